"""`epk-gp attribute`: the exact contribution of every training point to predictions."""

import shutil
import warnings
from pathlib import Path
from typing import Unpack

import typer

from epk_gp.analysis.breakdown import prediction_breakdown, summarise, write_table
from epk_gp.cli.kernel_requests import read_predictions
from epk_gp.cli.options import ExplainedOptions, ExplainedOutputs
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.show import CertificateWarning
from epk_gp.kernel_machine.attribute import GroupedAttribution, attribute_many
from epk_gp.kernel_machine.certification import describe_findings
from epk_gp.plots.contributions import attribution_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json
from epk_gp.quadrature.rules import AdaptiveRule, Rule

_MAX_DRAWN = 6  # points that are drawn


def attribute(
    *,
    out: Path,
    top: int,
    scheduler: str | None,
    **options: Unpack[ExplainedOptions],
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, workers = Stopwatch(), options["workers"]
    require_one_executor(workers, scheduler)
    asked = read_predictions(options, options["rule"], options["path"])
    trajectory, X, outputs = asked.trajectory, asked.chosen.X, asked.outputs
    folder = make_folder(out)
    typer.echo(f"explaining {asked.chosen}")
    predicted = asked.predicted
    with open_executor(workers, scheduler, resumes=True) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end, or expected of a fixed rule
        parts, by_range = attribute_many(
            trajectory,
            X,
            asked.groupings,
            head=asked.head,
            rule=asked.rule,
            path=asked.path,
            classes=asked.classes,
            checkpoint=folder / PARTIAL,
            memory_budget=memory_bytes(options["memory"]),
            progress=not options["quiet"],
            executor=executor,
        )
    breakdown = prediction_breakdown(parts, by_range, predicted)
    arrays = {"initial": parts.initial, "samples": parts.values, "decay": parts.decay.squeeze(2), "total": parts.total}
    arrays |= {"network": parts.network, "steps": by_range.values, "predicted": predicted, "inputs": X}
    statistics = parts.statistics.sum(dim=2) + parts.statistics_of_no_sample.squeeze(2)
    arrays |= {"statistics": statistics, "unexplained": parts.unexplained.squeeze(2)}
    metadata = {"head": asked.head, "rule": asked.rule.name, "digest": trajectory.digest, "outputs": outputs.value}
    write_arrays(folder / "attribution.safetensors", arrays, metadata)
    shutil.rmtree(folder / PARTIAL)
    drawn = range(min(_MAX_DRAWN, len(X)))
    picture = folder / "attribution.png"
    labels = asked.chosen.labels
    figure = attribution_figure(breakdown, trajectory, X, drawn, top, head=asked.head, labels=labels)
    save_figure(figure, picture, palette=X.ndim != 4 or X.shape[1] == 1)  # images in colour need more colours
    results = summarise(parts, breakdown, trajectory.targets, top)
    write_table(folder / "attribution.csv", breakdown, trajectory.targets, top)
    config: dict[str, object] = {
        "run": options["run"],
        "head": asked.head,
        "rule": options["rule"],
        "path": options["path"],
        "num_points": len(X),
        "dtype": str(X.dtype),
        "top": top,
    }
    config |= {"outputs": outputs.value, "seed": options["seed"], "points": str(asked.chosen)}
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
    _require_completeness(parts, asked.rule)


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
