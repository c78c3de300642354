"""The results of an attribution: the terms of a prediction, with their certificate."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.show import Displayed, Entry, Summary, count, kind_of, number
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.certification import certificate_entries, describe_findings
from epk_gp.kernel_machine.axes import (
    describe_axes,
    group_namer,
    largest_rows,
    number_row,
    place_table,
    sample_name,
    shown_places,
    sum_rows,
)
from epk_gp.quadrature.status import QuadratureStatus

# Above this amplification a result says that its terms cancel: small networks have 1.5 to 7, ResNets 20 to 40.
_LARGE_AMPLIFICATION = 10
_LARGE_SHARE = 0.01  # of the change of the outputs, by which `unexplained` is a finding


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CertifiedTerms(Displayed):
    """What all attributions have: the ends of the path, and the certificate of the sum of the terms.

    Attributes:
        initial: f at the initial weights, (n, C).
        network: Outputs of the trained network, (n, C).
        amplification: Sum of the absolute contributions of samples, steps apart, over the sum of the absolute changes
            that the steps' weights made, (n, C): how much larger the terms are than what they sum to.
        max_residual: Largest quadrature residual of a (point, step).
        evaluations: Gradient evaluations per point and step that choosing the nodes took, on average; per output of a
            point and step where the outputs of a point went through the run apart, to keep to the memory budget.
        residual_ratio: Largest ratio of a residual to what the rule's tolerance (1e-12 for a fixed rule) or rounding
            allows.
        max_step_mismatch: Largest difference of a recorded step from the one that the training gradients give.
        mismatch_ratio: Largest ratio of such a difference to what rounding explains.
        worst_step: The step that has it; -1 for a run without steps.
        error_tolerance: What `max_error` may be where both ratios are at most 1.
        statuses: Number of (point, step) pairs, of outputs where these went apart, by the reason why the rule stopped
            refining them.
        accepted_share: Share of a step that the run accepts as unexplained.
        run_findings: What the recorded run itself says against shares of samples (`certification.run_findings`).
    """

    initial: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    amplification: Float[Tensor, "n C"]
    max_residual: float
    evaluations: float
    residual_ratio: float
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    error_tolerance: float
    statuses: Mapping[QuadratureStatus, int]
    accepted_share: float = 0.0
    run_findings: tuple[str, ...] = ()

    @property
    @abstractmethod
    def unexplained_terms(self) -> Float[Tensor, "n C"]:
        """What is unexplained of each output."""

    @property
    @abstractmethod
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""

    @cached_property
    def max_error(self) -> float:
        """Largest |total - network|, computed once; 0 without points."""
        errors = (self.total - self.network).abs()
        return float(errors.max()) if errors.numel() else 0.0

    @property
    def certified(self) -> bool:
        """Whether quadrature, steps and sum are within tolerance, and little of the outputs' change is unexplained."""
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Why the result is not certified, with numbers; empty if it is."""
        return describe_findings(self)

    @cached_property
    def unexplained_share(self) -> float:
        """Share of the change of all outputs that is unexplained; 0 if it is at most 1 %, or what the run accepts."""
        terms, change = self.unexplained_terms.abs(), (self.network - self.initial).abs()
        allowed = max(_LARGE_SHARE, self.accepted_share) * float(change.sum())
        if not terms.numel() or float(terms.sum()) <= allowed or float(terms.max()) <= self.error_tolerance:
            return 0.0
        return float(terms.sum() / change.sum())

    def _entries(self) -> tuple[Entry, ...]:
        """Return what a summary says of all terms."""
        if not self.amplification.numel():
            return certificate_entries(self)
        largest = float(self.amplification.max())
        entry = Entry("amplification", number(largest), "at most")
        if largest > _LARGE_AMPLIFICATION:
            advice = (
                "at most: contributions are so many times larger than what they sum to, and cancel, so that one alone "
                "says little; sum them over groups, take the difference of two classes, or ask epk_gp.influence"
            )
            entry = replace(entry, note=advice, is_warning=True)
        return (*certificate_entries(self), entry)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Attribution(CertifiedTerms):
    """The terms of a prediction; with `initial` they sum to the network's output.

    Attributes:
        samples: Contribution of each training point, (n, C, M).
        decay: Contribution of weight decay, coupled or decoupled, (n, C).
        statistics: Contribution of the moving statistics of normalisations, (n, C); 0 for a network without them.
        unexplained: Contribution of what update rule and exact gradients leave of the steps, (n, C): rounding in less
            than float64, and what the run's `unexplained` accepts. In float64 without that it is rounding, taken as 0.
    """

    samples: Float[Tensor, "n C M"]
    decay: Float[Tensor, "n C"]
    statistics: Float[Tensor, "n C"]
    unexplained: Float[Tensor, "n C"]

    @property
    def unexplained_terms(self) -> Float[Tensor, "n C"]:
        """What is unexplained of each output."""
        return self.unexplained

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        return self.initial + self.samples.sum(dim=2) + self.decay + self.statistics + self.unexplained

    def _summary(self) -> Summary:
        n, C, M = self.samples.shape
        places = shown_places(self.network)
        terms = {
            "initial": self.initial,
            "samples": self.samples,
            "decay": self.decay,
            "statistics": self.statistics,
            "unexplained": self.unexplained,
        }
        rows = [
            *sum_rows(places, terms),
            number_row("network", places, self.network),
            *largest_rows("largest samples", places, self.samples, sample_name),
        ]
        return Summary(
            f"Attribution of {count(n, 'point')} × {count(C, 'output')} to {count(M, 'training sample')}",
            (*self._entries(), Entry("shape of samples", f"{tuple(self.samples.shape)}", kind_of(self.samples))),
            place_table(self.network, places, rows),
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class GroupedAttribution(CertifiedTerms):
    """The terms of a prediction, split along chosen axes; with `initial` they sum to the network's output.

    Attributes:
        values: Contributions of the training data, (n, C, G_1, G_2, ...) over the axes' groups, in their order.
        decay: Contribution of weight decay, split likewise; axes of training samples have length 1.
        statistics: Contribution of the moving statistics, split likewise; axes of parameters have length 1.
        statistics_of_no_sample: What of it belongs to no sample of a batch: forward passes that were not announced, and
            statistics that are no batch normalisation's; axes of samples and parameters have length 1.
        unexplained: Contribution of what update rule and exact gradients leave of the steps, split as `decay`.
        axes: The axes.
    """

    values: Float[Tensor, "n C *groups"]
    decay: Float[Tensor, "n C *ones"]
    statistics: Float[Tensor, "n C *samples"]
    statistics_of_no_sample: Float[Tensor, "n C *steps"]
    unexplained: Float[Tensor, "n C *ones"]
    axes: tuple[Axis, ...]

    @property
    def unexplained_terms(self) -> Float[Tensor, "n C"]:
        """What is unexplained of each output."""
        return self.unexplained.reshape(*self.network.shape, math.prod(self.unexplained.shape[2:])).sum(dim=2)

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        terms = (self.values, self.decay, self.statistics, self.statistics_of_no_sample, self.unexplained)
        sums = [term.reshape(*term.shape[:2], math.prod(term.shape[2:])).sum(dim=2) for term in terms]
        return self.initial + torch.stack(sums).sum(dim=0)

    def _summary(self) -> Summary:
        n, C = self.network.shape
        places, kinds = shown_places(self.network), ", ".join(axis.kind for axis in self.axes)
        terms = {
            "initial": self.initial,
            "training data": self.values,
            "decay": self.decay,
            "statistics": self.statistics,
            "statistics of no sample": self.statistics_of_no_sample,
            "unexplained": self.unexplained,
        }
        rows = [
            *sum_rows(places, terms),
            number_row("network", places, self.network),
            *largest_rows(f"largest by {kinds}", places, self.values, group_namer(self.axes)),
        ]
        return Summary(
            f"Attribution of {count(n, 'point')} × {count(C, 'output')} to {describe_axes(self.axes)}",
            (*self._entries(), Entry("shape of values", f"{tuple(self.values.shape)}", kind_of(self.values))),
            place_table(self.network, places, rows),
        )
