"""Influence is the derivative of retraining, through everything that a recorded step depends on."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, OF_TORCH
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from weighted_loops import CLASSES, INPUTS, POINTS, Encoder, WeightedLoop, convolutions, mlp

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine.axes import by_label, by_parameter, by_sample, by_step
from epk_gp.optimizers.torch_rules import rule_for

SAMPLES = (3, 7)
HELD = ("Muon", "Adafactor", "Rprop")  # whose preconditioners are not differentiated


def adamw(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr=0.02, eps=1e-3)


def momentum(p: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(p, lr=0.2, momentum=0.8, weight_decay=0.01)


@pytest.fixture(scope="module")
def run() -> epk.Trajectory:
    return WeightedLoop(adamw).record()


def assert_is_slope(loop: WeightedLoop, *, tolerance: float = 1e-6, **options: Any) -> None:
    effect = epk.influence(loop.record(), loop.test_points, **options)
    assert effect.certified
    for sample in SAMPLES:
        expected = loop.slopes(sample)
        assert (effect.values[:, :, sample] - expected).abs().max() <= tolerance * expected.abs().max()


OPTIMIZERS = [
    (name, options)
    for case, (name, options) in CASES.items()
    if name not in (*HELD, "SparseAdam")
    and not any(part in case for part in ("foreach", "fused", "tensor"))  # the same steps
    and ("maximize" not in case or name in ("SGD", "AdamW"))
]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "")
def test_influence_is_the_derivative_of_retraining_under_every_optimizer(name: str, options: dict[str, Any]) -> None:
    # an eps that the step of the central difference does not cross
    smooth = {"eps": 1e-3} if name in ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta") else {}
    assert_is_slope(WeightedLoop(lambda p: OF_TORCH[name](p, **smooth, **options)))


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    layers = [nn.Unflatten(1, (1, INPUTS)), nn.Conv1d(1, 3, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(9, CLASSES)]
    return nn.Sequential(*layers)


LOOPS: dict[str, WeightedLoop] = {
    "dropout": WeightedLoop(adamw, lambda: mlp(nn.Dropout(0.3))),
    "batch_norm": WeightedLoop(momentum, lambda: mlp(nn.BatchNorm1d(6))),
    "batch_norm_cumulative": WeightedLoop(momentum, lambda: mlp(nn.BatchNorm1d(6, momentum=None))),
    "batch_norm_accumulated": WeightedLoop(adamw, lambda: mlp(nn.BatchNorm1d(6)), accumulated=2),
    "instance_norm": WeightedLoop(momentum, instance_norm),
    "convolutions": WeightedLoop(momentum, convolutions),
    "transformer": WeightedLoop(adamw, Encoder),
    "accumulated": WeightedLoop(adamw, accumulated=3),
    "clipped_norm": WeightedLoop(momentum, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
    "clipped_norm_of_adam": WeightedLoop(adamw, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
    "clipped_value": WeightedLoop(momentum, clip=lambda p: nn.utils.clip_grad_value_(p, 0.02)),
    "relu": WeightedLoop(adamw, lambda: mlp(activation=nn.ReLU())),
    "full_batch": WeightedLoop(momentum, batch=POINTS),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_influence_is_the_derivative_of_retraining_in_every_loop(loop: WeightedLoop) -> None:
    assert_is_slope(loop)


def test_a_layer_that_is_trained_later_is_differentiated_through() -> None:
    def unfreeze_at_the_third_step(optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        group["seen"] = group.get("seen", 0) + 1
        if group["seen"] == 3:
            group["params"][0].requires_grad_(True)

    def frozen(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        p[0].requires_grad_(False)
        return adamw(p)

    assert_is_slope(WeightedLoop(frozen, after_step=unfreeze_at_the_third_step))


def test_influence_on_averaged_weights_is_the_derivative_of_their_outputs() -> None:
    loop = WeightedLoop(momentum)
    a = averaging_coefficients(loop.steps, decay=0.7)
    effect = epk.influence(averaged_trajectory(loop.record(), a), loop.test_points)
    ends = []
    for change in (1e-4, -1e-4):
        weights = torch.ones(1, POINTS, dtype=torch.float64)
        weights[0, 3] += change
        ends.append(epk.retrain(averaged_trajectory(loop.record(), a), weights).outputs(loop.test_points)[0])
    expected = (ends[0] - ends[1]) / 2e-4
    assert (effect.values[:, :, 3] - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("name", HELD)
def test_a_preconditioner_that_is_held_is_said_aloud(name: str) -> None:
    loop = WeightedLoop(lambda p: OF_TORCH[name]([q for q in p if name != "Muon" or q.ndim == 2], lr=0.02))
    run = loop.record(unexplained=0.9 if name == "Muon" else None)
    with pytest.warns(epk.CertificateWarning, match=f"how {name} would change with the gradients is not known"):
        effect = epk.influence(run, loop.test_points)
    assert f"how {name} would change" in effect.findings[0]
    assert not effect.certified


def test_statistics_that_no_batch_explains_are_said_aloud() -> None:
    def net() -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(INPUTS, 6)), nn.Tanh(), nn.Linear(6, CLASSES))

    loop = WeightedLoop(momentum, net)
    with pytest.warns(epk.CertificateWarning, match="how moving statistics would change"):
        assert "how moving statistics would" in epk.influence(loop.record(), loop.test_points).findings[0]


def test_a_rule_of_ones_own_is_held_and_said() -> None:
    loop = WeightedLoop(adamw)
    own = rule_for(adamw(list(mlp().parameters())))
    with pytest.warns(epk.CertificateWarning, match="how own rule would change"):
        assert "how own rule would" in epk.influence(loop.record(update_rule=own), loop.test_points).findings[0]


def test_the_terms_of_a_run_on_disk_are_those_in_memory(tmp_path: Path, run: epk.Trajectory) -> None:
    loop = WeightedLoop(adamw)
    loop.record(folder=tmp_path / "run")
    stored = epk.load_trajectory(tmp_path / "run", mlp().double())
    in_memory = epk.influence(run, loop.test_points)
    assert torch.equal(epk.influence(stored, loop.test_points).values, in_memory.values)


def test_a_run_without_the_optimizers_options_is_refused_where_they_are_needed(run: epk.Trajectory) -> None:
    old = replace(run, optimizer_groups=())
    with pytest.raises(ValueError, match="must hold the options of its optimizer, AdamW.*Record it again"):
        epk.influence(old, WeightedLoop(adamw).test_points)
    linear = replace(WeightedLoop(momentum).record(), optimizer_groups=())
    assert epk.influence(linear, WeightedLoop(adamw).test_points).certified


def test_classes_are_columns_of_all_outputs(run: epk.Trajectory) -> None:
    X, classes = WeightedLoop(adamw).test_points, torch.tensor([2, 0, 1])
    whole, chosen = epk.influence(run, X), epk.influence(run, X, classes=classes)
    assert torch.allclose(chosen.values[:, 0], whole.values[torch.arange(3), classes], rtol=1e-10, atol=1e-14)
    assert torch.allclose(chosen.outputs[:, 0], whole.outputs[torch.arange(3), classes])


def test_the_derivative_of_a_function_follows_from_those_of_the_outputs(run: epk.Trajectory) -> None:
    X, y = WeightedLoop(adamw).test_points, torch.tensor([2, 0, 1])
    whole = epk.influence(run, X)
    rows = epk.influence(run, X, function=lambda f: F.nll_loss(f, y, reduction="none"))
    joint = epk.influence(run, X, function=lambda f: F.nll_loss(f, y))
    chosen = whole.values[torch.arange(3), y]
    assert torch.allclose(rows.values[:, 0], -chosen, rtol=1e-10, atol=1e-14)
    assert joint.values.shape == (1, 1, POINTS)
    assert torch.allclose(joint.values[0, 0], -chosen.mean(dim=0), rtol=1e-10, atol=1e-14)


def test_axes_sum_what_single_samples_and_steps_add(run: epk.Trajectory) -> None:
    X = WeightedLoop(adamw).test_points
    whole = epk.influence(run, X)
    split = epk.influence(run, X, by=[by_label(run), by_step(run, [3])])
    assert split.values.shape == (3, CLASSES, CLASSES, 2)
    by_class = torch.stack([whole.values[:, :, run.targets == c].sum(dim=2) for c in range(CLASSES)], dim=2)
    assert torch.allclose(split.values.sum(dim=3), by_class, rtol=1e-10, atol=1e-14)
    other_order = epk.influence(run, X, by=[by_step(run, [3]), by_label(run)])
    assert torch.equal(other_order.values, split.values.transpose(2, 3))
    with pytest.raises(ValueError, match="has no part of one"):
        epk.influence(run, X, by=[by_parameter(run)])
    with pytest.raises(ValueError, match="std needs the derivative in each sample's weight"):
        _ = split.std


def test_truncation_keeps_what_the_last_steps_add(run: epk.Trajectory) -> None:
    X = WeightedLoop(adamw).test_points
    by = [by_sample(run), by_step(run)]
    whole, last = epk.influence(run, X, by=by).values, epk.influence(run, X, truncate=3).values
    assert torch.allclose(last, whole[:, :, :, -3:].sum(dim=3), rtol=1e-12, atol=1e-15)


def test_self_influence_is_each_samples_own_derivative(run: epk.Trajectory) -> None:
    X, y = WeightedLoop(adamw).data
    whole = epk.influence(run, X, function=lambda f: F.nll_loss(f, y, reduction="none"))
    own = epk.self_influence(run)
    assert torch.allclose(own, whole.values[:, 0].diagonal(), rtol=1e-9, atol=1e-13)
    assert torch.equal(epk.self_influence(run, torch.tensor([4, 1])), own[[4, 1]])
    with pytest.raises(ValueError, match=r"points must lie in 0..11: got 3..12"):
        epk.self_influence(run, torch.tensor([3, 12]))


def test_predictions_and_the_jackknife_follow_from_the_values(run: epk.Trajectory) -> None:
    effect = epk.influence(run, WeightedLoop(adamw).test_points)
    weights = torch.rand(2, POINTS, dtype=torch.float64)
    expected = effect.outputs + torch.stack([(effect.values * (w - 1)).sum(dim=2) for w in weights])
    assert torch.allclose(effect.predict(weights), expected)
    assert torch.allclose(effect.predict(weights[0]), expected[0])
    assert torch.allclose(effect.std, effect.values.square().sum(dim=2).sqrt())
    assert effect.adjoint_norms.shape == (3, CLASSES, run.num_steps + 1)
    with pytest.raises(ValueError, match=r"one weight per sample, \(..., 12\): got shape \(3,\)"):
        effect.predict(torch.ones(3, dtype=torch.float64))


def test_adjoint_norms_are_those_of_the_derivative_in_the_weights() -> None:
    loop = WeightedLoop(lambda p: torch.optim.SGD(p, lr=0.2))
    run = loop.record()
    effect = epk.influence(run, loop.test_points, classes=torch.tensor([0, 1, 2]))
    X, y = loop.data

    def trained(flat: Tensor, first: int) -> Tensor:
        w = flat
        for (batch,) in list(loop.batches())[first:]:
            loss = F.cross_entropy(run.model(run.model.unflatten(w), X[batch]), y[batch])
            (g,) = torch.autograd.grad(loss, w, create_graph=True)
            w = w - 0.2 * g
        return run.model(run.model.unflatten(w), loop.test_points).log_softmax(dim=1)[1, 1]

    for state in (0, 5, 8):
        w = run.states[state].clone().requires_grad_()
        (expected,) = torch.autograd.grad(trained(w, state), w)
        assert effect.adjoint_norms[1, 0, state] == pytest.approx(float(expected.norm()), rel=1e-9)
    assert effect.growth[1, 0] == effect.adjoint_norms[1, 0].max() / effect.adjoint_norms[1, 0, -1]


def test_blocks_of_points_rows_and_adjoints_change_nothing(
    run: epk.Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = WeightedLoop(adamw).test_points
    whole = epk.influence(run, X)
    for name, size in (("influence_points", 2), ("curvature_rows", 2), ("curvature_adjoints", 4)):
        monkeypatch.setattr(MemoryPlan, name, lambda *_, size=size: size)
    small = epk.influence(run, X)
    assert torch.allclose(small.values, whole.values, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("are_apart", [False, True], ids=["points", "outputs"])
def test_threads_and_checkpoints_change_nothing(
    are_apart: bool, run: epk.Trajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do outputs that are computed apart, because the adjoints of all of a point do not fit."""
    X = WeightedLoop(adamw).test_points
    whole = epk.influence(run, X)
    if are_apart:
        monkeypatch.setattr(MemoryPlan, "influence_points", lambda _, num_outputs: 2 if num_outputs == 1 else 0)
        expected, whole = whole, epk.influence(run, X)
        assert torch.allclose(whole.values, expected.values, rtol=1e-10, atol=1e-14)
        assert torch.allclose(whole.adjoint_norms, expected.adjoint_norms, rtol=1e-10)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(2) as pool:
        assert torch.equal(epk.influence(run, X, executor=pool).values, whole.values)
    kept = [epk.influence(run, X, checkpoint=tmp_path / "sums").values for _ in range(2)]
    assert torch.equal(kept[0], whole.values)
    assert torch.equal(kept[1], whole.values)


