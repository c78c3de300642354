"""The kernels before this one, as functions: asymmetric, or with coefficients that depend on the test point.

None of them is a kernel, so none is a `Kernel`. Each stands here as its paper has it, over the recorded run: gradient
flow is replaced by the straight steps, and the integral over a step by a quadrature rule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import CrossEntropy, NegativeLogLikelihood, loss_derivatives, soft_targets
from epk_gp.core.inputs import Points
from epk_gp.core.show import tracked
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, network_outputs, parse_inputs
from epk_gp.kernel_machine.baselines import ntk_at
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.vanilla_gd import validate_loss_takes_outputs, validate_vanilla_gd, vanilla_lr
from epk_gp.quadrature.rules import QuadratureRule, Rule, gauss_legendre, left_endpoint


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
