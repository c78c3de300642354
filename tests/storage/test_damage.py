"""Damaged and hostile runs: refused by a message that names the file, soon and in little memory; nothing executes."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.storage.files import MAX_JSON_BYTES, checksum
from epk_gp.storage.run import check_run
from epk_gp.storage.schema import MAX_CHUNKS, read_journal
from loops import data, mlp, sgd
from stored_runs import (
    CHUNK,
    DATA,
    HEADER,
    JOURNAL,
    changed,
    chunk_files,
    entry,
    flip,
    opened,
    record,
    refused,
    replace_chunk,
    replace_header,
    rewrite_journal,
    with_tensor,
    without,
)

FINISHED, RESUME = "finished.json", "resume-000003.safetensors"
OTHER_KINDS = [os.mkdir, *([os.mkfifo] if hasattr(os, "mkfifo") else [])]  # Windows has no pipes in folders
KEPT_BY = [HEADER, DATA, JOURNAL, CHUNK, FINISHED]
HOLDS = rf"{CHUNK} \(states 1\.\.2\) "


def written(name, content):
    return lambda run: (run / name).write_bytes(content)


def grown(name):
    """A sparse file of 1 TB."""
    return lambda run: os.truncate(run / name, 1 << 40)


def header(**changes):
    return lambda run: replace_header(run, **changes)


def with_data(make):
    """Other content of the data file, with all checksums."""

    def change(run):
        content = make(load_file(run / DATA))
        (run / DATA).write_bytes(content)
        replace_header(run, data_blake2b=checksum(content), data_bytes=len(content))

    return change


def lines(change):
    """Other lines of the journal, as bytes."""
    return lambda run: (run / JOURNAL).write_bytes(
        b"".join(change((run / JOURNAL).read_bytes().splitlines(keepends=True)))
    )


def line(number, content):
    return lines(lambda all_lines: [*all_lines[:number], content, *all_lines[number + 1 :]])


def link(name):
    def change(run):
        secret = run.with_name("secret")
        shutil.move(run / name, secret)
        (run / name).symlink_to(secret)

    return change


def another_kind(name, make):
    def change(run):
        (run / name).unlink()
        make(run / name)

    return change


def claims(length, size=100):
    """A safetensors file whose header says that it has so many bytes."""
    return length.to_bytes(8, "little") + b"{" * (size - 8)


def edited(number, **changes):
    """An entry of a line of the journal, with all checksums of lines."""
    return lambda run: rewrite_journal(run, lambda n, _: changes if n == number else {})


def edited_alone(**changes):
    """Without them."""
    return lines(lambda own: [own[0], json.dumps(json.loads(own[1]) | changes).encode() + b"\n", *own[2:]])


LINES = {
    "first": ({"first": 3}, "line 2 .*must continue at state 1"),
    "path": ({"file": "../chunk-000001.safetensors"}, "line 2 .*must continue at state 1"),
    "none": ({"states": 0}, "line 2 .*must continue at state 1"),
    "more": ({"states": 3}, "line 3 .*must continue at state 4"),
    "text": ({"states": "2"}, "line 2 .*damaged"),
    "bytes": ({"bytes": 7}, "must have 7 bytes"),
    "blake2b": ({"blake2b": "0" * 32}, "must have the checksum"),
    "digest": ({"digest": "0" * 32}, "must have the checksum"),
}
HEADERS = [
    {"dtype": "torch.load"}, {"names": ["__class__", 3]}, {"shapes": [[1 << 62], [1], [1], [1]]}, {"num_points": True},
    {"data_bytes": -1}, {"loss": {"kind": ["CrossEntropy"]}}, {"law": "SGD"}, {"keep_every": 0}, {"version": 2},
    {"unexplained": -0.1}, {"unexplained": True}, {"num_optimizers": 0}, {"modules": "0"}, {"statistics": [1, 2]},
    {"statistics": ["0", "0"], "statistic_shapes": [[6], [6]]}, {"statistics": ["0"], "statistic_shapes": [[-6]]},
]  # fmt: skip
STEPS_ON_BATCHES = "must hold steps on batches of the 10 training points"
TENSORS = {
    "nan_weights": (entry("states", 50, float("nan")), "'states' holds NaN or infinity"),
    "infinite_numbers": (entry("update", 3, float("inf")), "'update' holds NaN or infinity"),
    "fewer_weights": (with_tensor("states", lambda s: s[:, 1:]), r"'states' of shape \(2, 51\) and type F64"),
    "no_matrix": (with_tensor("states", lambda s: s.reshape(-1)), "'states' of shape .* and type F64"),
    "float32": (with_tensor("states", torch.Tensor.float), "'states' of shape .* and type F64"),
    "missing": (without("batches"), "'batches' is not in both"),
    "no_steps": (without("sizes"), "must hold 2 steps: its 'sizes' are missing"),
    "more": (lambda tensors: tensors | {"__import__": torch.zeros(1)}, "'__import__' is not in both"),
    "batch_beyond": (entry("batches", 0, 10), STEPS_ON_BATCHES),
    "batch_before": (entry("batches", 0, -1), STEPS_ON_BATCHES),
    "too_long": (entry("lengths", 0, 1 << 62), STEPS_ON_BATCHES),
    "no_length": (entry("lengths", 0, 0), STEPS_ON_BATCHES),
    "negative_length": (entry("lengths", 0, -2), STEPS_ON_BATCHES),
    "negative_size": (entry("sizes", 0, -0.1), STEPS_ON_BATCHES),
    "weights_of_none": (entry("weighted", 0, True), STEPS_ON_BATCHES),
    "weights_missing": (entry("weighted", 1, True), STEPS_ON_BATCHES),
}
NESTED = (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000)
# What is done to a run, and the words of the error.
DAMAGE = {
    "cut": (lambda run: os.truncate(chunk_files(run)[3], 99), r"\(states .* must have \d+ bytes: it has 9"),
    "flipped": (lambda run: flip(run / CHUNK, 40), HOLDS + "must have the checksum .*restore it from a"),
    "flipped data": (lambda run: flip(run / DATA, -5), "data.safetensors must have the checksum"),
    "cut data": (lambda run: os.truncate(run / DATA, 99), r"data.safetensors must have \d+ bytes: it has 99. The file"),
    **{f"link {name}": (link(name), f"{name}.* must be a plain file: it is a symbolic link") for name in KEPT_BY},
    **{f"{make.__name__} {name}": (another_kind(name, make), f"{name}.* must be a plain file")
       for name in (CHUNK, FINISHED) for make in OTHER_KINDS},
    **{f"claims {length}": (lambda run, n=length: replace_chunk(run, claims(n)), HOLDS + "must be a safetensors file")
       for length in (0, 1 << 40, (1 << 64) - 1)},
    "data claims": (with_data(lambda _: claims(1 << 50)), f"{DATA} must be a safetensors file"),
    **{f"nested {name} {content[:1]!r}": (written(name, content + b"\n"), name)
       for name in (HEADER, JOURNAL) for content in NESTED},
    "large header": (grown(HEADER), f"{HEADER} must have at most {MAX_JSON_BYTES} bytes"),
    "large data": (grown(DATA), rf"{DATA} must have \d+ bytes: it has {1 << 40}"),
    "large chunk": (grown(CHUNK), rf"{CHUNK} \(.*\) must have \d+ bytes: it has {1 << 40}"),
    "large journal": (grown(JOURNAL), f"{JOURNAL} must have at most"),
    "large closing record": (grown(FINISHED), f"{FINISHED} must have at most 1024 bytes"),
    "many lines": (lines(lambda own: own[:1] * 200_000), f"{JOURNAL} must have at most"),
    "empty lines": (written(JOURNAL, b"\n" * 10**6), f"{JOURNAL} must have at most {MAX_CHUNKS} lines: it has 1000000"),
    "long line": (lines(lambda own: [*own, b" " * 10**6 + b"\n"]), f"line 5 of .*{JOURNAL} must describe a chunk"),
    "no line": (written(JOURNAL, b""), "at least its initial weights.*no committed chunk"),
    **{f"line {n} {text!r}": (line(n, text + b"\n"), rf"line {n + 1} of .*{JOURNAL} must describe a chunk: it is dam")
       for n in (0, 3) for text in (b"", b"null", b"{}", b'{"file": "x"}', b"\xff\xfe")},
    "lost line": (line(1, b""), "line 2 .*must have its checksum: it is damaged, or a line before it is lost"),
    **{f"edited {name}": (edited(1, **change), message) for name, (change, message) in LINES.items()},
    **{f"edited alone {name}": (edited_alone(**LINES[name][0]), "line 2 of .* (must have its checksum|must describe a)")
       for name in ("first", "text", "digest")},
    **{f"{name} {text!r}": (written(name, text), f"{name} must be the (header|closing record) of an? ")
       for text in (b"", b"[]", b"\xff\xfe", b"{}") for name in (HEADER, FINISHED)},
    **{f"header {change}": (header(**change), f"{HEADER} must be the header of an epk_gp run of version 1")
       for change in HEADERS},
    **{f"tensors {name}": (changed(change), HOLDS + f".*{message}") for name, (change, message) in TENSORS.items()},
    **{f"data without {name}": (with_data(lambda own, n=name: save(without(n)(own))), f"{DATA} must hold '{name}'")
       for name in ("inputs", "targets", "probe")},
    "infinite data": (with_data(lambda own: save(own | {"inputs": own["inputs"] / 0})), "finite numbers: 'inputs'"),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_hostile_run_is_refused(run, damage, message):
    damage(run)
    refused(run, message, mebibytes=48)


def flip_or_cut(file, draw):
    content = bytearray(file.read_bytes())
    position = draw.randrange(len(content))
    if draw.random() < 0.8:
        content[position] ^= 1 << draw.randrange(8)
    else:
        del content[position:]
    file.write_bytes(content)


def digest_or_error(run):
    try:
        check_run(run)
        return epk.load_trajectory(run, mlp()).digest
    except (ValueError, FileNotFoundError) as error:
        return error


def names(error, file):
    """Whether an error names a file; a chunk or what follows it, with its states or steps."""
    message = str(error)
    if file.name == FINISHED and JOURNAL in message:
        return True  # two records disagree
    steps = "(states " if file.name.startswith("chunk") else "(at state " if file.name.startswith("resume") else ""
    return isinstance(error, Exception) and file.name in message and steps in message and "\n" not in message


def test_a_lost_file_of_any_name_is_found_and_others_do_not_matter(run):
    whole = digest_or_error(run)
    (run / "notes.txt").write_text("mine")
    (run / "chunk-000009.safetensors.part").write_bytes(b"torn")
    others = (FINISHED, "notes.txt", "writer.lock", "chunk-000009.safetensors.part")
    for file in sorted(run.iterdir()):
        content = file.read_bytes()
        file.unlink()
        left = digest_or_error(run)  # without the closing record, a run that was not finished
        assert names(left, file) or (left == whole and file.name in others)
        file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
def test_every_flipped_bit_and_every_lost_byte_is_found_and_its_file_is_named(run, tmp_path, finished):
    draw, copy, missed = random.Random(11), tmp_path / "copy", []
    if not finished:
        (run / FINISHED).unlink()
    whole = digest_or_error(run)
    shutil.copytree(run, copy)
    files = sorted(file for file in copy.iterdir() if file.name != "writer.lock")
    assert len(files) == 8 + finished
    for number in range(240):
        file = files[number % len(files)]
        flip_or_cut(file, draw)
        if not names(result := digest_or_error(copy), file):
            missed.append((file.name, file.read_bytes(), str(result)))
        shutil.copy(run / file.name, file)
    assert digest_or_error(copy) == whole
    assert missed == []


@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_a_last_journal_line_that_was_cut_short_is_not_committed(run, length):
    """As a crash between the journal and the removal of the state before leaves a run."""
    (run / FINISHED).unlink()
    (run / "resume-000002.safetensors").write_bytes(b"whatever the second but last commit kept")
    lines(lambda own: [*own[:3], own[3][:length]])(run)
    (run / "chunk-000003.safetensors.part").write_bytes(b"torn")
    chunk_files(run)[3].write_bytes(b"torn too")
    loaded, whole = epk.load_trajectory(run, mlp()), record(None, steps=4)
    assert loaded.num_steps == 4
    assert loaded.digest == whole.digest
    assert all(torch.equal(loaded.states[s], whole.states[s]) for s in range(5))
    assert not read_journal(run).finished


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_journal_that_lost_whole_lines_is_found(run, count):
    """The files of later commits say that there were more, whether the run was finished or not."""
    lines(lambda own: own[:count])(run)
    refused(run, r"must be as when the run was finished, with 4 chunks")
    (run / FINISHED).unlink()
    refused(run, rf"must have 4 lines: it ends after {count}")


def test_links_are_not_followed_when_a_run_is_resumed(run):
    link(JOURNAL)(run)
    net, (X, y) = mlp(), data()
    with pytest.raises(OSError, match="must be written to .*symbolic links"):
        epk.Recorder(net, sgd(net), X, y, folder=run, resume=True)


@pytest.mark.parametrize("change", [{"evil": 1}, {"reduction": "__import__"}], ids=str)
def test_a_loss_that_is_none_is_refused(run, change):
    replace_header(run, loss={"kind": "CrossEntropy", "reduction": "sum"} | change)
    refused(run, "loss must be", openings=[opened])


@pytest.mark.parametrize("state", [b" ", b"{}", b"[" * 100_000, b'{"dict": 3}', b'{"tensor": "../x"}'], ids=repr)
def test_a_training_state_is_not_trusted_either(run, state):
    content = save(load_file(run / RESUME) | {"state": torch.frombuffer(bytearray(state), dtype=torch.uint8)})
    (run / RESUME).write_bytes(content)

    def change(number, old):
        own = {"resume_bytes": len(content), "resume_blake2b": checksum(content, old["digest"])}
        return own if number == 3 else {}

    rewrite_journal(run, change)
    net, (X, y) = mlp(), data()
    with pytest.raises(ValueError, match=RESUME):
        epk.train(net, X, y, optimizer=sgd(net), steps=7, folder=run, resume=True)
    grown(RESUME)(run)
    refused(run, rf"{RESUME} \(.*\) must have \d+ bytes: it has {1 << 40}", openings=[check_run])


def test_a_run_with_replaced_files_of_the_same_content_is_good(run, tmp_path):
    """The negative control: what the helpers write is read, if nothing is wrong with it."""
    whole = epk.load_trajectory(run, mlp()).digest
    replace_chunk(run, (run / CHUNK).read_bytes())
    replace_header(run)
    for path in (run, shutil.copytree(run, tmp_path / "elsewhere")):
        assert epk.load_trajectory(path, mlp()).digest == whole
        assert check_run(path).num_steps == 6
        assert len(read_journal(path).chunks) == 4
