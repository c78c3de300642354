"""Gaussian-process regression on class labels with one scalar kernel or its features: one factorisation for all.

The kernel is a power of the path kernel's cosine times an RBF kernel.
"""

from dataclasses import dataclass
from functools import cached_property
from math import exp, log, pi, sqrt
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64, Shaped
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

# A process is conditioned through the kernel matrix of up to 5000 points, whose eigenvalues take less time than the
# features of many, if the matrix costs at most so many multiplications: some ten minutes on one core.
EXACT_POINTS = 5000
EXACT_MULTIPLICATIONS = 10**13
NUM_FEATURES = 4096
MAX_NODES = 256  # by default, for networks of many outputs

# Powers of the kernel, by the likelihood of validation labels (nats lost per label, one seed each). For 2000 images of
# MNIST and Fashion-MNIST and an MLP or a CNN the square is better than the kernel itself: 0.131 and 0.139, 0.099 and
# 0.107, 0.440 and 0.444, 0.400 and 0.401. Sketched in 4096 features it is worse (20,000 of MNIST: 0.080 and 0.073).
EXACT_POWER, SKETCHED_POWER = 2, 1

FEATURE_BLOCK = 4096  # points whose features are turned to float64, and into predictions, at a time
_MAX_LOG_NOISE = log(1e4)  # labels that the kernel says nothing about
_LOG_TOLERANCE = 1e-3  # of the logarithm of the noise: the marginal likelihood is flat there


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
    """Raise if the gradients of a point are all zero, so that there is no direction that a cosine could compare.

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
        has_units = isinstance(self.nodes.model.module, InUnits)  # float32 may not tell a table's rows apart
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
    values: Float[Tensor, " r"], projections: Float[Tensor, "r C"], remainder: float, num_points: int, rounding: float
) -> dict[str, float]:
    """Return the noise, relative to the outputscale, the outputscale and the likelihood of the most likely process.

    For each noise the outputscale is the best one, s = sum_c y_c^T (K + noise)^-1 y_c / (N C), and the negative
    logarithm of the likelihood that of N(targets; 0, s (K + noise)), per target.

    Args:
        values: The r largest eigenvalues of the N x N kernel matrix; the other N - r are 0.
        projections: Targets along the eigenvectors.
        remainder: Sum of squares of the targets' part that lies in none of the r eigenvectors.
        num_points: N.
        rounding: Relative rounding error of the matrix's entries: the noise is at least N times as large.
    """
    squares = projections.square().sum(1)

    def scale_for(noise: float) -> float:
        total = float((squares / (values + noise)).sum()) + remainder / noise
        return total / (num_points * projections.shape[1])

    def loss(log_noise: float) -> float:
        noise = exp(log_noise)
        log_determinant = float((values + noise).log().sum()) + (num_points - len(values)) * log(noise)
        return 0.5 * (log(2 * pi * scale_for(noise)) + 1 + log_determinant / num_points)

    bounds = (log(max(NOISE_FLOOR, num_points * rounding)), _MAX_LOG_NOISE)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": _LOG_TOLERANCE})
    best = min([float(found.x), *bounds], key=loss)
    return {"noise": exp(best), "outputscale": scale_for(exp(best)), "negative_log_likelihood": loss(best)}


def without_rounding(values: Float[Tensor, " n"], rounding: float, what: str) -> Float[Tensor, " n"]:
    """Return numbers that cannot be negative with those set to 0 that rounding has made so.

    Args:
        values: The numbers.
        rounding: How far below 0 rounding may have brought them.
        what: Their name in a message.

    Raises:
        ValueError: One is further below 0, which rounding does not explain.
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

    Targets are 1 - 1/C for a point's own class, and -1/C for the others. Conditioned through the N x N kernel matrix
    K = Q diag(v) Q^T; or Bayesian linear regression on k features of each point, F^T F = Q diag(v) Q^T.

    Attributes:
        kernel: The kernel, or what maps n inputs to their features, (n, k), each row of length 1.
        training: The N inputs, or their features F, (N, k), of which a process that was read from a file has none.
        targets: (N, C).
        values: Eigenvalues v of the kernel matrix, or of the features' scatter matrix, (r,).
        vectors: Eigenvectors Q, (N, r) of the kernel matrix or (k, r) of the features' scatter matrix.
        weights: Targets along them, divided by v + noise, (r, C).
        noise: Variance of the targets' noise, relative to the outputscale.
        outputscale: Prior variance of the processes.
        negative_log_likelihood: Of the targets, per target, in nats.
    """

    kernel: LabelKernel | InputFeatures
    training: Shaped[Tensor, "N ..."]
    targets: Float[Tensor, "N C"]
    values: Float[Tensor, " r"]
    vectors: Float[Tensor, "rows r"]
    weights: Float[Tensor, "r C"]
    noise: float
    outputscale: float
    negative_log_likelihood: float

    @property
    def rounding(self) -> float:
        """How far below 0 rounding may bring a variance, relative to the outputscale.

        Of N kernel values, divided by the smallest variance of an observation; or of features in float32: another
        place of a point in its block of points gives other last digits.
        """
        if isinstance(self.kernel, InputFeatures):
            return 8 * torch.finfo(torch.float32).eps
        return len(self.training) * self.kernel.rounding(self.training) * max(1.0, 1 / self.noise)

    def coordinates(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n r"]:
        """Return what predictions at n inputs depend on: b = k(X, inputs) Q, or the features along the eigenvectors."""
        if isinstance(self.kernel, InputFeatures):
            return self.kernel(X).to(self.vectors) @ self.vectors
        return self.kernel.block(X, self.training) @ self.vectors

    def predict(self, X: Shaped[Tensor, "n ..."]) -> tuple[Float[Tensor, "n C"], Float[Tensor, " n"]]:
        """Return the posterior mean, and the posterior variance relative to the outputscale: 1 far from all data.

        The variance is 1 - sum_j b_j^2 / (v_j + noise), or with features noise * sum_j b_j^2 / (v_j + noise).
        """
        has_features, budget = isinstance(self.kernel, InputFeatures), self.kernel.options.memory_budget
        means, variances = [], []
        for part in X.split(FEATURE_BLOCK if has_features else posterior_points(budget, 8, 1, len(self.vectors))):
            b = self.coordinates(part)
            share = (b.square() / (self.values + self.noise)).sum(1)
            variance = self.noise * share if has_features else 1 - share
            means.append(b @ self.weights)
            variances.append(without_rounding(variance, self.rounding, "variances"))
        return torch.cat(means), torch.cat(variances)

    def covariance(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Return the posterior covariance between n and m inputs, relative to the outputscale."""
        left = self.coordinates(X)
        right = left if X is Y else self.coordinates(Y)
        if isinstance(self.kernel, InputFeatures):
            return self.noise * (left / (self.values + self.noise)) @ right.T
        prior = self.kernel.gram(X) if X is Y else self.kernel.block(X, Y)
        return prior.sub_((left / (self.values + self.noise)) @ right.T)

    def leave_one_out(self) -> tuple[Float[Tensor, "N C"], Float[Tensor, " N"]]:
        """Predict each conditioning point from the others: mean, and variance relative to the outputscale.

        Equation (5.12) of Rasmussen & Williams (2006), with the hyperparameters as they are: residuals are divided by
        the diagonal of (K + noise)^-1, or by 1 - h with h the leverage of each point.

        Raises:
            ValueError: The process was read from a file, which does not hold the training features.
        """
        if not len(self.targets):
            raise ValueError("a process that was read from a file has no features of training points: fit it again.")
        if not isinstance(self.kernel, InputFeatures):
            inverse_diagonal = (self.vectors.square() / (self.values + self.noise)).sum(1)
            residuals = (self.vectors @ self.weights) / inverse_diagonal[:, None]
            variances = without_rounding(1 / inverse_diagonal - self.noise, self.rounding, "variances")
            return self.targets - residuals, variances
        means, spreads = [], []
        rows = zip(self.training.split(FEATURE_BLOCK), self.targets.split(FEATURE_BLOCK), strict=True)
        for features, targets in rows:
            b = features.to(self.vectors) @ self.vectors
            share = (b.square() / (self.values + self.noise)).sum(1)  # h
            means.append(targets - (targets - b @ self.weights) / (1 - share)[:, None])
            spreads.append(self.noise * share / (1 - share))
        return torch.cat(means), torch.cat(spreads)


