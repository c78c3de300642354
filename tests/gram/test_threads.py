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
from epk_gp.quadrature.rules import Rule
from helpers import Case, make_case

THREADS = 8


def in_threads(work: Callable[[], Tensor], count: int = THREADS) -> list[Tensor]:
    """Do the same work in several threads that start together."""
    barrier = Barrier(count)

    def task() -> Tensor:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(task) for _ in range(count)]]


def block(case: Case, rule: Rule) -> Tensor:
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    return epk.gram_block(case.trajectory, a, b, rule=rule)


RULE = epk.gauss_legendre(2)
WORK: dict[str, Callable[[Case], Tensor]] = {
    "gram_block": lambda case: block(case, RULE),
    "adaptive": lambda case: block(case, epk.adaptive(1e-8)),
    "network_outputs": lambda case: epk.network_outputs(case.trajectory, case.test),
    "reconstruct": lambda case: epk.reconstruct(case.trajectory, case.test).outputs,
    "attribute": lambda case: epk.attribute(case.trajectory, case.test, rule=RULE).samples,
}


@pytest.mark.slow
@pytest.mark.parametrize(("work", "name"), [*((work, "cnn") for work in WORK), ("attribute", "transformer")])
def test_threads_change_nothing(work: str, name: str) -> None:
    """From a plan that is not made yet: all threads need it at once."""
    case = make_case(name, steps=2)
    found = in_threads(lambda: WORK[work](case))
    expected = WORK[work](make_case(name, steps=2))
    assert all(torch.equal(result, expected) for result in found)


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
