"""Gaussian-process regression on class labels with one scalar kernel: one factorisation for all classes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import exp, log, pi
from typing import Literal, final

import torch
from jaxtyping import Float, Int, Int64, Shaped
from scipy.optimize import minimize_scalar
from torch import Tensor

from epk_gp.autodiff.sketches import covering_order
from epk_gp.core.checks import validate_count, validate_integer
from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.data import float_inputs
from epk_gp.gp.label_kernel import InputFeatures, LabelKernel, median_lengthscale
from epk_gp.gp.output_coupling import NOISE_FLOOR
from epk_gp.gram.sketch import NUM_NODES, nodes_trajectory, validate_path_of_nodes
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


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What the marginal likelihood depends on: eigenvalues of the N x N kernel matrix, and the targets along them.

    Attributes:
        values: The r largest eigenvalues v_j; the other N - r are 0.
        projections: Targets along the eigenvectors, (r, C).
        remainder: Sum of squares of the targets' part that lies in none of the r eigenvectors.
        num_points: N.
    """

    values: Float[Tensor, " r"]
    projections: Float[Tensor, "r C"]
    remainder: float
    num_points: int

    def scale_for(self, noise: float) -> float:
        """Return the outputscale at which the targets are most likely, for a noise relative to it.

        s = sum_c y_c^T (K + noise)^-1 y_c / (N C)
        """
        squares = self.projections.square().sum(1)
        total = float((squares / (self.values + noise)).sum()) + self.remainder / noise
        return total / (self.num_points * self.projections.shape[1])

    def negative_log_likelihood(self, noise: float) -> float:
        """Return -log N(targets; 0, s (K + noise)) per target, with the best outputscale s."""
        zeros = self.num_points - len(self.values)
        log_determinant = float((self.values + noise).log().sum()) + zeros * log(noise)
        return 0.5 * (log(2 * pi * self.scale_for(noise)) + 1 + log_determinant / self.num_points)


