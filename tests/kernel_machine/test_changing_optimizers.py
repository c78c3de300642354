"""Retraining and influence follow options, parameter groups and bounds of clipping that change during a run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from weighted_loops import POINTS, WeightedLoop, mlp

import epk_gp as epk
from epk_gp.optimizers.update_rules import Clip, ClipNorm, ClipValue
from epk_gp.storage.chunks import read_groups

Optimizer = optim.Optimizer
Make = Callable[[list[nn.Parameter]], Optimizer]
INF = float("inf")
WEIGHTS = torch.stack([torch.ones(POINTS), torch.arange(POINTS) % 3, torch.full((POINTS,), 3.0)]).double()


def adam(p: Any, **options: Any) -> Optimizer:
    return optim.Adam(p, **{"lr": 0.03, "eps": 1e-3, **options})


def sgd(p: Any) -> Optimizer:
    return optim.SGD(p, lr=0.2, momentum=0.8)


MAKE: dict[str, Make] = {
    "SGD": sgd,
    "Adam": adam,
    "AdamW": lambda p: optim.AdamW(p, lr=0.03, eps=1e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.02, eps=1e-3),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.2),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0, eps=1e-3),
    "Adamax": lambda p: optim.Adamax(p, lr=0.02, eps=1e-3),
    "NAdam": lambda p: optim.NAdam(p, lr=0.02, eps=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=0.02, eps=1e-3, betas=(0.9, 0.9)),
}


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


def unfreezing(make: Make, **options: Any) -> WeightedLoop:
    def add(step: int, optimizer: Optimizer, p: list[nn.Parameter]) -> None:
        if step == 3:
            optimizer.add_param_group({"params": p[:2], **options})

    return loop_of(lambda p: make(p[2:]), add, options={"trained": ["0.weight", "0.bias"]})


def regrouping() -> WeightedLoop:
    """A group is removed, and its parameters come back in a group with another eps."""

    def at_step(step: int, optimizer: Optimizer, p: list[nn.Parameter]) -> None:
        if step == 2:
            del optimizer.param_groups[0]
        if step == 5:
            optimizer.add_param_group({"params": p[:2], "eps": 0.1})

    return loop_of(lambda p: adam([{"params": p[:2]}, {"params": p[2:], "eps": 0.01}]), at_step)


def stated(clip: Clip, make: Make = sgd, *, is_stated: bool = True) -> WeightedLoop:
    def clip_gradients(p: list[nn.Parameter]) -> None:
        if isinstance(clip, ClipNorm):
            clip_grad_norm_(p, clip.bound, clip.norm_type)
        else:
            clip_grad_value_(p, clip.bound)

    return WeightedLoop(make, clip=clip_gradients, options={"clip": clip} if is_stated else {})


LOOPS = {
    "Adam_beta2": changing(adam, betas=(0.9, 0.5)),
    "Adam_eps": changing(adam, eps=0.1),
    "Adam_amsgrad": changing(lambda p: adam(p, amsgrad=True, betas=(0.9, 0.5)), amsgrad=False),
    "Adam_every_step": loop_of(adam, lambda s, o, _: o.param_groups[0].update(betas=(0.9 - s / 50, 1 - s / 40))),
    "RMSprop": changing(lambda p: optim.RMSprop(p, lr=0.02, eps=1e-3, momentum=0.5), alpha=0.5, eps=0.01, momentum=0.0),
    "RMSprop_centered": changing(lambda p: optim.RMSprop(p, lr=0.02, eps=1e-3, centered=True), centered=False),
    "Adagrad": changing(MAKE["Adagrad"], eps=0.3),
    "Adamax": changing(MAKE["Adamax"], eps=0.1),
    "Adadelta": changing(MAKE["Adadelta"], rho=0.5),
    "NAdam": changing(MAKE["NAdam"], betas=(0.8, 0.5), momentum_decay=0.4),
    "RAdam": changing(MAKE["RAdam"], betas=(0.8, 0.7)),
    "SGD": changing(sgd, nesterov=True, weight_decay=0.1, maximize=True),
    **{f"unfrozen_{name}": unfreezing(make) for name, make in MAKE.items()},
    "unfrozen_with_options": unfreezing(adam, eps=0.1, betas=(0.8, 0.6)),
    "regrouped": regrouping(),
    "clipped_inf": stated(ClipNorm(0.05, INF), adam),
    "clipped_1": stated(ClipNorm(0.4, 1.0)),
    "clipped_3": stated(ClipNorm(0.08, 3.0), adam),
    "bound_of_norm_not_reached": stated(ClipNorm(0.8)),
    "bound_of_value_not_reached": stated(ClipValue(0.4)),
    "bound_of_value_reached_by_some": stated(ClipValue(0.2)),
    "bound_reached_late": stated(ClipNorm(0.35), is_stated=False),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_retraining_and_influence_follow_what_changes(loop: WeightedLoop) -> None:
    run = loop.record()
    trained, effect = epk.retrain(run, WEIGHTS), epk.influence(run, loop.test_points)
    assert trained.certified
    assert effect.certified
    outputs = trained.outputs(loop.test_points)
    for own, weights in zip(outputs, WEIGHTS, strict=True):
        assert torch.allclose(own, loop.outputs(weights), rtol=0, atol=1e-8)
    expected = loop.slopes(7)
    assert (effect.values[:, :, 7] - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("name", ["Adam_beta2", "unfrozen_RMSprop", "clipped_inf"])
def test_a_run_on_disk_follows_them_too(name: str, tmp_path: Path) -> None:
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


NO_GROUPS = ["", "1", "{}", '{"names": [], "changes": [[0, [{"names": 0}]]]}', '{"names": [], "changes": [[9, []]]}']


@pytest.mark.parametrize("text", NO_GROUPS)
def test_groups_on_disk_that_are_none_are_refused(text: str) -> None:
    content = torch.tensor(list(text.encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="must hold 'groups' that describe"):
        read_groups(content, 3, "the chunk")


def test_a_schedule_of_what_no_preconditioner_depends_on_adds_nothing() -> None:
    run = loop_of(adam, lambda s, o, _: o.param_groups[0].update(betas=(0.9 - s / 50, 0.999), lr=0.1 / s)).record()
    assert all(step.groups is None for step in run.steps)


def test_a_resumed_run_knows_the_options_that_hold(tmp_path: Path) -> None:
    digests = []
    for lengths in ((6,), (3, 6)):
        path = tmp_path / str(len(lengths))
        for steps in lengths:
            torch.manual_seed(1)
            net = mlp().double()
            (X, y), optimizer = WeightedLoop(adam).data, adam(net.parameters())
            with epk.Recorder(net, optimizer, X, y, folder=path, resume=True) as recorder:
                for step in recorder.until(steps):
                    optimizer.zero_grad()
                    F.cross_entropy(net(X), y).backward()
                    recorder.batch(None)
                    optimizer.step()
                    if step in (1, 2):  # the last of them comes after the last step before the interruption
                        optimizer.param_groups[0]["eps"] *= 10
        run = recorder.trajectory
        assert [step.index for step in run.steps if step.groups is not None] == [2, 3]
        digests.append(run.digest)
    assert digests[0] == digests[1]


def test_a_group_that_is_removed_on_disk_takes_its_state_along(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be removed with its state"):
        regrouping().record(folder=tmp_path / "run")


def test_a_run_whose_groups_were_added_is_not_resumed(tmp_path: Path) -> None:
    for message in (None, "must have the 2 parameter groups of the last commit to resume"):
        torch.manual_seed(1)
        net = mlp().double()
        (X, y), optimizer = WeightedLoop(adam).data, adam(net[2].parameters())
        options: dict[str, Any] = {"folder": tmp_path / "run", "trained": ["0.weight", "0.bias"]}
        if message is not None:
            with pytest.raises(ValueError, match=message):
                epk.Recorder(net, optimizer, X, y, **options, resume=True)
            return
        with epk.Recorder(net, optimizer, X, y, **options) as recorder:
            for step in range(2):
                optimizer.zero_grad()
                F.cross_entropy(net(X), y).backward()
                recorder.batch(None)
                optimizer.step()
                if step == 0:
                    optimizer.add_param_group({"params": list(net[0].parameters())})


@pytest.mark.parametrize("name", [*MAKE, "ASGD", "Rprop", "SGD_of_plain_steps"])
def test_an_optimizer_that_has_stepped_is_refused_if_it_keeps_anything(name: str) -> None:
    others: dict[str, Make] = {
        "ASGD": optim.ASGD,
        "Rprop": optim.Rprop,
        "SGD_of_plain_steps": lambda p: optim.SGD(p, lr=0.1),
    }
    net, (X, y) = mlp().double(), WeightedLoop(adam).data
    optimizer = (MAKE | others)[name](list(net.parameters()))
    epk.Recorder(net, optimizer, X, y)
    F.cross_entropy(net(X), y).backward()
    optimizer.step()
    if name == "SGD_of_plain_steps":
        epk.Recorder(net, optimizer, X, y)
        return
    with pytest.raises(ValueError, match="the optimizer must be fresh: its .* holds gradients from before"):
        epk.Recorder(net, optimizer, X, y)


def planted_option(run: epk.Trajectory, **options: Any) -> epk.Trajectory:
    group = run.optimizer_groups[0]
    return replace(run, optimizer_groups=(replace(group, options={**group.options, **options}),))


def unrecorded_changes(run: epk.Trajectory, **_: Any) -> epk.Trajectory:
    return replace(run, steps=tuple(replace(step, groups=None) for step in run.steps))


FAULTS: dict[str, tuple[WeightedLoop, Callable[[epk.Trajectory], epk.Trajectory], int]] = {
    "eps": (WeightedLoop(adam), lambda run: planted_option(run, eps=1.1e-3), 0),
    "beta2": (WeightedLoop(adam), lambda run: planted_option(run, betas=[0.9, 0.99]), 1),
    "alpha": (WeightedLoop(MAKE["RMSprop"]), lambda run: planted_option(run, alpha=0.9), 0),
    "rho": (WeightedLoop(MAKE["Adadelta"]), lambda run: planted_option(run, rho=0.8), 0),
    "start": (WeightedLoop(MAKE["Adagrad"]), lambda run: planted_option(run, initial_accumulator_value=0.0), 0),
    "changes": (LOOPS["Adam_eps"], unrecorded_changes, 3),
    "groups": (LOOPS["unfrozen_Adam"], unrecorded_changes, 3),
    "bound": (LOOPS["clipped_inf"], lambda run: replace(run, clip=ClipNorm(0.06, INF)), 0),
    "norm": (LOOPS["clipped_inf"], lambda run: replace(run, clip=ClipNorm(0.05, 2.0)), 0),
    "norm_not_stated": (LOOPS["clipped_inf"], lambda run: replace(run, clip=None), 0),
    "value": (LOOPS["bound_of_value_reached_by_some"], lambda run: replace(run, clip=ClipValue(0.19)), 0),
}


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
@pytest.mark.parametrize(("loop", "plant", "step"), FAULTS.values(), ids=FAULTS)
def test_what_the_recorded_options_do_not_explain_is_not_certified(
    loop: WeightedLoop, plant: Callable[[epk.Trajectory], epk.Trajectory], step: int
) -> None:
    run, finding = plant(loop.record()), f"step {step} is not the one that the optimizer's recorded options"
    assert any(finding in each for each in epk.retrain(run, WEIGHTS[:1]).findings)
    assert any(finding in each for each in epk.influence(run, loop.test_points).findings)
    smoothed = epk.influence(run, loop.test_points, smoothing=epk.Smoothing(2))
    assert all(any(f"run {n} " in each for each in smoothed.findings) for n in range(2))
    with pytest.warns(epk.CertificateWarning, match=finding):
        epk.self_influence(run, torch.arange(2))


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_a_state_that_was_cleared_is_not_certified() -> None:
    loop = loop_of(adam, lambda step, o, _: step == 3 and o.state.clear())
    run = loop.record()
    assert "step 3 is not" in epk.retrain(run, WEIGHTS).findings[0]
    assert "step 3 is not" in epk.influence(run, loop.test_points).findings[0]


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_a_recorded_end_that_the_steps_do_not_reach_is_not_certified() -> None:
    loop = WeightedLoop(sgd)
    run = loop.record()
    moved = replace(run, states=(*run.states[:-1], run.states[-1] * 1.01))
    assert len(epk.retrain(moved, WEIGHTS).findings) == 2
    smoothed = epk.influence(moved, loop.test_points, smoothing=epk.Smoothing(2))
    assert sum("a replay with all weights 1 beside run" in each for each in smoothed.findings) == 2


def test_results_say_how_the_bound_of_clipping_is_known() -> None:
    loop, reached = stated(ClipNorm(0.8)), LOOPS["bound_reached_late"]
    unreached = stated(ClipNorm(0.8), is_stated=False)
    for each, words in ((loop, "as stated"), (reached, "as the clipped steps show it"), (unreached, "is not known")):
        run = each.record()
        assert words in " ".join(repr(epk.retrain(run, WEIGHTS)).split())
        assert words in " ".join(repr(epk.influence(run, each.test_points)).split())


@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")
def test_each_network_that_diverges_is_named() -> None:
    loop = WeightedLoop(sgd)
    run, weights = loop.record(), torch.cat([WEIGHTS, torch.full((1, POINTS), 1e300, dtype=torch.float64)])
    trained = epk.retrain(run, weights)
    assert not trained.certified
    assert "1 of 4 networks diverged (NaN, infinity or weights beyond measure): 3" in trained.findings[0]
    with pytest.warns(epk.CertificateWarning, match="not finite: their training diverged"):
        trained.outputs(loop.test_points)
