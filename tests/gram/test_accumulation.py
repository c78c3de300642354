"""How tiles are summed must not change what they hold."""

import mmap
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import epk_gp as epk
from epk_gp.autodiff import jacobians
from epk_gp.autodiff.dense import all_outputs
from epk_gp.autodiff.interception import StackedWeights, UnsupportedParameterUseError
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, layer_jacobians_blocked
from epk_gp.autodiff.representations import ContractionCost, LogitsLastLayer, SoftmaxLastLayer
from epk_gp.autodiff.verification import plan_for
from epk_gp.core import plans as huge_pages
from epk_gp.core.trajectory import flat_weights
from epk_gp.gram.path_kernel import gram_block_per_class
from epk_gp.gram.planned_kernel import WeightPrefetcher
from epk_gp.storage.chunks import StoredStates
from helpers import NETWORKS, assert_close, make_case

STACKED = {
    "relu", "leaky_relu", "tanh", "gelu", "one_class", "wide", "linear", "cnn", "conv1d", "conv3d", "wide_conv",
    "norms", "frozen_batch_norm",
}  # fmt: skip
RULE = epk.gauss_legendre(3)


@pytest.mark.parametrize("name", NETWORKS)
def test_which_networks_take_several_weights_at_once(name: str) -> None:
    """The negative control for the next test: a plan that never does so would pass it."""
    case = make_case(name, steps=1)
    assert plan_for(case.trajectory, case.trajectory.model_for(case.test)).plan.supports_stacking == (name in STACKED)


@pytest.mark.parametrize("name", ["norms", "cnn", "conv3d", "frozen_batch_norm"])
def test_convolutions_and_normalisations_are_layers(name: str) -> None:
    """The negative control for all tests of these networks: nothing of them is left to dense Jacobians."""
    case = make_case(name, steps=1)
    plan = plan_for(case.trajectory, case.trajectory.model_for(case.test)).plan
    assert plan.dense_params == ()
    weights = {key for key, value in case.trajectory.weights(0).items() if not key.endswith("bias")}
    assert set(plan.bias_of) == weights


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STACKED))
@pytest.mark.parametrize("kinds", [(True, True), (False, True), (False, False)])
def test_small_steps_may_be_taken_together(
    name: str, kinds: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(name)
    a, b = epk.Points(case.test, kinds[0]), epk.Points(case.trajectory.inputs, kinds[1])
    for head in case.heads:
        together = epk.gram_block(case.trajectory, a, b, head=head, rule=RULE)
        with monkeypatch.context() as patched:
            patched.setattr("epk_gp.core.plans.MIN_STACKED", 1 << 40)
            assert_close(epk.gram_block(case.trajectory, a, b, head=head, rule=RULE), together)


@pytest.mark.parametrize("name", ["relu", "wide", "cnn"])
def test_products_of_several_steps_may_be_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name)
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    for block in (epk.gram_block, gram_block_per_class):
        joined = [block(case.trajectory, a, b, head=head, rule=RULE) for head in case.heads]
        with monkeypatch.context() as patched:
            patched.setattr("epk_gp.autodiff.representations.LONG_INNER_DIM", 0)
            for head, expected in zip(case.heads, joined, strict=True):
                assert_close(block(case.trajectory, a, b, head=head, rule=RULE), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "wide", "wide_conv", "twice"])
