"""The plan of a network is found once and kept by its model, the dense one too."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff import verification
from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.scalars import ask
from epk_gp.autodiff.verification import plan_for, with_plan
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from helpers import assert_close, make_case, surprising_run


def test_the_dense_plan_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, original = [], UnsupportedParameterUseError.__init__  # a parameter is met where the plan has none
    noted = lambda *args: failures.append(args) or original(*args)  # noqa: E731
    monkeypatch.setattr(UnsupportedParameterUseError, "__init__", noted)
    trajectory, X = surprising_run()
    a, other = epk.Points(X, is_train=True), tangent_trajectory(trajectory)
    first, again = (epk.gram_block(tangent_trajectory(trajectory, s), a, a) for s in (0, 0))
    epk.reconstruct(trajectory, X)
    assert torch.equal(first, again)
    assert epk.attribute(trajectory, X).max_error < 1e-12
    assert other.model.cache is trajectory.model.cache
    assert not plan_for(other, other.model_for(X)).plan.bias_of
    assert len(failures) == 1


def noting(calls: list[tuple[bool, ...]], fails: Callable[[tuple[bool, ...]], bool]) -> Callable[..., str]:
    """Return a computation that notes which plans have layers, and may meet a parameter where these have none."""

    def compute(*nets: PlannedModel) -> str:
        calls.append(tuple(bool(net.plan.bias_of) for net in nets))
        if fails(calls[-1]):
            raise UnsupportedParameterUseError("not foreseen")
        return "computed"

    return compute


def test_what_the_dense_plan_cannot_do_is_an_error() -> None:
    trajectory, X = surprising_run()
    for expected in ([(True,), (False,)], [(False,)]):  # the second time the plan is dense from the start
        calls = list[tuple[bool, ...]]()
        with pytest.raises(UnsupportedParameterUseError, match="not foreseen"):
            with_plan(noting(calls, lambda _: True), X, trajectory)
        assert calls == expected


@pytest.mark.parametrize("failing", [0, 1])
def test_of_two_networks_the_first_gets_the_dense_plan_first(failing: int) -> None:
    """The network that is asked comes before the recorded one, whichever of both met its parameters otherwise."""
    run, calls = make_case("relu", steps=1).trajectory, list[tuple[bool, ...]]()
    asked, rows = ask(run, run.inputs[:3], lambda z: z.square())
    assert with_plan(noting(calls, lambda plans: plans[failing]), rows, asked, asked.recorded) == "computed"
    assert calls == [(True, True), (False, True), (False, False)][: failing + 2]
    assert (asked.model.cache.needs_dense_plan, run.model.cache.needs_dense_plan) == (True, failing == 1)


def test_runs_that_share_a_network_change_their_plan_together() -> None:
    (run, X), calls = surprising_run(), list[tuple[bool, ...]]()
    with_plan(noting(calls, any), X, run, tangent_trajectory(run))
    assert calls == [(True, True), (False, False)]


@pytest.mark.parametrize("other", [lambda run: pickle.loads(pickle.dumps(run)), copy.deepcopy])
def test_a_copied_run_starts_with_an_empty_cache(other: Any) -> None:
    trajectory, X = surprising_run()
    before = len(pickle.dumps(trajectory))
    expected = epk.attribute(trajectory, X)
    assert trajectory.model.cache.needs_dense_plan
    assert len(pickle.dumps(trajectory)) == before
    copied = other(trajectory)
    assert not copied.model.cache.plans
    assert not copied.model.cache.needs_dense_plan
    assert_close(epk.attribute(copied, X).samples, expected.samples)


def test_a_plan_is_made_for_each_dtype() -> None:
    case = make_case("relu", steps=1)
    double, single = (case.trajectory.model_for(case.test.to(dtype)) for dtype in (torch.float64, torch.float32))
    assert double.cache is single.cache
    assert plan_for(case.trajectory, double).plan == plan_for(case.trajectory, single).plan
    assert len(double.cache.plans) == 2


def test_large_networks_are_verified_on_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The true Jacobian of all rows would take gigabytes; the plan is the same."""
    case, sizes, compared = make_case("cnn"), [], verification.dense_jacobian
    noted = lambda *args, **kwargs: sizes.append(len(args[3])) or compared(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(verification, "dense_jacobian", noted)
    plans = []
    for num_bytes in (1 << 28, 0):
        monkeypatch.setattr(verification, "_TRUTH_BYTES", num_bytes)
        model = copy.deepcopy(case.trajectory).model_for(case.test)
        plans.append(plan_for(case.trajectory, model).plan)
    assert plans[0] == plans[1]
    assert max(sizes) > min(sizes) == 2


def test_a_network_of_many_outputs_is_verified_by_as_many_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for each of a thousand outputs took a minute."""
    calls, differentiate, counts, plans = [], torch.autograd.grad, [], []
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: calls.append(1) or differentiate(*args, **kw))
    for num_outputs in (3, 50):
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, num_outputs)).double()
        X, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
        trajectory = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
        before = len(calls)
        plans.append(plan_for(trajectory, trajectory.model_for(X)).plan)
        counts.append(len(calls) - before)
    assert counts[0] == counts[1] > 0
    sizes = {name: getattr(plans[0], name) for name in ("num_outputs", "activations_per_sample", "vmap_chunk_size")}
    assert plans[0] == dataclasses.replace(plans[1], **sizes)
    assert plans[0].num_outputs == 3
    assert plans[0].supports_jvp


def test_the_cheaper_representation_follows_the_shape() -> None:
    """Docs/engine.md, section 4: two of its examples."""
    cost = ContractionCost(num_output_pairs=100, num_contractions=1)
    assert cost.factored_is_cheaper(1, 784, 128, is_averaged=True)
    assert not cost.factored_is_cheaper(196, 72, 16, is_averaged=True)
    assert cost.factored_last_layer_is_cheaper(torch.Size([10, 128]), "logits")


class AtKinks(nn.Module):
    """A network whose units are all within rounding of ReLU's kink for the inputs and weights of the check."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(128, 64, bias=False), nn.Linear(192, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.cat([F.relu(self.inner(x)), x], dim=1))


def test_a_float32_network_keeps_its_layers_where_rounding_switches_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two computations of a gradient differ by more than rounding then, which says nothing about the network."""
    torch.manual_seed(0)
    net = AtKinks()
    tried = net.inner.weight.detach().double() + 0.02 * torch.arange(64 * 128).sin().view(64, 128).double()
    X, y = (torch.randn(8, 64).double() @ torch.linalg.svd(tried)[2][64:]).float(), torch.arange(8) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        F.cross_entropy(net(X), y).backward()
        recorder.batch(torch.arange(8))
        optimizer.step()
    run = recorder.trajectory
    plan = verification.plan_for(run, run.model_for(X)).plan
    assert plan.supports_interpolation
    assert plan.bias_of.keys() == {"inner.weight", "outer.weight"}
    assert epk.attribute(run, X[:2], path=epk.layerwise()).max_error < 1e-6
    run.model_for(X).cache.plans.clear()
    monkeypatch.setattr(verification, "_num_dropped", lambda _: (0, 0))  # the control: float32 alone
    assert "inner.weight" in verification.plan_for(run, run.model_for(X)).plan.dense_params
