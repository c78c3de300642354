"""A training with several processes as one run: each rank records its own forward passes, rank 0 writes them all.

`DistributedDataParallel` averages the gradients of W ranks in the backward pass. So a step uses the rows of all ranks,
with their weights divided by W; gradients, weights and optimizers are the same on all ranks, and rank 0 checks and
records the step. The moving statistics of the run are those of rank 0. In a step the passes of other ranks come before
those of rank 0, whose last pass leaves the statistics of the run.
"""

import copy
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from epk_gp.core.gradients import passes_of
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
        net: The network without its wrapper, with all weights.
        called: The object on which the loop's calls can be hooked.
        optimizer: Its optimizer, or several, with all of their state.
        rank: Number of this process among them.
        size: Number of processes.
        is_writer: Whether this process checks and writes the steps.
        is_divided: Whether there are several processes, or this one's network or optimizer is wrapped as a part of
            them.
        warning: The likeliest cause, as a clause, of an unexplained step: processes without a wrapper.
    """

    def __init__(self, net: Any, optimizer: Optimizers) -> None:
        """Find the processes by the network's wrapper, which is searched for if it is not given.

        Raises:
            ValueError: The network normalises by the rows of all ranks, or it is divided over several dimensions.
        """
        self.net = self.called = cast("Any", net.module if isinstance(net, DistributedDataParallel) else net)
        self.rank, self.size, self._first, self.group, self.is_writer = 0, 1, 0, None, True
        self.is_divided, self.warning = False, cast("str | None", None)
        self._sends_states, self._loaded = False, cast("list[Any] | None", None)
        self.optimizer, self._twin = optimizer, cast("WholeTwin | None", None)
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        known = [net] if self.net is not net else gc.get_objects() if count > 1 else []
        wrappers = [own for own in reversed(known) if issubclass(type(own), DistributedDataParallel)]
        with_net = (own for own in wrappers if any(part is self.net for part in own.modules()))
        self._wrapper = cast("Any", next(with_net, None))
        is_sharded = _is_sharded(self.net)
        if self._wrapper is None and not is_sharded:
            if count > 1:  # each may train a separate network, or it may be wrapped later
                self.warning = (
                    f"the gradient was averaged over the {count} processes of torch.distributed: give the recorder the "
                    "network that DistributedDataParallel has wrapped"
                )
            return
        mesh = next(self.net.parameters()).device_mesh if is_sharded and hasattr(self.net, "reshard") else None
        if is_sharded and (mesh is None or mesh.ndim > 1):
            raise ValueError(
                "weights must be whole, or divided by fully_shard(net) over one dimension of ranks: got others. "
                "Tensor parallelism, as of a vocabulary that is sharded, gives no process all outputs of a row."
            )
        group = self._wrapper.process_group if mesh is None else mesh.get_group()
        members = dist.get_process_group_ranks(group)
        self.rank, self.size, self._first = members.index(dist.get_rank()), len(members), members[0]
        self.is_writer, self.is_divided = self.rank == 0, self.size > 1
        if self.size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in self.net.modules()):
            raise ValueError(
                "a forward pass must depend on the rows of its own rank: SyncBatchNorm normalises by those of all. Use "
                "BatchNorm, with statistics of each rank's batch, or a normalisation of single rows, such as GroupNorm."
            )
        if self.size > 1:
            # a separate group: the loop's collectives do not interfere, and may not be on the CPU
            self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        optimizers = as_optimizers(optimizer)  # without wrappers
        if is_sharded or any(_local(own) is not own for own in optimizers):
            self.is_divided, self._twin = True, WholeTwin(self.net, optimizers, self)
            self.net, self.called, self.optimizer = self._twin.net, self._twin.called, self._twin.optimizers

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
        """Store options that a scheduler changed, and send this rank's training state to the writing rank."""
        if self._twin is not None:
            self._twin.pull_options()
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
        self._sends_states = self.size > 1
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
        if self._twin is not None:
            self._twin.push()
        return list(steps)


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