def test_smoothing_is_the_mean_of_the_derivatives_of_retrained_runs(run: epk.Trajectory) -> None:
    X, smoothing = WeightedLoop(adamw).test_points, epk.Smoothing(num_runs=2, low=0.5, high=1.5, seed=3)
    smooth = epk.influence(run, X, smoothing=smoothing)
    first, second = smoothing.weights(POINTS)
    assert torch.allclose(first + second, torch.full_like(first, 2.0))
    loop = WeightedLoop(adamw)
    expected = torch.zeros(3, CLASSES, dtype=torch.float64)
    for weights in (first, second):
        ends = []
        for change in (1e-4, -1e-4):
            moved = weights.clone()
            moved[7] += change
            ends.append(loop.outputs(moved))
        expected += (ends[0] - ends[1]) / 4e-4
    assert (smooth.values[:, :, 7] - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert smooth.certified
    assert torch.equal(smooth.outputs, epk.influence(run, X).outputs)


def test_a_run_with_huge_derivatives_does_not_spoil_the_average() -> None:
    values = torch.randn(8, 5, dtype=torch.float64)
    values[3] *= 1e6
    average = epk.Smoothing(8).average(values)
    assert torch.allclose(average, values.sort(dim=0).values[1:-1].mean(dim=0))
    assert average.abs().max() < 3
    assert torch.equal(epk.Smoothing(2).average(values[:2]), values[:2].mean(dim=0))


@pytest.mark.parametrize(
    "function",
    [
        lambda f: torch.cat([f[:1], f[1:] - f[:-1]]),
        lambda f: f.cumsum(0),
        lambda f: f.softmax(0),
        lambda f: torch.where(torch.arange(len(f))[:, None] == 2, f.flip(0), f),
        lambda f: f - f.mean(dim=0).detach(),
        lambda f: f * (f >= f.amax(dim=0)),
    ],
    ids=("differences", "sums", "softmax", "last", "detached", "largest"),
)
def test_every_row_of_a_function_must_be_that_of_one_input(
    run: epk.Trajectory, function: Callable[[Tensor], Tensor]
) -> None:
    """Also where other rows count without a derivative."""
    with pytest.raises(ValueError, match="result [012] depends on other rows"):
        epk.influence(run, WeightedLoop(adamw).test_points, function=function)


BAD: dict[str, tuple[Callable[[epk.Trajectory, Tensor], Any], type[Exception], str]] = {
    "joint_rows": (
        lambda run, X: epk.influence(run, X, function=lambda f: f - f.mean(dim=0)), ValueError, "depends on other rows",
    ),
    "shape": (
        lambda run, X: epk.influence(run, X, function=lambda f: f[:1]), ValueError, r"must map outputs of 3 inputs",
    ),
    "constant": (
        lambda run, X: epk.influence(run, X, function=lambda f: torch.ones(3)), ValueError, "must be differentiable",
    ),
    "classes_too": (
        lambda run, X: epk.influence(run, X, classes=torch.zeros(3, dtype=torch.int64), function=lambda f: f),
        ValueError,
        "classes and function must not be given together",
    ),
    "class": (
        lambda run, X: epk.influence(run, X, classes=torch.tensor([0, 1, 3])), ValueError, r"classes must lie in 0..2",
    ),
    "truncate": (lambda run, X: epk.influence(run, X, truncate=0), ValueError, "truncate must be"),
    "option": (lambda run, X: epk.influence(run, X, tol=1), TypeError, "unexpected keyword argument 'tol'"),
    "range": (lambda run, X: epk.Smoothing(low=1.0, high=1.0), ValueError, "0 <= low < high: got 1.0 and 1.0"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_wrong_arguments_are_refused(
    run: epk.Trajectory, call: Callable[..., Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(run, WeightedLoop(adamw).test_points)
