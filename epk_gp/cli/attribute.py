"""`epk-gp attribute`: what each training point added to predictions, computed here or by worker processes."""

import multiprocessing
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from epk_gp.analysis.breakdown import COLUMNS, prediction_breakdown, step_ranges, summarise, table_rows
from epk_gp.cli import options as opt
from epk_gp.cli.data import read_points
from epk_gp.cli.networks import open_run
from epk_gp.core.losses import Head
from epk_gp.core.show import CertificateWarning
from epk_gp.kernel_machine.attribute import Attribution, terms_by_sample
from epk_gp.kernel_machine.attribute import attribute as attribution_of
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.plots.contributions import attribution_figure
from epk_gp.plots.style import save_figure
from epk_gp.provenance import Stopwatch, write_arrays, write_json, write_table
from epk_gp.quadrature.rules import AdaptiveRule

_ANSWER = "log-probability of the answer"
_MAX_DRAWN = 6  # points that are drawn
_NUM_POINTS = "Largest number of points that are explained; the first 6 are drawn."
_TOP = "Training points listed and drawn of either sign, at most 50."
_HEAD = "Explain the logits, or their log-softmax; by default log_softmax for cross entropy, else logits."
_OUTPUTS = (
    "Every output; only the one that the network predicts, at a fraction of the cost; or the log-probability "
    "of the classes or words that the file of --points holds as `answers`."
)
_WORKERS = "Processes of one thread each; by default this process computes."


def attribute(
    run: opt.RunFolder,
    out: opt.Out = Path("attribution"),
    num_points: Annotated[int, opt.count(_NUM_POINTS)] = 6,
    top: Annotated[int, opt.count(_TOP, 1, 50)] = 8,
    head: Annotated[Head | None, typer.Option(help=_HEAD)] = None,
    rule: opt.RuleOption = "adaptive",
    path: opt.PathOption = None,
    outputs: Annotated[Literal["all", "predicted", "answers"], typer.Option(help=_OUTPUTS)] = "all",
    memory: opt.Memory = 1.0,
    points: opt.PointsFile = None,
    network: opt.Network = None,
    workers: Annotated[int | None, opt.count(_WORKERS, 1, 4096)] = None,
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed resumes from its partial sums when it is run again.
    """
    options = dict(locals())
    opt.validate_run(run, out)
    timer, quadrature, along = Stopwatch(), opt.parse_rule(rule), opt.parse_path(path)
    trajectory = open_run(run, network)
    chosen = read_points(trajectory, run, points, num_points)
    X, (explained, predicted) = chosen.X, chosen.explained(trajectory, outputs, head)
    resolved = explained.get("head")
    typer.echo(f"explaining {chosen}")
    groupings = [[by_sample(trajectory)], [step_ranges(trajectory)]]
    asked: dict[str, Any] = {"by": groupings, "rule": quadrature, "path": along, **explained}
    folder = opt.make_folder(out)
    partial = folder / opt.PARTIAL
    with _executor(workers) as executor, warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # said at the end, or expected of a fixed rule
        settings: dict[str, Any] = {"memory_budget": int(memory * 2**30), "executor": executor}
        parts, by_range = attribution_of(trajectory, X, **asked, **settings, checkpoint=partial, progress=True)
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


@contextmanager
def _executor(workers: int | None) -> Iterator[Executor | None]:
    """Give a pool of so many processes, or None for this process.

    Processes are spawned: one that has used PyTorch's threads cannot be forked safely.

    Raises:
        ChildProcessError: A worker died.
    """
    if workers is None:
        yield None
        return
    executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield executor
    except RuntimeError as error:
        if not isinstance(error.__cause__, BrokenExecutor):
            raise
        raise ChildProcessError(
            "workers must live until all is computed: one of them died, killed or out of memory. Run the same command "
            "again, which resumes from what was computed; with fewer --workers or less --memory if memory was short."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
