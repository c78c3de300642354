"""Gradients by parameter: row by row for parameters with other uses than as a layer's weight, and products of all.

Tables of embeddings, tied weights, scales that are multiplied by hand, learned positions: tensors made only of
parameters have no rows. When such a tensor meets rows, in a sum, a product or a layer, each row has a gradient in it,
which is then pulled back to the parameters.

A layer's Jacobian contains the gradients in a weight and in its bias together. They are written into columns of flat
weights, or multiplied with adjoints some rows of a parameter at a time, so that no array holds all gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.interception import (
    LAYERS,
    FunctionCall,
    ParameterInterception,
    UnsupportedParameterUseError,
    has_rows,
    is_in_place,
    substituted,
    tensors_in,
)
from epk_gp.autodiff.representations import (
    DenseJacobian,
    LayerJacobian,
    LeftFactor,
    NodeWeights,
    OuterProductJacobian,
    ProductSum,
    expect_representation,
)
from epk_gp.core.model import BATCH_MARK


@dataclass(frozen=True, eq=False)
class ParameterUse:
    """A call in which a parameter, or a tensor made only of parameters, meets rows.

    Attributes:
        value: The parameter, or the tensor made of it.
        names: The parameters from which it is made.
        call: The call.
        shape: Shape of its result, (E, ...).
        edge: Graph edge at which the gradient with respect to the result can be taken.
    """

    value: Tensor
    names: tuple[str, ...]
    call: FunctionCall
    shape: torch.Size
    edge: GradientEdge

    def gradients(self, grads: Float[Tensor, "K n ..."], *, create_graph: bool) -> Float[Tensor, "K n ..."]:
        """Return each row's gradient in the value.

        Args:
            grads: The gradients in the call's result.
            create_graph: Whether to keep the result differentiable.
        """
        value, call, (K, n) = self.value, self.call, grads.shape[:2]
        if call.function is F.embedding and call.held["weight"] is value:
            return self.of_embedding(grads).written().view(K, n, *value.shape)
        if call.function is F.linear and call.held["bias"] is value:
            return grads.reshape(K, n, -1, len(value)).sum(2)
        if call.function is F.linear and call.held["weight"] is value:
            x = call.input if create_graph else call.input.detach()
            return torch.einsum("knlo,nli->knoi", grads.reshape(K, n, -1, len(value)), x.reshape(n, -1, x.shape[-1]))
        return self._by_calling_again(grads, create_graph)

    def of_embedding(self, grads: Float[Tensor, "K n ..."]) -> "EmbeddingJacobian":
        """Return the gradients in the table of an embedding."""
        call, (K, n) = self.call, grads.shape[:2]
        ids = call.input.reshape(n, -1)
        flat = grads.reshape(K, n, ids.shape[1], -1)
        unused = call.args[2] if len(call.args) > 2 else call.kwargs.get("padding_idx")
        if unused is not None:
            flat = flat * (ids != unused % len(self.value)).to(flat)[:, :, None]
        return EmbeddingJacobian(ids, flat, len(self.value))

    def _by_calling_again(self, grads: Tensor, create_graph: bool) -> Tensor:
        """Repeat the call with a copy of the value for every row."""
        call, value, (K, n) = self.call, self.value.detach(), grads.shape[:2]
        before, is_of_rows = len(self.shape) - value.ndim, False
        if before:
            value = value.expand(n, *[1] * (before - 1), *value.shape)
        elif len(value) == 1:
            value = value.expand(n, *value.shape[1:])
        elif len(value) == n:
            is_of_rows = True
        else:
            raise UnsupportedParameterUseError(f"the weights {sorted(self.names)} must meet all rows alike.")
        leaf, by_id = value.clone().requires_grad_(), dict[int, Tensor]()
        for x in tensors_in((call.args, call.kwargs)):
            kept = x if create_graph else x.detach()
            by_id[id(x)] = kept.clone() if is_in_place(call.function) else kept
        by_id[id(self.value)] = leaf
        with torch.enable_grad():
            result = call.function(*substituted(call.args, by_id), **substituted(call.kwargs, by_id))
            if not isinstance(result, Tensor) or result.shape != grads.shape[1:]:
                raise UnsupportedParameterUseError(f"the weights {sorted(self.names)} must meet all rows alike.")
            found = [torch.autograd.grad(result, leaf, v, True, create_graph)[0] for v in grads]
        return torch.stack(found).reshape(K, n, *self.value.shape[is_of_rows:])


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer's function with a trained weight.

    Attributes:
        call: The call.
        names: Its weight's name.
        input: The layer's input, (E, ...), detached unless a graph is kept.
        input_is_constant: Whether the input does not depend on the weights.
        shape: Shape of its output, (E, ...).
        edge: Graph edge at which the gradient with respect to the call's output can be taken.
    """

    call: FunctionCall
    names: tuple[str]
    input: Tensor
    input_is_constant: bool
    shape: torch.Size
    edge: GradientEdge

    @property
    def options(self) -> dict[str, Any]:
        """Stride, padding, dilation and groups of a convolution, by name."""
        keys = ("stride", "padding", "dilation", "groups")
        named = {name: value for name, value in self.call.kwargs.items() if name in keys}
        return {**dict(zip(keys, self.call.args[3:], strict=False)), **named}

    def normalised(self, mode: ParameterInterception) -> Tensor:
        """Return the normalised input, which a normalisation then scales and shifts."""
        call, x = self.call, self.input
        rest = [None if k in call.slots.values() else value for k, value in enumerate(call.args)][1:]
        named = {name: value for name, value in call.kwargs.items() if name not in {"input", *call.slots}}
        if call.statistics:
            rest[:2] = [mode.of_rows(value, len(x)).detach() for value in call.statistics]
        result: Tensor = call.function(x, *rest, **named)
        return result


