"""The rows of a judge in a JSON file: who was judged, by whom, on what, the number, and what it cost."""

import json
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from epk_gp.provenance import Stopwatch, provenance

FOLDER = Path(__file__).parent


def row(
    system: str, judge: str, data: str, numbers: Sequence[float], unit: str, seconds: Sequence[float], note: str = ""
) -> dict[str, Any]:
    """Return a row: mean and standard deviation over repeats of the number, and the mean of its seconds."""
    deviation = stdev(numbers) if len(numbers) > 1 else None
    values = {"number": mean(numbers), "deviation": deviation, "unit": unit, "cost_seconds": mean(seconds)}
    return {"system": system, "judge": judge, "data": data, **values, "note": note}


def save(file: Path, rows: list[dict[str, Any]], repeats: str, timer: Stopwatch, libraries: dict[str, str]) -> None:
    """Write rows and a head: machine, versions, date, repeats.

    Raises:
        ValueError: A number is not finite, which JSON cannot express.
    """
    head = provenance(timer)
    head["versions"] = {**head["versions"], **libraries}  # type: ignore[dict-item]
    head |= {"date": datetime.now(UTC).date().isoformat(), "repeats": repeats}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"head": head, "rows": rows}, allow_nan=False, indent=1) + "\n")


class Seconds:
    """A context that measures the processor seconds of its block."""

    value: float

    def __enter__(self) -> "Seconds":
        self._start = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.value = time.process_time() - self._start


def run_library(python: Path, script: str, *arguments: Path | str) -> None:
    """Run a script of this folder in a library's own environment.

    Raises:
        RuntimeError: It failed; the message is the last line that it wrote.
    """
    command = [str(python), str(FOLDER / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"{script}: {lines[-1] if lines else 'ended without a message'}")
