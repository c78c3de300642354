"""The training side of a step: what the training data say the step is."""

from jaxtyping import Float
from torch import Tensor

from epk_gp.recording.diagnosis import batch_gradient
from epk_gp.recording.networks import Skeleton
from epk_gp.recording.optimizers import predict_step
from epk_gp.recording.store import Step
from epk_gp.recording.trajectory import Trajectory


def batch_of(trajectory: Trajectory, step: Step, like: Tensor) -> tuple[Tensor, Tensor]:
    """Give a step's inputs and targets in the dtype and on the device of `like`."""
    X, y = trajectory.inputs, trajectory.targets
    if step.batch is not None:
        rows = step.batch.to(X.device)
        X, y = X[rows], y[rows]
    X = X.to(device=like.device, dtype=like.dtype) if X.is_floating_point() else X.to(like.device)
    return X, y.to(like.device)


def training_direction(
    trajectory: Trajectory, step: Step, skeleton: Skeleton, w: Float[Tensor, " P"]
) -> Float[Tensor, " P"]:
    """Compute sum_i J_s(x_i)^T alpha_{s,i} from the step's batch: the step, up to rounding."""
    X, y = batch_of(trajectory, step, w)
    return predict_step(trajectory.law, batch_gradient(skeleton, w, X, y, trajectory.loss), step.size)
