"""Exact contributions: what each training point added to each output of each prediction."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.verification import with_plan
from epk_gp.core.compute_options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.head import Head
from epk_gp.core.trajectory import Trajectory, network_outputs, validate_inputs
from epk_gp.kernel_machine.adjoint import Decay, SampleContributions, accumulate, panel_size
from epk_gp.kernel_machine.axes import Axis, by_sample, validate_axes
from epk_gp.kernel_machine.problem import AttributionProblem, make_problem, pick_classes
from epk_gp.kernel_machine.progress import PassProgress
from epk_gp.kernel_machine.vanilla_gd import plain_panel_size, vanilla_gd_pass
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.storage.partial_sums import PartialSums


@dataclass(frozen=True, eq=False)
class Attribution:
    """The terms of a prediction; they sum to the network's output.

    Attributes:
        initial: f at the initial weights, (n, C).
        samples: Contribution of each training point, (n, C, M).
        decay: Contribution of weight decay, coupled or decoupled, (n, C).
        network: What the trained network says, (n, C).
        max_residual: Largest quadrature residual of a (point, step).
        evaluations: Gradient evaluations per point and step that choosing the nodes took, on average.
    """

    initial: Float[Tensor, "n C"]
    samples: Float[Tensor, "n C M"]
    decay: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    max_residual: float
    evaluations: float

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        return self.initial + self.samples.sum(dim=2) + self.decay

    @property
    def max_error(self) -> float:
        """Largest |total - network|."""
        return float((self.total - self.network).abs().max())


@dataclass(frozen=True, eq=False)
class GroupedAttribution:
    """The terms of a prediction, split along chosen axes; they sum to the network's output.

    Attributes:
        initial: f at the initial weights, (n, C).
        values: Contributions of the training data, (n, C, G_1, G_2, ...) over the axes' groups, in their order.
        decay: Contribution of weight decay, split likewise; axes of training samples have length 1.
        network: What the trained network says, (n, C).
        axes: The axes.
        max_residual: Largest quadrature residual of a (point, step).
        evaluations: Gradient evaluations per point and step that choosing the nodes took, on average.
    """

    initial: Float[Tensor, "n C"]
    values: Float[Tensor, "n C *groups"]
    decay: Float[Tensor, "n C *ones"]
    network: Float[Tensor, "n C"]
    axes: tuple[Axis, ...]
    max_residual: float
    evaluations: float

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        n, C = self.initial.shape
        return self.initial + self.values.reshape(n, C, -1).sum(dim=2) + self.decay.reshape(n, C, -1).sum(dim=2)

    @property
    def max_error(self) -> float:
        """Largest |total - network|."""
        return float((self.total - self.network).abs().max())


def attribute(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    *,
    head: Head = "log_softmax",
    rule: Rule = adaptive(tol=1e-12),
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> Attribution:
    """Split predictions into exact contributions of the training points.

        samples[n, :, i] = -sum_r c_{r,i} <Psi_r(x_n), grad_w loss_i(w_r)>,   Psi_r = sum_{s >= r} A_{s,r}^T Phi_s

    Theorem 3.6 of Bell et al. (2023) for gradient descent; theory, section 4, for momentum and recorded diagonal
    preconditioners, whose own dependence on the data is held as recorded and not attributed. One loss gradient per
    training point and step is needed, not C output gradients. Contributions sum to the prediction; they are not the
    effects of leaving points out.

    Args:
        trajectory: Training run with S steps on M points.
        X: n inputs, taken as test copies.
        head: Whether f is the logits or their log-softmax.
        rule: How each step's integral is taken.
        classes: One output per input, at a C-th of the cost: C is then 1 in the result. All C outputs by default.
        options: `memory_budget`, `progress` and `checkpoint`; see `ComputeOptions`.

    Returns:
        All terms, in the dtype of X.

    Raises:
        TypeError, ValueError: Inputs that the network cannot take; an unknown head or rule; classes out of range.
    """
    parsed = parse_options("attribute", ("accumulate",), **options)
    validate_inputs(trajectory, X)
    (parts,) = _attribute(trajectory, X, [(by_sample(trajectory),)], head, rule, classes, parsed)
    return Attribution(
        initial=parts.initial,
        samples=parts.values,
        decay=parts.decay.squeeze(2),
        network=parts.network,
        max_residual=parts.max_residual,
        evaluations=parts.evaluations,
    )


def attribute_by(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    by: Sequence[Axis],
    *,
    head: Head = "log_softmax",
    rule: Rule = adaptive(tol=1e-12),
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> GroupedAttribution:
    """Split predictions into exact contributions along any axes: samples, labels, steps, layers, parameters.

    Only the result that is asked for is ever held, not sample x step x parameter x output.

    Args:
        trajectory: Training run.
        X: n inputs, taken as test copies.
        by: `by_sample(trajectory)`, `by_label`, `by_step`, `by_layer`, `by_parameter`, or axes of one's own. Axes of
            the same kind are combined: a term counts where all its groups meet.
        head: Whether f is the logits or their log-softmax.
        rule: How each step's integral is taken.
        classes: One output per input; C is then 1 in the result.
        options: As `attribute`.

    Raises:
        TypeError, ValueError: As `attribute`; also axes that are not of this run.
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
    X: Shaped[Tensor, "n ..."],
    splits: Sequence[Sequence[Axis]],
    *,
    head: Head = "log_softmax",
    rule: Rule = adaptive(tol=1e-12),
    classes: Int64[Tensor, " n"] | None = None,
    **options: Unpack[ComputeSettings],
) -> tuple[GroupedAttribution, ...]:
    """Split predictions in several ways in one pass over the run: one result per entry of `splits`, as `attribute_by`.

    Raises:
        TypeError, ValueError: As `attribute_by`.
    """
    for by in splits:
        validate_axes(trajectory, by)
    validate_inputs(trajectory, X)
    parsed = parse_options("attribute_many", ("accumulate",), **options)
    return _attribute(trajectory, X, list(map(tuple, splits)), head, rule, classes, parsed)


