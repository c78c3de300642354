"""The terms of an attribution: the test side, the products with the training side, their sums along the axes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import (
    Cotangents,
    PlannedModel,
    WeightSegment,
    all_outputs,
    chosen_outputs,
    flat_columns,
    values,
)
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, statistics_jacobian
from epk_gp.autodiff.representations import ContractionCost, NodeWeights
from epk_gp.core.gradients import replayed_steps
from epk_gp.core.inputs import Inputs
from epk_gp.core.plans import MemoryPlan, rows_of_weights, rows_per_pass, weight_rows
from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, leaves_unexplained
from epk_gp.gram.accumulator import NodeBatch
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.certification import StepMismatches, coarsest_dtype
from epk_gp.quadrature.adaptive import Integral, integrate
from epk_gp.quadrature.rules import LayerwisePath, QuadratureStatus, stretches_of


@dataclass(frozen=True, eq=False)
class SampleContributions:
    """What some samples of one step add to some predictions.

    Attributes:
        step: s.
        rows: Which N of the points.
        samples: Indices of B training samples, a sample as often as it occurs.
        values: Their contributions, (N, K, B, G) over G parts of the network.
    """

    step: int
    rows: Int64[Tensor, " N"]
    samples: Int64[Tensor, " B"]
    values: Float[Tensor, "N K B G"]


@dataclass(frozen=True, eq=False)
class WeightDecayContribution:
    """What weight decay adds to some predictions in one step, (N, K, G)."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K G"]


@dataclass(frozen=True, eq=False)
class StatisticsContribution:
    """What the moving statistics add to some predictions in one step.

    Attributes:
        step: s.
        rows: Which N of the points.
        total: All of it, (N, K).
        samples: Indices of B training samples, a sample as often as it occurs; None if it is not split.
        values: What these add, (N, K, B).
    """

    step: int
    rows: Int64[Tensor, " N"]
    total: Float[Tensor, "N K"]
    samples: Int64[Tensor, " B"] | None = None
    values: Float[Tensor, "N K B"] | None = None


@dataclass(frozen=True, eq=False)
class UnexplainedContribution:
    """What the part of a step that update rule and gradients do not explain adds to some predictions, (N, K, G)."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K G"]


@dataclass(frozen=True, eq=False)
class WeightsContribution:
    """What a whole step of the weights adds to some predictions, (N, K): the sum of all terms but the statistics."""

    step: int
    rows: Int64[Tensor, " N"]
    values: Float[Tensor, "N K"]


Contribution = (
    SampleContributions
    | WeightDecayContribution
    | StatisticsContribution
    | UnexplainedContribution
    | WeightsContribution
)
Emit = Callable[[Contribution], None]


def grouped_products(
    H: Float[Tensor, "K N P"], vectors: Float[Tensor, "B P"], groups: Int64[Tensor, " L"], sizes: tuple[int, ...]
) -> Float[Tensor, "N K B G"]:
    """Compute inner products, summed over each group of parameters separately."""
    count = int(groups.max()) + 1
    K, N = H.shape[:2]
    if count == 1:
        return (H.flatten(0, 1) @ vectors.T).view(K, N, len(vectors)).transpose(0, 1).unsqueeze(3)
    out = H.new_zeros(N, K, len(vectors), count)
    first = 0
    for group, size in zip(groups.tolist(), sizes, strict=True):
        part = slice(first, first + size)
        out[..., group] += (H[..., part].flatten(0, 1) @ vectors[:, part].T).view(K, N, len(vectors)).transpose(0, 1)
        first += size
    return out


@dataclass(frozen=True, eq=False)
class AttributionProblem:
    """Predictions that are to be split into contributions.

    Attributes:
        kernel: The run's path kernel: trajectory, head, and how each step's integral is taken.
        X: n inputs.
        classes: One output per input, or None for all C.
        memory_budget: Bytes.
        net: The network in the computation's dtype, with its plan.
        cost: Decides the representations of layer Jacobians.
        columns: Place in the flat weights of each entry of dense layer Jacobians, (P,).
    """

    kernel: PathKernel
    X: Shaped[Tensor, "n ..."]
    classes: Int64[Tensor, " n"] | None
    memory_budget: int
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
        return self.net.memory_plan(self.memory_budget)

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
    memory_budget: int,
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
    return AttributionProblem(kernel, X.detach(), classes, memory_budget, net, cost, columns)


@dataclass(frozen=True, eq=False)
class IntegratedLine:
    """A straight line of the path at some of the points.

    Attributes:
        problem: The predictions.
        rows: Which N of the points.
        segment: The line.
        integral: The nodes of each point, and what they sum up to.
        max_rows: Nodes evaluated at a time.
    """

    problem: AttributionProblem
    rows: Int64[Tensor, " N"]
    segment: WeightSegment
    integral: Integral
    max_rows: int

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
) -> IntegratedLine:
    """Choose the nodes of some points on a stretch of the path.

    Args:
        problem: The predictions.
        steps: The steps that the stretch stands for; it goes from the recorded state before the first to that after the
            last.
        rows: Which N of the points.
        max_nodes: Nodes evaluated at a time.
    """
    X, net, kernel = problem.X[rows], problem.net, problem.kernel
    w, end = (flat_state(problem.trajectory, s, X) for s in (steps.start, steps.stop))
    size = min(max_nodes, rows_per_pass(net.plan, net.itemsize, problem.num_outputs))
    segment = WeightSegment(net, w, end - w, kernel.head, problem.memory_budget)
    if isinstance(kernel.path, LayerwisePath):
        return _layerwise_line(problem, segment, rows, max(2, size - size % 2))
    integral = integrate(segment, X, kernel.rule, len(stretches_of(kernel.path, problem.trajectory.num_steps)))
    return IntegratedLine(problem, rows, segment, integral, size)


def _layerwise_line(
    problem: AttributionProblem, segment: WeightSegment, rows: Int64[Tensor, " N"], max_rows: int
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
    return IntegratedLine(problem, rows, segment, integral, max_rows)


def averaged_statistics_jacobian(
    problem: AttributionProblem, line: IntegratedLine, rows: Int64[Tensor, " N"]
) -> Float[Tensor, "K N Q"]:
    """Average the outputs' gradients in the moving statistics over a line, at the nodes of those in the weights.

    With Phi the gradients in the weights, averaged over the same nodes,

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


