"""Runs made to do harm: refused by a message, in bounded time and memory, and nothing in them is executed."""

import os
import shutil
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.storage.files import MAX_JSON_BYTES, checksum
from epk_gp.storage.journal import MAX_CHUNKS, Chunk, chain_hash, read_journal, to_json_line
from epk_gp.storage.verify import check_run
from loops import data, mlp, sgd
from stored_runs import HEADER, JOURNAL, read_journal_lines, replace_chunk, replace_header

CHUNK, DATA = "chunk-000001.safetensors", "data.safetensors"


@pytest.fixture
def plain(tmp_path):
    """A run of four steps on batches, which was not finished: nothing but the journal vouches for its files."""
    path = tmp_path / "plain"
    net, (X, y) = mlp(), data()
    generator = torch.Generator().manual_seed(1)
    epk.train(net, X, y, optimizer=sgd(net), steps=4, batch_size=4, generator=generator, folder=path)
    (path / "finished.json").unlink()
    return path


def refused(run, message, seconds=2.0, mebibytes=24):
    """Refused by both functions that open a run, by a message, soon, and without taking much memory."""
    tracemalloc.start()
    start = time.perf_counter()
    for opening in (check_run, lambda path: epk.load_trajectory(path, mlp())):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
            opening(run)
        assert len(str(error.value)) < 2000
    taken, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < seconds
    assert peak < mebibytes << 20


def header_of_length(length, size=100):
    return length.to_bytes(8, "little") + b"{" * (size - 8)


# --- Files of another kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [HEADER, DATA, JOURNAL, CHUNK, "finished.json"])
def test_a_symbolic_link_is_refused(plain, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_bytes((plain / name).read_bytes() if (plain / name).exists() else b"{}")
    (plain / name).unlink(missing_ok=True)
    (plain / name).symlink_to(secret)
    refused(plain, f"{name}.* must be a plain file: it is a symbolic link")


@pytest.mark.parametrize("name", [HEADER, DATA, JOURNAL, CHUNK, "finished.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(plain, name, kind):
    (plain / name).unlink(missing_ok=True)
    (os.mkfifo if kind == "pipe" else os.mkdir)(plain / name)
    refused(plain, f"{name}.* must be a plain file")


def test_links_are_not_followed_when_a_run_is_resumed(plain, tmp_path):
    target = tmp_path / "target"
    target.write_bytes((plain / JOURNAL).read_bytes())
    (plain / JOURNAL).unlink()
    (plain / JOURNAL).symlink_to(target)
    net, (X, y) = mlp(), data()
    with pytest.raises(OSError, match="must be written to .*symbolic links"):
        epk.Recorder(net, sgd(net), X, y, folder=plain, resume=True)


# --- Headers and journals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 93, 1 << 24, 1 << 40, (1 << 64) - 1])
def test_a_safetensors_header_that_claims_too_much_is_refused(plain, length):
    replace_chunk(plain, header_of_length(length))
    refused(plain, rf"{CHUNK} \(states 1..4\) must be a safetensors file")


def test_data_whose_header_claims_too_much_are_refused(plain):
    content = header_of_length(1 << 50)
    (plain / DATA).write_bytes(content)
    replace_header(plain, data_blake2b=checksum(content), data_bytes=len(content))
    refused(plain, f"{DATA} must be a safetensors file")


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000], ids=["lists", "dicts", "digits"]
)
@pytest.mark.parametrize("name", [HEADER, JOURNAL, "finished.json"])
def test_json_that_is_nested_without_measure_is_refused(plain, name, content):
    (plain / name).write_bytes(content + b"\n")
    refused(plain, name)


def test_a_header_without_measure_is_refused_unread(plain):
    with (plain / HEADER).open("wb") as file:
        file.truncate(1 << 40)
    refused(plain, f"{HEADER} must have at most {MAX_JSON_BYTES} bytes", mebibytes=48)


def test_data_without_measure_are_refused_unread(plain):
    size = (plain / DATA).stat().st_size
    with (plain / DATA).open("r+b") as file:
        file.truncate(1 << 40)
    refused(plain, f"{DATA} must have {size} bytes: it has {1 << 40}")


@pytest.mark.parametrize("name", [CHUNK, "resume-000001.safetensors"])
def test_a_file_whose_size_the_journal_holds_is_refused_unread(plain, name):
    size = (plain / name).stat().st_size
    with (plain / name).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=rf"{name} \(.*\) must have {size} bytes: it has {1 << 40}"):
        check_run(plain)


