"""Gaussian-process regression on class labels with one scalar kernel or its features: one factorisation for all.

The kernel is a power of the path kernel's cosine times an RBF kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import exp, log, nan, pi, sqrt
from operator import itemgetter
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from numpy.polynomial import Polynomial
from scipy.optimize import minimize_scalar
from torch import Tensor

from epk_gp.autodiff.sketches import covering_order, rbf_features, tensor_sketch
from epk_gp.core.checks import ComputeOptions, validate_count, validate_integer
from epk_gp.core.inputs import Points
from epk_gp.core.plans import posterior_points
from epk_gp.core.trajectory import Trajectory, parse_inputs
from epk_gp.gp.data import InUnits, float_inputs, in_network_units, label_values
from epk_gp.gp.output_coupling import NOISE_FLOOR
from epk_gp.gram.path_features import trace_sketch
from epk_gp.gram.sketch import NUM_NODES, PathSketch, is_one_state, nodes_trajectory
from epk_gp.quadrature.rules import WeightPath, straight

InputsKernel = Literal["rbf"] | None

# Largest number of multiplications for which a process on up to 5000 points is conditioned through the kernel matrix,
# whose eigenvalues take less time than the features of many points: about ten minutes on one core.
EXACT_POINTS = 5000
EXACT_MULTIPLICATIONS = 10**13
NUM_FEATURES = 4096
MAX_NODES = 256  # default maximum, for networks with many outputs

# Powers of the kernel, compared by the likelihood of validation labels (nats lost per label, one seed each). For 2000
# images of MNIST and Fashion-MNIST and an MLP or a CNN the square is better than the kernel itself: 0.131 and 0.139,
# 0.099 and 0.107, 0.440 and 0.444, 0.400 and 0.401. Sketched in 4096 features it is worse (20,000 of MNIST: 0.080 and
# 0.073).
EXACT_POWER, SKETCHED_POWER = 2, 1

FEATURE_BLOCK = 4096  # points whose features are converted to float64, and to predictions, at a time
_MAX_LOG_NOISE = log(1e4)  # for labels that do not depend on the kernel
_LOG_TOLERANCE = 1e-3  # tolerance of the logarithm of the noise: the marginal likelihood is flat there
_LOSS_TOLERANCE = 3e-6  # allowed error of a predicted value in nats per target: less than the effect of the tolerance
_FIRST_STEP = 0.5  # step of the logarithm: from 1000 rows to 4000 the most likely noise grows by a factor of 1.8
_SQUARE_ROUNDING = 1e-8  # rounding of a sum of squares that is a difference of two
_INVERSE_COLUMNS = 512  # columns of the inverse of a triangular matrix, at a time


# Number of training inputs whose distances give the lengthscale: half a million pairs, whose median has a standard
# error below 0.2 % of the spread, for any number of inputs. The likelihood of these inputs tells where to search for
# the maximum of the likelihood of all.
_FEW_POINTS = 1000

# Least ratio of the median squared distance to its rounding, so that kernel values have six digits.
_LEAST_DISTANCE = 1e6


@dataclass(frozen=True, eq=False)
class LabelKernel:
    """A scalar kernel between inputs, with value 1 between an input and itself. Values are float64.

    They have the precision of the inputs, or of the weights if the inputs are integers. The trace is replaced by one
    combination of the outputs at each node, v_n^T K_n(x, x') v_n with rows v_n of a Hadamard matrix in turn, at 1 / C
    of the cost: this is exact for kernels that are the same at all nodes (docs/theory.md, section 9).

        k(x, x') = (tr K(x, x') / sqrt(tr K(x, x) tr K(x', x'))  exp(-|x - x'|^2 / 2 l^2))^p

    Attributes:
        nodes: A run of few steps that represents the whole run (`nodes_trajectory`).
        lengthscale: l of the RBF kernel; None leaves that factor out.
        options: Options of the computation of blocks.
        seed: Seed of the combinations of the outputs.
        power: p, an integer of at least 1.
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
            ValueError: An input's gradients are all zero: it has no direction for a cosine.
        """
        K = self.block(X, X)
        K.diagonal().fill_(1)  # it is 1 up to rounding
        return K

    def block(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Evaluate the kernel between n and m inputs.

        Raises:
            ValueError: As in `gram`.
        """
        a = Points(X, is_train=False)
        b = a if X is Y else Points(Y, is_train=False)
        products, *squares = self.combined.products(a, b, self.options)
        for square in squares:
            require_direction(square > 0)
        of_a, of_b = (square.to(torch.float64).sqrt() for square in squares)
        K = products.to(torch.float64).div_(of_a[:, None]).div_(of_b)
        if self.lengthscale is not None:
            size = max(1, self.options.memory_budget // (4 * 8 * len(Y)))
            y = in_network_units(self.nodes, Y)
            for values, rows in zip(K.split(size), X.split(size), strict=True):
                distances = squared_distances(in_network_units(self.nodes, rows), y)
                values *= distances.mul_(-0.5 / self.lengthscale**2).exp_()
        return K if self.power == 1 else K.pow_(self.power)


def require_direction(has_gradient: Bool[Tensor, " n"]) -> None:
    """Raise if the gradients of a point are all zero, so that it has no direction for a cosine.

    Raises:
        ValueError: There is such a point.
    """
    if not has_gradient.all():
        row = int((~has_gradient).nonzero()[0])
        raise ValueError(f"every point must have a gradient: that of point {row} is zero throughout. Leave it out.")


def squared_distances(X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
    """Return |x - y|^2 for every pair of flattened inputs; exactly 0 between a set's points and themselves."""
    x, y = X.flatten(1), Y.flatten(1)
    squares = torch.addmm(x.square().sum(1)[:, None] + y.square().sum(1), x, y.T, alpha=-2).clamp_min_(0)
    if X is Y or (X.shape == Y.shape and torch.equal(X, Y)):
        squares.fill_diagonal_(0)
    return squares


def few_rows(num_points: int, device: torch.device) -> Int64[Tensor, " s"]:
    """Return the indices of at most 1000 evenly spaced points."""
    count = min(num_points, _FEW_POINTS)
    return torch.arange(count, device=device) * num_points // max(1, count)


def median_lengthscale(X: Shaped[Tensor, "n ..."]) -> float:
    """Return the square root of the median squared distance between different inputs, of at most 1000 of them.

    Raises:
        ValueError: More than half of the pairs of inputs are equal, or rounding makes their distances wrong.
    """
    some = X[few_rows(len(X), X.device)].to(torch.float64)
    count = len(some)
    squares = squared_distances(some, some)
    above = torch.triu_indices(count, count, 1, device=X.device)
    median = float(squares[above[0], above[1]].median()) if count > 1 else 0.0
    length = float(some.flatten(1).square().sum(1).median())  # squared; a few distant inputs do no harm
    rounding = some[0].numel() * torch.finfo(squares.dtype).eps * length  # of the distance 0 of equal inputs
    if not median > rounding:
        raise ValueError("inputs must differ for a kernel on distances: their median is 0. Use inputs_kernel=None.")
    if not median > _LEAST_DISTANCE * rounding:
        raise ValueError(
            "inputs must not lie much farther from 0 than from each other, or their distances are rounding errors: got "
            f"a median distance of {sqrt(median):.3g} at {sqrt(length):.3g} from 0. Train on inputs "
            "whose mean was subtracted, or use inputs_kernel=None."
        )
    return sqrt(median)


@dataclass(frozen=True, eq=False)
class InputFeatures:
    """Features of inputs, each row of length 1, in float32: the sketch causes their error, not rounding.

    Attributes:
        nodes: The nodes of the path, as a run.
        num_features: k.
        seed: Seed of the sketch.
        lengthscale: Lengthscale of the RBF kernel on the inputs; None without one.
        options: Options of the computation.
        power: Power of the product of both kernels, an integer of at least 1. Every further factor is another sketch,
            with its own noise.
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
            ValueError: An input's gradients are all zero: it has no direction, as in `LabelKernel`.
        """
        has_units = isinstance(self.nodes.model.module, InUnits)  # float32 may not distinguish a table's rows
        X = parse_inputs(self.nodes, X if has_units else float_inputs(X, torch.float32))
        sketch = trace_sketch(self.nodes, self.num_features, nodes=None, seed=self.seed, head="logits")
        z = sketch.features(Points(X, is_train=False), self.options)
        require_direction(z.any(1))
        z = torch.nn.functional.normalize(z)
        if self.lengthscale is not None:
            z = self._product(z, rbf_features(in_network_units(self.nodes, X), self.lengthscale, seed=self.seed), 0)
        factor = z
        for number in range(1, self.power):
            z = self._product(z, factor, number)
        return z

    def _product(self, z: Tensor, other: Tensor, number: int) -> Tensor:
        return torch.nn.functional.normalize(tensor_sketch(z, other, self.num_features, seed=self.seed + number))


def most_likely(
    matrix: Float[Tensor, "r r"],
    targets: Float[Tensor, "N C"],
    few: Float[Tensor, "s s"],
    rounding: float,
    products: Float[Tensor, "r C"] | None = None,
) -> dict[str, Any]:
    """Return factor, weights and numbers (`LabelProcess`) of the most likely process on N targets.

    For each noise the outputscale is the best one, s = sum_c y_c^T (K + noise)^-1 y_c / (N C), and the negative
    log-likelihood is that of N(targets; 0, s (K + noise)), per target. Every tested noise costs a Cholesky
    factorisation; the likelihood of some of the points tells where to search (`_search`).

    Args:
        matrix: The kernel matrix K, or the scatter matrix F^T F of features with K = F F^T.
        targets: Targets of all points.
        few: The kernel matrix of the points `few_rows(N)`.
        rounding: Rounding error of the matrix's entries: the noise is at least N times as large.
        products: F^T targets, for features.
    """
    N, C = targets.shape
    values, vectors = torch.linalg.eigh(few)
    limit = len(few) * max(rounding, torch.finfo(values.dtype).eps) * float(values[-1])
    values = without_rounding(values, limit, "eigenvalues of the kernel matrix")
    squares = (vectors.T @ targets[few_rows(N, targets.device)]).square().sum(1)

    def of_few(log_noise: float) -> float:
        shifted = values + exp(log_noise)
        return _likelihood(float((squares / shifted).sum()), float(shifted.log().sum()), len(few), C)[1]

    def of_all(log_noise: float) -> dict[str, Any]:
        noise = exp(log_noise)
        shifted = matrix.clone()
        shifted.diagonal().add_(noise)
        factor, failed = torch.linalg.cholesky_ex(shifted)
        if failed:
            raise ValueError(
                f"the kernel matrix plus the noise {noise:.3g} must be positive definite: rounding has made it "
                "indefinite. Use inputs in float64, or fewer conditioning points."
            )
        weights = torch.linalg.solve_triangular(factor, targets if products is None else products, upper=False)
        quadratic, log_determinant = float(weights.square().sum()), 2 * float(factor.diagonal().log().sum())
        if products is not None:  # for F F^T + noise
            total = targets.square().sum()
            left = without_rounding((total - quadratic)[None], float(total) * _SQUARE_ROUNDING, "remainders")
            quadratic, log_determinant = float(left) / noise, log_determinant + (N - len(matrix)) * log_noise
        scale, loss = _likelihood(quadratic, log_determinant, N, C)
        numbers = {"noise": noise, "outputscale": scale, "negative_log_likelihood": loss}
        return {"factor": factor, "weights": weights, **numbers}

    bounds = log(max(NOISE_FLOOR, N * rounding)), _MAX_LOG_NOISE
    if len(few) == N:
        return of_all(_minimum(of_few, *bounds))
    best: dict[str, Any] = {}

    def loss(log_noise: float) -> float:
        nonlocal best
        process = of_all(log_noise)
        best = min(best or process, process, key=itemgetter("negative_log_likelihood"))
        return float(process["negative_log_likelihood"])

    _search(of_few, loss, bounds)
    return best


def _search(guess: Callable[[float], float], loss: Callable[[float], float], bounds: tuple[float, float]) -> None:
    """Evaluate a smooth, costly function of the noise's logarithm until its minimum is among the values.

    Another function that resembles it, and costs nothing, is corrected by the polynomial through their differences at
    the values nearest to the lowest one. The search ends at the minimum of this corrected function if it predicted the
    last value correctly; after a wrong prediction, the next value is in the wider half of the interval.
    """
    x, expected = _minimum(guess, *bounds), nan
    tried = {x: loss(x)}
    x = x / 2 if x in bounds else x + _FIRST_STEP if x < 0 else x - _FIRST_STEP
    while True:
        tried[x] = loss(x)
        is_foretold = abs(tried[x] - expected) < _LOSS_TOLERANCE
        best, reach = min(tried, key=tried.__getitem__), 2 * (max(tried) - min(tried))
        left = max((t for t in tried if t < best), default=max(bounds[0], best - reach))
        right = min((t for t in tried if t > best), default=min(bounds[1], best + reach))
        near = sorted(tried, key=lambda t: abs(t - best))[:5]
        difference = Polynomial.fit(near, [tried[t] - guess(t) for t in near], len(near) - 1)

        def corrected(t: float, difference: Polynomial = difference) -> float:
            return guess(t) + float(difference(t))

        x = _minimum(corrected, left, right)
        nearest = min(tried, key=lambda t: abs(t - x))
        if abs(x - nearest) < 2 * _LOG_TOLERANCE:
            if (nearest == best and is_foretold) or right - left < 8 * _LOG_TOLERANCE:
                return
            x = (best + (nearest if nearest != best else left if best - left > right - best else right)) / 2
        expected = corrected(x)


def _likelihood(quadratic: float, log_determinant: float, num_points: int, num_classes: int) -> tuple[float, float]:
    """Return the best outputscale, and the negative logarithm of the likelihood per target."""
    scale = quadratic / (num_points * num_classes)
    return scale, 0.5 * (log(2 * pi * scale) + 1 + log_determinant / num_points)


def _minimum(loss: Callable[[float], float], lowest: float, highest: float) -> float:
    """Return the position of the minimum of a function of the noise's logarithm, including the ends of its range."""
    found = minimize_scalar(loss, bounds=(lowest, highest), method="bounded", options={"xatol": _LOG_TOLERANCE})
    return min([float(found.x), lowest, highest], key=loss)


def without_rounding(values: Float[Tensor, " n"], rounding: float, what: str) -> Float[Tensor, " n"]:
    """Return numbers that cannot be negative, with those that are negative by rounding set to 0.

    Args:
        values: The numbers.
        rounding: Largest negative size that rounding can cause.
        what: Their name in messages.

    Raises:
        ValueError: A number is more negative than rounding explains.
    """
    lowest = float(values.min()) if len(values) else 0.0
    if lowest < -rounding:
        raise ValueError(
            f"{what} must not be negative: the smallest is {lowest:.3g}, and rounding explains no more than "
            f"{rounding:.3g}. Use inputs in float64, or fewer conditioning points."
        )
    return values.clamp_min(0)


@dataclass(frozen=True, eq=False)
class LabelProcess:
    """A Gaussian process for each class, all with the same kernel, conditioned on N labels.

    Targets are 1 - 1/C for a point's own class, and -1/C for the others. The process is conditioned through the
    Cholesky factor L of the N x N kernel matrix plus the noise; or it is a Bayesian linear regression on k features F
    of each point, with the factor of F^T F + noise.

    Attributes:
        kernel: The kernel, or the map from n inputs to their features, (n, k), each row of length 1.
        training: The N inputs, or their features F, (N, k); None for features of a process that was read from a file.
        targets: (N, C).
        factor: L, (r, r) with r = N or k, lower triangular.
        weights: L^-1 times the targets, or times F^T targets, (r, C).
        noise: Variance of the targets' noise, relative to the outputscale.
        outputscale: Prior variance of the processes.
        negative_log_likelihood: Negative log-likelihood of the targets, per target, in nats.
    """

    kernel: LabelKernel | InputFeatures
    training: Shaped[Tensor, "N ..."]
    targets: Float[Tensor, "N C"]
    factor: Float[Tensor, "r r"]
    weights: Float[Tensor, "r C"]
    noise: float
    outputscale: float
    negative_log_likelihood: float

    @property
    def rounding(self) -> float:
        """Largest negative variance that rounding can cause, relative to the outputscale.

        It depends on N kernel values, divided by the smallest variance of an observation; or on features in float32:
        another position of a point in its block of points changes the last digits.
        """
        if isinstance(self.kernel, InputFeatures):
            return 8 * torch.finfo(torch.float32).eps
        return len(self.training) * self.kernel.rounding(self.training) * max(1.0, 1 / self.noise)

    def coordinates(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n r"]:
        """Return the coordinates of n inputs for predictions: b = L^-1 k(inputs, x), or L^-1 times their features."""
        if isinstance(self.kernel, InputFeatures):
            return self._whitened(self.kernel(X))
        return self._whitened(self.kernel.block(X, self.training))

    def _whitened(self, rows: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
        """Return L^-1 times each row."""
        solved: Tensor = torch.linalg.solve_triangular(self.factor.mT, rows.to(self.factor), upper=True, left=False)
        return solved

    def predict(self, X: Shaped[Tensor, "n ..."]) -> tuple[Float[Tensor, "n C"], Float[Tensor, " n"]]:
        """Return the posterior mean, and the posterior variance relative to the outputscale: 1 far from all data.

        The variance is 1 - |b|^2, or with features noise * |b|^2.
        """
        has_features, budget = isinstance(self.kernel, InputFeatures), self.kernel.options.memory_budget
        means, variances = [], []
        for part in X.split(FEATURE_BLOCK if has_features else posterior_points(budget, 8, 1, len(self.factor))):
            b = self.coordinates(part)
            share = b.square().sum(1)
            variance = self.noise * share if has_features else 1 - share
            means.append(b @ self.weights)
            variances.append(without_rounding(variance, self.rounding, "variances"))
        return torch.cat(means), torch.cat(variances)

    def covariance(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Return the posterior covariance between n and m inputs, relative to the outputscale."""
        left = self.coordinates(X)
        right = left if X is Y else self.coordinates(Y)
        if isinstance(self.kernel, InputFeatures):
            return self.noise * left @ right.T
        prior = self.kernel.gram(X) if X is Y else self.kernel.block(X, Y)
        return prior.sub_(left @ right.T)

    def leave_one_out(self) -> tuple[Float[Tensor, "N C"], Float[Tensor, " N"]]:
        """Predict each conditioning point from the others: mean, and variance relative to the outputscale.

        Equation (5.12) of Rasmussen & Williams (2006), without changing the hyperparameters: residuals are divided by
        the diagonal of (K + noise)^-1, or by 1 - h with h the leverage of each point.

        Raises:
            ValueError: The process was read from a file, which does not contain the training features.
        """
        if not len(self.targets):
            raise ValueError("a process that was read from a file has no features of training points: fit it again.")
        if not isinstance(self.kernel, InputFeatures):
            L, N = self.factor, len(self.factor)
            inverse_diagonal = L.new_empty(N)
            for first in range(0, N, _INVERSE_COLUMNS):  # columns of L^-1, which is 0 above the diagonal
                identity = torch.eye(N - first, min(_INVERSE_COLUMNS, N - first), dtype=L.dtype, device=L.device)
                columns = torch.linalg.solve_triangular(L[first:, first:], identity, upper=False)
                inverse_diagonal[first : first + _INVERSE_COLUMNS] = columns.square().sum(0)
            solved = torch.linalg.solve_triangular(L.mT, self.weights, upper=True)  # (K + noise)^-1 targets
            variances = without_rounding(1 / inverse_diagonal - self.noise, self.rounding, "variances")
            return self.targets - solved / inverse_diagonal[:, None], variances
        means, spreads = [], []
        rows = zip(self.training.split(FEATURE_BLOCK), self.targets.split(FEATURE_BLOCK), strict=True)
        for features, targets in rows:
            b = self._whitened(features)
            share = b.square().sum(1)  # h
            means.append(targets - (targets - b @ self.weights) / (1 - share)[:, None])
            spreads.append(self.noise * share / (1 - share))
        return torch.cat(means), torch.cat(spreads)


def condition_exactly(kernel: LabelKernel, X: Shaped[Tensor, "N ..."], targets: Float[Tensor, "N C"]) -> LabelProcess:
    """Condition a process on N points through their kernel matrix, with the most likely noise and outputscale."""
    K, rows = kernel.gram(X), few_rows(len(X), X.device)
    return LabelProcess(kernel, X, targets, **most_likely(K, targets, K[rows][:, rows], kernel.rounding(X)))


def condition_on_features(
    features: InputFeatures, training_features: Float[Tensor, "N k"], targets: Float[Tensor, "N C"]
) -> LabelProcess:
    """Condition a process on N points through k features of each, with the most likely noise and outputscale.

    Args:
        features: Maps n inputs to their features.
        training_features: Features of the N points.
        targets: (N, C).
    """
    N, k = training_features.shape
    scatter, products = targets.new_zeros(k, k), targets.new_zeros(k, targets.shape[1])
    for rows, y in zip(training_features.split(FEATURE_BLOCK), targets.split(FEATURE_BLOCK), strict=True):
        F = rows.to(targets)
        scatter.addmm_(F.T, F)
        products.addmm_(F.T, y)
    few = training_features[few_rows(N, targets.device)].to(targets)
    found = most_likely(scatter, targets, few @ few.T, k * torch.finfo(targets.dtype).eps, products)
    return LabelProcess(features, training_features, targets, **found)


@dataclass(frozen=True)
class LabelSettings:
    """The settings of a process on labels.

    Attributes:
        nodes: Number of nodes of the path that represent all its steps; None for 20, or for as many as there are
            outputs, up to 256: one combination of the outputs is used at each node. For a run of one state, as many as
            there are outputs.
        features: Number of sketched features of each point; "exact" for the kernel matrix itself; None for "exact" up
            to 5000 conditioning points if the matrix takes at most 10^13 multiplications, and otherwise 4096 features.
        inputs_kernel: "rbf" multiplies the path kernel's cosine by an RBF kernel on the inputs, with the median
            distance between training inputs as its lengthscale; None leaves it out, and so do integer inputs.
        seed: Seed of the sketch.
        power: Power of the product of both kernels; None for 2 with the kernel matrix itself, and 1 with features.
        path: The path that contains the nodes.
    """

    nodes: int | None = None
    features: int | Literal["exact"] | None = None
    inputs_kernel: InputsKernel = "rbf"
    seed: int = 0
    power: int | None = None
    path: WeightPath = straight()

    def __post_init__(self) -> None:
        """Raise if a setting is invalid; nodes and path are checked by `nodes_trajectory`.

        Raises:
            TypeError: A number has a wrong type.
            ValueError: A number is out of range, or a name is unknown.
        """
        validate_integer(self.seed, "seed")
        if self.power is not None:
            validate_count(self.power, "power")
        if isinstance(self.features, str) and self.features != "exact":
            raise ValueError(f"features must be a number, 'exact' or None: got {self.features!r}.")
        if self.features not in (None, "exact"):
            validate_count(self.features, "features")
        if self.inputs_kernel not in ("rbf", None):
            raise ValueError(f"inputs_kernel must be 'rbf' or None: got {self.inputs_kernel!r}.")

    def num_nodes(self, num_outputs: int, *, is_one_state: bool = False) -> int:
        """Return the number of nodes for a network with C outputs."""
        if self.nodes is None and is_one_state:
            return min(num_outputs, MAX_NODES)
        return covering_order(num_outputs, NUM_NODES, MAX_NODES) if self.nodes is None else self.nodes

    def num_features(self, kernel: LabelKernel, X: Shaped[Tensor, "N ..."]) -> int | None:
        """Return the number of features of each of N conditioning points; None for the kernel matrix itself."""
        if self.features is not None:
            return None if self.features == "exact" else int(self.features)
        N = len(X)
        cost = N**2 * kernel.combined.multiplications_per_pair(X[:1])
        return NUM_FEATURES if N > EXACT_POINTS or cost > 2 * EXACT_MULTIPLICATIONS else None


def fit_labels(
    trajectory: Trajectory, settings: LabelSettings, points: Int64[Tensor, " N"], options: ComputeOptions
) -> LabelProcess:
    """Condition a process on the labels of training points.

    Args:
        trajectory: The run.
        settings: The settings of the process.
        points: Indices of the N conditioning points, on the device of the computation.
        options: Options of the computation.
    """
    count = settings.num_nodes(trajectory.num_outputs, is_one_state=is_one_state(trajectory))
    nodes = nodes_trajectory(trajectory, count, path=settings.path)
    own = points.to(trajectory.device)
    X = trajectory.inputs[own].to(points.device)
    values, mean = label_values(trajectory, own)
    targets = (values - mean).to(points.device)
    has_distances = settings.inputs_kernel is not None and trajectory.inputs.is_floating_point()
    lengthscale = median_lengthscale(in_network_units(trajectory, trajectory.inputs[own])) if has_distances else None
    power = EXACT_POWER if settings.power is None else int(settings.power)
    kernel = LabelKernel(nodes, lengthscale, options, settings.seed, power)
    num_features = settings.num_features(kernel, X)
    if num_features is None:
        return condition_exactly(kernel, float_inputs(X, torch.float64), targets)
    power = SKETCHED_POWER if settings.power is None else int(settings.power)
    features = InputFeatures(nodes, num_features, settings.seed, lengthscale, options, power)
    return condition_on_features(features, features(X), targets)
