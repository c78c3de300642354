"""What the tests of executors share, importable by workers: small runs, long calls, executors and a computation."""

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from thread_tools import content
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.core.checks import ComputeOptions
from epk_gp.kernel_machine.axes import by_label, by_layer, by_sample, by_step
from epk_gp.work.run import Piece, Sums, run
from helpers import gram_block_per_class, gram_diagonal_blocks

RULE, SMALL = epk.gauss_legendre(2), 1 << 20
OVER = "over"
COUNT = 6  # squares that tests of faults compute
RESULT = [n * n for n in range(COUNT)]
WIDTH, POINTS, STEPS = 40, 10, 18  # steps: ranges of 16 and 2
LONG = 200  # steps: ranges of 64 where few points go through several steps together


def make_net(extra: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, WIDTH), *([] if extra is None else [extra]), nn.Tanh(), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers).to(dtype)


def record(kind: str, steps: int = STEPS, dtype: torch.dtype = torch.float64, path: Path | None = None) -> Any:
    """A run of 10 points: "plain", "momentum", "adam", "dropout" or "batch_norm"."""
    net = make_net({"dropout": nn.Dropout(0.3), "batch_norm": nn.BatchNorm1d(WIDTH)}.get(kind), dtype)
    momentum = {"lr": 0.05, "momentum": 0.9} if kind == "momentum" else {"lr": 0.1}
    optimizer = torch.optim.SGD(net.parameters(), **momentum)
    if kind == "adam":
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    X, y = inputs(POINTS, 2).to(dtype), torch.arange(POINTS) % 3
    return epk.train(net, X, y, optimizer=optimizer, steps=steps, batch_size=5, folder=path)


