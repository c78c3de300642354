"""Paths between the recorded states, as values: along which a test point's Jacobian is integrated.

Any path from w_0 through recorded states to w_S gives an exact kernel machine (section 3.6, Bell et al. 2023): the
terms of a prediction differ, their sum does not (docs/theory.md, section 11).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import validate_count
from epk_gp.core.model import FunctionalModel


@dataclass(frozen=True)
class StraightPath:
    """Every step is a straight line of its own: the path of Definition 3.4, Bell et al. (2023)."""

    @property
    def every(self) -> int:
        """Steps that one stretch of the path stands for."""
        return 1


@dataclass(frozen=True)
class ChordPath:
    """Straight lines between every k-th state.

    Training gradients stay those at each step's own weights; the test side is integrated along the chord. That costs
    about as much as one step, and some 3 evaluations for each kink on it.

    Attributes:
        every: k, from 1. The last chord has the steps that are left; where k is larger than S there is one chord.
    """

    every: int

    def __post_init__(self) -> None:
        """Raise if k is no number of steps.

        Raises:
            TypeError: k is not a whole number.
            ValueError: k is below 1.
        """
        validate_count(self.every, "every")


@dataclass(frozen=True)
class ManhattanPath:
    """Every step moves the weights of one module after another, in the order of the network's parameters.

    Moving statistics are moved last, all together. A step costs as much as one straight step for each module.
    """

    @property
    def every(self) -> int:
        """Steps that one stretch of the path stands for."""
        return 1


@dataclass(frozen=True)
class LayerwisePath:
    """No path of the weights: between every k-th state, every operation's inputs move on a straight line of their own.

    The derivative of each operation of the network is averaged over the line between its inputs at both states: in
    closed form where it is linear in each of two factors, works number by number, or picks the largest of several.
    The averages are multiplied as derivatives are by the chain rule. So the terms sum to the outputs exactly, with two
    forward passes and one backward pass per point and stretch, however many units switch there; nothing is integrated.
    The averaged gradient is not the average of the gradient along the chord: both differ by second order in the
    stretch's length.

    Attributes:
        every: k, from 1. The last stretch has the steps that are left; where k is larger than S there is one.
    """

    every: int = 1

    def __post_init__(self) -> None:
        """Raise if k is no number of steps.

        Raises:
            TypeError: k is not a whole number.
            ValueError: k is below 1.
        """
        validate_count(self.every, "every")


WeightPath = StraightPath | ChordPath | ManhattanPath | LayerwisePath


def straight() -> StraightPath:
    """Every step is a straight line: the path of the paper, and the default everywhere."""
    return StraightPath()


def chords(every: int) -> ChordPath:
    """Straight lines between every k-th state; see `ChordPath`.

    Args:
        every: k. `chords(1)` is `straight()`.

    Raises:
        TypeError: k is not a whole number.
        ValueError: k is below 1.
    """
    return ChordPath(every)


def manhattan() -> ManhattanPath:
    """Weights move one module at a time; see `ManhattanPath`."""
    return ManhattanPath()


def layerwise(every: int = 1) -> LayerwisePath:
    """Derivatives averaged operation by operation between every k-th state; see `LayerwisePath`.

    Args:
        every: k.

    Raises:
        TypeError: k is not a whole number.
        ValueError: k is below 1.
    """
    return LayerwisePath(every)


def validate_path(path: object) -> None:
    """Raise if an object is not a path.

    Raises:
        TypeError: The object is neither straight steps, nor chords, nor a Manhattan or a layerwise path.
    """
    if not isinstance(path, WeightPath):
        raise TypeError(f"path must be a path such as epk_gp.straight() or epk_gp.chords(every=20): got {path!r}.")


def path_identity(path: WeightPath) -> tuple[WeightPath, ...]:
    """Return what a fingerprint depends on: nothing for straight steps, whose fingerprints knew of no paths."""
    return () if isinstance(path, StraightPath) or path == ChordPath(1) else (path,)


def stretches_of(path: WeightPath, num_steps: int, steps: slice = slice(None)) -> list[range]:
    """List the stretches of a path, each as the steps that it stands for, in their order.

    Args:
        path: The path.
        num_steps: S.
        steps: Some of the steps, which begin and end where stretches do.
    """
    own = range(num_steps)[steps]
    return [range(first, min(first + path.every, own.stop)) for first in own[:: path.every]]


def stretch_of(path: WeightPath, step: int, num_steps: int) -> range:
    """Return the stretch that a step belongs to."""
    first = step - step % path.every
    return range(first, min(first + path.every, num_steps))


def moved_parts(path: WeightPath, model: FunctionalModel) -> list[slice]:
    """List the parts of a state, weights and moving statistics behind them, that are moved one after another.

    One part is the whole state, unless the path is a Manhattan path: there each module's own parameters are one, which
    follow one another in the flat weights, and the moving statistics are the last.
    """
    P, Q = model.num_weights, model.num_statistics
    if not isinstance(path, ManhattanPath):
        return [slice(0, P + Q)]
    named = zip(model.names, model.sizes, strict=True)
    parts, first = [], 0
    for _, members in groupby(named, key=lambda entry: entry[0].rpartition(".")[0]):
        last = first + sum(size for _, size in members)
        parts.append(slice(first, last))
        first = last
    return [*parts, slice(P, P + Q)] if Q else parts


def num_segments(path: WeightPath, model: FunctionalModel, num_steps: int) -> int:
    """Count the straight lines that the path consists of."""
    return len(moved_parts(path, model)) * len(stretches_of(path, num_steps))


def lines_of_stretch(
    path: WeightPath, model: FunctionalModel, start: Float[Tensor, " n"], change: Float[Tensor, " n"]
) -> Iterator[tuple[slice, Float[Tensor, " n"], Float[Tensor, " n"]]]:
    """Yield the straight lines of a stretch: which part of the state moves, where from, and how far.

    Args:
        path: The path.
        model: The network.
        start: The state at the start of the stretch, (P,) or (P + Q,).
        change: What the stretch adds to it.
    """
    parts = moved_parts(path, model)
    for part in parts:
        if len(parts) == 1:
            yield part, start, change
            return
        direction = torch.zeros_like(change)
        direction[part] = change[part]
        yield part, start, direction
        start = start + direction


def require_integrable(path: WeightPath, what: str) -> None:
    """Raise if a path has no line on which something could be integrated.

    Args:
        path: The path.
        what: What integrates along it, for the message.

    Raises:
        ValueError: The path is a layerwise one.
    """
    if isinstance(path, LayerwisePath):
        raise ValueError(
            f"{what} integrates along a path of the weights, straight(), chords(every=k) or manhattan(): got "
            f"layerwise(every={path.every}), which is for attributions."
        )
