"""Record what a network's layers see: their inputs, and where the gradients of their outputs can be taken."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from epk_gp.autodiff.interception import (
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
