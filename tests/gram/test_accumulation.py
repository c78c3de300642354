"""How tiles are summed, and in how many threads, must not change what they hold."""

import copy
import mmap
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

import epk_gp as epk
from distributed_cases import make_net, record
from epk_gp.autodiff import jacobians
from epk_gp.autodiff.dense import all_outputs
from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, layer_jacobians_blocked
from epk_gp.autodiff.moved_weights import MovedWeights
from epk_gp.autodiff.representations import ContractionCost, LogitsLastLayer, SoftmaxLastLayer
from epk_gp.autodiff.verification import plan_for
from epk_gp.core import plans as huge_pages
from epk_gp.core.plans import TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.trajectory import flat_weights
from epk_gp.gram.planned_kernel import StateReader
from epk_gp.storage.chunks import StoredStates
from helpers import NETWORKS, assert_blocks, assert_close, gram_diagonal_blocks, make_case

STACKED = {
    "relu", "leaky_relu", "tanh", "gelu", "one_class", "wide", "linear", "cnn", "conv1d", "conv3d", "wide_conv",
    "norms", "frozen_batch_norm", "attention", "twice", "tied",
}  # fmt: skip
DENSE = {"cosine": ("out.bias",)}  # which is not used
RULE = epk.gauss_legendre(3)


@pytest.mark.parametrize("name", NETWORKS)
def test_which_networks_take_several_weights_at_once_and_have_layers_only(name: str) -> None:
    """The negative control for all tests of these networks: nothing of them is left to slower ways."""
    case = make_case(name, steps=1)
    plan = plan_for(case.trajectory, case.trajectory.model_for(case.test)).plan
    assert (plan.supports_stacking, plan.supports_jvp) == (name in STACKED, True)
    assert plan.dense_params == DENSE.get(name, plan.dense_params)
    if name in ("norms", "cnn", "conv3d", "frozen_batch_norm"):
        names = set(case.trajectory.weights(0))
        biases = {key: key.replace("weight", "bias") for key in names if not key.endswith("bias")}
        assert plan.dense_params == ()
        assert plan.bias_of == {key: bias if bias in names else None for key, bias in biases.items()}
    if name == "cnn":
        assert plan.supports_interpolation
        assert plan.supports_batched_vjp


@pytest.mark.parametrize("name", ["relu", "wide", "cnn"])
def test_products_of_several_steps_may_be_joined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name)
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    kernels = [epk.PathKernel(case.trajectory, head, RULE) for head in case.heads]
    joined = [(kernel.block(a, b), kernel.block_per_class(a, b)) for kernel in kernels]
    monkeypatch.setattr("epk_gp.autodiff.representations.LONG_INNER_DIM", 0)
    for kernel, (block, per_class) in zip(kernels, joined, strict=True):
        assert_close(kernel.block(a, b), block)
        assert_close(kernel.block_per_class(a, b), per_class)


@pytest.mark.parametrize("name", ["wide", *(pytest.param(n, marks=pytest.mark.slow) for n in ("wide_conv", "twice"))])
@pytest.mark.parametrize("is_train", [True, False])
def test_a_symmetric_tile_is_computed_in_halves(name: str, is_train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the block of the points with other points that happen to be equal; and symmetric to the last bit."""
    monkeypatch.setattr("epk_gp.gram.accumulator.SYMMETRIC_BLOCK_ROWS", 2)
    case = make_case(name, steps=2)
    points, others = (epk.Points(case.trajectory.inputs, is_train) for _ in range(2))
    for head in case.heads:
        kernel = epk.PathKernel(case.trajectory, head, RULE)
        own, expected = kernel.block(points, points), kernel.block(points, others)
        assert torch.equal(own, own.permute(2, 3, 0, 1))
        for block in (kernel.block_per_class(points, points), kernel.trace_block(points, points)):
            assert torch.equal(block, block.mT)
        assert_blocks(kernel, points, points, expected)


def test_what_memory_held_before_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums begin in memory that was never written."""
    case, empty = make_case("wide"), torch.Tensor.new_empty
    points = epk.Points(torch.cat([case.test, case.trajectory.inputs]), torch.arange(12) < 5)
    expected = epk.gram_block(case.trajectory, points, points, rule=RULE)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
    assert torch.equal(epk.gram_block(case.trajectory, points, points, rule=RULE), expected)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_large_sums_lie_in_huge_pages_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain, before = list[int](), mmap.mmap, resident_bytes()
    monkeypatch.setattr(mmap, "mmap", lambda *args, **options: made.append(args[1]) or plain(*args, **options))
    large = huge_pages.empty_huge_pages((100, 1 << 20), torch.zeros(0)).fill_(1)
    assert made == [400 << 20]
    assert resident_bytes() - before > 300 << 20
    del large
    assert resident_bytes() - before < 20 << 20
    odd = huge_pages.empty_huge_pages((9, 1 << 20), torch.zeros(0)[:0]).fill_(2)
    assert made[1:] == [36 << 20]
    assert torch.equal(pickle.loads(pickle.dumps(odd)), torch.full((9, 1 << 20), 2.0))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_the_last_layer_may_be_passed_without_a_product(head: str) -> None:
    case = make_case("wide", steps=1)
    net = plan_for(case.trajectory, case.trajectory.model_for(case.test))
    at, cost = WeightLocation(flat_weights(case.trajectory, 0, case.test)), ContractionCost(9, 1, head == "logits")
    found = layer_jacobians_blocked(net, at, case.test, head, cost)
    assert isinstance(found[-1], LogitsLastLayer if head == "logits" else SoftmaxLastLayer)
    plain = layer_jacobians(net, at, case.test, replace(all_outputs(head), head=None), cost)
    for one, other in zip(found, plain, strict=True):
        assert_close(one.to_dense(), other.to_dense())


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["conv1d", "cnn", "wide"])
def test_no_more_outputs_are_taken_back_than_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name, steps=2)
    run, a, b = case.trajectory, epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    elements = plan_for(run, run.model_for(case.test)).plan.activations_per_sample
    passes, plain = list[int](), jacobians.propagate_cotangents

    def counted(*args: Any, **kwargs: Any) -> list[Tensor]:
        passes.append(len(args[2]))
        return plain(*args, **kwargs)

    def blocks() -> Tensor:
        passes.clear()
        return torch.stack([epk.gram_block(run, a, b, head=head, rule=RULE) for head in case.heads])

    monkeypatch.setattr(jacobians, "propagate_cotangents", counted)
    together = blocks()
    monkeypatch.setattr("epk_gp.core.plans.PASS_BYTES", 1)
    assert_close(blocks(), together)
    assert set(passes) == {1}
    monkeypatch.setattr(jacobians, "rows_per_pass", lambda *args: 1)
    monkeypatch.setattr("epk_gp.core.plans.PASS_BYTES", 4 * 8 * elements)
    assert_close(blocks(), together)
    assert set(passes) == {1, 2}


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_layer_that_sees_some_rows_only_is_found(rows: int) -> None:
    """Not torch's own error: a routed network is asked again, with a dense plan."""
    weight = torch.randn(3, 2, dtype=torch.float64)
    x = torch.randn(6, 2, dtype=torch.float64)
    each = torch.stack([weight, 2 * weight])
    with MovedWeights({"weight": weight}, 6, {"weight": each}):
        whole = torch.nn.functional.linear(x, weight)
        with pytest.raises(UnsupportedParameterUseError, match=f"it saw {rows}"):
            torch.nn.functional.linear(x[:rows], weight)
    assert_close(whole, torch.cat([x[:3] @ weight.T, 2 * x[3:] @ weight.T]))


