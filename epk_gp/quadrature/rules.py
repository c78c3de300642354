"""Quadrature rules on [0, 1], as values."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from epk_gp.core.checks import validate_count, validate_positive

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

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Iterate over (node, weight)."""
        return iter(zip(self.nodes, self.weights, strict=True))

    def __len__(self) -> int:
        """Count the nodes, Q."""
        return len(self.nodes)

    @property
    def interval_rule(self) -> "QuadratureRule":
        """The rule on one interval of a step: this rule, as the step is one interval."""
        return self

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
    def interval_rule(self) -> QuadratureRule:
        """The rule on one interval of a step."""
        return gauss_legendre(self.order)

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


def left_endpoint() -> QuadratureRule:
    """One node at t = 0: the discrete path kernel (DPK)."""
    return QuadratureRule("left endpoint", (0.0,), (1.0,))


def left_riemann(n: int) -> QuadratureRule:
    """Left Riemann sum with n nodes: Algorithm 1 of Bell et al. (2023) with T = n.

    Raises:
        TypeError: n is not a whole number.
        ValueError: n is not in 1 .. 10,000.
    """
    _validate_nodes(n, MAX_COMPOSITE_NODES)
    return QuadratureRule(f"left Riemann {n}", tuple(k / n for k in range(n)), (1 / n,) * n)


def midpoint(n: int) -> QuadratureRule:
    """Composite midpoint rule with n nodes.

    Raises:
        TypeError: n is not a whole number.
        ValueError: n is not in 1 .. 10,000.
    """
    _validate_nodes(n, MAX_COMPOSITE_NODES)
    return QuadratureRule(f"midpoint {n}", tuple((k + 0.5) / n for k in range(n)), (1 / n,) * n)


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
