"""`epk-gp report`: the report of a run as one HTML file."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from epk_gp.analysis.labels import label_errors as errors_of_labels
from epk_gp.analysis.maps import uncertainty_on_plane
from epk_gp.cli import options as opt
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.uncertainty import parse_names, parse_plane, read_validation
from epk_gp.core.show import CertificateWarning
from epk_gp.core.torch_overrides import filter_own_warnings
from epk_gp.gp.data import training_labels
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.provenance import Stopwatch
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.report.points import Appearance
from epk_gp.report.text import Tokenizer
from epk_gp.report.write import write_report

_OUTPUTS = (
    "predicted (and the true class where it is another), all, or a number: the most probable; or answers: the "
    "log-probability of the classes or words that the file of --points holds as `answers`."
)
_TOKENIZER = "A tokenizer.json: inputs that are token ids are shown as text."
_VALIDATION = "Show how sure predictions are, by a process fitted with these points: as in epk-gp uncertainty."


def report(
    run: opt.RunFolder,
    out: Annotated[Path, typer.Option(help="The HTML file; it needs nothing beside it.")] = Path("report.html"),
    num_points: Annotated[int, opt.count("Largest number of points that are explained; the overview is of all.")] = 6,
    outputs: Annotated[str, typer.Option(help=_OUTPUTS)] = "predicted",
    title: Annotated[str | None, typer.Option(help="Title of the page; the run's digest by default.")] = None,
    class_names: Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the classes.")] = None,
    feature_names: opt.FeatureNames = None,
    tokenizer: Annotated[Path | None, typer.Option(help=_TOKENIZER)] = None,
    rule: opt.RuleOption = "adaptive",
    path: opt.PathOption = None,
    validation: Annotated[str | None, typer.Option(metavar="SOURCE", help=_VALIDATION)] = None,
    label_errors: Annotated[bool, typer.Option("--label-errors", help="Show suspicious labels.")] = False,
    map: Annotated[bool, typer.Option("--map", help="Map scores over two principal directions.")] = False,  # noqa: A002
    columns: opt.Columns = None,
    others: opt.Others = None,
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    seed: opt.Seed = 0,
) -> None:
    """Write a report: explained predictions that add up, their certificate, and the run as a whole, as one HTML file.

    It opens in a browser from the disk, and asks for nothing else.
    """
    opt.validate_run(run, out)
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), opt.parse_path(path)
    shown: dict[str, Any] = {"outputs": _parse_outputs(outputs), "title": title}
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out must be an HTML file, as in report.html: got {out}.")
    if out.is_dir():
        raise IsADirectoryError(f"--out must be a file: {out} is a folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if outputs == "answers" and validation is not None:
        raise ValueError("--outputs answers must stand without --validation, which is of the outputs. Leave one out.")
    if validation is None and (map or columns is not None):
        raise ValueError("--map and --columns must stand beside --validation: they map its scores. Pass it too.")
    trajectory = open_run(run, network)
    plane = parse_plane(trajectory, map, columns, others, feature_names)
    if label_errors or validation is not None:
        training_labels(trajectory, "report --label-errors" if label_errors else "report --validation")
    if validation is None:
        fitted, chosen = None, read_points(trajectory, run, points)
    else:
        fitted, chosen = read_validation(validation, points, run, trajectory, seed=seed)
    if outputs == "answers":
        chosen = chosen.taken(torch.arange(len(chosen.X))[:num_points])
        del shown["outputs"]
        shown |= chosen.answered()
    else:
        shown["y"] = chosen.labels
    num_explained = min(num_points, len(chosen.X))
    look: dict[str, Any] = {"names": parse_names(feature_names)}
    look["tokenizer"] = None if tokenizer is None else _read_tokenizer(tokenizer)
    Appearance(trajectory, **look)  # refuses names and words before anything is computed
    shown |= {"class_names": parse_names(class_names), **look}
    typer.echo(f"explaining {num_explained} of {chosen}")
    partial = out.with_name(f"{out.name}.{opt.PARTIAL}")
    settings: dict[str, Any] = {"memory_budget": int(memory * 2**30), "progress": True}
    if fitted is not None:
        process = UncertainClassifier(trajectory, seed=seed, **settings)
        shown["posterior"] = process.fit(fitted.X, fitted.labels)
        if plane is not None:
            shown["uncertainty_map"] = uncertainty_on_plane(process, plane)
    if label_errors:
        shown["suspects"] = errors_of_labels(trajectory, seed=seed, **settings)
    finding, how = "", settings | {"rule": quadrature, "path": along, "checkpoint": partial}
    try:
        with filter_own_warnings("error" if isinstance(quadrature, AdaptiveRule) else "ignore", CertificateWarning):
            write_report(out, trajectory, chosen.X, explained=num_explained, **shown, **how)
    except CertificateWarning as warning:  # once the report is written
        finding = str(warning)
    shutil.rmtree(partial, ignore_errors=True)
    typer.echo(f"written to {out}: {out.stat().st_size / 1e6:.2f} MB, to be opened in a browser ({timer.total:.1f} s)")
    if finding:
        raise ValueError(f"{finding} The report says so; check the run with epk-gp verify.")


def _read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer of the library `tokenizers`, which is no dependency of this package."""
    try:
        library = import_module("tokenizers")
    except ImportError as error:
        raise ValueError("--tokenizer needs the package tokenizers: pip install tokenizers.") from error
    try:
        read: Tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:  # it raises no class of its own
        raise ValueError(f"--tokenizer must be a tokenizer.json of the package tokenizers: {file}: {error}.") from error
    return read


def _parse_outputs(text: str) -> int | str:
    if text in ("predicted", "all", "answers"):
        return text
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0:
        return int(text)
    raise ValueError(f"--outputs must be predicted, all, answers, or a number of classes from 1: got {text[:40]!r}.")
