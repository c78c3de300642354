"""The one kernel that all classes share: a power of the path kernel's cosine times an RBF kernel; and its features."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from epk_gp.autodiff.sketches import rbf_features, tensor_sketch
from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.core.plans import posterior_points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.data import float_inputs
from epk_gp.gram.path_features import path_features, trace_sketch
from epk_gp.gram.sketch import PathSketch

# Training inputs whose distances give the lengthscale: half a million pairs, whose median has a standard error below
# 0.2 % of the spread, whatever the number of inputs.
_LENGTHSCALE_POINTS = 1000

# The median squared distance must be so many times the rounding of one, so that kernel values have six digits.
_LEAST_DISTANCE = 1e6


@dataclass(frozen=True, eq=False)
class LabelKernel:
    """A scalar kernel between inputs, with the value 1 between an input and itself. Values are float64.

    They have the precision of the inputs, and of the weights where inputs are integers. The trace is that of one
    combination of the outputs at each node, v_n^T K_n(x, x') v_n with rows v_n of a Hadamard matrix in turn, for a C-th
    of the cost: exact for kernels that do not change from node to node (docs/theory.md, section 9).

        k(x, x') = (tr K(x, x') / sqrt(tr K(x, x) tr K(x', x'))  exp(-|x - x'|^2 / 2 l^2))^p

    Attributes:
        nodes: Few steps that stand for the whole run (`nodes_trajectory`).
        lengthscale: l of the RBF kernel; None leaves that factor out.
        options: How blocks are computed.
        seed: Draws the combinations of the outputs.
        power: p, a whole number from 1 on.
    """

    nodes: Trajectory
    lengthscale: float | None
    options: ComputeOptions
    seed: int = 0
    power: int = 1

    def rounding(self, X: Shaped[Tensor, "n ..."]) -> float:
        """Return the relative rounding error of a value between inputs like these."""
        return self.power * torch.finfo(self.nodes.model.spec_for(X).dtype).eps

    @cached_property
    def combined(self) -> PathSketch:
        """The trace of the path kernel of the logits, from one combination of the outputs at each node."""
        return trace_sketch(self.nodes, 1, nodes=None, seed=self.seed, head="logits")

    def gram(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n n"]:
        """Evaluate the kernel between all pairs of n inputs.

        Raises:
            ValueError: An input's gradients are all zero: it has no direction that a cosine could compare.
        """
        K = self.block(X, X)
        K.diagonal().fill_(1)  # up to rounding it is 1 already
        return K

    def block(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Evaluate the kernel between n and m inputs.

        Raises:
            ValueError: As for `gram`.
        """
        a = Points(X, is_train=False)
        b = a if X is Y else Points(Y, is_train=False)
        products, of_a, of_b = self.combined.products(a, b, self.options)
        K = products[0].to(torch.float64).div_(_lengths(of_a)[:, None]).div_(_lengths(of_b))
        if self.lengthscale is not None:
            self._multiply_by_rbf(K, X, Y, self.lengthscale)
        return K if self.power == 1 else K.pow_(self.power)

    def split(self, X: Shaped[Tensor, "n ..."], num_columns: int) -> Iterator[Shaped[Tensor, "b ..."]]:
        """Split inputs into parts whose blocks with `num_columns` others fit into the memory budget."""
        yield from X.split(posterior_points(self.options.memory_budget, 8, 1, num_columns))

    def _multiply_by_rbf(self, K: Tensor, X: Tensor, Y: Tensor, lengthscale: float) -> None:
        size = max(1, self.options.memory_budget // (4 * 8 * len(Y)))
        for rows in torch.arange(len(X), device=X.device).split(size):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            K[part] *= squared_distances(X[part], Y).mul_(-0.5 / lengthscale**2).exp_()


def _lengths(squares: Float[Tensor, "n 1"]) -> Float[Tensor, " n"]:
    require_direction(squares[:, 0] > 0)
    return squares[:, 0].to(torch.float64).sqrt()


def require_direction(has_gradient: Bool[Tensor, " n"]) -> None:
    """Raise if the gradients of a point are all zero, so that there is no direction that a cosine could compare.

    Raises:
        ValueError: There is such a point.
    """
    if not has_gradient.all():
        row = int((~has_gradient).nonzero()[0])
        raise ValueError(
            f"every point must have a gradient other than zero: that of point {row} is zero in all outputs and "
            "weights. Leave that point out."
        )


def squared_distances(X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
    """Return |x - y|^2 for every pair of flattened inputs; exactly 0 between a set's points and themselves."""
    x, y = X.flatten(1), Y.flatten(1)
    squares = torch.addmm(x.square().sum(1)[:, None] + y.square().sum(1), x, y.T, alpha=-2).clamp_min_(0)
    if X is Y or (X.shape == Y.shape and torch.equal(X, Y)):
        squares.fill_diagonal_(0)
    return squares


def median_lengthscale(X: Shaped[Tensor, "n ..."]) -> float:
    """Return the square root of the median squared distance between different inputs, of at most 1000 of them.

    Raises:
        ValueError: More than half of the pairs of inputs are equal, or rounding makes their distances wrong.
    """
    count = min(len(X), _LENGTHSCALE_POINTS)
    some = X[torch.arange(count, device=X.device) * len(X) // count].to(torch.float64)
    squares = squared_distances(some, some)
    above = torch.triu_indices(count, count, 1, device=X.device)
    median = float(squares[above[0], above[1]].median()) if count > 1 else 0.0
    length = float(some.flatten(1).square().sum(1).median())  # squared; few inputs far from the others do no harm
    rounding = some[0].numel() * torch.finfo(squares.dtype).eps * length  # of equal inputs' distance 0
    if not median > rounding:
        raise ValueError(
            "inputs must differ for a kernel on their distances: the median distance between training inputs is 0. "
            "Use inputs_kernel=None."
        )
    if not median > _LEAST_DISTANCE * rounding:
        raise ValueError(
            "inputs must not lie much farther from 0 than from each other, or their distances are rounding errors: got "
            f"a median distance of {sqrt(median):.3g} at {sqrt(length):.3g} from 0. Train on inputs "
            "whose mean was subtracted, or use inputs_kernel=None."
        )
    return sqrt(median)


@dataclass(frozen=True, eq=False)
class InputFeatures:
    """Features of inputs, each row of length 1, in float32: their error is that of the sketch, not of rounding.

    Attributes:
        nodes: The nodes of the path, as a run.
        num_features: k.
        seed: Of the sketch.
        lengthscale: Of the RBF kernel on the inputs; None without one.
        options: How they are computed.
        power: Of the product of both kernels, a whole number from 1 on. Every further factor is another sketch, with
            its noise.
    """

    nodes: Trajectory
    num_features: int
    seed: int
    lengthscale: float | None
    options: ComputeOptions = ComputeOptions()
    power: int = 1

    def __call__(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n k"]:
        """Compute the features of n inputs.

        Raises:
            ValueError: An input's gradients are all zero: it has no direction, as for `LabelKernel`.
        """
        X = float_inputs(X, torch.float32)
        z = path_features(
            self.nodes,
            X,
            self.num_features,
            nodes=None,
            seed=self.seed,
            head="logits",
            num_probe=0,
            memory_budget=self.options.memory_budget,
            progress=self.options.progress,
            executor=self.options.executor,
        )
        require_direction(z.any(1))
        z = torch.nn.functional.normalize(z)
        if self.lengthscale is not None:
            z = self._product(z, rbf_features(X, self.lengthscale, seed=self.seed), 0)
        factor = z
        for number in range(1, self.power):
            z = self._product(z, factor, number)
        return z

    def _product(self, z: Tensor, other: Tensor, number: int) -> Tensor:
        return torch.nn.functional.normalize(tensor_sketch(z, other, self.num_features, seed=self.seed + number))
