"""Gradients with respect to one layer's weight and bias, from its inputs and its outputs' gradients.

Shapes: inputs (E, L, G, n_in), deltas (K, E, L, G, n_out), for L positions and G groups that do not mix. A linear layer
has one group, its positions are whatever lies between rows and features; a normalisation's scale and shift are a group
of one input and one output for every number that they scale.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from epk_gp.autodiff.interception import CHANNELS_LAST, LayerIO
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    Feature,
    OuterProductJacobian,
    append_bias_column,
    factored_is_cheaper,
    sum_outer_products,
)


class Layer:
    """One weight's gradients, from those with respect to its calls' outputs, some cotangents at a time."""

    def __init__(
        self,
        calls: Sequence[tuple[int, LayerIO]],
        shape: torch.Size,
        bias: bool,
        form: ContractionCost,
        *,
        averaged: bool,
        fixed_delta: bool,
    ) -> None:
        """Choose the form.

        Args:
            calls: The weight's calls, each with its number among all.
            shape: Of the weight.
            bias: A trained bias goes with it.
            form: What the choice depends on.
            averaged: Its factors have averages over t.
            fixed_delta: See `OuterProductJacobian`.
        """
        self.calls, self.bias, self.fixed_delta = calls, bias, fixed_delta
        first = calls[0][1]
        scales = first.normalise is not None
        self.groups: int = shape.numel() if scales else first.options.get("groups", 1)
        self.fixed_input = all(c.fixed_input for _, c in calls)
        n_in, self.n_out = (1, 1) if scales else (shape[1:].numel(), shape[0] // self.groups)
        length = sum(c.shape[1:].numel() // (self.groups * self.n_out) for _, c in calls)
        averaged = averaged or self.fixed_input
        self.factored = self.groups == 1 and factored_is_cheaper(form, length, n_in, self.n_out, averaged)
        one = bias and not self.factored
        self.inputs = [_inputs(c, n_in, self.groups, shape[2:], one=one) for _, c in calls]
        self.parts: list[Tensor] = []

    def take(self, deltas: Sequence[Tensor]) -> None:
        """Take in the next cotangents' gradients with respect to all calls' outputs."""
        own = [_at_positions(c, deltas[number], self.groups, self.n_out) for number, c in self.calls]
        if self.factored:
            self.parts.append((own[0] if len(own) == 1 else torch.cat(own, dim=2)).squeeze(3))
            return
        written = [sum_outer_products(a, delta) for a, delta in zip(self.inputs, own, strict=True)]
        self.parts.append(reduce(torch.add, written))

    def feature(self) -> Feature:
        """Give the gradients for all cotangents that were taken in."""
        values = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        if not self.factored:
            return DenseJacobian(values)
        a = self.inputs[0] if len(self.inputs) == 1 else torch.cat(self.inputs, dim=1)
        return OuterProductJacobian(a.squeeze(2), values, self.bias, self.fixed_input, self.fixed_delta)


def _at_positions(layer: LayerIO, delta: Tensor, groups: int, n_out: int) -> Tensor:
    """Bring a call's output gradients to (K, E, L, G, n_out)."""
    if layer.function in CHANNELS_LAST:
        return delta.reshape(*delta.shape[:2], -1, groups, n_out)
    positions = delta.reshape(*delta.shape[:2], groups * n_out, -1).transpose(2, 3)
    return positions.view(*positions.shape[:3], groups, n_out)


def _inputs(layer: LayerIO, n_in: int, groups: int, kernel: torch.Size, *, one: bool) -> Tensor:
    """Bring a call's inputs to (E, L, G, n_in), with the 1 of a bias if asked for."""
    x = layer.input if layer.normalise is None else layer.normalise(layer.input)
    if layer.function in CHANNELS_LAST:
        x = x.reshape(len(x), -1, groups, n_in)
        return append_bias_column(x) if one else x
    windows = x if layer.normalise is not None else _windows(x, layer.options, kernel)
    patches = windows.reshape(len(x), groups, n_in, -1)
    if one:
        patches = torch.cat([patches, x.new_ones(len(x), groups, 1, patches.shape[3])], dim=2)
    return patches.permute(0, 3, 1, 2)


def _windows(x: Tensor, options: Mapping[str, Any], kernel: torch.Size) -> Tensor:
    """Give what a convolution sees at each position: (E, channels, *kernel, *positions)."""
    stride, dilation = (_each(options.get(key, 1), len(kernel)) for key in ("stride", "dilation"))
    x = F.pad(x, _padding(options.get("padding", 0), kernel, dilation))
    for dim, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(dim, spread * (size - 1) + 1, step)[..., ::spread]
    dims = len(kernel)
    return x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * dims if len(values) == 1 else values


def _padding(padding: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[int]:
    """Give the zeros before and after each dimension, last dimension first."""
    if padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(width, width) for width in _each(0 if padding == "valid" else padding, len(kernel))]
    return [width for side in reversed(sides) for width in side]
