"""The script of all checks: it gets a browser where it can, and runs the checks in any case."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
TOOLS = ("bash", "env", "dirname", "timeout")

pytestmark = pytest.mark.skipif(
    not SCRIPT.exists() or any(shutil.which(tool) is None for tool in TOOLS),
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
    """Write a program."""
    file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    file.chmod(0o755)


def test_chromium_is_installed_where_it_is_missing(run):
    done, log = run()
    assert done.returncode == 0
    assert log == ["apt-get -qq update", "apt-get -qq install --yes --no-install-recommends chromium", "make test"]
    assert (done.stdout, done.stderr) == ("", "")


def test_an_installation_that_fails_is_said_and_the_checks_run(run):
    done, log = run(apt_get="echo 'E: no network' >&2; exit 100")
    assert done.returncode == 0
    assert log[-1] == "make test"
    assert done.stderr == "Chromium was not installed, so that reports are not tested in a browser: E: no network\n"


@pytest.mark.parametrize(
    "case",
    [{"programs": ("make", "apt-get", "chromium")}, {"programs": ("make",)}, {"user": "1000"}],
    ids=["chromium_is_there", "no_apt_get", "not_root"],
)
def test_nothing_is_installed_otherwise(run, case):
    done, log = run(**case)
    assert done.returncode == 0
    assert log == ["make test"]
