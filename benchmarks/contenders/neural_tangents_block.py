"""neural-tangents: `empirical_ntk_fn` with the implementation that the problem names (1, 2 or 3)."""

import os
from typing import Any

if os.environ.get("OMP_NUM_THREADS") == "1":  # as the other contenders: read when JAX is imported
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np
from architectures_jax import EMBEDDINGS, FUNCTIONS
from worker import Run, serve


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Write the network down as a function, and compile the block."""
    if problem["dtype"] == "float64":
        jax.config.update("jax_enable_x64", True)
    X, Y = jnp.asarray(arrays["X"]), jnp.asarray(arrays["Y"])
    is_trace, implementation = problem.get("of") == "trace", int(problem["variant"])
    if problem["kind"] in FUNCTIONS:
        f, weights = _with_constants(FUNCTIONS[problem["kind"]], arrays)
    else:
        f = _mlp if problem["kind"] == "mlp" else _cnn
        names = [name for name in arrays if name not in {"X", "Y"}]
        weights = {name: jnp.asarray(_as_jax(arrays[name])) for name in names}
    if problem.get("of") == "predictions":
        return _predictions(f, weights, X, Y, jnp.asarray(arrays["targets"]))
    axes = (-1,) if is_trace else ()
    kernel = nt.empirical_ntk_fn(f, trace_axes=axes, vmap_axes=0, implementation=implementation)
    outputs = problem["outputs"] if is_trace else 1  # its trace is the mean over outputs
    compiled = jax.jit(lambda *args: outputs * kernel(*args))
    compiled(X, Y, weights).block_until_ready()
    return lambda: compiled(X, Y, weights).block_until_ready()


def _predictions(f: Any, weights: dict[str, Any], X: Any, Y: Any, y: Any) -> Run:
    """Return gradient flow of the linearised network at time 5, and a posterior with noise in proportion."""
    kernel = jax.jit(nt.empirical_ntk_fn(f, trace_axes=(), vmap_axes=0, implementation=3))

    def predict() -> Any:
        K, k, prior = kernel(X, X, weights), kernel(Y, X, weights), kernel(Y, Y, weights)
        flow = nt.predict.gradient_descent_mse(K, y, trace_axes=())
        noise = 0.1 * jnp.einsum("iicc->", K) / y.size
        process = nt.predict.gp_inference(K, y, diag_reg=noise, diag_reg_absolute_scale=True, trace_axes=())
        mean, covariance = process("ntkgp", k, prior)
        paired = covariance.transpose(0, 2, 1, 3)  # as (m, C, m, C)
        values = (*flow(5.0, f(weights, X), f(weights, Y), k), mean, paired)
        return jnp.concatenate([value.flatten() for value in values]).block_until_ready()

    predict()
    return predict


def _with_constants(f: Any, arrays: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
    """Return a network as a function of its weights alone, and the weights: running statistics are constants."""
    values = {
        name: jnp.asarray(value if name in EMBEDDINGS else _as_jax(value))
        for name, value in arrays.items()
        if name not in {"X", "Y", "targets"}
    }
    constants = {name: value for name, value in values.items() if "running_" in name or "num_batches" in name}
    weights = {name: value for name, value in values.items() if name not in constants}
    return lambda w, x: f({**constants, **w}, x), weights


def _as_jax(value: np.ndarray) -> np.ndarray:
    return value.T if value.ndim == 2 else value


def _mlp(weights: dict[str, Any], x: Any) -> Any:
    layers = sorted({int(name.split(".")[0]) for name in weights})
    for number in layers:
        x = x @ weights[f"{number}.weight"] + weights[f"{number}.bias"]
        x = x if number == layers[-1] else jax.nn.relu(x)
    return x


def _cnn(weights: dict[str, Any], x: Any) -> Any:
    for number in (0, 3):
        x = jax.lax.conv_general_dilated(
            x, weights[f"{number}.weight"], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        x = jax.nn.relu(x + weights[f"{number}.bias"][:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return x.reshape(len(x), -1) @ weights["7.weight"] + weights["7.bias"]


if __name__ == "__main__":
    serve(make, order=(0, 2, 1, 3))
