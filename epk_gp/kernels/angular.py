"""The angular part J_n of the arc-cosine kernels, with derivatives of every order: Cho & Saul (2009)."""

from math import pi
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

ORDERS = (0, 1, 2)


def angular(cosine: Float[Tensor, "*n"], order: int) -> Float[Tensor, "*n"]:
    """Evaluate J_n(theta) for n = 0, 1, 2.

    Equations (4) to (7), Cho & Saul (2009):

        J_0 = pi - theta,   J_1 = sin + (pi - theta) cos,   J_2 = 3 sin cos + (pi - theta) (1 + 2 cos^2)

    Its derivatives form a ladder, dJ_n / dcos = n^2 J_{n-1}, and dJ_0 / dcos = 1 / sin. J_0 has a cusp at theta = 0 and
    pi: its derivative there is set to 0, which is that of a kernel's diagonal, where it is constant.

    Args:
        cosine: cos(theta); values beyond -1 and 1 are rounding errors, and clamped.
        order: n.
    """
    return cast(Tensor, _Angular.apply(cosine.clamp(-1, 1), order))  # type: ignore[no-untyped-call]


class _Angular(torch.autograd.Function):
    """J_n with its ladder of derivatives; autograd through acos gives infinity times zero where two points coincide."""

    @staticmethod
    def forward(ctx: Any, cosine: Tensor, order: int) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(cosine)
        angle = torch.acos(cosine)
        if order == 0:
            return pi - angle
        sine = (1 - cosine.square()).sqrt()
        if order == 1:
            return sine + (pi - angle) * cosine
        return 3 * sine * cosine + (pi - angle) * (1 + 2 * cosine.square())

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None]:
        (cosine,) = ctx.saved_tensors
        if ctx.order > 0:
            return weights * ctx.order**2 * angular(cosine, ctx.order - 1), None
        square = 1 - cosine.square()
        smooth = square > 0
        return weights * torch.where(smooth, square, torch.ones_like(square)).rsqrt() * smooth, None