def condition_exactly(kernel: LabelKernel, X: Shaped[Tensor, "N ..."], targets: Float[Tensor, "N C"]) -> LabelProcess:
    """Condition a process on N points through their kernel matrix, with the most likely noise and outputscale."""
    values, vectors = torch.linalg.eigh(kernel.gram(X))
    rounding = len(X) * kernel.rounding(X) * float(values[-1])
    values = without_rounding(values, rounding, "eigenvalues of the kernel matrix")
    projections = vectors.T @ targets
    numbers = most_likely(values, projections, 0.0, len(X), kernel.rounding(X))
    weights = projections / (values + numbers["noise"])[:, None]
    return LabelProcess(kernel, X, targets, values, vectors, weights, **numbers)


def condition_on_features(
    features: InputFeatures, training_features: Float[Tensor, "N k"], targets: Float[Tensor, "N C"]
) -> LabelProcess:
    """Condition a process on N points through k features of each, with the most likely noise and outputscale.

    Args:
        features: Maps n inputs to their features.
        training_features: Those of the N points.
        targets: (N, C).
    """
    N, k = training_features.shape
    scatter, products = targets.new_zeros(k, k), targets.new_zeros(k, targets.shape[1])
    for rows, y in zip(training_features.split(FEATURE_BLOCK), targets.split(FEATURE_BLOCK), strict=True):
        F = rows.to(targets)
        scatter.addmm_(F.T, F)
        products.addmm_(F.T, y)
    values, vectors = torch.linalg.eigh(scatter)
    rounding = k * torch.finfo(values.dtype).eps * float(values[-1])
    values = without_rounding(values, rounding, "eigenvalues of the features' scatter matrix")
    along = vectors.T @ products  # of the training points: none in directions of eigenvalue 0
    is_spanned = (values > rounding)[:, None]
    projections = torch.where(is_spanned, along, 0) / torch.where(is_spanned, values[:, None].sqrt(), 1)
    total = targets.square().sum()
    unexplained = without_rounding(
        (total - projections.square().sum())[None], float(total) * torch.finfo(total.dtype).eps ** 0.5, "remainders"
    )
    numbers = most_likely(values, projections, float(unexplained), N, 0.0)
    weights = along / (values + numbers["noise"])[:, None]
    return LabelProcess(features, training_features, targets, values, vectors, weights, **numbers)


