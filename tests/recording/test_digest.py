"""The digest of a run is part of the format: a run recorded by an earlier version has the digest it had then.

Every number below is a short binary fraction, so that each step is exact and the digests are the same on every machine.
They were computed before the modules were renamed, at version 2 of the format.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.step import fingerprint_data

STATES = [0.5, 0.4140625, 0.306396484375, 0.11346435546875, 0.08205127716064453]
DIGESTS = {  # of the run and of its data
    torch.float64: ("a2a494c892ade4f8981b3f70f5bab250", "3b57ef645b377f9462d291512ffef46d"),
    torch.float32: ("c7cdc224b3a0131b42b96e1c59479e03", "c5441667318a6bbe2f69d6e44e2a9b8c"),
}


@pytest.mark.parametrize("dtype", DIGESTS, ids=str)
def test_a_recorded_and_a_stored_run_have_the_digest_they_always_had_and_few_tensors(dtype, tmp_path):
    """One weight, momentum, a full batch, two small ones, and a step of two accumulated batches."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        net.weight.fill_(0.5)
    X, y = torch.tensor([[[1.0], [2.0], [-1.0], [0.5]], [[0.5], [1.0], [0.25], [-1.0]]]).to(dtype)
    optimizer, path = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5), tmp_path / "run"
    with epk.Recorder(net, optimizer, X, y, loss=epk.MeanSquaredError(), folder=path) as recorder:
        for batches in ([None], [[0, 3]], [[2]], [[0, 1], [2, 3]]):
            optimizer.zero_grad()
            for batch in batches:
                rows = slice(None) if batch is None else batch
                (F.mse_loss(net(X[rows]), y[rows]) / len(batches)).backward()
                recorder.batch(batch, weight=1 / len(batches))
            optimizer.step()
    for trajectory in (recorder.trajectory, epk.load_trajectory(path, nn.Linear(1, 1, bias=False).to(dtype))):
        assert [float(trajectory.states[s]) for s in range(5)] == STATES
        assert (trajectory.digest, trajectory.data_digest) == DIGESTS[dtype]
    chunk = load_file(path / "chunk-000001.safetensors")
    assert chunk.keys() == {"states", "sizes", "lengths", "batches", "weighted", "sample_weights", "update", "digests"}


def test_large_tensors_are_hashed_by_parts_whatever_the_number_of_threads():
    x, before = torch.arange(3 << 20, dtype=torch.float32), torch.get_num_threads()
    digests = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            digests.append(fingerprint_data(x))
    finally:
        torch.set_num_threads(before)
    x[-1] += 1
    assert len({*digests, fingerprint_data(x)}) == 2
