"""`epk-gp attribute`, `influence`, `datamodel`: what training points added, what weights do, what many change."""

import shutil
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from epk_gp.analysis.breakdown import COLUMNS, extremes, prediction_breakdown, step_ranges, summarise, table_rows
from epk_gp.cli import options as opt
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run
from epk_gp.cli.workers import computing
from epk_gp.core.show import CertificateWarning
from epk_gp.datamodels.fit import datamodel as datamodel_of
from epk_gp.kernel_machine.attribute import Attribution, terms_by_sample
from epk_gp.kernel_machine.attribute import attribute as attribution_of
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.kernel_machine.influence import Smoothing
from epk_gp.kernel_machine.influence import influence as influence_of
from epk_gp.plots.contributions import attribution_figure, datamodel_figure, influence_figure
from epk_gp.plots.style import class_labels, save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json, write_table
from epk_gp.quadrature.rules import AdaptiveRule

_ANSWER = "log-probability of the answer"
_MAX_DRAWN = 6  # points that are drawn
_SMOOTHING = "Average over so many runs, trained again with random weights, for ReLUs; 0: the derivative itself."
_PAIRS = "Train so many pairs of random halves, at least 3: a forecast of what predictions are worth; 0: none."
_SCORE_COLUMNS = ("point", "class", "network", "training_point", "label", "score")
_INFLUENCE_COLUMNS = ("point", "output", "network", "training_point", "label", "influence", "predicted_without")


