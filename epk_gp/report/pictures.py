"""Figures of a report as SVG, with the table behind each."""

import re
import threading
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from epk_gp.plots.style import INK, figure_style

REPORT_INK = "#1a1a1a"  # text: the page replaces it by its own colour in the dark theme

# Matplotlib's settings are those of the process: threads that write reports draw one after the other.
DRAWING = threading.RLock()


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element: text as text, no background, nothing that changes from run to run."""
    buffer = BytesIO()
    with DRAWING, figure_style(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # equal ids in several figures; none of them is referred to
    text = re.sub(r"\s*\n\s*", "\n", text)
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)  # hundredths of a point
    return text.replace(INK, REPORT_INK).strip()


def figure_entry(
    name: str,
    title: str,
    sentence: str,
    draw: Callable[[], Figure],
    table: tuple[Sequence[str], Sequence[Sequence[Any]]],
) -> dict[str, Any]:
    """Return a figure as the page takes it.

    Args:
        name: Its id, a word.
        title: Its title.
        sentence: What it shows, with its numbers.
        draw: Draws the figure.
        table: Head and rows of the table behind it.
    """
    head, rows = table
    with DRAWING:
        picture = svg(draw())
    behind = {"head": list(head), "rows": [list(row) for row in rows]}
    return {"id": name, "title": title, "sentence": sentence, "svg": picture, "table": behind}
