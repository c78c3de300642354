"""Contributions under plain gradient descent: layers stay factored, nothing of the size of the weights is kept."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, all_outputs, weighted_loss
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import LeftFactor
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, held_coefficients
from epk_gp.gram.accumulator import GramAccumulator, NodeBatch, StepAverage, add_to_averages
from epk_gp.kernel_machine.terms import (
    AttributionProblem,
    Emit,
    IntegratedLine,
    SampleContributions,
    UnexplainedContribution,
    WeightsContribution,
    integrate_stretch,
    leaves_residuals,
)
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import stretches_of


def validate_vanilla_gd(trajectory: Trajectory, name: str) -> None:
    """Raise if the steps of a run are not those of plain gradient descent.

    Raises:
        ValueError: The run has momentum, weight decay or a preconditioner; or its gradients are not those of the
            network in evaluation mode on the recorded data.
    """
    if not trajectory.is_vanilla_gd:
        has_passes = trajectory.statistics is not None or any(step.passes for step in trajectory.trained.steps)
        made = f"{trajectory.update_rule}{', with passes in training mode or other rows' if has_passes else ''}"
        raise ValueError(
            f"{name} must have steps of plain gradient descent, -eps_s times the batch gradient of the network in "
            f"evaluation mode on the recorded data: the run was made by {made}. Use epk_gp.reconstruct or "
            "epk_gp.attribute, which follow every update rule and every forward pass."
        )


def validate_loss_takes_outputs(trajectory: Trajectory, name: str) -> None:
    """Raise if the loss of a run depends on more than the network's outputs.

    Raises:
        ValueError: It takes what the network returned, which `output=` does not give back.
    """
    if not trajectory.loss_takes_outputs:
        raise ValueError(
            f"{name} needs a loss of the outputs (n, {trajectory.num_outputs}) alone: {trajectory.loss} takes what the "
            "network returned. Use epk_gp.reconstruct or epk_gp.attribute."
        )


def vanilla_lr(trajectory: Trajectory, step: Step) -> float:
    """Return eps_s, where a plain step is -eps_s times the batch gradient; clipping and sign are part of it."""
    u = held_coefficients(trajectory, step.index)
    return float(u.lr[0]) * float(u.grad_scale[0])


def parts_of_layers(problem: AttributionProblem, parts: Int64[Tensor, " L"]) -> list[int] | None:
    """Return which part of the network each layer's Jacobian belongs to; None where one belongs to several.

    Args:
        problem: The predictions.
        parts: The part that each of L parameters belongs to.
    """
    model, plan = problem.net.model, problem.net.plan
    part = dict(zip(model.names, parts.tolist(), strict=True))
    if problem.cost.all_dense:
        owners = [{part[name] for name in model.names}]
    else:
        owners = [{part[name] for name in (weight, bias) if name is not None} for weight, bias in plan.bias_of.items()]
        if plan.dense_params:
            owners.append({part[name] for name in plan.dense_params})
    return [min(own) for own in owners] if all(len(own) == 1 for own in owners) else None


def vanilla_gd_pass(
    problem: AttributionProblem,
    layer_parts: Sequence[int],
    steps: slice,
    emit: Emit,
    points_per_block: int,
) -> Iterator[tuple[Integral, int]]:
    """Go through steps of a run and emit every sample's contribution, -eps_s c_i <Phi_s, grad loss_i>.

    Yields the integral of each stretch, and its number of steps, when it is done.

    In less than float64 the rounding of a step is what its integral leaves over the samples' contributions; that of a
    chord belongs to its last step.

    Args:
        problem: The predictions, at points that are computed together.
        layer_parts: The part of the network that each layer's Jacobian belongs to (`parts_of_layers`).
        steps: Which steps; they begin and end where chords do.
        emit: Called with every contribution.
        points_per_block: Largest number of points that are computed together.

    Raises:
        ValueError: The run's steps are not those of plain gradient descent.
    """
    trajectory, rows = problem.trajectory, torch.arange(len(problem.X), device=problem.X.device)
    validate_vanilla_gd(trajectory, "factored contributions")
    layers_of_parts = [
        [layer for layer, part in enumerate(layer_parts) if part == number] for number in range(max(layer_parts) + 1)
    ]
    for stretch in stretches_of(problem.kernel.path, trajectory.num_steps, steps):
        line = integrate_stretch(problem, stretch, rows, points_per_block)
        total = problem.select_outputs(line.integral.total, rows)
        changes = total.new_zeros(len(stretch), *total.shape)
        for term in _sample_terms(line, stretch, layers_of_parts, points_per_block):
            emit(term)
            changes[term.step - stretch.start] += term.values.sum(dim=(2, 3))
        for s, change in zip(stretch, changes, strict=True):
            # the integral of a step is its change; of a chord it is that of all its steps
            emit(WeightsContribution(s, rows, total if len(stretch) == 1 else change))
        if leaves_residuals(trajectory, total):
            emit(UnexplainedContribution(stretch[-1], rows, (total - changes.sum(dim=0)).unsqueeze(2)))
        yield line.integral, len(stretch)


def vanilla_gd_points(problem: AttributionProblem) -> int:
    """Count the points whose contributions are computed at a time."""
    # an upper bound: all C outputs, also where one is asked for
    every = Cotangents(all_outputs("logits").of_logits, are_constant=True)
    at = WeightLocation(flat_state(problem.trajectory, 0, problem.X))
    jacobians = layer_jacobians(problem.net, at, problem.X[:1], every, problem.cost)
    return problem.memory.vanilla_gd_points(sum(jacobian.nbytes for jacobian in jacobians))


_SampleBlock = tuple[int, Int64[Tensor, " b"]]  # a step, and which of its samples


@dataclass(frozen=True, eq=False)
class LeftSide:
    """Output gradients at some nodes of a stretch, which are multiplied with the loss gradients of each of its steps.

    Attributes:
        batches: At the nodes.
        averages: Of layers that commute with the average, by number of the layer, over these nodes and all before.
        is_last: Whether no more nodes follow: the averages are over all nodes.
    """

    batches: list[NodeBatch]
    averages: dict[int, LeftFactor]
    is_last: bool


@dataclass(frozen=True, eq=False)
class _StepData:
    """The training side of a step.

    Attributes:
        step: The step.
        w: The recorded state before it.
        X: The inputs of its B samples.
        y: Their targets.
        c: Their weights.
    """

    step: Step
    w: Float[Tensor, " PQ"]
    X: Shaped[Tensor, "B ..."]
    y: Shaped[Tensor, "B ..."]
    c: Float[Tensor, " B"]

    @classmethod
    def of(cls, problem: AttributionProblem, s: int) -> "_StepData":
        """Read the data of step s."""
        step, w = problem.trajectory.steps[s], flat_state(problem.trajectory, s, problem.X)
        return cls(step, w, *batch_of(problem.trajectory, step, w))

    def contributions(
        self,
        part: Int64[Tensor, " b"],
        problem: AttributionProblem,
        left: LeftSide,
        layers_of_parts: Sequence[Sequence[int]],
    ) -> Float[Tensor, "N K b G"]:
        """Return what some of the samples add at some nodes, by parts of the network."""
        trajectory, K, N = problem.trajectory, problem.num_outputs, len(problem.X)
        cotangents = weighted_loss(trajectory.loss, self.y[part], self.c[part])
        right = layer_jacobians(problem.net, WeightLocation(self.w), self.X[part], cotangents, problem.cost)
        eta, found = -vanilla_lr(trajectory, self.step), self.w.new_empty(N, K, len(part), len(layers_of_parts))
        for number, layers in enumerate(layers_of_parts):
            tile = GramAccumulator((K, N, 1, len(part)), self.w)
            average = StepAverage(tile, right, eta, left.averages, layers)
            for batch in left.batches:
                average.accumulate(batch)
            if left.is_last:
                average.finalize()
            found[..., number] = tile.result()[:, :, 0].transpose(0, 1)
        return found


def _sample_terms(
    line: IntegratedLine, stretch: range, layers_of_parts: Sequence[Sequence[int]], points_per_block: int
) -> Iterator[SampleContributions]:
    """Yield the contributions of the samples of the steps of a stretch, some samples at a time.

    Output gradients at all nodes are held where they fit. Where they do not, they are computed again for as many
    samples as fit.
    """
    problem, rows, parts = line.problem, line.rows, len(layers_of_parts)
    memory, K, M = problem.memory, problem.num_outputs, problem.trajectory.num_points
    data_of = lru_cache(maxsize=1)(partial(_StepData.of, problem))  # a step has many blocks, one after the other
    size = num_samples = memory.vanilla_gd_samples(points_per_block, len(rows), K, parts)
    waiting = _left_sides(line, memory.node_bytes)
    first = next(waiting)
    held = [first] if first.is_last else []
    if not held:
        num_samples = memory.vanilla_gd_samples(M, len(rows), K, parts)
    lefts: Iterator[LeftSide] = chain([first], waiting)
    del first
    for blocks in _packed(_sample_blocks(problem, stretch, size), num_samples):
        sums: list[Tensor | None] = [None] * len(blocks)
        for left in held or lefts:
            for number, (s, part) in enumerate(blocks):
                found, before = data_of(s).contributions(part, problem, left, layers_of_parts), sums[number]
                sums[number] = found if before is None else before.add_(found)
        for (s, part), values in zip(blocks, sums, strict=True):
            if values is not None:
                batch = problem.trajectory.steps[s].batch
                yield SampleContributions(s, rows, part if batch is None else batch.to(part.device)[part], values)
        lefts = _left_sides(line, memory.node_bytes)  # for the next samples, if nothing is held


def _left_sides(line: IntegratedLine, num_bytes: int) -> Iterator[LeftSide]:
    """Compute the output gradients at as many nodes of a line at a time as fit."""
    averages: dict[int, LeftFactor] = {}
    batches, size = list[NodeBatch](), 0
    for batch in line.node_batches():
        own = sum(jacobian.nbytes for jacobian in batch.jacobians)
        if batches and size + own > num_bytes:
            yield LeftSide(batches, averages, is_last=False)
            batches, size = [], 0
        add_to_averages(averages, batch)
        batches.append(batch)
        size += own
    yield LeftSide(batches, averages, is_last=True)


def _sample_blocks(problem: AttributionProblem, steps: range, size: int) -> Iterator[_SampleBlock]:
    """Divide the samples of each step."""
    for s in steps:
        batch = problem.trajectory.steps[s].batch
        count = problem.trajectory.num_points if batch is None else len(batch)
        for part in torch.arange(count, device=problem.X.device).split(size):
            yield s, part


def _packed(blocks: Iterable[_SampleBlock], num_samples: int) -> Iterator[list[_SampleBlock]]:
    """Put blocks together, of so many samples at most."""
    pack, count = list[_SampleBlock](), 0
    for s, part in blocks:
        if pack and count + len(part) > num_samples:
            yield pack
            pack, count = [], 0
        pack.append((s, part))
        count += len(part)
    if pack:
        yield pack
