"""What `epk-gp record --resume` takes from the run: the options that it was recorded with."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from epk_gp.cli.data import is_data_file
from epk_gp.cli.manifest import MANIFEST, read_options
from epk_gp.cli.options import Dtype, LossName, OptimizerName
from epk_gp.storage.run import is_run

# The options that say what a run is made of, by parameter, and the kinds of their values. --out, --steps,
# --commit-seconds and --quiet may change from one part of a recording to the next.
_KINDS: dict[str, type] = {
    "data": str,
    "data_dir": Path,
    "num_train": int,
    "num_test": int,
    "num_classes": int,
    "network": str,
    "width": int,
    "activation": str,
    "zero_final": bool,
    "optimizer": OptimizerName,
    "lr": float,
    "momentum": float,
    "nesterov": bool,
    "weight_decay": float,
    "clip_norm": float,
    "batch_size": int,
    "loss": LossName,
    "dtype": Dtype,
    "keep_every": int,
    "check_every": int,
    "seed": int,
}
_STORED_AS = {"zero_final": "zero_final_layer"}
_REQUIRED = frozenset(_KINDS) - {
    "data_dir",
    "num_test",
    "num_classes",
    "width",
    "activation",
    "clip_norm",
    "batch_size",
}


def complete_options(options: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the options of a recording: with --resume, those that are not given are as recorded.

    Data of a file, and the folder of MNIST-format files, may have been moved: another path is not refused, as the data
    themselves are compared.

    Args:
        options: Values of all parameters of `record`.
        given: Parameters that are on the command line.

    Raises:
        ValueError: An option is given with another value than the recorded one, or the manifest is damaged, or it names
            a factory that the command line does not.
    """
    completed, run = dict(options), options["out"]
    recorded = read_options(run) if options["resume"] and is_run(run) else None
    if recorded is None:
        return completed
    for name, kind in (_KINDS | {"steps": int}).items():
        key = _STORED_AS.get(name, name)
        if key not in recorded:  # runs of earlier versions do not have all
            continue
        value = _parse(recorded[key], kind, name, run)
        if name not in given:
            completed[name] = value
        elif name != "steps" and options[name] != value and not _may_be_moved(name, options[name], value):
            raise ValueError(
                f"--{key.replace('_', '-')} must be the recorded one to resume the run at {run}: "
                f"it has {_describe(value)}, got {_describe(options[name])}. Leave the option out, or record another "
                "run."
            )
    if "network" not in given and ":" in completed["network"]:
        raise ValueError(
            f"--network must name a factory before it is executed: {completed['network']} makes the network of {run}. "
            f"If you trust it, pass --network {completed['network']}."
        )
    return completed


def _parse(value: object, kind: type, name: str, run: Path) -> Any:
    """Return a value of the manifest as the command line has it."""
    if value is None and name not in _REQUIRED:
        return None
    stored_as = kind if kind in (int, float, bool) else str
    accepted = (int, float) if kind is float else (stored_as,)
    try:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"it is {value!r}")
        return kind(value)
    except ValueError as error:
        raise ValueError(
            f"{run / MANIFEST} must hold the options of the recording: {name} is damaged ({error})."
        ) from error


def _may_be_moved(name: str, given: Any, recorded: Any) -> bool:
    return name == "data_dir" or (name == "data" and is_data_file(given) and is_data_file(recorded))


def _describe(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
