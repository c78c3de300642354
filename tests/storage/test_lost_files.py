"""Folders and files that are deleted or replaced while a run is recorded: nothing is lost in silence."""

import errno
import shutil

import pytest

import epk_gp as epk
from epk_gp.storage.verify import check_run
from loops import file_hashes, mlp
from stored_runs import record, resumed, step


def record_eight(path, fault):
    """Record five steps, make the fault, and record three more; each step is a commit."""
    recorder = resumed(path, storage=epk.Storage(steps=1))
    with recorder:
        for number in range(8):
            if number == 5:
                fault(path)
            step(recorder)
    return recorder


def delete(path):
    shutil.rmtree(path)


def rename(path):
    path.rename(path.with_name("renamed"))


def put_a_file_there(path):
    shutil.rmtree(path)
    path.write_text("mine")


def put_a_folder_there(path):
    shutil.rmtree(path)
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def put_another_run_there(path):
    shutil.rmtree(path)
    record(path)


def put_a_copy_there(path):
    """A copy has the same content, but the journal that the writer has open is no longer in the folder."""
    path.rename(path.with_name("renamed"))
    shutil.copytree(path.with_name("renamed"), path)


def delete_the_journal(path):
    (path / "journal.jsonl").unlink()


FOLDERS = (
    *(delete, rename, put_a_file_there, put_a_folder_there, put_another_run_there, put_a_copy_there),
    delete_the_journal,
)


@pytest.mark.parametrize("fault", FOLDERS, ids=lambda fault: fault.__name__)
def test_a_folder_that_is_not_the_run_s_any_more_is_named_and_left_alone(tmp_path, fault):
    """The message does not claim that the steps stay readable, and nothing is written to what is there now."""
    path, after_fault = tmp_path / "run", {}

    def fault_and_remember(path):
        fault(path)
        after_fault.update(file_hashes(tmp_path))

    with pytest.raises(OSError, match=r"must be written to .*run: .*; check .* that its 5 committed steps") as error:
        record_eight(path, fault_and_remember)
    assert error.value.errno in (errno.ENOENT, errno.ENOTDIR)
    assert file_hashes(tmp_path) == after_fault


def test_a_renamed_run_is_whole_at_its_new_place(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        record_eight(tmp_path / "run", rename)
    assert epk.load_trajectory(tmp_path / "renamed", mlp()).num_steps == check_run(tmp_path / "renamed").num_steps == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chunk-000002.safetensors", r"chunk-000002.safetensors \(states 2..2\) must have \d+ bytes: it is missing"),
        ("run.json", "run.json does not exist"),
        ("data.safetensors", "data.safetensors is missing or was changed"),
    ],
)
def test_a_file_that_is_deleted_while_the_run_is_recorded_is_named_at_the_end(tmp_path, name, message):
    """All steps are committed; once the file is restored, the run is whole."""
    path = tmp_path / "run"

    def take(path):
        (path / name).rename(tmp_path / name)

    with pytest.raises(OSError, match=f"must keep all its files while it is recorded: .*{message}.* Restore it"):
        record_eight(path, take)
    assert not (path / "finished.json").exists()
    (tmp_path / name).rename(path / name)
    assert check_run(path).num_steps == 8
    with resumed(path):
        pass
    assert check_run(path).finished


@pytest.mark.parametrize("open_run", [check_run, lambda path: epk.load_trajectory(path, mlp())], ids=["check", "load"])
def test_a_file_in_place_of_a_run_holds_no_run(tmp_path, open_run):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(FileNotFoundError, match="must hold a recorded run: .*run.json does not exist"):
        open_run(tmp_path / "run")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("path", [None, 3, b"run"])
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(TypeError, match="str"):
        epk.load_trajectory(path, mlp())
