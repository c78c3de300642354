"""Steps of a run made again from its kept states: in which order, and bit by bit as the loop made them.

Between kept states the loop's own step is repeated in the run's own dtype: the rows and random numbers of its passes,
torch's kernels, gradients that add up in `.grad`, clipping, and torch's optimizer from the state that it had. Each
state is compared with the recorded checksum and the last one with the kept state, so nothing is believed. How the loop
computed its loss is not recorded: the usual ways are tried (`loop_losses`), and the one that gives the bits is kept.

A *segment* is what is held of a stretch between two kept states: all of it where it fits into memory, else as many
steps, or the root of the stretch's; what the others begin with lies beside. So a stretch is made at most twice.
"""

import copy
import math
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from epk_gp.core.gradients import PassData, RunReplay, TrainingReplay, seen_targets
from epk_gp.core.losses import ClassLoss, loop_losses, loss_input
from epk_gp.core.model import write_state
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.torch_overrides import disable_fused_attention, kernels_of_the_loop
from epk_gp.core.trajectory import Trajectory, aligned
from epk_gp.core.update_law import STILL, still_weights
from epk_gp.optimizers.torch_rules import RULES, state_of, states_before
from epk_gp.optimizers.update_rules import (
    NO_UPDATE,
    LinearStep,
    UpdateCoefficients,
    broadcast_to_params,
    stack_coefficients,
    step_clip,
)

# Bytes of computed states that are held for the next reader, beside the segment that is read. A choice.
HELD_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive steps, made again.

    Attributes:
        states: The state before each step, and the one after the last.
        updates: The coefficients of each step; empty where no preconditioner scales any.
        after: What the steps after it begin with.
    """

    states: list[Tensor]
    updates: list[UpdateCoefficients]
    after: Any

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = [*self.states, *(value for update in self.updates for value in update)]
        return sum(value.nbytes for value in tensors)


class Segments(ABC):
    """The steps of a run, made again when they are read; to be used by one thread at a time.

    Args:
        kept: The kept states, [s], which `numbers` names.
        spec: Dtype and device in which states are made.
        step_bytes: Bytes that a step takes in a segment.
    """

    def __init__(self, kept: Any, spec: TensorSpec, step_bytes: int) -> None:
        self.kept, self.spec, self.step_bytes, numbers = kept, spec, step_bytes, kept.numbers
        longest = max((end - first for first, end in pairwise(numbers)), default=1)
        most = max(HELD_BYTES // max(1, step_bytes), math.isqrt(longest - 1) + 1)
        begun = [s for first, end in pairwise(numbers) for s in range(first, end, most)]
        self.bounds: list[int] = [*begun, numbers[-1]]
        self.numbers, self.made = {*numbers}, dict[int, Segment]()  # the one used last stands last
        self.starts = dict[int, Path | None]()  # files with what segments begin with; None of what is stored

    @abstractmethod
    def make(self, first: int, end: int, start: Any) -> Segment:
        """Make the steps from one state to another."""

    @abstractmethod
    def is_stored(self, state: int) -> bool:
        """Whether a segment can begin at a state without the steps before it."""

    @abstractmethod
    def stored(self, state: int) -> Any:
        """Return what a segment begins with at such a state."""

    @property
    def is_divided(self) -> bool:
        """Whether a stretch is made twice, for not all of it is held."""
        return len(self.bounds) > len(self.numbers)

    def segment(self, step: int) -> tuple[Segment, int]:
        """Return the segment of a step, and the step's place in it."""
        place = bisect_right(self.bounds, step) - 1
        if place not in self.made:
            self._make(place)
        self.made[place] = made = self.made.pop(place)
        while len(self.made) > 2 and sum(held.nbytes for held in self.made.values()) > HELD_BYTES:
            del self.made[next(iter(self.made))]
        return made, step - self.bounds[place]

    def state(self, state: int) -> Float[Tensor, " P"]:
        """Return a state: kept, or made; one between two segments is the end of the one before too."""
        if state in self.numbers:
            return kept_state(self.kept, state, self.spec)
        for place in reversed(self.made):
            if self.bounds[place] <= state <= self.bounds[place + 1]:
                return self.made[place].states[state - self.bounds[place]]
        made, place = self.segment(state)
        return made.states[place]

    def after_move(self, w: Float[Tensor, " P"], step: Step, states: Sequence[Tensor]) -> Float[Tensor, " P"]:
        """Return the weights w, which the optimizer's step left, after the step's move, given the states before."""
        if step.move is None:
            return w
        place = step.move.anchor - step.index - 1  # from the end
        return torch.lerp(w, states[place] if -place <= len(states) else self.state(step.move.anchor), step.move.share)

    def _make(self, place: int) -> None:
        """Make a segment, and those before it from where steps can begin; the first time all of the stretch."""
        first = last = place
        while first not in self.starts and not self.is_stored(self.bounds[first]):
            first -= 1
        if first not in self.starts:
            self.starts = {first: None}
            while self.bounds[last + 1] not in self.numbers:
                last += 1
        file = self.starts[first]
        start = self.stored(self.bounds[first]) if file is None else torch.load(file, weights_only=False)
        for number in range(first, last + 1):
            made = self.make(self.bounds[number], self.bounds[number + 1], start)
            start = made.after
            if number + 2 < len(self.bounds) and not self.is_stored(self.bounds[number + 1]):
                self.starts[number + 1] = file = self._folder / f"{number - min(self.starts)}.pt"  # written over
                torch.save(start, file)
            if number == place:
                self.made[place] = made

    @cached_property
    def _folder(self) -> Path:
        folder = tempfile.mkdtemp(prefix="epk_gp-states-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def kept_state(kept: Any, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
    """Read a kept state for a computation."""
    w: Tensor = kept[state]
    return aligned(w.to(dtype=spec.dtype, device=spec.device))


def load_optimizer(optimizer: Optimizer, recorded: Mapping[str, Any]) -> None:
    """Load an optimizer's state in the dtypes that it had: torch loads all but "step" in the parameter's dtype.

    NAdam's product of momenta is float32 for any weights; in float64 it would go on to other steps.
    """
    optimizer.load_state_dict(copy.deepcopy(dict(recorded)))  # which takes the tensors themselves
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in recorded["state"].items():
        loaded = optimizer.state[parameters[index]]
        for name, value in state.items():
            if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device, copy=True)


