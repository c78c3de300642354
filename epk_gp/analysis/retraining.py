"""New coefficients for the kernel machine, by a support vector machine (Figure 3, Bell et al. 2023)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RetrainedMachine:
    """One kernel machine per class, against all other classes: sum_i coefficients[c, i] k_c(x, x_i) + intercepts[c].

    Attributes:
        coefficients: (C, M), zero but for support vectors.
        intercepts: (C,).
        support: Number of support vectors of each class's machine, (C,).
    """

    coefficients: Float[Tensor, "C M"]
    intercepts: Float[Tensor, " C"]
    support: Int64[Tensor, " C"]


@dataclass(frozen=True, eq=False)
class Sigmoid:
    """Probabilities from decision values, one logistic curve per class (Platt 1999).

    Attributes:
        slopes: (C,).
        offsets: (C,).
    """

    slopes: Float[Tensor, " C"]
    offsets: Float[Tensor, " C"]


def retrain(gram: Float[Tensor, "C M M"], labels: Int64[Tensor, " M"], *, penalty: float = 1.0) -> RetrainedMachine:
    """Fit a support vector machine per class on its own Gram matrix, with scikit-learn's `SVC`.

    Section 4.1, Bell et al. (2023): the kernel is kept, its coefficients a_i are trained anew.

    Args:
        gram: K_c over the M training copies, as `gram_block_per_class` gives it.
        labels: Class of each point.
        penalty: The SVM's C, for the kernel divided by its mean diagonal.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: A penalty that is not positive, other labels than points, or a class without a point.
    """
    try:
        from sklearn.svm import SVC  # noqa: PLC0415  an optional dependency
    except ImportError as error:
        raise ImportError("retrain() must have scikit-learn. Run: pip install epk-gp[experiments]") from error
    C, M = gram.shape[:2]
    if not penalty > 0:
        raise ValueError(f"penalty must be positive: got {penalty}.")
    counts = torch.bincount(labels, minlength=C)
    if len(labels) != M or len(counts) != C or int(counts.min()) == 0:
        raise ValueError(
            f"labels must name each of {C} classes at least once, one per point: got {len(labels)} labels for {M} "
            f"points, with {counts.tolist()} points per class."
        )
    coefficients = gram.new_zeros(C, M)
    intercepts, support = gram.new_zeros(C), torch.zeros(C, dtype=torch.int64)
    for c in range(C):
        scale = float(gram[c].diagonal().mean())
        machine = SVC(kernel="precomputed", C=penalty).fit((gram[c] / scale).cpu().numpy(), (labels == c).cpu().numpy())
        chosen = torch.from_numpy(machine.support_.astype(np.int64))
        coefficients[c, chosen] = torch.from_numpy(machine.dual_coef_[0]).to(gram) / scale
        intercepts[c] = float(machine.intercept_[0])
        support[c] = len(chosen)
    return RetrainedMachine(coefficients, intercepts, support)


def decision_values(machine: RetrainedMachine, cross: Float[Tensor, "C n M"]) -> Float[Tensor, "n C"]:
    """Evaluate the machines at n points, given their kernel values with the M training copies."""
    return torch.einsum("cnm,cm->nc", cross, machine.coefficients) + machine.intercepts


def fit_sigmoid(decisions: Float[Tensor, "n C"], labels: Int64[Tensor, " n"]) -> Sigmoid:
    """Fit a logistic curve per class to decision values of points that the machine was not trained on.

    Args:
        decisions: Of n points.
        labels: Their classes.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: A class without a point, or with every point.
    """
    try:
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  an optional dependency
    except ImportError as error:
        raise ImportError("fit_sigmoid() must have scikit-learn. Run: pip install epk-gp[experiments]") from error
    slopes, offsets = torch.empty_like(decisions[0]), torch.empty_like(decisions[0])
    for c, values in enumerate(decisions.unbind(1)):
        inside = (labels == c).cpu().numpy()
        if inside.all() or not inside.any():
            raise ValueError(
                f"calibration needs points of class {c} and of others: got {inside.sum()} of {len(inside)}."
            )
        curve = LogisticRegression().fit(values.cpu().numpy()[:, None], inside)
        slopes[c], offsets[c] = float(curve.coef_[0, 0]), float(curve.intercept_[0])
    return Sigmoid(slopes, offsets)


def probabilities(sigmoid: Sigmoid, decisions: Float[Tensor, "n C"]) -> Float[Tensor, "n C"]:
    """Turn decision values into one probability per class; they need not sum to 1."""
    return torch.sigmoid(decisions * sigmoid.slopes + sigmoid.offsets)
