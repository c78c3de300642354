"""`epk-gp attribute`: the exact contribution of every training point to predictions."""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges, summarise, write_table
from epk_gp.cli.app import app
from epk_gp.cli.data import PointSource, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import (
    PARTIAL,
    HeadOption,
    Memory,
    Network,
    Out,
    PointsFile,
    Quiet,
    RuleOption,
    RunDtype,
    RunFolder,
    SeedOfPoints,
    make_folder,
    memory_bytes,
    parse_rule,
    torch_dtype,
)
from epk_gp.core.head import resolve_head
from epk_gp.core.trajectory import network_outputs
from epk_gp.kernel_machine.attribute import GroupedAttribution, attribute_many
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.plots.figures import draw_attributions
from epk_gp.provenance import Stopwatch, write_arrays, write_json
from epk_gp.quadrature.rules import AdaptiveRule, Rule

_MAX_DRAWN = 6  # points that are drawn


class OutputsName(StrEnum):
    """The outputs whose contributions are computed."""

    every = "all"
    predicted = "predicted"


@app.command(short_help="Write the contribution of each training point.")
def attribute(
    run: RunFolder,
    out: Out = Path("attribution"),
    num_points: Annotated[int, typer.Option(help="Largest number of points that are explained.")] = 6,
    top: Annotated[int, typer.Option(help="Training points listed and drawn of either sign.")] = 8,
    head: HeadOption = None,
    rule: RuleOption = "adaptive",
    outputs: Annotated[
        OutputsName,
        typer.Option(help="Every output, or only the one that the network predicts, at a fraction of the cost."),
    ] = OutputsName.every,
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, quadrature = Stopwatch(), parse_rule(rule)
    if top < 1:
        raise ValueError(f"--top must be at least 1: got {top}.")
    trajectory = open_run(run, network)
    head_name = resolve_head(None if head is None else head.value, trajectory.loss, trajectory.num_outputs)
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    X = read_points(source, trajectory, num_points)
    folder = make_folder(out)
    predicted = network_outputs(trajectory, X).argmax(dim=1)
    parts, by_range = attribute_many(
        trajectory,
        X,
        [[by_sample(trajectory)], [step_ranges(trajectory)]],
        head=head_name,
        rule=quadrature,
        classes=predicted if outputs is OutputsName.predicted else None,
        checkpoint=folder / PARTIAL,
        memory_budget=memory_bytes(memory),
        progress=not quiet,
    )
    breakdown = prediction_breakdown(parts, by_range, predicted)
    arrays = {"initial": parts.initial, "samples": parts.values, "decay": parts.decay.squeeze(2), "total": parts.total}
    arrays |= {"network": parts.network, "steps": by_range.values, "predicted": predicted, "inputs": X}
    metadata = {"head": head_name, "rule": quadrature.name, "digest": trajectory.digest, "outputs": outputs.value}
    write_arrays(folder / "attribution.safetensors", arrays, metadata)
    shutil.rmtree(folder / PARTIAL)
    draw_attributions(folder / "attribution.png", breakdown, trajectory, X, range(min(_MAX_DRAWN, len(X))), top)
    results = summarise(parts, breakdown, trajectory.targets, top)
    write_table(folder / "attribution.csv", breakdown, trajectory.targets, top)
    config: dict[str, object] = {
        "run": run,
        "head": head_name,
        "rule": rule,
        "num_points": len(X),
        "dtype": str(X.dtype),
        "top": top,
    }
    config |= {"outputs": outputs.value, "seed": seed}
    write_json(folder / "attribution.json", "attribute", config, results, timer)
    num_outputs = trajectory.num_outputs if outputs is OutputsName.every else 1
    typer.echo(f"{len(X)} points x {num_outputs} outputs x {trajectory.num_points} training points")
    typer.echo(
        f"the contributions sum to the network's outputs to within {results['max_error']:.2e} "
        f"({results['max_relative_error']:.1e} of each point's largest output)"
    )
    typer.echo(
        f"written to {folder}: attribution.safetensors, attribution.csv, attribution.json, attribution.png "
        f"({timer.total:.1f} s)"
    )
    _require_completeness(parts, quadrature)


def _require_completeness(parts: GroupedAttribution, rule: Rule) -> None:
    """Raise if the contributions under an adaptive rule do not sum to the outputs. A fixed rule guarantees nothing.

    Raises:
        ValueError: The sum differs from the network's outputs by more than the rule's tolerance allows.
    """
    if not isinstance(rule, AdaptiveRule):
        return
    size = max(1.0, float(parts.network.abs().max()))
    allowed = 10 * rule.tol + (1e-9 if parts.network.dtype == torch.float64 else 1e-3) * size
    error = float((parts.total - parts.network).abs().max())
    if not error <= allowed:
        raise ValueError(
            f"the contributions must sum to the network's outputs to within {allowed:.1g}: they differ by {error:.3g}. "
            "Do not use them; check the run with epk-gp verify."
        )