def attribute(
    run: opt.RunFolder,
    out: opt.Out = Path("attribution"),
    num_points: opt.NumExplained = 6,
    top: opt.TopListed = 8,
    head: opt.HeadOption = None,
    rule: opt.RuleOption = "adaptive",
    path: opt.PathOption | None = None,
    outputs: opt.Explained = "all",
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    seed: opt.SeedOfPoints = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed resumes from its partial sums when it is run again.
    """
    options = dict(locals())
    opt.validate_run(run, out, workers, scheduler)
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), None if path is None else opt.parse_path(path)
    trajectory = open_run(run, network)
    chosen = read_points(trajectory, run, points, num_points, dtype=opt.DTYPES.get(dtype), seed=seed)
    X, (explained, predicted) = chosen.X, chosen.explained(trajectory, outputs, head)
    resolved = explained.get("head")
    typer.echo(f"explaining {chosen}")
    groupings = [[by_sample(trajectory)], [step_ranges(trajectory)]]
    asked: dict[str, Any] = {"by": groupings, "rule": quadrature, "path": along, **explained}
    folder = opt.make_folder(out)
    partial = folder / opt.PARTIAL
    with computing(memory, workers, scheduler, quiet, partial) as settings, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end, or expected of a fixed rule
        parts, by_range = attribution_of(trajectory, X, **asked, **settings)
    breakdown, terms = prediction_breakdown(parts, by_range, predicted), Attribution(**terms_by_sample(parts))._terms
    arrays = {"initial": parts.initial, "network": parts.network, "total": parts.total, **terms}
    arrays |= {"steps": by_range.values, "predicted": predicted, "inputs": X}
    metadata = {"head": str(resolved), "rule": quadrature.name, "digest": trajectory.digest, "outputs": outputs}
    write_arrays(folder / "attribution.safetensors", arrays, metadata)
    shutil.rmtree(partial)
    drawn = range(min(_MAX_DRAWN, len(X)))
    shown: dict[str, Any] = {"head": resolved, "number": _ANSWER if outputs == "answers" else None}
    figure = attribution_figure(breakdown, trajectory, X, drawn, top, labels=chosen.labels, **shown)
    is_gray = X.ndim != 4 or X.shape[1] == 1  # images in colour need more colours
    save_figure(figure, folder / "attribution.png", palette=is_gray)
    results = summarise(parts, breakdown, trajectory.targets, top)
    write_table(folder / "attribution.csv", COLUMNS, table_rows(breakdown, trajectory.targets, top))
    config = options | {"head": resolved, "num_points": len(X), "dtype": str(X.dtype), "points": str(chosen)}
    write_json(folder / "attribution.json", "attribute", config, results, timer)
    note = f"; the first {_MAX_DRAWN} are drawn" if len(X) > _MAX_DRAWN else ""
    typer.echo(f"{len(X)} points x {parts.network.shape[1]} outputs x {trajectory.num_points} training points{note}")
    typer.echo(
        f"the contributions sum to the network's outputs to within {results['max_error']:.2e} "
        f"({results['max_relative_error']:.1e} of each point's largest output)"
    )
    typer.echo(f"written to {folder}: attribution.safetensors, .csv, .json and .png ({timer.total:.1f} s)")
    if isinstance(quadrature, AdaptiveRule) and not parts.certified:  # a fixed rule guarantees nothing
        findings = "; ".join(parts.findings)
        raise ValueError(f"the contributions must sum to the outputs, certified: {findings}. Do not use them.")


def influence(
    run: opt.RunFolder,
    out: opt.Out = Path("influence"),
    num_points: opt.NumExplained = 6,
    top: opt.TopListed = 8,
    head: opt.HeadOption = None,
    outputs: opt.Explained = "predicted",
    smoothing: Annotated[int, opt.count(_SMOOTHING, 0, 10_000)] = 0,
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    seed: opt.SeedOfPoints = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write the derivative of outputs in every training point's weight, a table of the largest, and draw them.

    The negative of a derivative predicts what leaving the point out would do. A command that was killed resumes from
    its partial sums when it is run again.
    """
    options = dict(locals())
    opt.validate_run(run, out, workers, scheduler)
    timer, trajectory = Stopwatch(), open_run(run, network)
    chosen = read_points(trajectory, run, points, num_points, dtype=opt.DTYPES.get(dtype), seed=seed)
    X, (explained, predicted) = chosen.X, chosen.explained(trajectory, outputs, head)
    resolved, folder = explained.get("head"), opt.make_folder(out)
    typer.echo(f"explaining {chosen}")
    partial = folder / opt.PARTIAL
    smoothed = Smoothing(smoothing, seed=seed or 0) if smoothing else None
    with computing(memory, workers, scheduler, quiet, partial) as settings, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end
        effect = influence_of(trajectory, X, **explained, smoothing=smoothed, **settings)
    arrays = {"values": effect.values, "outputs": effect.outputs, "std": effect.std}
    arrays |= {"adjoint_norms": effect.adjoint_norms, "predicted": predicted, "inputs": X}
    metadata = {"head": str(resolved), "digest": trajectory.digest, "outputs": outputs, "smoothing": str(smoothing)}
    write_arrays(folder / "influence.safetensors", arrays, metadata)
    shutil.rmtree(partial, ignore_errors=True)
    summaries, rows = list[dict[str, Any]](), list[list[Any]]()
    for n, output in enumerate(predicted.tolist()):
        column = output if outputs == "all" else 0
        values, of_network = effect.values[n, column], float(effect.outputs[n, column])
        largest = _largest(values, trajectory.targets, top)
        rows += [[n, output, of_network, *entry, of_network - entry[-1]] for entry in largest]
        point = {"point": n, "output": output, "network": of_network, "std": float(values.square().sum().sqrt())}
        named = [{"training_point": index, "influence": value} for index, _, value in largest]
        summaries.append(point | {"largest": named})
    write_table(folder / "influence.csv", _INFLUENCE_COLUMNS, rows)
    drawn, growth = range(min(_MAX_DRAWN, len(X))), float(effect.growth.max())
    shown: dict[str, Any] = {"head": resolved, "number": _ANSWER if outputs == "answers" else None}
    figure = influence_figure(effect, predicted, drawn, top, trajectory, **shown)
    save_figure(figure, folder / "influence.png", palette=True)
    config = options | {"head": resolved, "num_points": len(X), "dtype": str(X.dtype), "points": str(chosen)}
    results: dict[str, Any] = {"certified": effect.certified, "findings": list(effect.findings)}
    results |= {"max_step_mismatch": effect.max_step_mismatch, "growth": growth, "points": summaries}
    write_json(folder / "influence.json", "influence", config, results, timer)
    note = f"; the first {_MAX_DRAWN} are drawn" if len(X) > _MAX_DRAWN else ""
    typer.echo(f"{len(X)} points x {effect.outputs.shape[1]} outputs x {trajectory.num_points} training points{note}")
    typer.echo(f"the derivative in the weights is at most {growth:.3g} times as large along the run as at its end")
    typer.echo(f"written to {folder}: influence.safetensors, .csv, .json and .png ({timer.total:.1f} s)")
    if not effect.certified:
        raise ValueError(f"the derivative must be certified: {'; '.join(effect.findings)}. Do not use it.")


def _largest(values: Tensor, targets: Tensor, top: int) -> list[tuple[int, Any, float]]:
    """List the training points with the largest values and the smallest ones below 0: index, label and value."""
    raised, lowered = extremes(values, targets, top)
    return [(e["training_point"], e.get("label", ""), e["contribution"]) for e in raised + lowered[::-1]]


def datamodel(
    run: opt.RunFolder,
    out: opt.Out = Path("datamodel"),
    num_points: opt.NumExplained = 6,
    top: opt.TopListed = 8,
    pairs: Annotated[int, opt.count(_PAIRS, 0, 10_000)] = 0,
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    dtype: opt.RunDtype = None,
    seed: opt.SeedOfPoints = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write what predictions lose with each training point, a table of the largest losses, and draw them.

    Explained is the log-odds of each point's label, or of the predicted class where points have no labels; or the
    log-probability of `answers` where they have some. Scores add up over the points that are left out.
    """
    options = dict(locals())
    opt.validate_run(run, out, workers, scheduler)
    timer, trajectory = Stopwatch(), open_run(run, network)
    chosen = read_points(trajectory, run, points, num_points, dtype=opt.DTYPES.get(dtype), seed=seed)
    X, C, folder = chosen.X, trajectory.num_outputs, opt.make_folder(out)
    of = "predicted classes" if chosen.labels is None else "labels"
    if chosen.answers is not None:
        of = "answers"
    explained, classes = chosen.explained(trajectory, "answers" if of == "answers" else "predicted", None)
    if of != "answers":
        classes = classes if chosen.labels is None else chosen.labels
        explained = {"y": classes if chosen.labels is not None or C > 1 else None}
    typer.echo(f"explaining {chosen}, their {of}")
    partial = folder / opt.PARTIAL
    with computing(memory, workers, scheduler, quiet, partial) as settings, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end
        model = datamodel_of(trajectory, X, **explained, **settings)
        if pairs:
            model = model.with_forecast(pairs, seed or 0, **(settings | {"checkpoint": partial / "halves"}))
    n, forecast = len(X), model.forecast
    outputs, scores = model.outputs.view(n, -1), model.scores.view(n, -1, trajectory.num_points)
    arrays = {"scores": scores, "outputs": outputs, "classes": classes, "inputs": X}
    if forecast is not None:
        arrays |= {"halves": forecast.sample_weights, "measured": forecast.measured}
    write_arrays(folder / "datamodel.safetensors", arrays, {"digest": trajectory.digest, "method": model.method})
    shutil.rmtree(partial, ignore_errors=True)
    place = torch.arange(n), classes if outputs.shape[1] > 1 else torch.zeros_like(classes)
    rows, summaries, without, kind = list[list[Any]](), list[dict[str, Any]](), list[Tensor](), model.questions.kind
    for k, (c, value, own) in enumerate(zip(classes.tolist(), outputs[place].tolist(), scores[place], strict=True)):
        largest = _largest(own, trajectory.targets, top)
        rows += [[k, c, value, *entry] for entry in largest]
        named = [{"training_point": index, "score": score} for index, _, score in largest]
        summaries.append({"point": k, "class": c, "network": value, "largest": named})
        if k < _MAX_DRAWN:  # without the largest scores, one more each time
            kept = torch.ones(min(top, len(own)) + 1, len(own), dtype=torch.bool)
            for row, index in enumerate(own.argsort(descending=True)[: len(kept) - 1].tolist(), start=1):
                kept[row:, index] = False
            without.append(model.predict(kept).view(len(kept), n, -1)[:, k, int(place[1][k])])
    write_table(folder / "datamodel.csv", _SCORE_COLUMNS, rows)
    names = [_ANSWER if of == "answers" else f"{kind} of class {c}" if C > 1 else kind for c in classes.tolist()]
    drawn, known = torch.stack(without), class_labels(trajectory.targets)
    save_figure(datamodel_figure(scores[place], drawn, names, top, known), folder / "datamodel.png", palette=True)
    config = options | {"num_points": n, "dtype": str(X.dtype), "points": str(chosen), "explained": of}
    results: dict[str, Any] = {"certified": not model.findings, "findings": list(model.findings)}
    results |= {"method": model.method, "forecast": None, "points": summaries, "without_largest": drawn.tolist()}
    if forecast is not None:
        results["forecast"] = {name: getattr(forecast, name) for name in ("lds", "interval", "slope", "scatter")}
    write_json(folder / "datamodel.json", "datamodel", config, results, timer)
    words = "not asked for (--pairs 5)" if forecast is None else "LDS {:.2f} [{:.2f}, {:.2f}] on random halves"
    typer.echo(f"{n} points x {trajectory.num_points} training points; predicts by {model.method}")
    typer.echo(f"forecast: {words.format(*() if forecast is None else (forecast.lds, *forecast.interval))}")
    typer.echo(f"written to {folder}: datamodel.safetensors, .csv, .json and .png ({timer.total:.1f} s)")
    if model.findings:
        raise ValueError(f"the datamodel must be certified: {'; '.join(model.findings)}. Do not use it.")
