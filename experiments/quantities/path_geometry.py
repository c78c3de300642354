"""The geometry of a run in weight space: the line w_0 → w_S and the recorded path (Figure 8, Bell et al. 2023)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.checks import validate_integer, validate_labels
from epk_gp.core.gradients import batch_gradient
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import CrossEntropy, per_sample_losses, sample_weights
from epk_gp.core.trajectory import Trajectory, flat_state, parse_inputs, validate_trajectory
from quantities.alignment import angle


@dataclass(frozen=True, eq=False)
class LineProfile:
    """A classifier on the line w_0 + t (w_S − w_0), on which its moving statistics, if any, move as well.

    Attributes:
        t: T values of t in [0, 1].
        accuracy: Share of points that are classified correctly.
        loss: Mean loss.
        norm: L2 norm of the weights.
        slope: Derivative of the mean loss along the unit vector from w_0 to w_S.
        length: |w_S − w_0|.
    """

    t: Float[Tensor, " T"]
    accuracy: Float[Tensor, " T"]
    loss: Float[Tensor, " T"]
    norm: Float[Tensor, " T"]
    slope: Float[Tensor, " T"]
    length: float


@dataclass(frozen=True, eq=False)
class PathProfile:
    """The recorded path through its S + 1 weight states.

    Attributes:
        norm: |w_s|, (S + 1,).
        angle_to_initial: Angle between w_s and w_0 in degrees, (S + 1,).
        distance: |w_s − w_0|, (S + 1,).
        angle_to_chord: Angle between each step and the chord w_S − w_0 in degrees, (S,).
        straightness: Length of the chord over the length of the path, in (0, 1].
    """

    norm: Float[Tensor, " states"]
    angle_to_initial: Float[Tensor, " states"]
    distance: Float[Tensor, " states"]
    angle_to_chord: Float[Tensor, " S"]
    straightness: float

    @property
    def norm_change(self) -> float:
        """|w_S| / |w_0| − 1."""
        return float(self.norm[-1] / self.norm[0] - 1)


def line_profile(trajectory: Trajectory, X: Inputs, labels: Int64[Tensor, " n"], *, size: int = 51) -> LineProfile:
    """Evaluate the network on the straight line from its first to its last weights.

    Args:
        trajectory: A run with cross entropy.
        X: n points.
        labels: Classes of the points.
        size: Number of values of t, at least 2.

    Raises:
        TypeError: The points are of a kind that the network cannot take, the labels are not integers, or `size` is not
            a whole number.
        ValueError: The points have another shape than the training inputs, the labels do not fit them, or the loss is
            not cross entropy, or `size` is below 2.
    """
    X = parse_inputs(trajectory, X)
    if not isinstance(trajectory.loss, CrossEntropy):
        raise ValueError(f"a line profile needs a run with cross entropy: got {trajectory.loss}.")
    validate_integer(size, "size")
    validate_labels(labels, len(X), trajectory.num_outputs)
    labels = labels.long()
    if size < 2:
        raise ValueError(f"size must be at least 2, for both ends of the line: got {size}.")
    model = trajectory.model_for(X)
    w, end = (flat_state(trajectory, s, X) for s in (0, trajectory.num_steps))
    P = model.num_weights
    length = float((end - w)[:P].norm())
    mean = CrossEntropy()
    c = sample_weights(mean, labels)
    rows = []
    for t in torch.linspace(0, 1, int(size), dtype=w.dtype, device=w.device):
        point = w + t * (end - w)
        with torch.no_grad():
            z = torch.cat([model(model.unflatten(point), part) for part in X.split(1024)])
        accuracy = (z.argmax(1) == labels).to(w).mean()
        slope = batch_gradient(model, point, X, labels, mean, c, in_statistics=True) @ (end - w) / length
        rows.append(torch.stack([t, accuracy, per_sample_losses(mean, z, labels).mean(), point[:P].norm(), slope]))
    times, accuracy, loss, norm, slopes = torch.stack(rows, dim=1)
    return LineProfile(times, accuracy, loss, norm, slopes, length)


def path_profile(trajectory: Trajectory) -> PathProfile:
    """Measure norms, angles and lengths along the recorded path.

    Raises:
        TypeError: The object is not a `Trajectory`.
        ValueError: The initial weights are zero, or a step did not move the weights, so that an angle is not defined.
    """
    validate_trajectory(trajectory)
    first, last = trajectory.states[0], trajectory.states[trajectory.num_steps]
    chord = last - first
    norm, angle_to_initial, distance, angle_to_chord, length = [], [], [], [], 0.0
    before = first
    for s in range(trajectory.num_steps + 1):
        w = trajectory.states[s]
        norm.append(w.norm())
        angle_to_initial.append(angle(w, first))
        distance.append((w - first).norm())
        if s:
            angle_to_chord.append(angle(w - before, chord))
            length += float((w - before).norm())
        before = w
    return PathProfile(
        norm=torch.stack(norm),
        angle_to_initial=torch.stack(angle_to_initial),
        distance=torch.stack(distance),
        angle_to_chord=torch.stack(angle_to_chord),
        straightness=float(chord.norm()) / length,
    )