class WholeTwin:
    """A network and optimizers with all weights, gradients and state, copied from others that are divided among ranks.

    They follow a network of `fully_shard`, and a `ZeroRedundancyOptimizer`: hooks of a twin are registered on the
    original, and are called when all ranks have gathered the values.

    Attributes:
        net: The network with all weights: the original one if it has them.
        called: The object on which the loop's calls can be hooked.
        optimizers: The optimizers of its parameters.
    """

    def __init__(self, net: nn.Module, optimizers: Sequence[Optimizer], ranks: "Ranks") -> None:
        """Gather everything, on all ranks together, as in all further calls."""
        self._original, self._originals, self._ranks = net, optimizers, ranks
        self.net = _whole_copy(net) if _is_sharded(net) else net
        self._twins = dict(zip(net.parameters(), self.net.parameters(), strict=True))
        self._copied = [(p, q) for p, q in self._twins.items() if p is not q]
        for _, q in self._copied:
            q.grad = torch.zeros_like(q)  # until real ones arrive: if all are None, a step was skipped
        self.optimizers = [copy.copy(_local(optimizer)) for optimizer in optimizers]
        for optimizer, twin in zip(optimizers, self.optimizers, strict=True):
            vars(twin)["register_step_pre_hook"] = _after(self.pull_gradients, optimizer.register_step_pre_hook, twin)
            vars(twin)["register_step_post_hook"] = _after(self.pull, optimizer.register_step_post_hook, twin)
        self.called = SimpleNamespace(
            register_forward_pre_hook=_after(self._follow_modes, net.register_forward_pre_hook, self.net),
            register_forward_hook=_after(self._follow_modes, net.register_forward_hook, self.net),
        )
        self.pull()

    @torch.no_grad()
    def pull(self) -> None:
        """Gather weights, state and options."""
        for p, q in self._copied:
            q.copy_(_whole(p.detach()))
        for optimizer, twin in zip(self._originals, self.optimizers, strict=True):
            local, held = _local(optimizer), _held(optimizer)
            stored = [(n, local.state[p]) for n, p in enumerate(held) if p in local.state]
            states = {n: {key: _whole(value) for key, value in state.items()} for n, state in stored}
            if local is not optimizer:
                parts: list[Any] = [states] * self._ranks.size
                dist.all_gather_object(parts, states, group=self._ranks.group)
                states = {n: own for part in parts for n, own in part.items()}
            twin.state = defaultdict(dict, {self._twins.get(held[n], held[n]): own for n, own in states.items()})
        self.pull_options()

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Gather gradients and options."""
        for p, q in self._copied:
            q.grad = None if p.grad is None else _whole(p.grad)
        self.pull_options()

    def pull_options(self) -> None:
        """Copy the optimizers' options to the twins."""
        for optimizer, twin in zip(self._originals, self.optimizers, strict=True):
            groups = optimizer.param_groups
            twin.param_groups = [{**own, "params": [self._twins.get(p, p) for p in own["params"]]} for own in groups]

    @torch.no_grad()
    def push(self) -> None:
        """Give each rank its part of the twin's weights, state and options."""
        for p, q in self._copied:
            p.copy_(_part(q.detach(), p))
        for optimizer, twin in zip(self._originals, self.optimizers, strict=True):
            local = _local(optimizer)
            for p in _held(local):
                q = self._twins.get(p, p)
                local.state[p] = {k: _part(v, p) if v.shape == q.shape else v for k, v in twin.state[q].items()}
            for group, own in zip(twin.param_groups, optimizer.param_groups, strict=True):
                own |= {**group, "params": own["params"]}

    def _follow_modes(self) -> None:
        """Copy the original's modes and buffers, which are not divided."""
        for part, original in zip(self.net.modules(), self._original.modules(), strict=True):
            part.training = original.training
            part._buffers.update(original._buffers)


def _after(gather: Callable[[], None], register: Callable[..., Any], twin: Any) -> Callable[..., Any]:
    """Return a function that registers a hook on an original; the hook gets its twin after the values are gathered."""

    def register_hook(hook: Any, **options: Any) -> Any:
        def call(original: Any, *arguments: Any) -> Any:
            gather()
            return hook(twin, *arguments)

        return register(call, **options)

    return register_hook


def _local(optimizer: Any) -> Optimizer:
    """Return the optimizer that holds a rank's part of the state."""
    local: Optimizer = optimizer.optim if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else optimizer
    return local


def _held(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_sharded(net: Any) -> bool:
    return isinstance(net, nn.Module) and any(hasattr(p, "full_tensor") for p in net.parameters())


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _part(value: Tensor, like: Any) -> Tensor:
    """Return a rank's part of a tensor that is divided like another one."""
    if not hasattr(like, "full_tensor"):
        return value
    part: Tensor = dist.tensor.distribute_tensor(value, like.device_mesh, like.placements)
    return part


def _whole_copy(net: Any) -> nn.Module:
    """Copy a network that `fully_shard` divides among ranks as one with all weights, without its hooks.

    torch replaces the class of such modules to forbid copies.
    """
    net.reshard()  # after a forward pass without a backward pass its weights are not parameters
    memo: dict[int, Any] = {id(p): nn.Parameter(_whole(p.detach()), p.requires_grad) for p in net.parameters()}
    memo |= {id(b): b for b in net.buffers()}
    kinds = [(part, type(part)) for part in net.modules() if hasattr(part, "reshard")]
    for part in net.modules():
        for name, value in vars(part).items():
            if name.startswith("__composable_api"):
                memo[id(value)] = None
            elif name.endswith("_hooks"):
                is_kept = name in ("_forward_hooks", "_forward_pre_hooks")
                kept = ((key, hook) for key, hook in value.items() if is_kept and "FSDP" not in repr(hook))
                memo[id(value)] = OrderedDict(kept)
    try:
        for part, kind in kinds:
            part.__class__ = kind.__bases__[1]
        whole: nn.Module = copy.deepcopy(net, memo)
    finally:
        for part, kind in kinds:
            part.__class__ = kind
    return whole
