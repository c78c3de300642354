"""One look for all figures: colours that each have one meaning, sizes of text, and how figures are made and saved."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib.style
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

Arguments = ParamSpec("Arguments")

# The n-th class, or the n-th curve of a figure. Petroff (2021): ten colours that can be told apart in each of the three
# kinds of colour blindness.
PALETTE = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
INK = "#222222"  # text, decision boundaries, and the point that is explained
GREY = "#4d4d4d"  # edges, and lines of reference
GRID = "#e3e3e3"
REST = "#e4e4e4"  # what is summed up in one bar
RAISED, LOWERED = "#2166ac", "#b35806"  # what raised an output and what lowered it: blue and orange
RIGHT, WRONG = "#004d4f", "#e0559b"  # predictions that are right and wrong: dark teal and pink
IN_DISTRIBUTION, OUT_OF_DISTRIBUTION = "#94a4a2", "#832db6"  # points like the training data, and others
EXACT = PALETTE[0]  # the exact path kernel, or what is computed with it
UP, DOWN = "▲", "▼"  # marks of what raised an output and of what lowered it

WIDTH = 7.6  # inches of every figure: the site shows an inch as 100 pixels
SMALL = 8  # points of the smallest text
_DPI = 200  # twice the pixels of the site, for dense screens
_COLOURS = 256  # of a PNG with a palette


def _shades() -> ListedColormap:
    """Return greys of evenly spaced lightness (CIE L* from 99 to 25), so that equal steps look equal."""
    lightness = np.linspace(99, 25, 256)
    linear = ((lightness + 16) / 116) ** 3
    srgb = 1.055 * linear ** (1 / 2.4) - 0.055
    return ListedColormap(np.repeat(srgb[:, None], 3, axis=1), name="epk_gp_shades")


# Maps are grey, so that the colour of a point stands for its class only. White is certain or small, dark the opposite.
COLORMAP = _shades()
CERTAIN, UNCERTAIN = COLORMAP(0), COLORMAP(255)
# Values of either sign: the colours of what lowers and of what raises, with white at zero.
SIGNED = LinearSegmentedColormap.from_list("epk_gp_signed", [LOWERED, "#ffffff", RAISED])
MAGNITUDES = "viridis"  # values at points that have no class

STYLE = "epk_gp.plots.house"  # matplotlib's name of house.mplstyle, beside this file


@contextmanager
def figure_style() -> Generator[None, None, None]:
    """Give figures that are made and saved in this context the look of this package.

    The same look for a whole session is `plt.style.use(STYLE)`.
    """
    with matplotlib.style.context(STYLE):
        yield


def styled(draw: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Decorate a function that returns a figure, so that the figure has the look of this package."""

    @wraps(draw)
    def draw_in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure:
        with figure_style():
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()  # marks of axes are made here, with the sizes of the style
        return figure

    return draw_in_style


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Return an empty figure for the site's column.

    Args:
        height: In inches.
        width: In inches; the default fills the column.
    """
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(
    figure: Figure, file: str | os.PathLike[str], *, description: str | None = None, palette: bool = False
) -> None:
    """Write a figure as PNG or SVG, as the file's name ends. The same figure gives the same bytes.

    Args:
        figure: The figure.
        file: File that is written.
        description: Text that is kept in the file.
        palette: Write a PNG with 256 colours, which is a third of the size and looks the same without photographs.
    """
    place = Path(file)
    with figure_style():
        if place.suffix != ".png":
            metadata: dict[str, Any] = {"Date": None, "Description": description}
            figure.savefig(place, metadata=metadata)
            return
        buffer = BytesIO()
        figure.savefig(buffer, dpi=_DPI, metadata={"Software": None})
    picture = Image.open(buffer).convert("RGB")
    if palette:
        picture = picture.quantize(_COLOURS, dither=Image.Dither.NONE)
    entries = PngInfo()
    if description is not None:
        entries.add_itxt("Description", description, zip=True)
    picture.save(place, format="PNG", optimize=True, pnginfo=entries, dpi=(_DPI, _DPI))
