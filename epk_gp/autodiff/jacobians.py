"""Per-sample gradients of the outputs, layer by layer.

For a linear layer the gradient of output k at point e is delta_k (x) a: the gradient with respect to the layer's output
times the layer's input. A convolution, or a layer used at several positions or several times, sums such products over
its positions. Which representation a layer takes is decided by counted cost (`ContractionCost`), the same on both
sides of an inner product. Parameters that are not a layer's are differentiated sample by sample (`dense_jacobian`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, all_outputs, dense_jacobian, group_rows
from epk_gp.autodiff.interception import (
    LINEAR,
    InterpolatedWeights,
    MovedWeights,
    StackedWeights,
    UnsupportedParameterUseError,
)
from epk_gp.autodiff.layer_builder import (
    LayerIO,
    LayerIORecorder,
    LayerJacobianBuilder,
    Users,
    pool_windows,
    users_of_nodes,
)
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    LayerJacobian,
    LeftFactor,
    NodeWeights,
    OuterProductJacobian,
    ProductSum,
    append_bias_column,
    concat_rows,
    concat_scaled,
    expect_representation,
    is_short,
    same_representation,
)
from epk_gp.autodiff.secants import SecantDerivatives, mean_of_rows
from epk_gp.autodiff.sketches import FeatureSum
from epk_gp.core.losses import Head, apply_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import MemoryPlan, cotangents_per_pass, fits_pass, rows_per_pass
from epk_gp.core.torch_overrides import disable_fused_attention


@final
@dataclass(frozen=True, eq=False)
class LogitsLastLayer(LayerJacobian):
    """The last, linear layer's gradients of all C logits: output_grads[k, e] is the unit vector e_k.

    Inner products are zero for different outputs, and the same for all pairs of equal ones.

    Attributes:
        inputs: The layer's inputs, (E, n), with the 1 of a bias.
        num_outputs: C.
    """

    inputs: Float[Tensor, "E n"]
    num_outputs: int

    commutes_with_average = True

    @property
    def multiplications_per_pair(self) -> int:
        """Of the inputs."""
        return self.inputs.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return self.inputs.nbytes

    @property
    def fits_concatenation(self) -> bool:
        """Whether the inner dimension is short."""
        return is_short(self.inputs.shape[1])

    def to_dense(self) -> Float[Tensor, "C E P_layer"]:
        """Put each output's inputs into the place of its row of the weight."""
        eye = torch.eye(self.num_outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        return (eye[:, None, :, None] * self.inputs[None, :, None, :]).flatten(2)

    def rows(self, rows: slice) -> "LogitsLastLayer":
        """Return some of the points."""
        return replace(self, inputs=self.inputs[rows])

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "LogitsLastLayer":
        """Append other points."""
        return replace(
            self, inputs=torch.cat([self.inputs, *(same_representation(self, other).inputs for other in others)])
        )

    def concat_steps(self, others: Sequence[LeftFactor], weights: Sequence[float]) -> "LogitsLastLayer":
        """Concatenate the inputs."""
        return replace(
            self, inputs=concat_scaled([same_representation(self, step).inputs for step in (self, *others)], weights, 1)
        )

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "LogitsLastLayer":
        """Average the inputs."""
        return replace(
            self, inputs=nodes.add(None if before is None else same_representation(self, before).inputs, self.inputs, 0)
        )

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add one product of the inputs for all outputs."""
        total.add_same_class((self.inputs @ same_representation(self, other).inputs.T).mul_(weight))

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        products = (self.inputs * same_representation(self, other).inputs).sum(1)
        return torch.diag_embed(products[:, None].expand(-1, self.num_outputs))

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Sketch the inputs with each unit vector."""
        eye = torch.eye(self.num_outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        total.add_outer_products(self.inputs, eye[:, None].expand(-1, len(self.inputs), -1), weight, generator)


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayer(LayerJacobian):
    """The last, linear layer's gradients of all C log-softmax outputs: output_grads[k, e] = e_k - p_e.

    Attributes:
        inputs: The layer's inputs, (E, n), with the 1 of a bias.
        output_grads: (C, E, C).
        probabilities: Softmax probabilities p, (E, C).
        input_is_constant: The inputs depend neither on weights nor on the step.
    """

    inputs: Float[Tensor, "E n"]
    output_grads: Float[Tensor, "C E C"]
    probabilities: Float[Tensor, "E C"]
    input_is_constant: bool

    commutes_with_average = True
    fits_concatenation = False

    @property
    def multiplications_per_pair(self) -> int:
        """Of inputs and output gradients."""
        return self.inputs.shape[1] + self.output_grads.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and output gradients."""
        return self.inputs.nbytes + self.output_grads.nbytes

    def as_outer_product(self) -> OuterProductJacobian:
        """Return the same gradients as any other layer's."""
        grads = self.output_grads.unsqueeze(2)
        return OuterProductJacobian(self.inputs[:, None], grads, False, self.input_is_constant, False)

    def to_dense(self) -> Float[Tensor, "C E P_layer"]:
        """Write the outer products out."""
        return self.as_outer_product().to_dense()

    def rows(self, rows: slice) -> "SoftmaxLastLayer":
        """Return some of the points."""
        grads, p = self.output_grads[:, rows], self.probabilities[rows]
        return replace(self, inputs=self.inputs[rows], output_grads=grads, probabilities=p)

    def concat_rows(self, others: Sequence[LayerJacobian]) -> "SoftmaxLastLayer":
        """Append other points."""
        parts = [self, *(same_representation(self, other) for other in others)]
        return replace(
            self,
            inputs=torch.cat([part.inputs for part in parts]),
            output_grads=torch.cat([part.output_grads for part in parts], dim=1),
            probabilities=torch.cat([part.probabilities for part in parts]),
        )

    def average(self, before: LeftFactor | None, nodes: NodeWeights) -> "SoftmaxLastLayerAverage":
        """Average the inputs, and their products with each probability."""
        values = torch.cat([self.inputs[None], self.probabilities.T[:, :, None] * self.inputs])
        last = None if before is None else expect_representation(SoftmaxLastLayerAverage, before).values
        return SoftmaxLastLayerAverage(nodes.add(last, values, 1))

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add the inner products of the outer products."""
        b = same_representation(self, other).as_outer_product()
        self.as_outer_product().add_inner(b, total, weight, layer=layer, same_points=same_points)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E C C"]:
        """Multiply row by row."""
        return self.as_outer_product().pointwise_products(same_representation(self, other).as_outer_product())

    def sketch(self, total: FeatureSum, weight: float, generator: torch.Generator) -> None:
        """Sketch the outer products."""
        self.as_outer_product().sketch(total, weight, generator)


@final
@dataclass(frozen=True, eq=False)
class SoftmaxLastLayerAverage(LeftFactor):
    """Averages over t of a `SoftmaxLastLayer`: of its inputs a, and of p_c a for every output c; (1 + C, N, n)."""

    values: Float[Tensor, "rows N n"]

    fits_concatenation = False

    @property
    def nbytes(self) -> int:
        """Bytes of the averages."""
        return self.values.nbytes

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add the inner products with the other side's factors, or averages (docs/theory.md, section 5)."""
        if isinstance(other, SoftmaxLastLayerAverage):
            total.add_softmax_averages(self.values, other.values, weight)
            return
        b = expect_representation(SoftmaxLastLayer, other)
        total.add_softmax_last_layer(self.values, b.inputs, b.probabilities, weight)


@dataclass(frozen=True, eq=False)
class WeightLocation:
    """Weights at which Jacobians are taken: `w`, or `w + t_e d` for row e, or `stacked[g]` for the g-th equal part.

    All of them hold the moving statistics behind the weights, where the network has any. Jacobians are those in the
    weights alone.

    Attributes:
        w: Flat weights, (P,), or flat weights and moving statistics, (P + Q,).
        d: Flat direction, as `w`, or None.
        t: (E,) with `d`.
        stacked: G rows like `w`, or None.
        secant_head: Rows come in pairs, at t = 0 and at t = 1, and every operation has the mean of its derivative over
            the segment between both (`autodiff.secants`), this head included: cotangents are those of its outputs.
    """

    w: Float[Tensor, " PQ"]
    d: Float[Tensor, " PQ"] | None = None
    t: Float[Tensor, " E"] | None = None
    stacked: Float[Tensor, "G PQ"] | None = None
    secant_head: Head | None = None

    @property
    def is_one_point(self) -> bool:
        """Whether all rows have the same weights."""
        return self.t is None and self.stacked is None


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
        at: The weights.
        X: E inputs.
        cotangents: Which gradients are wanted.
        cost: Decides the representations.
        create_graph: Keep the result differentiable with respect to X. No input counts as constant then, so that both
            sides of an inner product take the same representation, with or without a graph to their own points.

    Returns:
        One Jacobian per layer, always in the same order.
    """
    model, plan = net.model, net.plan
    if at.t is not None and not (cost.all_dense or plan.supports_interpolation):
        raise ValueError("rows at different points of a segment need a plan that supports interpolation, or all dense.")
    params = {name: value.detach().requires_grad_() for name, value in model.unflatten(at.w).items()}
    if cost.all_dense:
        with torch.set_grad_enabled(create_graph), disable_fused_attention():
            values = cotangents.of_logits(logits_row_by_row(net, at, X))
        return [dense_jacobian(net, model.names, at.w, X, values, d=at.d, t=at.t, create_graph=create_graph)]
    with torch.enable_grad(), disable_fused_attention():
        moved = _moved_weights(net, params, at)
        recorder = LayerIORecorder(params, plan.bias_of, len(X), keep_graph=create_graph, moved=moved)
        secants = secant_derivatives(params, at, moved)
        with moved or nullcontext(), recorder, secants:
            z = outputs_at(model, params, X, at)
        values = cotangents.of_logits(z if create_graph else z.detach())
        has_secants = at.secant_head is not None
        recorded = _RecordedForward(net, recorder.calls, z, values, cotangents, has_secants, create_graph)
        layers = [recorded.start_layer(name, params[name].shape, cost) for name in plan.bias_of]
        builders = [layer for layer in layers if isinstance(layer, LayerJacobianBuilder)]
        skips_last = at.is_one_point and not create_graph
        for output_grads in recorded.backward(params, skips_last=skips_last):
            for builder in builders:
                builder.add_cotangents(output_grads)
    jacobians = [layer.build() if isinstance(layer, LayerJacobianBuilder) else layer for layer in layers]
    if plan.dense_params:
        names = plan.dense_params
        if at.secant_head is not None:
            jacobians.append(_dense_secants(net, names, at, X, values))
            return jacobians
        jacobians.append(dense_jacobian(net, names, at.w, X, values, d=at.d, t=at.t, create_graph=create_graph))
    return jacobians


def secant_derivatives(
    params: Mapping[str, Tensor], at: WeightLocation, moved: MovedWeights | None
) -> AbstractContextManager[object]:
    """Return the mode under which a forward pass has secants, where they are asked for."""
    if at.secant_head is None:
        return nullcontext()
    if not isinstance(moved, InterpolatedWeights):
        raise TypeError("secants need rows at both ends of a segment: this is a bug in epk_gp.")
    return SecantDerivatives(params, moved)


def outputs_at(
    model: FunctionalModel, params: Mapping[str, Tensor], X: Shaped[Tensor, "E ..."], at: WeightLocation
) -> Float[Tensor, "E C"]:
    """Evaluate the logits, or with secants the outputs that the cotangents belong to."""
    z = model(params, X)
    return z if at.secant_head is None else apply_head(z, at.secant_head)


def _dense_secants(
    net: PlannedModel, names: tuple[str, ...], at: WeightLocation, X: Shaped[Tensor, "E ..."], values: Tensor
) -> DenseJacobian:
    """Differentiate the outputs of each pair of rows with respect to some parameters, pair by pair."""
    parts = []
    for rows in torch.arange(len(X), device=X.device).split(2):
        params = {name: value.detach().requires_grad_() for name, value in net.model.unflatten(at.w).items()}
        here = replace(at, t=None if at.t is None else at.t[rows])
        with torch.enable_grad(), disable_fused_attention():
            moved = _moved_weights(net, params, here)
            secants = secant_derivatives(params, here, moved)
            with moved or nullcontext(), secants:
                z = outputs_at(net.model, params, X[rows], here)
            own = [params[name] for name in names]
            grads = [
                torch.autograd.grad(z, own, value, retain_graph=True, allow_unused=True, materialize_grads=True)
                for value in values[:, rows]
            ]
        parts.append(torch.stack([torch.cat([grad.flatten() for grad in of_output]) for of_output in grads]) / 2)
    return DenseJacobian(torch.stack(parts, dim=1).repeat_interleave(2, dim=1))


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


def layer_jacobians_at_weights(
    net: PlannedModel,
    weights: Iterable[Float[Tensor, " PQ"]],
    X: Shaped[Tensor, "n ..."],
    head: Head,
    cost: ContractionCost,
    memory: MemoryPlan,
) -> Iterator[list[LayerJacobian]]:
    """Compute the layer Jacobians of all outputs of n inputs at several weights, small ones together.

    Measured, float64, steps of a 100-64-3 network with 4 nodes: together 7 times faster for 8 points, 3.4 for 128, 1.3
    for 512; a 784-128-10 network loses from 512 points on.

    Args:
        net: The network.
        weights: Flat weights, one after the other.
        X: n inputs.
        head: Which outputs.
        cost: Decides the representations.
        memory: How many are computed together.
    """
    can_stack = net.plan.supports_stacking and not cost.all_dense
    weights, at_once = iter(weights), memory.stacked_weights(len(X)) if can_stack else 1
    while batch := list(islice(weights, at_once)):
        if len(batch) == 1:
            yield layer_jacobians_blocked(net, WeightLocation(batch[0]), X, head, cost)
            continue
        rows = X.repeat(len(batch), *[1] * (X.ndim - 1))
        at = WeightLocation(batch[0], stacked=torch.stack(batch))
        jacobians = layer_jacobians(net, at, rows, all_outputs(head), cost)
        for start in range(0, len(rows), len(X)):
            yield [jacobian.rows(slice(start, start + len(X))) for jacobian in jacobians]


@dataclass(frozen=True, eq=False)
class _RecordedForward:
    """One recorded forward pass, and the cotangents of its logits.

    Attributes:
        net: The network.
        calls: Its layers' calls; of a convolution that a max-pool alone sees, with the edge of the pool's output.
        z: Its logits, (E, C).
        values: The cotangents of the logits, (K, E, C).
        cotangents: What they are the cotangents of.
        has_secants: Its operations have secants, which one cotangent goes through at a time.
        create_graph: Its gradients are kept differentiable.
    """

    net: PlannedModel
    calls: list[LayerIO]
    z: Tensor
    values: Tensor
    cotangents: Cotangents
    has_secants: bool = False
    create_graph: bool = False

    @cached_property
    def users(self) -> Users:
        """Who takes the outputs of each node of the graph."""
        return users_of_nodes(self.z)

    def start_layer(self, name: str, shape: torch.Size, cost: ContractionCost) -> LayerJacobianBuilder | LayerJacobian:
        """Collect the calls of one weight; a head's last layer has its Jacobian at once."""
        own = [(number, call) for number, call in enumerate(self.calls) if call.weight == name]
        if not own:
            raise UnsupportedParameterUseError(
                f"the layer of {name} must see all {len(self.z)} rows: it was not called."
            )
        has_bias = self.net.plan.bias_of[name] is not None
        is_last = all(call.edge.node is self.z.grad_fn for _, call in own)
        head = self.cotangents.head
        if is_last and own[0][1].function is LINEAR and head and cost.factored_last_layer_is_cheaper(shape, head):
            ((_, last),) = own
            return self._last_layer(last, head, has_bias=has_bias)
        builder = LayerJacobianBuilder(
            own,
            shape,
            cost,
            has_bias=has_bias,
            cotangent_is_constant=self.cotangents.are_constant and is_last,
            ends_network=is_last and cost.cotangents_are_constant,
        )
        self._see_through_pool(builder, cost)
        return builder

    def _see_through_pool(self, builder: LayerJacobianBuilder, cost: ContractionCost) -> None:
        """Let gradients end at a max-pool that alone sees a layer's output, where that costs less."""
        is_possible = self.net.plan.supports_pool_windows and not (self.create_graph or self.has_secants)
        if not is_possible or (pooled := builder.pooled_call()) is None:
            return
        number, call, n_in = pooled
        if (windows := pool_windows(self.users, call)) is None:
            return
        num_outputs = self.net.plan.num_outputs  # what was verified
        num_cotangents = num_outputs if cost.tries_pool_windows else min(len(self.values), num_outputs)
        collected = n_in * windows.shape.numel()  # against the numbers that go back through the pool
        if collected <= num_cotangents * call.shape.numel() and fits_pass(collected, self.net.itemsize):
            builder.see_through(windows)
            self.calls[number] = replace(call, edge=windows.edge, shape=windows.shape)

    def backward(self, params: Mapping[str, Tensor], *, skips_last: bool) -> Iterator[list[Tensor]]:
        """Propagate the cotangents to the outputs of all calls, as many at a time as fit: (K, E, ...) for each call.

        Args:
            params: The network's parameters.
            skips_last: A last, linear layer may be passed without a matrix product, where there is one.
        """
        calls, outputs, values, known = self.calls, self.z, self.values, list[Tensor]()
        if skips_last and self.cotangents.head is not None and ends_in_linear(self.z, calls):
            weight = params[calls[-1].weight]
            values, known = cotangents_before_last_linear(weight, self.z, self.cotangents.head), [values]
            calls, outputs = calls[:-1], calls[-1].source
        plan = self.net.plan
        size = cotangents_per_pass(plan, self.net.itemsize, len(self.z), len(values))
        for start in range(0, len(values), size):
            part = slice(start, start + size)
            grads = propagate_cotangents(
                outputs,
                calls,
                values[part],
                batched=plan.supports_batched_vjp and not self.has_secants,
                frees_graph=part.stop >= len(values),
                create_graph=self.create_graph,
            )
            if self.has_secants:  # gradients are captured before the hooks of the calls' outputs
                grads = [mean_of_rows(grad.transpose(0, 1)).transpose(0, 1) for grad in grads]
            yield [*grads, *(grad[part] for grad in known)]

    def _last_layer(self, last: LayerIO, head: Head, *, has_bias: bool) -> LayerJacobian:
        inputs = append_bias_column(last.input) if has_bias else last.input
        if head == "logits":
            return LogitsLastLayer(inputs, self.z.shape[1])
        return SoftmaxLastLayer(inputs, self.values, self.z.detach().softmax(dim=1), last.input_is_constant)


def ends_in_linear(z: Tensor, calls: Sequence[LayerIO]) -> bool:
    """Return whether the outputs depend on other layers through the input of a last, linear one."""
    last = calls[-1] if calls else None
    return last is not None and last.function is LINEAR and last.edge.node is z.grad_fn and not last.input_is_constant


def cotangents_before_last_linear(weight: Tensor, z: Tensor, head: Head) -> Tensor:
    """Return a head's cotangents at the last layer's input, where they are rows of its weight: no product is needed."""
    W = weight.detach()
    rows = W[:, None].expand(-1, len(z), -1)
    return rows - z.detach().softmax(dim=1) @ W if head == "log_softmax" else rows


def propagate_cotangents(
    outputs: Float[Tensor, "E ..."],
    calls: Sequence[LayerIO],
    cotangents: Float[Tensor, "K E ..."],
    *,
    batched: bool,
    frees_graph: bool = True,
    create_graph: bool = False,
) -> list[Tensor]:
    """Propagate K cotangents back to the outputs of layer calls: one (K, E, ...) tensor each.

    Args:
        outputs: What the cotangents belong to, usually the logits.
        calls: The layer calls.
        cotangents: The cotangents.
        batched: Propagate them in one call.
        frees_graph: The graph is not used again.
        create_graph: Keep the result differentiable.
    """
    if not calls:
        return []
    edges = [call.edge for call in calls]
    columns: list[Tensor | None]
    if batched and len(cotangents) > 1 and not create_graph:
        grads = torch.autograd.grad(
            outputs, edges, cotangents, is_grads_batched=True, retain_graph=not frees_graph, allow_unused=True
        )
        columns = [None if grad is None else grad.detach() for grad in grads]
    else:
        rows = [
            torch.autograd.grad(
                outputs,
                edges,
                cotangent,
                retain_graph=create_graph or not frees_graph or k + 1 < len(cotangents),
                create_graph=create_graph,
                allow_unused=True,
            )
            for k, cotangent in enumerate(cotangents)
        ]
        columns = [
            None if own[0] is None else own[0][None] if len(own) == 1 else torch.stack(own)
            for own in zip(*rows, strict=True)
        ]
    return [
        outputs.new_zeros(len(cotangents), *call.shape) if column is None else column
        for call, column in zip(calls, columns, strict=True)
    ]


def _moved_weights(net: PlannedModel, params: Mapping[str, Tensor], at: WeightLocation) -> MovedWeights | None:
    if at.stacked is not None:
        return StackedWeights(params, net.model.unflatten_rows(at.stacked.detach().requires_grad_()))
    if at.t is None or at.d is None:
        return None
    return InterpolatedWeights(params, net.model.unflatten(at.d), at.t)


def logits_row_by_row(net: PlannedModel, at: WeightLocation, X: Shaped[Tensor, "E ..."]) -> Float[Tensor, "E C"]:
    """Evaluate the logits at each row's weights, also where the network does not support interpolation."""
    model = net.model
    params = model.unflatten(at.w)
    if at.t is None or at.d is None or net.plan.supports_interpolation:
        with _moved_weights(net, params, at) or nullcontext():
            return model(params, X)
    if net.plan.shares_pass:
        points, groups = group_rows(at.t)
        parts = [model(model.unflatten(at.w + t * at.d), X[rows]) for t, rows in zip(points, groups, strict=True)]
        return torch.cat(parts)[torch.cat(groups).argsort()]
    direction = model.unflatten(at.d)
    moved = ({name: w + t * direction[name] for name, w in params.items()} for t in at.t)
    return torch.cat([model(here, X[e : e + 1]) for e, here in enumerate(moved)])
