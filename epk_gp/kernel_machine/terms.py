"""The terms of an attribution: the test side, averaged gradients along the path, and sums of terms along axes."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, WeightSegment, all_outputs, chosen_outputs
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, statistics_jacobian
from epk_gp.autodiff.representations import ContractionCost, LayerJacobian, LeftFactor, NodeWeights
from epk_gp.autodiff.uses import by_parameter
from epk_gp.core.checks import ComputeOptions
from epk_gp.core.plans import OPERATIONS_TOGETHER, rows_per_pass, weight_rows
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.states import recomputation_of
from epk_gp.core.step import NOT_OF_DATA, fingerprint
from epk_gp.core.trajectory import Trajectory, flat_state, has_coarse_steps
from epk_gp.gram.accumulator import NodeBatch, add_to_averages
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.planned_kernel import Evaluation
from epk_gp.kernel_machine.axes import Axis, CombinedAxes, parameter_parts
from epk_gp.kernel_machine.certificate import StepResiduals, coarsest_dtype, integral_sums
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import LayerwisePath, path_identity, stretches_of
from epk_gp.work.run import Piece, Place, RunWork, Sums, pieces_of_ranges, run

Groupings = tuple[tuple[Axis, ...], ...]


@dataclass(eq=False)
class Predictions(Evaluation):
    """Predictions that will be split into contributions.

    Attributes:
        X: n inputs.
        classes: One output per input, or None for all C.
    """

    X: Shaped[Tensor, "n ..."]
    classes: Int64[Tensor, " n"] | None
    _recorded_net: PlannedModel | None = None

    @property
    def recorded(self) -> Trajectory:
        """The recorded run, whose network and data made the steps."""
        return self.trajectory.recorded

    @property
    def recorded_net(self) -> PlannedModel:
        """The network of the recorded run, with its plan."""
        return self._recorded_net or self.net

    @property
    def num_outputs(self) -> int:
        """Number K of requested outputs per point."""
        return self.trajectory.num_outputs if self.classes is None else 1

    @cached_property
    def cost(self) -> ContractionCost:
        """The cost model that picks the representations of layer Jacobians."""
        return ContractionCost(
            num_output_pairs=self.num_outputs,
            num_contractions=self.rule.num_contractions,
            cotangents_are_constant=self.head == "logits",
            all_dense=not self.net.plan.supports_interpolation,
            keeps_factors=self.is_layerwise or self.lines_together > 1,
        )

    @property
    def is_layerwise(self) -> bool:
        """Whether derivatives of operations are averaged, instead of integrated along a line of the weights."""
        return isinstance(self.path, LayerwisePath)

    def state(self, s: int) -> Float[Tensor, " PQ"]:
        """Read a state of the path."""
        return self.states.get(s)

    def trained_state(self, s: int) -> Float[Tensor, " PQ"]:
        """Read a state of the run: the same as the path's, except for averaged weights."""
        return self.state(s) if self.trajectory.average is None else flat_state(self.trajectory.trained, s, self.X)

    @cached_property
    def lines_together(self) -> int:
        """Number of stretches of the path whose averaged gradients are computed together."""
        K, N, run = self.num_outputs, len(self.X), self.recorded
        most = max((run.num_points if step.batch is None else len(step.batch) for step in run.steps), default=0)
        products = 2 * K * N * most * self.net.model.num_weights  # fewer for layers that stay factored
        if self.is_layerwise or (run.is_vanilla_gd and products > OPERATIONS_TOGETHER):
            return 1
        return self.memory.lines_together(2 * N * self.rule.num_contractions, K, K * N)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros of the computation's dtype and device."""
        spec = self.net.model.spec
        return torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def select_outputs(self, f: Float[Tensor, "n C"]) -> Float[Tensor, "n K"]:
        """Return the requested outputs."""
        return f if self.classes is None else f.gather(1, self.classes[:, None])

    def cotangents(self, points: Int64[Tensor, " N"]) -> Cotangents:
        """Return the cotangents of the requested outputs, for some points.

        The last layer has the representation of any other layer (`head=None`), as in the loss gradients by which its
        Jacobian is multiplied. The head of a layerwise path is one of the operations.
        """
        head = "logits" if self.is_layerwise else self.head
        if self.classes is None:
            return replace(all_outputs(head), head=None)
        return chosen_outputs(head, self.classes[points])


