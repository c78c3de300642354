"""Small runs on disk that the tests of storage share."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

import epk_gp as epk
from loops import data, file_hashes, mlp, sgd

JOURNAL, HEADER = "journal.jsonl", "run.json"


def record(path, steps=6, chunk_bytes=800, finish=True, **options):
    """A run of six steps in chunks of two: 408 bytes of weights are too few to commit, 816 are enough."""
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    storage = epk.Storage(chunk_bytes=chunk_bytes, **options)
    recorder = epk.Recorder(net, optimizer, X, y, path=path, storage=storage)
    with recorder if finish else unfinished(recorder):
        for step in range(steps):
            batch = None if step % 3 == 0 else torch.tensor([step, 9, 2])[: step % 3 + 1]
            rows = slice(None) if batch is None else batch
            optimizer.zero_grad()
            F.cross_entropy(net(X[rows]), y[rows]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


@contextmanager
def unfinished(recorder):
    """Stop as an error would: what was recorded is committed, and the run is not closed."""
    recorder.__enter__()
    yield
    recorder.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def chunk_files(run):
    return sorted(run.glob("chunk-*.safetensors"))


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(bytes(content))


def refused(run, error, match, net=None):
    """Loading is refused, and nothing in the folder changes."""
    before = file_hashes(run)
    with pytest.raises(error, match=match):
        epk.load_trajectory(run, mlp() if net is None else net)
    assert file_hashes(run) == before


def resumed(path, net=None, optimizer=sgd, X=None, y=None, **options):
    net = mlp() if net is None else net
    default_X, default_y = data()
    X, y = default_X if X is None else X, default_y if y is None else y
    return epk.Recorder(net, optimizer(net), X, y, path=path, resume=True, **options)


def step(recorder):
    recorder.optimizer.zero_grad()
    F.cross_entropy(recorder.net(recorder.X), recorder.y).backward()
    recorder.batch(None)
    recorder.optimizer.step()
