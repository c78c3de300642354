"""Watch and redirect a network's use of its weights, whatever modules it is written with.

A forward pass under one of these modes calls the same functions as ever; the modes see every call that takes a weight
(through `torch.overrides.TorchFunctionMode`), so that a weight used twice, outside its module or inside a function is
never missed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# Functions that are linear in (weight, bias) taken together: positions and names of these arguments.
JOINTLY_LINEAR: dict[Callable[..., Any], dict[int | str, str]] = {
    F.linear: {1: "weight", 2: "bias"},
    F.bilinear: {2: "weight", 3: "bias"},
    F.embedding: {1: "weight"},
    F.layer_norm: {2: "weight", 3: "bias"},
    F.group_norm: {2: "weight", 3: "bias"},
    F.batch_norm: {3: "weight", 4: "bias"},
    F.instance_norm: {3: "weight", 4: "bias"},
    F.rms_norm: {2: "weight"},
    **{
        function: {1: "weight", 2: "bias"}
        for function in (
            F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        )
    },
}  # fmt: skip
LINEAR = F.linear
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
NORMALISATIONS = (F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.rms_norm)
LAYERS = (LINEAR, *CONVOLUTIONS, *NORMALISATIONS)
CHANNELS_LAST = (LINEAR, F.layer_norm, F.rms_norm)


class UnsupportedParameterUseError(ValueError):
    """The network uses its weights otherwise than on the rows on which its plan was made (`probe.once_more`)."""


@dataclass(frozen=True, eq=False)
class LayerIO:
    """One call of a layer's function with a trained weight.

    Attributes:
        function: One of `LAYERS`.
        weight: Name of its weight.
        bias: Name of its bias, None without a trained one.
        source: What the layer saw, (E, ...).
        input: The same, detached unless a graph is kept.
        fixed_input: The input does not depend on the weights.
        options: stride, padding, dilation, groups, by name.
        shape: Shape of its output, (E, ...).
        edge: Where the gradient with respect to the call's output is to be had.
        normalise: What is scaled and shifted, from the input; None but for normalisations.
    """

    function: Callable[..., Any]
    weight: str
    bias: str | None
    source: Tensor
    input: Tensor
    fixed_input: bool
    options: dict[str, Any]
    shape: torch.Size
    edge: GradientEdge
    normalise: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class ParameterUsage:
    """One call of a function that takes weights.

    Attributes:
        function: What was called.
        names: All weights among its arguments.
        weight: The one in the place of a jointly linear function's weight, if any.
        bias: The one in the place of its bias, if any.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    weight: str | None
    bias: str | None

    @property
    def proper(self) -> bool:
        """The function is linear in all the weights that it takes."""
        return len(self.names) == (self.weight is not None) + (self.bias is not None)


class ParameterUsageRecorder(TorchFunctionMode):
    """List which function takes which weights, and count the numbers that are made."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Watch the given tensors."""
        super().__init__()
        self.names = {id(value): name for name, value in weights.items()}
        self.calls: list[ParameterUsage] = []
        self.elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Note the call, then make it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [value for value in _flat((result,)) if isinstance(value, Tensor)]
        if not tensors:  # a shape, a dtype: nothing that depends on a weight's value
            return result
        self.elements += sum(tensor.numel() for tensor in tensors)
        found = tuple(self.names[id(value)] for value in _flat((args, kwargs)) if id(value) in self.names)
        if found:
            by_slot = _names_in(JOINTLY_LINEAR.get(func, {}), self.names, args, kwargs)
            self.calls.append(ParameterUsage(func, found, by_slot.get("weight"), by_slot.get("bias")))
        return result


