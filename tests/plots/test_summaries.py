"""The drawings of a run as a whole: what is drawn is what was passed in."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from epk_gp.plots.summaries import (
    kernel_matrix,
    reconstruction_differences,
    reconstruction_errors,
    reliability_diagram,
    roc,
    spectrum,
    target_scatter,
)


@pytest.fixture
def ax():
    return Figure().subplots()


def test_a_mark_of_the_reliability_diagram_is_larger_where_more_points_are(ax):
    reliability_diagram(ax, np.array([0.5, 0.9]), np.array([0.4, 1.0]), np.array([2, 10]))
    (marks,) = ax.collections
    assert np.allclose(marks.get_offsets(), [[0.5, 0.4], [0.9, 1.0]])
    small, large = marks.get_sizes()
    assert small < large


def test_a_curve_is_drawn_through_its_points(ax):
    roc(ax, np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.8, 1.0]))
    chance, curve = ax.lines
    assert np.allclose(curve.get_xydata(), [[0, 0], [0, 0.8], [1, 1]])
    assert np.allclose(chance.get_xydata(), [[0, 0], [1, 1]])


def test_outputs_stand_above_their_targets(ax):
    target_scatter(ax, torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.5]))
    assert np.allclose(ax.collections[0].get_offsets(), [[1, 2], [3, 2.5]])
    assert np.allclose(ax.lines[0].get_xydata(), [[1, 1], [3, 3]])


@pytest.mark.parametrize(("low", "expected"), [(0.37, 0.3), (0.0, 0.0), (-0.2, -1.0)])
def test_the_shades_of_a_matrix_hold_all_cosines(ax, low, expected):
    K = np.array([[1.0, low], [low, 1.0]])
    kernel_matrix(ax, K, np.array([4, 7]))
    (image,) = ax.images
    assert np.allclose(image.get_array(), K)
    assert image.get_clim() == (pytest.approx(expected), 1)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "7"]
    assert [line.get_xdata()[0] for line in ax.lines if len(set(line.get_xdata())) == 1] == [0.5]


def test_eigenvalues_are_drawn_as_shares_and_zeros_are_not(ax):
    spectrum(ax, torch.tensor([3.0, 1.0, 0.0, -1e-18], dtype=torch.float64))
    assert np.allclose(ax.lines[0].get_xydata(), [[1, 0.75], [2, 0.25]])


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda ax: reliability_diagram(ax, np.ones(2), np.ones(3), np.ones(2)), "accuracy must have shape"),
        (lambda ax: reliability_diagram(ax, np.ones(2), np.ones(2), np.ones(3)), "count must have shape"),
        (lambda ax: roc(ax, np.ones(2), np.ones(3)), "outside must have shape"),
        (lambda ax: target_scatter(ax, np.ones(2), np.ones(3)), "outputs must have shape"),
        (lambda ax: kernel_matrix(ax, np.ones((2, 3)), None), "cosines must have shape"),
        (lambda ax: kernel_matrix(ax, np.ones((2, 2)), np.ones(3)), "groups must have shape"),
        (lambda ax: spectrum(ax, np.zeros(2)), "values must hold a positive eigenvalue: got none"),
        (lambda ax: spectrum(ax, np.array([np.nan])), "values must be finite"),
    ],
    ids=range(8),
)
def test_what_cannot_be_drawn_is_refused(ax, draw, message, unchecked):
    with pytest.raises(ValueError, match=message):
        draw(ax)


def test_a_matrix_names_its_groups_as_it_is_told(ax):
    kernel_matrix(ax, np.eye(3), np.array([0, 0, 2]), names=["cat", "none", "$dog_{"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["cat", "\\$dog_{"]
    assert all(label.get_rotation() == 0 for label in ax.get_xticklabels())
    kernel_matrix(ax, np.eye(2), np.array([0, 1]), names=["a long name of a class", "another one of that length"])
    assert [label.get_rotation() for label in ax.get_xticklabels()] == [90, 90]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_differences_keep_their_sign_and_scale(ax):
    network = torch.tensor([0.0, 1.0, 2.0])
    assert reconstruction_differences(ax, network, network + torch.tensor([0.5, -0.25, 0.0])) is ax
    reconstruction_differences(ax, network, network, label="exact")
    assert np.array_equal(ax.collections[0].get_offsets(), [[0, 0.5], [1, -0.25], [2, 0]])
    assert len(ax.lines) == 1
    assert legend(ax) == ["kernel machine: largest 0.5", "exact: largest 0"]


def test_errors_below_the_rounding_are_drawn_in_its_band(ax):
    network = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
    assert reconstruction_errors(ax, network, network + torch.tensor([1e-3, 0.0, 1e-6])) is ax
    reconstruction_errors(ax, network, network, label="exact")
    errors = np.asarray(ax.collections[0].get_offsets())[:, 1]
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    rounding = 4 * np.finfo(np.float64).eps / 2
    assert len(ax.patches) == 1
    assert band.y1 == pytest.approx(rounding)
    assert errors[[0, 2]] == pytest.approx([1e-3, 1e-6])
    assert 0 < errors[1] < rounding
    assert ax.get_yscale() == "log"
    assert legend(ax)[0] == "below the rounding of float64"
