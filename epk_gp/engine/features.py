"""Per-sample gradients of the outputs, factored per layer (a x delta) or dense.

For a linear layer the gradient of output k at point e is delta_k (x) a; a convolution, or a layer used at several
positions or several times, sums such products over its positions l. Which form a layer takes is decided by counted cost
(`products_cost_less`), the same on both sides of an inner product.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from epk_gp.engine.modes import LINEAR, AlongLine, LayerCall, Tape, UnforeseenUseError, plain_math
from epk_gp.engine.plan import Plan, grads_of_calls, rows_at_a_time
from epk_gp.recording.networks import Skeleton, call, unflatten

Cotangents = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Factors:
    """A layer's gradients as sums of outer products: delta[k, e, l] (x) (a[e, l], 1 if bias).

    Attributes:
        a: Layer inputs, (E, L, n_in).
        delta: Gradients with respect to the layer's outputs, (K, E, L, n_out).
        bias: A trained bias rides along: the inputs have one more entry, 1.
        fixed_input: `a` depends on neither weights nor step.
        fixed_delta: `delta` does not depend on the weights.
    """

    a: Float[Tensor, "E L n_in"]
    delta: Float[Tensor, "K E L n_out"]
    bias: bool
    fixed_input: bool
    fixed_delta: bool


@dataclass(frozen=True, eq=False)
class Jacobian:
    """A layer's gradients, or those of several weights, written out: (K, E, P_layer)."""

    values: Float[Tensor, "K E P_layer"]


Feature = Factors | Jacobian


@dataclass(frozen=True)
class Form:
    """What the cost of a layer's form depends on, beside its shape.

    Attributes:
        pairs: K K', pairs of outputs in the block.
        products: Inner products a step costs if the layer is factored and cannot be averaged over t: Q or 1.
        fixed_head: The test side's cotangents do not depend on the weights (the logits head).
        dense: Write everything out (for networks that cannot be evaluated on a line).
    """

    pairs: int
    products: int
    fixed_head: bool = False
    dense: bool = False


@dataclass(frozen=True, eq=False)
class Place:
    """Weights at which gradients are taken: `w`, or `w + t_e d` for row e.

    Attributes:
        w: Flat weights, (P,).
        d: Flat direction, (P,), or None.
        t: (E,) with `d`.
    """

    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"] | None = None
    t: Float[Tensor, " E"] | None = None


def products_cost_less(form: Form, length: int, n_in: int, n_out: int, averaged: bool) -> bool:
    """Compare factored with written-out inner products, per pair of points and outputs (fitted costs of engine.md)."""
    products = 1 if averaged else form.products
    return products * length**2 * (n_in / form.pairs + n_out + 64) < n_in * n_out + 32


def gradients(
    skeleton: Skeleton,
    plan: Plan,
    place: Place,
    X: Shaped[Tensor, "E ..."],
    cotangents: Cotangents,
    form: Form,
    *,
    fixed_seed: bool,
    create_graph: bool = False,
) -> list[Feature]:
    """Compute the features of E inputs.

    Args:
        skeleton: The network, in the computation's dtype.
        plan: How its weights are used.
        place: The weights.
        X: E inputs.
        cotangents: Maps logits (E, C) to the K vectors (K, E, C) that the output gradients are contracted with.
        form: Decides factored or dense.
        fixed_seed: The cotangents do not depend on the logits.
        create_graph: Keep the features differentiable with respect to X. No input counts as fixed then, so that both
            sides of an inner product take the same form with or without a graph to their own points.

    Returns:
        One feature per layer, always in the same order.
    """
    weights = {name: value.detach().requires_grad_() for name, value in unflatten(skeleton, place.w).items()}
    if place.t is not None and not (form.dense or plan.on_line):
        raise ValueError("rows at different places need a network that can be evaluated on a line, or the dense form.")
    if form.dense:
        with torch.set_grad_enabled(create_graph), plain_math():
            seeds = cotangents(_logits_anywhere(skeleton, plan, place, X))
        return [dense_jacobian(skeleton, plan, skeleton.names, place, X, seeds, create_graph=create_graph)]
    with torch.enable_grad(), plain_math():
        tape = Tape(weights, plan.biases, len(X), keep_graph=create_graph)
        with _line(skeleton, weights, place), tape:
            z = call(skeleton, weights, X)
        seeds = cotangents(z if create_graph else z.detach())
        deltas = grads_of_calls(z, tape.calls, seeds, batched=plan.batched, create_graph=create_graph)
    found: list[Feature] = []
    for name, bias in plan.biases.items():
        layer = [(c, delta) for c, delta in zip(tape.calls, deltas, strict=True) if c.weight == name]
        if not layer:
            raise UnforeseenUseError(f"the layer of {name} must see all {len(X)} rows: it was not called.")
        is_last = all(c.edge.node is z.grad_fn for c, _ in layer)
        averaged = is_last and form.fixed_head
        found.append(
            _layer_feature(layer, bias is not None, weights[name].shape, form, averaged, fixed_seed and is_last)
        )
    if plan.dense:
        found.append(dense_jacobian(skeleton, plan, plan.dense, place, X, seeds, create_graph=create_graph))
    return found


