"""`epk-gp estimate`: what another command costs, before it starts."""

from collections.abc import Set
from pathlib import Path
from typing import Unpack

import typer

from epk_gp.analysis.breakdown import step_ranges
from epk_gp.cli.kernel_requests import ExplanationRequest, read_block, read_predictions
from epk_gp.cli.options import EstimatedCommand, EstimatedOptions, ExplainedOutputs
from epk_gp.cli.parsing import PARTIAL, make_folder, memory_bytes, require_folder
from epk_gp.core.options import ComputeSettings
from epk_gp.distributed.cost_estimate import CostEstimate
from epk_gp.gram.estimate import estimate_gram
from epk_gp.kernel_machine.estimate import estimate_attribution
from epk_gp.provenance import Stopwatch, write_json

_RULES = {EstimatedCommand.gram: "gauss-legendre:4", EstimatedCommand.attribute: "adaptive"}  # the commands' own
_OF_ONE = {
    EstimatedCommand.gram: ("rows", "columns", "num_rows", "num_columns", "steps", "part"),
    EstimatedCommand.attribute: ("num_points", "outputs"),
}

# What is held beside the result while its file is written, in multiples of it: a block is brought into the order of
# its axes; the sums of a part are written from where they lie.
_COPIES_OF_BLOCK, _COPIES_OF_PART = 1, 0

_DAY, _HOUR, _MINUTE = 86400, 3600, 60


def complete_options(options: dict[str, object], given: Set[str]) -> dict[str, object]:
    """Return the options with the command's own rule.

    Raises:
        ValueError: An option is that of another command, and would be ignored.
    """
    what = EstimatedCommand(str(options["what"]))
    for other, names in _OF_ONE.items():
        for name in names:
            if other is not what and name in given:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{option} must stand beside --what {other}: got --what {what}. Leave one of them out."
                )
    return options if "rule" in given else {**options, "rule": _RULES[what]}


def estimate(
    *,
    what: EstimatedCommand,
    out: Path | None,
    seconds: float,
    **options: Unpack[EstimatedOptions],
) -> None:
    """Say how long gram or attribute will take with the same options, and how much memory and disk."""
    timer, workers = Stopwatch(), options["workers"]
    if out is not None:
        require_folder(out)
    config: dict[str, object] = {"run": options["run"], "what": what.value, "rule": options["rule"]}
    config |= {"path": options["path"], "memory": options["memory"], "workers": workers}
    computing = ComputeSettings(
        memory_budget=memory_bytes(options["memory"]), progress=not options["quiet"], checkpoint=PARTIAL
    )
    if what is EstimatedCommand.gram:
        asked = read_block(options)
        asked.show_sides()
        config |= {"row_points": asked.a_is, "column_points": asked.b_is}
        config |= {"steps": options["steps"], "part": options["part"]}
        found = estimate_gram(
            asked.trajectory, asked.a, asked.b, head=asked.head, rule=asked.rule, path=asked.path, which=asked.which,
            workers=workers, seconds=seconds, **computing,
        )  # fmt: skip
        written = found.disk.result + sum(side.X.nbytes + len(side) for side in (asked.a, asked.b))
        copies = _COPIES_OF_BLOCK if asked.which is None else _COPIES_OF_PART
    else:
        explained = read_predictions(options, options["rule"], options["path"])
        typer.echo(f"explaining {explained.chosen}")
        config |= {"points": str(explained.chosen), "outputs": explained.outputs.value}
        found = estimate_attribution(
            explained.trajectory, explained.chosen.X, explained.groupings, head=explained.head, rule=explained.rule,
            path=explained.path, classes=explained.classes, workers=workers, seconds=seconds, **computing,
        )  # fmt: skip
        written, copies = _attribution_bytes(explained), _COPIES_OF_BLOCK
    peak = found.memory.owner + copies * written
    _show(found, written, peak)
    if out is not None:
        write_json(make_folder(out) / "estimate.json", "estimate", config, _numbers(found, written, peak), timer)
        typer.echo(f"written to {out}: estimate.json")


def _attribution_bytes(asked: ExplanationRequest) -> int:
    """Count the bytes of the arrays of attribution.safetensors."""
    trajectory, X = asked.trajectory, asked.chosen.X
    samples, ranges = trajectory.num_points, len(step_ranges(trajectory).names)
    per_output = samples + ranges + 6  # initial, decay, total, network, statistics, unexplained
    itemsize = X.itemsize if X.is_floating_point() else trajectory.dtype.itemsize
    K = trajectory.num_outputs if asked.outputs is ExplainedOutputs.every else 1
    return len(X) * (K * per_output * itemsize + 8) + X.nbytes  # 8: the predicted class


def _show(found: CostEstimate, written: int, peak: int) -> None:
    """Print an estimate."""
    disk, memory, costs = found.disk, found.memory, found.costs
    measured = "all pieces" if costs.is_exact else f"{costs.num_measured} parts of pieces, the rest is extrapolated"
    lines = {
        "pieces": found.description,
        "measured": f"{measured} ({_time(costs.sample_seconds)})",
        "work of one process": _interval(found.work_seconds, found.work_interval),
        "longest piece": _time(found.longest_piece),
    }
    if found.workers is None:
        lines["time"] = _interval(found.seconds, found.interval)
    else:
        lines[f"time with {found.workers} workers"] = _interval(found.seconds, found.interval)
        if found.workers > found.num_pieces:
            lines["workers of use"] = f"{found.num_pieces}: there are no more pieces"
    peak_so_far = "" if memory.measured is None else f"{_size(memory.measured)} in the sample; "
    lines |= {
        "time besides": f"{_time(found.setup_seconds)} of it before the first piece; the start of Python comes on top",
        "memory of a process": f"{peak_so_far}with its whole budget {_size(memory.limit)}",
        "memory of the result": f"{_size(peak)} more in the process that writes it",
        "disk": f"{_size(written)} for the result, and at most {_size(disk.scratch)} beside it until it is there",
    }
    if disk.pieces_at_once:
        lines["disk"] += f" ({disk.pieces_at_once} pieces of {_size(disk.piece)} at a time)"
    for name, value in lines.items():
        typer.echo(f"{name + ':':26}{value}")


def _numbers(found: CostEstimate, written: int, peak: int) -> dict[str, object]:
    """Return an estimate as JSON has it."""
    memory, disk, costs = found.memory, found.disk, found.costs
    return {
        "pieces": found.num_pieces,
        "work_seconds": found.work_seconds,
        "work_interval": found.work_interval,
        "seconds": found.seconds,
        "interval": found.interval,
        "longest_piece_seconds": found.longest_piece,
        "setup_seconds": found.setup_seconds,
        "all_measured": costs.is_exact,
        "measured_parts": costs.num_measured,
        "sample_seconds": costs.sample_seconds,
        "memory_of_process_bytes": memory.limit,
        "measured_memory_bytes": memory.measured,
        "memory_of_result_bytes": peak,
        "result_bytes": written,
        "piece_bytes": disk.piece,
        "pieces_at_once": disk.pieces_at_once,
        "scratch_bytes": disk.scratch,
    }


def _interval(seconds: float, interval: tuple[float, float]) -> str:
    low, high = (_time(bound) for bound in interval)
    return _time(seconds) if low == high else f"{_time(seconds)} ({low} to {high})"


def _time(seconds: float) -> str:
    """Return a time in words, with two or three digits."""
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.3g} min"
    return f"{seconds / _HOUR:.3g} h" if seconds < _DAY else f"{seconds / _DAY:.3g} days"


def _size(num_bytes: int) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
