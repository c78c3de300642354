"""`epk-gp uncertainty`: scores of points by an `UncertainClassifier`, and a map of these scores."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from epk_gp.analysis.maps import Plane, UncertaintyMap, column_plane, principal_plane, uncertainty_on_plane
from epk_gp.analysis.measures import error_detection
from epk_gp.cli import options as opt
from epk_gp.cli.data import ChosenPoints, read_labelled
from epk_gp.cli.networks import open_run
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.data import MIN_VALIDATION_POINTS, count_seen, training_labels
from epk_gp.gp.label_process import InputFeatures
from epk_gp.gp.stacking import Stacking, classes_in_every_set
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.plots.maps import map_figure
from epk_gp.plots.scores import scores_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json

_SCORES = ("error", "out_of_distribution", "entropy", "mutual_information", "std")
_MAPPED = ("x", "y", "training", "network_class", "probability", "std", "entropy", "mutual_information",
           "out_of_distribution")  # fmt: skip
_GRID = 40  # nodes per side
_PRINCIPAL = ("first principal direction", "second principal direction")
_VALIDATION = (
    "Labelled points that the network has not seen: held-out, the run's own; a file (.safetensors or .npz) with "
    "`inputs` and `labels`; or a folder of MNIST-format files (its test part). Without --points half of them, drawn "
    "with --seed, are kept to be scored."
)
_POINTS = "The points that are scored: a file with `inputs`, and perhaps `labels`, or a folder of MNIST-format files."


def uncertainty(
    run: opt.RunFolder,
    out: opt.Out = Path("uncertainty"),
    validation: Annotated[str, typer.Option(metavar="SOURCE", help=_VALIDATION)] = "held-out",
    points: Annotated[Path | None, typer.Option(help=_POINTS)] = None,
    alpha: Annotated[
        float, opt.number("Share of sets of classes without the true one.", below=1.0, or_equal=False)
    ] = 0.1,
    map: Annotated[bool, typer.Option("--map", help="Map scores over two principal directions.")] = False,  # noqa: A002
    columns: opt.Columns = None,
    others: opt.Others = None,
    feature_names: opt.FeatureNames = None,
    grid: Annotated[int | None, opt.count("Nodes per side of a map, 2 to 400; 40 by default.", 2, 400)] = None,
    network: opt.Network = None,
    seed: opt.Seed = 0,
) -> None:
    """Score points: how likely a prediction is wrong, and how unlike the training data a point is.

    Beside the scores stand sets of classes that hold the true one as often as asked for. With --map or --columns the
    scores are mapped too.
    """
    options = dict(locals())
    opt.validate_run(run, out)
    timer, trajectory = Stopwatch(), open_run(run, network)
    training_labels(trajectory, "uncertainty")
    plane = parse_plane(trajectory, map, columns, others, feature_names)
    if (grid is not None and plane is None) or (feature_names is not None and columns is None):
        raise ValueError("--grid must stand beside --map or --columns, --feature-names beside --columns. Add them.")
    fitted, scored = read_validation(validation, points, run, trajectory, seed=seed)
    folder = opt.make_folder(out)
    typer.echo(f"scoring {scored}, with {fitted} as validation points")
    model = UncertainClassifier(trajectory, seed=seed, progress=True).fit(fitted.X, fitted.labels)
    results = _describe_model(model) | _write_scores(folder, model, scored, fitted, alpha)
    files = ["scores.npz", "scores.png", "uncertainty.json"]
    if plane is not None:
        _write_map(folder, uncertainty_on_plane(model, plane, size=grid or _GRID), trajectory.digest, fitted.X)
        files += ["map.png", "map.safetensors"]
    config = options | {"validation": str(fitted), "points": str(scored)}
    write_json(folder / "uncertainty.json", "uncertainty", config, results, timer)
    for line in _score_lines(results, alpha):
        typer.echo(line)
    typer.echo(f"written to {folder}: {', '.join(files)} ({timer.total:.1f} s)")


def _write_map(folder: Path, m: UncertaintyMap, digest: str, validation: Tensor) -> None:
    """Write and draw a map."""
    axes, words = (_PRINCIPAL, describe_plane(m.plane.origin.numel())) if m.plane.columns is None else (None, None)
    save_figure(map_figure(m, axes, plane=words, validation=validation), folder / "map.png", palette=True)
    arrays = {name: getattr(m, name) for name in _MAPPED} | {"origin": m.plane.origin, "axes": m.plane.axes}
    write_arrays(folder / "map.safetensors", arrays, {"digest": digest, "rows": "y", "columns": "x"})


def describe_plane(num_entries: int) -> str:
    """Return which plane a map shows of inputs with so many coordinates, as the line above the picture."""
    return (
        f"Shown is the plane of the first two principal directions of the training inputs ({num_entries} coordinates) "
        "through their mean.\nTraining points are projected onto it."
    )


def parse_names(text: str | None) -> list[str] | None:
    """Return the names that an option has, with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_plane(
    trajectory: Trajectory, is_principal: bool, columns: str | None, others: str | None, feature_names: str | None
) -> Plane | None:
    """Return the plane of a map: the principal directions (--map), two columns (--columns), or None.

    Raises:
        ValueError: Both are given, or an option would be ignored, or the columns are not there.
    """
    if (columns is None and others is not None) or (columns is not None and is_principal):
        raise ValueError("--columns must stand without --map, and --others beside --columns. Leave one out.")
    if columns is not None:
        return _parse_columns(columns, others, parse_names(feature_names), trajectory.inputs)
    return principal_plane(trajectory.inputs) if is_principal else None


