"""One layer's gradients from its recorded inputs and its outputs' gradients.

A max-pool hands each gradient to one position of its window, the same for all outputs of the network. The layer's
gradient is therefore a sum over the pool's windows in place of all positions, of gradients of the pool's output times
what the convolution sees at the largest position. No gradient goes back through the pool, nor through a ReLU between.

Weight sharing: a layer uses its weight at L positions for every sample. Inputs are brought to the shape
(E, L, G, n_in) and output gradients to (K, E, L, G, n_out), for E samples, K cotangents, and G groups that do not mix.

* A linear layer has one group. Its positions are whatever lies between samples and features, such as the places of a
  sequence: an input (E, T, n_in) becomes (E, T, 1, n_in).
* A convolution's positions are the places of its output. Its inputs are the patches that it sees there.
* A normalisation's scale and shift are G groups of one input and one output, one for every number that they scale.

A weight that is used by several calls has the positions of all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional as F

from epk_gp.autodiff.interception import (
    CHANNELS_LAST,
    CONVOLUTIONS,
    LAYERS,
    NORMALISATIONS,
    FunctionCall,
    MovedWeights,
    ParameterInterception,
    UnsupportedParameterUseError,
    has_tensors,
    require_rows,
)
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    LayerJacobian,
    OuterProductJacobian,
    append_bias_column,
    sum_outer_products,
)


@dataclass(frozen=True, eq=False)
class LayerIO:
    """Input and output of one call of a layer's function with a trained weight.

    Attributes:
        function: One of `LAYERS`.
        weight: Name of its weight.
        bias: Name of its bias, None without a trained one.
        source: What the layer saw, (E, ...).
        input: The same, detached unless a graph is kept.
        input_is_constant: The input does not depend on the weights.
        options: stride, padding, dilation, groups, by name.
        shape: Shape of its output, (E, ...).
        edge: Where the gradient with respect to the call's output can be taken.
        normalise: What is scaled and shifted, as a function of the input; None except for normalisations.
    """

    function: Callable[..., Any]
    weight: str
    bias: str | None
    source: Tensor
    input: Tensor
    input_is_constant: bool
    options: dict[str, Any]
    shape: torch.Size
    edge: GradientEdge
    normalise: Callable[[Tensor], Tensor] | None


@final
class LayerIORecorder(ParameterInterception):
    """Record inputs and gradient edges of the layers' calls with the given parameters.

    Args:
        params: All parameters by name.
        bias_of: The layers' weights, each with the bias that goes with it.
        num_rows: E, rows that every call must see.
        keep_graph: Keep the layers' inputs attached to the graph.
        moved: What moves the rows' weights and statistics, if anything does.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        bias_of: Mapping[str, str | None],
        num_rows: int,
        *,
        keep_graph: bool = False,
        moved: MovedWeights | None = None,
    ) -> None:
        observed = {*bias_of, *(bias for bias in bias_of.values() if bias is not None)}
        super().__init__({name: value for name, value in params.items() if name in observed})
        self.bias_of, self.num_rows, self.keep_graph, self.moved = bias_of, num_rows, keep_graph, moved
        self.calls: list[LayerIO] = []

    def intercept(self, call: FunctionCall) -> Any:
        """Make the call and record it if it is a layer's."""
        result = call.run()
        if not has_tensors(result):
            return result
        slots = call.in_slots() if call.function in LAYERS else {}
        names = {name: self.name_of.get(id(value)) for name, value in slots.items()}
        weight, bias = names.get("weight"), names.get("bias")
        if weight is None or self.bias_of.get(weight, weight) != bias or {*call.params} - {weight, bias}:
            raise UnsupportedParameterUseError(
                f"the weights {sorted({*call.params})} must be used by their layers only."
            )
        x = call.input
        require_rows(x, result, self.num_rows, weight)
        keys = ("stride", "padding", "dilation", "groups") if call.function in CONVOLUTIONS else ()
        named = {name: value for name, value in call.kwargs.items() if name in keys}
        self.calls.append(
            LayerIO(
                function=call.function,
                weight=weight,
                bias=bias,
                source=x,
                input=x if self.keep_graph else x.detach(),
                input_is_constant=not self.keep_graph and not x.requires_grad and not call.statistics,
                options={**dict(zip(keys, call.args[3:], strict=False)), **named},
                shape=result.shape,
                edge=get_gradient_edge(result),
                normalise=_without_scale_and_shift(call, self.moved) if call.function in NORMALISATIONS else None,
            )
        )
        return result


