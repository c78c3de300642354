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

X = torch.tensor([[1.0], [2.0], [-1.0], [0.5]], dtype=torch.float64)
Y = torch.tensor([[0.5], [1.0], [0.25], [-1.0]], dtype=torch.float64)
STATES = [0.5, 0.4140625, 0.306396484375, 0.11346435546875, 0.08205127716064453]
DIGESTS = {torch.float64: "a2a494c892ade4f8981b3f70f5bab250", torch.float32: "c7cdc224b3a0131b42b96e1c59479e03"}
DATA_DIGESTS = {torch.float64: "3b57ef645b377f9462d291512ffef46d", torch.float32: "c5441667318a6bbe2f69d6e44e2a9b8c"}


def record(path=None, dtype=torch.float64, **options):
    """One weight, momentum, a full batch, two small ones, and a step of two accumulated batches."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        net.weight.fill_(0.5)
    inputs, targets = X.to(dtype), Y.to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    with epk.Recorder(net, optimizer, inputs, targets, loss=epk.MeanSquaredError(), folder=path, **options) as recorder:
        for batch in (None, torch.tensor([0, 3]), torch.tensor([2])):
            rows = slice(None) if batch is None else batch
            optimizer.zero_grad()
            F.mse_loss(net(inputs[rows]), targets[rows]).backward()
            recorder.batch(batch)
            optimizer.step()
        optimizer.zero_grad()
        for rows in (torch.tensor([0, 1]), torch.tensor([2, 3])):
            (0.5 * F.mse_loss(net(inputs[rows]), targets[rows])).backward()
            recorder.batch(rows, weight=0.5)
        optimizer.step()
    return recorder.trajectory


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", DIGESTS, ids=str)
def test_a_recorded_run_has_the_digest_it_always_had(dtype):
    trajectory = record(dtype=dtype)
    assert [float(state) for state in trajectory.states] == STATES
    assert trajectory.digest == DIGESTS[dtype]
    assert trajectory.data_digest == DATA_DIGESTS[dtype]


def test_a_stored_run_has_that_digest_and_few_tensors(tmp_path):
    record(tmp_path / "run")
    assert epk.load_trajectory(tmp_path / "run", nn.Linear(1, 1, bias=False)).digest == DIGESTS[torch.float64]
    chunk = load_file(tmp_path / "run" / "chunk-000001.safetensors")
    assert chunk.keys() == {"states", "sizes", "lengths", "batches", "weighted", "sample_weights", "update"}
