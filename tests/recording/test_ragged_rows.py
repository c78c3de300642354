"""Rows of unequal lengths: with offsets, nested, packed, as a list; the run is that of padded rows with masks."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import epk_gp as epk
from helpers import refusal

LENGTHS = torch.tensor([3, 1, 4, 2, 5, 2, 3, 1])
M, L = len(LENGTHS), int(LENGTHS.max())
GENERATOR = torch.Generator().manual_seed(0)
MASK = torch.arange(L) < LENGTHS[:, None]
IDS = torch.randint(1, 9, (M, L), generator=GENERATOR) * MASK
FLOATS = torch.randn(M, L, 3, dtype=torch.float64, generator=GENERATOR) * MASK[..., None]
Y = torch.arange(M) % 3


class TwoLayers(nn.Module):
    """A first layer of rows of any length, and an output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.out = self.make_first(), nn.Linear(6, 3)


class Bag(TwoLayers):
    make_first = staticmethod(lambda: nn.EmbeddingBag(9, 6, mode="mean"))

    def forward(self, text, offsets):
        return self.out(torch.tanh(self.first(text, offsets)))


class PaddedBag(Bag):
    def forward(self, lengths, padded):
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        rows = nn.functional.embedding(padded, self.first.weight) * mask[..., None]
        return self.out(torch.tanh(rows.sum(dim=1) / lengths[:, None]))


class PaddedSums(TwoLayers):
    make_first = staticmethod(lambda: nn.Linear(3, 6))

    def forward(self, lengths, padded):
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return self.out((torch.tanh(self.first(padded)) * mask[..., None]).sum(dim=1))


class Nested(PaddedSums):
    def forward(self, rows):
        return self.out(torch.tanh(self.first(rows)).to_padded_tensor(0.0).sum(dim=1))


class List(PaddedSums):
    def forward(self, rows):
        return self.out(torch.stack([torch.tanh(self.first(row)).sum(dim=0) for row in rows]))


class Packed(TwoLayers):
    make_first = staticmethod(lambda: nn.LSTM(3, 6, batch_first=True))

    def forward(self, rows):
        return self.out(self.first(rows)[1][0][-1])


class PaddedLast(Packed):
    def forward(self, lengths, padded):
        return self.out(self.first(padded)[0][torch.arange(len(padded)), lengths - 1])


def offsets(rows):
    lengths = torch.tensor([len(row) for row in rows])
    return torch.cat(rows), lengths.cumsum(0) - lengths


FORMS = {  # network, the same one on padded rows, rows, arguments of a call
    "offsets": (Bag, PaddedBag, IDS, offsets),
    "nested": (Nested, PaddedSums, FLOATS, lambda rows: (torch.nested.nested_tensor(rows, layout=torch.jagged),)),
    "list": (List, PaddedSums, FLOATS, lambda rows: (rows,)),
    "packed": (Packed, PaddedLast, FLOATS, lambda rows: (pack_sequence(rows, enforce_sorted=False),)),
}


def rows_of(padded, points=range(M)):
    return [padded[point, : LENGTHS[point]] for point in points]


def record(net, data, call, y=Y, **options):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    with epk.Recorder(net, optimizer, data, y, **options) as recorder:
        for batch in torch.arange(M).split(3) * 2:
            optimizer.zero_grad()
            nn.functional.cross_entropy(call(batch), Y[batch]).backward()
            recorder.batch(**({"indices": batch} if y is Y else {"targets": Y[batch]}))
            optimizer.step()
    return recorder


def in_form(form, net):
    """Data, and a call of the network on a batch."""
    _, _, padded, arguments = FORMS[form]
    return epk.Ragged(rows_of(padded), form), lambda batch: net(*arguments(rows_of(padded, batch.tolist())))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch maps packing over rows one by one
