"""Contributions under plain gradient descent: layers stay factored, nothing of the size of the weights is kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.autodiff.cotangents import Cotangents, all_outputs, weighted_loss
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.layer_jacobian import LeftFactor
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, held_coefficients
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.step_average import NodeBatch, StepAverage, step_averages
from epk_gp.kernel_machine.contributions import (
    Emit,
    SampleContributions,
    UnexplainedContribution,
    WeightsContribution,
)
from epk_gp.kernel_machine.problem import AttributionProblem, integrate_stretch
from epk_gp.kernel_machine.progress import PassProgress
from epk_gp.kernel_machine.step_residuals import leaves_residuals
from epk_gp.quadrature.paths import stretches_of


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
    progress: PassProgress,
    points_per_block: int,
) -> None:
    """Go through steps of a run and emit every sample's contribution, -eps_s c_i <Phi_s, grad loss_i>.

    In less than float64 the rounding of a step is what its integral leaves over the samples' contributions; that of a
    chord belongs to its last step.

    Args:
        problem: The predictions, at points that are computed together.
        layer_parts: The part of the network that each layer's Jacobian belongs to (`parts_of_layers`).
        steps: Which steps; they begin and end where chords do.
        emit: Called with every contribution.
        progress: How far the pass is; what is done is left out.
        points_per_block: Largest number of points that are computed together.

    Raises:
        ValueError: The run's steps are not those of plain gradient descent.
    """
    trajectory, rows = problem.trajectory, torch.arange(len(problem.X), device=problem.X.device)
    validate_vanilla_gd(trajectory, "factored contributions")
    layers_of_parts = [
        [layer for layer, part in enumerate(layer_parts) if part == number] for number in range(max(layer_parts) + 1)
    ]
    samples_per_block = problem.memory.vanilla_gd_samples(
        points_per_block, len(rows), problem.num_outputs, len(layers_of_parts)
    )
    for stretch in stretches_of(problem.kernel.path, trajectory.num_steps, steps)[progress.done :]:
        (line,) = integrate_stretch(problem, stretch, rows, points_per_block)
        rest = problem.select_outputs(line.integral.total, rows).clone()
        left = LeftSide(line.batches, step_averages(line.batches))
        for s in stretch:
            change = rest.clone()
            for term in _sample_terms(problem, trajectory.steps[s], left, layers_of_parts, samples_per_block):
                emit(term)
                rest -= term.values.sum(dim=(2, 3))
            # the integral of a step is its change; of a chord it is that of all its steps
            emit(WeightsContribution(s, rows, change if len(stretch) == 1 else change - rest))
        if leaves_residuals(trajectory, rest):
            emit(UnexplainedContribution(stretch[-1], rows, rest.unsqueeze(2)))
        progress.advance([line.integral], None, is_last=False, num_steps=len(stretch))


def vanilla_gd_points(problem: AttributionProblem) -> int:
    """Count the points whose contributions are computed at a time."""
    # an upper bound: all C outputs, also where one is asked for
    every = Cotangents(all_outputs("logits").of_logits, are_constant=True)
    at = WeightLocation(flat_state(problem.trajectory, 0, problem.X))
    jacobians = layer_jacobians(problem.net, at, problem.X[:1], every, problem.cost)
    return problem.memory.vanilla_gd_points(sum(jacobian.nbytes for jacobian in jacobians))


@dataclass(frozen=True, eq=False)
class LeftSide:
    """Output gradients on a stretch of the path, which are multiplied with the loss gradients of each of its steps.

    Attributes:
        batches: At the nodes.
        averages: Those of layers that commute with the average, by number of the layer.
    """

    batches: list[NodeBatch]
    averages: dict[int, LeftFactor]


def _sample_terms(
    problem: AttributionProblem,
    step: Step,
    left: LeftSide,
    layers_of_parts: Sequence[Sequence[int]],
    samples_per_block: int,
) -> Iterator[SampleContributions]:
    """Yield the contributions of one step's samples, some of them at a time."""
    trajectory, K = problem.trajectory, problem.num_outputs
    rows = torch.arange(len(problem.X), device=problem.X.device)
    w = flat_state(trajectory, step.index, problem.X)
    X, y, c = batch_of(trajectory, step, w)
    samples = (torch.arange(len(X)) if step.batch is None else step.batch).to(X.device)
    eta = -vanilla_lr(trajectory, step)
    for part in torch.arange(len(X), device=X.device).split(samples_per_block):
        cotangents = weighted_loss(trajectory.loss, y[part], c[part])
        right = layer_jacobians(problem.net, WeightLocation(w), X[part], cotangents, problem.cost)
        values = w.new_empty(len(rows), K, len(part), len(layers_of_parts))
        for number, layers in enumerate(layers_of_parts):
            tile = GramAccumulator((K, len(rows), 1, len(part)), w)
            average = StepAverage(tile, right, eta, left.averages, layers)
            for batch in left.batches:
                average.accumulate(batch)
            average.finalize()
            values[..., number] = tile.result()[:, :, 0].transpose(0, 1)
        yield SampleContributions(step.index, rows, samples[part], values)
