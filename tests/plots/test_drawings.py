"""Drawings: what is drawn is what was passed in, users' texts stay texts, and what cannot be drawn is refused."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.text import Text

from epk_gp.analysis.measures import ROCCurve
from epk_gp.plots import PALETTE, class_regions, map_handles, region_handles, shades_of, uncertainty_map
from epk_gp.plots.contributions import attribution_bars, training_image
from epk_gp.plots.scores import risk_coverage, score_histogram
from epk_gp.plots.style import LOWERED, RAISED, REST, output_name, plain
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
        (risk_coverage, ({},), "at least one curve: got none"),
    ],
    ids=range(6),
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


X, Y = np.linspace(0.0, 4.0, 5), np.linspace(0.0, 2.0, 3)
VALUES, ZERO = np.arange(15.0).reshape(3, 5), np.zeros((3, 5), dtype=int)


def shade_at(ax, x, y):
    """The interval of values whose shade is drawn at a place."""
    shades = shades_of(ax)
    found = [k for k, path in enumerate(shades.get_paths()) if path.contains_point((x, y))]
    return [(shades.levels[k], shades.levels[k + 1]) for k in found]


def test_the_map_shades_each_node_by_its_value(ax):
    uncertainty_map(ax, X, Y, VALUES, title="t", colorbar_label="nats")
    for (row, column), value in np.ndenumerate(VALUES):
        inside = np.clip([X[column], Y[row]], [0.01, 0.01], [3.99, 1.99])
        assert any(low - 0.2 <= value <= high + 0.2 for low, high in shade_at(ax, *inside))
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 4), (0, 2))  # to the frame, and not beyond the nodes
    assert [other.get_ylabel() for other in ax.figure.axes if other is not ax] == ["nats"]


def test_shades_between_nodes_stay_within_the_values_and_one_value_is_drawn(ax):
    spike = np.zeros((9, 9))
    spike[4, 4] = 1.0  # a cubic spline goes below 0 beside it
    uncertainty_map(ax, np.arange(9.0), np.arange(9.0), spike, title="")
    shades = shades_of(ax)
    assert (shades.levels[0], shades.levels[-1]) == (0, 1)
    darkest = [np.ptp(path.vertices, axis=0).max() for path in shades.get_paths() if len(path.vertices)][-1]
    assert darkest < 1  # the top of the spike alone
    other = ax.figure.add_subplot()
    uncertainty_map(other, X, Y, np.full((3, 5), 2.0), title="", limits=(2.0, 2.0), colorbar=False)
    assert shade_at(other, 2.0, 1.0)


def test_points_have_the_colours_of_their_classes_and_the_legend_that_maps_share_names_them(ax):
    points, labels = torch.tensor([[0.0, 0.0], [1.0, 1.0], [9.0, 9.0]]), torch.tensor([2, 0, 2])
    uncertainty_map(ax, X, Y, VALUES, title="", points=points, labels=labels)
    assert [to_hex(c) for c in ax.collections[-1].get_facecolor()] == [PALETTE[2], PALETTE[0], PALETTE[2]]
    assert ax.get_xlim() == (0, 4)  # the point outside does not widen the map
    handles = map_handles(labels, names=["cat", "dog", "bird"])
    assert [handle.get_label() for handle in handles] == ["cat", "bird", "decision boundary of the network"]


def line_of(ax):
    lines = [artist for artist in ax.collections if isinstance(artist, ContourSet) and not artist.filled]
    return np.concatenate([path.vertices for artist in lines for path in artist.get_paths()] or [np.zeros((0, 2))])


@pytest.mark.parametrize(
    ("row", "expected"),
    [([0, 0, 2, 2, 2], [1.5]), ([0] * 5 + [1] * 4, [2.25]), ([0] * 5, [])],  # 2.25: the middle of 2.0 and 2.5
    ids=["coarse", "finer", "one_class"],
)
def test_the_boundary_lies_where_the_class_changes_up_to_the_frame(ax, row, expected):
    uncertainty_map(ax, X, Y, VALUES, title="", boundary=np.repeat([row], 6, axis=0))
    line = line_of(ax)
    assert np.unique(line[:, 0].round(6)).tolist() == expected
    assert not expected or (line[:, 1].min(), line[:, 1].max()) == (0, 2)


def test_a_slanted_boundary_has_no_steps(ax):
    fine = np.linspace(0, 4, 161)
    classes = (fine[:, None] > 1 + 0.31 * fine).astype(int)
    uncertainty_map(ax, np.arange(5.0), np.arange(5.0), np.ones((5, 5)), title="", boundary=classes)
    line, node = line_of(ax), 4 / 160
    inner = line[(line[:, 0] > 0.3) & (line[:, 0] < 3.7)]
    assert np.abs(inner[:, 1] - 1 - 0.31 * inner[:, 0]).max() < 0.6 * node
    slopes = np.diff(inner, axis=0)
    assert np.abs(slopes[:, 1] / slopes[:, 0] - 0.31).max() < 0.1
    raw = ax.contour(fine, fine, classes, levels=[0.5]).get_paths()[0].vertices  # the negative control: stairs
    assert np.abs(np.diff(raw, axis=0)[:, 1]).min() == 0


def test_what_jumps_at_the_boundary_is_not_blurred_across_it(ax):
    x = np.linspace(0, 4, 9)
    classes = np.repeat((np.linspace(0, 4, 81) > 2.1)[None], 81, axis=0).astype(int)
    regions = np.repeat((x > 2.1)[None], 9, axis=0).astype(int)
    values = regions.astype(float)
    other = ax.figure.add_subplot()
    uncertainty_map(ax, x, x, values, title="", boundary=classes, regions=regions, colorbar=False)
    uncertainty_map(other, x, x, values, title="", boundary=classes, colorbar=False)
    assert shade_at(ax, 2.02, 2.0)[0][0] == 0  # the first shade up to the boundary at 2.125
    assert shade_at(other, 2.02, 2.0)[0][0] == 0
    assert shade_at(ax, 2.2, 2.0)[0][1] == pytest.approx(1)
    assert shade_at(other, 2.2, 2.0)[0][1] < 0.7  # the negative control


def test_many_classes_are_named_in_their_regions_but_for_one_that_is_too_small_to_be_seen(ax):
    classes = np.repeat(np.arange(6).repeat(20)[None], 60, axis=0)
    classes[30, 0] = 6
    uncertainty_map(ax, X, Y, VALUES, title="", boundary=classes)
    assert words(ax.texts) == ["0", "1", "2", "3", "4", "5"]
    places = np.array([text.get_position()[0] for text in ax.texts])
    assert np.allclose(places, (np.arange(6) + 0.5) * 4 / 6, atol=0.05)
    other = ax.figure.add_subplot()
    uncertainty_map(other, X, Y, VALUES, title="", boundary=np.repeat(np.arange(5)[None], 3, axis=0))
    assert words(other.texts) == []  # the colours of a few tell them


def test_regions_are_pale_and_meet_at_the_boundary(ax):
    class_regions(ax, X, Y, np.repeat([[0, 0, 2, 2, 2]], 3, axis=0))
    left, right = (artist.get_paths()[0] for artist in ax.collections)
    assert left.contains_point((1.4, 1))
    assert not left.contains_point((1.6, 1))
    assert right.contains_point((1.6, 1))
    colours = [to_hex(artist.get_facecolor()[0]) for artist in ax.collections]
    assert colours == [to_hex(handle.get_facecolor()) for handle in region_handles([0, 2])]
    assert not set(colours) & set(PALETTE)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": VALUES.T}, r"values must have shape \(3, 5\): got \(5, 3\)"),
        ({"grid_x": X[::-1]}, "grid_x must be increasing and evenly spaced"),
        ({"grid_x": X**2}, "grid_x must be increasing and evenly spaced"),
        ({"grid_y": Y[:1]}, "grid_y must be increasing"),
        ({"values": VALUES + np.inf}, "values must be finite"),
        ({"boundary": ZERO.T}, "boundary must have shape"),
        ({"points": np.zeros((4, 3))}, r"points must have shape \(4, 2\)"),
        ({"points": np.zeros((4, 2)), "labels": ZERO[0, :3]}, r"labels must have shape \(4,\)"),
        ({"labels": ZERO[0]}, "boundary, and labels with points"),
        ({"regions": ZERO}, "regions must come with a boundary"),
        ({"boundary": ZERO, "regions": ZERO[:, :4]}, r"regions must have shape \(3, 5\): got \(3, 4\)"),
    ],
)
def test_the_map_refuses_what_does_not_fit(ax, options, message):
    with pytest.raises(ValueError, match=message):
        uncertainty_map(ax, **({"grid_x": X, "grid_y": Y, "values": VALUES, "title": ""} | options))