def _parse_columns(columns: str, others: str | None, names: list[str] | None, X: Tensor) -> Plane:
    """Return the plane of the columns of a table that options name.

    Raises:
        ValueError: They name no two columns, or values that these do not have.
    """
    kinds, ends, axes = dict[Any, Any](), dict[Any, Any](), list[Any]()

    def column(word: str) -> str | int:
        return word.strip() if word.strip() in (names or ()) or not word.strip().isdecimal() else int(word)

    try:
        for part in columns.split(","):
            word, _, own = part.partition("=")
            axes.append(column(word))
            if ".." in own:
                ends[axes[-1]] = tuple(map(float, own.split("..")))
            elif own:
                pairs = [kind.split(":", 1) for kind in own.split("/")]
                kinds[axes[-1]] = {float(value): name for value, name in pairs}
        x, y = axes
        pairs = [pair.split("=") for pair in (others or "").split(",") if pair]
        held = {column(word): float(value) for word, value in pairs}
    except ValueError as error:
        given = f"{columns!r}" if others is None else f"{columns!r} and {others!r}"
        raise ValueError(f"--columns must be X,Y, and --others NAME=VALUE,...: got {given} ({error}).") from error
    return column_plane(X, x, y, names=names, others=held, categories=kinds, extent=ends)


def read_validation(
    validation_source: str, points_file: Path | None, run: Path, trajectory: Trajectory, *, seed: int
) -> tuple[ChosenPoints, ChosenPoints]:
    """Read validation points, and the points that are scored: others, or half of them where none are named.

    Args:
        validation_source: Where the validation points are, as for `read_labelled`.
        points_file: Where the others are; None for half of the validation points.
        run: Folder of the run.
        trajectory: The run.
        seed: Of the division.

    Raises:
        ValueError: The validation points have no labels, or are too few, or a file is damaged.
        OSError: A file cannot be read.
    """
    source = read_labelled(validation_source, run, trajectory)
    if source.labels is None:
        raise ValueError(f"validation points must have labels: {validation_source} has no `labels`.")
    if points_file is None:
        validation, points = source.halves(seed)
    else:
        validation, points = source, read_labelled(str(points_file), run, trajectory)
        points = replace(points, labels=None) if points_file.is_dir() else points
    if len(validation.X) < MIN_VALIDATION_POINTS:
        raise ValueError(f"there must be at least {MIN_VALIDATION_POINTS} validation points: got {len(validation.X)}.")
    count_seen(validation.X, trajectory)  # raises if most are training points
    return validation, points


