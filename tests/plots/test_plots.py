import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from epk_gp.plots import (
    PALETTE,
    attribution_bars,
    error_against_evaluations,
    reconstruction_scatter,
    uncertainty_map,
)


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def words(ax):
    return [text.get_text() for text in ax.texts]


# Reconstruction


def test_the_scatter_names_its_largest_error(ax):
    network = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    machine = network + torch.tensor([[0.0, -0.25], [0.125, 0.0]])
    assert reconstruction_scatter(ax, network, machine, label="midpoint") is ax
    assert legend(ax) == ["midpoint: largest |error| 0.25"]
    assert np.array_equal(ax.collections[0].get_offsets(), [[0, 0], [1, 0.75], [2, 2.125], [3, 3]])
    assert ax.get_aspect() == 1


def test_two_rules_share_one_identity_line(ax):
    x = torch.arange(3.0)
    reconstruction_scatter(ax, x, x + 1, label="a")
    reconstruction_scatter(ax, x, x, label="b")
    assert len(ax.lines) == 1
    assert len(legend(ax)) == 2
    assert not np.array_equal(ax.collections[0].get_facecolor(), ax.collections[1].get_facecolor())


def test_outputs_with_gradients_are_drawn(ax):
    x = torch.arange(3.0, requires_grad=True)
    reconstruction_scatter(ax, x, 2 * x)
    assert legend(ax) == ["kernel machine: largest |error| 2"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("network", "machine", "message"),
    [
        ([0.0, 1.0], [0.0], r"one shape: got \(2,\) and \(1,\)"),
        ([], [], "at least one output"),
        ([0.0], [np.nan], "machine must be finite: got 1 entries"),
    ],
)
def test_the_scatter_refuses_what_it_cannot_compare(ax, network, machine, message):
    with pytest.raises(ValueError, match=message):
        reconstruction_scatter(ax, np.array(network), np.array(machine))


# Uncertainty map

X, Y = np.linspace(0.0, 4.0, 5), np.linspace(0.0, 2.0, 3)
VALUES = np.arange(15.0).reshape(3, 5)


def test_the_map_places_each_value_at_its_node(ax):
    uncertainty_map(ax, X, Y, VALUES, title="t", colorbar_label="nats")
    image = ax.images[0]
    assert np.array_equal(image.get_array(), VALUES)
    assert image.get_extent() == [-0.5, 4.5, -0.5, 2.5]  # half a cell beyond the outer nodes
    assert image.origin == "lower"
    assert image.get_clim() == (0, 14)
    assert ax.get_aspect() == 1
    assert ax.get_title() == "t"
    assert image.colorbar.ax.get_ylabel() == "nats"


def test_the_map_colours_points_by_class(ax):
    points = torch.tensor([[0.0, 0.0], [1.0, 1.0], [9.0, 9.0]])
    uncertainty_map(ax, X, Y, VALUES, title="", points=points, labels=torch.tensor([2, 0, 2]))
    colours = [to_hex(c) for c in ax.collections[-1].get_facecolor()]
    assert colours == [PALETTE[2], PALETTE[0], PALETTE[2]]
    assert legend(ax) == ["class 0", "class 2"]
    assert ax.get_xlim() == (-0.5, 4.5)  # the point outside does not widen the map


def test_the_boundary_lies_where_the_class_changes(ax):
    boundary = np.repeat([[0, 0, 2, 2, 2]], 3, axis=0)
    uncertainty_map(ax, X, Y, VALUES, title="", boundary=boundary)
    (lines,) = ax.collections
    vertices = np.concatenate([path.vertices for path in lines.get_paths()])
    assert np.array_equal(np.unique(vertices[:, 0]), [1.5])


def test_a_finer_boundary_lies_on_the_same_extent(ax):
    boundary = np.repeat([[0] * 5 + [1] * 4], 6, axis=0)
    uncertainty_map(ax, X, Y, VALUES, title="", boundary=boundary)
    (lines,) = ax.collections
    vertices = np.concatenate([path.vertices for path in lines.get_paths()])
    assert np.allclose(vertices[:, 0], 2.25)  # the middle of 2.0 and 2.5


def test_one_class_has_no_boundary(ax):
    uncertainty_map(ax, X, Y, VALUES, title="", boundary=np.zeros((3, 5), dtype=int))
    assert not ax.collections


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": VALUES.T}, r"values must have shape \(3, 5\): got \(5, 3\)"),
        ({"grid_x": X[::-1]}, "grid_x must be 1-dimensional, increasing and evenly spaced"),
        ({"grid_x": X**2}, "grid_x must be 1-dimensional, increasing and evenly spaced"),
        ({"grid_y": Y[:1]}, "grid_y must be 1-dimensional"),
        ({"values": VALUES + np.inf}, "values must be finite"),
        ({"boundary": np.zeros((5, 3), dtype=int)}, "boundary must have shape"),
        ({"points": np.zeros((4, 3))}, r"points must have shape \(4, 2\)"),
        ({"points": np.zeros((4, 2)), "labels": np.zeros(3, dtype=int)}, r"labels must have shape \(4,\)"),
        ({"labels": np.zeros(3, dtype=int)}, "labels must come with points"),
    ],
)
def test_the_map_refuses_what_does_not_fit(ax, options, message):
    with pytest.raises(ValueError, match=message):
        uncertainty_map(ax, **({"grid_x": X, "grid_y": Y, "values": VALUES, "title": ""} | options))


