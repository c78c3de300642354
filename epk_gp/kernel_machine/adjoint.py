"""Contributions under any linear update rule: adjoints from the last step back (docs/theory.md, section 4)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.gradients import RunReplay
from epk_gp.core.show import progress_bar
from epk_gp.core.replay import passes_of
from epk_gp.core.step import Step
from epk_gp.core.trajectory import flat_state, flat_weights, step_coefficients
from epk_gp.optimizers.update_rules import UpdateCoefficients, broadcast_to_params
from epk_gp.kernel_machine.adjoint import propagate_step
from epk_gp.kernel_machine.terms import (
    Emit,
    SampleContributions,
    StatisticsContribution,
    UnexplainedContribution,
    WeightDecayContribution,
    WeightsContribution,
    grouped_products,
)
from epk_gp.kernel_machine.loss_products import LossProducts, is_rounding
from epk_gp.kernel_machine.terms import AttributionProblem
from epk_gp.kernel_machine.certification import PassProgress
from epk_gp.kernel_machine.adjoint import statistics_increments
from epk_gp.kernel_machine.terms import StepResiduals
from epk_gp.kernel_machine.adjoint import StretchAverage, average_over, statistics_change
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.paths import stretch_of


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
    progress: PassProgress,
    options: PassOptions,
) -> None:
    """Go through the run from its last step to its first and emit every contribution.

    With H_s the adjoint of h (`propagate`), sample i adds -<H_s, grad_scale_s c_i grad loss_i(w_s)>.

    Args:
        problem: The predictions.
        groups: Group of each of the L parameters.
        emit: Called with every contribution; weight decay that is zero is left out.
        progress: How far the pass is; what is done is left out.
        options: Points at a time, what the steps leave unexplained, and whether statistics are split over samples.
    """
    trajectory, sizes = problem.trajectory, problem.net.model.sizes
    blocks = torch.arange(len(problem.X), device=problem.X.device).split(options.points_per_block)
    S = trajectory.num_steps
    work_items = len(blocks) * S
    products = LossProducts(problem, RunReplay(trajectory.trained, problem.net.model, problem.X))
    shown, advice = problem.options.progress, progress.advice
    with progress_bar(work_items, "attribution", unit="step", initial=progress.done, shown=shown, advice=advice) as bar:
        for number, rows in enumerate(blocks):
            stretch: StretchAverage | None = None
            for position in range(max(0, progress.done - number * S), S):
                step = trajectory.steps[S - 1 - position]
                adjoint_state = progress.adjoint_state if position else None  # beta_{s+1} M_{s+1}
                uncounted: tuple[Integral, ...] = ()
                if stretch is None or step.index not in stretch.steps:
                    steps, stretch = stretch_of(problem.kernel.path, step.index, S), None
                    stretch = average_over(
                        problem, steps, rows, options.points_per_block, splits_statistics=options.splits_statistics
                    )
                    # a pass that resumes within a chord has counted it
                    uncounted = stretch.integrals if step.index == steps[-1] else ()
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
                progress.advance(uncounted, adjoint_state, is_last=progress.done + 1 == work_items)
                bar.update()


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
