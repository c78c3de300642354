"""`epk-gp uncertainty --validation`: scores of points, sets of classes, and how well they do where labels are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from epk_gp.analysis.measures import error_detection
from epk_gp.cli.labelled import LabelledPoints, halves, read_labelled, without_labels
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import Dtype
from epk_gp.cli.parsing import make_folder, memory_bytes, parse_features, parse_path, require_outside, torch_dtype
from epk_gp.cli.workers import open_executor
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gp.data import count_seen, training_labels
from epk_gp.gp.label_process import LabelProcess, SketchedLabelProcess
from epk_gp.gp.stacking import ClassUncertainty
from epk_gp.gp.uncertain_classifier import MIN_VALIDATION_POINTS, UncertainClassifier
from epk_gp.plots.scores import ScoredPoints, scores_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_json, write_npz


@dataclass(frozen=True)
class ScoreOptions:
    """What a user asks for."""

    run: Path
    out: Path
    validation: str
    points: Path | None
    alpha: float
    features: str | None
    nodes: int | None
    path: str
    save_model: Path | None
    memory: float
    num_samples: int
    network: str | None
    dtype: Dtype
    workers: int | None
    scheduler: str | None
    seed: int
    quiet: bool


@dataclass(frozen=True, eq=False)
class _Scored:
    """What is known of n points: scores, probabilities, sets of classes, the network's own classes and confidence."""

    points: LabelledPoints
    u: ClassUncertainty
    probability: Float[Tensor, "n C"]
    sets: Bool[Tensor, "n C"]
    network: Int64[Tensor, " n"]
    softmax: Float[Tensor, " n"]


def write_scores(asked: ScoreOptions) -> None:
    """Fit an `UncertainClassifier`, and write its scores of the points."""
    timer, features, path = Stopwatch(), parse_features(asked.features), parse_path(asked.path)
    if asked.save_model is not None:
        _require_new_folder(asked.run, asked.save_model)
    trajectory = open_run(asked.run, asked.network)
    training_labels(trajectory, "uncertainty --validation")
    validation, points = read_validation(asked.validation, asked.points, asked.run, trajectory, seed=asked.seed)
    folder = make_folder(asked.out)
    typer.echo(f"scoring {points}, with {validation} as validation points")
    with open_executor(asked.workers, asked.scheduler) as executor:
        model = UncertainClassifier(
            trajectory,
            nodes=asked.nodes,
            features=features,
            seed=asked.seed,
            path=path,
            memory_budget=memory_bytes(asked.memory),
            progress=not asked.quiet,
            executor=executor,
        )
        model.fit(validation.X, validation.labels)
        timer.lap("fit")
        if asked.save_model is not None:
            model.save(asked.save_model)
        scored = _score(model, points, asked)
        timer.lap("score")
        ordinary = torch.as_tensor(model.uncertainty(validation.X, 2).out_of_distribution)
        results = _describe_model(model) | _compare(scored, ordinary, asked.alpha)
    write_npz(folder / "scores.npz", _arrays(scored, torch_dtype(asked.dtype)))
    drawn = ScoredPoints(
        X=points.X,
        rows=points.rows,
        error=torch.as_tensor(scored.u.error),
        out_of_distribution=torch.as_tensor(scored.u.out_of_distribution),
        predicted=scored.network,
        right=None if points.labels is None else scored.network == points.labels,
        risks={} if points.labels is None else _risks(scored, points.labels),
    )
    save_figure(scores_figure(drawn, ordinary), folder / "scores.png")
    config = {name: getattr(asked, name) for name in ("run", "alpha", "features", "nodes", "num_samples", "seed")}
    config |= {"path": asked.path, "workers": asked.workers, "scheduler": asked.scheduler}
    config |= {"validation": str(validation), "points": str(points), "dtype": asked.dtype.value}
    write_json(folder / "uncertainty.json", "uncertainty", config, results, timer)
    for line in _lines(results, asked.alpha):
        typer.echo(line)
    saved = "" if asked.save_model is None else f"; the model to {asked.save_model}"
    typer.echo(f"written to {folder}: scores.npz, scores.png, uncertainty.json{saved} ({timer.total:.1f} s)")


def read_validation(
    validation_source: str, points_file: Path | None, run: Path, trajectory: Trajectory, *, seed: int
) -> tuple[LabelledPoints, LabelledPoints]:
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
        validation, points = halves(source, seed)
    else:
        validation, points = source, read_labelled(str(points_file), run, trajectory)
        points = without_labels(points) if points_file.is_dir() else points
    if len(validation.X) < MIN_VALIDATION_POINTS:
        half = "" if points_file is not None else " (half of those given, for without --points the rest are scored)"
        raise ValueError(
            f"there must be at least {MIN_VALIDATION_POINTS} validation points: got {len(validation.X)}{half}. Name a "
            "source of more, or record with a larger --num-test."
        )
    seen = count_seen(validation.X, trajectory)
    if seen:
        typer.echo(f"note: {seen} of {len(validation.X)} validation points are equal to training points")
    return validation, points