@pytest.mark.parametrize("is_train", [True, False])
def test_a_symmetric_tile_is_computed_in_halves(name: str, is_train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the block of the points with other points that happen to be equal; and symmetric to the last bit."""
    monkeypatch.setattr("epk_gp.gram.accumulator.SYMMETRIC_BLOCK_ROWS", 2)
    case = make_case(name)
    points, others = (epk.Points(case.trajectory.inputs, is_train) for _ in range(2))
    for head in case.heads:
        own = epk.gram_block(case.trajectory, points, points, head=head, rule=RULE)
        assert_close(own, epk.gram_block(case.trajectory, points, others, head=head, rule=RULE))
        assert torch.equal(own, own.permute(2, 3, 0, 1))
        per_class = gram_block_per_class(case.trajectory, points, points, head=head, rule=RULE)
        assert torch.equal(per_class, per_class.mT)
        assert_close(per_class, torch.einsum("ncmc->cnm", own).contiguous())


def test_what_memory_held_before_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums begin in memory that was never written."""
    case = make_case("wide")
    points = epk.Points(torch.cat([case.test, case.trajectory.inputs]), torch.arange(12) < 5)
    expected = epk.gram_block(case.trajectory, points, points, rule=RULE)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(float("nan"))
    )
    assert torch.equal(epk.gram_block(case.trajectory, points, points, rule=RULE), expected)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_large_sums_lie_in_huge_pages_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("wide")
    points = epk.Points(torch.cat([case.test, case.trajectory.inputs]), torch.arange(12) < 5)
    expected = epk.gram_block(case.trajectory, points, points, rule=RULE)
    monkeypatch.setattr(huge_pages, "_LARGE", 0)
    made: list[int] = []
    plain = mmap.mmap

    def counted(*args: Any, **kwargs: Any) -> mmap.mmap:
        made.append(args[1])
        return plain(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", counted)
    found = epk.gram_block(case.trajectory, points, points, rule=RULE)
    assert torch.equal(found, expected)
    assert made
    assert all(size % (2 << 20) == 0 for size in made)
    assert torch.equal(pickle.loads(pickle.dumps(found)), expected)
    before = resident_bytes()
    large = huge_pages.empty_huge_pages((100, 1 << 20), torch.zeros(0)).fill_(1)
    assert resident_bytes() - before > 300 << 20
    del large
    assert resident_bytes() - before < 20 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_the_last_layer_may_be_passed_without_a_product(head: str) -> None:
    """All layers' gradients equal those pulled back from the outputs themselves."""
    case = make_case("wide", steps=1)
    net = plan_for(case.trajectory, case.trajectory.model_for(case.test))
    at, cost = WeightLocation(flat_weights(case.trajectory, 0, case.test)), ContractionCost(9, 1, head == "logits")
    found = layer_jacobians_blocked(net, at, case.test, head, cost)
    assert isinstance(found[-1], LogitsLastLayer if head == "logits" else SoftmaxLastLayer)
    plain = layer_jacobians(net, at, case.test, replace(all_outputs(head), head=None), cost)
    for one, other in zip(found, plain, strict=True):
        assert_close(one.to_dense(), other.to_dense())


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["cnn", "conv1d", "wide_conv", "wide"])
def test_no_more_outputs_are_taken_back_than_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = blocks_and_passes(name, monkeypatch)
    monkeypatch.setattr("epk_gp.core.plans.PASS_BYTES", 1)
    one_by_one, passes = blocks_and_passes(name, monkeypatch)
    assert set(passes) == {1}
    assert_close(one_by_one, together)
    monkeypatch.setattr(jacobians, "rows_per_pass", lambda *args: 1)
    elements = plan_for(
        (case := make_case(name)).trajectory, case.trajectory.model_for(case.test)
    ).plan.activations_per_sample
    monkeypatch.setattr("epk_gp.core.plans.PASS_BYTES", 4 * 8 * elements)
    in_two, passes = blocks_and_passes(name, monkeypatch)
    assert set(passes) == {1, 2}
    assert_close(in_two, together)


def blocks_and_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[int]]:
    """Compute a case's blocks, and list how many cotangents each backward pass took."""
    case = make_case(name)
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    plan_for(case.trajectory, case.trajectory.model_for(case.test))
    passes: list[int] = []
    plain = jacobians.propagate_cotangents

    def counted(*args: Any, **kwargs: Any) -> list[Tensor]:
        passes.append(len(args[2]))
        return plain(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(jacobians, "propagate_cotangents", counted)
        blocks = [epk.gram_block(case.trajectory, a, b, head=head, rule=RULE) for head in case.heads]
    return torch.stack(blocks), passes


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_layer_that_sees_some_rows_only_is_found(rows: int) -> None:
    """Not torch's own error: a routed network is asked again, with a dense plan."""
    weight = torch.randn(3, 2, dtype=torch.float64)
    x = torch.randn(6, 2, dtype=torch.float64)
    each = torch.stack([weight, 2 * weight])
    with StackedWeights({"weight": weight}, {"weight": each}):
        whole = torch.nn.functional.linear(x, weight)
        with pytest.raises(UnsupportedParameterUseError, match=f"it saw {rows}"):
            torch.nn.functional.linear(x[:rows], weight)
    assert_close(whole, torch.cat([x[:3] @ weight.T, 2 * x[3:] @ weight.T]))


def test_states_on_disk_are_read_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    X, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    epk.train(net, X, y, optimizer=optimizer, steps=40, folder=tmp_path / "run")
    run = epk.load_trajectory(tmp_path / "run", net)
    read: list[int] = []
    plain = StoredStates.__getitem__

    def counted(self: StoredStates, state: int) -> Tensor:
        read.append(state)
        return plain(self, state)

    monkeypatch.setattr(StoredStates, "__getitem__", counted)
    a, b = epk.Points(X, False), epk.Points(X, True)
    block = epk.gram_block(run, a, b, rule=RULE)
    assert len(read) <= 41 + 1  # one pass, and the state that the plan was made at
    with monkeypatch.context() as patched:
        patched.setattr(WeightPrefetcher, "get", lambda self, state, keep: flat_weights(run, state, X))
        assert torch.equal(epk.gram_block(run, a, b, rule=RULE), block)
