"""`epk-gp demo`: the paper's three-Gaussian problem from training to figures, with nothing to download."""

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges, summarise
from epk_gp.analysis.maps import coordinate_plane, uncertainty_on_plane
from epk_gp.cli import options as opt
from epk_gp.cli.data import draw_rows
from epk_gp.cli.networks import NetworkSpec, build_network
from epk_gp.cli.runs import certificate
from epk_gp.cli.uncertainty import describe_map, describe_plane, fitted_numbers, map_numbers
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.model import zero_final_layer
from epk_gp.core.show import CertificateWarning
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.datasets import Dataset, three_gaussians
from epk_gp.gp.models import LogitGP
from epk_gp.kernel_machine.attribute import attribute_many
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.kernel_machine.reconstruct import Reconstruction, reconstruct
from epk_gp.plots.contributions import attribution_figure
from epk_gp.plots.maps import map_figure
from epk_gp.plots.style import save_figure
from epk_gp.plots.summaries import reconstruction_figure
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.quadrature.rules import Rule, adaptive, gauss_legendre, left_riemann
from epk_gp.recording.train import train
from epk_gp.report.write import write_report


@dataclass(frozen=True)
class Size:
    """The sizes of the demo; the defaults are those of section 4.1 of Bell et al. (2023)."""

    num_per_class: int = 1000
    dim: int = 100
    width: int = 64
    lr: float = 0.1
    steps: int = 300
    num_test: int = 102
    num_condition: int = 300
    grid: int = 40
    num_samples: int = 1024
    num_explained: int = 3


_SMOKE = Size(
    num_per_class=20, dim=6, width=8, steps=8, num_test=9, num_condition=20, grid=8, num_samples=64, num_explained=2
)