def _score(model: UncertainClassifier, points: LabelledPoints, asked: ScoreOptions) -> _Scored:
    X = points.X
    u = model.uncertainty(X, asked.num_samples)
    z = network_outputs(model.trajectory, X).to(torch.float64).softmax(1)
    probability, sets = torch.as_tensor(model.predict_proba(X)), torch.as_tensor(model.predict_set(X, asked.alpha))
    return _Scored(points, u, probability, sets, z.argmax(1), 1 - z.amax(1))


def _risks(scored: _Scored, labels: Tensor) -> dict[str, Tensor]:
    """Return risk-coverage curves of the network's predictions, by name of the score."""
    wrong = scored.network != labels
    return {
        "error score": error_detection(torch.as_tensor(scored.u.error), wrong).risk,
        "softmax": error_detection(scored.softmax, wrong).risk,
    }


def _describe_model(model: UncertainClassifier) -> dict[str, object]:
    process = model.process_
    sketched = isinstance(process, SketchedLabelProcess)
    return {
        "process": f"{len(process.vectors)} sketched features" if sketched else "exact",
        "num_condition": _num_condition(process),
        "noise": process.noise,
        "outputscale": process.outputscale,
        "stacking": {"network": model.stacking_.network, "process": model.stacking_.process},
        "num_conformity_scores": len(model.conformity_scores_),
    }


def _num_condition(process: LabelProcess) -> int:
    """Count the points that a process was conditioned on: those of the run whose labels its loss takes."""
    if isinstance(process, SketchedLabelProcess) and process.training_features is not None:
        return len(process.training_features)
    return len(process.vectors)


def _compare(scored: _Scored, ordinary: Tensor, alpha: float) -> dict[str, object]:
    """Return what the scores say on average, and where labels are known, how well."""
    sizes, out = scored.sets.sum(1), torch.as_tensor(scored.u.out_of_distribution)
    results: dict[str, object] = {
        "num_points": len(sizes),
        "mean_error_score": float(torch.as_tensor(scored.u.error).mean()),
        "mean_set_size": float(sizes.double().mean()),
        "share_beyond_95_percent_of_validation": float((out > ordinary.quantile(0.95)).double().mean()),
    }
    labels = scored.points.labels
    if labels is None:
        return results
    wrong = scored.network != labels
    by_score, by_softmax = (
        error_detection(values, wrong) for values in (torch.as_tensor(scored.u.error), scored.softmax)
    )
    return results | {
        "network_accuracy": float((~wrong).double().mean()),
        "accuracy": float((scored.probability.argmax(1) == labels).double().mean()),
        "negative_log_likelihood": float(torch.nn.functional.nll_loss(scored.probability.log(), labels)),
        "error_auroc": {"error score": by_score.auroc, "softmax": by_softmax.auroc},
        "aurc": {"error score": by_score.aurc, "softmax": by_softmax.aurc},
        "sets_with_the_true_class": float(scored.sets.gather(1, labels[:, None]).double().mean()),
    }


def _lines(results: dict[str, object], alpha: float) -> list[str]:
    r: dict[str, Any] = results
    a = r["stacking"]
    lines = [
        f"process on {r['num_condition']} labels ({r['process']}): noise {r['noise']:.2g}; "
        f"weights {a['network']:.2g} of the network, {a['process']:.2g} of the process"
    ]
    sets = f"sets at {100 * (1 - alpha):g} %: {r['mean_set_size']:.2f} classes on average"
    if "accuracy" in r:
        pairs = [f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in r["error_auroc"].items()]
        lines += [f"accuracy: network {r['network_accuracy']:.3f}, network and process {r['accuracy']:.3f}"]
        lines += [f"finds the network's errors, area under the ROC curve: {', '.join(pairs)}"]
        sets += f", {100 * r['sets_with_the_true_class']:.1f} % hold the true one"
    if alpha * (r["num_conformity_scores"] + 1) < 1:
        sets += f" (all classes: {r['num_conformity_scores']} points are too few for --alpha {alpha:g})"
    beyond = 100 * r["share_beyond_95_percent_of_validation"]
    return [*lines, sets, f"less like the training data than 95 % of the validation points: {beyond:.1f} %"]


def _arrays(scored: _Scored, dtype: torch.dtype) -> dict[str, Tensor]:
    u, p = scored.u, scored.probability
    names = ("error", "out_of_distribution", "entropy", "mutual_information", "std")
    arrays = {name: torch.as_tensor(getattr(u, name)).to(dtype) for name in names}
    arrays |= {"probability": p.to(dtype), "predicted": p.argmax(1), "network_predicted": scored.network}
    arrays |= {"sets": scored.sets, "row": scored.points.rows}
    return arrays if scored.points.labels is None else arrays | {"labels": scored.points.labels}


def _require_new_folder(run: Path, folder: Path) -> None:
    """Raise if the fitted classifier cannot be written to a folder, before anything is computed."""
    require_outside(run, folder, "--save-model")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--save-model must be a new or empty folder: {folder} is a file or holds something.")
