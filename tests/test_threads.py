"""Every public function gives the same bytes from several threads at once as from one, and leaves nothing behind."""

import gc
import linecache
import re
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_faults import CALLS, KERNELS, Shared, count_faults, expected_results, outcome, share
from thread_tools import THREADS, at_once, switching_often
from torch import Tensor, nn

from epk_gp.autodiff import verification
from epk_gp.autodiff.verification import passes_check, plan_for
from epk_gp.core.show import CertificateWarning
from epk_gp.core.torch_overrides import (
    FlopCount,
    disable_fused_attention,
    filter_own_warnings,
    forward_mode,
    quiet_checkpoints,
)
from epk_gp.estimator import draw_from
from epk_gp.kernels.blocks import BlockCache
from helpers import make_case


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Shared]:
    return cache(lambda name, network="relu": share(network, tmp_path_factory.mktemp(name)))


# Calls of some milliseconds, one of each kind: the others make the same passes, and are slow in 8 threads.
QUICK = {
    "gram_block", "gram_block, fewer states", "block_per_class", "diagonal_blocks", "network_outputs",
    "EPKKernel full", "EPKKernel independent normalized",
    "leave_one_out", "Trajectory", "load_trajectory", "check_run", "train",
}  # fmt: skip
# The kernel's other outputs, and a report, which makes the passes of other calls; `make faults` takes all.
REPEATED = {f"EPKKernel {name}" for name in KERNELS} - QUICK | {"write_report"}
DIFFERENT = [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS if c not in REPEATED]


@pytest.mark.parametrize("call", DIFFERENT)
def test_threads_get_the_bytes_that_one_gets(call, shares):
    """Eight threads, and four for what takes longer."""
    expected, together, count = (
        outcome(call, shares("alone")),
        shares("together"),
        THREADS if call in QUICK else THREADS // 2,
    )
    with switching_often():
        assert at_once([lambda: outcome(call, together)] * count) == [expected] * count
    assert CertificateWarning not in [kind for _, _, kind, *_ in warnings.filters]


@pytest.mark.types
def test_every_call_takes_and_returns_what_its_annotations_say(shares):
    """`make test-types` checks them: every public function is called once."""
    for name, call in CALLS.items():
        assert call(shares("alone")) is not None, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer"])  # `make faults` takes all networks
def test_many_calls_at_once_on_a_new_run_change_nothing(name):
    """In another order in each thread, from a network of which nothing is known yet; `make faults` takes all calls."""
    calls = tuple(call for call in CALLS if call in QUICK | {"attribute"})
    count = count_faults(name, calls, expected_results(name, calls), count=3, seed=0)
    assert count.calls == 3 * len(calls)
    assert count.faults == []


def test_threads_that_wait_for_each_other_are_seen():
    """The control of the tests above: a deadlock is an error, and a wrong result is counted."""
    never = threading.Event()
    with pytest.raises(TimeoutError, match="2 of 2 threads did not end"):
        at_once([never.wait, never.wait], seconds=0.05)
    never.set()


@pytest.mark.slow
def test_a_wrong_result_is_counted():
    calls = ("network_outputs", "load_trajectory")
    expected = expected_results("linear", calls)
    assert count_faults("linear", calls, expected, count=2).faults == []
    wrong = {**expected, "network_outputs": ()}
    assert count_faults("linear", calls, wrong, count=2).faults == ["linear, network_outputs: other bytes"] * 2


@pytest.mark.parametrize("call", ["train", "network_outputs", "load_trajectory"])
def test_no_call_evaluates_fused_attention(call, shares, monkeypatch):
    """Alone it would have other bytes than beside a thread that has switched it off."""
    shared, allowed, original = shares("attention", "transformer"), [], nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        allowed.append(torch.backends.cuda.flash_sdp_enabled())
        return original(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    CALLS[call](shared)
    assert allowed
    assert not any(allowed)


def test_switches_of_attention_outlive_no_interrupted_computation():
    """Not even if the interrupt comes before the computation could say that it is done."""
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()
    interrupted = disable_fused_attention()
    interrupted.__enter__()
    assert not torch.backends.cuda.flash_sdp_enabled()
    del interrupted
    with disable_fused_attention():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()) == before


def test_a_level_of_forward_mode_that_was_left_open_is_closed(monkeypatch):
    exit_level = torch.autograd.forward_ad.exit_dual_level

    def interrupted(**kwargs: Any) -> None:
        raise KeyboardInterrupt("at the end")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.forward_ad, "exit_dual_level", interrupted)
        with pytest.raises(KeyboardInterrupt, match="at the end"), forward_mode():
            pass
    with forward_mode():
        assert torch.autograd.forward_ad.unpack_dual(torch.ones(1)).tangent is None
    assert torch.autograd.forward_ad.exit_dual_level is exit_level


def test_operations_are_counted_without_hooks_at_the_modules_of_other_threads() -> None:
    with FlopCount() as counter:
        nn.Linear(4, 3)(torch.ones(2, 4))
        assert not nn.modules.module._global_forward_pre_hooks
    assert counter.total == 2 * 2 * 4 * 3


LOCKS = re.compile(r"\s*with .*(\block|_lock|\b_[A-Z_]{4,})\b")