def demo(
    out: opt.Out = Path("demo_output"),
    seed: opt.Seed = 0,
    dtype: opt.DataDtype = "float64",
    smoke: Annotated[bool, typer.Option("--smoke", help="Use tiny sizes, for a second or two.")] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Train on three Gaussians, show that the kernel machine is the network, explain and map it (about a minute)."""
    size, timer, folder = _SMOKE if smoke else Size(), Stopwatch(), opt.make_folder(out)
    held_out, trajectory = _record(size, seed, opt.DTYPES[dtype], quiet)
    X = held_out.inputs
    correct = (network_outputs(trajectory, X).argmax(1) == held_out.labels).double().mean()
    M, P, S = trajectory.num_points, trajectory.num_weights, trajectory.num_steps
    typer.echo(f"{M} points of three Gaussians in {size.dim} dimensions; {P} weights;")
    typer.echo(f"{S} steps of gradient descent; {100 * float(correct):.0f} % of {len(X)} held-out points right")
    timer.lap("record")

    typer.echo("\nIs the kernel machine the network? (held-out points, all classes)")
    table, machines = _reconstruct(trajectory, X, quiet)
    timer.lap("reconstruct")
    first, best = next(iter(machines.items())), list(machines.items())[-1]
    figure = reconstruction_figure([first, best], "log_softmax")
    save_figure(figure, folder / "reconstruction.png", palette=True)
    timer.lap("draw")

    typer.echo("\nWhich training points made the predictions?")
    chosen = _points_by_confidence(trajectory, held_out, size.num_explained)
    groupings = [[by_sample(trajectory)], [step_ranges(trajectory)]]
    parts, by_range = attribute_many(trajectory, X[chosen], groupings, progress=not quiet)
    breakdown = prediction_breakdown(parts, by_range, parts.network.argmax(dim=1))
    attributions = summarise(parts, breakdown, trajectory.targets, 5)
    figure = attribution_figure(
        breakdown,
        trajectory,
        X[chosen],
        range(len(chosen)),
        5,
        head=resolve_head(None, trajectory.loss, trajectory.num_outputs),
        labels=held_out.labels[chosen],
    )
    save_figure(figure, folder / "attribution.png", palette=True)
    typer.echo(f"the contributions of {M} training points to {len(chosen)} predictions sum to the network's outputs")
    typer.echo(f"to within {attributions['max_error']:.1e}")
    timer.lap("attribute")

    typer.echo("\nHow sure is it?")
    # Two nodes are exact between kinks: the gradients of the logits are linear in t there, and the kernel is a product
    # of two of them.
    conditioned = draw_rows(trajectory.num_points, size.num_condition, seed)
    gp = LogitGP(trajectory, points=conditioned, rule=gauss_legendre(2))
    losses = gp.fit(progress=not quiet)
    generator = torch.Generator().manual_seed(seed)
    m = uncertainty_on_plane(
        gp,
        coordinate_plane(trajectory.inputs),
        size=size.grid,
        num_samples=size.num_samples,
        generator=generator,
        progress=not quiet,
    )
    figure = map_figure(m, trajectory.targets, plane=describe_plane("coordinates", size.dim))
    save_figure(figure, folder / "uncertainty.png", palette=True)
    typer.echo(describe_map(m))
    timer.lap("uncertainty")
    write_report(
        folder / "report.html",
        trajectory,
        X,
        held_out.labels,
        title="Three Gaussians",
        outputs=1,
        explained=chosen,
        uncertainty_map=m,
        progress=not quiet,
    )
    timer.lap("report")

    results = {"held_out_accuracy": float(correct), "reconstruction": table, "held_out_points_explained": chosen}
    results |= {"attribution": attributions, "uncertainty": fitted_numbers(gp, losses) | map_numbers(m)}
    config = asdict(size) | {"seed": seed, "dtype": dtype, "smoke": smoke, "digest": trajectory.digest}
    write_json(folder / "results.json", "demo", config, results, timer)
    typer.echo(f"\nwritten to {folder}: report.html, to be opened in a browser; reconstruction.png,")
    typer.echo(f"attribution.png, uncertainty.png, results.json ({timer.total:.0f} s)")


def _record(size: Size, seed: int, dtype: torch.dtype, quiet: bool) -> tuple[Dataset, Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    data = three_gaussians(size.num_per_class, dim=size.dim, generator=generator, dtype=dtype)
    held_out = three_gaussians(size.num_test // 3, dim=size.dim, generator=generator, dtype=dtype)
    torch.manual_seed(seed)
    net = build_network(
        NetworkSpec(name="mlp", input_shape=[size.dim], num_outputs=data.num_classes, width=size.width)
    ).to(dtype)
    zero_final_layer(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=size.lr)
    trajectory = train(net, data.inputs, data.labels, optimizer=optimizer, steps=size.steps, progress=not quiet)
    return held_out, trajectory


def _reconstruct(
    trajectory: Trajectory, X: Tensor, quiet: bool
) -> tuple[list[dict[str, object]], dict[str, Reconstruction]]:
    """Print the table row by row. Return it, and the kernel machines with the log-softmax head."""
    table: list[dict[str, object]] = []
    machines = {}
    typer.echo(f"{'rule':<38}{'head':<14}{'evaluations':>12}{'largest error':>16}{'residual':>12}{'seconds':>10}")
    rules: list[tuple[Rule, Head]] = [(left_riemann(n), "log_softmax") for n in (1, 10, 100)]
    for rule, head in [*rules, (adaptive(), "logits"), (adaptive(), "log_softmax")]:
        timer = Stopwatch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CertificateWarning)  # the table shows what the fixed rules miss
            r = reconstruct(trajectory, X, head=head, rule=rule, progress=not quiet)
        seconds = timer.total
        typer.echo(
            f"{rule.name:<38}{head:<14}{r.evaluations:>12.1f}{r.max_error:>16.1e}{r.max_residual:>12.1e}{seconds:>10.1f}"
        )
        table.append({"rule": rule.name, "head": head, "seconds": seconds} | certificate(r))
        if head == "log_softmax":
            machines[rule.name] = r
    return table, machines


def _points_by_confidence(trajectory: Trajectory, held_out: Dataset, count: int) -> list[int]:
    """Choose held-out points from the most to the least confident, by the gap between the two largest outputs."""
    largest = network_outputs(trajectory, held_out.inputs).topk(2, dim=1).values
    order = (largest[:, 0] - largest[:, 1]).argsort(descending=True)
    ranks = torch.linspace(0, len(order) - 1, count).round().long()
    chosen: list[int] = order[ranks].tolist()
    return chosen
