"""Exact contributions: what each training point added to each output of each prediction."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Unpack

from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.verification import with_plan
from epk_gp.core.options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.losses import Head
from epk_gp.core.inputs import Inputs
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.attribution_pass import AttributionPass, Groupings, run_pass
from epk_gp.kernel_machine.attribute import Attribution, CertifiedTerms, GroupedAttribution
from epk_gp.kernel_machine.axes import Axis, by_sample, validate_axes
from epk_gp.kernel_machine.certification import run_findings, sum_tolerance, warn_if_uncertified
from epk_gp.kernel_machine.terms import AttributionProblem, make_problem, parse_problem
from epk_gp.quadrature.paths import WeightPath, straight
from epk_gp.quadrature.rules import Rule, adaptive


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
            then sets the tolerance of the certificate alone), and `manhattan()`.
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
        lambda net: _split(make_problem(net, kernel, X, classes, options), tuple(groupings), splits_statistics),
    )
    if results:  # all are sums of the same terms
        warn_if_uncertified("the attribution", results[0])
    return results


def _split(
    problem: AttributionProblem, groupings: Groupings, splits_statistics: bool
) -> tuple[GroupedAttribution, ...]:
    trajectory, X, kernel = problem.trajectory, problem.X, problem.kernel
    initial = problem.select_outputs(network_outputs(trajectory, X, state=0, head=kernel.head))
    network = problem.select_outputs(network_outputs(trajectory, X, state=-1, head=kernel.head))
    work = AttributionPass(problem, groupings, splits_statistics)
    found = run_pass(work, initial)
    collectors, sizes, progress, mismatches = (
        found.sums.collectors, found.sums.sizes, found.progress, found.residuals.mismatches
    )  # fmt: skip
    record, steps, dtype = progress.record, max(1, trajectory.num_steps), mismatches.dtype
    ends = (work.as_rows(initial), work.as_rows(network))
    tolerance = sum_tolerance(kernel.rule, dtype, collectors[0].size_of_terms(*ends), steps)

    def of_points(rows: Tensor) -> Tensor:
        return rows.reshape(*initial.shape, *rows.shape[2:])

    if found.is_factored:  # there it is what the other terms leave: it must be rounding, or the sum misses the outputs
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
            evaluations=progress.evaluations / (work.num_rows * steps),
            residual_ratio=record.residual_ratio,
            max_step_mismatch=mismatches.largest,
            mismatch_ratio=mismatches.ratio,
            worst_step=mismatches.worst_step,
            error_tolerance=sum_tolerance(kernel.rule, dtype, collector.size_of_terms(*ends), steps),
            statuses=dict(record.statuses),
            accepted_share=trajectory.unexplained or 0.0,
            run_findings=run_findings(trajectory),
        )
        for collector in collectors
    )
