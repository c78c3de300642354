"""The exact path kernel of a training run, and its Gram blocks."""

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Unpack

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.verification import with_plan
from epk_gp.core.compute_options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.head import Head, validate_head
from epk_gp.core.points import Points, validate_points
from epk_gp.core.trajectory import Trajectory, validate_inputs
from epk_gp.gram.accumulation import (
    MAX_STEP_BATCH,
    Job,
    jacobians_at_nodes,
    panel_size,
    shared_nodes,
    step_batches,
    steps_of,
    sum_steps,
)
from epk_gp.gram.accumulator import diagonal, empty_tile, transpose_block, write
from epk_gp.gram.huge_pages import empty
from epk_gp.gram.input_derivatives import block_input_gradient, diagonal_input_gradient
from epk_gp.gram.prefetch import WeightPrefetcher
from epk_gp.quadrature.rules import QuadratureRule, Rule, gauss_legendre, validate_rule
from epk_gp.storage.partial_sums import PartialSums


@dataclass(frozen=True, eq=False)
class PathKernel:
    """The exact path kernel of a training run (Definition 3.4 and Theorem 3.7, Bell et al. 2023).

        K(x, x') = sum_s eta_s sum_q w_q phi_sq(x) phi_sq(x')^T    (C x C)

    phi_sq(x) is the Jacobian of f at the step's start for a training copy, and at node t_q of the step for a test copy.

    Attributes:
        trajectory: Training run with S steps.
        head: Whether f is the logits or their log-softmax.
        rule: Nodes and positive weights on [0, 1], the same for both sides; or an adaptive rule, which picks each test
            point's own nodes against training copies, and the union of a tile's points' nodes between test copies. The
            Gram matrix over both copies is then positive semi-definite to the tolerance only: it is no longer one sum
            over common nodes. Take a fixed rule where a factorisation needs more.
        step_weights: eta_s >= 0, (S,); the learning rates by default.
    """

    trajectory: Trajectory
    head: Head = "log_softmax"
    rule: Rule = gauss_legendre(4)
    step_weights: Float[Tensor, " S"] | None = None

    def block(self, a: Points, b: Points, options: ComputeOptions = ComputeOptions()) -> Float[Tensor, "N C M C"]:
        """Compute K[n, c, m, d] between N and M points; see `gram_block`."""
        return self._evaluate(a, b, options, per_class=False)

    def block_per_class(
        self, a: Points, b: Points, options: ComputeOptions = ComputeOptions()
    ) -> Float[Tensor, "C N M"]:
        """Compute K[n, c, m, c] for every output c; see `gram_block_per_class`."""
        return self._evaluate(a, b, options, per_class=True)

    def diagonal_blocks(self, a: Points, options: ComputeOptions = ComputeOptions()) -> Float[Tensor, "N C C"]:
        """Compute each point's C x C kernel with itself; see `gram_diagonal_blocks`."""
        self._validate(a, a)
        model = self.trajectory.model_for(a.X)
        return with_plan(
            self.trajectory, model, lambda plan: _diagonal_blocks(self._job(a, plan, options, per_class=False), a)
        )

    def block_input_gradient(
        self,
        a: Points,
        b: Points,
        weights: Float[Tensor, "K N L M"] | Float[Tensor, "K N M"],
        options: ComputeOptions = ComputeOptions(),
        *,
        summed: bool = False,
    ) -> Shaped[Tensor, "N ..."]:
        """Differentiate a weighted sum of kernel values with respect to the points on the left.

            d/da_n  sum_{k,n,l,m} weights[k, n, l, m] K(a_n, b_m)[k, l]

        Args:
            a: N points; b is held fixed, also where it is the same.
            b: M points.
            weights: Class-major; without the third dimension only pairs of equal classes are summed.
            options: How to compute.
            summed: The weights have one class on each side, the sum of all outputs.

        Returns:
            The derivative, in the shape of a.X.
        """
        rule = self._fixed_rule()
        return block_input_gradient(
            self.trajectory,
            a,
            b,
            weights,
            head=self.head,
            rule=rule,
            summed=summed,
            memory_budget=options.memory_budget,
        )

    def diagonal_input_gradient(
        self, a: Points, weights: Float[Tensor, "N C C"], options: ComputeOptions = ComputeOptions()
    ) -> Shaped[Tensor, "N ..."]:
        """Differentiate a weighted sum of the blocks K(a_n, a'_n) with respect to a_n, at a'_n = a_n held fixed.

        Args:
            a: N points.
            weights: One C x C block per point; the derivative with respect to a'_n is that with transposed weights.
            options: How to compute.

        Returns:
            The derivative, in the shape of a.X.
        """
        return diagonal_input_gradient(
            self.trajectory, a, weights, head=self.head, rule=self._fixed_rule(), memory_budget=options.memory_budget
        )

    def _fixed_rule(self) -> QuadratureRule:
        if not isinstance(self.rule, QuadratureRule):
            raise TypeError(
                f"derivatives need the same nodes at all points, as in gauss_legendre(4): got {self.rule!r}."
            )
        return self.rule

    def _evaluate(self, a: Points, b: Points, options: ComputeOptions, *, per_class: bool) -> Tensor:
        self._validate(a, b)
        model = self.trajectory.model_for(a.X)

        def compute(plan: DifferentiationPlan) -> Tensor:
            job = self._job(a, plan, options, per_class=per_class)
            return _assemble(_with_blocks_of_steps(job, a, b, options.accumulate, options.checkpoint), a, b)

        return with_plan(self.trajectory, model, compute)

    def _validate(self, a: Points, b: Points) -> None:
        for name, points in (("a", a), ("b", b)):
            validate_points(points, name)
            validate_inputs(self.trajectory, points.X, f"{name}.X")
        if a.X.dtype != b.X.dtype or a.X.device != b.X.device:
            raise ValueError(
                "both sets of points must share dtype and device: "
                f"got {a.X.dtype} on {a.X.device} and {b.X.dtype} on {b.X.device}."
            )
        validate_head(self.head, self.trajectory.num_outputs)
        validate_rule(self.rule)

    def _job(self, a: Points, plan: DifferentiationPlan, options: ComputeOptions, *, per_class: bool) -> Job:
        model = self.trajectory.model_for(a.X)
        like = torch.empty(0, dtype=model.spec.dtype, device=a.X.device)
        return Job(
            trajectory=self.trajectory,
            model=model,
            plan=plan,
            head=self.head,
            rule=self.rule,
            etas=_etas(self.trajectory, self.step_weights),
            like=like,
            per_class=per_class,
            progress=options.progress,
            num_outputs=self.trajectory.num_outputs,
            budget=options.memory_budget,
            dtype=like.dtype,
            states=WeightPrefetcher(self.trajectory, like),
        )


