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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer

from epk_gp.core.gradients import PassData, RunReplay, TrainingReplay
from epk_gp.core.graphs import tensors_of
from epk_gp.core.losses import (
    ClassLoss,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    PerSampleLoss,
    cast_targets,
    classes_second,
    fit_targets,
    ignored_class,
    loss_input,
    sample_weights,
)
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.torch_overrides import disable_fused_attention, kernels_of_the_loop
from epk_gp.core.trajectory import Trajectory, aligned
from epk_gp.optimizers.torch_rules import RULES, state_of, states_before
from epk_gp.optimizers.update_rules import (
    NO_UPDATE,
    LinearStep,
    UpdateCoefficients,
    broadcast_to_params,
    is_clipped,
    stack_coefficients,
    step_clip,
)

# Bytes of computed states that are held for the next reader, beside the segment that is read; and bytes of what
# segments begin with, from which on it lies in temporary files. A choice.
HELD_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive steps, made again.

    Attributes:
        states: The state before each step, and the one after the last.
        updates: The coefficients of each step; empty where they are held as recorded.
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


class _Starts:
    """What segments begin with, by their number: in memory, or in temporary files."""

    def __init__(self) -> None:
        self._held, self._bytes, self._folder = dict[int, Any](), 0, ""

    def clear(self) -> None:
        self._held, self._bytes = {}, 0

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def __getitem__(self, number: int) -> Any:
        start = self._held[number]
        return torch.load(start, weights_only=False) if isinstance(start, Path) else start

    def put(self, number: int, start: Any, num_bytes: int) -> None:
        if self._bytes + num_bytes > HELD_BYTES:
            if not self._folder:
                self._folder = tempfile.mkdtemp(prefix="epk_gp-states-")
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            file = Path(self._folder) / f"{number - min(self._held, default=number)}.pt"  # again after clear()
            torch.save(start, file)
            start = file
        else:
            self._bytes += num_bytes
        self._held[number] = start


