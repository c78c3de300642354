"""`epk-gp uncertainty`: scores of points; or a Gaussian process on the logits over a plane through the data."""

from pathlib import Path

import torch
import typer
from torch import Tensor

from epk_gp.analysis.maps import Plane, UncertaintyMap, coordinate_plane, principal_plane, uncertainty_on_plane
from epk_gp.cli.data import PointSource, draw_rows, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import CoupledOutputs, Dtype, PlaneName, TargetsName
from epk_gp.cli.parsing import make_folder, parse_path, parse_rule, torch_dtype
from epk_gp.cli.scores import ScoreOptions, write_scores
from epk_gp.cli.summaries import describe_map, describe_plane, fitted_numbers, map_numbers
from epk_gp.cli.workers import open_executor, require_one_executor
from epk_gp.core.losses import CrossEntropy, NegativeLogLikelihood
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.models import LogitGP
from epk_gp.gp.softmax import softmax_uncertainty
from epk_gp.plots.maps import map_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json, write_npz
from epk_gp.quadrature.rules import QuadratureRule

_AXIS_NAMES = {
    "principal": ("first principal direction", "second principal direction"),
    "coordinates": ("$x_1$", "$x_2$"),
}


def uncertainty(
    *,
    run: Path,
    out: Path,
    validation: str | None,
    alpha: float,
    features: str | None,
    nodes: int | None,
    path: str,
    save_model: Path | None,
    memory: float,
    num_condition: int,
    outputs: CoupledOutputs,
    targets: TargetsName,
    plane: PlaneName,
    grid: int,
    margin: float,
    num_samples: int,
    rule: str,
    fit_steps: int,
    points: Path | None,
    network: str | None,
    dtype: Dtype,
    workers: int | None,
    scheduler: str | None,
    seed: int,
    quiet: bool,
) -> None:
    """Score points with an `UncertainClassifier` if there are validation points; map a GP's uncertainty otherwise.

    The GP has the exact path kernel, in float64; its uncertainty is written at points and over a plane.
    """
    require_one_executor(workers, scheduler)
    if validation is not None:
        options = ScoreOptions(
            run=run,
            out=out,
            validation=validation,
            points=points,
            alpha=alpha,
            features=features,
            nodes=nodes,
            path=path,
            save_model=save_model,
            memory=memory,
            num_samples=num_samples,
            network=network,
            dtype=dtype,
            workers=workers,
            scheduler=scheduler,
            seed=seed,
            quiet=quiet,
        )
        write_scores(options)
        return
    timer, quadrature, along = Stopwatch(), parse_rule(rule), parse_path(path)
    if not isinstance(quadrature, QuadratureRule):
        raise ValueError(
            f"--rule must be a fixed rule, the same for all points: an adaptive one does not give a kernel. Got {rule}."
        )
    trajectory = open_run(run, network)
    if not isinstance(trajectory.loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            "the outputs of the network must be logits, for the softmax makes class probabilities of them: the run's "
            f"loss is {type(trajectory.loss).__name__}. Record with --loss cross-entropy, or take the standard "
            "deviations of the outputs themselves from LogitGP(...).logit_posterior(X) in Python."
        )
    surface = _choose_plane(trajectory, plane)
    asked = read_points(PointSource(run, points, torch.float64), trajectory, None)
    X, folder = asked.X, make_folder(out)
    typer.echo(f"predicting at {asked} and on a map of {grid} x {grid} nodes")
    chosen = draw_rows(trajectory.num_points, num_condition, seed).tolist()
    with open_executor(workers, scheduler) as executor:
        gp = LogitGP(
            trajectory,
            outputs.value,
            targets=targets.value,
            points=chosen,
            rule=quadrature,
            path=along,
            nodes=nodes,
            executor=executor,
        )
        losses = gp.fit(fit_steps, progress=not quiet)
        generator = torch.Generator().manual_seed(seed)
        u = softmax_uncertainty(gp.logit_posterior(X, progress=not quiet), num_samples, generator)
        m = uncertainty_on_plane(
            gp, surface, size=grid, margin=margin, num_samples=num_samples, generator=generator, progress=not quiet
        )
    words = describe_plane(plane.value, trajectory.inputs[0].numel())
    figure = map_figure(m, trajectory.targets, _AXIS_NAMES[plane.value], plane=words)
    save_figure(figure, folder / "uncertainty.png", palette=True)
    metadata = {"digest": trajectory.digest, "rows": "y", "columns": "x"}
    arrays = _map_arrays(m) | {"origin": surface.origin, "axes": surface.axes}
    write_arrays(folder / "map.safetensors", _cast(arrays, torch_dtype(dtype)), metadata)
    at_points = {"inputs": X, "mean": u.mean, "std": u.std, "entropy": u.entropy, "standard_error": u.standard_error}
    at_points |= {"expected_entropy": u.expected_entropy, "mutual_information": u.mutual_information}
    write_npz(folder / "points.npz", _cast(at_points, torch_dtype(dtype)))
    results = fitted_numbers(gp, losses) | map_numbers(m) | {"mean_std_at_points": float(u.std.mean())}
    config = {
        "run": run,
        "num_condition": len(chosen),
        "outputs": outputs.value,
        "targets": targets.value,
        "seed": seed,
    }
    config |= {"plane": plane.value, "grid": grid, "margin": margin, "num_samples": num_samples}
    config |= {
        "workers": workers,
        "scheduler": scheduler,
        "fit_steps": fit_steps,
        "rule": rule,
        "path": path,
        "nodes": nodes,
        "dtype": dtype.value,
        "points": str(asked),
    }
    write_json(folder / "uncertainty.json", "uncertainty", config, results, timer)
    typer.echo(f"GP on {len(chosen)} training points: outputscale {results['outputscale']}, noise {results['noise']}")
    typer.echo(describe_map(m))
    typer.echo(
        f"written to {folder}: uncertainty.png, uncertainty.json, map.safetensors, points.npz ({timer.total:.1f} s)"
    )
    typer.echo("for scores to abstain and to detect by, add --validation held-out, or a file of labelled points")


def _choose_plane(trajectory: Trajectory, name: PlaneName) -> Plane:
    return (principal_plane if name is PlaneName.principal else coordinate_plane)(trajectory.inputs)


def _map_arrays(m: UncertaintyMap) -> dict[str, Tensor]:
    names = ("x", "y", "training", "kernel", "network_class", "probability", "std", "entropy", "mutual_information")
    return {name: getattr(m, name) for name in names}


def _cast(arrays: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arrays with floating-point ones cast to a type."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in arrays.items()}
