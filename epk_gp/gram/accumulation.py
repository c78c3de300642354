"""Some steps of a Gram tile: which gradients are taken where, and how many of them at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from epk_gp.autodiff.directional import Line
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians_at_weights, layer_jacobians_blocked
from epk_gp.autodiff.representations import ContractionCost, Feature, feature_bytes
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.head import Head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.prefetch import WeightPrefetcher
from epk_gp.gram.step_average import NodeBatch, StepAverage
from epk_gp.quadrature.adaptive import integrate, union_mesh
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule, Rule
from epk_gp.storage.partial_sums import PartialSums

T = TypeVar("T")

MAX_STEP_BATCH = 16  # summed in the points' dtype before they are added to the sum of all


@dataclass(frozen=True, eq=False)
class Job:
    """What all tiles of a block share."""

    trajectory: Trajectory
    model: FunctionalModel
    plan: DifferentiationPlan
    head: Head
    rule: Rule
    etas: tuple[float, ...]
    like: Tensor
    per_class: bool
    progress: bool
    num_outputs: int
    budget: int
    dtype: torch.dtype
    states: WeightPrefetcher
    steps_at_once: int | None = None
    checkpoint: PartialSums | None = None


def sum_steps(
    job: Job,
    steps: list[tuple[int, float]],
    tile: GramAccumulator,
    X: Tensor,
    left: bool,
    Y: Tensor,
    right: bool,
    *,
    shared: bool,
) -> None:
    """Add steps to a tile: training copies at the steps' starts, test copies at their nodes."""
    if not right:
        both = X if shared else torch.cat([X, Y])
        places = [(s, t, eta * weight) for s, eta in steps for t, weight in shared_nodes(job, s, both)]
        for some in _batched(places, steps_per_batch(job, (len(X) + len(Y)) * _feature_bytes(job))):
            features = list(jacobians_at_nodes(job, [(s, t) for s, t, _ in some], X))
            others = features if shared else list(jacobians_at_nodes(job, [(s, t) for s, t, _ in some], Y))
            tile.add_steps(features, others, [weight for *_, weight in some])
        return
    starts = [(s, 0.0) for s, _ in steps]
    others = list(jacobians_at_nodes(job, starts, Y))
    if left:
        features = others if shared else list(jacobians_at_nodes(job, starts, X))
        tile.add_steps(features, others, [eta for _, eta in steps])
        return
    found = []
    evaluations = _test_nodes(job, [s for s, _ in steps], X)
    for (_, eta), other, nodes in zip(steps, others, evaluations, strict=True):
        integral = StepAverage(tile, len(X), other, eta, fixed_steps=True)
        for node in nodes:
            integral.take(node)
        found.append(integral)
    numbers = sorted(found[0].averages)
    tile.add_steps(
        [[integral.averages[number] for number in numbers] for integral in found],
        [[other[number] for number in numbers] for other in others],
        [eta for _, eta in steps],
    )


def step_batches(job: Job, steps: list[tuple[int, float]], num_points: int) -> Iterator[list[tuple[int, float]]]:
    """Split steps into runs whose features fit into the budget together."""
    nodes = len(job.rule) if isinstance(job.rule, QuadratureRule) else 1
    return _batched(steps, steps_per_batch(job, num_points * (nodes + 2) * _feature_bytes(job)))


