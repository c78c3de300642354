"""An exact Gaussian process with an RBF kernel and one factorisation for all classes, beside which ours is judged."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FLOOR = 1e-6  # of the noise, so that the matrix can be factorised
NUM_FIT = 2000  # points on which the marginal likelihood is maximised; the process is conditioned on all


@dataclass(frozen=True, eq=False)
class RBFProcess:
    """A posterior of C functions that share a kernel; its prior variance is 1, so that its variance lies in [0, 1].

    Attributes:
        inputs: (N, D).
        lengthscale: In units of the inputs.
        noise: Variance of the noise over that of the functions.
        factor: Cholesky factor of K + noise I.
        weights: (N, C), (K + noise I)^-1 (Y - mean).
        mean: (C,), the mean of the targets.
    """

    inputs: Tensor
    lengthscale: float
    noise: float
    factor: Tensor
    weights: Tensor
    mean: Tensor

    def posterior(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Return means (n, C) and the variance (n,) that all classes share."""
        means, variances = [], []
        for part in X.double().split(1000):
            k = _rbf(part, self.inputs, self.lengthscale)
            means.append(self.mean + k @ self.weights)
            solved = torch.linalg.solve_triangular(self.factor, k.mT, upper=False)
            variances.append(1 - solved.square().sum(0))
        return torch.cat(means), torch.cat(variances).clamp_min(0)

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Return mean (N, C) and variance (N,) at each point from all others (Rasmussen and Williams, 5.12)."""
        precision = torch.cholesky_inverse(self.factor).diagonal()
        return self.targets() - self.weights / precision[:, None], 1 / precision

    def targets(self) -> Tensor:
        """Return what the process was conditioned on."""
        return self.mean + self.factor @ (self.factor.mT @ self.weights)


def fit_rbf_process(
    X: Tensor, labels: Tensor, num_classes: int, generator: torch.Generator, *, lengthscale: float | None = None
) -> RBFProcess:
    """Condition on labels (one-hot), with noise, and lengthscale where none is given, by marginal likelihood.

    The scale of the functions follows in closed form, and classes share all three. The search starts at the median
    distance.
    """
    X, Y = X.double(), F.one_hot(labels, num_classes).double()
    mean = Y.mean(0)
    chosen = torch.randperm(len(X), generator=generator)[:NUM_FIT]
    lengthscale, noise = _hyperparameters(X[chosen], Y[chosen] - mean, lengthscale)
    K = _rbf(X, X, lengthscale)
    K.diagonal().add_(noise)
    factor = torch.linalg.cholesky(K)
    return RBFProcess(X, lengthscale, noise, factor, torch.cholesky_solve(Y - mean, factor), mean)


def median_distance(X: Tensor) -> float:
    """Return the median distance of pairs of points."""
    return float(torch.pdist(X[:1000].double()).median())


def _hyperparameters(X: Tensor, Y: Tensor, known: float | None) -> tuple[float, float]:
    squared = torch.cdist(X, X).square()
    N, C = Y.shape
    noise = torch.tensor(0.05, dtype=torch.float64).log().requires_grad_()
    length = torch.tensor(known or median_distance(X), dtype=torch.float64).log().requires_grad_(known is None)
    searched = [noise] if known else [noise, length]
    optimizer = torch.optim.LBFGS(searched, max_iter=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        K = torch.exp(-0.5 * squared / length.exp().square())
        factor = torch.linalg.cholesky(K + (noise.exp() + FLOOR) * torch.eye(N, dtype=torch.float64))
        solved = torch.linalg.solve_triangular(factor, Y, upper=False)
        value = 0.5 * C * (solved.square().mean().log() + 2 / N * factor.diagonal().log().sum())  # per point
        value.backward()
        return value

    optimizer.step(loss)
    return float(length.detach().exp()), float(noise.detach().exp()) + FLOOR


def _rbf(A: Tensor, B: Tensor, lengthscale: float) -> Tensor:
    return torch.cdist(A, B).square_().mul_(-0.5 / lengthscale**2).exp_()
