"""When a run cannot be written: one message, a readable run, and the same end once it is resumed."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import epk_gp as epk
from epk_gp.storage import writer as writing
from epk_gp.storage.verify import check_run
from loops import data, file_hashes, mlp, sgd
from stored_runs import resumed, step


def test_a_second_writer_is_refused_and_the_first_continues(tmp_path):
    first = resumed(tmp_path / "run", storage=epk.Storage(steps=1))
    with first:
        step(first)
        for _ in range(2):
            with pytest.raises(BlockingIOError, match="one writer at a time: another one records into .*run"):
                resumed(tmp_path / "run")
        step(first)
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 2
    assert resumed(tmp_path / "run").num_steps == 2


@pytest.mark.mostly_slow
@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", range(6))
def test_a_full_disk_gives_one_message_and_leaves_a_readable_run(tmp_path, monkeypatch, fails, number):
    """The operation fails from the given one on."""
    path, left = tmp_path / "run", [number]
    recorder = resumed(path, storage=epk.Storage(steps=1))
    owner = Path if fails == "replace" else os
    real = getattr(owner, fails)

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    def loop():
        with recorder:
            for _ in range(8):
                step(recorder)

    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, full)
        with pytest.raises(
            OSError, match=r"must be written to .*run: No space left on device; check .* that its \d+ committed"
        ) as e:
            loop()
    assert e.value.errno == errno.ENOSPC
    committed = recorder.num_committed
    assert str(committed) in str(e.value)
    assert epk.load_trajectory(path, mlp()).num_steps == committed == check_run(path).num_steps
    assert not list(path.glob("*.part"))
    again = resumed(path, storage=epk.Storage(steps=1))
    with again:
        for _ in again.until(8):
            step(again)
    net, (X, y) = mlp(), data()
    assert again.trajectory.digest == epk.train(net, X, y, optimizer=sgd(net), steps=8).digest


def test_an_error_of_the_loop_s_own_keeps_the_steps_before_it(tmp_path):
    recorder = resumed(tmp_path / "run")

    def loop():
        with recorder:
            for _ in range(3):
                step(recorder)
            raise FileNotFoundError("mine")

    with pytest.raises(FileNotFoundError, match="mine"):
        loop()
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 3


def test_a_folder_without_the_right_to_write_is_named(tmp_path, monkeypatch):
    """The rights themselves where they hold; the superuser's hold nowhere, so they are taken from `os.open`."""
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, folder=tmp_path / "run")
    before = file_hashes(tmp_path / "run")
    real = os.open

    def read_only(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    for path, kept in ((tmp_path / "run", "it is unchanged"), (tmp_path / "new", "no step is recorded yet")):
        with pytest.raises(PermissionError, match=f"must be written to .*: Permission denied; .*{kept}.*resume=True"):
            resumed(path)
    assert file_hashes(tmp_path / "run") == before
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 2


def test_rights_that_are_taken_away_are_named(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="must be written to .*: Permission denied"):
        resumed(tmp_path / "run")
    tmp_path.chmod(0o700)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_an_interrupt_at_any_file_operation_leaves_a_readable_run(tmp_path, monkeypatch, moment):
    """Ctrl-C is an exception between any two instructions; here it comes with the operation of that number."""
    path, left = tmp_path / "run", [moment]
    recorder = resumed(path, storage=epk.Storage(steps=1))

    def interrupted(real):
        def wrapper(*arguments, **options):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return wrapper

    def loop():
        with recorder:
            for _ in range(8):
                step(recorder)

    names = {
        os: ("fsync", "write", "lseek"),
        Path: ("replace", "unlink", "open"),
        writing: ("chunk_tensors", "to_json_line"),
    }
    with monkeypatch.context() as patch:
        for owner, functions in names.items():
            for name in functions:
                patch.setattr(owner, name, interrupted(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            loop()
    assert epk.load_trajectory(path, mlp()).num_steps == check_run(path).num_steps == recorder.num_steps
    again = resumed(path, storage=epk.Storage(steps=1))
    with again:
        for _ in again.until(8):
            step(again)
    net, (X, y) = mlp(), data()
    assert again.trajectory.digest == epk.train(net, X, y, optimizer=sgd(net), steps=8).digest


def test_steps_are_committed_by_a_clock_that_does_not_jump(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: -1e9)
    recorder = resumed(tmp_path / "run", storage=epk.Storage(seconds=10.0))
    committed = []
    with recorder:
        for seconds in (3, 3, 3, 3, 100, 1):
            now[0] += seconds
            step(recorder)
            committed.append(recorder.num_committed)
    assert committed == [0, 0, 0, 4, 5, 5]
    assert recorder.num_committed == 6


def test_a_start_that_a_crash_cut_short_is_started_anew(tmp_path):
    net, (X, y) = mlp(), data()
    whole = epk.train(net, X, y, optimizer=sgd(net), steps=3, folder=tmp_path / "run")
    start = shutil.copytree(tmp_path / "run", tmp_path / "start")
    for name in ("run.json", "chunk-000001.safetensors", "finished.json", "resume-000001.safetensors"):
        (start / name).unlink()
    (start / "run.json.part").write_text(json.dumps("torn"))
    net = mlp()
    assert epk.train(net, X, y, optimizer=sgd(net), steps=3, folder=start, resume=True).digest == whole.digest
    (start / "mine.txt").write_text("mine")
    (start / "run.json").unlink()
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        resumed(start)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
        ({"seconds": 0}, ValueError, "seconds must be positive"),
        ({"steps": 2.5}, TypeError, "steps must be a whole number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_storage_options_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        epk.Storage(**options)
