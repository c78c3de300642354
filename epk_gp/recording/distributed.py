"""A training with several processes as one run: each rank records its own forward passes, rank 0 writes them all.

`DistributedDataParallel` averages the gradients of W ranks in the backward pass. So a step uses the rows of all ranks,
with their weights divided by W; gradients, weights and optimizers are the same on all ranks, and rank 0 checks and
records the step. The moving statistics of the run are those of rank 0. In a step the passes of other ranks come before
those of rank 0, whose last pass leaves the statistics of the run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from epk_gp.core.gradients import passes_of
from epk_gp.core.model import uncompiled
from epk_gp.core.step import Step
from epk_gp.optimizers.torch_rules import Optimizers, as_optimizers
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.seen import MadeStep
from epk_gp.recording.setup import TrainingSetup
from epk_gp.storage.training_state import TrainingState

OTHER_RANKS = "other ranks"  # their name in the training state of the run

_INTEGER = {torch.float64: torch.int64, torch.float32: torch.int32}
_DIFFERENCES = {  # causes of different weights on ranks, in the order of the search
    "gradient": (
        "its gradient is its own. DDP averages gradients in the backward pass of net(X): call the wrapped network, not "
        "net.module(X), end a step outside of no_sync(), and leave gradients as they are"
    ),
    "options": "other options of the optimizer there, such as the learning rate",
    "weights": "they, or what the optimizer holds, were changed on one rank alone",
}

_Value = TypeVar("_Value")
# the records that a step may have (`PassRecords.step`), the moving statistics before and after it
_OwnStep = tuple[tuple[Step, ...], Tensor, Tensor]


class Ranks:
    """The processes that train one network together; only the present one if there are no others.

    Attributes:
        net: The network without its wrapper.
        rank: Number of this process among them.
        size: Number of processes.
        is_writer: Whether this process checks and writes the steps.
        warning: The likeliest cause, as a clause, of an unexplained step: processes without a wrapper.
    """

    def __init__(self, net: Any, optimizer: Optimizers, ddp: DistributedDataParallel | None) -> None:
        """Find the processes by the wrapper: the network given, or the one that holds it inside another module.

        Raises:
            TypeError: `ddp` is no such wrapper.
            ValueError: `ddp` does not hold the network; ranks hold parts of weights or of the optimizer's state; or the
                network normalises by the rows of all ranks.
        """
        self.net = cast("Any", net.module if isinstance(net, DistributedDataParallel) else net)
        self.rank, self.size, self._first, self.group, self.is_writer = 0, 1, 0, None, True
        self.warning = cast("str | None", None)
        self._sends_states, self._loaded = False, cast("list[Any] | None", None)
        ddp = uncompiled(ddp)
        if ddp is not None and not isinstance(ddp, DistributedDataParallel):
            raise TypeError(f"ddp must be a DistributedDataParallel: got {type(ddp).__name__}.")
        if ddp is not None and self.net is not net and ddp is not net:
            raise ValueError("ddp must be left out where the network itself is wrapped: it is another wrapper.")
        self._wrapper = cast("Any", net if self.net is not net else ddp)
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
        if count:
            _validate_whole(self.net, as_optimizers(optimizer))
        if self._wrapper is None:
            if count > 1:  # each may train a separate network, or it may be wrapped later
                self.warning = (
                    f"the gradient was averaged over the {count} processes of torch.distributed: give the recorder the "
                    "network that DistributedDataParallel has wrapped, or ddp= where it has wrapped a larger module"
                )
            return
        if all(part is not self.net for part in self._wrapper.modules()):
            raise ValueError("ddp must hold the network that is recorded: it holds another one.")
        members = dist.get_process_group_ranks(self._wrapper.process_group)
        self.rank, self.size, self._first = members.index(dist.get_rank()), len(members), members[0]
        self.is_writer = self.rank == 0
        if self.size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in self.net.modules()):
            raise ValueError(
                "a forward pass must depend on the rows of its own rank: SyncBatchNorm normalises by those of all. Use "
                "BatchNorm, with statistics of each rank's batch, or a normalisation of single rows, such as GroupNorm."
            )
        if self.size > 1:
            # a separate group: the loop's collectives do not interfere, and may not be on the CPU
            self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks on the writing rank, and none on the others."""
        values: list[Any] | None = [None] * self.size if self.is_writer else None
        dist.gather_object(value, values, dst=self._first, group=self.group)
        return values or []

    def share(self, value: _Value) -> _Value:
        """Return the writing rank's value on all ranks."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=self._first, group=self.group)
        return values[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise the writing rank's exceptions on all ranks.

        Raises:
            Exception: The one that was raised on the writing rank.
        """
        try:
            yield
        except Exception as error:
            self.share(cast("Exception | None", error))
            raise
        if (raised := self.share(cast("Exception | None", None))) is not None:
            raise raised

    def validate(self, data_digest: str) -> None:
        """Raise on the writing rank if another rank has different training data.

        Raises:
            ValueError: The data differ.
        """
        digests = self.gather(data_digest)
        if odd := [rank for rank, own in enumerate(digests) if own != digests[0]]:
            raise ValueError(f"X and y must be the same on all ranks: those of rank {odd[0]} are not those of rank 0.")

    def whole_step(
        self, record: Callable[[], _OwnStep], setup: TrainingSetup, made: MadeStep, end: Float[Tensor, " P"]
    ) -> _OwnStep | None:
        """Return the step on the rows of all ranks on the writing rank, and None on the others.

        Args:
            record: Returns this rank's part of the step, with all moving statistics of its passes.
            setup: The training.
            made: The step as this rank saw it; observations of other ranks are added to it.
            end: The weights after the step.

        Raises:
            StepMismatchError: A rank cannot record its part, or its weights are not those of rank 0.
        """
        own, error = None, None
        try:
            if self._wrapper is not None and self._wrapper._join_config.enable:
                raise StepMismatchError(
                    "all ranks must have as many batches, for they record a step together: net.join() is for others. "
                    "Leave it out, and give each rank as many (DistributedSampler does, or drop_last)."
                )
            own = record()
        except Exception as raised:  # any exception, because the other ranks wait for this one
            error = str(raised) if isinstance(raised, ValueError) else f"{type(raised).__name__}: {raised}"
        numbers = {"options": torch.cat([v.double().flatten() for v in made.update.tensors()])}
        numbers |= {"gradient": made.gradient, "weights": end}
        bits = {name: value.view(_INTEGER[value.dtype]).sum().item() for name, value in numbers.items()}
        steps = () if own is None else tuple(step.map(Tensor.cpu) for step in own[0])
        parts = self.gather((steps, error, made.unseen, bits))
        for rank, (_, error, doubt, bits) in enumerate(parts):
            if error is not None:
                raise StepMismatchError(f"rank {rank}: {error}")
            if bits["weights"] != parts[0][-1]["weights"]:
                cause = next(text for name, text in _DIFFERENCES.items() if bits[name] != parts[0][-1][name])
                raise StepMismatchError(
                    f"the weights after a step must be the same on all ranks: those of rank {rank} are not those of "
                    f"rank 0. Likely cause: {cause}."
                )
            made.doubt = made.doubt or (doubt and f"on rank {rank} {doubt}")
        if own is None or not self.is_writer:
            return None
        made.announced = ()  # one rank's observations do not describe the whole step
        _, before, after = own
        of_ranks = [steps for steps, *_ in reversed(parts)]
        count = max(map(len, of_ranks))
        joined = (_joined([own[min(k, len(own) - 1)] for own in of_ranks], setup, before, after) for k in range(count))
        return tuple(joined), before, after

    def state_dict(self) -> dict[str, Any]:
        """Return the states that the other ranks send; empty before the first step."""
        return {"size": self.size, "states": self.gather({}) if self._sends_states else []}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Keep the states of the other ranks until `restore`.

        Raises:
            ValueError: Another number of processes recorded the run.
        """
        if state["size"] != self.size:
            raise ValueError(f"a run of {state['size']} processes must be resumed by as many: got {self.size}")
        self._loaded = state["states"]

    def complete_iteration(self, own: TrainingState) -> None:
        """Send this rank's training state to the writing rank."""
        if self._sends_states and not self.is_writer:
            self.gather({"state": own.state_dict(), "buffers": {n: b.cpu() for n, b in self.net.named_buffers()}})

    def restore(self, optimizers: Sequence[Optimizer], own: TrainingState, steps: Sequence[Step]) -> list[Step]:
        """Bring all ranks to the state from which the writing rank resumed a run; from now on they send their states.

        Args:
            optimizers: The optimizers, whose state is that of the writing rank.
            own: This rank's training state; it is restored to this rank's stored one.
            steps: The recorded steps, on the writing rank.

        Returns:
            The recorded steps, without their passes.
        """
        state = TrainingState(optimizers, {}, torch.zeros(0))
        self._sends_states = True
        values = {n: p.data for n, p in self.net.named_parameters()} | dict(self.net.named_buffers())
        on_cpu = {name: value.cpu() for name, value in values.items()}
        known = (self._loaded, state.state_dict(), [replace(step, passes=()) for step in steps], on_cpu)
        loaded, tensors, steps, on_cpu = self.share(known)
        if loaded is None:
            return list(steps)
        if not self.is_writer:
            with torch.random.fork_rng(devices=[]):
                state.load_state_dict(tensors, "rank 0")
            if loaded:
                own.load_state_dict(loaded[self.rank]["state"], f"rank {self.rank}")
                on_cpu |= loaded[self.rank]["buffers"]
            for name, value in on_cpu.items():
                values[name].copy_(value)
        return list(steps)


