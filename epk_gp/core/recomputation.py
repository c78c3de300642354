"""Weight states that were not kept, computed again: the law of a run from each kept state to the next.

From a kept state on the recorded steps are made again on exact gradients, in the dtype of the computation,

    w~_{s+1} = w~_s + (step of the update rule on the gradient at w~_s),

up to the next kept state. The path goes along these states and from the last of them to the kept one, so that the step
that ends at a kept state is the law's step and a jump: the difference of kept and computed state. Sums along the path
are exact whatever the jumps are; a jump belongs to no sample (docs/theory.md, section 4).

Momentum and preconditioners follow from all gradients since the first step. What the optimizer keeps is therefore
computed once, from the first stretch to the last, and held at the beginning of each.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import RLock
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.core.gradients import RunReplay, has_momentum
from epk_gp.core.plans import TensorSpec, rows_of_weights
from epk_gp.core.trajectory import Trajectory, aligned
from epk_gp.core.update_law import CompactUpdate, OptimizerMemory, UpdateLaw, restore_update, scaled_fields
from epk_gp.optimizers.update_rules import UpdateCoefficients, predict_step

# Bytes of computed states that are held for the next reader, beside the stretch that is read; and bytes of what
# optimizers keep at the beginning of all stretches, from which on they lie in a temporary file. A choice.
HELD_BYTES = 256 << 20

# By how much a kept state may miss the computed one, relative to the way between two kept states, by norms. As for a
# run that is trained again: rounding is amplified along the steps.
JUMP_SHARE = {torch.float64: 1e-6, torch.float32: 1e-2}


@runtime_checkable
class KeptStates(Protocol):
    """The kept weight states of a run, read by their numbers among all its states."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which states are kept, in ascending order: the first, the last, and others."""

    def __len__(self) -> int:
        """Count all states, S + 1."""

    def __getitem__(self, state: int, /) -> Float[Tensor, " P"]:
        """Read a kept state."""


@runtime_checkable
class CompactUpdates(Protocol):
    """The update rule's coefficients of each step, with one number per parameter where a scale says the others."""

    def __len__(self) -> int:
        """Count the steps, S."""

    def __getitem__(self, step: int, /) -> UpdateCoefficients:
        """Read the coefficients; of a scaled one that of one weight of each parameter."""

    def places(self, step: int) -> Mapping[str, Int64[Tensor, " L"]]:
        """Read which weight that is, by the names of the scaled coefficients (`CompactUpdate`)."""


@dataclass(frozen=True, eq=False)
class _Stretch:
    """The steps between two kept states, made again.

    Attributes:
        states: The state before each step, and the one after the last; the first is kept.
        updates: The coefficients of each step; empty where they are held as recorded.
        after: What the optimizer keeps at the end.
    """

    states: list[Tensor]
    updates: list[UpdateCoefficients]
    after: OptimizerMemory

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [*self.states, *(value for update in self.updates for value in update)]
        return sum(value.nbytes for value in tensors)


