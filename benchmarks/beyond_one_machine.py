"""Long calls by workers: up to 1,000 in simulated time, two real processes, and a large map by one command.

Usage: python benchmarks/beyond_one_machine.py simulate
       python benchmarks/beyond_one_machine.py processes --rounds 9 [--before FOLDER]
       python benchmarks/beyond_one_machine.py grid --points 100000

`simulate` needs no quiet machine; `processes` does. FOLDER holds another version of epk_gp, whose time without an
executor is compared.
"""

import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from map_by_workers import grid
from pools import compare, compare_versions, dask, empty_pieces, pool, seconds_of_owner
from simulated_workers import Costs, SimulatedWorkers, Work
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.core.checks import ComputeOptions
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.tiles import WHOLE, GramWork, step_ranges
from epk_gp.storage.files import PartialSums
from epk_gp.work import run as carrying
from epk_gp.work.run import run as carry_out

app = typer.Typer(help=__doc__, add_completion=False)
app.command()(grid)
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
    begun, ahead = time.perf_counter(), carrying.num_ahead
    with (
        mock.patch("epk_gp.work.run.PartialSums", workers.sums),
        mock.patch("epk_gp.gram.path_kernel.assemble", drained),
        mock.patch.object(carrying, "num_ahead", lambda num_bytes, _: ahead(num_bytes, disk)),
    ):
        kernel.trace_block(*points, **replace(options, executor=workers).settings)
    return workers, time.perf_counter() - begun


def drained(work: GramWork) -> Tensor:
    """Let all tiles be summed, and return a block of zeros that takes no memory."""
    for _ in carry_out(work, work.planned.options, "kernel"):
        pass
    return torch.zeros(()).expand(work.planned.block_shape(len(work.a), len(work.b)))


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
        kernel.trace_block(a, a if same else epk.Points(Y, is_train=y), **replace(options, executor=timed).settings)
        found[layout.kind(x, y, is_symmetric=same)] = timed.seconds
    return found


@dataclass(frozen=True)
class _Call:
    result: Callable[[], Any]

    def cancel(self) -> bool:
        return True


@dataclass(frozen=True)
class Timed:
    """An executor that computes here, and measures the processor's time, so that other processes do not count."""

    seconds: list[float]

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Measure a call when its result is asked for."""

        def call() -> Any:
            before = time.process_time()
            result = function(*args)
            self.seconds.append(time.process_time() - before)
            return result

        return _Call(call)


def tile_side(kernel: PathKernel, options: ComputeOptions) -> int:
    """Count the points on each side of the kernel's tiles."""
    found: list[int] = []

    def noted(work: GramWork) -> Tensor:
        found.append(work.planned.tile_points)
        return torch.empty(1, 1, 1)

    points = epk.Points(torch.zeros(1, 2, dtype=torch.float64), is_train=False)
    with mock.patch("epk_gp.gram.path_kernel.assemble", noted):
        kernel.trace_block(points, points, **options.settings)
    return found[0]


def seconds_per_byte(num_bytes: int, repeats: int = 5) -> float:
    """Measure how long the owner reads and adds a piece."""
    with tempfile.TemporaryDirectory() as folder:
        sums = PartialSums(folder, "benchmark")
        total, found = torch.zeros(1, 1, num_bytes // 8, dtype=torch.float64), []
        sums.save("piece", {"total": torch.ones_like(total)}, 1)
        for _ in range(repeats):
            before = time.process_time()
            total.add_(sums.load("piece")[0]["total"])
            found.append((time.process_time() - before) / num_bytes)
    return statistics.median(found)


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
