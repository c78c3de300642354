"""The pass over a run, from its last step back, that finds how outputs depend on the weights of samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, PlannedModel, flat_columns
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, statistics_jacobian
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.core.gradients import RunReplay
from epk_gp.core.step import fingerprint
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, step_coefficients
from epk_gp.core.update_law import UpdateLaw
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.curvature import LossCurvature
from epk_gp.kernel_machine.optimizer_adjoint import MemoryTrace, OptimizerJacobian
from epk_gp.work.run import RunWork
from epk_gp.work.sums import Piece, Place, Sums


@dataclass(frozen=True, eq=False)
class InfluenceProblem:
    """What is differentiated, and along what the result is split.

    Attributes:
        trajectory: The run.
        X: n inputs, (n, ...).
        cotangents: The derivatives of the K wanted numbers of each input in its logits, (n, K, C).
        is_joint: Whether the inputs share their numbers, such as a mean over inputs, which is then the one row of the
            result.
        axes: Axes of samples and steps.
        own: The one training sample of each input whose weight counts, (n,); None for all samples.
        factors: What the derivative in each sample's weight is multiplied with, (M,); None for 1.
        truncate: Number of steps, from the last one back, that are gone through.
        memory_budget: Bytes.
    """

    trajectory: Trajectory
    X: Shaped[Tensor, "n ..."]
    cotangents: Float[Tensor, "n K C"]
    is_joint: bool
    axes: tuple[Axis, ...]
    own: Int64[Tensor, " n"] | None
    factors: Float[Tensor, " M"] | None
    truncate: int
    memory_budget: int

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        return fingerprint(
            "influence", self.trajectory.digest, self.X, self.cotangents, self.is_joint, self.own,
            self.factors, self.truncate, self.memory_budget, *(axis.group for axis in self.axes),
            [(axis.kind, axis.names) for axis in self.axes],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Adjoints:
    """What the pass carries from a step to the one before it.

    Attributes:
        of_weights: Of the trained weights, (R, P).
        of_statistics: Of the moving statistics, (R, Q); None for a network without them.
        of_memory: Of what the optimizer keeps; None for zero.
        of_average: Of the averaged weights, (R, P); None for a run that is not averaged.
    """

    of_weights: Float[Tensor, "R P"]
    of_statistics: Float[Tensor, "R Q"] | None
    of_memory: list[Tensor | None]
    of_average: Float[Tensor, "R P"] | None

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name, for a file."""
        named = {"weights": self.of_weights, "statistics": self.of_statistics, "average": self.of_average}
        named |= {f"memory.{number}": value for number, value in enumerate(self.of_memory)}
        return {f"adjoint.{name}": value for name, value in named.items() if value is not None}

    @classmethod
    def load(cls, state: dict[str, Tensor], num_kept: int, reference: Tensor) -> "_Adjoints":
        """Take them from a file."""
        found = {name: value.to(reference) for name, value in state.items() if name.startswith("adjoint.")}
        memory = [found.get(f"adjoint.memory.{number}") for number in range(num_kept)]
        return cls(found["adjoint.weights"], found.get("adjoint.statistics"), memory, found.get("adjoint.average"))


