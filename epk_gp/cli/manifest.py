"""The manifest that `epk-gp record` writes into a run's folder, network.json: how the network is made."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epk_gp.cli.networks import NetworkSpec, build_network
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
