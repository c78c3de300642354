"""Runs while they are written: one writer, disks and folders that fail, interrupts; a readable run and the same end."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

import epk_gp as epk
from epk_gp.storage import files
from epk_gp.storage import writer as writing
from epk_gp.storage.run import check_run
from loops import data, file_hashes, mlp, sgd
from stored_runs import record, resumed, step


def recorder(path):
    return resumed(path, storage=epk.Storage(steps=1))


def steps(recorder, count):
    with recorder:
        for _ in recorder.until(count):
            step(recorder)
    return recorder


@cache
def digest(count):
    net, (X, y) = mlp(), data()
    return epk.train(net, X, y, optimizer=sgd(net), steps=count).digest


def opened_digest(path):
    return epk.load_trajectory(path, mlp()).digest


# --- One writer at a time -------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_until_the_first_one_ends_and_readers_are_not(tmp_path):
    first = recorder(tmp_path / "run")
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == check_run(tmp_path / "run").num_steps == 0
    with first:
        step(first)
        for _ in range(2):
            with pytest.raises(BlockingIOError, match="one writer at a time: another one records into .*run"):
                recorder(tmp_path / "run")
        step(first)
    steps(recorder(tmp_path / "run"), 3)
    assert opened_digest(tmp_path / "run") == digest(3)


def test_a_lock_file_is_no_file_of_the_run(tmp_path):
    """It stays where it is; a copy without it is whole, and a crash between lock and header leaves it alone."""
    lock = tmp_path / "run" / "writer.lock"
    lock.parent.mkdir()
    lock.touch()
    steps(recorder(tmp_path / "run"), 2)
    count = check_run(tmp_path / "run").files
    lock.unlink()
    assert check_run(tmp_path / "run").files == count == 8
    steps(recorder(tmp_path / "run"), 4)
    assert opened_digest(tmp_path / "run") == digest(4)


SCRIPT = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from stored_runs import resumed
first = resumed(sys.argv[1])
if not os.fork():  # such as a worker of a DataLoader
    first._commits.writer.close()
    os._exit(0)
os.wait()
try:
    resumed(sys.argv[1])
except BlockingIOError:
    print("refused", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_lock_ends_with_the_process_that_took_it_and_not_with_its_forks(tmp_path):
    packages = os.pathsep.join([str(Path(epk.__file__).parents[1]), str(Path(__file__).parents[1])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": packages}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "refused\n"), killed.stderr
    steps(recorder(tmp_path / "run"), 2)
    assert opened_digest(tmp_path / "run") == digest(2)


@pytest.mark.parametrize("name", ["run.json", "journal.jsonl", "data.safetensors"])
def test_runs_are_recorded_and_links_refused_where_the_system_has_nothing_that_only_unix_has(
    tmp_path, monkeypatch, name
):
    """Windows: no O_NOFOLLOW, O_NONBLOCK and O_CLOEXEC, no folders that can be opened."""
    for flag in ("_NO_FOLLOW", "_SAFE_FLAGS", "_CAN_SYNC_FOLDERS"):
        monkeypatch.setattr(files, flag, 0)
    steps(recorder(tmp_path / "run"), 2)
    steps(recorder(tmp_path / "run"), 4)
    assert opened_digest(tmp_path / "run") == digest(4)
    (tmp_path / "run" / name).rename(tmp_path / "secret")
    (tmp_path / "run" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=f"{name} must be a plain file: it is a symbolic link"):
        epk.load_trajectory(tmp_path / "run", mlp())
    with pytest.raises((ValueError, OSError), match="symbolic link"):
        recorder(tmp_path / "run")


# --- Operations that fail -------------------------------------------------------------------------------------------


def fails_from(number, error, real):
    """A file operation that fails from the given one on, or as an interrupt once."""
    left = [number]

    def operation(*arguments, **options):
        left[0] -= 1
        if left[0] < 0 and (error is not KeyboardInterrupt or left[0] == -1):
            raise error
        return real(*arguments, **options)

    return operation


def stops(path, monkeypatch, operations, error, match):
    """Record until the operations fail: what was recorded can be read, and resumed to the end of one that did not."""
    own = recorder(path)
    with monkeypatch.context() as patch:
        for owner, name in operations:
            patch.setattr(owner, name, error(getattr(owner, name)))
        with pytest.raises((OSError, KeyboardInterrupt), match=match) as caught:
            steps(own, 4)
    assert epk.load_trajectory(path, mlp()).num_steps == check_run(path).num_steps == own.num_committed
    steps(recorder(path), 4)
    assert opened_digest(path) == digest(4)
    return own, caught.value


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("fails", "number"), [*(("write", n) for n in (1, 0, 3)), *((f, n) for f in ("fsync", "replace") for n in range(5))]
)
def test_a_full_disk_gives_one_message_and_leaves_a_readable_run(tmp_path, monkeypatch, fails, number):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = r"must be written to .*run: No space left on device; check .* that its \d+ committed"
    operations = [(Path if fails == "replace" else os, fails)]
    own, error = stops(tmp_path / "run", monkeypatch, operations, lambda real: fails_from(number, full, real), message)
    assert error.errno == errno.ENOSPC
    assert f"its {own.num_committed} committed" in str(error)
    assert not list((tmp_path / "run").glob("*.part"))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("moment", range(0, 36, 3))
def test_an_interrupt_at_any_file_operation_leaves_a_readable_run(tmp_path, monkeypatch, moment):
    """Ctrl-C is an exception between any two instructions; here it comes with the operation of that number."""
    operations = [(os, name) for name in ("fsync", "write", "lseek")]
    operations += [(Path, name) for name in ("replace", "unlink", "open")]
    operations += [(writing, name) for name in ("chunk_tensors", "to_json_line")]
    count = fails_from(moment, KeyboardInterrupt, lambda: None)

    def interrupted(real):
        def operation(*arguments, **options):
            count()
            return real(*arguments, **options)

        return operation

    stops(tmp_path / "run", monkeypatch, operations, interrupted, None)


def test_an_error_of_the_loop_s_own_keeps_the_steps_before_it(tmp_path):
    own = resumed(tmp_path / "run", storage=epk.Storage(chunk_bytes=800))

    def fails(*_):
        if own.num_steps == 3:
            raise FileNotFoundError("mine")

    own.optimizer.register_step_pre_hook(fails)
    with pytest.raises(FileNotFoundError, match="mine"):
        steps(own, 8)
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 3


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    """The superuser's rights hold everywhere, so they are taken from `os.open`."""
    steps(recorder(tmp_path / "run"), 2)
    before, real = file_hashes(tmp_path / "run"), os.open

    def read_only(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    for path, kept in ((tmp_path / "run", "it is unchanged"), (tmp_path / "new", "no step is recorded yet")):
        with pytest.raises(PermissionError, match=f"must be written to .*: Permission denied; .*{kept}.*resume=True"):
            resumed(path)
    assert file_hashes(tmp_path / "run") == before


def test_steps_are_committed_by_a_clock_that_does_not_jump(tmp_path, monkeypatch):
    now, committed = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: -1e9)
    own = resumed(tmp_path / "run", storage=epk.Storage(seconds=10.0))
    with own:
        for seconds in (3, 3, 3, 3, 100, 1):
            now[0] += seconds
            step(own)
            committed.append(own.num_committed)
    assert committed == [0, 0, 0, 3, 4, 4]  # the last step waits for the next: the loop may move the weights
    assert own.num_committed == 6


