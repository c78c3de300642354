"""Long calls by workers: up to 1,000 in simulated time, two real processes, and a large map by one command.

Usage: python benchmarks/beyond_one_machine.py simulate
       python benchmarks/beyond_one_machine.py processes --rounds 9 [--before FOLDER]
       python benchmarks/beyond_one_machine.py grid --points 100000

`simulate` needs no quiet machine; `processes` does. FOLDER holds another version of epk_gp, whose time without an
executor is compared.
"""

import itertools
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from processes import Worker, current_python
from safetensors.torch import save_file
from simulated_workers import Costs, SimulatedWorkers, Work
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.core.compute_options import ComputeOptions
from epk_gp.distributed import pieces
from epk_gp.distributed.pieces import Here, Piece, computed_pieces
from epk_gp.gram import tiles
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tile_parts import WHOLE, step_ranges
from epk_gp.storage.partial_sums import PartialSums
from problems import epk_problems

app = typer.Typer(help=__doc__, add_completion=False)
OUTPUTS, WIDTH = 3, 64
RANGE = 16  # steps of a piece


@dataclass(frozen=True)
class Job:
    """A block of the scalar kernel.

    Attributes:
        name: Name in the table.
        num_rows: Points on the left.
        num_columns: Points on the right, training copies; 0 for a symmetric block.
        num_train: Training copies among the points on the left, which are test copies else.
    """

    name: str
    num_rows: int
    num_columns: int
    num_train: int = 0

    def points(self) -> tuple[epk.Points, epk.Points]:
        """Draw the points, on a plane."""
        draws = torch.Generator().manual_seed(0)
        X = torch.randn(self.num_rows, 2, generator=draws, dtype=torch.float64)
        a = epk.Points(X, torch.arange(self.num_rows) < self.num_train)
        if not self.num_columns:
            return a, a
        Y = torch.randn(self.num_columns, 2, generator=draws, dtype=torch.float64)
        return a, epk.Points(Y, is_train=True)


