"""A contender's process: sets a problem up, then runs it once for every line on its standard input.

Needs numpy only, so that it starts in every contender's own environment.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[], Any]


def serve(make: Callable[[dict[str, Any], dict[str, np.ndarray]], Run], order: tuple[int, ...] | None = None) -> None:
    """Answer each line "run" with seconds and peak memory; the first answer also writes the result to a file.

    Args:
        make: Function that takes the problem and its arrays, and returns a function that computes the result from the
            inputs every time it is called.
        order: Permutation that brings the axes of a block into the order (N, C, M, C).
    """
    problem = json.loads(Path(sys.argv[1]).read_text())
    with np.load(problem["arrays"]) as stored:
        arrays = dict(stored)
    before = time.perf_counter()
    run = make(problem, arrays)
    send({"ready": True, "bytes": _memory_bytes("VmRSS"), "seconds": time.perf_counter() - before})
    for number, line in enumerate(sys.stdin):
        if line.strip() != "run":
            break
        before = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - before
        peak = _memory_bytes("VmHWM")
        if not number and len(sys.argv) > 2:
            array = np.asarray(result)
            np.save(sys.argv[2], array if order is None or array.ndim != len(order) else array.transpose(order))
        send({"seconds": seconds, "peak_bytes": peak})


def _memory_bytes(which: str) -> int:
    """Return the memory of this process, current (VmRSS) or peak (VmHWM). `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split(f"{which}:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def send(answer: dict[str, Any]) -> None:
    """Write an answer as one line."""
    print(json.dumps(answer), flush=True)