class Collector:
    """Sums contributions into one result. Combined axes of one kind are flattened to one index until the end.

    Args:
        problem: The predictions.
        axes: The axes of the result.
        parts: Which part of the network each parameter belongs to; contributions are those of parts.
        reference: The predictions at the initial weights, (n, K).
    """

    def __init__(
        self, problem: AttributionProblem, axes: tuple[Axis, ...], parts: Int64[Tensor, " L"], reference: Tensor
    ) -> None:
        self.axes = axes
        trajectory = problem.trajectory
        counts = {"step": trajectory.num_steps, "sample": trajectory.num_points}
        self.index, self.sizes = {}, {}
        for kind, count in (*counts.items(), ("parameter", len(trajectory.model.names))):
            own = [axis for axis in axes if axis.kind == kind]
            index = torch.zeros(count, dtype=torch.int64)
            for axis in own:
                index = index * len(axis.names) + axis.group.cpu()
            self.index[kind], self.sizes[kind] = index, [len(axis.names) for axis in own]
        T, U, G = (torch.Size(self.sizes[kind]).numel() for kind in ("step", "sample", "parameter"))
        self.values = reference.new_zeros(*reference.shape, T, U, G)
        self.decay = reference.new_zeros(*reference.shape, T, G)
        self.statistics = reference.new_zeros(*reference.shape, T, U)
        self.statistics_of_no_sample = reference.new_zeros(*reference.shape, T)
        self.unexplained = reference.new_zeros(*reference.shape, T, G)
        self.group_of_sample = self.index["sample"].to(reference.device)
        group_of_part = torch.zeros(int(parts.max()) + 1, dtype=torch.int64)
        group_of_part[parts] = self.index["parameter"]
        self.group_of_part = group_of_part.to(reference.device)
        self._parts_are_groups = torch.equal(group_of_part, torch.arange(G))

    @property
    def splits_samples(self) -> bool:
        """Whether samples are put into groups."""
        return bool(self.sizes["sample"])

    @property
    def sums(self) -> list[Tensor]:
        """What terms are added to."""
        return [self.values, self.decay, self.statistics, self.statistics_of_no_sample, self.unexplained]

    def add(self, term: Contribution) -> None:
        """Add one contribution, split by parts of the network."""
        t = int(self.index["step"][term.step])
        if isinstance(term, SampleContributions):
            _add_by_sample(self.values[:, :, t], term.rows, self._group(term.samples), self._by_group(term.values))
        elif isinstance(term, WeightDecayContribution):
            self.decay[term.rows, :, t] += self._by_group(term.values)
        elif isinstance(term, UnexplainedContribution):
            self.unexplained[term.rows, :, t] += self._by_group(term.values)
        elif isinstance(term, StatisticsContribution):
            self._add_statistics(term, t)

    def drop_unexplained_above(self, tolerance: float) -> None:
        """Leave what is unexplained out of the sum where it is more than rounding can be."""
        if not self.unexplained.flatten(2).sum(dim=2).abs().max() <= tolerance:
            self.unexplained.zero_()

    def _add_statistics(self, term: StatisticsContribution, t: int) -> None:
        if not self.splits_samples:
            self.statistics[term.rows, :, t, 0] += term.total
            return
        rest = term.total
        if term.samples is not None and term.values is not None:
            _add_by_sample(self.statistics[:, :, t], term.rows, self._group(term.samples), term.values)
            rest = rest - term.values.sum(dim=2)
        self.statistics_of_no_sample[term.rows, :, t] += rest

    def _group(self, samples: Tensor) -> Tensor:
        return self.group_of_sample[samples.to(self.group_of_sample.device)]

    def size_of_terms(self, *others: Tensor) -> Tensor:
        """Return the sum of the absolute values of all terms, and of others, (n, K)."""
        terms = [total.flatten(2).abs().sum(dim=2) for total in self.sums]
        return torch.stack([*terms, *(other.abs() for other in others)]).sum(dim=0)

    def _by_group(self, values: Tensor) -> Tensor:
        if self._parts_are_groups:
            return values
        grouped = values.new_zeros(*values.shape[:-1], self.values.shape[-1])
        return grouped.index_add_(values.ndim - 1, self.group_of_part, values)

    def result(self, tensor: Tensor, kinds: tuple[str, ...]) -> Tensor:
        """Unflatten the kinds and bring the axes into their order; kinds that are left out get length 1."""
        shape = [size for kind in kinds for size in self.sizes[kind]]
        tensor = tensor.reshape(*tensor.shape[:2], *shape)
        present = [number for kind in kinds for number, axis in enumerate(self.axes) if axis.kind == kind]
        order = [2 + present.index(number) for number in range(len(self.axes)) if number in present]
        tensor = tensor.permute(0, 1, *order)
        for number in range(len(self.axes)):
            if number not in present:
                tensor = tensor.unsqueeze(2 + number)
        return tensor


