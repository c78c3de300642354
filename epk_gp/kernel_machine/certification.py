"""Certificates: what quadrature and rounding may leave of a sum over the run, and the warning where more is left."""

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.certificate import CertificateWarning
from epk_gp.core.trajectory import Trajectory
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import AdaptiveRule, Rule
from epk_gp.quadrature.status import QuadratureStatus

# An adaptive rule may leave its tolerance in each interval of a step: a step that is cut leaves more than its share.
_TOLERANCES = 8
_FIXED_RULE_TOLERANCE = 1e-12  # what a fixed rule is measured by: the default of the adaptive one

# Rounding of the integral of one step, in eps of the outputs. The adaptive rule accepts 16.
_ROUNDING = 64


@dataclass
class IntegrationRecord:
    """What the integrals of a run left, over all points and steps.

    Attributes:
        max_residual: Largest residual of a (point, step); NaN stays.
        size: Largest output at the ends of the steps, at least 1.
        statuses: Number of (point, step) pairs by the reason why their refinement ended.
    """

    max_residual: float = 0.0
    size: float = 1.0
    statuses: Counter[QuadratureStatus] = field(default_factory=Counter)

    def add(self, integral: Integral) -> None:
        """Count the integrals of some points over one step."""
        largest = torch.stack([integral.residual.max(), integral.start.abs().max(), integral.end.abs().max()])
        residual, start, end = largest.tolist()
        self.max_residual = larger(self.max_residual, residual)
        self.size = max(self.size, start, end)
        counts = torch.bincount(integral.status, minlength=len(QuadratureStatus)).tolist()
        self.statuses.update({status: counts[status] for status in QuadratureStatus if counts[status]})

    def state(self) -> dict[str, Tensor]:
        """Return the record as tensors, for a checkpoint."""
        numbers = [self.max_residual, self.size, *(float(self.statuses[status]) for status in QuadratureStatus)]
        return {"integration": torch.tensor(numbers, dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the record of a checkpoint."""
        self.max_residual, self.size, *counts = state["integration"].tolist()
        self.statuses = Counter({status: int(counts[status]) for status in QuadratureStatus if counts[status]})


def larger(a: float, b: float) -> float:
    """Return the larger of two numbers, and NaN if one of them is: Python's max() may drop it."""
    return a if math.isnan(a) or a >= b else b


def coarsest_dtype(trajectory: Trajectory, outputs: Float[Tensor, "n C"]) -> torch.dtype:
    """Return float32 if the run or the computation is in it, else float64."""
    return torch.float32 if torch.float32 in (trajectory.dtype, outputs.dtype) else torch.float64


def residual_tolerance(rule: Rule, dtype: torch.dtype, size: float, num_steps: int) -> float:
    """Return what the residuals of one point may add up to over `num_steps` steps.

    Args:
        rule: How the steps were integrated; a fixed rule is measured by the adaptive one's default tolerance.
        dtype: The dtype of the outputs.
        size: Largest output.
        num_steps: Number of steps.
    """
    tol = rule.tol if isinstance(rule, AdaptiveRule) else _FIXED_RULE_TOLERANCE
    return max(_TOLERANCES * tol, _ROUNDING * torch.finfo(dtype).eps * size * num_steps)


def sum_tolerance(rule: Rule, dtype: torch.dtype, terms: Float[Tensor, "n C"], num_steps: int) -> float:
    """Return by how much the terms of a prediction may miss the network's output.

    Args:
        rule: How the steps were integrated.
        dtype: The coarser of the dtypes of run and computation.
        terms: Sum of the terms' absolute values.
        num_steps: Number of steps, each of which carries the rounding of the weights.
    """
    eps = torch.finfo(dtype).eps
    share = 2**16 * eps if dtype == torch.float64 else _ROUNDING * eps
    size = max(1.0, float(terms.max()))
    return residual_tolerance(rule, dtype, size, 1) + share * size * math.sqrt(max(1, num_steps))


def describe_statuses(statuses: Mapping[QuadratureStatus, int]) -> str:
    """Return what the statuses say of residuals that are too large; empty if they say nothing."""
    if QuadratureStatus.FIXED in statuses:
        return " (a fixed rule: epk_gp.adaptive() chooses its nodes by the residual)"
    failed = {status: count for status, count in statuses.items() if not status.is_supported}
    if not failed:
        return ""
    reasons = ", ".join(f"{count} {status.name}" for status, count in sorted(failed.items()))
    return f" ({reasons} of {sum(statuses.values())} pairs of a point and a step)"


@runtime_checkable
class SumOfTerms(Protocol):
    """An attribution: terms that sum to the network's output."""

    @property
    def max_residual(self) -> float:
        """Largest quadrature residual of a (point, step)."""

    @property
    def residual_tolerance(self) -> float:
        """What it may be."""

    @property
    def max_error(self) -> float:
        """Largest |total - network|."""

    @property
    def error_tolerance(self) -> float:
        """What it may be."""

    @property
    def statuses(self) -> Mapping[QuadratureStatus, int]:
        """Number of (point, step) pairs by the reason why the rule stopped refining them."""


def attribution_findings(parts: SumOfTerms) -> list[str]:
    """Return what speaks against the certificate of an attribution, with numbers; empty if it holds."""
    findings = []
    if not parts.max_residual <= parts.residual_tolerance:
        findings.append(
            f"the residual of a step is {parts.max_residual:.2e}, more than {parts.residual_tolerance:.2e}"
            + describe_statuses(parts.statuses)
        )
    if not parts.max_error <= parts.error_tolerance:
        findings.append(
            f"the terms miss the network's output by {parts.max_error:.2e}, more than {parts.error_tolerance:.2e}"
        )
    return findings


def warn_uncertified(name: str, findings: list[str]) -> None:
    """Warn that a result is not certified, with the numbers; nothing happens without findings."""
    if findings:
        warnings.warn(f"{name} is not certified: {'; '.join(findings)}.", CertificateWarning, stacklevel=4)
