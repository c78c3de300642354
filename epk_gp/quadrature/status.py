"""Why the adaptive rule stopped refining an interval (docs/engine.md, section 8)."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

# A residual below this many eps of the outputs' size is taken for rounding of the sums in it.
_ROUNDING = 16

# Every so many levels, a residual below _NOISE times that rounding is accepted if the levels since then, which made the
# interval 2^NOISE_LEVELS times shorter, did not make it 4 times smaller: it is rounding inside the network.
_NOISE, NOISE_LEVELS = 1024, 8

# The shortest interval that is still split, in eps.
_SHORTEST = 8

# Halving an interval shows that its quadrature has converged to something else than f(b) - f(a) if it changes the
# integral by at most this fraction of the residual, and either half keeps more than that of it. After so many
# generations of that the interval is accepted (docs/engine.md, section 8).
_CONVERGED_CHANGE, _GENERATIONS = 1e-2, 4

# Where f is smooth, a higher order or a half of the interval has at most this fraction of the residual. Halving an
# interval divides that of Gauss-Legendre with n nodes by 2^(2n + 1), 512 for n = 4; extending the rule gains more.
SMOOTH_DECAY = 1e-2

# An integral has settled if so many higher orders in a row let its residual fall like that or, as the last one must,
# change it by at most _CONVERGED_CHANGE of the residual. What is left is taken for rounding inside the network if it is
# at most _SETTLED times the rounding above, which is what a certificate allows, or at the level of noise and this
# fraction of the integral: a kink that all of these orders miss lies so near to an end of the interval.
_RAISES, _SETTLED, _SMALL_PART = 2, 4, 1e-6

OPEN = -1  # the interval is to be refined


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


@dataclass(frozen=True, eq=False)
class Lineage:
    """For how many generations the quadrature of E intervals has converged to something else than f(b) - f(a).

    Attributes:
        raises: How many higher orders in a row behaved as where f is smooth.
        has_settled: The last of at least `_RAISES` higher orders hardly changed the integral.
        generations: How many halvings in a row did so, the interval's parent included.
        error: The residual of the ancestor with which they began.
    """

    raises: Int64[Tensor, " E"]
    has_settled: Bool[Tensor, " E"]
    generations: Int64[Tensor, " E"]
    error: Float[Tensor, " E"]

    def __getitem__(self, rows: Shaped[Tensor, " _"]) -> "Lineage":
        """Return those of some of the intervals."""
        return Lineage(*(value[rows] for value in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Parents:
    """F intervals that the intervals of the next level are parts of.

    Attributes:
        residual: f(b) - f(a) - integral, (F, C).
        lineage: Their lineages.
        is_halved: They were cut in the middle, and not at located kinks.
        is_raised: They were not cut, but given a higher order.
    """

    residual: Float[Tensor, "F C"]
    lineage: "Lineage"
    is_halved: Bool[Tensor, " F"]
    is_raised: Bool[Tensor, " F"]


def rounding_of(start: Float[Tensor, "n C"], end: Float[Tensor, "n C"]) -> Float[Tensor, " n"]:
    """Return the residual that is taken for rounding of each point's outputs."""
    size = torch.maximum(start.abs(), end.abs()).amax(dim=1).clamp(min=1.0)
    return _ROUNDING * torch.finfo(size.dtype).eps * size


def fixed_status(error: Float[Tensor, " E"]) -> Int64[Tensor, " E"]:
    """Return the status of intervals under a fixed rule, from their residuals."""
    return torch.where(error.isfinite(), QuadratureStatus.FIXED, QuadratureStatus.NOT_FINITE)


def residual_status(error: Float[Tensor, " E"], rounding: Float[Tensor, " E"], tol: float) -> Int64[Tensor, " E"]:
    """Return the status of intervals whose residuals are small, and `OPEN` for the others.

    Args:
        error: Their residuals.
        rounding: Residual that is taken for rounding of the outputs.
        tol: Tolerance of a step.
    """
    reason = torch.where(error <= rounding, QuadratureStatus.ROUNDING, OPEN)
    return torch.where(error <= tol, QuadratureStatus.CONVERGED, reason)


