"""How far other kernels' test gradients point away from those along the path (Figure 2, Bell et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.head import Head, apply_head, validate_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory, flat_weights, validate_inputs

_BLOCK = 8  # points that share a forward pass: each pays a backward pass through all of them


@dataclass(frozen=True, eq=False)
class Alignment:
    """Angles, in degrees, at E places along a run; row n is one output of test point n.

    The exact path kernel's test gradient at place s + t is that of w_s(t). The discrete path kernel (DPK) takes that of
    w_s instead, the neural tangent kernel (NTK) that of one weight state for the whole run.

    Attributes:
        place: s + t, (E,).
        to_step: Between the exact gradient and the step w_{s+1} - w_s, the sum of all training gradients, (n, E).
        discrete_to_step: The same with the DPK's gradient.
        tangent_to_step: The same with the NTK's.
        discrete_apart: Between the exact and the DPK's gradient.
        tangent_apart: Between the exact and the NTK's gradient.
    """

    place: Float[Tensor, " E"]
    to_step: Float[Tensor, "n E"]
    discrete_to_step: Float[Tensor, "n E"]
    tangent_to_step: Float[Tensor, "n E"]
    discrete_apart: Float[Tensor, "n E"]
    tangent_apart: Float[Tensor, "n E"]

    @property
    def discrete_error(self) -> Float[Tensor, "n E"]:
        """What the paper draws for the DPK: difference of the angles to the step, with its sign."""
        return self.discrete_to_step - self.to_step

    @property
    def tangent_error(self) -> Float[Tensor, "n E"]:
        """The same for the NTK."""
        return self.tangent_to_step - self.to_step


def gradient_alignment(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    outputs: Int64[Tensor, " n"],
    *,
    steps: Sequence[int],
    places: Sequence[float],
    tangent_state: int = -1,
    head: Head = "log_softmax",
) -> Alignment:
    """Measure the angles of test gradients along a run.

    Args:
        trajectory: Training run with S steps.
        X: n test points.
        outputs: Which output of each is differentiated.
        steps: Steps to look at, in 0 … S − 1.
        places: Where in each step, t in [0, 1].
        tangent_state: Weight state of the NTK: 0 … S, negative from the end.
        head: "logits" or "log_softmax".

    Raises:
        TypeError, ValueError: Points that the network cannot take; a step, place or output that does not exist; a
            gradient or a step that is zero and so has no direction.
    """
    validate_inputs(trajectory, X)
    validate_head(head, trajectory.num_outputs)
    S, C = trajectory.num_steps, trajectory.num_outputs
    if not steps or not all(0 <= s < S for s in steps):
        raise ValueError(f"steps must lie in 0..{S - 1}: got {list(steps)}.")
    if not places or not all(0 <= t <= 1 for t in places):
        raise ValueError(f"places must lie in [0, 1]: got {list(places)}.")
    if not 0 <= int(outputs.min()) <= int(outputs.max()) < C:
        raise ValueError(f"outputs must lie in 0..{C - 1}: got {int(outputs.min())}..{int(outputs.max())}.")
    model = trajectory.model_for(X)
    tangent = output_gradients(model, flat_weights(trajectory, tangent_state % (S + 1), X), X, outputs, head)
    # Filled in place: small results that are kept between large temporaries would fragment the memory.
    angles = X.new_empty(5, len(X), len(steps), len(places))
    for i, s in enumerate(steps):
        start, end = flat_weights(trajectory, s, X), flat_weights(trajectory, s + 1, X)
        step = (end - start)[None]
        discrete = output_gradients(model, start, X, outputs, head)
        angles[1, :, i] = angle(discrete, step)[:, None]
        angles[2, :, i] = angle(tangent, step)[:, None]
        for q, t in enumerate(places):
            exact = output_gradients(model, start + t * (end - start), X, outputs, head)
            angles[0, :, i, q] = angle(exact, step)
            angles[3, :, i, q] = angle(exact, discrete)
            angles[4, :, i, q] = angle(exact, tangent)
    place = torch.tensor([s + t for s in steps for t in places], dtype=X.dtype)
    return Alignment(place, *angles.flatten(2))


def angle(u: Float[Tensor, "*n P"], v: Float[Tensor, "*m P"]) -> Float[Tensor, "*k"]:
    """Compute the angle between vectors in degrees, to full precision also where it is small (Kahan 2006, §12).

    Raises:
        ValueError: A vector of length 0.
    """
    lengths = [x.norm(dim=-1, keepdim=True) for x in (u, v)]
    if any(bool((length == 0).any()) for length in lengths):
        raise ValueError("an angle needs vectors of positive length: got a zero vector. Leave that step or point out.")
    a, b = u / lengths[0], v / lengths[1]
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) * (180 / pi)


def output_gradients(
    model: FunctionalModel, w: Float[Tensor, " P"], X: Shaped[Tensor, "n ..."], outputs: Int64[Tensor, " n"], head: Head
) -> Float[Tensor, "n P"]:
    """Write out the gradient of one output per point, in the order of the flat weights."""
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
