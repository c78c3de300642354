"""Axes of an attribution: what the contributions are split by."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.core.trajectory import Trajectory
from epk_gp.core.checks import validate_integer

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
