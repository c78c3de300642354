"""Fixtures of the kernel's tests: one small run, and a count of what the path kernel computes."""

from dataclasses import dataclass, field

import pytest

from epk_gp.gram.path_kernel import PathKernel
from kernel_cases import make_run


@pytest.fixture(scope="module")
def trajectory():
    return make_run()


@dataclass
class Counter:
    """How many points the path kernel was evaluated at, and by which methods."""

    points: int = 0
    calls: list = field(default_factory=list)


@pytest.fixture
def counter(monkeypatch):
    count = Counter()

    def counting(name):
        original = getattr(PathKernel, name)

        def wrapped(kernel, *sets, **options):
            count.points += sum(len(points) for points in sets)
            count.calls.append(name)
            return original(kernel, *sets, **options)

        return wrapped

    for name in ("block", "block_per_class", "trace_block", "diagonal_blocks"):
        monkeypatch.setattr(PathKernel, name, counting(name))
    return count