def gradients_in_blocks(
    skeleton: Skeleton, plan: Plan, place: Place, X: Shaped[Tensor, "E ..."], head: str, form: Form
) -> list[Feature]:
    """Compute the features of all outputs of E inputs, as many at a time as the caches like."""
    rows = rows_at_a_time(plan)
    blocks = torch.arange(len(X), device=X.device).split(rows)
    found = []
    for part in blocks:
        here = place if place.t is None else replace(place, t=place.t[part])
        x = X if len(blocks) == 1 else X[part]
        found.append(gradients(skeleton, plan, here, x, head_cotangents(head), form, fixed_seed=head == "logits"))
    return found[0] if len(found) == 1 else [_joined(layer) for layer in zip(*found, strict=True)]


def head_cotangents(head: str) -> Cotangents:
    """Give the C cotangents of the outputs: rows of I, or of I - 1 p^T for the log-softmax head."""

    def rows(z: Tensor) -> Tensor:
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)[:, None, :].expand(-1, z.shape[0], -1)
        return eye if head == "logits" else eye - z.softmax(dim=1)

    return rows


def dense_jacobian(
    skeleton: Skeleton,
    plan: Plan,
    names: tuple[str, ...],
    place: Place,
    X: Shaped[Tensor, "E ..."],
    seeds: Float[Tensor, "K E C"],
    *,
    create_graph: bool = False,
) -> Jacobian:
    """Differentiate with respect to the named weights, sample by sample: for whatever is not a plain layer."""
    w = unflatten(skeleton, place.w)
    d = None if place.d is None else unflatten(skeleton, place.d)

    def pulled_back(x: Tensor, seed: Tensor, t: Tensor) -> Tensor:
        here = w if d is None else {name: w[name] + t * d[name] for name in w}
        others = {name: value for name, value in here.items() if name not in names}

        def outputs(inner: Mapping[str, Tensor]) -> Any:
            return functional_call(skeleton.module, {**others, **inner}, (x.unsqueeze(0),)).squeeze(0)

        pull = vjp(outputs, {name: here[name] for name in names})[1]
        (columns,) = vmap(pull)(seed)
        return torch.cat([columns[name].flatten(1) for name in names], dim=1)

    t = torch.zeros(len(X), dtype=place.w.dtype, device=X.device) if place.t is None else place.t
    with plain_math():
        if plan.mapped:
            rows = vmap(pulled_back, in_dims=(0, 1, 0), out_dims=1, chunk_size=plan.map_chunk)(X, seeds, t)
            return Jacobian(rows if create_graph else rows.detach())
        return Jacobian(_looped_jacobian(skeleton, names, w, d, X, seeds, t, create_graph=create_graph))