class ParameterUses:
    """Follows tensors made only of parameters, until they meet rows.

    Args:
        params: The parameters.
        num_rows: E.
    """

    def __init__(self, params: Mapping[str, Tensor], num_rows: int) -> None:
        self.num_rows = num_rows
        # by id: each such tensor, and the parameters from which it was made
        self.made: dict[int, tuple[Tensor, tuple[str, ...]]] = {id(v): (v, (name,)) for name, v in params.items()}

    def seen(self, call: FunctionCall, result: Any) -> list[ParameterUse]:
        """Return the uses in a call, and remember results made only of parameters.

        Raises:
            UnsupportedParameterUseError: The call does not return one entry per row.
        """
        tensors, results = list(tensors_in((call.args, call.kwargs))), list(tensors_in((result,)))
        values = [self.made[id(value)] for value in tensors if id(value) in self.made]
        names = tuple(dict.fromkeys(name for _, own in values for name in own))
        # indices into embeddings that are not inputs, such as token types, and initial states may belong to rows
        x = call.input if call.function is F.embedding or call.function in LAYERS else None
        are_of_rows = isinstance(x, Tensor) and x.ndim > 1 and len(x) == self.num_rows
        if not (are_of_rows or any(map(has_rows, tensors))):
            self.made |= {id(value): (value, names) for value in results if names}
            return []
        if values and (len(results) > 1 or results[0].shape[:1] != (self.num_rows,)):
            raise UnsupportedParameterUseError(f"the weights {sorted(names)} must meet all {self.num_rows} rows.")
        for value in results:
            setattr(value, BATCH_MARK, self.num_rows)
        return [ParameterUse(*own, call, results[0].shape, get_gradient_edge(results[0])) for own in values]


@final
@dataclass(frozen=True, eq=False)
class EmbeddingJacobian(LayerJacobian):
    """The gradients of a table of embeddings, whose rows are zero except for the indices of a point.

    Attributes:
        ids: Indices of each point, (E, L).
        output_grads: Gradients in the embeddings of these indices, (K, E, L, d).
        num_embeddings: Number of rows of the table.
    """

    ids: Int64[Tensor, "E L"]
    output_grads: Float[Tensor, "K E L d"]
    num_embeddings: int

    point_dims: ClassVar = {"ids": 0, "output_grads": 1}
    commutes_with_average = False

    @property
    def multiplications_per_pair(self) -> int:
        """Multiplications of gradients with equal indices."""
        return self.ids.shape[1] ** 2 + self.output_grads.shape[2:].numel()

    def written(self, rows: slice = slice(None)) -> Float[Tensor, "K E size"]:
        """Return dense gradients in some rows of the table."""
        first, end, _ = rows.indices(self.num_embeddings)
        (K, n, _, width), count = self.output_grads.shape, end - first
        places = self.ids - first + count * torch.arange(n, device=self.ids.device)[:, None]
        point, position = ((self.ids >= first) & (self.ids < end)).nonzero(as_tuple=True)
        out = self.output_grads.new_zeros(K, n * count, width)
        return out.index_add(1, places[point, position], self.output_grads[:, point, position]).view(K, n, -1)

    def products(self, H: Float[Tensor, "R size"], rows: slice = slice(None)) -> Float[Tensor, "R E"]:
        """Multiply adjoints of some rows of the table by the gradients of one output at each point."""
        first, end, _ = rows.indices(self.num_embeddings)
        H, values = H.unflatten(1, (end - first, -1)), H.new_zeros(len(H), len(self.ids))
        for point, (ids, grads) in enumerate(zip(self.ids, self.output_grads[0].to(H), strict=True)):
            (own,) = ((ids >= first) & (ids < end)).nonzero(as_tuple=True)
            if len(own):
                values[:, point] = H[:, ids[own] - first].flatten(1) @ grads[own].flatten()
        return values

    def to_dense(self) -> Float[Tensor, "K E P_layer"]:
        """Return all gradients in dense form."""
        return self.written()

    def add_inner(self, other: LeftFactor, total: ProductSum, weight: float, *, layer: int, same_points: bool) -> None:
        """Add one matrix product of the dense gradients."""
        total.add_products(self.written(), expect_representation(EmbeddingJacobian, other).written(), weight)

    def pointwise_products(self, other: LayerJacobian) -> Float[Tensor, "E K K"]:
        """Multiply row by row."""
        return DenseJacobian(self.written()).pointwise_products(other)