class _Memories:
    """What the optimizer keeps at the beginning of each stretch: in memory, or in a temporary file."""

    def __init__(self, first: OptimizerMemory, count: int) -> None:
        self._first, self._counts = first, [first.counts]
        flat = torch.cat(first.tensors())
        self._rows = rows_of_weights(count, len(flat), flat, HELD_BYTES // max(1, flat.nbytes))
        self._rows[0] = flat

    def __len__(self) -> int:
        return len(self._counts)

    def append(self, memory: OptimizerMemory) -> None:
        self._rows[len(self)] = torch.cat(memory.tensors()).to(self._rows.device)
        self._counts.append(memory.counts)

    def __getitem__(self, number: int) -> OptimizerMemory:
        like = self._first.tensors()
        own = self._rows[number].to(like[0].device, copy=True).split([len(value) for value in like])
        momentum, *rest = own
        values, kept = iter(rest), []
        for memory in self._first.kept:
            kept.append(tuple(next(values) for _ in memory))
        return OptimizerMemory(momentum, tuple(kept), self._counts[number])


class _Computation:
    """The states of a run in one dtype and on one device; to be used by one thread at a time.

    Args:
        run: The run, whose states are the kept ones and whose coefficients are compact.
        kept: The kept states.
        updates: The coefficients.
        spec: Dtype and device.
    """

    def __init__(self, run: Trajectory, kept: KeptStates, updates: CompactUpdates, spec: TensorSpec) -> None:
        self.run, self.kept, self.updates, self.spec = run, kept, updates, spec
        self.model, self.numbers = run.model.variant(spec), kept.numbers
        reference = torch.empty(0, dtype=spec.dtype, device=spec.device)
        self.replay = RunReplay(run, self.model, reference)
        # without scales no step depends on the options of the optimizer
        self.law = UpdateLaw(run, reference) if any(scaled_fields(run.optimizer_groups, self.model.names)) else None
        momentum = reference.new_zeros(self.model.num_weights)
        self.first = (
            OptimizerMemory(momentum, (), torch.zeros(len(self.model.sizes), dtype=torch.float64))
            if self.law is None
            else self.law.initial()
        )
        needs_memory = self.law is not None or has_momentum(run)
        self.memories = _Memories(self.first, len(self.numbers) - 1) if needs_memory and len(self.numbers) > 1 else None
        self.stretches: dict[int, _Stretch] = {}  # the one used last stands last

    def kept_state(self, state: int) -> Tensor:
        return aligned(self.kept[state].to(dtype=self.spec.dtype, device=self.spec.device))

    def stretch(self, number: int) -> _Stretch:
        """Return the steps from kept state `number` to the next one."""
        if number in self.stretches:
            self.stretches[number] = self.stretches.pop(number)
            return self.stretches[number]
        if self.memories is None:
            return self._hold(number, self._make(number, self.first))
        for before in range(len(self.memories) - 1, number):
            made = self._hold(before, self._make(before, self.memories[before]))
            self.memories.append(made.after)
        made = self._hold(number, self._make(number, self.memories[number]))
        if number + 1 == len(self.memories) < len(self.numbers) - 1:
            self.memories.append(made.after)
        return made

    def _hold(self, number: int, made: _Stretch) -> _Stretch:
        self.stretches[number] = made
        while len(self.stretches) > 1 and sum(held.nbytes for held in self.stretches.values()) > HELD_BYTES:
            del self.stretches[next(iter(self.stretches))]
        return made

    def _make(self, number: int, memory: OptimizerMemory) -> _Stretch:
        run, P = self.run, self.model.num_weights
        w = self.kept_state(self.numbers[number])
        states, updates = [w], []
        for index in range(self.numbers[number], self.numbers[number + 1]):
            state = w if run.statistics is None else torch.cat([w, run.statistics[index].to(w)])
            g, _ = self.replay.gradient_at(run.steps[index], state)
            update, memory = self._update(index, memory, w, g[:P])
            d, momentum = predict_step(update, self.model.sizes, w, g[:P], memory.momentum)
            w, memory = w + d, replace(memory, momentum=momentum)
            states.append(w)
            if self.law is not None:
                updates.append(update)
        return _Stretch(states, updates, memory)

    def _update(
        self, index: int, memory: OptimizerMemory, w: Tensor, g: Tensor
    ) -> tuple[UpdateCoefficients, OptimizerMemory]:
        """Return the coefficients of a step, and what the preconditioners keep after it."""
        update = self.updates[index]
        if self.law is None:
            return update, memory
        law = self.law.step(index)
        scales, kept, _ = law.scales(memory, w, g)
        update = restore_update(CompactUpdate(update, self.updates.places(index)), law.parts, scales, law.sizes)
        return update, replace(memory, kept=kept, counts=memory.counts + law.moves.to(memory.counts))


@dataclass(frozen=True, eq=False)
class Recomputation:
    """The states and coefficients of a run that keeps some of them, in any dtype. Several threads may read at once.

    Attributes:
        run: The run, whose states are the kept ones and whose coefficients are compact.
        kept: The kept states.
        updates: The coefficients.
    """

    run: Trajectory
    kept: KeptStates
    updates: CompactUpdates
    _lock: RLock = field(default_factory=RLock, init=False, repr=False)
    _computations: dict[TensorSpec, _Computation] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Return the pickled form, without what was computed."""
        return Recomputation, (self.run, self.kept, self.updates)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {state: place for place, state in enumerate(self.kept.numbers)}

    @property
    def is_scaled(self) -> bool:
        """Whether a preconditioner scales coefficients, which are computed again."""
        return any(scaled_fields(self.run.optimizer_groups, self.run.model.names))

    def is_kept(self, state: int) -> bool:
        """Whether a state is kept."""
        return state in self._places

    def stretch_of(self, step: int) -> tuple[int, int]:
        """Return the kept states before and after a step."""
        numbers = self.kept.numbers
        place = bisect_right(numbers, step)
        return numbers[place - 1], numbers[place]

    def state(self, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
        """Return a state: kept, or computed in the dtype and on the device of a computation."""
        if self.is_kept(state):
            return aligned(self.kept[state].to(dtype=spec.dtype, device=spec.device))
        first, _ = self.stretch_of(state)
        return self._stretch(first, spec).states[state - first]

    def update(self, step: int, spec: TensorSpec) -> UpdateCoefficients:
        """Return the coefficients of a step by which its states were computed."""
        if not self.is_scaled:
            return self.updates[step]
        first, _ = self.stretch_of(step)
        return self._stretch(first, spec).updates[step - first]

    def jumps(self, spec: TensorSpec) -> Iterator[tuple[int, float, float]]:
        """Yield each kept state but the first: its number, the jump's norm, and the way from the kept state before."""
        for first, last in zip(self.kept.numbers, self.kept.numbers[1:], strict=False):
            end = self.state(last, spec)
            computed = self._stretch(first, spec).states[-1]
            yield last, float((end - computed).norm()), float((end - self.state(first, spec)).norm())

    def allowed_jump(self, step: int, dtype: torch.dtype, w: Float[Tensor, " P"]) -> float:
        """Return the norm that the jump at the end of a step may have, for the results to be certified.

        Args:
            step: The step before a kept state.
            dtype: The coarser of the dtypes of run and computation.
            w: The weights before the step, which say dtype and device.
        """
        first, last = self.stretch_of(step)
        start, end = (self.kept[state].to(w) for state in (first, last))
        share = JUMP_SHARE[dtype] + (self.run.unexplained or 0.0)
        return share * float((end - start).norm())

    def _stretch(self, first: int, spec: TensorSpec) -> _Stretch:
        with self._lock:
            if spec not in self._computations:
                self._computations[spec] = _Computation(self.run, self.kept, self.updates, spec)
            return self._computations[spec].stretch(self._places[first])


@dataclass(frozen=True, eq=False)
class RecomputedStates:
    """Weight states of which some are kept and the others computed when they are read."""

    recomputation: Recomputation

    def __len__(self) -> int:
        """Return the number of states, S + 1."""
        return len(self.recomputation.kept)

    def __getitem__(self, state: int) -> Float[Tensor, " P"]:
        """Read one state, computed in the dtype of the weights.

        Raises:
            IndexError: The run has no such state.
        """
        return self.at(state, _own_spec(self.recomputation))

    def at(self, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
        """Read one state, computed in the dtype and on the device of a computation.

        Raises:
            IndexError: The run has no such state.
        """
        if not 0 <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1}: got {state}.")
        return self.recomputation.state(state, spec)


@dataclass(frozen=True, eq=False)
class RecomputedUpdates:
    """Coefficients of steps, computed with the states where a preconditioner scales them."""

    recomputation: Recomputation

    def __len__(self) -> int:
        """Return the number of steps, S."""
        return len(self.recomputation.updates)

    def __getitem__(self, step: int) -> UpdateCoefficients:
        """Read the coefficients of one step, computed in the dtype of the weights.

        Raises:
            IndexError: The run has no such step.
        """
        return self.at(step, _own_spec(self.recomputation))

    def at(self, step: int, spec: TensorSpec) -> UpdateCoefficients:
        """Read the coefficients of one step, computed in the dtype and on the device of a computation.

        Raises:
            IndexError: The run has no such step.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in 0..{len(self) - 1}: got {step}.")
        return self.recomputation.update(step, spec)

    @property
    def is_scaled(self) -> bool:
        """Whether a preconditioner scales any of them."""
        return self.recomputation.is_scaled

    def held(self, step: int) -> UpdateCoefficients:
        """Return what is held of one step's coefficients: one number per parameter where a scale says the others."""
        return self.recomputation.updates[step]


def _own_spec(recomputation: Recomputation) -> TensorSpec:
    return recomputation.run.model.spec


def recomputed_run(run: Trajectory, kept: KeptStates, updates: CompactUpdates) -> Trajectory:
    """Return a run whose states between kept ones are computed when they are read.

    Args:
        run: The run with `kept` in the place of its states and `updates` in that of its coefficients.
        kept: The kept states.
        updates: The coefficients.
    """
    own = Recomputation(run, kept, updates)
    return replace(run, states=RecomputedStates(own), updates=RecomputedUpdates(own))


def recomputation_of(trajectory: Trajectory) -> Recomputation | None:
    """Return how the states of a run, or of the run that an average is made of, are computed; None if all are kept."""
    states = trajectory.trained.states
    return states.recomputation if isinstance(states, RecomputedStates) else None
