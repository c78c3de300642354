"""Per-sample gradients of the outputs, layer by layer.

For a linear layer the gradient of output k at point e is delta_k (x) a: the gradient with respect to the layer's output
times the layer's input. A convolution, or a layer used at several positions or several times, sums such products over
its positions. The counted cost (`ContractionCost`) decides each layer's representation, the same on both sides of an
inner product. Other parameters have gradients at the calls in which they meet rows (`autodiff.uses`); the rest is
differentiated sample by sample (`dense_jacobian`).

A layer uses its weight at L positions for every sample. Inputs are brought to the shape (E, L, G, n_in) and output
gradients to (K, E, L, G, n_out), for E samples, K cotangents, and G groups that do not mix.

* A linear layer has one group. Its positions are the dimensions between samples and features, such as the positions of
  a sequence. A convolution's positions are those of its output; its inputs are the patches at these positions.
* A normalisation's scale and shift are G groups of one input and one output, one for every scaled number.

A weight that is used by several calls has the positions of all of them.

A max-pool passes each gradient to one position of its window, for every output. The layer's gradient is therefore a sum
over the pool's windows, and no gradient goes back through the pool, nor through a ReLU before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional as F

from epk_gp.autodiff.averages import end_of
from epk_gp.autodiff.dense import (
    Cotangents,
    PlannedModel,
    all_outputs,
    dense_jacobian,
    graph_nodes,
    group_rows,
    propagate_cotangents,
    pulled_back,
)
from epk_gp.autodiff.interception import (
    CHANNELS_LAST,
    CONVOLUTIONS,
    LAYERS,
    NORMALISATIONS,
    FunctionCall,
    ParameterInterception,
    UnsupportedParameterUseError,
    has_tensors,
    require_rows,
    windows_of,
)
from epk_gp.autodiff.moved_weights import MovedWeights
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    LayerJacobian,
    LogitsLastLayer,
    OuterProductJacobian,
    SoftmaxLastLayer,
    append_bias_column,
    concat_rows,
    sum_outer_products,
)
from epk_gp.autodiff.secants import SecantDerivatives
from epk_gp.autodiff.uses import LayerCall, ParameterUse, ParameterUses, UseBuilder
from epk_gp.core.losses import Head, apply_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import MemoryPlan, cotangents_per_pass, fits_pass, rows_per_pass
from epk_gp.core.torch_overrides import disable_fused_attention


@dataclass(frozen=True, eq=False)
class WeightLocation:
    """Weights at which Jacobians are taken: `w`, or `w + t_e d` for row e.

    They include the moving statistics after the weights, if the network has any. The Jacobians are those in the weights
    only.

    Attributes:
        w: Flat weights, (P,), or flat weights and moving statistics, (P + Q,); or G rows of them, one for each of G
            equal groups of the rows.
        d: Flat direction, in the same form as `w`, or None.
        t: (E,) with `d`.
        secant_head: The head for secants (`secant_jacobians`): each row stands for both w and w + d.
    """

    w: Float[Tensor, "*G PQ"]
    d: Float[Tensor, "*G PQ"] | None = None
    t: Float[Tensor, " E"] | None = None
    secant_head: Head | None = None

    @property
    def first(self) -> Float[Tensor, " PQ"]:
        """The weights, or the first group's weights."""
        return self.w if self.w.ndim == 1 else self.w[0]