def gram_block(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    *,
    head: Head = "log_softmax",
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "N C M C"]:
    """Sum the exact path kernel over all steps.

    Equation (3) under the sum of Theorem 3.7, Bell et al. (2023):

        K[n, c, m, d] = sum_s eta_s sum_q w_q <phi_sq(a_n)_c, phi_sq(b_m)_d>

    Args:
        trajectory: Training run with S steps.
        a: N points, each a training or a test copy.
        b: M points.
        head: Whether f is the logits or their log-softmax.
        rule: See `PathKernel`.
        step_weights: eta_s >= 0; the learning rates by default.
        options: `memory_budget`, `progress`, `checkpoint` and `accumulate`; see `ComputeOptions`.

    Returns:
        The block, not flattened, in the dtype of the points or of `accumulate`. It may be a view of memory in the order
        (C, N, C, M): `reshape` flattens it, `view` may not.

    Raises:
        TypeError, ValueError: Points that the network cannot take, points of different dtypes, an unknown head, bad
            step weights, a checkpoint of another computation.
    """
    return PathKernel(trajectory, head, rule, step_weights).block(a, b, parse_options("gram_block", **options))


def gram_block_per_class(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    *,
    head: Head = "log_softmax",
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "C N M"]:
    """Sum the exact path kernel of each output with itself, at a C-th of the products.

        K[c, n, m] = gram_block[n, c, m, c]

    Arguments, errors: as `gram_block`.
    """
    kernel = PathKernel(trajectory, head, rule, step_weights)
    return kernel.block_per_class(a, b, parse_options("gram_block_per_class", **options))


def gram_diagonal_blocks(
    trajectory: Trajectory,
    a: Points,
    *,
    head: Head = "log_softmax",
    rule: Rule = gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "N C C"]:
    """Compute each point's C x C kernel with itself, gram_block[n, :, n, :], at a cost linear in N.

    Arguments, errors: as `gram_block`; `checkpoint` and `accumulate` have no meaning here.
    """
    parsed = parse_options("gram_diagonal_blocks", ("checkpoint", "accumulate"), **options)
    return PathKernel(trajectory, head, rule, step_weights).diagonal_blocks(a, parsed)


def _diagonal_blocks(job: Job, a: Points) -> Tensor:
    result = a.X.new_zeros((len(a), job.num_outputs, job.num_outputs), dtype=job.like.dtype)
    for is_train in (True, False):
        for rows in a.copies(is_train).split(panel_size(job)):
            if not len(rows):
                continue
            X, total = a.X[rows], result.new_zeros(len(rows), job.num_outputs, job.num_outputs)
            for s, eta in tqdm(steps_of(job), desc="steps", disable=not job.progress):
                nodes = [(0.0, 1.0)] if is_train else shared_nodes(job, s, X)
                found = jacobians_at_nodes(job, [(s, t) for t, _ in nodes], X)
                for features, (_, weight) in zip(found, nodes, strict=True):
                    total += eta * weight * diagonal(features)
            result[rows] = total
    return result


