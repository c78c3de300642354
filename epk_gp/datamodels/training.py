"""Training in the path kernel: the network's numbers for other weights of the samples, from kernels alone.

    du / dt = K_l (w * a * force(u)),   0 <= t <= 1 in each part l of the run, one after the other,

with u the coordinates of all samples and the requested numbers, starting at their recorded values before the first
step; K_l the kernel of part l times its time, a the weights of the samples in the loss, w the requested weights. The
equation is stiff: a step of Euler's method is at most 1.2 / (largest eigenvalue of K_l a times the loss's curvature).

Coordinates are what the loss of a sample depends on. For cross entropy with one class per sample, the loss
log(1 + e^-m) depends only on the margin,

    m = log p_y - log(1 - p_y) = z_y - log sum_{c != y} e^{z_c},   force -dloss / dm = sigmoid(-m);

For any other loss of outputs (n, C) it depends on the C outputs, whose forces are -dloss / dz. Scores of many
positions, such as words, are too many: for them the curvature of the loss is that of labels drawn from the network's
own probabilities, whose gradients are added to that of the sample's loss.

Path ridge is the closed form of the equation with means over the path instead of kernels, forces and curvatures:

    scores = k A (K A + 1 / c)^-1 r / c,   K = sum_l K_l, A = diag(a), r the mean force, c = alpha * mean curvature

for a kept share alpha of the samples: the mean of a Gaussian process with the path kernel as prior covariance.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from linear_operator.utils import linear_cg
from scipy.optimize import brentq
from torch import Tensor, nn

from epk_gp.autodiff.dense import Cotangents, all_outputs
from epk_gp.core.losses import (
    ClassLoss,
    CrossEntropy,
    Loss,
    PerSampleLoss,
    classes_second,
    ignored_class,
    loss_derivatives,
    per_sample_losses,
    soft_targets,
)

LARGEST_DENSE = 5000  # coordinates up to which the ridge is solved by Cholesky
SHARE = 0.5  # alpha: kept share of the samples, in the curvature of the ridge
_EULER, _FARTHEST = 1.2, 2.0  # below 2, the limit of Euler's method; largest change of a margin in a step
# Logarithm of a time, in units of the fastest change: range, steps and error. Steps of outputs do not grow longer.
_SHORTEST, _LONGEST, _LONGEST_OF_OUTPUTS, _LOG_STEP, _LOG_ERROR = -12, 24, 8, 2, 0.02
_POWERS, _EVERY = 4, 4  # iterations for the largest eigenvalue at the beginning of a part; steps between others
_CG_STEPS = 11  # at least ten steps are made; eleven are enough with this damping


def log_odds(z: Float[Tensor, "n C"], classes: Int64[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the log-odds of one class of each row, from logits, log-probabilities, or a single logit of class 1."""
    if z.shape[1] == 1:
        return z[:, 0] * (2 * classes - 1)
    own = classes[:, None]
    return z.gather(1, own)[:, 0] - z.scatter(1, own, -torch.inf).logsumexp(dim=1)


