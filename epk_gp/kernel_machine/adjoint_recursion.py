"""The adjoint recursion of an update rule: one step back (docs/theory.md, section 4)."""

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, step_coefficients
from epk_gp.optimizers.update_rules import UpdateCoefficients, apply_matrices, broadcast_to_params


def propagate_step(
    trajectory: Trajectory,
    step: Step,
    sizes: tuple[int, ...],
    Phi: Float[Tensor, "K N P"],
    adjoint_state: Tensor | None,
) -> tuple[Float[Tensor, "K N P"], Float[Tensor, "K N P"], Tensor | None]:
    """Go one step of a run back: return the adjoints of the step and of h, and what the step before receives.

    Of a run of averaged weights, whose steps are a_s (d_s + e_s) with the lead e_{s+1} = (1 - a_s) (d_s + e_s), the
    adjoint of the recorded step d_s is E_s = a_s Phi_s + (1 - a_s) E_{s+1}. It takes the place of Phi_s.

    Args:
        trajectory: The run.
        step: The step s.
        sizes: Number of weights of each of the L parameters.
        Phi: The averaged gradients of the outputs along the path, which are overwritten.
        adjoint_state: What the step after left, which is overwritten; None after the last step.

    Returns:
        E_s (Phi_s where the path is that of the trained weights), H_s, and the state for the step before.
    """
    u, average = step_coefficients(trajectory, step.index, Phi), trajectory.average
    if average is None:
        return Phi, *propagate(u, sizes, Phi, adjoint_state)
    a = float(average.coefficients[step.index])
    E = Phi.mul_(a)
    of_momentum = None
    if adjoint_state is not None:
        of_momentum = adjoint_state[0]
        E = E.add_(adjoint_state[1], alpha=1 - a)
    H, of_momentum = propagate(u, sizes, E, of_momentum)
    return E, H, torch.stack([torch.zeros_like(E) if of_momentum is None else of_momentum, E])


def propagate(
    u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Float[Tensor, "K N P"], adjoint_state: Tensor | None
) -> tuple[Float[Tensor, "K N P"], Tensor | None]:
    """Go one step back: return the adjoint of h, and what the step before receives.

    The adjoint of the momentum buffer is M_s = momentum_lr_s Phi_s + beta_{s+1} M_{s+1}, and that of h is H_s =
    one_minus_dampening_s M_s + lr_s Phi_s. Under a matrix preconditioner left_s^T Phi_s right_s^T takes the place of
    Phi_s.

    Args:
        u: The coefficients of step s.
        sizes: Number of weights of each of the L parameters.
        Phi: The adjoint of the weights after the step.
        adjoint_state: beta_{s+1} M_{s+1}, which is overwritten; None if it is zero.

    Returns:
        H_s, and beta_s M_s or None if it is zero.
    """
    coefficients = (u.momentum_lr, u.beta, u.one_minus_dampening, u.lr)
    momentum_lr, beta, one_minus_dampening, lr = (broadcast_to_params(v, sizes, Phi) for v in coefficients)
    Phi = apply_matrices(u, sizes, Phi, transposed=True)
    M = adjoint_state
    if momentum_lr.any():
        M = momentum_lr * Phi if M is None else M.addcmul_(Phi, momentum_lr)
    if M is None:
        return lr * Phi, None
    H = one_minus_dampening * M
    if lr.any():
        H.addcmul_(Phi, lr)
    return H, M.mul_(beta) if beta.any() else None
