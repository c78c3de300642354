"""The path kernel of a run's loss: inner products of gradients at some states, in the metric of the steps there.

    K_l = J_l H_l J_l^T      rows of J_l: gradients of the coordinates of training samples, and of the questions

Near step s the weights move by -H_s g for a gradient g that changes slowly, with one number per weight,

    H_s = grad_scale (lr + momentum_lr q_s),   q_s = beta q_{s-1} + one_minus_dampening,

from the recorded coefficients (`epk_gp.optimizers.update_rules`): eps / (sqrt(v) + delta) for Adam, and for SGD eps /
(1 - momentum) once its momentum has grown. A run of length T = sum_s eps_s is divided into parts of equal time, each
with the metric and the gradients of the state in its middle. The square root of H enters the layer Jacobians: exactly
for dense gradients, and for the two factors of an outer product by (row means)(column means) / mean of 1 / H.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn.functional import cosine_similarity

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
from epk_gp.core.losses import Head, apply_head, sample_weights
from epk_gp.core.plans import empty_huge_pages, rows_per_pass
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.step import Step, fingerprint
from epk_gp.core.trajectory import (
    Trajectory,
    flat_state,
    flat_weights,
    held_coefficients,
    outputs_at,
    step_coefficients,
)
from epk_gp.core.update_law import scaled_fields
from epk_gp.datamodels.training import Coordinates, PseudoLabels, log_odds, log_odds_cotangents
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.optimizers.update_rules import broadcast_to_params
from epk_gp.work.run import Piece, Place, RunWork, Sums

# Number of nodes of the path, and if six kernels do not fit. On halves of six runs (digits, Fashion-MNIST and KMNIST,
# two seeds), 3, 6, 12 and 24 nodes gave an LDS of .71, .72, .73 and .74.
NUM_STATES, FEW_STATES = 6, 3
# Rates per step above which no optimizer moves a weight whose gradient it has seen: about 3 for Adam, 10 for RMSprop,
# and ten times as many with momentum.
_MOST_RATES = 100


@dataclass(frozen=True, eq=False)
class PathNodes:
    """Some states of a run, each of which represents an equal part of its time.

    Attributes:
        run: The run.
        steps: The steps s that begin at these states.
        factors: The momentum's q_s at these steps, (L,) or (P,).
        times: Number of similar steps that each represents: sum of eps over the part, divided by eps_s.
        time: T, the sum of the learning rates of all steps.
        sample_weights: Mean weight of each sample's loss in the loss of a step, (M,): 1 / M for an even training.
    """

    run: Trajectory
    steps: tuple[int, ...]
    factors: tuple[Float64[Tensor, " _"], ...]
    times: tuple[float, ...]
    time: float
    sample_weights: Float64[Tensor, " M"]

    @property
    def scaled(self) -> list[bool]:
        """Whether a preconditioner scales each parameter."""
        return [bool(own) for own in scaled_fields(self.run.optimizer_groups, self.run.model.names)]

    @property
    def is_even(self) -> bool:
        """Whether all weights of a parameter have the same number, as for SGD."""
        L, updates = len(self.run.model.sizes), (held_coefficients(self.run, s) for s in self.steps)
        return not any(self.scaled) and all(len(v) == L for u in updates for v in (u.lr, u.momentum_lr, u.grad_scale))

    def metric(self, node: int, state: Float[Tensor, " PQ"]) -> Float[Tensor, " P"]:
        """Return the sum of H_s over the part of the run that a node represents.

        If a preconditioner has seen no gradient yet, it divides by almost zero, and H_s is huge: the gradient g of the
        whole loss would move the weight by more than 100 rates. Then H_s = eps_s / |g|, which moves it by one rate.

        Args:
            node: The node.
            state: The weights there, followed by moving statistics.

        Raises:
            ValueError: A step moves weights up the gradient, or skips some weights of a parameter.
        """
        run, s, sizes = self.run, self.steps[node], self.run.model.sizes
        update, reference = step_coefficients(run, s, state), state[: run.num_weights]
        scale, lr, momentum_lr, factor = (
            broadcast_to_params(value, sizes, reference)
            for value in (update.grad_scale, update.lr, update.momentum_lr, self.factors[node])
        )
        H = scale * (lr + momentum_lr * factor)
        rests = [own == 0 for own in (lr + momentum_lr * factor).split(list(sizes))]
        is_uneven = any(bool(own.any()) and not bool(own.all()) for own in rests)
        if not bool((H >= 0).all() & H.isfinite().all()) or is_uneven:
            raise ValueError(
                "a datamodel needs steps down the gradient, with a finite number >= 0 for each weight, of all weights "
                f"of a parameter: step {s} has others (maximize=True, a rate below 0, SparseAdam or Rprop)."
            )
        if any(scaled := self.scaled):
            step = Step(index=s, lr=0.0, batch=None, sample_weights=self.sample_weights)
            g, _ = RunReplay(run, run.model_for(state), state).gradient_at(step, state)
            moved = g.abs() / self.rate(node)  # times H, in rates
            is_scaled = torch.tensor(scaled, device=H.device).repeat_interleave(torch.tensor(sizes, device=H.device))
            H = torch.where(is_scaled & (H * moved > _MOST_RATES), 1 / moved, H)
        return H * self.times[node]

    def rate(self, node: int) -> float:
        """Return the rate of the step of a node: part of the time of the run divided by the number of such steps."""
        return self.time / (len(self.steps) * self.times[node])


def path_nodes(run: Trajectory, count: int = NUM_STATES) -> PathNodes:
    """Return this many nodes of a run's path.

    Raises:
        ValueError: The run is too short, or its steps do not have one number per weight.
    """
    S, rates = run.num_steps, torch.tensor([step.lr for step in run.steps], dtype=torch.float64)
    if S < NUM_STATES or not bool((rates >= 0).all()) or not float(rates.sum()) < float("inf"):
        raise ValueError(f"a datamodel needs {NUM_STATES} steps at least, with learning rates >= 0: got a run of {S}.")
    rates = rates if bool(rates.any()) else torch.ones_like(rates)  # if the first group rests, steps are equal
    time, ends = float(rates.sum()), rates.cumsum(0) * (1 + 1e-12)  # for a tie, the step that ends there
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) * time / count
    steps = torch.searchsorted(ends, middles).clamp(max=S - 1).tolist()
    factors = dict[int, Tensor]()
    factor = torch.zeros(len(run.model.sizes), dtype=torch.float64)
    reference = flat_weights(run, 0, run.states[0])
    fields = scaled_fields(run.optimizer_groups, run.model.names)
    is_held = not any({"beta", "one_minus_dampening"} & own for own in fields)
    for s in range(steps[-1] + 1):
        update = held_coefficients(run, s) if is_held else step_coefficients(run, s, reference)
        if update.has_matrices:
            raise ValueError(
                f"a datamodel needs steps with one number for each weight: those of {run.update_rule} have matrices, "
                "or two buffers. Ask epk_gp.attribute, or train on subsets in a loop of your own."
            )
        beta, share = update.beta.double().cpu(), update.one_minus_dampening.double().cpu()
        if len({len(beta), len(share), len(factor)}) > 1:
            wide = reference.double().cpu()
            beta, share, factor = (broadcast_to_params(value, run.model.sizes, wide) for value in (beta, share, factor))
        factor = beta * factor + share
        factors[s] = factor
    times = tuple(time / count / float(rates[s]) for s in steps)
    return PathNodes(run, tuple(steps), tuple(factors[s] for s in steps), times, time, _mean_weights(run, rates))


def _mean_weights(run: Trajectory, rates: Float64[Tensor, " S"]) -> Float64[Tensor, " M"]:
    """Average the weights of the samples' losses over the time of the run."""
    total = torch.zeros(run.num_points + 1, dtype=torch.float64)  # the last entry is for rows outside the training data
    every, targets = torch.arange(run.num_points), run.targets.cpu()
    for step, rate in zip(run.steps, rates.tolist(), strict=True):
        samples, weights = every if step.batch is None else step.batch.cpu(), step.sample_weights
        weights = sample_weights(run.loss, targets[samples]) if weights is None else weights.cpu()
        total.index_add_(0, samples, weights.double() * rate)
    return total[:-1] / rates.sum()


