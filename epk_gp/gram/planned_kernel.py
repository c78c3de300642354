"""A run during its evaluation along its path, and its path kernel: network with plan, states, lines, layer Jacobians.

Training copies are evaluated at the start of each step, test copies at the nodes of the path.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel, WeightSegment, all_outputs
from epk_gp.autodiff.jacobians import (
    WeightLocation,
    joined_jacobians,
    layer_jacobians,
    layer_jacobians_blocked,
)
from epk_gp.autodiff.moved_weights import equal_groups
from epk_gp.autodiff.representations import ContractionCost, LayerJacobian, LeftFactor, NodeWeights, concat_rows
from epk_gp.core.checks import ComputeOptions
from epk_gp.core.losses import Head
from epk_gp.core.plans import MAX_STEP_BATCH, MemoryPlan
from epk_gp.core.show import warn_uncertified
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.gram.accumulator import NodeBatch
from epk_gp.quadrature import rules
from epk_gp.quadrature.adaptive import Integral, integrate, union_mesh
from epk_gp.storage.chunks import StoredStates
from epk_gp.work.run import Sums

_AHEAD = 2  # states read ahead: the two of the next step; a choice, other numbers were not timed

Steps = list[tuple[int, float]]  # (s, eta_s)
Averages = dict[int, LeftFactor]  # by number of the layer

# Number of steps whose products are taken at once: fewer gain nothing. And their products, which stay in the cache:
# choices.
_FEW_STEPS, MOST_STEPS, _PRODUCTS = 4, 64, 1 << 19


def warn_of_integrals(sums: Sums) -> None:
    """Emit one `CertificateWarning` if integrals of an adaptive rule differ from the change of the outputs.

    Gram blocks have no certificate of their own: their nodes are those on which the rule integrated the outputs.
    """
    if "integrals" not in sums.added:
        return
    counts, residuals = sums.added["integrals"].tolist(), sums.largest["residuals"].tolist()
    found = [status for status in rules.QuadratureStatus if counts[status] and not status.is_supported]
    if found:
        reasons = ", ".join(f"{counts[status]} {status.name}" for status in found)
        warn_uncertified(
            f"the adaptive rule must integrate the outputs' change over each step: {sum(counts[s] for s in found)} "
            f"of {sum(counts)} integrals of a point over a step did not ({reasons}; largest residual "
            f"{max(residuals[status] for status in found):.2g}), so that nodes, and kernel values, are not exact. See "
            "QuadratureStatus, and epk_gp.reconstruct for the certificate."
        )


class StateReader:
    """Flat weights of a run, followed by its moving statistics, for a pass over its steps.

    A separate thread reads states that are on disk, or that go to another device, two states ahead in the direction of
    the pass.

    Args:
        trajectory: The run.
        reference: Tensor that sets dtype and device.
    """

    def __init__(self, trajectory: Trajectory, reference: Float[Tensor, "..."]) -> None:
        self.trajectory, self.reference = trajectory, reference
        reads = isinstance(trajectory.states, StoredStates) or reference.device != trajectory.device
        self._reader = ThreadPoolExecutor(1) if reads else None
        self._stream = torch.cuda.current_stream(reference.device) if reference.is_cuda else None
        self._requested, self._step = dict[int, Future[Tensor] | Tensor](), 1

    @property
    def lowest(self) -> int:
        """The first state that is held; 0 if none is."""
        return min(self._requested, default=0)

    def get(self, state: int, keep: int = 1) -> Float[Tensor, " PQ"]:
        """Return a state.

        Args:
            state: s in 0 .. S.
            keep: Number of states, before it in the direction of the pass, that may be requested again.
        """
        if self._requested and not self.lowest <= state <= max(self._requested):
            self._step = -1 if state < self.lowest else 1
        last = min(max(state + self._step * (_AHEAD if self._reader else 0), 0), self.trajectory.num_steps)
        for number in range(state, last + self._step, self._step):
            if number not in self._requested:
                self._requested[number] = (
                    self._reader.submit(self._fetch, number) if self._reader else self._fetch(number)
                )
        for number in [number for number in self._requested if (number - state) * self._step < -keep]:
            del self._requested[number]
        found = self._requested[state]
        return found if isinstance(found, Tensor) else found.result()

    def _fetch(self, state: int) -> Tensor:
        """Read a state; copy it to a GPU after the work that is queued there, without waiting for it."""
        if self._stream is None or self.trajectory.device.type != "cpu":
            return flat_state(self.trajectory, state, self.reference)
        row = flat_state(self.trajectory, state, self.reference.new_empty(0, device="cpu"))
        with torch.cuda.stream(self._stream):
            return row.pin_memory().to(self.reference.device, non_blocking=True)


@dataclass(eq=False)
class Evaluation:
    """A run whose network is evaluated along its path; each thread has its own.

    Attributes:
        net: The network in the computation's dtype and on its device, with its plan.
        trajectory: The run; for a question, the run with the network that answers it (`autodiff.scalars`).
        head: Whether f is the logits or their log-softmax.
        rule: Quadrature rule.
        path: The path along which test copies move.
        memory_budget: Bytes for the computation.
    """

    net: PlannedModel
    trajectory: Trajectory
    head: Head
    rule: rules.Rule
    path: rules.WeightPath
    memory_budget: int

    def __reduce__(self) -> tuple[type["Evaluation"], tuple[Any, ...]]:
        """Return the pickled form, without data of a thread."""
        return type(self), tuple(getattr(self, entry.name) for entry in fields(self) if entry.init)

    @cached_property
    def reference(self) -> Float[Tensor, " 0"]:
        """An empty tensor of the computation's dtype and device."""
        return torch.empty(0, dtype=self.net.model.spec.dtype, device=self.net.model.spec.device)

    @cached_property
    def memory(self) -> MemoryPlan:
        """The memory plan, which turns the budget into block sizes."""
        return self.net.memory_plan(self.memory_budget)

    @cached_property
    def states(self) -> StateReader:
        """Reads the states of the path ahead of their use."""
        return StateReader(self.trajectory, self.reference)

    @cached_property
    def num_stretches(self) -> int:
        """Number of stretches of the path, which share the rule's tolerance."""
        return len(rules.stretches_of(self.path, self.trajectory.num_steps))

    def stretch(self, s: int) -> range:
        """Return the steps of the path's stretch that contains a step."""
        return rules.stretch_of(self.path, s, self.trajectory.num_steps)

    def integrate(self, stretches: Sequence[range], X: Shaped[Tensor, "n ..."]) -> tuple[WeightSegment, Integral]:
        """Integrate the outputs over stretches of the path together; return the lines and each pair's integrals."""
        keep = 1 + stretches[-1].stop - stretches[0].start
        numbers = sorted({s for own in stretches for s in (own.start, own.stop)})
        if numbers[-1] <= self.states.lowest:  # a backward pass over the steps
            numbers.reverse()
        states = {s: self.states.get(s, keep) for s in numbers}
        starts, ends = ([states[s] for s in own] for own in zip(*((r.start, r.stop) for r in stretches), strict=True))
        w, end = (own[0] if len(own) == 1 else torch.stack(own) for own in (starts, ends))
        d = end - w
        lines = WeightSegment(self.net, w, d, self.head, self.memory_budget)
        return lines, integrate(lines, X, self.rule, self.num_stretches)