@pytest.mark.parametrize("form", FORMS)
def test_the_run_is_that_of_padded_rows(form, tmp_path):
    make, make_padded, padded, call = FORMS[form]
    net, other = make().double(), make_padded().double()
    other.load_state_dict(net.state_dict())
    ragged = record(net, *in_form(form, net), folder=tmp_path / "run")
    expected = record(other, (LENGTHS, padded), lambda batch: other(LENGTHS[batch], padded[batch]))
    run = ragged.trajectory
    assert not any(step.passes for step in run.steps)  # all rows are those of X
    assert all(torch.equal(a, b) for a, b in zip(ragged.X.rows, rows_of(padded), strict=True))
    test, points = epk.Ragged(rows_of(padded, [0, 1, 4]), form), (LENGTHS[[0, 1, 4]], padded[[0, 1, 4]])
    parts, others = epk.attribute(run, test), epk.attribute(expected.trajectory, points)
    assert parts.certified
    assert (parts.samples - others.samples).abs().max() < 1e-12
    returned = net(*call(rows_of(padded, [0, 1, 4]))).detach().log_softmax(dim=1)
    assert (parts.total - returned).abs().max() < 1e-12
    loaded = epk.load_trajectory(tmp_path / "run", make().double())
    assert loaded.digest == run.digest
    own = call(rows_of(padded, [0, 1, 4]))  # as the network takes them
    assert torch.equal(epk.attribute(loaded, own if form == "offsets" else own[0]).samples, parts.samples)
    assert epk.reconstruct(loaded, test).certified


@pytest.mark.parametrize("form", ["nested", "packed"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_nested_tensors_and_packed_sequences_are_ragged_by_themselves(form):
    make, _, padded, arguments = FORMS[form]
    net, other = make().double(), make().double()
    run, plain = record(net, *in_form(form, net)), record(other, arguments(rows_of(padded))[0], in_form(form, other)[1])
    assert run.trajectory.digest == plain.trajectory.digest


def test_rows_of_a_stream_may_be_longer_than_its_example():
    net = Bag().double()
    example = epk.Ragged(rows_of(IDS, [1, 7]), "offsets", longest=L)
    run = record(net, epk.Stream(example, Y[[1, 7]]), in_form("offsets", net)[1], y=None).trajectory
    seen, expected = (
        {(*row.tolist(), -int(label)) for row, label in zip(*pair, strict=True)}
        for pair in ((run.unpack(run.inputs).rows, run.targets), (rows_of(IDS), Y))
    )
    assert seen == expected
    assert epk.attribute(run, epk.Ragged(rows_of(IDS, [0, 4]), "offsets")).certified


def test_a_call_without_offsets_is_none_with_rows_of_the_data():
    net, other = Bag().double(), Bag().double()
    data, call = in_form("offsets", net)

    def twice(batch):
        net(IDS[batch], None)
        return call(batch)

    assert record(net, data, twice).trajectory.digest == record(other, *in_form("offsets", other)).trajectory.digest


def test_what_is_no_ragged_batch_is_refused():
    net, rows = Bag().double(), rows_of(IDS)
    run = record(net, *in_form("offsets", net)).trajectory
    longer, other = [*rows[:2], torch.ones(L + 1, dtype=torch.int64)], [*rows[:2], torch.ones(2, 2, dtype=torch.int64)]

    def shuffled(batch):
        return net(*offsets(rows_of(IDS, (M - 1 - batch).tolist())))

    calls = {
        "like the training inputs": lambda: epk.attribute(run, epk.Ragged(longer, "offsets")),
        "that differ in their length alone": lambda: epk.attribute(run, epk.Ragged(other, "offsets")),
        "a call among offsets, nested, packed, list": lambda: record(net, epk.Ragged(rows, "padded"), net),
    }
    values, starts = offsets(rows)
    no_offsets = [(values, starts + 1), (values, starts.double()), (values, starts.flip(0)), (values, starts, starts)]
    for message, call in calls.items():
        assert refusal((TypeError, ValueError), message, call) is None, message
    for other in no_offsets:
        assert refusal(ValueError, "must have one row per point", epk.attribute, run, other) is None
    with pytest.raises(epk.StepMismatchError, match=r"row 0 was X\[7\], the batch says X\[0\]"):
        record(net, epk.Ragged(rows, "offsets"), shuffled)
