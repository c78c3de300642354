"""neural-tangents: `empirical_ntk_fn` with the implementation that the problem names (1, 2 or 3)."""

from typing import Any

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np
from worker import Run, serve


def make(problem: dict[str, Any], arrays: dict[str, np.ndarray]) -> Run:
    """Write the network down as a function, and compile the block."""
    if problem["dtype"] == "float64":
        jax.config.update("jax_enable_x64", True)
    names = [name for name in arrays if name not in {"X", "Y"}]
    weights = {name: jnp.asarray(_as_jax(arrays[name])) for name in names}
    X, Y = jnp.asarray(arrays["X"]), jnp.asarray(arrays["Y"])
    f = _mlp if problem["kind"] == "mlp" else _cnn
    kernel = nt.empirical_ntk_fn(f, trace_axes=(), vmap_axes=0, implementation=int(problem["variant"]))
    compiled = jax.jit(kernel)
    compiled(X, Y, weights).block_until_ready()
    return lambda: compiled(X, Y, weights).block_until_ready()


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
