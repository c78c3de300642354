"""Contributions under any linear update rule: adjoints from the last step back (docs/theory.md, section 4).

A normalisation in training mode moves its statistics by b' - b = m (stat - b), and its batch's statistics are sums over
the rows: stat = sum_i stat_i. Row i adds m (stat_i - b / n), centred, so that nothing remains.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.gradients import RunReplay
from epk_gp.core.replay import PassData, TrainingReplay, passes_of
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, step_coefficients
from epk_gp.gram.accumulator import averaged_jacobian
from epk_gp.kernel_machine.loss_products import LossProducts, grouped_products
from epk_gp.kernel_machine.terms import AttributionProblem, AttributionWork, IntegratedLine, TermSums, integrate_stretch
from epk_gp.optimizers.update_rules import UpdateCoefficients, apply_matrices, broadcast_to_params
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.paths import stretch_of, stretches_of
from epk_gp.quadrature.rules import AdaptiveRule
from epk_gp.quadrature.status import OPEN, QuadratureStatus, fixed_status, residual_status, rounding_of
from epk_gp.work.sums import Sums


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


@contextmanager
def watching_normalisations(module: nn.Module, look: Callable[[str, nn.Module, Tensor], None]) -> Iterator[None]:
    """Call a function with name, layer and input of each normalisation with moving statistics in a forward pass."""
    handles = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: look(name, layer, args[0]))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    increments = torch.zeros(n, sum(sizes), dtype=state.dtype, device=state.device)
    named = dict(zip(model.statistics, increments.split(sizes, dim=1), strict=True))

    def look(name: str, layer: nn.Module, a: Tensor) -> None:
        if not layer.training or not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return
        if a.ndim < 2 or len(a) % n or a.numel() // a.shape[1] < 2:  # rows are mixed
            return
        by_row = a.detach().unflatten(0, (n, -1)).movedim(2, 1).flatten(2)  # n channels positions
        count = by_row.shape[0] * by_row.shape[2]
        mean, momentum = by_row.mean(dim=(0, 2)), layer.momentum
        variance = (by_row - mean[None, :, None]).square().sum(dim=2) / (count - 1)
        if momentum is None:
            momentum = 1.0 / (float(layer.num_batches_tracked or 0) + 1)
        for kind, rows in (("running_mean", by_row.sum(dim=2) / count), ("running_var", variance)):
            buffer = f"{name}.{kind}".lstrip(".")
            if buffer in named:
                named[buffer] += (momentum * (rows - getattr(layer, kind) / n)).to(increments)

    with watching_normalisations(replay.module_in_modes(data), look), torch.no_grad():
        replay.losses(replay.params(state, data), data)
    return increments


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
    problem: AttributionProblem, steps: range, max_nodes: int, *, splits_statistics: bool
) -> StretchAverage:
    """Average the gradients of the points over a stretch.

    Args:
        problem: The predictions.
        steps: The steps that the stretch stands for.
        max_nodes: Nodes evaluated at a time.
        splits_statistics: The averages in the moving statistics are wanted even where their sum is known without.
    """
    line = integrate_stretch(problem, steps, max_nodes)
    of_statistics = None
    # a layerwise integral is not known without; that of one step is, but for how it is split
    wants_statistics = problem.is_layerwise or splits_statistics or len(steps) > 1
    if wants_statistics and problem.trajectory.statistics is not None:
        of_statistics = line.averaged_statistics_jacobian()
    Phi = averaged_jacobian(line.node_batches(), problem.columns)
    integral = _measured(line, Phi, of_statistics) if problem.is_layerwise else line.integral
    return StretchAverage(steps, Phi, of_statistics, integral)


def _measured(
    line: IntegratedLine, Phi: Float[Tensor, "K N P"], of_statistics: Float[Tensor, "K N Q"] | None
) -> Integral:
    """Return the integral of a layerwise stretch, with what its averages say of the change of the outputs."""
    problem, integral, P = line.problem, line.integral, line.problem.net.model.num_weights
    d, eps = line.segment.d, torch.finfo(Phi.dtype).eps
    change, size = (Phi @ d[:P]).T, (Phi.abs() @ d[:P].abs()).T
    if of_statistics is not None:
        change = change + (of_statistics @ d[P:]).T
        size = size + (of_statistics.abs() @ d[P:].abs()).T
    rounding = _SUM_ROUNDING * eps * size.amax(dim=1)
    true = problem.select_outputs(integral.end - integral.start)
    error = (true - change).abs().amax(dim=1)
    total = change if problem.classes is None else integral.total.scatter(1, problem.classes[:, None], change)
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


class AdjointTerms(AttributionWork):
    """The terms of any linear update rule, by adjoints: each block of points goes through the whole run, backward.

    With H_s the adjoint of h (`propagate`), sample i adds -<H_s, grad_scale_s c_i grad loss_i(w_s)>.
    """

    keeps_residuals = True

    @property
    def ranges(self) -> list[slice]:
        """All steps."""
        return [slice(0, self.kernel.trajectory.num_steps)]

    def terms(
        self, problem: AttributionProblem, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Tensor | None]]:
        """Go through the run from its last step, and add every term to the totals."""
        trajectory, X, sizes = problem.trajectory, problem.X, problem.net.model.sizes
        products = LossProducts(problem, RunReplay(trajectory.trained, problem.net.model, X))
        splits_statistics = self.splits_statistics and any(own.splits_samples for own in totals.grouped)
        adjoint, stretch = sums.carried.get("adjoint"), None
        for s in reversed(range(trajectory.num_steps - sums.steps)):
            step, uncounted = trajectory.steps[s], None
            if stretch is None or s not in stretch.steps:
                steps, stretch = stretch_of(self.kernel.path, s, trajectory.num_steps), None
                stretch = average_over(problem, steps, self.rows_per_block, splits_statistics=splits_statistics)
                # a pass that resumes within a chord has counted it
                uncounted = stretch.integral if s == steps[-1] else None
            Phi, u = stretch.of_weights, step_coefficients(trajectory, s, X)
            start, end = (flat_weights(trajectory, state, X) for state in (s, s + 1))
            change = (Phi @ (end - start)).T  # N K
            totals.add_change(s, change)
            if trajectory.average is not None and len(stretch.steps) > 1:
                Phi = Phi.clone()  # it is overwritten
            E, H, adjoint = propagate_step(trajectory, step, sizes, Phi, adjoint)
            w = flat_weights(trajectory.trained, s, X)
            decay: Tensor | None = None
            for of_pull, factor in ((H, u.weight_decay), (E, u.decoupled_decay)):
                if factor.any():
                    pull = broadcast_to_params(factor, sizes, w) * w
                    found = grouped_products(of_pull, pull[None], self.parts, sizes).squeeze(2)  # N K G
                    decay = found if decay is None else decay + found
            if decay is not None:
                totals.add("decay", s, -decay)
            H = H if bool((u.grad_scale == 1).all()) else H * broadcast_to_params(u.grad_scale, sizes, H)
            for data in passes_of(step, products.run.data):
                values, rounding = products(step, data, H, self.parts)
                totals.add_samples(s, data.samples, -values)
                if rounding is not None:
                    totals.add("unexplained", s, -rounding)
            residual = self.residuals[s]
            if residual is not None:
                totals.add("unexplained", s, grouped_products(E, residual.to(E)[None], self.parts, sizes).squeeze(2))
            if trajectory.statistics is not None:
                self._add_statistics(totals, products, step, stretch, change, splits_statistics)
            yield uncounted, 1, adjoint

    def _add_statistics(
        self,
        totals: TermSums,
        products: LossProducts,
        step: Step,
        stretch: StretchAverage,
        change: Float[Tensor, "N K"],
        is_split: bool,
    ) -> None:
        """Add what the moving statistics add in a step, in which the weights change the outputs by `change`."""
        problem, s, Phi_b = products.problem, step.index, stretch.of_statistics
        if len(stretch.steps) == 1:
            total = problem.select_outputs(stretch.integral.total) - change
        else:
            before, after = (flat_state(problem.trajectory, state, problem.X) for state in (s, s + 1))
            total = torch.einsum("knq,q->nk", Phi_b, (after - before)[problem.net.model.num_weights :])
        if Phi_b is None or not is_split:
            totals.add_statistics(s, total, None)
            return
        state, samples, added = flat_state(problem.trajectory.trained, s, problem.X), [], []
        for data in passes_of(step, products.run.data):
            increments = statistics_increments(products.run.passes, state, data)
            samples.append(data.samples)
            added.append(torch.einsum("knq,bq->nkb", Phi_b, increments.to(Phi_b)))
        totals.add_statistics(s, total, (torch.cat(samples), torch.cat(added, dim=2)))
