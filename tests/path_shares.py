"""Per-sample buffers run forward with recorded coefficients."""

import torch
from torch import Tensor, nn

import epk_gp as epk
import reference
from epk_gp.optimizers.update_rules import apply_matrices, broadcast_to_params


def shares(run: epk.Trajectory) -> list[Tensor]:
    """Per-sample buffers run forward: the share of each sample, and at last of decay, in each step, (M + 1, P)."""
    sizes, M, P = run.model.sizes, run.num_points, run.num_weights
    buffers, result = torch.zeros(M + 1, P).double(), []
    for step in run.steps:
        u, w = run.updates[step.index], run.states[step.index]
        per_weight = [broadcast_to_params(value, sizes, w) for value in u]
        lr, momentum_lr, beta, take, scale, decay, decoupled = per_weight
        h = torch.zeros(M + 1, P).double()
        for i in step.batch.tolist():
            leaves = {name: value.clone().requires_grad_() for name, value in run.weights(step.index).items()}
            z = run.model.evaluate(leaves, run.inputs[i : i + 1])
            loss = nn.functional.cross_entropy(z, run.targets[i : i + 1]) / len(step.batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            h[i] += scale * torch.cat([g.flatten() for g in gradients])
        h[-1] = decay * w
        buffers = beta * buffers + take * h
        share = -apply_matrices(u, sizes, momentum_lr * buffers + lr * h)
        share[-1] -= decoupled * w
        result.append(share)
    return result


def assert_are_shares(run: epk.Trajectory, X: Tensor, of_steps: list[Tensor]) -> None:
    """Contributions are those of each sample's part of every step, (M + 1, P), against Phi by brute force."""
    rule, expected = epk.gauss_legendre(4), torch.zeros(len(X), 3, run.num_points + 1, dtype=torch.float64)
    for s, share in enumerate(of_steps):
        for n, x in enumerate(X):
            phi = sum(w * reference.jacobian(run, s, t, x, "logits") for t, w in rule)
            expected[n] += phi @ share.T
    parts = epk.attribute(run, X, head="logits")
    scale = expected.abs().max()
    assert (parts.samples - expected[:, :, :-1]).abs().max() <= 1e-9 * scale
    assert (parts.decay - expected[:, :, -1]).abs().max() <= 1e-9 * scale
    assert parts.max_error <= 1e-10
    assert epk.reconstruct(run, X, head="logits").max_error <= 1e-10
