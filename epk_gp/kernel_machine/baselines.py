"""Other kernel machines: one kernel for the whole run (Theorem 3.7, Bell et al. 2023), and the tangent kernel."""

from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.checks import ComputeSettings, parse_options
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.losses import CrossEntropy, Head, NegativeLogLikelihood, sample_weights, soft_targets
from epk_gp.core.show import Tabular
from epk_gp.core.step import tensor_bytes
from epk_gp.core.trajectory import Trajectory, flat_state, held_coefficients, parse_inputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import run_of_states
from epk_gp.kernel_machine.certificate import sum_tolerance, warn_unless_certified
from epk_gp.quadrature.rules import AdaptiveRule, Rule, WeightPath, adaptive, require_integrable, straight


def tangent_trajectory(trajectory: Trajectory, state: int = -1) -> Trajectory:
    """Return a run of one step of length zero, whose path kernel is the NTK (Jacot et al. 2018) at that state.

        K(x, x') = J_{w_s}(x) J_{w_s}(x')^T

    Every function that takes a run also takes this one: `gram_block`, `EPKKernel`, `LogitGP` (whose initial and trained
    network are both f_{w_s}). Training and test copies have the same gradients.

    Args:
        trajectory: The run.
        state: s in 0 .. S, negative from the end.

    Returns:
        A run from w_s to w_s in one step of size 1, with its own digest.

    Raises:
        IndexError: The state does not exist.
    """
    count = trajectory.num_steps + 1
    if not -count <= state < count:
        raise IndexError(f"state must lie in 0..{trajectory.num_steps} (or be negative): got {state}.")
    w = flat_state(trajectory, state % count, trajectory.states[0])
    identity = trajectory.digest.encode() + bytes(tensor_bytes(w))
    return run_of_states(trajectory, [w, w], 1.0, "none (NTK)", identity)


@dataclass(frozen=True, eq=False, repr=False)
class SingleMachine(Tabular):
    """f(x) = b(x) + sum_i K(x, x_i) a_i with one kernel for the whole run.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: b(x), (n, C).
        coefficients: a_i, (M, C).
        max_error: Largest |outputs - network|.
        error_tolerance: Largest allowed error: the rule's tolerance (1e-12 for a fixed rule), and rounding.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    coefficients: Float[Tensor, "M C"]
    max_error: float
    error_tolerance: float
    _columns = ("initial", "outputs", "network")

    @property
    def certified(self) -> bool:
        """Whether the sum is the network's output up to tolerance."""
        return self.max_error <= self.error_tolerance


def single_machine(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    **options: Unpack[ComputeSettings],
) -> SingleMachine:
    """Evaluate the single kernel machine (Theorem 3.7, Bell et al. 2023), if it exists.

        f(x) = f_{w_0}(x) + sum_i K(x, x_i) a_i,   a_i = c_i q_i,   K with eta_s = eps_s

    It needs coefficients that are the same at all steps: cross entropy, the log-softmax head, and every step on all
    points.

    Args:
        trajectory: Training run.
        X: n inputs, taken as test copies.
        head: Must be "log_softmax" for cross entropy; any for `NegativeLogLikelihood`. None follows the loss.
        rule: Quadrature rule for the integral of each step, or of each chord.
        path: The path of test copies. The theorem holds along all paths, with the kernel of the path.
        options: `memory_budget` and `progress`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `gram_block`; also if the theorem does not hold, with the reason.
    """
    parsed = parse_options("single_machine", ("checkpoint", "accumulate"), **options)
    kernel = PathKernel(trajectory, head, rule, path=path)
    require_integrable(path, "single_machine")
    X = parse_inputs(trajectory, X)
    spec = trajectory.model.spec_for(X)
    coefficients = _constant_coefficients(trajectory, kernel.head, spec.dtype).to(X.device)
    initial, network = kernel.end_outputs(X)
    outputs = initial.clone()
    block_bytes = trajectory.num_outputs**2 * initial.element_size() * len(X)  # one training point's kernel values
    size = max(1, parsed.memory_budget // (4 * block_bytes))
    training = spec.cast(trajectory.inputs)
    for part in torch.arange(len(training), device=X.device).split(size):
        K = kernel.block(Points(X, is_train=False), Points(training[part], is_train=True), **parsed.settings)
        outputs += torch.einsum("ncmd,md->nc", K, coefficients[part])
    error, terms = float((outputs - network).abs().max()), initial.abs() + network.abs() + outputs.abs()
    allowed = sum_tolerance(rule, trajectory, initial.dtype, terms)
    result = SingleMachine(outputs, network, initial, coefficients, error, allowed)
    if not result.certified:
        advice = "" if isinstance(rule, AdaptiveRule) else " (a fixed rule: epk_gp.adaptive() chooses its nodes)"
        finding = f"its sum misses the network's output by {error:.2e}, more than {allowed:.2e}{advice}"
        warn_unless_certified("the single kernel machine", [finding])
    return result


def _constant_coefficients(trajectory: Trajectory, head: Head, dtype: torch.dtype) -> Float[Tensor, "M C"]:
    """Return c_i q_i, after checking that the theorem holds."""
    advice = "Use epk_gp.reconstruct: the ensemble over steps (Theorem 3.6) is exact there."
    loss, reason = trajectory.loss, ""
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            f"the single kernel machine needs a loss derivative that stays constant: that of {loss} moves. {advice}"
        )
    if not trajectory.loss_takes_outputs:
        reason = f"a loss of the outputs (n, C) alone: {loss} takes what the network returned"
    elif head != "log_softmax" and isinstance(loss, CrossEntropy):
        reason = 'head="log_softmax": with respect to the logits the loss derivative p - y moves'
    every = torch.arange(trajectory.num_points)
    for step in () if reason else trajectory.steps:
        u, batch = held_coefficients(trajectory, step.index), step.batch
        is_plain = trajectory.is_vanilla_gd and float(u.lr[0] * u.grad_scale[0]) == step.lr
        if batch is not None and not torch.equal(batch.sort().values.cpu(), every):
            reason = f"every step to use all training points: step {step.index} used {len(batch)} of {len(every)}"
        elif not is_plain or step.sample_weights is not None:
            reason = (
                f"steps of plain gradient descent on the loss itself: step {step.index} of {trajectory.update_rule} "
                "has momentum, decay, clipping, accumulated batches, preconditioned gradients, or forward passes with "
                "dropout, moving statistics or other rows"
            )
        if reason:
            break
    if reason:
        raise ValueError(f"the single kernel machine needs {reason}. {advice}")
    q = soft_targets(loss, trajectory.targets, trajectory.inputs.new_zeros(0, trajectory.num_outputs, dtype=dtype))
    return sample_weights(loss, trajectory.targets).to(q)[:, None] * q
