"""Path thinning: every k-th step stands for its neighbours. An approximation, whose error is measured."""

import hashlib
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from epk_gp.core.checks import ComputeSettings, parse_options, validate_count
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.losses import Head
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, parse_inputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.quadrature.rules import Rule, gauss_legendre


@dataclass(frozen=True, eq=False)
class Thinning:
    """A run whose kernel leaves steps out, and what that costs.

    Attributes:
        trajectory: The same run with other weights of its steps in the kernel: the middle one of every k consecutive
            steps has the weight of all of them, the others have none. For Gram matrices and Gaussian processes;
            `reconstruct` and `attribute` do not look at these weights, and stay exact.
        every: k.
        kept: Steps that are left.
        error: Frobenius norm of (thinned - full) over that of the full Gram matrix of the probe.
        max_error: Largest |thinned - full| over the full matrix's mean diagonal.
        probe: Points of the probe: half are training copies, half test copies.
    """

    trajectory: Trajectory
    every: int
    kept: int
    error: float
    max_error: float
    probe: int


def thin_path(
    trajectory: Trajectory,
    every: int,
    X: Inputs,
    *,
    head: Head | None = None,
    rule: Rule = gauss_legendre(4),
    num_probe: int = 32,
    **options: Unpack[ComputeSettings],
) -> Thinning:
    """Leave steps out of the kernel's sum, and measure the error against the full sum.

        K[n, c, m, d] = sum_{g} (sum_{s in group g} eta_s) sum_q w_q <phi_{s(g),q}(a_n)_c, phi_{s(g),q}(b_m)_d>

    The error is measured with this head and rule on the Gram matrix of evenly spaced points: `num_probe` of X as test
    copies and as many training points as training copies.

    Args:
        trajectory: Training run with S steps.
        every: k, from 1 (nothing is left out) to S.
        X: n points like those that will be asked about.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: Quadrature rule.
        num_probe: Points of either kind, at most.
        options: `memory_budget` and `progress` of the computation of the error; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: k is not a whole number in 1 .. S, or the network cannot take the points.
    """
    parse_options("thin_path", ("checkpoint", "accumulate", "executor"), **options)
    X = parse_inputs(trajectory, X)
    validate_count(every, "every")
    validate_count(num_probe, "num_probe")
    if every > trajectory.num_steps:
        raise ValueError(f"every must be at most the number of steps, {trajectory.num_steps}: got {every}.")
    thinned = _thinned(trajectory, every)
    training = trajectory.inputs.to(X)
    probe = torch.cat([_spaced(training, num_probe), _spaced(X, num_probe)])
    is_train = torch.arange(len(probe), device=X.device) < min(num_probe, len(training))
    points = Points(probe, is_train)
    full, other = (PathKernel(run, head, rule).block(points, points, **options) for run in (trajectory, thinned))
    difference = other - full
    diagonal = torch.einsum("ncnc->nc", full).mean()
    return Thinning(
        trajectory=thinned,
        every=every,
        kept=sum(step.lr > 0 for step in thinned.steps),
        error=float(difference.norm() / full.norm()),
        max_error=float(difference.abs().max() / diagonal),
        probe=len(probe),
    )


def _thinned(trajectory: Trajectory, every: int) -> Trajectory:
    steps: list[Step] = []
    for first in range(0, trajectory.num_steps, every):
        group = trajectory.steps[first : first + every]
        # of two middle steps the earlier and the later one in turn: always the later one would be a bias
        total, middle = sum(step.lr for step in group), group[(len(group) - (first // every + 1) % 2) // 2]
        steps += [replace(step, lr=total if step is middle else 0.0) for step in group]
    digest = hashlib.blake2b(f"{trajectory.digest} every {every}".encode(), digest_size=16).hexdigest()
    return replace(trajectory, steps=tuple(steps), digest=digest)


def _spaced(X: Tensor, count: int) -> Tensor:
    return X[torch.linspace(0, len(X) - 1, min(count, len(X)), device=X.device).round().long()]
