"""Quadrature rules on [0, 1], and paths through the recorded states along which they integrate, as values.

Any path from w_0 through recorded states to w_S gives an exact kernel machine (section 3.6, Bell et al. 2023): the
terms of a prediction differ, but not their sum (docs/theory.md, section 11).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from epk_gp.core.checks import validate_count, validate_positive
from epk_gp.core.show import count

# Measured with NumPy 2.4 on one core: 0.06 s and an error of 2e-11 for 1000 Gauss-Legendre nodes, 0.5 s for 2000, and
# 80 GB for 100,000, because NumPy computes the eigenvalues of a matrix with one row per node.
MAX_GAUSS_LEGENDRE_NODES = 1000
MAX_COMPOSITE_NODES = 10_000  # the rounded sum of 100,000 equal weights differs from 1 by more than 1e-12
_TYPICAL_INTERVALS = 16  # per point and step of the adaptive rule, for block sizes only: a choice, not a bound

# Gradients per point and step, by default.
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
        """Inner products per step if nothing can be averaged over its nodes."""
        return len(self)

    @property
    def typical_nodes(self) -> int:
        """Number of nodes per step for choosing block sizes."""
        return len(self)


@dataclass(frozen=True)
class AdaptiveRule:
    """Gauss-Legendre and its extensions on intervals of [0, 1] chosen for each point and step by the free residual.

    See docs/engine.md, section 8; the residual is that of docs/theory.md, section 3.

    Attributes:
        tol: Target for the absolute error of an output over all S steps: each interval of a step may contribute tol /
            S. A step cut into several intervals can exceed its share; the certificate reports the actual error.
        order: Number of Gauss-Legendre nodes with which the halves of an interval start. A step, and an interval
            between located kinks, starts with its midpoint; nodes are then added where the outputs are smooth in t.
        max_evaluations: Bound on the gradients evaluated for a point and step; a result accepted at the bound shows in
            the residual and in the status.
    """

    tol: float
    order: int
    max_evaluations: int = MAX_EVALUATIONS

    def __post_init__(self) -> None:
        """Raise if the tolerance, the order or the bound is invalid.

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
        """Assumed number of inner products per step if nothing can be averaged: most steps have one interval."""
        return self.order

    @property
    def typical_nodes(self) -> int:
        """Number of nodes per step for choosing block sizes: most points stay below 16 intervals."""
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
    """Reasons that the rule stopped; a point's status is the most severe of its intervals'.

    From `INTERVAL_LIMIT` on, the integral equals the change of the outputs neither to the tolerance nor to rounding.

    Attributes:
        CONVERGED: The residual is within the tolerance.
        ROUNDING: The residual is above the tolerance, and at the level of the outputs' rounding.
        FIXED: A fixed rule was used, without refinement.
        INTERVAL_LIMIT: The interval cannot be split further, and its residual is not small: the derivative is unbounded
            there.
        EVALUATION_LIMIT: Another refinement would exceed the bound on evaluations.
        INCONSISTENT_DERIVATIVE: The integral of the derivative has converged, but not to the change of the outputs: the
            outputs jump, or autograd's result is not their derivative.
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
        """Whether the integration reached its goal; a fixed rule has none."""
        return self < QuadratureStatus.INTERVAL_LIMIT


@dataclass(frozen=True)
class ChordPath:
    """Straight lines between every k-th state.

    Training gradients stay those at each step's own weights; the test side is integrated along the chord. A chord costs
    about as much as one step, and about 3 evaluations for each kink on it.

    Attributes:
        every: k >= 1; 1 makes every step a line, the path of Definition 3.4, Bell et al. (2023). The last chord has the
            remaining steps; if k is larger than S there is one chord.
    """

    every: int

    def __post_init__(self) -> None:
        """Raise if k is not a number of steps."""
        validate_count(self.every, "every")

    def __str__(self) -> str:
        """Describe the path."""
        return "straight steps" if self.every == 1 else f"straight lines, each over {count(self.every, 'step')}"


@dataclass(frozen=True)
class LayerwisePath:
    """Not a path of the weights: between every k-th state, each operation's inputs move on a separate straight line.

    The derivative of each operation of the network is averaged over the line between its inputs at both states: in
    closed form if it is linear in each of two factors, works number by number, or picks the largest of several. The
    averages are multiplied like derivatives in the chain rule. So the terms sum to the outputs exactly, with two
    forward passes and one backward pass per point and stretch, for any number of switching units; nothing is
    integrated. The averaged gradient is not the average of the gradient along the chord: both differ by second order in
    the stretch's length.

    Attributes:
        every: k >= 1. The last stretch has the remaining steps; if k is larger than S there is one stretch.
    """

    every: int = 1

    def __post_init__(self) -> None:
        """Raise if k is not a number of steps."""
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
    """Return the path's entry in a fingerprint: empty for straight steps, as in fingerprints before paths existed."""
    return () if path == straight() else (path,)


def stretches_of(path: WeightPath, num_steps: int, steps: slice = slice(None)) -> list[range]:
    """List the stretches of a path in order, each as its range of steps.

    Args:
        path: The path.
        num_steps: S.
        steps: Some of the steps; they must begin and end at ends of stretches.
    """
    own = range(num_steps)[steps]
    return [range(first, min(first + path.every, own.stop)) for first in own[:: path.every]]


def stretch_of(path: WeightPath, step: int, num_steps: int) -> range:
    """Return the stretch that a step belongs to."""
    first = step - step % path.every
    return range(first, min(first + path.every, num_steps))


def require_integrable(path: WeightPath, what: str) -> None:
    """Raise if a path has no line along which to integrate, or no states that could replace one.

    Args:
        path: The path.
        what: Name of the integrating computation, for the message.

    Raises:
        TypeError: `path` is not a path.
        ValueError: The path is a layerwise one.
    """
    validate_path(path)
    if isinstance(path, LayerwisePath):
        raise ValueError(
            f"{what} integrates along a path of the weights, straight() or chords(every=k): got "
            f"layerwise(every={path.every}), which is for attributions."
        )
