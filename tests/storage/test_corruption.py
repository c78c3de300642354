"""Flipped and lost bytes: whatever a run uses is checked, and the damaged file is named."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import epk_gp as epk
from epk_gp.storage.verify import check_run
from loops import data, mlp

RESUME = "resume-"


def record(path, finish):
    net, (X, y) = mlp(torch.float32), data(dtype=torch.float32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    storage = epk.Storage(steps=2)
    recorder = epk.Recorder(net, optimizer, X, y, folder=path, storage=storage, resume=True)
    recorder.__enter__()
    for step in recorder.until(6):
        batch = torch.arange(step + 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(X[batch]), y[batch]).backward()
        recorder.batch(batch)
        optimizer.step()
    stopped = (None, None) if finish else (KeyboardInterrupt, KeyboardInterrupt())
    recorder.__exit__(*stopped, None)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["finished", "unfinished"])
def run(request, tmp_path_factory):
    return record(tmp_path_factory.mktemp("corruption") / "run", request.param)


def opened(run):
    """Open and check a run; None if it is refused as it must be: in words, naming the file."""
    try:
        check_run(run)
        return epk.load_trajectory(run, mlp(torch.float32)).digest
    except (ValueError, FileNotFoundError) as error:
        return error


def damage(file, draw):
    """Flip a bit, or cut the file short."""
    content = bytearray(file.read_bytes())
    position = draw.randrange(len(content))
    if draw.random() < 0.8:
        content[position] ^= 1 << draw.randrange(8)
    else:
        del content[position:]
    file.write_bytes(bytes(content))


@pytest.mark.slow
def test_every_flipped_bit_and_every_lost_byte_is_found_and_its_file_is_named(run, tmp_path):
    draw, copy = random.Random(11), tmp_path / "copy"
    whole = opened(run)
    shutil.copytree(run, copy)
    files = sorted(file.name for file in copy.iterdir() if file.name != "writer.lock")
    assert len(files) == (9 if (run / "finished.json").exists() else 8)
    missed = []
    for number in range(400):
        file = copy / files[number % len(files)]
        damage(file, draw)
        result = opened(copy)
        if not isinstance(result, Exception) or not names(result, file):
            missed.append((file.name, file.read_bytes(), str(result)))
        shutil.copy(run / file.name, file)
    assert opened(copy) == whole
    assert missed == []


def names(error: Exception, file: Path) -> bool:
    """Whether an error names a file; a chunk or what follows it, with its states or steps."""
    message = str(error)
    if file.name == "finished.json" and "journal.jsonl" in message:
        return True  # two records disagree
    steps = "(states " if file.name.startswith("chunk") else "(at state " if file.name.startswith(RESUME) else ""
    return file.name in message and steps in message and "\n" not in message


@pytest.mark.parametrize("position", range(0, 60, 7))
def test_a_lost_file_of_any_name_is_found(run, tmp_path, position):
    copy = shutil.copytree(run, tmp_path / "copy")
    files = sorted(file for file in copy.iterdir() if file.name != "writer.lock")
    file = files[position % len(files)]
    file.unlink()
    if file.name == "finished.json":  # what is left is a run that was not finished, whole
        assert opened(copy) == opened(run)
    else:
        assert names(opened(copy), file)


def test_what_is_not_the_run_s_does_not_matter(run, tmp_path):
    """The negative control."""
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "notes.txt").write_text(json.dumps("mine"))
    (copy / "chunk-000009.safetensors.part").write_bytes(b"torn")
    assert opened(copy) == opened(run)
