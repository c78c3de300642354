"""The networks of the command line, and the manifest of a run, network.json: how its network is made."""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from epk_gp.core.model import functionalize
from epk_gp.core.trajectory import Trajectory
from epk_gp.storage.files import (
    MAX_JSON_BYTES,
    atomic_write,
    checksummed_json,
    read_bytes,
    read_checksummed_json,
    regular_file_size,
)
from epk_gp.storage.run import load_trajectory
from epk_gp.storage.schema import read_data, read_header

MANIFEST = "network.json"
_WIDTH = 64
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@dataclass(frozen=True)
class NetworkSpec:
    """How a network is made.

    Attributes:
        name: "mlp" (one hidden layer), "cnn" (two convolutions with pooling), or "package.module:factory".
        input_shape: Shape of one input. This and the following fields matter for built-in networks only.
        num_outputs: Number of outputs C.
        width: Hidden units of "mlp".
        activation: "relu", "tanh" or "gelu".
    """

    name: str
    input_shape: tuple[int, ...]
    num_outputs: int
    width: int = _WIDTH
    activation: str = "relu"


def build_network(spec: NetworkSpec) -> nn.Module:
    """Return a network with random initial weights.

    Raises:
        ValueError: There is no built-in network of this name, or it cannot take these inputs, or a factory fails.
        ImportError: A factory cannot be imported.
        TypeError: A factory is not a function, or does not return a network.
    """
    _validate_name(spec.name)
    if ":" in spec.name:
        return _from_factory(spec.name)
    if spec.activation not in _ACTIVATIONS:
        raise ValueError(f"--activation must be one of {sorted(_ACTIVATIONS)}: got {spec.activation!r}.")
    activation = _ACTIVATIONS[spec.activation]
    if spec.name == "mlp":
        size = torch.Size(spec.input_shape).numel()
        _require_memory(spec.width * (size + 1) + spec.num_outputs * (spec.width + 1))
        layers = [nn.Linear(size, spec.width), activation(), nn.Linear(spec.width, spec.num_outputs)]
        return nn.Sequential(*([nn.Flatten()] if len(spec.input_shape) > 1 else []), *layers)
    if len(spec.input_shape) != 3 or min(spec.input_shape[1:]) < 4:
        raise ValueError(f"the cnn needs images (channels, height >= 4, width >= 4): got {spec.input_shape}.")
    channels, height, width = spec.input_shape
    size = 16 * (height // 4) * (width // 4)
    _require_memory((size + 1) * spec.num_outputs)
    first, second = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    last = nn.Linear(size, spec.num_outputs)
    return nn.Sequential(
        first, activation(), nn.MaxPool2d(2), second, activation(), nn.MaxPool2d(2), nn.Flatten(), last
    )


def _validate_name(name: str) -> None:
    module, _, function = name.partition(":")
    if name not in ("mlp", "cnn") and not (module and function):
        raise ValueError(f"--network must be mlp, cnn or package.module:factory: got {name!r}.")


def network_spec(
    name: str, X: Shaped[Tensor, "n ..."], num_outputs: int, width: int | None, activation: str | None
) -> NetworkSpec:
    """Describe the network that a user names, for given inputs.

    Raises:
        ValueError: An option does not belong to this network, or a built-in network cannot take the inputs.
    """
    _validate_name(name)
    if width is not None and name != "mlp":
        raise ValueError(f"--width belongs to --network mlp: got --network {name}.")
    if activation is not None and name not in ("mlp", "cnn"):
        raise ValueError(f"--activation belongs to --network mlp and cnn: got --network {name}.")
    if name in ("mlp", "cnn"):
        if not X.is_floating_point():
            raise ValueError(
                f"--network {name} must have floating-point inputs: got {X.dtype}. Write `inputs` as floats."
            )
        if X.ndim < 2:
            raise ValueError(
                f"--network {name} must have inputs of shape (n, D) or more: got {tuple(X.shape)}. "
                f"Write one number per point as ({len(X)}, 1)."
            )
    return NetworkSpec(name, tuple(X.shape[1:]), num_outputs, width or _WIDTH, activation or "relu")


def validate_network(net: nn.Module, X: Shaped[Tensor, "n ..."], num_classes: int) -> int:
    """Evaluate a network on two inputs before training, and return its number of outputs.

    Raises:
        ValueError: The network cannot take these inputs, or has fewer outputs than there are classes.
    """
    model = functionalize(net)
    params = {name: p.detach() for name, p in net.named_parameters() if name in model.names}
    try:
        with torch.no_grad():
            outputs = model(params, X[:2])
    except RuntimeError as error:
        raise ValueError(f"the network must take inputs of shape {tuple(X.shape[1:])}: {error}") from error
    if outputs.shape[1] < num_classes:
        raise ValueError(
            f"the network must have an output per class: got {outputs.shape[1]} for {num_classes} classes."
        )
    return outputs.shape[1]


def _require_memory(num_weights: int) -> None:
    """Raise before weights are allocated that cannot fit: the system may end the process instead of refusing."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * num_weights > available:
        raise ValueError(
            f"the network must fit into the memory, {available / 2**30:.0f} GiB: its {num_weights:.1e} weights take "
            f"{8 * num_weights / 2**30:.0f} GiB. Take a smaller --width, or inputs or classes of which there are fewer."
        )


def _from_factory(name: str) -> nn.Module:
    """Return the network that a user's factory makes."""
    module_name, _, function_name = name.partition(":")
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


def write_manifest(run: Path, spec: NetworkSpec, config: Mapping[str, object], held_out: str | None) -> None:
    """Write how the network is made, the options of the recording, and the checksum of the held-out points."""
    content = {"network": asdict(spec), "recorded_with": dict(config), "held_out_blake2b": held_out}
    atomic_write(run / MANIFEST, checksummed_json(content))


def read_network_spec(run: Path) -> NetworkSpec | None:
    """Return how a run's network is made, or None if the run has no manifest.

    Raises:
        ValueError: The manifest is damaged.
    """
    manifest = _read_manifest(run)
    if manifest is None:
        return None
    try:
        fields = manifest["network"]
        shape, sizes = tuple(fields["input_shape"]), (fields["num_outputs"], fields["width"])
        if not all(type(n) is int and 0 <= n < 1 << 31 for n in (*shape, *sizes)):
            raise ValueError(f"a size is out of range: {shape}, {sizes}")
        return NetworkSpec(str(fields["name"]), shape, *sizes, str(fields["activation"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{run / MANIFEST} must describe how the network is made: it does not ({error}). Pass --network."
        ) from error


def read_options(run: Path) -> dict[str, Any] | None:
    """Return the options that a run was recorded with, as JSON has them, or None if the run has no manifest.

    Raises:
        ValueError: The manifest is damaged.
    """
    manifest, spec = _read_manifest(run), read_network_spec(run)
    if manifest is None or spec is None:
        return None
    options = manifest.get("recorded_with")
    if not isinstance(options, dict):
        raise ValueError(f"{run / MANIFEST} must hold the options of the recording: it does not.")
    width, activation = spec.name == "mlp", spec.name in ("mlp", "cnn")  # those that have these options
    network = {"network": spec.name, "width": spec.width if width else None}
    return options | network | {"activation": spec.activation if activation else None}


def held_out_checksum(run: Path) -> str | None:
    """Return the checksum of a run's held-out points, or None if the manifest has none.

    Raises:
        ValueError: The manifest is damaged.
    """
    manifest = _read_manifest(run)
    value = None if manifest is None else manifest.get("held_out_blake2b")
    return value if isinstance(value, str) else None


def open_run(run: Path, network: str | None) -> Trajectory:
    """Load a run with the network that the user names, or else with the network of its manifest.

    A factory that only the manifest names is not executed: whoever wrote the folder could choose it.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: No network is named, or the manifest is damaged or names a factory, or the network is not the
            recorded one.
        ImportError: The factory cannot be imported.
        TypeError: The factory is not a function that returns a network.
    """
    header = read_header(run)
    spec = read_network_spec(run)
    if network is not None and (spec is None or network != spec.name):
        shape = tuple(read_data(run, header)["inputs"].shape[1:])
        spec = NetworkSpec(network, shape, header["num_outputs"])
    if spec is None:
        raise ValueError(f"--network must name the network: {run} has no {MANIFEST} that does.")
    if network is None and ":" in spec.name:
        raise ValueError(
            f"--network must name a factory before it is executed: {spec.name} makes the network of {run}. "
            f"If you trust it, pass --network {spec.name}."
        )
    try:
        return load_trajectory(run, build_network(spec))
    except RuntimeError as error:  # torch's error for inputs of another shape, where the weights have the right names
        raise ValueError(f"the network must be the recorded one: {error}") from error


def _read_manifest(run: Path) -> dict[str, Any] | None:
    file = run / MANIFEST
    if regular_file_size(file, str(file)) is None:
        return None
    requirement = f"{file} must describe how the network is made"
    content = read_checksummed_json(read_bytes(file, MAX_JSON_BYTES, str(file)), requirement)
    if content is None:
        raise ValueError(f"{requirement}: it is damaged, for its checksum is not that of its content. Pass --network.")
    return content
