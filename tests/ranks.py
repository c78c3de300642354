"""Processes that train one network together on this machine, and the same loops in one process."""

import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import epk_gp as epk
from loops import data as points
from loops import record

TIMEOUT = 60.0  # seconds until ranks that wait for each other fail
POINTS, CLASSES, SIZE = 16, 3, 2

# Its processes begin with everything imported, in some milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["epk_gp.analysis.labels", "torch._dynamo", "torch.distributed.fsdp"])


data = partial(points, POINTS)


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Tanh(), nn.Linear(6, CLASSES)).double()


def on_ranks(size: int, program: Callable[..., Any], folder: Path, *args: Any, dies: bool = False) -> list[Any]:
    """Run a program, of a module that can be imported, in so many processes; return what each rank returned.

    They meet in a folder, where their results lie. Where one `dies`, all of them do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("rendezvous", *(f"error.{rank}" for rank in range(size))):
        (folder / file).unlink(missing_ok=True)
    ranks = [_CONTEXT.Process(target=_rank, args=(rank, size, program, folder, args)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT)
    for process in ranks:
        if process.is_alive():
            process.kill()
    if dies:
        assert all(process.exitcode for process in ranks)
        return []
    errors = [file.read_text() for file in sorted(folder.glob("error.*"))]
    assert [process.exitcode for process in ranks] == [0] * size, "\n".join(errors)
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(size)]


def each(calls: list[tuple[Any, ...]]) -> list[Any]:
    """Call several programs one after another, for one start of the processes: each a function and its arguments."""
    return [program(*arguments) for program, *arguments in calls]


def _rank(rank: int, size: int, program: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    torch.manual_seed(10 + rank)
    place, wait = f"file://{folder / 'rendezvous'}", timedelta(seconds=TIMEOUT / 2)
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=wait)
    try:
        torch.save(program(*args), folder / f"result.{rank}")
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        sys.stderr.flush()
        raise
    distributed.destroy_process_group()


@dataclass(frozen=True)
class Loop:
    """A training loop, as several processes run it and as one does.

    Attributes:
        layers: Layers in the middle of the network.
        parts: Number of backward passes of a step, all but the last of them without communication.
        sizes: How many rows of a batch each rank gets; None for equal parts.
        options: Options of the optimizer.
        module: Give the recorder the network inside of the wrapper, and the wrapper as `ddp`.
        pulls: Share of the way back to slow weights that every second step ends with (Lookahead).
        clip: Bound of the norm of the gradient.
    """

    layers: Callable[[], tuple[nn.Module, ...]] = tuple
    parts: int = 1
    sizes: tuple[int, ...] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: Any = None
    module: bool = False
    pulls: float = 0.0
    clip: float = float("inf")
    steps: int = 4
    batch_size: int = 8

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = network(*self.layers())
        return net, self.make_optimizer(net)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3} if self.options is None else self.options
        return self.optimizer(net.parameters(), **options)

    @torch.no_grad()
    def pull(self, net: nn.Module, slow: list[Tensor], step: int) -> None:
        for own, p in zip(slow, net.parameters(), strict=True) if self.pulls and step % 2 else ():
            p.copy_(own.lerp_(p, 1 - self.pulls))

    def batches(self, size: int) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(3)
        found = []
        for _ in range(self.steps):
            batch = torch.randperm(POINTS, generator=generator)[: self.batch_size]
            found.append(list(batch.split(list(self.sizes or [self.batch_size // size] * size))))
        return found


ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "options": {"lr": 0.02, "weight_decay": 0.1}}
PLAIN = Loop()
LOOPS = {
    "plain": PLAIN,
    "module": Loop(module=True),
    "dropout": Loop(lambda: (nn.Dropout(0.3),)),
    "batch_norm": Loop(lambda: (nn.BatchNorm1d(6),)),
    "accumulated": Loop(lambda: (nn.BatchNorm1d(6), nn.Dropout(0.2)), parts=2),
    "accumulated_batch_norm": Loop(lambda: (nn.BatchNorm1d(6),), parts=2),
    "uneven": Loop(sizes=(6, 2)),
    "adamw": Loop(**ADAMW),
    "lookahead": Loop(pulls=0.4),
    "clipped": Loop(clip=0.1234567),
}


def on_rank(name: str, **options: Any) -> Any:
    """Record a loop on this rank; return the trajectory on rank 0, and the error of asking for it on the others."""
    loop, (X, y) = LOOPS[name], data()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    net = network(*loop.layers())
    wrapped, optimizer = DistributedDataParallel(net), loop.make_optimizer(net)
    slow = [p.detach().clone() for p in net.parameters()] if loop.pulls else []
    torch.manual_seed(10 + rank)
    given: Any = {"net": net, "ddp": wrapped} if loop.module else {"net": wrapped}
    with epk.Recorder(optimizer=optimizer, X=X, y=y, check_every=1, **given, **options) as recorder:
        for step, batches in enumerate(loop.batches(size)):
            optimizer.zero_grad()
            parts = batches[rank].chunk(loop.parts)
            for number, rows in enumerate(parts, start=1):
                with nullcontext() if number == loop.parts else wrapped.no_sync():
                    (F.cross_entropy(wrapped(X[rows]), y[rows]) / loop.parts).backward()
                recorder.batch(rows, weight=1 / loop.parts)
            nn.utils.clip_grad_norm_(net.parameters(), loop.clip)
            optimizer.step()
            loop.pull(net, slow, step)
    if rank == 0:
        return recorder.trajectory
    try:
        return recorder.trajectory
    except RuntimeError as error:
        return str(error)


def in_one_process(name: str, size: int = SIZE, weights: Tensor | None = None) -> Any:
    """Record the loop that so many ranks run, pass by pass in one process; or only train, with weights of the samples.

    Each rank draws its own random numbers, and begins a step with the moving statistics of rank 0.
    """
    loop, (X, y) = LOOPS[name], data()
    net, optimizer = loop.make()
    slow = [p.detach().clone() for p in net.parameters()] if loop.pulls else []
    states = [torch.Generator().manual_seed(10 + rank).get_state() for rank in range(size)]
    recording = epk.Recorder(net, optimizer, X, y) if weights is None else nullcontext()
    with recording as recorder:
        for step, batches in enumerate(loop.batches(size)):
            optimizer.zero_grad()
            buffers = [value.clone() for value in net.buffers()]
            for rank in reversed(range(size)):
                for value, first in zip(net.buffers(), buffers, strict=True):
                    value.copy_(first)
                torch.set_rng_state(states[rank])
                for rows in batches[rank].chunk(loop.parts):
                    factor = 1 / (loop.parts * size)
                    c = 1.0 if weights is None else weights[rows]
                    (factor * c * F.cross_entropy(net(X[rows]), y[rows], reduction="none")).mean().backward()
                    if recorder is not None:
                        recorder.batch(rows, weight=factor)
                states[rank] = torch.get_rng_state()
            nn.utils.clip_grad_norm_(net.parameters(), loop.clip)
            optimizer.step()
            loop.pull(net, slow, step)
    return net.eval() if recorder is None else recorder.trajectory


def on_whole_batches(name: str) -> Any:
    """Record the loop of one process that computes the gradient of each step's whole batch at once."""
    loop = LOOPS[name]
    return record(*loop.make(), *data(), [batches[0] for batches in loop.batches(1)]).trajectory


