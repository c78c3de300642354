"""Axes of an attribution, along which contributions are split, and results as small tables."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any, Literal

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
        kind: The kind of things that are grouped.
        group: The group, 0 .. G - 1, of each sample, step or parameter.
        names: Names of the G groups.
    """

    kind: Kind
    group: Int64[Tensor, " T"]
    names: tuple[str, ...]


def by_sample(trajectory: Trajectory) -> Axis:
    """Return the axis with a separate entry for each training sample."""
    return every_sample(trajectory.num_points)


def every_sample(count: int) -> Axis:
    """Return the same axis for a number of samples."""
    return Axis("sample", torch.arange(count), tuple(map(str, range(count))))


def by_label(trajectory: Trajectory) -> Axis:
    """Return the axis that joins training samples of the same class.

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
    """Return the axis with a separate entry for each step, or for each range of steps.

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
    """Return the axis with a separate entry for each trained parameter (a layer's weight, a layer's bias)."""
    names = trajectory.model.names
    return Axis("parameter", torch.arange(len(names)), names)


def by_layer(trajectory: Trajectory) -> Axis:
    """Return the axis that joins the parameters of one module."""
    owners = [name.rpartition(".")[0] for name in trajectory.model.names]
    names = tuple(dict.fromkeys(owners))
    return Axis("parameter", torch.tensor([names.index(owner) for owner in owners]), names)


def _sizes(trajectory: Trajectory) -> dict[str, int]:
    """Return the numbers of samples, steps and parameters of a run."""
    return {"step": trajectory.num_steps, "sample": trajectory.num_points, "parameter": len(trajectory.model.names)}


class CombinedAxes:
    """Axes of one result; axes of the same kind are joined to one index, under which sums are kept until the end.

    Args:
        trajectory: The run.
        axes: The axes, in the order of the result.

    Attributes:
        index: For each kind, the index of each step, sample or parameter among all groups of that kind.
        sizes: For each kind, the numbers of groups of its axes.
    """

    def __init__(self, trajectory: Trajectory, axes: Sequence[Axis]) -> None:
        self.kinds, self.index, self.sizes = [axis.kind for axis in axes], dict[str, Tensor](), dict[str, list[int]]()
        for kind, size in _sizes(trajectory).items():
            index = torch.zeros(size, dtype=torch.int64)
            for axis in (own := [axis for axis in axes if axis.kind == kind]):
                index = index * len(axis.names) + axis.group.cpu()
            self.index[kind], self.sizes[kind] = index, [len(axis.names) for axis in own]

    def count(self, kind: str) -> int:
        """Return the number of groups of a kind."""
        return math.prod(self.sizes[kind])

    def unflatten(self, sums: Float[Tensor, "n C *places"], *kinds: str) -> Float[Tensor, "n C *groups"]:
        """Arrange sums over groups of some kinds in the order of the axes; axes of other kinds get length 1."""
        sums = sums.reshape(*sums.shape[:2], *(size for kind in kinds for size in self.sizes[kind]))
        present = [place for kind in kinds for place, own in enumerate(self.kinds) if own == kind]
        sums = sums.permute(0, 1, *(2 + present.index(place) for place in sorted(present)))
        for place, kind in enumerate(self.kinds):
            if kind not in kinds:
                sums = sums.unsqueeze(2 + place)
        return sums


def parameter_parts(groupings: Iterable[Sequence[Axis]], num_parameters: int) -> Int64[Tensor, " L"]:
    """Return the part of each of L parameters; parameters that no axis separates form one part.

    Args:
        groupings: The axes of each result.
        num_parameters: L.
    """
    groups = [axis.group.cpu() for axes in groupings for axis in axes if axis.kind == "parameter"]
    if not groups:
        return torch.zeros(num_parameters, dtype=torch.int64)
    parts: Tensor = torch.unique(torch.stack(groups), dim=1, return_inverse=True)[1]
    return parts


def parse_axes(trajectory: Trajectory, axes: object) -> tuple[Axis, ...]:
    """Return the axes of one result.

    Raises:
        TypeError: There is no list of axes.
        ValueError: The groups do not fit the run's samples, steps or parameters, or their names.
    """
    if not isinstance(axes, list | tuple):
        got = type(axes).__name__
        raise TypeError(f"by must be a list of axes: got {got}. Write by=[by_step(trajectory)], also for a single one.")
    sizes = _sizes(trajectory)
    for axis in axes:
        if not isinstance(axis, Axis):
            got = "a list among them" if isinstance(axis, list | tuple) else repr(axis)
            raise TypeError(f"by must hold axes such as epk_gp.kernel_machine.axes.by_step(trajectory): got {got}.")
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
    return tuple(axes)


