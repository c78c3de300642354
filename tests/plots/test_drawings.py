"""Drawings: what is drawn is what was passed in, users' texts stay texts, and what cannot be drawn is refused."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from drawings import compare_outputs, error_against_evaluations, term_bars
from epk_gp.analysis.measures import ROCCurve
from epk_gp.plots.contributions import attribution_bars, training_image
from epk_gp.plots.maps import map_handles, region_handles, uncertainty_map
from epk_gp.plots.scores import risk_coverage, score_histogram
from epk_gp.plots.style import LOWERED, PALETTE, RAISED, REST, output_name, plain
from epk_gp.report.overview import kernel_matrix, reliability_diagram, roc, spectrum, target_scatter


def words(texts):
    return [text.get_text() for text in texts]


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def colours(ax):
    return [to_hex(bar.get_facecolor()) for bar in ax.patches]


def test_bars_sum_to_the_total_and_a_long_rest_is_cut_and_says_so(ax):
    values = torch.linspace(-1, 1.01, 100, dtype=torch.float64)
    attribution_bars(ax, values, torch.zeros(100, dtype=torch.int64), top=3)
    assert sum(widths(ax)) == pytest.approx(float(values.sum()), rel=1e-12)
    assert (len(widths(ax)), words(ax.get_yticklabels())[3]) == (7, "94 others")
    other = ax.figure.add_subplot()
    attribution_bars(other, np.full(1000, 0.01), np.zeros(1000, dtype=int), top=2)
    assert "+9.98 (bar cut)" in words(other.texts)
    assert max(widths(other)) == pytest.approx(0.025)
    assert "all bars together: +10" in other.get_xlabel()


def test_bars_are_the_most_helpful_and_the_most_harmful_points(ax):
    values = np.array([0.1, -0.5, 0.4, -0.2, 0.3, -0.1])
    attribution_bars(ax, values, np.array([0, 1, 2, 0, 1, 2]), names=["cat", "dog", "bird"], top=2)
    assert words(ax.get_yticklabels()) == ["#2, bird", "#4, dog", "2 others", "#3, cat", "#1, dog"]
    assert np.allclose(widths(ax), [0.4, 0.3, 0.0, -0.2, -0.5])
    assert colours(ax)[:2] == [PALETTE[2], PALETTE[1]]
    assert words(ax.texts) == ["+0.4", "+0.3", "+0", "−0.2", "−0.5"]
    assert words(ax.get_legend().get_texts()) == ["cat", "dog", "bird"]
    for values, expected in (([1.0, -1.0], ["#0, class 0", "#1, class 1"]), ([0.0, 0.0], ["2 others"])):
        other = ax.figure.add_subplot()
        attribution_bars(other, np.array(values), np.array([0, 1]))
        assert words(other.get_yticklabels()) == expected


def test_without_classes_the_sign_of_a_bar_is_its_side_and_colour(ax):
    attribution_bars(ax, np.array([2.0, -1.0, 0.5]), None, top=1, output="logit of class 2")
    assert [np.sign(width) for width in widths(ax)] == [1, 1, -1]
    assert words(ax.get_yticklabels()) == ["#0", "1 other", "#1"]
    assert colours(ax) == [RAISED, REST, LOWERED]
    assert ax.get_xlabel().startswith("▼ lowered     contribution to the logit of class 2     ▲ raised")
    assert ax.get_legend() is None


@pytest.mark.parametrize(("contribution", "style"), [(2.0, "-"), (-2.0, (0, (2.2, 1.2))), (0.0, "-")])
def test_the_frame_of_an_image_tells_the_sign_without_colours(ax, contribution, style):
    training_image(ax, np.eye(4), "caption", contribution)
    assert {spine.get_linestyle() for spine in ax.spines.values()} == {style}
    assert {spine.get_linewidth() > 1 for spine in ax.spines.values()} == {contribution != 0}


def test_a_machine_is_drawn_against_its_network_and_the_largest_error_is_named(ax):
    network = torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True)
    machine = network + torch.tensor([[0.0, -0.25], [0.125, 0.0]])
    for show, drawn, said in (
        ("outputs", [0, 0.75, 2.125, 3], "midpoint: largest |error| 0.25"),
        ("differences", [0, -0.25, 0.125, 0], "midpoint: largest 0.25"),
    ):
        axes = ax.figure.add_subplot()
        compare_outputs(axes, network, machine, show, label="midpoint")
        compare_outputs(axes, network, network, show)
        assert np.array_equal(axes.collections[0].get_offsets().T, [[0, 1, 2, 3], drawn])
        assert words(axes.get_legend().get_texts())[0] == said
        assert len(axes.lines) == 1  # two rules share one line
        assert not np.array_equal(*(marks.get_facecolor() for marks in axes.collections))


def test_errors_below_the_rounding_are_drawn_in_its_band(ax):
    network = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    compare_outputs(ax, network, network + torch.tensor([1e-3, 0.0, 1e-6]), "errors")
    compare_outputs(ax, network, network, "errors", label="exact")
    errors, rounding = np.asarray(ax.collections[0].get_offsets())[:, 1], 4 * np.finfo(np.float64).eps / 2
    (band,) = ax.patches
    assert band.get_extents().transformed(ax.transData.inverted()).y1 == pytest.approx(rounding)
    assert errors[[0, 2]] == pytest.approx([1e-3, 1e-6])
    assert 0 < errors[1] < rounding
    assert words(ax.get_legend().get_texts())[0] == "below the rounding of float64"


def test_rules_stand_at_cost_and_error_zero_is_named_and_names_keep_clear_of_each_other(ax):
    error_against_evaluations(ax, ["a", "b"], torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]))
    assert words(ax.texts) == ["a", "b (error 0)"]
    assert [tuple(line.get_xydata()[0]) for line in ax.lines] == [(1, 0.5), (2, 0.25), (2, 0.25)]
    assert (ax.lines[2].get_marker(), ax.lines[2].get_markerfacecolor()) == ("v", "white")
    other = ax.figure.add_subplot()
    error_against_evaluations(other, ["first rule", "second rule", "third rule"], [100, 100, 101], [1e-3, 1e-3, 1.1e-3])
    boxes = [text.get_window_extent() for text in other.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_curves_run_from_a_few_points_to_all_of_them(ax):
    risk = torch.linspace(0, 0.2, 200, dtype=torch.float64)
    risk_coverage(ax, {"a": risk, "b": risk / 2})
    assert words(ax.get_legend().get_texts()) == ["a", "b"]
    x, y = ax.lines[0].get_data()
    assert (x[0], x[-1]) == (2, 100)
    np.testing.assert_allclose(y, 100 * risk[3:])


def test_histograms_of_different_sizes_have_one_area(ax):
    score_histogram(ax, {"few": np.full(3, 0.5), "many": np.linspace(0, 1.01, 1000)}, label="score")
    for patch in ax.patches:
        corners = patch.get_xy()
        tops = corners[1:-1:2] if len(corners) < 90 else corners[1:80:2]
        assert tops[:, 1].sum() == pytest.approx(1)  # also what rounding has put above 1
    assert [patch.get_fill() for patch in ax.patches] == [True, False]  # told apart without colours


def test_marks_and_curves_stand_where_their_numbers_are(ax):
    first, second, third, fourth = (ax.figure.add_subplot() for _ in range(4))
    reliability_diagram(first, torch.tensor([0.5, 0.9]), torch.tensor([0.4, 1.0]), torch.tensor([2, 10]))
    assert np.allclose(first.collections[0].get_offsets(), [[0.5, 0.4], [0.9, 1.0]])
    small, large = first.collections[0].get_sizes()
    assert small < large  # where more points are
    roc(second, ROCCurve(torch.zeros(3), torch.tensor([0, 0, 1.0]), torch.tensor([0, 0.75, 1])))
    assert [line.get_xydata().tolist() for line in second.lines] == [[[0, 0], [1, 1]], [[0, 0], [0, 0.75], [1, 1]]]
    target_scatter(third, torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.5]))
    assert np.allclose(third.collections[0].get_offsets(), [[1, 2], [3, 2.5]])
    assert np.allclose(third.lines[0].get_xydata(), [[1, 1], [3, 3]])
    spectrum(fourth, torch.tensor([3.0, 1.0, 0.0, -1e-18], dtype=torch.float64))
    assert np.allclose(fourth.lines[0].get_xydata(), [[1, 0.75], [2, 0.25]])


@pytest.mark.parametrize(("low", "expected"), [(0.37, 0.3), (-0.2, -1.0)])
def test_the_shades_of_a_matrix_hold_all_cosines_and_lines_divide_its_groups(ax, low, expected):
    kernel_matrix(ax, torch.tensor([[1, low], [low, 1]]).double(), torch.tensor([1, 3]), ["2", "4", "6", "7"])
    (image,) = ax.images
    assert image.get_clim() == (pytest.approx(expected), 1)
    assert words(ax.get_xticklabels()) == ["4", "7"]
    assert [line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1] == [0.5]
    kernel_matrix(ax, torch.eye(2), torch.tensor([0, 1]), ["a long name of a class", "another one of that length"])
    assert [label.get_rotation() for label in ax.get_xticklabels()] == [90, 90]


TWO, CLASSES = np.ones(2), np.array([0, 1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("draw", "arguments", "message"),
    [
        (attribution_bars, (np.ones(3), CLASSES), r"labels must have shape \(3,\): got \(2,\)"),
        (attribution_bars, (np.zeros(0), None), "at least one entry"),
        (attribution_bars, (np.array([0, np.inf, 0]), None), "contributions must be finite"),
        (lambda ax: attribution_bars(ax, TWO, CLASSES, top=0), (), "at least one entry: got 0 of 2"),
        (lambda ax: attribution_bars(ax, TWO, CLASSES, names=["cat"]), (), "none for class 1"),
        (compare_outputs, (TWO, np.ones(1), "errors"), r"one shape and an output: got \(2,\) and \(1,\)"),
        (compare_outputs, (np.ones(1), np.array([np.nan]), "outputs"), "machine must be finite: got 1 entries"),
        (term_bars, (["a", "b"], np.ones(1)), r"values must have shape \(2,\): got \(1,\)"),
        (error_against_evaluations, (["a", "b"], [1], [1, 1]), "evaluations must have shape"),
        (risk_coverage, ({},), "at least one curve: got none"),
    ],
    ids=range(10),
)
def test_what_cannot_be_drawn_is_refused(ax, draw, arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(ax, *arguments)


NAMES = ["$", "$x_{$", "$\\alpha$", "a_b^c\\d", "$5 and $6", "\udcff", "100 %", ""]
GRID, ONE = np.linspace(0, 1, 3), np.array([0.5])


def map_of(ax, name):
    uncertainty_map(
        ax, GRID, GRID, np.arange(9.0).reshape(3, 3), title=name, points=np.zeros((1, 2)), labels=np.array([0]),
        names=[name] * 9, colorbar_label=name, boundary=np.arange(36).reshape(6, 6) // 4,
    )  # fmt: skip
    ax.legend(handles=[*map_handles([0], names=[name]), *region_handles([0], names=[name])])


DRAWINGS = {
    "bars": lambda ax, name: attribution_bars(ax, -TWO, CLASSES, names=[name] * 2, title=name, output=name),
    "map": map_of,
    "image": lambda ax, name: training_image(ax, np.eye(4), name),
    "terms": lambda ax, name: term_bars(ax, [name], ONE, output=name),
    "machine": lambda ax, name: compare_outputs(ax, ONE, ONE, "errors", label=name),
    "rules": lambda ax, name: error_against_evaluations(ax, [name, f"{name} 2"], [1, 2], [0.1, 0.2]),
    "risk": lambda ax, name: risk_coverage(ax, {name: np.zeros(3)}),
    "histogram": lambda ax, name: score_histogram(ax, {name: ONE}, label=name),
    "matrix": lambda ax, name: kernel_matrix(ax, torch.eye(2), torch.from_numpy(CLASSES), [name] * 2),
    "output": lambda ax, name: ax.set_title(output_name(0, None, [name])),
}


@pytest.mark.parametrize("drawing", DRAWINGS)
def test_a_name_is_drawn_as_it_stands(drawing):
    """No text is a formula, but for matplotlib's own, such as 10 to a power, and the names of coordinates."""
    for name in NAMES[1:3]:
        figure = Figure(figsize=(4, 3), dpi=30)
        DRAWINGS[drawing](figure.subplots(), name)
        FigureCanvasAgg(figure).draw()
        shown = [text.replace(r"\$", "") for text in words(figure.findobj(Text)) if "mathdefault" not in text]
        assert not [text for text in shown if text.count("$") >= 2 and text not in ("$x_1$", "$x_2$")]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_plain_text_is_shown_as_it_is_and_twice_is_as_once(name):
    shown = plain(name)
    assert plain(shown) == shown
    assert shown.replace(r"\$", "$") == name.replace("\udcff", "?")
