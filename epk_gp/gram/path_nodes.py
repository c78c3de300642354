"""A few nodes of the whole path that stand for all its steps: the midpoint rule along the path."""

import hashlib
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, validate_trajectory
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.core.checks import validate_count
from epk_gp.quadrature.paths import (
    LayerwisePath,
    ManhattanPath,
    WeightPath,
    path_identity,
    straight,
    stretch_of,
    validate_path,
)

_RULE = "none ({} nodes of a path)"  # name of the update rule of a run that is nodes of another one
NUM_NODES = 20  # leave 0.2 % of an MLP's kernel (docs/theory.md, section 9)


def nodes_trajectory(
    trajectory: Trajectory, nodes: int = NUM_NODES, *, is_train: bool = False, path: WeightPath = straight()
) -> Trajectory:
    """Return a run of few steps whose kernel between test copies is the path kernel by the midpoint rule.

    The path is divided into n parts of equal length sum_s eta_s / n. The weights w(c) in the middle of each part,
    between two states of the run where it falls into a step, are the states of the run that is returned:

        K(x, x') = sum_s eta_s int J_st(x) J_st(x')^T dt  =  sum_j (sum_s eta_s / n) J_{w_j}(x) J_{w_j}(x')^T + error

    Evaluate it with `left_endpoint()`, which takes each step at its start; then training and test copies are the same.
    Its last state is the trained network.

    Args:
        trajectory: The run, with S steps.
        nodes: n.
        is_train: Take the weights at the start of the step that each node falls into, as training copies do.
        path: Where the weights are between the states of the run: on `straight()` steps, or on `chords(every=k)`.

    Returns:
        A run of n steps with a digest of its own, in memory: (n + 1) states of P weights. A run that is n nodes of
        another one is returned as it is.

    Raises:
        TypeError: `trajectory` is no recorded run, `nodes` is not a whole number, or `path` is no path.
        ValueError: `nodes` is below 1, the steps have no length, the run is a path of averaged weights, or the path is
            a Manhattan path, or one of chords over nodes.
    """
    validate_trajectory(trajectory)
    validate_count(nodes, "nodes")
    validate_path_of_nodes(path)
    if trajectory.average is not None:
        raise ValueError(
            "the path kernel is that of a recorded run: this one is the path of its averaged weights. Take "
            "trajectory.trained."
        )
    if trajectory.update_rule == _RULE.format(nodes):
        if path_identity(path):
            raise ValueError(
                f"nodes along {path!r} must be those of a recorded run: this run is {nodes} nodes of another one "
                "already. Take them from that run."
            )
        return trajectory
    ends = [0.0, *accumulate(step.lr for step in trajectory.steps)]
    if not ends[-1] > 0:
        raise ValueError(
            "the steps must have a length, for the path is divided by it: their learning rates, those of the first "
            f"parameter group, sum to {ends[-1]}. Record with a group first that learns."
        )
    along = None if is_train else path
    states = [_state_at(trajectory, ends, (j + 0.5) / nodes * ends[-1], along) for j in range(nodes)]
    states.append(flat_state(trajectory, trajectory.num_steps, trajectory.states[0]))
    P = trajectory.num_weights
    name = f"{trajectory.digest} {nodes} nodes{' of training copies' if is_train else ''}"
    name += "".join(f" along {own}" for own in path_identity(path))
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    length = ends[-1] / nodes
    sizes = trajectory.model.sizes
    coefficients = stack_coefficients([LinearStep(lr=length)] * len(sizes), sizes)
    return replace(
        trajectory,
        states=tuple(state[:P] for state in states),
        statistics=None if trajectory.statistics is None else tuple(state[P:] for state in states),
        updates=(coefficients,) * nodes,
        steps=tuple(Step(index=j, lr=length, batch=None) for j in range(nodes)),
        update_rule=_RULE.format(nodes),
        digest=digest,
    )


def validate_path_of_nodes(path: WeightPath) -> None:
    """Raise if single states of the weights cannot stand for a path.

    Raises:
        TypeError: It is no path.
        ValueError: It is a Manhattan or a layerwise path.
    """
    validate_path(path)
    if isinstance(path, ManhattanPath | LayerwisePath):
        got = "manhattan()" if isinstance(path, ManhattanPath) else f"layerwise(every={path.every})"
        raise ValueError(
            f"a node is one state of all weights, on straight() steps or on chords(every=k): got {got}, along which "
            "modules or operations move apart."
        )


def _state_at(trajectory: Trajectory, ends: list[float], length: float, path: WeightPath | None) -> Tensor:
    """Return the weights, and statistics behind them, at some length of a path, or at the start of the run's step."""
    S = trajectory.num_steps
    s = min(bisect_right(ends, length), S) - 1
    if path is None:
        return flat_state(trajectory, s, trajectory.states[0])
    stretch = stretch_of(path, s, S)
    first, last = stretch.start, stretch.stop
    start, end = (flat_state(trajectory, state, trajectory.states[0]) for state in (first, last))
    return torch.lerp(start, end, (length - ends[first]) / (ends[last] - ends[first]))
