"""Directional derivatives along a training step, and gradients in the moving statistics."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.func import jacrev, jvp, vmap

from epk_gp.autodiff.dense import Cotangents, PlannedModel, dense_jacobian, group_rows
from epk_gp.autodiff.forward_mode import exclusive_forward_mode, forward_mode
from epk_gp.autodiff.interception import InterpolatedWeights
from epk_gp.autodiff.jacobians import WeightLocation, logits_row_by_row, outputs_at, secant_derivatives
from epk_gp.core.losses import Head, apply_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.torch_overrides import disable_fused_attention

# Up to so many different points of a segment, rows are grouped by their point, one pass for each, instead of being
# mapped over. A choice, not a measurement.
_FEW_POINTS = 8


@dataclass(frozen=True, eq=False)
class WeightSegment:
    """f along w + t d, t in [0, 1].

    Attributes:
        net: The network.
        w: Flat weights at t = 0, and moving statistics behind them where the network has any, (P + Q,).
        d: Flat direction, (P + Q,).
        head: "logits" or "log_softmax".
        memory_budget: Bytes that an evaluation may use.
    """

    net: PlannedModel
    w: Float[Tensor, " PQ"]
    d: Float[Tensor, " PQ"]
    head: Head
    memory_budget: int

    @property
    def rows_per_kink_search(self) -> int:
        """Number of rows that are searched for kinks at a time."""
        return self.net.memory_plan(self.memory_budget).kink_search_rows()

    @property
    def rows_per_block(self) -> int:
        """Number of rows that are evaluated at a time."""
        return self.net.memory_plan(self.memory_budget).directional_rows()

    def interpolated(
        self, t: Float[Tensor, " E"], params: dict[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], InterpolatedWeights]:
        """Return the parameters to call the network with, and the mode that moves row e to t_e.

        Args:
            t: (E,) positions on the segment.
            params: The parameters at w, if they are there already.
        """
        params = self.net.model.unflatten(self.w) if params is None else params
        return params, InterpolatedWeights(params, self.net.model.unflatten(self.d), t)


def values(segment: WeightSegment, X: Shaped[Tensor, "E ..."], t: Float[Tensor, " E"]) -> Float[Tensor, "E C"]:
    """Evaluate f for row e at w + t_e d."""
    return _in_blocks(segment, X, t, differentiate=False)[0]


def directional_derivatives(
    segment: WeightSegment, X: Shaped[Tensor, "E ..."], t: Float[Tensor, " E"]
) -> tuple[Float[Tensor, "E C"], Float[Tensor, "E C"]]:
    """Evaluate f and df/dt = J d, the gradient's inner product with the step, for row e at w + t_e d."""
    return _in_blocks(segment, X, t, differentiate=True)


def _in_blocks(segment: WeightSegment, X: Tensor, t: Tensor, *, differentiate: bool) -> tuple[Tensor, Tensor]:
    rows = segment.rows_per_block
    with torch.no_grad(), disable_fused_attention():
        blocks = [_block(segment, x, u, differentiate) for x, u in zip(X.split(rows), t.split(rows), strict=True)]
    return torch.cat([f for f, _ in blocks]), torch.cat([slope for _, slope in blocks])


