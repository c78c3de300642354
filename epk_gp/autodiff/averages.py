"""Averages of the derivative of one operation between two states, most in closed form (docs/theory.md, section 11).

An operation is given by its value at the start, its value at the end, and, for each argument that moves, a function
that pulls multipliers back to it: m with `<m, change of the argument> = <multiplier of the result, change of the
result>`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.interception import has_rows
from epk_gp.core.model import BATCH_MARK

Pull = Callable[[Tensor], Tensor]
Ends = tuple[Tensor, Tensor]
Outputs = tuple[Tensor, ...]

# Gauss-Legendre nodes on [-1, 1], for the derivative of functions without a closed form.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)

# A remainder below this many eps of the outputs' size is rounding, and is not distributed.
_ROUNDING = 64


# Attributes of a tensor: its value at the end, and the mean of both, with the tensor version of that mean.
_END, _MIDDLE = "_epk_gp_end", "_epk_gp_middle"


def end_of(x: Tensor) -> Tensor:
    """Return the value at the end of the stretch."""
    end: Tensor = getattr(x, _END, x)
    return end


def moves(x: object) -> bool:
    """Return whether a tensor has a value at the end of the stretch."""
    return hasattr(x, _END)


def moves_to(x: Tensor, end: Tensor) -> Tensor:
    """Attach to a tensor its value at the end of the stretch."""
    setattr(x, _END, end)
    setattr(x, _MIDDLE, None)
    return x


def middle_of(x: Tensor) -> Tensor:
    """Return the mean of a tensor's values at both ends; for whole numbers, the values at the start."""
    if not x.is_floating_point() and not x.is_complex():
        return x.detach()
    known: tuple[int, Tensor] | None = getattr(x, _MIDDLE, None)
    if known is None or known[0] != x._version:
        known = (x._version, torch.lerp(x.detach(), end_of(x), 0.5).requires_grad_(x.requires_grad))
        setattr(x, _MIDDLE, known)
        if has_rows(x):
            setattr(known[1], BATCH_MARK, getattr(x, BATCH_MARK))
    return known[1]


class _Pulled(torch.autograd.Function):
    """A value with a known function that pulls multipliers back to one argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: list[Tensor], pull: Pull) -> Tensor:
        """Return the value; it is wrapped in a list, because autograd would make a view of a tensor argument."""
        ctx.pull = pull
        return value[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """Pull back."""
        return ctx.pull(grads[0]), None, None


class _Joined(torch.autograd.Function):
    """A value whose multiplier goes to several nodes; autograd runs the requested ones."""

    @staticmethod
    def forward(ctx: Any, value: list[Tensor], *arms: Tensor) -> Tensor:
        """Return the value."""
        ctx.num_arms = len(arms)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the multiplier to each arm."""
        return None, *[grads[0]] * ctx.num_arms


def pulled(value: Tensor, *arms: tuple[Tensor, Pull]) -> Tensor:
    """Return a new tensor for the result of an operation.

    Args:
        value: Its value, without a graph.
        arms: Moving arguments, each with the function that pulls multipliers back to it.
    """
    differentiable = [(x, pull) for x, pull in arms if x.requires_grad]
    if not differentiable or not torch.is_grad_enabled():
        return value
    apply_pulled: Any = _Pulled.apply
    if len(differentiable) == 1:
        [(x, pull)] = differentiable
        return cast(Tensor, apply_pulled(x, [value], pull))
    nodes = (apply_pulled(x, [value.new_empty(()).expand(value.shape)], pull) for x, pull in differentiable)
    joined: Any = _Joined.apply
    return cast(Tensor, joined([value], *nodes))


class SegmentSecant(torch.autograd.Function):
    """Any function: the mean of its derivative over the segment between both ends, and a correction of the rest.

    The mean is taken at four Gauss-Legendre nodes. Its remaining error in the change of the outputs is distributed in
    proportion to the changes of the inputs: the smallest correction that removes it, row by row.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Outputs], ends: Sequence[Ends], values: Any, *inputs: Any) -> Outputs:
        """Return the results at the start.

        Args:
            ctx: Data for the backward pass.
            function: Maps a position in [0, 1] and inputs to the floating-point outputs.
            ends: The inputs at both ends.
            values: The outputs at both ends, and whether they have rows.
            inputs: The inputs, for which gradients are computed.
        """
        ctx.function, ctx.ends, (outputs, ctx.has_rows) = function, ends, values
        ctx.changes = [end - start for start, end in outputs]  # the outputs may be overwritten
        ctx.sizes = [start.abs() + end.abs() for start, end in outputs]
        return tuple(start for start, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Average the derivative, and distribute the remainder."""
        means = _mean_gradients(ctx.function, ctx.ends, grads)
        changes, inner = [end - start for start, end in ctx.ends], partial(_inner, has_rows=ctx.has_rows)
        left = inner(ctx.changes, grads) - inner(means, changes)
        size, length = inner(ctx.sizes, [grad.abs() for grad in grads]), inner(changes, changes)
        is_left = (left.abs() > _ROUNDING * torch.finfo(left.dtype).eps * size) & (length > 0)
        factor = torch.where(is_left, left / length, 0.0)
        pairs = zip(means, changes, strict=True)
        return None, None, None, *(m + factor.view(-1, *[1] * (c.ndim - 1)).squeeze(0) * c for m, c in pairs)


