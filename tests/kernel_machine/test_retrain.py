"""Retraining is the recorded loop with other weights of its samples, and influence is its derivative."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_cases import CASES, OF_TORCH
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils.parametrizations import weight_norm
from weighted_loops import INPUTS, POINTS, Apply, Encoder, WeightedLoop, convolutions, mlp, record

import epk_gp as epk
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.step import ForwardPass, SeenRows
from epk_gp.kernel_machine.influence import Influence
from epk_gp.optimizers.torch_rules import PRECONDITIONERS
from epk_gp.optimizers.update_rules import Clip, ClipNorm, ClipValue
from epk_gp.storage.chunks import read_groups

Optimizer = optim.Optimizer
Make = Callable[[list[nn.Parameter]], Optimizer]
INF, sgd = float("inf"), partial(optim.SGD, lr=0.2, momentum=0.8, weight_decay=0.01)
WEIGHTS = torch.stack([torch.ones(POINTS), torch.arange(POINTS) % 3, torch.full((POINTS,), 3.0)]).double()
LEFT_OUT = torch.ones(2, POINTS, dtype=torch.float64)
LEFT_OUT[1, 3] = 0
NOT_KNOWN = ("Muon", "Rprop", "Adafactor")
# an eps that the step of the central difference does not cross; a bias before BatchNorm has a gradient of rounding
SMOOTH = {name: {"eps": 1e-3} for name in ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")}


def adam(p: Any, **options: Any) -> Optimizer:
    return optim.Adam(p, **{"lr": 0.03, "eps": 1e-3, **options})


def adamw(p: list[nn.Parameter]) -> Optimizer:
    return optim.AdamW([{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], lr=0.02, eps=1e-3)


MAKE: dict[str, Make] = {
    "SGD": sgd, "Adam": adam, "AdamW": lambda p: optim.AdamW(p, lr=0.03, eps=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.02, eps=1e-3),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0, eps=1e-3), "Adamax": lambda p: optim.Adamax(p, lr=0.02, eps=1e-3),
    "NAdam": lambda p: optim.NAdam(p, lr=0.02, eps=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=0.02, eps=1e-3, betas=(0.9, 0.9)),
}  # fmt: skip


def loop_of(make: Make, at_step: Callable[[int, Optimizer, list[nn.Parameter]], Any], **options: Any) -> WeightedLoop:
    """A loop that calls a function after each step, with the number of steps made so far."""
    state: dict[str, Any] = {}

    def start(p: list[nn.Parameter]) -> Optimizer:
        state.update(p=p, steps=0)
        return make(p)

    def after_step(optimizer: Optimizer) -> None:
        state["steps"] += 1
        at_step(state["steps"], optimizer, state["p"])

    return WeightedLoop(start, after_step=after_step, **options)


def changing(make: Make, **options: Any) -> WeightedLoop:
    return loop_of(make, lambda step, o, _: step == 3 and [group.update(options) for group in o.param_groups])


def adding(make: Make, **options: Any) -> WeightedLoop:
    """The first layer joins in a group of its own."""
    at_step = lambda step, o, p: step == 3 and o.add_param_group({"params": p[:2], **options})  # noqa: E731
    return loop_of(lambda p: make(p[2:]), at_step, options={"trained": ["0.weight", "0.bias"]})


def regrouping() -> WeightedLoop:
    """A group is removed, and its parameters come back in a group with another eps."""

    def at_step(step: int, optimizer: Optimizer, p: list[nn.Parameter]) -> None:
        if step == 2:
            del optimizer.param_groups[0]
        if step == 5:
            optimizer.add_param_group({"params": p[:2], "eps": 0.1})

    return loop_of(lambda p: adam([{"params": p[:2]}, {"params": p[2:], "eps": 0.01}]), at_step)


def clipped(clip: Clip, make: Make = sgd, *, is_stated: bool = True) -> WeightedLoop:
    cut = lambda p: clip_grad_value_(p, clip.bound)  # noqa: E731
    if isinstance(clip, ClipNorm):
        cut = lambda p: clip_grad_norm_(p, clip.bound, clip.norm_type)  # noqa: E731
    return WeightedLoop(make, clip=cut, options={"clip": clip} if is_stated else {})


def masked(p: list[nn.Parameter], clip: Clip | None = None) -> None:
    """Set gradients of a row, a column and a whole parameter to 0, as loops do that freeze entries, and clip."""
    for grad in (p[0].grad[:2], p[2].grad[:, 1], p[3].grad):
        grad.zero_()
    if isinstance(clip, ClipNorm):
        clip_grad_norm_(p, clip.bound, clip.norm_type)
    elif clip is not None:
        clip_grad_value_(p, clip.bound)


def largest_half(p: list[nn.Parameter]) -> None:
    """Leave the largest half of each gradient, which depends on the gradient."""
    for q in p:
        q.grad[q.grad.abs() < q.grad.abs().median()] = 0


def weight_normalised(net: nn.Module, layer: int = 0, dim: int | None = 0) -> nn.Module:
    """torch's own second derivative of it takes the norm as constant: influence would be 0.03 % to 4 % off."""
    weight_norm(net[layer], dim=dim)
    return net


