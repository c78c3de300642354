"""The process on the labels of a run's training points: exact for some thousands, by sketched features for more."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.sketches import covering_order
from epk_gp.core.checks import validate_count, validate_integer
from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.class_data import float_inputs
from epk_gp.gp.label_features import InputFeatures
from epk_gp.gp.label_kernel import LabelKernel, median_lengthscale
from epk_gp.gp.label_process import LabelProcess, centred_labels, condition_exactly, condition_on_features
from epk_gp.gram.sketch import NUM_NODES, nodes_trajectory, validate_path_of_nodes
from epk_gp.quadrature.paths import WeightPath, straight

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
