"""Contributions under any linear update rule: adjoints from the last step back (docs/theory.md, section 4)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.contraction_cost import ContractionCost
from epk_gp.autodiff.cotangents import weighted_loss
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.layer_jacobian import to_flat_order
from epk_gp.core.gradients import sample_gradients
from epk_gp.core.step import Step
from epk_gp.core.trajectory import batch_of, flat_weights
from epk_gp.core.update_rules import UpdateCoefficients, broadcast_to_params
from epk_gp.gram.step_average import averaged_jacobian
from epk_gp.kernel_machine.adjoint_recursion import propagate
from epk_gp.kernel_machine.problem import AttributionProblem, integrate_step
from epk_gp.kernel_machine.progress import PassProgress


@dataclass(frozen=True, eq=False)
class SampleContributions:
    """What some samples of one step add to some predictions.

    Attributes:
        step: s.
        rows: Which N of the points.
        samples: Indices of B training samples, a sample as often as it occurs.
        values: Their contributions, (N, K, B, G) over G groups of parameters.
    """

    step: int
    rows: Int64[Tensor, " N"]
    samples: Int64[Tensor, " B"]
    values: Float[Tensor, "N K B G"]


@dataclass(frozen=True, eq=False)
class WeightDecayContribution:
    """What weight decay adds to some predictions in one step, (N, K, G)."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K G"]


Emit = Callable[[SampleContributions | WeightDecayContribution], None]


@dataclass(frozen=True, eq=False)
class _StepAdjoints:
    """The adjoints of one step at N points.

    Attributes:
        step: The step.
        rows: Which points.
        w: Weights at its start, (P,).
        coefficients: Of the update rule.
        average: Phi, the averaged Jacobian of the outputs, (K, N, P): the adjoint of the weights after the step.
        of_h: H, the adjoint of h, (K, N, P).
    """

    step: Step
    rows: Int64[Tensor, " N"]
    w: Float[Tensor, " P"]
    coefficients: UpdateCoefficients
    average: Float[Tensor, "K N P"]
    of_h: Float[Tensor, "K N P"]


def adjoint_pass(
    problem: AttributionProblem,
    groups: Int64[Tensor, " L"],
    emit: Emit,
    progress: PassProgress,
    *,
    points_per_block: int,
) -> None:
    """Go through the run from its last step to its first and emit every contribution.

    With H_s the adjoint of h (`propagate`), sample i adds -<H_s, grad_scale_s c_i grad loss_i(w_s)>.

    Args:
        problem: The predictions.
        groups: Group of each of the L parameters.
        emit: Called with every contribution; weight decay that is zero is left out.
        progress: How far the pass is; what is done is left out.
        points_per_block: Points whose adjoints are carried at a time.
    """
    trajectory, sizes = problem.trajectory, problem.net.model.sizes
    blocks = torch.arange(len(problem.X), device=problem.X.device).split(points_per_block)
    S = trajectory.num_steps
    work_items = len(blocks) * S
    with tqdm(total=work_items, initial=progress.done, desc="steps", disable=not problem.options.progress) as bar:
        for number, rows in enumerate(blocks):
            for position in range(max(0, progress.done - number * S), S):
                step = trajectory.steps[S - 1 - position]
                adjoint_state = progress.adjoint_state if position else None  # beta_{s+1} M_{s+1}
                integral, batches = integrate_step(problem, step, rows, points_per_block)
                Phi = averaged_jacobian(batches, problem.columns)
                del batches
                w = flat_weights(trajectory, step.index, problem.X)
                u = trajectory.updates[step.index]
                H, adjoint_state = propagate(u, sizes, Phi, adjoint_state)
                adjoints = _StepAdjoints(step, rows, w, u, Phi, H)
                _emit_weight_decay(problem, adjoints, groups, emit)
                _emit_samples(problem, adjoints, groups, emit)
                progress.advance(integral, adjoint_state, is_last=progress.done + 1 == work_items)
                bar.update()


def _emit_weight_decay(
    problem: AttributionProblem, adjoints: _StepAdjoints, groups: Int64[Tensor, " L"], emit: Emit
) -> None:
    sizes, u, w = problem.net.model.sizes, adjoints.coefficients, adjoints.w
    total = None
    for adjoint, factor in ((adjoints.of_h, u.weight_decay), (adjoints.average, u.decoupled_decay)):
        if factor.any():
            pull = broadcast_to_params(factor, sizes, w) * w
            part = _grouped_products(adjoint, pull[None], groups, sizes).squeeze(2)  # N K G
            total = part if total is None else total + part
    if total is not None:
        emit(WeightDecayContribution(adjoints.step.index, adjoints.rows, -total))


def _emit_samples(
    problem: AttributionProblem, adjoints: _StepAdjoints, groups: Int64[Tensor, " L"], emit: Emit
) -> None:
    trajectory, net, step = problem.trajectory, problem.net, adjoints.step
    X, y, c = batch_of(trajectory, step, adjoints.w)
    samples = (torch.arange(len(X)) if step.batch is None else step.batch).to(X.device)
    H, scale = adjoints.of_h, adjoints.coefficients.grad_scale
    H = H * broadcast_to_params(scale, net.model.sizes, H) if not bool((scale == 1).all()) else H
    cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=problem.cost.all_dense)
    for part in torch.arange(len(X), device=X.device).split(problem.memory.adjoint_samples()):
        if trajectory.loss_takes_outputs:
            cotangents = weighted_loss(trajectory.loss, y[part], c[part])
            jacobians = layer_jacobians(net, WeightLocation(adjoints.w), X[part], cotangents, cost)
            loss_grads = to_flat_order(jacobians, problem.columns)[0]  # B P
        else:
            loss_grads = sample_gradients(net.model, adjoints.w, X[part], y[part], trajectory.loss, c[part])
        contributions = -_grouped_products(H, loss_grads, groups, net.model.sizes)
        emit(SampleContributions(step.index, adjoints.rows, samples[part], contributions))


def _grouped_products(
    H: Float[Tensor, "K N P"], loss_grads: Float[Tensor, "B P"], groups: Int64[Tensor, " L"], sizes: tuple[int, ...]
) -> Float[Tensor, "N K B G"]:
    """Compute inner products, summed over each group of parameters separately."""
    count = int(groups.max()) + 1
    K, N = H.shape[:2]
    if count == 1:
        return (H.flatten(0, 1) @ loss_grads.T).view(K, N, len(loss_grads)).transpose(0, 1).unsqueeze(3)
    out = H.new_zeros(N, K, len(loss_grads), count)
    first = 0
    for group, size in zip(groups.tolist(), sizes, strict=True):
        part = slice(first, first + size)
        out[..., group] += (
            (H[..., part].flatten(0, 1) @ loss_grads[:, part].T).view(K, N, len(loss_grads)).transpose(0, 1)
        )
        first += size
    return out
