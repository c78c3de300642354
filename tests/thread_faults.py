"""Count wrong results of one run in several threads at once: every public function, on many kinds of network."""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thread_calls import CALLS, NAMES, Shared, share
from thread_tools import SECONDS, THREADS, at_once, content, switching_often


@dataclass
class Count:
    calls: int
    faults: list[str]


def outcome(call: str, shared: Shared) -> object:
    try:
        return content(CALLS[call](shared))
    except Exception as error:
        return content(error)


def expected_results(name: str, calls: Sequence[str] = tuple(CALLS)) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        shared = share(name, Path(folder))
        return {call: outcome(call, shared) for call in calls}


def count_faults(
    name: str, calls: Sequence[str], expected: dict[str, object], *, count: int = THREADS, seed: int | None = None
) -> Count:
    """Make each call `count` times in as many threads, on a run of which nothing is known yet.

    Args:
        name: The network.
        calls: Names of calls; each thread makes all of them.
        expected: What they return in one thread.
        count: Number of threads.
        seed: Each thread makes the calls in a random order of its own; all in the given order if None.
    """
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        shared = share(name, Path(folder))

        def task(number: int) -> dict[str, object]:
            order = list(calls)
            if seed is not None:
                random.Random(seed * count + number).shuffle(order)
            found: dict[str, object] = {}
            for call in order:
                found[call] = outcome(call, shared)
            return found

        with switching_often():
            tasks = [lambda number=number: task(number) for number in range(count)]  # type: ignore[misc]
            results = at_once(tasks, seconds=max(SECONDS, 10 * len(calls)))  # a thread has a result after all its calls
    for result in results:
        if isinstance(result, BaseException):
            faults += [f"{name}: {result!r}"] * len(calls)
            continue
        for call, found in result.items():
            if found != expected[call]:
                error = isinstance(found, tuple) and isinstance(found[0], type)
                faults.append(f"{name}, {call}: {found if error else 'other bytes'}")
    return Count(count * len(calls), faults)


def count_thread_faults(rounds: int, names: Sequence[str] = NAMES) -> Count:
    """Make every call on every network in 8 threads, in another order in each.

    Args:
        rounds: How often, each time with fresh runs.
        names: The networks.

    Returns:
        The number of calls, and what was wrong.
    """
    total = Count(0, [])
    for name in names:
        expected = expected_results(name)
        for number in range(rounds):
            one = count_faults(name, tuple(CALLS), expected, seed=number)
            total.calls += one.calls
            total.faults += one.faults
    return total
