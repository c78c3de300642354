"""Exact contributions: what each training point added to each output of each prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.planning import with_plan
from epk_gp.core.compute_options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.gradients import replayed_steps
from epk_gp.core.head import Head
from epk_gp.core.input_layout import Inputs
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.adjoint import SampleContributions, WeightDecayContribution, adjoint_pass
from epk_gp.kernel_machine.axes import Axis, by_sample, validate_axes
from epk_gp.kernel_machine.certification import (
    IntegrationRecord,
    StepMismatches,
    coarsest_dtype,
    describe_findings,
    sum_tolerance,
    warn_if_uncertified,
)
from epk_gp.kernel_machine.problem import AttributionProblem, make_problem, parse_problem
from epk_gp.kernel_machine.progress import PassProgress
from epk_gp.kernel_machine.vanilla_gd import vanilla_gd_pass, vanilla_gd_points
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.quadrature.status import QuadratureStatus
from epk_gp.storage.partial_sums import PartialSums


@dataclass(frozen=True, eq=False)
class Attribution:
    """The terms of a prediction; they sum to the network's output.

    Attributes:
        initial: f at the initial weights, (n, C).
        samples: Contribution of each training point, (n, C, M).
        decay: Contribution of weight decay, coupled or decoupled, (n, C).
        network: Outputs of the trained network, (n, C).
        max_residual: Largest quadrature residual of a (point, step).
        evaluations: Gradient evaluations per point and step that choosing the nodes took, on average.
        residual_ratio: Largest ratio of a residual to what the rule's tolerance (1e-12 for a fixed rule) or rounding
            allows.
        max_step_mismatch: Largest difference of a recorded step from the one that the training gradients give.
        mismatch_ratio: Largest ratio of such a difference to what rounding explains.
        worst_step: The step that has it; -1 for a run without steps.
        error_tolerance: What `max_error` may be where both ratios are at most 1.
        statuses: Number of (point, step) pairs by the reason why the rule stopped refining them.
    """

    initial: Float[Tensor, "n C"]
    samples: Float[Tensor, "n C M"]
    decay: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    max_residual: float
    evaluations: float
    residual_ratio: float
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    error_tolerance: float
    statuses: Mapping[QuadratureStatus, int]

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        return self.initial + self.samples.sum(dim=2) + self.decay

    @property
    def max_error(self) -> float:
        """Largest |total - network|."""
        return float((self.total - self.network).abs().max())

    @property
    def certified(self) -> bool:
        """Whether quadrature, steps and sum are within tolerance, as for a `Reconstruction`."""
        return not describe_findings(self)


@dataclass(frozen=True, eq=False)
class GroupedAttribution:
    """The terms of a prediction, split along chosen axes; they sum to the network's output.

    Attributes:
        initial: f at the initial weights, (n, C).
        values: Contributions of the training data, (n, C, G_1, G_2, ...) over the axes' groups, in their order.
        decay: Contribution of weight decay, split likewise; axes of training samples have length 1.
        network: Outputs of the trained network, (n, C).
        axes: The axes.
        max_residual: Largest quadrature residual of a (point, step).
        evaluations: Gradient evaluations per point and step that choosing the nodes took, on average.
        residual_ratio: Largest ratio of a residual to what the rule's tolerance (1e-12 for a fixed rule) or rounding
            allows.
        max_step_mismatch: Largest difference of a recorded step from the one that the training gradients give.
        mismatch_ratio: Largest ratio of such a difference to what rounding explains.
        worst_step: The step that has it; -1 for a run without steps.
        error_tolerance: What `max_error` may be where both ratios are at most 1.
        statuses: Number of (point, step) pairs by the reason why the rule stopped refining them.
    """

    initial: Float[Tensor, "n C"]
    values: Float[Tensor, "n C *groups"]
    decay: Float[Tensor, "n C *ones"]
    network: Float[Tensor, "n C"]
    axes: tuple[Axis, ...]
    max_residual: float
    evaluations: float
    residual_ratio: float
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    error_tolerance: float
    statuses: Mapping[QuadratureStatus, int]

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        n, C = self.initial.shape
        return self.initial + self.values.reshape(n, C, -1).sum(dim=2) + self.decay.reshape(n, C, -1).sum(dim=2)

    @property
    def max_error(self) -> float:
        """Largest |total - network|."""
        return float((self.total - self.network).abs().max())

    @property
    def certified(self) -> bool:
        """Whether quadrature, steps and sum are within tolerance, as for a `Reconstruction`."""
        return not describe_findings(self)


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
    diagonal preconditioners, whose own dependence on the data is held as recorded and not attributed. One loss gradient
    per training point and step is needed, not C output gradients. Contributions sum to the prediction; they are not the
    effects of leaving points out.

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
    (parts,) = _attribute(kernel, X, [(by_sample(trajectory),)], classes, parsed)
    return Attribution(
        initial=parts.initial,
        samples=parts.values,
        decay=parts.decay.squeeze(2),
        network=parts.network,
        max_residual=parts.max_residual,
        evaluations=parts.evaluations,
        residual_ratio=parts.residual_ratio,
        max_step_mismatch=parts.max_step_mismatch,
        mismatch_ratio=parts.mismatch_ratio,
        worst_step=parts.worst_step,
        error_tolerance=parts.error_tolerance,
        statuses=parts.statuses,
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
) -> tuple[GroupedAttribution, ...]:
    trajectory = kernel.trajectory
    results = with_plan(
        trajectory,
        trajectory.model_for(X),
        lambda net: _split(make_problem(net, kernel, X, classes, options), groupings),
    )
    if results:  # all are sums of the same terms
        warn_if_uncertified("the attribution", results[0])
    return results


class _Collector:
    """Sums contributions into one result. Combined axes of one kind are flattened to one index until the end."""

    def __init__(self, problem: AttributionProblem, axes: tuple[Axis, ...], reference: Tensor) -> None:
        self.axes = axes
        trajectory = problem.trajectory
        counts = {"step": trajectory.num_steps, "sample": trajectory.num_points}
        self.index, self.sizes = {}, {}
        for kind, count in (*counts.items(), ("parameter", len(trajectory.model.names))):
            own = [axis for axis in axes if axis.kind == kind]
            index = torch.zeros(count, dtype=torch.int64)
            for axis in own:
                index = index * len(axis.names) + axis.group.cpu()
            self.index[kind], self.sizes[kind] = index, [len(axis.names) for axis in own]
        T, U, G = (torch.Size(self.sizes[kind]).numel() for kind in ("step", "sample", "parameter"))
        self.values = reference.new_zeros(*reference.shape, T, U, G)
        self.decay = reference.new_zeros(*reference.shape, T, G)
        self.group_of_sample = self.index["sample"].to(reference.device)
        self.group_of_parameter = self.index["parameter"].to(reference.device)

    def add(self, term: SampleContributions | WeightDecayContribution) -> None:
        """Add one contribution, of all parameters together or of each separately."""
        t = int(self.index["step"][term.step])
        values = self._by_group(term.values)
        if isinstance(term, WeightDecayContribution):
            self.decay[term.rows, :, t] += values
            return
        index = self.group_of_sample[term.samples]
        if len(term.rows) == len(self.values):
            self.values[:, :, t].index_add_(2, index, values)
        else:
            self.values[term.rows, :, t] = self.values[term.rows, :, t].index_add_(2, index, values)

    def size_of_terms(self, *others: Tensor) -> Tensor:
        """Return the sum of the absolute values of all terms, and of others, (n, K)."""
        terms = [total.flatten(2).abs().sum(dim=2) for total in (self.values, self.decay)]
        return torch.stack([*terms, *(other.abs() for other in others)]).sum(dim=0)

    def _by_group(self, values: Tensor) -> Tensor:
        if values.shape[-1] == 1 and self.values.shape[-1] == 1:
            return values
        grouped = values.new_zeros(*values.shape[:-1], self.values.shape[-1])
        return grouped.index_add_(values.ndim - 1, self.group_of_parameter, values)

    def result(self, tensor: Tensor, kinds: tuple[str, ...]) -> Tensor:
        """Unflatten the kinds and bring the axes into their order; kinds that are left out get length 1."""
        shape = [size for kind in kinds for size in self.sizes[kind]]
        tensor = tensor.reshape(*tensor.shape[:2], *shape)
        present = [number for kind in kinds for number, axis in enumerate(self.axes) if axis.kind == kind]
        order = [2 + present.index(number) for number in range(len(self.axes)) if number in present]
        tensor = tensor.permute(0, 1, *order)
        for number in range(len(self.axes)):
            if number not in present:
                tensor = tensor.unsqueeze(2 + number)
        return tensor


def _split(problem: AttributionProblem, groupings: Sequence[tuple[Axis, ...]]) -> tuple[GroupedAttribution, ...]:
    trajectory, X, kernel, folder = problem.trajectory, problem.X, problem.kernel, problem.options.checkpoint
    initial = problem.select_outputs(network_outputs(trajectory, X, state=0, head=kernel.head))
    network = problem.select_outputs(network_outputs(trajectory, X, state=-1, head=kernel.head))
    collectors = [_Collector(problem, axes, initial) for axes in groupings]

    def emit(term: SampleContributions | WeightDecayContribution) -> None:
        for collector in collectors:
            collector.add(term)

    # parameters are kept apart only where a grouping asks for them
    is_whole = not any(collector.sizes["parameter"] for collector in collectors)
    is_vanilla = is_whole and trajectory.is_vanilla_gd and trajectory.loss_takes_outputs
    points = vanilla_gd_points(problem) if is_vanilla else problem.memory.adjoint_points(problem.num_outputs)
    name = f"sums-{fingerprint(problem.net.plan, is_vanilla, points)}"  # partial sums of another plan are other sums
    sums = [total for collector in collectors for total in (collector.values, collector.decay)]
    stored = None if folder is None else PartialSums(folder, _identity(problem, groupings))
    progress = PassProgress(stored, sums, IntegrationRecord(kernel.rule, trajectory.num_steps), name)
    if is_vanilla:
        vanilla_gd_pass(problem, emit, progress, points_per_block=points)
    else:
        count = len(trajectory.model.names)
        groups = torch.zeros(count, dtype=torch.int64) if is_whole else torch.arange(count)
        adjoint_pass(problem, groups, emit, progress, points_per_block=points)
    record, steps = progress.record, max(1, trajectory.num_steps)
    dtype = coarsest_dtype(trajectory, initial)
    mismatches = StepMismatches(dtype)
    for replayed in replayed_steps(trajectory, problem.net.model, X):
        mismatches.add(trajectory, problem.net.model, replayed)
    return tuple(
        GroupedAttribution(
            initial=initial,
            values=collector.result(collector.values, ("step", "sample", "parameter")),
            decay=collector.result(collector.decay, ("step", "parameter")),
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
