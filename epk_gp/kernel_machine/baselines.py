"""Other kernel machines.

One kernel for the whole run (Theorem 3.7, Bell et al. 2023), and the kernels before this one.

None of them is a kernel, so none is a `Kernel`. Each stands here as its paper has it, over the recorded run: gradient
flow is replaced by the straight steps, and the integral over a step by a quadrature rule.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.losses import (
    CrossEntropy,
    Head,
    NegativeLogLikelihood,
    loss_derivatives,
    resolve_head,
    sample_weights,
    soft_targets,
)
from epk_gp.core.options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.plans import single_machine_samples
from epk_gp.core.show import tracked, warn_uncertified
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, held_coefficients, network_outputs, parse_inputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.certification import coarsest_dtype, sum_tolerance
from epk_gp.kernel_machine.vanilla_gd import validate_loss_takes_outputs, validate_vanilla_gd, vanilla_lr
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.quadrature.rules import (
    AdaptiveRule,
    QuadratureRule,
    Rule,
    WeightPath,
    adaptive,
    gauss_legendre,
    left_endpoint,
    require_integrable,
    straight,
    validate_path,
    validate_rule,
)


def tangent_trajectory(trajectory: Trajectory, state: int = -1) -> Trajectory:
    """Return a run of one step of length zero, whose path kernel is the NTK (Jacot et al. 2018) at that state.

        K(x, x') = J_{w_s}(x) J_{w_s}(x')^T

    Everything that takes a run takes this one as well: `gram_block`, `EPKKernel`, `LogitGP` (whose initial and trained
    network are both f_{w_s}). Training and test copies have the same gradients.

    Args:
        trajectory: The run.
        state: s in 0 .. S, negative from the end.

    Returns:
        A run from w_s to w_s in one step of size 1, with a digest of its own.

    Raises:
        IndexError: No such state.
    """
    count = trajectory.num_steps + 1
    if not -count <= state < count:
        raise IndexError(f"state must lie in 0..{trajectory.num_steps} (or be negative): got {state}.")
    return ntk_at(trajectory, flat_state(trajectory, state % count, trajectory.states[0]))


def ntk_at(trajectory: Trajectory, w: Float[Tensor, " PQ"]) -> Trajectory:
    """Return a run of one step of length zero at any weights.

    Args:
        trajectory: Gives network, data and loss.
        w: Flat weights, and moving statistics behind them where the run has any.
    """
    hasher = hashlib.blake2b(trajectory.digest.encode(), digest_size=16)
    hasher.update(tensor_bytes(w))
    sizes, P = trajectory.model.sizes, trajectory.num_weights
    return replace(
        trajectory,
        states=(w[:P], w[:P]),
        statistics=None if trajectory.statistics is None else (w[P:], w[P:]),
        updates=(stack_coefficients([LinearStep(lr=1.0)] * len(sizes), sizes),),
        steps=(Step(index=0, lr=1.0, batch=None),),
        update_rule="none (NTK)",
        digest=hasher.hexdigest(),
    )


@dataclass(frozen=True, eq=False)
class SingleMachine:
    """f(x) = b(x) + sum_i K(x, x_i) a_i with one kernel for the whole run.

    Attributes:
        outputs: Outputs of the kernel machine, (n, C).
        network: Outputs of the trained network, (n, C).
        initial: b(x), (n, C).
        coefficients: a_i, (M, C).
        max_error: Largest |outputs - network|.
        error_tolerance: What it may be: the rule's tolerance (1e-12 for a fixed rule), and rounding.
    """

    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    initial: Float[Tensor, "n C"]
    coefficients: Float[Tensor, "M C"]
    max_error: float
    error_tolerance: float

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
    """Evaluate the single kernel machine (Theorem 3.7, Bell et al. 2023), where there is one.

        f(x) = f_{w_0}(x) + sum_i K(x, x_i) a_i,   a_i = c_i q_i,   K with eta_s = eps_s

    It needs coefficients that stay the same from step to step: cross entropy, the log-softmax head, every step on all
    points.

    Args:
        trajectory: Training run.
        X: n inputs, taken as test copies.
        head: Must be "log_softmax" for cross entropy; either for `NegativeLogLikelihood`. None follows the loss.
        rule: How each step's integral is taken; that of each chord along chords.
        path: Along which test copies move. The theorem holds along all of them, with the kernel of the path.
        options: `memory_budget` and `progress`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As `gram_block`; also where the theorem does not hold, with the reason.
    """
    parsed = parse_options("single_machine", ("checkpoint", "accumulate"), **options)
    X = parse_inputs(trajectory, X)
    validate_rule(rule)
    validate_path(path)
    require_integrable(path, "single_machine")
    head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    coefficients = _constant_coefficients(trajectory, head, trajectory.model.spec_for(X).dtype).to(X.device)
    initial = network_outputs(trajectory, X, state=0, head=head)
    network = network_outputs(trajectory, X, state=-1, head=head)
    outputs = initial.clone()
    C, itemsize = trajectory.num_outputs, initial.element_size()
    size = single_machine_samples(parsed.memory_budget, C, itemsize, len(X))
    kernel = PathKernel(trajectory, head, rule, path=path)
    training = trajectory.model.spec_for(X).cast(trajectory.inputs)
    for part in torch.arange(len(training), device=X.device).split(size):
        K = kernel.block(Points(X, is_train=False), Points(training[part], is_train=True), parsed)
        outputs += torch.einsum("ncmd,md->nc", K, coefficients[part])
    error, terms = float((outputs - network).abs().max()), initial.abs() + network.abs() + outputs.abs()
    allowed = sum_tolerance(rule, coarsest_dtype(trajectory, initial), terms, trajectory.num_steps)
    result = SingleMachine(outputs, network, initial, coefficients, error, allowed)
    if not result.certified:
        advice = "" if isinstance(rule, AdaptiveRule) else " (a fixed rule: epk_gp.adaptive() chooses its nodes)"
        finding = f"its sum misses the network's output by {error:.2e}, more than {allowed:.2e}{advice}"
        warn_uncertified(f"the single kernel machine is not certified: {finding}.")
    return result


def _constant_coefficients(trajectory: Trajectory, head: Head, dtype: torch.dtype) -> Float[Tensor, "M C"]:
    advice = "Use epk_gp.reconstruct: the ensemble over steps (Theorem 3.6) is exact there."
    loss = trajectory.loss
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            "the single kernel machine needs a loss derivative that stays constant: "
            f"that of {trajectory.loss} moves. {advice}"
        )
    validate_loss_takes_outputs(trajectory, "the single kernel machine")
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
        u = held_coefficients(trajectory, step.index)
        if (
            not trajectory.is_vanilla_gd
            or float(u.lr[0] * u.grad_scale[0]) != step.lr
            or step.sample_weights is not None
        ):
            raise ValueError(
                "the single kernel machine needs steps of plain gradient descent on the loss itself: "
                f"step {step.index} of {trajectory.update_rule} has momentum, decay, clipping, accumulated batches, "
                "preconditioned gradients, or forward passes with dropout, moving statistics or other rows. "
                f"{advice}"
            )
    reference = trajectory.inputs.new_zeros(0, trajectory.num_outputs, dtype=dtype)
    q = soft_targets(loss, trajectory.targets, reference)
    return sample_weights(loss, trajectory.targets).to(q)[:, None] * q


@dataclass(frozen=True, eq=False)
class Baseline:
    """A block, the coefficients that go with it, and how far their sum is from the network.

    Attributes:
        block: K(x_n, x_i)[c, d] of n test points and M training points.
        coefficients: a, by which it is multiplied and summed over i and d; one per training point and output, or one
            per entry of the block where they depend on the test point.
        outputs: f_{w_0} + sum, (n, C).
        network: Outputs of the trained network, (n, C).
        max_error: Largest |outputs - network|.
    """

    block: Float[Tensor, "n C M C"]
    coefficients: Float[Tensor, "M C"] | Float[Tensor, "n C M C"]
    outputs: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    max_error: float


def k_prime_block(
    trajectory: Trajectory,
    X: Inputs,
    Y: Shaped[Tensor, "m ..."] | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    head: Head | None = None,
    rule: Rule = gauss_legendre(4),
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "n C m C"]:
    """Evaluate k' on any two sets of points: the left side moves, the right side is frozen.

    Equation (13), Bell et al. (2023), summed over the steps like the exact path kernel:

        k'(x, x') = sum_s eta_s int_0^1 <grad f_{w_s(t)}(x), grad f_{w_s(0)}(x')> dt

    It is continuous but not symmetric. On test x training points it is the exact path kernel's own block, so
    `reconstruct` and `single_machine` report its error; on one set with itself it is no Gram matrix.

    Args:
        trajectory: Training run.
        X: n inputs whose gradients move.
        Y: m inputs whose gradients are frozen.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: Quadrature rule.
        options: As `gram_block`.
    """
    parsed = parse_options("k_prime_block", **options)
    return PathKernel(trajectory, head, rule).block(Points(X, is_train=False), Points(Y, is_train=True), parsed)


def chen_machine(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = "logits",
    rule: QuadratureRule = left_endpoint(),
    **options: Unpack[ComputeSettings],
) -> Baseline:
    """Evaluate the kernel machine of Chen et al. (2021), equation (18) of Bell et al. (2023).

        K(x, x_i)[c, d] = sum_s eps_s sum_q omega_q c_{s,i} |dL(f(x_i), y_i) / df_d| <grad f_c(x), grad f_d(x_i)>
        a_{i,d} = -sign(dL(f(x_i), y_i) / df_d),   all at w_s(t_q)

    The weight belongs to one of the two arguments, so K is not symmetric. The sign must not change along the run.

    Args:
        trajectory: Training run on M points.
        X: n inputs.
        head: "logits" or "log_softmax"; None follows the run's loss, as in `k_prime_block`.
        rule: Where in a step gradients are taken; the left endpoint is what a discrete run has.
        options: `memory_budget` (for the blocks of one state) and `progress`; see `ComputeOptions`.

    Returns:
        Block, signs and error. The error is that of taking the steps for gradient flow; it shrinks with them.

    Raises:
        ValueError: A loss derivative changes sign along the run; log_softmax without cross entropy.
    """
    parsed = parse_options("chen_machine", ("checkpoint", "accumulate", "executor"), **options)
    X = parse_inputs(trajectory, X)
    head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    block, signs = None, None
    for columns, K, derivative in _path_blocks(trajectory, X, head, rule, parsed):
        block = K.new_zeros(*K.shape[:2], trajectory.num_points, K.shape[3]) if block is None else block
        signs = derivative.new_zeros(trajectory.num_points, K.shape[3]) if signs is None else signs
        before, now = signs[columns], derivative.sign()
        changed = before * now < 0
        if changed.any():
            row, output = changed.nonzero()[0].tolist()
            raise ValueError(
                "the machine of Chen et al. needs loss derivatives of constant sign: that of training point "
                f"{int(columns[row])} with respect to output {output} changes. Use epk_gp.reconstruct."
            )
        signs[columns] = torch.where(now == 0, before, now)
        block.index_add_(2, columns, K * derivative.abs())
    block, signs = _nonempty(block), _nonempty(signs)
    return _baseline(trajectory, X, head, block, -signs)


def domingos_machine(
    trajectory: Trajectory,
    X: Inputs,
    *,
    head: Head | None = "logits",
    rule: QuadratureRule = left_endpoint(),
    **options: Unpack[ComputeSettings],
) -> Baseline:
    """Evaluate the kernel machine of Domingos (2020), Theorem 1: its coefficients depend on the test point.

        K(x, x_i)[c, d] = sum_s eps_s sum_q omega_q c_{s,i} <grad f_c(x), grad f_d(x_i)>        (the path kernel)
        a(x)[c, i, d]   = - sum (..) <grad f_c(x), grad f_d(x_i)> dL(f(x_i), y_i) / df_d / K(x, x_i)[c, d]

    a is the loss derivative averaged along the path with the tangent kernel for weights. These change sign, so the
    "average" can lie outside the derivatives' range, and it is infinite where the path kernel is zero.

    Arguments: as `chen_machine`.

    Returns:
        Path kernel, coefficients (n, C, M, C) and error.
    """
    parsed = parse_options("domingos_machine", ("checkpoint", "accumulate", "executor"), **options)
    X = parse_inputs(trajectory, X)
    head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    block, weighted = None, None
    for columns, K, derivative in _path_blocks(trajectory, X, head, rule, parsed):
        empty = K.new_zeros(*K.shape[:2], trajectory.num_points, K.shape[3])
        block, weighted = (empty if block is None else block), (empty.clone() if weighted is None else weighted)
        block.index_add_(2, columns, K)
        weighted.index_add_(2, columns, K * derivative)
    block, weighted = _nonempty(block), _nonempty(weighted)
    coefficients = torch.where(weighted == 0, torch.zeros_like(weighted), -weighted / block)
    return _baseline(trajectory, X, head, block, coefficients)


def _path_blocks(
    trajectory: Trajectory, X: Tensor, head: Head, rule: QuadratureRule, options: ComputeOptions
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for every node, the batch's points, eps omega c <grad, grad> with both sides there, and dL / df."""
    validate_vanilla_gd(trajectory, "this kernel machine's run")
    validate_loss_takes_outputs(trajectory, "this kernel machine")
    quiet = replace(options, progress=False)
    for step in tracked(trajectory.steps, "baseline", unit="step", shown=options.progress):
        size = vanilla_lr(trajectory, step)
        if size == 0:
            continue
        start, end = (flat_state(trajectory, s, X) for s in (step.index, step.index + 1))
        rows, y, c = batch_of(trajectory, step, start)
        columns = (torch.arange(len(rows)) if step.batch is None else step.batch).to(X.device)
        for t, omega in rule:
            here = ntk_at(trajectory, torch.lerp(start, end, t))
            pair = (Points(X, is_train=True), Points(rows, is_train=True))
            K = PathKernel(here, head, left_endpoint()).block(*pair, quiet)
            yield columns, size * omega * c[:, None] * K, _derivatives(here, rows, y, head)


def _derivatives(trajectory: Trajectory, X: Tensor, y: Tensor, head: Head) -> Float[Tensor, "M C"]:
    """Differentiate each point's loss with respect to f, the logits or their log-softmax."""
    if head == "logits":
        return loss_derivatives(trajectory.loss, network_outputs(trajectory, X), y)
    if not isinstance(trajectory.loss, CrossEntropy | NegativeLogLikelihood):
        raise ValueError(
            f'head="log_softmax" needs a loss that is a function of it, CrossEntropy: the run has {trajectory.loss}. '
            'Use head="logits".'
        )
    return -soft_targets(
        trajectory.loss, y, X.new_zeros(0, trajectory.num_outputs, dtype=trajectory.model.spec_for(X).dtype)
    )


def _nonempty(block: Tensor | None) -> Tensor:
    if block is None:
        raise ValueError("the run must have a step of positive size: it has none.")
    return block


def _baseline(trajectory: Trajectory, X: Tensor, head: Head, block: Tensor, coefficients: Tensor) -> Baseline:
    initial, network = (network_outputs(trajectory, X, state=s, head=head) for s in (0, -1))
    terms = block * coefficients
    finite = terms.where(block != 0, torch.zeros_like(terms))
    outputs = initial + finite.sum((2, 3))
    return Baseline(block, coefficients, outputs, network, float((outputs - network).abs().max()))
