"""The adjoint recursion of an update rule: one step back (docs/theory.md, section 4)."""

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.update_rules import UpdateCoefficients, apply_matrices, broadcast_to_params


def propagate(
    u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Float[Tensor, "K N P"], adjoint_state: Tensor | None
) -> tuple[Float[Tensor, "K N P"], Tensor | None]:
    """Go one step back: return the adjoint of h, and what the step before receives.

    With Phi the averaged gradients of the outputs and Psi_s = left_s^T Phi_s right_s^T, the adjoint of the momentum
    buffer is M_s = momentum_lr_s Psi_s + beta_{s+1} M_{s+1}, and that of h is H_s = one_minus_dampening_s M_s +
    lr_s Psi_s.

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
    Psi = apply_matrices(u, sizes, Phi, transposed=True)
    M = adjoint_state
    if momentum_lr.any():
        M = momentum_lr * Psi if M is None else M.addcmul_(Psi, momentum_lr)
    if M is None:
        return lr * Psi, None
    H = one_minus_dampening * M
    if lr.any():
        H.addcmul_(Psi, lr)
    return H, M.mul_(beta) if beta.any() else None
