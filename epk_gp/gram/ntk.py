"""A run of one step of length zero: its path kernel is the neural tangent kernel at that state."""

import hashlib
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_rules import LinearStep, stack_coefficients

_STATELESS = ("plan", "model")  # what is remembered of a network, not of its weights


def tangent_trajectory(trajectory: Trajectory, state: int = -1) -> Trajectory:
    """Stand still at one state of a run: the neural tangent kernel (Jacot et al. 2018) with an `EPKKernel`'s face.

        K(x, x') = J_{w_s}(x) J_{w_s}(x')^T

    Everything that takes a run takes this one: `gram_block`, `EPKKernel`, `LogitGP` (whose initial and trained network
    are both f_{w_s}). Training and test copies have the same gradients.

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
    return ntk_at(trajectory, trajectory.states[state % count])


def ntk_at(trajectory: Trajectory, w: Float[Tensor, " P"]) -> Trajectory:
    """Stand still at any weights.

    Args:
        trajectory: Gives network, data and loss.
        w: Flat weights.
    """
    hasher = hashlib.blake2b(trajectory.digest.encode(), digest_size=16)
    hasher.update(w.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    sizes = trajectory.model.sizes
    return replace(
        trajectory,
        states=(w, w),
        updates=(stack_coefficients([LinearStep(lr=1.0)] * len(sizes), sizes),),
        steps=(Step(index=0, lr=1.0, batch=None),),
        update_rule="standing still",
        digest=hasher.hexdigest(),
    )