def interrupt(work: Callable[[], object], line: int) -> bool:
    """Raise KeyboardInterrupt before a line of the package or of torch's parametrisation; return whether it was.

    Context managers of torch.func and of torch's function modes are left out: one that does not run to its end leaves
    torch's levels open. So are lines that take or release a lock, where Python raises no interrupt.
    """
    parts = ("epk_gp", "stateless", "_named_member_accessor", "forward_ad", "contextlib")
    left = line

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal left
        file = frame.f_code.co_filename
        if "contextlib" in file and hasattr(manager := frame.f_locals.get("self"), "gen"):
            file += manager.gen.gi_code.co_filename
        if (
            "_functorch" in file
            or Path(file).parts[-2:] == ("torch", "overrides.py")
            or not any(part in file for part in parts)
        ):
            return None
        if event != "line" or LOCKS.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
            return trace
        left -= 1
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("call", ["EPKKernel full", "network_outputs", "attribute, adaptive"])
def test_an_interrupt_anywhere_leaves_nothing_wrong_behind(call, tmp_path):
    expected = expected_results("tied", (call,))[call]
    shared = share("tied", tmp_path)
    lines = [2**n for n in range(1, 15)]
    assert sum(interrupt(lambda: CALLS[call](shared), line) for line in lines) > 10
    gc.collect()  # a generator that was cut off in a cycle holds its lock, for which other threads would wait
    assert outcome(call, shared) == expected
    assert at_once([lambda: outcome(call, shared)]) == [expected]  # no lock is left to this thread
    assert torch.backends.mha.get_fastpath_enabled()


def test_an_interrupt_anywhere_hides_no_warning():
    def work() -> None:
        with quiet_checkpoints():
            warnings.warn(message, UserWarning, stacklevel=1)

    message = "None of the inputs have requires_grad=True. Gradients will be None"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sum(interrupt(work, line) for line in range(1, 40)) > 10
        work()
        assert not caught
        warnings.warn(message, UserWarning, stacklevel=1)
    assert len(caught) == 1


def test_a_module_that_was_interrupted_is_not_used_again():
    """Torch may leave parameters of the interrupted call in it."""
    case = make_case("tied", steps=1)
    model, params = case.trajectory.model, case.trajectory.weights(1)
    expected = model(params, case.test)
    used = model._of_thread.module
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape|size"):
        model(params, case.test[:, :3])
    assert "module" not in model._of_thread.__dict__
    used.a.weight = nn.Parameter(torch.zeros_like(used.a.weight))  # what an interrupt leaves at worst
    assert torch.equal(model(params, case.test), expected)


def test_a_warning_in_another_thread_is_no_error_of_it():
    case = make_case("tanh", steps=1)
    with quiet_checkpoints():  # its filter stays
        before = list(warnings.filters)
    inside, done = threading.Event(), threading.Event()

    def attempt() -> tuple[Tensor, Tensor]:
        inside.set()
        done.wait(timeout=10)
        return torch.zeros(1), torch.zeros(1)

    def other() -> None:
        inside.wait(timeout=10)
        warnings.warn("of another thread", UserWarning, stacklevel=1)
        done.set()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert at_once([lambda: passes_check(attempt), other]) == [True, None]
    assert warnings.filters == before
    plan_for(case.trajectory, case.trajectory.model_for(case.test))
    assert warnings.filters == before


def test_two_checks_that_end_as_they_began_leave_the_filters_as_they_were():
    """The first one in is the first one out: `catch_warnings` would leave the first one's filters for good."""
    before = list(warnings.filters)
    first, second = filter_own_warnings("error", Warning), filter_own_warnings("error", Warning)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(UserWarning, match="still an error"):
        warnings.warn("still an error", UserWarning, stacklevel=1)
    second.__exit__(None, None, None)
    assert warnings.filters == before


@pytest.mark.parametrize("error", [
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError("no memory"),
    KeyboardInterrupt("stopped"),
])  # fmt: skip
def test_a_plan_of_a_failed_check_is_not_kept(error, monkeypatch):
    case = make_case("tanh", steps=1)
    model = case.trajectory.model_for(case.test)

    def fails(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(verification, "_slopes", fails)
        with pytest.raises(type(error), match="memory|stopped"):
            plan_for(case.trajectory, model)
    assert not model.cache.plans
    assert plan_for(case.trajectory, model).plan.supports_jvp


def test_a_cache_can_be_measured_while_it_is_filled():
    cache = BlockCache(1 << 30)
    stop = threading.Event()

    def fill() -> None:
        for number in range(1000):
            cache.put(number, torch.zeros(1))
        stop.set()

    def measure() -> None:
        while not stop.is_set():
            assert cache.num_bytes % 4 == 0

    with switching_often():
        assert at_once([fill, measure]) == [None, None]


def test_random_numbers_of_ones_own_are_those_of_the_global_generator():
    def build() -> list[Tensor]:
        net = nn.Sequential(nn.Linear(4, 5), nn.Conv1d(1, 2, 3), nn.Embedding(4, 3), nn.LSTM(3, 4))
        nn.init.trunc_normal_(net[0].weight)
        nn.init.orthogonal_(net[3].weight_ih_l0)
        drawn = [torch.rand(3), torch.randn(2), torch.randint(0, 9, (4,)), torch.randperm(5), torch.rand(2).bernoulli()]
        return [*(p.detach().clone() for p in net.parameters()), *drawn]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected = build()
    before = torch.get_rng_state()
    with draw_from(torch.Generator().manual_seed(3)):
        found = build()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
