"""Damaged runs: a missing, shortened or edited file is found and named, and what a crash cut short is not committed."""

import json
import shutil

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.storage.journal import Chunk, chain_hash, read_journal, to_json_line
from loops import data, mlp, sgd
from stored_runs import HEADER, JOURNAL, chunk_files, flip, record, refused, replace_header


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold a recorded run: .*nowhere/run.json does not exist"):
        epk.load_trajectory(tmp_path / "nowhere", mlp())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [HEADER, JOURNAL, "data.safetensors"])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    refused(run, FileNotFoundError, rf"must .*{name}")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_missing_chunk_is_named_with_its_states(run, number):
    file = chunk_files(run)[number]
    file.unlink()
    refused(
        run, ValueError, rf"{file.name} \(states {max(0, 2 * number - 1)}\.\.\d\) must have \d+ bytes: it is missing"
    )


@pytest.mark.parametrize("number", [0, 3])
def test_a_truncated_chunk_is_named_with_its_states(run, number):
    file = chunk_files(run)[number]
    file.write_bytes(file.read_bytes()[:-1])
    refused(run, ValueError, rf"{file.name} \(states .* must have \d+ bytes: it has \d+")


@pytest.mark.parametrize("position", [0, 40, -1, -300])
def test_a_flipped_bit_in_a_chunk_is_found(run, position):
    file = chunk_files(run)[1]
    flip(file, position)
    refused(run, ValueError, rf"{file.name} \(states 1\.\.2\) must have the checksum .*damaged; restore it from a copy")


def test_damaged_data_are_found(run):
    file = run / "data.safetensors"
    flip(file, -5)
    refused(run, ValueError, r"data.safetensors must have the checksum")


def test_data_of_another_size_are_found(run):
    file = run / "data.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-8])
    refused(run, ValueError, rf"data.safetensors must have {size} bytes: it has {size - 8}. The file is damaged")


def test_chunks_of_another_run_do_not_pass(run, tmp_path):
    """Same sizes, another history."""
    record(tmp_path / "other", steps=6)
    net, (X, y) = mlp(), data()
    with torch.no_grad():
        net[0].bias += 1
    optimizer = sgd(net)
    with epk.Recorder(
        net, optimizer, X, y, folder=tmp_path / "another", storage=epk.Storage(chunk_bytes=800)
    ) as recorder:
        F.cross_entropy(net(X), y).backward()
        recorder.batch(None)
        optimizer.step()
    shutil.copy(chunk_files(tmp_path / "another")[0], chunk_files(run)[0])
    refused(run, ValueError, "chunk-000000.safetensors .* must have the checksum")


def cut(run, lines, length=0):
    """Leave whole lines of the journal, and the start of the next one."""
    whole = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    (run / JOURNAL).write_bytes(b"".join(whole[:lines]) + (whole[lines][:length] if length else b""))


def before_its_last_commit(run):
    """Bring back the file that the run would go on from, as a crash between journal and removal leaves it."""
    (run / "resume-000002.safetensors").write_bytes(b"whatever the second but last commit kept")


@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_a_last_journal_line_that_was_cut_short_is_not_committed(crashed, length):
    before_its_last_commit(crashed)
    cut(crashed, 3, length)
    loaded = epk.load_trajectory(crashed, mlp())
    assert loaded.num_steps == 4
    whole = record(None, steps=4)
    assert loaded.digest == whole.digest
    for s in range(5):
        assert torch.equal(loaded.states[s], whole.states[s])


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_journal_that_lost_whole_lines_is_found(crashed, run, lines):
    """The files of later commits say that there were more, whether the run was finished or not."""
    cut(crashed, lines)
    refused(crashed, ValueError, rf"must have 4 lines: it ends after {lines}")
    cut(run, lines)
    refused(run, ValueError, r"must be as when the run was finished, with 4 chunks")


def test_a_run_that_was_not_finished_opens_as_what_was_committed(crashed):
    assert epk.load_trajectory(crashed, mlp()).digest == record(None).digest
    assert not read_journal(crashed).finished