def _looped_jacobian(
    skeleton: Skeleton,
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
            z = call(skeleton, here, X[e : e + 1])
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


def _line(skeleton: Skeleton, weights: Mapping[str, Tensor], place: Place) -> AbstractContextManager[object]:
    if place.t is None or place.d is None:
        return nullcontext()
    return AlongLine(weights, unflatten(skeleton, place.d), place.t)


def _logits_anywhere(skeleton: Skeleton, plan: Plan, place: Place, X: Tensor) -> Tensor:
    weights = unflatten(skeleton, place.w)
    if place.t is None or place.d is None or plan.on_line:
        with _line(skeleton, weights, place):
            return call(skeleton, weights, X)
    direction = unflatten(skeleton, place.d)
    moved = ({name: w + t * direction[name] for name, w in weights.items()} for t in place.t)
    return torch.cat([call(skeleton, here, X[e : e + 1]) for e, here in enumerate(moved)])


def _layer_feature(
    layer: list[tuple[LayerCall, Tensor]], bias: bool, shape: torch.Size, form: Form, averaged: bool, fixed_delta: bool
) -> Feature:
    """Join the calls of one weight. Shapes: inputs (E, L, G, n_in), deltas (K, E, L, G, n_out) with G groups."""
    parts = [_positions(c, delta, shape) for c, delta in layer]
    length = sum(a.shape[1] for a, _ in parts)
    groups, n_in, n_out = parts[0][0].shape[2], parts[0][0].shape[3], parts[0][1].shape[4]
    fixed_input = all(c.fixed_input for c, _ in layer)
    averaged = averaged or fixed_input
    if groups == 1 and products_cost_less(form, length, n_in, n_out, averaged):
        a = torch.cat([a.squeeze(2) for a, _ in parts], dim=1)
        delta = torch.cat([delta.squeeze(3) for _, delta in parts], dim=2)
        return Factors(a, delta, bias, fixed_input, fixed_delta)
    total = _outer(*parts[0], bias)
    for a, delta in parts[1:]:
        total = total + _outer(a, delta, bias)
    return Jacobian(total)


def written_out(feature: Feature) -> Float[Tensor, "K E P_layer"]:
    """Write a layer's gradients out: weight row by row, each followed by its bias if it has one."""
    if isinstance(feature, Jacobian):
        return feature.values
    return _outer(feature.a.unsqueeze(2), feature.delta.unsqueeze(3), feature.bias)


def _joined(parts: Sequence[Feature]) -> Feature:
    """Join one layer's features of several blocks of rows."""
    factors = [part for part in parts if isinstance(part, Factors)]
    if not factors:
        return Jacobian(torch.cat([part.values for part in parts if isinstance(part, Jacobian)], dim=1))
    delta = torch.cat([part.delta for part in factors], dim=1)
    return replace(factors[0], a=torch.cat([part.a for part in factors]), delta=delta)


def feature_bytes(features: list[Feature]) -> int:
    """Count the bytes that features take."""
    return sum(f.values.nbytes if isinstance(f, Jacobian) else f.a.nbytes + f.delta.nbytes for f in features)


def _outer(a: Tensor, delta: Tensor, bias: bool) -> Tensor:
    K, E = delta.shape[:2]
    # one batched product per point and group: (K n_out, L) x (L, n_in)
    left = delta.permute(1, 3, 0, 4, 2).flatten(2, 3)  # E G (K n_out) L
    right = a.transpose(1, 2)  # E G L n_in
    if bias:
        right = torch.cat([right, right.new_ones(*right.shape[:3], 1)], dim=3)
    product = left @ right  # E G (K n_out) n_in
    rows: Tensor = product.unflatten(2, (K, -1)).permute(2, 0, 1, 3, 4)
    return rows.reshape(K, E, -1)


def _positions(layer: LayerCall, delta: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Bring a call to inputs (E, L, G, n_in) and deltas (K, E, L, G, n_out)."""
    x = layer.input
    if layer.function is LINEAR:
        return x.reshape(len(x), -1, 1, x.shape[-1]), delta.reshape(*delta.shape[:2], -1, 1, delta.shape[-1])
    groups = layer.options.get("groups", 1)
    dims = len(shape) - 2
    if dims == 1:  # a 1-d convolution is a 2-d one of height 1
        x, delta = x.unsqueeze(2), delta.unsqueeze(3)
    kernel = (1,) * (2 - dims) + tuple(shape[2:])
    stride, dilation = (_two(layer.options.get(key, 1), dims, 1) for key in ("stride", "dilation"))
    x = F.pad(x, _padding(layer.options.get("padding", 0), kernel, dilation, dims))
    patches = F.unfold(x, kernel, dilation=dilation, stride=stride)  # E (G n_in) L
    a = patches.transpose(1, 2).unflatten(2, (groups, -1))
    return a, delta.flatten(3).transpose(2, 3).unflatten(3, (groups, -1))


def _two(value: Any, dims: int, filler: int) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * dims
    values = values * dims if len(values) == 1 else values
    return (filler, values[0]) if dims == 1 else (values[0], values[1])


def _padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, int], dims: int) -> tuple[int, int, int, int]:
    if padding == "same":
        totals = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        (top, bottom), (left, right) = ((total // 2, total - total // 2) for total in totals)
        return left, right, top, bottom
    height, width = (0, 0) if padding == "valid" else _two(padding, dims, 0)
    return width, width, height, height