def _mean_gradients(function: Callable[..., Outputs], ends: Sequence[Ends], grads: Sequence[Tensor]) -> list[Tensor]:
    """Average the contracted derivative over the segment between both ends."""
    means = [torch.zeros_like(start) for start, _ in ends]
    for node, weight in zip((1 + _NODES) / 2, _WEIGHTS / 2, strict=True):
        here = [torch.lerp(*both, float(node)).requires_grad_() for both in ends]
        with torch.enable_grad():
            outputs = function(node, *(x.clone() for x in here))
            found = torch.autograd.grad(outputs, here, grads, allow_unused=True, materialize_grads=True)
        for mean, grad in zip(means, found, strict=True):
            mean.add_(grad, alpha=float(weight))
    return means


def _inner(left: Sequence[Tensor], right: Sequence[Tensor], *, has_rows: bool) -> Float[Tensor, " n"]:
    """Sum the products of all entries, row by row."""
    products = [a * b for a, b in zip(left, right, strict=True)]
    return torch.stack([value.reshape(len(value) if has_rows else 1, -1).sum(1) for value in products]).sum(0)


def identity(grad: Tensor) -> Tensor:
    """Return the multiplier."""
    return grad


def _mean(ends: Ends) -> Tensor:
    return torch.add(*ends).mul_(0.5)


def product_pulls(a: Tensor, b: Tensor) -> tuple[Pull, Pull]:
    """Return the functions that pull back to the factors of an elementwise product, from their middles."""
    return (lambda grad: (grad * b).sum_to_size(a.shape)), (lambda grad: (grad * a).sum_to_size(b.shape))


def matmul_pulls(a: Tensor, b: Tensor) -> tuple[Pull, Pull]:
    """Return the functions that pull back to the factors of a matrix product, from their middles."""

    def to_right(grad: Tensor) -> Tensor:
        if b.ndim == 2:
            return a.reshape(-1, a.shape[-1]).mT @ grad.reshape(-1, grad.shape[-1])
        return (a.mT @ grad).sum_to_size(b.shape)

    return (lambda grad: (grad @ b.mT).sum_to_size(a.shape)), to_right


def log_mean(a: Tensor, b: Tensor, change: Tensor) -> Tensor:
    """Return (b - a) / (log b - log a) of tensors whose logarithms differ by `change`; 0 if this is not a number."""
    size = change.abs().nan_to_num_(nan=0.0).clamp_min_(torch.finfo(change.dtype).tiny)
    return torch.expm1(-size).div_(size).neg_().mul_(torch.maximum(a, b))


def _tanh(x: Ends, y: Ends) -> Tensor:
    size = (x[1] - x[0]).abs_().clamp_min_(torch.finfo(x[0].dtype).tiny)
    return size.tanh().div_(size).mul_(1 - y[0] * y[1])


def _sigmoid(x: Ends, y: Ends) -> Tensor:
    size = (x[1] - x[0]).abs_().mul_(0.5).clamp_min_(torch.finfo(x[0].dtype).tiny)
    return size.tanh().div_(size).mul_(_mean(y) - y[0] * y[1])


def _silu(x: Ends, y: Ends) -> Tensor:
    s = x[0].sigmoid(), x[1].sigmoid()
    return _sigmoid(x, s).mul_(_mean(x)).add_(_mean(s))


# Slopes (y1 - y0) / (x1 - x0) without cancellation, by the functions' names.
SLOPES: dict[str, Callable[[Ends, Ends], Tensor]] = {
    "square": lambda x, y: x[0] + x[1],
    "sqrt": lambda x, y: (y[0] + y[1]).reciprocal_(),
    "rsqrt": lambda x, y: (y[0] * y[1]).square_().div_(y[0] + y[1]).neg_(),
    "reciprocal": lambda x, y: (y[0] * y[1]).neg_(),
    "exp": lambda x, y: log_mean(*y, x[1] - x[0]),
    "log": lambda x, y: log_mean(*x, y[1] - y[0]).reciprocal_(),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
}


