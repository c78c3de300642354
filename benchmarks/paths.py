"""Other paths between the recorded states: what they cost, what their sums leave, and what they change.

Usage: python benchmarks/paths.py sums --only "ReLU MLP"
       python benchmarks/paths.py layerwise     (two minutes; into paths.json, from which `make pages` writes)
       python benchmarks/paths.py map
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.analysis.measures import rank_correlation
from epk_gp.datasets import three_gaussians
from epk_gp.kernel_machine.attribute import Attribution
from epk_gp.provenance import Stopwatch, provenance
from epk_gp.quadrature.rules import WeightPath

LAYERWISE = Path(__file__).with_suffix(".json")
app = typer.Typer(add_completion=False)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3),
}


class Encoder(nn.Module):
    """A transformer's layer with dropout, on the rows of an image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.out(self.encoder(x.unflatten(1, (8, 8))).mean(dim=1))  # type: ignore[no-any-return]


def cnn(*, normalised: bool) -> nn.Module:
    """Return two convolutions with pooling on images of 8 x 8 pixels."""
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(8)] if normalised else [nn.Identity(), nn.Identity()]
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), norms[0], nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1), norms[1], nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ReLU MLP": lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)),
    "ReLU CNN": lambda: cnn(normalised=False),
    "BatchNorm CNN": lambda: cnn(normalised=True),
    "transformer, dropout": Encoder,
}


@dataclass(frozen=True)
class Row:
    """What one path did.

    Attributes:
        error: Largest difference of a sum of contributions from the network's output.
        evaluations: Gradients evaluated for each point and step.
        eigenvalue: Smallest eigenvalue of a Gram matrix over both copies, over the largest one.
        rank: Rank correlation of contributions with those along straight steps.
        difference: Norm of their difference over that of the latter.
        seconds: Of the attribution.
        kernel_seconds: Of a block of test copies with training copies.
        num_bytes: What the run takes on disk with every k-th weight state, k the steps of a chord.
        thinned_error: `error`, along the same chords of that run.
    """

    error: float
    evaluations: float
    eigenvalue: float
    rank: float
    difference: float
    seconds: float
    kernel_seconds: float
    num_bytes: int
    thinned_error: float


