"""Axes of an attribution, what contributions are split by, and results as small tables."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.checks import validate_integer
from epk_gp.core.show import NAME_LENGTH, SHOWN_POINTS, Table, columns_note, count, number, shortened
from epk_gp.core.trajectory import Trajectory

Kind = Literal["sample", "step", "parameter"]


@dataclass(frozen=True, eq=False)
class Axis:
    """A partition of the training samples, the steps or the parameters into groups.

    Attributes:
        kind: What is put into groups.
        group: Each sample's, step's or parameter's group, 0 .. G - 1.
        names: Names of the G groups.
    """

    kind: Kind
    group: Int64[Tensor, " T"]
    names: tuple[str, ...]


def by_sample(trajectory: Trajectory) -> Axis:
    """Return the axis on which each training sample has an entry of its own."""
    return Axis("sample", torch.arange(trajectory.num_points), tuple(map(str, range(trajectory.num_points))))


def by_label(trajectory: Trajectory) -> Axis:
    """Return the axis that joins training samples of one class.

    Raises:
        ValueError: The targets are not class labels.
    """
    if trajectory.targets.is_floating_point() or trajectory.targets.ndim != 1:
        raise ValueError(
            "by_label needs class labels as targets: got "
            f"{trajectory.targets.dtype} of shape {tuple(trajectory.targets.shape)}. Build an Axis of your own."
        )
    labels, group = trajectory.targets.cpu().unique(return_inverse=True)
    return Axis("sample", group, tuple(str(int(label)) for label in labels))


def by_step(trajectory: Trajectory, edges: Sequence[int] | None = None) -> Axis:
    """Return the axis on which each step has an entry of its own, or each range of steps.

    Args:
        trajectory: The run.
        edges: First step of each range after the first, ascending.

    Raises:
        TypeError: An edge is not a whole number.
        ValueError: The edges do not ascend, or do not lie in 1 .. S - 1.
    """
    steps = torch.arange(trajectory.num_steps)
    if edges is None:
        return Axis("step", steps, tuple(map(str, steps.tolist())))
    for edge in edges:
        validate_integer(edge, "an edge")
    inner = torch.tensor([int(edge) for edge in edges], dtype=torch.int64)
    ascending = bool((inner.diff() > 0).all())
    if not ascending or (len(inner) and not 1 <= int(inner[0]) <= int(inner[-1]) < trajectory.num_steps):
        raise ValueError(f"edges must ascend within 1..{trajectory.num_steps - 1}: got {list(edges)}.")
    bounds = [0, *inner.tolist(), trajectory.num_steps]
    names = tuple(f"{a}..{b - 1}" for a, b in pairwise(bounds))
    return Axis("step", torch.bucketize(steps, inner, right=True), names)


def by_parameter(trajectory: Trajectory) -> Axis:
    """Return the axis on which each trained parameter (a layer's weight, a layer's bias) has an entry of its own."""
    names = trajectory.model.names
    return Axis("parameter", torch.arange(len(names)), names)


def by_layer(trajectory: Trajectory) -> Axis:
    """Return the axis that joins the parameters of one module."""
    owners = [name.rpartition(".")[0] for name in trajectory.model.names]
    names = tuple(dict.fromkeys(owners))
    return Axis("parameter", torch.tensor([names.index(owner) for owner in owners]), names)


def parameter_parts(groupings: Iterable[Sequence[Axis]], num_parameters: int) -> Int64[Tensor, " L"]:
    """Return the part of each of L parameters: those that no axis tells apart are one part.

    Args:
        groupings: The axes of each result.
        num_parameters: L.
    """
    groups = [axis.group.cpu() for axes in groupings for axis in axes if axis.kind == "parameter"]
    if not groups:
        return torch.zeros(num_parameters, dtype=torch.int64)
    parts: Tensor = torch.unique(torch.stack(groups), dim=1, return_inverse=True)[1]
    return parts


def validate_axes(trajectory: Trajectory, axes: Sequence[Axis]) -> None:
    """Raise if axes do not belong to this run.

    Raises:
        TypeError: An object is not an axis.
        ValueError: The groups do not fit the run's samples, steps or parameters, or their names.
    """
    sizes = {
        "sample": trajectory.num_points,
        "step": trajectory.num_steps,
        "parameter": len(trajectory.model.names),
    }
    for axis in axes:
        if not isinstance(axis, Axis):
            raise TypeError(f"by must hold axes such as epk_gp.kernel_machine.axes.by_step(trajectory): got {axis!r}.")
        if axis.kind not in sizes:
            raise ValueError(f"an axis must be of kind {sorted(sizes)}: got {axis.kind!r}.")
        if axis.group.shape != (sizes[axis.kind],):
            raise ValueError(
                f"an axis must put each of the run's {sizes[axis.kind]} {axis.kind}s into a group: "
                f"got groups of shape {tuple(axis.group.shape)}."
            )
        if axis.group.dtype != torch.int64 or not 0 <= int(axis.group.min()) <= int(axis.group.max()) < len(axis.names):
            raise ValueError(
                f"groups must be int64 in 0..{len(axis.names) - 1}, one name each: got {axis.group.dtype} in "
                f"{int(axis.group.min())}..{int(axis.group.max())}."
            )


_LARGEST = 3  # parts that are named for a point
Place = tuple[int, int]  # a point, and one of its outputs


def shown_places(outputs: Float[Tensor, "n C"]) -> list[Place]:
    """Return the first points, each with its largest output."""
    if not outputs.shape[1]:
        return []
    return list(enumerate(outputs[:SHOWN_POINTS].argmax(dim=1).tolist()))


def place_table(outputs: Float[Tensor, "n C"], places: list[Place], rows: list[tuple[str, ...]]) -> Table | None:
    """Return a table with a column for each of the places.

    Args:
        outputs: The outputs of all points.
        places: Which of them have a column.
        rows: The name of each row, and an entry for each column.

    Returns:
        The table, or None where there is no point.
    """
    n, C = outputs.shape
    if not places:
        return None
    chosen = [] if C == 1 else [("output", *(str(c) for _, c in places))]
    note = columns_note(len(places), n, outputs="" if C == 1 else f"of the {count(C, 'output')}, each point's largest")
    return Table(("", *(f"point {i}" for i, _ in places)), (*chosen, *rows), note)


def sum_rows(places: list[Place], terms: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Return a row for each term, (n, C, ...), summed over all but point and output, and one for the sum of all."""
    sums = {name: [float(term[place].detach().sum()) for place in places] for name, term in terms.items()}
    total = [
        math.fsum(column) if all(map(math.isfinite, column)) else sum(column)
        for column in zip(*sums.values(), strict=True)
    ]
    rows = [(name, *map(number, values)) for name, values in sums.items()]
    return [*rows, ("sum of all terms", *map(number, total))]


