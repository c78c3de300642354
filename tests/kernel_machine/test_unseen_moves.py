"""Moving statistics that something else than the steps' passes moves: held as recorded, and said; a reset is exact."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from weighted_loops import INPUTS, POINTS, WeightedLoop, mlp

import epk_gp as epk
from epk_gp.core.show import CertificateWarning


def sgd(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.2, momentum=0.5)


def pass_without_a_loss(net: nn.Module) -> None:
    """Measure something in training mode, as loops do that forget `net.eval()`."""
    with torch.no_grad():
        net(WeightedLoop(sgd).data[0])


def reset(net: nn.Module) -> None:
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.reset_running_stats()


def loop(beside: Callable[[nn.Module], None] | None = None, momentum: float | None = 0.1) -> WeightedLoop:
    return WeightedLoop(sgd, lambda: mlp(nn.BatchNorm1d(6, momentum=momentum)), beside=beside, steps=5)


def left_out() -> Tensor:
    weights = torch.ones(2, POINTS, dtype=torch.float64)
    weights[1, 3] = 0
    return weights


@pytest.mark.parametrize("accumulated", [1, 2])
def test_passes_without_a_loss_hold_the_statistics_and_are_said(accumulated: int) -> None:
    own = replace(loop(pass_without_a_loss), accumulated=accumulated)
    run = own.record()
    with pytest.warns(CertificateWarning, match="moved by passes without a loss"):
        again = epk.retrain(run, left_out())
    assert torch.allclose(again.outputs(own.test_points)[0], own.outputs(torch.ones(POINTS)), atol=1e-12)
    for smoothing in (None, epk.Smoothing(2, low=0.5, high=1.5)):
        with pytest.warns(CertificateWarning, match="how moving statistics would change"):
            epk.influence(run, own.test_points, smoothing=smoothing)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_reset_of_the_statistics_is_exact(momentum: float | None) -> None:
    own = loop(reset, momentum)
    run = own.record()
    again, effect = epk.retrain(run, left_out()), epk.influence(run, own.test_points)
    assert again.certified
    assert effect.certified
    expected = own.slopes(3)
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()
    for row, weights in zip(again.outputs(own.test_points), left_out(), strict=True):
        assert torch.allclose(row, own.outputs(weights), atol=1e-12)


def test_a_network_that_moves_its_statistics_otherwise_is_not_the_recorded_one(tmp_path: Path) -> None:
    loop().record(folder=tmp_path / "run")
    run = epk.load_trajectory(tmp_path / "run", loop(momentum=0.3).net().double())
    with pytest.warns(CertificateWarning, match="or the network moves its statistics otherwise"):
        epk.retrain(run, left_out())
    for smoothing in (None, epk.Smoothing(2, low=0.5, high=1.5)):
        with pytest.warns(CertificateWarning, match="differs from the step that the loss's gradient"):
            epk.influence(run, torch.zeros(1, INPUTS, dtype=torch.float64), smoothing=smoothing)
