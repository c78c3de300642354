"""Autograd functions that propagate the mean derivative between two rows, in place of the derivative at each.

Rows come in pairs, 2i and 2i + 1: the same input at the start and at the end of a stretch of the weights. Each function
has multipliers m with `y_end - y_start = <m, x_end - x_start>`, whatever it computes; see docs/theory.md, section 11.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Outputs = tuple[Tensor, ...]

# Gauss-Legendre nodes on [-1, 1], of the derivative of what is no elementwise function.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)

# A remainder below so many eps of the outputs' size is rounding, and is not distributed.
_ROUNDING = 64


def start_and_end(x: Shaped[Tensor, "E ..."]) -> tuple[Shaped[Tensor, "n ..."], Shaped[Tensor, "n ..."]]:
    """Return the first and the second row of every pair."""
    start, end = x.unflatten(0, (-1, 2)).unbind(1)
    return start, end


def both_rows(value: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "E ..."]:
    """Return what belongs to a pair for each of its rows."""
    return value.repeat_interleave(2, dim=0)


def mean_of_rows(grad: Shaped[Tensor, "E ..."]) -> Shaped[Tensor, "E ..."]:
    """Return the mean over each pair, for each of its rows: the hook of a function that is linear in each argument."""
    return both_rows(grad.unflatten(0, (-1, 2)).mean(1))


class ElementwiseSecant(torch.autograd.Function):
    """A function of single numbers, with the slope between the two rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], has_kinks: bool) -> Tensor:
        """Compute the function and its slopes.

        Args:
            ctx: What the backward pass needs.
            x: (E, ...).
            function: Works entry by entry.
            has_kinks: Its slope between near numbers may be that of none of them.
        """
        y = function(x.clone())
        (start, end), (y_start, y_end) = start_and_end(x), start_and_end(y)
        change = end - start
        # a difference of near numbers is rounding; the derivative in the middle is off by the square of the difference
        limit = 0.0 if has_kinks else torch.finfo(x.dtype).eps ** (1 / 3)
        is_near = change.abs() <= limit * torch.maximum(start.abs(), end.abs())
        slope = (y_end - y_start) / change
        if bool(is_near.any()):
            with torch.enable_grad():
                middle = ((start + end) / 2).requires_grad_()
                (derivative,) = torch.autograd.grad(function(middle.clone()).sum(), middle)
            slope = torch.where(is_near, derivative, slope)
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """Multiply by the slopes."""
        (slope,) = ctx.saved_tensors
        return both_rows(slope) * mean_of_rows(grads[0]), None, None


class PoolSecant(torch.autograd.Function):
    """The largest of several inputs: the first row's until the second row's catches up with it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the pool, and for how long the largest inputs of either row are the largest.

        Args:
            ctx: What the backward pass needs.
            x: (E, channels, ...).
            pool: Returns the largest inputs, and their places among those of the channel.
        """
        y, indices = pool(x)
        first, second = start_and_end(indices.flatten(2))
        leads = [row.gather(2, first) - row.gather(2, second) for row in start_and_end(x.flatten(2))]
        lead = leads[0] - leads[1]
        share = torch.where(lead > 0, leads[0] / lead, 0.5)
        ctx.save_for_backward(first, second, share)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """Give each of the two its share."""
        first, second, share = ctx.saved_tensors
        grad = grads[0].flatten(2).unflatten(0, (-1, 2)).mean(1)
        result = grad.new_zeros(len(first), ctx.shape[1], ctx.shape[2:].numel())
        result.scatter_add_(2, first, share * grad).scatter_add_(2, second, (1 - share) * grad)
        return both_rows(result.unflatten(2, ctx.shape[2:])), None


class SegmentSecant(torch.autograd.Function):
    """Any function of rows: its derivative's mean over the segment between both rows, and what that leaves.

    The mean is taken at four Gauss-Legendre nodes. What it leaves of the change of the outputs is distributed in
    proportion to the changes of the inputs: the smallest correction that leaves nothing.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Outputs], *inputs: Tensor) -> Outputs:
        """Compute the function.

        Args:
            ctx: What the backward pass needs.
            function: Maps the inputs to its floating-point outputs, row by row.
            inputs: (E, ...) each.
        """
        outputs = function(*(x.clone() for x in inputs))
        ctx.function, ctx.num_inputs = function, len(inputs)
        ends = [start_and_end(y) for y in outputs]  # the outputs may be overwritten
        ctx.save_for_backward(
            *inputs, *(end - start for start, end in ends), *(start.abs() + end.abs() for start, end in ends)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Average the derivative, and distribute what is left."""
        inputs, rest = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        cotangents = [mean_of_rows(grad) for grad in grads]
        means = _mean_gradients(ctx.function, inputs, cotangents)
        changes = [end - start for start, end in map(start_and_end, inputs)]
        of_pairs = [cotangent[::2] for cotangent in cotangents]
        left = _inner(rest[: len(grads)], of_pairs) - _inner(means, changes)
        size = _inner(rest[len(grads) :], [cotangent.abs() for cotangent in of_pairs])
        length = _inner(changes, changes)
        is_left = (left.abs() > _ROUNDING * torch.finfo(left.dtype).eps * size) & (length > 0)
        factor = torch.where(is_left, left / length, 0.0)
        corrected = [
            mean + factor.view(-1, *[1] * (change.ndim - 1)) * change
            for mean, change in zip(means, changes, strict=True)
        ]
        return None, *(both_rows(value) for value in corrected)


def _mean_gradients(
    function: Callable[..., Outputs], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Average the contracted derivative over the segments between the rows, two nodes at a time."""
    means = [torch.zeros_like(start_and_end(x)[0]) for x in inputs]
    for first in range(0, len(_NODES), 2):
        places = inputs[0].new_tensor((1 + _NODES[first : first + 2]) / 2)
        weights = inputs[0].new_tensor(_WEIGHTS[first : first + 2] / 2)
        here = []
        for x in inputs:
            start, end = start_and_end(x)
            along = places.repeat(len(start)).view(-1, *[1] * (x.ndim - 1))
            here.append(torch.lerp(both_rows(start), both_rows(end), along).requires_grad_())
        with torch.enable_grad():
            outputs = function(*(x.clone() for x in here))
            found = torch.autograd.grad(outputs, here, cotangents, allow_unused=True, materialize_grads=True)
        for mean, grad in zip(means, found, strict=True):
            mean += torch.einsum("nk...,k->n...", grad.unflatten(0, (-1, 2)), weights)
    return means


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Sum the products of all entries, row by row."""
    return torch.stack([(a * b).reshape(len(a), -1).sum(1) for a, b in zip(left, right, strict=True)]).sum(0)
