"""The training side of every step: what the training data and the step law say the step is."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.recording.chunks import Step
from epk_gp.recording.diagnosis import batch_gradient
from epk_gp.recording.networks import Skeleton
from epk_gp.recording.optimizers import predict_step
from epk_gp.recording.trajectory import Trajectory, batch_of, flat_weights


def training_directions(
    trajectory: Trajectory, skeleton: Skeleton, like: Tensor
) -> Iterator[tuple[Step, Float[Tensor, " P"], Float[Tensor, " P"]]]:
    """Replay the run: each step with its weights w_s and its direction, recomputed from the training gradients.

    Args:
        trajectory: The run.
        skeleton: Its network in the computation's dtype.
        like: Gives dtype and device.
    """
    momentum = torch.zeros_like(flat_weights(trajectory, 0, like))
    for step in trajectory.steps:
        w = flat_weights(trajectory, step.index, like)
        X, y, c = batch_of(trajectory, step, w)
        g = batch_gradient(skeleton, w, X, y, trajectory.loss, c)
        d, momentum = predict_step(trajectory.updates[step.index], skeleton.sizes, w, g, momentum)
        yield step, w, d
