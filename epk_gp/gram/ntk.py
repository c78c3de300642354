"""The neural tangent kernel (NTK) at one state of a run, as the path kernel of one step of length zero."""

import hashlib
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.step import tensor_bytes
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients


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
