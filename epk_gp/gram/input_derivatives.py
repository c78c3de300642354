"""Derivatives of Gram blocks with respect to the points, step by step: no graph over the run is ever kept.

The derivative of a gradient's inner product needs the network's second derivative, mixed in weights and input. Where
that jumps (ReLU, max-pool) the jump is not seen: the result is the derivative inside the linear piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.jacobians import Cotangents, WeightLocation, gradients, head_cotangents
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    Feature,
    OuterProductJacobian,
    feature_bytes,
    to_dense,
)
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.compute_options import MEMORY_BUDGET
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.head import Head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory, flat_weights
from epk_gp.quadrature.rules import QuadratureRule


@dataclass(frozen=True, eq=False)
class _Job:
    trajectory: Trajectory
    model: FunctionalModel
    plan: DifferentiationPlan
    rule: QuadratureRule
    form: ContractionCost
    cotangents: Cotangents
    fixed_seed: bool
    like: Tensor
    panel: int


def block_input_gradient(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    weights: Float[Tensor, "K N L M"] | Float[Tensor, "K N M"],
    *,
    head: Head,
    rule: QuadratureRule,
    summed: bool = False,
    memory_budget: int = MEMORY_BUDGET,
) -> Shaped[Tensor, "N ..."]:
    """Differentiate a weighted sum of kernel values with respect to the points on the left.

        d/da_n  sum_{k,n,l,m} weights[k, n, l, m] K(a_n, b_m)[k, l]

    Args:
        trajectory: Training run.
        a: N points; b is held fixed, also where it is the same.
        b: M points.
        weights: Class-major; without the third dimension only pairs of equal classes are summed.
        head: Head of the network.
        rule: Quadrature rule.
        summed: The weights have one class on each side, the sum of all outputs.
        memory_budget: Bytes for everything but the inputs and the result.

    Returns:
        The derivative, in the shape of a.X.
    """
    pairs = weights.shape[0] * (weights.shape[2] if weights.ndim == 4 else 1)
    result = torch.zeros_like(a.X)
    with torch.enable_grad():
        job = _job(trajectory, a.X, head, rule, pairs, summed, memory_budget)
        for rows, left in _panels(a, job.panel):
            for columns, right in _panels(b, job.panel):
                _add_block(job, result, a.X, rows, left, b.X[columns], right, weights[:, rows][..., columns])
    return result


def diagonal_input_gradient(
    trajectory: Trajectory,
    a: Points,
    weights: Float[Tensor, "N C C"],
    *,
    head: Head,
    rule: QuadratureRule,
    memory_budget: int = MEMORY_BUDGET,
) -> Shaped[Tensor, "N ..."]:
    """Differentiate a weighted sum of the blocks K(a_n, a'_n) with respect to a_n, at a'_n = a_n held fixed.

    Arguments: as `block_input_gradient`; the derivative with respect to a'_n is that with transposed weights.
    """
    result = torch.zeros_like(a.X)
    with torch.enable_grad():
        job = _job(trajectory, a.X, head, rule, weights.shape[1] ** 2, False, memory_budget)
        for rows, is_train in _panels(a, job.panel):
            for step in trajectory.steps:
                for t, omega in [(0.0, 1.0)] if is_train else rule:
                    X, features = _attached(job, step.index, t, a.X[rows])
                    blocks = torch.stack([_own_products(f) for f in features]).sum(0)
                    result[rows] += step.lr * omega * _derivative((blocks * weights[rows]).sum(), X)
    return result


def _job(
    trajectory: Trajectory, X: Tensor, head: Head, rule: QuadratureRule, pairs: int, summed: bool, budget: int
) -> _Job:
    model = trajectory.model_for(X)
    like = torch.empty(0, dtype=model.spec.dtype, device=X.device)
    rows = head_cotangents(head)
    job = _Job(
        trajectory=trajectory,
        model=model,
        plan=plan_for(trajectory, model),
        rule=rule,
        form=ContractionCost(pairs, len(rule), fixed_head=head == "logits"),
        cotangents=(lambda z: rows(z).sum(0, keepdim=True)) if summed else rows,
        fixed_seed=head == "logits",
        like=like,
        panel=1,
    )
    job = replace(job, plan=_differentiable_plan(job))
    # a point goes twice through the network and has features on both sides; a panel's products are square
    per_point = 4 * (trajectory.num_outputs + 3) * job.plan.activations_per_sample * like.element_size()
    if trajectory.num_steps:
        per_point += 8 * feature_bytes(_features(job, _place(job, 0, 0.0), X[:1].detach()))
    by_products = int((budget / (8 * like.element_size() * pairs)) ** 0.5)
    return replace(job, panel=max(1, min(by_products, budget // (2 * per_point))))


def _differentiable_plan(job: _Job) -> DifferentiationPlan:
    """Let `vmap` differentiate the dense weights only if it equals a loop: torch 2.13 gets layer norms wrong, twice."""
    trajectory, plan = job.trajectory, job.plan
    if not (plan.dense_params and plan.supports_vmap):
        return plan
    found_for, key = job.model.cache.vmap_second_derivatives, job.model.spec
    if key not in found_for:
        X = trajectory.inputs[:2].to(job.like)
        found = []
        for mapped in (True, False):
            trial = replace(job, plan=replace(plan, supports_vmap=mapped))
            point, features = _attached(trial, 0, 0.5, X)
            values = to_dense(features[-1])
            wave = torch.arange(values.numel(), device=X.device).to(values).sin().view_as(values)
            found.append(_derivative((values * wave).sum(), point))
        error = (found[0] - found[1]).abs().max()
        found_for[key] = bool(error <= torch.finfo(job.like.dtype).eps ** 0.65 * found[1].abs().max())
    return replace(plan, supports_vmap=found_for[key])


def _panels(b: Points, size: int) -> Iterator[tuple[Tensor, bool]]:
    for is_train in (True, False):
        yield from ((rows, is_train) for rows in b.copies(is_train).split(size) if len(rows))


def _add_block(
    job: _Job, result: Tensor, A: Tensor, rows: Tensor, left: bool, Y: Tensor, right: bool, weights: Tensor
) -> None:
    """Add the derivative at the given rows, all of one copy, against right points of one copy."""
    for step in job.trajectory.steps:
        if step.lr == 0:
            continue
        mine = _attached(job, step.index, 0.0, A[rows]) if left else None
        theirs = _frozen(job, step.index, 0.0, Y) if right else None
        total = job.like.new_zeros(())
        for t, omega in [(0.0, 1.0)] if left and right else job.rule:
            X, features = mine or _attached(job, step.index, t, A[rows])
            others = theirs or _frozen(job, step.index, t, Y)
            pairs = zip(features, others, strict=True)
            value = torch.stack([(_products(f, g, weights.ndim == 3) * weights).sum() for f, g in pairs]).sum()
            if mine is None:
                result[rows] += _derivative(step.lr * omega * value, X)
            else:
                total = total + step.lr * omega * value
        if mine is not None:
            result[rows] += _derivative(total, mine[0])


def _attached(job: _Job, s: int, t: float, X: Tensor) -> tuple[Tensor, list[Feature]]:
    X = X.detach().requires_grad_()
    return X, _features(job, _place(job, s, t), X)


def _frozen(job: _Job, s: int, t: float, X: Tensor) -> list[Feature]:
    """Compute features without a graph, in the form that those with one take."""
    return [_detached(f) for f in _features(job, _place(job, s, t), X.detach())]


def _features(job: _Job, place: WeightLocation, X: Tensor) -> list[Feature]:
    """Compute features with a graph to X, layers with several positions written out."""
    found = gradients(
        job.model, job.plan, place, X, job.cotangents, job.form, fixed_seed=job.fixed_seed, create_graph=True
    )
    return [
        f if isinstance(f, OuterProductJacobian) and f.a.shape[1] == 1 else DenseJacobian(to_dense(f)) for f in found
    ]


def _detached(feature: Feature) -> Feature:
    if isinstance(feature, DenseJacobian):
        return DenseJacobian(feature.values.detach())
    return replace(feature, a=feature.a.detach(), delta=feature.delta.detach())


def _products(f: Feature, g: Feature, per_class: bool) -> Tensor:
    """Multiply out two layers: (K, N, L, M), or (K, N, M) for equal classes only."""
    sides = "knp,kmp->knm" if per_class else "knp,lmp->knlm"
    if isinstance(f, DenseJacobian) or isinstance(g, DenseJacobian):
        return torch.einsum(sides, to_dense(f), to_dense(g))
    inputs = f.a[:, 0] @ g.a[:, 0].T + float(f.bias)
    deltas = torch.einsum(sides, f.delta[:, :, 0], g.delta[:, :, 0])
    return deltas * (inputs if per_class else inputs[:, None, :])


def _own_products(f: Feature) -> Tensor:
    """Multiply each point's gradients with a frozen copy of themselves, (N, K, L)."""
    g = _detached(f)
    if isinstance(f, DenseJacobian) or isinstance(g, DenseJacobian):
        return torch.einsum("knp,lnp->nkl", to_dense(f), to_dense(g))
    inputs = (f.a[:, 0] * g.a[:, 0]).sum(-1) + float(f.bias)
    return torch.einsum("kno,lno->nkl", f.delta[:, :, 0], g.delta[:, :, 0]) * inputs[:, None, None]


def _derivative(value: Tensor, X: Tensor) -> Tensor:
    (derivative,) = torch.autograd.grad(value, X, allow_unused=True, materialize_grads=True)
    return derivative


def _place(job: _Job, s: int, t: float) -> WeightLocation:
    start, end = (flat_weights(job.trajectory, state, job.like) for state in (s, s + 1))
    return WeightLocation(torch.lerp(start, end, t))
