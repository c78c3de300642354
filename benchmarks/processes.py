"""Contenders as processes of their own, each in an environment where its versions fit."""

import json
import subprocess
import sys
import venv
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SETUP_SECONDS = 300  # a contender that takes longer is out
WARM_SECONDS = 1  # runs shorter than this come twice in a turn, the second one counts


class Worker:
    """A contender's process: waits until it is told to run."""

    def __init__(self, python: Path, script: str, problem: dict[str, Any], folder: Path, name: str) -> None:
        """Start it and wait until the problem is set up.

        Args:
            python: Interpreter of its environment.
            script: In `contenders`.
            problem: What it is told.
            folder: For its files.
            name: Of its files.

        Raises:
            RuntimeError: It did not get so far; with its last word.
        """
        description = folder / f"{name}.json"
        description.write_text(json.dumps(problem))
        self._result, self._stderr = folder / f"{name}.npy", folder / f"{name}.stderr"
        with self._stderr.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(HERE / "contenders" / script), str(description), str(self._result)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.bytes_before: int = self._answer(SETUP_SECONDS)["bytes"]
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def take_turn(self, limit: float) -> None:
        """Run, and note seconds and peak memory.

        Other processes have filled the caches since the last turn, so a short run is made twice, and the second counts.
        The peak is that of the first run of all: after it the result is copied to be compared.

        Args:
            limit: Seconds that a run may take.

        Raises:
            RuntimeError: It did not finish, or not in time.
        """
        found = self._run(limit)
        self.peak_bytes = self.peak_bytes or found["peak_bytes"]
        if self.seconds and found["seconds"] < WARM_SECONDS:
            found = self._run(limit)
        self.seconds.append(found["seconds"])

    def _run(self, limit: float) -> dict[str, Any]:
        if self._process.stdin is not None:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        return self._answer(limit)

    def result(self) -> np.ndarray:
        """Read what the first run gave."""
        return np.load(self._result)

    def _answer(self, seconds: float) -> dict[str, Any]:
        watch = Timer(seconds, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout or ():
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            late = not watch.is_alive()
            watch.cancel()
        if late:
            raise RuntimeError(f"stopped after {seconds:.0f} s")
        lines = [line for line in self._stderr.read_text().splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else "the process ended without a word")


def environment(folder: Path, packages: list[str]) -> Path | None:
    """Make a virtual environment, once, and give its interpreter; None if the registry lacks a package."""
    python, done = folder / "bin" / "python", folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
            return None
        done.touch()
    return python


def own_python() -> Path:
    """Give the interpreter that runs this."""
    return Path(sys.executable)
