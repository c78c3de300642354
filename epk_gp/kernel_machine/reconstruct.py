"""The network as an ensemble of kernel machines, one per step (Theorem 3.6, Bell et al. 2023)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.show import Displayed, Entry, Summary, count, kind_of
from epk_gp.core.losses import Head
from epk_gp.core.inputs import Inputs
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.certification import (
    certificate_entries,
    coarsest_dtype,
    describe_findings,
    sum_tolerance,
    warn_if_uncertified,
)
from epk_gp.kernel_machine.reconstruct import sum_over_steps
from epk_gp.kernel_machine.axes import number_row, place_table, shown_places
from epk_gp.quadrature.paths import WeightPath, require_integrable, straight
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.quadrature.status import QuadratureStatus


@dataclass(frozen=True, eq=False, repr=False)
class Reconstruction(Displayed):
    """A kernel machine's outputs beside the network's, with the certificate.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: f at the initial weights, the machine's b(x), (n, C).
        max_error: Largest |outputs - network|.
        max_residual: Largest |f(w_{s+1}) - f(w_s) - integral| of a (point, step), or of a chord: the quadrature's
            error, known without the sum.
        total_residual: Largest sum of these over the steps of one point: an upper bound on the quadrature's share of
            the error.
        evaluations: Gradients evaluated per point and step, on average.
        max_step_mismatch: Largest difference, over weights and steps, between a recorded step and the one that the
            training gradients give: rounding of the weights' dtype.
        residual_ratio: Largest ratio of the residual of a (point, step) to what the rule's tolerance (1e-12 for a fixed
            rule) or rounding allows.
        mismatch_ratio: Largest ratio of a step's mismatch to what rounding of weights and gradients explains.
        worst_step: The step that has it; -1 for a run without steps.
        error_tolerance: What `max_error` may be where both are at most 1.
        statuses: Number of (point, step) pairs, or of points and chords, by the reason why the rule stopped refining
            them.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    max_error: float
    max_residual: float
    total_residual: float
    evaluations: float
    max_step_mismatch: float
    residual_ratio: float
    mismatch_ratio: float
    worst_step: int
    error_tolerance: float
    statuses: Mapping[QuadratureStatus, int]

    @property
    def certified(self) -> bool:
        """Whether quadrature, steps and sum are within tolerance.

        The residual alone sees the quadrature only; a step that is not the stated loss's on the stated data shows in
        the mismatch. All concern the sum, not each kernel value.
        """
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Why the result is not certified, with numbers; empty if it is."""
        return describe_findings(self)

    def _summary(self) -> Summary:
        (n, C), places = self.network.shape, shown_places(self.network)
        rows = [
            number_row("initial", places, self.initial),
            number_row("kernel machine", places, self.outputs),
            number_row("network", places, self.network),
            number_row("difference", places, self.outputs[: len(places)] - self.network[: len(places)]),
        ]
        return Summary(
            f"Reconstruction of {count(n, 'point')} × {count(C, 'output')}",
            (
                *certificate_entries(self),
                Entry("shape of outputs", f"{tuple(self.outputs.shape)}", kind_of(self.outputs)),
            ),
            place_table(self.network, places, rows),
        )


def reconstruct(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
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
        X: n inputs, of the structure of the training inputs.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: How each step's integral is taken, or each chord's.
        path: Along which the points are integrated. The sum is as exact for `chords(every=k)`, at fewer evaluations,
            and for `manhattan()`. `layerwise()` is for attributions: without their samples there is nothing to sum.
        options: `memory_budget` (beside it, one gradient of the training data), `progress`, `checkpoint` and
            `executor`; see `ComputeOptions`.

    Returns:
        Outputs and certificate, in the dtype of X.

    Raises:
        TypeError, ValueError: The network cannot take the inputs, or the head, the rule or the path is unknown.
    """
    parsed = parse_options("reconstruct", ("accumulate",), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    require_integrable(path, "reconstruct")
    X = kernel.parse_inputs(X)
    result = with_plan(trajectory, trajectory.model_for(X), lambda net: _reconstruct(net, kernel, X, parsed))
    warn_if_uncertified("the reconstruction", result)
    return result


def _reconstruct(net: PlannedModel, kernel: PathKernel, X: Tensor, options: ComputeOptions) -> Reconstruction:
    trajectory, head = kernel.trajectory, kernel.head
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    sums, steps = sum_over_steps(net, kernel, X, options), max(1, trajectory.num_steps)
    outputs = (initial + sums.total).to(initial.dtype)
    terms = initial.abs().double() + network.abs() + sums.sizes
    return Reconstruction(
        outputs=outputs,
        network=network,
        initial=initial,
        max_error=float((outputs - network).abs().max()),
        max_residual=sums.record.max_residual,
        total_residual=float(sums.residuals.max()),
        evaluations=sums.evaluations / len(X) / steps,
        max_step_mismatch=sums.mismatches.largest,
        residual_ratio=sums.record.residual_ratio,
        mismatch_ratio=sums.mismatches.ratio,
        worst_step=sums.mismatches.worst_step,
        error_tolerance=sum_tolerance(kernel.rule, coarsest_dtype(trajectory, initial), terms, steps),
        statuses=dict(sums.record.statuses),
    )
