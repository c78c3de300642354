"""The common style of all figures: colours with one meaning each, sizes, numbers and names as text, and saved files."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import ParamSpec, TypeAlias

import matplotlib.style
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from epk_gp.core.losses import Head

Arguments = ParamSpec("Arguments")
Numbers: TypeAlias = Tensor | np.ndarray

# The n-th class, or the n-th curve of a figure. Petroff (2021): ten colours that can be distinguished with each of the
# three kinds of colour blindness.
PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
INK = "#222222"  # text, decision boundaries, and the explained point
GREY = "#4d4d4d"  # edges, and lines of reference
GRID = "#e3e3e3"
REST = "#e4e4e4"  # the sum of other points in one bar
RAISED, LOWERED = "#2166ac", "#b35806"  # contributions that raised or lowered an output: blue and orange
RIGHT, WRONG = "#004d4f", "#e0559b"  # predictions that are right and wrong: dark teal and pink
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION = "#94a4a2", "#832db6"  # points like the training data, and others
EXACT = PALETTE[0]  # the exact path kernel, or results computed with it
UP, DOWN = "▲", "▼"  # marks of contributions that raised or lowered an output

WIDTH = 7.6  # width in inches of every figure: the site shows an inch as 100 pixels
SMALL = 8  # size of the smallest text in points
_DPI = 200  # twice the pixels of the site, for dense screens
_COLOURS = 256  # colours of a PNG with a palette


def _shades() -> ListedColormap:
    """Return greys of evenly spaced lightness (CIE L* from 99 to 25), so that equal steps look equal."""
    lightness = np.linspace(99, 25, 256)
    linear = ((lightness + 16) / 116) ** 3
    srgb = 1.055 * linear ** (1 / 2.4) - 0.055
    return ListedColormap(np.repeat(srgb[:, None], 3, axis=1), name="epk_gp_shades")


# Maps are grey, so that the colour of a point shows only its class. White is certain or small, dark the opposite.
COLORMAP = _shades()
# Values of either sign: the colours for lowering and for raising, with white at zero.
SIGNED = LinearSegmentedColormap.from_list("epk_gp_signed", [LOWERED, "#ffffff", RAISED])
MAGNITUDES = "viridis"  # values at points without classes

STYLE = "epk_gp.plots.house"  # matplotlib's name of house.mplstyle, next to this file


def figure_style() -> AbstractContextManager[None]:
    """Apply the package's style to figures that are created and saved in this context.

    For a whole session, use `plt.style.use(STYLE)`.
    """
    return matplotlib.style.context(STYLE)


def styled(draw: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Decorate a function that returns a figure, so that the figure has the package's style."""

    @wraps(draw)
    def draw_in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure:
        with figure_style():
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()  # marks of axes are created here, with the sizes of the style
        return figure

    return draw_in_style


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure for the site's column.

    Args:
        height: Height in inches.
        width: Width in inches; the default fills the column.
    """
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(
    figure: Figure, file: str | os.PathLike[str], *, description: str | None = None, palette: bool = False
) -> None:
    """Write a figure as PNG or SVG, according to the file's suffix. The same figure gives the same bytes.

    Args:
        figure: The figure.
        file: The file to write.
        description: Text that is stored in the file.
        palette: Whether to write a PNG with 256 colours, which has a third of the size and the same look without
            photographs.
    """
    place = Path(file)
    with figure_style():
        if place.suffix != ".png":
            figure.savefig(place, metadata={"Date": None, "Description": description})
            return
        buffer = BytesIO()
        figure.savefig(buffer, dpi=_DPI, metadata={"Software": None}, pil_kwargs={"compress_level": 0})  # read at once
    picture = Image.open(buffer).convert("RGB")
    if palette:
        picture = picture.quantize(_COLOURS, dither=Image.Dither.NONE)
    entries = PngInfo()
    if description is not None:
        entries.add_itxt("Description", description, zip=True)
    picture.save(place, format="PNG", optimize=True, pnginfo=entries, dpi=(_DPI, _DPI))


def as_numpy(name: str, values: Numbers | Sequence[int | float]) -> np.ndarray:
    """Return the values as an array, in float64 if they are floating-point numbers.

    Raises:
        ValueError: A value is not finite.
    """
    if isinstance(values, Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
    array = np.asarray(values)
    if np.issubdtype(array.dtype, np.floating):
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        count = int((~np.isfinite(array)).sum())
        raise ValueError(f"{name} must be finite: got {count} entries that are not. Find them before drawing.")
    return array


def require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise if an array does not have the expected shape.

    Raises:
        ValueError: The shapes differ.
    """
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}: got {array.shape}. Check the order of the arguments.")


def short(value: float, *, sign: bool = False) -> str:
    """Format a number in a few characters, with a typographic minus."""
    text = f"{value:+.3g}" if sign else f"{value:.2g}"
    mantissa, exponent, power = text.partition("e")
    return (mantissa + (f"e{int(power)}" if exponent else "")).replace("-", "−")


def plain(text: str) -> str:
    """Return a text that matplotlib shows literally: dollars begin no formula. Applying it twice changes nothing."""
    return re.sub(r"(?<!\\)\$", r"\\$", str(text).encode(errors="replace").decode())


def class_name(number: int, names: Sequence[str] | None, word: str = "class ") -> str:
    """Return the name of a class for a picture: the given one, or "class 3".

    Raises:
        ValueError: There are names, but none for this class.
    """
    if names is None:
        return f"{word}{number}"
    if number >= len(names):
        raise ValueError(f"names must name each class: got {len(names)} names, none for class {number}. Add others.")
    return plain(names[number])


def class_colour(number: int) -> str:
    """Return the colour of a class."""
    return PALETTE[number % len(PALETTE)]


def as_images(X: Tensor) -> Tensor | None:
    """Return the points as grey (n, H, W) or colour (n, H, W, 3) images, or None if they are not images."""
    if X.ndim != 4 or X.shape[1] not in (1, 3) or min(X.shape[2:]) < 4:
        return None
    return X[:, 0] if X.shape[1] == 1 else X.permute(0, 2, 3, 1)


def class_labels(labels: Tensor) -> Tensor | None:
    """Return the targets if they are class labels, or None."""
    return labels if labels.ndim == 1 and labels.dtype == torch.int64 else None


OUTPUT_NAMES: dict[Head | None, str] = {"logits": "logit", "log_softmax": "log probability", None: "output"}


def output_name(number: int, head: Head | None, names: Sequence[str] | None = None, *, is_class: bool = True) -> str:
    """Return the name of an output: "logit of class 2", or "output 2" if it does not stand for a class.

    Args:
        number: Index of the output.
        head: The head of the outputs; None if it is unknown.
        names: Names of the classes, in order.
        is_class: Whether outputs stand for classes.
    """
    return f"{OUTPUT_NAMES[head]} of class {class_name(number, names, '')}" if is_class else f"output {number}"


def signed_bars(ax: Axes, values: np.ndarray, colours: Sequence[str], names: Sequence[str]) -> BarContainer:
    """Draw a bar for each value, from the top down, with its name on the left and a line at 0."""
    bars = ax.barh(range(len(values)), values, color=colours, edgecolor=GREY, linewidth=0.6, height=0.78)
    ax.axvline(0, color=GREY, linewidth=1)
    ax.set_yticks(range(len(values)), names, fontsize=SMALL)
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    return bars
