"""`epk-gp report`: the report of a run as one HTML file."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from epk_gp.analysis.labels import label_errors as errors_of_labels
from epk_gp.analysis.maps import UncertaintyMap, principal_plane, uncertainty_on_plane
from epk_gp.cli import options as opt
from epk_gp.cli.data import cast_points, draw_rows, read_labelled, read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.uncertainty import Columns, FeatureNames, Others, parse_columns, parse_names, read_validation
from epk_gp.cli.workers import computing
from epk_gp.core.show import CertificateWarning
from epk_gp.core.torch_overrides import filter_own_warnings
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.data import training_labels
from epk_gp.gp.models import LogitGP
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.kernel_machine.influence import influence as influence_of
from epk_gp.provenance import Stopwatch
from epk_gp.quadrature.rules import AdaptiveRule, gauss_legendre
from epk_gp.report.points import Appearance
from epk_gp.report.text import Tokenizer
from epk_gp.report.write import write_report

_NUM_CONDITION, _FIT_STEPS, _NODES = 300, 50, 4  # of the map, as of `epk-gp uncertainty`
_OUTPUTS = (
    "predicted (and the true class where it is another), all, or a number: the most probable; or answers: the "
    "log-probability of the classes or words that the file of --points holds as `answers`."
)
_TOKENIZER = "A tokenizer.json: inputs that are token ids are shown as text."
_OUTSIDE = "With --validation: points unlike the training data, to test scores on."


def report(
    run: opt.RunFolder,
    out: Annotated[Path, typer.Option(help="The HTML file; it needs nothing beside it.")] = Path("report.html"),
    num_points: Annotated[int, opt.count("Largest number of points that are explained; the overview is of all.")] = 6,
    top: Annotated[int, opt.count("Training points named of either sign, at most 50.", 1, 50)] = 10,
    outputs: Annotated[str, typer.Option(help=_OUTPUTS)] = "predicted",
    title: Annotated[str | None, typer.Option(help="Title of the page; the run's digest by default.")] = None,
    class_names: Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the classes.")] = None,
    feature_names: FeatureNames = None,
    tokenizer: Annotated[Path | None, typer.Option(help=_TOKENIZER)] = None,
    head: opt.HeadOption = None,
    rule: opt.RuleOption = "adaptive",
    path: opt.PathOption | None = None,
    influence: Annotated[bool, typer.Option("--influence", help="Show influence beside contributions.")] = False,
    validation: opt.Source = None,
    outside: Annotated[str | None, typer.Option(metavar="SOURCE", help=_OUTSIDE)] = None,
    label_errors: Annotated[bool, typer.Option("--label-errors", help="Show suspicious labels.")] = False,
    map: Annotated[bool, typer.Option("--map", help="Map a GP's uncertainty over a plane.")] = False,  # noqa: A002
    columns: Columns = None,
    others: Others = None,
    kernel_points: Annotated[int, opt.count("Training points in the kernel matrix; 0 leaves it out.", 0, 500)] = 100,
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    seed: opt.SeedOfPoints = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write a report: explained predictions that add up, their certificate, and the run as a whole, as one HTML file.

    It opens in a browser from the disk, and asks for nothing else.
    """
    opt.validate_run(run, out, workers, scheduler)
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), None if path is None else opt.parse_path(path)
    shown: dict[str, Any] = {"outputs": _parse_outputs(outputs), "title": title, "top": top}
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"--out must be an HTML file, as in report.html: got {out}.")
    if out.is_dir():
        raise IsADirectoryError(f"--out must be a file: {out} is a folder.")
    out.parent.mkdir(parents=True, exist_ok=True)
    if outside is not None and validation is None:
        raise ValueError("--outside must stand beside --validation: its scores are those of the process fitted there.")
    if outputs == "answers" and (validation is not None or map):
        raise ValueError("--outputs answers must stand without --validation and --map, which are of the outputs.")
    if (validation is None or map) if columns is not None else others is not None:
        raise ValueError("--columns must stand beside --validation, without --map, and --others beside --columns.")
    trajectory = open_run(run, network)
    plane = None if columns is None else parse_columns(columns, others, feature_names, trajectory.inputs)
    if label_errors or validation is not None:
        training_labels(trajectory, "report --label-errors" if label_errors else "report --validation")
    if validation is None:
        fitted, chosen = None, read_points(trajectory, run, points, dtype=opt.DTYPES.get(dtype))
    else:
        fitted, chosen = read_validation(validation, points, run, trajectory, seed=seed or 0)
    asked: dict[str, Any] = {"head": head}
    if outputs == "answers":
        chosen = chosen.taken(draw_rows(len(chosen.X), num_points, seed))
        asked = chosen.answered(head)
        del shown["outputs"]
    else:
        shown["y"] = chosen.labels
    X = cast_points(chosen.X, trajectory, opt.DTYPES.get(dtype))
    explained = draw_rows(len(X), num_points, seed)
    if outside is not None:
        shown["outside"] = read_labelled(outside, run, trajectory).X
    look: dict[str, Any] = {"names": parse_names(feature_names)}
    look["tokenizer"] = None if tokenizer is None else _read_tokenizer(tokenizer)
    Appearance(trajectory, **look)  # refuses names and words before anything is computed
    shown |= {"class_names": parse_names(class_names), "kernel_points": kernel_points, **look}
    typer.echo(f"explaining {len(explained)} of {chosen}")
    partial = out.with_name(f"{out.name}.{opt.PARTIAL}")
    with computing(memory, workers, scheduler, quiet, partial) as settings:
        del settings["checkpoint"]  # each call has its own
        if influence:
            resumed = settings | {"checkpoint": partial / "influence"}
            shown["influence"] = influence_of(trajectory, X[explained], **asked, **resumed)
        if fitted is not None:
            process = UncertainClassifier(trajectory, seed=seed or 0, **settings)
            shown["posterior"] = process.fit(fitted.X, fitted.labels)
            if plane is not None:
                shown["uncertainty_map"] = uncertainty_on_plane(process, plane)
        if label_errors:
            shown["suspects"] = errors_of_labels(trajectory, seed=seed or 0, **settings)
        if map:
            shown["uncertainty_map"] = _map(trajectory, seed or 0, quiet)
        finding = ""
        try:
            with filter_own_warnings("error" if isinstance(quadrature, AdaptiveRule) else "ignore", CertificateWarning):
                how: dict[str, Any] = settings | {"rule": quadrature, "path": along, "checkpoint": partial}
                write_report(out, trajectory, X, explained=explained.tolist(), **asked, **shown, **how)
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


def _map(trajectory: Trajectory, seed: int, quiet: bool) -> UncertaintyMap:
    """Map the uncertainty of a GP on the logits over the plane of the data's principal directions."""
    chosen = draw_rows(trajectory.num_points, _NUM_CONDITION, seed).tolist()
    gp = LogitGP(trajectory, points=chosen, rule=gauss_legendre(_NODES))
    gp.fit(_FIT_STEPS, progress=not quiet)
    generator = torch.Generator().manual_seed(seed)
    return uncertainty_on_plane(gp, principal_plane(trajectory.inputs), generator=generator, progress=not quiet)


def _parse_outputs(text: str) -> int | str:
    if text in ("predicted", "all", "answers"):
        return text
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0:
        return int(text)
    raise ValueError(f"--outputs must be predicted, all, answers, or a number of classes from 1: got {text[:40]!r}.")
