"""Maps over a plane: an extent for each axis, and other columns at their mean."""

import numpy as np
import pytest
import torch

import epk_gp as epk
from epk_gp.analysis.maps import coordinate_plane, grid_over, lift, principal_plane, project, uncertainty_on_plane
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.plots.maps import map_figure


@pytest.fixture(scope="module")
def people():
    """Ages, incomes and numbers of children."""
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(20, 70, 30), rng.lognormal(10.8, 0.5, 30), rng.integers(1, 4, 30)]
    model = epk.EPKClassifier(steps=20, random_state=0).fit(X, X[:, 1] > 1000 * X[:, 0])
    return model.trajectory_


@pytest.fixture(scope="module")
def process(people):
    return epk.LogitGP(people, points=range(0, 30, 3), nodes=2)


def test_each_axis_of_a_map_has_the_extent_of_its_column(people, process):
    X, plane = people.inputs, coordinate_plane(people.inputs)
    m = uncertainty_on_plane(process, plane, size=5, margin=0.1, num_samples=16)
    for axis, column in ((m.x, X[:, 0]), (m.y, X[:, 1])):
        border = 0.1 * (column.max() - column.min())
        torch.testing.assert_close(axis[[0, -1]], torch.stack([column.min() - border, column.max() + border]))
    ages, incomes, children = lift(m.plane, torch.tensor([[30.0, 4e4]]).double())[0].tolist()
    assert (ages, incomes, children) == pytest.approx((30, 4e4, float(X[:, 2].mean())))
    torch.testing.assert_close(project(plane, X), X[:, :2])
    square = uncertainty_on_plane(process, plane, size=5, margin=0.1, num_samples=16, square=True)  # the control
    assert float(square.x[0]) < -1e4


def test_the_distance_to_the_data_counts_both_columns_of_a_map(people, process):
    def correlation(scale):
        m = uncertainty_on_plane(
            process, coordinate_plane(people.inputs), size=5, num_samples=16, generator=torch.Generator().manual_seed(0)
        )
        unit = torch.tensor([m.x[-1] - m.x[0], m.y[-1] - m.y[0]]) ** scale
        nodes = torch.cartesian_prod(m.y, m.x).flip(1) / unit
        distance = torch.cdist(nodes, m.training / unit).amin(1)
        ranks = torch.stack([values.argsort().argsort().double() for values in (m.std.flatten(), distance)])
        return float(torch.corrcoef(ranks)[0, 1]), m.distance_correlation

    expected, found = correlation(1)
    assert found == pytest.approx(expected, abs=1e-6)
    assert correlation(0)[0] != pytest.approx(found, abs=1e-3)  # of incomes alone


@pytest.mark.parametrize("outputs", ["full", "independent", "trace"])
def test_a_map_has_the_kernels_own_diagonal_and_computes_it_once(people, outputs, monkeypatch):
    gp = epk.LogitGP(people, outputs, points=range(0, 30, 3), nodes=2)
    gp.fit(3)
    calls, diagonal_blocks = [], PathKernel.diagonal_blocks
    monkeypatch.setattr(
        PathKernel, "diagonal_blocks", lambda *args: calls.append(len(args[1])) or diagonal_blocks(*args)
    )
    m = uncertainty_on_plane(gp, coordinate_plane(people.inputs), size=5, num_samples=16)
    assert calls == [25]
    nodes = lift(m.plane, torch.cartesian_prod(m.y, m.x).flip(1))
    with torch.no_grad():
        k = gp.kernel(epk.test_copy(nodes), diag=True)
    expected = k.reshape(25, 2).mean(1) if outputs == "full" else k.reshape(-1, 25).mean(0)
    torch.testing.assert_close(m.kernel.flatten(), expected, rtol=1e-12, atol=0)


def test_a_grid_of_points_without_extent_along_an_axis_is_refused_and_a_square_one_is_not():
    line = torch.linspace(0, 1, 9).double()[:, None] * torch.tensor([[3.0, 1.0, 2.0]]).double() + 1e3
    same = torch.tensor([[1.0, 2.0], [1.0, 5.0]])
    for plane, X in ((principal_plane(line), line), (coordinate_plane(same), same)):
        with pytest.raises(ValueError, match="different places along both axes: .* pass square=True"):
            grid_over(project(plane, X), 3, 0.1)
        x, y = grid_over(project(plane, X), 3, 0.1, square=True)
        assert x[-1] - x[0] == pytest.approx(float(y[-1] - y[0]))
    with pytest.raises(ValueError, match="different places"):
        grid_over(torch.ones(3, 2), 3, 0.1, square=True)


def test_a_map_of_two_units_fills_its_axes_and_one_of_one_unit_keeps_their_ratio(people, process):
    plane = coordinate_plane(people.inputs)
    for square, aspect in ((False, "auto"), (True, 1.0)):
        m = uncertainty_on_plane(process, plane, size=5, num_samples=16, square=square)
        ax = map_figure(m).axes[0]
        assert ax.get_aspect() == aspect
        assert ax.get_xlim() == tuple(m.x[[0, -1]].tolist())