def _validate_whole(net: Any, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a process holds a part of the weights, or of the optimizers' state.

    Raises:
        ValueError: It does.
    """
    weights = net.parameters() if isinstance(net, nn.Module) else ()
    parts = ["weights that ranks divide"] * any(hasattr(p, "full_tensor") for p in weights)
    parts += [name for own in optimizers if (name := type(own).__name__) == "ZeroRedundancyOptimizer"]
    if parts:
        raise ValueError(
            "each process must hold all weights and all of the optimizer's state, because a step is recorded with all "
            f"of them: got {parts[0]}. Train with DistributedDataParallel and a plain optimizer, in place of "
            "fully_shard, tensor parallelism and ZeroRedundancyOptimizer."
        )


def _joined(steps: Sequence[Step], setup: TrainingSetup, before: Tensor, after: Tensor) -> Step:
    """Join the parts of a step; the weights of each rank's rows are divided by the number of ranks."""
    parts = [data for step in steps for data in passes_of(step, setup.X, setup.y, setup.loss)]

    def unless(value: Tensor | None, known: Tensor) -> Tensor | None:
        return None if value is None or torch.equal(value.to(known), known) else value

    passes = [
        replace(one, statistics=unless(one.statistics, before), statistics_after=unless(one.statistics_after, after))
        for one in (part.forward for part in parts)
    ]
    batch, weights = (torch.cat(values).cpu() for values in zip(*((p.samples, p.c) for p in parts), strict=True))
    needed = () if all(one.is_plain for one in passes) else tuple(passes)
    return replace(steps[-1], batch=batch, sample_weights=weights / len(steps), passes=needed)
