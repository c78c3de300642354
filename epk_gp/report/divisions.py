"""What a report splits contributions by: training samples, layers and ranges of steps."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.axes import Axis, by_layer, by_sample, by_step

NUM_RANGES = 8  # of steps, of about equal length
MAX_LAYERS = 12  # more modules are joined: by their names, or else neighbours


@dataclass(frozen=True, eq=False)
class Divisions:
    """The axes of the contributions of a report.

    Attributes:
        axes: Training samples, layers where they are told apart, and ranges of steps, in this order.
        layers: Names of the L layers.
        ranges: First step and last step plus one of the R ranges.
    """

    axes: tuple[Axis, ...]
    layers: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]


def divide(trajectory: Trajectory, *, by_layers: bool = True) -> Divisions:
    """Return how the contributions of a run are split in its report.

    Args:
        trajectory: The run.
        by_layers: Whether layers are told apart.
    """
    S = trajectory.num_steps
    count = max(1, min(NUM_RANGES, S))
    edges = [round(S * r / count) for r in range(count + 1)]
    ranges = tuple(pairwise(edges))
    samples, steps = by_sample(trajectory), by_step(trajectory, edges[1:-1])
    if not by_layers:
        return Divisions((samples, steps), ("the network",), ranges)
    layers = _layer_axis(trajectory)
    return Divisions((samples, layers, steps), layers.names, ranges)


def _layer_axis(trajectory: Trajectory) -> Axis:
    """Join the parameters of a module, and many modules by the beginning of their names, or else neighbours."""
    axis = by_layer(trajectory)
    depth = max(len(name.split(".")) for name in axis.names)
    names = list(axis.names)
    while len(dict.fromkeys(names)) > MAX_LAYERS and depth > 1:
        depth -= 1
        names = [".".join(name.split(".")[:depth]) for name in axis.names]
    distinct = list(dict.fromkeys(names))
    if len(distinct) <= MAX_LAYERS:
        group = torch.tensor([distinct.index(name) for name in names])
        return Axis("parameter", group[axis.group], tuple(_title(trajectory, name) for name in distinct))
    part = [MAX_LAYERS * number // len(distinct) for number in range(len(distinct))]
    members = [[name for name, p in zip(distinct, part, strict=True) if p == k] for k in range(MAX_LAYERS)]
    titles = tuple(m[0] if len(m) == 1 else f"{m[0]} to {m[-1]}" for m in members)
    group = torch.tensor([part[distinct.index(name)] for name in names])
    return Axis("parameter", group[axis.group], titles)


def _title(trajectory: Trajectory, name: str) -> str:
    kind = type(trajectory.model.module.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else kind
