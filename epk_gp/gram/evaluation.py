"""A run whose network is being evaluated along its path: the network with its plan, states, and lines between them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel, WeightSegment
from epk_gp.core.losses import Head
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.quadrature import rules
from epk_gp.quadrature.adaptive import Integral, integrate
from epk_gp.storage.chunks import StoredStates

_AHEAD = 2  # states read ahead: the two of the next step; a choice, other numbers were not timed


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
