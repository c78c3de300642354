"""Steps of a path made again from its kept states: their order, and the choice between several ways (`Steps`).

The loop's own step is repeated in the run's own dtype: the rows and random numbers of its passes, torch's kernels,
gradients that add up in `.grad`, clipping, and torch's optimizer from its recorded state. Each state is compared with
the recorded checksum, and the last one with the kept state, so nothing is assumed. The loop's way of computing its loss
is not recorded: the first stretch that is read decides, by the first of the usual ways that gives its bits (`Plan`);
the other stretches follow that plan. If the loop's bits cannot be reproduced, the update rule makes the steps on exact
gradients, in any dtype.

A *segment* is the part of a stretch between two kept states that is held: the whole stretch if it fits into memory,
otherwise as many steps, or the square root of the stretch's. The starts of the other segments are stored beside it. So
a stretch is made at most twice.
"""

import copy
import math
import shutil
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, pairwise, product, starmap
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from epk_gp.core.gradients import PassData, TrainingReplay, seen_targets
from epk_gp.core.losses import ClassLoss, loop_losses, loss_input
from epk_gp.core.model import leaves_of, write_state
from epk_gp.core.plans import TensorSpec
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.torch_overrides import disable_fused_attention, kernels_of_the_loop
from epk_gp.core.trajectory import Trajectory, aligned, initial_momentum
from epk_gp.core.update_law import STILL, OptimizerMemory, UpdateLaw, restore_update, scaled_fields, still_weights
from epk_gp.optimizers.torch_rules import RULES, state_of, states_before
from epk_gp.optimizers.update_rules import (
    NO_UPDATE,
    ClipValue,
    LinearStep,
    UpdateCoefficients,
    broadcast_to_params,
    clip_kind,
    predict_step,
    shown_clip,
    stack_coefficients,
)

# Bytes of computed states that are held for the next reader, in addition to the current segment. A choice.
HELD_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Steps:
    """A way to make the steps of a path again.

    Attributes:
        kept: The kept states, [s], which `numbers` names.
        spec: Dtype and device of the computed states.
        restarts: The kept states from which steps can be made without the steps before them.
        begin: Returns the optimizer's state at such a kept state, in a form that can be stored.
        step: Makes a step, given its number, the weights before it, the optimizer's state, and a function that returns
            an earlier state. Returns weights, the optimizer's state, and coefficients.
        unpacked: Returns the optimizer's state from its stored form.
        packed: Returns the stored form of the optimizer's state.
    """

    kept: Any
    spec: TensorSpec
    restarts: Collection[int]
    begin: Callable[[int], Any]
    step: Callable[[int, Tensor, Any, Callable[[int], Tensor]], tuple[Tensor, Any, Any]]
    unpacked: Callable[[Any], Any] = lambda memory: memory
    packed: Callable[[Any], Any] = lambda memory: memory


class Segment(NamedTuple):
    """Consecutive steps, made again: the state before each step and after the last, and the coefficients of each."""

    states: list[Tensor]
    updates: list[UpdateCoefficients]