def with_fault(fault: str) -> str:
    """Return what this rank says of a loop that goes wrong on rank 1 at step 2."""
    (X, y), rank = data(), distributed.get_rank()
    net, _ = PLAIN.make()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2 if fault == "lr" and rank else 0.1)
    X = X + 1 if fault == "data" and rank else X
    try:
        with epk.Recorder(wrapped, optimizer, X, y, check_every=1) as recorder:
            for step, batches in enumerate(PLAIN.batches(SIZE)):
                now, rows = fault if (rank, step) == (1, 2) else "none", batches[rank]
                optimizer.zero_grad()
                own = wrapped.module if fault == "module" else wrapped
                F.cross_entropy(own(X[rows]), y[rows]).backward()
                if now == "broken":
                    vars(recorder._stretch._passes)["step"] = lambda *_: torch.zeros(2) @ torch.zeros(3)
                if now != "silent":
                    recorder.batch({"shuffled": rows.flip(0), "fewer": rows[1:]}.get(now, rows))
                if now == "edit":
                    net[0].weight.data[0, 0] += 1e-3
                optimizer.step()
    except (ValueError, RuntimeError) as error:
        return f"{recorder.num_steps} {error}" if fault != "data" else str(error)
    return "nothing"


def unwrapped_when_recorded() -> str:
    """Return what a recorder says that was made before the network was wrapped."""
    X, y = data()
    net, optimizer = PLAIN.make()
    rows = PLAIN.batches(SIZE)[0][distributed.get_rank()]
    with epk.Recorder(net, optimizer, X, y) as recorder:
        wrapped = DistributedDataParallel(net)
        F.cross_entropy(wrapped(X[rows]), y[rows]).backward()
        recorder.batch(rows)
        try:
            optimizer.step()
        except epk.StepMismatchError as error:
            return str(error)
    return "nothing"


