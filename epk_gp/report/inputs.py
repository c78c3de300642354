"""What a point looks like in a report: an image, a text, a position in the plane, or named numbers."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor

from epk_gp.core.inputs import Inputs
from epk_gp.core.trajectory import Trajectory
from epk_gp.plots.figures import as_images
from epk_gp.report.fixed_point import significant

Decode = Callable[[Any], str]

_MAX_SIDE = 64  # pixels of a picture; larger images are made smaller
_GREYS, _COLOURS = 16, 64  # of a picture
_MAX_TEXT = 400  # characters
_MAX_VALUES = 60  # numbers of an explained point
_MAX_VALUES_OF_SAMPLE = 16  # numbers of a training sample, of which a report shows thousands


@dataclass(frozen=True, eq=False)
class Appearance:
    """How points are shown.

    Attributes:
        trajectory: The run.
        names: Names of the features of rows; None for x1, x2, ...
        decode: Makes a text of one input: of a tensor, or of the tuple or dictionary that the network takes.
        low: Smallest entry of the training images, which is white; 0 for other inputs.
        high: Largest one, which is black.
    """

    trajectory: Trajectory
    names: tuple[str, ...] | None
    decode: Decode | None
    low: float
    high: float


def appearance(trajectory: Trajectory, names: Sequence[str] | None, decode: Decode | None) -> Appearance:
    """Return how the points of a run are shown.

    Raises:
        TypeError: `decode` is no function.
        ValueError: There is not one name per feature, or points are no rows of features.
    """
    X = trajectory.inputs
    if decode is not None and not callable(decode):
        raise TypeError(f"decode must be a function that makes a text of one input: got {decode!r}.")
    if names is not None:
        if X.ndim != 2 or trajectory.model.signature.layout is not None:
            raise ValueError(f"names are those of the features of rows: the run's inputs have shape {tuple(X.shape)}.")
        if len(names) != X.shape[1]:
            raise ValueError(f"names must name each of the {X.shape[1]} features: got {len(names)} names.")
    images = as_images(X) if X.is_floating_point() else None
    low, high = (0.0, 1.0) if images is None else (float(images.min()), float(images.max()))
    return Appearance(trajectory, None if names is None else tuple(map(str, names)), decode, low, high)


def show(look: Appearance, row: Shaped[Tensor, "..."], *, is_sample: bool = False) -> dict[str, Any]:
    """Return one packed input as a report has it.

    Args:
        look: How points are shown.
        row: The input.
        is_sample: Whether it is a training sample, of which fewer numbers are shown.
    """
    row = row.detach().cpu()
    parts = look.trajectory.unpack(row[None]) if look.trajectory.model.signature.graph is None else row[None]
    if look.decode is not None:
        return {"text": _cut(str(look.decode(_first(parts))))}
    if not isinstance(parts, Tensor):
        return {"text": _cut("; ".join(f"{name}: {_numbers(value[0])}" for name, value in _named(parts)))}
    if not row.is_floating_point():
        return {"text": _cut(f"node {int(row)}" if row.ndim == 0 else _numbers(row))}
    images = as_images(row[None])
    if images is not None:
        return {"image": _picture(images[0], look.low, look.high)}
    entries = [significant(value, 4) for value in row.double().flatten().tolist()]
    if row.ndim == 1 and len(entries) == 2 and look.names is None:
        return {"position": entries}
    most = _MAX_VALUES_OF_SAMPLE if is_sample else _MAX_VALUES
    return {"values": [[_name(look, row, k), value] for k, value in enumerate(entries[:most])]}


def describe_cut(look: Appearance) -> str | None:
    """Return which numbers of a point a report leaves out; None if it shows all."""
    X = look.trajectory.inputs
    shown = show(look, X[0]).get("values")
    size = X[0].numel()
    if shown is None or size <= _MAX_VALUES_OF_SAMPLE:
        return None
    return (
        f"the first {min(size, _MAX_VALUES)} of {size} numbers of an explained point, and the first "
        f"{_MAX_VALUES_OF_SAMPLE} of a training sample"
    )


def _name(look: Appearance, row: Tensor, k: int) -> str:
    if look.names is not None:
        return look.names[k]
    if row.ndim == 1:
        return f"x{k + 1}"
    place = np.unravel_index(k, tuple(row.shape))
    return f"x[{', '.join(str(int(i)) for i in place)}]"


def _first(parts: Inputs) -> Any:
    if isinstance(parts, Tensor):
        return parts[0]
    if isinstance(parts, Mapping):
        return {key: value[0] for key, value in parts.items()}
    return tuple(value[0] for value in parts)  # type: ignore[union-attr]  # a graph is shown by its node numbers


def _named(parts: Any) -> list[tuple[str, Tensor]]:
    return list(parts.items()) if isinstance(parts, Mapping) else [(str(k), value) for k, value in enumerate(parts)]


def _numbers(values: Tensor) -> str:
    flat = values.flatten()[:_MAX_TEXT]
    if not flat.is_floating_point():
        return " ".join(str(int(value)) for value in flat)
    return " ".join(f"{float(value):.4g}" for value in flat)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _picture(image: Float[Tensor, "H W *rgb"], low: float, high: float) -> str:
    """Return an image as the address of a small PNG: grey ones dark on white, as figures show them."""
    shares = ((image.double() - low) / ((high - low) or 1.0)).clamp(0, 1)
    is_grey = image.ndim == 2
    pixels = (255 * (1 - shares if is_grey else shares)).round().to(torch.uint8).numpy()
    picture = Image.fromarray(pixels)
    if max(picture.size) > _MAX_SIDE:
        picture.thumbnail((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BOX)
    picture = picture.quantize(_GREYS if is_grey else _COLOURS, dither=Image.Dither.NONE)
    buffer = BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
