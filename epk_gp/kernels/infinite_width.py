"""Kernels of random networks of infinite width, to compare a path kernel with."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import pi
from typing import Any, cast, final

import gpytorch
import torch
from gpytorch.constraints import Positive
from jaxtyping import Float
from torch import Tensor

ORDERS = (0, 1, 2)


def angular(cosine: Float[Tensor, "*n"], order: int) -> Float[Tensor, "*n"]:
    """Evaluate J_n(theta) for n = 0, 1, 2.

    Equations (4) to (7), Cho & Saul (2009):

        J_0 = pi - theta,   J_1 = sin + (pi - theta) cos,   J_2 = 3 sin cos + (pi - theta) (1 + 2 cos^2)

    Its derivatives form a ladder, dJ_n / dcos = n^2 J_{n-1}, and dJ_0 / dcos = 1 / sin. J_0 has a cusp at theta = 0 and
    pi: its derivative there is set to 0, which is that of a kernel's diagonal, where it is constant.

    Args:
        cosine: cos(theta); values beyond -1 and 1 are rounding errors, and clamped.
        order: n.
    """
    return cast(Tensor, _Angular.apply(cosine.clamp(-1, 1), order))  # type: ignore[no-untyped-call]


class _Angular(torch.autograd.Function):
    """J_n with its ladder of derivatives; autograd through acos gives infinity times zero where two points coincide."""

    @staticmethod
    def forward(ctx: Any, cosine: Tensor, order: int) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(cosine)
        angle = torch.acos(cosine)
        if order == 0:
            return pi - angle
        sine = (1 - cosine.square()).sqrt()
        if order == 1:
            return sine + (pi - angle) * cosine
        return 3 * sine * cosine + (pi - angle) * (1 + 2 * cosine.square())

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None]:
        (cosine,) = ctx.saved_tensors
        if ctx.order > 0:
            return weights * ctx.order**2 * angular(cosine, ctx.order - 1), None
        square = 1 - cosine.square()
        smooth = square > 0
        return weights * torch.where(smooth, square, torch.ones_like(square)).rsqrt() * smooth, None


class InfiniteWidthKernel(gpytorch.kernels.Kernel, ABC):  # type: ignore[misc]  # gpytorch ships no types
    """Covariance of the last hidden layer of a random network with infinitely wide layers (Neal 1996).

        S_1(x, y) = bias_variance + weight_variance * x^T y
        K_l(x, y) = scale * E[psi(u) psi(v)],                  (u, v) ~ N(0, [[S_l(x, x), S_l(x, y)], [.., S_l(y, y)]])
        S_{l+1}   = bias_variance + weight_variance * K_l      one layer more (the recursion of NNGP, Lee et al. 2018)

    Variances are learned. Inputs have no copy column; pass `active_dims` to use such a kernel beside an `EPKKernel`.

    Args:
        depth: Number L of hidden layers; the kernel is K_L.
        bias: Whether layers have biases; bias_variance is 0 without.
        batch_shape: Of the variances.
        active_dims: Columns of wider inputs to use.

    Raises:
        ValueError: The depth is below 1.
    """

    def __init__(
        self,
        depth: int = 1,
        *,
        bias: bool = True,
        batch_shape: torch.Size | Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1 hidden layer: got {depth}.")
        batch = torch.Size(batch_shape)
        super().__init__(batch_shape=batch, active_dims=active_dims)
        self.depth, self.bias = depth, bias
        for name in ["weight_variance", "bias_variance"] if bias else ["weight_variance"]:
            self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros(*batch, 1)))
            self.register_constraint(f"raw_{name}", Positive())
            self.initialize(**{f"raw_{name}": Positive().inverse_transform(torch.ones(*batch, 1))})

    @property
    def weight_variance(self) -> Float[Tensor, "*b 1"]:
        """Variance of a weight, times the width before it."""
        value: Tensor = self.raw_weight_variance_constraint.transform(self.raw_weight_variance)
        return value

    @weight_variance.setter
    def weight_variance(self, value: float | Tensor) -> None:
        self._initialize("weight_variance", value)

    @property
    def bias_variance(self) -> Float[Tensor, "*b 1"]:
        """Variance of a bias."""
        value: Tensor = self.raw_bias_variance_constraint.transform(self.raw_bias_variance)
        return value

    @bias_variance.setter
    def bias_variance(self, value: float | Tensor) -> None:
        self._initialize("bias_variance", value)

    @abstractmethod
    def expectation(
        self, s_xx: Float[Tensor, "*#n"], s_yy: Float[Tensor, "*#n"], s_xy: Float[Tensor, "*#n"]
    ) -> Float[Tensor, "*m"]:
        """Evaluate scale * E[psi(u) psi(v)] for (u, v) ~ N(0, [[s_xx, s_xy], [s_xy, s_yy]])."""

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """List the buffers that have the batch's shape; `active_dims` has not, and GPyTorch would index it."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            if name.rpartition(".")[2] != "active_dims":
                yield name, buffer

    def forward(
        self,
        x1: Float[Tensor, "*b n D"],
        x2: Float[Tensor, "*c m D"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Float[Tensor, "*d n"] | Float[Tensor, "*d n m"]:
        """Evaluate the kernel, or its diagonal.

        Raises:
            ValueError: `last_dim_is_batch` is True.
        """
        if last_dim_is_batch:
            raise ValueError("last_dim_is_batch must be False: got True, which additive kernels of one column need.")
        same = x1.shape == x2.shape and torch.equal(x1, x2)
        s_xx = self._inner(x1, x1, diag=True)
        s_yy = s_xx if same else self._inner(x2, x2, diag=True)
        s_xy = s_xx if same and diag else self._inner(x1, x2, diag=diag)
        if not diag:
            if same:  # the same rounded numbers, so that the angle of a point with itself is exactly 0
                s_xx = s_yy = s_xy.diagonal(dim1=-2, dim2=-1)
            s_xx, s_yy = s_xx[..., :, None], s_yy[..., None, :]
        for layer in range(self.depth):
            moments = [self.expectation(*s) for s in ((s_xx, s_xx, s_xx), (s_yy, s_yy, s_yy), (s_xx, s_yy, s_xy))]
            if layer == self.depth - 1:
                break
            s_xx, s_yy, s_xy = (self._next(k, diag) for k in moments)
        return moments[2]

    def _inner(self, x: Tensor, y: Tensor, *, diag: bool) -> Tensor:
        """Evaluate S_1 for all pairs of points, or only for pairs of equal index."""
        return self._next((x * y).sum(-1) if diag else x @ y.mT, diag)

    def _next(self, products: Tensor, diag: bool) -> Tensor:
        """Compute the next layer's second moments from inner products."""

        def shaped(variance: Tensor) -> Tensor:
            return variance if products.ndim < 2 or diag else variance[..., None]

        result = shaped(self.weight_variance) * products
        return result + shaped(self.bias_variance) if self.bias else result

    def _initialize(self, name: str, value: float | Tensor) -> None:
        raw = getattr(self, f"raw_{name}")
        target = torch.as_tensor(value).to(raw)
        self.initialize(**{f"raw_{name}": getattr(self, f"raw_{name}_constraint").inverse_transform(target)})


@final
class ErfKernel(InfiniteWidthKernel):
    """The error function's kernel, psi = erf.

    Equation (10), Williams (1996):

        K(x, y) = 2 / pi asin(2 S(x, y) / sqrt((1 + 2 S(x, x)) (1 + 2 S(y, y))))

    Arguments: as `InfiniteWidthKernel`.
    """

    def expectation(
        self, s_xx: Float[Tensor, "*#n"], s_yy: Float[Tensor, "*#n"], s_xy: Float[Tensor, "*#n"]
    ) -> Float[Tensor, "*m"]:
        """Evaluate E[erf(u) erf(v)]."""
        return 2 / pi * torch.asin(2 * s_xy / ((1 + 2 * s_xx) * (1 + 2 * s_yy)).sqrt())


@final
class ArcCosineKernel(InfiniteWidthKernel):
    """The arc-cosine kernel, psi(u) = u^n for u > 0 and 0 elsewhere: a step (n = 0), ReLU (1), or its square (2).

    Equation (3), Cho & Saul (2009), which has the scale 2:

        K(x, y) = 2 E[psi(u) psi(v)] = 1 / pi (S(x, x) S(y, y))^(n/2) J_n(theta)
        cos(theta) = S(x, y) / (S(x, x) S(y, y))^(1/2)

    Args:
        order: n.
        depth: Number of hidden layers.
        bias: Whether layers have biases; not by default, so that the kernel is homogeneous of degree n^depth.
        options: As `InfiniteWidthKernel`.

    Raises:
        ValueError: The order is not 0, 1 or 2.
    """

    def __init__(self, order: int = 1, depth: int = 1, *, bias: bool = False, **options: Any) -> None:
        if order not in ORDERS:
            raise ValueError(f"order must be one of {list(ORDERS)}: got {order!r}.")
        super().__init__(depth, bias=bias, **options)
        self.order = order

    def expectation(
        self, s_xx: Float[Tensor, "*#n"], s_yy: Float[Tensor, "*#n"], s_xy: Float[Tensor, "*#n"]
    ) -> Float[Tensor, "*m"]:
        """Evaluate 2 E[psi(u) psi(v)].

        Raises:
            ValueError: The order is 0 and a point is the origin, which has no direction.
        """
        square = s_xx * s_yy
        nonzero = square > 0
        if self.order == 0 and not nonzero.all():
            raise ValueError("the arc-cosine kernel of order 0 has no value at the origin: use bias=True.")
        length = torch.where(nonzero, square, torch.ones_like(square)).sqrt()
        values = angular(s_xy / length, self.order) * length**self.order / pi
        return values if self.order == 0 else values * nonzero