class Segments:
    """The steps of a run, made again when they are read; used by one thread at a time."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.numbers, kept = steps, {*steps.kept.numbers}, steps.kept
        self.step_bytes = 2 * kept_state(kept, 0, steps.spec).nbytes  # a state, and coefficients
        stretches = [*pairwise((*kept.numbers, len(kept) - 1))]  # the last stretch is empty if the last state is kept
        longest = max((end - first for first, end in stretches), default=1)
        self.most = max(HELD_BYTES // max(1, self.step_bytes), math.isqrt(max(1, longest) - 1) + 1)
        self.bounds = [*(s for first, end in stretches for s in range(first, end, self.most)), len(kept) - 1]
        self.made = dict[int, Segment]()  # the most recently used is last
        self.starts = dict[int, Path | None]()  # files with the starts of segments; None if stored with the run
        self._current: tuple[int, list[Tensor]] = (0, [])  # the states of the segment that is being made

    def segment(self, step: int) -> tuple[Segment, int]:
        """Return the segment of a step, and the step's position in it."""
        place = bisect_right(self.bounds, step, hi=len(self.bounds) - 1) - 1
        if place not in self.made:
            self._make(place)
        self.made[place] = made = self.made.pop(place)
        while len(self.made) > 2 and sum(len(held.states) for held in self.made.values()) > self.most:
            del self.made[next(iter(self.made))]
        return made, step - self.bounds[place]

    def missed(self, stretch: int) -> str | None:
        """Make a stretch, given by its number, and return the reason if that fails; None if it succeeds."""
        try:
            self.segment(self.steps.kept.numbers[stretch + 1] - 1)
        except _ERRORS as error:
            self.starts.clear()
            return str(error)
        return None

    def state(self, state: int) -> Float[Tensor, " P"]:
        """Return a state, kept or made; a state between two segments is also the end of the first."""
        if state in self.numbers:
            return kept_state(self.steps.kept, state, self.steps.spec)
        held = ((self.bounds[place], made.states) for place, made in reversed(self.made.items()))
        for first, states in chain([self._current], held):
            if 0 <= state - first < len(states):
                return states[state - first]
        made, place = self.segment(state)
        return made.states[place]

    def _make(self, place: int) -> None:
        """Make a segment, and the segments before it since the last possible start."""
        bounds, steps, first = self.bounds, self.steps, place
        while first not in self.starts and bounds[first] not in steps.restarts:
            first -= 1
        self.starts = self.starts if first in self.starts else {first: None}
        file, w = self.starts[first], None
        w, packed = (w, steps.begin(bounds[first])) if file is None else torch.load(file, weights_only=False)
        memory = steps.unpacked(packed)
        for number in range(first, place + 1):
            begun, end = bounds[number], bounds[number + 1]
            made = Segment([self.state(begun) if begun in self.numbers else w], [])
            for index in range(begun, end):
                self._current = begun, made.states
                w, memory, update = steps.step(index, made.states[-1], memory, self.state)
                made.states.append(w)
                made.updates.append(update)
            if number + 2 < len(bounds) and end not in steps.restarts:
                self.starts[number + 1] = file = self._folder / f"{number - min(self.starts)}.pt"  # overwritten
                torch.save((w, steps.packed(memory)), file)
        self.made[place] = made

    @cached_property
    def _folder(self) -> Path:
        folder = tempfile.mkdtemp(prefix="epk_gp-states-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return Path(folder)


def state_before(run: Trajectory, index: int, w: Float[Tensor, " P"]) -> Float[Tensor, " PQ"]:
    """Return the weights before a step with the recorded moving statistics."""
    return w if run.statistics is None else torch.cat([w, run.statistics[index].to(w)])


def moved(step: Step, w: Float[Tensor, " P"], earlier: Callable[[int], Tensor]) -> Float[Tensor, " P"]:
    """Return the weights after the step's move, given the weights w after the optimizer's step and earlier states."""
    return w if step.move is None else torch.lerp(w, earlier(step.move.anchor), step.move.share)


def is_scaled(run: Trajectory) -> bool:
    """Whether a preconditioner scales any coefficients of a run, so that they are computed again with its states."""
    return any(scaled_fields(run.optimizer_groups, run.model.names))


def kept_state(kept: Any, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
    """Read a kept state for a computation."""
    return aligned(kept[state].to(dtype=spec.dtype, device=spec.device))


def load_optimizer(optimizer: Optimizer, recorded: Mapping[str, Any]) -> None:
    """Load an optimizer's state in its recorded dtypes: torch loads all but "step" in the parameter's dtype.

    NAdam's product of momenta is float32 for weights of any dtype; in float64 the next steps would differ.
    """
    optimizer.load_state_dict(copy.deepcopy(dict(recorded)))  # it keeps the tensors without copying
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in recorded["state"].items():
        loaded = optimizer.state[parameters[index]]
        for name, value in state.items():
            if isinstance(value, Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device, copy=True)


class _MissedError(Exception):
    """The reason that a step cannot be made again bit by bit."""


# Exceptions from rebuilding an optimizer and a pass of a run of another machine, version or loop.
_ERRORS = (_MissedError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_NUM_LOSSES = 6  # largest number of ways in `loop_losses`, plus the sum over rows


class Plan(NamedTuple):
    """The kernels of a loop's passes, and the number of the usual way in which it computed its loss."""

    kernels: Callable[[], AbstractContextManager[None]]
    loss: int


class _Loop(TrainingReplay):
    """Makes steps as the loop made them, on one device, and compares each state with the recorded one.

    Args:
        run: The run, whose coefficients are compact.
        kept: The kept states, with the stored replay data (`replay_row`).
        updates: The coefficients.
        device: Device of the network.
        plan: The plan of the passes.
    """

    def __init__(self, run: Trajectory, kept: Any, updates: Any, device: torch.device, plan: Plan) -> None:
        model = run.model.variant(TensorSpec(run.dtype, device))
        super().__init__(model, run.loss, model.spec)
        self.run, self.kept, self.updates, self.plan = run, kept, updates, plan
        self.numbers, self.data = {*kept.numbers}, RunReplay(run, model, torch.empty(0)).data

    def begin(self, state: int) -> Any:
        """Return the stored state of the optimizers after a kept state."""
        row = self.kept.replay_row(state)
        if "optimizers" not in row:
            raise _MissedError("the optimizer's state was not stored with it")
        return row["optimizers"]

    def optimizers(self, states: Sequence[Mapping[str, Any]]) -> list[Optimizer]:
        """Make the loop's optimizers on the network of the passes, in their recorded state."""
        named = dict(self.module_in_modes(self.data(self.run.steps[0])[0]).named_parameters())
        groups, made = iter(self.run.optimizer_groups), list[Optimizer]()
        for state in states:
            own = list(islice(groups, len(state["param_groups"])))
            if len(own) < len(state["param_groups"]):
                raise _MissedError("a group of parameters came later")
            kind: Any = getattr(optim, own[0].rule, None)
            if kind not in RULES:
                raise _MissedError(f"its optimizer ({own[0].rule or 'with a rule of its own'}) is none of torch's")
            optimizer = kind([{"params": [named[name] for name in group.names]} for group in own], lr=1e-3)
            load_optimizer(optimizer, state)
            made.append(optimizer)
        return made

    def step(
        self, index: int, w: Float[Tensor, " P"], optimizers: list[Optimizer], earlier: Callable[[int], Tensor]
    ) -> tuple[Float[Tensor, " P"], list[Optimizer], UpdateCoefficients]:
        """Make a step, and return the weights after it and all of its coefficients.

        Raises:
            _MissedError: The weights after it are not the recorded ones.
        """
        model, step, passes = self.model, self.run.steps[index], self.data(self.run.steps[index])
        row, update, places = self.kept.replay_row(index + 1), self.updates[index], self.updates.places(index)
        groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        for group, options in zip(groups, row["options"], strict=True):
            group.update(options)
        state, module = state_before(self.run, index, w), self.module_in_modes(passes[0])
        named, steps = dict(zip(model.names, leaves_of(module, model, state), strict=True)), dict[str, LinearStep]()
        for data in passes:
            self._backward(state, data)
        write_state(module, model, w)  # a pass may have changed them
        self._edit_gradients(module, named, update, w)
        names = {p: name for name, p in named.items()}
        for optimizer in optimizers:
            rule = RULES[type(optimizer)]
            members = [(names[p], p, group) for group in optimizer.param_groups for p in group["params"]]
            before = states_before(optimizer, {name: p for name, p, _ in members}, rule.needs_before)
            optimizer.step()
            for name, p, group in members if places else ():
                if p.grad is not None:
                    steps[name] = rule.coefficients(p, group, before.get(name, {}), state_of(optimizer, p))
        whole = stack_coefficients([steps.get(name, NO_UPDATE) for name in model.names], model.sizes)
        w, is_kept = moved(step, model.flatten(named), earlier), index + 1 in self.numbers
        is_same = crc32(tensor_bytes(w)) == row["checksum"]
        if not is_same or (is_kept and not torch.equal(w, kept_state(self.kept, index + 1, self.spec))):
            threads, own = row["threads"], torch.get_num_threads()
            hint = "" if threads == own else f": the run was made with {threads} threads, here are {own}"
            raise _MissedError(f"step {index}, made again, ends at other bits{hint}")
        return w, optimizers, replace(update, **{name: getattr(whole, name) for name in places})

    def _backward(self, state: Float[Tensor, " PQ"], data: PassData) -> None:
        """Make a pass from the state before its step; its gradients are added to the network's."""
        module = self.module_in_modes(data)
        write_state(module, self.model, self.state(state, data))
        with torch.enable_grad(), self.plan.kernels():
            with self.conditions(module, data, exact=False):
                returned = self.call(module, data, exact=False)
                factor, function = self._losses(returned, data)[self.plan.loss]
                loss = factor * function()
            loss.backward()

    def _losses(self, returned: Any, data: PassData) -> list[tuple[float, Callable[[], Tensor]]]:
        """Return possible ways in which the loop computed its loss, each a factor and a function."""

        def sum_of_rows() -> Tensor:
            values = self.losses_of(returned, data)
            return data.c.to(values) @ values

        seen, y = data.forward.targets, data.y.to(self.spec.device)
        is_mixed = isinstance(self.loss, ClassLoss) and seen is not None and seen.values.is_floating_point()
        if is_mixed or data.forward.cotangents is not None:
            return [(1.0, sum_of_rows)]
        value = loss_input(self.model.signature, self.loss, returned, data.y)
        return [*loop_losses(self.loss, returned, value, seen_targets(y, seen), data.c), (1.0, sum_of_rows)]

    def _edit_gradients(
        self, module: nn.Module, named: Mapping[str, Tensor], update: UpdateCoefficients, w: Float[Tensor, " P"]
    ) -> None:
        """Omit, mask and clip gradients as the loop did: as stated, or as the step's coefficients show."""
        model, fields = self.model, ("grad_scale", *STILL)
        c = {name: broadcast_to_params(getattr(update, name), model.sizes, w) for name in fields}
        for name, is_still in zip(model.names, still_weights(c).split(list(model.sizes)), strict=True):
            p = named[name]
            p.grad = None if is_still.all() else torch.zeros_like(p) if p.grad is None else p.grad
        g, scale = model.flatten({name: p if p.grad is None else p.grad for name, p in named.items()}), c["grad_scale"]
        is_by_entry = clip_kind(update, len(g)) is ClipValue  # otherwise the factors are the loop's own
        for name, factor in model.unflatten((scale != 0).to(g) if is_by_entry else scale.abs()).items():
            if (p := named[name]).grad is not None and not bool((factor == 1).all()):
                p.grad *= factor
        if is_by_entry and (clip := self.run.clip or shown_clip(update, scale, g)) is not None:
            clip.clip_gradients(module)


def loop_segments(
    run: Trajectory, kept: Any, updates: Any, device: torch.device, stretch: int
) -> tuple[Segments, str | None]:
    """Find the plan that reproduces the bits of a stretch.

    Returns:
        The loop's steps; and the reason that the first plan fails, None if one of the plans reproduces the bits.
    """
    reasons, spec = list[str](), TensorSpec(run.dtype, device)
    # in float64 the update rule gives the states too, whatever other threads do
    own = [kernels_of_the_loop] * (run.dtype != torch.float64)
    for plan in starmap(Plan, product([*own, disable_fused_attention], range(_NUM_LOSSES))):
        loop = _Loop(run, kept, updates, device, plan)
        segments = Segments(Steps(kept, spec, loop.numbers, loop.begin, loop.step, loop.optimizers, _states))
        if (reason := segments.missed(stretch)) is None:
            return segments, None
        reasons.append(reason)
    return segments, reasons[0]


def _states(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [optimizer.state_dict() for optimizer in optimizers]


def rule_steps(run: Trajectory, kept: Any, updates: Any, spec: TensorSpec) -> Steps:
    """Return the steps of the update rule on exact gradients; momentum and scales follow from all earlier gradients.

    Args:
        run: The run, whose states are the kept ones and whose coefficients are compact.
        kept: The kept states. Each one restarts the steps, independent of earlier computations.
        updates: The coefficients.
        spec: Dtype and device.
    """
    model, reference = run.model.variant(spec), torch.empty(0, dtype=spec.dtype, device=spec.device)
    replay = RunReplay(run, model, reference)
    # without scales no step depends on the options of the optimizer
    law = UpdateLaw(run, reference) if is_scaled(run) else None
    momentum = initial_momentum(run, reference.new_zeros(run.num_weights))
    first = OptimizerMemory(momentum, (), reference) if law is None else law.initial()

    def step(
        index: int, w: Tensor, memory: OptimizerMemory, earlier: Callable[[int], Tensor]
    ) -> tuple[Tensor, OptimizerMemory, UpdateCoefficients]:
        g = replay.gradient_at(run.steps[index], state_before(run, index, w))[0][: len(w)]
        update = updates[index]
        if law is not None:
            own = law.step(index)
            scales, memory = own.scales(memory, own.decayed(w, g))
            update = restore_update(replace(update, places=updates.places(index)), own.parts, scales, own.sizes)
        d, momentum = predict_step(update, model.sizes, w, g, memory.momentum)
        return moved(run.steps[index], w + d, earlier), replace(memory, momentum=momentum), update

    restarts = {0} if law is not None or run.has_momentum else {*kept.numbers}
    return Steps(kept, spec, restarts, lambda _: first, step)
