"""Gradients, row by row, of parameters with other uses than as the weight of one kind of layer.

Tables of embeddings, tied weights, scales that are multiplied by hand, learned positions: tensors made only of
parameters have no rows. When such a tensor meets rows, in a sum, a product or a layer, each row has a gradient in it,
which is then pulled back to the parameters.
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

from epk_gp.autodiff.interception import (
    LAYERS,
    LINEAR,
    FunctionCall,
    ParameterInterception,
    UnsupportedParameterUseError,
    has_rows,
    substituted,
    tensors_in,
)
from epk_gp.autodiff.representations import DenseJacobian, LayerJacobian, LeftFactor, ProductSum, expect_representation
from epk_gp.autodiff.secants import is_in_place
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
        if call.function is LINEAR and call.held["bias"] is value:
            return grads.reshape(K, n, -1, len(value)).sum(2)
        if call.function is LINEAR and call.held["weight"] is value:
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
