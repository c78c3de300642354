"""The figures that commands write."""

import pytest
import torch
from matplotlib.figure import Figure

import epk_gp as epk
from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges
from epk_gp.kernel_machine.attribute import attribute_many
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.plots.figures import draw_attributions


@pytest.fixture(scope="module")
def images():
    """A run on 40 random images, and the contributions to the prediction of one."""
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(40, 1, 4, 4, generator=g, dtype=torch.float64), torch.arange(40) % 2
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).double()
    trajectory = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    rule = epk.gauss_legendre(2)
    parts = attribute_many(trajectory, X[:1], [[by_sample(trajectory)], [step_ranges(trajectory)]], rule=rule)
    return trajectory, X[:1], prediction_breakdown(*parts, parts[0].network.argmax(1))


def test_the_curve_of_an_output_ends_at_the_network_where_statistics_move():
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(20, 4, generator=g, dtype=torch.float64), torch.arange(20) % 2
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.1)
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=3)
    parts = attribute_many(trajectory, X[:2], [[by_sample(trajectory)], [step_ranges(trajectory)]])
    breakdown = prediction_breakdown(*parts, parts[0].network.argmax(1))
    assert (breakdown.initial + breakdown.steps.sum(1) - breakdown.network).abs().max() < 1e-12
    assert breakdown.statistics.abs().max() > 1e-3


@pytest.mark.parametrize("top", [1, 6, 8])
def test_as_many_training_images_are_drawn_as_are_asked_for(images, tmp_path, monkeypatch, top):
    trajectory, X, breakdown = images
    assert min((breakdown.samples[0] > 0).sum(), (breakdown.samples[0] < 0).sum()) >= top
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    draw_attributions(tmp_path / "a.png", breakdown, trajectory, X, [0], top)
    captions = [ax.get_title() for ax in drawn[0].get_axes() if ax.images]
    assert captions[0] == "explained"
    order = breakdown.samples[0].argsort(descending=True).tolist()
    expected = [*order[:top], *order[::-1][:top]]
    assert [int(caption.split()[0].removeprefix("#")) for caption in captions[1:]] == expected
