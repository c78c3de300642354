"""Exact contributions: what each training point added to each output of each prediction."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Unpack

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.planning import with_plan
from epk_gp.core.compute_options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.head import Head
from epk_gp.core.input_layout import Inputs
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.adjoint import PassOptions, adjoint_pass
from epk_gp.kernel_machine.attribution_results import Attribution, CertifiedTerms, GroupedAttribution
from epk_gp.kernel_machine.axes import Axis, by_sample, validate_axes
from epk_gp.kernel_machine.certification import IntegrationRecord, sum_tolerance, warn_if_uncertified
from epk_gp.kernel_machine.collector import Collector, TermSizes
from epk_gp.kernel_machine.contributions import Contribution
from epk_gp.kernel_machine.problem import AttributionProblem, make_problem, parse_problem
from epk_gp.kernel_machine.progress import PassProgress
from epk_gp.kernel_machine.step_residuals import StepResiduals
from epk_gp.kernel_machine.vanilla_gd import vanilla_gd_pass, vanilla_gd_points
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.storage.partial_sums import PartialSums


def attribute(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
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
        rule: How each step's integral is taken.
        classes: One output per input, at a C-th of the cost: C is then 1 in the result. All C outputs by default.
        options: `memory_budget`, `progress` and `checkpoint`; see `ComputeOptions`.

    Returns:
        All terms, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, the head or the rule is unknown, or a class is out
            of range.
    """
    parsed = parse_options("attribute", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule)
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
        rule: How each step's integral is taken.
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
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> tuple[GroupedAttribution, ...]:
    """Split predictions in several ways in one pass over the run: one result per grouping, as `attribute_by`.

    Raises:
        TypeError, ValueError: As `attribute_by`.
    """
    for by in groupings:
        validate_axes(trajectory, by)
    parsed = parse_options("attribute_many", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule)
    X = parse_problem(kernel, X, classes)
    return _attribute(kernel, X, list(map(tuple, groupings)), classes, parsed)


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
        lambda net: _split(make_problem(net, kernel, X, classes, options), groupings, splits_statistics),
    )
    if results:  # all are sums of the same terms
        warn_if_uncertified("the attribution", results[0])
    return results


def _split(
    problem: AttributionProblem, groupings: Sequence[tuple[Axis, ...]], splits_statistics: bool
) -> tuple[GroupedAttribution, ...]:
    trajectory, X, kernel, folder = problem.trajectory, problem.X, problem.kernel, problem.options.checkpoint
    initial = problem.select_outputs(network_outputs(trajectory, X, state=0, head=kernel.head))
    network = problem.select_outputs(network_outputs(trajectory, X, state=-1, head=kernel.head))
    collectors = [Collector(problem, axes, initial) for axes in groupings]
    sizes = TermSizes(initial)

    def emit(term: Contribution) -> None:
        sizes.add(term)
        for collector in collectors:
            collector.add(term)

    # parameters are kept apart only where a grouping asks for them
    is_whole = not any(collector.sizes["parameter"] for collector in collectors)
    is_factored = is_whole and trajectory.is_vanilla_gd and trajectory.loss_takes_outputs
    is_factored &= trajectory.unexplained is None
    points = vanilla_gd_points(problem) if is_factored else problem.memory.adjoint_points(problem.num_outputs)
    name = f"sums-{fingerprint(problem.net.plan, is_factored, points)}"  # partial sums of another plan are other sums
    sums = [total for collector in collectors for total in collector.sums] + sizes.sums
    stored = None if folder is None else PartialSums(folder, _identity(problem, groupings))
    progress = PassProgress(stored, sums, IntegrationRecord(kernel.rule, trajectory.num_steps), name)
    residuals = StepResiduals(problem, initial, keeps=not is_factored)
    if is_factored:
        vanilla_gd_pass(problem, emit, progress, points_per_block=points)
    else:
        count = len(trajectory.model.names)
        groups = torch.zeros(count, dtype=torch.int64) if is_whole else torch.arange(count)
        splits_statistics &= any(collector.splits_samples for collector in collectors)
        adjoint_pass(problem, groups, emit, progress, PassOptions(points, residuals, splits_statistics))
    record, steps = progress.record, max(1, trajectory.num_steps)
    mismatches, dtype = residuals.mismatches, residuals.mismatches.dtype
    tolerance = sum_tolerance(kernel.rule, dtype, collectors[0].size_of_terms(initial, network), steps)
    if is_factored:  # there it is what the other terms leave: it must be rounding, or the sum misses the outputs
        for collector in collectors:
            collector.drop_unexplained_above(tolerance)
    return tuple(
        GroupedAttribution(
            initial=initial,
            values=collector.result(collector.values, ("step", "sample", "parameter")),
            decay=collector.result(collector.decay, ("step", "parameter")),
            statistics=collector.result(collector.statistics, ("step", "sample")),
            statistics_of_no_sample=collector.result(collector.statistics_of_no_sample, ("step",)),
            unexplained=collector.result(collector.unexplained, ("step", "parameter")),
            amplification=sizes.amplification,
            network=network,
            axes=collector.axes,
            max_residual=record.max_residual,
            evaluations=progress.evaluations / (len(X) * steps),
            residual_ratio=record.residual_ratio,
            max_step_mismatch=mismatches.largest,
            mismatch_ratio=mismatches.ratio,
            worst_step=mismatches.worst_step,
            error_tolerance=sum_tolerance(kernel.rule, dtype, collector.size_of_terms(initial, network), steps),
            statuses=dict(record.statuses),
        )
        for collector in collectors
    )


def _identity(problem: AttributionProblem, groupings: Sequence[tuple[Axis, ...]]) -> str:
    axes = [axis for grouping in groupings for axis in grouping]
    kinds = [[axis.kind for axis in grouping] for grouping in groupings]
    kernel = problem.kernel
    return fingerprint(
        kernel.trajectory.digest, kernel.head, kernel.rule, problem.options.memory_budget, kinds, problem.X,
        problem.classes, *(axis.group for axis in axes), [axis.names for axis in axes],
    )  # fmt: skip
