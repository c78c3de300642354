"""Texts of users in pictures: what begins a formula of matplotlib elsewhere is shown as it stands."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from drawings import error_against_evaluations, reconstruction_scatter, term_bars
from epk_gp.plots import attribution_bars, map_handles, region_handles, training_image, uncertainty_map
from epk_gp.plots.common import output_name, plain
from epk_gp.plots.scores import risk_coverage, score_histogram, suspicion_bars
from epk_gp.plots.summaries import kernel_matrix, reconstruction_differences, reconstruction_errors

NAMES = ["$", "$x_{$", "$\\alpha$", "a_b^c\\d", "$5 and $6", "\udcff", "100 %", ""]
GRID, ONE = np.linspace(0, 1, 3), np.array([0.5])


def bars(ax, name):
    attribution_bars(ax, np.array([1.0, -2.0]), np.array([0, 1]), names=[name] * 2, title=name, output=name)


def map_of(ax, name):
    z = np.arange(9.0).reshape(3, 3)
    labels, points = np.array([0]), np.zeros((1, 2))
    uncertainty_map(
        ax, GRID, GRID, z, title=name, points=points, labels=labels, names=[name] * 9, colorbar_label=name,
        boundary=np.arange(36).reshape(6, 6) // 4,
    )  # fmt: skip
    ax.legend(handles=[*map_handles([0], names=[name]), *region_handles([0], names=[name])])


DRAWINGS = {
    "bars": bars,
    "map": map_of,
    "image": lambda ax, name: training_image(ax, np.eye(4), name),
    "terms": lambda ax, name: term_bars(ax, [name], ONE, output=name),
    "scatter": lambda ax, name: reconstruction_scatter(ax, ONE, ONE, label=name),
    "differences": lambda ax, name: reconstruction_differences(ax, ONE, ONE, label=name),
    "errors": lambda ax, name: reconstruction_errors(ax, ONE, ONE, label=name),
    "rules": lambda ax, name: error_against_evaluations(ax, [name, f"{name} 2"], [1, 2], [0.1, 0.2]),
    "risk": lambda ax, name: risk_coverage(ax, {name: np.zeros(3)}),
    "histogram": lambda ax, name: score_histogram(ax, {name: ONE}, label=name),
    "suspicion": lambda ax, name: suspicion_bars(ax, ONE, [name]),
    "matrix": lambda ax, name: kernel_matrix(ax, np.eye(2), np.array([0, 1]), names=[name] * 2),
    "output": lambda ax, name: ax.set_title(output_name(0, None, [name])),
}


def formulas(figure):
    """Return the texts that matplotlib takes for formulas, but for those of its own, such as 10 to a power."""
    texts = [text.get_text() for text in figure.findobj(Text)]
    return [text for text in texts if "mathdefault" not in text and text.replace(r"\$", "").count("$") >= 2]


@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize("name", NAMES[:-2], ids=range(len(NAMES) - 2))
def test_a_name_is_drawn_as_it_stands(drawing, name):
    figure = Figure(figsize=(4, 3), dpi=30)
    DRAWINGS[drawing](figure.subplots(), name)
    FigureCanvasAgg(figure).draw()
    assert not [text for text in formulas(figure) if text not in ("$x_1$", "$x_2$")]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_plain_text_is_shown_as_it_is_and_twice_is_as_once(name):
    shown = plain(name)
    assert plain(shown) == shown
    assert shown.replace(r"\$", "$") == name.replace("\udcff", "?")