# Attribution


def widths(ax):
    return [bar.get_width() for bar in ax.patches]


def ticks(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def test_bars_sum_to_the_total(ax):
    values = torch.linspace(-1, 1.01, 100, dtype=torch.float64)
    attribution_bars(ax, values, torch.zeros(100, dtype=torch.int64), top=3)
    assert sum(widths(ax)) == pytest.approx(float(values.sum()), rel=1e-12)
    assert len(widths(ax)) == 7
    assert ticks(ax)[3] == "94 others"


def test_bars_are_the_most_helpful_and_the_most_harmful_points(ax):
    values = np.array([0.1, -0.5, 0.4, -0.2, 0.3, -0.1])
    attribution_bars(ax, values, np.array([0, 1, 2, 0, 1, 2]), names=["cat", "dog", "bird"], top=2)
    assert ticks(ax) == ["#2", "#4", "2 others", "#3", "#1"]
    assert np.allclose(widths(ax), [0.4, 0.3, 0.0, -0.2, -0.5])
    assert [to_hex(bar.get_facecolor()) for bar in ax.patches[:2]] == [PALETTE[2], PALETTE[1]]
    assert words(ax) == ["+0.4", "+0.3", "+0", "−0.2", "−0.5"]
    assert legend(ax) == ["cat", "dog", "bird"]


def test_a_long_rest_is_cut_and_says_so(ax):
    values = np.full(1000, 0.01)
    attribution_bars(ax, values, np.zeros(1000, dtype=int), top=2)
    assert "+9.98 (bar cut)" in words(ax)
    assert max(widths(ax)) == pytest.approx(0.025)
    assert "all bars together: +10)" in ax.get_xlabel()


def test_without_others_there_is_no_bar_for_them(ax):
    attribution_bars(ax, np.array([1.0, -1.0]), np.array([0, 1]))
    assert ticks(ax) == ["#0", "#1"]


def test_contributions_of_zero_are_others(ax):
    attribution_bars(ax, np.zeros(4), np.zeros(4, dtype=int))
    assert ticks(ax) == ["4 others"]
    assert words(ax) == ["+0"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": np.zeros(2, dtype=int)}, r"labels must have shape \(3,\): got \(2,\)"),
        ({"top": 0}, "top must be at least 1: got 0"),
        ({"names": ["cat"]}, "names must name each class: got 1 names for labels up to 1"),
        ({"contributions": np.zeros(0), "labels": np.zeros(0, dtype=int)}, "at least one entry"),
        ({"contributions": np.array([0, np.inf, 0])}, "contributions must be finite"),
    ],
)
def test_bars_refuse_what_does_not_fit(ax, options, message):
    with pytest.raises(ValueError, match=message):
        attribution_bars(ax, **({"contributions": np.ones(3), "labels": np.array([0, 1, 0])} | options))


# Rules


def test_each_rule_stands_at_its_cost_and_error(ax):
    error_against_evaluations(ax, ["left", "adaptive"], [1, 11.3], [1e-1, 1e-14])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [tuple(line.get_xydata()[0]) for line in ax.lines] == [(1, 1e-1), (11.3, 1e-14)]
    assert words(ax) == ["left", "adaptive"]


def test_names_keep_clear_of_each_other(ax):
    error_against_evaluations(ax, ["first rule", "second rule", "third rule"], [100, 100, 101], [1e-3, 1e-3, 1.1e-3])
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_an_error_of_zero_is_drawn_and_named(ax):
    error_against_evaluations(ax, ["a", "b"], torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]))
    assert words(ax) == ["a", "b (error 0)"]
    assert ax.lines[1].get_ydata()[0] == 0.25


@pytest.mark.parametrize(
    ("evaluations", "errors", "message"),
    [([1], [1, 1], "evaluations must have shape"), ([0, 1], [1, 1], "positive"), ([1, 1], [1, -1], "absolute errors")],
)
def test_rules_refuse_what_no_logarithm_shows(ax, evaluations, errors, message):
    with pytest.raises(ValueError, match=message):
        error_against_evaluations(ax, ["a", "b"], evaluations, errors)


def test_no_rules_are_refused(ax):
    with pytest.raises(ValueError, match="at least one name"):
        error_against_evaluations(ax, [], [], [])
