"""The network as a kernel machine: the ensemble over steps (Theorem 3.6) and the single machine (Theorem 3.7)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.directional import Line
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.compute_options import MEMORY_BUDGET
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.gradients import replayed_updates
from epk_gp.core.head import Head, validate_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import (
    Trajectory,
    flat_weights,
    network_outputs,
    validate_inputs,
)
from epk_gp.core.validation import validate_memory_budget
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import AdaptiveRule, Rule, adaptive, validate_rule

_SEGMENTS = 16  # of a point and step at a time under the adaptive rule: what most points stay below


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """A kernel machine's outputs beside the network's, with the certificate.

    Attributes:
        outputs: What the kernel machine says, (n, C).
        network: What the trained network says, (n, C).
        initial: f at the initial weights, the machine's b(x), (n, C).
        max_error: Largest |outputs - network|.
        max_residual: Largest |f(w_{s+1}) - f(w_s) - integral| of a (point, step): the quadrature's error, known
            without the sum.
        total_residual: Largest sum of these over the steps of one point: an upper bound on the quadrature's share of
            the error.
        evaluations: Gradients evaluated per point and step, on average.
        max_step_mismatch: Largest difference, over weights and steps, between a recorded step and the one that the
            training gradients give: rounding of the weights' dtype.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    max_error: float
    max_residual: float
    total_residual: float
    evaluations: float
    max_step_mismatch: float


def reconstruct(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    *,
    head: Head = "log_softmax",
    rule: Rule = adaptive(tol=1e-12),
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Reconstruction:
    """Evaluate the ensemble of kernel machines, one per step (Theorem 3.6, Bell et al. 2023).

        f(x) = f_{w_0}(x) + sum_s sum_i K_s(x, x_i) alpha_{s,i}
             = f_{w_0}(x) + sum_s <Phi_s(x), sum_i J_s(x_i)^T alpha_{s,i}>

    The training side of every step is recomputed from the training data; recorded weights only say where the
    gradients are taken. Works for every head, loss and batch size. The certificate concerns the sum, not each kernel
    value.

    Args:
        trajectory: Training run with S steps.
        X: n inputs.
        head: Whether f is the logits or their log-softmax.
        rule: How each step's integral is taken.
        memory_budget: Bytes for everything but the inputs and the result; beside it, one gradient of the training data.
        progress: Show a progress bar.

    Returns:
        Outputs and certificate, in the dtype of X.

    Raises:
        TypeError, ValueError: Inputs that the network cannot take; an unknown head or rule.
    """
    validate_inputs(trajectory, X)
    validate_head(head, trajectory.num_outputs)
    validate_rule(rule)
    validate_memory_budget(memory_budget)
    model = trajectory.model_for(X)
    return with_plan(
        trajectory, model, lambda plan: _reconstruct(trajectory, model, plan, X, head, rule, memory_budget, progress)
    )


def _reconstruct(
    trajectory: Trajectory,
    model: FunctionalModel,
    plan: DifferentiationPlan,
    X: Tensor,
    head: Head,
    rule: Rule,
    memory_budget: int,
    progress: bool,
) -> Reconstruction:
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    total = torch.zeros_like(initial, dtype=torch.float64)
    residuals = torch.zeros_like(total[:, 0])
    largest, mismatch = total.new_zeros(()), total.new_zeros(())  # tensors: Python's max() would drop a NaN
    evaluations = 0.0
    panels = torch.arange(len(X), device=X.device).split(_panel(X, rule, initial, memory_budget))
    directions = replayed_updates(trajectory, model, X)
    for step, w, d in tqdm(directions, desc="steps", total=trajectory.num_steps, disable=not progress):
        end = flat_weights(trajectory, step.index + 1, X)
        line = Line(model, plan, w, d, head, memory_budget // 2)
        for rows in panels:
            integral = integrate(line, X[rows], rule, trajectory.num_steps)
            total[rows] += integral.total
            residuals[rows] += integral.residual
            largest = torch.maximum(largest, integral.residual.max())
            evaluations += float(integral.evaluations.sum()) / len(X)
        mismatch = torch.maximum(mismatch, (end - w - d).abs().max())
    outputs = (initial + total).to(initial.dtype)
    return Reconstruction(
        outputs=outputs,
        network=network,
        initial=initial,
        max_error=float((outputs - network).abs().max()),
        max_residual=float(largest),
        total_residual=float(residuals.max()),
        evaluations=evaluations / max(1, trajectory.num_steps),
        max_step_mismatch=float(mismatch),
    )


def _panel(X: Tensor, rule: Rule, f: Tensor, budget: int) -> int:
    """Choose how many points are integrated at a time, for half of the budget."""
    nodes = _SEGMENTS * rule.order if isinstance(rule, AdaptiveRule) else len(rule)
    per_point = nodes * (2 * X[0].nbytes + 8 * f[0].nbytes)  # inputs at the nodes; f, slopes, integrals
    return max(1, budget // (2 * per_point))