@dataclass(frozen=True, eq=False)
class IntegratedLines:
    """Straight lines of the path, one or several, at all points: pair g N + n is point n on line g.

    Attributes:
        block: The predictions.
        lines: The G lines.
        integral: The nodes of each pair, and their sum.
        max_rows: Largest number of nodes evaluated at a time.
    """

    block: Predictions
    lines: WeightSegment
    integral: Integral
    max_rows: int

    def node_batches(self, pairs: range | None = None) -> Iterator[NodeBatch]:
        """Compute the output gradients at the nodes, some nodes at a time; each call computes them again.

        Args:
            pairs: Neighbouring pairs whose nodes are used; None for all.
        """
        block, own = self.block, range(len(self.integral.total)) if pairs is None else pairs
        for pair, weights, at in self._nodes(self.max_rows, own):
            points = pair % len(block.X)
            jacobians = layer_jacobians(block.net, at, block.X[points], block.cotangents(points), block.cost)
            yield NodeBatch(jacobians, NodeWeights(weights, pair - own.start, len(own)))

    def average_into(self, Phi: Float[Tensor, "G N K P"]) -> None:
        """Overwrite a vector of weights for each output of each pair with the outputs' averaged gradients."""
        block, (G, N, _, _), sizes = self.block, Phi.shape, list(self.block.net.model.sizes)
        all_dense = block.cost.all_dense
        at_once = max(1, min(self.max_rows, block.memory.adjoint_points(block.num_outputs) // 8))
        for lines in torch.arange(G).split(max(1, at_once // N)):
            first, last = int(lines[0]), int(lines[-1]) + 1
            for start in range(0, N, at_once):
                points = slice(start, min(start + at_once, N))
                columns = Phi[first:last, points].flatten(0, 1).split(sizes, dim=2)
                pairs = range(first * N + points.start, (last - 1) * N + points.stop)
                averages, layers = dict[int, LeftFactor](), list[LayerJacobian]()
                for number, batch in enumerate(self.node_batches(pairs)):
                    add_to_averages(averages, batch)
                    layers = [*batch.jacobians]
                    for own, out in zip(by_parameter(block.net, layers, all_dense=all_dense), columns, strict=True):
                        if not own.jacobian.commutes_with_average:
                            own.write_average(batch.nodes, out, adds=number > 0)
                layers = [cast(LayerJacobian, averages.get(k, own)) for k, own in enumerate(layers)]
                each = torch.arange(len(pairs), device=Phi.device)
                nodes = NodeWeights(torch.ones_like(each, dtype=Phi.dtype), each, len(each))
                for own, out in zip(by_parameter(block.net, layers, all_dense=all_dense), columns, strict=True):
                    if own.jacobian.commutes_with_average:
                        own.write_average(nodes, out, adds=False)

    def averaged_statistics_jacobian(self) -> Float[Tensor, "K GN Q"]:
        """Average the outputs' gradients in the moving statistics, at the nodes of the averages in the weights.

        With Phi the gradients in the weights, averaged over the same nodes,

            <Phi, w_{s+1} - w_s> + <Phi^b, b_{s+1} - b_s> = integral.total.
        """
        block, K, Q = self.block, self.block.num_outputs, self.block.net.model.num_statistics
        total = block.zeros(K, len(self.integral.total), Q)
        size = block.memory.statistics_rows(K, Q)
        for pair, weights, at in self._nodes(size, range(len(self.integral.total))):
            points = pair % len(block.X)
            gradients = statistics_jacobian(block.net, at, block.X[points], block.cotangents(points))
            total.index_add_(1, pair, weights[:, None] * gradients)
        return total

    def _nodes(self, size: int, own: range) -> Iterator[tuple[Tensor, Tensor, WeightLocation]]:
        """Yield the pairs of some nodes at a time, the nodes' weights (0 for repeated nodes), and locations."""
        integral = self.integral
        nodes = ((integral.point >= own.start) & (integral.point < own.stop)).nonzero().squeeze(1)
        pair, t, weights = integral.point[nodes], integral.t[nodes], integral.weight[nodes]
        for lines, rows, first in self.lines.passes(pair // len(self.block.X), size):
            own_weights = torch.zeros_like(t[rows]).index_copy_(0, first, weights[rows[first]])
            yield pair[rows], own_weights, WeightLocation(lines.w, lines.d, t[rows])


def integrate_stretches(block: Predictions, stretches: Sequence[range], max_nodes: int) -> IntegratedLines:
    """Choose the nodes of all points on neighbouring stretches of the path, which are integrated together.

    Args:
        block: The predictions.
        stretches: The steps of each stretch; it goes from the recorded state before the first to the state after the
            last.
        max_nodes: Largest number of nodes evaluated at a time.
    """
    size = min(max_nodes, rows_per_pass(block.net.plan, block.net.itemsize, block.num_outputs))
    lines, integral = block.integrate(stretches, block.X)
    return IntegratedLines(block, lines, integral, size)


# The terms of a result, and the kinds of axes that split each.
TERMS = {
    "values": ("step", "sample", "parameter"),
    "decay": ("step", "parameter"),
    "statistics": ("step", "sample"),
    "statistics_of_no_sample": ("step",),
    "unexplained": ("step", "parameter"),
}


def sources_of(trajectory: Trajectory) -> dict[str, tuple[str, ...]]:
    """Return the sources of a run's predictions other than training points, with the kinds of axes that split each."""
    return dict.fromkeys(trajectory.sources, ("step", "parameter"))


class GroupedSums:
    """Sums of terms along the axes of one result. Terms are given by parts of the network, which no axis divides.

    Args:
        trajectory: The run.
        axes: The axes.
        parts: The part of the network to which each parameter belongs.
        reference: Tensor with the shape, (n, K), dtype and device of the predictions.
    """

    def __init__(
        self, trajectory: Trajectory, axes: tuple[Axis, ...], parts: Int64[Tensor, " L"], reference: Tensor
    ) -> None:
        self.trajectory, self.axes, self.combined = trajectory, axes, CombinedAxes(trajectory, axes)
        self.sums = {
            name: reference.new_zeros(*reference.shape, *map(self.combined.count, kinds))
            for name, kinds in (TERMS | sources_of(trajectory)).items()
        }
        self.group_of_sample = self.combined.index["sample"].to(reference.device)
        group_of_part = torch.zeros(int(parts.max()) + 1, dtype=torch.int64)
        group_of_part[parts] = self.combined.index["parameter"]
        self.group_of_part = group_of_part.to(reference.device)
        self._parts_are_groups = torch.equal(group_of_part, torch.arange(self.combined.count("parameter")))

    @property
    def splits_samples(self) -> bool:
        """Whether samples are put into groups."""
        return bool(self.combined.sizes["sample"])

    def at(self, name: str, step: int) -> Tensor:
        """Return the entries, (n, K, ...), to which terms of a kind in a step are added."""
        return self.sums[name][:, :, int(self.combined.index["step"][step])]

    def of_samples(self, samples: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
        """Return the groups of samples."""
        return self.group_of_sample[samples.to(self.group_of_sample.device)]

    def of_parts(self, values: Float[Tensor, "*rest parts"]) -> Float[Tensor, "*rest G"]:
        """Add up the parts of each group."""
        if self._parts_are_groups:
            return values
        grouped = values.new_zeros(*values.shape[:-1], self.combined.count("parameter"))
        return grouped.index_add_(values.ndim - 1, self.group_of_part, values)

    def size_of_terms(self, *others: Tensor) -> Tensor:
        """Return the sum of the absolute values of all terms, and of others, (n, K)."""
        terms = [total.flatten(2).abs().sum(dim=2) for total in self.sums.values()]
        return torch.stack([*terms, *(other.abs() for other in others)]).sum(dim=0)


class TermSums:
    """The sums of all results, and the sizes of their terms. A pass over the run adds its terms to them.

    Args:
        trajectory: The run.
        groupings: The axes of each result.
        reference: Tensor with the shape, (n, K), dtype and device of the predictions.
    """

    def __init__(self, trajectory: Trajectory, groupings: Groupings, reference: Float[Tensor, "n K"]) -> None:
        parts = parameter_parts(groupings, len(trajectory.model.names))
        self.grouped = [GroupedSums(trajectory, axes, parts, reference) for axes in groupings]
        self._has_outside = NOT_OF_DATA in trajectory.sources
        self._of_samples, self._of_steps = reference.new_zeros(reference.shape), reference.new_zeros(reference.shape)

    @property
    def named(self) -> dict[str, Tensor]:
        """Return the tensors to which terms are added, in a fixed order."""
        sums = [total for grouped in self.grouped for total in grouped.sums.values()]
        return {f"sum.{number}": total for number, total in enumerate([*sums, self._of_samples, self._of_steps])}

    @property
    def amplification(self) -> Float[Tensor, "n K"]:
        """Ratio of the sizes of the samples' terms to those of the steps' changes; 0 if no step changed anything."""
        return torch.where(self._of_steps > 0, self._of_samples / self._of_steps.clamp(min=1e-300), 0.0)

    def add_samples(self, step: int, samples: Int64[Tensor, " B"], values: Float[Tensor, "n K B G"]) -> None:
        """Add the contributions of samples of a step, repeated as they occur, over G parts of the network.

        Rows outside the training data, with number -1, are added to a separate source.
        """
        self._of_samples += values.sum(dim=3).abs().sum(dim=2)
        if self._has_outside:
            is_outside = (samples < 0).to(values.device)
            self.add(NOT_OF_DATA, step, values[:, :, is_outside].sum(dim=2))
            samples, values = samples[samples >= 0], values[:, :, ~is_outside]
        for own in self.grouped:
            own.at("values", step).index_add_(2, own.of_samples(samples), own.of_parts(values))

    def add(self, name: str, step: int, values: Float[Tensor, "n K G"]) -> None:
        """Add a step's contribution of weight decay ("decay"), of its "unexplained" part, or of a source."""
        for own in self.grouped:
            own.at(name, step).add_(own.of_parts(values))

    def add_change(self, values: Float[Tensor, "n K"]) -> None:
        """Count the contribution of a whole step of the weights: the sum of all terms except the statistics."""
        self._of_steps += values.abs()

    def add_statistics(
        self, step: int, total: Float[Tensor, "n K"], of_samples: tuple[Tensor, Float[Tensor, "n K B"]] | None
    ) -> None:
        """Add the contribution of the moving statistics in a step.

        Args:
            step: The step.
            total: The whole contribution.
            of_samples: Samples of its batches, (B,), repeated as they occur, and their contributions; None if it is not
                split.
        """
        for own in self.grouped:
            if not own.splits_samples:
                own.at("statistics", step)[:, :, 0] += total
                continue
            rest = total
            if of_samples is not None:
                samples, values = of_samples
                if self._has_outside:
                    samples, values = samples[samples >= 0], values[:, :, (samples >= 0).to(values.device)]
                own.at("statistics", step).index_add_(2, own.of_samples(samples), values)
                rest = total - values.sum(dim=2)
            own.at("statistics_of_no_sample", step).add_(rest)


def leaves_residuals(block: Predictions) -> bool:
    """Return whether steps may differ from the update rule's on exact gradients by more than float64's rounding."""
    dtype = coarsest_dtype(block.recorded, block.net.model.spec.dtype)
    return dtype != torch.float64 or has_coarse_steps(block.recorded)


def layers_of(block: Predictions, parts: Int64[Tensor, " L"]) -> list[list[int]] | None:
    """Return the layers of each part of the network; None if a layer's Jacobian belongs to several.

    Args:
        block: The predictions.
        parts: The part to which each of L parameters belongs.
    """
    model, plan = block.net.model, block.net.plan
    part = dict(zip(model.names, parts.tolist(), strict=True))
    layers: list[Sequence[str | None]] = [*plan.bias_of.items(), *([plan.dense_params] if plan.dense_params else [])]
    layers = [model.names] if block.cost.all_dense else layers
    owners = [{part[name] for name in names if name is not None} for names in layers]
    if any(len(own) > 1 for own in owners):
        return None
    return [[layer for layer, own in enumerate(owners) if own == {number}] for number in range(int(parts.max()) + 1)]


def is_plain_descent(block: Predictions, groupings: Groupings) -> bool:
    """Return whether contributions can be computed from layers' factors: for plain steps, along steps or chords.

    In less than float64, the difference between a step and its integral belongs to no part of the network. A layerwise
    average is measured on dense gradients.

    Args:
        block: The predictions.
        groupings: The axes of each result.
    """
    trajectory, parts = block.trajectory, parameter_parts(groupings, len(block.net.model.names))
    if layers_of(block, parts) is None or (parts.any() and leaves_residuals(block)):
        return False
    is_plain = trajectory.is_vanilla_gd and trajectory.loss_takes_outputs and trajectory.unexplained is None
    return is_plain and not block.is_layerwise and recomputation_of(trajectory) is None


@dataclass(frozen=True, eq=False)
class PathWork(RunWork):
    """A sum along a path of the weights, in pieces: a block of points, and a range of steps.

    Attributes:
        kernel: The run's path kernel: trajectory, head, and quadrature rule.
        X: All inputs.
        memory_budget: Bytes for the computation.
    """

    kernel: PathKernel
    X: Shaped[Tensor, "n ..."]
    memory_budget: int

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.kernel.trajectory, self.X

    @property
    def ranges(self) -> list[slice]:
        """The steps of each range that is summed separately: all of them by default."""
        return [slice(0, self.kernel.trajectory.num_steps)]

    @cached_property
    def num_stretches(self) -> int:
        """Number of stretches of the path, which share the rule's tolerance."""
        return len(stretches_of(self.kernel.path, self.kernel.trajectory.num_steps))

    def pieces_of(self, name: str, num_blocks: int) -> list[Piece]:
        """List the pieces, block by block."""
        steps, ranges = self.kernel.trajectory.num_steps, self.ranges
        return [p for k in range(num_blocks) for p in pieces_of_ranges(f"{name}-{k}", (k,), ranges, steps)]

    def fingerprint_with(self, *others: object) -> str:
        """Return a fingerprint of the summed terms, and of everything else on which the sums depend."""
        kernel, path = self.kernel, path_identity(self.kernel.path)
        asked = kernel.trajectory.digest, kernel.head, kernel.rule, self.memory_budget, self.X
        return fingerprint(*asked, *others, *path)


@dataclass(frozen=True, eq=False)
class AttributionWork(PathWork):
    """A pass over the run that adds up all terms.

    Attributes:
        classes: One output per input, or None for all.
        groupings: The axes of each result.
        splits_statistics: Whether to split the contribution of the moving statistics over the samples.
        outputs_per_row: Number of outputs of a row of the sums; a row is a point, or an output of a point.
        rows_per_block: Number of rows that go through the run together.
    """

    classes: Int64[Tensor, " n"] | None
    groupings: Groupings
    splits_statistics: bool
    outputs_per_row: int
    rows_per_block: int
    keeps_residuals: ClassVar[bool]

    @abstractmethod
    def terms(
        self, block: Predictions, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, dict[str, Tensor]]]:
        """Go through a range of steps, and add every term to the totals.

        Args:
            block: The predictions of a block.
            totals: Their sums.
            number: Number of the range.
            sums: The results of an earlier, interrupted call for it.

        Yields:
            Points at which sums could be saved: a new integral, the number of steps, and the state for the remaining
            steps.
        """

    @cached_property
    def whole(self) -> Predictions:
        """The predictions."""
        kernel = self.kernel
        asked = self.net, kernel.trajectory, kernel.head, kernel.rule, kernel.path, self.memory_budget
        return Predictions(*asked, self.X, self.classes, self.recorded_net)

    @cached_property
    def parts(self) -> Int64[Tensor, " L"]:
        """The part of the network of each parameter; parameters that no grouping separates form one part."""
        return parameter_parts(self.groupings, len(self.kernel.trajectory.model.names))

    @cached_property
    def residuals(self) -> StepResiduals:
        """The differences between the recorded and the replayed steps; the run is replayed."""
        whole, keeps_all = self.whole, leaves_residuals(self.whole)
        most = weight_rows(self.memory_budget, whole.net.itemsize, whole.net.model.num_weights)
        net = whole.recorded_net
        run = RunReplay(whole.recorded, net.model, whole.X, net.memory_plan(self.memory_budget))
        return StepResiduals(run, most, keeps=self.keeps_residuals, keeps_all=keeps_all)

    @property
    def num_rows(self) -> int:
        """Number of rows of the sums."""
        return len(self.X) * self.whole.num_outputs // self.outputs_per_row

    @cached_property
    def blocks(self) -> list[Int64[Tensor, " rows"]]:
        """The rows of each block."""
        return list(torch.arange(self.num_rows, device=self.X.device).split(self.rows_per_block))

    def as_rows(self, f: Float[Tensor, "n K"]) -> Float[Tensor, "N R"]:
        """Arrange outputs of all points like the sums."""
        return f.reshape(-1, self.outputs_per_row)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The pieces, block by block."""
        shape = fingerprint(self.plan, type(self).__name__, self.outputs_per_row, self.rows_per_block, "by point")
        return self.pieces_of(f"sums-{shape}", len(self.blocks))

    @property
    def piece_bytes(self) -> int:
        """Bytes of the sums of a block."""
        return self.num_bytes(min(self.num_rows, self.rows_per_block))

    def totals(self, reference: Float[Tensor, "R K"], rows: Int64[Tensor, " R"]) -> TermSums:
        """Return zero sums of some rows, on the device and in the dtype of a tensor."""
        return TermSums(self.whole.recorded, self.groupings, reference)

    def summed(self, options: ComputeOptions, title: str) -> tuple[Tensor, Tensor, TermSums, Sums]:
        """Carry out all pieces: return the outputs at both ends, the sums of all rows, and the other results joined."""
        initial, network = map(self.whole.select_outputs, self.kernel.end_outputs(self.X))
        totals, rest = self.totals(self.as_rows(initial), torch.arange(self.num_rows)), Sums()
        for piece, sums in run(self, options, title):
            for name, total in totals.named.items():
                total[self.blocks[piece.place[0]]] += sums.added.pop(name)
            rest.merge(sums)
        return initial, network, totals, rest

    def num_bytes(self, num_rows: int) -> int:
        """Count the bytes of the sums of some rows."""
        like = self.whole.zeros(0).new_empty(num_rows, self.outputs_per_row, device="meta")
        return sum(total.nbytes for total in self.totals(like, torch.arange(num_rows)).named.values())

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        groups = [axis.group for axes in self.groupings for axis in axes]
        names = [[(axis.kind, axis.names) for axis in axes] for axes in self.groupings]
        return self.fingerprint_with(self.classes, *groups, names, self.splits_statistics)

    def block(self, number: int) -> Predictions:
        """Return the predictions of a block."""
        whole, rows = self.whole, self.blocks[number]
        if self.outputs_per_row < whole.num_outputs:
            points, classes = rows // whole.num_outputs, rows % whole.num_outputs
            return replace(whole, X=self.X[points], classes=classes)
        return replace(whole, X=self.X[rows], classes=None if self.classes is None else self.classes[rows])

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Sum the terms of a range of steps at the points of a block."""
        block = self.block(place[0])
        totals = self.totals(block.zeros(len(block.X), self.outputs_per_row), self.blocks[place[0]])
        sums = Sums(totals.named, saved.largest, saved.carried, saved.steps)
        for name, value in saved.added.items():
            sums.added[name] = sums.added[name].copy_(value) if name in sums.added else value
        yield sums
        for integral, num_steps, carried in self.terms(block, totals, place[1], sums):
            if integral is not None:
                sums.merge(integral_sums(integral, self.kernel.rule, self.num_stretches))
            sums.carried, sums.steps = carried, sums.steps + num_steps
            yield sums