def trace_lineage(
    parents: Parents, parent: Int64[Tensor, " E"], residual: Float[Tensor, "E C"], is_open: Bool[Tensor, " E"]
) -> Lineage:
    """Continue the parents' lineages.

    A generation counts if halving an interval hardly changed its integral, and both halves keep a part of its residual.

    Args:
        parents: The intervals that were refined last.
        parent: Which of them each of the E intervals is a part of.
        residual: The intervals' f(b) - f(a) - integral.
        is_open: Their residuals are not small.
    """
    # in the difference of residuals, f(b) - f(a) cancels: it is the sum of the parts' integrals less the parent's
    change = parents.residual.index_add(0, parent, residual, alpha=-1).abs().amax(dim=1)
    error, before = parents.residual.abs().amax(dim=1), parents.lineage
    threshold = _CONVERGED_CHANGE * error
    is_left = is_open & (residual.abs().amax(dim=1) > threshold[parent])
    num_left = torch.zeros_like(before.generations).index_add_(0, parent, is_left.long())
    counts = parents.is_halved & (change <= threshold) & (num_left == 2)
    generations = torch.where(counts, before.generations + 1, 0)
    own = torch.zeros_like(error).index_add_(0, parent, residual.abs().amax(dim=1))  # of the one part, if raised
    is_smooth = (change <= threshold) | (own <= SMOOTH_DECAY * error)
    raises = torch.where(parents.is_raised & is_smooth, before.raises + 1, 0)
    has_settled = (raises >= _RAISES) & (change <= threshold)
    return Lineage(raises, has_settled, generations, torch.where(generations > 1, before.error, error))[parent]


def may_be_rounding(
    error: Float[Tensor, " E"], integral: Float[Tensor, "E C"], rounding: Float[Tensor, " E"]
) -> Bool[Tensor, " E"]:
    """Return whether residuals are taken for rounding inside the network once the integrals have settled."""
    is_small_part = (error <= _NOISE * rounding) & (error <= _SMALL_PART * integral.abs().amax(dim=1))
    return (error <= _SETTLED * rounding) | is_small_part


def limit_status(
    error: Float[Tensor, " E"],
    integral: Float[Tensor, "E C"],
    *,
    width: Float[Tensor, " E"],
    rounding: Float[Tensor, " E"],
    ancestor_error: Float[Tensor, " E"],
    lineage: Lineage,
    level: int,
) -> Int64[Tensor, " E"]:
    """Return the status of intervals that are not refined although their residuals are not small, else `OPEN`.

    Args:
        error: Their residuals.
        integral: Their integrals.
        width: Their lengths.
        rounding: Residual that is taken for rounding of the outputs.
        ancestor_error: Largest residual of the last levels of intervals that they are parts of.
        lineage: Their lineages.
        level: How often the intervals were refined.
    """
    is_noise = error <= _NOISE * rounding
    has_stalled = is_noise & (error > ancestor_error / 4) & (level > 0 and level % NOISE_LEVELS == 0)
    is_jump = error > _NOISE * integral.abs().amax(dim=1)
    at_limit = torch.where(is_jump, QuadratureStatus.INCONSISTENT_DERIVATIVE, QuadratureStatus.INTERVAL_LIMIT)
    at_limit = torch.where(is_noise, QuadratureStatus.ROUNDING, at_limit)
    reason = torch.where(width <= _SHORTEST * torch.finfo(error.dtype).eps, at_limit, OPEN)
    began_as_noise = lineage.error <= _NOISE * rounding
    converged = torch.where(began_as_noise, QuadratureStatus.ROUNDING, QuadratureStatus.INCONSISTENT_DERIVATIVE)
    reason = torch.where(lineage.generations >= _GENERATIONS, converged, reason)
    has_settled = lineage.has_settled & may_be_rounding(error, integral, rounding)
    reason = torch.where(has_stalled | has_settled, QuadratureStatus.ROUNDING, reason)
    return torch.where(error.isfinite(), reason, QuadratureStatus.NOT_FINITE)