@pytest.mark.parametrize("path", [epk.straight(), epk.chords(7)], ids=["straight", "chords"])
def test_states_on_disk_are_read_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    record("plain", 40, path=tmp_path / "run")
    run, read, plain = epk.load_trajectory(tmp_path / "run", make_net()), list[int](), StoredStates.__getitem__
    monkeypatch.setattr(StoredStates, "__getitem__", lambda self, state: read.append(state) or plain(self, state))
    a, b = (epk.Points(run.inputs, is_train) for is_train in (False, True))
    block = epk.gram_block(run, a, b, rule=RULE, path=path)
    assert len(read) <= 41 + 1  # one pass, and the state that the plan was made at
    diagonal = gram_diagonal_blocks(run, a, rule=RULE, path=path)
    monkeypatch.setattr(StateReader, "get", lambda self, state, keep: flat_weights(run, state, run.inputs))
    assert torch.equal(epk.gram_block(run, a, b, rule=RULE, path=path), block)
    assert torch.equal(gram_diagonal_blocks(run, a, rule=RULE, path=path), diagonal)


def in_threads(work: Callable[[], Tensor], count: int = 8) -> list[Tensor]:
    """Do the same work in several threads that start together."""
    barrier = Barrier(count)

    def task() -> Tensor:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(task) for _ in range(count)]]


def test_one_module_in_several_threads_gives_wrong_numbers() -> None:
    """The negative control: `functional_call` writes the parameters into the module that it is given."""
    case = make_case("relu", steps=1)
    model, X, ready = case.trajectory.model, case.test, Barrier(2)
    module, params = copy.deepcopy(model.module), [case.trajectory.weights(s) for s in (0, 1)]
    expected = [torch.func.functional_call(module, p, (X,)) for p in params]

    class Slow(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.nn.functional.linear:
                ready.wait(timeout=10)  # the other thread has written its parameters, too
            return func(*args, **(kwargs or {}))

    def both(call: Callable[[dict[str, Tensor]], Tensor]) -> list[bool]:
        def task(number: int) -> bool:
            with Slow():
                return torch.equal(call(dict(params[number])), expected[number])

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(task, range(2)))

    assert not all(both(lambda p: torch.func.functional_call(module, p, (X,))))
    assert all(both(lambda p: model(p, X)))


def test_a_plan_and_a_variant_are_made_once() -> None:
    case, spec = make_case("relu", steps=1), TensorSpec(torch.float32, torch.device("cpu"))
    model = case.trajectory.model_for(case.test)
    for made in (lambda: plan_for(case.trajectory, model).plan, lambda: case.trajectory.model.variant(spec)):
        assert len({int(number) for number in in_threads(lambda made=made: torch.tensor(id(made())))}) == 1


def test_fused_attention_stays_off_until_the_last_thread_is_done() -> None:
    before, second = torch.backends.mha.get_fastpath_enabled(), disable_fused_attention()
    with disable_fused_attention():
        second.__enter__()
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled() == before
