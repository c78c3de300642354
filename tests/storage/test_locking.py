"""One writer at a time: by a lock on the journal, or on a file beside it, or by a marker where there are no locks."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.storage import files
from epk_gp.storage import writer as locking
from epk_gp.storage.verify import check_run
from loops import data, mlp, sgd

LOCK, MARKER = "writer.lock", "writer.pid"
KINDS = ("journal", "file", "marker")


def no_locks(*_, **__):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def without_journal_locks(kind, patch=setattr):
    """Make this process lock as Windows does ("file"), or as on a file system without locks ("marker")."""
    if kind == "file":
        patch(locking, "_JOURNAL_CAN_BE_LOCKED", False)
    elif kind == "marker":
        patch(locking, "lock_descriptor", no_locks)


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    without_journal_locks(request.param, monkeypatch.setattr)
    return request.param


def warned(kind):
    """The warning that nothing but a file's existence locks the run."""
    return (
        pytest.warns(RuntimeWarning, match=f"has no locks: {MARKER} stands for one")
        if kind == "marker"
        else nullcontext()
    )


def recorder(path, kind="journal", **options):
    net, (X, y) = mlp(), data()
    with warned(kind):
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


def test_a_second_writer_is_refused_until_the_first_one_ends(tmp_path, kind):
    first = recorder(tmp_path / "run", kind)
    for _ in range(2):
        with pytest.raises(BlockingIOError, match="one writer at a time: another process records into"):
            recorder(tmp_path / "run", kind)
    steps(first, 2)
    steps(recorder(tmp_path / "run", kind), 3)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(3)


def test_a_run_that_is_written_can_be_read(tmp_path, kind):
    writer = recorder(tmp_path / "run", kind)
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == check_run(tmp_path / "run").num_steps == 0
    steps(writer, 1)


def test_a_finished_run_holds_no_lock_file_that_is_not_needed(tmp_path, kind):
    steps(recorder(tmp_path / "run", kind), 2)
    assert (tmp_path / "run" / LOCK).exists() == (kind == "file")  # filelock removes it on Windows only
    assert not (tmp_path / "run" / MARKER).exists()
    files = check_run(tmp_path / "run").files
    (tmp_path / "run" / LOCK).unlink(missing_ok=True)
    assert check_run(tmp_path / "run").files == files == 8


@pytest.mark.parametrize("before", KINDS)
def test_a_run_is_resumed_whatever_locked_it_before(tmp_path, kind, before):
    """A run of an earlier version, or one that was moved from another system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locking, "_JOURNAL_CAN_BE_LOCKED", True)
        patch.setattr(locking, "lock_descriptor", lambda *_, **__: True)
        without_journal_locks(before, patch.setattr)
        steps(recorder(tmp_path / "run", before), 2)
    steps(recorder(tmp_path / "run", kind), 4)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(4)


@pytest.mark.parametrize("name", [LOCK, MARKER])
def test_a_lock_file_alone_does_not_occupy_a_folder(tmp_path, name):
    """A crash between the lock and the header leaves one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).touch()
    steps(recorder(tmp_path / "run"), 1)
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 1


SCRIPT = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import warnings
    warnings.simplefilter("ignore")
    import torch
    torch.set_num_threads(1)
    from storage_locking import recorder, without_journal_locks

    without_journal_locks({kind!r})
    first = recorder({path!r})
    {work}
"""


def run_script(tmp_path, kind, work):
    """Run in a process of its own, which imports this file."""
    (tmp_path / "storage_locking.py").write_text(Path(__file__).read_text())
    script = textwrap.dedent(SCRIPT).format(
        tests=str(Path(__file__).parents[1]), kind=kind, path=str(tmp_path / "run"), work=work
    )
    packages = [str(Path(epk.__file__).parents[1]), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(packages)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_a_process_that_is_killed_gives_its_lock_back(tmp_path, kind):
    killed = run_script(tmp_path, kind, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {name for name in (LOCK, MARKER) if (tmp_path / "run" / name).exists()}
    assert left == {"journal": set(), "file": {LOCK}, "marker": {MARKER}}[kind]
    steps(recorder(tmp_path / "run", kind), 2)
    assert epk.load_trajectory(tmp_path / "run", mlp()).digest == whole_digest(2)


@pytest.mark.slow
def test_a_forked_process_that_ends_does_not_give_the_lock_back(tmp_path, kind):
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
    done = run_script(tmp_path, kind, work.format(path=str(tmp_path / "run")))
    assert done.stdout == "refused\n", done.stderr


def test_a_run_is_recorded_where_the_system_has_nothing_that_only_unix_has(tmp_path, monkeypatch):
    """Windows: no O_NOFOLLOW, O_NONBLOCK and O_CLOEXEC, no folders that can be opened, no locks that readers pass."""
    monkeypatch.setattr(files, "_NO_FOLLOW", 0)
    monkeypatch.setattr(files, "_SAFE_FLAGS", 0)
    monkeypatch.setattr(files, "_CAN_SYNC_FOLDERS", False)
    without_journal_locks("file", monkeypatch.setattr)
    steps(recorder(tmp_path / "run", "file"), 2)
    steps(recorder(tmp_path / "run", "file"), 4)
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
