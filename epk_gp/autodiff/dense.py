"""A network with its plan: outputs and derivatives along a step of the weights, and dense Jacobians.

Derivatives along a step, J d, are computed in one of three ways: in forward mode for rows that share a pass at any
positions on the step; otherwise in forward mode for rows at one position, or mapped over rows; otherwise row by row,
with one backward pass per output, which works wherever training does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.func import jvp, vjp, vmap

from epk_gp.autodiff.moved_weights import MovedWeights, equal_groups
from epk_gp.autodiff.representations import DenseJacobian
from epk_gp.core.losses import Head, Loss, apply_head, loss_derivatives
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import DifferentiationPlan, MemoryPlan
from epk_gp.core.torch_overrides import disable_fused_attention, exclusive_forward_mode, forward_mode

# Up to this many different points of a segment, rows are grouped by their point, with one pass each, instead of being
# mapped over. A choice, not a measurement.
_FEW_POINTS = 8


@dataclass(frozen=True, eq=False)
class Cotangents:
    """K cotangents of the logits of every sample.

    Attributes:
        of_logits: Maps logits (E, C) to the cotangents (K, E, C).
        are_constant: Whether the cotangents do not depend on the logits.
        head: The head whose C outputs all have a cotangent; None for other cotangents.
    """

    of_logits: Callable[[Float[Tensor, "E C"]], Float[Tensor, "K E C"]]
    are_constant: bool = False
    head: Head | None = None


def all_outputs(head: Head) -> Cotangents:
    """Return the C cotangents of the outputs: rows of I, or of I - 1 p^T (docs/theory.md, section 5)."""
    return replace(combined_outputs(head, None), head=head)


def chosen_outputs(head: Head, classes: Int64[Tensor, " n"]) -> Cotangents:
    """Return one cotangent for each of n samples' own output; all n may be repeated at other weight states."""
    every = all_outputs(head).of_logits

    def rows(z: Tensor) -> Tensor:
        chosen = classes.repeat(len(z) // len(classes))
        return every(z)[chosen, torch.arange(len(z), device=z.device)][None]

    return Cotangents(rows, are_constant=head == "logits")


def combined_outputs(head: Head, coefficients: Float[Tensor, "K C"] | None) -> Cotangents:
    """Return the K cotangents of sums over the outputs of a head, each with its own coefficients; None for I."""

    def rows(z: Tensor) -> Tensor:
        V = torch.eye(z.shape[1], dtype=z.dtype, device=z.device) if coefficients is None else coefficients.to(z)
        every = V[:, None].expand(-1, len(z), -1)
        return every if head == "logits" else every - V.sum(1)[:, None, None] * z.softmax(dim=1)

    return Cotangents(rows, are_constant=head == "logits")


def weighted_loss(loss: Loss, y: Shaped[Tensor, "B ..."], c: Float[Tensor, " B"]) -> Cotangents:
    """Return one cotangent for each sample's weighted loss: c_i times its derivative in the logits."""
    return Cotangents(lambda z: (c[:, None] * loss_derivatives(loss, z, y))[None])


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A network in the computation's dtype and on its device, with its plan.

    Attributes:
        model: The network as a function of its weights.
        plan: The plan for differentiating it.
    """

    model: FunctionalModel
    plan: DifferentiationPlan

    def memory_plan(self, budget: int) -> MemoryPlan:
        """Return the memory plan that turns a budget of bytes into block sizes for this network."""
        return MemoryPlan(budget, self.itemsize, self.plan, self.model.num_weights)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.model.spec.dtype.itemsize

    @property
    def coarsest_dtype(self) -> torch.dtype:
        """The dtype whose rounding the outputs have."""
        return torch.float32 if self.plan.casts_to_float32 else self.model.spec.dtype

    def leaves(self, w: Float[Tensor, " PQ"]) -> dict[str, Tensor]:
        """Return flat weights by name, with gradients."""
        return {name: value.detach().requires_grad_() for name, value in self.model.unflatten(w).items()}


def flat_columns(net: PlannedModel, *, all_dense: bool) -> Int64[Tensor, " P"]:
    """Return the index in the flat weights of each entry of dense layer Jacobians, in their order.

    Args:
        net: The network.
        all_dense: Whether there is one dense Jacobian of all weights (`ContractionCost.all_dense`).
    """
    model, plan = net.model, net.plan
    if all_dense:
        return torch.arange(model.num_weights)
    places = dict(zip(model.names, torch.arange(model.num_weights).split(list(model.sizes)), strict=True))
    columns = []
    for name, bias in plan.bias_of.items():
        weight = places[name].view(len(places[bias or name]), -1)
        columns.append(torch.cat([weight] if bias is None else [weight, places[bias][:, None]], dim=1).flatten())
    return torch.cat([*columns, *(places[name] for name in plan.dense_params)])


def dense_jacobian(
    net: PlannedModel,
    names: tuple[str, ...],
    w: Float[Tensor, " PQ"],
    X: Shaped[Tensor, "E ..."],
    cotangents: Float[Tensor, "K E C"],
    *,
    d: Float[Tensor, " PQ"] | None = None,
    t: Float[Tensor, " E"] | None = None,
    create_graph: bool = False,
) -> DenseJacobian:
    """Differentiate the contracted logits with respect to named parameters, or moving statistics.

    Args:
        net: The network.
        names: The parameters.
        w: Flat weights, followed by moving statistics if the network has any.
        X: E inputs.
        cotangents: K cotangents of each sample's logits.
        d: Flat direction, if row e is evaluated at w + t_e d.
        t: (E,) with `d`.
        create_graph: Whether to keep the result differentiable with respect to X.
    """
    model, plan = net.model, net.plan
    t_of_rows = w.new_zeros(len(X)) if t is None else t

    def pull_back(x: Tensor, cotangent: Tensor, t_of_row: Tensor) -> Tensor:
        params = model.unflatten(w)
        if d is not None:  # by name, not as a slice of the row's weights, which torch multiplies in another order
            direction = model.unflatten(d)
            params = {name: value + t_of_row * direction[name] for name, value in params.items()}

        def outputs(inner: Mapping[str, Tensor]) -> Any:
            return model.evaluate({**params, **inner}, x.unsqueeze(0)).squeeze(0)

        pull = vjp(outputs, {name: params[name] for name in names})[1]
        (columns,) = vmap(pull)(cotangent)
        return torch.cat([columns[name].flatten(1) for name in names], dim=1)

    with disable_fused_attention():
        if plan.supports_vmap:
            # rows first: torch requires this layout for a mapped result that is the same for all rows (a parameter
            # without a gradient)
            mapped = vmap(pull_back, in_dims=(0, 1, 0), chunk_size=plan.vmap_chunk_size)(X, cotangents, t_of_rows)
            return DenseJacobian(mapped.transpose(0, 1) if create_graph else mapped.transpose(0, 1).detach())
        rows = []
        for e in range(len(X)):
            leaves = net.leaves(w if d is None else w + t_of_rows[e] * d)
            with torch.enable_grad():
                z = model(leaves, X[e : e + 1])
                rows.append(pulled_back(z, [leaves[n] for n in names], cotangents[:, e : e + 1], create_graph))
        return DenseJacobian(torch.stack(rows, dim=1))


def pulled_back(
    z: Tensor, leaves: Sequence[Tensor], cotangents: Float[Tensor, "K ..."], create_graph: bool = False
) -> Float[Tensor, "K P"]:
    """Differentiate outputs with respect to some leaves by one backward pass per cotangent."""
    pull = partial(torch.autograd.grad, z, leaves, retain_graph=True, create_graph=create_graph, materialize_grads=True)
    with torch.set_grad_enabled(create_graph):  # before 2.10 torch's zeros of an unused leaf require a gradient
        return torch.stack([torch.cat([g.reshape(-1) for g in pull(cotangent)]) for cotangent in cotangents])


def propagate_cotangents(
    outputs: Float[Tensor, "E ..."],
    places: Sequence[tuple[GradientEdge, torch.Size]],
    cotangents: Float[Tensor, "K E ..."],
    *,
    batched: bool,
    frees_graph: bool,
    create_graph: bool,
) -> list[Tensor]:
    """Propagate K cotangents back to edges of a graph: one (K, E, ...) tensor each.

    Args:
        outputs: The tensor to which the cotangents belong, usually the logits.
        places: Edges at which gradients are computed, with their shapes.
        cotangents: The cotangents.
        batched: Whether to propagate them in one call.
        frees_graph: Whether the graph is not used again.
        create_graph: Whether to keep the result differentiable.
    """
    if not places:
        return []
    edges = [edge for edge, _ in places]
    columns: list[Tensor | None]
    if batched and len(cotangents) > 1 and not create_graph:
        grads = torch.autograd.grad(
            outputs, edges, cotangents, is_grads_batched=True, retain_graph=not frees_graph, allow_unused=True
        )
        columns = [None if grad is None else grad.detach() for grad in grads]
    else:
        keeps, last = create_graph or not frees_graph, len(cotangents) - 1
        rows = [
            torch.autograd.grad(
                outputs, edges, v, retain_graph=keeps or k < last, create_graph=create_graph, allow_unused=True
            )
            for k, v in enumerate(cotangents)
        ]
        columns = [
            None if own[0] is None else own[0][None] if len(own) == 1 else torch.stack(own)
            for own in zip(*rows, strict=True)
        ]
    return [
        outputs.new_zeros(len(cotangents), *shape) if column is None else column
        for (_, shape), column in zip(places, columns, strict=True)
    ]


def graph_nodes(tensors: Sequence[Tensor]) -> Iterator[Node]:
    """Yield the nodes of a graph."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = {own for own, _ in node.next_functions if own is not None} - seen
        seen |= following
        waiting += following


def group_rows(t: Float[Tensor, " E"]) -> tuple[Float[Tensor, " G"], list[Int64[Tensor, " _"]]]:
    """Return the different points of a segment, and the rows at each of them."""
    points, index = t.unique(return_inverse=True)
    return points, [(index == k).nonzero().squeeze(1) for k in range(len(points))]


@dataclass(frozen=True, eq=False)
class WeightSegment:
    """f along w + t d, t in [0, 1], on one line or on several.

    With N inputs, pair g N + n is input n on line g.

    Attributes:
        net: The network.
        w: Flat weights at t = 0, followed by moving statistics if the network has any; or those of G lines.
        d: Flat direction, in the same form.
        head: "logits" or "log_softmax".
        memory_budget: Bytes that an evaluation may use.
    """

    net: PlannedModel
    w: Float[Tensor, "*G PQ"]
    d: Float[Tensor, "*G PQ"]
    head: Head
    memory_budget: int

    @property
    def num_lines(self) -> int:
        """Number G of lines."""
        return 1 if self.w.ndim == 1 else len(self.w)

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan that turns the budget into block sizes."""
        return self.net.memory_plan(self.memory_budget)

    def interpolated(
        self, t: Float[Tensor, " E"], params: dict[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], MovedWeights]:
        """Return the parameters for calling the network, and the mode that moves row e to t_e.

        On several lines, each has an equal group of the rows.

        Args:
            t: (E,) positions on the segment.
            params: The parameters at w, if they are already available.
        """
        unflatten, is_one = self.net.model.unflatten, self.w.ndim == 1
        params = unflatten(self.w if is_one else self.w[0]) if params is None else params
        start = None if is_one else unflatten(self.w.detach().requires_grad_(torch.is_grad_enabled()))
        return params, MovedWeights(params, len(t), start, unflatten(self.d), t)

    def passes(self, line: Int64[Tensor, " E"], size: int) -> Iterator[tuple["WeightSegment", Tensor, Tensor]]:
        """Divide rows into passes of equal groups, one per line; rows of a line with fewer rows are repeated.

        Args:
            line: The line of each row.
            size: Largest number of rows of a pass.

        Yields:
            The lines of a pass, its rows, and the positions of rows that are not repetitions.
        """
        if self.num_lines == 1:
            for rows in torch.arange(len(line), device=line.device).split(size):
                yield self, rows, rows - rows[:1]
            return
        counts, first = line.bincount(minlength=self.num_lines), 0
        by_count = counts.argsort(descending=True, stable=True)
        sizes = [size for size in counts[by_count].tolist() if size]
        while first < len(sizes):
            most, last = sizes[first], first + 1
            while last < len(sizes) and 2 * sizes[last] >= most and (last + 1 - first) * most <= size:
                last += 1
            own, first = by_count[first:last].sort().values, last
            part = self if len(own) == self.num_lines else replace(self, w=self.w[own], d=self.d[own])
            part = part if len(own) > 1 else replace(self, w=self.w[own[0]], d=self.d[own[0]])
            for rows, is_own in zip(*(v.split(size, dim=1) for v in equal_groups(line, own)), strict=True):
                yield part, rows.flatten(), is_own.flatten().nonzero().squeeze(1)

    def outputs(self, params: Mapping[str, Tensor], X: Shaped[Tensor, "E ..."]) -> Float[Tensor, "E C"]:
        """Evaluate f with given parameters."""
        return apply_head(self.net.model(params, X), self.head)


def values_at_end(segment: WeightSegment, X: Shaped[Tensor, "E ..."], *, is_start: bool) -> Float[Tensor, "E C"]:
    """Evaluate f at the starts of lines, or at their ends; each line has an equal group of the rows."""
    state, unflatten = segment.w if is_start else segment.w + segment.d, segment.net.model.unflatten
    with torch.no_grad(), disable_fused_attention():
        if segment.num_lines == 1:
            return segment.outputs(unflatten(state), X)
        params = unflatten(state[0])
        with MovedWeights(params, len(X), unflatten(state)):
            return segment.outputs(params, X)


def values(
    segment: WeightSegment, X: Shaped[Tensor, "N ..."], t: Float[Tensor, " E"], pair: Int64[Tensor, " E"] | None = None
) -> Float[Tensor, "E C"]:
    """Evaluate f at w + t_e d for each pair of a line and an input; by default for each input."""
    return _in_passes(segment, X, t, pair, differentiate=False)[0]


def directional_derivatives(
    segment: WeightSegment, X: Shaped[Tensor, "N ..."], t: Float[Tensor, " E"], pair: Int64[Tensor, " E"] | None = None
) -> tuple[Float[Tensor, "E C"], Float[Tensor, "E C"]]:
    """Evaluate f and df/dt = J d, the gradient's inner product with the step, for the same pairs as `values`."""
    return _in_passes(segment, X, t, pair, differentiate=True)


def _in_passes(
    segment: WeightSegment, X: Tensor, t: Tensor, pair: Tensor | None, *, differentiate: bool
) -> tuple[Tensor, Tensor]:
    pair, found = torch.arange(len(t), device=t.device) if pair is None else pair, list[tuple[Tensor, ...]]()
    with torch.no_grad(), disable_fused_attention():
        for part, rows, own in segment.passes(pair // len(X), segment.memory.directional_rows()):
            f, slope = _block(part, X[pair[rows] % len(X)], t[rows], differentiate)
            found.append((rows[own], f[own], slope[own]))
    rows, f, slope = (torch.cat(values) for values in zip(*found, strict=True))
    return torch.empty_like(f).index_copy_(0, rows, f), torch.empty_like(slope).index_copy_(0, rows, slope)


def _block(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Evaluate f and its slopes; f replaces the slopes if they are not requested."""
    plan = segment.net.plan
    is_fast = plan.supports_jvp or not differentiate
    # in float32 torch may use an LSTM of a library that has no forward mode
    has_fused_derivatives = not differentiate or t.dtype == torch.float64
    at_points = segment.num_lines == 1 and plan.calls_fused_functions and has_fused_derivatives
    passes_at_points = at_points and len(t.unique()) <= _FEW_POINTS
    if is_fast and plan.supports_interpolation and not passes_at_points:
        with _moving(t, differentiate) as u:
            params, moved = segment.interpolated(u)
            with moved:
                f = segment.outputs(params, X)
            return _with_slope(f, differentiate)
    points, groups = group_rows(t)
    if is_fast and plan.supports_vmap and len(points) > (1 if plan.shares_pass else _FEW_POINTS):
        return _mapped(segment, X, t, differentiate)
    results = [_at_one_point(segment, X[rows], points[k], differentiate) for k, rows in enumerate(groups)]
    order = torch.cat(groups).argsort()
    return torch.cat([f for f, _ in results])[order], torch.cat([slope for _, slope in results])[order]


@contextmanager
def _moving(t: Tensor, differentiate: bool) -> Iterator[Tensor]:
    """Yield t, with a tangent of 1 in forward mode if slopes are requested."""
    with forward_mode() if differentiate else nullcontext():
        yield fwAD.make_dual(t, torch.ones_like(t)) if differentiate else t


def _with_slope(f: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    f, slope = fwAD.unpack_dual(f) if differentiate else (f, f)
    return f, torch.zeros_like(f) if slope is None else slope


def _mapped(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Evaluate under `vmap` over rows; for a graph, whose passes compute all nodes, over the points."""
    model, graph = segment.net.model, segment.net.model.signature.graph
    w, d = model.unflatten(segment.w), model.unflatten(segment.d)

    def outputs(u: Tensor, x: Tensor) -> Tensor:
        z: Tensor = model.evaluate({name: w[name] + u * d[name] for name in w}, x)
        return apply_head(z, segment.head)

    def value_and_slope(u: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if not differentiate:
            f = outputs(u, x)
            return f, f
        pair = jvp(lambda v: outputs(v, x), (u,), (torch.ones_like(u),))
        return pair[0], pair[1]

    chunk = segment.net.plan.vmap_chunk_size
    with exclusive_forward_mode():
        if graph is None:
            f, slope = vmap(value_and_slope, chunk_size=chunk)(t, X.unsqueeze(1))
            return f.squeeze(1), slope.squeeze(1)
        (points, place), (nodes, row) = (x.unique(dim=0, return_inverse=True) for x in (t, X))
        f, slope = vmap(value_and_slope, in_dims=(0, None), chunk_size=chunk)(points, nodes)
    return f[place, row], slope[place, row]


def _at_one_point(segment: WeightSegment, X: Tensor, t: Tensor, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Evaluate rows that share their point of the segment."""
    model = segment.net.model
    if not differentiate or segment.net.plan.supports_jvp:
        with _moving(t, differentiate) as u:
            return _with_slope(segment.outputs(model.unflatten(segment.w + u * segment.d), X), differentiate)
    w, rows = segment.w + t * segment.d, list[tuple[Tensor, Tensor]]()
    for x in X.split(1):
        leaf = w.detach().requires_grad_()
        with torch.enable_grad():
            f = segment.outputs(model.unflatten(leaf), x)
            one_hot = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)[:, None]
            rows.append((f.detach(), (pulled_back(f, [leaf], one_hot) @ segment.d)[None]))
    return torch.cat([f for f, _ in rows]), torch.cat([slope for _, slope in rows])
