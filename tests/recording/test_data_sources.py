"""Data in arrays, memory maps, datasets and loaders: the run is that with tensors in memory, to the last bit."""

import os
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from epk_gp.storage import schema
from page_code import load

M, STEPS = 150, 8
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(M, 5, dtype=torch.float64, generator=GENERATOR)
Y = torch.arange(M) % 3
TEST = torch.randn(4, 5, dtype=torch.float64, generator=GENERATOR)


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.double()

    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


class Items(Dataset):
    """Items of a function of their index."""

    def __init__(self, item):
        self.item = item

    def __len__(self):
        return M

    def __getitem__(self, index):
        return self.item(index)


PAIRS = Items(lambda index: (X[index].numpy(), int(Y[index])))
DICTS = Items(lambda index: {"x": X[index], "mask": torch.ones(5, dtype=torch.bool), "labels": int(Y[index])})
INPUTS = Items(lambda index: X[index])


def hugging_face():
    datasets = pytest.importorskip("datasets")
    columns = {"x": X.numpy(), "mask": np.ones((M, 5), bool), "labels": Y.tolist()}
    return datasets.Dataset.from_dict(columns).with_format("torch", dtype=None), None


def mapped(name, folder):
    array = {"X": X.numpy(), "Y": Y.numpy(), "mask": np.ones((M, 5), bool)}[name]
    np.save(folder / f"{name}.npy", array)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


SOURCES = {
    "arrays": lambda folder: (X.numpy(), Y.numpy()),
    "strided array": lambda folder: (np.asfortranarray(X.numpy())[:], Y.numpy()),
    "memory maps": lambda folder: (mapped("X", folder), mapped("Y", folder)),
    "dataset of pairs": lambda folder: (PAIRS, None),
    "dataset of inputs": lambda folder: (INPUTS, Y),
    "tensor dataset": lambda folder: (TensorDataset(X), Y.numpy()),
    "subset": lambda folder: (Subset(TensorDataset(X.flip(0), Y.flip(0)), list(range(M))[::-1]), None),
    "loader": lambda folder: (DataLoader(IndexedDataset(PAIRS), 7, shuffle=True), None),
    "loader with workers": lambda folder: (DataLoader(PAIRS, 7, num_workers=2), None),
    "memory maps by name": lambda folder: ({"x": mapped("X", folder), "mask": mapped("mask", folder)}, Y),
    "dataset of dictionaries": lambda folder: (DICTS, None),
    "key of the targets": lambda folder: (DICTS, "labels"),
    "Hugging Face": lambda folder: hugging_face(),
}


def train(inputs, targets, steps=STEPS, **options):
    net = Net()
    options |= {"optimizer": torch.optim.Adam(net.parameters(), lr=0.01), "batch_size": 40}
    return epk.train(net, inputs, targets, steps=steps, generator=torch.Generator().manual_seed(2), **options)


@cache
def trained_on_tensors(*, is_masked=False):
    return train(MASKED[0] if is_masked else X, Y)


MASKED = {"x": X, "mask": torch.ones(M, 5, dtype=torch.bool)}, {"x": TEST, "mask": torch.ones(4, 5, dtype=torch.bool)}
SEVERAL = "memory maps by name", "dataset of dictionaries", "key of the targets", "Hugging Face"


def asserted_same(run, expected, test):
    assert run.digest == expected.digest
    assert run.data_digest == expected.data_digest
    parts, others = epk.attribute(run, test), epk.attribute(expected, test)
    assert parts.certified
    assert torch.equal(parts.samples, others.samples)
    assert torch.equal(parts.total, others.total)


@pytest.mark.parametrize(
    ("source", "is_on_disk"), [*((source, True) for source in SOURCES), ("memory maps", False), ("subset", False),
    ("dataset of dictionaries", False)],
)  # fmt: skip
def test_the_run_is_that_with_tensors_in_memory(source, is_on_disk, tmp_path):
    options = {"folder": tmp_path / "run"} if is_on_disk else {}
    is_masked = source in SEVERAL
    expected, test = trained_on_tensors(is_masked=is_masked), MASKED[1] if is_masked else TEST
    asserted_same(train(*SOURCES[source](tmp_path), **options), expected, test)
    if is_on_disk:
        asserted_same(epk.load_trajectory(tmp_path / "run", Net()), expected, test)


def test_reading_leaves_the_random_numbers_as_they_are():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for loader in (DataLoader(PAIRS, 7), PAIRS):
        net = Net()
        torch.manual_seed(3)
        epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_run_on_a_dataset_is_resumed_to_the_same_end(tmp_path):
    expected = trained_on_tensors()
    train(PAIRS, None, steps=3, folder=tmp_path / "run", resume=True)
    asserted_same(train(PAIRS, None, folder=tmp_path / "run", resume=True), expected, TEST)
    other = TensorDataset(X + 1, Y)
    with pytest.raises(ValueError, match="data_digest must be the recorded one"):
        train(other, None, steps=9, folder=tmp_path / "run", resume=True)