def _attribute(
    trajectory: Trajectory,
    X: Tensor,
    splits: list[tuple[Axis, ...]],
    head: Head,
    rule: Rule,
    classes: Tensor | None,
    options: ComputeOptions,
) -> tuple[GroupedAttribution, ...]:
    def compute(plan: DifferentiationPlan) -> tuple[GroupedAttribution, ...]:
        query = make_problem(trajectory, X, head, rule, classes, options.memory_budget, plan)
        return _split(query, splits, options.checkpoint, options.progress)

    return with_plan(trajectory, trajectory.model_for(X), compute)


class _Collector:
    """Sums terms into one result. Combined axes of one kind are flattened to one index until the end."""

    def __init__(self, query: AttributionProblem, axes: tuple[Axis, ...], like: Tensor) -> None:
        self.axes = axes
        trajectory = query.trajectory
        counts = {"step": trajectory.num_steps, "sample": trajectory.num_points}
        self.index, self.sizes = {}, {}
        for kind, count in (*counts.items(), ("parameter", len(trajectory.model.names))):
            own = [axis for axis in axes if axis.kind == kind]
            index = torch.zeros(count, dtype=torch.int64)
            for axis in own:
                index = index * len(axis.names) + axis.group.cpu()
            self.index[kind], self.sizes[kind] = index, [len(axis.names) for axis in own]
        T, U, G = (torch.Size(self.sizes[kind]).numel() for kind in ("step", "sample", "parameter"))
        self.values = like.new_zeros(*like.shape, T, U, G)
        self.decay = like.new_zeros(*like.shape, T, G)
        self.group_of_sample = self.index["sample"].to(like.device)
        self.group_of_parameter = self.index["parameter"].to(like.device)

    def take(self, term: SampleContributions | Decay) -> None:
        """Add one term, of all parameters together or of each apart."""
        t = int(self.index["step"][term.step])
        values = self._joined(term.values)
        if isinstance(term, Decay):
            self.decay[term.rows, :, t] += values
            return
        index = self.group_of_sample[term.samples]
        if len(term.rows) == len(self.values):
            self.values[:, :, t].index_add_(2, index, values)
        else:
            self.values[term.rows, :, t] = self.values[term.rows, :, t].index_add_(2, index, values)

    def _joined(self, values: Tensor) -> Tensor:
        if values.shape[-1] == 1 and self.values.shape[-1] == 1:
            return values
        joined = values.new_zeros(*values.shape[:-1], self.values.shape[-1])
        return joined.index_add_(values.ndim - 1, self.group_of_parameter, values)

    def result(self, tensor: Tensor, kinds: tuple[str, ...]) -> Tensor:
        """Unflatten the kinds and bring the axes into their order; kinds that are left out get length 1."""
        shape = [size for kind in kinds for size in self.sizes[kind]]
        tensor = tensor.reshape(*tensor.shape[:2], *shape)
        held = [number for kind in kinds for number, axis in enumerate(self.axes) if axis.kind == kind]
        order = [2 + held.index(number) for number in range(len(self.axes)) if number in held]
        tensor = tensor.permute(0, 1, *order)
        for number in range(len(self.axes)):
            if number not in held:
                tensor = tensor.unsqueeze(2 + number)
        return tensor


def _split(
    query: AttributionProblem, splits: list[tuple[Axis, ...]], checkpoint: str | os.PathLike[str] | None, progress: bool
) -> tuple[GroupedAttribution, ...]:
    trajectory, X, head = query.trajectory, query.X, query.head
    initial = pick_classes(query, network_outputs(trajectory, X, state=0, head=head))
    network = pick_classes(query, network_outputs(trajectory, X, state=-1, head=head))
    collectors = [_Collector(query, axes, initial) for axes in splits]

    def take(term: SampleContributions | Decay) -> None:
        for collector in collectors:
            collector.take(term)

    whole = not any(collector.sizes["parameter"] for collector in collectors)
    kept = None if checkpoint is None else PartialSums(checkpoint, _identity(query, splits))
    plain = whole and trajectory.is_vanilla_gd
    panel = plain_panel_size(query) if plain else panel_size(query)
    name = f"sums-{fingerprint(query.plan, plain, panel)}"  # a network's second plan starts anew
    sums = [total for collector in collectors for total in (collector.values, collector.decay)]
    keeper = PassProgress(kept, sums, initial, name)
    if plain:
        vanilla_gd_pass(query, take, keeper, progress=progress)
    else:
        count = len(trajectory.model.names)
        groups = torch.zeros(count, dtype=torch.int64) if whole else torch.arange(count)
        accumulate(query, groups, take, keeper, progress=progress)
    return tuple(
        GroupedAttribution(
            initial=initial,
            values=collector.result(collector.values, ("step", "sample", "parameter")),
            decay=collector.result(collector.decay, ("step", "parameter")),
            network=network,
            axes=collector.axes,
            max_residual=float(keeper.largest),
            evaluations=keeper.evaluations / (len(X) * max(1, trajectory.num_steps)),
        )
        for collector in collectors
    )


def _identity(query: AttributionProblem, splits: list[tuple[Axis, ...]]) -> str:
    axes = [axis for split in splits for axis in split]
    kinds = [[axis.kind for axis in split] for split in splits]
    return fingerprint(
        query.trajectory.digest, query.head, query.rule, query.memory_budget, kinds, query.X, query.classes,
        *(axis.group for axis in axes), [axis.names for axis in axes],
    )  # fmt: skip