def normalised(momentum: float | None = 0.1, make: Make = sgd, **options: Any) -> WeightedLoop:
    return WeightedLoop(make, lambda: mlp(nn.BatchNorm1d(6, momentum=momentum)), **options)


LOOPS: dict[str, WeightedLoop] = {
    "dropout": WeightedLoop(adamw, lambda: mlp(nn.Dropout(0.3))), "batch_norm": normalised(),
    "batch_norm_cumulative": normalised(None), "batch_norm_accumulated": normalised(make=adamw, accumulated=2),
    "instance_norm": WeightedLoop(
        sgd, lambda: convolutions(nn.InstanceNorm1d(3, affine=True, track_running_stats=True))
    ),
    "convolutions": WeightedLoop(sgd, convolutions),
    "weight_norm_of_convolutions": WeightedLoop(sgd, lambda: weight_normalised(convolutions(nn.Identity()), 1)),
    "weight_norm": WeightedLoop(sgd, lambda: weight_normalised(mlp())),
    "weight_norm_of_columns": WeightedLoop(sgd, lambda: weight_normalised(mlp(), dim=1)),
    "weight_norm_of_all": WeightedLoop(sgd, lambda: weight_normalised(mlp(), dim=None)),
    "operation_of_ones_own": WeightedLoop(sgd, lambda: mlp(activation=Apply(torch.square))),
    "transformer": WeightedLoop(adamw, Encoder), "accumulated": WeightedLoop(adamw, accumulated=3),
    "relu": WeightedLoop(adamw, lambda: mlp(activation=nn.ReLU())), "full_batch": WeightedLoop(sgd, batch=POINTS),
    "unfrozen_layer": loop_of(
        lambda p: adam([p[0].requires_grad_(False), *p[1:]]), lambda s, _, p: p[0].requires_grad_(s >= 3)
    ),
    "scheduled": loop_of(adam, lambda s, o, _: o.param_groups[0].update(lr=0.05 * 0.8**s)),
    "Adam_beta2": changing(adam, betas=(0.9, 0.5)), "Adam_eps": changing(adam, eps=0.1),
    "Adam_amsgrad": changing(lambda p: adam(p, amsgrad=True, betas=(0.9, 0.5)), amsgrad=False),
    "Adam_every_step": loop_of(adam, lambda s, o, _: o.param_groups[0].update(betas=(0.9 - s / 50, 1 - s / 40))),
    "RMSprop": changing(lambda p: optim.RMSprop(p, lr=0.02, eps=1e-3, momentum=0.5), alpha=0.5, eps=0.01, momentum=0.0),
    "RMSprop_centered": changing(lambda p: optim.RMSprop(p, lr=0.02, eps=1e-3, centered=True), centered=False),
    "Adagrad": changing(MAKE["Adagrad"], eps=0.3), "Adamax": changing(MAKE["Adamax"], eps=0.1),
    "Adadelta": changing(MAKE["Adadelta"], rho=0.5),
    "NAdam": changing(MAKE["NAdam"], betas=(0.8, 0.5), momentum_decay=0.4),
    "RAdam": changing(MAKE["RAdam"], betas=(0.8, 0.7)),
    "SGD": changing(sgd, nesterov=True, weight_decay=0.1, maximize=True),
    **{f"added_{name}": adding(MAKE[name]) for name in ("SGD", "Adam", "RMSprop", "RAdam")},
    "added_with_options": adding(adam, eps=0.1, betas=(0.8, 0.6)), "regrouped": regrouping(),
    "clipped_norm": clipped(ClipNorm(0.1), adamw, is_stated=False),
    "clipped_value": clipped(ClipValue(0.02), is_stated=False), "clipped_inf": clipped(ClipNorm(0.05, INF), adam),
    "clipped_1": clipped(ClipNorm(0.4, 1.0)), "clipped_3": clipped(ClipNorm(0.08, 3.0), adam),
    "bound_of_norm_not_reached": clipped(ClipNorm(0.8)), "bound_of_value_not_reached": clipped(ClipValue(0.4)),
    "bound_of_value_reached_by_some": clipped(ClipValue(0.2)), "masked": WeightedLoop(adamw, clip=masked),
    "masked_accumulated": WeightedLoop(sgd, clip=masked, accumulated=2),
    "masked_and_clipped": WeightedLoop(adam, clip=lambda p: masked(p, ClipNorm(0.1))),
    "masked_and_clipped_as_stated": WeightedLoop(
        sgd, clip=lambda p: masked(p, ClipNorm(0.2, 1.0)), options={"clip": ClipNorm(0.2, 1.0)}
    ),
    "masked_and_clipped_by_value": WeightedLoop(adam, clip=lambda p: masked(p, ClipValue(0.02))),
    "bound_reached_late": clipped(ClipNorm(0.35), is_stated=False),
}  # fmt: skip
for case, (name, options) in CASES.items():
    is_same_step = any(part in case for part in ("foreach", "fused", "tensor"))
    is_less = case.endswith("-plain") or (case.endswith("-maximize") and name != "AdamW")  # than another case
    if name not in (*NOT_KNOWN, "SparseAdam") and not is_same_step and not is_less:
        every = {**SMOOTH.get(name, {}), **options}
        LOOPS[case] = WeightedLoop(lambda p, name=name, every=every: OF_TORCH[name](p, **every))