def refusal(net: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> str:
    """Return what a recorder says of a network and its optimizer before the training."""
    try:
        epk.Recorder(net, optimizer or torch.optim.SGD(net.parameters(), lr=0.1), *data(), **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def sharded_vocabulary() -> str:
    """Some of the outputs of the last layer are on each rank."""
    net, mesh = network(), init_device_mesh("cpu", (SIZE,))
    parallelize_module(net, mesh, {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    return refusal(net)


def sharded_weights() -> str:
    """FSDP2."""
    return refusal(fully_shard(network()))


def sharded_state() -> str:
    """Each rank has the state of some parameters."""
    of_torch, net = importlib.import_module("torch.distributed.optim"), network()  # warns when it is imported
    optimizer = of_torch.ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.02)
    return refusal(DistributedDataParallel(net), optimizer)


def another_wrapper() -> str:
    """`ddp=` holds another network."""
    return refusal(network(), ddp=DistributedDataParallel(network()))


def with_join() -> str:
    """Return what this rank says of a loop whose ranks have other numbers of batches."""
    (X, y), rank = data(), distributed.get_rank()
    net = network()
    wrapped, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(wrapped, optimizer, X, y) as recorder, wrapped.join():
        for rows in PLAIN.batches(SIZE)[0][: 2 - rank]:
            F.cross_entropy(wrapped(X[rows]), y[rows]).backward()
            recorder.batch(rows)
            with pytest.raises(epk.StepMismatchError) as error:
                optimizer.step()
            return str(error.value)
    return "nothing"


def resumable(run: Path, death: int | None = None) -> Any:
    """Record a run that is resumed if it is there; each rank draws its rows, and rank 1 dies after a step."""
    (X, y), rank = data(), distributed.get_rank()
    net = network(nn.BatchNorm1d(6), nn.Dropout(0.2))
    wrapped, optimizer = DistributedDataParallel(net), PLAIN.make_optimizer(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    rows_of_rank = torch.Generator().manual_seed(rank)
    torch.manual_seed(10 + rank)
    options = {"folder": run, "resume": True, "storage": epk.Storage(steps=1)}
    stateful = {"scheduler": scheduler, "rows": rows_of_rank}
    with epk.Recorder(wrapped, optimizer, X, y, check_every=1, stateful=stateful, **options) as recorder:
        first = recorder.num_steps
        for step in recorder.until(6):
            rows = torch.randperm(POINTS, generator=rows_of_rank)[:4]
            optimizer.zero_grad()
            F.cross_entropy(wrapped(X[rows]), y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
            scheduler.step()
            if rank == 1 and step == death:
                os._exit(3)
    return first, recorder.trajectory.digest if rank == 0 else recorder.num_steps
