"""Contributions under any linear update rule: adjoints from the last step back (docs/theory.md, section 4).

A normalisation in training mode moves its statistics by b' - b = m (stat - b), and its batch's statistics are sums over
the rows: stat = sum_i stat_i. Row i adds m (stat_i - b / n), centred, so that nothing remains.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from epk_gp.core.gradients import RunReplay
from epk_gp.core.replay import PassData, TrainingReplay, passes_of
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, step_coefficients
from epk_gp.gram.accumulator import averaged_jacobian
from epk_gp.kernel_machine.loss_products import LossProducts, is_rounding
from epk_gp.kernel_machine.terms import (
    AttributionProblem,
    Emit,
    IntegratedLine,
    SampleContributions,
    StatisticsContribution,
    StepResiduals,
    UnexplainedContribution,
    WeightDecayContribution,
    WeightsContribution,
    averaged_statistics_jacobian,
    grouped_products,
    integrate_stretch,
)
from epk_gp.optimizers.update_rules import UpdateCoefficients, apply_matrices, broadcast_to_params
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.intervals import OPEN, fixed_status, residual_status, rounding_of
from epk_gp.quadrature.rules import AdaptiveRule, LayerwisePath, QuadratureStatus, stretch_of, stretches_of


def propagate_step(
    trajectory: Trajectory,
    step: Step,
    sizes: tuple[int, ...],
    Phi: Float[Tensor, "K N P"],
    adjoint_state: Tensor | None,
) -> tuple[Float[Tensor, "K N P"], Float[Tensor, "K N P"], Tensor | None]:
    """Go one step of a run back: return the adjoints of the step and of h, and what the step before receives.

    Of a run of averaged weights, whose steps are a_s (d_s + e_s) with the lead e_{s+1} = (1 - a_s) (d_s + e_s), the
    adjoint of the recorded step d_s is E_s = a_s Phi_s + (1 - a_s) E_{s+1}. It takes the place of Phi_s.

    Args:
        trajectory: The run.
        step: The step s.
        sizes: Number of weights of each of the L parameters.
        Phi: The averaged gradients of the outputs along the path, which are overwritten.
        adjoint_state: What the step after left, which is overwritten; None after the last step.

    Returns:
        E_s (Phi_s where the path is that of the trained weights), H_s, and the state for the step before.
    """
    u, average = step_coefficients(trajectory, step.index, Phi), trajectory.average
    if average is None:
        return Phi, *propagate(u, sizes, Phi, adjoint_state)
    a = float(average.coefficients[step.index])
    E = Phi.mul_(a)
    of_momentum = None
    if adjoint_state is not None:
        of_momentum = adjoint_state[0]
        E = E.add_(adjoint_state[1], alpha=1 - a)
    H, of_momentum = propagate(u, sizes, E, of_momentum)
    return E, H, torch.stack([torch.zeros_like(E) if of_momentum is None else of_momentum, E])


def propagate(
    u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Float[Tensor, "K N P"], adjoint_state: Tensor | None
) -> tuple[Float[Tensor, "K N P"], Tensor | None]:
    """Go one step back: return the adjoint of h, and what the step before receives.

    The adjoint of the momentum buffer is M_s = momentum_lr_s Phi_s + beta_{s+1} M_{s+1}, and that of h is H_s =
    one_minus_dampening_s M_s + lr_s Phi_s. Under a matrix preconditioner left_s^T Phi_s right_s^T takes the place of
    Phi_s.

    Args:
        u: The coefficients of step s.
        sizes: Number of weights of each of the L parameters.
        Phi: The adjoint of the weights after the step.
        adjoint_state: beta_{s+1} M_{s+1}, which is overwritten; None if it is zero.

    Returns:
        H_s, and beta_s M_s or None if it is zero.
    """
    coefficients = (u.momentum_lr, u.beta, u.one_minus_dampening, u.lr)
    momentum_lr, beta, one_minus_dampening, lr = (broadcast_to_params(v, sizes, Phi) for v in coefficients)
    Phi = apply_matrices(u, sizes, Phi, transposed=True)
    M = adjoint_state
    if momentum_lr.any():
        M = momentum_lr * Phi if M is None else M.addcmul_(Phi, momentum_lr)
    if M is None:
        return lr * Phi, None
    H = one_minus_dampening * M
    if lr.any():
        H.addcmul_(Phi, lr)
    return H, M.mul_(beta) if beta.any() else None


def statistics_increments(replay: TrainingReplay, state: Float[Tensor, " PQ"], data: PassData) -> Float[Tensor, "n Q"]:
    """Replay a forward pass and return what each of its rows adds to the moving statistics.

    Statistics that are no normalisation's, and those of a layer that sees other rows than those of the batch, get zero:
    what they add belongs to no row.

    Args:
        replay: Replays the run's forward passes.
        state: Weights and statistics at the start of the step.
        data: The pass.
    """
    model, n = replay.model, len(data.X)
    sizes = [shape.numel() for shape in model.statistic_shapes]
    firsts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    named = zip(model.statistics, firsts, sizes, strict=False)
    place = {name: slice(first, first + size) for name, first, size in named}
    increments = torch.zeros(n, sum(sizes), dtype=state.dtype, device=state.device)

    def add(name: str, values: Tensor) -> None:
        if name in place:
            increments[:, place[name]] += values.to(increments)

    def hook(prefix: str) -> Any:
        def before(module: Any, args: tuple[Any, ...]) -> None:
            parts = _row_statistics(module, args[0], n)
            if parts is not None:
                momentum = module.momentum
                if momentum is None:
                    momentum = 1.0 / (float(module.num_batches_tracked) + 1)
                for buffer, part in zip(("running_mean", "running_var"), parts, strict=True):
                    b = getattr(module, buffer)
                    add(f"{prefix}{buffer}", momentum * (part - b / n))

        return before

    handles = [
        module.register_forward_pre_hook(hook(f"{name}." if name else ""))
        for name, module in replay.module_in_modes(data).named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.running_mean is not None
    ]
    try:
        with torch.no_grad():
            replay.losses(replay.params(state, data), data)
    finally:
        for handle in handles:
            handle.remove()
    return increments


def _row_statistics(module: nn.Module, a: Tensor, num_rows: int) -> tuple[Tensor, Tensor] | None:
    """Return each row's part of the batch's mean and unbiased variance, (n, channels) each; None if rows are mixed."""
    if a.ndim < 2 or len(a) % num_rows or a.numel() // a.shape[1] < 2:
        return None
    by_row = a.detach().unflatten(0, (num_rows, -1)).movedim(2, 1).flatten(2)  # n channels positions
    count = by_row.shape[0] * by_row.shape[2]
    mean = by_row.mean(dim=(0, 2))
    variance = (by_row - mean[None, :, None]).square().sum(dim=2) / (count - 1)
    return by_row.sum(dim=2) / count, variance


# A change of the outputs that is a sum over the weights may miss them by so many eps of the sum of its terms' sizes.
_SUM_ROUNDING = 16


@dataclass(frozen=True, eq=False)
class StretchAverage:
    """The adjoint of every step of a stretch: what a change of the state during any of them does to N points.

    Attributes:
        steps: The steps that the stretch stands for.
        of_weights: Phi, the averaged gradients in the weights.
        of_statistics: Phi^b, those in the moving statistics, if they were asked for.
        integral: Along the stretch.
    """

    steps: range
    of_weights: Float[Tensor, "K N P"]
    of_statistics: Float[Tensor, "K N Q"] | None
    integral: Integral


def average_over(
    problem: AttributionProblem, steps: range, rows: Int64[Tensor, " N"], max_nodes: int, *, splits_statistics: bool
) -> StretchAverage:
    """Average the gradients of some points over a stretch.

    Args:
        problem: The predictions.
        steps: The steps that the stretch stands for.
        rows: Which N of the points.
        max_nodes: Nodes evaluated at a time.
        splits_statistics: The averages in the moving statistics are wanted even where their sum is known without.
    """
    line = integrate_stretch(problem, steps, rows, max_nodes)
    is_layerwise = isinstance(problem.kernel.path, LayerwisePath)
    of_statistics = None
    # a layerwise integral is not known without; that of one step is, but for how it is split
    wants_statistics = is_layerwise or splits_statistics or len(steps) > 1
    if wants_statistics and problem.trajectory.statistics is not None:
        of_statistics = averaged_statistics_jacobian(problem, line, rows)
    Phi = averaged_jacobian(line.node_batches(), problem.columns)
    integral = _measured(problem, rows, line, Phi, of_statistics) if is_layerwise else line.integral
    return StretchAverage(steps, Phi, of_statistics, integral)


def _measured(
    problem: AttributionProblem,
    rows: Int64[Tensor, " N"],
    line: IntegratedLine,
    Phi: Float[Tensor, "K N P"],
    of_statistics: Float[Tensor, "K N Q"] | None,
) -> Integral:
    """Return the integral of a layerwise stretch, with what its averages say of the change of the outputs."""
    P, integral = problem.net.model.num_weights, line.integral
    d, eps = line.segment.d, torch.finfo(Phi.dtype).eps
    change, size = (Phi @ d[:P]).T, (Phi.abs() @ d[:P].abs()).T
    if of_statistics is not None:
        change = change + (of_statistics @ d[P:]).T
        size = size + (of_statistics.abs() @ d[P:].abs()).T
    rounding = _SUM_ROUNDING * eps * size.amax(dim=1)
    true = problem.select_outputs(integral.end - integral.start, rows)
    error = (true - change).abs().amax(dim=1)
    total = change if problem.classes is None else integral.total.scatter(1, problem.classes[rows][:, None], change)
    rule = problem.kernel.rule
    if isinstance(rule, AdaptiveRule):
        share = len(stretches_of(problem.kernel.path, problem.trajectory.num_steps))
        of_outputs = rounding_of(integral.start, integral.end)
        status = residual_status(error, torch.maximum(of_outputs, rounding), rule.tol / share)
        status = torch.where(status == OPEN, QuadratureStatus.INCONSISTENT_DERIVATIVE, status)
        status = torch.where(error.isfinite(), status, QuadratureStatus.NOT_FINITE)
    else:
        status = fixed_status(error)
    return replace(integral, total=total, residual=error, status=status, rounding=rounding)


def statistics_change(
    problem: AttributionProblem,
    average: StretchAverage,
    step: int,
    rows: Int64[Tensor, " N"],
    of_weights: Float[Tensor, "N K"],
) -> Float[Tensor, "N K"]:
    """Return what the change of the moving statistics in a step adds to some outputs.

    Args:
        problem: The predictions.
        average: The stretch that the step belongs to.
        step: The step.
        rows: Which N of the points.
        of_weights: What its weights add.
    """
    if len(average.steps) == 1:
        return problem.select_outputs(average.integral.total, rows) - of_weights
    before, after = (flat_state(problem.trajectory, s, problem.X) for s in (step, step + 1))
    change = (after - before)[problem.net.model.num_weights :]
    return torch.einsum("knq,q->nk", average.of_statistics, change)


@dataclass(frozen=True, eq=False)
class PassOptions:
    """How a pass over the run divides its work, and what it emits beside the samples' contributions.

    Attributes:
        points_per_block: Points whose adjoints are carried at a time.
        residuals: What the steps leave unexplained.
        splits_statistics: Split what the moving statistics add over the samples.
    """

    points_per_block: int
    residuals: StepResiduals
    splits_statistics: bool


@dataclass(frozen=True, eq=False)
class _StepAdjoints:
    """The adjoints of one step at N points.

    Attributes:
        step: The step.
        rows: Which points.
        w: Weights at its start, (P,).
        coefficients: Of the update rule.
        average: Phi, the averaged Jacobian of the outputs, (K, N, P): the adjoint of the step, the same for all steps
            of a chord. Of a run of averaged weights it is E, which holds the later steps of the average too.
        of_h: H, the adjoint of h, (K, N, P).
    """

    step: Step
    rows: Int64[Tensor, " N"]
    w: Float[Tensor, " P"]
    coefficients: UpdateCoefficients
    average: Float[Tensor, "K N P"]
    of_h: Float[Tensor, "K N P"]


def adjoint_pass(
    problem: AttributionProblem,
    groups: Int64[Tensor, " L"],
    emit: Emit,
    options: PassOptions,
    done: int = 0,
    adjoint_state: Tensor | None = None,
) -> Iterator[tuple[Integral | None, Tensor | None]]:
    """Go through the run from its last step to its first and emit every contribution.

    Yields when a step is done: the integral, if a stretch has begun with it, and what the step before receives.

    With H_s the adjoint of h (`propagate`), sample i adds -<H_s, grad_scale_s c_i grad loss_i(w_s)>.

    Args:
        problem: The predictions.
        groups: Group of each of the L parameters.
        emit: Called with every contribution; weight decay that is zero is left out.
        options: Nodes at a time, what the steps leave unexplained, and whether statistics are split over samples.
        done: Number of steps, from the last one, that are left out.
        adjoint_state: What the last one of them left, which is overwritten.
    """
    trajectory, sizes = problem.trajectory, problem.net.model.sizes
    rows, S = torch.arange(len(problem.X), device=problem.X.device), trajectory.num_steps
    products = LossProducts(problem, RunReplay(trajectory.trained, problem.net.model, problem.X))
    stretch: StretchAverage | None = None
    for position in range(done, S):
        step = trajectory.steps[S - 1 - position]
        uncounted = None
        if stretch is None or step.index not in stretch.steps:
            steps, stretch = stretch_of(problem.kernel.path, step.index, S), None
            stretch = average_over(
                problem, steps, rows, options.points_per_block, splits_statistics=options.splits_statistics
            )
            # a pass that resumes within a chord has counted it
            uncounted = stretch.integral if step.index == steps[-1] else None
        Phi = stretch.of_weights
        w = flat_weights(trajectory.trained, step.index, problem.X)
        u = step_coefficients(trajectory, step.index, problem.X)
        change = flat_weights(trajectory, step.index + 1, problem.X)
        of_weights = (Phi @ (change - flat_weights(trajectory, step.index, problem.X))).T  # N K
        emit(WeightsContribution(step.index, rows, of_weights))
        if trajectory.average is not None and len(stretch.steps) > 1:
            Phi = Phi.clone()  # it is overwritten
        E, H, adjoint_state = propagate_step(trajectory, step, sizes, Phi, adjoint_state)
        adjoints = _StepAdjoints(step, rows, w, u, E, H)
        _emit_weight_decay(problem, adjoints, groups, emit)
        _emit_samples(problem, products, adjoints, groups, emit)
        _emit_unexplained(problem, adjoints, groups, emit, options)
        if trajectory.statistics is not None:
            total = statistics_change(problem, stretch, step.index, rows, of_weights)
            of_statistics = stretch.of_statistics if options.splits_statistics else None
            emit(_statistics_term(products, step, rows, total, of_statistics))
        yield uncounted, adjoint_state


def _emit_weight_decay(
    problem: AttributionProblem, adjoints: _StepAdjoints, groups: Int64[Tensor, " L"], emit: Emit
) -> None:
    sizes, u, w = problem.net.model.sizes, adjoints.coefficients, adjoints.w
    total = None
    for adjoint, factor in ((adjoints.of_h, u.weight_decay), (adjoints.average, u.decoupled_decay)):
        if factor.any():
            pull = broadcast_to_params(factor, sizes, w) * w
            part = grouped_products(adjoint, pull[None], groups, sizes).squeeze(2)  # N K G
            total = part if total is None else total + part
    if total is not None:
        emit(WeightDecayContribution(adjoints.step.index, adjoints.rows, -total))


def _emit_samples(
    problem: AttributionProblem,
    products: LossProducts,
    adjoints: _StepAdjoints,
    groups: Int64[Tensor, " L"],
    emit: Emit,
) -> None:
    step, H, scale = adjoints.step, adjoints.of_h, adjoints.coefficients.grad_scale
    H = H * broadcast_to_params(scale, problem.net.model.sizes, H) if not bool((scale == 1).all()) else H
    for data in passes_of(step, products.run.data):
        values, rounding = products(step, data, H, groups)
        emit(SampleContributions(step.index, adjoints.rows, data.samples, -values))
        if rounding is not None and is_rounding(rounding, values, products.run.passes.dtype_of(data)):
            emit(UnexplainedContribution(step.index, adjoints.rows, -rounding))


def _emit_unexplained(
    problem: AttributionProblem,
    adjoints: _StepAdjoints,
    groups: Int64[Tensor, " L"],
    emit: Emit,
    options: PassOptions,
) -> None:
    residual = options.residuals[adjoints.step.index]
    if residual is not None:
        vectors = residual.to(adjoints.average)[None]
        values = grouped_products(adjoints.average, vectors, groups, problem.net.model.sizes).squeeze(2)
        emit(UnexplainedContribution(adjoints.step.index, adjoints.rows, values))


def _statistics_term(
    products: LossProducts,
    step: Step,
    rows: Int64[Tensor, " N"],
    total: Float[Tensor, "N K"],
    Phi_b: Float[Tensor, "K N Q"] | None,
) -> StatisticsContribution:
    """Return what the moving statistics add in a step: all of it, and what samples add if their adjoint is known."""
    if Phi_b is None:
        return StatisticsContribution(step.index, rows, total)
    problem = products.problem
    state = flat_state(problem.trajectory.trained, step.index, problem.X)
    samples, added = [], []
    for data in passes_of(step, products.run.data):
        increments = statistics_increments(products.run.passes, state, data)
        samples.append(data.samples)
        added.append(torch.einsum("knq,bq->nkb", Phi_b, increments.to(Phi_b)))
    return StatisticsContribution(step.index, rows, total, torch.cat(samples), torch.cat(added, dim=2))
