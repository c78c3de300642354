"""Small tensors kept in blocks: the same values, and a process that does not grow."""

import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch

import epk_gp as epk
from epk_gp.recording import history as tensor_arena
from epk_gp.recording.history import TensorArena


def test_what_is_put_is_what_is_kept(monkeypatch):
    monkeypatch.setattr(tensor_arena, "_BLOCK_BYTES", 64)
    place = TensorArena()
    values = [torch.randn(n, 2) for n in (1, 3, 30, 2)] + [torch.arange(5), torch.zeros(0), torch.tensor(2.0)]
    kept = [place.copy_in(value) for value in values]
    for value, copy in zip(values, kept, strict=True):
        assert torch.equal(copy, value)
        assert copy.dtype == value.dtype
        assert copy.data_ptr() != value.data_ptr() or not value.numel()


def test_small_tensors_share_a_block():
    place = TensorArena()
    a, b = place.copy_in(torch.ones(3)), place.copy_in(torch.zeros(2))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert torch.equal(a, torch.ones(3))


SCRIPT = """
    import json, torch
    import epk_gp as epk

    torch.set_num_threads(1)

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(1568, 10),
    ).double()
    X, y = torch.rand(500, 1, 28, 28, dtype=torch.float64), torch.arange(500) % 10
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for step in range(60):
            rows = torch.randperm(500)[:250]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(X[rows]), y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
            if step == 9:
                before = resident()
    print(json.dumps(resident() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
def test_recording_grows_by_its_states_only():
    """50 states of 15,810 weights are 6 MB. Kept one by one they pinned 600 MB and more."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) < 200 << 20


@pytest.mark.slow
def test_a_pickled_run_holds_its_own_numbers_only():
    net = torch.nn.Linear(4, 3).double()
    X = torch.randn(20, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, X, torch.arange(20) % 3, optimizer=optimizer, steps=30, batch_size=5)
    content = pickle.dumps(run)
    assert len(content) < 1 << 20  # blocks are 4 MiB each
    again = pickle.loads(content)
    assert again.digest == run.digest
    assert all(torch.equal(again.states[s], run.states[s]) for s in range(31))
    assert epk.reconstruct(again, X).max_error < 1e-12