@dataclass(eq=False)
class PlannedKernel(Evaluation):
    """A path kernel during its evaluation: each thread has its own.

    Attributes:
        step_weights: eta_s of each of the S steps.
        options: Options of the computation.
        is_per_class: Whether only pairs of equal classes are computed.
        is_traced: Whether only the sum over pairs of equal classes is computed; `is_per_class` is then also true.
        integrations: Number of integrals of an adaptive rule with each status, and their largest residuals, since they
            were last taken.
    """

    step_weights: tuple[float, ...]
    options: ComputeOptions
    is_per_class: bool = False
    is_traced: bool = False
    integrations: Sums = field(init=False, default_factory=Sums)

    def take_integrations(self) -> Sums:
        """Return the counts of integrals, and reset them."""
        found, self.integrations = self.integrations, Sums()
        return found

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which ranges of steps are summed."""
        return self.options.accumulate or self.reference.dtype

    @property
    def num_output_pairs(self) -> int:
        """Number of pairs of outputs whose products are computed."""
        return self.trajectory.num_outputs ** (1 if self.is_per_class else 2)

    @property
    def num_sums(self) -> int:
        """Number of entries in the block for each pair of points: pairs of outputs, or one if they are summed."""
        return 1 if self.is_traced else self.num_output_pairs

    def block_shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Return the shape of a class-major block: (K, N, K, M), or (K, N, M) for equal classes, K = 1 if summed."""
        K = 1 if self.is_traced else self.trajectory.num_outputs
        return (K, num_rows, num_columns) if self.is_per_class else (K, num_rows, K, num_columns)

    @cached_property
    def steps(self) -> Steps:
        """The steps with a positive weight."""
        return [(s, eta) for s, eta in enumerate(self.step_weights) if eta > 0]

    def stretches(self, steps: Steps) -> list[tuple[int, Steps]]:
        """Group such steps, in order, by their stretch, which is named by its first step."""
        return [(first, list(own)) for first, own in groupby(steps, key=lambda entry: self.stretch(entry[0]).start)]

    def cost(self, num_contractions: int | None = None) -> ContractionCost:
        """Return the cost model that picks each layer's representation.

        Args:
            num_contractions: Products per step if no factor can be averaged; by default those of the rule, as between
                copies of one kind. Along chords dense gradients are computed once: 1.
        """
        is_adaptive = isinstance(self.rule, rules.AdaptiveRule)
        return ContractionCost(
            num_output_pairs=self.num_output_pairs,
            num_contractions=num_contractions or self.rule.num_contractions,
            cotangents_are_constant=self.head == "logits",
            all_dense=is_adaptive and not self.net.plan.supports_interpolation,
        )

    @property
    def mixed_cost(self) -> ContractionCost:
        """The cost model between test and training copies: all steps of a chord share one test side."""
        return self.cost(self.rule.num_contractions * min(self.path.every, max(1, self.trajectory.num_steps)))

    @property
    def tile_points(self) -> int:
        """Number of points on each side of a tile."""
        return self.memory.tile_points(self.num_sums, self.feature_bytes)

    @property
    def feature_bytes(self) -> int:
        """Bytes of the layer Jacobians of one point, measured once for each way of computing them."""
        net, measured = self.net, self.net.model.cache.feature_bytes
        keys = [(self.head, cost, tuple(net.plan.bias_of), net.model.spec) for cost in (self.cost(), self.mixed_cost)]
        for key in keys:
            if key not in measured:
                X = net.model.spec.cast(self.trajectory.inputs[:1])
                measured[key] = sum(jacobian.nbytes for jacobian in next(self.jacobians([(0, 0.0)], X, key[1])))
        return max(measured[key] for key in keys)

    def batch_size(self, num_jacobians: int) -> int:
        """Count the steps or nodes that are added together; an adaptive rule takes one at a time."""
        if isinstance(self.rule, rules.AdaptiveRule):
            return 1
        return self.memory.steps_per_batch(num_jacobians * self.feature_bytes)

    def step_batches(self, steps: Steps, num_points: int, *, are_training: bool) -> Iterator[Steps]:
        """Split steps into batches whose layer Jacobians fit into the budget together; chords stay whole.

        Args:
            steps: The steps.
            num_points: Number of points of the larger side.
            are_training: Whether all points are training copies, which do not move along chords.
        """
        size, groups = self.batch_size(num_points * (self.rule.num_contractions + 2)), [[step] for step in steps]
        if not are_training and self.path.every > 1:
            size = max(1, min(size, MAX_STEP_BATCH // self.path.every))
            groups = [own for _, own in self.stretches(steps)]
        for first in range(0, len(groups), size):
            yield [step for own in groups[first : first + size] for step in own]

    def jacobians(
        self, nodes: list[tuple[int, float]], X: Shaped[Tensor, "n ..."], cost: ContractionCost | None = None
    ) -> Iterator[list[LayerJacobian]]:
        """Compute layer Jacobians at nodes (s, t): the fraction t of the line from w_s to the end of its stretch.

        Args:
            nodes: Steps s and positions t, in the order of the steps. A stretch of the path is named by its first step;
                training copies have t = 0.
            X: n inputs.
            cost: Decides the representations; `cost()` by default.
        """
        for count, jacobians in self.joined_jacobians(nodes, X, cost or self.cost()):
            rows = [slice(k * len(X), (k + 1) * len(X)) for k in range(count)]
            yield from ([jacobian.rows(own) for jacobian in jacobians] if count > 1 else jacobians for own in rows)

    def steps_together(self, num_left: int, num_right: int) -> int:
        """Count the steps whose products are taken at once, between test and training copies; 1 for large tiles."""
        products = self.num_output_pairs * num_left * num_right * self.rule.num_contractions
        rows = max(num_left * self.rule.num_contractions, num_right)
        if self.path.every > 1 or self.cost().all_dense:
            return 1
        count = min(MOST_STEPS, _PRODUCTS // products, self.memory.lines_together(rows, self.trajectory.num_outputs, 0))
        return count if count >= _FEW_STEPS else 1

    def joined_jacobians(
        self, nodes: list[tuple[int, float]], X: Shaped[Tensor, "n ..."], cost: ContractionCost
    ) -> Iterator[tuple[int, list[LayerJacobian]]]:
        """Compute layer Jacobians at nodes as in `jacobians`: the rows of some nodes at a time, node by node."""
        steps = [s for s, _ in nodes]
        keep = 1 + max(steps, default=0) - min(steps, default=0)
        weights = (self._weights_at(s, t, keep) for s, t in nodes)
        return joined_jacobians(self.net, weights, X, self.head, cost, self.memory)

    def jacobians_together(
        self, nodes: list[tuple[int, float]], X: Shaped[Tensor, "n ..."], cost: ContractionCost
    ) -> list[LayerJacobian]:
        """Compute layer Jacobians at nodes: the rows of all of them."""
        return concat_rows([*map(itemgetter(1), self.joined_jacobians(nodes, X, cost))])

    def nodes_together(self, steps: list[int], X: Shaped[Tensor, "n ..."], cost: ContractionCost) -> NodeBatch:
        """Evaluate test copies at all nodes of T steps, equally many each: point t N + n is point n at step t."""
        N, T = len(X), len(steps)
        if isinstance(self.rule, rules.QuadratureRule):
            jacobians = self.jacobians_together([(s, t) for s in steps for t in self.rule.nodes], X, cost)
            weights = self.reference.new_tensor(self.rule.weights).repeat_interleave(N).repeat(T)
            pair = torch.arange(T * N, device=X.device).view(T, 1, N).expand(-1, len(self.rule), -1).flatten()
            return NodeBatch(jacobians, NodeWeights(weights, pair, T * N))
        lines, integral = self._integrate(steps, X)
        parts, places, count = list[list[LayerJacobian]](), torch.zeros_like(integral.point), 0
        for part, rows, first in lines.passes(integral.point // N, self.memory.directional_rows()):
            at = WeightLocation(part.w, part.d, integral.t[rows])
            parts.append(layer_jacobians(self.net, at, X[integral.point[rows] % N], all_outputs(self.head), cost))
            places[rows[first]], count = first + count, count + len(rows)
        rows, is_first = (own.flatten() for own in equal_groups(integral.point // N, torch.arange(T, device=X.device)))
        jacobians = [jacobian.rows(places[rows]) for jacobian in concat_rows(parts)]
        return NodeBatch(jacobians, NodeWeights(integral.weight[rows] * is_first, integral.point[rows], T * N))

    def _weights_at(self, s: int, t: float, keep: int) -> Float[Tensor, " PQ"]:
        start = self.states.get(s, keep)
        if t == 0:
            return start
        stretch = self.stretch(s)
        return torch.lerp(start, self.states.get(stretch.stop, keep + len(stretch)), t)

    def node_batches(
        self, steps: list[int], X: Shaped[Tensor, "n ..."], cost: ContractionCost
    ) -> Iterator[Iterator[NodeBatch]]:
        """Evaluate test copies at the nodes of each stretch of the path, either common nodes or each point's own.

        Args:
            steps: The first step of each stretch.
            X: n inputs.
            cost: Decides the representations.
        """
        if isinstance(self.rule, rules.AdaptiveRule):
            for s in steps:
                yield self._point_nodes(s, X, cost)
            return
        jacobians = self.jacobians([(s, t) for s in steps for t, _ in self.rule], X, cost)
        weights = [NodeWeights(weight, None, len(X)) for _, weight in self.rule]
        for _ in steps:
            yield map(NodeBatch, islice(jacobians, len(weights)), weights)

    def _point_nodes(self, s: int, X: Tensor, cost: ContractionCost) -> Iterator[NodeBatch]:
        segment, integral = self._integrate([s], X)
        for rows in torch.arange(len(integral.point), device=X.device).split(len(X)):
            points = integral.point[rows]
            at = WeightLocation(segment.w, segment.d, integral.t[rows])
            jacobians = layer_jacobians_blocked(self.net, at, X[points], self.head, cost)
            yield NodeBatch(jacobians, NodeWeights(integral.weight[rows], points, len(X)))

    def shared_nodes(
        self, steps: Steps, X: Shaped[Tensor, "n ..."], *, are_training: bool
    ) -> list[tuple[int, float, float]]:
        """List the nodes (s, t) that copies of one kind share, with the weights of their products.

        Training copies are at the start of each step; test copies are at nodes, given with the first step of their
        stretch.

        Args:
            steps: (s, eta_s) of each step.
            X: The points, at which an adaptive rule chooses its nodes.
            are_training: Whether they are training copies.
        """
        if are_training:
            return [(s, 0.0, eta) for s, eta in steps]
        nodes = []
        for first, own in self.stretches(steps):
            if isinstance(self.rule, rules.QuadratureRule):
                of_stretch = list(self.rule)
            else:
                of_stretch = union_mesh(self._integrate([first], X)[1], self.rule)
            nodes += [(first, t, sum(eta for _, eta in own) * weight) for t, weight in of_stretch]
        return nodes

    def _integrate(self, steps: list[int], X: Tensor) -> tuple[WeightSegment, Integral]:
        """Integrate the outputs over the stretches of some steps, and count the integrals on the device."""
        lines, integral = self.integrate([self.stretch(s) for s in steps], X)
        has_it = integral.status[:, None] == torch.arange(len(rules.QuadratureStatus), device=integral.status.device)
        residuals = (integral.residual[:, None] * has_it).nan_to_num(0.0).amax(dim=0)
        self.integrations.merge(Sums({"integrals": has_it.sum(dim=0)}, {"residuals": residuals.double()}))
        return lines, integral
