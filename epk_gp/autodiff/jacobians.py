"""Per-sample gradients of the outputs, factored per layer (a x delta) or dense.

For a linear layer the gradient of output k at point e is delta_k (x) a; a convolution, or a layer used at several
positions or several times, sums such products over its positions l. Which form a layer takes is decided by counted cost
(`factored_is_cheaper`), the same on both sides of an inner product.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.func import vjp, vmap

from epk_gp.autodiff.interception import (
    LINEAR,
    InterpolatedWeights,
    LayerIO,
    LayerIORecorder,
    StackedWeights,
    UnsupportedParameterUseError,
    disable_fused_attention,
)
from epk_gp.autodiff.layer_io import Layer
from epk_gp.autodiff.plan import cotangents_at_a_time, grads_of_calls, rows_at_a_time
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    Feature,
    LastLayerFactors,
    factored_last_layer_is_cheaper,
    joined,
    rows_of,
)
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.model import FunctionalModel

Cotangents = Callable[[Tensor], Tensor]
_TOGETHER = 8, 256  # fewer weights at a time gain nothing; more gain nothing more


@dataclass(frozen=True, eq=False)
class WeightLocation:
    """Weights at which gradients are taken: `w`, or `w + t_e d` for row e, or `each[g]` for the g-th of G equal parts.

    Attributes:
        w: Flat weights, (P,).
        d: Flat direction, (P,), or None.
        t: (E,) with `d`.
        each: (G, P), or None.
    """

    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"] | None = None
    t: Float[Tensor, " E"] | None = None
    each: Float[Tensor, "G P"] | None = None


def gradients(
    model: FunctionalModel,
    plan: DifferentiationPlan,
    place: WeightLocation,
    X: Shaped[Tensor, "E ..."],
    cotangents: Cotangents,
    form: ContractionCost,
    *,
    fixed_seed: bool,
    head: str | None = None,
    create_graph: bool = False,
) -> list[Feature]:
    """Compute the features of E inputs.

    Args:
        model: The network, in the computation's dtype.
        plan: How its weights are used.
        place: The weights.
        X: E inputs.
        cotangents: Maps logits (E, C) to the K vectors (K, E, C) that the output gradients are contracted with.
        form: Decides factored or dense.
        fixed_seed: The cotangents do not depend on the logits.
        head: The cotangents are those of all outputs of this head (`head_cotangents`).
        create_graph: Keep the features differentiable with respect to X. No input counts as fixed then, so that both
            sides of an inner product take the same form with or without a graph to their own points.

    Returns:
        One feature per layer, always in the same order.
    """
    weights = {name: value.detach().requires_grad_() for name, value in model.unflatten(place.w).items()}
    if place.t is not None and not (form.dense or plan.supports_interpolation):
        raise ValueError("rows at different places need a network that can be evaluated on a line, or the dense form.")
    if form.dense:
        with torch.set_grad_enabled(create_graph), disable_fused_attention():
            seeds = cotangents(_logits_anywhere(model, plan, place, X))
        return [dense_jacobian(model, plan, model.names, place, X, seeds, create_graph=create_graph)]
    with torch.enable_grad(), disable_fused_attention():
        tape = LayerIORecorder(weights, plan.bias_of, len(X), keep_graph=create_graph)
        with _line(model, weights, place), tape:
            z = model(weights, X)
        seeds = cotangents(z if create_graph else z.detach())
        layers = [
            _layer(name, bias, tape.calls, weights[name].shape, z, seeds, form, fixed_seed=fixed_seed, head=head)
            for name, bias in plan.bias_of.items()
        ]
        plain = place.t is None and place.each is None and not create_graph
        calls, top, down, known = tape.calls, z, seeds, list[Tensor]()
        if plain and head is not None and ends_in_linear(z, calls):
            down, known = cotangents_before_last_linear(weights[calls[-1].weight], seeds, z, head), [seeds]
            calls, top = calls[:-1], calls[-1].source
        at_once = cotangents_at_a_time(plan, len(X), len(seeds), seeds.dtype)
        for start in range(0, len(seeds), at_once):
            part = slice(start, start + at_once)
            final = part.stop >= len(seeds)
            deltas = grads_of_calls(
                top, calls, down[part], batched=plan.supports_batched_vjp, final=final, create_graph=create_graph
            )
            for layer in layers:
                if isinstance(layer, Layer):
                    layer.take([*deltas, *(delta[part] for delta in known)])
    found = [layer.feature() if isinstance(layer, Layer) else layer for layer in layers]
    if plan.dense_params:
        found.append(dense_jacobian(model, plan, plan.dense_params, place, X, seeds, create_graph=create_graph))
    return found


def ends_in_linear(z: Tensor, calls: Sequence[LayerIO]) -> bool:
    """Whether the outputs depend on other layers through the input of a last, linear one."""
    last = calls[-1] if calls else None
    return last is not None and last.function is LINEAR and last.edge.node is z.grad_fn and not last.fixed_input


def cotangents_before_last_linear(weight: Tensor, seeds: Tensor, z: Tensor, head: str) -> Tensor:
    """Pull a head's cotangents back to the last layer's input, where they are rows of its weight: no product."""
    W = weight.detach()
    rows = W[:, None].expand(-1, len(z), -1)
    return rows - z.detach().softmax(dim=1) @ W if head == "log_softmax" else rows


def layer_jacobians_blocked(
    model: FunctionalModel,
    plan: DifferentiationPlan,
    place: WeightLocation,
    X: Shaped[Tensor, "E ..."],
    head: str,
    form: ContractionCost,
) -> list[Feature]:
    """Compute the features of all outputs of E inputs, as many at a time as the caches like."""
    rows = rows_at_a_time(plan, place.w.dtype, plan.num_outputs)
    blocks = torch.arange(len(X), device=X.device).split(rows)
    found = []
    for part in blocks:
        here = place if place.t is None else replace(place, t=place.t[part])
        x = X if len(blocks) == 1 else X[part]
        fixed = head == "logits"
        found.append(gradients(model, plan, here, x, head_cotangents(head), form, fixed_seed=fixed, head=head))
    return found[0] if len(found) == 1 else [joined(layer) for layer in zip(*found, strict=True)]


def layer_jacobians_at_weights(
    model: FunctionalModel,
    plan: DifferentiationPlan,
    weights: Iterable[Float[Tensor, " P"]],
    X: Shaped[Tensor, "n ..."],
    head: str,
    form: ContractionCost,
    *,
    dtype: torch.dtype,
    memory: int,
) -> Iterator[list[Feature]]:
    """Compute the features of all outputs of n inputs at several weights, small ones together.

    Measured, float64, steps of a 100-64-3 network with 4 nodes: together 7 times faster for 8 points, 3.4 for 128, 1.3
    for 512; a 784-128-10 network loses from 512 points on.

    Args:
        model: The network, in the computation's dtype.
        plan: How its weights are used.
        weights: Flat weights, one after the other.
        X: n inputs.
        head: Whose outputs.
        form: Decides factored or dense.
        dtype: Of the computation.
        memory: Bytes that may be used for doing several together.
    """
    broadcast_to_params = (
        4 * dtype.itemsize * (model.num_weights + len(X) * plan.activations_per_sample * (plan.num_outputs + 2))
    )
    fitting = min(rows_at_a_time(plan, dtype, plan.num_outputs) // len(X), memory // broadcast_to_params, _TOGETHER[1])
    together = plan.supports_stacking and not form.dense and fitting >= _TOGETHER[0]
    weights, at_once = iter(weights), fitting if together else 1
    while some := list(islice(weights, at_once)):
        if len(some) == 1:
            yield layer_jacobians_blocked(model, plan, WeightLocation(some[0]), X, head, form)
            continue
        rows, place = X.repeat(len(some), *[1] * (X.ndim - 1)), WeightLocation(some[0], each=torch.stack(some))
        fixed = head == "logits"
        layers = gradients(model, plan, place, rows, head_cotangents(head), form, fixed_seed=fixed, head=head)
        for start in range(0, len(rows), len(X)):
            yield [rows_of(feature, slice(start, start + len(X))) for feature in layers]


def head_cotangents(head: str) -> Cotangents:
    """Give the C cotangents of the outputs: rows of I, or of I - 1 p^T for the log-softmax head."""

    def rows(z: Tensor) -> Tensor:
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)[:, None, :].expand(-1, z.shape[0], -1)
        return eye if head == "logits" else eye - z.softmax(dim=1)

    return rows


def dense_jacobian(
    model: FunctionalModel,
    plan: DifferentiationPlan,
    names: tuple[str, ...],
    place: WeightLocation,
    X: Shaped[Tensor, "E ..."],
    seeds: Float[Tensor, "K E C"],
    *,
    create_graph: bool = False,
) -> DenseJacobian:
    """Differentiate with respect to the named weights, sample by sample: for whatever is not a plain layer."""
    w = model.unflatten(place.w)
    d = None if place.d is None else model.unflatten(place.d)

    def pulled_back(x: Tensor, seed: Tensor, t: Tensor) -> Tensor:
        here = w if d is None else {name: w[name] + t * d[name] for name in w}
        others = {name: value for name, value in here.items() if name not in names}

        def outputs(inner: Mapping[str, Tensor]) -> Any:
            return model.evaluate({**others, **inner}, x.unsqueeze(0)).squeeze(0)

        pull = vjp(outputs, {name: here[name] for name in names})[1]
        (columns,) = vmap(pull)(seed)
        return torch.cat([columns[name].flatten(1) for name in names], dim=1)

    t = torch.zeros(len(X), dtype=place.w.dtype, device=X.device) if place.t is None else place.t
    with disable_fused_attention():
        if plan.supports_vmap:
            rows = vmap(pulled_back, in_dims=(0, 1, 0), out_dims=1, chunk_size=plan.vmap_chunk_size)(X, seeds, t)
            return DenseJacobian(rows if create_graph else rows.detach())
        return DenseJacobian(_looped_jacobian(model, names, w, d, X, seeds, t, create_graph=create_graph))


def _looped_jacobian(
    model: FunctionalModel,
    names: tuple[str, ...],
    w: dict[str, Tensor],
    d: dict[str, Tensor] | None,
    X: Tensor,
    seeds: Tensor,
    t: Tensor,
    *,
    create_graph: bool,
) -> Tensor:
    rows = []
    for e in range(len(X)):
        here = {name: (w[name] if d is None else w[name] + t[e] * d[name]).detach().requires_grad_() for name in w}
        with torch.enable_grad():
            z = model(here, X[e : e + 1])
            leaves = [here[name] for name in names]
            per_output = [
                torch.autograd.grad(
                    z,
                    leaves,
                    seed,
                    retain_graph=True,
                    create_graph=create_graph,
                    allow_unused=True,
                    materialize_grads=True,
                )
                for seed in seeds[:, e : e + 1]
            ]
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in grads]) for grads in per_output]))
    return torch.stack(rows, dim=1)


def _line(
    model: FunctionalModel, weights: Mapping[str, Tensor], place: WeightLocation
) -> AbstractContextManager[object]:
    if place.each is not None:
        return StackedWeights(weights, model.unflatten_rows(place.each.detach().requires_grad_()))
    if place.t is None or place.d is None:
        return nullcontext()
    return InterpolatedWeights(weights, model.unflatten(place.d), place.t)


def _logits_anywhere(model: FunctionalModel, plan: DifferentiationPlan, place: WeightLocation, X: Tensor) -> Tensor:
    weights = model.unflatten(place.w)
    if place.t is None or place.d is None or plan.supports_interpolation:
        with _line(model, weights, place):
            return model(weights, X)
    direction = model.unflatten(place.d)
    moved = ({name: w + t * direction[name] for name, w in weights.items()} for t in place.t)
    return torch.cat([model(here, X[e : e + 1]) for e, here in enumerate(moved)])


def _layer(
    name: str,
    bias: str | None,
    calls: Sequence[LayerIO],
    shape: torch.Size,
    z: Tensor,
    seeds: Tensor,
    form: ContractionCost,
    *,
    fixed_seed: bool,
    head: str | None,
) -> "Layer | LastLayerFactors":
    """Collect the calls of one weight; a head's last layer has its gradients at once."""
    own = [(number, c) for number, c in enumerate(calls) if c.weight == name]
    if not own:
        raise UnsupportedParameterUseError(f"the layer of {name} must see all {len(z)} rows: it was not called.")
    is_last = all(c.edge.node is z.grad_fn for _, c in own)
    linear = own[0][1].function is LINEAR
    if is_last and linear and head is not None and factored_last_layer_is_cheaper(form, shape, head):
        ((_, last),) = own
        p = None if head == "logits" else z.detach().softmax(dim=1)
        x = last.input.unsqueeze(1)
        return LastLayerFactors(x, seeds.unsqueeze(2), bias is not None, last.fixed_input, fixed_seed, p)
    averaged = is_last and form.fixed_head
    return Layer(own, shape, bias is not None, form, averaged=averaged, fixed_delta=fixed_seed and is_last)