def _without_scale_and_shift(call: FunctionCall, moved: MovedWeights | None) -> Callable[[Tensor], Tensor]:
    """Return a normalisation as a function of its input alone, without weight and bias."""
    rest = [None if number in call.slots else value for number, value in enumerate(call.args)][1:]
    named = {name: value for name, value in call.kwargs.items() if name not in {"input", *call.slots.values()}}

    def normalise(x: Tensor) -> Tensor:
        result: Tensor = call.function(x, *rest, **named)
        return result

    def normalise_by_own_statistics(x: Tensor) -> Tensor:
        own = [value if moved is None else moved.of_rows(value, len(x)) for value in call.statistics]
        result: Tensor = call.function(x, *(value.detach() for value in own), *rest[2:])
        return result

    return normalise_by_own_statistics if call.statistics else normalise


_POOLS = ("MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0")
_RELU = "ReluBackward0"

Users = defaultdict[Node, list[tuple[Node, int]]]


@dataclass(frozen=True, eq=False)
class PoolWindows:
    """The windows of a max-pool over a convolution's output.

    Attributes:
        edge: Where the gradient with respect to the pool's output can be taken.
        positions: The largest position of each window, counted through the convolution's output, (E, channels,
            *windows).
        relu: What a ReLU between both returned, (E, channels, *positions); None without one.
    """

    edge: GradientEdge
    positions: Int64[Tensor, "E channels ..."]
    relu: Float[Tensor, "E channels ..."] | None

    @property
    def shape(self) -> torch.Size:
        """Shape of the pool's output."""
        return self.positions.shape

    def patches(self, x: Float[Tensor, "E n_in L"]) -> Float[Tensor, "E channels n_in W"]:
        """Take what each channel's windows see of a convolution's patches; zeros where the ReLU returned zero."""
        positions, n_in = self.positions.flatten(2), x.shape[1]
        E, channels, W = positions.shape
        spread = x.unsqueeze(1).expand(E, channels, -1, -1)
        taken = spread.gather(3, positions.unsqueeze(2).expand(E, channels, n_in, W))
        if self.relu is None:
            return taken
        is_zero = self.relu.flatten(2).gather(2, positions) <= 0
        return taken.masked_fill_(is_zero.unsqueeze(2), 0)


def sum_over_windows(
    patches: Float[Tensor, "E channels n_in W"], grads: Float[Tensor, "K E channels W"]
) -> Float[Tensor, "K E P"]:
    """Write a convolution's gradients out: one product per point and channel, for all cotangents."""
    product = grads.permute(1, 2, 0, 3) @ patches.mT  # E channels K n_in
    return product.permute(2, 0, 1, 3).flatten(2)


def users_of_nodes(outputs: Tensor) -> Users:
    """Find who takes the outputs of each node of a graph: the node and the number of the output, for each use."""
    users: Users = defaultdict(list)
    waiting = [] if outputs.grad_fn is None else [outputs.grad_fn]
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        for source, number in node.next_functions:
            if source is None:
                continue
            users[source].append((node, number))
            if source not in found:
                found.add(source)
                waiting.append(source)
    return users


def pool_windows(users: Users, call: LayerIO) -> PoolWindows | None:
    """Find the max-pool that alone sees a convolution's output, or the output of a ReLU that alone sees it.

    Args:
        users: Of the nodes of the graph.
        call: The convolution.
    """
    relu, pool = None, _only_user(users, call.edge.node)
    if pool is not None and pool.name() == _RELU:
        relu, pool = pool, _only_user(users, pool)
    if pool is None or pool.name() not in _POOLS:
        return None
    # torch's names for what nodes keep: under other names, verification finds that windows cannot be had
    positions: Tensor = pool._saved_result1  # type: ignore[attr-defined]
    if positions.dim() != len(call.shape):
        return None
    outputs: Tensor | None = None if relu is None else relu._saved_result.detach()  # type: ignore[attr-defined]
    return PoolWindows(GradientEdge(pool, 0), positions, outputs)


def _only_user(users: Users, node: Node) -> Node | None:
    """Return the node that takes a node's first output, if nothing else takes any."""
    of_node = users[node]
    return of_node[0][0] if len(of_node) == 1 and of_node[0][1] == 0 else None


