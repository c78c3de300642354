"""The network's outputs along a straight training step, each row at its own place on the line."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.func import jacrev, jvp, vmap

from epk_gp.autodiff.interception import InterpolatedWeights, disable_fused_attention
from epk_gp.autodiff.plan import rows_at_a_time
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.head import Head, apply_head
from epk_gp.core.model import FunctionalModel

_FEW_PLACES = 8
_COPIES = 8  # of a forward pass: values, tangents, and both along the direction


@dataclass(frozen=True, eq=False)
class Line:
    """f along w + t d, t in [0, 1].

    Attributes:
        model: The network, in the computation's dtype.
        plan: How to differentiate it.
        w: Flat weights at t = 0, (P,).
        d: Flat direction, (P,).
        head: "logits" or "log_softmax".
        memory_budget: Bytes that an evaluation may use; blocks of rows follow from it.
    """

    model: FunctionalModel
    plan: DifferentiationPlan
    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    head: Head
    memory_budget: int


def values(line: Line, X: Shaped[Tensor, "E ..."], t: Float[Tensor, " E"]) -> Float[Tensor, "E C"]:
    """Evaluate f for row e at w + t_e d."""
    return _in_blocks(line, X, t, slopes_too=False)[0]


def directional_derivatives(
    line: Line, X: Shaped[Tensor, "E ..."], t: Float[Tensor, " E"]
) -> tuple[Float[Tensor, "E C"], Float[Tensor, "E C"]]:
    """Evaluate f and df/dt = J d, the gradient's inner product with the step, for row e at w + t_e d."""
    return _in_blocks(line, X, t, slopes_too=True)


def block_rows(line: Line) -> int:
    """Count the rows that are evaluated at a time."""
    elements = line.memory_budget // (_COPIES * line.w.element_size())
    return max(1, min(elements // line.plan.activations_per_sample, rows_at_a_time(line.plan)))


def _in_blocks(line: Line, X: Tensor, t: Tensor, *, slopes_too: bool) -> tuple[Tensor, Tensor]:
    rows = block_rows(line)
    with torch.no_grad(), disable_fused_attention():
        blocks = [_block(line, x, u, slopes_too) for x, u in zip(X.split(rows), t.split(rows), strict=True)]
    return torch.cat([f for f, _ in blocks]), torch.cat([slope for _, slope in blocks])


def _block(line: Line, X: Tensor, t: Tensor, slopes_too: bool) -> tuple[Tensor, Tensor]:
    if line.plan.supports_interpolation and (line.plan.supports_jvp or not slopes_too):
        return _shared_products(line, X, t, slopes_too)
    places, where = t.unique(return_inverse=True)
    if line.plan.supports_vmap and len(places) > _FEW_PLACES:
        return _mapped(line, X, t, slopes_too)
    f = [t.new_zeros(0)] * len(places)
    slope = list(f)
    order = [(where == k).nonzero().squeeze(1) for k in range(len(places))]
    for k, rows in enumerate(order):
        f[k], slope[k] = _at_one_place(line, X[rows], places[k], slopes_too)
    back = torch.cat(order).argsort()
    return torch.cat(f)[back], torch.cat(slope)[back]


def _shared_products(line: Line, X: Tensor, t: Tensor, slopes_too: bool) -> tuple[Tensor, Tensor]:
    weights, direction = line.model.unflatten(line.w), line.model.unflatten(line.d)
    if not slopes_too:
        with InterpolatedWeights(weights, direction, t):
            f = apply_head(line.model(weights, X), line.head)
        return f, f
    with fwAD.dual_level():
        with InterpolatedWeights(weights, direction, fwAD.make_dual(t, torch.ones_like(t))):
            z = line.model(weights, X)
        f, slope = fwAD.unpack_dual(apply_head(z, line.head))
    return f, torch.zeros_like(f) if slope is None else slope


def _mapped(line: Line, X: Tensor, t: Tensor, slopes_too: bool) -> tuple[Tensor, Tensor]:
    w, d = line.model.unflatten(line.w), line.model.unflatten(line.d)

    def outputs(u: Tensor, x: Tensor) -> Tensor:
        here = {name: w[name] + u * d[name] for name in w}
        z: Tensor = line.model.evaluate(here, x.unsqueeze(0)).squeeze(0)
        return apply_head(z, line.head)

    def both(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        if not slopes_too:
            f = outputs(u, x)
            return f, f
        if line.plan.supports_jvp:
            pair = jvp(lambda v: outputs(v, x), (u,), (torch.ones_like(u),))
            return pair[0], pair[1]
        return outputs(u, x), jacrev(outputs)(u, x)

    f, slope = vmap(both, chunk_size=line.plan.vmap_chunk_size)(X, t)
    return f, slope


def _at_one_place(line: Line, X: Tensor, t: Tensor, slopes_too: bool) -> tuple[Tensor, Tensor]:
    here = line.model.unflatten(line.w + t * line.d)
    if not slopes_too:
        f = apply_head(line.model(here, X), line.head)
        return f, f
    direction = line.model.unflatten(line.d)
    if line.plan.supports_jvp:
        with fwAD.dual_level():
            duals = {name: fwAD.make_dual(value, direction[name]) for name, value in here.items()}
            f, slope = fwAD.unpack_dual(apply_head(line.model(duals, X), line.head))
        return f, torch.zeros_like(f) if slope is None else slope
    if not line.plan.supports_double_backward:
        rows = [jvp_per_sample(line.model, here, direction, x, line.head) for x in X.split(1)]
        return torch.cat([f for f, _ in rows]), torch.cat([slope for _, slope in rows])
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in here.items()}
        f = apply_head(line.model(leaves, X), line.head)
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
    weights: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    x: Shaped[Tensor, "1 ..."],
    head: Head,
) -> tuple[Float[Tensor, "1 C"], Float[Tensor, "1 C"]]:
    """Compute f and J d at one input by one backward pass per output: works wherever training does."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        f = apply_head(model(leaves, x), head)
        directional_derivatives = []
        for value in f[0]:
            pulled = torch.autograd.grad(
                value, list(leaves.values()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            parts = [(g * direction[name]).sum() for g, name in zip(pulled, leaves, strict=True)]
            directional_derivatives.append(torch.stack(parts).sum())
    return f.detach(), torch.stack(directional_derivatives)[None]
