"""Announced indices are checked: rows and targets that the loop used are compared with X and y at these indices."""

import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

import epk_gp as epk
import page_code
from epk_gp.callbacks import IndexedDataset
from epk_gp.core import step as row_identity
from epk_gp.core.losses import CrossEntropy
from epk_gp.core.step import RowIdentity
from epk_gp.datasets import digits

ROOT = Path(__file__).resolve().parents[2]


@cache
def data():
    found = digits()
    return found.inputs.reshape(-1, 64)[:600].clone(), found.labels[:600].clone()


@cache
def benchmark():
    return page_code.load(ROOT / "benchmarks" / "row_identity.py")


def normalised(x):
    return (x - 0.3) / 0.35


def augmented(x):
    """Normalise, mirror half of the images, and shift all by up to a pixel."""
    x = normalised(x).reshape(-1, 1, 8, 8)
    x = torch.where((torch.rand(len(x)) < 0.5).reshape(-1, 1, 1, 1), x.flip(-1), x)
    down, right = torch.randint(3, (2,)).tolist()
    return F.pad(x, [1] * 4)[:, :, down : down + 8, right : right + 8].flatten(1)


def record(loader, X, y, change=normalised, *, steps=10, loss=F.cross_entropy, **options):
    """Train a small network on (announced indices, rows, labels)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(X.shape[1], 6), nn.Tanh(), nn.Linear(6, 10)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    recorder = epk.Recorder(net, optimizer, X, y, **options)
    with recorder:
        for _, (indices, (inputs, labels)) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            loss(net(change(inputs)), labels).backward()
            recorder.batch(indices)
            optimizer.step()
    return recorder


def loaded(dataset):
    return DataLoader(dataset, batch_size=32, shuffle=True)


def announced(numbers, X, y, size=32):
    """Batches of random rows, under other numbers."""
    return ((numbers[rows], (X[rows], y[rows])) for rows in torch.randperm(len(X)).split(size))


def right():
    X, y = data()
    return loaded(IndexedDataset(TensorDataset(X, y))), X, y


def numbers_within_the_subset():
    X, y = data()
    subset = random_split(TensorDataset(X, y), [400, 200])[0]
    return loaded([(number, subset[number]) for number in range(400)]), X, y


def counted_beside_a_shuffled_loader():
    X, y = data()
    items = enumerate(loaded(TensorDataset(X, y)))
    return ((torch.arange(32 * k, 32 * k + len(batch[1])), batch) for k, batch in items), X, y


def in_another_order(*which):
    """The recorder gets rows, labels or both in one other order."""
    loader, X, y = right()
    order = torch.randperm(len(y))
    return loader, X[order] if "rows" in which else X, y[order] if "labels" in which else y


WRONG = {
    "subset": numbers_within_the_subset,
    "counted": counted_beside_a_shuffled_loader,
    "another_data_set": lambda: (right()[0], torch.rand(600, 64, dtype=torch.float64), data()[1]),
    "placeholders": lambda: (right()[0], 0 * data()[0], 0 * data()[1]),
    "permuted_labels": lambda: in_another_order("labels"),
    "permuted": lambda: in_another_order("rows", "labels"),
    "other_labels": lambda: (*right()[:2], torch.randint(10, (600,))),
    "zeros_beside_right_labels": lambda: (right()[0], 0 * data()[0], data()[1]),
}
NOT_THE_ROWS = "must get the indices of the rows that the network saw"


ROWS = ("subset", "counted", "another_data_set", "placeholders")  # wrong rows are also seen under augmentation


@pytest.mark.parametrize(("name", "change"), [(n, normalised) for n in WRONG] + [(n, augmented) for n in ROWS])
def test_rows_under_wrong_indices_are_an_error(name, change):
    with pytest.raises(epk.StepMismatchError, match=NOT_THE_ROWS):
        record(*WRONG[name](), change)


def test_right_indices_of_normalised_rows_pass_and_the_normalisation_is_named():
    with pytest.warns(
        UserWarning, match=r"the loader normalises: pass X as the network.*each column of every row is that of X"
    ):
        trajectory = record(*right()).trajectory
    assert trajectory.identity_finding is None
    assert epk.attribute(trajectory, normalised(data()[0][:2])).certified


def test_right_indices_of_augmented_rows_pass_in_silence():
    assert record(*right(), augmented).trajectory.identity_finding is None


def test_permuted_labels_of_two_classes_are_an_error_where_rows_are_as_recorded():
    """Half of them agree by chance: as many as in a loop with noisy labels."""
    X, y = data()
    loader = loaded(IndexedDataset(TensorDataset(X, y % 2)))
    with pytest.raises(epk.StepMismatchError, match="agree with y at the announced indices no more than by chance"):
        record(loader, X, (y % 2)[torch.randperm(len(y))], lambda x: x, steps=30)


@pytest.mark.parametrize(("size", "steps"), [(1, 70), (2, 40), (600, 5)])
def test_small_and_full_batches_are_checked(size, steps):
    X, y = data()
    batches = chain.from_iterable(announced(torch.arange(600), X, y, size) for _ in range(steps))
    record(batches, X, y, augmented, steps=steps)
    order = torch.randperm(600)
    batches = chain.from_iterable(announced(order, X, y, size) for _ in range(steps))
    with pytest.raises(epk.StepMismatchError, match="must get the indices"):
        record(batches, X, y, augmented, steps=steps)


@pytest.mark.filterwarnings("ignore:the loader normalises")
def test_points_that_x_holds_twice_are_no_other_points():
    X, y = data()
    X, y = X[:100].repeat(6, 1), y[:100].repeat(6)
    record(announced(torch.arange(600), X, y), X, y)


def test_an_error_names_the_row_that_the_network_saw():
    X, y = data()
    order = torch.randperm(600)
    with pytest.raises(epk.StepMismatchError, match=r"saw something like X\[") as error:
        record(announced(order, X, y[order]), X, y)
    seen, said = map(int, re.findall(r"X\[(\d+)\]", str(error.value).rpartition("saw something")[2])[:2])
    assert order[seen] == said


def test_rows_of_the_same_class_are_another_ones():
    """They are alike, and the labels agree: the announced row is nearer than others, but one is nearer still."""
    X, y = data()
    order = torch.empty(600, dtype=torch.long)
    for c in range(10):
        order[(y == c).nonzero()[:, 0]] = (y == c).nonzero()[:, 0].roll(1)
    with pytest.raises(epk.StepMismatchError, match=r"saw something like X.* in at least \d+ of 128 rows"):
        record(announced(order, X, y), X, y)


def test_the_steps_of_a_loop_that_was_refused_are_not_certified(tmp_path):
    net = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    with pytest.raises(epk.StepMismatchError):
        record(*numbers_within_the_subset(), folder=tmp_path / "run")
    trajectory = epk.load_trajectory(tmp_path / "run", net)
    assert trajectory.num_steps > 2
    assert "not those of the rows" in str(trajectory)
    with pytest.warns(epk.CertificateWarning, match="the announced indices are not those of the rows"):
        parts = epk.attribute(trajectory, normalised(data()[0][:1]), classes=torch.tensor([0]))
    assert not parts.certified
    assert "announced indices are not those" in str(parts)
    with pytest.warns(epk.CertificateWarning, match="the announced indices are not those of the rows"):
        assert not epk.influence(trajectory, normalised(data()[0][:1])).certified


def test_rows_that_cannot_be_matched_are_said_once_and_by_every_result(monkeypatch):
    monkeypatch.setattr(row_identity, "_CLEAR", 1.1)
    with pytest.warns(epk.CertificateWarning, match="rows could not be matched with X") as said:
        trajectory = record(*right(), augmented, steps=18).trajectory
    assert len(said) == 1
    assert "rows could not be matched" in str(trajectory)
    with pytest.warns(epk.CertificateWarning, match="rows could not be matched with X"):
        assert not epk.attribute(trajectory, data()[0][:1], classes=torch.tensor([0])).certified


@pytest.mark.filterwarnings("ignore:the loader normalises")
def test_accumulated_and_resumed_runs_are_checked(tmp_path):
    X, y = data()

    def run(steps, order):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        with epk.Recorder(net, optimizer, X, y, folder=tmp_path / "run", resume=True) as recorder:
            for step in recorder.until(steps):
                optimizer.zero_grad()
                for half in range(2):
                    rows = (torch.arange(16) * 7 + 13 * step + 5 * half) % 600
                    (0.5 * F.cross_entropy(net(normalised(X[rows])), y[rows])).backward()
                    recorder.batch(order[rows], weight=0.5)
                optimizer.step()

    run(6, torch.arange(600))
    with pytest.raises(epk.StepMismatchError, match="must get the indices"):
        run(16, torch.randperm(600))


def judged(recipe, wrong, X, y, count):
    bench = benchmark()
    identity = RowIdentity(X, y, CrossEntropy())
    errors = [identity.look_at(step) for step in bench.steps_of(X, y, recipe, bench.loops(y)[wrong], count)]
    return identity, [error for error in [*errors, identity.finish()] if error is not None]


TEN = ("normalisation", "flips", "crops and flips", "colour", "noise", "rotation, shear", "RandAugment", "cutout")


@pytest.mark.parametrize("name", [*TEN, "mixup", "CutMix"])
def test_ten_recipes_of_images_are_told_from_wrong_ones(name):
    X = benchmark().coloured_images(200)[..., ::2, ::2]
    y, recipe = torch.arange(200) % 10, benchmark().IMAGES[name]
    count = 8 if name in TEN else 32
    identity, errors = judged(recipe, "right", X, y, count)
    assert (identity.num_confirmed, identity.doubts, errors) == (1, [], [])
    assert judged(recipe, "another row and its label", X, y, count)[1]
    assert judged(recipe, "another row, the label of the announced one", X, y, count)[1]


@pytest.mark.parametrize("kind", ["sentences", "table"])
def test_recipes_of_sentences_and_tables_are_told_from_wrong_ones(kind):
    X, y = getattr(benchmark(), kind)(400), torch.arange(400) % 10
    for recipe in (benchmark().TEXT if kind == "sentences" else benchmark().of_columns(X)).values():
        identity, errors = judged(recipe, "right", X, y, 32)
        assert identity.num_confirmed
        assert (identity.doubt, errors) == (None, [])
        assert judged(recipe, "another row, the label of the announced one", X, y, 32)[1]


@pytest.mark.parametrize("change", [lambda x: x @ torch.randn(40, 40), lambda x: x[:, torch.randperm(40)]])
def test_a_fixed_map_of_all_rows_is_no_other_data_set(change):
    """Whitening, features of a frozen network: rows are as alike to one another as they were."""
    X = torch.randn(300, 40)
    seen = change(X)
    recipe = benchmark().rows_only(lambda x: seen[(x[:, None] == X[None]).all(dim=2).int().argmax(dim=1)])
    identity, errors = judged(recipe, "right", X, torch.arange(300) % 10, 16)
    assert (identity.num_confirmed, errors) == (2, [])
    assert judged(recipe, "another row, the label of the announced one", X, torch.arange(300) % 10, 16)[1]


def test_rows_of_a_subset_have_the_numbers_of_the_whole_data_set():
    X, y = data()
    first = random_split(TensorDataset(X, y), [400, 200])[0]
    for dataset in (first, Subset(first, range(50, 90)), Subset(first, [-1, 3])):
        indexed = IndexedDataset(dataset)
        for place in (0, 1, -1):
            index, (row, label) = indexed[place]
            assert torch.equal(row, X[index])
            assert label == y[index]
    loader = loaded(IndexedDataset(first))
    assert record(loader, X, y, augmented).num_steps == 10
    with pytest.raises(ValueError, match="IndexedDataset of a Subset gives the numbers of the whole data set"):
        record(loader, X[first.indices], y[first.indices])
