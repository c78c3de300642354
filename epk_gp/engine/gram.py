"""Gram blocks of the exact path kernel, streamed over steps, nodes and tiles within a memory budget."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.engine.adaptive import common_nodes, integrate
from epk_gp.engine.averages import Evaluations, StepIntegral
from epk_gp.engine.checkpoint import Checkpoint, identity_of
from epk_gp.engine.contractions import Tile, diagonal, empty_tile, turned, write
from epk_gp.engine.features import Feature, Form, Place, feature_bytes, gradients_in_blocks
from epk_gp.engine.line import Line
from epk_gp.engine.plan import Plan
from epk_gp.engine.points import Points, check_points
from epk_gp.engine.probe import once_more, plan_for
from epk_gp.engine.quadrature import AdaptiveRule, QuadratureRule, Rule, check_rule, gauss_legendre
from epk_gp.recording.checks import check_memory_budget
from epk_gp.recording.networks import Head, Skeleton, check_head
from epk_gp.recording.trajectory import Trajectory, check_inputs, compute_dtype, flat_weights, skeleton_for

MEMORY_BUDGET = 1 << 30
_STEPS_AT_ONCE = 16  # summed in the points' dtype before they are added to the sum of all


@dataclass(frozen=True, eq=False)
class Job:
    """What all tiles of a block share."""

    trajectory: Trajectory
    skeleton: Skeleton
    plan: Plan
    head: Head
    rule: Rule
    etas: tuple[float, ...]
    like: Tensor
    per_class: bool
    progress: bool
    num_outputs: int
    budget: int
    dtype: torch.dtype
    steps_at_once: int | None = None
    checkpoint: Checkpoint | None = None


@once_more
def gram_block(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    *,
    head: Head = "log_softmax",
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    accumulate: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Float[Tensor, "N C M C"]:
    """Sum the exact path kernel over all steps.

    Equation (3) under the sum of Theorem 3.7, Bell et al. (2023):

        K[n, c, m, d] = sum_s eta_s sum_q w_q <phi_sq(a_n)_c, phi_sq(b_m)_d>

    Args:
        trajectory: Training run with S steps.
        a: N points, each a training or a test copy.
        b: M points.
        head: Whether f is the logits or their log-softmax.
        rule: Nodes and positive weights on [0, 1], the same for both sides; or an adaptive rule, which picks each test
            point's own nodes against training copies, and the union of a tile's points' nodes between test copies. The
            Gram matrix over both copies is then positive semi-definite to the tolerance only: it is no longer one sum
            over common nodes. Take a fixed rule where a factorisation needs more.
        step_weights: eta_s >= 0; the learning rates by default.
        accumulate: torch.float64 to sum steps in float64 where the points, and so all products, are float32.
        checkpoint: Folder for partial sums. A call that was killed, made again with the same arguments and number of
            threads, goes on from there and gives the same bytes. Delete the folder when the result is safe.
        memory_budget: Bytes for everything but the inputs and the result.
        progress: Show a progress bar.

    Returns:
        The block, not flattened, in the dtype of the points or of `accumulate`.

    Raises:
        TypeError, ValueError: Points that the network cannot take, points of different dtypes, an unknown head, bad
            step weights, a checkpoint of another computation.
    """
    job = _job(trajectory, a, b, head, rule, step_weights, memory_budget, progress, per_class=False)
    job = _with_blocks_of_steps(job, a, b, accumulate, checkpoint)
    return _assemble(job, a, b)


@once_more
def gram_block_per_class(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    *,
    head: Head = "log_softmax",
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    accumulate: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Float[Tensor, "C N M"]:
    """Sum the exact path kernel of each output with itself, at a C-th of the products.

        K[c, n, m] = gram_block[n, c, m, c]

    Arguments, errors: as `gram_block`.
    """
    job = _job(trajectory, a, b, head, rule, step_weights, memory_budget, progress, per_class=True)
    return _assemble(_with_blocks_of_steps(job, a, b, accumulate, checkpoint), a, b)


@once_more
def gram_diagonal_blocks(
    trajectory: Trajectory,
    a: Points,
    *,
    head: Head = "log_softmax",
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Float[Tensor, "N C C"]:
    """Compute each point's C x C kernel with itself, gram_block[n, :, n, :], at a cost linear in N.

    Arguments, errors: as `gram_block`.
    """
    job = _job(trajectory, a, a, head, rule, step_weights, memory_budget, progress, per_class=False)
    result = a.X.new_zeros((len(a), job.num_outputs, job.num_outputs), dtype=job.like.dtype)
    for is_train in (True, False):
        for rows in a.copies(is_train).split(_panel(job)):
            if not len(rows):
                continue
            X, total = a.X[rows], result.new_zeros(len(rows), job.num_outputs, job.num_outputs)
            for s, eta in tqdm(_steps(job), desc="steps", disable=not job.progress):
                if is_train:
                    total += eta * diagonal(_features(job, _start(job, s), X))
                    continue
                for node in _test_nodes(job, s, X, shared=True):
                    total += eta * float(node.weights[0]) * diagonal(node.features)
            result[rows] = total
    return result


def _job(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    head: Head,
    rule: Rule,
    step_weights: Tensor | None,
    budget: int,
    progress: bool,
    *,
    per_class: bool,
) -> Job:
    for name, points in (("a", a), ("b", b)):
        check_points(points, name)
        check_inputs(trajectory, points.X, f"{name}.X")
    if a.X.dtype != b.X.dtype or a.X.device != b.X.device:
        raise ValueError(
            "both sets of points must share dtype and device: "
            f"got {a.X.dtype} on {a.X.device} and {b.X.dtype} on {b.X.device}."
        )
    check_head(head, trajectory.num_outputs)
    check_rule(rule)
    check_memory_budget(budget)
    dtype = compute_dtype(trajectory, a.X)
    return Job(
        trajectory=trajectory,
        skeleton=skeleton_for(trajectory, dtype, a.X.device),
        plan=plan_for(trajectory, a.X),
        head=head,
        rule=rule,
        etas=_etas(trajectory, step_weights),
        like=torch.empty(0, dtype=dtype, device=a.X.device),
        per_class=per_class,
        progress=progress,
        num_outputs=trajectory.num_outputs,
        budget=budget,
        dtype=dtype,
    )


def _with_blocks_of_steps(
    job: Job, a: Points, b: Points, accumulate: torch.dtype | None, checkpoint: str | os.PathLike[str] | None
) -> Job:
    """Sum blocks of steps apart, if their sums are wanted in another dtype or on disk."""
    if accumulate not in (None, job.dtype, torch.float64):
        raise ValueError(f"accumulate must be torch.float64 or None: got {accumulate}.")
    if (accumulate is None or accumulate is job.dtype) and checkpoint is None:
        return job
    job = replace(job, dtype=job.dtype if accumulate is None else accumulate, steps_at_once=_STEPS_AT_ONCE)
    if checkpoint is None:
        return job
    identity = identity_of(
        job.trajectory.digest, job.head, job.rule, job.etas, job.per_class, job.budget, job.dtype, a is b,
        a.X, b.X, a.is_train, b.is_train,
    )  # fmt: skip
    return replace(job, checkpoint=Checkpoint(checkpoint, identity))


def _etas(trajectory: Trajectory, step_weights: object) -> tuple[float, ...]:
    if step_weights is None:
        return tuple(step.size for step in trajectory.steps)
    if not isinstance(step_weights, Tensor):
        raise TypeError(
            f"step_weights must be a torch.Tensor, ({trajectory.num_steps},): got {type(step_weights).__name__}. "
            "Convert it with torch.tensor."
        )
    if step_weights.shape != (trajectory.num_steps,):
        raise ValueError(f"step_weights must have shape ({trajectory.num_steps},): got {tuple(step_weights.shape)}.")
    if not (torch.isfinite(step_weights).all() and (step_weights >= 0).all()):
        raise ValueError(
            "step_weights must be finite and not negative, or the Gram matrix is not positive semi-definite."
        )
    return tuple(step_weights.tolist())


def _assemble(job: Job, a: Points, b: Points) -> Tensor:
    """Fill the result copy by copy, tile by tile: (N, K, M, K), or (K, N, M) per class."""
    K, same = job.num_outputs, a is b
    plan = identity_of(job.plan, _panel(job))  # a network's second plan starts anew
    shape = (K, len(a), len(b)) if job.per_class else (len(a), K, len(b), K)
    result = torch.empty(shape, dtype=job.dtype, device=job.like.device)
    for left, right in product((True, False), repeat=2):
        if same and right and not left:
            continue  # the mirror image of another kind
        rows, columns = a.copies(left).split(_panel(job)), b.copies(right).split(_panel(job))
        mirrored = same and left == right
        for (i, n), (j, m) in product(enumerate(rows), enumerate(columns)):
            if not len(n) or not len(m) or (mirrored and j < i):
                continue
            name = f"{plan}-{left:d}{right:d}-{i}-{j}"
            if left and not right:  # the training side stands on the right
                tile = turned(_sum_tile(job, name, b.X[m], False, a.X[n], True, shared=False), job.per_class)
            else:
                tile = _sum_tile(job, name, a.X[n], left, b.X[m], right, shared=mirrored and i == j)
            write(tile, result, n, m)
            if same and (left != right or i != j):
                write(turned(tile, job.per_class), result, m, n)
    return result


def _sum_tile(job: Job, name: str, X: Tensor, left: bool, Y: Tensor, right: bool, *, shared: bool) -> Tensor:
    """Sum a tile over all steps, in blocks of steps from where a checkpoint has it."""
    stored, done = ({}, 0) if job.checkpoint is None else job.checkpoint.load(name)
    total = stored["total"].to(job.like.device) if stored else None
    steps = _steps(job)
    size = job.steps_at_once or max(1, len(steps))
    with tqdm(total=len(steps), initial=min(done, len(steps)), desc="steps", disable=not job.progress) as bar:
        for first in range(done, max(1, len(steps)), size):
            part = steps[first : first + size]
            tile = empty_tile(job.num_outputs, len(X), job.num_outputs, len(Y), job.like, per_class=job.per_class)
            _sum_steps(job, part, tile, X, left, Y, right, shared=shared, bar=bar)
            total = tile.finished().to(job.dtype) if total is None else total.add_(tile.finished())
            if job.checkpoint is not None and (job.checkpoint.due or first + size >= len(steps)):
                job.checkpoint.save(name, {"total": total}, first + size)
    if total is None:
        raise ValueError(f"checkpoint must hold the sum of tile {name}: it is empty. Delete its folder.")
    return total


def _sum_steps(
    job: Job,
    steps: list[tuple[int, float]],
    tile: Tile,
    X: Tensor,
    left: bool,
    Y: Tensor,
    right: bool,
    *,
    shared: bool,
    bar: "tqdm[Any]",
) -> None:
    for s, eta in steps:
        bar.update()
        if right:
            start = _start(job, s)
            other = _features(job, start, Y)
            if left:
                tile.add(other if shared else _features(job, start, X), other, eta)
                continue
            integral = StepIntegral(tile, len(X), other, eta, fixed_steps=True)
            for node in _test_nodes(job, s, X, shared=False):
                integral.take(node)
            integral.close()
        else:
            both = X if shared else torch.cat([X, Y])
            for t, weight in _shared_nodes(job, s, both):
                place = _between(job, s, t)
                features = _features(job, place, X)
                tile.add(features, features if shared else _features(job, place, Y), eta * weight)


def _steps(job: Job) -> list[tuple[int, float]]:
    return [(s, eta) for s, eta in enumerate(job.etas) if eta > 0]


def _start(job: Job, s: int) -> Place:
    return Place(flat_weights(job.trajectory, s, job.like))


def _between(job: Job, s: int, t: float) -> Place:
    start, end = (flat_weights(job.trajectory, state, job.like) for state in (s, s + 1))
    return Place(torch.lerp(start, end, t))


def _features(job: Job, place: Place, X: Tensor) -> list[Feature]:
    return gradients_in_blocks(job.skeleton, job.plan, place, X, job.head, _form(job))


def _form(job: Job) -> Form:
    ragged = isinstance(job.rule, AdaptiveRule)
    nodes = 4 if isinstance(job.rule, AdaptiveRule) else len(job.rule)
    pairs = job.num_outputs if job.per_class else job.num_outputs**2
    return Form(pairs, nodes, fixed_head=job.head == "logits", dense=ragged and not job.plan.on_line)


def _shared_nodes(job: Job, s: int, X: Tensor) -> list[tuple[float, float]]:
    """List the nodes that all points share in a step."""
    if isinstance(job.rule, QuadratureRule):
        return list(job.rule)
    return common_nodes(_line(job, s), X, job.rule, job.trajectory.num_steps)


def _test_nodes(job: Job, s: int, X: Tensor, *, shared: bool) -> Iterator[Evaluations]:
    """Evaluate test copies at the nodes of a step: all at the same ones, or each at its own."""
    if shared or isinstance(job.rule, QuadratureRule):
        for t, weight in _shared_nodes(job, s, X):
            yield Evaluations(_features(job, _between(job, s, t), X), job.like.new_tensor([weight]))
        return
    line = _line(job, s)
    integral = integrate(line, X, job.rule, job.trajectory.num_steps)
    for part in torch.arange(len(integral.point), device=X.device).split(len(X)):
        place = Place(line.w, line.d, integral.t[part])
        points = integral.point[part]
        yield Evaluations(_features(job, place, X[points]), integral.weight[part], points)


def _line(job: Job, s: int) -> Line:
    start, end = (flat_weights(job.trajectory, state, job.like) for state in (s, s + 1))
    return Line(job.skeleton, job.plan, start, end - start, job.head, job.budget)


def _panel(job: Job) -> int:
    """Choose how many points a side of a tile has, from the memory budget."""
    K, size = job.num_outputs, job.like.element_size()
    pairs = K if job.per_class else K * K
    per_pair = size * (3 * pairs + 1)  # total, sums of delta delta', scratch, a a'
    per_point = size * (K + 3) * job.plan.elements + 3 * _feature_bytes(job)  # both sides, and an average
    by_pairs = int((job.budget / 2 / per_pair) ** 0.5)
    by_points = int(job.budget / 4 / per_point)
    return max(1, min(by_pairs, by_points))


def _feature_bytes(job: Job) -> int:
    """Measure what the features of one point take."""
    key = ("feature bytes", job.head, _form(job), *job.plan.biases, job.like.dtype, job.like.device)
    if key not in job.trajectory.memo:
        X = job.trajectory.inputs[:1].to(job.like.device)
        features = _features(job, _start(job, 0), X.to(job.like.dtype) if X.is_floating_point() else X)
        job.trajectory.memo[key] = feature_bytes(features)
    found: int = job.trajectory.memo[key]
    return found