def test_a_start_that_a_crash_cut_short_is_started_anew(tmp_path):
    start = tmp_path / "start"
    steps(resumed(start), 3)
    for name in ("run.json", "chunk-000001.safetensors", "finished.json", "resume-000001.safetensors"):
        (start / name).unlink()
    (start / "run.json.part").write_text(json.dumps("torn"))
    steps(resumed(start), 3)
    assert opened_digest(start) == digest(3)
    (start / "mine.txt").write_text("mine")
    (start / "run.json").unlink()
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        resumed(start)


# --- Folders and files that are deleted or replaced -----------------------------------------------------------------


def record_eight(path, fault):
    """Record five steps, make the fault, and record three more; each step is a commit."""
    own = recorder(path)
    with own:
        for number in own.until(8):
            if number == 5:
                fault(path)
            step(own)


def replaced(path, make):
    shutil.rmtree(path)
    make(path)


def copied(path):
    """A copy has the same content, but the journal that the writer has open is no longer in the folder."""
    path.rename(path.with_name("renamed"))
    shutil.copytree(path.with_name("renamed"), path)


FAULTS = {
    "deleted": shutil.rmtree,
    "renamed": lambda path: path.rename(path.with_name("renamed")),
    "a file": lambda path: replaced(path, lambda path: path.write_text("mine")),
    "a folder": lambda path: replaced(path, Path.mkdir),
    "another run": lambda path: replaced(path, record),
    "a copy": copied,
    "no journal": lambda path: (path / "journal.jsonl").unlink(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_not_the_run_s_any_more_is_named_and_left_alone(tmp_path, fault):
    """The message does not claim that the steps stay readable, and nothing is written to what is there now."""
    after_fault = {}

    def fault_and_remember(path):
        FAULTS[fault](path)
        after_fault.update(file_hashes(tmp_path))

    with pytest.raises(OSError, match=r"must be written to .*run: .*; check .* that its 5 committed steps") as error:
        record_eight(tmp_path / "run", fault_and_remember)
    assert error.value.errno in (errno.ENOENT, errno.ENOTDIR)
    assert file_hashes(tmp_path) == after_fault
    if fault == "renamed":
        assert opened_digest(tmp_path / "renamed") == digest(5)


LOST = {
    "chunk-000002.safetensors": r"chunk-000002.safetensors \(states 2..2\) must have \d+ bytes: it is missing",
    "run.json": "run.json does not exist",
    "data.safetensors": "data.safetensors is missing or was changed",
}


@pytest.mark.parametrize("name", LOST)
def test_a_file_that_is_deleted_while_the_run_is_recorded_is_named_at_the_end(tmp_path, name):
    """All steps are committed; once the file is restored, the run is whole."""
    path = tmp_path / "run"
    with pytest.raises(OSError, match=f"must keep all its files while it is recorded: .*{LOST[name]}.* Restore it"):
        record_eight(path, lambda path: (path / name).rename(tmp_path / name))
    assert not (path / "finished.json").exists()
    (tmp_path / name).rename(path / name)
    assert check_run(path).num_steps == 8
    with resumed(path):
        pass
    assert check_run(path).finished


NO_RUN = "must hold a recorded run: .*run.json does not exist"
WRONG = [
    ("chunk_bytes must be at least 1", lambda _: epk.Storage(chunk_bytes=0)),
    ("seconds must be positive", lambda _: epk.Storage(seconds=0)),
    ("steps must be a whole number", lambda _: epk.Storage(steps=2.5)),
    ("keep_every must be", lambda _: epk.Storage(keep_every=0)),
    (NO_RUN, check_run),
    *((NO_RUN, opened_digest), ("str", lambda _: opened_digest(None)), ("str", lambda _: opened_digest(b"run"))),
]


@pytest.mark.usefixtures("unchecked")
def test_wrong_options_and_folders_that_hold_no_run_are_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    for message, call in WRONG:
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
            call(tmp_path / "run")