class UseBuilder:
    """Builds one parameter's Jacobian from the gradients of its uses' results, some cotangents at a time.

    Args:
        parameter: The parameter.
        uses: Its uses, each with its number among all calls.
        create_graph: Whether to keep the result differentiable.
        keeps_factors: Whether to keep factors (`ContractionCost`).
    """

    def __init__(
        self,
        parameter: Tensor,
        uses: Sequence[tuple[int, ParameterUse]],
        *,
        create_graph: bool,
        keeps_factors: bool = False,
    ) -> None:
        self.parameter, self.uses = parameter, uses
        self.create_graph = create_graph
        (use,) = [use for _, use in uses] if len(uses) == 1 else [None]
        is_table = use is not None and use.call.function is F.embedding and use.value is parameter
        self.keeps_factors, self.parts = keeps_factors and is_table, list[Tensor]()

    def add_cotangents(self, grads: Sequence[Tensor]) -> None:
        """Add the next cotangents' gradients with respect to the results of all calls."""
        if self.keeps_factors:
            self.parts.append(grads[self.uses[0][0]])
            return
        own = (self._pulled_back(use, use.gradients(grads[k], create_graph=self.create_graph)) for k, use in self.uses)
        self.parts.append(reduce(torch.add, own))

    def _pulled_back(self, use: ParameterUse, gradients: Float[Tensor, "K n ..."]) -> Float[Tensor, "K n P_layer"]:
        """Return the gradients in the parameter."""
        if use.value is self.parameter:
            return gradients.reshape(*gradients.shape[:2], -1)
        (K, n), shape = gradients.shape[:2], use.value.shape
        if gradients.shape[2:] != shape:  # the value has an entry for every row, and only the row's own counts
            rows = torch.arange(n, device=gradients.device)
            whole = gradients.new_zeros(K, n, *shape)
            whole[:, rows, rows] = gradients
            gradients = whole
        (found,) = torch.autograd.grad(
            use.value,
            self.parameter,
            gradients.flatten(0, 1),
            retain_graph=True,
            create_graph=self.create_graph,
            is_grads_batched=True,
        )
        return found.reshape(K, n, -1)

    def build(self) -> LayerJacobian:
        """Return the Jacobian for all cotangents so far."""
        values = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        if not self.keeps_factors:
            return DenseJacobian(values)
        return self.uses[0][1].of_embedding(values)


_ALL = slice(None)
_AVERAGED = 1 << 19  # numbers averaged at a time: 4 MiB in float64, which stay in the cache


