"""`epk-gp attribute`: what each training point added to each prediction."""

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges, summarise, write_table
from epk_gp.cli.app import (
    PARTIAL,
    HeadName,
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
    app,
    make_folder,
    memory_bytes,
    parse_rule,
    torch_dtype,
)
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run
from epk_gp.core.trajectory import network_outputs
from epk_gp.kernel_machine.attribute import GroupedAttribution, attribute_many
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.plots.figures import draw_attributions
from epk_gp.provenance import Stopwatch, write_arrays, write_json
from epk_gp.quadrature.rules import AdaptiveRule, Rule

_PANELS = 6


class OutputsName(StrEnum):
    """Which outputs are explained."""

    every = "all"
    predicted = "predicted"


@app.command(short_help="What each training point added to predictions.")
def attribute(
    run: RunFolder,
    out: Out = Path("attribution"),
    num_points: Annotated[int, typer.Option(help="Points to explain, at most.")] = 6,
    top: Annotated[int, typer.Option(help="Training points listed and drawn, of either sign.")] = 8,
    head: HeadOption = HeadName.log_softmax,
    rule: RuleOption = "adaptive",
    outputs: Annotated[
        OutputsName,
        typer.Option(help="Every output, or the one that the network predicts, at a fraction of the cost."),
    ] = OutputsName.every,
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed goes on where it was when it is given again.
    """
    watch, quadrature = Stopwatch(), parse_rule(rule)
    if top < 1:
        raise ValueError(f"--top must be at least 1: got {top}.")
    trajectory = open_run(run, network)
    X = read_points(run, points, trajectory, num_points, None if dtype is None else torch_dtype(dtype), seed)
    folder = make_folder(out)
    predicted = network_outputs(trajectory, X).argmax(dim=1)
    parts, curve = attribute_many(
        trajectory,
        X,
        [[by_sample(trajectory)], [step_ranges(trajectory)]],
        head=head.value,
        rule=quadrature,
        classes=predicted if outputs is OutputsName.predicted else None,
        checkpoint=folder / PARTIAL,
        memory_budget=memory_bytes(memory),
        progress=not quiet,
    )
    breakdown = prediction_breakdown(parts, curve, predicted)
    arrays = {"initial": parts.initial, "samples": parts.values, "decay": parts.decay.squeeze(2), "total": parts.total}
    arrays |= {"network": parts.network, "steps": curve.values, "predicted": predicted, "inputs": X}
    about = {"head": head.value, "rule": quadrature.name, "digest": trajectory.digest, "outputs": outputs.value}
    write_arrays(folder / "attribution.safetensors", arrays, about)
    shutil.rmtree(folder / PARTIAL)
    draw_attributions(folder / "attribution.png", breakdown, trajectory, X, range(min(_PANELS, len(X))), top)
    results = summarise(parts, breakdown, trajectory.targets, top)
    write_table(folder / "attribution.csv", breakdown, trajectory.targets, top)
    asked_for = {"run": run, "head": head.value, "rule": rule, "num_points": len(X), "dtype": str(X.dtype), "top": top}
    config = asked_for | {"outputs": outputs.value, "seed": seed}
    write_json(folder / "attribution.json", "attribute", config, results, watch)
    asked = trajectory.num_outputs if outputs is OutputsName.every else 1
    typer.echo(f"{len(X)} points x {asked} outputs x {trajectory.num_points} training points")
    typer.echo(
        f"the contributions sum to the network's outputs to within {results['max_error']:.2e} "
        f"({results['max_relative_error']:.1e} of each point's largest output)"
    )
    typer.echo(
        f"written to {folder}: attribution.safetensors, attribution.csv, attribution.json, attribution.png "
        f"({watch.total:.1f} s)"
    )
    _require_completeness(parts, quadrature)


def _require_completeness(parts: GroupedAttribution, rule: Rule) -> None:
    """End with an error where an adaptive rule's contributions do not sum to the outputs; fixed rules promise nothing.

    Raises:
        ValueError: They do not.
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
