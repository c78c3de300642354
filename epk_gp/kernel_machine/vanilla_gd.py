"""Contributions under plain gradient descent: layers stay factored, nothing of the size of the weights is kept."""

from collections.abc import Callable

import torch
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.jacobians import WeightLocation, gradients, head_cotangents
from epk_gp.autodiff.representations import feature_bytes
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, batch_of, flat_weights
from epk_gp.gram.accumulator import empty_tile
from epk_gp.gram.step_average import StepAverage
from epk_gp.kernel_machine.adjoint import SampleContributions, weighted_loss
from epk_gp.kernel_machine.problem import AttributionProblem, integrate_step
from epk_gp.kernel_machine.progress import PassProgress


def validate_vanilla_gd(trajectory: Trajectory, what: str) -> None:
    """Refuse a run whose steps are not those of plain gradient descent.

    Raises:
        ValueError: Momentum, decay or a preconditioner.
    """
    if not trajectory.is_vanilla_gd:
        raise ValueError(
            f"{what} must have steps of plain gradient descent, -eps_s times the batch gradient: the run was made by "
            f"{trajectory.update_rule}. Use epk_gp.reconstruct or epk_gp.attribute, which follow every update rule."
        )


def vanilla_lr(trajectory: Trajectory, step: Step) -> float:
    """Give eps_s, with -eps_s the batch gradient's factor in a plain step: clipping and sign are in it."""
    u = trajectory.updates[step.index]
    return float(u.lr[0]) * float(u.grad_scale[0])


def vanilla_gd_pass(
    query: AttributionProblem, take: Callable[[SampleContributions], None], keeper: PassProgress, *, progress: bool
) -> None:
    """Go through the run and hand out every sample's contribution, -eps_s c_i <Phi_s, grad loss_i>, as `accumulate`.

    Raises:
        ValueError: The run's steps are not those of plain gradient descent.
    """
    trajectory, n = query.trajectory, len(query.X)
    validate_vanilla_gd(trajectory, "factored contributions")
    panel = plain_panel_size(query)
    panels = torch.arange(n, device=query.X.device).split(panel)
    units = len(panels) * trajectory.num_steps
    steps = trajectory.steps[keeper.done // len(panels) :]
    for step in tqdm(
        steps, desc="steps", total=trajectory.num_steps, initial=keeper.done // len(panels), disable=not progress
    ):
        w = flat_weights(trajectory, step.index, query.X)
        X, y, c = batch_of(trajectory, step, w)
        samples = (torch.arange(len(X)) if step.batch is None else step.batch).to(X.device)
        eta = -vanilla_lr(trajectory, step)
        for rows in panels[keeper.done % len(panels) :]:
            integral, nodes = integrate_step(query, step, rows, max(1, panel))
            size = integral.total.element_size()
            block = max(1, min(panel, query.memory_budget // (4 * size * query.num_rows * len(rows))))
            for part in torch.arange(len(X), device=X.device).split(block):
                cotangents = weighted_loss(trajectory.loss, y[part], c[part])
                place = WeightLocation(w)
                right = gradients(query.model, query.plan, place, X[part], cotangents, query.form, fixed_seed=False)
                tile = empty_tile(query.num_rows, len(rows), 1, len(part), integral.total, per_class=False)
                joined = StepAverage(tile, len(rows), right, eta, fixed_steps=False)
                for node in nodes:
                    joined.take(node)
                joined.close()
                values = tile.finished()[:, :, 0].transpose(0, 1)
                take(SampleContributions(step.index, rows, samples[part], values.unsqueeze(3)))
            keeper.advance(integral, None, last=keeper.done + 1 == units)


def plain_panel_size(query: AttributionProblem) -> int:
    """Choose how many points are taken at a time, from the memory budget."""
    place = WeightLocation(flat_weights(query.trajectory, 0, query.X))
    like: Tensor = query.X[:1]
    features = gradients(query.model, query.plan, place, like, head_cotangents("logits"), query.form, fixed_seed=True)
    size = torch.finfo(query.dtype).bits // 8
    per_point = (query.trajectory.num_outputs + 3) * query.plan.activations_per_sample * size + 12 * feature_bytes(
        features
    )
    return max(1, query.memory_budget // (4 * per_point))
