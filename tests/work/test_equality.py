"""Workers give the bytes of a call without them, whoever carries the pieces and in whatever order."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from distributed_cases import CALLS, Shuffled, alone, run_of, same

QUICK = ("block", "momentum", "features")  # the run-time checks of shapes make many small steps slow
CASES = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)


@CASES
def test_pieces_in_any_order_give_the_bytes_of_none(name):
    call, executor = CALLS[name], Shuffled()
    assert same(call(run_of(name), executor=executor), alone(name))
    assert len(executor.order) > 1
    assert executor.order != sorted(executor.order)


@CASES
def test_threads_give_the_bytes_of_none(name):
    call = CALLS[name]
    with ThreadPoolExecutor(2) as executor:
        assert same(call(run_of(name), executor=executor), alone(name))


@CASES
def test_processes_give_the_bytes_of_none(name, processes):
    call = CALLS[name]
    assert same(call(run_of(name), executor=processes), alone(name))