def test_files_of_rows_go_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run = train(PAIRS, None)
    assert os.listdir(tmp_path / "temporary") == []  # mapped, without a name
    assert torch.equal(run.inputs, X)
    train(PAIRS, None, folder=tmp_path / "runs" / "run")
    assert sorted(os.listdir(tmp_path)) == ["runs", "temporary"]
    assert os.listdir(tmp_path / "runs") == ["run"]


def test_mapped_data_of_a_loaded_run_are_checked(tmp_path, monkeypatch):
    expected = train(PAIRS, None, folder=tmp_path / "run")
    monkeypatch.setattr(schema, "_IN_MEMORY", 0)
    asserted_same(epk.load_trajectory(tmp_path / "run", Net()), expected, TEST)
    file = tmp_path / "run" / "data.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="must have the checksum it was written with"):
        epk.load_trajectory(tmp_path / "run", Net())


class Generated(IterableDataset):
    def __iter__(self):
        return iter(PAIRS)


REFUSED = {
    "augmentation": (Items(lambda i: (X[i] + 0.1 * torch.randn(5), int(Y[i]))), None, ValueError,
        "the same each time it is read: item 0 is another one.*without"),
    "ragged": (Items(lambda i: (X[i, : 1 + i % 3], int(Y[i]))), None, TypeError,
        "arrays or numbers of one shape: stack expects"),
    "ragged between blocks": (Items(lambda i: (X[i, : 5 - i // 64], int(Y[i]))), None, ValueError,
        r"row 64 is \(\(4,\).* those before are \[\(\(5,\)"),
    "texts": (Items(lambda i: ("a text", int(Y[i]))), None, TypeError, "X must be a torch.Tensor: got tuple"),
    "items by name": (Items(lambda i: {"a": X}[i]), Y, TypeError, "tensors, arrays or numbers of one shape: 0"),
    "iterable": (Generated(), None, TypeError, "map-style dataset.*got an iterable one. Pass epk.Stream"),
    "no targets": (INPUTS, None, TypeError, "y must be the targets that the stated loss takes"),
    "unknown key": (DICTS, "label", ValueError, "y must be a key of the dataset's items"),
    "too few targets": (X.numpy(), Y.numpy()[:-1], ValueError, r"one row per point.* got \[\(149,\), \(150,\)\]"),
    "too many targets": (X.numpy()[:-1], Y.numpy(), ValueError, r"one row per point.* got \[\(149,\), \(150,\)\]"),
    "too many targets of a dataset": (TensorDataset(X[1:]), Y, ValueError, "X and y must have one row per point"),
    "a stream": (epk.Stream(X, Y), None, TypeError, "X must be a data set.*got a Stream. Write the loop"),
    "an empty array": (X.numpy()[:0], Y[:0], ValueError, r"at least one: got \[\(0,\)\]"),
    "an empty dataset": (TensorDataset(X[:0], Y[:0]), None, ValueError, r"at least one: got \[\(0,\)\]"),
    "a number": (np.array(1.0), Y, ValueError, r"at least one: got \[\(\), \(150,\)\]"),
    "a list of targets": (X.numpy(), Y.tolist(), TypeError, "y must be a torch.Tensor: got list"),
    "bytes": (X.to(torch.uint8).numpy(), Y, ValueError, "accept X .* torch.uint8: it fails .* converted in X too"),
    "not finite": (np.where(np.arange(M)[:, None] == 70, np.inf, X.numpy()), Y, ValueError, "finite: row 70"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_are_no_rows_are_refused(name):
    inputs, targets, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        train(inputs, targets)


@pytest.mark.slow
def test_a_run_over_rows_on_disk_takes_memory_that_does_not_grow_with_them(tmp_path):
    """Growth of anonymous memory, MiB, where the rows are 76 MiB; as a tensor they are copied, the control."""
    benchmark = load(Path(__file__).parents[2] / "benchmarks" / "data_on_disk.py")
    peaks = benchmark.measure(200_000, tmp_path)
    assert max(peaks[phase] for phase in ("creating", "recording", "loading")) < 25
    assert peaks["attribute"] < 60  # 10 times the result, 4.6 MiB
    rows, labels = (np.load(tmp_path / f"{name}.npy") for name in "Xy")
    net = benchmark.network(100)
    with peaks.of("in memory"):
        epk.Recorder(net, torch.optim.Adam(net.parameters()), torch.from_numpy(rows), torch.from_numpy(labels))
    assert peaks["in memory"] > 70
