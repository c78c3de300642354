"""Retraining is the recorded loop with other weights of its samples."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, OF_TORCH
from torch import Tensor, nn
from weighted_loops import INPUTS, POINTS, Encoder, WeightedLoop, convolutions, mlp

import epk_gp as epk
from epk_gp.analysis.counterfactual import random_subsets
from epk_gp.core.plans import MemoryPlan
from epk_gp.optimizers.torch_rules import PRECONDITIONERS

WEIGHTS = torch.cat(
    [
        torch.ones(1, POINTS, dtype=torch.float64),
        random_subsets(POINTS, 2),
        torch.linspace(0.1, 2, POINTS, dtype=torch.float64)[None],
    ]
)
NOT_KNOWN = ("Muon", "Rprop", "Adafactor")


def assert_is_the_loop(loop: WeightedLoop, run: epk.Trajectory | None = None) -> None:
    trained = epk.retrain(loop.record() if run is None else run, WEIGHTS)
    assert trained.certified
    outputs = trained.outputs(loop.test_points)
    for number, weights in enumerate(WEIGHTS):
        assert torch.allclose(outputs[number], loop.outputs(weights), rtol=0, atol=1e-8)


OPTIMIZERS = [
    (name, options)
    for case, (name, options) in CASES.items()
    if name not in (*NOT_KNOWN, "SparseAdam")
    and not any(part in case for part in ("foreach", "fused", "tensor"))  # the same steps
    and ("maximize" not in case or name in ("SGD", "AdamW"))
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "")
def test_retraining_is_the_loop_with_weights_under_every_optimizer(name: str, options: dict[str, Any]) -> None:
    assert_is_the_loop(WeightedLoop(lambda p: OF_TORCH[name](p, **options)))


def adamw(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], lr=0.02)


LOOPS = {
    "dropout": WeightedLoop(adamw, lambda: mlp(nn.Dropout(0.3))),
    "batch_norm": WeightedLoop(adamw, lambda: mlp(nn.BatchNorm1d(6)), accumulated=2),
    "batch_norm_cumulative": WeightedLoop(adamw, lambda: mlp(nn.BatchNorm1d(6, momentum=None))),
    "convolutions": WeightedLoop(adamw, convolutions),
    "transformer": WeightedLoop(adamw, Encoder),
    "clipped_norm": WeightedLoop(adamw, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
    "clipped_value": WeightedLoop(adamw, clip=lambda p: nn.utils.clip_grad_value_(p, 0.02)),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_retraining_is_the_loop_with_weights(loop: WeightedLoop) -> None:
    assert_is_the_loop(loop)


def test_the_schedule_of_the_learning_rate_is_kept() -> None:
    def scheduled(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=0.05)

    loop = WeightedLoop(scheduled, after_step=lambda o: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.8))
    assert_is_the_loop(loop)


@pytest.mark.parametrize("loop", [LOOPS["batch_norm"], LOOPS["clipped_norm"], LOOPS["dropout"]])
def test_a_retrained_run_is_a_recorded_run(loop: WeightedLoop) -> None:
    trained = epk.retrain(loop.record(), WEIGHTS)
    again = trained.run(3)
    parts = epk.attribute(again, loop.test_points)
    assert parts.certified
    # a bias in front of BatchNorm has a gradient of rounding, which AdamW amplifies
    assert torch.allclose(parts.network, trained.outputs(loop.test_points)[3], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_rules_whose_steps_on_other_gradients_are_not_known_are_refused(name: str) -> None:
    loop = WeightedLoop(lambda p: OF_TORCH[name]([q for q in p if name != "Muon" or q.ndim == 2], lr=0.02))
    run = loop.record(unexplained=0.9 if name == "Muon" else None)
    with pytest.raises(ValueError, match=f"those of {name} are known for the recorded ones only"):
        epk.retrain(run, WEIGHTS)


def test_every_scale_is_computed_once_a_step_and_once_for_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    run, counts = WeightedLoop(adamw).record(), []

    def counted(memory: Any, h: torch.Tensor, *rest: Any) -> Any:
        counts.append(h.shape[-1])
        return own.scale(memory, h, *rest)

    own = PRECONDITIONERS["AdamW"]
    monkeypatch.setitem(PRECONDITIONERS, "AdamW", replace(own, scale=counted))
    epk.retrain(run, WEIGHTS)
    assert sum(counts) == 2 * run.num_steps * run.num_weights


def test_blocks_of_runs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = WeightedLoop(adamw)
    run, weights = loop.record(), random_subsets(POINTS, 20)
    whole = epk.retrain(run, weights)
    monkeypatch.setattr(MemoryPlan, "retrained_runs", lambda *_: 7)
    small = epk.retrain(run, weights)
    assert torch.allclose(small.states, whole.states, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        ([1.0] * POINTS, TypeError, "weights must be a torch.Tensor of floating-point numbers: got list"),
        (torch.ones(POINTS, dtype=torch.int64), TypeError, r"got torch.int64"),
        (torch.ones(2, 3), ValueError, r"one weight per sample, \(m, 12\): got shape \(2, 3\)"),
        (torch.full((POINTS,), float("nan")), ValueError, "NaN"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_weights_are_refused(weights: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        epk.retrain(WeightedLoop(adamw).record(), weights)


# Moving statistics that something else than the steps' passes moves: held as recorded, and said; a reset is exact


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


def normalised_loop(beside: Callable[[nn.Module], None] | None = None, momentum: float | None = 0.1) -> WeightedLoop:
    return WeightedLoop(sgd, lambda: mlp(nn.BatchNorm1d(6, momentum=momentum)), beside=beside, steps=5)


def left_out() -> Tensor:
    weights = torch.ones(2, POINTS, dtype=torch.float64)
    weights[1, 3] = 0
    return weights


@pytest.mark.parametrize("accumulated", [1, 2])
def test_passes_without_a_loss_hold_the_statistics_and_are_said(accumulated: int) -> None:
    own = replace(normalised_loop(pass_without_a_loss), accumulated=accumulated)
    run = own.record()
    with pytest.warns(epk.CertificateWarning, match="moved by passes without a loss"):
        again = epk.retrain(run, left_out())
    assert torch.allclose(again.outputs(own.test_points)[0], own.outputs(torch.ones(POINTS)), atol=1e-12)
    for smoothing in (None, epk.Smoothing(2, low=0.5, high=1.5)):
        with pytest.warns(epk.CertificateWarning, match="how moving statistics would change"):
            epk.influence(run, own.test_points, smoothing=smoothing)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_reset_of_the_statistics_is_exact(momentum: float | None) -> None:
    own = normalised_loop(reset, momentum)
    run = own.record()
    again, effect = epk.retrain(run, left_out()), epk.influence(run, own.test_points)
    assert again.certified
    assert effect.certified
    expected = own.slopes(3)
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()
    for row, weights in zip(again.outputs(own.test_points), left_out(), strict=True):
        assert torch.allclose(row, own.outputs(weights), atol=1e-12)


def test_a_network_that_moves_its_statistics_otherwise_is_not_the_recorded_one(tmp_path: Path) -> None:
    normalised_loop().record(folder=tmp_path / "run")
    run = epk.load_trajectory(tmp_path / "run", normalised_loop(momentum=0.3).net().double())
    with pytest.warns(epk.CertificateWarning, match="or the network moves its statistics otherwise"):
        epk.retrain(run, left_out())
    for smoothing in (None, epk.Smoothing(2, low=0.5, high=1.5)):
        with pytest.warns(epk.CertificateWarning, match="differs from the step that the loss's gradient"):
            epk.influence(run, torch.zeros(1, INPUTS, dtype=torch.float64), smoothing=smoothing)
