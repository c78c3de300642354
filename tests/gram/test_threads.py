"""What is made once for all threads, and why each has a module of its own; tests/test_threads.py compares bytes."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

from epk_gp.autodiff.verification import plan_for
from epk_gp.core.plans import TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention
from helpers import make_case


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