def steps_per_batch(job: Job, feature_bytes_each: int) -> int:
    """Count the steps or nodes that fit into an eighth of the budget; an adaptive rule takes one at a time."""
    if isinstance(job.rule, AdaptiveRule):
        return 1
    each = feature_bytes_each + 2 * job.model.num_weights * job.like.element_size()
    return max(1, min(MAX_STEP_BATCH, job.budget // (8 * each)))


def _batched(values: list[T], size: int) -> Iterator[list[T]]:
    return (values[first : first + size] for first in range(0, len(values), size))


def steps_of(job: Job) -> list[tuple[int, float]]:
    """List the steps that count, (s, eta_s)."""
    return [(s, eta) for s, eta in enumerate(job.etas) if eta > 0]


def jacobians_at_nodes(job: Job, places: list[tuple[int, float]], X: Tensor) -> Iterator[list[Feature]]:
    """Compute features at places (s, t), t of the way from w_s to w_{s+1}; small ones together."""
    keep = 1 + max((s for s, _ in places), default=0) - min((s for s, _ in places), default=0)
    weights = (_between(job, s, t, keep) for s, t in places)
    return layer_jacobians_at_weights(
        job.model, job.plan, weights, X, job.head, _form(job), dtype=job.like.dtype, memory=job.budget // 8
    )


def _between(job: Job, s: int, t: float, keep: int) -> Tensor:
    start = job.states.get(s, keep)
    return start if t == 0 else torch.lerp(start, job.states.get(s + 1, keep + 1), t)


def _form(job: Job) -> ContractionCost:
    ragged = isinstance(job.rule, AdaptiveRule)
    nodes = 4 if isinstance(job.rule, AdaptiveRule) else len(job.rule)
    pairs = job.num_outputs if job.per_class else job.num_outputs**2
    return ContractionCost(
        pairs, nodes, fixed_head=job.head == "logits", dense=ragged and not job.plan.supports_interpolation
    )


def shared_nodes(job: Job, s: int, X: Tensor) -> list[tuple[float, float]]:
    """List the nodes that all points share in a step."""
    if isinstance(job.rule, QuadratureRule):
        return list(job.rule)
    return union_mesh(_line(job, s), X, job.rule, job.trajectory.num_steps)


def _test_nodes(job: Job, steps: list[int], X: Tensor) -> Iterator[Iterator[NodeBatch]]:
    """Evaluate test copies at the nodes of each step: all at the same ones, or each at its own."""
    if isinstance(job.rule, AdaptiveRule):
        yield from (_own_nodes(job, s, job.rule, X) for s in steps)
        return
    rule = list(job.rule)
    features = jacobians_at_nodes(job, [(s, t) for s in steps for t, _ in rule], X)
    for _ in steps:
        yield (NodeBatch(next(features), weight) for _, weight in rule)


def _own_nodes(job: Job, s: int, rule: AdaptiveRule, X: Tensor) -> Iterator[NodeBatch]:
    line = _line(job, s)
    integral = integrate(line, X, rule, job.trajectory.num_steps)
    for part in torch.arange(len(integral.point), device=X.device).split(len(X)):
        place = WeightLocation(line.w, line.d, integral.t[part])
        points = integral.point[part]
        features = layer_jacobians_blocked(job.model, job.plan, place, X[points], job.head, _form(job))
        yield NodeBatch(features, integral.weight[part], points)


def _line(job: Job, s: int) -> Line:
    start, end = job.states.get(s, 1), job.states.get(s + 1, 2)
    return Line(job.model, job.plan, start, end - start, job.head, job.budget)


def panel_size(job: Job) -> int:
    """Choose how many points a side of a tile has, from the memory budget."""
    K, size = job.num_outputs, job.like.element_size()
    pairs = K if job.per_class else K * K
    per_pair = size * (3 * pairs + 1)  # total, sums of delta delta', scratch, a a'
    per_point = size * (K + 3) * job.plan.activations_per_sample + 3 * _feature_bytes(job)  # both sides, and an average
    by_pairs = int((job.budget / 2 / per_pair) ** 0.5)
    by_points = int(job.budget / 4 / per_point)
    return max(1, min(by_pairs, by_points))


def _feature_bytes(job: Job) -> int:
    """Measure what the features of one point take."""
    key = (job.head, _form(job), tuple(job.plan.bias_of), job.model.spec)
    found = job.model.cache.feature_bytes
    if key not in found:
        X = job.trajectory.inputs[:1].to(job.like.device)
        X = X.to(job.like.dtype) if X.is_floating_point() else X
        found[key] = feature_bytes(next(jacobians_at_nodes(job, [(0, 0.0)], X)))
    return found[key]
