"""Angles between the test gradients of the exact path kernel, the DPK and the NTK (Figure 2, Bell et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_integer, validate_labels, validate_number
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head, apply_head, resolve_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory, flat_state, parse_inputs

# Points that share a forward pass. Each point needs a backward pass of its own, which runs through the whole block.
_BLOCK = 8


@dataclass(frozen=True, eq=False)
class Alignment:
    """Angles in degrees at E times along a run. Row n belongs to one output of test point n.

    At time s + t the exact path kernel uses the test gradient at the weights w_s + t (w_{s+1} - w_s). The discrete path
    kernel (DPK) uses the gradient at w_s instead, and the neural tangent kernel (NTK) uses the gradient at one weight
    state for the whole run.

    Attributes:
        time: s + t, (E,).
        angle_exact_to_step: Angle between the exact gradient and the step w_{s+1} - w_s, (n, E).
        angle_dpk_to_step: Angle between the DPK's gradient and the step, (n, E).
        angle_ntk_to_step: Angle between the NTK's gradient and the step, (n, E).
        angle_dpk_to_exact: Angle between the DPK's gradient and the exact one, (n, E).
        angle_ntk_to_exact: Angle between the NTK's gradient and the exact one, (n, E).
    """

    time: Float[Tensor, " E"]
    angle_exact_to_step: Float[Tensor, "n E"]
    angle_dpk_to_step: Float[Tensor, "n E"]
    angle_ntk_to_step: Float[Tensor, "n E"]
    angle_dpk_to_exact: Float[Tensor, "n E"]
    angle_ntk_to_exact: Float[Tensor, "n E"]

    @property
    def dpk_error(self) -> Float[Tensor, "n E"]:
        """Angle of the DPK's gradient to the step minus that of the exact gradient, as Figure 2 draws it."""
        return self.angle_dpk_to_step - self.angle_exact_to_step

    @property
    def ntk_error(self) -> Float[Tensor, "n E"]:
        """Angle of the NTK's gradient to the step minus that of the exact gradient."""
        return self.angle_ntk_to_step - self.angle_exact_to_step


def gradient_alignment(
    trajectory: Trajectory,
    X: Inputs,
    outputs: Int64[Tensor, " n"],
    *,
    steps: Sequence[int],
    times: Sequence[float],
    ntk_state: int = -1,
    head: Head | None = None,
) -> Alignment:
    """Measure the angles of test gradients along a run.

    Args:
        trajectory: Training run with S steps.
        X: n test points.
        outputs: The output of each point that is differentiated.
        steps: Steps to measure, in 0 … S − 1.
        times: Times t in [0, 1] within each step.
        ntk_state: Index of the weight state at which the NTK is taken: 0 … S, or negative to count from the end.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".

    Raises:
        TypeError: The points are of a kind that the network cannot take, or an index or time is of the wrong kind.
        ValueError: The points have another shape than the training inputs, or a step, time or output does not exist, or
            a gradient or step is zero and has no direction.
    """
    X = parse_inputs(trajectory, X)
    head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    S, C = trajectory.num_steps, trajectory.num_outputs
    for s in (*steps, ntk_state):
        validate_integer(s, "a step or state")
    for t in times:
        validate_number(t, "a time")
    if not -S - 1 <= ntk_state <= S:
        raise ValueError(f"ntk_state must lie in 0..{S} (or be negative): got {ntk_state}.")
    validate_labels(outputs, len(X), C, name="outputs")
    outputs = outputs.long()
    if not steps or not all(0 <= s < S for s in steps):
        raise ValueError(f"steps must lie in 0..{S - 1}: got {list(steps)}.")
    if not times or not all(0 <= t <= 1 for t in times):
        raise ValueError(f"times must lie in [0, 1]: got {list(times)}.")
    model = trajectory.model_for(X)
    ntk = output_gradients(model, flat_state(trajectory, int(ntk_state) % (S + 1), X), X, outputs, head)
    # One tensor for all results: small results that are allocated between large temporaries would fragment the memory.
    angles = X.new_empty(5, len(X), len(steps), len(times))
    for i, s in enumerate(steps):
        start, end = flat_state(trajectory, s, X), flat_state(trajectory, s + 1, X)
        step = (end - start)[None, : model.num_weights]
        dpk = output_gradients(model, start, X, outputs, head)
        angles[1, :, i] = angle(dpk, step)[:, None]
        angles[2, :, i] = angle(ntk, step)[:, None]
        for q, t in enumerate(times):
            exact = output_gradients(model, start + t * (end - start), X, outputs, head)
            angles[0, :, i, q] = angle(exact, step)
            angles[3, :, i, q] = angle(exact, dpk)
            angles[4, :, i, q] = angle(exact, ntk)
    time = torch.tensor([s + t for s in steps for t in times], dtype=X.dtype)
    return Alignment(time, *angles.flatten(2))


def angle(u: Float[Tensor, "*n P"], v: Float[Tensor, "*m P"]) -> Float[Tensor, "*k"]:
    """Compute the angle between vectors in degrees, to full precision also where it is small (Kahan 2006, §12).

    Raises:
        ValueError: A vector has length 0.
    """
    lengths = [x.norm(dim=-1, keepdim=True) for x in (u, v)]
    if any(bool((length == 0).any()) for length in lengths):
        raise ValueError("an angle needs vectors of positive length: got a zero vector. Leave that step or point out.")
    a, b = u / lengths[0], v / lengths[1]
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) * (180 / pi)


def output_gradients(
    model: FunctionalModel,
    w: Float[Tensor, " PQ"],
    X: Shaped[Tensor, "n ..."],
    outputs: Int64[Tensor, " n"],
    head: Head,
) -> Float[Tensor, "n P"]:
    """Return the gradient of one output per point, in the order of the flat weights."""
    blocks = zip(X.split(_BLOCK), outputs.split(_BLOCK), strict=True)
    return torch.cat([_block_gradients(model, w, x, chosen, head) for x, chosen in blocks])


def _block_gradients(model: FunctionalModel, w: Tensor, X: Tensor, outputs: Tensor, head: Head) -> Tensor:
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
        f = apply_head(model(leaves, X), head).gather(1, outputs[:, None].to(X.device))[:, 0]
        ordered = [leaves[name] for name in model.names]
        rows = [
            torch.autograd.grad(value, ordered, retain_graph=True, allow_unused=True, materialize_grads=True)
            for value in f
        ]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