QUICK = {"dropout", "batch_norm_accumulated", "Adam_beta2", "regrouped", "clipped_norm", "clipped_3",
         "bound_of_value_reached_by_some", "unfrozen_layer", "SGD-nesterov", "masked_and_clipped"}  # fmt: skip
EVERY = [pytest.param(loop, id=k, marks=() if k in QUICK else pytest.mark.slow) for k, loop in LOOPS.items()]


def assert_is_slope(effect: Influence, loop: WeightedLoop, sample: int) -> None:
    expected = loop.slopes(sample)
    assert (effect.values[:, :, sample] - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:There is a performance drop because")  # torch maps no norm of weight normalisation
@pytest.mark.parametrize("loop", EVERY)
def test_retraining_is_the_loop_and_influence_its_derivative(loop):
    run = loop.record()
    trained, effect = epk.retrain(run, WEIGHTS), epk.influence(run, loop.test_points)
    assert trained.certified
    assert effect.certified
    for own, weights in zip(trained.outputs(loop.test_points), WEIGHTS, strict=True):
        assert torch.allclose(own, loop.outputs(weights), rtol=0, atol=1e-8)
    assert_is_slope(effect, loop, 7)


@pytest.mark.parametrize("name", ["batch_norm_accumulated", "clipped_norm", "dropout"])
def test_a_retrained_run_is_a_recorded_run(name):
    loop = LOOPS[name]
    trained = epk.retrain(loop.record(), WEIGHTS)
    parts = epk.attribute(trained.run(2), loop.test_points)
    assert parts.certified
    # a bias in front of BatchNorm has a gradient of rounding, which AdamW amplifies
    assert torch.allclose(parts.network, trained.outputs(loop.test_points)[2], rtol=0, atol=1e-9)


def test_a_mask_that_changes_is_held_where_a_run_is_trained_again():
    loop = WeightedLoop(adamw, clip=largest_half)
    run = loop.record()
    effect = epk.influence(run, loop.test_points)
    assert effect.certified  # at the recorded gradients a small change of them leaves the mask as it is
    assert_is_slope(effect, loop, 3)
    with pytest.warns(epk.CertificateWarning, match="entries of the gradient the loop sets to 0 changes along the run"):
        again = epk.retrain(run, LEFT_OUT)
    assert (again.outputs(loop.test_points)[1] - loop.outputs(LEFT_OUT[1])).abs().max() > 0.01
    with pytest.warns(epk.CertificateWarning, match="is held as recorded"):
        epk.influence(run, loop.test_points, smoothing=epk.Smoothing(2, low=0.5, high=1.5))


def centralised(p: list[nn.Parameter]) -> None:
    for q in p[::2]:
        q.grad -= q.grad.mean(dim=1, keepdim=True)


def orthogonal(p: list[nn.Parameter]) -> None:
    for q in p[::2]:
        q.grad += 0.4 * (q @ q.T - torch.eye(len(q))) @ q.detach()


@pytest.mark.parametrize("edit", [centralised, orthogonal, lambda p: p[0].grad[0].mul_(0.5)])
def test_what_a_run_leaves_unexplained_is_no_certified_derivative(edit):
    """Contributions have a term for it; how it follows from other weights of the samples is not known."""
    loop = WeightedLoop(sgd, clip=edit)
    run = loop.record(unexplained=0.95)
    assert epk.attribute(run, loop.test_points).unexplained.abs().max() > 1e-3
    match = r"differs from the step that .*; how that part would follow from other weights of the samples is not known"
    calls = (
        lambda: epk.influence(run, loop.test_points),
        lambda: epk.influence(run, loop.test_points, smoothing=epk.Smoothing(2, low=0.5, high=1.5)),
        lambda: epk.influence(run, own=True),
        lambda: epk.retrain(run, LEFT_OUT),
    )
    for call in calls:
        with pytest.warns(epk.CertificateWarning, match=match):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_a_certified_derivative_whatever_a_run_may_leave_unexplained(dtype):
    """Beside a layer whose bias has a gradient of rounding, under an optimizer that takes its rates as tensors."""
    torch.manual_seed(0)
    net, X, y = mlp(nn.LayerNorm(6)).to(dtype), torch.randn(POINTS, INPUTS).to(dtype), torch.arange(POINTS) % 3
    optimizer = optim.AdamW(net.parameters(), lr=torch.tensor(0.02), foreach=False)
    batches = [torch.randperm(POINTS)[:5] for _ in range(8)]
    run = record(net, optimizer, X, y, batches, unexplained=0.5)
    assert epk.influence(run, X[:2]).certified
    assert epk.retrain(run, WEIGHTS).certified


def test_a_pass_whose_rows_do_not_follow_the_stated_loss_is_refused():
    run = WeightedLoop(sgd).record()
    forward = ForwardPass(5, cotangents=SeenRows(torch.tensor([1, 4]), torch.ones(2, 3, dtype=torch.float64)))
    steps = (*run.steps[:2], replace(run.steps[2], passes=(forward,)), *run.steps[3:])
    with pytest.raises(ValueError, match="does not follow: step 2: 2 of 5 rows"):
        epk.influence(replace(run, steps=steps), run.inputs[:1])


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_rules_whose_steps_on_other_gradients_are_not_known_are_refused(name):
    loop = WeightedLoop(lambda p: OF_TORCH[name]([q for q in p if name != "Muon" or q.ndim == 2], lr=0.02))
    run = loop.record(unexplained=0.9 if name == "Muon" else None)
    with pytest.raises(ValueError, match=f"those of {name} are known for the recorded ones only"):
        epk.retrain(run, WEIGHTS)


@pytest.mark.parametrize("rule", ["AdamW", "NAdam"])
def test_every_scale_is_computed_once_a_step_and_once_for_the_certificate(rule, monkeypatch):
    run, counts, own = WeightedLoop(MAKE[rule]).record(), list[int](), PRECONDITIONERS[rule]
    counted = lambda memory, h, *rest: counts.append(h.shape[-1]) or own.scale(memory, h, *rest)  # noqa: E731
    monkeypatch.setitem(PRECONDITIONERS, rule, replace(own, scale=counted))
    epk.retrain(run, WEIGHTS)
    assert sum(counts) == 2 * run.num_steps * run.num_weights


def test_blocks_of_runs_change_nothing(monkeypatch):
    run, weights = WeightedLoop(adamw).record(), torch.rand(20, POINTS).double()
    whole = epk.retrain(run, weights)
    monkeypatch.setattr(MemoryPlan, "retrained_runs", lambda *_: 7)
    assert torch.allclose(epk.retrain(run, weights).states, whole.states, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("unchecked")
def test_wrong_weights_are_refused():
    run = WeightedLoop(adamw).record()
    for weights, kind, message in (
        ([1.0] * POINTS, TypeError, "weights must be a torch.Tensor of floating-point numbers: got list"),
        (torch.ones(POINTS, dtype=torch.int64), TypeError, r"got torch.int64"),
        (torch.ones(2, 3), ValueError, r"one weight per sample, \(m, 12\): got shape \(2, 3\)"),
        (torch.full((POINTS,), float("nan")), ValueError, "NaN"),
    ):
        with pytest.raises(kind, match=message):
            epk.retrain(run, weights)


# Moving statistics that something else than the steps' passes moves: held as recorded, and said; a reset is exact


def pass_without_a_loss(net: nn.Module) -> None:
    """Measure something in training mode, as loops do that forget `net.eval()`."""
    with torch.no_grad():
        net(WeightedLoop(sgd).data[0])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_passes_without_a_loss_hold_the_statistics_and_are_said(accumulated):
    own = normalised(beside=pass_without_a_loss, accumulated=accumulated)
    run = own.record()
    with pytest.warns(epk.CertificateWarning, match="moved by passes without a loss"):
        again = epk.retrain(run, LEFT_OUT)
    assert torch.allclose(again.outputs(own.test_points)[0], own.outputs(torch.ones(POINTS)), atol=1e-12)
    for smoothing in (None, epk.Smoothing(2, low=0.5, high=1.5)):
        with pytest.warns(epk.CertificateWarning, match="how moving statistics would change"):
            epk.influence(run, own.test_points, smoothing=smoothing)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_reset_of_the_statistics_is_exact(momentum):
    own = normalised(momentum, beside=lambda net: net[1].reset_running_stats())
    run = own.record()
    again, effect = epk.retrain(run, LEFT_OUT), epk.influence(run, own.test_points)
    assert again.certified
    assert effect.certified
    assert_is_slope(effect, own, 3)
    for row, weights in zip(again.outputs(own.test_points), LEFT_OUT, strict=True):
        assert torch.allclose(row, own.outputs(weights), atol=1e-12)


def test_a_network_that_moves_its_statistics_otherwise_is_not_the_recorded_one(tmp_path):
    normalised().record(folder=tmp_path / "run")
    run = epk.load_trajectory(tmp_path / "run", normalised(0.3).net().double())
    with pytest.warns(epk.CertificateWarning, match="or the network moves its statistics otherwise"):
        epk.retrain(run, LEFT_OUT)
    for smoothing in (None, epk.Smoothing(2, low=0.5, high=1.5)):
        with pytest.warns(epk.CertificateWarning, match="differs from the step that the loss's gradient"):
            epk.influence(run, torch.zeros(1, INPUTS, dtype=torch.float64), smoothing=smoothing)


# Options, parameter groups and bounds of clipping that change during a run


@pytest.mark.parametrize("name", ["Adam_beta2", "added_RMSprop", "clipped_inf", "masked_and_clipped"])
def test_a_run_on_disk_follows_what_changes_too(name, tmp_path):
    loop = LOOPS[name]
    in_memory = loop.record()
    loop.record(folder=tmp_path / "whole", storage=epk.Storage(steps=2))
    loop.record(folder=tmp_path / "fewer", storage=epk.Storage(keep_every=3))
    whole, fewer = (epk.load_trajectory(tmp_path / part, mlp().double()) for part in ("whole", "fewer"))
    assert whole.digest == in_memory.digest
    assert [step.groups for step in whole.steps] == [step.groups for step in in_memory.steps]
    assert whole.clip == in_memory.clip
    expected = epk.retrain(in_memory, WEIGHTS)
    assert torch.equal(epk.retrain(whole, WEIGHTS).states, expected.states)
    computed = epk.retrain(fewer, WEIGHTS)
    assert computed.certified
    assert torch.allclose(computed.states, expected.states, rtol=0, atol=1e-10)


def test_groups_on_disk_that_are_none_are_refused():
    for text in ("", "1", "{}", '{"names": [], "changes":[[0, [{"names": 0}]]]}', '{"names": [], "changes":[[9, []]]}'):
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        with pytest.raises(ValueError, match="must hold 'groups' that describe"):
            read_groups(content, 3, "the chunk")


def test_a_schedule_of_what_no_preconditioner_depends_on_adds_nothing():
    run = loop_of(adam, lambda s, o, _: o.param_groups[0].update(betas=(0.9 - s / 50, 0.999), lr=0.1 / s)).record()
    assert all(step.groups is None for step in run.steps)


def test_a_resumed_run_knows_the_options_that_hold(tmp_path):
    digests = []
    for lengths in ((6,), (3, 6)):
        for steps in lengths:
            torch.manual_seed(1)
            net = mlp().double()
            (X, y), optimizer = WeightedLoop(adam).data, adam(net.parameters())
            with epk.Recorder(net, optimizer, X, y, folder=tmp_path / f"{len(lengths)}", resume=True) as recorder:
                for step in recorder.until(steps):
                    optimizer.zero_grad()
                    F.cross_entropy(net(X), y).backward()
                    recorder.batch(None)
                    optimizer.step()
                    if step in (1, 2):  # the last of them comes after the last step before the interruption
                        optimizer.param_groups[0]["eps"] *= 10
        assert [step.index for step in recorder.trajectory.steps if step.groups is not None] == [2, 3]
        digests.append(recorder.trajectory.digest)
    assert digests[0] == digests[1]


def test_a_group_that_is_removed_on_disk_takes_its_state_along(tmp_path):
    with pytest.raises(ValueError, match="must be removed with its state"):
        regrouping().record(folder=tmp_path / "run")


def test_a_run_whose_groups_were_added_is_not_resumed(tmp_path):
    loop = LOOPS["added_Adam"]
    loop.record(folder=tmp_path / "run")
    with pytest.raises(ValueError, match="must have the 2 parameter groups of the last commit to resume"):
        loop.record(folder=tmp_path / "run", resume=True)


def test_runs_of_an_optimizer_that_has_stepped_are_refused_if_it_keeps_anything():
    for make in (*MAKE.values(), optim.ASGD, optim.Rprop, None):
        net, (X, y) = mlp().double(), WeightedLoop(adam).data
        optimizer = optim.SGD(net.parameters(), lr=0.1) if make is None else make(list(net.parameters()))
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
        run = epk.Recorder(net, optimizer, X, y).trajectory
        refused = pytest.raises(ValueError, match="the run must begin with a new optimizer")
        with nullcontext() if make is None else refused:  # plain steps keep nothing
            epk.retrain(run, torch.ones(1, len(X)))


# Faults


def planted_option(**options: Any) -> Callable[[epk.Trajectory], epk.Trajectory]:
    def plant(run: epk.Trajectory) -> epk.Trajectory:
        group = run.optimizer_groups[0]
        return replace(run, optimizer_groups=(replace(group, options={**group.options, **options}),))

    return plant


def unrecorded_changes(run: epk.Trajectory) -> epk.Trajectory:
    return replace(run, steps=tuple(replace(step, groups=None) for step in run.steps))


FAULTS: dict[str, tuple[WeightedLoop, Callable[[epk.Trajectory], epk.Trajectory], int]] = {
    "eps": (WeightedLoop(adam), planted_option(eps=1.1e-3), 0),
    "beta2": (WeightedLoop(adam), planted_option(betas=[0.9, 0.99]), 1),
    "alpha": (WeightedLoop(MAKE["RMSprop"]), planted_option(alpha=0.9), 0),
    "rho": (WeightedLoop(MAKE["Adadelta"]), planted_option(rho=0.8), 0),
    "start": (WeightedLoop(MAKE["Adagrad"]), planted_option(initial_accumulator_value=0.0), 0),
    "changes": (LOOPS["Adam_eps"], unrecorded_changes, 3),
    "groups": (LOOPS["added_Adam"], unrecorded_changes, 3),
    "state_cleared": (loop_of(adam, lambda step, o, _: step == 3 and o.state.clear()), lambda run: run, 3),
    "bound": (LOOPS["clipped_inf"], lambda run: replace(run, clip=ClipNorm(0.06, INF)), 0),
    "norm": (LOOPS["clipped_inf"], lambda run: replace(run, clip=ClipNorm(0.05, 2.0)), 0),
    "norm_not_stated": (LOOPS["clipped_inf"], lambda run: replace(run, clip=None), 1),
    "value": (LOOPS["bound_of_value_reached_by_some"], lambda run: replace(run, clip=ClipValue(0.19)), 0),
}


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
@pytest.mark.parametrize(("loop", "plant", "step"), FAULTS.values(), ids=FAULTS)
def test_what_the_recorded_options_do_not_explain_is_not_certified(loop, plant, step):
    run, finding = plant(loop.record()), f"step {step} is not the one that the optimizer's recorded options"
    assert any(finding in each for each in epk.retrain(run, WEIGHTS[:1]).findings)
    with pytest.warns(epk.CertificateWarning, match=finding):
        epk.influence(run, own=torch.arange(2))
    if plant is unrecorded_changes:
        smoothed = epk.influence(run, loop.test_points, smoothing=epk.Smoothing(2))
        assert all(any(f"run {n} " in each for each in smoothed.findings) for n in range(2))


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_a_recorded_end_that_the_steps_do_not_reach_is_not_certified():
    loop = WeightedLoop(sgd)
    run = loop.record()
    moved = replace(run, states=(*run.states[:-1], run.states[-1] * 1.01), live=None)
    assert len(epk.retrain(moved, WEIGHTS).findings) == 2
    smoothed = epk.influence(moved, loop.test_points, smoothing=epk.Smoothing(2))
    assert sum("a replay with all weights 1 beside run" in each for each in smoothed.findings) == 2


def test_results_say_how_the_bound_of_clipping_is_known():
    for loop, words in (
        (clipped(ClipNorm(0.8)), "as stated"),
        (LOOPS["bound_reached_late"], "as the clipped steps show it"),
        (clipped(ClipNorm(0.8), is_stated=False), "is not known"),
    ):
        run = loop.record()
        assert words in " ".join(repr(epk.retrain(run, WEIGHTS)).split())
        assert words in " ".join(repr(epk.influence(run, loop.test_points)).split())


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_each_network_that_diverges_is_named():
    loop = WeightedLoop(sgd)
    trained = epk.retrain(loop.record(), torch.cat([WEIGHTS, torch.full((1, POINTS), 1e300, dtype=torch.float64)]))
    assert "1 of 4 networks diverged (NaN, infinity or weights beyond measure): 3" in trained.findings[0]
    with pytest.warns(epk.CertificateWarning, match="not finite: their training diverged"):
        trained.outputs(loop.test_points)