@lru_cache
def recorded(kind: str, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Any:
    return record(kind, steps, dtype)


def inputs(count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(count: int, dtype: torch.dtype = torch.float64) -> epk.Points:
    return epk.Points(inputs(count).to(dtype), torch.arange(count) % 3 > 0)


def same(one: Any, other: Any) -> bool:
    return content(one) == content(other)


@dataclass(frozen=True)
class Call:
    name: str
    kind: str
    compute: Callable[..., Any]
    dtype: torch.dtype = torch.float64
    steps: int = STEPS

    def __call__(self, run: Any, **options: Any) -> Any:
        return self.compute(run, **options)


def _block(left: int, right: int = 0, call: Callable[..., Any] = epk.gram_block, **fixed: Any) -> Callable[..., Any]:
    def compute(run: Any, **options: Any) -> Tensor:
        a = mixed(left, run.inputs.dtype)
        return call(run, a, mixed(right) if right else a, **{"rule": RULE, **fixed, **options})

    return compute


def _explained(call: Callable[..., Any], count: int, **fixed: Any) -> Callable[..., Any]:
    return lambda run, **options: call(run, inputs(count), memory_budget=SMALL, **fixed, **options)


def _retrain(run: Any, **options: Any) -> Any:
    weights = torch.rand(25, POINTS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return epk.retrain(run, weights, memory_budget=SMALL, **options)


def _posterior(run: Any, **options: Any) -> Any:
    posterior = epk.LogitGP(run, rule=RULE, **options).logit_posterior(inputs(6))
    return posterior.mean, posterior.covariance


def _many(run: Any, **options: Any) -> Any:
    groupings = [(by_sample(run), by_layer(run)), (by_label(run),), (by_step(run),)]
    return epk.attribute(run, inputs(48), by=groupings, rule=RULE, memory_budget=SMALL, **options)


def _trace(run: Any, **options: Any) -> Tensor:
    return epk.PathKernel(run, "logits", RULE).trace_block(mixed(5), mixed(4), **options)


_ATTRIBUTE = _explained(epk.attribute, 48, rule=RULE)
_ADAPTIVE = epk.adaptive(tol=1e-6)
_OF_ROWS = epk.RowFunction(lambda z, y: z.log_softmax(dim=1) * y, torch.arange(144.0).double().view(48, 3).sin())
CALLS = {
    call.name: call
    for call in (
        Call("block", "plain", _block(5, 4)),
        Call("symmetric", "plain", _block(5)),
        Call("chords", "plain", _block(5, path=epk.chords(3))),
        Call("per_class", "momentum", _block(5, 4, gram_block_per_class)),
        Call("trace", "plain", _trace),
        Call("tiles", "plain", _block(100, rule=epk.QuadratureRule.left_endpoint(), memory_budget=SMALL), steps=2),
        Call("adaptive", "plain", _block(2, 1, rule=_ADAPTIVE), steps=LONG),
        Call("float32", "plain", _block(9, accumulate=torch.float64), torch.float32),
        Call("attribute", "plain", _ATTRIBUTE, steps=3),
        Call("classes", "momentum", _explained(epk.attribute, 150, rule=RULE, classes=torch.arange(150) % 3), steps=3),
        Call("momentum", "momentum", _ATTRIBUTE, steps=3),
        Call("adam", "adam", _ATTRIBUTE, steps=3),
        Call("dropout", "dropout", _ATTRIBUTE, steps=3),
        Call("batch_norm", "batch_norm", _ATTRIBUTE, steps=3),
        Call("function", "momentum", _explained(epk.attribute, 48, rule=RULE, function=_OF_ROWS), steps=3),
        Call("many", "momentum", _many, steps=3),
        Call("many_plain", "plain", _many, steps=3),
        Call("influence", "adam", _explained(epk.influence, 9), steps=3),
        Call("retrain", "adam", _retrain, steps=3),
        Call("posterior", "plain", _posterior),
        Call("diagonal", "plain", lambda run, **o: gram_diagonal_blocks(run, mixed(9), rule=RULE, **o), steps=LONG),
        Call("reconstruct", "plain", _explained(epk.reconstruct, 4, rule=_ADAPTIVE), steps=LONG),
        Call("reconstruct_momentum", "momentum", _explained(epk.reconstruct, 300, rule=_ADAPTIVE), steps=2),
        Call("features", "plain", lambda run, **o: epk.path_features(run, inputs(2100), 16, nodes=4, num_probe=0, **o)),
    )
}


def run_of(name: str) -> Any:
    call = CALLS[name]
    return recorded(call.kind, call.steps, call.dtype)


@lru_cache
def alone(name: str) -> Any:
    return CALLS[name](run_of(name))


class Pending:
    def __init__(self, pool: "Shuffled", call: Callable[[], Any], place: Any) -> None:
        self.pool, self.call, self.place, self.found = pool, call, place, list[Any]()

    def result(self) -> Any:
        if not self.found:
            self.pool.work()
        return self.found[0]

    def cancel(self) -> bool:
        return True


class Shuffled:
    """An executor that works when a result is asked for: on all calls at once, in a random order."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.waiting, self.order = random.Random(seed), list[Pending](), list[Any]()

    def submit(self, function: Callable[..., Any], *args: Any) -> Pending:
        self.waiting.append(Pending(self, lambda: function(*args), args[-1]))
        return self.waiting[-1]

    def work(self) -> None:
        self.random.shuffle(self.waiting)
        while self.waiting:
            pending = self.waiting.pop()
            self.order.append(pending.place)
            pending.found.append(pending.call())


class StopError(Exception):
    """What stands for a fault."""


class Stopping(Shuffled):
    """An executor that fails after some pieces: when a piece is submitted, or when its result is asked for."""

    def __init__(self, after: int, where: str) -> None:
        super().__init__()
        self.left, self.where = after, where

    def submit(self, function: Callable[..., Any], *args: Any) -> Pending:
        self.count("submit")
        pending = super().submit(lambda *args: self.count("result") or function(*args), *args)
        if self.where == "submit":
            pending.result()
        return pending

    def count(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left < 0:
                raise StopError(f"stopped in {where}")


@dataclass(frozen=True)
class Squares:
    """A computation for tests of faults: place (n,) gives n^2. Each computation is noted in a file of its piece."""

    notes: str  # folder of the files
    seconds: float = 0.0  # that a piece takes, until there is a file `OVER` in the folder
    fault: Callable[[int], None] | None = None  # called with the place before a piece is computed
    count: int = COUNT
    piece_bytes: int = 8
    device: ClassVar[torch.device] = torch.device("cpu")

    @property
    def pieces(self) -> list[Piece]:
        return [Piece(f"square-{n}", (n,)) for n in range(self.count)]

    def identity(self) -> str:
        return "squares"

    def check(self) -> None:
        """Nothing is on disk."""

    def compute(self, place: tuple[int, ...], saved: Sums) -> Iterator[Sums]:
        (n,) = place
        self._note(n, "begun")
        if self.fault is not None:
            self.fault(n)
        if not (Path(self.notes) / OVER).exists():
            time.sleep(self.seconds)
        self._note(n, "done")
        yield Sums({"value": torch.tensor([n * n])}, steps=1)

    def _note(self, n: int, what: str) -> None:
        first = Path(self.notes) / f"{os.getpid()}.worker"
        if not first.exists():
            first.touch()
        with (Path(self.notes) / f"{n}.txt").open("a") as stream:
            stream.write(f"{what} {os.getpid()}\n")

    def processes(self, seconds: float) -> list[int]:
        """All processes that began their first piece so long ago."""
        files, now = Path(self.notes).glob("*.worker"), time.time()
        return sorted(int(file.stem) for file in files if now - file.stat().st_mtime > seconds)

    def noted(self, n: int, what: str) -> list[int]:
        file = Path(self.notes) / f"{n}.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(what)]


def squares(work: Squares, executor: Any, folder: Path, count: int = COUNT) -> list[int]:
    options = ComputeOptions(executor=executor, checkpoint=folder)
    return [int(sums.added["value"]) for _, sums in run(replace(work, count=count), options, "squares")]


def exit_at(n: int) -> None:
    """End the worker in the middle of the third piece, as a kill does."""
    if n == 2:
        os._exit(1)
