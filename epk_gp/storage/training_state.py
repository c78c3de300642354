"""The training state of a run: everything that the next step depends on except the weights, stored without pickle.

It consists of the optimizers' state, the state of the objects that the user names (schedulers, samplers, generators),
the recorder's momentum buffer, the network's buffers that changed since the recording began, and the states of torch's
generators on the CPU and on the network's accelerator.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from pydantic import ConfigDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

from epk_gp.core.replay import load_optimizer
from epk_gp.core.step import tensor_bytes
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.storage.files import load_tensors, parse_json, read_checked
from epk_gp.storage.schema import Chunk, Record, resume_name, validated

# Names of the tensors in a resume file, in addition to `tensor.N` for the tensors of the JSON text.
REPLAY, CHECKSUM = "replay", "checksum"  # in a chunk: the replay data of steps, and the weights' checksum
_STATE, _RANDOM, _DEVICE_RANDOM, _MOMENTUM = "state", "random", "random.device", "momentum"
# Entries of an optimizer's state with their parameter's shape; torch would accept any other shape too.
_BUFFERS = {
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "sum"),
    *("acc_delta", "exp_inf", "ax", "prev", "step_size"),
}


@runtime_checkable
class Stateful(Protocol):
    """An object that returns and restores its state, as torch's schedulers do."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, texts, lists, dictionaries and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore a state."""


StatefulObjects = Mapping[str, Stateful | torch.Generator]