def recorded(
    name: str, optimizer_name: str, steps: int, num_train: int, folder: Path | None = None, keep_every: int = 1
) -> epk.Trajectory:
    """Train a network in training mode on minibatches of half of the data, and record it in memory or in a folder."""
    torch.manual_seed(0)
    data = three_gaussians(-(-num_train // 3), dim=64)
    X, y = data.inputs[:num_train], data.labels[:num_train]
    net = NETWORKS[name]().double().train()
    optimizer = OPTIMIZERS[optimizer_name](net)
    storage = epk.Storage(keep_every=keep_every)
    with epk.Recorder(net, optimizer, X, y, folder=folder, storage=storage) as recorder:
        for _ in range(steps):
            batch = torch.randperm(num_train)[: num_train // 2]
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


def measure(
    run: epk.Trajectory, thinned: epk.Trajectory, num_bytes: int, X: Tensor, every: int, straight: Tensor | None
) -> tuple[Row, Tensor]:
    """Attribute along chords, and compute the kernel along them; attribute once more with every k-th state."""
    path = epk.chords(every)
    before = time.process_time()
    parts = epk.attribute(run, X, path=path)
    seconds = time.process_time() - before
    own = parts.samples.flatten()
    reference = own if straight is None else straight
    test, train = epk.Points(X, is_train=False), epk.Points(run.inputs, is_train=True)
    before = time.process_time()
    epk.gram_block(run, test, train, path=path)
    kernel_seconds = time.process_time() - before
    few = run.inputs[:8]  # twice: zero is among the eigenvalues
    both = epk.Points(torch.cat([few, few, few, X, X]), torch.arange(24 + 2 * len(X)) < 16)
    K = epk.gram_block(run, both, both, path=path)
    eigenvalues = torch.linalg.eigvalsh(K.reshape(len(both) * run.num_outputs, -1))
    row = Row(
        error=parts.max_error,
        evaluations=parts.evaluations,
        eigenvalue=float(eigenvalues[0] / eigenvalues[-1]),
        rank=rank_correlation(own, reference),
        difference=float((own - reference).norm() / reference.norm()),
        seconds=seconds,
        kernel_seconds=kernel_seconds,
        num_bytes=num_bytes,
        thinned_error=epk.attribute(thinned, X, path=path).max_error,
    )
    return row, reference


@app.command()
def sums(
    only: Annotated[str, typer.Option(help="Networks whose names contain this.")] = "",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    num_train: Annotated[int, typer.Option(help="Training points.")] = 48,
    num_test: Annotated[int, typer.Option(help="Points that are explained.")] = 5,
    lengths: Annotated[str, typer.Option(help="Steps of a chord.")] = "1,5,20,100",
) -> None:
    """Print a table over networks, optimizers and lengths of chords; seconds are of the process, on one thread."""
    torch.set_num_threads(1)
    typer.echo(
        "| network | optimizer | k | error of the sums | evaluations | smallest eigenvalue | rank correlation | "
        "difference / norm | attribution, s | kernel, s | KB on disk | error with every k-th state |"
    )
    typer.echo("|---" * 12 + "|")
    X = three_gaussians(-(-num_test // 3), dim=64, generator=torch.Generator().manual_seed(1)).inputs[:num_test]
    for name in (name for name in NETWORKS if only in name):
        for optimizer_name in OPTIMIZERS:
            run, straight = recorded(name, optimizer_name, steps, num_train), None
            for every in map(int, lengths.split(",")):
                with TemporaryDirectory() as folder:
                    thinned = recorded(name, optimizer_name, steps, num_train, Path(folder) / "run", every)
                    num_bytes = sum(file.stat().st_size for file in (Path(folder) / "run").iterdir())
                    row, straight = measure(run, thinned, num_bytes, X, every, straight)
                typer.echo(
                    f"| {name} | {optimizer_name} | {every} | {row.error:.1e} | {row.evaluations:.2f} | "
                    f"{row.eigenvalue:.0e} | {row.rank:.4f} | {row.difference:.3f} | {row.seconds:.1f} | "
                    f"{row.kernel_seconds:.2f} | {row.num_bytes / 1e3:,.0f} | {row.thinned_error:.1e} |"
                )


@app.command()
def layerwise(
    only: Annotated[str, typer.Option(help="Networks whose names contain this.")] = "",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 100,
    num_train: Annotated[int, typer.Option(help="Training points.")] = 48,
    num_test: Annotated[int, typer.Option(help="Points that are explained.")] = 5,
    lengths: Annotated[str, typer.Option(help="Steps of a stretch.")] = "1,20",
) -> None:
    """Print what layerwise averages change and cost beside straight steps, measured in turns, and save it."""
    torch.set_num_threads(1)
    rows, timer = [], Stopwatch()
    typer.echo(
        "| network | optimizer | k | error of the sums | evaluations | along steps | rank correlation | "
        "difference / norm | attribution, s | along steps, s |"
    )
    typer.echo("|---" * 10 + "|")
    X = three_gaussians(-(-num_test // 3), dim=64, generator=torch.Generator().manual_seed(1)).inputs[:num_test]
    for name in (name for name in NETWORKS if only in name):
        for optimizer_name in OPTIMIZERS:
            run = recorded(name, optimizer_name, steps, num_train)
            for every in map(int, lengths.split(",")):
                (straight, before), (own, seconds) = (
                    _timed(run, X, path) for path in (epk.straight(), epk.layerwise(every))
                )
                terms, reference = own.samples.flatten(), straight.samples.flatten()
                row = {
                    "network": name,
                    "optimizer": optimizer_name,
                    "every": every,
                    "error": own.max_error,
                    "evaluations": own.evaluations,
                    "straight": straight.evaluations,
                    "rank": rank_correlation(terms, reference),
                    "difference": float((terms - reference).norm() / reference.norm()),
                    "seconds": seconds,
                    "straight seconds": before,
                }
                rows.append(row)
                typer.echo(
                    f"| {name} | {optimizer_name} | {every} | {row['error']:.0e} | {row['evaluations']:.2f} | "
                    f"{row['straight']:.2f} | {row['rank']:.4f} | {row['difference']:.1e} | {seconds:.1f} | "
                    f"{before:.1f} |"
                )
    if not only:
        LAYERWISE.write_text(json.dumps({"steps": steps, "rows": rows, **provenance(timer)}, indent=1) + "\n")


def _timed(run: epk.Trajectory, X: Tensor, path: WeightPath) -> tuple[Attribution, float]:
    """Attribute, and return the seconds of the process."""
    before = time.process_time()
    parts = epk.attribute(run, X, path=path)
    return parts, time.process_time() - before


def two_moons(count: int) -> tuple[Tensor, Tensor]:
    """Draw points on two half circles, with noise."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(count, generator=generator, dtype=torch.float64) * torch.pi
    label = torch.arange(count) % 2
    side = 1.0 - 2.0 * label
    X = torch.stack([angle.cos() * side + label, angle.sin() * side + 0.5 * label], dim=1)
    return X + 0.15 * torch.randn(count, 2, generator=generator, dtype=torch.float64), label


@app.command("map")
def uncertainty_map(
    size: Annotated[int, typer.Option(help="Points per side of the map.")] = 60,
    num_train: Annotated[int, typer.Option(help="Training points, all conditioned on.")] = 300,
    steps: Annotated[int, typer.Option(help="Minibatch steps of Adam.")] = 400,
    width: Annotated[int, typer.Option(help="Units of both hidden layers.")] = 64,
    asked: Annotated[
        str,
        typer.Option(
            help="Chord lengths with Gauss-Legendre nodes, or numbers of nodes of the whole path; the first is the "
            "reference."
        ),
    ] = "1:2,20:1,50:4,50:1,100:4,100:1,10,20,40",
    threads: Annotated[int, typer.Option(help="Threads.")] = 1,
) -> None:
    """Print the seconds of an uncertainty map of two moons along chords, and its difference from that along steps.

    So with nodes of the whole path that stand for all its steps.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    X, y = two_moons(num_train)
    net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    net = net.double()
    run = epk.train(
        net, X, y, optimizer=torch.optim.Adam(net.parameters(), lr=1e-3), steps=steps, batch_size=min(32, num_train)
    )
    low, high = X.amin(0) - 1, X.amax(0) + 1
    sides = (torch.linspace(float(low[d]), float(high[d]), size) for d in range(2))
    grid = torch.cartesian_prod(*sides).double()
    typer.echo("| k | nodes | wall, s | process, s | largest std | its largest difference | mean | rank correlation |")
    typer.echo("|---" * 8 + "|")
    reference = None
    for every, _, nodes in (pair.rpartition(":") for pair in asked.split(",")):
        wall, process = time.perf_counter(), time.process_time()
        if every:
            gp = epk.LogitGP(run, path=epk.chords(int(every)), rule=epk.gauss_legendre(int(nodes)))
        else:
            gp = epk.LogitGP(run, nodes=int(nodes))
        gp.fit()
        generator = torch.Generator().manual_seed(0)
        std = gp.logit_posterior(grid).softmax_uncertainty(generator=generator).std[:, 0]
        wall, process = time.perf_counter() - wall, time.process_time() - process
        reference = std if reference is None else reference
        off = (std - reference).abs()
        typer.echo(
            f"| {every or '-'} | {nodes} | {wall:.1f} | {process:.1f} | {float(std.max()):.3f} | "
            f"{float(off.max()):.4f} | {float(off.mean()):.5f} | "
            f"{rank_correlation(std, reference):.4f} |"
        )


if __name__ == "__main__":
    app()