@dataclass(frozen=True)
class LabelSettings:
    """What a process on labels is made of.

    Attributes:
        nodes: Nodes of the path that stand for all its steps; None for 20, or for as many more as outputs need, up to
            256: at each node one combination of them is taken. Of a run of one state as many as there are outputs.
        features: Sketched features of each point; "exact" for the kernel matrix itself; None for "exact" up to 5000
            conditioning points where the matrix takes at most 10^13 multiplications, and 4096 features else.
        inputs_kernel: "rbf" multiplies the path kernel's cosine by an RBF kernel on the inputs, with the median
            distance between training inputs as its lengthscale; None leaves it out, as integers as inputs do.
        seed: Seed of the sketch.
        power: Of the product of both kernels; None for 2 with the kernel matrix itself, and 1 with features.
        path: Which the nodes lie on.
    """

    nodes: int | None = None
    features: int | Literal["exact"] | None = None
    inputs_kernel: InputsKernel = "rbf"
    seed: int = 0
    power: int | None = None
    path: WeightPath = straight()

    def __post_init__(self) -> None:
        """Raise if a setting cannot be used; nodes and path are checked by `nodes_trajectory`.

        Raises:
            TypeError: A number is of the wrong kind.
            ValueError: A number is out of range, or a name is not known.
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
        settings: What the process is made of.
        points: Indices of the N training points to condition on; on the device that computes.
        options: How it is computed.
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
