"""`epk-gp attribute`: the exact contribution of every training point to predictions."""

import shutil
import warnings
from pathlib import Path

import typer

from epk_gp.analysis.breakdown import prediction_breakdown, step_ranges, summarise, write_table
from epk_gp.cli.data import PointSource, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import Dtype, ExplainedOutputs, HeadName
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes, parse_rule, torch_dtype
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.certificate import CertificateWarning
from epk_gp.core.head import resolve_head
from epk_gp.core.trajectory import network_outputs
from epk_gp.kernel_machine.attribute import attribute_many
from epk_gp.kernel_machine.attribution_results import GroupedAttribution
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.kernel_machine.certification import describe_findings
from epk_gp.plots.figures import draw_attributions
from epk_gp.provenance import Stopwatch, write_arrays, write_json
from epk_gp.quadrature.rules import AdaptiveRule, Rule

_MAX_DRAWN = 6  # points that are drawn


def attribute(
    *,
    run: Path,
    out: Path,
    num_points: int,
    top: int,
    head: HeadName | None,
    rule: str,
    outputs: ExplainedOutputs,
    memory: float,
    points: Path | None,
    network: str | None,
    dtype: Dtype | None,
    seed: int | None,
    workers: int | None,
    scheduler: str | None,
    quiet: bool,
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, quadrature = Stopwatch(), parse_rule(rule)
    require_one_executor(workers, scheduler)
    trajectory = open_run(run, network)
    head_name = resolve_head(None if head is None else head.value, trajectory.loss, trajectory.num_outputs)
    source = PointSource(run, points, None if dtype is None else torch_dtype(dtype), seed)
    chosen = read_points(source, trajectory, num_points)
    X, folder = chosen.X, make_folder(out)
    typer.echo(f"explaining {chosen}")
    predicted = network_outputs(trajectory, X).argmax(dim=1)
    with open_executor(workers, scheduler, resumes=True) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end, or expected of a fixed rule
        parts, by_range = attribute_many(
            trajectory,
            X,
            [[by_sample(trajectory)], [step_ranges(trajectory)]],
            head=head_name,
            rule=quadrature,
            classes=predicted if outputs is ExplainedOutputs.predicted else None,
            checkpoint=folder / PARTIAL,
            memory_budget=memory_bytes(memory),
            progress=not quiet,
            executor=executor,
        )
    breakdown = prediction_breakdown(parts, by_range, predicted)
    arrays = {"initial": parts.initial, "samples": parts.values, "decay": parts.decay.squeeze(2), "total": parts.total}
    arrays |= {"network": parts.network, "steps": by_range.values, "predicted": predicted, "inputs": X}
    statistics = parts.statistics.sum(dim=2) + parts.statistics_of_no_sample.squeeze(2)
    arrays |= {"statistics": statistics, "unexplained": parts.unexplained.squeeze(2)}
    metadata = {"head": head_name, "rule": quadrature.name, "digest": trajectory.digest, "outputs": outputs.value}
    write_arrays(folder / "attribution.safetensors", arrays, metadata)
    shutil.rmtree(folder / PARTIAL)
    drawn = range(min(_MAX_DRAWN, len(X)))
    picture = folder / "attribution.png"
    draw_attributions(picture, breakdown, trajectory, X, drawn, top, head=head_name, labels=chosen.labels)
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
    config |= {"outputs": outputs.value, "seed": seed, "points": str(chosen)}
    config |= {"workers": workers, "scheduler": scheduler}
    write_json(folder / "attribution.json", "attribute", config, results, timer)
    num_outputs = trajectory.num_outputs if outputs is ExplainedOutputs.every else 1
    note = f"; the first {_MAX_DRAWN} are drawn" if len(X) > _MAX_DRAWN else ""
    typer.echo(f"{len(X)} points x {num_outputs} outputs x {trajectory.num_points} training points{note}")
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
        ValueError: The contributions are not certified.
    """
    if isinstance(rule, AdaptiveRule) and not parts.certified:
        findings = "; ".join(describe_findings(parts))
        raise ValueError(
            f"the contributions must sum to the network's outputs, certified: {findings}. Do not use them; check the "
            "run with epk-gp verify."
        )
