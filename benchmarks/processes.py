"""Contenders as processes of their own, each in an environment where its versions fit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

HERE = Path(__file__).parent
SETUP_SECONDS = 300  # a contender whose set-up takes longer is stopped
WARM_SECONDS = 1  # runs shorter than this are made twice in a turn, and the second one counts


class Worker:
    """The process of a contender, which runs when it is told to."""

    def __init__(
        self,
        python: Path,
        script: str,
        problem: dict[str, Any],
        folder: Path,
        name: str,
        setup_seconds: float = SETUP_SECONDS,
    ) -> None:
        """Start the process and wait until the problem is set up.

        Args:
            python: Interpreter of its environment.
            script: Name of its script in `contenders`.
            problem: Description of the problem.
            folder: Folder for its files.
            name: Name of its files.
            setup_seconds: Seconds after which it is stopped if it is not ready.

        Raises:
            RuntimeError: The process ended before the problem was set up; the message is the last line of its stderr.
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
        ready = self._answer(setup_seconds)
        self.bytes_before: int = ready["bytes"]
        self.setup_seconds: float = ready["seconds"]
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def take_turn(self, limit: float) -> None:
        """Run, and store seconds and peak memory.

        Other processes have used the caches since the last turn, so a short run is made twice, and the second one
        counts. The peak memory is that of the very first run, after which the result is copied for comparison.

        Args:
            limit: Seconds that a run may take.

        Raises:
            RuntimeError: The run failed, or took longer than the limit.
        """
        answer = self._run(limit)
        self.peak_bytes = self.peak_bytes or answer["peak_bytes"]
        if self.seconds and answer["seconds"] < WARM_SECONDS:
            answer = self._run(limit)
        self.seconds.append(answer["seconds"])

    def _run(self, limit: float) -> dict[str, Any]:
        if self._process.stdin is not None:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        return self._answer(limit)

    def result(self) -> np.ndarray:
        """Return the result of the first run."""
        return np.load(self._result)

    def _answer(self, seconds: float) -> dict[str, Any]:
        timer = Timer(seconds, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout or ():
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        if timed_out:
            raise RuntimeError(f"stopped after {seconds:.0f} s")
        lines = [line for line in self._stderr.read_text().splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else "the process ended without a message")


def environment(folder: Path, packages: list[str], python: Path | None = None) -> Path:
    """Make a virtual environment once, and return its interpreter.

    Args:
        folder: Its folder.
        packages: What it holds, as pip takes it.
        python: Interpreter that makes it; None means the one that runs this process.

    Raises:
        RuntimeError: A package cannot be installed; the message is what pip says last.
    """
    inside, done = folder / "bin" / "python", folder / "done"
    if not done.exists():
        subprocess.run([str(python or current_python()), "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        found = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if found.returncode:
            raise RuntimeError(([line for line in found.stderr.splitlines() if "ERROR" in line] or ["pip failed"])[-1])
        done.touch()
    return inside


def interpreter(version: tuple[int, int]) -> Path:
    """Find an interpreter of this version of Python or a later one: this one, on the PATH, or among pyenv's.

    Raises:
        RuntimeError: There is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = [f"python{version[0]}.{minor}" for minor in range(version[1], version[1] + 4)]
    found = [current_python(), *(Path(path) for name in names if (path := shutil.which(name)))]
    found += [file for name in names for file in sorted(pyenv.glob(f"*/bin/{name}"))]
    ask = f"import sys; sys.exit(sys.version_info < {version})"
    for python in found:  # pyenv's shims are on the PATH and fail for versions that are not chosen
        if not subprocess.run([str(python), "-c", ask], stderr=subprocess.DEVNULL, check=False).returncode:
            return python
    raise RuntimeError(f"no Python {version[0]}.{version[1]} or later on this machine")


def current_python() -> Path:
    """Return the interpreter that runs this process."""
    return Path(sys.executable)
