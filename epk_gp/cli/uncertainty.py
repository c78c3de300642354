"""`epk-gp uncertainty` and `audit`: maps of a process, scores of points, and the labels that a process doubts."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from epk_gp.analysis.labels import label_errors
from epk_gp.analysis.maps import Plane, UncertaintyMap, column_plane, principal_plane, uncertainty_on_plane
from epk_gp.analysis.measures import error_detection
from epk_gp.cli import options as opt
from epk_gp.cli.data import ChosenPoints, draw_rows, read_labelled, read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.workers import computing
from epk_gp.core.losses import CrossEntropy, NegativeLogLikelihood
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.data import MIN_VALIDATION_POINTS, count_seen, training_labels
from epk_gp.gp.label_process import InputFeatures
from epk_gp.gp.models import LogitGP
from epk_gp.gp.stacking import Stacking, classes_in_every_set
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.plots.maps import map_figure
from epk_gp.plots.scores import scores_figure, suspicious_labels_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json, write_npz, write_table
from epk_gp.quadrature.rules import QuadratureRule

_OF_SCORES = ("alpha", "by_class", "features", "save_model", "memory")  # options of scores only
_OF_PROCESS = ("num_condition", "outputs", "targets", "rule", "fit_steps")  # of the map without --validation only
_OF_COLUMNS = ("others", "feature_names")
_OF_MAPS = ("grid", "margin", *_OF_COLUMNS)
_MAP_ARRAYS = ("x", "y", "training", "network_class", "probability", "std", "entropy", "mutual_information", "kernel",
               "out_of_distribution")  # fmt: skip
_POINT_ARRAYS = ("mean", "std", "entropy", "standard_error", "expected_entropy", "mutual_information")
_AUDIT_COLUMNS = ("rank", "index", "label", "expected", "score", "margin", "own_label", "log_probability", "aum")

_PRINCIPAL = ("first principal direction", "second principal direction")

Outputs = Literal["full", "independent"]
Targets = Literal["network", "dirichlet"]
_ALPHA = "Scores: share of sets of classes without the true one."
_BY_CLASS = "Scores: this share within each class, by a threshold for each."
_FEATURES = "Sketched features, or exact for none; by default exact up to 5000 points if that is cheap, else 4096."
Features = Annotated[str | None, typer.Option(help=_FEATURES)]
_NODES = (
    "Nodes in place of all steps: 20 by default, or one an output up to 256; a map takes all steps by default, 20 are "
    "faster."
)
Nodes = Annotated[int | None, opt.count(_NODES, 1, 10**6)]
_COLUMNS = (
    "Map over two columns of a table, X,Y, each by its name (--feature-names) or its number from 0. An extent stands "
    "behind it, as in age=0..100, or the name of each value of a column of categories, as in sex=0:female/1:male."
)
Columns = Annotated[str | None, typer.Option(metavar="X,Y", help=_COLUMNS)]
_OTHERS = "With --columns: values of other columns, as in age=40,children=2; by default their medians."
Others = Annotated[str | None, typer.Option(metavar="NAME=VALUE,...", help=_OTHERS)]
FeatureNames = Annotated[str | None, typer.Option(metavar="A,B,...", help="Names of the features.")]


def uncertainty(
    ctx: opt.Context,
    run: opt.RunFolder,
    out: opt.Out = Path("uncertainty"),
    validation: opt.Source = None,
    points: opt.PointsFile = None,
    alpha: Annotated[float, opt.number(_ALPHA, below=1.0, or_equal=False)] = 0.1,
    by_class: Annotated[bool, typer.Option("--by-class", help=_BY_CLASS)] = False,
    features: Features = None,
    nodes: Nodes = None,
    path: opt.PathOption = "straight",
    save_model: Annotated[Path | None, typer.Option(help="Scores: new folder for the fitted classifier.")] = None,
    memory: opt.Memory = 1.0,
    num_condition: Annotated[int, opt.count("Map: largest number of training points of its GP.")] = 300,
    outputs: Annotated[Outputs, typer.Option(help="Map: coupled classes, or one GP per class.")] = "full",
    targets: Annotated[Targets, typer.Option(help="Map: the network's outputs, or Dirichlet labels.")] = "network",
    columns: Columns = None,
    others: Others = None,
    feature_names: FeatureNames = None,
    grid: Annotated[int, opt.count("Map: nodes per side, 2 to 400.", 2, 400)] = 40,
    margin: Annotated[float, opt.number("Map: border, in units of the data's extent.", below=1000.0)] = 0.4,
    num_samples: Annotated[int, opt.count("Monte Carlo draws through the softmax, 2 to 100000.", 2, 10**5)] = 1024,
    rule: Annotated[str, typer.Option(help="Map: a fixed rule, as gauss-legendre:N.")] = "gauss-legendre:4",
    fit_steps: Annotated[int, opt.count("Map: steps of the fit by marginal likelihood.")] = 50,
    network: opt.Network = None,
    dtype: Annotated[opt.Dtype, typer.Option(help="Type of results; everything is computed in float64.")] = "float64",
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    seed: opt.Seed = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Score points with --validation; without it, map the uncertainty of a GP on the logits over a plane.

    Scores say how likely a prediction is wrong, and how unlike the training data a point is; beside them stand sets of
    classes that hold the true one as often as asked for. With --columns they are mapped too.
    """
    options = {name: value for name, value in locals().items() if name != "ctx"}
    given, reasons = opt.given_options(ctx), dict.fromkeys(_OF_SCORES, "without --validation")
    if validation is not None:
        reasons = dict.fromkeys(_OF_PROCESS, "beside --validation")
    if columns is None:
        reasons |= dict.fromkeys(_OF_COLUMNS if validation is None else _OF_MAPS, "without --columns")
    if unused := [f"{given[name]} would be ignored {reason}" for name, reason in reasons.items() if name in given]:
        raise ValueError(f"{unused[0]}. Pass one of them, or both.")
    opt.validate_run(run, out, workers, scheduler)
    timer, along = Stopwatch(), opt.parse_path(path)
    if validation is not None:
        asked = parse_features(features)
        if save_model is not None:
            opt.require_outside(run, save_model, "--save-model")
            if save_model.exists() and (not save_model.is_dir() or any(save_model.iterdir())):
                raise ValueError(f"--save-model must be a new or empty folder: {save_model} holds something.")
        trajectory = open_run(run, network)
        training_labels(trajectory, "uncertainty --validation")
        surface = None if columns is None else parse_columns(columns, others, feature_names, trajectory.inputs)
        fitted, scored = read_validation(validation, points, run, trajectory, seed=seed)
        folder = opt.make_folder(out)
        typer.echo(f"scoring {scored}, with {fitted} as validation points")
        with computing(memory, workers, scheduler, quiet) as settings:
            model = UncertainClassifier(trajectory, nodes=nodes, features=asked, seed=seed, path=along, **settings)
            model.fit(fitted.X, fitted.labels)
            if save_model is not None:
                model.save(save_model)
            numbers = _describe_model(model)
            numbers |= _write_scores(folder, model, scored, fitted, num_samples, alpha, by_class, opt.DTYPES[dtype])
            if surface is not None:
                m = uncertainty_on_plane(model, surface, size=grid, margin=margin, num_samples=num_samples)
                _write_map(folder, "map", m, opt.DTYPES[dtype], trajectory.digest, validation=fitted.X)
        config = options | {"validation": str(fitted), "points": str(scored)}
        write_json(folder / "uncertainty.json", "uncertainty", config, numbers, timer)
        for line in _score_lines(numbers, alpha):
            typer.echo(line)
        saved = "" if save_model is None else f"; the model to {save_model}"
        files = ("scores.npz", "scores.png", "uncertainty.json", "map.png", "map.safetensors")
        listed = ", ".join(files[: 3 if surface is None else 5])
        typer.echo(f"written to {folder}: {listed}{saved} ({timer.total:.1f} s)")
        return
    fixed = opt.parse_rule(rule)
    if not isinstance(fixed, QuadratureRule):
        raise ValueError(f"--rule must be a fixed rule, the same for all points: got {rule}.")
    trajectory = open_run(run, network)
    if not isinstance(trajectory.loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(f"the network's outputs must be logits: the run's loss is {type(trajectory.loss).__name__}.")
    X = trajectory.inputs
    surface = principal_plane(X) if columns is None else parse_columns(columns, others, feature_names, X)
    chosen = read_points(trajectory, run, points, dtype=torch.float64)
    X, folder = chosen.X, opt.make_folder(out)
    typer.echo(f"predicting at {chosen} and on a map of {grid} x {grid} nodes")
    rows = draw_rows(trajectory.num_points, num_condition, seed).tolist()
    with computing(memory, workers, scheduler, quiet) as settings:
        executor = settings["executor"]  # a map takes little memory
        gp = LogitGP(
            trajectory, outputs, targets=targets, points=rows, rule=fixed, path=along, nodes=nodes, executor=executor
        )
        losses = gp.fit(fit_steps, progress=not quiet)
        generator = torch.Generator().manual_seed(seed)
        u = gp.logit_posterior(X, progress=not quiet).softmax_uncertainty(num_samples, generator)
        m = uncertainty_on_plane(
            gp, surface, size=grid, margin=margin, num_samples=num_samples, generator=generator, progress=not quiet
        )
    _write_map(folder, "uncertainty", m, opt.DTYPES[dtype], trajectory.digest)
    at_points = {"inputs": X} | {name: getattr(u, name) for name in _POINT_ARRAYS}
    write_npz(folder / "points.npz", _cast(at_points, opt.DTYPES[dtype]))
    scale = gp.covar_module.outputscale.detach().reshape(-1).tolist()
    noise = gp.likelihood.noise.detach().reshape(-1)[: gp.kernel.config.structure.num_matrices].tolist()
    largest, correlation = float(m.std.max()), m.distance_correlation
    results: dict[str, Any] = {"kernel_scale": gp.kernel.scale, "outputscale": scale, "noise": noise}
    results |= {"negative_log_likelihood": [losses[0], losses[-1]], "largest_std": largest}
    results |= {"largest_standard_error": m.standard_error, "rank_correlation_of_std_with_distance": correlation}
    results["mean_std_at_points"] = float(u.std.mean())
    config = options | {"num_condition": len(rows), "points": str(chosen)}
    write_json(folder / "uncertainty.json", "uncertainty", config, results, timer)
    typer.echo(f"GP on {len(rows)} training points: outputscale {scale}, noise {noise}")
    typer.echo(f"standard deviation of the class probability over the map: at most {largest:.3f}")
    falls = "none" if correlation is None else f"{correlation:+.2f}"
    typer.echo(f"its rank correlation with the distance to the training data: {falls}")
    typer.echo(f"written to {folder}: uncertainty.png and .json, map.safetensors, points.npz ({timer.total:.1f} s)")
    typer.echo("for scores to abstain and to detect by, add --validation held-out, or a file of labelled points")


def _cast(arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arrays with floating-point ones cast to a type."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in arrays.items()}


def _write_map(
    folder: Path, picture: str, m: UncertaintyMap, dtype: torch.dtype, digest: str, validation: Tensor | None = None
) -> None:
    """Write and draw a map."""
    axes, words = (_PRINCIPAL, describe_plane(m.plane.origin.numel())) if m.plane.columns is None else (None, None)
    save_figure(map_figure(m, axes, plane=words, validation=validation), folder / f"{picture}.png", palette=True)
    arrays = {name: values for name in _MAP_ARRAYS if (values := getattr(m, name)) is not None}
    arrays |= {"origin": m.plane.origin, "axes": m.plane.axes}
    write_arrays(folder / "map.safetensors", _cast(arrays, dtype), {"digest": digest, "rows": "y", "columns": "x"})


def describe_plane(num_entries: int) -> str:
    """Return which plane a map shows of inputs with so many coordinates, as the line above the picture."""
    return (
        f"Shown is the plane of the first two principal directions of the training inputs ({num_entries} coordinates) "
        "through their mean.\nTraining points are projected onto it."
    )


def parse_names(text: str | None) -> list[str] | None:
    """Return the names that an option has, with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_columns(columns: str, others: str | None, feature_names: str | None, X: Tensor) -> Plane:
    """Return the plane of the columns of a table that options name.

    Raises:
        ValueError: They name no two columns, or values that these do not have.
    """
    names, kinds, ends, axes = parse_names(feature_names), dict[Any, Any](), dict[Any, Any](), list[Any]()

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


def parse_features(text: str | None) -> int | Literal["exact"] | None:
    """Return what --features asks for: a number of sketched features, none of them, or the choice by the run's size.

    Raises:
        ValueError: It is neither a whole number above 0 nor "exact".
    """
    if text is None or text == "exact":
        return None if text is None else "exact"
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text)):
        raise ValueError(f"--features must be exact, or a whole number from 1 to 9999999: got {text[:40]!r}.")
    return int(text)


def _write_scores(
    folder: Path,
    model: UncertainClassifier,
    points: ChosenPoints,
    validation: ChosenPoints,
    num_samples: int,
    alpha: float,
    by_class: bool,
    dtype: torch.dtype,
) -> dict[str, object]:
    """Write and draw the scores of points. Return what they say on average, and where labels are known, how well."""
    X, labels = points.X, points.labels
    u = model.uncertainty(X, num_samples)
    z = network_outputs(model.trajectory, X).to(torch.float64).softmax(1)
    predicted, softmax = z.argmax(1), 1 - z.amax(1)
    p, sets = torch.as_tensor(model.predict_proba(X)), torch.as_tensor(model.predict_set(X, alpha, by_class=by_class))
    error, far = torch.as_tensor(u.error), torch.as_tensor(u.out_of_distribution)
    ordinary = torch.as_tensor(model.uncertainty(validation.X, 2).out_of_distribution)
    names = ("error", "out_of_distribution", "entropy", "mutual_information", "std")
    arrays = {name: torch.as_tensor(getattr(u, name)).to(dtype) for name in names}
    arrays |= {"probability": p.to(dtype), "predicted": p.argmax(1), "network_predicted": predicted}
    arrays |= {"sets": sets, "row": points.rows}
    calibrating = (model.conformity_scores_, alpha, model.conformity_labels_ if by_class else None)
    results: dict[str, object] = {
        "num_points": len(X),
        "mean_error_score": float(error.mean()),
        "mean_set_size": float(sets.sum(1).double().mean()),
        "classes_in_every_set": classes_in_every_set(p.shape[1], *calibrating),
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
    write_npz(folder / "scores.npz", arrays)
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
    if few := r["classes_in_every_set"]:
        sets += f" (too few points calibrate classes {few}, which are in each)"
    beyond = 100 * r["share_beyond_95_percent_of_validation"]
    return [*lines, sets, f"less like the training data than 95 % of the validation points: {beyond:.1f} %"]


def audit(
    run: opt.RunFolder,
    out: opt.Out = Path("audit"),
    top: Annotated[int, opt.count("Labels printed and drawn, at most 60; the table holds all.", 1, 60)] = 20,
    features: Features = None,
    nodes: Nodes = None,
    path: opt.PathOption = "straight",
    memory: opt.Memory = 1.0,
    network: opt.Network = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    seed: opt.Seed = 0,
    quiet: opt.Quiet = False,
) -> None:
    """Rank the training labels of a classifier by how suspicious they are; the worst are printed and drawn."""
    options = dict(locals())
    opt.validate_run(run, out, workers, scheduler)
    timer, asked, along = Stopwatch(), parse_features(features), opt.parse_path(path)
    trajectory = open_run(run, network)
    labels = training_labels(trajectory, "audit")
    folder = opt.make_folder(out)
    with computing(memory, workers, scheduler, quiet) as settings:
        found = label_errors(trajectory, nodes=nodes, features=asked, seed=seed, path=along, **settings)
    order = found.scores.argsort(descending=True, stable=True)
    judged = (found.points, labels[found.points], found.predicted, found.scores, found.margin, found.own_label)
    columns = [values[order].tolist() for values in (*judged, found.log_probability, found.aum)]
    rows = list(zip(range(1, len(order) + 1), *columns, strict=True))
    write_table(folder / "labels.csv", _AUDIT_COLUMNS, rows)
    save_figure(suspicious_labels_figure(found, trajectory.inputs, labels, top), folder / "audit.png")
    others = int((found.predicted != labels[found.points]).sum())
    first = [dict(zip(_AUDIT_COLUMNS, row, strict=True)) for row in rows[:top]]
    results = {"num_points": len(rows), "another_class_expected": others, "first": first}
    write_json(folder / "audit.json", "audit", options, results, timer)
    typer.echo(" rank   index  label  expected   score   margin  own label      AUM")
    for rank, index, label, expected, score, margin, own, _, aum in rows[:top]:
        typer.echo(f"{rank:>5}{index:>8}{label:>7}{expected:>10}{score:>8.3f}{margin:>9.2f}{own:>11.2f}{aum:>9.2f}")
    typer.echo(f"another class than the label is expected at {others} of {len(rows)} training points")
    typer.echo(f"written to {folder}: labels.csv, audit.json, audit.png ({timer.total:.1f} s)")
