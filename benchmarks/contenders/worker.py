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
    """Answer each line "run" with seconds and peak memory, and the first one with the result in a file.

    Args:
        make: Gets the problem and its arrays, and gives a function that computes the result from the inputs again
            every time it is called.
        order: Axes of the result in the order (N, C, M, C), if it has another.
    """
    problem = json.loads(Path(sys.argv[1]).read_text())
    with np.load(problem["arrays"]) as stored:
        arrays = dict(stored)
    run = make(problem, arrays)
    say({"ready": True, "bytes": _memory_bytes("VmRSS")})
    for number, line in enumerate(sys.stdin):
        if line.strip() != "run":
            break
        before = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - before
        peak = _memory_bytes("VmHWM")
        if not number and len(sys.argv) > 2:
            found = np.asarray(result)
            np.save(sys.argv[2], found if order is None else found.transpose(order))
        say({"seconds": seconds, "peak_bytes": peak})


def _memory_bytes(which: str) -> int:
    """Read the process's own memory, now (VmRSS) or at most (VmHWM): `ru_maxrss` would begin with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split(f"{which}:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(answer: dict[str, Any]) -> None:
    """Write an answer's line."""
    print(json.dumps(answer), flush=True)