class Segments(ABC):
    """The steps of a run, made again when they are read; to be used by one thread at a time.

    Args:
        numbers: Which states are kept, in ascending order: the first, the last, and others.
        step_bytes: Bytes that a step takes in a segment.
        start_bytes: Bytes of what a segment begins with.
        is_whole: Whether a stretch is made as a whole before anything of it is used.
    """

    def __init__(self, numbers: Sequence[int], step_bytes: int, start_bytes: int, *, is_whole: bool = False) -> None:
        self._start_bytes, self._is_whole, self.step_bytes = start_bytes, is_whole, step_bytes
        longest = max((end - first for first, end in pairwise(numbers)), default=1)
        most = max(HELD_BYTES // max(1, step_bytes), math.isqrt(longest - 1) + 1)
        self.bounds = [s for first, end in pairwise(numbers) for s in range(first, end, most)] + [numbers[-1]]
        self.kept, self.starts, self.made = {*numbers}, _Starts(), dict[int, Segment]()  # the one used last stands last

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
        return len(self.bounds) > len(self.kept)

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
        """Return a state that is not kept; one between two segments is the end of the one before too."""
        for place in reversed(self.made):
            if self.bounds[place] <= state <= self.bounds[place + 1]:
                return self.made[place].states[state - self.bounds[place]]
        made, place = self.segment(state)
        return made.states[place]

    def _make(self, place: int) -> None:
        first = last = place
        while first not in self.starts and not self.is_stored(self.bounds[first]):
            first -= 1
        if first not in self.starts:
            self.starts.clear()  # of another stretch
            self.starts.put(first, self.stored(self.bounds[first]), self._start_bytes)
            while self._is_whole and self.bounds[last + 1] not in self.kept:
                last += 1
        start = self.starts[first]
        for number in range(first, last + 1):
            made = self.make(self.bounds[number], self.bounds[number + 1], start)
            start = made.after
            if number + 2 < len(self.bounds) and not self.is_stored(self.bounds[number + 1]):
                self.starts.put(number + 1, start, self._start_bytes)
            if number == place:
                self.made[place] = made


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


def loop_losses(loss: Loss, returned: Any, value: Any, data: PassData) -> list[Callable[[], Tensor]]:
    """Return ways in which a loop may have computed the loss of a pass from what the network returned.

    They are equal but for rounding: a loss that the network returned itself; torch's function on all positions in one
    dimension, or on classes second; the mean or the sum of the rows' losses.

    Args:
        loss: The stated loss.
        returned: What the network returned.
        value: What the loss takes of it.
        data: The pass.
    """
    y, seen = data.y.to(value.device if isinstance(value, Tensor) else data.y.device), data.forward.targets
    if seen is not None:
        if seen.values.is_floating_point() and isinstance(loss, ClassLoss):
            return []  # mixed labels
        y = y.index_copy(0, seen.index.to(y.device), seen.values.to(y))
    y, ways, number = cast_targets(y, value), list[Callable[[], Tensor]](), torch.ones(len(y), dtype=torch.float64)
    own = [z for z in tensors_of(returned) if z.ndim == 0 and z.requires_grad]
    for reduction, expected in {loss.reduction: sample_weights(loss, y), "sum": number}.items():
        if (factor := _common_factor(data.c, expected.to(data.c))) is None:
            continue  # weights of rows
        functions: list[Any] = [lambda: own[0]] * bool(own and reduction == loss.reduction)
        if isinstance(loss, ClassLoss):
            weights = None if loss.class_weights is None else value.new_tensor(loss.class_weights)
            options: dict[str, Any] = {"weight": weights, "ignore_index": ignored_class(loss), "reduction": reduction}
            options |= {"label_smoothing": loss.label_smoothing} if isinstance(loss, CrossEntropy) else {}
            call: Any = F.cross_entropy if isinstance(loss, CrossEntropy) else F.nll_loss
            z = classes_second(value, y)
            if z.ndim > 2 and not y.is_floating_point():
                functions.append(partial(call, z.movedim(1, -1).reshape(-1, z.shape[1]), y.reshape(-1), **options))
            functions.append(partial(call, z, y, **options))
        elif isinstance(loss, MeanSquaredError):
            functions.append(partial(F.mse_loss, value, fit_targets(y, value), reduction=reduction))
        elif isinstance(loss, PerSampleLoss):
            fitted = fit_targets(y, value) if isinstance(value, Tensor) else y
            functions.append(partial(_reduced, loss, value, fitted, reduction))
        ways += [partial(_scaled, factor, function) for function in functions]
    return ways


def _reduced(loss: PerSampleLoss, value: Any, y: Tensor, reduction: str) -> Tensor:
    result: Tensor = getattr(loss.function(value, y), reduction)()
    return result


def _scaled(factor: float, function: Callable[[], Tensor]) -> Tensor:
    return factor * function()


def _common_factor(c: Float[Tensor, " n"], expected: Float[Tensor, " n"]) -> float | None:
    """Return the number by which expected weights become c, up to the rounding of one that was read 1/k."""
    factors = (c / expected)[expected != 0]
    if not len(factors) or bool((factors - factors[0]).abs().max() > 1e-9 * factors[0].abs()):
        return None
    factor = float(factors[0])
    count = round(1 / factor) if factor else 0
    return 1 / count if count and abs(factor * count - 1) < 1e-6 else factor


class _MissedError(Exception):
    """Says why a step cannot be made again bit by bit."""


# What rebuilding an optimizer and a pass may raise, of a run of another machine, version or loop.
_ERRORS = (_MissedError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_Kernels = Callable[[], AbstractContextManager[None]]
_NUM_LOSSES = 6  # the most ways that `loop_losses` gives, and the sum over rows
_WAYS = [
    (kernels, number) for kernels in (kernels_of_the_loop, disable_fused_attention) for number in range(_NUM_LOSSES)
]


class _LoopPasses(TrainingReplay):
    """Makes forward and backward passes as the loop made them."""

    def backward(self, state: Float[Tensor, " PQ"], data: PassData, way: tuple[_Kernels, int]) -> None:
        """Make a pass from the state before its step; gradients are added to those of the network."""
        module, (kernels, number) = self._module(data, exact=False), way
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, value in self.model.unflatten(self.state(state, data, exact=False)).items():
                named[name].copy_(value)
        with torch.enable_grad(), kernels():
            with self.conditions(module, data, exact=False):
                returned = self.call(module, data, exact=False)
                loss = self._ways(returned, data)[number]()
            loss.backward()

    def _ways(self, returned: Any, data: PassData) -> list[Callable[[], Tensor]]:
        sum_of_rows = partial(self._sum_of_rows, returned, data)
        if data.forward.cotangents is not None:
            return [sum_of_rows]
        value = loss_input(self.model.signature, self.loss, returned, data.y)
        return [*loop_losses(self.loss, returned, value, data), sum_of_rows]

    def _sum_of_rows(self, returned: Any, data: PassData) -> Tensor:
        values = self.losses_of(returned, data)
        return data.c.to(values) @ values

    def network(self, data: PassData) -> nn.Module:
        """Return the network that makes a pass."""
        return self._module(data, exact=False)


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
        self.run, self.states, self.updates = run, kept, updates
        model = run.model.variant(TensorSpec(run.dtype, device))
        self.passes = _LoopPasses(model, run.loss, model.spec)
        self.data = RunReplay(run, model, torch.empty(0, dtype=run.dtype, device=device)).data
        num_bytes = model.num_weights * run.dtype.itemsize
        super().__init__(kept.numbers, 2 * num_bytes, 3 * num_bytes, is_whole=True)
        self.way: tuple[_Kernels, int] | None = None  # in which all steps so far were made
        self.known = dict[int, str | None]()

    def has(self, step: int) -> bool:
        """Whether the stretch of a step can be made again; the first time that it is asked for it is tried."""
        stretch = bisect_right(self.states.numbers, step) - 1
        if stretch in self.known:
            return self.known[stretch] is None
        ways, reasons = _WAYS if self.way is None else [self.way], dict[str, None]()
        if self.run.dtype == torch.float64:  # where the update rule gives the states too, whatever other threads do
            ways = [way for way in ways if way[0] is disable_fused_attention]
        for self._trial in ways:
            try:
                self.segment(step)
            except _ERRORS as error:
                self.starts.clear()
                reasons.setdefault(str(error))
            else:
                self.way, self.known[stretch] = self._trial, None
                return True
        others = range(len(self.states.numbers)) if self.way is None else [stretch]  # nothing fits this run
        self.known |= dict.fromkeys(others, next(iter(reasons)))
        return False

    def is_stored(self, state: int) -> bool:
        """Whether a state is kept."""
        return state in self.kept

    def stored(self, state: int) -> Any:
        """Return the kept weights, and the state of the optimizers."""
        row = self.states.replay_row(state) if hasattr(self.states, "replay_row") else {}
        if "optimizers" not in row:
            raise _MissedError("the optimizer's state was not stored with it")
        if (threads := row["threads"]) != torch.get_num_threads():
            self._hint = f": the run was made with {threads} threads, here are {torch.get_num_threads()}"
        return self._kept(state), row["optimizers"]

    def make(self, first: int, end: int, start: Any) -> Segment:
        """Make steps, and compare each state with the recorded one.

        Raises:
            _MissedError: A state is another one, or the optimizer is not known.
        """
        (w, recorded), run = start, self.run
        module = self.passes.network(self.data(run.steps[first])[0])
        optimizers = self._optimizers(module, recorded)
        states, updates = [w], list[UpdateCoefficients]()
        for index in range(first, end):
            row, update = self.states.replay_row(index + 1), self.updates[index]
            groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
            for group, options in zip(groups, row["options"], strict=True):
                group.update(options)
            scaled = replace(update, places=self.updates.places(index))
            w, update = self._step(run.steps[index], w, module, optimizers, scaled)
            if (move := run.steps[index].move) is not None:
                near = range(first, index + 1)
                w = torch.lerp(
                    w, states[move.anchor - first] if move.anchor in near else self._kept(move.anchor), move.share
                )
            is_same = crc32(tensor_bytes(w)) == row["checksum"]
            if not is_same or (index + 1 in self.kept and not torch.equal(w, self._kept(index + 1))):
                raise _MissedError(f"step {index}, made again, ends at other bits{self._hint}")
            states.append(w)
            updates += [update] * bool(scaled.places)
        return Segment(states, updates, (w, [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]))

    _hint = ""  # why bits may be others

    def _kept(self, state: int) -> Tensor:
        if state not in self.kept:
            raise _MissedError(f"it needs state {state}, which is not kept")
        spec = self.passes.model.spec
        return aligned(self.states[state].to(dtype=spec.dtype, device=spec.device))

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
        with torch.no_grad():
            for name, value in model.unflatten(w).items():  # a pass may have seen others
                named[name].copy_(value)
        for name, is_moved in zip(model.names, _moved(update, model.sizes), strict=True):
            p = named[name]
            p.grad = None if not is_moved else torch.zeros_like(p) if p.grad is None else p.grad
        self._clip(module, update)
        steps = dict[str, LinearStep]()
        for optimizer in optimizers:
            rule, groups = (
                RULES[type(optimizer)],
                [(p, group) for group in optimizer.param_groups for p in group["params"]],
            )
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
        """Clip the gradients as the loop did: as stated, or as the factors of the step show it."""
        model = self.passes.model
        clip = self.run.clip
        if clip is None and is_clipped(update):
            parts = {name: p if p.grad is None else p.grad for name, p in module.named_parameters()}
            g = model.flatten(parts)
            clip = step_clip(None, update, broadcast_to_params(update.grad_scale, model.sizes, g), g)
        if clip is not None:
            clip.clip_gradients(module)


def _moved(update: UpdateCoefficients, sizes: Sequence[int]) -> Iterator[bool]:
    """Yield of each parameter whether the optimizer moved it or its buffer, by the coefficients of its first weight."""
    firsts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    still = {"lr": 0.0, "momentum_lr": 0.0, "beta": 1.0, "one_minus_dampening": 0.0}
    for k in range(len(sizes)):
        values = {name: getattr(update, name) for name in still}
        yield any(float(v[k if len(v) == len(sizes) else firsts[k]]) != still[name] for name, v in values.items())