def number_row(name: str, places: list[Place], values: Float[Tensor, "n C"]) -> tuple[str, ...]:
    """Return a row of the values at the places."""
    return (name, *(number(float(values[place])) for place in places))


def largest_rows(
    name: str, places: list[Place], values: Tensor, name_of: Callable[[int], str]
) -> list[tuple[str, ...]]:
    """Return rows of the parts, (n, C, ...), that are largest in absolute value, the largest first.

    Args:
        name: Name of the first row.
        places: The columns.
        values: The parts.
        name_of: Maps the number of a part, flattened, to its name.
    """
    columns = []
    for place in places:
        parts = values[place].detach().flatten()
        largest = parts.abs().topk(min(_LARGEST, len(parts))).indices
        named = zip(largest.tolist(), parts[largest].tolist(), strict=True)
        columns.append([f"{name_of(part)}: {value:+.4g}" for part, value in named])
    return [(name if not k else "", *row) for k, row in enumerate(zip(*columns, strict=True))]


def sample_name(index: int) -> str:
    """Return the name of a training sample."""
    return f"#{index}"


def group_namer(axes: tuple[Axis, ...]) -> Callable[[int], str]:
    """Return a function from the number of a group, over all axes, to its name."""
    sizes = [len(axis.names) for axis in axes]
    length = NAME_LENGTH // max(1, len(axes))

    def name_of(part: int) -> str:
        places = np.unravel_index(part, sizes) if sizes else ()
        return ", ".join(
            shortened(f"{'#' if is_each(axis) else ''}{axis.names[int(place)]}", length)
            for axis, place in zip(axes, places, strict=True)
        )

    return name_of


def is_each(axis: Axis) -> bool:
    """Return whether each sample has a group of its own on an axis."""
    num_groups = len(axis.names)
    return axis.kind == "sample" and 0 < num_groups == len(axis.group) and axis.names[-1] == str(num_groups - 1)


def describe_axes(axes: tuple[Axis, ...]) -> str:
    """Return what values are split by, as in "2 groups of samples, 20 groups of steps"."""
    return ", ".join(
        count(len(axis.names), "sample") if is_each(axis) else f"{count(len(axis.names), 'group')} of {axis.kind}s"
        for axis in axes
    )