def layer_jacobians(
    net: PlannedModel,
    at: WeightLocation,
    X: Shaped[Tensor, "E ..."],
    cotangents: Cotangents,
    cost: ContractionCost,
    *,
    create_graph: bool = False,
) -> list[LayerJacobian]:
    """Compute the layer Jacobians of E inputs.

    Args:
        net: The network.
        at: The weights. Rows at different points of a segment need a plan that supports interpolation, or dense layers.
        X: E inputs.
        cotangents: The cotangents of the requested gradients.
        cost: Decides the representations.
        create_graph: Whether to keep the result differentiable with respect to X. No input counts as constant then, so
            that both sides of an inner product take the same representation, with or without a graph to their own
            points.

    Returns:
        One Jacobian per layer, always in the same order.
    """
    model, plan = net.model, net.plan
    if cost.all_dense:
        with torch.set_grad_enabled(create_graph), disable_fused_attention():
            values = cotangents.of_logits(_logits(net, at, X))
        return [dense_jacobian(net, model.names, at.w, X, values, d=at.d, t=at.t, create_graph=create_graph)]
    with torch.enable_grad(), disable_fused_attention():
        recorded = _RecordedPass(net, at, X, cotangents, create_graph)
        jacobians = recorded.jacobians(cost)
    if plan.dense_params:
        names, values = plan.dense_params, recorded.values
        jacobians.append(dense_jacobian(net, names, at.w, X, values, d=at.d, t=at.t, create_graph=create_graph))
    return jacobians


def secant_jacobians(
    net: PlannedModel,
    segment: tuple[Float[Tensor, " PQ"], Float[Tensor, " PQ"]],
    X: Shaped[Tensor, "n ..."],
    cotangents: Cotangents,
    cost: ContractionCost,
    head: Head,
) -> tuple[Float[Tensor, "n 2 C"], list[LayerJacobian], Float[Tensor, "K n Q"]]:
    """Average the derivative of every operation, the head included, between two states (`autodiff.secants`).

    Args:
        net: The network; its plan supports interpolation.
        segment: The first state, w, and the direction to the second.
        X: n inputs.
        cotangents: The cotangents of the requested gradients, for the head's outputs.
        cost: Decides the representations.
        head: The head.

    Returns:
        The head's outputs at both states; the averaged layer Jacobians and gradients in the moving statistics.
    """
    at = WeightLocation(*segment, secant_head=head)
    with torch.enable_grad(), disable_fused_attention():
        recorded = _RecordedPass(net, at, X, cotangents, False)
        jacobians = recorded.jacobians(cost)
    if net.plan.dense_params:
        jacobians.append(_dense_secants(net, at, X, recorded.values))
    z = recorded.z
    return torch.stack([z.detach(), end_of(z)], dim=1), jacobians, torch.cat(recorded.of_statistics)


def _evaluate(
    net: PlannedModel,
    params: dict[str, Tensor],
    at: WeightLocation,
    X: Tensor,
    recorder: "_RecordedPass | None" = None,
    statistics: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, ParameterInterception]:
    """Evaluate the logits, or for secants the outputs of the cotangents, under the returned mode.

    Args:
        net: The network.
        params: Its parameters at w.
        at: The weights of the rows.
        X: E inputs.
        recorder: Receives the calls that take its parameters.
        statistics: Moving statistics of every row, which replace those at w + t_e d.
    """
    model, watch = net.model, None if recorder is None else recorder.watch
    mode: ParameterInterception
    if at.secant_head is not None and at.d is not None:
        mode = SecantDerivatives(params, model.unflatten(at.d), len(X), watch, statistics)
        with mode:
            return apply_head(model(params, X), at.secant_head), mode
    elif at.t is not None or at.w.ndim > 1:
        start = model.unflatten(at.w.detach().requires_grad_()) if at.w.ndim > 1 else None
        direction = None if at.d is None else model.unflatten(at.d)
        mode = MovedWeights(params, len(X), start, direction, at.t, watch, statistics)
    else:
        observed = set[str]() if recorder is None else recorder.observed
        mode = ParameterInterception({name: params[name] for name in observed}, watch)
    with mode if mode.name_of else nullcontext():
        return model(params, X), mode


def _logits(net: PlannedModel, at: WeightLocation, X: Tensor) -> Float[Tensor, "E C"]:
    """Evaluate the logits at each row's weights, even if the network does not support interpolation."""
    model = net.model
    if at.t is None or at.d is None or net.plan.supports_interpolation:
        return _evaluate(net, model.unflatten(at.w), at, X)[0]
    points, groups = group_rows(at.t) if net.plan.shares_pass else (at.t, torch.arange(len(X)).split(1))
    parts = [model(model.unflatten(at.w + t * at.d), X[rows]) for t, rows in zip(points, groups, strict=True)]
    return torch.cat(parts)[torch.cat([*groups]).argsort()]


