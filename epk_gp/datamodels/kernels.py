"""The path kernel of a run's loss: inner products of gradients at some states, in the metric of the steps there.

    K_l = J_l H_l J_l^T      rows of J_l: gradients of the coordinates of training samples, and of the questions

H_l has one number per weight. Its square root enters the layer Jacobians: exactly for dense gradients, and for the two
factors of an outer product by (row means)(column means) / mean of 1 / H.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, all_outputs, chosen_outputs, flat_columns
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import (
    ContractionCost,
    DenseJacobian,
    LayerJacobian,
    OuterProductJacobian,
    append_bias_column,
    concat_rows,
)
from epk_gp.autodiff.scalars import RowFunction
from epk_gp.core.losses import Head, apply_head
from epk_gp.core.plans import empty_huge_pages, rows_per_pass
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, flat_state, outputs_at
from epk_gp.datamodels.coordinates import Coordinates, PseudoLabels, log_odds, log_odds_cotangents
from epk_gp.datamodels.nodes import PathNodes
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.work.run import Piece, Place, RunWork, Sums


@dataclass(frozen=True, eq=False)
class Questions:
    """The requested numbers: one number for each of n inputs, or K.

    Attributes:
        run: The run whose network gives the numbers (`autodiff.scalars`).
        X: The inputs.
        classes: The class of each input whose log-odds or output is requested; None for all K outputs.
        head: Head of the outputs; None for log-odds.
    """

    run: Trajectory
    X: Shaped[Tensor, "n ..."]
    classes: Int64[Tensor, " n"] | None
    head: Head | None

    @property
    def per_input(self) -> int:
        """Number K of numbers per input."""
        return self.run.num_outputs if self.classes is None else 1

    def cotangents(self, rows: slice) -> Cotangents:
        """Return the derivatives of the numbers of some inputs in the network's outputs."""
        if self.classes is None:
            return Cotangents(all_outputs(self.head or "logits").of_logits)
        own = self.classes[rows]
        return log_odds_cotangents(own) if self.head is None else chosen_outputs(self.head, own)

    def numbers(self, z: Float[Tensor, "n C"]) -> Float[Tensor, " nK"]:
        """Return the numbers of all inputs, input by input, from the logits of the network."""
        if self.classes is None:
            return apply_head(z, self.head or "logits").flatten()
        own = self.classes.to(z.device)
        return log_odds(z, own) if self.head is None else apply_head(z, self.head).gather(1, own[:, None])[:, 0]

    def values(self, state: int) -> Float[Tensor, " nK"]:
        """Return the numbers of the network of a state."""
        return self.numbers(outputs_at(self.run, self.X, state, "logits"))

    @property
    def kind(self) -> str:
        """The word for a number."""
        return "number" if self.run.asked_of is not None else "output" if self.head is not None else "log-odds"

    @property
    def as_function(self) -> RowFunction | None:
        """The log-odds as a function for `influence`; None if outputs or numbers are requested."""
        return None if self.head is not None or self.classes is None else RowFunction(log_odds, self.classes)


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelWork(RunWork):
    """The kernels at all nodes of a run; a piece is one node.

    Attributes:
        nodes: The nodes.
        first: The first node whose kernel is computed.
        groups: Pieces: neighbouring nodes share one kernel, the sum of theirs.
        trained: The run whose network gives the coordinates.
        coordinates: The coordinates of the training samples, K' for each of M.
        questions: The requested numbers.
        is_exact: Whether the metric enters outer products exactly, which makes them dense.
        memory_budget: Bytes for the computation.
    """

    nodes: PathNodes
    first: int = 0
    groups: int = 1
    trained: Trajectory
    coordinates: Coordinates | PseudoLabels
    questions: Questions
    is_exact: bool
    memory_budget: int

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and its questions."""
        return self.questions.run, self.questions.X

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a kernel: training coordinates followed by questions, and training coordinates."""
        columns = self.coordinates.per_sample * self.nodes.run.num_points
        return columns + len(self.questions.X) * self.questions.per_input, columns

    @property
    def pieces(self) -> list[Piece]:
        """The groups of nodes."""
        return [Piece(f"{self.named('kernel')}-{number}", (number,)) for number in range(self.groups)]

    @property
    def num_nodes(self) -> int:
        """Number of nodes whose kernels are computed."""
        return len(self.nodes.steps) - self.first

    @property
    def piece_bytes(self) -> int:
        """Bytes of a kernel."""
        return self.net.itemsize * self.shape[0] * self.shape[1]

    def identity(self) -> str:
        """Return a fingerprint of everything on which the kernels depend."""
        asked, run = self.questions, self.nodes.run
        sizes = self.is_exact, self.memory_budget, self.coordinates.per_sample, self.groups
        return fingerprint("datamodel", run.digest, asked.run.digest, asked.X, asked.classes, asked.head, *sizes)

    @cached_property
    def trained_net(self) -> PlannedModel:
        """The network of the training side, with its plan."""
        return PlannedModel(self.trained.model_for(self.inputs), self.recorded_plan or self.plan)

    @cached_property
    def inputs(self) -> Shaped[Tensor, "M ..."]:
        """Inputs of the training side."""
        return self.net.model.spec.cast(self.trained.inputs)

    @cached_property
    def cost(self) -> ContractionCost:
        """The cost model that picks the representations of layers, the same on both sides."""
        plans = [(net.plan.bias_of, net.plan.dense_params) for net in (self.net, self.trained_net)]
        return ContractionCost(self.coordinates.per_sample**2, 1, all_dense=plans[0] != plans[1])

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Sum the kernels of a group, and yield each one's mean diagonal and the coordinates of the samples there."""
        numbers = [k for k in range(self.num_nodes) if k * self.groups // self.num_nodes == place[0]]
        total, along, traces = Sums(steps=1), list[Tensor](), list[Tensor]()
        for number in numbers:
            side = _NodeSide(self, self.first + number)
            total.added["kernel"] = self._add(side, total.added.get("kernel"))
            traces.append(total.added["kernel"].diagonal().mean())
            along.append(self.coordinates.of(side.outputs))
        diagonals = torch.stack(traces).diff(prepend=torch.zeros_like(traces[0])[None])
        total.added |= {"coordinates": torch.stack(along), "diagonals": diagonals}
        yield total

    def _add(self, side: "_NodeSide", kernel: Float[Tensor, "NQ N"] | None) -> Float[Tensor, "NQ N"]:
        """Add the kernel at a node to a sum, which is created if it is None."""
        (rows, columns), M, n = self.shape, self.nodes.run.num_points, len(self.questions.X)
        K, per_input = self.coordinates.per_sample, self.questions.per_input
        kernel = empty_huge_pages((rows, columns), side.weights).zero_() if kernel is None else kernel
        of_train, of_questions = kernel[:columns].view(K, M, K, M), kernel[columns:].view(n, per_input, K, M)
        tiles, asked = (_tiles(count, side.tile_points) for count in (M, n))
        for number, own in enumerate(tiles):
            right = side.train(own)
            for others in tiles[number:]:
                left = right if others == own else side.train(others)
                block = _products(left, right, is_symmetric=others == own)
                of_train[:, others, :, own] += block
                if others != own:
                    of_train[:, own, :, others] += block.permute(2, 3, 0, 1)
            for others in asked:
                of_questions[others][..., own] += _products(side.asked(others), right).transpose(0, 1)
        return kernel


class _NodeSide:
    """Layer Jacobians at a node, including the square root of the metric."""

    def __init__(self, work: KernelWork, node: int) -> None:
        self.work, net = work, work.trained_net
        self.weights = flat_state(work.nodes.run, work.nodes.steps[node], work.questions.X)
        H = work.nodes.metric(node, self.weights)
        self._metric = H[flat_columns(net, all_dense=work.cost.all_dense).to(H.device)]
        with torch.no_grad():
            params, parts = net.model.unflatten(self.weights), work.inputs.split(rows_per_pass(net.plan, net.itemsize))
            self.outputs = torch.cat([net.model(params, part) for part in parts])
        self._coordinates = work.coordinates.at(self.outputs, node)

    @cached_property
    def tile_points(self) -> int:
        """Number of points on each side of a tile: an eighth of the budget for Jacobians, one for sums of products."""
        budget, K = self.work.memory_budget // 8, self.work.coordinates.per_sample
        by_jacobians = budget // sum(jacobian.nbytes for jacobian in self.train(slice(0, 1)))
        return max(1, min(by_jacobians, math.isqrt(budget // (3 * self.work.net.itemsize)) // K))

    def train(self, rows: slice) -> list[LayerJacobian]:
        """Return the layer Jacobians of the coordinates of training samples."""
        return self._weighted(self.work.trained_net, self.work.inputs, self._coordinates, rows)

    def asked(self, rows: slice) -> list[LayerJacobian]:
        """Return the layer Jacobians of the questions."""
        return self._weighted(self.work.net, self.work.questions.X, self.work.questions, rows)

    def _weighted(
        self, net: PlannedModel, X: Tensor, asked: Coordinates | PseudoLabels | Questions, rows: slice
    ) -> list[LayerJacobian]:
        K = asked.per_input if isinstance(asked, Questions) else asked.per_sample
        parts, size = list[list[LayerJacobian]](), rows_per_pass(net.plan, net.itemsize, K)
        for first in range(rows.start, rows.stop, size):
            some = slice(first, min(first + size, rows.stop))
            jacobians = layer_jacobians(
                net, WeightLocation(self.weights), X[some], asked.cotangents(some), self.work.cost
            )
            widths = [_num_weights(jacobian) for jacobian in jacobians]
            metric = zip(jacobians, self._metric.split(widths), strict=True)
            parts.append([weighted(jacobian, h, is_exact=self.work.is_exact) for jacobian, h in metric])
        return concat_rows(parts)


def _num_weights(jacobian: LayerJacobian) -> int:
    if isinstance(jacobian, OuterProductJacobian):
        return jacobian.output_grads.shape[3] * (jacobian.inputs.shape[2] + jacobian.has_bias)
    return jacobian.to_dense().shape[2]


def weighted(jacobian: LayerJacobian, h: Float[Tensor, " P"], *, is_exact: bool) -> LayerJacobian:
    """Return a layer's gradients times the square root of the metric of its weights.

    Args:
        jacobian: The gradients.
        h: The metric, in the order of dense gradients.
        is_exact: Whether to make outer products dense if their two factors cannot take the metric exactly.
    """
    if isinstance(jacobian, OuterProductJacobian) and (not is_exact or bool((h == h[0]).all())):
        inverse = (1 / h).masked_fill(h == 0, torch.nan).view(jacobian.output_grads.shape[3], -1)
        rows, columns = inverse.nanmean(dim=1).rsqrt(), (inverse.nanmean(dim=0) / inverse.nanmean()).rsqrt()
        rows, columns = (factor.nan_to_num(0.0) for factor in (rows, columns))  # for weights that do not move
        a = append_bias_column(jacobian.inputs) if jacobian.has_bias else jacobian.inputs
        return OuterProductJacobian(a * columns, jacobian.output_grads * rows, False, False, False)
    return DenseJacobian(jacobian.to_dense() * h.sqrt())


def _products(
    left: list[LayerJacobian], right: list[LayerJacobian], *, is_symmetric: bool = False
) -> Float[Tensor, "K n J m"]:
    sides = [
        own.output_grads if isinstance(own, OuterProductJacobian) else own.to_dense() for own in (left[0], right[0])
    ]
    shape = [size for side in sides for size in side.shape[:2]]
    total = GramAccumulator(tuple(shape), sides[0], is_symmetric=is_symmetric)
    for layer, (x, y) in enumerate(zip(left, right, strict=True)):
        x.add_inner(y, total, 1.0, layer=layer, same_points=False)
    return total.result()


def _tiles(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]
