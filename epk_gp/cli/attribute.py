"""`epk-gp attribute`: what each training point added to each prediction."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from epk_gp.cli.app import (
    HeadName,
    HeadOption,
    Network,
    Out,
    PointsFile,
    Quiet,
    RuleOption,
    RunDtype,
    RunFolder,
    SeedOfPoints,
    app,
    make_folder,
    parse_rule,
    torch_dtype,
)
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.pictures import draw_attribution
from epk_gp.cli.results import Stopwatch, write_arrays, write_json
from epk_gp.machines.attribute import Attribution
from epk_gp.machines.attribute import attribute as attribute_points

_PANELS = 6


@app.command(short_help="What each training point added to predictions.")
def attribute(
    run: RunFolder,
    out: Out = Path("attribution"),
    num_points: Annotated[int, typer.Option(help="Points to explain, at most.")] = 6,
    top: Annotated[int, typer.Option(help="Training points listed and drawn, of either sign.")] = 8,
    head: HeadOption = HeadName.log_softmax,
    rule: RuleOption = "adaptive",
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Write every training point's exact contribution to every output, and draw the largest ones."""
    watch, quadrature = Stopwatch(), parse_rule(rule)
    if top < 1:
        raise ValueError(f"--top must be at least 1: got {top}.")
    trajectory = open_run(run, network)
    X = read_points(run, points, trajectory, num_points, None if dtype is None else torch_dtype(dtype), seed)
    folder = make_folder(out)
    parts = attribute_points(trajectory, X, head=head.value, rule=quadrature, progress=not quiet)
    arrays = {"initial": parts.initial, "samples": parts.samples, "decay": parts.decay, "network": parts.network}
    about = {"head": head.value, "rule": quadrature.name, "digest": trajectory.digest}
    write_arrays(folder / "attribution.safetensors", arrays | {"total": parts.total, "inputs": X}, about)
    shown = range(min(_PANELS, len(X)))
    draw_attribution(folder / "attribution.png", parts, trajectory.targets, [f"point {n}" for n in shown], shown, top)
    results = summarise(parts, trajectory.targets, top)
    config = {"run": run, "head": head.value, "rule": rule, "num_points": len(X), "dtype": str(X.dtype), "top": top} | {
        "seed": seed
    }
    write_json(folder / "attribution.json", "attribute", config, results, watch)
    typer.echo(f"{len(X)} points x {trajectory.num_outputs} outputs x {trajectory.num_points} training points")
    typer.echo(f"the contributions sum to the network's outputs to within {results['max_error']:.2e}")
    typer.echo(f"written to {folder}: attribution.safetensors, attribution.json, attribution.png ({watch.total:.1f} s)")


def summarise(parts: Attribution, targets: Tensor, top: int) -> dict[str, object]:
    """List, for each point, the training points that moved its predicted output most.

    Args:
        parts: The contributions.
        targets: Training targets; labels are listed where there are any.
        top: Training points of either sign.
    """
    summaries = []
    for n, outputs in enumerate(parts.network):
        c = int(outputs.argmax())
        values, order = parts.samples[n, c].sort(descending=True)
        ranked = list(zip(order.tolist(), values.tolist(), strict=True))
        raised = [_entry(m, v, targets) for m, v in ranked[:top] if v > 0]
        lowered = [_entry(m, v, targets) for m, v in ranked[::-1][:top] if v < 0]
        own: dict[str, object] = {
            "point": n,
            "output": c,
            "network": float(outputs[c]),
            "initial": float(parts.initial[n, c]),
        }
        sums = {"raised_by": float(values[values > 0].sum()), "lowered_by": float(values[values < 0].sum())}
        summaries.append(own | sums | {"most_raising": raised, "most_lowering": lowered})
    return {
        "max_error": float((parts.total - parts.network).abs().max()),
        "max_residual": parts.max_residual,
        "evaluations": parts.evaluations,
        "points": summaries,
    }


def _entry(index: int, contribution: float, targets: Tensor) -> dict[str, object]:
    labelled = targets.ndim == 1 and targets.dtype == torch.int64
    label: dict[str, object] = {"label": int(targets[index])} if labelled else {}
    entry: dict[str, object] = {"training_point": index, "contribution": contribution}
    return entry | label
