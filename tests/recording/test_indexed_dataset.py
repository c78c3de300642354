"""Batches that say which rows they hold, from a DataLoader."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset

M, C = 24, 3


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(M, 4, dtype=torch.float64, generator=generator), torch.arange(M) % C


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)).double()


def test_batches_of_a_shuffled_loader_say_their_rows(data):
    X, y = data
    loader = DataLoader(IndexedDataset(TensorDataset(X, y)), batch_size=10, shuffle=True)
    seen = []
    for indices, (inputs, labels) in loader:
        assert torch.equal(inputs, X[indices])
        assert torch.equal(labels, y[indices])
        seen.append(indices)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(M))
    assert IndexedDataset(TensorDataset(X, y))[-1][0] == M - 1


@pytest.mark.slow
def test_a_recorded_loader_run_is_exact(data, net):
    X, y = data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    loader = DataLoader(IndexedDataset(TensorDataset(X, y)), batch_size=10, shuffle=True)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for _ in range(3):
            for indices, (inputs, labels) in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()
                recorder.batch(indices)
                optimizer.step()
    assert recorder.num_steps == 9  # 10, 10 and 4 rows, three times
    parts = epk.attribute(recorder.trajectory, X[:5] + 0.1)
    assert float((parts.total - parts.network).abs().max()) < 1e-12


def test_augmentation_hidden_in_the_dataset_is_recorded(data, net):
    X, y = data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    loader = DataLoader(IndexedDataset(TensorDataset(X + 0.01, y)), batch_size=10)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for indices, (inputs, labels) in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            recorder.batch(indices)
            optimizer.step()
    assert torch.equal(recorder.trajectory.steps[0].passes[0].inputs.values, X[:10] + 0.01)
    assert epk.reconstruct(recorder.trajectory, X[:3]).max_error < 1e-12


def test_a_dataset_without_numbers_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(TypeError, match="items by index: got Stream"):
        IndexedDataset(Stream())
