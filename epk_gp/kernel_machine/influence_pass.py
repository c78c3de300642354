"""The pass over a run, from its last step back, that computes how outputs depend on the weights of samples.

An optimizer's step is, entry by entry, a function of the weight, its gradient and the optimizer's state, so its
Jacobian is one small matrix per weight: one backward pass gives a row of it for all weights. Adjoints of any number of
outputs are then multiplied by it.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import Cotangents, flat_columns
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, statistics_jacobian
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.core.plans import MAX_STEP_BATCH, MemoryPlan, weight_rows
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.step import fingerprint
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, held_coefficients, step_coefficients
from epk_gp.core.update_law import OptimizerMemory, StepLaw, UpdateLaw
from epk_gp.kernel_machine.axes import Axis, CombinedAxes
from epk_gp.kernel_machine.curvature import LossCurvature
from epk_gp.optimizers.update_rules import EPSILON, ClipNorm, ClipValue, UpdateCoefficients, apply_matrices, clip_kind
from epk_gp.work.run import Piece, Place, RunWork, Sums


class OptimizerJacobian:
    """The Jacobian of the optimizer's part of a step; all its matrices between vectors of weights are diagonal.

    Args:
        law: The step.
        update: Its recorded coefficients.
        g: The gradient of the batch's loss, (P,). It is used if it is clipped.
        slopes: The slopes of each part that a preconditioner scales (`scale_slopes`).
        kind: The kind of gradient clipping in the step, if any.
    """

    def __init__(
        self,
        law: StepLaw,
        update: UpdateCoefficients,
        g: Float[Tensor, " P"],
        slopes: Sequence["Slopes"],
        kind: type[ClipNorm | ClipValue] | None,
    ) -> None:
        law.require_one_buffer()
        self.law, self.update, self.g, self.slopes, self.kind = law, update, g, slopes, kind
        self.factors = {name: value if bool(value.any()) else None for name, value in law.recorded.items()}

    def adjoints(
        self, of_weights: Float[Tensor, "R P"], of_memory: Sequence[Tensor | None]
    ) -> tuple[Float[Tensor, "R P"], Float[Tensor, "R P"], list[Tensor | None]]:
        """Multiply adjoints by the transposed Jacobian.

        Args:
            of_weights: Adjoints of the weights after the step.
            of_memory: Adjoints of the optimizer's state after it, in the order of `OptimizerMemory.tensors`; None for
                zero.

        Returns:
            The adjoints of the weights before the step, except through the gradient; of the gradient of the batch's
            loss; and of the optimizer's state before the step.
        """
        c, (of_momentum, *of_kept) = self.factors, of_memory
        of_direction = -apply_matrices(self.update, self.law.sizes, of_weights, transposed=True)
        of_momentum = _add(None if of_momentum is None else of_momentum.clone(), of_direction, c["momentum_lr"])
        of_h = _add(_add(None, of_direction, c["lr"]), of_momentum, c["one_minus_dampening"])
        of_h, before = torch.zeros_like(of_weights) if of_h is None else of_h, [_add(None, of_momentum, c["beta"])]
        after = iter(of_kept)
        for part, (direct, of_buffer, rows) in zip(self.law.parts, self.slopes, strict=True):
            of_scale = of_direction[:, part.columns] * direct
            if of_momentum is not None:
                of_scale.addcmul_(of_momentum[:, part.columns], of_buffer)
            adjoints = [of_scale, *islice(after, len(rows) - 1)]
            totals: list[Tensor | None] = [of_h[:, part.columns], *[None] * (len(rows) - 1)]
            for adjoint, row in zip(adjoints, rows, strict=True):
                totals = [_add(total, adjoint, entry) for total, entry in zip(totals, row, strict=True)]
            before += totals[1:]
        through = of_weights.clone() if c["decoupled_decay"] is None else of_weights * (1 - c["decoupled_decay"])
        _add(through, of_h, c["weight_decay"])
        return through, self._unclipped(of_h * self.law.recorded["grad_scale"]), before

    def _unclipped(self, of_gradient: Float[Tensor, "R P"]) -> Float[Tensor, "R P"]:
        """Return the adjoint of the gradient before clipping."""
        factors, clip = self.law.recorded["grad_scale"].abs(), self.law.clip
        if self.kind is None:
            return of_gradient
        if self.kind is ClipValue:  # a clipped entry does not depend on the gradient
            return of_gradient * ((factors == 1) | (factors == 0))
        g = torch.where(factors > 0, self.g, 0.0).requires_grad_()
        with torch.enable_grad():
            norm = torch.linalg.vector_norm(g, clip.norm_type if isinstance(clip, ClipNorm) else 2.0)
            (slope,) = torch.autograd.grad(norm, g)
        along: Tensor = of_gradient @ g.detach() / (norm.detach() + EPSILON)
        return of_gradient - along[:, None] * slope


# For some weights that a preconditioner scales: the derivatives of the step's direction, and of the momentum, in the
# scale's logarithm; and the derivatives of this logarithm and of the new state, in h and in the old state. None stands
# for 0.
Slopes = tuple[Tensor, Tensor, list[list[Tensor | None]]]


def scale_slopes(
    laws: Sequence[StepLaw],
    memories: Sequence[OptimizerMemory],
    w: Float[Tensor, "K P"],
    g: Float[Tensor, "K P"],
) -> list[list[Slopes]]:
    """Return the slopes of each part of K steps that scale the same weights by the same options.

    Args:
        laws: The steps.
        memories: The optimizer's states before each.
        w: The weights before each.
        g: The gradients of their losses.
    """
    c = {name: torch.stack([law.recorded[name] for law in laws]) for name in laws[0].recorded}
    h = (c["grad_scale"] * g + c["weight_decay"] * w).requires_grad_()
    momentum, counts = (torch.stack([getattr(own, name) for own in memories]) for name in ("momentum", "counts"))
    parts = zip(*(own.kept for own in memories), strict=True)
    kept = tuple(tuple(torch.stack(own).requires_grad_() for own in zip(*each, strict=True)) for each in parts)
    with torch.enable_grad():
        scales, after = laws[0].scales(OptimizerMemory(momentum, kept, counts), h)
        of_parts = zip(laws[0].parts, scales, kept, after.kept, strict=True)
        rows = [[_row(out, [h, *own], part.columns) for out in (s.log(), *made)] for part, s, own, made in of_parts]
    h = h.detach()
    m, found = c["beta"] * momentum + c["one_minus_dampening"] * h, [list[Slopes]() for _ in laws]
    for part, several in zip(laws[0].parts, rows, strict=True):
        terms = {"momentum_lr": m, "lr": h, "one_minus_dampening": h}
        scaled = {name: (c[name] * terms[name])[:, part.columns] for name in part.fields}
        zero = torch.zeros_like(h[:, part.columns])
        of_momentum = scaled.pop("one_minus_dampening", zero)
        direct = sum(scaled.values(), zero)
        for k, own in enumerate(found):
            step = [[None if value is None else value[k] for value in row] for row in several]
            own.append((direct[k], of_momentum[k], step))
    return found


def _row(output: Tensor, inputs: list[Tensor], columns: slice) -> list[Tensor | None]:
    """Return the derivatives of an output, entry by entry, in each input; in the first for some columns; None for 0."""
    first, *rest = torch.autograd.grad(output.sum(), inputs, retain_graph=True, allow_unused=True)
    found = [None if first is None else first[:, columns], *rest]
    return [None if value is None or not bool(value.any()) else value for value in found]


def _add(total: Tensor | None, adjoint: Tensor | None, entry: Tensor | None) -> Tensor | None:
    """Add the product of an adjoint, (R, n), and a diagonal, (n,), in place; None stands for zero."""
    if adjoint is None or entry is None:
        return total
    return adjoint * entry if total is None else total.addcmul_(adjoint, entry)


class MemoryTrace:
    """The optimizer's state before each step, computed again from the recorded weights and batches.

    All of it is held if it fits into memory. Otherwise every k-th state is held, where k is about the square root of
    the number of steps, and the states of one stretch at a time. It is read from the last step to the first, by one
    thread: each pass over the run has its own `reader`.

    Args:
        law: The steps of the run.
        run: Computes their gradients.
        budget: Bytes of memory; an eighth of them is for the held states.
    """

    def __init__(self, law: UpdateLaw, run: RunReplay, budget: int) -> None:
        self.law, self.run, self._initial = law, run, law.initial()
        S, self.num_kept = law.trajectory.num_steps, len(self._initial.tensors())
        most = weight_rows(budget // 2, law.reference.element_size(), (1 + self.num_kept) * sum(law.sizes))
        self.stride = max(1, S if most >= S else round(S**0.5))
        self._held: list[OptimizerMemory] = []
        self._stretch: dict[int, tuple[OptimizerMemory, Tensor]] = {}
        # about 20 vectors of each step whose slopes are computed together
        self._at_once = min(MAX_STEP_BATCH, weight_rows(budget // 4, law.reference.element_size(), 20 * sum(law.sizes)))
        self._slopes = dict[int, list[Slopes]]()
        if not law.parts:
            return
        memory = self._initial
        for index in range(S):
            if index % self.stride == 0:
                self._held.append(memory)
            if index < (S - 1) // self.stride * self.stride:  # the last stretch is computed when it is read
                memory = self._after(index, memory)[1]
        if len(self._held) == 1:  # all readers share it
            self._make(0)

    def reader(self, run: RunReplay) -> "MemoryTrace":
        """Return another trace that shares the held states."""
        own = copy(self)
        own.run, own._slopes = run, {}
        return own

    def __getitem__(self, index: int) -> tuple[Float[Tensor, " P"], list[Slopes]]:
        """Return the inputs of a step's Jacobian: the gradient of its loss, if it is needed, and slopes."""
        if not self.law.parts:
            momentum, update = self._initial.momentum, held_coefficients(self.law.trajectory, index)
            clips = index in self.law.clipped_steps and clip_kind(update, len(momentum)) is ClipNorm
            return self.run.gradient(self.law.trajectory.steps[index])[0] if clips else momentum, []
        if index not in self._stretch:
            self._make(index // self.stride)
        if index not in self._slopes:
            first = index // self._at_once * self._at_once
            laws = {s: self.law.step(s) for s in range(first, first + self._at_once) if s in self._stretch}
            alike = [s for s, law in laws.items() if law.parts is laws[index].parts and law.is_moved is None]
            alike = alike if index in alike else [index]
            memories, g = zip(*(self._stretch[s] for s in alike), strict=True)
            w = [flat_weights(self.law.trajectory, s, self.law.reference) for s in alike]
            several = scale_slopes([laws[s] for s in alike], memories, torch.stack(w), torch.stack(g))
            self._slopes = dict(zip(alike, several, strict=True))
        return self._stretch[index][1], self._slopes[index]

    def _make(self, number: int) -> None:
        """Compute the steps of a stretch, replacing those of another one."""
        self._stretch, memory = {}, self._held[number]
        for step in range(number * self.stride, min((number + 1) * self.stride, self.law.trajectory.num_steps)):
            before = memory
            g, memory = self._after(step, memory)
            self._stretch[step] = before, g

    def _after(self, index: int, memory: OptimizerMemory) -> tuple[Tensor, OptimizerMemory]:
        """Return the gradient of a step's loss, and the optimizer's state after the step."""
        run, law = self.law.trajectory, self.law.step(index)
        w, update = flat_weights(run, index, self.law.reference), step_coefficients(run, index, self.law.reference)
        g, _, _, momentum = self.run.predict(run.steps[index], update, w, memory.momentum)
        return g, replace(law.scales(memory, law.decayed(w, g))[1], momentum=momentum)


# The vectors that the pass carries from a step to the one before it, if they are not zero: the adjoints `weights` of
# the trained weights, (R, P), `statistics` of the moving statistics, (R, Q), `average` of the averaged weights, (R, P),
# and `memory.0`, `memory.1`, ... of the optimizer's state.
Adjoints = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class InfluenceWork(RunWork):
    """The differentiated numbers and the axes of the result, in pieces of some inputs each.

    Attributes:
        trajectory: The run; for a question (`autodiff.scalars`) the pass goes through the recorded run.
        X: n inputs, (n, ...).
        cotangents: The derivatives of the K numbers of each input in its network's outputs, (n, K, C).
        is_joint: Whether the inputs share their numbers, such as a mean over inputs, which is then the only row of the
            result.
        axes: Axes of samples and steps.
        own: The training sample of each input whose weight counts, (n,); None for all samples.
        factors: Factors of the derivative in each sample's weight, (M,); None for 1.
        truncate: Number of steps of the pass, from the last one back.
        memory_budget: Bytes for the computation.
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

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and the inputs."""
        return self.trajectory, self.X

    @cached_property
    def law(self) -> UpdateLaw:
        """The steps as functions."""
        return UpdateLaw(self.trajectory.recorded, flat_weights(self.trajectory, 0, self.X))

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan, which turns the budget into block sizes for the recorded network."""
        return self.recorded_net.memory_plan(self.memory_budget)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Numbers of an input in one row of the sums, and rows that go through the run together."""
        n, K, _ = self.cotangents.shape
        # a joint number has one adjoint for all inputs; numbers are rows if all numbers of an input do not fit
        fitting = max(1, n) if self.is_joint else self.memory.influence_points(K)
        return (K, fitting) if fitting else (1, max(1, self.memory.influence_points(1)))

    @cached_property
    def blocks(self) -> list[Int64[Tensor, " rows"]]:
        """The rows of each block: inputs, or numbers of inputs."""
        (n, K, _), (numbers, rows) = self.cotangents.shape, self._sizes
        return list(torch.arange(n * K // numbers).split(rows))

    @property
    def pieces(self) -> list[Piece]:
        """The blocks."""
        name = f"influence-{fingerprint(self.plan, *self._sizes)}"
        return [Piece(f"{name}-{number}", (number,), self.truncate) for number in range(len(self.blocks))]

    @property
    def piece_bytes(self) -> int:
        """Bytes of the sums of a block."""
        numbers, rows = self._sizes
        return 8 * rows * numbers * self.trajectory.recorded.num_points

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        return fingerprint(
            "influence", self.trajectory.digest, self.X, self.cotangents, self.is_joint, self.own, self.factors,
            self.truncate, self.memory_budget, *(axis.group for axis in self.axes),
            [(axis.kind, axis.names) for axis in self.axes],
        )  # fmt: skip

    @cached_property
    def trace(self) -> MemoryTrace:
        """The optimizer's state before each step."""
        return MemoryTrace(self.law, self.replay, self.memory_budget)

    @cached_property
    def replay(self) -> RunReplay:
        """Computes the gradients of all steps, for the optimizer's state and for the comparison of the steps."""
        return self._replay()

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Go through the run with the rows of a block, and yield its sums after each step: `values` and `norms`.

        The values are along the axes of steps, then of samples, (R, T, U); the norms are those of the adjoints of the
        weights at each state, (R, S + 1).
        """
        rows, S = self.blocks[place[0]], self.trajectory.num_steps
        adjoints, numbers = self._start(rows), self._sizes[0]
        like, combined = adjoints["weights"], CombinedAxes(self.trajectory.recorded, self.axes)
        own = None if self.own is None else self.own[self._points(rows).repeat_interleave(numbers)].to(like.device)
        factors = None if self.factors is None else self.factors.to(like)
        groups, num_columns = combined.index["sample"].to(like.device), combined.count("sample") if own is None else 1
        values, norms = like.new_zeros(len(like), combined.count("step"), num_columns), like.new_zeros(len(like), S + 1)
        norms[:, S] = _norm(adjoints)
        unexplained = saved.largest.get("unexplained", torch.tensor(False)).clone()
        if saved.added:
            values.copy_(saved.added["values"])
            norms.copy_(saved.added["norms"])
            adjoints = {name: value.to(like) for name, value in saved.carried.items()}
        run = self._replay()  # blocks may go through the run at the same time
        curvature, trace = LossCurvature(self.recorded_net, run, self.memory), self.trace.reader(run)
        sums = Sums({"values": values, "norms": norms}, {"unexplained": unexplained}, adjoints, saved.steps)
        yield sums
        step_of = combined.index["step"].tolist()
        with disable_fused_attention():  # once, not in every step
            for index in reversed(range(S - self.truncate, S - saved.steps)):
                adjoints, products = self._back(index, adjoints, curvature, trace)
                at_step = values[:, step_of[index]]
                for samples, found in products:
                    samples = samples.to(found.device)
                    found = found if factors is None else found * factors[samples]
                    if own is not None:
                        at_step[:, 0] += (found * (samples[None] == own[:, None])).sum(dim=1)
                    else:
                        at_step.index_add_(1, groups[samples], found)
                norms[:, index] = _norm(adjoints)
                unexplained |= not curvature.explains_statistics
                sums.carried, sums.steps = adjoints, sums.steps + 1
                yield sums

    def _start(self, rows: Int64[Tensor, " rows"]) -> Adjoints:
        """Return the adjoints of the trained weights and statistics."""
        net, rows = self.net, rows.to(self.X.device)
        trajectory, points, is_joint = self.trajectory, self._points(rows), self.is_joint
        X = self.X[points]
        state = flat_state(trajectory, trajectory.num_steps, X)
        if self._sizes[0] == 1:
            wanted = self.cotangents[points, rows % self.cotangents.shape[1]][None]
        else:
            wanted = self.cotangents[points].transpose(0, 1)  # K N C
        cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=not net.plan.supports_interpolation)
        columns = flat_columns(net, all_dense=cost.all_dense).to(X.device)
        K, N, P, Q = *wanted.shape[:2], net.model.num_weights, net.model.num_statistics
        of_weights = state.new_zeros(*((K,) if is_joint else (K, N)), P)
        of_statistics = state.new_zeros(*of_weights.shape[:-1], Q)
        at_once = max(1, net.memory_plan(self.memory_budget).adjoint_points(K))
        for part in torch.arange(N, device=X.device).split(at_once):
            cotangents, at = Cotangents(wanted[:, part].to), WeightLocation(state)
            found = [(of_weights, to_flat_order(layer_jacobians(net, at, X[part], cotangents, cost), columns))]
            if Q:
                found.append((of_statistics, statistics_jacobian(net, at, X[part], cotangents)))
            for total, value in found:
                if is_joint:
                    total += value.sum(dim=1)
                else:
                    total[:, part] = value
        if not is_joint:
            of_weights, of_statistics = (
                total.transpose(0, 1).reshape(N * K, total.shape[2]) for total in (of_weights, of_statistics)
            )
        adjoints = {"statistics": of_statistics} if Q else {}
        if trajectory.average is None:
            return adjoints | {"weights": of_weights}
        return adjoints | {"weights": torch.zeros_like(of_weights), "average": of_weights}

    def _replay(self) -> RunReplay:
        return RunReplay(self.trajectory.recorded, self.recorded_net.model, self.X, self.memory)

    def _back(
        self, index: int, adjoints: Adjoints, curvature: LossCurvature, trace: MemoryTrace
    ) -> tuple[Adjoints, list[tuple[Tensor, Tensor]]]:
        """Go one step back: return the adjoints before it, and the products with its rows (`LossCurvature`)."""
        trajectory, average = self.law.trajectory, self.trajectory.average
        of_weights, before = adjoints["weights"], Adjoints()
        if average is not None:
            a = float(average.coefficients[index])
            of_weights = of_weights + a * adjoints["average"]
            before["average"] = (1 - a) * adjoints["average"]
        (g, slopes), update = trace[index], step_coefficients(trajectory, index, self.X)
        kind = clip_kind(update, len(g)) if index in self.law.clipped_steps else None
        jacobian = OptimizerJacobian(self.law.step(index), update, g, slopes, kind)
        kept = [adjoints.get(f"memory.{number}") for number in range(trace.num_kept)]
        through, of_gradient, kept = jacobian.adjoints(of_weights, kept)
        before |= {f"memory.{number}": value for number, value in enumerate(kept) if value is not None}
        products, pulled, moving = curvature(trajectory.steps[index], of_gradient, adjoints.get("statistics"))
        before |= {"weights": through + pulled} | ({} if moving is None else {"statistics": moving})
        return before, products

    def _points(self, rows: Int64[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
        """Return the inputs of rows."""
        return rows // (self.cotangents.shape[1] // self._sizes[0])


def _norm(adjoints: Adjoints) -> Float[Tensor, " R"]:
    """Return the norms of the adjoints of the weights, trained and averaged."""
    total = adjoints["weights"] + adjoints["average"] if "average" in adjoints else adjoints["weights"]
    norm: Tensor = torch.linalg.vector_norm(total, dim=1)
    return norm
