"""Drawings: what is drawn is what was passed in, users' texts stay texts, and what cannot be drawn is refused."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from drawings import error_against_evaluations, term_bars
from epk_gp.plots import (
    PALETTE,
    attribution_bars,
    map_handles,
    region_handles,
    risk_coverage,
    score_histogram,
    suspicion_bars,
    training_image,
    uncertainty_map,
)  # fmt: skip
from epk_gp.plots.style import IN_DISTRIBUTION, LOWERED, RAISED, REST, WRONG, output_name, plain
from epk_gp.plots.summaries import (
    compare_outputs,
    kernel_matrix,
    reliability_diagram,
    roc,
    spectrum,
    target_scatter,
)  # fmt: skip


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def words(ax):
    return [text.get_text() for text in ax.texts]


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def ticks(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def offsets(ax):
    return np.asarray(ax.collections[0].get_offsets())


def colours(ax):
    return [to_hex(bar.get_facecolor()) for bar in ax.patches]


def test_bars_sum_to_the_total_and_a_long_rest_is_cut_and_says_so(ax):
    values = torch.linspace(-1, 1.01, 100, dtype=torch.float64)
    attribution_bars(ax, values, torch.zeros(100, dtype=torch.int64), top=3)
    assert sum(widths(ax)) == pytest.approx(float(values.sum()), rel=1e-12)
    assert (len(widths(ax)), ticks(ax)[3]) == (7, "94 others")
    other = ax.figure.add_subplot()
    attribution_bars(other, np.full(1000, 0.01), np.zeros(1000, dtype=int), top=2)
    assert "+9.98 (bar cut)" in words(other)
    assert max(widths(other)) == pytest.approx(0.025)
    assert "all bars together: +10" in other.get_xlabel()


def test_bars_are_the_most_helpful_and_the_most_harmful_points(ax):
    values = np.array([0.1, -0.5, 0.4, -0.2, 0.3, -0.1])
    attribution_bars(ax, values, np.array([0, 1, 2, 0, 1, 2]), names=["cat", "dog", "bird"], top=2)
    assert ticks(ax) == ["#2, bird", "#4, dog", "2 others", "#3, cat", "#1, dog"]
    assert np.allclose(widths(ax), [0.4, 0.3, 0.0, -0.2, -0.5])
    assert colours(ax)[:2] == [PALETTE[2], PALETTE[1]]
    assert words(ax) == ["+0.4", "+0.3", "+0", "−0.2", "−0.5"]
    assert legend(ax) == ["cat", "dog", "bird"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, -1.0], ["#0, class 0", "#1, class 1"]), ([0.0, 0.0], ["2 others"])],
    ids=["no others", "zeros are others"],
)
def test_others_have_a_bar_where_there_are_any(ax, values, expected):
    attribution_bars(ax, np.array(values), np.array([0, 1]))
    assert ticks(ax) == expected


def test_the_sign_of_a_bar_is_its_side_and_its_marks_say_so(ax):
    attribution_bars(ax, np.array([2.0, -1.0, 0.5]), None, top=1, output="logit of class 2")
    assert [np.sign(width) for width in widths(ax)] == [1, 1, -1]
    assert ticks(ax) == ["#0", "1 other", "#1"]
    assert colours(ax) == [RAISED, REST, LOWERED]
    assert ax.get_xlabel().startswith("▼ lowered     contribution to the logit of class 2     ▲ raised")
    assert ax.get_legend() is None


@pytest.mark.parametrize(("contribution", "style"), [(2.0, "-"), (-2.0, (0, (2.2, 1.2))), (0.0, "-")])
def test_the_frame_of_an_image_tells_the_sign_without_colours(ax, contribution, style):
    training_image(ax, np.eye(4), "caption", contribution)
    (drawn,) = {spine.get_linestyle() for spine in ax.spines.values()}
    assert drawn == style
    (width,) = {spine.get_linewidth() for spine in ax.spines.values()}
    assert (width > 1) == (contribution != 0)


def test_terms_start_where_the_one_above_ends(ax):
    term_bars(ax, ["initial", "samples", "decay"], np.array([-0.5, 4.0, -1.5]), output="logit")
    assert np.allclose([bar.get_x() for bar in ax.patches], [0, -0.5, 3.5, 0])
    assert np.allclose(widths(ax), [-0.5, 4, -1.5, 2])
    assert ticks(ax) == ["initial", "samples", "decay", "logit"]
    assert words(ax) == ["▼ −0.5", "▲ +4", "▼ −1.5", "2"]


def test_a_machine_is_drawn_against_its_network_and_the_largest_error_is_named(ax):
    network = torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True)
    machine = network + torch.tensor([[0.0, -0.25], [0.125, 0.0]])
    for show, drawn, said in (
        ("outputs", [0, 0.75, 2.125, 3], "midpoint: largest |error| 0.25"),
        ("differences", [0, -0.25, 0.125, 0], "midpoint: largest 0.25"),
    ):
        axes = ax.figure.add_subplot()
        assert compare_outputs(axes, network, machine, show, label="midpoint") is axes
        compare_outputs(axes, network, network, show)
        assert np.array_equal(offsets(axes).T, [[0, 1, 2, 3], drawn])
        assert legend(axes)[0] == said
        assert len(axes.lines) == 1  # two rules share one line
        assert not np.array_equal(*(marks.get_facecolor() for marks in axes.collections))
    assert ax.figure.axes[1].get_aspect() == 1


def test_errors_below_the_rounding_are_drawn_in_its_band(ax):
    network = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    compare_outputs(ax, network, network + torch.tensor([1e-3, 0.0, 1e-6]), "errors")
    compare_outputs(ax, network, network, "errors", label="exact")
    errors, rounding = offsets(ax)[:, 1], 4 * np.finfo(np.float64).eps / 2
    (band,) = ax.patches
    assert band.get_extents().transformed(ax.transData.inverted()).y1 == pytest.approx(rounding)
    assert errors[[0, 2]] == pytest.approx([1e-3, 1e-6])
    assert 0 < errors[1] < rounding
    assert ax.get_yscale() == "log"
    assert legend(ax)[0] == "below the rounding of float64"


def test_rules_of_a_family_share_colour_mark_and_line(ax):
    rules = ["left Riemann 100", "left Riemann 1", "adaptive Gauss-Legendre 4, tol 1e-06", "midpoint"]
    error_against_evaluations(ax, rules, [100, 1, 8, 2], [1e-4, 1e-1, 1e-7, 1e-2])
    assert legend(ax) == ["left Riemann, n nodes"]
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[1, 1e-1], [100, 1e-4]], [[8, 1e-7]], [[2, 1e-2]]]
    assert len({line.get_color() for line in ax.lines}) == len({line.get_marker() for line in ax.lines}) == 3
    assert words(ax) == ["100", "1", "adaptive Gauss-Legendre 4, tol 1e−6", "midpoint"]


def test_many_rules_of_one_family_repeat_no_colour_for_another(ax):
    rules = [f"Gauss-Legendre {n}" for n in range(1, 12)] + ["left Riemann 1"]
    error_against_evaluations(ax, rules, list(range(1, 13)), [10.0**-n for n in range(12)])
    assert [line.get_color() for line in ax.lines] == list(PALETTE[:2])


def test_names_keep_clear_of_each_other(ax):
    error_against_evaluations(ax, ["first rule", "second rule", "third rule"], [100, 100, 101], [1e-3, 1e-3, 1.1e-3])
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_each_rule_stands_at_its_cost_and_error_and_an_error_of_zero_is_named(ax):
    error_against_evaluations(ax, ["a", "b"], torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]))
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert words(ax) == ["a", "b (error 0)"]
    assert [tuple(line.get_xydata()[0]) for line in ax.lines] == [(1, 0.5), (2, 0.25), (2, 0.25)]
    assert (ax.lines[2].get_marker(), ax.lines[2].get_markerfacecolor()) == ("v", "white")


def test_curves_run_from_a_few_points_to_all_of_them(ax):
    risk = torch.linspace(0, 0.2, 200, dtype=torch.float64)
    assert risk_coverage(ax, {"a": risk, "b": risk / 2}) is ax
    assert legend(ax) == ["a", "b"]
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
    assert ax.get_xlabel() == "score"


def test_labels_that_another_class_is_expected_for_stand_out(ax):
    suspicion_bars(ax, torch.tensor([-0.5, 0.1]), ["#3", "#4"])
    assert widths(ax) == pytest.approx([-0.5, 0.1])
    assert colours(ax) == [WRONG, IN_DISTRIBUTION]
    assert ticks(ax) == ["#3", "#4"]
    low, high = ax.get_ylim()
    assert low > high  # the worst stands on top


def test_marks_and_curves_stand_where_their_numbers_are(ax):
    first, second, third, fourth = (ax.figure.add_subplot() for _ in range(4))
    reliability_diagram(first, np.array([0.5, 0.9]), np.array([0.4, 1.0]), np.array([2, 10]))
    assert np.allclose(offsets(first), [[0.5, 0.4], [0.9, 1.0]])
    small, large = first.collections[0].get_sizes()
    assert small < large  # where more points are
    roc(second, np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.8, 1.0]))
    assert [line.get_xydata().tolist() for line in second.lines] == [[[0, 0], [1, 1]], [[0, 0], [0, 0.8], [1, 1]]]
    target_scatter(third, torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.5]))
    assert np.allclose(offsets(third), [[1, 2], [3, 2.5]])
    assert np.allclose(third.lines[0].get_xydata(), [[1, 1], [3, 3]])
    spectrum(fourth, torch.tensor([3.0, 1.0, 0.0, -1e-18], dtype=torch.float64))
    assert np.allclose(fourth.lines[0].get_xydata(), [[1, 0.75], [2, 0.25]])


@pytest.mark.parametrize(("low", "expected"), [(0.37, 0.3), (0.0, 0.0), (-0.2, -1.0)])
def test_the_shades_of_a_matrix_hold_all_cosines(ax, low, expected):
    K = np.array([[1.0, low], [low, 1.0]])
    kernel_matrix(ax, K, np.array([4, 7]))
    (image,) = ax.images
    assert np.allclose(image.get_array(), K)
    assert image.get_clim() == (pytest.approx(expected), 1)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "7"]
    assert [line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1] == [0.5]


def test_a_matrix_names_its_groups_as_it_is_told(ax):
    kernel_matrix(ax, np.eye(3), np.array([0, 0, 2]), names=["cat", "none", "$dog_{"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["cat", "\\$dog_{"]
    assert all(label.get_rotation() == 0 for label in ax.get_xticklabels())
    kernel_matrix(ax, np.eye(2), np.array([0, 1]), names=["a long name of a class", "another one of that length"])
    assert [label.get_rotation() for label in ax.get_xticklabels()] == [90, 90]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("draw", "arguments", "message"),
    [
        (attribution_bars, (np.ones(3), np.zeros(2, dtype=int)), r"labels must have shape \(3,\): got \(2,\)"),
        (attribution_bars, (np.zeros(0), None), "at least one entry"),
        (attribution_bars, (np.array([0, np.inf, 0]), None), "contributions must be finite"),
        (compare_outputs, (np.ones(2), np.ones(1), "errors"), r"one shape and an output: got \(2,\) and \(1,\)"),
        (compare_outputs, (np.ones(0), np.ones(0), "outputs"), r"one shape and an output: got \(0,\)"),
        (compare_outputs, (np.ones(1), np.array([np.nan]), "outputs"), "machine must be finite: got 1 entries"),
        (term_bars, (["a", "b"], np.ones(1)), r"values must have shape \(2,\): got \(1,\)"),
        (error_against_evaluations, (["a", "b"], [1], [1, 1]), "evaluations must have shape"),
        (error_against_evaluations, (["a", "b"], [0, 1], [1, 1]), "positive"),
        (error_against_evaluations, (["a", "b"], [1, 1], [1, -1]), "absolute errors"),
        (error_against_evaluations, ([], [], []), "at least one name"),
        (risk_coverage, ({},), "at least one curve: got none"),
        (risk_coverage, ({"a": np.zeros(0)},), "a must have a risk for each number of points"),
        (suspicion_bars, (np.zeros(2), ["#1"]), "names must name each label: got 1 names for 2 margins"),
        (spectrum, (np.array([np.nan]),), "values must be finite"),
    ],
    ids=range(15),
)
def test_what_cannot_be_drawn_is_refused(ax, draw, arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(ax, *arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"), [({"top": 0}, "at least one entry: got 0 of 2"), ({"names": ["cat"]}, "none for class 1")]
)
def test_bars_need_a_row_and_a_name_for_each_class(ax, options, message):
    with pytest.raises(ValueError, match=message):
        attribution_bars(ax, np.ones(2), np.array([0, 1]), **options)


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
    "machine": lambda ax, name: compare_outputs(ax, ONE, ONE, "errors", label=name),
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