def most_likely(spectrum: Spectrum, rounding: float = 0.0) -> dict[str, float]:
    """Return the noise, relative to the outputscale, the outputscale and the likelihood of the most likely process.

    Args:
        spectrum: Of the kernel matrix.
        rounding: Relative rounding error of its entries: the noise is at least N times as large.
    """
    bounds = (log(max(NOISE_FLOOR, spectrum.num_points * rounding)), _MAX_LOG_NOISE)

    def loss(log_noise: float) -> float:
        return spectrum.negative_log_likelihood(exp(log_noise))

    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": _LOG_TOLERANCE})
    noise = exp(min([float(found.x), *bounds], key=loss))
    likelihood = spectrum.negative_log_likelihood(noise)
    return {"noise": noise, "outputscale": spectrum.scale_for(noise), "negative_log_likelihood": likelihood}


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
class LabelProcess(ABC):
    """A Gaussian process for each class, all with the same kernel, conditioned on N labels.

    Targets are 1 - 1/C for a point's own class, and -1/C for the others.

    Attributes:
        values: Eigenvalues v of the kernel matrix, or of the features' scatter matrix, (r,).
        vectors: Eigenvectors, (N, r) of the kernel matrix or (k, r) of the features' scatter matrix.
        weights: Targets along them, divided by v + noise, (r, C).
        noise: Variance of the targets' noise, relative to the outputscale.
        outputscale: Prior variance of the processes.
        negative_log_likelihood: Of the targets, per target, in nats.
    """

    values: Float[Tensor, " r"]
    vectors: Float[Tensor, "rows r"]
    weights: Float[Tensor, "r C"]
    noise: float
    outputscale: float
    negative_log_likelihood: float

    @abstractmethod
    def split(self, X: Shaped[Tensor, "n ..."]) -> list[Shaped[Tensor, "b ..."]]:
        """Split inputs into parts that are evaluated at a time."""

    @abstractmethod
    def coordinates(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n r"]:
        """Return what predictions at n inputs depend on: their kernel values along the eigenvectors."""

    @abstractmethod
    def variance_along(self, coordinates: Float[Tensor, "n r"]) -> Float[Tensor, " n"]:
        """Return the posterior variance, relative to the outputscale."""

    @abstractmethod
    def covariance(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Return the posterior covariance between n and m inputs, relative to the outputscale."""

    @abstractmethod
    def leave_one_out(self) -> tuple[Float[Tensor, "N C"], Float[Tensor, " N"]]:
        """Predict each conditioning point from the others: mean, and variance relative to the outputscale.

        Equation (5.12) of Rasmussen & Williams (2006), with the hyperparameters as they are.
        """

    @property
    @abstractmethod
    def rounding(self) -> float:
        """How far below 0 rounding may bring a variance, relative to the outputscale."""

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.weights.shape[1]

    @final
    def predict(self, X: Shaped[Tensor, "n ..."]) -> tuple[Float[Tensor, "n C"], Float[Tensor, " n"]]:
        """Return the posterior mean, and the posterior variance relative to the outputscale: 1 far from all data."""
        means, variances = [], []
        for part in self.split(X):
            coordinates = self.coordinates(part)
            means.append(coordinates @ self.weights)
            variances.append(without_rounding(self.variance_along(coordinates), self.rounding, "variances"))
        return torch.cat(means), torch.cat(variances)


@final
@dataclass(frozen=True, eq=False)
class ExactLabelProcess(LabelProcess):
    """Conditioned through the N x N kernel matrix K = Q diag(v) Q^T.

    Attributes:
        kernel: The kernel.
        inputs: The N inputs.
        targets: (N, C).
    """

    kernel: LabelKernel
    inputs: Shaped[Tensor, "N ..."]
    targets: Float[Tensor, "N C"]

    @property
    def rounding(self) -> float:
        """That of N kernel values, divided by the smallest variance of an observation."""
        return len(self.inputs) * self.kernel.rounding(self.inputs) * max(1.0, 1 / self.noise)

    def split(self, X: Shaped[Tensor, "n ..."]) -> list[Shaped[Tensor, "b ..."]]:
        """Split by the kernel's memory budget."""
        return list(self.kernel.split(X, len(self.inputs)))

    def coordinates(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n r"]:
        """Return k(X, inputs) Q."""
        return self.kernel.block(X, self.inputs) @ self.vectors

    def variance_along(self, coordinates: Float[Tensor, "n r"]) -> Float[Tensor, " n"]:
        """Return 1 - sum_j b_j^2 / (v_j + noise)."""
        return 1 - (coordinates.square() / (self.values + self.noise)).sum(1)

    def covariance(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Return k(X, Y) - sum_j b_j(X) b_j(Y) / (v_j + noise)."""
        prior = self.kernel.gram(X) if X is Y else self.kernel.block(X, Y)
        left = self.coordinates(X)
        right = left if X is Y else self.coordinates(Y)
        return prior.sub_((left / (self.values + self.noise)) @ right.T)

    def leave_one_out(self) -> tuple[Float[Tensor, "N C"], Float[Tensor, " N"]]:
        """Divide by the diagonal of (K + noise)^-1."""
        inverse_diagonal = (self.vectors.square() / (self.values + self.noise)).sum(1)
        residuals = (self.vectors @ self.weights) / inverse_diagonal[:, None]
        variances = without_rounding(1 / inverse_diagonal - self.noise, self.rounding, "variances")
        return self.targets - residuals, variances


@final
@dataclass(frozen=True, eq=False)
class SketchedLabelProcess(LabelProcess):
    """Bayesian linear regression on k features of each point: F^T F = Q diag(v) Q^T.

    Attributes:
        features: Maps n inputs to their features, (n, k), each row of length 1.
        training_features: F, (N, k).
        targets: (N, C).
    """

    features: InputFeatures
    training_features: Float[Tensor, "N k"] | None
    targets: Float[Tensor, "N C"] | None

    @property
    def rounding(self) -> float:
        """That of features in float32: another place of a point in its block of points gives other last digits."""
        return 8 * torch.finfo(torch.float32).eps

    def split(self, X: Shaped[Tensor, "n ..."]) -> list[Shaped[Tensor, "b ..."]]:
        """Split into blocks of one size."""
        return list(X.split(FEATURE_BLOCK))

    def coordinates(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n r"]:
        """Return the features along the eigenvectors."""
        return self.features(X).to(self.vectors) @ self.vectors

    def variance_along(self, coordinates: Float[Tensor, "n r"]) -> Float[Tensor, " n"]:
        """Return noise * sum_j b_j^2 / (v_j + noise)."""
        return self.noise * (coordinates.square() / (self.values + self.noise)).sum(1)

    def covariance(self, X: Shaped[Tensor, "n ..."], Y: Shaped[Tensor, "m ..."]) -> Float[Tensor, "n m"]:
        """Return noise * sum_j b_j(X) b_j(Y) / (v_j + noise)."""
        left = self.coordinates(X)
        right = left if X is Y else self.coordinates(Y)
        return self.noise * (left / (self.values + self.noise)) @ right.T

    def leave_one_out(self) -> tuple[Float[Tensor, "N C"], Float[Tensor, " N"]]:
        """Divide residuals by 1 - h, h the leverage of each point.

        Raises:
            ValueError: The process was read from a file, which does not hold the training features.
        """
        if self.training_features is None or self.targets is None:
            raise ValueError(
                "predictions of the training points from each other need their features: a process that was read "
                "from a file has none. Fit it again."
            )
        residuals, variances = [], []
        blocks = zip(self.training_features.split(FEATURE_BLOCK), self.targets.split(FEATURE_BLOCK), strict=True)
        for features, targets in blocks:
            b = features.to(self.vectors) @ self.vectors
            share = (b.square() / (self.values + self.noise)).sum(1)  # h
            residuals.append((targets - b @ self.weights) / (1 - share)[:, None])
            variances.append(self.noise * share / (1 - share))
        return self.targets - torch.cat(residuals), torch.cat(variances)


def centred_labels(labels: Int[Tensor, " N"], num_classes: int) -> Float[Tensor, "N C"]:
    """Return one-hot labels minus 1/C, float64."""
    return torch.nn.functional.one_hot(labels.long(), num_classes).to(torch.float64) - 1 / num_classes


def condition_exactly(
    kernel: LabelKernel, X: Shaped[Tensor, "N ..."], targets: Float[Tensor, "N C"]
) -> ExactLabelProcess:
    """Condition a process on N points through their kernel matrix, with the most likely noise and outputscale."""
    values, vectors = torch.linalg.eigh(kernel.gram(X))
    rounding = len(X) * kernel.rounding(X) * float(values[-1])
    values = without_rounding(values, rounding, "eigenvalues of the kernel matrix")
    projections = vectors.T @ targets
    numbers = most_likely(Spectrum(values, projections, 0.0, len(X)), kernel.rounding(X))
    weights = projections / (values + numbers["noise"])[:, None]
    return ExactLabelProcess(values, vectors, weights, **numbers, kernel=kernel, inputs=X, targets=targets)


def condition_on_features(
    features: InputFeatures, training_features: Float[Tensor, "N k"], targets: Float[Tensor, "N C"]
) -> SketchedLabelProcess:
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
    numbers = most_likely(Spectrum(values, projections, float(unexplained), N))
    weights = along / (values + numbers["noise"])[:, None]
    return SketchedLabelProcess(
        values, vectors, weights, **numbers, features=features, training_features=training_features, targets=targets
    )


@dataclass(frozen=True)
class LabelSettings:
    """What a process on labels is made of.

    Attributes:
        nodes: Nodes of the path that stand for all its steps; None for 20, or for as many more as outputs need, up to
            256: at each node one combination of them is taken.
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

    def validate(self) -> None:
        """Raise if a setting cannot be used.

        Raises:
            TypeError: A number is of the wrong kind.
            ValueError: A number is out of range, or a name is not known.
        """
        if self.nodes is not None:
            validate_count(self.nodes, "nodes")
        validate_path_of_nodes(self.path)
        validate_integer(self.seed, "seed")
        if self.power is not None:
            validate_count(self.power, "power")
        if isinstance(self.features, str):
            if self.features != "exact":
                raise ValueError(f"features must be a number, 'exact' or None: got {self.features!r}.")
        elif self.features is not None:
            validate_count(self.features, "features")
        if self.inputs_kernel not in ("rbf", None):
            raise ValueError(f"inputs_kernel must be 'rbf' or None: got {self.inputs_kernel!r}.")

    def exponent(self, default: int) -> int:
        """Return the power of the kernel."""
        return default if self.power is None else int(self.power)

    def num_nodes(self, num_outputs: int) -> int:
        """Return the number of nodes for a network with C outputs."""
        return covering_order(num_outputs, NUM_NODES, MAX_NODES) if self.nodes is None else int(self.nodes)

    def num_features(self, kernel: LabelKernel, X: Shaped[Tensor, "N ..."]) -> int | None:
        """Return the number of features of each of N conditioning points; None for the kernel matrix itself."""
        if self.features == "exact":
            return None
        if self.features is not None:
            return int(self.features)
        N = len(X)
        if N > EXACT_POINTS or N**2 * kernel.combined.multiplications_per_pair(X[:1]) > 2 * EXACT_MULTIPLICATIONS:
            return NUM_FEATURES
        return None


def fit_labels(
    trajectory: Trajectory,
    labels: Int64[Tensor, " M"],
    settings: LabelSettings,
    points: Int64[Tensor, " N"],
    options: ComputeOptions,
) -> LabelProcess:
    """Condition a process on the labels of training points.

    Args:
        trajectory: The run.
        labels: Of all M training points.
        settings: What the process is made of.
        points: Indices of the N training points to condition on; on the device that computes.
        options: How it is computed.
    """
    nodes = nodes_trajectory(trajectory, settings.num_nodes(trajectory.num_outputs), path=settings.path)
    own = points.to(trajectory.device)
    X = trajectory.inputs[own].to(points.device)
    targets = centred_labels(labels[own], trajectory.num_outputs).to(points.device)
    lengthscale = _lengthscale(trajectory, settings.inputs_kernel)
    kernel = LabelKernel(nodes, lengthscale, options, settings.seed, settings.exponent(EXACT_POWER))
    num_features = settings.num_features(kernel, X)
    if num_features is None:
        return condition_exactly(kernel, float_inputs(X, torch.float64), targets)
    power = settings.exponent(SKETCHED_POWER)
    features = InputFeatures(nodes, num_features, settings.seed, lengthscale, options, power)
    return condition_on_features(features, features(X), targets)


def _lengthscale(trajectory: Trajectory, inputs_kernel: InputsKernel) -> float | None:
    """Return the lengthscale of the kernel on the inputs; None without one: integers have no distances."""
    if inputs_kernel is None or not trajectory.inputs.is_floating_point():
        return None
    return median_lengthscale(trajectory.inputs)
