"""The test side of an attribution: averaged output gradients along the recorded steps."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.directional import Line
from epk_gp.autodiff.jacobians import Cotangents, WeightLocation, gradients, head_cotangents
from epk_gp.autodiff.plan import flat_layout, rows_at_a_time
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.core.differentiation_plan import DifferentiationPlan
from epk_gp.core.head import Head, validate_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_weights, validate_inputs
from epk_gp.core.validation import validate_memory_budget
from epk_gp.gram.step_average import NodeBatch
from epk_gp.quadrature.adaptive import Integral, integrate
from epk_gp.quadrature.rules import AdaptiveRule, Rule, validate_rule


@dataclass(frozen=True, eq=False)
class AttributionProblem:
    """What is asked of a run.

    Attributes:
        trajectory: The run.
        X: n inputs.
        head: "logits" or "log_softmax".
        rule: How each step's integral is taken.
        classes: One output per input, or None for all C.
        memory_budget: Bytes for everything but the inputs and the result.
        model: The network in the computation's dtype.
        plan: How to differentiate it.
        form: The form of its gradients.
        layout: Place in the flat weights of each entry of written-out gradients, (P,).
    """

    trajectory: Trajectory
    X: Shaped[Tensor, "n ..."]
    head: Head
    rule: Rule
    classes: Int64[Tensor, " n"] | None
    memory_budget: int
    model: FunctionalModel
    plan: DifferentiationPlan
    form: ContractionCost
    layout: Int64[Tensor, " P"]

    @property
    def dtype(self) -> torch.dtype:
        """The computation's dtype."""
        return self.model.spec.dtype

    @property
    def num_rows(self) -> int:
        """Number K of outputs asked for."""
        return self.trajectory.num_outputs if self.classes is None else 1


def make_problem(
    trajectory: Trajectory,
    X: Shaped[Tensor, "n ..."],
    head: Head,
    rule: Rule,
    classes: Int64[Tensor, " n"] | None,
    memory_budget: int,
    plan: DifferentiationPlan,
) -> AttributionProblem:
    """Check a question and get ready to answer it.

    Raises:
        TypeError, ValueError: Inputs that the network cannot take; an unknown head or rule; classes that are none.
    """
    validate_inputs(trajectory, X)
    validate_head(head, trajectory.num_outputs)
    validate_rule(rule)
    validate_memory_budget(memory_budget)
    C = trajectory.num_outputs
    if classes is not None:
        if not isinstance(classes, Tensor) or classes.dtype != torch.int64 or classes.shape != X.shape[:1]:
            got = f"{classes.dtype} of shape {tuple(classes.shape)}" if isinstance(classes, Tensor) else repr(classes)
            raise ValueError(f"classes must be an int64 tensor with one output per point, ({len(X)},): got {got}.")
        if not 0 <= int(classes.min()) <= int(classes.max()) < C:
            raise ValueError(f"classes must lie in 0..{C - 1}: got {int(classes.min())}..{int(classes.max())}.")
        classes = classes.to(X.device)
    form = ContractionCost(
        pairs=C if classes is None else 1,
        products=4 if isinstance(rule, AdaptiveRule) else len(rule),
        fixed_head=head == "logits",
        dense=not plan.supports_interpolation,
    )
    model = trajectory.model_for(X)
    layout = flat_layout(model, plan, dense=form.dense).to(X.device)
    return AttributionProblem(trajectory, X.detach(), head, rule, classes, memory_budget, model, plan, form, layout)


def integrate_step(
    query: AttributionProblem, step: Step, rows: Int64[Tensor, " N"], block_size: int
) -> tuple[Integral, list[NodeBatch]]:
    """Choose the nodes of some points on a step, and compute their output gradients there.

    Args:
        query: What is asked.
        step: The step; its path is the recorded one, from w_s to w_{s+1}.
        rows: Which N of the points.
        block_size: Nodes evaluated at a time.
    """
    X = query.X[rows]
    w, end = (flat_weights(query.trajectory, s, X) for s in (step.index, step.index + 1))
    line = Line(query.model, query.plan, w, end - w, query.head, query.memory_budget)
    integral = integrate(line, X, query.rule, query.trajectory.num_steps)
    found, size = [], min(block_size, rows_at_a_time(query.plan, query.dtype, query.num_rows))
    for part in torch.arange(len(integral.point), device=X.device).split(size):
        points = integral.point[part]
        place = WeightLocation(line.w, line.d, integral.t[part])
        classes = None if query.classes is None else query.classes[rows[points]]
        cotangents = _chosen(head_cotangents(query.head), classes)
        features = gradients(
            query.model, query.plan, place, X[points], cotangents, query.form, fixed_seed=query.head == "logits"
        )
        found.append(NodeBatch(features, integral.weight[part], points))
    return integral, found


def pick_classes(query: AttributionProblem, f: Float[Tensor, "n C"]) -> Float[Tensor, "n K"]:
    """Keep the outputs that are asked for: (n, C) to (n, K)."""
    return f if query.classes is None else f.gather(1, query.classes[:, None])


def _chosen(cotangents: Cotangents, classes: Tensor | None) -> Cotangents:
    if classes is None:
        return cotangents

    def rows(z: Tensor) -> Tensor:
        return cotangents(z)[classes, torch.arange(len(z), device=z.device)][None]

    return rows
