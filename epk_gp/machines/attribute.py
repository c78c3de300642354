"""Exact contributions: what each training point added to each output of each prediction."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.engine.adaptive import integrate
from epk_gp.engine.averages import Evaluations, StepIntegral
from epk_gp.engine.contractions import empty_tile
from epk_gp.engine.features import Cotangents, Form, Place, feature_bytes, gradients, head_cotangents
from epk_gp.engine.gram import MEMORY_BUDGET
from epk_gp.engine.line import Line
from epk_gp.engine.plan import Plan
from epk_gp.engine.probe import plan_for
from epk_gp.engine.quadrature import AdaptiveRule, Rule, adaptive, check_rule
from epk_gp.machines.directions import batch_of, training_direction
from epk_gp.recording.losses import loss_derivatives, sample_weight
from epk_gp.recording.networks import Head, Skeleton, check_head
from epk_gp.recording.store import Step
from epk_gp.recording.trajectory import (
    Trajectory,
    check_inputs,
    flat_weights,
    network_outputs,
    skeleton_for,
)


@dataclass(frozen=True, eq=False)
class Attribution:
    """The terms of a prediction; they sum to the network's output.

    Attributes:
        initial: f at the initial weights, (n, C).
        samples: Contribution of each training point, (n, C, M).
        decay: Contribution of weight decay, (n, C); zero for plain gradient descent.
        network: What the trained network says, (n, C).
        max_residual: Largest quadrature residual of a (point, step).
        evaluations: Gradient evaluations per point and step that choosing the nodes took, on average.
    """

    initial: Float[Tensor, "n C"]
    samples: Float[Tensor, "n C M"]
    decay: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    max_residual: float
    evaluations: float

    @property
    def total(self) -> Float[Tensor, "n C"]:
        """Sum of all terms."""
        return self.initial + self.samples.sum(dim=2) + self.decay

    @property
    def max_error(self) -> float:
        """Largest |total - network|."""
        return float((self.total - self.network).abs().max())


def attribute(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    *,
    head: Head = "log_softmax",
    rule: Rule = adaptive(tol=1e-12),  # noqa: B008  # a frozen value
    memory_budget: int = MEMORY_BUDGET,
    progress: bool = False,
) -> Attribution:
    """Split predictions into exact contributions of the training points (Theorem 3.6, Bell et al. 2023).

        samples[n, :, i] = sum_s K_s(x_n, x_i) alpha_{s,i} = -sum_s eps_s c_{s,i} Phi_s(x_n) grad_w loss_i(w_s)

    One loss gradient per training point and step is needed, not C output gradients. Contributions sum to the
    prediction; they are not the effects of leaving points out.

    Args:
        trajectory: Training run with S steps on M points.
        X: n inputs, taken as test copies.
        head: Whether f is the logits or their log-softmax.
        rule: How each step's integral is taken.
        memory_budget: Bytes for everything but the inputs and the result.
        progress: Show a progress bar.

    Returns:
        All terms, in the dtype of X.

    Raises:
        TypeError, ValueError: Inputs that the network cannot take; an unknown head or rule.
    """
    check_inputs(trajectory, X)
    check_head(head, trajectory.num_outputs)
    check_rule(rule)
    initial = network_outputs(trajectory, X, state=0, head=head)
    samples = initial.new_zeros(*initial.shape, trajectory.num_points)
    skeleton, plan = skeleton_for(trajectory, initial.dtype, X.device), plan_for(trajectory, X)
    form = Form(
        pairs=trajectory.num_outputs,
        products=4 if isinstance(rule, AdaptiveRule) else len(rule),
        fixed_head=head == "logits",
        dense=not plan.on_line,
    )
    largest, evaluations = 0.0, 0.0
    for step in tqdm(trajectory.steps, desc="steps", disable=not progress):
        w = flat_weights(trajectory, step.index, X)
        line = Line(skeleton, plan, w, training_direction(trajectory, step, skeleton, w), head)
        for rows in torch.arange(len(X), device=X.device).split(_panel(trajectory, plan, form, initial, memory_budget)):
            integral = integrate(line, X[rows], rule, trajectory.num_steps)
            nodes = _evaluated(line, X[rows], form, integral.point, integral.t, integral.weight)
            _add_step(trajectory, step, line, form, nodes, samples, rows, memory_budget)
            largest = max(largest, float(integral.residual.max()))
            evaluations += float(integral.evaluations.sum())
    return Attribution(
        initial=initial,
        samples=samples,
        decay=torch.zeros_like(initial),
        network=network_outputs(trajectory, X, state=-1, head=head),
        max_residual=largest,
        evaluations=evaluations / (len(X) * trajectory.num_steps),
    )


def _evaluated(line: Line, X: Tensor, form: Form, point: Tensor, t: Tensor, weight: Tensor) -> list[Evaluations]:
    """Compute output gradients at every point's own nodes."""
    found = []
    for part in torch.arange(len(point), device=X.device).split(max(1, len(X))):
        place = Place(line.w, line.d, t[part])
        rows = X[point[part]]
        features = gradients(
            line.skeleton, line.plan, place, rows, head_cotangents(line.head), form, fixed_seed=line.head == "logits"
        )
        found.append(Evaluations(features, weight[part], point[part]))
    return found


