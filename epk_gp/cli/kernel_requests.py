"""What commands are asked to compute from a run's kernel: a block of it, or the contributions to predictions."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import typer
from jaxtyping import Int64
from torch import Tensor

from epk_gp.analysis.breakdown import step_ranges
from epk_gp.cli.data import ChosenPoints, PointSource, cast_points, draw_rows, read_points
from epk_gp.cli.manifest import open_run
from epk_gp.cli.options import BlockOptions, ExplainedOutputs, PredictionOptions, RunOptions, Side
from epk_gp.cli.parsing import parse_path, parse_rule, torch_dtype
from epk_gp.core.inputs import Points
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.kernel_machine.axes import Axis, by_sample
from epk_gp.quadrature.paths import WeightPath
from epk_gp.quadrature.rules import Rule


@dataclass(frozen=True, eq=False)
class BlockRequest:
    """A block of the kernel.

    Attributes:
        trajectory: The run.
        head: Its outputs' head.
        rule: The quadrature rule.
        path: Along which test copies move.
        a: The points along the rows.
        b: Those along the columns.
        a_is: What the points along the rows are, in words.
        b_is: The same of the columns.
    """

    trajectory: Trajectory
    head: Head
    rule: Rule
    path: WeightPath
    a: Points
    b: Points
    a_is: str
    b_is: str

    def show_sides(self) -> None:
        """Print what the points are."""
        typer.echo(f"rows: {self.a_is}")
        typer.echo(f"columns: {self.b_is}")


def read_block(options: BlockOptions) -> BlockRequest:
    """Open the run and read the points of a block.

    Raises:
        ValueError, TypeError, OSError: An option is wrong, or a file cannot be read.
    """
    rule, path = parse_rule(options["rule"]), parse_path(options["path"])
    rows, columns = options["rows"], options["columns"]
    _require_test_side(options["points"], rows, columns)
    trajectory, head = _open(options)
    source = _source(options)
    (a, a_is), (b, b_is) = (
        _points_of_side(source, trajectory, *side)
        for side in ((rows, options["num_rows"]), (columns, options["num_columns"]))
    )
    return BlockRequest(trajectory, head, rule, path, a, b, a_is, b_is)


@dataclass(frozen=True, eq=False)
class ExplanationRequest:
    """Predictions whose contributions are wanted.

    Attributes:
        trajectory: The run.
        head: Its outputs' head.
        rule: The quadrature rule.
        chosen: The points.
        outputs: Which outputs are explained.
        path: Along which the points are integrated.
    """

    trajectory: Trajectory
    head: Head
    rule: Rule
    chosen: ChosenPoints
    outputs: ExplainedOutputs
    path: WeightPath

    @cached_property
    def predicted(self) -> Int64[Tensor, " n"]:
        """The class that the network predicts at each point."""
        return network_outputs(self.trajectory, self.chosen.X).argmax(dim=1)

    @property
    def classes(self) -> Int64[Tensor, " n"] | None:
        """The one output of each point that is explained, if it is not every output."""
        return self.predicted if self.outputs is ExplainedOutputs.predicted else None

    @property
    def groupings(self) -> list[list[Axis]]:
        """What the contributions are split by: training points, and ranges of steps."""
        return [[by_sample(self.trajectory)], [step_ranges(self.trajectory)]]


def read_predictions(options: PredictionOptions, rule: str = "adaptive", path: str = "straight") -> ExplanationRequest:
    """Open the run and read the points whose predictions are explained.

    Args:
        options: The command's options.
        rule: The quadrature rule, where the command has one.
        path: The path, where the command has one.

    Raises:
        ValueError, TypeError, OSError: An option is wrong, or a file cannot be read.
    """
    quadrature, along = parse_rule(rule), parse_path(path)
    trajectory, head = _open(options)
    chosen = read_points(_source(options), trajectory, options["num_points"])
    return ExplanationRequest(trajectory, head, quadrature, chosen, options["outputs"], along)


def _open(options: RunOptions) -> tuple[Trajectory, Head]:
    trajectory, head = open_run(options["run"], options["network"]), options["head"]
    return trajectory, resolve_head(None if head is None else head.value, trajectory.loss, trajectory.num_outputs)


def _source(options: RunOptions) -> PointSource:
    dtype = options["dtype"]
    return PointSource(
        options["run"], options["points"], None if dtype is None else torch_dtype(dtype), options["seed"]
    )


def _require_test_side(points: Path | None, rows: Side, columns: Side) -> None:
    """Raise if --points has no side."""
    if points is not None and rows is Side.train and columns is Side.train:
        raise ValueError("--points must have a side: got --rows train and --columns train. Make one of them test.")


def _points_of_side(source: PointSource, trajectory: Trajectory, side: Side, count: int | None) -> tuple[Points, str]:
    """Return the points of one side of a block, at most so many, and what they are in words."""
    if side is Side.test:
        chosen = read_points(source, trajectory, count)
        return Points(chosen.X, is_train=False), f"test copies of {chosen}"
    X = cast_points(trajectory.inputs[draw_rows(trajectory.num_points, count, source.seed)], trajectory, source.dtype)
    return Points(X, is_train=True), f"training copies of {len(X)} of {trajectory.num_points} training inputs"
