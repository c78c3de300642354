"""The Makefile: which interpreter makes the environment, and what happens if another one has made it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the Makefile, and an environment whose Python says that it is 3.10."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.10\n")
    python.chmod(0o755)
    return tmp_path


def dry_run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status and the output of make, which prints its commands and runs none.

    The variables of a make that runs these tests are left out: it would hand on its options.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for name in ("PYTHON", "VENV", "OUT", "PYTEST_ARGS"):
        environment.pop(name, None)
    ended = subprocess.run(["make", "-n", *arguments], cwd=folder, capture_output=True, text=True, env=environment)
    return ended.returncode, ended.stdout + ended.stderr


def test_another_python_than_that_of_the_environment_is_refused(clone: Path) -> None:
    status, output = dry_run(clone, "test", f"PYTHON={sys.executable}")
    assert status != 0
    assert f".venv must be made by Python {RUNNING}: it was made by Python 3.10" in output
    assert f"VENV=.venv-{RUNNING}" in output
    assert "-m pytest" not in output


def test_an_interpreter_that_does_not_exist_is_refused(clone: Path) -> None:
    status, output = dry_run(clone, "test", "PYTHON=python9.9")
    assert status != 0
    assert "PYTHON=python9.9 must be an interpreter: it cannot be started" in output


@pytest.mark.parametrize(
    "arguments", [(), ("VENV=.venv-other", f"PYTHON={sys.executable}")], ids=["no_python", "another_environment"]
)
def test_the_environment_is_used_otherwise(clone: Path, arguments: tuple[str, ...]) -> None:
    """The negative control."""
    status, output = dry_run(clone, "test", *arguments)
    assert status == 0, output
    assert "-m pytest" in output


def test_an_environment_can_be_removed_with_any_python(clone: Path) -> None:
    assert dry_run(clone, "clean", f"PYTHON={sys.executable}")[0] == 0
