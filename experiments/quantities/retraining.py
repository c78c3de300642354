"""Kernel machines whose coefficients are retrained by support vector machines (Figure 3, Bell et al. 2023)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from torch import Tensor

from epk_gp.core.checks import validate_labels, validate_positive, validate_tensor


@dataclass(frozen=True, eq=False)
class RetrainedMachine:
    """One kernel machine per class against all other classes: sum_i coefficients[c, i] k_c(x, x_i) + intercepts[c].

    Attributes:
        coefficients: (C, M), zero except for support vectors.
        intercepts: (C,).
        num_support_vectors: Number of support vectors of each class's machine, (C,).
    """

    coefficients: Float[Tensor, "C M"]
    intercepts: Float[Tensor, " C"]
    num_support_vectors: Int64[Tensor, " C"]


@dataclass(frozen=True, eq=False)
class PlattScaling:
    """Logistic curves that turn decision values into probabilities, one per class (Platt 1999).

    Attributes:
        slopes: (C,).
        offsets: (C,).
    """

    slopes: Float[Tensor, " C"]
    offsets: Float[Tensor, " C"]


def fit_support_vector_machines(
    gram: Float[Tensor, "C M M"], labels: Int64[Tensor, " M"], *, penalty: float = 1.0
) -> RetrainedMachine:
    """Fit a support vector machine per class on its own Gram matrix, with scikit-learn's `SVC`.

    Section 4.1 of Bell et al. (2023): the kernel stays the same and its coefficients a_i are trained again.

    Args:
        gram: K_c over the M training copies, as `PathKernel.block_per_class` returns it.
        labels: Class of each point.
        penalty: The SVM's C, for the kernel divided by its mean diagonal.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The matrices are not square, the penalty is not positive, or the numbers of labels and points
            differ, or a class has no point.
    """
    validate_tensor(gram, "gram", ndim=3, floating=True)
    C, M = gram.shape[:2]
    if gram.shape != (C, M, M):
        raise ValueError(f"gram must be one square matrix per class, (C, M, M): got shape {tuple(gram.shape)}.")
    validate_positive(penalty, "penalty")
    validate_labels(labels, M, C)
    counts = torch.bincount(labels, minlength=C)
    if len(counts) != C or int(counts.min()) == 0:
        raise ValueError(f"labels must name each of {C} classes at least once: got {counts.tolist()} points per class.")
    coefficients = gram.new_zeros(C, M)
    intercepts, num_support_vectors = gram.new_zeros(C), torch.zeros(C, dtype=torch.int64)
    for c in range(C):
        scale = float(gram[c].diagonal().mean())
        machine = SVC(kernel="precomputed", C=penalty).fit((gram[c] / scale).cpu().numpy(), (labels == c).cpu().numpy())
        support = torch.from_numpy(machine.support_.astype(np.int64))
        coefficients[c, support] = torch.from_numpy(machine.dual_coef_[0]).to(gram) / scale
        intercepts[c] = float(machine.intercept_[0])
        num_support_vectors[c] = len(support)
    return RetrainedMachine(coefficients, intercepts, num_support_vectors)


def decision_values(machine: RetrainedMachine, cross: Float[Tensor, "C n M"]) -> Float[Tensor, "n C"]:
    """Evaluate the machines at n points, given their kernel values with the M training copies."""
    return torch.einsum("cnm,cm->nc", cross, machine.coefficients) + machine.intercepts


def fit_platt_scaling(decisions: Float[Tensor, "n C"], labels: Int64[Tensor, " n"]) -> PlattScaling:
    """Fit a logistic curve per class to decision values of points that the machine was not trained on.

    Args:
        decisions: Decision values of n points.
        labels: Classes of the points.

    Raises:
        TypeError: The decision values are not a tensor of float32 or float64, or the labels are not integers.
        ValueError: There is not one label per point, or a class has no point, or has all points.
    """
    validate_tensor(decisions, "decisions", ndim=2, floating=True)
    validate_labels(labels, len(decisions))
    if not decisions.numel():
        raise ValueError(f"decisions must hold at least one point: got shape {tuple(decisions.shape)}.")
    slopes, offsets = torch.empty_like(decisions[0]), torch.empty_like(decisions[0])
    for c, values in enumerate(decisions.unbind(1)):
        in_class = (labels == c).cpu().numpy()
        if in_class.all() or not in_class.any():
            raise ValueError(
                f"calibration needs points of class {c} and of others: got {in_class.sum()} of {len(in_class)}."
            )
        curve = LogisticRegression().fit(values.cpu().numpy()[:, None], in_class)
        slopes[c], offsets[c] = float(curve.coef_[0, 0]), float(curve.intercept_[0])
    return PlattScaling(slopes, offsets)


def probabilities(scaling: PlattScaling, decisions: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
    """Turn decision values into one probability per class. The probabilities of a point need not sum to 1."""
    return torch.sigmoid(decisions * scaling.slopes + scaling.offsets)