def power_slope(x: Ends, exponent: object) -> Tensor | None:
    """Return the slope of a square or a cube; None for other powers."""
    if exponent == 2:
        return x[0] + x[1]
    return (x[0] + x[1]).square_().sub_(x[0] * x[1]) if exponent == 3 else None


def quotient_slope(call: Callable[[Tensor], Tensor], x: Ends, y: Ends, limit: Tensor | float, *, fits: bool) -> Tensor:
    """Return the slope of any elementwise function.

    Args:
        call: The function.
        x: Its argument at both ends.
        y: Its results.
        limit: Changes up to this size are too small for a quotient: the slope is then the derivative in the middle.
        fits: Whether the function can be called with only some of the numbers.
    """
    change = x[1] - x[0]
    slope = (y[1] - y[0]).div_(change)
    is_near = change.abs_() <= limit
    if bool(is_near.any()):
        with torch.enable_grad():
            middle = _mean(x)
            leaf = (middle[is_near] if fits else middle).requires_grad_()
            (derivative,) = torch.autograd.grad(call(leaf.clone()).sum(), leaf)
        slope[is_near] = derivative if fits else derivative[is_near]
    return slope


class Exponentials:
    """Shares of exponentials in their sums, for numbers that may be -inf at both ends.

    No intermediate number is large, even if the sums at both ends are far apart: each end is shifted by its own largest
    number, and all multipliers are at most 1, because the logarithmic mean is concave.

    Args:
        x: The numbers at both ends.
        dim: Dimension of the sums.
    """

    def __init__(self, x: Ends, dim: int) -> None:
        (p0, log0), (p1, log1) = (_shares(value, dim) for value in x)
        self.dim, self.change, self.change_of_logs = dim, x[1] - x[0], log1 - log0
        self.shares, self.logs = (p0, p1), (log0, log1)
        largest = torch.maximum(log0, log1)
        a0, a1 = (log0 - largest).exp_(), (log1 - largest).exp_()
        self.weights = log_mean(p0 * a0, p1 * a1, self.change).div_(log_mean(a0, a1, self.change_of_logs))

    def softmax(self) -> tuple[Ends, Pull]:
        """Return the shares at both ends: the exponentials of their logarithms."""
        slopes, weights, dim = log_mean(*self.shares, self.change - self.change_of_logs), self.weights, self.dim

        def pull(grad: Tensor) -> Tensor:
            inner = grad * slopes
            return inner.sub_(weights * inner.sum(dim, keepdim=True))

        return self.shares, pull

    def log_sum(self) -> tuple[Ends, Tensor]:
        """Return the logarithms of the sums at both ends, and the averages of their derivatives."""
        return self.logs, self.weights


def _shares(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the softmax, and the logarithm of the sum; both are 0 if all numbers are -inf."""
    largest = x.amax(dim, keepdim=True)
    is_empty = largest == -torch.inf
    largest = largest.masked_fill(is_empty, 0.0)
    exps = (x - largest).exp_()
    sums = exps.sum(dim, keepdim=True).masked_fill_(is_empty, 1.0)
    return exps.div_(sums), sums.log_().add_(largest)


def log_softmax(x: Ends, dim: int) -> tuple[Ends, Pull]:
    """Return the logarithms of shares at both ends, and the function that pulls back to the numbers."""
    (start, end), weights = Exponentials(x, dim).log_sum()
    return (x[0] - start, x[1] - end), lambda grad: grad - weights * grad.sum(dim, keepdim=True)


def normalised(x: Ends, dims: tuple[int, ...], eps: float, *, centres: bool) -> tuple[Ends, Pull]:
    """Return numbers divided by the root of their mean square, minus their mean if `centres`, at both ends."""
    c = [value - value.mean(dims, keepdim=True) if centres else value for value in x]
    r0, r1 = (value.square().mean(dims, keepdim=True).add_(eps).rsqrt_() for value in c)
    middle, inverse = _mean((c[0], c[1])), _mean((r0, r1))
    slope = (r0 * r1).square_().div_(r0 + r1).mul_(-2)

    def pull(grad: Tensor) -> Tensor:
        inner = (grad * middle).mean(dims, keepdim=True).mul_(slope)
        result = torch.addcmul(grad * inverse, middle, inner)
        return result.sub_(result.mean(dims, keepdim=True)) if centres else result

    return (c[0] * r0, c[1] * r1), pull