class LayerIORecorder(TorchFunctionMode):
    """Keep inputs and gradient edges of the layers' calls with the given weights."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        biases: Mapping[str, str | None],
        num_rows: int,
        *,
        keep_graph: bool = False,
    ) -> None:
        """Watch some weights.

        Args:
            weights: All weights by name.
            biases: The layers' weights, each with the bias that goes with it.
            num_rows: E, rows that every call must see.
            keep_graph: Keep the layers' inputs attached.
        """
        super().__init__()
        watched = {*biases, *(bias for bias in biases.values() if bias is not None)}
        self.names = {id(value): name for name, value in weights.items() if name in watched}
        self.biases = biases
        self.num_rows = num_rows
        self.keep_graph = keep_graph
        self.calls: list[LayerIO] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call; tape it if it is a layer's."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found = {self.names[id(value)] for value in _flat((args, kwargs)) if id(value) in self.names}
        if not found or not _has_tensors(result):
            return result
        slots = JOINTLY_LINEAR.get(func, {}) if func in LAYERS else {}
        by_slot = _names_in(slots, self.names, args, kwargs)
        weight, bias = by_slot.get("weight"), by_slot.get("bias")
        if weight is None or self.biases.get(weight, weight) != bias or found - {weight, bias}:
            raise UnsupportedParameterUseError(f"the weights {sorted(found)} must be used by their layers only.")
        x = _argument(0, "input", args, kwargs)
        _check_rows(x, result, self.num_rows, weight)
        names = ("stride", "padding", "dilation", "groups") if func in CONVOLUTIONS else ()
        options = {**dict(zip(names, args[3:], strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
        self.calls.append(
            LayerIO(
                function=func,
                weight=weight,
                bias=bias,
                source=x,
                input=x if self.keep_graph else x.detach(),
                fixed_input=not self.keep_graph and not x.requires_grad,
                options=options,
                shape=result.shape,
                edge=get_gradient_edge(result),
                normalise=_without(func, slots, args, kwargs) if func in NORMALISATIONS else None,
            )
        )
        return result


class InterpolatedWeights(TorchFunctionMode):
    """Evaluate row e at weights w + t_e d: each jointly linear function is called once with w and once with d."""

    def __init__(self, weights: Mapping[str, Tensor], direction: Mapping[str, Tensor], t: Tensor) -> None:
        """Set the line.

        Args:
            weights: w by name, the very tensors that the network will be called with.
            direction: d by name.
            t: (E,) places on the line, one per row; may carry a tangent or require a gradient.
        """
        super().__init__()
        self.direction = {id(weights[name]): value for name, value in direction.items()}
        self.names = {id(weights[name]): name for name in direction}
        self.t = t

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, and add t times the call along the direction."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found = [id(value) for value in _flat((args, kwargs)) if id(value) in self.direction]
        if not found or not _has_tensors(result):
            return result
        slots = JOINTLY_LINEAR.get(func, {})
        along, moved, trained = list(args), dict(kwargs), 0
        for slot, name in slots.items():
            value = _argument(slot, name, args, kwargs)
            if value is None:
                continue
            trained += id(value) in self.direction
            transpose_block = self.direction.get(id(value))
            transpose_block = torch.zeros_like(value) if transpose_block is None else transpose_block
            if isinstance(slot, int) and slot < len(args):
                along[slot] = transpose_block
            else:
                moved[name] = transpose_block
        if trained != len(found):
            names = sorted(self.names[key] for key in found)
            raise UnsupportedParameterUseError(
                f"the weights {names} must be used by functions that are linear in them."
            )
        _check_rows(_argument(0, "input", args, kwargs), result, len(self.t), self.names[found[0]])
        return result + self.t.view(-1, *[1] * (result.ndim - 1)) * func(*along, **moved)


class StackedWeights(TorchFunctionMode):
    """Evaluate each of G equal parts of the rows at weights of its own."""

    def __init__(self, weights: Mapping[str, Tensor], each: Mapping[str, Tensor]) -> None:
        """Set the weights.

        Args:
            weights: By name, the very tensors that the network will be called with; their values are not used.
            each: By name, with a first dimension of G.
        """
        super().__init__()
        self.each = {id(weights[name]): value for name, value in each.items()}
        self.names = {id(weights[name]): name for name in each}
        self.parts = len(next(iter(each.values())))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call part by part; linear layers in one product."""
        kwargs = kwargs or {}
        found = [id(value) for value in _flat((args, kwargs)) if id(value) in self.each]
        if not found:
            return func(*args, **kwargs)
        slots = JOINTLY_LINEAR.get(func, {})
        values = {name: _argument(slot, name, args, kwargs) for slot, name in slots.items()}
        own = {name: self.each[id(value)] for name, value in values.items() if id(value) in self.each}
        if not slots:
            result = func(*args, **kwargs)  # a shape, a dtype: or a use that cannot be had
            if not _has_tensors(result):
                return result
        if len(own) != len(found):
            names = sorted(self.names[key] for key in found)
            raise UnsupportedParameterUseError(
                f"the weights {names} must be used by functions that are linear in them."
            )
        x = _argument(0, "input", args, kwargs)
        rows = len(x) if isinstance(x, Tensor) and x.ndim else 0
        if not rows or rows % self.parts:  # whether they are all of the rows, the tape knows
            raise UnsupportedParameterUseError(f"the layer of {self.names[found[0]]} must see all rows: it saw {rows}.")
        parts = x.unflatten(0, (self.parts, -1))
        if func is LINEAR and (values["bias"] is None or "bias" in own) and "weight" in own:
            return _linear_each(parts, own["weight"], own.get("bias")).flatten(0, 1)
        results = []
        for g, part in enumerate(parts):
            here, named = [part, *args[1:]] if args else [], {**kwargs, **({} if args else {"input": part})}
            for slot, name in slots.items():
                if name not in own:
                    continue
                if isinstance(slot, int) and slot < len(here):
                    here[slot] = own[name][g]
                else:
                    named[name] = own[name][g]
            results.append(func(*here, **named))
        return torch.cat(results)


def _linear_each(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply G linear layers, (G, n_out, n_in), to (G, n, ..., n_in)."""
    rows = x.flatten(1, -2)
    result = rows @ weight.mT if bias is None else torch.baddbmm(bias[:, None], rows, weight.mT)
    return result.view(*x.shape[:-1], -1)


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Keep torch to kernels that can be differentiated in every way: no fused attention."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _argument(slot: int | str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(slot, int) and slot < len(args):
        return args[slot]
    return kwargs.get(name)


def _names_in(
    slots: Mapping[int | str, str], names: Mapping[int, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, str | None]:
    """Find which weights lie in the places of a function's weight and bias."""
    return {name: names.get(id(_argument(slot, name, args, kwargs))) for slot, name in slots.items()}


def _without(
    func: Callable[..., Any], slots: Mapping[int | str, str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """Make a function of a call's input alone, without the arguments in the given places."""
    rest = [None if number in slots else value for number, value in enumerate(args)][1:]
    named = {name: value for name, value in kwargs.items() if name not in {"input", *slots.values()}}

    def plain(x: Tensor) -> Tensor:
        found: Tensor = func(x, *rest, **named)
        return found

    return plain


def _has_tensors(result: Any) -> bool:
    """Whether a call made something that can depend on a weight's value: not a shape, not a dtype."""
    return any(isinstance(value, Tensor) for value in _flat((result,)))


def _check_rows(x: Any, result: Tensor, num_rows: int, name: str) -> None:
    seen = len(x) if isinstance(x, Tensor) and x.ndim else 0
    if seen != num_rows or len(result) != num_rows:
        raise UnsupportedParameterUseError(f"the layer of {name} must see all {num_rows} rows: it saw {seen}.")


def _flat(values: Any) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(value.values())
        else:
            yield value