def _dense_secants(net: PlannedModel, at: WeightLocation, X: Tensor, values: Tensor) -> DenseJacobian:
    """Average the derivatives in the dense parameters, row by row."""
    parts = []
    for row in torch.arange(len(X), device=X.device).split(1):
        params = net.leaves(at.w)
        with torch.enable_grad(), disable_fused_attention():
            z, _ = _evaluate(net, params, at, X[row])
            parts.append(pulled_back(z, [params[name] for name in net.plan.dense_params], values[:, row]))
    return DenseJacobian(torch.stack(parts, dim=1))


def layer_jacobians_blocked(
    net: PlannedModel, at: WeightLocation, X: Shaped[Tensor, "E ..."], head: Head, cost: ContractionCost
) -> list[LayerJacobian]:
    """Compute the layer Jacobians of all outputs of E inputs, in blocks sized for the CPU cache."""
    blocks = torch.arange(len(X), device=X.device).split(rows_per_pass(net.plan, net.itemsize, net.plan.num_outputs))
    parts = []
    for rows in blocks:
        here = at if at.t is None else replace(at, t=at.t[rows])
        parts.append(layer_jacobians(net, here, X if len(blocks) == 1 else X[rows], all_outputs(head), cost))
    return concat_rows(parts)


def joined_jacobians(
    net: PlannedModel,
    weights: Iterable[Float[Tensor, " PQ"]],
    X: Shaped[Tensor, "n ..."],
    head: Head,
    cost: ContractionCost,
    memory: MemoryPlan,
) -> Iterator[tuple[int, list[LayerJacobian]]]:
    """Compute the layer Jacobians of all outputs of n inputs at several weights, several weights at a time.

    Measured, float64, 100-64-3 network: 7 times faster for 8 points, 3.4 for 128, 1.3 for 512; 784-128-10 is slower
    there.

    Args:
        net: The network.
        weights: Flat weights, one state after the other.
        X: n inputs.
        head: The head whose outputs are differentiated.
        cost: Decides the representations.
        memory: The memory plan, which limits how many are computed together.

    Yields:
        The number of weights, and the layer Jacobians of n rows for each of them.
    """
    can_stack = net.plan.supports_stacking and not cost.all_dense
    weights, at_once = iter(weights), memory.stacked_weights(len(X)) if can_stack else 1
    while batch := list(islice(weights, at_once)):
        if len(batch) == 1:
            yield 1, layer_jacobians_blocked(net, WeightLocation(batch[0]), X, head, cost)
            continue
        rows = X.repeat(len(batch), *[1] * (X.ndim - 1))
        yield len(batch), layer_jacobians(net, WeightLocation(torch.stack(batch)), rows, all_outputs(head), cost)


def statistics_jacobian(
    net: PlannedModel, at: WeightLocation, X: Shaped[Tensor, "E ..."], cotangents: Cotangents
) -> Float[Tensor, "K E Q"]:
    """Differentiate the contracted logits of E inputs with respect to the moving statistics.

    If the network supports interpolation, every row is evaluated with its own statistics, so that one backward pass per
    cotangent gives the gradients of all rows. Arguments: as in `layer_jacobians`.
    """
    model = net.model
    if not net.plan.supports_interpolation:
        with torch.no_grad(), disable_fused_attention():
            values = cotangents.of_logits(_logits(net, at, X))
        return dense_jacobian(net, model.statistics, at.w, X, values, d=at.d, t=at.t).values
    if at.t is None:
        at = replace(at, d=torch.zeros_like(at.w), t=at.w.new_zeros(len(X)))
    with torch.enable_grad(), disable_fused_attention():
        rows, own = _statistics_of_rows(model, at)
        z, _ = _evaluate(net, model.unflatten(at.first.detach()), at, X, statistics=own)
        values = cotangents.of_logits(z.detach())
        if not z.requires_grad:  # no statistic is used
            return values.new_zeros(len(values), *rows.shape)
        return pulled_back(z, [rows], values).view(len(values), *rows.shape)