def _with_blocks_of_steps(
    job: Job, a: Points, b: Points, accumulate: torch.dtype | None, checkpoint: str | os.PathLike[str] | None
) -> Job:
    """Sum blocks of steps apart, if their sums are wanted in another dtype or on disk."""
    if accumulate not in (None, job.dtype, torch.float64):
        raise ValueError(f"accumulate must be torch.float64 or None: got {accumulate}.")
    if (accumulate is None or accumulate is job.dtype) and checkpoint is None:
        return job
    job = replace(job, dtype=job.dtype if accumulate is None else accumulate, steps_at_once=MAX_STEP_BATCH)
    if checkpoint is None:
        return job
    identity = fingerprint(
        job.trajectory.digest, job.head, job.rule, job.etas, job.per_class, job.budget, job.dtype, a is b,
        a.X, b.X, a.is_train, b.is_train,
    )  # fmt: skip
    return replace(job, checkpoint=PartialSums(checkpoint, identity))


def _etas(trajectory: Trajectory, step_weights: object) -> tuple[float, ...]:
    if step_weights is None:
        return tuple(step.lr for step in trajectory.steps)
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
    size = panel_size(job)
    plan = fingerprint(job.plan, size)  # a network's second plan starts anew
    kinds = [
        (left, right)
        for left, right in product((True, False), repeat=2)
        if not (same and right and not left)  # the mirror image of another kind
        and len(a.copies(left))
        and len(b.copies(right))
    ]
    shape = (K, len(a), len(b)) if job.per_class else (K, len(a), K, len(b))
    if len(kinds) == 1 and max(len(a), len(b)) <= size:
        ((left, right),) = kinds
        return _public(_tile(job, f"{plan}-{left:d}{right:d}-0-0", a.X, left, b.X, right, shared=same), job)
    result = empty(shape, job.like.new_empty(0, dtype=job.dtype))
    for left, right in kinds:
        rows, columns = a.copies(left).split(size), b.copies(right).split(size)
        mirrored = same and left == right
        for (i, n), (j, m) in product(enumerate(rows), enumerate(columns)):
            if mirrored and j < i:
                continue
            name = f"{plan}-{left:d}{right:d}-{i}-{j}"
            tile = _tile(job, name, a.X[n], left, b.X[m], right, shared=mirrored and i == j)
            write(tile, result, n, m)
            if same and (left != right or i != j):
                write(transpose_block(tile, job.per_class), result, m, n)
    return _public(result, job)


def _public(tile: Tensor, job: Job) -> Tensor:
    """Order a class-major tile's dimensions as they are promised."""
    return tile if job.per_class else tile.permute(1, 0, 3, 2)


def _tile(job: Job, name: str, X: Tensor, left: bool, Y: Tensor, right: bool, *, shared: bool) -> Tensor:
    """Sum a tile, class-major, with the training side on the right."""
    if left and not right:
        return transpose_block(_sum_tile(job, name, Y, False, X, True, shared=False), job.per_class)
    return _sum_tile(job, name, X, left, Y, right, shared=shared)


def _sum_tile(job: Job, name: str, X: Tensor, left: bool, Y: Tensor, right: bool, *, shared: bool) -> Tensor:
    """Sum a tile over all steps, in blocks of steps from where a checkpoint has it."""
    stored, done = ({}, 0) if job.checkpoint is None else job.checkpoint.load(name)
    total = stored["total"].to(job.like.device) if stored else None
    steps = steps_of(job)
    size = job.steps_at_once or max(1, len(steps))
    C = job.num_outputs
    with tqdm(total=len(steps), initial=min(done, len(steps)), desc="steps", disable=not job.progress) as bar:
        for first in range(done, max(1, len(steps)), size):
            part = steps[first : first + size]
            tile = empty_tile(C, len(X), C, len(Y), job.like, per_class=job.per_class, symmetric=shared)
            for some in step_batches(job, part, max(len(X), len(Y))):
                sum_steps(job, some, tile, X, left, Y, right, shared=shared)
                bar.update(len(some))
            total = tile.finished().to(job.dtype) if total is None else total.add_(tile.finished())
            if job.checkpoint is not None and (job.checkpoint.should_save or first + size >= len(steps)):
                job.checkpoint.save(name, {"total": total}, first + size)
    if total is None:
        raise ValueError(f"checkpoint must hold the sum of tile {name}: it is empty. Delete its folder.")
    return total