_LARGEST = 3  # number of groups that are named for a point
Rows = list[tuple[str, ...]]  # rows of a table: a name, and an entry for each column


class PointsTable:
    """A small table of a result: one column for each of the first points, each for its largest output.

    Args:
        outputs: The outputs of all points.
        name: The word for one of the outputs.
    """

    def __init__(self, outputs: Float[Tensor, "n C"], name: str = "output") -> None:
        self.shape, self.name = outputs.shape, name
        self.places = list(enumerate(outputs[:SHOWN_POINTS].argmax(dim=1).tolist())) if outputs.shape[1] else []

    def table(self, rows: Rows) -> Table | None:
        """Return the table with these rows; None if there are no points."""
        n, C = self.shape
        if not self.places:
            return None
        chosen = [] if C == 1 else [(self.name, *(str(c) for _, c in self.places))]
        largest = "" if C == 1 else f"of the {count(C, self.name)}, each point's largest"
        note = columns_note(len(self.places), n, outputs=largest)
        return Table(("", *(f"point {i}" for i, _ in self.places)), (*chosen, *rows), note)

    def frame(self, terms: Mapping[str, Tensor], axes: Sequence[Axis]) -> tuple[Any, ...]:
        """Return the parts of a table of all points and outputs, in the form for `Tabular`.

        Args:
            terms: Values, (n, C, ...).
            axes: The axes of the values; groups whose names are their numbers get the numbers as labels.
        """
        labels = [[int(name) if name == str(k) else name for k, name in enumerate(axis.names)] for axis in axes]
        rows = {"point": range(self.shape[0]), self.name: range(self.shape[1])}
        return rows, terms, [(axis.kind, own) for axis, own in zip(axes, labels, strict=True)]

    def row(self, name: str, values: Float[Tensor, "n C"]) -> tuple[str, ...]:
        """Return a row of values."""
        return (name, *(number(float(values[place])) for place in self.places))

    def sums(self, terms: Mapping[str, Tensor]) -> Rows:
        """Return a row for each term, (n, C, ...), summed over all but point and output, and one for the total."""
        sums = {name: [float(term[place].detach().sum()) for place in self.places] for name, term in terms.items()}
        sums["sum of all terms"] = [sum(column) for column in zip(*sums.values(), strict=True)]
        return [(name, *map(number, values)) for name, values in sums.items()]

    def largest(self, name: str, values: Tensor, name_of: Callable[[int], str]) -> Rows:
        """Return rows of the groups, (n, C, ...), with the largest absolute values, the largest first.

        Args:
            name: Name of the first row.
            values: Values of the groups.
            name_of: Maps the number of a group, over all axes, to its name.
        """
        columns = []
        for place in self.places:
            groups = values[place].detach().flatten()
            largest = groups.abs().topk(min(_LARGEST, len(groups))).indices
            named = zip(largest.tolist(), groups[largest].tolist(), strict=True)
            columns.append([f"{name_of(group)}: {value:+.4g}" for group, value in named])
        return [(name if not k else "", *row) for k, row in enumerate(zip(*columns, strict=True))]


def group_name(axes: Sequence[Axis], group: int) -> str:
    """Return the name of a group, numbered over all axes."""
    places = np.unravel_index(group, [len(axis.names) for axis in axes]) if axes else ()
    length, named = NAME_LENGTH // max(1, len(axes)), zip(axes, map(int, places), strict=True)
    return ", ".join(f"#{k}" if _is_each(axis) else _short_name(axis.names, k, length) for axis, k in named)


def _short_name(names: Sequence[str], place: int, length: int) -> str:
    """Return a name; a long one without the dotted beginning and end that all names share."""
    if len(names[place]) <= length:
        return names[place]
    parts = [name.split(".") for name in names]
    first, last = (len(commonprefix(own)) for own in (parts, [own[::-1] for own in parts]))  # noqa: RUF071  of lists
    return shortened(".".join(parts[place][first : len(parts[place]) - last]) or names[place], length)


def _is_each(axis: Axis) -> bool:
    """Return whether each sample has its own group on an axis."""
    num_groups = len(axis.names)
    return axis.kind == "sample" and 0 < num_groups == len(axis.group) and axis.names[-1] == str(num_groups - 1)


def in_words(axes: Sequence[Axis]) -> str:
    """Describe the axes of values, as in "2 groups of samples, 20 groups of steps"."""
    return ", ".join(
        count(len(axis.names), "sample") if _is_each(axis) else f"{count(len(axis.names), 'group')} of {axis.kind}s"
        for axis in axes
    )
