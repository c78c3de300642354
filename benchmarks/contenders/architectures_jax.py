"""The networks of `architectures` in JAX, on the weights of torch by their names there.

Matrices of linear layers are transposed, as JAX's libraries have them: with `x @ w.T` neural-tangents does not know the
layer, and is slower.
"""

from typing import Any

import jax
import jax.numpy as jnp

HEADS = 4
EMBEDDINGS = ("words.weight", "places.weight")


def _linear(w: dict[str, Any], name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def _convolution(w: dict[str, Any], name: str, x: Any) -> Any:
    form = ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(x, w[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=form)
    return y + w[f"{name}.bias"][:, None, None] if f"{name}.bias" in w else y


def _pool(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def _layer_norm(w: dict[str, Any], name: str, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _batch_norm(w: dict[str, Any], name: str, x: Any) -> Any:
    mean, var, weight, bias = (
        w[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / jnp.sqrt(var + 1e-5) * weight + bias


def _mlp(w: dict[str, Any], x: Any) -> Any:
    return _linear(w, "4", jax.nn.relu(_linear(w, "2", jax.nn.relu(_linear(w, "0", x)))))


def _cnn(w: dict[str, Any], x: Any) -> Any:
    for name in ("0", "3"):
        x = _pool(jax.nn.relu(_convolution(w, name, x)))
    return _linear(w, "7", x.reshape(len(x), -1))


def _resnet(w: dict[str, Any], x: Any) -> Any:
    h = jax.nn.relu(_batch_norm(w, "norms.0", _convolution(w, "stem", x)))
    for i in (0, 2):
        inner = jax.nn.relu(_batch_norm(w, f"norms.{i + 1}", _convolution(w, f"convolutions.{i}", h)))
        h = jax.nn.relu(h + _batch_norm(w, f"norms.{i + 2}", _convolution(w, f"convolutions.{i + 1}", inner)))
    return _linear(w, "last", h.mean((2, 3)))


def _transformer(w: dict[str, Any], x: Any) -> Any:
    h = w["words.weight"][x] + w["places.weight"]
    n, length, width = h.shape
    for i in range(2):
        parts = jnp.split(_linear(w, f"into.{i}", _layer_norm(w, f"norms.{2 * i}", h)), 3, axis=-1)
        q, k, v = (part.reshape(n, length, HEADS, -1).transpose(0, 2, 1, 3) for part in parts)
        attention = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / q.shape[-1] ** 0.5, axis=-1)
        h = h + _linear(w, f"out.{i}", (attention @ v).transpose(0, 2, 1, 3).reshape(n, length, width))
        inner = _linear(w, f"up.{i}", _layer_norm(w, f"norms.{2 * i + 1}", h))
        h = h + _linear(w, f"down.{i}", jax.nn.gelu(inner, approximate=True))
    return _linear(w, "last", _layer_norm(w, "norms.4", h).mean(1))


def _shared(w: dict[str, Any], x: Any) -> Any:
    h = u = _linear(w, "into", x)
    for _ in range(4):
        h = jnp.tanh(_layer_norm(w, "norm", _linear(w, "again", h) + u))
    return _linear(w, "last", h)


FUNCTIONS = {
    "MLP 784-128-128-10": _mlp,
    "CNN 1-8-16 with pooling": _cnn,
    "ResNet, 5 convolutions, frozen BatchNorm": _resnet,
    "transformer, 2 blocks, 16 tokens": _transformer,
    "one layer used 4 times, LayerNorm": _shared,
}
