"""Gradients of the outputs in the moving statistics, sample by sample."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents
from epk_gp.autodiff.dense import dense_jacobian
from epk_gp.autodiff.interception import InterpolatedWeights
from epk_gp.autodiff.jacobians import WeightLocation, logits_row_by_row, outputs_at, secant_derivatives
from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.torch_overrides import disable_fused_attention


def statistics_jacobian(
    net: PlannedModel, at: WeightLocation, X: Shaped[Tensor, "E ..."], cotangents: Cotangents
) -> Float[Tensor, "K E Q"]:
    """Differentiate the contracted logits of E inputs with respect to the moving statistics.

    Where the network supports interpolation, every row is evaluated with statistics of its own, so that one backward
    pass per cotangent gives the gradients of all rows.

    Args:
        net: The network.
        at: Weights and statistics of each row, `w + t_e d`.
        X: E inputs.
        cotangents: Which gradients are wanted.
    """
    model = net.model
    if not net.plan.supports_interpolation:
        with torch.no_grad(), disable_fused_attention():
            values = cotangents.of_logits(logits_row_by_row(net, at, X))
        return dense_jacobian(net, model.statistics, at.w, X, values, d=at.d, t=at.t).values
    t = torch.zeros(len(X), dtype=at.w.dtype, device=X.device) if at.t is None else at.t
    d = torch.zeros_like(at.w) if at.d is None else at.d
    start, along = at.w[model.num_weights :].detach(), d[model.num_weights :].detach()
    with torch.enable_grad(), disable_fused_attention():
        rows = (start + t[:, None] * along).requires_grad_()
        pieces = rows.split([shape.numel() for shape in model.statistic_shapes], dim=1)
        named = zip(model.statistics, pieces, model.statistic_shapes, strict=True)
        own = {name: piece.reshape(len(X), *shape) for name, piece, shape in named}
        params = model.unflatten(at.w.detach())
        moved = InterpolatedWeights(params, model.unflatten(d.detach()), t, own)
        secants = secant_derivatives(params, at, moved)
        with moved, secants:
            z = outputs_at(model, params, X, at)
        values = cotangents.of_logits(z.detach())
        if not z.requires_grad:  # no statistic is used
            return values.new_zeros(len(values), *rows.shape)
        grads = [
            torch.autograd.grad(z, rows, value, retain_graph=k + 1 < len(values), materialize_grads=True)[0]
            for k, value in enumerate(values)
        ]
    return torch.stack(grads)
