"""What a run goes on from: the state of optimizer, schedules, samplers and random numbers, kept without pickle."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from epk_gp.storage.atomic_files import parse_json

_BUFFERS = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg", "sum"}
_STATE, _RANDOM, _MOMENTUM = "state", "random", "momentum"


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state, as torch's schedulers do."""

    def state_dict(self) -> dict[str, Any]:
        """Give the state: numbers, texts, lists, dictionaries and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take a state."""


StatefulObjects = Mapping[str, Stateful | torch.Generator]


def validate_stateful(stateful: StatefulObjects) -> None:
    """Refuse what has no state to keep.

    Raises:
        TypeError: Not a dictionary of generators and objects with `state_dict` and `load_state_dict`.
    """
    if not isinstance(stateful, Mapping):
        raise TypeError(f"stateful must be a dictionary, name to object: got {type(stateful).__name__}.")
    for name, value in stateful.items():
        if not isinstance(name, str) or not isinstance(value, torch.Generator | Stateful):
            raise TypeError(
                f"stateful must hold torch.Generators and objects with state_dict and load_state_dict: {name!r} is "
                f"{type(value).__name__}."
            )


def capture_training_state(optimizer: Optimizer, stateful: StatefulObjects, momentum: Tensor) -> dict[str, Tensor]:
    """Copy everything that the next step depends on, but the weights.

    Args:
        optimizer: Its state is kept.
        stateful: Other objects whose state is kept, by name.
        momentum: The momentum buffer that the recorder follows, (P,).

    Raises:
        TypeError: A state that cannot be written without pickle.
    """
    tensors: dict[str, Tensor] = {_RANDOM: torch.random.get_rng_state()}
    if momentum.any():
        tensors[_MOMENTUM] = momentum.clone()
    state = {
        "optimizer": optimizer.state_dict(),
        "keep": {name: _state_of(value) for name, value in stateful.items()},
    }
    text = json.dumps(_encode(state, tensors, "state"))
    tensors[_STATE] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def restore_training_state(
    tensors: Mapping[str, Tensor], optimizer: Optimizer, stateful: StatefulObjects, momentum: Tensor, where: str
) -> None:
    """Bring optimizer, kept objects, recorder's momentum and torch's random numbers back, in place.

    Args:
        tensors: What `capture_training_state` gave.
        optimizer: Made as the recorded one was.
        stateful: The kept objects, under the same names.
        momentum: Is overwritten, (P,).
        where: What to call the file in an error.

    Raises:
        ValueError: A state of another shape, other names in `stateful`, or an object that does not take its state.
    """
    try:
        state = _decode(parse_json(tensors[_STATE].numpy().tobytes(), where), tensors)
        recorded, moving = state["optimizer"], tensors.get(_MOMENTUM)
        names, random = set(state["keep"]), tensors[_RANDOM]
        if moving is not None and moving.shape != momentum.shape:
            raise ValueError(f"its momentum has shape {tuple(moving.shape)}")
    except (KeyError, TypeError, IndexError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} must hold what the run goes on from: it does not ({error}).") from error
    if names != set(stateful):
        raise ValueError(
            f"stateful must have the names it had when the run was recorded, {sorted(names)}: got {sorted(stateful)}."
        )
    try:
        _check_optimizer_state(optimizer, recorded)
        optimizer.load_state_dict(recorded)
        for name, value in stateful.items():
            if isinstance(value, torch.Generator):
                value.set_state(state["keep"][name])
            else:
                value.load_state_dict(state["keep"][name])
        torch.random.set_rng_state(random)  # last: a sampler may have drawn again what it had drawn
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"optimizer and stateful must take the state that the run goes on from: {error}.") from error
    if moving is not None:
        momentum.copy_(moving)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """List each parameter group's options, for the run's header.

    Raises:
        TypeError: Options that are neither numbers nor texts nor lists of them.
    """
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    plain = [
        {key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for key, value in g.items()}
        for g in groups
    ]
    counts = [len(group["params"]) for group in optimizer.param_groups]
    tensors: dict[str, Tensor] = {}
    encoded = [
        {key: _encode(value, tensors, f"option {key!r}") for key, value in sorted(group.items())} for group in plain
    ]
    if tensors:
        raise TypeError("the optimizer's options must be numbers or texts: got a tensor of several numbers.")
    made: list[dict[str, Any]] = json.loads(
        json.dumps([{"parameters": n, **g} for n, g in zip(counts, encoded, strict=True)])
    )
    return made


def _state_of(value: Stateful | torch.Generator) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _check_optimizer_state(optimizer: Optimizer, recorded: dict[str, Any]) -> None:
    """Refuse buffers of another shape than their parameter's, which torch would take."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in recorded["state"].items():
        for name, value in state.items():
            if name in _BUFFERS and isinstance(value, Tensor) and value.shape != parameters[index].shape:
                raise ValueError(
                    f"the optimizer's {name} must have the shape {tuple(parameters[index].shape)} of its parameter: "
                    f"got {tuple(value.shape)}."
                )


def _encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Write a state as JSON; tensors go beside it, under a number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
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
    raise TypeError(
        f"the {where} of a run on disk must consist of numbers, texts, lists, dictionaries and tensors: got "
        f"{type(value).__name__}. Record in memory, or leave it out of stateful."
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
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