class InfluencePass:
    """Goes through a run from its last step to its first, for some inputs at a time.

    Args:
        problem: What is wanted.
        net: The network with its plan.
    """

    def __init__(self, problem: InfluenceProblem, net: PlannedModel) -> None:
        self.problem, self.net = problem, net
        trajectory, X = problem.trajectory, problem.X
        self.law = UpdateLaw(trajectory, flat_weights(trajectory, 0, X))
        self.memory = net.memory_plan(problem.memory_budget)
        n, K, _ = problem.cotangents.shape
        # a joint number has one adjoint, whatever the inputs; numbers are rows where all of an input's do not fit
        fitting = max(1, n) if problem.is_joint else self.memory.influence_points(K)
        self.numbers_per_row = K if fitting else 1
        self.rows_per_block = fitting or max(1, self.memory.influence_points(1))

    @property
    def blocks(self) -> list[Int64[Tensor, " rows"]]:
        """The rows of each block: inputs, or numbers of inputs."""
        n, K, _ = self.problem.cotangents.shape
        return list(torch.arange(n * K // self.numbers_per_row).split(self.rows_per_block))

    @cached_property
    def trace(self) -> MemoryTrace:
        """What the optimizer kept before each step."""
        return MemoryTrace(self.law, self._replay())

    def part(self, number: int, saved: Sums) -> Iterator[Sums]:
        """Go through the run with the rows of a block, and yield its sums after each step.

        Args:
            number: Which block.
            saved: The sums of some steps, and the adjoints behind them; empty ones to begin with.
        """
        problem, rows = self.problem, self.blocks[number]
        S, points = problem.trajectory.num_steps, self._points(rows)
        adjoints = self._start(rows)
        count = len(adjoints.of_weights)
        of_numbers = points.repeat_interleave(self.numbers_per_row) if problem.own is not None else None
        sums = _Sums(problem, of_numbers, count, adjoints.of_weights)
        sums.norms[:, S] = self._norm(adjoints)
        unexplained = saved.largest.get("unexplained", torch.tensor(False)).clone()
        if saved.added:
            sums.load(saved.added)
            adjoints = _Adjoints.load(saved.carried, len(adjoints.of_memory), adjoints.of_weights)
        run = self._replay()  # blocks may go through the run beside each other
        curvature, trace, done = LossCurvature(self.net, run, self.memory), self.trace.reader(run), saved.steps
        yield Sums(sums.state(), {"unexplained": unexplained}, adjoints.state(), done)
        for position in range(done, problem.truncate):
            index = S - 1 - position
            adjoints = self._back(index, adjoints, curvature, trace, sums)
            sums.norms[:, index] = self._norm(adjoints)
            unexplained |= not curvature.explains_statistics
            yield Sums(sums.state(), {"unexplained": unexplained}, adjoints.state(), position + 1)

    def _start(self, rows: Int64[Tensor, " rows"]) -> _Adjoints:
        """Return the adjoints of the trained weights and statistics."""
        problem, net, rows = self.problem, self.net, rows.to(self.problem.X.device)
        trajectory, points = problem.trajectory, self._points(rows)
        X = problem.X[points]
        state = flat_state(trajectory, trajectory.num_steps, X)
        if self.numbers_per_row == 1:
            wanted = problem.cotangents[points, rows % problem.cotangents.shape[1]][None]
        else:
            wanted = problem.cotangents[points].transpose(0, 1)  # K N C
        cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=not net.plan.supports_interpolation)
        columns = flat_columns(net, all_dense=cost.all_dense).to(X.device)
        K, N, P, Q = *wanted.shape[:2], net.model.num_weights, net.model.num_statistics
        size = max(1, self.memory.adjoint_points(K))
        of_weights = state.new_zeros(*((K,) if problem.is_joint else (K, N)), P)
        of_statistics = state.new_zeros(*of_weights.shape[:-1], Q) if Q else None
        for part in torch.arange(N, device=X.device).split(size):
            cotangents = Cotangents(wanted[:, part].to)
            at = WeightLocation(state)
            found = [(of_weights, to_flat_order(layer_jacobians(net, at, X[part], cotangents, cost), columns))]
            if of_statistics is not None:
                found.append((of_statistics, statistics_jacobian(net, at, X[part], cotangents)))
            for total, value in found:
                if problem.is_joint:
                    total += value.sum(dim=1)
                else:
                    total[:, part] = value
        flat = [
            None if value is None else (value if problem.is_joint else value.transpose(0, 1).reshape(N * K, -1))
            for value in (of_weights, of_statistics)
        ]
        kept: list[Tensor | None] = [None] * len(self.law.initial().tensors())
        if flat[0] is None:
            raise RuntimeError("a network must have weights.")
        if trajectory.average is None:
            return _Adjoints(flat[0], flat[1], kept, None)
        return _Adjoints(torch.zeros_like(flat[0]), flat[1], kept, flat[0])

    def _replay(self) -> RunReplay:
        return RunReplay(self.problem.trajectory.trained, self.net.model, self.problem.X)

    def _back(
        self, index: int, adjoints: _Adjoints, curvature: LossCurvature, trace: MemoryTrace, sums: "_Sums"
    ) -> _Adjoints:
        """Go one step back."""
        trajectory = self.law.trajectory
        of_weights, of_average = adjoints.of_weights, adjoints.of_average
        average = self.problem.trajectory.average
        if average is not None and of_average is not None:
            a = float(average.coefficients[index])
            of_weights = of_weights + a * of_average
            of_average = (1 - a) * of_average
        traced = trace[index]
        w = flat_weights(trajectory, index, self.problem.X)
        update = step_coefficients(trajectory, index, w)
        jacobian = OptimizerJacobian(self.law.step(index), update, traced.memory, w, traced.g)
        found = jacobian.adjoints(of_weights, adjoints.of_memory)
        pulled = curvature(trajectory.steps[index], found.of_gradient, adjoints.of_statistics)
        for products in pulled.products:
            sums.add(index, products.samples, products.values)
        return _Adjoints(found.of_weights + pulled.of_weights, pulled.of_statistics, found.of_memory, of_average)

    def _points(self, rows: Int64[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
        """Return the inputs that rows belong to."""
        return rows // (self.problem.cotangents.shape[1] // self.numbers_per_row)

    def _norm(self, adjoints: _Adjoints) -> Float[Tensor, " R"]:
        total = adjoints.of_weights if adjoints.of_average is None else adjoints.of_weights + adjoints.of_average
        norm: Tensor = torch.linalg.vector_norm(total, dim=1)
        return norm


class _Sums:
    """What the derivatives of a block are added to.

    Attributes:
        values: Along the axes of steps, then of samples, (R, T, U).
        norms: Norms of the adjoints of the weights at each state, (R, S + 1).
    """

    def __init__(self, problem: InfluenceProblem, points: Tensor | None, count: int, reference: Tensor) -> None:
        trajectory = problem.trajectory
        self.index: dict[str, Tensor] = {}
        sizes = {}
        for kind, total in (("step", trajectory.num_steps), ("sample", trajectory.num_points)):
            index = torch.zeros(total, dtype=torch.int64)
            own = [axis for axis in problem.axes if axis.kind == kind]
            for axis in own:
                index = index * len(axis.names) + axis.group.cpu()
            self.index[kind] = index.to(reference.device)
            sizes[kind] = torch.Size(len(axis.names) for axis in own).numel()
        self.factors = None if problem.factors is None else problem.factors.to(reference)
        self.own = None if points is None or problem.own is None else problem.own[points].to(reference.device)
        columns = 1 if self.own is not None else sizes["sample"]
        self.values = reference.new_zeros(count, sizes["step"], columns)
        self.norms = reference.new_zeros(count, trajectory.num_steps + 1)

    def add(self, step: int, samples: Int64[Tensor, " B"], values: Float[Tensor, "R B"]) -> None:
        """Add the derivatives in the weights of the samples of a forward pass."""
        t = int(self.index["step"][step])
        samples = samples.to(values.device)
        if self.factors is not None:
            values = values * self.factors[samples]
        if self.own is not None:
            self.values[:, t, 0] += (values * (samples[None] == self.own[:, None])).sum(dim=1)
        else:
            self.values[:, t].index_add_(1, self.index["sample"][samples], values)

    def state(self) -> dict[str, Tensor]:
        """Return the sums by name."""
        return {"values": self.values, "norms": self.norms}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the sums from a file."""
        self.values.copy_(state["values"])
        self.norms.copy_(state["norms"])


@dataclass(frozen=True, eq=False)
class InfluenceWork(RunWork):
    """The pass in pieces: a block of rows each.

    Attributes:
        problem: What is wanted.
    """

    problem: InfluenceProblem

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and the inputs."""
        return self.problem.trajectory, self.problem.X

    @cached_property
    def whole(self) -> InfluencePass:
        """The pass of all inputs."""
        return InfluencePass(self.problem, self.net)

    @property
    def pieces(self) -> list[Piece]:
        """The blocks."""
        whole = self.whole
        name = f"influence-{fingerprint(self.plan, whole.numbers_per_row, whole.rows_per_block)}"
        return [Piece(f"{name}-{number}", (number,), self.problem.truncate) for number in range(len(whole.blocks))]

    @property
    def piece_bytes(self) -> int:
        """Bytes of the sums of a block."""
        return 8 * self.whole.rows_per_block * self.whole.numbers_per_row * self.problem.trajectory.num_points

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        return self.problem.identity()

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Go through the run with the rows of a block."""
        yield from self.whole.part(place[0], saved)