def _add_step(
    trajectory: Trajectory,
    step: Step,
    line: Line,
    form: Form,
    nodes: list[Evaluations],
    samples: Tensor,
    rows: Tensor,
    memory_budget: int,
) -> None:
    """Contract the averaged output gradients with each batch member's loss gradient."""
    X, y = batch_of(trajectory, step, samples)
    columns = torch.arange(len(X)) if step.batch is None else step.batch
    columns = columns.to(samples.device)
    eta = -step.size * sample_weight(trajectory.loss, len(X))
    C, n = samples.shape[1], len(rows)
    block = _panel(trajectory, line.plan, form, samples, memory_budget)
    block = max(1, min(block, memory_budget // (4 * samples.element_size() * C * n)))
    for part in torch.arange(len(X), device=samples.device).split(block):
        right = gradients(
            line.skeleton,
            line.plan,
            Place(line.w),
            X[part],
            _loss_cotangents(trajectory, y[part]),
            form,
            fixed_seed=False,
        )
        tile = empty_tile(C, n, 1, len(part), samples, per_class=False)
        integral = StepIntegral(tile, n, right, eta, fixed_steps=False)
        for node in nodes:
            integral.take(node)
        integral.close()
        contributions = tile.finished()[:, :, 0].transpose(0, 1)
        if len(rows) == len(samples):
            samples.index_add_(2, columns[part], contributions)
        else:
            samples[rows] = samples[rows].index_add_(2, columns[part], contributions)


def _loss_cotangents(trajectory: Trajectory, y: Tensor) -> Cotangents:
    def rows(z: Tensor) -> Tensor:
        return loss_derivatives(trajectory.loss, z, y)[None]

    return rows


def _panel(trajectory: Trajectory, plan: Plan, form: Form, like: Tensor, memory_budget: int) -> int:
    """Choose how many points are taken at a time, from the memory budget."""
    key = ("attribution bytes", form, like.dtype, like.device)
    if key not in trajectory.memo:
        skeleton: Skeleton = skeleton_for(trajectory, like.dtype, like.device)
        X = trajectory.inputs[:1].to(like.device)
        X = X.to(like.dtype) if X.is_floating_point() else X
        place = Place(flat_weights(trajectory, 0, X))
        features = gradients(skeleton, plan, place, X, head_cotangents("logits"), form, fixed_seed=True)
        trajectory.memo[key] = feature_bytes(features)
    per_point = (trajectory.num_outputs + 3) * plan.elements * like.element_size() + 12 * int(trajectory.memo[key])
    return max(1, memory_budget // (4 * per_point))
