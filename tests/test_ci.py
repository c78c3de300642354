"""The script of all checks gets a browser where it can, and the Makefile uses the interpreter that it must."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from page_code import load

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
MAKE = "make test test-changed-pages"
TOOLS = ("bash", "env", "dirname", "timeout")

pytestmark = pytest.mark.skipif(
    os.name == "nt" or not SCRIPT.exists() or any(shutil.which(tool) is None for tool in TOOLS),
    reason="needs the checkout, bash and coreutils",
)


@pytest.fixture
def run(tmp_path):
    """Run the script where there are only some tools, and a `make` and an `apt-get` that say what they were asked."""

    def run(*, user="0", programs=("make", "apt-get"), apt_get="exit 0"):
        for tool in TOOLS:
            (tmp_path / tool).symlink_to(shutil.which(tool))
        bodies = {"make": "exit 0", "apt-get": apt_get, "chromium": "exit 0"}
        for name in programs:
            write(tmp_path / name, f'echo "{name} $*" >> "{tmp_path}/log"\n{bodies[name]}')
        write(tmp_path / "id", f"echo {user}")
        environment = {name: value for name, value in os.environ.items() if name != "EPK_GP_CHROMIUM"}
        done = subprocess.run(
            [str(SCRIPT)], env={**environment, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False
        )
        return done, (tmp_path / "log").read_text().splitlines()

    return run


def write(file, body):
    file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    file.chmod(0o755)


INSTALLING = ["apt-get -qq update", "apt-get -qq install --yes --no-install-recommends chromium", MAKE]
FAILED = "Chromium was not installed, so that reports are not tested in a browser: E: no network\n"


@pytest.mark.parametrize(
    ("case", "asked", "said"),
    [
        ({}, INSTALLING, ""),
        ({"apt_get": "echo 'E: no network' >&2; exit 100"}, INSTALLING, FAILED),
        ({"programs": ("make", "apt-get", "chromium")}, [MAKE], ""),
        ({"user": "1000"}, [MAKE], ""),
    ],
    ids=["missing", "installation_fails", "chromium_is_there", "not_root"],
)
def test_chromium_is_installed_where_it_can_be_and_the_checks_run_in_any_case(run, case, asked, said):
    done, log = run(**case)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)
    assert log == asked


@pytest.fixture
def tested(tmp_path, monkeypatch):
    """.ci/tested.py in a repository of its own."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in (".ci/run", "docs/page.md", "epk_gp/core.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    for words in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    module = load(SCRIPT.with_name("tested.py"))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_pages_are_tested_again_where_anything_that_they_read_or_import_changed(tested, tmp_path):
    assert not tested.is_tested()  # nothing is noted
    for name, is_read in (("docs/page.md", True), ("epk_gp/core.py", True), ("CHANGELOG.md", False)):
        (tmp_path / tested.NOTE).write_text(tested.content())
        assert tested.is_tested()
        (tmp_path / name).write_text("after")
        assert tested.is_tested() != is_read
    (tmp_path / tested.NOTE).write_text(tested.content())
    (tmp_path / "docs" / "page.md").unlink()
    assert not tested.is_tested()
    (tmp_path / tested.NOTE).write_text(tested.content())
    shutil.rmtree(tmp_path / ".git")
    assert not tested.is_tested()  # git cannot say what is there


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