def _write_scores(
    folder: Path, model: UncertainClassifier, points: ChosenPoints, validation: ChosenPoints, alpha: float
) -> dict[str, object]:
    """Write and draw the scores of points. Return what they say on average, and where labels are known, how well."""
    X, labels = points.X, points.labels
    u = model.uncertainty(X)
    z = network_outputs(model.trajectory, X).to(torch.float64).softmax(1)
    predicted, softmax = z.argmax(1), 1 - z.amax(1)
    p, sets = torch.as_tensor(model.predict_proba(X)), torch.as_tensor(model.predict_set(X, alpha))
    error, far = torch.as_tensor(u.error), torch.as_tensor(u.out_of_distribution)
    ordinary = torch.as_tensor(model.uncertainty(validation.X, 2).out_of_distribution)
    arrays = {name: torch.as_tensor(getattr(u, name)) for name in _SCORES}
    arrays |= {"probability": p, "predicted": p.argmax(1), "network_predicted": predicted}
    arrays |= {"sets": sets, "row": points.rows}
    results: dict[str, object] = {
        "num_points": len(X),
        "mean_error_score": float(error.mean()),
        "mean_set_size": float(sets.sum(1).double().mean()),
        "classes_in_every_set": classes_in_every_set(p.shape[1], model.conformity_scores_, alpha),
        "share_beyond_95_percent_of_validation": float((far > ordinary.quantile(0.95)).double().mean()),
    }
    risks: dict[str, Tensor] = {}
    if labels is not None:
        arrays["labels"] = labels
        wrong = predicted != labels
        by_score, by_softmax = error_detection(error, wrong), error_detection(softmax, wrong)
        risks = {"error score": by_score.risk, "softmax": by_softmax.risk}
        results |= {
            "network_accuracy": float((~wrong).double().mean()),
            "accuracy": float((p.argmax(1) == labels).double().mean()),
            "negative_log_likelihood": float(torch.nn.functional.nll_loss(p.log(), labels)),
            "error_auroc": {"error score": by_score.auroc, "softmax": by_softmax.auroc},
            "aurc": {"error score": by_score.aurc, "softmax": by_softmax.aurc},
            "sets_with_the_true_class": float(sets.gather(1, labels[:, None]).double().mean()),
        }
    plain: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in arrays.items()}
    np.savez(folder / "scores.npz", **plain)
    right = None if labels is None else predicted == labels
    figure = scores_figure(
        X, rows=points.rows, error=error, far=far, ordinary=ordinary, predicted=predicted, right=right, risks=risks
    )
    save_figure(figure, folder / "scores.png")
    return results


def _describe_model(model: UncertainClassifier) -> dict[str, object]:
    process = model.process_
    is_sketched = isinstance(process.kernel, InputFeatures)
    return {
        "process": f"{len(process.factor)} sketched features" if is_sketched else "exact",
        "num_condition": len(process.training),  # the points of the run whose labels its loss takes
        "noise": process.noise,
        "outputscale": process.outputscale,
        "stacking": asdict(model.stacking_),
        "num_conformity_scores": len(model.conformity_scores_),
    }


def _score_lines(results: dict[str, object], alpha: float) -> list[str]:
    r: dict[str, Any] = results
    a = r["stacking"]
    lines = [
        f"process on {r['num_condition']} labels ({r['process']}): noise {r['noise']:.2g}; "
        f"weights {a['network']:.2g} of the network, {a['process']:.2g} of the process",
        f"the process gains {Stacking(**a).gain_words}",
    ]
    sets = f"sets at {100 * (1 - alpha):g} %: {r['mean_set_size']:.2f} classes on average"
    if "accuracy" in r:
        pairs = [f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in r["error_auroc"].items()]
        lines += [f"accuracy: network {r['network_accuracy']:.3f}, network and process {r['accuracy']:.3f}"]
        lines += [f"finds the network's errors, area under the ROC curve: {', '.join(pairs)}"]
        sets += f", {100 * r['sets_with_the_true_class']:.1f} % hold the true one"
    if r["classes_in_every_set"]:
        sets += " (too few validation points for smaller ones)"
    beyond = 100 * r["share_beyond_95_percent_of_validation"]
    return [*lines, sets, f"less like the training data than 95 % of the validation points: {beyond:.1f} %"]
