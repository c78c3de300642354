"""Quadrature rules on [0, 1], and paths between the recorded states along which they integrate, as values.

Any path from w_0 through recorded states to w_S gives an exact kernel machine (section 3.6, Bell et al. 2023): the
terms of a prediction differ, their sum does not (docs/theory.md, section 11).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from epk_gp.core.checks import validate_count, validate_positive
from epk_gp.core.show import count

# Measured with NumPy 2.4 on one core: 0.06 s and an error of 2e-11 for 1000 Gauss-Legendre nodes, 0.5 s for 2000, and
# 80 GB for 100,000, as NumPy takes the eigenvalues of a matrix with a row per node.
MAX_GAUSS_LEGENDRE_NODES = 1000
MAX_COMPOSITE_NODES = 10_000  # with 100,000 equal weights their rounded sum is no longer 1 to within 1e-12
_TYPICAL_INTERVALS = 16  # of a point and step under the adaptive rule, for block sizes only: a choice, not a bound

# Gradients for one point and step, by default.
MAX_EVALUATIONS = 16384


@dataclass(frozen=True)
class QuadratureRule:
    """Nodes and positive weights on [0, 1]; one rule for both arguments of the kernel keeps it positive semi-definite.

    Attributes:
        name: Name of the rule in tables.
        nodes: Q distinct points in [0, 1].
        weights: Q positive weights that sum to 1.
    """

    name: str
    nodes: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise if the rule would not give a kernel.

        Raises:
            ValueError: Nodes and weights have different lengths, a node lies outside [0, 1], or the weights are not
                positive or do not sum to 1.
        """
        if len(self.nodes) != len(self.weights) or not self.nodes:
            raise ValueError(f"a rule needs as many weights as nodes: got {len(self.nodes)} and {len(self.weights)}.")
        if not all(0 <= t <= 1 for t in self.nodes):
            raise ValueError(f"nodes must lie in [0, 1]: got {min(self.nodes)}..{max(self.nodes)}.")
        if not all(weight > 0 for weight in self.weights):
            raise ValueError(
                f"weights must be positive, or the Gram matrix is not positive semi-definite: got {min(self.weights)}."
            )
        if abs(sum(self.weights) - 1) > 1e-12:
            raise ValueError(f"weights must sum to 1: got {sum(self.weights)}.")

    @classmethod
    def left_endpoint(cls) -> "QuadratureRule":
        """Return the rule of one node at t = 0: its kernel is the discrete path kernel (DPK)."""
        return cls("left endpoint", (0.0,), (1.0,))

    @classmethod
    def left_riemann(cls, n: int) -> "QuadratureRule":
        """Return the left Riemann sum with n nodes: Algorithm 1 of Bell et al. (2023) with T = n.

        Raises:
            TypeError: n is not a whole number.
            ValueError: n is not in 1 .. 10,000.
        """
        _validate_nodes(n, MAX_COMPOSITE_NODES)
        return cls(f"left Riemann {n}", tuple(k / n for k in range(n)), (1 / n,) * n)

    @classmethod
    def midpoint(cls, n: int) -> "QuadratureRule":
        """Return the composite midpoint rule with n nodes.

        Raises:
            TypeError: n is not a whole number.
            ValueError: n is not in 1 .. 10,000.
        """
        _validate_nodes(n, MAX_COMPOSITE_NODES)
        return cls(f"midpoint {n}", tuple((k + 0.5) / n for k in range(n)), (1 / n,) * n)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Iterate over (node, weight)."""
        return iter(zip(self.nodes, self.weights, strict=True))

    def __len__(self) -> int:
        """Count the nodes, Q."""
        return len(self.nodes)

    @property
    def num_contractions(self) -> int:
        """Inner products that a step costs where nothing can be averaged over its nodes."""
        return len(self)

    @property
    def typical_nodes(self) -> int:
        """Nodes of a step that block sizes allow for."""
        return len(self)


@dataclass(frozen=True)
class AdaptiveRule:
    """Gauss-Legendre and its extensions on intervals of [0, 1] chosen for each point and step by the free residual.

    See docs/engine.md, section 8; the residual is that of docs/theory.md, section 3.

    Attributes:
        tol: Aim for the absolute error of an output over all S steps: each interval of a step may leave tol / S. A step
            cut into several can leave more than its share; the certificate says what came out.
        order: Gauss-Legendre nodes with which the halves of an interval start. A step, and an interval between located
            kinks, starts with its midpoint; nodes are then added as far as the outputs are smooth in t.
        max_evaluations: Bound on the gradients evaluated for a point and step; what is accepted there shows in the
            residual and in the status.
    """

    tol: float
    order: int
    max_evaluations: int = MAX_EVALUATIONS

    def __post_init__(self) -> None:
        """Raise if the tolerance, the order or the bound has no meaning.

        Raises:
            TypeError: `tol` is not a number, or `order` or `max_evaluations` is not a whole number.
            ValueError: `tol` is not positive and finite, `order` is not in 1 .. 1000, or `max_evaluations` is below
                `order`.
        """
        validate_positive(self.tol, "tol")
        _validate_nodes(self.order, MAX_GAUSS_LEGENDRE_NODES, "order")
        validate_count(self.max_evaluations, "max_evaluations", minimum=self.order)

    @property
    def num_contractions(self) -> int:
        """Inner products that a step is taken to cost where nothing can be averaged: most steps have one interval."""
        return self.order

    @property
    def typical_nodes(self) -> int:
        """Nodes of a step that block sizes allow for: most points stay below 16 intervals."""
        return _TYPICAL_INTERVALS * self.order

    @property
    def name(self) -> str:
        """Name of the rule in tables."""
        return f"adaptive Gauss-Legendre {self.order}, tol {self.tol:g}"


Rule = QuadratureRule | AdaptiveRule


def gauss_legendre(n: int) -> QuadratureRule:
    """Gauss-Legendre with n nodes: exact for polynomials of degree 2n - 1.

    Raises:
        TypeError: n is not a whole number.
        ValueError: n is not in 1 .. 1000.
    """
    _validate_nodes(n, MAX_GAUSS_LEGENDRE_NODES)
    x, w = np.polynomial.legendre.leggauss(n)
    return QuadratureRule(f"Gauss-Legendre {n}", tuple(((1 + x) / 2).tolist()), tuple((w / w.sum()).tolist()))


def adaptive(tol: float = 1e-12, *, order: int = 4, max_evaluations: int = MAX_EVALUATIONS) -> AdaptiveRule:
    """Adaptive Gauss-Legendre; see `AdaptiveRule`."""
    return AdaptiveRule(tol, order, max_evaluations)


def validate_rule(rule: object) -> None:
    """Raise if an object is not a quadrature rule.

    Raises:
        TypeError: The object is neither a fixed nor an adaptive rule.
    """
    if not isinstance(rule, QuadratureRule | AdaptiveRule):
        raise TypeError(f"rule must be a quadrature rule such as epk_gp.gauss_legendre(4): got {rule!r}.")


def _validate_nodes(n: object, maximum: int, name: str = "the number of nodes") -> None:
    validate_count(n, name)
    if int(n) > maximum:  # type: ignore[call-overload]  # an integer, as validate_count has made sure
        raise ValueError(f"{name} must be at most {maximum}: got {n}. The adaptive rule needs no such number.")


class QuadratureStatus(IntEnum):
    """Why the rule stopped; a point's status is the most severe of its intervals'.

    From `INTERVAL_LIMIT` on, the integral is not the change of the outputs to the tolerance nor to rounding.

    Attributes:
        CONVERGED: The residual is within the tolerance.
        ROUNDING: The residual is above the tolerance, and at the level of the outputs' rounding.
        FIXED: A fixed rule was used as it is; nothing was steered.
        INTERVAL_LIMIT: The interval is as short as rounding of t, and its residual is not small: the derivative is not
            bounded there.
        EVALUATION_LIMIT: Another refinement would have passed the bound on evaluations.
        INCONSISTENT_DERIVATIVE: The integral of the derivative has converged, but not to the change of the outputs: the
            outputs jump, or what autograd computes is not their derivative.
        NOT_FINITE: The derivative, or the outputs inside the step, hold NaN or infinity.
    """

    CONVERGED = 0
    ROUNDING = 1
    FIXED = 2
    INTERVAL_LIMIT = 3
    EVALUATION_LIMIT = 4
    INCONSISTENT_DERIVATIVE = 5
    NOT_FINITE = 6

    @property
    def is_supported(self) -> bool:
        """Whether the integration did what it was asked for: a fixed rule is asked for nothing."""
        return self < QuadratureStatus.INTERVAL_LIMIT


@dataclass(frozen=True)
class ChordPath:
    """Straight lines between every k-th state.

    Training gradients stay those at each step's own weights; the test side is integrated along the chord. That costs
    about as much as one step, and some 3 evaluations for each kink on it.

    Attributes:
        every: k, from 1: then every step is a line of its own, the path of Definition 3.4, Bell et al. (2023). The last
            chord has the steps that are left; where k is larger than S there is one chord.
    """

    every: int

    def __post_init__(self) -> None:
        """Raise if k is no number of steps."""
        validate_count(self.every, "every")

    def __str__(self) -> str:
        """Describe the path."""
        return "straight steps" if self.every == 1 else f"straight lines, each over {count(self.every, 'step')}"


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
        """Raise if k is no number of steps."""
        validate_count(self.every, "every")

    def __str__(self) -> str:
        """Describe the path."""
        return f"derivatives averaged operation by operation, each over {count(self.every, 'step')}"


WeightPath = ChordPath | LayerwisePath


def straight() -> ChordPath:
    """Every step is a straight line: the path of the paper, and the default everywhere."""
    return ChordPath(1)


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
        TypeError: The object is neither straight lines nor a layerwise path.
    """
    if not isinstance(path, WeightPath):
        raise TypeError(f"path must be a path such as epk_gp.straight() or epk_gp.chords(every=20): got {path!r}.")


def path_identity(path: WeightPath) -> tuple[WeightPath, ...]:
    """Return what a fingerprint depends on: nothing for straight steps, whose fingerprints knew of no paths."""
    return () if path == straight() else (path,)


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
    """Raise if a path has no line on which something could be integrated, or single states could stand for it.

    Args:
        path: The path.
        what: What integrates along it, for the message.

    Raises:
        TypeError: It is no path.
        ValueError: The path is a layerwise one.
    """
    validate_path(path)
    if isinstance(path, LayerwisePath):
        raise ValueError(
            f"{what} integrates along a path of the weights, straight() or chords(every=k): got "
            f"layerwise(every={path.every}), which is for attributions."
        )
