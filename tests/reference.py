"""The definitions, read off the page: loops over `autograd.grad`, nothing shared with the engine."""

import torch
from torch import Tensor

import epk_gp as epk
from epk_gp.quadrature.rules import QuadratureRule


def output(trajectory: epk.Trajectory, weights: dict[str, Tensor], x: Tensor, head: str) -> Tensor:
    z = trajectory.model.evaluate(weights, x[None])[0]
    return torch.log_softmax(z, dim=0) if head == "log_softmax" else z


def jacobian(trajectory: epk.Trajectory, s: int, t: float, x: Tensor, head: str, every: int = 1) -> Tensor:
    """(C, P) at w_s(t), or at t on the chord of so many steps that step s belongs to."""
    s = s // every * every
    start, end = trajectory.weights(s), trajectory.weights(min(s + every, trajectory.num_steps))
    here = {name: (start[name] + t * (end[name] - start[name])).detach().requires_grad_() for name in start}
    f = output(trajectory, here, x, head)
    leaves = [here[name] for name in trajectory.model.names]
    rows = [
        torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True, materialize_grads=True) for value in f
    ]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def features(trajectory: epk.Trajectory, s: int, t: float, points: epk.Points, head: str, every: int = 1) -> Tensor:
    """Definition 3.4: (n, C, P), frozen at w_s for training copies."""
    masks = points.is_train.tolist() if isinstance(points.is_train, Tensor) else [points.is_train] * len(points)
    places = [(0.0, 1) if is_train else (t, every) for is_train in masks]
    return torch.stack([jacobian(trajectory, s, t, x, head, k) for x, (t, k) in zip(points.X, places, strict=True)])


def gram_block(
    trajectory: epk.Trajectory, a: epk.Points, b: epk.Points, head: str, rule: QuadratureRule, every: int = 1
) -> Tensor:
    block = torch.zeros((), dtype=torch.float64)
    for step in trajectory.steps:
        for t, weight in rule:
            phi_a, phi_b = (features(trajectory, step.index, t, points, head, every) for points in (a, b))
            block = block + step.lr * weight * torch.einsum("ncp,mdp->ncmd", phi_a, phi_b)
    return block


def contributions(trajectory: epk.Trajectory, X: Tensor, head: str, rule: QuadratureRule) -> Tensor:
    """Theorem 3.6 sample by sample, (n, C, M)."""
    C, M = trajectory.num_outputs, trajectory.num_points
    total = torch.zeros(len(X), C, M, dtype=torch.float64)
    for step in trajectory.steps:
        batch = range(M) if step.batch is None else step.batch.tolist()
        c = 1 / len(batch) if trajectory.loss.reduction == "mean" else 1.0
        phi = [sum(w * jacobian(trajectory, step.index, t, x, head) for t, w in rule) for x in X]
        for i in batch:
            x, y = trajectory.inputs[i], trajectory.targets[i]
            z = output(trajectory, trajectory.weights(step.index), x, "logits").detach().requires_grad_()
            if isinstance(trajectory.loss, epk.CrossEntropy):
                value = -torch.log_softmax(z, dim=0)[y]
            else:
                value = (z - y).square().sum() / (C if trajectory.loss.reduction == "mean" else 1)
            (derivative,) = torch.autograd.grad(value, z)
            gradient = derivative @ jacobian(trajectory, step.index, 0.0, x, "logits")
            for n in range(len(X)):
                total[n, :, i] -= step.lr * c * (phi[n] @ gradient)
    return total