def _statistics_of_rows(model: FunctionalModel, at: WeightLocation) -> tuple[Float[Tensor, "E Q"], dict[str, Tensor]]:
    """Return the moving statistics of every row, to be differentiated, and the same by name."""
    w, d = (torch.zeros_like(at.w) if value is None else value.detach() for value in (at.w, at.d))
    t, P = w.new_zeros(1) if at.t is None else at.t, model.num_weights
    w, d = (v[P:] if v.ndim == 1 else v[:, P:].repeat_interleave(len(t) // len(v), dim=0) for v in (w, d))
    rows = (w + t[:, None] * d).requires_grad_()
    pieces = rows.split([shape.numel() for shape in model.statistic_shapes], dim=1)
    named = zip(model.statistics, pieces, model.statistic_shapes, strict=True)
    return rows, {name: piece.reshape(len(t), *shape) for name, piece, shape in named}


class _RecordedPass:
    """A forward pass with the recorded calls of the layers, and the cotangents of its outputs.

    Arguments: as in `layer_jacobians`.
    """

    def __init__(
        self, net: PlannedModel, at: WeightLocation, X: Tensor, cotangents: Cotangents, create_graph: bool
    ) -> None:
        self.net, self.at, self.cotangents, self.create_graph = net, at, cotangents, create_graph
        self.bias_of, self.num_rows = net.plan.bias_of, len(X)
        self.observed = {*self.bias_of, *(bias for bias in self.bias_of.values() if bias is not None)}
        self.calls = list[LayerCall | ParameterUse]()
        self.params, self.statistics, own = net.leaves(at.first), None, None
        self.of_statistics = list[Tensor]()  # gradients, for some cotangents at a time
        if at.secant_head is not None:
            self.statistics, own = _statistics_of_rows(net.model, replace(at, t=at.w.new_zeros(len(X))))
        self.z, self.mode = _evaluate(net, self.params, at, X, self, own)
        self.values = cotangents.of_logits(self.z if create_graph else self.z.detach())

    def watch(self, call: FunctionCall | None, result: Any) -> None:
        """Record a call of a layer, or one in which tensors made of parameters meet rows."""
        if call is None or not has_tensors(result):  # a shape or a dtype
            return
        weight, bias = (name if name in self.observed else None for name in map(call.names.get, ("weight", "bias")))
        held = zip((weight, bias), ("weight", "bias"), strict=True)
        are_whole = all(name is None or call.held[slot] is self.params[name] for name, slot in held)
        if weight is None or call.function not in LAYERS or not are_whole or self.bias_of.get(weight, weight) != bias:
            self.calls += self.uses.seen(call, result)
            return
        x = call.input
        require_rows(x, result, self.num_rows, weight)
        is_constant = not self.create_graph and not x.requires_grad and not call.statistics
        kept = x if self.create_graph else x.detach()
        edge = get_gradient_edge(result)
        self.calls.append(LayerCall(call, (weight,), kept, is_constant, result.shape, edge))

    @cached_property
    def uses(self) -> ParameterUses:
        """The follower of parameters with other uses than in layers."""
        return ParameterUses({name: self.params[name] for name in self.observed}, self.num_rows)

    def jacobians(self, cost: ContractionCost) -> list[LayerJacobian]:
        """Compute the Jacobian of every layer."""
        layers = [self._start_layer(name, cost) for name in self.bias_of]
        builders = [layer for layer in layers if not isinstance(layer, LayerJacobian)]
        for output_grads in self._backward():
            for builder in builders:
                builder.add_cotangents(output_grads)
        del self.mode  # it refers to the weights and this object: a reference cycle would delay freeing memory
        return [layer if isinstance(layer, LayerJacobian) else layer.build() for layer in layers]

    def _start_layer(self, name: str, cost: ContractionCost) -> "LayerJacobianBuilder | UseBuilder | LayerJacobian":
        """Collect the calls of one parameter; the last layer of a head returns its Jacobian at once."""
        every = [(number, call) for number, call in enumerate(self.calls) if name in call.names]
        if not every:
            raise UnsupportedParameterUseError(
                f"the layer of {name} must see all {self.num_rows} rows: it was not called."
            )
        own = [(number, call) for number, call in every if isinstance(call, LayerCall)]
        if len(own) < len(every):
            weight, uses = self.params[name], dict[int, ParameterUse]()
            for number, call in every:
                if isinstance(call, LayerCall):
                    call = ParameterUse(weight, call.names, call.call, call.shape, call.edge)
                uses[number] = call
            options = {"create_graph": self.create_graph, "keeps_factors": cost.keeps_factors}
            return UseBuilder(weight, [*uses.items()], **options)
        head, last = self.cotangents.head, own[-1][1]
        is_linear_last = self.are_last(own) and last.call.function is F.linear
        if is_linear_last and head and cost.factored_last_layer_is_cheaper(self.params[name].shape, head):
            inputs = last.input if self.bias_of[name] is None else append_bias_column(last.input)
            if head == "logits":
                return LogitsLastLayer(inputs, self.z.shape[1])
            p, is_constant = self.z.detach().softmax(dim=1), last.input_is_constant
            return SoftmaxLastLayer(inputs[:, None], self.values.unsqueeze(2), False, is_constant, False, p)
        builder = LayerJacobianBuilder(self, name, own, cost)
        if self.net.plan.supports_pool_windows and not self.create_graph and self.at.secant_head is None:
            self._see_through_pool(builder, cost)
        return builder

    def are_last(self, calls: Sequence[tuple[int, LayerCall]]) -> bool:
        """Return whether the network returns the results of these calls."""
        return all(call.edge.node is self.z.grad_fn for _, call in calls)

    @cached_property
    def _users(self) -> "_Users":
        """The users of the outputs of each node of the graph: the node and the number of the output, for each use."""
        users: _Users = defaultdict(list)
        for node in graph_nodes([self.z]):
            for source, number in node.next_functions:
                if source is not None:
                    users[source].append((node, number))
        return users

    def _see_through_pool(self, builder: "LayerJacobianBuilder", cost: ContractionCost) -> None:
        """Let gradients end at a max-pool that is the only user of a convolution's output, if that costs less.

        The convolution must be the only call of its weight, without groups, and its gradients dense.
        """
        (number, layer), *others = builder.calls
        if others or builder.is_factored or builder.num_groups > 1 or layer.call.function not in CONVOLUTIONS:
            return
        if (windows := _pool_windows(self._users, layer)) is None:
            return
        edge, positions, _ = windows
        num_outputs = self.net.plan.num_outputs  # the verified number
        num_cotangents = num_outputs if cost.tries_pool_windows else min(len(self.values), num_outputs)
        collected = builder.inputs[0].shape[3] * positions.numel()  # versus the numbers that go back through the pool
        if collected <= num_cotangents * layer.shape.numel() and fits_pass(collected, self.net.itemsize):
            builder.see_through(windows)
            self.calls[number] = replace(layer, edge=edge, shape=positions.shape)

    def _backward(self) -> Iterator[list[Tensor]]:
        """Propagate the cotangents to the outputs of all calls, as many at a time as fit: (K, E, ...) for each call.

        A last, linear layer needs no matrix product: the cotangents at its input are rows of its weight.
        """
        calls, outputs, values, known = self.calls, self.z, self.values, list[Tensor]()
        head, has_secants = self.cotangents.head, self.at.secant_head is not None
        last = calls[-1] if calls and isinstance(calls[-1], LayerCall) else None
        is_one_point = self.at.t is None and self.at.w.ndim == 1 and not has_secants
        ends_in_linear = last is not None and last.call.function is F.linear and last.edge.node is self.z.grad_fn
        if last and head and ends_in_linear and not last.input_is_constant and is_one_point and not self.create_graph:
            W = self.params[last.names[0]].detach()
            rows = W[:, None].expand(-1, self.num_rows, -1)
            values, known = rows - self.z.detach().softmax(dim=1) @ W if head == "log_softmax" else rows, [values]
            calls, outputs = calls[:-1], last.call.input
        plan, places = self.net.plan, [(call.edge, call.shape) for call in calls]
        if self.statistics is not None:
            places.append((get_gradient_edge(self.statistics), self.statistics.shape))
        size = cotangents_per_pass(plan, self.net.itemsize, self.num_rows, len(values))
        for start in range(0, len(values), size):
            part = slice(start, start + size)
            grads = propagate_cotangents(
                outputs,
                places,
                values[part],
                batched=plan.supports_batched_vjp and not has_secants,
                frees_graph=part.stop >= len(values),
                create_graph=self.create_graph,
            )
            if has_secants:
                *grads, of_statistics = grads
                self.of_statistics.append(of_statistics)
            yield [*grads, *(grad[part] for grad in known)]


_POOLS = ("MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0")
_Users = defaultdict[Node, list[tuple[Node, int]]]


# The windows of a max-pool over a convolution's output: the edge for the gradient in the pool's output; the index of
# the largest entry of each window in the convolution's output, (E, channels, *windows); and the output of a ReLU
# between both, (E, channels, *positions), or None.
_PoolWindows = tuple[GradientEdge, Int64[Tensor, "E channels ..."], Float[Tensor, "E channels ..."] | None]


def _pool_windows(users: _Users, layer: LayerCall) -> _PoolWindows | None:
    """Find a max-pool that is the only user of a convolution's output, or of the output of a ReLU after it."""
    relu, pool = None, _only_user(users, layer.edge.node)
    if pool is not None and pool.name() == "ReluBackward0":
        relu, pool = pool, _only_user(users, pool)
    if pool is None or pool.name() not in _POOLS:
        return None
    # torch's names for saved values of nodes: under other names, verification finds that windows are unavailable
    positions: Tensor = pool._saved_result1  # type: ignore[attr-defined]
    if positions.dim() != len(layer.shape):
        return None
    outputs: Tensor | None = None if relu is None else relu._saved_result.detach()  # type: ignore[attr-defined]
    return GradientEdge(pool, 0), positions, outputs


def _only_user(users: _Users, node: Node) -> Node | None:
    """Return the node that uses a node's first output, if it is the only user of any output."""
    return users[node][0][0] if [number for _, number in users[node]] == [0] else None


class LayerJacobianBuilder:
    """Builds one weight's Jacobian from the gradients of its calls' outputs, some cotangents at a time.

    Args:
        recorded: The pass.
        name: The weight.
        calls: Its calls, each with its number among all calls.
        cost: Decides between factored and dense.
    """

    def __init__(
        self, recorded: _RecordedPass, name: str, calls: Sequence[tuple[int, LayerCall]], cost: ContractionCost
    ) -> None:
        self.has_secants = recorded.at.secant_head is not None
        self.calls, self.has_bias, is_last = calls, recorded.bias_of[name] is not None, recorded.are_last(calls)
        self.cotangent_is_constant = is_last and recorded.cotangents.are_constant
        first, shape = calls[0][1], recorded.params[name].shape
        scales = first.call.function in NORMALISATIONS
        is_convolution = first.call.function in CONVOLUTIONS
        self.num_groups: int = shape.numel() if scales else first.options.get("groups", 1) if is_convolution else 1
        self.input_is_constant = all(call.input_is_constant for _, call in calls)
        self.n_in, self.n_out = (1, 1) if scales else (shape[1:].numel(), shape[0] // self.num_groups)
        num_positions = sum(call.shape[1:].numel() // (self.num_groups * self.n_out) for _, call in calls)
        # with constant cotangents of the test side, the last layer's inputs can be averaged over t; the training side,
        # whose cotangents may vary, must make the same choice
        is_averaged = (is_last and cost.cotangents_are_constant) or self.input_is_constant
        self.is_factored = self.num_groups == 1 and (
            (cost.keeps_factors and not is_convolution)  # a convolution's patches take more than their products
            or cost.factored_is_cheaper(
                num_positions, self.n_in, self.n_out, is_averaged=is_averaged, is_constant=self.input_is_constant
            )
        )
        self.inputs = [self._inputs_at_positions(call, shape[2:], recorded.mode) for _, call in calls]
        self.parts: list[Tensor] = []
        self.patches: Tensor | None = None

    def _inputs_at_positions(self, layer: LayerCall, kernel: torch.Size, mode: ParameterInterception) -> Tensor:
        """Bring a call's inputs to (E, L, G, n_in), with the 1 of a bias if they are dense."""
        function, appends = layer.call.function, self.has_bias and not self.is_factored
        x = layer.normalised(mode) if function in NORMALISATIONS and not self.has_secants else layer.input
        if function in CHANNELS_LAST:
            x = x.reshape(len(x), -1, self.num_groups, self.n_in)
            return append_bias_column(x) if appends else x
        windows = x if function in NORMALISATIONS else windows_of(x, layer.options, kernel)
        patches = windows.reshape(len(x), self.num_groups, self.n_in, -1)
        if appends:
            patches = torch.cat([patches, x.new_ones(len(x), self.num_groups, 1, patches.shape[3])], dim=2)
        return patches.permute(0, 3, 1, 2)

    def _grads_at_positions(self, layer: LayerCall, grads: Tensor) -> Tensor:
        """Bring a call's output gradients to (K, E, L, G, n_out)."""
        if layer.call.function in CHANNELS_LAST:
            return grads.reshape(*grads.shape[:2], -1, self.num_groups, self.n_out)
        positions = grads.reshape(*grads.shape[:2], self.num_groups * self.n_out, -1).transpose(2, 3)
        return positions.view(*positions.shape[:3], self.num_groups, self.n_out)

    def see_through(self, windows: _PoolWindows) -> None:
        """Use the gradients of a max-pool's output from now on, instead of the convolution's.

        Each channel's windows see some of the convolution's patches; zeros where the ReLU returned zero.
        """
        _, places, relu = windows
        x, positions = self.inputs[0].squeeze(2).mT, places.flatten(2)
        (E, channels, W), n_in = positions.shape, x.shape[1]
        spread = x.unsqueeze(1).expand(E, channels, -1, -1)
        self.patches = spread.gather(3, positions.unsqueeze(2).expand(E, channels, n_in, W))
        if relu is not None:
            is_zero = relu.flatten(2).gather(2, positions) <= 0
            self.patches.masked_fill_(is_zero.unsqueeze(2), 0)

    def add_cotangents(self, output_grads: Sequence[Tensor]) -> None:
        """Add the next cotangents' gradients with respect to the outputs of all calls."""
        if self.patches is not None:  # one product per point and channel, for all cotangents
            grads = output_grads[self.calls[0][0]].flatten(3)
            product = grads.permute(1, 2, 0, 3) @ self.patches.mT  # E channels K n_in
            self.parts.append(product.permute(2, 0, 1, 3).flatten(2))
            return
        own = [self._grads_at_positions(call, output_grads[number]) for number, call in self.calls]
        if self.is_factored:
            self.parts.append((own[0] if len(own) == 1 else torch.cat(own, dim=2)).squeeze(3))
            return
        dense = [sum_outer_products(a, delta) for a, delta in zip(self.inputs, own, strict=True)]
        self.parts.append(reduce(torch.add, dense))

    def build(self) -> LayerJacobian:
        """Return the Jacobian for all cotangents so far."""
        values = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        if not self.is_factored:
            return DenseJacobian(values)
        a = (self.inputs[0] if len(self.inputs) == 1 else torch.cat(self.inputs, dim=1)).squeeze(2)
        return OuterProductJacobian(a, values, self.has_bias, self.input_is_constant, self.cotangent_is_constant)
