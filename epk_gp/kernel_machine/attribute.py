"""Exact contributions: what each training point added to each output of each prediction."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.verification import with_plan
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.show import Displayed, Entry, Summary, count, kind_of, number
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.attribution_pass import AttributionWork, Groupings, TermSums
from epk_gp.kernel_machine.axes import (
    Axis,
    by_sample,
    describe_axes,
    group_namer,
    largest_rows,
    number_row,
    place_table,
    sample_name,
    shown_places,
    sum_rows,
    validate_axes,
)
from epk_gp.kernel_machine.certification import (
    IntegrationRecord,
    certificate_entries,
    describe_findings,
    run_findings,
    sum_tolerance,
    warn_if_uncertified,
)
from epk_gp.kernel_machine.terms import parse_problem
from epk_gp.quadrature.rules import QuadratureStatus, Rule, WeightPath, adaptive, straight
from epk_gp.work.run import run
from epk_gp.work.sums import Sums

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


def attribute(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> Attribution:
    """Split predictions into exact contributions of the training points.

        samples[n, :, i] = -sum_r c_{r,i} <Psi_r(x_n), grad_w loss_i(w_r)>,   Psi_r = sum_{s >= r} A_{s,r}^T Phi_s

    Theorem 3.6 of Bell et al. (2023) for gradient descent; docs/theory.md, section 4, for momentum and recorded
    preconditioners, whose own dependence on the data is held as recorded and not attributed;
    docs/theory.md, section 7, for dropout, batch statistics and augmented rows. The terms sum to the prediction; they
    are not the effects of leaving points out.

    Args:
        trajectory: Training run with S steps on M points.
        X: n inputs, of the structure of the training inputs, taken as test copies.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: How each step's integral is taken, or each chord's.
        path: Along which the points are integrated. Other paths give other contributions with the same sum, as exactly:
            `chords(every=k)` at fewer evaluations, `layerwise(every=k)` at two for k steps, without an integral (`rule`
            then sets the tolerance of the certificate alone).
        classes: One output per input, at a C-th of the cost: C is then 1 in the result. All C outputs by default; where
            the adjoints of all of a point do not fit into `memory_budget`, outputs go through the run apart, some at a
            time, and a larger budget is faster.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        All terms, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, the head, the rule or the path is unknown, or a class
            is out of range.
    """
    parsed = parse_options("attribute", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    X = parse_problem(kernel, X, classes)
    (parts,) = _attribute(kernel, X, [(by_sample(trajectory),)], classes, parsed, splits_statistics=False)
    shared = {field.name: getattr(parts, field.name) for field in fields(CertifiedTerms)}
    return Attribution(
        samples=parts.values,
        decay=parts.decay.squeeze(2),
        statistics=parts.statistics.sum(dim=2) + parts.statistics_of_no_sample.squeeze(2),
        unexplained=parts.unexplained.squeeze(2),
        **shared,
    )


def attribute_by(
    trajectory: Trajectory,
    X: Inputs,
    by: Sequence[Axis],
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> GroupedAttribution:
    """Split predictions into exact contributions along any axes: samples, labels, steps, layers, parameters.

    Only the result that is asked for is ever held, not sample x step x parameter x output.

    Args:
        trajectory: Training run.
        X: n inputs, of the structure of the training inputs, taken as test copies.
        by: `by_sample(trajectory)`, `by_label`, `by_step`, `by_layer`, `by_parameter`, or axes of one's own. Axes of
            the same kind are combined: a term counts where all its groups meet.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: As of `attribute`.
        path: As of `attribute`.
        classes: One output per input; C is then 1 in the result.
        options: As `attribute`.

    Raises:
        TypeError, ValueError: As `attribute`; an axis does not belong to this run.
    """
    (parts,) = attribute_many(
        trajectory,
        X,
        [by],
        head=head,
        rule=rule,
        path=path,
        classes=classes,
        **options,
    )
    return parts


def attribute_many(
    trajectory: Trajectory,
    X: Inputs,
    groupings: Sequence[Sequence[Axis]],
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> tuple[GroupedAttribution, ...]:
    """Split predictions in several ways in one pass over the run: one result per grouping, as `attribute_by`.

    Raises:
        TypeError, ValueError: As `attribute_by`.
    """
    axes = parse_groupings(trajectory, groupings)
    parsed = parse_options("attribute_many", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    X = parse_problem(kernel, X, classes)
    return _attribute(kernel, X, axes, classes, parsed)


def parse_groupings(trajectory: Trajectory, groupings: Sequence[Sequence[Axis]]) -> Groupings:
    """Return the axes of each result, after checking that they belong to the run.

    Raises:
        TypeError, ValueError: One does not.
    """
    for by in groupings:
        validate_axes(trajectory, by)
    return tuple(map(tuple, groupings))


def _attribute(
    kernel: PathKernel,
    X: Tensor,
    groupings: Sequence[tuple[Axis, ...]],
    classes: Tensor | None,
    options: ComputeOptions,
    *,
    splits_statistics: bool = True,
) -> tuple[GroupedAttribution, ...]:
    trajectory = kernel.trajectory
    results = with_plan(
        trajectory,
        trajectory.model_for(X),
        lambda net: _split(
            AttributionWork(
                kernel, X.detach(), classes, options.memory_budget, tuple(groupings), splits_statistics, plan=net.plan
            ),
            options,
        ),
    )
    if results:  # all are sums of the same terms
        warn_if_uncertified("the attribution", results[0])
    return results


def _split(work: AttributionWork, options: ComputeOptions) -> tuple[GroupedAttribution, ...]:
    problem, trajectory, X, kernel = work.problem, work.kernel.trajectory, work.X, work.kernel
    initial = problem.select_outputs(network_outputs(trajectory, X, state=0, head=kernel.head))
    network = problem.select_outputs(network_outputs(trajectory, X, state=-1, head=kernel.head))
    totals, rest = TermSums.of(problem, work.groupings, work.as_rows(initial)), Sums()
    for piece, sums in run(work, options, "attribution", advice=problem.advice):
        rows = work.blocks[piece.place[0]]
        for name, total in totals.named.items():
            total[rows] += sums.added.pop(name)
        rest.merge(sums)
    collectors, sizes, record, mismatches = (
        totals.collectors, totals.sizes, IntegrationRecord.of(rest), work.residuals.mismatches
    )  # fmt: skip
    steps, dtype = max(1, trajectory.num_steps), mismatches.dtype
    ends = (work.as_rows(initial), work.as_rows(network))
    tolerance = sum_tolerance(kernel.rule, dtype, collectors[0].size_of_terms(*ends), steps)

    def of_points(rows: Tensor) -> Tensor:
        return rows.reshape(*initial.shape, *rows.shape[2:])

    if work.is_factored:  # there it is what the other terms leave: it must be rounding, or the sum misses the outputs
        for collector in collectors:
            collector.drop_unexplained_above(tolerance)
    return tuple(
        GroupedAttribution(
            initial=initial,
            values=of_points(collector.result(collector.values, ("step", "sample", "parameter"))),
            decay=of_points(collector.result(collector.decay, ("step", "parameter"))),
            statistics=of_points(collector.result(collector.statistics, ("step", "sample"))),
            statistics_of_no_sample=of_points(collector.result(collector.statistics_of_no_sample, ("step",))),
            unexplained=of_points(collector.result(collector.unexplained, ("step", "parameter"))),
            amplification=of_points(sizes.amplification),
            network=network,
            axes=collector.axes,
            max_residual=record.max_residual,
            evaluations=record.evaluations / (work.num_rows * steps),
            residual_ratio=record.residual_ratio,
            max_step_mismatch=mismatches.largest,
            mismatch_ratio=mismatches.ratio,
            worst_step=mismatches.worst_step,
            error_tolerance=sum_tolerance(kernel.rule, dtype, collector.size_of_terms(*ends), steps),
            statuses=record.statuses,
            accepted_share=trajectory.unexplained or 0.0,
            run_findings=run_findings(trajectory),
        )
        for collector in collectors
    )
