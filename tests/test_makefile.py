"""The Makefile: which interpreter makes the environment, and what happens if another one has made it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THIS = f"PYTHON={sys.executable}"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.skipif(os.name == "nt" or shutil.which("make") is None, reason="needs make and sh")
@pytest.mark.parametrize(
    ("arguments", "is_done", "said"),
    [
        (("test", THIS), False, f".venv must be made by Python {RUNNING}: it was made by Python 3.10"),
        (("test", "PYTHON=python9.9"), False, "PYTHON=python9.9 must be an interpreter: it cannot be started"),
        (("test",), True, "-m pytest"),
        (("test", "VENV=.venv-other", THIS), True, "-m pytest"),
        (("clean", THIS), True, ""),
    ],
    ids=["another_python", "no_python", "none_named", "another_environment", "clean"],
)
def test_the_environment_is_used_by_the_python_that_made_it(tmp_path, arguments, is_done, said):
    """Make prints its commands and runs none; the variables of one that runs these tests are left out."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.10\n")
    python.chmod(0o755)
    left_out = ("MAKE", "MFLAGS", "PYTHON", "VENV", "OUT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    ended = subprocess.run(["make", "-n", *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (ended.returncode == 0) == is_done, ended.stderr
    assert said in ended.stdout + ended.stderr
    assert is_done or "-m pytest" not in ended.stdout