class LayerJacobianBuilder:
    """Builds one weight's Jacobian from the gradients of its calls' outputs, some cotangents at a time.

    Args:
        calls: The weight's calls, each with its number among all calls.
        shape: Shape of the weight.
        has_bias: A trained bias goes with it.
        cost: Decides between factored and dense.
        cotangent_is_constant: The output gradients do not depend on the weights.
        ends_network: The last layer, under a head whose test-side cotangents are constant, so that its inputs can be
            averaged over t. Also true on the training side, whose cotangents may vary: both sides must choose alike.
    """

    def __init__(
        self,
        calls: Sequence[tuple[int, LayerIO]],
        shape: torch.Size,
        cost: ContractionCost,
        *,
        has_bias: bool,
        cotangent_is_constant: bool,
        ends_network: bool,
    ) -> None:
        self.calls, self.has_bias, self.cotangent_is_constant = calls, has_bias, cotangent_is_constant
        first = calls[0][1]
        scales = first.normalise is not None
        self.num_groups: int = shape.numel() if scales else first.options.get("groups", 1)
        self.input_is_constant = all(call.input_is_constant for _, call in calls)
        n_in, self.n_out = (1, 1) if scales else (shape[1:].numel(), shape[0] // self.num_groups)
        num_positions = sum(call.shape[1:].numel() // (self.num_groups * self.n_out) for _, call in calls)
        is_averaged = ends_network or self.input_is_constant
        self.is_factored = self.num_groups == 1 and cost.factored_is_cheaper(
            num_positions, n_in, self.n_out, is_averaged=is_averaged
        )
        bias_column = has_bias and not self.is_factored
        self.inputs = [_inputs_at_positions(c, n_in, self.num_groups, shape[2:], bias_column) for _, c in calls]
        self.parts: list[Tensor] = []
        self.patches_of_windows: Tensor | None = None

    def pooled_call(self) -> tuple[int, LayerIO, int] | None:
        """Return the call whose output a max-pool may see alone, its number, and what it sees at a position.

        It is the only one of its weight, a convolution without groups, and its gradients are written out.
        """
        (number, call), *others = self.calls
        if others or self.is_factored or self.num_groups > 1 or call.function not in CONVOLUTIONS:
            return None
        return number, call, self.inputs[0].shape[3]

    def see_through(self, windows: PoolWindows) -> None:
        """Take the gradients of a max-pool's output from now on, in place of the convolution's."""
        self.patches_of_windows = windows.patches(self.inputs[0].squeeze(2).mT)

    def add_cotangents(self, output_grads: Sequence[Tensor]) -> None:
        """Take the next cotangents' gradients with respect to the outputs of all calls."""
        if self.patches_of_windows is not None:
            self.parts.append(sum_over_windows(self.patches_of_windows, output_grads[self.calls[0][0]].flatten(3)))
            return
        own = [_grads_at_positions(c, output_grads[number], self.num_groups, self.n_out) for number, c in self.calls]
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
        a = self.inputs[0] if len(self.inputs) == 1 else torch.cat(self.inputs, dim=1)
        return OuterProductJacobian(
            a.squeeze(2), values, self.has_bias, self.input_is_constant, self.cotangent_is_constant
        )


def _grads_at_positions(call: LayerIO, grads: Tensor, num_groups: int, n_out: int) -> Tensor:
    """Bring a call's output gradients to (K, E, L, G, n_out)."""
    if call.function in CHANNELS_LAST:
        return grads.reshape(*grads.shape[:2], -1, num_groups, n_out)
    positions = grads.reshape(*grads.shape[:2], num_groups * n_out, -1).transpose(2, 3)
    return positions.view(*positions.shape[:3], num_groups, n_out)


def _inputs_at_positions(call: LayerIO, n_in: int, num_groups: int, kernel: torch.Size, bias_column: bool) -> Tensor:
    """Bring a call's inputs to (E, L, G, n_in), with the 1 of a bias if asked for."""
    x = call.input if call.normalise is None else call.normalise(call.input)
    if call.function in CHANNELS_LAST:
        x = x.reshape(len(x), -1, num_groups, n_in)
        return append_bias_column(x) if bias_column else x
    windows = x if call.normalise is not None else _windows(x, call.options, kernel)
    patches = windows.reshape(len(x), num_groups, n_in, -1)
    if bias_column:
        patches = torch.cat([patches, x.new_ones(len(x), num_groups, 1, patches.shape[3])], dim=2)
    return patches.permute(0, 3, 1, 2)


def _windows(x: Tensor, options: Mapping[str, Any], kernel: torch.Size) -> Tensor:
    """Return what a convolution sees at each position: (E, channels, *kernel, *positions)."""
    stride, dilation = (_per_dimension(options.get(key, 1), len(kernel)) for key in ("stride", "dilation"))
    x = F.pad(x, _padding(options.get("padding", 0), kernel, dilation))
    for dim, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, spread * (size - 1) + 1, step)[..., ::spread]
    dims = len(kernel)
    return x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))


def _per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * dims if len(values) == 1 else values


def _padding(padding: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[int]:
    """Return the zeros before and after each dimension, last dimension first."""
    if padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(width, width) for width in _per_dimension(0 if padding == "valid" else padding, len(kernel))]
    return [width for side in reversed(sides) for width in side]
