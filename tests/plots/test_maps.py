"""Drawings of maps over a plane."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.contour import ContourSet

from epk_gp.plots import PALETTE, class_regions, map_handles, region_handles, shades_of, uncertainty_map


def words(texts):
    return [text.get_text() for text in texts]


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
