"""Gradients with respect to one layer's weight and bias, from its inputs and its outputs' gradients.

Weight sharing: a layer uses its weight at L positions for every sample. Inputs are brought to the shape
(E, L, G, n_in) and output gradients to (K, E, L, G, n_out), for E samples, K cotangents, and G groups that do not mix.

* A linear layer has one group. Its positions are whatever lies between samples and features, such as the places of a
  sequence: an input (E, T, n_in) becomes (E, T, 1, n_in).
* A convolution's positions are the places of its output. Its inputs are the patches that it sees there.
* A normalisation's scale and shift are G groups of one input and one output, one for every number that they scale.

A weight that is used by several calls has the positions of all of them.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.interception import CHANNELS_LAST, CONVOLUTIONS
from epk_gp.autodiff.representations import LayerJacobian, append_bias_column, sum_outer_products
from epk_gp.autodiff.layer_builder import LayerIO
from epk_gp.autodiff.layer_builder import PoolWindows, sum_over_windows
from epk_gp.autodiff.representations import DenseJacobian, OuterProductJacobian


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
