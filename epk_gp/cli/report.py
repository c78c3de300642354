"""`epk-gp report`: the report of a run as one HTML file."""

import os
import shutil
from pathlib import Path
from typing import TypedDict, Unpack

import torch
import typer
from jaxtyping import Int64, Shaped
from torch import Tensor

from epk_gp.analysis.labels import label_errors
from epk_gp.analysis.maps import UncertaintyMap, principal_plane, uncertainty_on_plane
from epk_gp.autodiff.verification import filter_own_warnings
from epk_gp.cli.data import PointSource, cast_points, draw_rows, read_points
from epk_gp.cli.labelled import LabelledPoints, read_labelled
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import PathOptions
from epk_gp.cli.parsing import PARTIAL, memory_bytes, parse_path, parse_rule, torch_dtype
from epk_gp.cli.scores import read_validation
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.options import SupportsSubmit
from epk_gp.core.show import CertificateWarning
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.data import training_labels
from epk_gp.gp.models import LogitGP
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.kernel_machine.influence import influence as influence_of
from epk_gp.provenance import Stopwatch
from epk_gp.quadrature.rules import AdaptiveRule, gauss_legendre
from epk_gp.report.points import appearance
from epk_gp.report.request import ExplainedOutputs
from epk_gp.report.write import write_report

_NUM_CONDITION, _FIT_STEPS, _NODES = 300, 50, 4  # of the map, as of `epk-gp uncertainty`


class ReportOptions(PathOptions):
    """The options of `epk-gp report`, but for its file."""

    num_points: int
    top: int
    layers: bool
    outputs: str
    title: str | None
    class_names: str | None
    feature_names: str | None
    influence: bool
    validation: str | None
    outside: str | None
    label_errors: bool
    map: bool
    kernel_points: int
    scheduler: str | None


class _Computing(TypedDict):
    """How everything is computed: the part of `ComputeSettings` that all calls share."""

    memory_budget: int
    progress: bool
    executor: SupportsSubmit | None


def report(*, out: Path, **options: Unpack[ReportOptions]) -> None:
    """Write what predictions are made of, and how sure they are, as one HTML file.

    A command that was killed resumes the contributions from its partial sums when it is run again.
    """
    asked, timer = options, Stopwatch()
    rule, path, out = parse_rule(asked["rule"]), parse_path(asked["path"]), _parse_out(out)
    require_one_executor(asked["workers"], asked["scheduler"])
    outputs = _parse_outputs(asked["outputs"])
    if asked["outside"] is not None and asked["validation"] is None:
        raise ValueError("--outside must stand beside --validation: its scores are those of the process fitted there.")
    trajectory = open_run(asked["run"], asked["network"])
    if asked["label_errors"] or asked["validation"] is not None:
        training_labels(trajectory, "report --label-errors" if asked["label_errors"] else "report --validation")
    validation, X, y, words = _read_points(asked, trajectory)
    outside = None
    if asked["outside"] is not None:
        outside = read_labelled(asked["outside"], asked["run"], trajectory).X
    explained = draw_rows(len(X), asked["num_points"], asked["seed"])
    head, classes = asked["head"], _parse_names(asked["class_names"])
    features = _parse_names(asked["feature_names"])
    appearance(trajectory, features, None)  # refuses names before anything is computed
    typer.echo(f"explaining {len(explained)} of {words}")
    partial = out.with_name(f"{out.name}.{PARTIAL}")
    with open_executor(asked["workers"], asked["scheduler"], resumes=True) as executor:
        computing: _Computing = {
            "memory_budget": memory_bytes(asked["memory"]),
            "progress": not asked["quiet"],
            "executor": executor,
        }
        effect = None
        if asked["influence"]:
            effect = influence_of(
                trajectory,
                X[explained],
                head=None if head is None else head.value,
                checkpoint=partial / "influence",
                **computing,
            )
        model = None
        if validation is not None:
            model = UncertainClassifier(trajectory, seed=asked["seed"] or 0, **computing)
            model.fit(validation.X, validation.labels)
        suspects = label_errors(trajectory, seed=asked["seed"] or 0, **computing) if asked["label_errors"] else None
        surface = _map(trajectory, asked) if asked["map"] else None
        finding = ""
        try:
            with filter_own_warnings("error" if isinstance(rule, AdaptiveRule) else "ignore", CertificateWarning):
                write_report(
                    out,
                    trajectory,
                    X,
                    y,
                    title=asked["title"],
                    head=None if head is None else head.value,
                    rule=rule,
                    path=path,
                    outputs=outputs,
                    explained=explained.tolist(),
                    class_names=classes,
                    names=features,
                    top=asked["top"],
                    by_layers=asked["layers"],
                    influence=effect,
                    posterior=model,
                    outside=outside,
                    suspects=suspects,
                    uncertainty_map=surface,
                    kernel_points=asked["kernel_points"],
                    checkpoint=partial,
                    **computing,
                )
        except CertificateWarning as warning:  # once the report is written
            finding = str(warning)
    shutil.rmtree(partial, ignore_errors=True)
    typer.echo(
        f"written to {out}: {os.path.getsize(out) / 1e6:.2f} MB, to be opened in a browser ({timer.total:.1f} s)"
    )
    if finding:
        raise ValueError(f"{finding} The report says so; check the run with epk-gp verify.")


def _read_points(
    asked: ReportOptions, trajectory: Trajectory
) -> tuple[LabelledPoints | None, Shaped[Tensor, "n ..."], Int64[Tensor, " n"] | None, str]:
    """Return labelled validation points, if they are asked for; the points, their labels, and what they are."""
    dtype = None if asked["dtype"] is None else torch_dtype(asked["dtype"])
    if asked["validation"] is None:
        chosen = read_points(PointSource(asked["run"], asked["points"], dtype), trajectory, None)
        return None, chosen.X, chosen.labels, str(chosen)
    validation, points = read_validation(
        asked["validation"], asked["points"], asked["run"], trajectory, seed=asked["seed"] or 0
    )
    X = cast_points(points.X, trajectory, dtype)
    return validation, X, points.labels, str(points)


def _map(trajectory: Trajectory, asked: ReportOptions) -> UncertaintyMap:
    """Map the uncertainty of a GP on the logits over the plane of the data's principal directions."""
    seed, shown = asked["seed"] or 0, not asked["quiet"]
    chosen = draw_rows(trajectory.num_points, _NUM_CONDITION, seed).tolist()
    gp = LogitGP(trajectory, points=chosen, rule=gauss_legendre(_NODES))
    gp.fit(_FIT_STEPS, progress=shown)
    generator = torch.Generator().manual_seed(seed)
    return uncertainty_on_plane(gp, principal_plane(trajectory.inputs), generator=generator, progress=shown)


def _parse_outputs(text: str) -> ExplainedOutputs:
    if text == "predicted":
        return "predicted"
    if text == "all":
        return "all"
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0:
        return int(text)
    raise ValueError(f"--outputs must be predicted, all, or a number of classes from 1: got {text[:40]!r}.")


def _parse_names(text: str | None) -> list[str] | None:
    """Return the names that an option has, with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",")]


def _parse_out(out: Path) -> Path:
    """Return the file for the report, after making its folder.

    Raises:
        ValueError: It has another ending than .html.
        OSError: Its folder cannot be made, or a folder has its name.
    """
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out must be an HTML file, as in report.html: got {out}.")
    if out.is_dir():
        raise IsADirectoryError(f"--out must be a file: {out} is a folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out
