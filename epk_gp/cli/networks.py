"""The networks of the command line, and the manifest of a run, network.json: how its network is made."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Shaped
from pydantic import Field
from torch import Tensor, nn

from epk_gp.core.trajectory import Trajectory
from epk_gp.storage.run import load_trajectory
from epk_gp.storage.schema import Record, read_data, read_header, read_record

MANIFEST = "network.json"
_BUILT_IN = ("mlp", "cnn")

_Size = Annotated[int, Field(ge=0, lt=1 << 31)]


class NetworkSpec(Record):
    """The construction of a network.

    Attributes:
        name: "mlp" (one hidden layer), "cnn" (two convolutions with pooling), or "package.module:factory".
        input_shape: Shape of one input. This and the following fields matter for built-in networks only.
        num_outputs: Number of outputs C.
        width: Hidden units of "mlp".
    """

    name: str
    input_shape: list[_Size]
    num_outputs: _Size
    width: _Size = 64


class Manifest(Record):
    """Files of the command line next to a run: its network, the options of the recording, and its held-out points."""

    network: NetworkSpec
    recorded_with: dict[str, Any]
    held_out_bytes: _Size = 0
    held_out_blake2b: str = ""


def read_manifest(run: Path) -> Manifest | None:
    """Return the manifest of a run, or None if it has none.

    Raises:
        ValueError: The manifest is damaged.
    """
    file = run / MANIFEST
    message = f"{file} must describe how the network is made, or be removed and --network be passed"
    return read_record(Manifest, file, message)


def network_and_output(spec: NetworkSpec) -> tuple[nn.Module, Callable[[Any], Tensor] | None]:
    """Return a network with random initial weights, and the map to its outputs if a factory has one.

    Raises:
        ValueError: There is no built-in network of this name, or it cannot take these inputs, or a factory fails.
        ImportError: A factory cannot be imported.
        TypeError: A factory is not a function, or does not return a network.
    """
    if spec.name not in _BUILT_IN:
        return _from_factory(spec.name)
    shape = spec.input_shape
    if spec.name == "mlp":
        size = torch.Size(shape).numel()
        layers = [nn.Linear(size, spec.width), nn.ReLU(), nn.Linear(spec.width, spec.num_outputs)]
        return nn.Sequential(*([nn.Flatten()] if len(shape) > 1 else []), *layers), None
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ValueError(f"the cnn needs images (channels, height >= 4, width >= 4): got {tuple(shape)}.")
    first, second = nn.Conv2d(shape[0], 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    last = nn.Linear(16 * (shape[1] // 4) * (shape[2] // 4), spec.num_outputs)
    layers = [first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), last]
    return nn.Sequential(*layers), None


def network_spec(name: str, X: Shaped[Tensor, "n ..."], num_outputs: int, width: int | None) -> NetworkSpec:
    """Describe the network that a user names, for given inputs.

    Raises:
        ValueError: An option does not belong to this network, or a built-in network cannot take the inputs.
    """
    if width is not None and name != "mlp":
        raise ValueError(f"--width belongs to --network mlp: got --network {name}.")
    if name in _BUILT_IN and (X.ndim < 2 or not X.is_floating_point()):
        raise ValueError(f"--network {name} must have floating-point inputs of shape (n, D) or more: got {X.dtype}.")
    own: dict[str, Any] = {} if width is None else {"width": width}
    return NetworkSpec(name=name, input_shape=list(X.shape[1:]), num_outputs=num_outputs, **own)


def _from_factory(name: str) -> tuple[nn.Module, Callable[[Any], Tensor] | None]:
    """Return the network that a user's factory makes, and what it returns as the second of a pair: `output`."""
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ValueError(f"--network must be mlp, cnn or package.module:factory: got {name!r}.")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
        made = factory()
    except Exception as error:
        kind = ImportError if isinstance(error, ImportError | AttributeError) else ValueError
        raise kind(f"--network {name} must make a network: it raised {type(error).__name__}: {error}") from error
    net, output = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, nn.Module):
        raise TypeError(f"--network {name} must return a torch.nn.Module: got {type(net).__name__}.")
    return net, output


def open_run(run: Path, network: str | None) -> Trajectory:
    """Load a run with the network that the user names, or else with the network of its manifest.

    A factory that only the manifest names is not executed: whoever wrote the folder could choose it.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: No network is named, or the manifest is damaged or names a factory, or the network is not the
            recorded one.
        ImportError: The factory cannot be imported.
        TypeError: The factory does not return a network.
    """
    header, manifest = read_header(run), read_manifest(run)
    spec = None if manifest is None else manifest.network
    if network is not None and (spec is None or network != spec.name):
        shape = list(read_data(run, header)["inputs"].shape[1:])
        spec = NetworkSpec(name=network, input_shape=shape, num_outputs=header["num_outputs"])
    if spec is None:
        raise ValueError(f"--network must name the network: {run} has no {MANIFEST} that does.")
    if network is None:
        require_trusted(spec.name, run)
    try:
        net, output = network_and_output(spec)
        return load_trajectory(run, net, output=output)
    except RuntimeError as error:  # torch's error for inputs of another shape, where the weights have the right names
        raise ValueError(f"the network must be the recorded one: {error}") from error


def require_trusted(name: str, run: Path) -> None:
    """Raise if a network that only a run's manifest names is a factory.

    Raises:
        ValueError: It is one.
    """
    if name not in _BUILT_IN:
        raise ValueError(f"--network must name the factory of {run}. If you trust it, pass --network {name}.")