class _OptimizerState(Record):
    """The `state_dict` of an optimizer."""

    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class _State(Record):
    """The content of a resume file: state of the optimizers, of the objects in `stateful`, and changed buffers."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    optimizers: list[_OptimizerState]
    keep: dict[str, Any]
    buffers: dict[str, Tensor]


def validate_stateful(stateful: StatefulObjects) -> None:
    """Raise if a value is not a dictionary of generators and objects with `state_dict` and `load_state_dict`.

    Raises:
        TypeError: The value is not a dictionary, or one of its values has no state.
    """
    values = stateful.items() if isinstance(stateful, Mapping) else [(None, stateful)]
    if not all(isinstance(name, str) and isinstance(value, torch.Generator | Stateful) for name, value in values):
        raise TypeError(f"stateful must be a dictionary of torch.Generators and objects with state_dict: {stateful}.")


def validate_resumable(
    optimizers: Sequence[Optimizer], stateful: StatefulObjects, folder: str | os.PathLike[str] | None
) -> None:
    """Raise if a run with these arguments could not be resumed to the same end.

    Raises:
        ValueError: There is no folder, or the learning rates of an optimizer follow a scheduler not in `stateful`.
    """
    if folder is None:
        raise ValueError("resume=True needs folder=, the folder of the run to resume: got None.")
    for optimizer in optimizers:
        if optimizer.state_dict().keys() != {"state", "param_groups"}:
            raise ValueError(f"resume=True needs torch's state_dict(): {type(optimizer).__name__} has another one.")
    is_scheduled = any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups)
    if is_scheduled and not any(isinstance(value, LRScheduler) for value in stateful.values()):
        raise ValueError("resume=True must know the learning-rate schedule: pass stateful={'scheduler': scheduler}.")


@dataclass(eq=False)
class TrainingState:
    """The objects, other than the weights, whose state the next step depends on.

    Attributes:
        optimizers: The optimizers, in the order in which the header counts them.
        stateful: Other objects, by name.
        momentum: The recorder's momentum buffer, (P,).
        net: The network; its changed buffers, and the generator of its device, belong to the state.
        groups: The optimizers' parameter groups, with the names of their parameters and rules.
    """

    optimizers: Sequence[Optimizer]
    stateful: StatefulObjects
    momentum: Float[Tensor, " P"]
    net: nn.Module | None = None
    groups: Sequence[OptimizerGroup] = ()
    _versions: dict[str, tuple[Tensor, int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Store the present buffers, so that changed ones are known later."""
        self._versions = {name: (value, _version(value)) for name, value in self._buffers().items()}

    def header(self) -> dict[str, Any]:
        """Return the header's entries about the optimizers.

        Raises:
            TypeError: An option is neither a number nor a text nor a list of them.
        """
        options = [
            {"parameters": len(group["params"])} | {key: group[key] for key in sorted(group) if key != "params"}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        try:  # NumPy's numbers and tensors with one number have `item`
            options = json.loads(json.dumps(options, default=lambda value: value.item()))
        except (AttributeError, RuntimeError, ValueError) as error:
            raise TypeError("the optimizer's options must be numbers or texts: one is neither.") from error
        groups = [group.to_json() for group in self.groups]
        return {"optimizer": options, "num_optimizers": len(self.optimizers), "groups": groups}

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state of all objects and of torch's generators, without the momentum.

        Raises:
            ValueError: A parameter group was removed, but its state is still there.
        """
        random = {_RANDOM: torch.random.get_rng_state()}
        if (device := self._accelerator()) is not None:
            random[_DEVICE_RANDOM] = torch.get_device_module(device).get_rng_state(device)
        try:
            states = [optimizer.state_dict() for optimizer in self.optimizers]
        except KeyError as error:
            raise ValueError("a parameter group must be removed with its state (optimizer.state.pop).") from error
        state = {
            "optimizers": states,
            "keep": {
                name: value.get_state() if isinstance(value, torch.Generator) else value.state_dict()
                for name, value in self.stateful.items()
            },
            "buffers": {name: value for name, value in self._buffers().items() if self._has_changed(name, value)},
        }
        return {"random": random, "state": tree_map_only(Tensor, lambda value: value.detach().clone(), state)}

    def state_dict(
        self, snapshot: Mapping[str, Any] | None = None, momentum: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return a snapshot (by default of the present state) and the momentum, as tensors that can be stored.

        Raises:
            TypeError: A state contains an object that only pickle could store.
            ValueError: As in `snapshot`.
        """
        snapshot = self.snapshot() if snapshot is None else snapshot
        momentum = self.momentum if momentum is None else momentum
        held = {_MOMENTUM: momentum.clone()} if momentum.any() else {}
        return {**snapshot["random"], **held, **_encoded(snapshot["state"])}

    def replay_row(self, options: Sequence[Mapping[str, Any]], *, is_kept: bool) -> dict[str, Tensor]:
        """Return the replay data of a step: options of the groups, and the number of threads.

        Args:
            options: All options of each group in the step; empty for the initial state.
            is_kept: Whether the state after the step is kept: the optimizers' state after it is then also stored.
        """
        row: dict[str, Any] = {"options": [dict(own) for own in options], "threads": torch.get_num_threads()}
        if is_kept:
            row["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        return _encoded(row)

    def load_state_dict(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """Restore the state of all objects and torch's generators, in place.

        The optimizer and the other objects must be created as in the recorded run.

        Args:
            tensors: The result of `state_dict`.
            where: Name of the file in error messages.

        Returns:
            The network's buffers that had changed; they are not restored here.

        Raises:
            ValueError: The tensors are not a training state, have other shapes, or other names in `stateful`; or an
                object does not accept its state; or the network has other buffers.
        """
        message = f"{where} must hold the state to resume from"
        entries = decoded_state(tensors, message)
        state, momentum = validated(_State, entries, message), tensors.get(_MOMENTUM, torch.zeros_like(self.momentum))
        recorded = [own.model_dump() for own in state.optimizers]
        sizes = len(self.momentum), 2 * len(self.momentum)  # with a second buffer
        if len(recorded) != len(self.optimizers) or momentum.ndim != 1 or len(momentum) not in sizes:
            raise ValueError(f"{message}: it has that of {len(recorded)} optimizers.")
        if state.keep.keys() != self.stateful.keys():
            raise ValueError(f"stateful must have the names {sorted(state.keep)}: got {sorted(self.stateful)}.")
        buffers = self._buffers()
        for name, value in state.buffers.items():
            own = buffers.get(name)
            if own is None or (own.shape, own.dtype) != (value.shape, value.dtype):
                raise ValueError(f"the network must have the recorded buffers to resume {where}: {name!r} is another.")
        try:
            for optimizer, own_state in zip(self.optimizers, recorded, strict=True):
                _validate_optimizer_state(optimizer, own_state)
            for optimizer, own_state in zip(self.optimizers, recorded, strict=True):
                load_optimizer(optimizer, own_state)
            for name, kept in self.stateful.items():
                (kept.set_state if isinstance(kept, torch.Generator) else kept.load_state_dict)(state.keep[name])
            torch.random.set_rng_state(tensors[_RANDOM])  # last, as a sampler may draw numbers while it is restored
            if (device := self._accelerator()) is not None and _DEVICE_RANDOM in tensors:
                torch.get_device_module(device).set_rng_state(tensors[_DEVICE_RANDOM], device)
        except (KeyError, IndexError, TypeError, RuntimeError, AttributeError) as error:
            raise ValueError(f"optimizer and stateful must take the state to resume from: {error}.") from error
        self.momentum = momentum.to(self.momentum)
        return state.buffers

    def _buffers(self) -> dict[str, Tensor]:
        return {} if self.net is None else dict(self.net.named_buffers())

    def _has_changed(self, name: str, value: Tensor) -> bool:
        before, version = self._versions.get(name, (None, -1))
        return value is not before or _version(value) != version or version < 0

    def _accelerator(self) -> torch.device | None:
        first = None if self.net is None else next(self.net.parameters(), None)
        return None if first is None or first.device.type == "cpu" else first.device


def read_training_state(path: str | os.PathLike[str], number: int, chunk: Chunk) -> dict[str, Tensor]:
    """Read the training state after a chunk, checked against the journal's checksum.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged.
    """
    file = Path(path) / resume_name(number)
    where = f"{file} (at state {chunk.last})"
    content = read_checked(file, chunk.resume_bytes, chunk.resume_blake2b, where, chunk.digest)
    return load_tensors(content, where)


def _version(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor; -1 if torch does not count them."""
    return -1 if value.is_inference() else value._version


def _validate_optimizer_state(optimizer: Optimizer, recorded: dict[str, Any]) -> None:
    count = len(recorded["param_groups"])
    if count != len(optimizer.param_groups):
        raise ValueError(f"the optimizer must have the {count} parameter groups of the last commit to resume.")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in recorded["state"].items():
        for name, value in state.items():
            if name in _BUFFERS and isinstance(value, Tensor) and value.shape != parameters[index].shape:
                raise ValueError(f"the optimizer's {name} must have its parameter's shape: got {tuple(value.shape)}.")


def _encoded(state: Any) -> dict[str, Tensor]:
    """Return a state as tensors: its JSON text, and its own tensors by number."""
    tensors = dict[str, Tensor]()
    text = json.dumps(_encode(state, tensors, "state"))
    return tensors | {_STATE: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def decoded_state(tensors: Mapping[str, Tensor], message: str) -> Any:
    """Return a state from the tensors in which it was stored.

    Args:
        tensors: The stored tensors.
        message: Start of the error message, which states the required content of the file.

    Raises:
        ValueError: The tensors hold no state.
    """
    try:
        return _decode(parse_json(bytes(tensor_bytes(tensors[_STATE])), message), tensors)
    except (KeyError, TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{message}: it does not ({error}).") from error


def _encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return a state as JSON; its tensors are stored separately, by number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors, where)
    if isinstance(value, Tensor):
        name = f"tensor.{len(tensors)}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(entry, tensors, where) for entry in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_encode(key, tensors, where), _encode(entry, tensors, where)] for key, entry in value.items()]}
    raise TypeError(f"the {where} must consist of numbers, texts, lists, dicts, tensors: got {type(value).__name__}.")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state from the JSON of `_encode`."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content].clone()
        if kind in ("dict", "counter"):
            pairs = {_decode(key, tensors): _decode(entry, tensors) for key, entry in content}
            return Counter(pairs) if kind == "counter" else pairs
        entries = [_decode(entry, tensors) for entry in content]
        return entries if kind == "list" else tuple(entries)
    return value
