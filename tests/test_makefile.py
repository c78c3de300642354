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
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "PYTHON", "VENV", "OUT"))
    }
    ended = subprocess.run(["make", "-n", *arguments], cwd=folder, capture_output=True, text=True, env=environment)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "is_done", "said"),
    [
        (("test", f"PYTHON={sys.executable}"), False, f"by Python {RUNNING}: it was made by Python 3.10"),
        (("test", "PYTHON=python9.9"), False, "PYTHON=python9.9 must be an interpreter: it cannot be started"),
        (("test",), True, "-m pytest"),
        (("test", "VENV=.venv-other", f"PYTHON={sys.executable}"), True, "-m pytest"),
        (("clean", f"PYTHON={sys.executable}"), True, ""),
    ],
    ids=["another_python", "no_python", "none_named", "another_environment", "clean"],
)
def test_the_environment_is_used_by_the_python_that_made_it(clone: Path, arguments, is_done: bool, said: str) -> None:
    status, output = dry_run(clone, *arguments)
    assert (status == 0) == is_done, output
    assert said in output
    assert is_done or "-m pytest" not in output