def jobs(points: int) -> list[Job]:
    """Return the jobs: a map, all training points, and all pairs with training copies among them."""
    return [
        Job("map", points, 1_000),
        Job("all training points", points, 60_000),
        Job("all pairs", points, 0, min(60_000, points // 10)),
    ]


@app.command()
def simulate(
    points: Annotated[int, typer.Option(help="Points on the left.")] = 1_000_000,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1_000,
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2,4,10,40,100,400,1000",
    only: Annotated[str, typer.Option(help="Names of the jobs that are simulated.")] = "map,all training points",
    samples: Annotated[int, typer.Option(help="Pieces of each kind whose seconds are measured.")] = 3,
    memory: Annotated[int, typer.Option(help="Memory budget, MiB.")] = 1024,
    disk: Annotated[int, typer.Option(help="Free space in the folder of the pieces, GiB.")] = 1_000,
    door: Annotated[float, typer.Option(help="Owner's seconds for an empty piece; 0: they are measured.")] = 0.0,
) -> None:
    """Run whole jobs with the pieces, window, order and sums that real ones have, and with measured durations."""
    torch.set_num_threads(1)
    run = record(steps)
    kernel, options = PathKernel(run, "logits"), ComputeOptions(memory << 20)
    door = door or seconds_of_owner()
    typer.echo(f"an empty piece costs the owner and its scheduler {1e3 * door:.2f} ms")
    for job in jobs(points):
        if job.name not in only.split(","):
            continue
        a, b = job.points()
        layout = Layout(job, tile_side(kernel, options), len(step_ranges(steps)))
        kernels = measure_kernels(run, layout, options, samples)
        read = seconds_per_byte(layout.num_bytes)
        costs = Costs(kernels, door, read)
        typer.echo(
            f"\n{job.name}: {points:,} points x {job.num_columns or points:,}, {steps} steps; tiles of {layout.side} "
            "points"
        )
        for kind, seconds in kernels.items():
            listed = ", ".join(f"{value:.2f}" for value in seconds)
            typer.echo(f"  a piece of {' x '.join(kind)} copies: {layout.num_bytes / 2**20:.0f} MiB, {listed} s")
        typer.echo(f"  the owner reads one in {read * layout.num_bytes:.3f} s\n")
        typer.echo(
            "| workers | hours | efficiency | bound by | peak of files, GiB | with stragglers | owner, us a piece |"
        )
        typer.echo("| --- | --- | --- | --- | --- | --- | --- |")
        for count in map(int, workers.split(",")):
            plain, slowed = (
                simulated(kernel, (a, b), options, SimulatedWorkers(costs, layout.work, count, slow), disk << 30)
                for slow in (0, -(-count // 100) if count > 1 else 0)
            )
            typer.echo(line(*plain, slowed[0]))
        last = plain[0]
        typer.echo(
            f"\n{last.num_pieces:,} pieces of up to {last.longest:.1f} s, {last.work_seconds / 3600:.3g} hours of "
            "work; "
            f"critical path, a piece and the owner's reading of all: {last.critical_path:.0f} s; "
            f"peak memory of this process so far {peak_gib():.2f} GiB"
        )


def line(workers: SimulatedWorkers, seconds: float, slowed: SimulatedWorkers) -> str:
    """Return a line of the table."""
    bounds = workers.bounds
    name = max(bounds, key=lambda key: bounds[key])
    return (
        f"| {workers.count} | {workers.now / 3600:.3g} | {bounds['workers'] / workers.now:.2f} | "
        f"{name}, {bounds[name] / workers.now:.2f} | {workers.peak_bytes() / 2**30:.1f} | "
        f"{slowed.bounds['workers'] / slowed.now:.2f} | {1e6 * (seconds - workers.spent) / workers.num_pieces:.0f} |"
    )


def simulated(
    kernel: PathKernel,
    points: tuple[epk.Points, epk.Points],
    options: ComputeOptions,
    workers: SimulatedWorkers,
    disk: int,
) -> tuple[SimulatedWorkers, float]:
    """Compute a block of the scalar kernel by simulated workers; no block is made of the sums of its tiles.

    Returns:
        The workers, and the real seconds that all took.
    """
    begun, ahead = time.perf_counter(), pieces.num_ahead
    with (
        mock.patch.object(tiles, "PartialSums", workers.sums),
        mock.patch.object(tiles, "assembled", drained),
        mock.patch.object(pieces, "num_ahead", lambda num_bytes, _: ahead(num_bytes, disk)),
    ):
        kernel.trace_block(*points, replace(options, executor=workers))
    return workers, time.perf_counter() - begun


def drained(tiles: list[Any], totals: Iterator[Tensor], shape: tuple[int, ...], reference: Tensor) -> Tensor:
    """Let all tiles be summed, and return an empty block."""
    for _ in zip(tiles, totals, strict=True):
        pass
    return reference.new_empty(1, 0, 0)


@dataclass(frozen=True)
class Layout:
    """What the pieces of a job are.

    Attributes:
        job: The job.
        side: Points on each side of a tile.
        num_ranges: Ranges of steps.
    """

    job: Job
    side: int
    num_ranges: int

    def work(self, place: tuple[int, ...]) -> Work:
        """Return what a place costs."""
        x, y, i, j, *_ = place
        n, m = self._length(self._count(x), i), self._length(self._columns(y), j)
        kind = self.kind(bool(x), bool(y), is_symmetric=not self.job.num_columns and x == y and i == j)
        ranges = self.num_ranges if place[-1] == WHOLE else 1  # a whole tile's file is written once: a little less
        return Work(kind, ranges * n * m / (self.side * self.right), 8 * n * m)

    @property
    def right(self) -> int:
        """Points on the right of the largest tile."""
        return min(self.side, self.job.num_columns or self.side)

    @property
    def num_bytes(self) -> int:
        """Of the largest piece."""
        return 8 * self.side * self.right

    @staticmethod
    def kind(x: bool, y: bool, *, is_symmetric: bool) -> tuple[str, str]:
        """Name the kind of a tile."""
        names = ("training" if x else "test", "training" if y else "test")
        return (names[0], "the same " + names[1]) if is_symmetric else names

    def kinds(self) -> list[tuple[bool, bool, bool]]:
        """List the kinds: is the left, is the right training; are both the same points."""
        if self.job.num_columns:
            return [(False, True, False)]
        both = [(x, y, False) for x, y in ((True, True), (True, False), (False, False))]
        return [*both, (True, True, True), (False, False, True)]

    def _count(self, is_train: int) -> int:
        return self.job.num_train if is_train else self.job.num_rows - self.job.num_train

    def _columns(self, is_train: int) -> int:
        return self.job.num_columns or self._count(is_train)

    def _length(self, count: int, number: int) -> int:
        return min(self.side, count - number * self.side)


def measure_kernels(
    run: epk.Trajectory, layout: Layout, options: ComputeOptions, samples: int
) -> dict[tuple[str, str], list[float]]:
    """Measure pieces of each kind, in this process, their files included."""
    weights = run.step_sizes.clone()
    weights[RANGE * samples :] = 0.0  # as many ranges of steps as there are samples
    kernel, found = PathKernel(run, "logits", step_weights=weights), {}
    draws = torch.Generator().manual_seed(1)
    for x, y, same in layout.kinds():
        X, Y = (torch.randn(n, 2, generator=draws, dtype=torch.float64) for n in (layout.side, layout.right))
        a = epk.Points(X, is_train=x)
        timed = Timed([])
        kernel.trace_block(a, a if same else epk.Points(Y, is_train=y), replace(options, executor=timed))
        found[layout.kind(x, y, is_symmetric=same)] = timed.seconds
    return found


@dataclass(frozen=True)
class Timed:
    """An executor that computes here, and measures."""

    seconds: list[float]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Measure a call when its result is asked for."""

        def call() -> Any:
            before = time.perf_counter()
            result = function(*args)
            self.seconds.append(time.perf_counter() - before)
            return result

        return Here().submit(call)


def tile_side(kernel: PathKernel, options: ComputeOptions) -> int:
    """Count the points on each side of the kernel's tiles."""
    found: list[int] = []

    def noted(context: Any, *_: Any) -> Tensor:
        found.append(tiles.tile_points(context))
        return context.reference.new_empty(1, 0, 0)

    points = epk.Points(torch.zeros(1, 2, dtype=torch.float64), is_train=False)
    with mock.patch("epk_gp.gram.path_kernel.gram_tiles", noted):
        kernel.trace_block(points, points, options)
    return found[0]


def seconds_per_byte(num_bytes: int, repeats: int = 5) -> float:
    """Measure how long the owner reads and adds a piece."""
    with tempfile.TemporaryDirectory() as folder:
        sums = PartialSums(folder, "benchmark")
        total, found = torch.zeros(1, 1, num_bytes // 8, dtype=torch.float64), []
        sums.save("piece", {"total": torch.ones_like(total)}, 1)
        for _ in range(repeats):
            before = time.perf_counter()
            total.add_(sums.load("piece")[0]["total"])
            found.append((time.perf_counter() - before) / num_bytes)
    return statistics.median(found)


class Empty:
    """A computation of nothing."""

    def check(self) -> None:
        """Nothing is on disk."""

    def piece(self, place: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the place."""
        return {"value": torch.tensor(place)}


def empty_pieces(executor: Any, count: int) -> tuple[float, float]:
    """Have empty pieces computed; return the seconds of each by the clock, and of the owner's processor."""
    with tempfile.TemporaryDirectory() as folder:
        sums, listed = PartialSums(folder, "empty"), [Piece(f"piece-{n}", (n,)) for n in range(count)]
        next(iter(computed_pieces(Empty(), listed[:1], executor, sums, 1)))
        before, owned = time.perf_counter(), time.process_time()
        for piece, _ in zip(listed, computed_pieces(Empty(), listed, executor, sums, 1), strict=True):
            sums.remove([piece.name])
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


@app.command()
def processes(
    rounds: Annotated[int, typer.Option(help="Rounds in which both take turns; medians count.")] = 9,
    steps: Annotated[str, typer.Option(help="Training steps of problem a, one case each.")] = "10,96",
    budgets: Annotated[str, typer.Option(help="Memory budgets of the cases, MiB.")] = "1024,256",
    count: Annotated[int, typer.Option(help="Processes.")] = 2,
    empty: Annotated[int, typer.Option(help="Empty pieces.")] = 500,
    before: Annotated[str, typer.Option(help="Folder of another version, for the time without an executor.")] = "",
) -> None:
    """Compare processes of one thread with this one, on problem a's whole block; and measure empty pieces."""
    torch.set_num_threads(1)
    with pool(count) as executor:
        for number, budget in itertools.product(map(int, steps.split(",")), map(int, budgets.split(","))):
            compare(executor, count, rounds, number, budget << 20)
    for name, opened in (("process pool", pool), ("Dask", dask)):
        with opened(count) as executor:
            wall, owned = empty_pieces(executor, empty)
        typer.echo(f"{name}: an empty piece takes {1e3 * wall:.2f} ms, of the owner's processor {1e3 * owned:.2f} ms")
    if before:
        compare_versions(Path(before), rounds)


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
        contenders = {}
        try:
            for name, path in (("this version", Path(__file__).parents[1]), ("the other", before)):
                os.environ["PYTHONPATH"] = str(path)
                description = problem.description(threads=1)
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


@app.command()
def grid(
    points: Annotated[int, typer.Option(help="Grid points.")] = 100_000,
    num_train: Annotated[int, typer.Option(help="Training points.")] = 1_000,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    memory: Annotated[float, typer.Option(help="Memory budget of a worker, GiB.")] = 0.25,
) -> None:
    """Compute the kernel between a grid's points and all training points by one command, and watch its processes.

    The network has one output, so that a value of the kernel is one number.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draws = torch.Generator().manual_seed(0)
        X = torch.randn(num_train, 2, generator=draws, dtype=torch.float64)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
        optimizer, loss = torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss()
        epk.train(
            net, X, X.sin().sum(1, keepdim=True), loss=loss, optimizer=optimizer, steps=steps, path=folder / "run"
        )
        (folder / "grid_network.py").write_text(NETWORK)
        save_file({"inputs": on_grid(points)}, folder / "grid.safetensors")
        command = [
            *("gram", "run", "--out", "map", "--points", "grid.safetensors", "--columns", "train"),
            *("--network", "grid_network:make", "--workers", str(workers), "--memory", str(memory), "--quiet"),
        ]  # fmt: skip
        typer.echo(f"epk-gp {' '.join(command)}")
        begun = time.perf_counter()
        peaks = watched([str(Path(sys.executable).with_name("epk-gp")), *command], folder)
        seconds, size = time.perf_counter() - begun, (folder / "map" / "gram.safetensors").stat().st_size
    owner, *others = peaks
    typer.echo(
        f"{points:,} grid points x {num_train:,} training points x {steps} steps: {seconds:.1f} s, a file of "
        f"{size / 2**20:.0f} MiB"
    )
    typer.echo(f"peak memory: owner {owner:.0f} MiB; workers {', '.join(f'{peak:.0f}' for peak in others)} MiB")


NETWORK = f"""from torch import nn


def make():
    return nn.Sequential(nn.Linear(2, {WIDTH}), nn.Tanh(), nn.Linear({WIDTH}, 1)).double()
"""


def on_grid(points: int) -> Tensor:
    """Return points of a square grid, row by row."""
    side = -(-points // max(1, round(points**0.5)))
    first = torch.linspace(-3, 3, side, dtype=torch.float64)
    second = torch.linspace(-3, 3, -(-points // side), dtype=torch.float64)
    return torch.cartesian_prod(second, first)[:points].contiguous()


def watched(command: list[str], folder: Path) -> list[float]:
    """Run a command, and return the peak memory in MiB of its process, and of each process that it started."""
    peaks = dict[int, float]()
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        for number in (process.pid, *children(process.pid)):
            peaks[number] = peak_mib(number) or peaks.get(number, 0.0)
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"the command must succeed: it ended with {process.returncode}.")
    owner = peaks.pop(process.pid)
    return [owner, *sorted((peak for peak in peaks.values() if peak > 50), reverse=True)]  # not the resource tracker


def children(number: int) -> list[int]:
    """List the processes that a process started."""
    file = Path(f"/proc/{number}/task/{number}/children")
    try:
        return [int(child) for child in file.read_text().split()]
    except OSError:
        return []


def peak_mib(number: int) -> float:
    """Return the peak memory of a process, 0 if it has gone."""
    try:
        status = Path(f"/proc/{number}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(entry.split()[1]) / 1024 for entry in status if entry.startswith("VmHWM")), 0.0)


def record(steps: int) -> epk.Trajectory:
    """Record the training of a tanh network on 1,000 points of a plane."""
    torch.manual_seed(0)
    X = torch.randn(1_000, 2, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS)).double()
    y = (3 * X[:, 0]).sin().gt(X[:, 1]).long() + (X[:, 0] > 1).long()
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=steps)


def peak_gib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    app()
