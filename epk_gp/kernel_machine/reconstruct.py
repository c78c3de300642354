"""The network as an ensemble of kernel machines, one per step (Theorem 3.6, Bell et al. 2023)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.directional import WeightSegment
from epk_gp.autodiff.planned_model import PlannedModel
from epk_gp.autodiff.planning import with_plan
from epk_gp.core.compute_options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.gradients import ReplayedStep, mismatch_tolerance, replayed_steps
from epk_gp.core.head import Head
from epk_gp.core.memory_plan import integration_points
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory, flat_weights, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.certification import (
    IntegrationRecord,
    coarsest_dtype,
    describe_statuses,
    larger,
    residual_tolerance,
    warn_uncertified,
)
from epk_gp.quadrature.adaptive import integrate
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.quadrature.status import QuadratureStatus


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """A kernel machine's outputs beside the network's, with the certificate.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: f at the initial weights, the machine's b(x), (n, C).
        max_error: Largest |outputs - network|.
        max_residual: Largest |f(w_{s+1}) - f(w_s) - integral| of a (point, step): the quadrature's error, known
            without the sum.
        total_residual: Largest sum of these over the steps of one point: an upper bound on the quadrature's share of
            the error.
        evaluations: Gradients evaluated per point and step, on average.
        max_step_mismatch: Largest difference, over weights and steps, between a recorded step and the one that the
            training gradients give: rounding of the weights' dtype.
        residual_tolerance: What `total_residual` may be: the rule's tolerance (1e-12 for a fixed rule) or rounding.
        mismatch_ratio: Largest ratio of a step's mismatch to what rounding of weights and gradients can explain.
        worst_step: The step that has it; -1 for a run without steps.
        statuses: Number of (point, step) pairs by the reason why the rule stopped refining them.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    max_error: float
    max_residual: float
    total_residual: float
    evaluations: float
    max_step_mismatch: float
    residual_tolerance: float
    mismatch_ratio: float
    worst_step: int
    statuses: Mapping[QuadratureStatus, int]

    @property
    def certified(self) -> bool:
        """Whether quadrature and steps are within tolerance: the sum is then the network for the stated reasons.

        The residual alone sees the quadrature only; a step that is not the stated loss's on the stated data shows in
        the mismatch. Both concern the sum, not each kernel value.
        """
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """What speaks against the certificate, with numbers; empty if it holds."""
        findings = []
        if not self.total_residual <= self.residual_tolerance:
            findings.append(
                f"the residuals of a point add up to {self.total_residual:.2e}, more than {self.residual_tolerance:.2e}"
                + describe_statuses(self.statuses)
            )
        if not self.mismatch_ratio <= 1:
            findings.append(
                f"step {self.worst_step} differs from the step that the loss's gradient on the recorded batch gives by "
                f"{self.mismatch_ratio:.2g} times what rounding explains (largest difference of a step "
                f"{self.max_step_mismatch:.2e})"
            )
        return findings


def reconstruct(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    **options: Unpack[ComputeSettings],
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
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: How each step's integral is taken.
        options: `memory_budget` (beside it, one gradient of the training data) and `progress`; see `ComputeOptions`.

    Returns:
        Outputs and certificate, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, or the head or the rule is unknown.
    """
    parsed = parse_options("reconstruct", ("checkpoint", "accumulate"), **options)
    kernel = PathKernel(trajectory, head, rule)
    kernel.validate_inputs(X)
    result = with_plan(trajectory, trajectory.model_for(X), lambda net: _reconstruct(net, kernel, X, parsed))
    warn_uncertified("the reconstruction", result.findings)
    return result


def _reconstruct(net: PlannedModel, kernel: PathKernel, X: Tensor, options: ComputeOptions) -> Reconstruction:
    trajectory, head, rule = kernel.trajectory, kernel.head, kernel.rule
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    total = torch.zeros_like(initial, dtype=torch.float64)
    residuals = torch.zeros_like(total[:, 0])
    record, mismatches = IntegrationRecord(), _Mismatches(coarsest_dtype(trajectory, initial))
    evaluations = 0.0
    size = integration_points(options.memory_budget, rule.typical_nodes, X[0].nbytes, initial[0].nbytes)
    blocks = torch.arange(len(X), device=X.device).split(size)
    replay = replayed_steps(trajectory, net.model, X)
    for replayed in tqdm(replay, desc="steps", total=trajectory.num_steps, disable=not options.progress):
        # half of the budget; the other half is the block's
        segment = WeightSegment(net, replayed.w, replayed.d, head, options.memory_budget // 2)
        for rows in blocks:
            integral = integrate(segment, X[rows], rule, trajectory.num_steps)
            total[rows] += integral.total
            residuals[rows] += integral.residual
            record.add(integral)
            evaluations += float(integral.evaluations.sum()) / len(X)
        mismatches.add(trajectory, net.model, replayed)
    outputs = (initial + total).to(initial.dtype)
    return Reconstruction(
        outputs=outputs,
        network=network,
        initial=initial,
        max_error=float((outputs - network).abs().max()),
        max_residual=record.max_residual,
        total_residual=float(residuals.max()),
        evaluations=evaluations / max(1, trajectory.num_steps),
        max_step_mismatch=mismatches.largest,
        residual_tolerance=residual_tolerance(rule, initial.dtype, record.size, max(1, trajectory.num_steps)),
        mismatch_ratio=mismatches.ratio,
        worst_step=mismatches.worst_step,
        statuses=dict(record.statuses),
    )


class _Mismatches:
    """The differences of recorded steps from replayed ones, in the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.largest, self.ratio, self.worst_step = 0.0, 0.0, -1

    def add(self, trajectory: Trajectory, model: FunctionalModel, replayed: ReplayedStep) -> None:
        index, w, d = replayed.step.index, replayed.w, replayed.d
        mismatch = float((flat_weights(trajectory, index + 1, w) - w - d).abs().max())
        tolerance = mismatch_tolerance(trajectory, model, replayed, mismatch, self.dtype)
        ratio = mismatch / tolerance if tolerance else math.inf * mismatch if mismatch else 0.0
        self.largest = larger(self.largest, mismatch)
        if self.worst_step < 0 or not ratio <= self.ratio:
            self.ratio, self.worst_step = larger(self.ratio, ratio), index