def test_a_journal_of_a_million_lines_is_refused(plain):
    line = (plain / JOURNAL).read_bytes().splitlines(keepends=True)[0]
    (plain / JOURNAL).write_bytes(line * 1_000_000)
    refused(plain, f"{JOURNAL} must have at most", seconds=4.0)
    (plain / JOURNAL).write_bytes(b"\n" * 1_000_000)
    refused(plain, f"{JOURNAL} must have at most {MAX_CHUNKS} lines: it has 1000000")
    with (plain / JOURNAL).open("wb") as file:
        file.truncate(1 << 40)
    refused(plain, f"{JOURNAL} must have at most")


def test_one_endless_line_is_no_line(plain):
    whole = (plain / JOURNAL).read_bytes()
    (plain / JOURNAL).write_bytes(whole + b" " * 1_000_000)
    assert epk.load_trajectory(plain, mlp()).num_steps == 4  # it has no end, so it was never committed
    (plain / JOURNAL).write_bytes(whole + b" " * 1_000_000 + b"\n")
    refused(plain, f"line 3 of .*{JOURNAL} must describe a chunk")


@pytest.mark.parametrize("file", ["../chunk-000001.safetensors", "/etc/passwd", "chunk-000001.safetensors/..", ""])
def test_names_lead_nowhere(plain, file):
    chunks, before = [], ""
    for chunk in read_journal_lines(plain):
        chunk = chunk | ({"file": file} if chunk["first"] else {})
        before = chain_hash(before, Chunk(**chunk))
        chunks.append(Chunk(**(chunk | {"line": before})))
    (plain / JOURNAL).write_bytes(b"".join(to_json_line(chunk) for chunk in chunks))
    refused(plain, "line 2 of .* must continue at state 1: it does not")


