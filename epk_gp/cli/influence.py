"""`epk-gp influence`: how predictions depend on the weight of every training point."""

import csv
import shutil
import warnings
from pathlib import Path
from typing import Unpack

import torch
import typer
from torch import Tensor

from epk_gp.cli.kernel_requests import ExplanationRequest, read_predictions
from epk_gp.cli.options import ExplainedOutputs, PredictionOptions
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.show import CertificateWarning
from epk_gp.kernel_machine.influence import Influence, Smoothing
from epk_gp.kernel_machine.influence import influence as influence_of
from epk_gp.plots.contributions import influence_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json

_MAX_DRAWN = 6  # points that are drawn


def influence(
    *,
    out: Path,
    top: int,
    smoothing: int,
    scheduler: str | None,
    **options: Unpack[PredictionOptions],
) -> None:
    """Write how outputs depend on every training point's weight, a table of the largest effects, and draw them.

    A command that was killed resumes from its partial sums when it is run again.
    """
    timer, workers = Stopwatch(), options["workers"]
    require_one_executor(workers, scheduler)
    asked = read_predictions(options)
    trajectory, X = asked.trajectory, asked.chosen.X
    folder = make_folder(out)
    typer.echo(f"explaining {asked.chosen}")
    with open_executor(workers, scheduler, resumes=True) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end
        effect = influence_of(
            trajectory,
            X,
            head=asked.head,
            classes=asked.classes,
            smoothing=Smoothing(smoothing, seed=options["seed"] or 0) if smoothing else None,
            checkpoint=folder / PARTIAL,
            memory_budget=memory_bytes(options["memory"]),
            progress=not options["quiet"],
            executor=executor,
        )
    arrays = {"values": effect.values, "outputs": effect.outputs, "std": effect.std}
    arrays |= {"adjoint_norms": effect.adjoint_norms, "predicted": asked.predicted, "inputs": X}
    outputs = asked.outputs.value
    metadata = {"head": asked.head, "digest": trajectory.digest, "outputs": outputs, "smoothing": str(smoothing)}
    write_arrays(folder / "influence.safetensors", arrays, metadata)
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    rows = _of_predicted(asked, effect)
    _write_table(folder / "influence.csv", asked, rows, top)
    drawn = range(min(_MAX_DRAWN, len(X)))
    figure = influence_figure(effect, asked.predicted, drawn, top, trajectory, head=asked.head)
    save_figure(figure, folder / "influence.png", palette=True)
    config: dict[str, object] = {"run": options["run"], "head": asked.head, "num_points": len(X), "top": top}
    config |= {"dtype": str(X.dtype), "outputs": outputs, "seed": options["seed"], "points": str(asked.chosen)}
    config |= {"smoothing": smoothing, "workers": workers, "scheduler": scheduler}
    write_json(folder / "influence.json", "influence", config, _summary(asked, effect, rows, top), timer)
    note = f"; the first {_MAX_DRAWN} are drawn" if len(X) > _MAX_DRAWN else ""
    num_outputs = effect.outputs.shape[1]
    typer.echo(f"{len(X)} points x {num_outputs} outputs x {trajectory.num_points} training points{note}")
    typer.echo(
        f"the derivative in the weights is at most {float(effect.growth.max()):.3g} times as large along the run as at "
        "its end"
    )
    files = ", ".join(f"influence.{ending}" for ending in ("safetensors", "csv", "json", "png"))
    typer.echo(f"written to {folder}: {files} ({timer.total:.1f} s)")
    if not effect.certified:
        raise ValueError(
            f"the derivative must be certified: {'; '.join(effect.findings)}. Check the run with epk-gp verify."
        )


def _of_predicted(asked: ExplanationRequest, effect: Influence) -> tuple[Tensor, Tensor]:
    """Return the derivatives of each point's predicted output, (n, M), and that output, (n,)."""
    n = torch.arange(len(asked.predicted))
    column = torch.zeros_like(asked.predicted) if asked.outputs is ExplainedOutputs.predicted else asked.predicted
    return effect.values[n, column], effect.outputs[n, column]


def _listed(values: Tensor, top: int) -> list[tuple[int, float]]:
    """Return the points of the largest derivatives of either sign, from the largest to the smallest."""
    ordered, order = values.sort(descending=True)
    ranked = list(zip(order.tolist(), ordered.tolist(), strict=True))
    raised, lowered = [pair for pair in ranked[:top] if pair[1] > 0], [pair for pair in ranked[-top:] if pair[1] < 0]
    return raised + [pair for pair in lowered if pair not in raised]


def _write_table(path: Path, asked: ExplanationRequest, rows: tuple[Tensor, Tensor], top: int) -> None:
    """Write the training points on whose weights each predicted output depends most, one line each, as CSV."""
    targets = asked.trajectory.targets
    has_labels = targets.ndim == 1 and targets.dtype == torch.int64
    with path.open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["point", "output", "network", "training_point", "label", "influence", "predicted_without"])
        for n, (values, output) in enumerate(zip(*rows, strict=True)):
            for index, value in _listed(values, top):
                label = int(targets[index]) if has_labels else ""
                network = float(output)
                table.writerow([n, int(asked.predicted[n]), network, index, label, value, network - value])


def _summary(asked: ExplanationRequest, effect: Influence, rows: tuple[Tensor, Tensor], top: int) -> dict[str, object]:
    points = [
        {
            "point": n,
            "output": int(asked.predicted[n]),
            "network": float(output),
            "std": float(values.square().sum().sqrt()),
            "largest": [{"training_point": index, "influence": value} for index, value in _listed(values, top)],
        }
        for n, (values, output) in enumerate(zip(*rows, strict=True))
    ]
    return {
        "certified": effect.certified,
        "held": list(effect.held),
        "max_step_mismatch": effect.max_step_mismatch,
        "growth": float(effect.growth.max()),
        "points": points,
    }
