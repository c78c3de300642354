"""Two processes and one take turns on a whole block; pieces of nothing; another version takes turns without any."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import typer
from processes import Worker, current_python
from torch import nn

import epk_gp as epk
from epk_gp.core.checks import ComputeOptions
from epk_gp.work.run import Piece, Sums
from epk_gp.work.run import run as carry_out
from problems import epk_problems


@dataclass(frozen=True)
class Empty:
    """A computation of nothing, in so many pieces."""

    count: int
    piece_bytes: int = 1
    device: Any = "cpu"

    @property
    def pieces(self) -> list[Piece]:
        """List the pieces."""
        return [Piece(f"piece-{n}", (n,)) for n in range(self.count)]

    def identity(self) -> str:
        """Return a name."""
        return "empty"

    def check(self) -> None:
        """Nothing is on disk."""

    def compute(self, place: tuple[int, ...], saved: Sums) -> Iterator[Sums]:
        """Return the place."""
        yield Sums({"value": torch.tensor(place)}, steps=1)


def empty_pieces(executor: Any, count: int) -> tuple[float, float]:
    """Have empty pieces computed; return the seconds of each by the clock, and of the owner's processor."""
    options = ComputeOptions(executor=executor)
    list(carry_out(Empty(1), options, "empty"))
    before, owned = time.perf_counter(), time.process_time()
    list(carry_out(Empty(count), options, "empty"))
    return (time.perf_counter() - before) / count, (time.process_time() - owned) / count


@contextmanager
def pool(count: int) -> Iterator[Executor]:
    """Give a pool of spawned processes."""
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@contextmanager
def dask(count: int) -> Iterator[Any]:
    """Give a client of a Dask cluster on this machine, whose scheduler is in this process."""
    from distributed import Client, LocalCluster  # noqa: PLC0415  comes with the extra 'distributed'

    with (
        LocalCluster(n_workers=count, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


def seconds_of_owner(count: int = 500) -> float:
    """Measure the processor time of a job's owner and its scheduler for an empty piece."""
    with dask(1) as client:
        return empty_pieces(client, count)[1]


def compare(executor: Executor, count: int, rounds: int, steps: int, budget: int) -> None:
    """Let this process and the workers take turns on problem a's whole block, in float64."""
    problem = replace(next(p for p in epk_problems() if p.name.startswith("a, ") and p.dtype == "float64"), steps=steps)
    arrays = {name: torch.from_numpy(value) for name, value in problem.arrays().items()}
    net = nn.Sequential(nn.Linear(*problem.widths[:2]), nn.ReLU(), nn.Linear(*problem.widths[1:])).double()
    net.load_state_dict({name: arrays[name] for name in net.state_dict()})
    labels = torch.arange(problem.m) % problem.widths[-1]
    run = epk.train(net, arrays["Y"], labels, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=steps)
    a, b = epk.Points(arrays["X"], is_train=False), epk.Points(arrays["Y"], is_train=True)
    rule, seconds = epk.gauss_legendre(problem.nodes), dict[bool, list[float]]({False: [], True: []})
    results = {}
    for number in range(rounds + 1):  # the first round is not timed: it makes the workers warm
        for by_workers in (False, True) if number % 2 else (True, False):
            begun = time.perf_counter()
            results[by_workers] = epk.gram_block(
                run, a, b, head="logits", rule=rule, memory_budget=budget, executor=executor if by_workers else None
            )
            if number:
                seconds[by_workers].append(time.perf_counter() - begun)
    if not torch.equal(results[False], results[True]):
        raise RuntimeError("workers must return the bytes of this process: they did not.")
    one, many = statistics.median(seconds[False]), statistics.median(seconds[True])
    ratios = [x / y for x, y in zip(seconds[False], seconds[True], strict=True)]
    typer.echo(
        f"problem a, {steps} steps, {budget >> 20} MiB: one process {1e3 * one:.0f} ms, {count} workers "
        f"{1e3 * many:.0f} ms, {one / many:.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f} in {rounds} "
        "rounds)"
    )


def compare_versions(before: Path, rounds: int) -> None:
    """Let this version and another take turns on problem a's whole block, without an executor, in processes."""
    problem = next(p for p in epk_problems() if p.name.startswith("a, ") and p.dtype == "float64")
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        contenders, arrays = {}, f"{folder}/arrays.npz"
        np.savez(arrays, **problem.arrays())
        try:
            for name, path in (("this version", Path(__file__).parents[1]), ("the other", before)):
                os.environ["PYTHONPATH"] = str(path)
                description = problem.description(arrays=arrays)
                contenders[name] = Worker(current_python(), "epk_gp_block.py", description, Path(folder), name)
            for number in range(2 * rounds):
                for name in sorted(contenders, reverse=bool(number % 2)):
                    contenders[name].take_turn(60.0)
        finally:
            for worker in contenders.values():
                worker.close()
    this, other = (contenders[name].seconds for name in ("this version", "the other"))
    ratios = [x / y for x, y in zip(this, other, strict=True)]
    typer.echo(
        f"without an executor: {1e3 * statistics.median(this):.1f} ms, before {1e3 * statistics.median(other):.1f} ms; "
        f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
