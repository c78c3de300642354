"""`epk-gp estimate`: what another command costs, before it starts."""

from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

import typer

from epk_gp.cli.kernel_requests import read_block, read_predictions
from epk_gp.cli.options import EstimatedCommand, EstimatedOptions
from epk_gp.cli.parsing import make_folder, memory_bytes, require_folder
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.plan import plan_attribution, plan_gram
from epk_gp.provenance import Stopwatch, write_json

_RULES = {EstimatedCommand.gram: "gauss-legendre:4", EstimatedCommand.attribute: "adaptive"}  # the commands' own
_OF_ONE = {
    EstimatedCommand.gram: ("rows", "columns", "num_rows", "num_columns"),
    EstimatedCommand.attribute: ("num_points", "outputs"),
}


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
    """Say into how many pieces gram or attribute divide with the same options, their bytes and their seconds."""
    timer, budget = Stopwatch(), memory_bytes(options["memory"])
    if out is not None:
        require_folder(out)
    config: dict[str, object] = {name: options[name] for name in ("run", "rule", "path", "memory", "workers")}
    config["what"] = what.value
    if what is EstimatedCommand.gram:
        asked = read_block(options)
        asked.show_sides()
        config |= {"row_points": asked.a_is, "column_points": asked.b_is}
        kernel = PathKernel(asked.trajectory, asked.head, asked.rule, path=asked.path)
        plan = plan_gram(kernel, asked.a, asked.b, seconds=seconds, memory_budget=budget)
    else:
        explained = read_predictions(options, options["rule"], options["path"])
        typer.echo(f"explaining {explained.chosen}")
        config |= {"points": str(explained.chosen), "outputs": explained.outputs.value}
        kernel = PathKernel(explained.trajectory, explained.head, explained.rule, path=explained.path)
        plan = plan_attribution(
            kernel, explained.chosen.X, explained.groupings, classes=explained.classes, seconds=seconds,
            memory_budget=budget,
        )  # fmt: skip
    workers = max(1, min(options["workers"] or 1, plan.pieces))
    typer.echo(f"pieces:  {plan.pieces}, of up to {_size(plan.piece_bytes)}")
    typer.echo(f"result:  {_size(plan.result_bytes)}")
    typer.echo(f"time:    {_time(plan.seconds)} of one process; {_time(plan.seconds / workers)} with {workers} workers")
    if out is not None:
        results = {**asdict(plan), "workers_of_use": workers, "seconds_with_workers": plan.seconds / workers}
        write_json(make_folder(out) / "estimate.json", "estimate", config, results, timer)
        typer.echo(f"written to {out}: estimate.json")


def _time(seconds: float) -> str:
    """Return a time in words, with three digits."""
    for unit, factor in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _size(num_bytes: int) -> str:
    """Return a number of bytes in words."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} bytes"
