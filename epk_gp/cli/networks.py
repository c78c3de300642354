"""Which network a run has: the built-in ones, the user's own, and the note of it in the run's folder."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from epk_gp.core.model import functionalize
from epk_gp.core.trajectory import Trajectory
from epk_gp.storage.atomic_files import (
    MAX_JSON_BYTES,
    atomic_write,
    checksummed_json,
    read_bytes,
    read_checksummed_json,
    regular_file_size,
)
from epk_gp.storage.run import load_trajectory
from epk_gp.storage.schema import read_data, read_header

_NOTE = "network.json"
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True)
class NetworkSpec:
    """How to make a network.

    Attributes:
        name: "mlp" (one hidden layer), "cnn" (two convolutions with pooling), or "package.module:factory".
        input_shape: Shape of one input; built-in networks only, as all that follows.
        num_outputs: C.
        width: Hidden units of "mlp".
        activation: "relu", "tanh" or "gelu".
    """

    name: str
    input_shape: tuple[int, ...]
    num_outputs: int
    width: int = 64
    activation: str = "relu"


def build_network(spec: NetworkSpec) -> nn.Module:
    """Make a network with random weights.

    Raises:
        ValueError: No such built-in network, or inputs that it cannot take.
        ImportError, TypeError: As `_from_factory`.
    """
    if ":" in spec.name:
        return _from_factory(spec.name)
    if spec.activation not in _ACTIVATIONS:
        raise ValueError(f"--activation must be one of {sorted(_ACTIVATIONS)}: got {spec.activation!r}.")
    activation = _ACTIVATIONS[spec.activation]
    if spec.name == "mlp":
        if spec.width < 1:
            raise ValueError(f"--width must be at least 1: got {spec.width}.")
        size = torch.Size(spec.input_shape).numel()
        layers = [nn.Linear(size, spec.width), activation(), nn.Linear(spec.width, spec.num_outputs)]
        return nn.Sequential(*([nn.Flatten()] if len(spec.input_shape) > 1 else []), *layers)
    if spec.name == "cnn":
        if len(spec.input_shape) != 3 or min(spec.input_shape[1:]) < 4:
            raise ValueError(f"the cnn needs images (channels, height >= 4, width >= 4): got {spec.input_shape}.")
        channels, height, width = spec.input_shape
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (height // 4) * (width // 4), spec.num_outputs),
        )
    raise ValueError(f"--network must be mlp, cnn or package.module:factory: got {spec.name!r}.")


def check_network(net: nn.Module, X: Shaped[Tensor, "n ..."], num_classes: int) -> int:
    """Try a network on two inputs before training, and count its outputs.

    Raises:
        ValueError: It cannot take them, or has fewer outputs than there are classes.
    """
    model = functionalize(net)
    weights = {name: p.detach() for name, p in net.named_parameters() if name in model.names}
    try:
        with torch.no_grad():
            outputs = model(weights, X[:2])
    except RuntimeError as error:
        raise ValueError(f"the network must take inputs of shape {tuple(X.shape[1:])}: {error}") from error
    if outputs.shape[1] < num_classes:
        raise ValueError(
            f"the network must have an output per class: got {outputs.shape[1]} for {num_classes} classes."
        )
    return outputs.shape[1]


def write_note(run: Path, spec: NetworkSpec, config: Mapping[str, object], held_out: str | None) -> None:
    """Note in a run's folder how its network is made, how it was recorded, and the checksum of its held-out points."""
    note = {"network": asdict(spec), "recorded_with": dict(config), "held_out_blake2b": held_out}
    atomic_write(run / _NOTE, checksummed_json(note))


def open_run(run: Path, network: str | None) -> Trajectory:
    """Open a run with the network that is named, or else noted in its folder.

    Raises:
        FileNotFoundError: No run there.
        ValueError: No network named or noted, a note that is damaged, or a network that is not the recorded one.
        ImportError, TypeError: A factory that cannot be found, or is none.
    """
    header = read_header(run)
    spec = read_note(run)
    if network is not None and (spec is None or network != spec.name):
        shape = tuple(read_data(run, header)["inputs"].shape[1:])
        spec = NetworkSpec(network, shape, header["num_outputs"])
    if spec is None:
        raise ValueError(f"--network must say how the network is made: {run} has no {_NOTE}.")
    if network is None and ":" in spec.name:
        raise ValueError(
            f"--network must name a factory that is to be run: {run} says that {spec.name} makes its network. If you "
            f"trust it, pass --network {spec.name}."
        )
    try:
        return load_trajectory(run, build_network(spec))
    except RuntimeError as error:  # torch, on weights of the right names and inputs of another shape
        raise ValueError(f"the network must be the recorded one: {error}") from error


def read_note(run: Path) -> NetworkSpec | None:
    """Read how a run's network is made; None if there is no note.

    Raises:
        ValueError: A damaged note.
    """
    note = _read_note(run)
    if note is None:
        return None
    try:
        fields = note["network"]
        return NetworkSpec(
            str(fields["name"]),
            tuple(int(n) for n in fields["input_shape"]),
            int(fields["num_outputs"]),
            int(fields["width"]),
            str(fields["activation"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run / _NOTE} must say how the network is made: it does not ({error}). Pass --network."
        ) from error


def manifest_held_out(run: Path) -> str | None:
    """Read the checksum of a run's held-out points; None if none is noted.

    Raises:
        ValueError: A damaged note.
    """
    note = _read_note(run)
    found = None if note is None else note.get("held_out_blake2b")
    return found if isinstance(found, str) else None


def _read_note(run: Path) -> dict[str, Any] | None:
    file = run / _NOTE
    if regular_file_size(file, str(file)) is None:
        return None
    says = f"{file} must say how the network is made"
    note = read_checksummed_json(read_bytes(file, MAX_JSON_BYTES, str(file)), says)
    if note is None:
        raise ValueError(f"{says}: it is damaged, for its checksum is not that of its content. Pass --network.")
    return note


def _from_factory(name: str) -> nn.Module:
    """Call the user's own factory.

    Raises:
        ImportError: No such module or function.
        TypeError: It is not callable, or returns no module.
        ValueError: It fails.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"--network must be mlp, cnn or package.module:factory: got {name!r}.")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ImportError(f"--network {name}: module {module_name!r} cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ImportError(f"--network {name}: module {module_name!r} has no {function_name!r}.") from error
    except Exception as error:
        raise ValueError(f"--network {name}: importing it raised {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise TypeError(f"--network {name} must be a function: got {type(factory).__name__}.")
    try:
        net = factory()
    except Exception as error:
        raise ValueError(f"--network {name}: the factory raised {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise TypeError(f"--network {name} must return a torch.nn.Module: got {type(net).__name__}.")
    return net
