"""Results with their provenance: JSON with configuration, versions and seconds; files of arrays; and tables."""

import csv
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

import epk_gp
from epk_gp.storage.files import tensor_file


@dataclass
class Stopwatch:
    """A timer: seconds since its creation."""

    start: float = field(default_factory=time.perf_counter)

    @property
    def total(self) -> float:
        """Seconds since the creation of the timer."""
        return round(time.perf_counter() - self.start, 3)


def write_json(
    file: Path, command: str, config: Mapping[str, object], results: Mapping[str, object], timer: Stopwatch
) -> None:
    """Write results together with the data needed to reproduce them.

    Raises:
        ValueError: A number is not finite, which JSON cannot represent.
    """
    plain = {name: v if isinstance(v, int | float | str | list | dict | None) else str(v) for name, v in config.items()}
    content = {"command": command, "config": plain, "results": results, **provenance(timer)}
    file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of this package, Python and the packages that compute."""
    packages = ("torch", "gpytorch", "linear_operator", "numpy", "safetensors")
    own = {"epk_gp": epk_gp.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in packages}


def provenance(timer: Stopwatch) -> dict[str, object]:
    """Return the versions, the machine and the seconds of a result."""
    machine = {"system": platform.platform(), "threads": torch.get_num_threads()}
    return {"versions": versions(), "machine": machine, "seconds": {"total": timer.total}}


def write_arrays(file: Path, arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named arrays as safetensors, with metadata: equal inputs give equal bytes."""
    with file.open("wb") as stream:
        stream.writelines(tensor_file(arrays, metadata))


def write_table(file: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows with a header as CSV."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([columns, *rows])
