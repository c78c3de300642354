"""Paths between the recorded states, as values: along which a test point's Jacobian is integrated.

Any path from w_0 through recorded states to w_S gives an exact kernel machine (section 3.6, Bell et al. 2023): the
terms of a prediction differ, their sum does not (docs/theory.md, section 11).
"""

from dataclasses import dataclass

from epk_gp.core.checks import validate_count


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


WeightPath = StraightPath | ChordPath | LayerwisePath


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
        TypeError: The object is neither straight steps, nor chords, nor a layerwise path.
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
            f"{what} integrates along a path of the weights, straight() or chords(every=k): got "
            f"layerwise(every={path.every}), which is for attributions."
        )