def _add_by_sample(total: Tensor, rows: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values (N, K, B, ...) to the rows of a total (n, K, U, ...), each sample's to its group."""
    if len(rows) == len(total):
        total.index_add_(2, index, values)
    else:
        total[rows] = total[rows].index_add_(2, index, values)


class TermSizes:
    """Sums of absolute values: of the samples' contributions, and of the changes that the steps' weights made."""

    def __init__(self, reference: Tensor) -> None:
        self.of_samples, self.of_steps = torch.zeros_like(reference), torch.zeros_like(reference)

    @property
    def sums(self) -> list[Tensor]:
        """What terms are added to."""
        return [self.of_samples, self.of_steps]

    @property
    def amplification(self) -> Tensor:
        """The ratio of the two; 0 where no step changed anything."""
        return torch.where(self.of_steps > 0, self.of_samples / self.of_steps.clamp(min=1e-300), 0.0)

    def add(self, term: Contribution) -> None:
        """Add one contribution."""
        if isinstance(term, SampleContributions):
            self.of_samples[term.rows] += term.values.sum(dim=3).abs().sum(dim=2)
        elif isinstance(term, WeightsContribution):
            self.of_steps[term.rows] += term.values.abs()


class StepResiduals:
    """rho_s = w_{s+1} - w_s - (the update that the training gradients give), for all steps of a run.

    The run is replayed once, and every step is compared with the recorded one. The residuals of a run in float64 that
    may leave nothing unexplained are rounding, and are not kept unless a preconditioner amplifies it: where one is
    more, the comparison says so. Of a run whose states are computed again, the steps that end at a kept state have
    residuals, the jumps; those between are steps of the update rule on the gradients of this very computation.

    Attributes:
        mismatches: The comparison.
    """

    def __init__(self, problem: AttributionProblem, outputs: Float[Tensor, "n C"], *, keeps: bool) -> None:
        trajectory, X, model = problem.trajectory, problem.X, problem.net.model
        dtype = coarsest_dtype(trajectory, outputs)
        self.mismatches = StepMismatches(dtype)
        recomputation, S = recomputation_of(trajectory), trajectory.num_steps
        ends = range(1, S + 1) if recomputation is None else recomputation.kept.numbers[1:]
        places = {state - 1: place for place, state in enumerate(ends)}
        max_rows = weight_rows(problem.memory_budget, outputs.element_size(), model.num_weights)
        self._rows: dict[int, Tensor] = {}
        rows: Tensor | None = None
        keeps_all = keeps and leaves_residuals(trajectory, outputs)
        for replayed in replayed_steps(trajectory, model, X):
            index = replayed.step.index
            is_amplified = self.mismatches.add(trajectory, model, replayed)
            if not keeps or not (is_amplified or (keeps_all and index in places)):
                continue
            residual = flat_weights(trajectory.trained, index + 1, X) - replayed.w - replayed.d
            if index not in places:
                self._rows[index] = residual.to(outputs)
                continue
            rows = rows_of_weights(len(places), model.num_weights, outputs, max_rows) if rows is None else rows
            rows[places[index]] = residual.to(rows)
            self._rows[index] = rows[places[index]]

    def __getitem__(self, s: int) -> Float[Tensor, " P"] | None:
        """Return rho_s; None where it is zero to rounding."""
        return self._rows.get(s)


def leaves_residuals(trajectory: Trajectory, outputs: Float[Tensor, "n C"]) -> bool:
    """Return whether steps may differ from the update rule's on exact gradients by more than float64's rounding.

    Args:
        trajectory: The run.
        outputs: Outputs in the dtype of the computation.
    """
    return coarsest_dtype(trajectory, outputs) != torch.float64 or leaves_unexplained(trajectory)
