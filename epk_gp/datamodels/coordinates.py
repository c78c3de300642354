"""The coordinates that the loss of a sample depends on, and the forces of training on them.

For cross entropy with one class per sample, the loss log(1 + e^-m) depends only on the margin,

    m = log p_y - log(1 - p_y) = z_y - log sum_{c != y} e^{z_c},   force -dloss / dm = sigmoid(-m);

For any other loss of outputs (n, C) it depends on the C outputs, whose forces are -dloss / dz. Scores of many
positions, such as words, are too many: for them the curvature of the loss is that of labels drawn from the network's
own probabilities, whose gradients are added to that of the sample's loss.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
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
