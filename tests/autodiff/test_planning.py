"""The plan of a network is found once and kept by its model, the dense one too."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

import epk_gp as epk
from epk_gp.autodiff import verification
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.autodiff.representations import ContractionCost, DenseJacobian, NodeWeights, OuterProductJacobian
from epk_gp.autodiff.verification import plan_for, planned
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.kernel_machine.baselines import tangent_trajectory
from helpers import assert_close, make_case, surprising_run


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every time that a parameter is met where the plan did not expect it."""
    listed: list[str] = []
    original = UnsupportedParameterUseError.__init__

    def counted(self: UnsupportedParameterUseError, message: str, *args: Any) -> None:
        listed.append(message)
        original(self, message, *args)

    monkeypatch.setattr(UnsupportedParameterUseError, "__init__", counted)
    return listed


def test_the_dense_plan_is_found_once(failures: list[str]) -> None:
    """Over the one-step runs that are made of a run, and in later calls."""
    trajectory, X = surprising_run()
    a = epk.Points(X, is_train=True)
    first, again = (epk.gram_block(tangent_trajectory(trajectory, s), a, a) for s in (0, 0))
    epk.reconstruct(trajectory, X)
    assert len(failures) == 1
    assert torch.equal(first, again)
    assert epk.attribute(trajectory, X).max_error < 1e-12


def test_runs_of_one_network_share_what_was_found(failures: list[str]) -> None:
    trajectory, X = surprising_run()
    epk.attribute(trajectory, X)
    assert len(failures) == 1
    other = tangent_trajectory(trajectory)
    assert other.model.cache is trajectory.model.cache
    assert not plan_for(other, other.model_for(X)).plan.bias_of
    assert len(failures) == 1


def fail_always(trajectory: epk.Trajectory, X: torch.Tensor, calls: list[object]) -> None:
    while True:
        with planned(trajectory, X) as net:
            calls.append(net)
            raise UnsupportedParameterUseError("never")


def test_what_the_dense_plan_cannot_do_is_an_error() -> None:
    trajectory, X = surprising_run()
    calls = []
    for expected in (2, 3):  # the second time the plan is dense from the start
        with pytest.raises(UnsupportedParameterUseError, match="never"):
            fail_always(trajectory, X, calls)
        assert len(calls) == expected


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
    case, sizes = make_case("cnn"), []
    compared = verification.dense_jacobian
    monkeypatch.setattr(
        verification,
        "dense_jacobian",
        lambda net, names, w, X, *args, **kwargs: sizes.append(len(X)) or compared(net, names, w, X, *args, **kwargs),
    )
    plans = []
    for num_bytes in (1 << 28, 0):
        monkeypatch.setattr(verification, "_TRUTH_BYTES", num_bytes)
        model = copy.deepcopy(case.trajectory).model_for(case.test)
        plans.append(plan_for(case.trajectory, model).plan)
    assert plans[0] == plans[1]
    assert max(sizes) > min(sizes) == 2


def test_a_network_of_many_outputs_is_verified_by_as_many_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass for each of a thousand outputs took a minute."""
    calls, differentiate = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kwargs: calls.append(1) or differentiate(*args, **kwargs)
    )
    counts, plans = [], []
    for num_outputs in (3, 50):
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, num_outputs)).double()
        X, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
        trajectory = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
        before = len(calls)
        plans.append(plan_for(trajectory, trajectory.model_for(X)).plan)
        counts.append(len(calls) - before)
    assert counts[0] == counts[1] > 0
    assert plans[0] == dataclasses.replace(
        plans[1],
        num_outputs=3,
        activations_per_sample=plans[0].activations_per_sample,
        vmap_chunk_size=plans[0].vmap_chunk_size,
    )
    assert plans[0].supports_jvp


def test_both_sides_must_have_one_representation() -> None:
    dense = DenseJacobian(torch.zeros(1, 2, 3))
    factored = OuterProductJacobian(torch.zeros(2, 1, 3), torch.zeros(1, 2, 1, 1), False, False, False)
    tile = GramAccumulator((1, 2, 1, 2), torch.zeros(0))
    with pytest.raises(TypeError, match="DenseJacobian met OuterProductJacobian. This is a bug in epk_gp"):
        dense.add_inner(factored, tile, 1.0, layer=0, same_points=True)
    with pytest.raises(TypeError, match="must name their points"):
        NodeWeights(torch.ones(2), None, 2).row_points()


def test_the_cheaper_representation_follows_the_shape() -> None:
    """Docs/engine.md, section 4: two of its examples."""
    cost = ContractionCost(num_output_pairs=100, num_contractions=1)
    assert cost.factored_is_cheaper(1, 784, 128, is_averaged=True)
    assert not cost.factored_is_cheaper(196, 72, 16, is_averaged=True)
    assert cost.factored_last_layer_is_cheaper(torch.Size([10, 128]), "logits")
