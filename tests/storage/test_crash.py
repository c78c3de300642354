"""Recording processes that are killed, and readers beside a writer: what was committed is there, and it goes on."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import epk_gp

CRASHES = Path(__file__).parents[1] / "crashes.py"


def run(mode, keep_every=1, kills=200):
    """A process of its own, for it forks.

    It works in memory where it can: SIGKILL leaves what was written there as on a disk, only faster.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(epk_gp.__file__).parents[1])}
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        command = [sys.executable, str(CRASHES), mode, folder, "7", str(keep_every), str(kills)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == [], done.stderr
    return result


@pytest.mark.slow
def test_a_recording_read_and_killed_at_any_moment_opens_verifies_and_ends_as_if_it_had_not_been():
    result = run("random", kills=25)
    assert result["kills"] == 25
    assert {2, 4} & set(result["left_at"])  # kills within the run, not at its ends alone
    assert result["reads"] > 25


@pytest.mark.slow
@pytest.mark.parametrize("keep_every", [1, 3])
def test_a_recording_killed_after_each_file_operation_is_resumed(keep_every):
    result = run("operations", keep_every)
    assert result["kills"] > 45 // keep_every
    assert result["resumed"] > 20 // keep_every