class _MissedError(Exception):
    """Says why a step cannot be made again bit by bit."""


# What rebuilding an optimizer and a pass may raise, of a run of another machine, version or loop.
_ERRORS = (_MissedError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_Kernels = Callable[[], AbstractContextManager[None]]
_NUM_LOSSES = 6  # the most ways that `loop_losses` gives, and the sum over rows


class _LoopPasses(TrainingReplay):
    """Makes forward and backward passes as the loop made them."""

    def backward(self, state: Float[Tensor, " PQ"], data: PassData, way: tuple[_Kernels, int]) -> None:
        """Make a pass from the state before its step; gradients are added to those of the network."""
        module, (kernels, number) = self.module_in_modes(data), way
        write_state(module, self.model, self.state(state, data))
        with torch.enable_grad(), kernels():
            with self.conditions(module, data, exact=False):
                returned = self.call(module, data, exact=False)
                factor, function = self._losses(returned, data)[number]
                loss = factor * function()
            loss.backward()

    def _losses(self, returned: Any, data: PassData) -> list[tuple[float, Callable[[], Tensor]]]:
        """Return ways in which the loop may have computed its loss, by factors and functions."""

        def sum_of_rows() -> Tensor:
            values = self.losses_of(returned, data)
            return data.c.to(values) @ values

        seen, y = data.forward.targets, data.y.to(self.spec.device)
        is_mixed = isinstance(self.loss, ClassLoss) and seen is not None and seen.values.is_floating_point()
        if is_mixed or data.forward.cotangents is not None:
            return [(1.0, sum_of_rows)]
        value = loss_input(self.model.signature, self.loss, returned, data.y)
        return [*loop_losses(self.loss, returned, value, seen_targets(y, seen), data.c), (1.0, sum_of_rows)]


class BitwiseReplay(Segments):
    """The steps of a run as the loop made them, on one device.

    Args:
        run: The run, whose coefficients are compact.
        kept: The kept states, with what is stored to make steps again (`replay_row`).
        updates: The coefficients.
        device: Where the network computes.

    Attributes:
        known: Of stretches that were tried, by their numbers, why they cannot be made again; None where they can.
    """

    def __init__(self, run: Trajectory, kept: Any, updates: Any, device: torch.device) -> None:
        model = run.model.variant(TensorSpec(run.dtype, device))
        super().__init__(kept, model.spec, 2 * model.num_weights * run.dtype.itemsize)
        self.run, self.updates, self.passes = run, updates, _LoopPasses(model, run.loss, model.spec)
        self.data = RunReplay(run, model, torch.empty(0, dtype=run.dtype, device=device)).data
        self.way: tuple[_Kernels, int] | None = None  # in which all steps so far were made
        self.known = dict[int, str | None]()

    def has(self, step: int) -> bool:
        """Whether the stretch of a step can be made again; the first time that it is asked for it is tried."""
        stretch = bisect_right(self.kept.numbers, step) - 1
        if stretch in self.known:
            return self.known[stretch] is None
        # in float64 the update rule gives the states too, whatever other threads do
        own, reasons = [kernels_of_the_loop] * (self.run.dtype != torch.float64), dict[str, None]()
        ways = product([*own, disable_fused_attention], range(_NUM_LOSSES)) if self.way is None else [self.way]
        for self._trial in ways:
            try:
                self.segment(step)
            except _ERRORS as error:
                self.starts.clear()
                reasons.setdefault(str(error))
            else:
                self.way, self.known[stretch] = self._trial, None
                return True
        others = range(len(self.kept.numbers)) if self.way is None else [stretch]  # nothing fits this run
        self.known |= dict.fromkeys(others, next(iter(reasons)))
        return False

    def is_stored(self, state: int) -> bool:
        """Whether a state is kept."""
        return state in self.numbers

    def stored(self, state: int) -> Any:
        """Return the kept weights, and the state of the optimizers."""
        row = self.kept.replay_row(state) if hasattr(self.kept, "replay_row") else {}
        if "optimizers" not in row:
            raise _MissedError("the optimizer's state was not stored with it")
        return self.state(state), row["optimizers"]

    def make(self, first: int, end: int, start: Any) -> Segment:
        """Make steps, and compare each state with the recorded one.

        Raises:
            _MissedError: A state is another one, or the optimizer is not known.
        """
        (w, recorded), run = start, self.run
        module = self.passes.module_in_modes(self.data(run.steps[first])[0])
        optimizers = self._optimizers(module, recorded)
        states, updates = [w], list[UpdateCoefficients]()
        for index in range(first, end):
            row, update = self.kept.replay_row(index + 1), self.updates[index]
            groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
            for group, options in zip(groups, row["options"], strict=True):
                group.update(options)
            scaled = replace(update, places=self.updates.places(index))
            w, update = self._step(run.steps[index], w, module, optimizers, scaled)
            w = self.after_move(w, run.steps[index], states)
            is_same = crc32(tensor_bytes(w)) == row["checksum"]
            if not is_same or (index + 1 in self.numbers and not torch.equal(w, self.state(index + 1))):
                threads, own = row["threads"], torch.get_num_threads()
                hint = "" if threads == own else f": the run was made with {threads} threads, here are {own}"
                raise _MissedError(f"step {index}, made again, ends at other bits{hint}")
            states.append(w)
            updates.append(update)
        return Segment(states, updates, (w, [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]))

    def _optimizers(self, module: nn.Module, recorded: Sequence[Mapping[str, Any]]) -> list[Optimizer]:
        """Make the optimizers of the loop on another network, in the state that they had."""
        named, groups, made = dict(module.named_parameters()), iter(self.run.optimizer_groups), list[Optimizer]()
        for state in recorded:
            own = [group for _, group in zip(state["param_groups"], groups, strict=False)]
            if len(own) < len(state["param_groups"]):
                raise _MissedError("a group of parameters came later")
            kind: Any = getattr(optim, own[0].rule, None)
            if kind not in RULES:
                raise _MissedError(f"its optimizer ({own[0].rule or 'with a rule of its own'}) is none of torch's")
            optimizer = kind([{"params": [named[name] for name in group.names]} for group in own], lr=1e-3)
            load_optimizer(optimizer, state)
            made.append(optimizer)
        return made

    def _step(
        self, step: Step, w: Tensor, module: nn.Module, optimizers: Sequence[Optimizer], update: UpdateCoefficients
    ) -> tuple[Float[Tensor, " P"], UpdateCoefficients]:
        """Make a step of the loop, and return the weights after it and its coefficients, all of them."""
        model, statistics = self.passes.model, self.run.statistics
        state = w if statistics is None else torch.cat([w, statistics[step.index].to(w)])
        named = dict(module.named_parameters())
        for name in model.names:
            named[name].grad = None
            named[name].requires_grad_(True)
        for data in self.data(step):
            self.passes.backward(state, data, self._trial)
        write_state(module, model, w)  # a pass may have seen others
        still = still_weights({name: broadcast_to_params(getattr(update, name), model.sizes, w) for name in STILL})
        for name, is_still in zip(model.names, still.split(list(model.sizes)), strict=True):
            p = named[name]
            p.grad = None if is_still.all() else torch.zeros_like(p) if p.grad is None else p.grad
        self._clip(module, update)
        steps = dict[str, LinearStep]()
        for optimizer in optimizers:
            rule = RULES[type(optimizer)]
            groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
            names = {id(named[name]): name for name in model.names}
            own = {names[id(p)]: p for p, _ in groups}
            before = states_before(optimizer, own, rule.needs_before)
            optimizer.step()
            for p, group in groups if update.places else ():
                if p.grad is not None:
                    name = names[id(p)]
                    steps[name] = rule.coefficients(p, group, before.get(name, {}), state_of(optimizer, p))
        whole = stack_coefficients([steps.get(name, NO_UPDATE) for name in model.names], model.sizes)
        scaled: dict[str, Any] = {name: getattr(whole, name) for name in update.places}
        return model.flatten(named), replace(update, **scaled, places={})

    def _clip(self, module: nn.Module, update: UpdateCoefficients) -> None:
        """Mask and clip the gradients as the loop did: as stated, or as the factors of the step show it."""
        model = self.passes.model
        g = model.flatten({name: p if p.grad is None else p.grad for name, p in module.named_parameters()})
        scale = broadcast_to_params(update.grad_scale, model.sizes, g)
        for name, kept in model.unflatten((scale != 0).to(g)).items():
            if (p := module.get_parameter(name)).grad is not None and not bool(kept.all()):
                p.grad *= kept
        clip = step_clip(self.run.clip, update, scale, g)
        if clip is not None:
            clip.clip_gradients(module)