@dataclass(frozen=True, eq=False)
class CheckpointNodes(PathNodes):
    """Checkpoints at even times, of a training without further information; its time is determined later.

    Adam's metric uses the gradient of the whole loss, squared and averaged over the checkpoints; docs/judging.md
    compares it with the recorded metric.

    Attributes:
        diagonal: The metric of a whole run of time 1, (P,).
        rule: "Adam" or "SGD".
        observed: Cosines between the changes between checkpoints and the steps of each rule.
    """

    diagonal: Float[Tensor, " P"]
    rule: str
    observed: Mapping[str, float]

    @property
    def is_even(self) -> bool:
        """Whether all weights have the same number."""
        return self.rule == "SGD"

    def metric(self, node: int, state: Float[Tensor, " PQ"]) -> Float[Tensor, " P"]:
        """Return the metric times the share of the run that a node represents."""
        return self.diagonal.to(state) * self.times[node]


def checkpoint_nodes(run: Trajectory, rule: str | None) -> CheckpointNodes:
    """Return the nodes of a path of checkpoints (`trained.between.path_of_checkpoints`).

    Args:
        run: The path.
        rule: "Adam" or "SGD"; None takes the one whose steps best follow the changes between checkpoints.

    Raises:
        ValueError: There are too few checkpoints.
    """
    if (last := run.num_steps) + 1 < NUM_STATES:
        raise ValueError(
            f"a datamodel needs {NUM_STATES} checkpoints at least, at even times from the initial network to the "
            f"trained one: got {last + 1}."
        )
    states = [round(k * last / (NUM_STATES - 1)) for k in range(NUM_STATES)]
    w = [flat_state(run, state, run.states[0]) for state in states]
    replay, step = RunReplay(run, run.model, w[0]), run.steps[0]
    P = run.num_weights
    g = torch.stack([replay.gradient_at(step, own)[0] for own in w])
    adam = 1 / (g.square().mean(dim=0).sqrt() + 1e-8)
    ways, mean = torch.stack(w)[:, :P].diff(dim=0), (g[1:] + g[:-1]) / 2
    along = {"Adam": -adam * mean, "SGD": -mean}
    observed = {name: float(cosine_similarity(ways, own, dim=1).nanmean()) for name, own in along.items()}
    rule = max(observed, key=observed.__getitem__) if rule is None else rule
    ends = [0.5 / (NUM_STATES - 1)]
    times = (*ends, *[2 * ends[0]] * (NUM_STATES - 2), *ends)
    return CheckpointNodes(
        run=run,
        steps=tuple(states),
        factors=(),
        times=times,
        time=float("nan"),
        sample_weights=sample_weights(run.loss, run.targets),
        diagonal=adam if rule == "Adam" else torch.ones_like(adam),
        rule=rule,
        observed=observed,
    )


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
