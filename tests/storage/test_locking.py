"""One writer at a time: by a lock of the operating system, on a file beside the journal."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.storage import files
from epk_gp.storage.verify import check_run
from loops import data, mlp, sgd

LOCK = "writer.lock"


def recorder(path, **options):
    net, (X, y) = mlp(), data()
    return epk.Recorder(net, sgd(net), X, y, folder=path, storage=epk.Storage(steps=1), resume=True, **options)


def steps(recorder, count):
    with recorder:
        for _ in recorder.until(count):
            recorder.optimizer.zero_grad()
            F.cross_entropy(recorder.net(recorder.X), recorder.y).backward()
            recorder.batch(None)
            recorder.optimizer.step()


def whole_digest(count):
    net, (X, y) = mlp(), data()
    return epk.train(net, X, y, optimizer=sgd(net), steps=count).digest


def test_a_second_writer_is_refused_until_the_first_one_ends(tmp_path):
    first = recorder(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(BlockingIOError, match="one writer at a time: another one records into"):
            recorder(tmp_path / "run")
    steps(first, 2)
    steps(recorder(tmp_path / "run"), 3)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(3)


def test_a_run_that_is_written_can_be_read(tmp_path):
    writer = recorder(tmp_path / "run")
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == check_run(tmp_path / "run").num_steps == 0
    steps(writer, 1)


def test_a_lock_file_is_no_file_of_the_run(tmp_path):
    """It stays where it is; a copy without it is whole, and a crash between lock and header leaves it alone."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).touch()
    steps(recorder(tmp_path / "run"), 2)
    files = check_run(tmp_path / "run").files
    (tmp_path / "run" / LOCK).unlink()
    assert check_run(tmp_path / "run").files == files == 8
    steps(recorder(tmp_path / "run"), 4)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(4)


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import warnings
    warnings.simplefilter("ignore")
    import torch
    torch.set_num_threads(1)
    from storage_locking import recorder

    first = recorder({path!r})
    {work}
"""


def run_script(tmp_path, work):
    """Run in a process of its own, which imports this file."""
    (tmp_path / "storage_locking.py").write_text(Path(__file__).read_text())
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parents[1]), path=str(tmp_path / "run"), work=work)
    packages = [str(Path(epk.__file__).parents[1]), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(packages)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_process_that_is_killed_gives_its_lock_back(tmp_path):
    killed = run_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    steps(recorder(tmp_path / "run"), 2)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(2)


@pytest.mark.slow
def test_a_forked_process_that_ends_does_not_give_the_lock_back(tmp_path):
    """Such as a worker of a DataLoader."""
    work = textwrap.dedent("""
        if not os.fork():
            first._commits.writer.close()
            os._exit(0)
        os.wait()
        try:
            recorder({path!r})
        except BlockingIOError:
            print("refused")
    """)
    done = run_script(tmp_path, work.format(path=str(tmp_path / "run")))
    assert done.stdout == "refused\n", done.stderr


def test_a_run_is_recorded_where_the_system_has_nothing_that_only_unix_has(tmp_path, monkeypatch):
    """Windows: no O_NOFOLLOW, O_NONBLOCK and O_CLOEXEC, no folders that can be opened, no locks that readers pass."""
    monkeypatch.setattr(files, "_NO_FOLLOW", 0)
    monkeypatch.setattr(files, "_SAFE_FLAGS", 0)
    monkeypatch.setattr(files, "_CAN_SYNC_FOLDERS", False)
    steps(recorder(tmp_path / "run"), 2)
    steps(recorder(tmp_path / "run"), 4)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(4)


@pytest.mark.parametrize("name", ["run.json", "journal.jsonl", "data.safetensors"])
def test_symbolic_links_are_refused_where_the_system_would_follow_them(tmp_path, monkeypatch, name):
    monkeypatch.setattr(files, "_NO_FOLLOW", 0)
    steps(recorder(tmp_path / "run"), 1)
    (tmp_path / "run" / name).rename(tmp_path / "secret")
    (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} must be a plain file: it is a symbolic link"):
        epk.load_trajectory(tmp_path / "run", mlp())
    with pytest.raises((ValueError, OSError), match="symbolic link"):
        recorder(tmp_path / "run")