def log_odds_cotangents(classes: Int64[Tensor, " n"]) -> Cotangents:
    """Return the derivative of the log-odds of one class of each row: e_y minus the softmax of the others."""

    def rows(z: Tensor) -> Tensor:
        if z.shape[1] == 1:
            return (2 * classes - 1).to(z)[None, :, None]
        own = classes.to(z.device)[:, None]
        return (-z.scatter(1, own, -torch.inf).softmax(dim=1)).scatter(1, own, 1.0)[None]

    return Cotangents(rows)


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The K coordinates of each of M samples, on which its loss depends: coordinate k of sample i is entry k M + i.

    Attributes:
        loss: The loss of the run.
        targets: Targets of the samples.
        num_outputs: C.
    """

    loss: Loss
    targets: Shaped[Tensor, "M ..."]
    num_outputs: int

    @property
    def are_margins(self) -> bool:
        """Whether they are margins: for cross entropy with one class per sample, without label smoothing."""
        is_smooth = isinstance(self.loss, CrossEntropy) and self.loss.label_smoothing > 0
        has_classes = isinstance(self.loss, ClassLoss) and not self.targets.is_floating_point()
        return has_classes and not is_smooth and self.num_outputs > 1

    @property
    def is_logit(self) -> bool:
        """Whether the single output is the logit of class 1 against class 0."""
        is_binary = isinstance(self.loss, PerSampleLoss) and isinstance(self.loss.function, nn.BCEWithLogitsLoss)
        return is_binary and self.num_outputs == 1

    @property
    def per_sample(self) -> int:
        """Number K of coordinates per sample."""
        return 1 if self.are_margins else self.num_outputs

    @cached_property
    def _weighted_classes(self) -> tuple[Int64[Tensor, " M"], Float[Tensor, " M"]]:
        """The class of each sample, and its weight in the loss: 0 for a sample that is left out."""
        like = torch.empty(0, self.num_outputs, dtype=torch.float64, device=self.targets.device)
        q = soft_targets(self.loss, self.targets, like)  # type: ignore[arg-type]  # `are_margins`
        return q.argmax(dim=1), q.sum(dim=1)

    def at(self, z: Float[Tensor, "M C"], node: int) -> "Coordinates":
        """Return the coordinates at a node, which are the same at all nodes."""
        return self

    def cotangents(self, rows: slice) -> Cotangents:
        """Return the derivatives of the coordinates of some samples in their outputs."""
        if self.are_margins:
            return log_odds_cotangents(self._weighted_classes[0][rows])
        return Cotangents(all_outputs("logits").of_logits)  # without the special form of the last layer for a head

    def of(self, z: Float[Tensor, "M C"]) -> Float[Tensor, " KM"]:
        """Return the coordinates of all samples."""
        return log_odds(z, self._weighted_classes[0]) if self.are_margins else z.T.flatten()

    def forces(self, u: Float[Tensor, "KM s"]) -> Float[Tensor, "KM s"]:
        """Return the forces on the coordinates in s trainings, in a differentiable form."""
        if self.are_margins:
            return self._weighted_classes[1].to(u)[:, None] * torch.sigmoid(-u)
        with torch.enable_grad():
            leaf = u if u.requires_grad else u.detach().requires_grad_()
            z = leaf.T.unflatten(1, (self.num_outputs, -1)).transpose(1, 2).flatten(0, 1)  # s M rows of C outputs
            y = self.targets.repeat(u.shape[1], *[1] * (self.targets.ndim - 1))
            loss = per_sample_losses(self.loss, z, y).sum()
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=u.requires_grad)
        return -slope

    def pull(self, u: Float[Tensor, "KM s"], v: Float[Tensor, "KM s"]) -> tuple[Tensor, Tensor]:
        """Return the forces, and the products of their symmetric derivative with v."""
        if self.are_margins:
            forces, p = self.forces(u), torch.sigmoid(u)
            return forces, -forces * p * v
        with torch.enable_grad():
            leaf = u.detach().requires_grad_()
            forces = self.forces(leaf)
            if not forces.requires_grad:
                return forces, torch.zeros_like(v)
            (slopes,) = torch.autograd.grad(forces, leaf, v, materialize_grads=True)
        return forces.detach(), slopes

    def along(self, u: Float[Tensor, "KM s"]) -> tuple[Float[Tensor, "KM s"], Float[Tensor, " s"]]:
        """Return the forces at some states, and the mean curvature of the loss at each, from one product with signs."""
        signs = random_signs(u)
        forces, slopes = self.pull(u, signs)
        return forces, -(slopes * signs).mean(dim=0)


def random_signs(u: Float[Tensor, "N s"]) -> Float[Tensor, "N s"]:
    """Return random signs for the rows, the same in every call: with them the mean of v . A v is the trace of A."""
    signs = torch.randint(0, 2, (len(u), 1), generator=torch.Generator().manual_seed(0)).mul(2).sub(1)
    return signs.to(u).expand_as(u)


@dataclass(frozen=True, eq=False)
class PseudoLabels:
    """Gradients of the losses of M samples for drawn labels, K - 1 for each, and for the recorded targets.

    Attributes:
        loss: The loss of the run.
        targets: Targets of the samples.
        shape: Shape of a sample's scores.
        draws: Number K - 1 of drawn labels per sample.
        labels: The drawn labels, (K - 1, M, ...); None before they are drawn.
    """

    loss: ClassLoss
    targets: Int64[Tensor, "M ..."]
    shape: torch.Size
    draws: int
    labels: Int64[Tensor, "draws M ..."] | None = None

    @property
    def per_sample(self) -> int:
        """Number K of gradients per sample."""
        return self.draws + 1

    def at(self, z: Float[Tensor, "M D"], node: int) -> "PseudoLabels":
        """Draw labels from the probabilities of a network with these scores; the same labels in every call."""
        p = classes_second(self.loss, z.unflatten(1, self.shape), self.targets).movedim(1, -1).softmax(dim=-1)
        generator = torch.Generator().manual_seed(node)
        drawn = torch.multinomial(p.flatten(0, -2).cpu(), self.draws, replacement=True, generator=generator)
        labels = drawn.T.unflatten(1, p.shape[:-1]).to(z.device)
        return replace(self, labels=torch.where(self.targets == ignored_class(self.loss), self.targets, labels))

    def cotangents(self, rows: slice) -> Cotangents:
        """Return the derivatives of minus the losses of some samples in their scores."""

        def of_scores(z: Tensor) -> Tensor:
            own = [*([] if self.labels is None else self.labels), self.targets]
            scores = z.unflatten(1, self.shape)
            return torch.stack([-loss_derivatives(self.loss, scores, y[rows]).flatten(1) for y in own])

        return Cotangents(of_scores)

    def of(self, z: Float[Tensor, "M D"]) -> Float[Tensor, " none"]:
        """Return no coordinates."""
        return z.new_empty(0)


@dataclass(frozen=True, eq=False)
class PathTraining:
    """The training of a run in its path kernel.

    Attributes:
        kernels: Kernels of consecutive parts of the run, each times its time; N training coordinates, then questions.
        start: Coordinates and requested numbers before the first step.
        recorded: The requested numbers of the trained network.
        coordinates: Coordinates of the samples.
        sample_weights: Mean weight of each sample in the loss of a step; 0 for samples that the training did not see.
        forces: Mean force on each coordinate along the recorded path, (N,).
        curvature: Mean curvature of the loss along the path.
    """

    kernels: tuple[Float[Tensor, "NQ N"], ...]
    start: Float[Tensor, " NQ"]
    recorded: Float[Tensor, " Q"]
    coordinates: Coordinates
    sample_weights: Float[Tensor, " M"]
    forces: Float[Tensor, " N"]
    curvature: float

    @cached_property
    def present(self) -> Float[Tensor, " M"]:
        """1 for each sample that the training saw, 0 for the others."""
        return (self.sample_weights > 0).to(self.start)

    @cached_property
    def share(self) -> Float[Tensor, " N"]:
        """Weight of the loss of each coordinate; for a sample that was not seen, the mean of the others."""
        seen = self.sample_weights[self.sample_weights > 0]
        own = torch.where(self.sample_weights > 0, self.sample_weights, seen.mean())
        return own.to(self.start).repeat(self.coordinates.per_sample)

    @property
    def num_coordinates(self) -> int:
        """Number N of training coordinates."""
        return len(self.forces)

    @cached_property
    def repeated(self) -> Float[Tensor, " Q"]:
        """The numbers after training in the path kernel with the samples of the recorded training."""
        found: Tensor = self.simulate(self.present[None])[0]
        return found

    @property
    def asked_start(self) -> Float[Tensor, " Q"]:
        """The requested numbers before the first step."""
        return self.start[self.num_coordinates :]

    def changes(self, weights: Float[Tensor, "s M"]) -> Float[Tensor, "s Q"]:
        """Return the changes of the requested numbers by training with other weights of the samples."""
        return self.simulate(weights) - self.repeated

    def of_samples(self, scores: Float[Tensor, "Q N"]) -> Float[Tensor, "Q M"]:
        """Add the scores of the coordinates of each sample."""
        found: Tensor = scores.unflatten(1, (self.coordinates.per_sample, -1)).sum(dim=1)
        return found

    def simulate(self, weights: Float[Tensor, "s M"]) -> Float[Tensor, "s Q"]:
        """Train with other weights of the samples, s times, and return the requested numbers."""
        found: Tensor = self._steps(weights)[0][self.num_coordinates :].T
        return found

    def with_time(self, last: Float[Tensor, " N"]) -> tuple["PathTraining", bool]:
        """Return the training with kernels of unit time scaled to the time at which it has the last residuals.

        If its residuals never become this small, the time at which they are closest is used, and the flag is False.

        Args:
            last: The coordinates at the end of the recorded training.

        Raises:
            ValueError: Residuals do not fall.
        """

        def mean_square(u: Float[Tensor, " N"]) -> float:
            return float(self.coordinates.forces(u[:, None]).square().mean().log())

        def end(log_time: float) -> Float[Tensor, " N"]:
            timed = replace(self, sample_weights=self.sample_weights * math.exp(log_time))  # time scales either one
            return timed._steps(self.present[None])[0][: self.num_coordinates, 0]

        center = -math.log(sum(float(kernel.diagonal() @ self.share) for kernel in self.kernels))
        longest = _LONGEST if self.coordinates.are_margins else _LONGEST_OF_OUTPUTS
        size, first = mean_square(last), self.start[: self.num_coordinates]
        found, least, is_reached = -math.inf, float((first - last).norm()), False
        for log_time in range(_SHORTEST, longest + 1, _LOG_STEP) if size < mean_square(first) else ():
            u = end(time := center + log_time)
            if mean_square(u) <= size:
                if is_reached := log_time > _SHORTEST:
                    found = brentq(lambda time: mean_square(end(time)) - size, time - _LOG_STEP, time, xtol=_LOG_ERROR)
                break
            if (distance := float((u - last).norm())) < least:
                found, least = time, distance
        if found == -math.inf:
            raise ValueError(
                "the checkpoints must be those of a training, whose residuals fall: those of the last one are not "
                "smaller, or training in the path kernel does not come nearer to it, whatever its time."
            )
        return replace(self, kernels=tuple(kernel.mul_(math.exp(found)) for kernel in self.kernels)), is_reached

    def derivative(self) -> Float[Tensor, "Q M"]:
        """Differentiate the numbers after training in the weight of each sample, at those of the recorded training."""
        N = self.num_coordinates
        _, steps = self._steps(self.present[None], keeps=True)
        Q, present = len(self.start) - N, self.present.repeat(self.coordinates.per_sample)[:, None]
        adjoint, total = self.share.new_zeros(N, Q), self.share.new_zeros(N, Q)
        for part, size, u in reversed(steps):
            kernel = self.kernels[part]
            back = (kernel[:N].T @ adjoint + kernel[N:].T) * (self.share * size)[:, None]
            forces, slopes = self.coordinates.pull(u.expand(-1, Q), back * present)
            total += back * forces
            adjoint += slopes
        return self.of_samples(total.T)

    def _steps(
        self, weights: Float[Tensor, "s M"], *, keeps: bool = False
    ) -> tuple[Float[Tensor, "NQ s"], list[tuple[int, Tensor, Tensor]]]:
        N, a = self.num_coordinates, weights.T.repeat(self.coordinates.per_sample, 1) * self.share[:, None]
        u, kept = self.start[:, None].repeat(1, len(weights)), list[tuple[int, Tensor, Tensor]]()
        v, flattest = torch.ones_like(u[:N]).div(N**0.5), torch.finfo(u.dtype).tiny
        for part, kernel in enumerate(self.kernels):
            left, count = torch.ones_like(u[0]), 0
            while bool((left > 0).any()):
                for _ in range(_POWERS if not count else count % _EVERY == 0):
                    product = -self.coordinates.pull(u[:N], kernel[:N] @ v)[1] * a
                    largest = product.norm(dim=0)
                    v = torch.where((left > 0) & (largest > flattest), product / largest.clamp(min=flattest), v)
                step = kernel @ (a * self.coordinates.forces(u[:N]))
                longest = _EULER / largest.clamp(min=flattest)
                if self.coordinates.are_margins:
                    longest = torch.minimum(longest, _FARTHEST / step[:N].abs().amax(dim=0).clamp(min=flattest))
                size = torch.minimum(left, longest)
                if keeps:
                    kept.append((part, size, u[:N].clone()))
                u += step * size
                left, count = torch.where(size < left, left - size, 0.0), count + 1
        return u, kept

    @property
    def damping(self) -> float:
        """The damping of the ridge, relative to the mean diagonal of the damped matrix."""
        N = self.num_coordinates
        return 1 / (SHARE * self.curvature * float(sum(k[:N].diagonal() @ self.share for k in self.kernels)) / N)

    def ridge(self) -> Float[Tensor, "Q M"]:
        """Return the change of each number by the whole of each sample, by path ridge."""
        N, root = self.num_coordinates, self.share.sqrt()
        total = self.kernels[0] if len(self.kernels) == 1 else sum(self.kernels[1:], self.kernels[0].clone())
        c = SHARE * self.curvature
        solved = _solve(total[:N], root, 1 / c, (total[N:] * root).T)
        return self.of_samples((solved * (root * self.forces)[:, None]).T / c)


def _solve(K: Float[Tensor, "N N"], root: Float[Tensor, " N"], shift: float, b: Float[Tensor, "N r"]) -> Tensor:
    """Solve (S K S + shift I) x = b, S = diag(root): by Cholesky, or for many rows by conjugate gradients."""
    if len(K) <= LARGEST_DENSE:
        A = root[:, None] * K * root
        A.diagonal().add_(shift)
        return torch.cholesky_solve(b, torch.linalg.cholesky(A))

    def multiply(v: Tensor) -> Tensor:
        return root[:, None] * (K @ (root[:, None] * v)) + shift * v

    found: Tensor = linear_cg(multiply, b, max_iter=_CG_STEPS, max_tridiag_iter=0, tolerance=math.inf)
    return found


def gauss_newton_scores(
    kernel: Float[Tensor, "NQ N"], sample_weights: Float[Tensor, " M"], draws: int
) -> Float[Tensor, "Q M"]:
    """Return scores by the linearised end of a training whose curvature is that of drawn labels.

        scores = a_i g_x^T (alpha sum_j a_j R_j R_j^T / s + G^-1)^-1 g_i,   G = T H

    where g_i is minus the gradient of a sample's loss, R_j those of s drawn labels, and H the metric at one state.

    Args:
        kernel: Products of the gradients of M samples in the metric G: drawn labels first, then the losses, then the
            questions.
        sample_weights: Mean weight of each sample in the loss of a step.
        draws: Number of labels drawn per sample.
    """
    M = len(sample_weights)
    N, end = draws * M, (draws + 1) * M
    root = (sample_weights / draws).sqrt().repeat(draws)
    solved = _solve(kernel[:N, :N], root, 1 / SHARE, root[:, None] * kernel[:N, N:])
    scores = kernel[end:, N:] - (kernel[end:, :N] * root) @ solved
    return scores * sample_weights