@dataclass(frozen=True, eq=False)
class ParameterGradients:
    """The gradients of K outputs at E points in one parameter.

    Attributes:
        jacobian: The Jacobian of its layer.
        width: Numbers in a row of the layer's weight.
        has_bias: Whether the layer has a bias, whose gradients follow those of each row of the weight.
        is_bias: Whether the parameter is that bias.
    """

    jacobian: LayerJacobian
    width: int
    has_bias: bool = False
    is_bias: bool = False

    @property
    def unit(self) -> int:
        """Numbers in a row of the parameter."""
        return 1 if self.is_bias else self.width

    def written(self, rows: slice = _ALL) -> Float[Tensor, "K E size"]:
        """Return the dense gradients in some rows of the parameter; the rows of a bias are its entries."""
        if isinstance(self.jacobian, EmbeddingJacobian):
            return self.jacobian.written(rows)
        if type(self.jacobian) is OuterProductJacobian:
            inputs, delta = self.jacobian.inputs, self.jacobian.output_grads[..., rows]  # E L n_in, K E L n_out
            if self.is_bias:
                return delta.sum(dim=2)
            is_single = inputs.shape[1] == 1
            return (delta.squeeze(2).unsqueeze(3) * inputs if is_single else delta.mT @ inputs).flatten(2)
        by_row: Tensor = self.jacobian.to_dense().unflatten(2, (-1, self.width + self.has_bias))[:, :, rows]
        return by_row[..., -1] if self.is_bias else by_row[..., : self.width].flatten(2)

    def write_average(self, nodes: NodeWeights, out: Float[Tensor, "N K size"], *, adds: bool) -> None:
        """Write the average over nodes of each of N points, in one product for points with similar numbers of nodes.

        Args:
            nodes: The points and weights of the E evaluations.
            out: The result, which is overwritten.
            adds: Whether to add to it, for nodes after the first.
        """
        if type(self.jacobian) is not OuterProductJacobian:
            values = nodes.add(None, self.written(), 1).transpose(0, 1)
            out.add_(values) if adds else out.copy_(values)
            return
        grads, inputs = self.jacobian.output_grads.permute(1, 0, 3, 2), self.jacobian.inputs  # E K n_out L, E L n_in
        if not adds and sum(len(points) for points, *_ in nodes.by_point) < len(out):
            out.zero_()
        for points, rows, weights in nodes.by_point:
            is_whole, size = len(points) == len(out), max(1, _AVERAGED // out[0].numel())
            for part in (slice(first, first + size) for first in range(0, len(points), size)):
                own = rows[part]
                weighted = (grads[own] * weights[part][..., None, None, None]).permute(0, 2, 3, 1, 4).flatten(3)
                if self.is_bias:
                    values = weighted.sum(dim=3)
                else:
                    values = (weighted.flatten(1, 2) @ inputs[own].flatten(1, 2)).view(len(own), out.shape[1], -1)
                if is_whole:
                    out[part].add_(values) if adds else out[part].copy_(values)
                elif adds:
                    out.index_add_(0, points[part], values)
                else:
                    out[points[part]] = values

    def products(self, H: Float[Tensor, "R size"], rows: slice = _ALL) -> Float[Tensor, "R E"]:
        """Multiply adjoints of some rows of the parameter by the gradients of one output at each point."""
        if isinstance(self.jacobian, EmbeddingJacobian):
            return self.jacobian.products(H, rows)
        return self.products_of_steps(H[None], rows)[0].T

    def products_of_steps(self, H: Float[Tensor, "T R size"], rows: slice = _ALL) -> Float[Tensor, "T B R"]:
        """Multiply adjoints of T steps by the gradients of one output at B points of each step.

        A few adjoints are multiplied by the inputs first, so that no gradient becomes dense.
        """
        own, (T, R, _) = self.jacobian, H.shape
        if type(own) is OuterProductJacobian and own.inputs.shape[1] == 1 and not self.is_bias:
            B = len(own.inputs) // T
            if R * (B + self.width) < B * self.width:  # numbers for each output of the layer, and gradients
                factors = own.inputs, own.output_grads[0][..., rows]
                inputs, delta = (x.to(H).flatten(0, -2).unflatten(0, (T, -1)) for x in factors)
                of_outputs = (H.reshape(T, -1, self.width) @ inputs.mT).unflatten(1, (R, -1))  # T R n_out B
                few: Tensor = (of_outputs * delta.mT[:, None]).sum(dim=2).mT
                return few
        products: Tensor = self.written(rows)[0].to(H).unflatten(0, (T, -1)) @ H.mT
        return products


def by_parameter(
    net: PlannedModel, jacobians: Sequence[LayerJacobian], *, all_dense: bool = False
) -> list[ParameterGradients]:
    """Return the gradients in each parameter, in the order of the flat weights.

    Args:
        net: The network.
        jacobians: The result of `layer_jacobians`.
        all_dense: Whether there is one dense Jacobian of all weights (`ContractionCost.all_dense`).
    """
    model, plan = net.model, net.plan
    shapes, found = dict(zip(model.names, model.shapes, strict=True)), dict[str, ParameterGradients]()
    names = model.names if all_dense else plan.dense_params
    layers = () if all_dense else zip(plan.bias_of.items(), jacobians, strict=False)
    for (weight, bias), jacobian in layers:
        if bias is None:
            found[weight] = ParameterGradients(jacobian, _width(shapes[weight]))
            continue
        width = shapes[weight].numel() // shapes[bias].numel()
        found |= {name: ParameterGradients(jacobian, width, True, name == bias) for name in (weight, bias)}
    if names:
        parts = jacobians[-1].to_dense().split([shapes[name].numel() for name in names], dim=2)
        for name, part in zip(names, parts, strict=True):
            found[name] = ParameterGradients(DenseJacobian(part), _width(shapes[name]))
    return [found[name] for name in model.names]


def _width(shape: torch.Size) -> int:
    return max(1, shape[1:].numel())
