"""How much larger contributions are than what they sum to."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.kernel_machine.amplification import amplification
from epk_gp.kernel_machine.attribute import attribute_by
from epk_gp.kernel_machine.axes import by_label, by_layer, by_sample, by_step


@pytest.fixture
def run() -> epk.Trajectory:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    X, y = torch.randn(11, 4).double(), torch.arange(11) % 3
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    return epk.train(net, X, y, optimizer=optimizer, steps=6, batch_size=4)


def test_it_is_the_ratio_of_sums_per_step(run):
    X = torch.randn(2, 4).double()
    parts = attribute_by(run, X, [by_step(run), by_sample(run)])
    ratio = amplification(parts)
    assert ratio.shape == (2, 3, 6)
    for n, c, s in [(0, 0, 0), (1, 2, 5)]:
        shares = [*parts.values[n, c, s].tolist(), float(parts.decay[n, c, s])]
        assert ratio[n, c, s] == pytest.approx(sum(map(abs, shares)) / abs(sum(shares)))
    assert bool((ratio >= 1 - 1e-12).all())


def test_it_keeps_other_axes_and_sums_over_all_of_samples(run):
    X = torch.randn(2, 4).double()
    parts = attribute_by(run, X, [by_label(run), by_layer(run), by_sample(run)])
    assert amplification(parts).shape == (2, 3, len(parts.axes[1].names))


def test_one_sample_alone_is_not_amplified():
    net = nn.Sequential(nn.Linear(4, 3)).double()
    X, y = torch.randn(1, 4).double(), torch.zeros(1, dtype=torch.int64)
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=2)
    torch.testing.assert_close(
        amplification(attribute_by(run, X, [by_sample(run)])), torch.ones(1, 3, dtype=torch.float64)
    )


def test_an_attribution_without_samples_is_refused(run):
    parts = attribute_by(run, torch.randn(2, 4).double(), [by_step(run)])
    with pytest.raises(ValueError, match=r"split along the training samples: its axes are step\. Add by_sample"):
        amplification(parts)
