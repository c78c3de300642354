"""The network as a kernel machine: the ensemble over steps (Theorem 3.6) and the single machine (Theorem 3.7)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.engine.adaptive import integrate
from epk_gp.engine.gram import MEMORY_BUDGET, gram_block
from epk_gp.engine.line import Line
from epk_gp.engine.points import Points
from epk_gp.engine.probe import once_more, plan_for
from epk_gp.engine.quadrature import AdaptiveRule, Rule, adaptive, check_rule
from epk_gp.machines.directions import training_directions
from epk_gp.machines.plain import is_plain
from epk_gp.recording.checks import check_memory_budget
from epk_gp.recording.losses import CrossEntropy, NegativeLogLikelihood, sample_weights, soft_targets
from epk_gp.recording.networks import Head, check_head
from epk_gp.recording.trajectory import (
    Trajectory,
    check_inputs,
    compute_dtype,
    flat_weights,
    network_outputs,
    skeleton_for,
)

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


@once_more
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
    check_inputs(trajectory, X)
    check_head(head, trajectory.num_outputs)
    check_rule(rule)
    check_memory_budget(memory_budget)
    skeleton = skeleton_for(trajectory, compute_dtype(trajectory, X), X.device)
    plan = plan_for(trajectory, X)
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    total = torch.zeros_like(initial, dtype=torch.float64)
    residuals = torch.zeros_like(total[:, 0])
    largest, mismatch = total.new_zeros(()), total.new_zeros(())  # tensors: Python's max() would drop a NaN
    evaluations = 0.0
    panels = torch.arange(len(X), device=X.device).split(_panel(X, rule, initial, memory_budget))
    directions = training_directions(trajectory, skeleton, X)
    for step, w, d in tqdm(directions, desc="steps", total=trajectory.num_steps, disable=not progress):
        end = flat_weights(trajectory, step.index + 1, X)
        line = Line(skeleton, plan, w, d, head, memory_budget // 2)
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


@dataclass(frozen=True, eq=False)
class SingleMachine:
    """f(x) = b(x) + sum_i K(x, x_i) a_i with one kernel for the whole run.

    Attributes:
        outputs: What the machine says, (n, C).
        network: What the trained network says, (n, C).
        initial: b(x), (n, C).
        coefficients: a_i, (M, C).
        max_error: Largest |outputs - network|.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    coefficients: Float[Tensor, "M C"]
    max_error: float


def single_machine(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    *,
    head: Head = "log_softmax",
    rule: Rule = adaptive(tol=1e-12),
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> SingleMachine:
    """Evaluate the single kernel machine (Theorem 3.7, Bell et al. 2023), where there is one.

        f(x) = f_{w_0}(x) + sum_i K(x, x_i) a_i,   a_i = c_i q_i,   K with eta_s = eps_s

    It needs coefficients that stay the same from step to step: cross entropy, the log-softmax head, every step on all
    points.

    Args:
        trajectory: Training run.
        X: n inputs, taken as test copies.
        head: Must be "log_softmax".
        rule: How each step's integral is taken.
        memory_budget: Bytes for the Gram blocks.
        progress: Show a progress bar.

    Raises:
        TypeError, ValueError: As `gram_block`; also where the theorem does not hold, with the reason.
    """
    check_inputs(trajectory, X)
    check_rule(rule)
    coefficients = _constant_coefficients(trajectory, head, compute_dtype(trajectory, X)).to(X.device)
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    outputs = initial.clone()
    C, size = trajectory.num_outputs, initial.element_size()
    rows = max(1, memory_budget // (4 * C * C * size * len(X)))
    training = trajectory.inputs.to(device=X.device)
    training = training.to(X.dtype) if training.is_floating_point() else training
    for part in torch.arange(len(training), device=X.device).split(rows):
        K = gram_block(
            trajectory,
            Points(X, is_train=False),
            Points(training[part], is_train=True),
            head=head,
            rule=rule,
            memory_budget=memory_budget,
            progress=progress,
        )
        outputs += torch.einsum("ncmd,md->nc", K, coefficients[part])
    return SingleMachine(outputs, network, initial, coefficients, float((outputs - network).abs().max()))


def _constant_coefficients(trajectory: Trajectory, head: Head, dtype: torch.dtype) -> Float[Tensor, "M C"]:
    advice = "Use epk_gp.reconstruct: the ensemble over steps (Theorem 3.6) is exact there."
    loss = trajectory.loss
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            "the single kernel machine needs a loss derivative that stays constant: "
            f"that of {trajectory.loss} moves. {advice}"
        )
    if head != "log_softmax" and isinstance(loss, CrossEntropy):
        raise ValueError(
            'the single kernel machine needs head="log_softmax": '
            "with respect to the logits the loss derivative p - y moves. " + advice
        )
    every = torch.arange(trajectory.num_points)
    for step in trajectory.steps:
        if step.batch is not None and not torch.equal(step.batch.sort().values.cpu(), every):
            raise ValueError(
                "the single kernel machine needs every step to use all training points: "
                f"step {step.index} used a batch of {len(step.batch)} of {trajectory.num_points}. {advice}"
            )
        u = trajectory.updates[step.index]
        if (
            not is_plain(trajectory)
            or float(u.direct[0] * u.gradient[0]) != step.size
            or step.sample_weights is not None
        ):
            raise ValueError(
                "the single kernel machine needs steps of plain gradient descent on the loss itself: "
                f"step {step.index} of {trajectory.law} has momentum, decay, clipping, accumulated batches or "
                f"preconditioned gradients. {advice}"
            )
    like = trajectory.inputs.new_zeros(0, trajectory.num_outputs, dtype=dtype)
    q = soft_targets(loss, trajectory.targets, like)
    return sample_weights(loss, trajectory.targets).to(q)[:, None] * q