def test_a_chunk_without_its_journal_line_is_not_committed(crashed):
    before_its_last_commit(crashed)
    cut(crashed, 3)
    (crashed / "chunk-000003.safetensors.part").write_bytes(b"torn")
    chunk_files(crashed)[3].write_bytes(b"torn too")
    assert epk.load_trajectory(crashed, mlp()).num_steps == 4


def test_a_journal_without_any_line_is_no_run(crashed):
    (crashed / JOURNAL).write_bytes(b"")
    refused(crashed, ValueError, "at least its initial weights.*no committed chunk")


@pytest.mark.parametrize(
    "line", [b"\n", b"null\n", b"[]\n", b"{}\n", b'{"file": "x"}\n', b"\xff\xfe\n", b"{truncated\n"], ids=repr
)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_damaged_line_within_the_journal_is_an_error(crashed, number, line):
    lines = (crashed / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[number] = line
    (crashed / JOURNAL).write_bytes(b"".join(lines))
    refused(crashed, ValueError, rf"line {number + 1} of .*{JOURNAL} must describe a chunk: it is damaged")


def rewritten(run, change):
    """Edit the second line of the journal, and write all checksums anew as an insider would."""
    chunks, before = [], ""
    for number, line in enumerate((run / JOURNAL).read_text().splitlines()):
        chunk = Chunk.model_construct(**(json.loads(line) | (change if number == 1 else {})))
        before = chain_hash(before, chunk)
        chunks.append(chunk.model_copy(update={"line": before}))
    (run / JOURNAL).write_bytes(b"".join(to_json_line(chunk) for chunk in chunks))


CHANGES = {
    "first": ({"first": 3}, "line 2 .*must continue at state 1"),
    "path": ({"file": "../chunk-000001.safetensors"}, "line 2 .*must continue at state 1"),
    "none": ({"states": 0}, "line 2 .*must continue at state 1"),
    "more": ({"states": 3}, "line 3 .*must continue at state 4"),
    "text": ({"states": "2"}, "line 2 .*damaged"),
    "bytes": ({"bytes": 7}, "must have 7 bytes"),
    "blake2b": ({"blake2b": "0" * 32}, "must have the checksum"),
    "digest": ({"digest": "0" * 32}, "must have the checksum"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_journal_line_that_was_edited_with_new_checksums_is_found(crashed, change, message):
    rewritten(crashed, change)
    refused(crashed, ValueError, message)


@pytest.mark.parametrize("change", [change for change, _ in CHANGES.values()], ids=CHANGES.keys())
def test_an_edited_journal_line_is_found(crashed, change):
    lines = (crashed / JOURNAL).read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    (crashed / JOURNAL).write_text("\n".join(lines) + "\n")
    refused(crashed, ValueError, "line 2 of .* (must have its checksum: it is damaged|must describe a chunk)")


def test_a_line_lost_from_the_middle_of_the_journal_is_found(crashed):
    lines = (crashed / JOURNAL).read_bytes().splitlines(keepends=True)
    (crashed / JOURNAL).write_bytes(b"".join(lines[:1] + lines[2:]))
    refused(crashed, ValueError, "line 2 .*must have its checksum: it is damaged, or a line before it is lost")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b"[" * 1000], ids=repr)
def test_a_damaged_closing_record_is_found(run, content):
    (run / "finished.json").write_bytes(content)
    refused(run, ValueError, "finished.json must be the closing record of a run")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"epk_gp run"', b"\xff\xfe", b"{}"], ids=repr)
def test_a_damaged_header_is_found(run, content):
    (run / HEADER).write_bytes(content)
    refused(run, ValueError, "run.json must be the header of an epk_gp run")


@pytest.mark.parametrize(
    "key", ["names", "shapes", "dtype", "num_outputs", "num_points", "loss", "law", "data_digest", "data_blake2b"]
)
@pytest.mark.parametrize("change", ["removed", "edited"])
def test_an_edited_header_is_found(run, key, change):
    header = json.loads((run / HEADER).read_text())
    del header[key]
    if change == "edited":
        header[key] = 4
    (run / HEADER).write_text(json.dumps(header))
    refused(run, ValueError, "run.json must be the header of an epk_gp run: its checksum is not that of its content")


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_a_run_of_another_version_is_refused(run, version):
    replace_header(run, version=version)
    refused(run, ValueError, "run.json must be the header of an epk_gp run of version 1: 'version'")
