"""Count the files that a call goes through, and its deepest stack: `gram_block`, `attribute` and one recorded step.

Each call runs twice, and the second is counted: the first also plans how the network is differentiated. The step that
is counted is one whose gradient is checked, which not every step is.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import epk_gp as epk

PACKAGE = str(Path(epk.__file__).parent)


def traced(call: Callable[[], Any]) -> tuple[list[str], int]:
    """Return the files of the package whose functions a call enters, and the deepest stack of such functions."""
    files, deepest = set[str](), 0

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal deepest
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        files.add(file.removeprefix(PACKAGE + "/"))
        depth, outer = 0, frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(PACKAGE)
            outer = outer.f_back
        deepest = max(deepest, depth)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(files), deepest


def recorded_run(make_optimizer: Callable[[Any], torch.optim.Optimizer], *layers: nn.Module) -> Any:
    """Record a small network, and return its recorder's trajectory, its inputs and what one more step goes through."""
    torch.manual_seed(0)
    X, y = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 2
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 2)).double()
    optimizer = make_optimizer(net.parameters())
    with epk.Recorder(net, optimizer, X, y, check_every=1) as recorder:

        def step() -> None:
            batch = torch.arange(10)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()

        for _ in range(5):
            step()
        seen = traced(step)
    return recorder.trajectory, X, seen


def traces() -> dict[str, tuple[list[str], int]]:
    """Return the files and the deepest stack of each call."""
    descent, X, step = recorded_run(lambda p: torch.optim.SGD(p, lr=0.1))
    adaptive, _, _ = recorded_run(lambda p: torch.optim.AdamW(p, lr=0.01), nn.Dropout(0.2))
    a, b = (epk.Points(X[:3], is_train=is_train) for is_train in (False, True))
    calls = {
        "gram_block, SGD": lambda: epk.gram_block(descent, a, b),
        "attribute, AdamW with dropout": lambda: epk.attribute(adaptive, X[:3]),
    }
    result = {}
    for name, call in calls.items():
        call()
        result[name] = traced(call)
    return result | {"one recorded step": step}


if __name__ == "__main__":
    for name, (files, deepest) in traces().items():
        print(f"{name:<32}{len(files):>4} files, deepest stack {deepest:>3}")
        if "-v" in sys.argv:
            print("    " + " ".join(files))
