"""Announced indices are checked: rows and targets that the loop used are compared with X and y at these indices."""

import re
from functools import cache
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from wrong_indices import CHANGES, PATTERNS, SUBTLE, draw_case, outcome, scaled
from wrong_indices import record as record_changed

import epk_gp as epk
import page_code
from epk_gp.callbacks import IndexedDataset
from epk_gp.core import row_identity
from epk_gp.core.losses import CrossEntropy
from epk_gp.core.row_identity import RowIdentity
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


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()


def record(loader, X, y, change=normalised, *, steps=10, **options):
    """Train a small network on (announced indices, rows, labels)."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for indices, (inputs, labels) in islice(loader, steps):
            optimizer.zero_grad()
            F.cross_entropy(net(change(inputs)), labels).backward()
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
    subset = random_split(TensorDataset(*data()), [400, 200])[0]
    return loaded([(number, subset[number]) for number in range(400)]), *data()


def counted_beside_a_shuffled_loader():
    items = enumerate(loaded(TensorDataset(*data())))
    return ((torch.arange(32 * k, 32 * k + len(batch[1])), batch) for k, batch in items), *data()


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


def test_right_indices_pass_and_a_normalisation_is_named_and_an_augmentation_is_not():
    says = r"the loader normalises: pass X as the network.*each column of every row is that of X"
    with pytest.warns(UserWarning, match=says):
        trajectory = record(*right()).trajectory
    assert trajectory.identity_finding is None
    assert epk.attribute(trajectory, normalised(data()[0][:2])).certified
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


def test_rows_of_the_same_class_are_another_ones_and_the_error_names_one():
    """They are alike, and the labels agree: the announced row is nearer than others, but one is nearer still."""
    X, y = data()
    order = torch.empty(600, dtype=torch.long)
    for c in range(10):
        order[(y == c).nonzero()[:, 0]] = (y == c).nonzero()[:, 0].roll(1)
    with pytest.raises(epk.StepMismatchError, match=r"saw something like X.* in at least \d+ of 256 rows") as error:
        record(announced(order, X, y), X, y)
    seen, said = map(int, re.findall(r"X\[(\d+)\]", str(error.value).rpartition("saw something")[2])[:2])
    assert order[seen] == said


def test_the_steps_of_a_loop_that_was_refused_are_not_certified(tmp_path):
    with pytest.raises(epk.StepMismatchError):
        record(*numbers_within_the_subset(), folder=tmp_path / "run")
    trajectory = epk.load_trajectory(tmp_path / "run", network())
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
    rows, halves = torch.randperm(600)[:512].view(16, 2, 16), {"folder": tmp_path / "run", "resume": True}
    record_changed(network(), *data(), rows[:6], rows[:6], lambda x, _: normalised(x), **halves)
    others = torch.randperm(600)[rows[6:]]
    with pytest.raises(epk.StepMismatchError, match="must get the indices"):
        record_changed(network(), *data(), rows[6:], others, lambda x, _: normalised(x), **halves)


def judged(recipe, X, y, count, wrong="right"):
    bench = benchmark()
    identity = RowIdentity(X, y, CrossEntropy())
    errors = [identity.look_at(step) for step in bench.steps_of(X, y, recipe, bench.loops(y)[wrong], count)]
    return identity, [error for error in [*errors, identity.finish()] if error is not None]


def assert_judged(recipe, X, y, count, wrong=("another row, the label of the announced one",)):
    """Right indices pass, and wrong ones do not; return how many judgements were made of the right ones."""
    identity, errors = judged(recipe, X, y, count)
    assert (identity.doubt, errors) == (None, [])
    assert all(judged(recipe, X, y, count, each)[1] for each in wrong)
    return identity.num_judged


TEN = ("normalisation", "flips", "crops and flips", "colour", "noise", "rotation, shear", "RandAugment", "cutout")


@pytest.mark.parametrize("name", [*TEN, "mixup", "CutMix"])
def test_ten_recipes_of_images_are_told_from_wrong_ones(name):
    X, count = benchmark().coloured_images(200)[..., ::2, ::2], 8 if name in TEN else 32
    wrong = "another row and its label", "another row, the label of the announced one"
    assert assert_judged(benchmark().IMAGES[name], X, torch.arange(200) % 10, count, wrong) == 1


@pytest.mark.parametrize("kind", ["sentences", "table"])
def test_recipes_of_sentences_and_tables_are_told_from_wrong_ones(kind):
    X, y = getattr(benchmark(), kind)(400), torch.arange(400) % 10
    for recipe in (benchmark().TEXT if kind == "sentences" else benchmark().of_columns(X)).values():
        assert assert_judged(recipe, X, y, 32)


@pytest.mark.parametrize("change", [lambda x: x @ torch.randn(40, 40), lambda x: x[:, torch.randperm(40)]])
def test_a_fixed_map_of_all_rows_is_no_other_data_set(change):
    """Whitening, features of a frozen network: rows are as alike to one another as they were."""
    X = torch.randn(300, 40)
    seen = change(X)
    recipe = benchmark().rows_only(lambda x: seen[(x[:, None] == X[None]).all(dim=2).int().argmax(dim=1)])
    assert assert_judged(recipe, X, torch.arange(300) % 10, 16) == 2


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


def announce(rows, indices, change=lambda x, X: x + 0.2 * torch.randn_like(x), X=None):
    """Record a loop over the first training points; returns the recorded run."""
    X, y = data()[0] if X is None else X, data()[1]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 10)).double()
    return record_changed(net, X, y[: len(X)], rows[:, None], indices[:, None], change)


def test_indices_that_are_all_one_are_an_error():
    """There is nothing to compare in a batch of them; all of X says whose the rows are."""
    rows = torch.randperm(600)[:320].reshape(20, 16)
    with pytest.raises(epk.StepMismatchError, match=r"saw something like X.*the batch says X\[0\]"):
        announce(rows, 0 * rows, scaled)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_few_different_indices_of_noisy_rows_are_not_confirmed(k):
    rows = torch.randperm(600)[:320].reshape(20, 16)
    with pytest.warns(epk.CertificateWarning, match="could be compared with no other|of the comparisons only"):
        assert announce(rows, rows % k).identity_finding is not None


def test_rows_that_were_compared_with_nothing_are_not_certified():
    """All rows are of one training point, at the right index: no other index shows how alike they are by chance."""
    rows = torch.full((5, 8), 7)
    with pytest.warns(epk.CertificateWarning, match="40 of 40 rows could be compared with no other point"):
        trajectory = announce(rows, rows)
    with pytest.warns(epk.CertificateWarning, match="could be compared with no other point"):
        assert not epk.attribute(trajectory, data()[0][:1], classes=torch.tensor([0])).certified


@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_sets_of_few_points_are_confirmed_and_their_permutations_are_not(size):
    X, rows = data()[0][:size], torch.randint(size, (12, 6), generator=torch.Generator().manual_seed(0))
    assert announce(rows, rows, X=X).identity_finding is None
    if size > 1:
        with pytest.warns(epk.CertificateWarning, match="rows could not be matched"):
            assert announce(rows, (rows + 1) % size, X=X).identity_finding is not None


@pytest.mark.parametrize("points", [1, 3])
def test_batches_of_few_points_augmented_several_times_are_confirmed(points):
    """No batch has enough points to compare; those of several batches are compared."""
    rows = torch.arange(points * 24).reshape(24, points).repeat_interleave(12 // points, dim=1)
    assert announce(rows, rows).identity_finding is None
    errors = epk.StepMismatchError, epk.CertificateWarning
    with pytest.raises(errors, match="in .* of the comparisons only|something"):
        announce(rows, rows + 40)


WRONG_HALVES = {
    "second pass with the first one's": "pass 1 of each step",
    "every other step late": "steps s with s % 2 = 1",
    "half of a batch shifted": "half 1 of each pass",
}


@pytest.mark.parametrize("name", WRONG_HALVES)
def test_an_error_names_the_places_of_wrong_indices(name):
    """The mean of all comparisons is 75 %, which heavily augmented rows have too."""
    torch.manual_seed(0)
    rows, net = torch.randint(600, (24, 2, 16)), nn.Linear(64, 10).double()
    with pytest.raises(epk.StepMismatchError, match=re.escape(WRONG_HALVES[name])):
        record_changed(net, *data(), rows, PATTERNS[name](rows, data()[1]), lambda x, _: augmented(x))


@pytest.mark.parametrize("seed", range(5))
def test_drawn_right_indices_pass_and_drawn_wrong_ones_do_not(seed):
    assert outcome(seed, right=True)[0] == "right", draw_case(seed, right=True)
    assert outcome(seed, right=False)[0] in ("refused", "uncertified"), draw_case(seed, right=False)


def test_every_pattern_and_every_change_is_drawn():
    drawn = [draw_case(seed) for seed in range(1000)]
    assert {pattern for _, _, pattern, _ in drawn} == {None, *PATTERNS, *SUBTLE}
    assert {case[:2] for case in drawn} == {(kind, change) for kind in CHANGES for change in CHANGES[kind]}


def record_unstated(said, steps=6):
    """Record a loss that is not stated, of raw rows of which one gets another index in step 4."""
    X, net = data()[0], nn.Linear(64, 3).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with epk.Recorder(net, optimizer, X, None, loss=None) as recorder:
        for step in range(steps):
            rows = torch.arange(8) + 8 * step
            optimizer.zero_grad()
            net(torch.cat([X[rows], torch.rand(2, 64, dtype=X.dtype)])).square().mean().backward()
            indices = torch.cat([rows, torch.tensor([-1, -1])])
            indices[2] = said if step == 4 else indices[2]
            recorder.batch(indices)
            optimizer.step()
    return recorder.trajectory


def test_a_training_row_under_the_index_of_none_is_named():
    words = r"row 2 of pass 0 of step 4 was announced as no training point \(-1\), and is X\[34\] bit for bit"
    with pytest.warns(epk.CertificateWarning, match=words):
        trajectory = record_unstated(-1)
    with pytest.warns(epk.CertificateWarning, match=words):
        assert not epk.attribute(trajectory, data()[0][:1], head="logits").certified
    assert words.replace("\\", "") in " ".join(str(trajectory).split())
    trajectory = record_unstated(34)
    assert trajectory.identity_finding is None
    assert epk.attribute(trajectory, data()[0][:1], head="logits").certified
