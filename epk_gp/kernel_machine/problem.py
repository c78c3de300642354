"""The test side of an attribution: averaged output gradients along the recorded steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.dense import Cotangents, all_outputs, chosen_outputs
from epk_gp.autodiff.directional import WeightSegment, values
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import NodeWeights
from epk_gp.autodiff.dense import PlannedModel, flat_columns
from epk_gp.autodiff.directional import statistics_jacobian
from epk_gp.core.options import ComputeOptions
from epk_gp.core.inputs import Inputs
from epk_gp.core.plans import MemoryPlan, rows_per_pass
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.accumulator import NodeBatch
from epk_gp.quadrature.adaptive import Integral, integrate
from epk_gp.quadrature.paths import LayerwisePath, lines_of_stretch, num_segments
from epk_gp.quadrature.status import QuadratureStatus


@dataclass(frozen=True, eq=False)
class AttributionProblem:
    """Predictions that are to be split into contributions.

    Attributes:
        kernel: The run's path kernel: trajectory, head, and how each step's integral is taken.
        X: n inputs.
        classes: One output per input, or None for all C.
        options: How to compute.
        net: The network in the computation's dtype, with its plan.
        cost: Decides the representations of layer Jacobians.
        columns: Place in the flat weights of each entry of dense layer Jacobians, (P,).
    """

    kernel: PathKernel
    X: Shaped[Tensor, "n ..."]
    classes: Int64[Tensor, " n"] | None
    options: ComputeOptions
    net: PlannedModel
    cost: ContractionCost
    columns: Int64[Tensor, " P"]

    @property
    def trajectory(self) -> Trajectory:
        """The run."""
        return self.kernel.trajectory

    @property
    def num_outputs(self) -> int:
        """Number K of outputs that are asked for at each point."""
        return self.trajectory.num_outputs if self.classes is None else 1

    @property
    def memory(self) -> MemoryPlan:
        """Turns the budget into block sizes."""
        return self.net.memory_plan(self.options.memory_budget)

    @property
    def advice(self) -> str:
        """What makes the call faster, or shows how far it is."""
        ways = ["progress=True shows how far it is"]
        if not isinstance(self.kernel.path, LayerwisePath):
            ways.insert(0, "path=epk_gp.layerwise() takes two evaluations for each point and step, along another path")
        if self.num_outputs > 1:
            ways.insert(0, "classes= explains one output of each point")
        return "; ".join(ways)

    def at(self, points: Int64[Tensor, " N"], classes: Int64[Tensor, " N"] | None) -> "AttributionProblem":
        """Return the same of some of the points, which may be repeated, with one output of each if that is given."""
        cost = replace(self.cost, num_output_pairs=self.trajectory.num_outputs if classes is None else 1)
        return replace(self, X=self.X[points], classes=classes, cost=cost)

    def select_outputs(self, f: Float[Tensor, "N C"], rows: Int64[Tensor, " N"] | None = None) -> Float[Tensor, "N K"]:
        """Keep the outputs that are asked for: (N, C) to (N, K), of some of the points, or of all of them."""
        if self.classes is None:
            return f
        return f.gather(1, (self.classes if rows is None else self.classes[rows])[:, None])


def parse_problem(kernel: PathKernel, X: Inputs, classes: object) -> Shaped[Tensor, "n ..."]:
    """Return inputs as one tensor, after checking that their predictions can be attributed.

    Raises:
        TypeError, ValueError: The network cannot take the inputs; the head or the rule is unknown; `classes` are not
            one output per input.
    """
    X = kernel.parse_inputs(X)
    if classes is not None:
        validate_classes(classes, len(X), kernel.trajectory.num_outputs)
    return X


def validate_classes(classes: object, num_points: int, num_outputs: int) -> None:
    """Raise if classes are not one output per point.

    Raises:
        ValueError: They are not.
    """
    if not isinstance(classes, Tensor) or classes.dtype != torch.int64 or classes.shape != (num_points,):
        got = f"{classes.dtype} of shape {tuple(classes.shape)}" if isinstance(classes, Tensor) else repr(classes)
        raise ValueError(f"classes must be an int64 tensor with one output per point, ({num_points},): got {got}.")
    if not 0 <= int(classes.min()) <= int(classes.max()) < num_outputs:
        raise ValueError(f"classes must lie in 0..{num_outputs - 1}: got {int(classes.min())}..{int(classes.max())}.")


def make_problem(
    net: PlannedModel,
    kernel: PathKernel,
    X: Shaped[Tensor, "n ..."],
    classes: Int64[Tensor, " n"] | None,
    options: ComputeOptions,
) -> AttributionProblem:
    """Prepare an attribution; the arguments were validated by `parse_problem`."""
    cost = ContractionCost(
        num_output_pairs=kernel.trajectory.num_outputs if classes is None else 1,
        num_contractions=kernel.rule.num_contractions,
        cotangents_are_constant=kernel.head == "logits",
        all_dense=not net.plan.supports_interpolation,
    )
    columns = flat_columns(net, all_dense=cost.all_dense).to(X.device)
    classes = None if classes is None else classes.to(X.device)
    return AttributionProblem(kernel, X.detach(), classes, options, net, cost, columns)


@dataclass(frozen=True, eq=False)
class IntegratedLine:
    """A straight line of the path at some of the points.

    Attributes:
        problem: The predictions.
        rows: Which N of the points.
        segment: The line.
        part: Which part of the state moves along it.
        integral: The nodes of each point, and what they sum up to.
        max_rows: Nodes evaluated at a time.
    """

    problem: AttributionProblem
    rows: Int64[Tensor, " N"]
    segment: WeightSegment
    part: slice
    integral: Integral
    max_rows: int

    @property
    def moves_weights(self) -> bool:
        """Whether any weights move along it."""
        return bool(self.part.start < self.problem.net.model.num_weights)

    def node_batches(self) -> Iterator[NodeBatch]:
        """Compute the output gradients at the nodes, some nodes at a time; each call computes them anew."""
        problem, integral, X = self.problem, self.integral, self.problem.X[self.rows]
        is_layerwise = isinstance(problem.kernel.path, LayerwisePath)
        for nodes in torch.arange(len(integral.point), device=X.device).split(self.max_rows):
            points = integral.point[nodes]
            head = self.segment.head if is_layerwise else None
            at = WeightLocation(self.segment.w, self.segment.d, integral.t[nodes], secant_head=head)
            cotangents = (_output_cotangents if is_layerwise else _cotangents)(problem, self.rows[points])
            jacobians = layer_jacobians(problem.net, at, X[points], cotangents, problem.cost)
            yield NodeBatch(jacobians, NodeWeights(integral.weight[nodes], points, len(self.rows)))


def integrate_stretch(
    problem: AttributionProblem, steps: range, rows: Int64[Tensor, " N"], max_nodes: int
) -> Iterator[IntegratedLine]:
    """Choose the nodes of some points on a stretch of the path, line by line.

    Args:
        problem: The predictions.
        steps: The steps that the stretch stands for; it goes from the recorded state before the first to that after the
            last.
        rows: Which N of the points.
        max_nodes: Nodes evaluated at a time.
    """
    X, net, kernel = problem.X[rows], problem.net, problem.kernel
    w, end = (flat_state(problem.trajectory, s, X) for s in (steps.start, steps.stop))
    share = num_segments(kernel.path, net.model, problem.trajectory.num_steps)
    size = min(max_nodes, rows_per_pass(net.plan, net.itemsize, problem.num_outputs))
    for part, start, direction in lines_of_stretch(kernel.path, net.model, w, end - w):
        segment = WeightSegment(net, start, direction, kernel.head, problem.options.memory_budget)
        if isinstance(kernel.path, LayerwisePath):
            yield _layerwise_line(problem, segment, part, rows, max(2, size - size % 2))
        else:
            integral = integrate(segment, X, kernel.rule, share)
            yield IntegratedLine(problem, rows, segment, part, integral, size)


def _layerwise_line(
    problem: AttributionProblem, segment: WeightSegment, part: slice, rows: Int64[Tensor, " N"], max_rows: int
) -> IntegratedLine:
    """Evaluate some points at both ends of a stretch, every operation with its mean derivative between them.

    The integral is the change of the outputs, until the averages are known (`with_averages`).
    """
    X, net = problem.X[rows], problem.net
    if not net.plan.supports_interpolation:
        raise ValueError(
            "layerwise() needs a network whose weights are used by functions that are linear in them, row by row: this "
            "one's are not. Take chords(every=k)."
        )
    both = X.repeat_interleave(2, dim=0)
    t = segment.w.new_tensor([0.0, 1.0]).repeat(len(X))
    f = values(segment, both, t)
    start, end = f.unflatten(0, (-1, 2)).unbind(1)
    point = torch.arange(len(X), device=X.device).repeat_interleave(2)
    zeros, ones = torch.zeros_like(start[:, 0]), torch.ones_like(point[::2])
    integral = Integral(
        total=end - start,
        start=start,
        end=end,
        residual=zeros,
        evaluations=zeros + 2,
        point=point,
        t=t,
        weight=torch.full_like(t, 0.5),
        breakpoints=zeros,
        ends=zeros + 1,
        orders=ones + 1,
        num_intervals=ones,
        status=ones * QuadratureStatus.CONVERGED,
    )
    return IntegratedLine(problem, rows, segment, part, integral, max_rows)


def averaged_statistics_jacobian(
    problem: AttributionProblem, line: IntegratedLine, rows: Int64[Tensor, " N"]
) -> Float[Tensor, "K N Q"]:
    """Average the outputs' gradients in the moving statistics over a line, at the nodes of those in the weights.

    With Phi the gradients in the weights, averaged over the same nodes, of a line on which all of them move,

        <Phi, w_{s+1} - w_s> + <Phi^b, b_{s+1} - b_s> = line.integral.total.

    Args:
        problem: The predictions.
        line: The line, from `integrate_stretch`.
        rows: Which N of the points.
    """
    X, net, integral = problem.X[rows], problem.net, line.integral
    Q = net.model.num_statistics
    total = X.new_zeros(problem.num_outputs, len(rows), Q, dtype=net.model.spec.dtype)
    size = problem.memory.statistics_rows(problem.num_outputs, Q)
    size += size % 2  # the rows of a layerwise path come in pairs
    for part in torch.arange(len(integral.point), device=X.device).split(size):
        points = integral.point[part]
        is_layerwise = isinstance(problem.kernel.path, LayerwisePath)
        head = line.segment.head if is_layerwise else None
        at = WeightLocation(line.segment.w, line.segment.d, integral.t[part], secant_head=head)
        cotangents = (_output_cotangents if is_layerwise else _cotangents)(problem, rows[points])
        gradients = statistics_jacobian(net, at, X[points], cotangents)
        total.index_add_(1, points, integral.weight[part][:, None] * gradients)
    return total


def _output_cotangents(problem: AttributionProblem, points: Tensor) -> Cotangents:
    """Return the cotangents of the outputs that are asked for, where the head is one of the operations."""
    if problem.classes is None:
        return replace(all_outputs("logits"), head=None)
    return chosen_outputs("logits", problem.classes[points])


def _cotangents(problem: AttributionProblem, points: Tensor) -> Cotangents:
    """Return the cotangents of the outputs that are asked for.

    The last layer takes the representation of any other layer (`head=None`), as in the loss gradients that its
    Jacobian is multiplied with.
    """
    if problem.classes is None:
        return replace(all_outputs(problem.kernel.head), head=None)
    return chosen_outputs(problem.kernel.head, problem.classes[points])
