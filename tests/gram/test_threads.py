"""One run in several threads at once gives the same bytes as in one thread."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

import epk_gp as epk
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.plans import TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention
from helpers import Case, make_case

THREADS = 8
NAMES = ("relu", "cnn", "cosine", "transformer")


def in_threads(work: Callable[[], Tensor], count: int = THREADS) -> list[Tensor]:
    """Do the same work in several threads that start together."""
    barrier = Barrier(count)

    def task() -> Tensor:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(task) for _ in range(count)]]


def fixed(case: Case) -> Tensor:
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    return epk.gram_block(case.trajectory, a, b, rule=epk.gauss_legendre(2))


def own_nodes(case: Case) -> Tensor:
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    return epk.gram_block(case.trajectory, a, b, rule=epk.adaptive(1e-8))


WORK: dict[str, Callable[[Case], Tensor]] = {
    "gram_block": fixed,
    "adaptive": own_nodes,
    "network_outputs": lambda case: epk.network_outputs(case.trajectory, case.test),
    "reconstruct": lambda case: epk.reconstruct(case.trajectory, case.test).outputs,
    "attribute": lambda case: epk.attribute(case.trajectory, case.test, rule=epk.gauss_legendre(2)).samples,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tanh", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES)])
@pytest.mark.parametrize("work", WORK)
def test_threads_change_nothing(name: str, work: str) -> None:
    """From a plan that is not made yet: all threads need it at once."""
    case = make_case(name, steps=2)
    found = in_threads(lambda: WORK[work](case))
    expected = WORK[work](make_case(name, steps=2))
    assert all(torch.equal(result, expected) for result in found)


def test_one_module_in_several_threads_gives_wrong_numbers() -> None:
    """The negative control: `functional_call` writes the parameters into the module that it is given."""
    case = make_case("relu", steps=1)
    module, X = copy.deepcopy(case.trajectory.model.module), case.test
    params = [case.trajectory.weights(s) for s in (0, 1)]
    expected = [torch.func.functional_call(module, p, (X,)) for p in params]
    ready = Barrier(2)

    class Slow(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.nn.functional.linear:
                ready.wait(timeout=10)  # the other thread has written its parameters, too
            return func(*args, **(kwargs or {}))

    def task(number: int) -> Tensor:
        with Slow():
            return torch.func.functional_call(module, dict(params[number]), (X,))

    def safe(number: int) -> Tensor:
        with Slow():
            return case.trajectory.model(params[number], X)

    with ThreadPoolExecutor(2) as pool:
        shared = list(pool.map(task, range(2)))
        own = list(pool.map(safe, range(2)))
    assert not all(torch.equal(found, wanted) for found, wanted in zip(shared, expected, strict=True))
    assert all(torch.equal(found, wanted) for found, wanted in zip(own, expected, strict=True))


def test_a_plan_and_a_variant_are_made_once() -> None:
    case = make_case("relu", steps=1)
    model = case.trajectory.model_for(case.test)
    plans = set(in_threads(lambda: torch.tensor(id(plan_for(case.trajectory, model).plan))))
    assert len({int(plan) for plan in plans}) == 1
    spec = TensorSpec(torch.float32, torch.device("cpu"))
    variants = in_threads(lambda: torch.tensor(id(case.trajectory.model.variant(spec))))
    assert len({int(variant) for variant in variants}) == 1


def test_fused_attention_stays_off_until_the_last_thread_is_done() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    first, second = disable_fused_attention(), disable_fused_attention()
    with first:
        second.__enter__()
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled() == before