def _block(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    plan = segment.net.plan
    interpolates = plan.supports_interpolation and (plan.supports_jvp or not differentiate)
    if interpolates and not plan.calls_fused_functions:
        return _interpolated(segment, X, t, differentiate)
    points, groups = group_rows(t)
    if interpolates and len(points) > _FEW_POINTS:
        return _interpolated(segment, X, t, differentiate)
    if plan.shares_pass and plan.supports_mapped_passes and len(points) > 1:
        return mapped_passes(segment, X, (points, groups), differentiate=differentiate)
    if plan.supports_vmap and len(points) > _FEW_POINTS and not plan.shares_pass:
        return _mapped(segment, X, t, differentiate)
    results = [_at_one_point(segment, X[rows], points[k], differentiate) for k, rows in enumerate(groups)]
    order = torch.cat(groups).argsort()
    return torch.cat([f for f, _ in results])[order], torch.cat([slope for _, slope in results])[order]


def _interpolated(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Evaluate all rows in one forward pass: each layer is called with w and with d."""
    model = segment.net.model
    if not differentiate:
        params, moved = segment.interpolated(t)
        with moved:
            f = apply_head(model(params, X), segment.head)
        return f, f
    with forward_mode():
        params, moved = segment.interpolated(fwAD.make_dual(t, torch.ones_like(t)))
        with moved:
            z = model(params, X)
        f, slope = fwAD.unpack_dual(apply_head(z, segment.head))
    return f, torch.zeros_like(f) if slope is None else slope


def _mapped(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Evaluate row by row under `vmap`."""
    model, plan = segment.net.model, segment.net.plan
    w, d = model.unflatten(segment.w), model.unflatten(segment.d)

    def outputs(u: Tensor, x: Tensor) -> Tensor:
        here = {name: w[name] + u * d[name] for name in w}
        z: Tensor = model.evaluate(here, x.unsqueeze(0)).squeeze(0)
        return apply_head(z, segment.head)

    def value_and_slope(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if not differentiate:
            f = outputs(u, x)
            return f, f
        if plan.supports_jvp:
            pair = jvp(lambda v: outputs(v, x), (u,), (torch.ones_like(u),))
            return pair[0], pair[1]
        return outputs(u, x), jacrev(outputs)(u, x)

    with exclusive_forward_mode():
        f, slope = vmap(value_and_slope, chunk_size=plan.vmap_chunk_size)(X, t)
    return f, slope


def mapped_passes(
    segment: WeightSegment,
    X: Shaped[Tensor, "E ..."],
    grouped: tuple[Float[Tensor, " G"], list[Int64[Tensor, " _"]]],
    *,
    differentiate: bool,
) -> tuple[Float[Tensor, "E C"], Float[Tensor, "E C"]]:
    """Evaluate passes that compute the rows of all points under `vmap` over the points of the segment.

    Args:
        segment: The step, of a network that takes a graph.
        X: Node numbers.
        grouped: The different points, and the rows at each of them.
        differentiate: Differentiate along the step too; f stands in for the derivative otherwise.
    """
    model, plan = segment.net.model, segment.net.plan
    (points, groups), graph = grouped, model.signature.graph
    nodes = X if graph is None else graph.nodes.to(X.device)
    w, d = model.unflatten(segment.w), model.unflatten(segment.d)

    def outputs(u: Tensor) -> Tensor:
        return apply_head(model.evaluate({name: w[name] + u * d[name] for name in w}, nodes), segment.head)

    def value_and_slope(u: Tensor) -> tuple[Tensor, Tensor]:
        if not differentiate:
            f = outputs(u)
            return f, f
        pair = jvp(outputs, (u,), (torch.ones_like(u),))
        return pair[0], pair[1]

    with exclusive_forward_mode():
        f, slope = vmap(value_and_slope, chunk_size=plan.vmap_chunk_size)(points)
    place = torch.arange(len(points), device=X.device).repeat_interleave(
        torch.tensor([len(rows) for rows in groups], device=X.device)
    )[torch.cat(groups).argsort()]
    return f[place, X.reshape(-1)], slope[place, X.reshape(-1)]


def _at_one_point(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Evaluate rows that share their point of the segment."""
    model, plan = segment.net.model, segment.net.plan
    here = model.unflatten(segment.w + t * segment.d)
    if not differentiate:
        f = apply_head(model(here, X), segment.head)
        return f, f
    direction = model.unflatten(segment.d)
    if plan.supports_jvp:
        with forward_mode():
            duals = {name: fwAD.make_dual(value, direction[name]) for name, value in here.items()}
            f, slope = fwAD.unpack_dual(apply_head(model(duals, X), segment.head))
        return f, torch.zeros_like(f) if slope is None else slope
    if not plan.supports_double_backward:
        rows = [jvp_per_sample(model, here, direction, x, segment.head) for x in X.split(1)]
        return torch.cat([f for f, _ in rows]), torch.cat([slope for _, slope in rows])
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in here.items()}
        f = apply_head(model(leaves, X), segment.head)
        return f.detach(), jvp_via_double_vjp(f, leaves, direction)


def jvp_via_double_vjp(
    f: Float[Tensor, "E C"], leaves: Mapping[str, Tensor], direction: Mapping[str, Tensor]
) -> Float[Tensor, "E C"]:
    """Compute J d in reverse mode: differentiate v -> v^T J d with respect to v."""
    v = torch.ones_like(f, requires_grad=True)
    pulled = torch.autograd.grad(
        f, list(leaves.values()), v, create_graph=True, allow_unused=True, materialize_grads=True
    )
    value = torch.stack([(g * direction[name]).sum() for g, name in zip(pulled, leaves, strict=True)]).sum()
    (slope,) = torch.autograd.grad(value, v, allow_unused=True, materialize_grads=True)
    return slope


def jvp_per_sample(
    model: FunctionalModel,
    params: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    x: Shaped[Tensor, "1 ..."],
    head: Head,
) -> tuple[Float[Tensor, "1 C"], Float[Tensor, "1 C"]]:
    """Compute f and J d at one input by one backward pass per output: works wherever training does."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        f = apply_head(model(leaves, x), head)
        slopes = []
        for value in f[0]:
            pulled = torch.autograd.grad(
                value, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            parts = [(g * direction[name]).sum() for g, name in zip(pulled, leaves, strict=True)]
            slopes.append(torch.stack(parts).sum())
    return f.detach(), torch.stack(slopes)[None]


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