HEADERS = {
    "dtype": {"dtype": "torch.load"},
    "names": {"names": ["__class__", 3]},
    "fewer": {"names": ["0.weight"]},
    "negative": {"shapes": [[-1], [1], [1], [1]]},
    "huge": {"shapes": [[1 << 62], [1], [1], [1]]},
    "no_shape": {"shapes": [0, 1, 2, 3]},
    "points": {"num_points": True},
    "data_size": {"data_bytes": -1},
    "loss": {"loss": {"kind": ["CrossEntropy"]}},
    "law": {"law": "SGD"},
    "keep_every": {"keep_every": 0},
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_describes_no_run_is_refused(plain, change):
    replace_header(plain, **change)
    refused(plain, f"{HEADER} must be the header of an epk_gp run of version 1: '({'|'.join(change)})?")


@pytest.mark.parametrize(
    "loss",
    [{"kind": "CrossEntropy", "reduction": "sum", "evil": 1}, {"kind": "CrossEntropy", "reduction": "__import__"}],
    ids=["option", "reduction"],
)
def test_a_loss_that_is_none_is_refused(plain, loss):
    replace_header(plain, loss=loss)
    with pytest.raises(ValueError, match="loss must be"):
        epk.load_trajectory(plain, mlp())


# --- Tensors --------------------------------------------------------------------------------------------------------


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


def with_entry(position, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[position] = value
        return tensor

    return change


TENSORS = {
    "nan_weights": (changed("states", with_entry(50, float("nan"))), "'states' holds NaN or infinity"),
    "infinite_numbers": (changed("update", with_entry(3, float("inf"))), "'update' holds NaN or infinity"),
    "fewer_weights": (changed("states", lambda s: s[:, 1:].clone()), r"'states' of shape \(4, 51\) and type F64"),
    "fewer_states": (changed("states", lambda s: s[1:].clone()), r"'states' of shape \(4, 51\) and type F64: got"),
    "no_matrix": (changed("states", lambda s: s.reshape(-1)), "'states' of shape .* and type F64"),
    "float32": (changed("states", torch.Tensor.float), "'states' of shape .* and type F64"),
    "half": (changed("states", torch.Tensor.half), "'states' of shape .* and type F64"),
    "missing": (lambda tensors: {k: v for k, v in tensors.items() if k != "batches"}, "'batches' is not in both"),
    "more": (lambda tensors: tensors | {"__import__": torch.zeros(1)}, "'__import__' is not in both"),
    "batch_beyond": (changed("batches", with_entry(0, 10)), "on batches of the 10 training points"),
    "batch_before": (changed("batches", with_entry(0, -1)), "on batches of the 10 training points"),
    "too_long": (changed("lengths", with_entry(0, 1 << 62)), "must hold steps on batches"),
    "no_length": (changed("lengths", with_entry(0, 0)), "must hold steps on batches"),
    "negative_length": (changed("lengths", with_entry(0, -2)), "must hold steps on batches"),
    "negative_size": (changed("sizes", with_entry(0, -0.1)), "must hold steps on batches"),
    "weights_of_none": (changed("weighted", with_entry(0, True)), "must hold steps on batches"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_a_chunk_that_holds_something_else_is_refused_with_its_states(plain, change, message):
    replace_chunk(plain, save(change(load_file(plain / CHUNK))))
    refused(plain, rf"{CHUNK} \(states 1..4\) .*{message}")


@pytest.mark.parametrize("name", ["inputs", "targets", "probe"])
def test_data_that_miss_something_are_refused(plain, name):
    content = save({key: value for key, value in load_file(plain / DATA).items() if key != name})
    (plain / DATA).write_bytes(content)
    replace_header(plain, data_blake2b=checksum(content), data_bytes=len(content))
    refused(plain, f"{DATA} must hold '{name}'")


def test_data_that_are_not_finite_are_refused(plain):
    tensors = load_file(plain / DATA)
    content = save(tensors | {"inputs": tensors["inputs"] / 0})
    (plain / DATA).write_bytes(content)
    replace_header(plain, data_blake2b=checksum(content), data_bytes=len(content))
    refused(plain, f"{DATA} must hold finite numbers: 'inputs'")


def test_a_file_that_is_cut_short_while_it_is_used_is_no_crash(plain):
    trajectory = epk.load_trajectory(plain, mlp())
    content = (plain / CHUNK).read_bytes()
    (plain / CHUNK).write_bytes(content[:-100])
    with pytest.raises(ValueError, match=rf"{CHUNK} \(states 1..4\) must have {len(content)} bytes: it has"):
        epk.network_outputs(trajectory, data()[0])


@pytest.mark.parametrize("state", [b"", b"{}", b"[" * 100_000, b'{"dict": 3}', b'{"tensor": "../x"}'], ids=repr)
def test_a_training_state_is_not_trusted_either(plain, state):
    name = "resume-000001.safetensors"
    kept = load_file(plain / name) | {"state": torch.frombuffer(bytearray(state or b" "), dtype=torch.uint8)}
    content, chunks, before = save(kept), [], ""
    for chunk in read_journal_lines(plain):
        if chunk["first"]:
            chunk |= {"resume_bytes": len(content), "resume_blake2b": checksum(content, chunk["digest"])}
        before = chain_hash(before, Chunk(**chunk))
        chunks.append(Chunk(**(chunk | {"line": before})))
    (plain / name).write_bytes(content)
    (plain / JOURNAL).write_bytes(b"".join(to_json_line(chunk) for chunk in chunks))
    net, (X, y) = mlp(), data()
    with pytest.raises(ValueError, match=f"{name}"):
        epk.train(net, X, y, optimizer=sgd(net), steps=5, batch_size=4, folder=plain, resume=True)


def test_a_run_with_replaced_files_of_the_same_content_is_good(plain):
    """The negative control: what the helpers write is read, if nothing is wrong with it."""
    whole = epk.load_trajectory(plain, mlp()).digest
    replace_chunk(plain, (plain / CHUNK).read_bytes())
    replace_header(plain)
    assert epk.load_trajectory(plain, mlp()).digest == whole
    assert check_run(plain).num_steps == 4
    assert len(read_journal(plain).chunks) == 2
    copy = shutil.copytree(plain, Path(f"{plain}-elsewhere"))
    assert epk.load_trajectory(copy, mlp()).digest == whole
