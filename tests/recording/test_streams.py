"""A stream: rows are kept as the network sees them and numbered by content; the run is that with X in memory."""

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import epk_gp as epk
from epk_gp.recording import recorder as recorder_module
from epk_gp.storage.run import check_run
from stored_runs import replace_chunk

M, EXAMPLES = 24, 3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(M, 5, dtype=torch.float64, generator=GENERATOR)
Y = torch.arange(M) % 3
TEST = torch.randn(4, 5, dtype=torch.float64, generator=GENERATOR)
BATCHES = [batch for _ in range(3) for batch in torch.randperm(M, generator=GENERATOR).split(8)]
ORDER = list(dict.fromkeys(torch.cat(BATCHES).tolist()))  # of the first time that each row comes
LOSS = nn.CrossEntropyLoss()


class Masked(nn.Module):
    """Takes a dictionary, and the mask as a Boolean."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x, mask):
        return self.layers(x * mask)


def mlp(*middle):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), *middle, nn.Tanh(), nn.Linear(7, 3)).double()


NETS = {
    "plain": mlp,
    "dropout": lambda: mlp(nn.Dropout(0.2)),
    "batch norm": lambda: mlp(nn.BatchNorm1d(7)),
    "several inputs": Masked,
}


def inputs_of(net, rows):
    return {"x": rows, "mask": torch.ones_like(rows, dtype=torch.bool)} if isinstance(net, Masked) else rows


def call(net, rows):
    return net(**inputs_of(net, rows)) if isinstance(net, Masked) else net(rows)


def record_stream(net, first, rows, labels, **options):
    """Train on a stream of batches of rows."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, epk.Stream(*first), **options) as recorder:
        for x, y in zip(rows, labels, strict=True):
            optimizer.zero_grad()
            LOSS(net(x), y).backward()
            recorder.batch(targets=y)
            optimizer.step()
    return recorder.trajectory


def record(net, *, streams, splits=1, stop=None, is_stated=True, y=Y, **options):
    """Train on batches that come in parts whose losses are summed; all parts are announced before the step."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.01)
    first, loss = BATCHES[0][:EXAMPLES], {} if is_stated else {"loss": None}
    data = (epk.Stream(inputs_of(net, X[first]), y[first] if is_stated else None),)
    data = data if streams else (inputs_of(net, X), y)
    with epk.Recorder(net, optimizer, *data, **loss, **options) as recorder:
        for step in recorder.until(stop or len(BATCHES)):
            optimizer.zero_grad()
            parts = BATCHES[step].chunk(splits)
            for part in parts:
                LOSS(call(net, X[part]), y[part]).div(splits).backward()
                if not is_stated:
                    recorder.batch()
            for part in parts if is_stated else ():
                weight = {} if splits == 1 else {"weight": 1 / splits}
                _ = recorder.batch(targets=y[part], **weight) if streams else recorder.batch(part, **weight)
            optimizer.step()
    return recorder.trajectory


def asserted_same(stream, memory, net, tolerance=0.0):
    test = inputs_of(net, TEST)
    parts, others = epk.attribute(stream, test, head="logits"), epk.attribute(memory, test, head="logits")
    assert parts.certified
    assert float((parts.samples - others.samples[:, :, ORDER]).abs().max()) <= tolerance
    assert (parts.total - others.total).abs().max() < 1e-12


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", NETS)
def test_the_run_is_that_with_X_in_memory_to_the_last_bit(name, splits):
    net = NETS[name]()
    stream, memory = (record(NETS[name](), streams=streams, splits=splits) for streams in (True, False))
    assert stream.num_points == M
    assert torch.equal(stream.inputs, memory.inputs[ORDER])
    assert torch.equal(stream.targets, Y[ORDER])
    for step, other in zip(stream.steps, memory.steps, strict=True):
        assert torch.equal(torch.tensor(ORDER)[step.batch], other.batch)
    for s in range(stream.num_steps + 1):
        assert torch.equal(stream.states[s], memory.states[s])
    asserted_same(stream, memory, net)


@pytest.mark.parametrize("splits", [1, 2])
def test_without_a_stated_loss_rows_need_no_targets(splits):
    stream = record(mlp(), streams=True, splits=splits, is_stated=False)
    assert torch.equal(stream.inputs, X[ORDER])
    asserted_same(stream, record(mlp(), streams=False, splits=splits), mlp(), tolerance=1e-12)


def test_a_row_with_two_targets_is_two_points():
    labels = Y[:4], Y[:4].roll(2)
    run = record_stream(mlp(), (X[:2], Y[:2]), [X[:4], X[:4]], labels)
    assert [step.batch.tolist() for step in run.steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(run.inputs, torch.cat([X[:4], X[:4]]))
    assert torch.equal(run.targets, torch.cat(labels))
    assert epk.attribute(run, TEST).certified


@pytest.mark.parametrize("storage", [epk.Storage(steps=2), epk.Storage(keep_every=4), epk.Storage(chunk_bytes=1)])
def test_a_stream_is_resumed_to_the_same_end(storage, tmp_path):
    whole, folder = record(mlp(), streams=True), tmp_path / "run"
    options = {"streams": True, "folder": folder, "resume": True, "storage": storage}
    record(mlp(), stop=2, **options)
    recorded = record(mlp(), **options)
    loaded = epk.load_trajectory(folder, mlp())
    for run in (recorded, loaded):
        assert torch.equal(run.inputs, whole.inputs)
        assert torch.equal(run.targets, whole.targets)
        assert run.data_digest == whole.data_digest
        assert storage.keep_every > 1 or run.digest == whole.digest
        asserted_same(run, record(mlp(), streams=False), mlp(), 1e-12 if storage.keep_every > 1 else 0.0)
    assert recorded.digest == loaded.digest
    assert check_run(folder).num_steps == len(BATCHES)


def test_a_run_on_disk_holds_each_row_once(tmp_path):
    folder = tmp_path / "run"
    run = record(mlp(), streams=True, folder=folder, storage=epk.Storage(steps=2))
    data = load_file(folder / "data.safetensors")
    chunks = [load_file(file) for file in sorted(folder.glob("chunk-*"))]
    held = ["rows.inputs" in chunk for chunk in chunks]
    for name, whole in (("inputs", run.inputs), ("targets", run.targets)):
        rows = [chunk[f"rows.{name}"] for chunk, is_held in zip(chunks, held, strict=True) if is_held]
        assert torch.equal(torch.cat([data[name], *rows]), whole)
    assert held == [False, True, True, False, False, False]  # initial weights; rows come in the first epoch alone


@pytest.mark.parametrize("is_image", [True, False])
def test_images_of_8_bits_are_stored_in_bytes_and_read_as_the_network_saw_them(is_image, tmp_path):
    """Without rounding: what is no image stays as it is."""
    folder = tmp_path / "run"
    images = torch.randint(256, (9, 5), generator=torch.Generator().manual_seed(2), dtype=torch.uint8) / 255
    images = images if is_image else torch.where(torch.arange(5) == 2, -0.0, images)
    seen = record_stream(mlp().float(), (images[:3], Y[:3]), images.split(3), Y[:9].split(3), folder=folder)
    chunk = load_file(folder / "chunk-000001.safetensors")
    assert chunk["rows.inputs"].dtype == (torch.uint8 if is_image else torch.float32)
    run = epk.load_trajectory(folder, mlp().float())
    assert torch.equal(run.inputs, images)
    assert run.data_digest == seen.data_digest


def test_a_run_that_lost_rows_is_not_loaded(tmp_path):
    folder = tmp_path / "run"
    record(mlp(), streams=True, folder=folder, storage=epk.Storage(steps=3))
    chunk = sorted(folder.glob("chunk-*"))[1]
    tensors = load_file(chunk)
    tensors |= {name: tensors[name][:-1].clone() for name in ("rows.inputs", "rows.targets")}
    replace_chunk(folder, save(tensors))
    with pytest.raises(ValueError, match=f"must hold all rows of the stream .* it holds {M - 1}"):
        epk.load_trajectory(folder, mlp())


def one_step(rows=X[:4], net=None, data=None, **batch):
    net = mlp() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, *(data or (epk.Stream(X[:2], Y[:2]),))) as recorder:
        LOSS(net(rows), Y[: len(rows)]).backward()
        recorder.batch(**batch)
        optimizer.step()


IDS = torch.ones(2, 6, dtype=torch.int64)
WORDS = nn.Sequential(nn.Embedding(9, 4), nn.AdaptiveAvgPool2d((5, 4)), nn.Flatten(), nn.Linear(20, 3)).double()
REFUSED = {
    "whose rows number themselves": {"indices": [0, 1, 2, 3]},
    "targets must be what the stated loss takes": {"data": (X, Y), "targets": Y[:4]},
    "X and y must have one row per point": {"data": (epk.Stream(X, Y[1:]),)},
    "must get the targets of the rows": {},
    "rows of a stream .* must be seen: no call of the network on the batch's rows": {"targets": Y[:3]},
    "all rows must have one shape and dtype, and a target": {"targets": Y[:4].double()},
    "one shape and dtype.*Pad them to one shape":
        {"rows": IDS, "net": WORDS, "data": (epk.Stream(IDS[:, :5], Y[:2]),), "targets": Y[:2]},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_batch_of_a_stream_is_refused(message):
    with pytest.raises((ValueError, epk.StepMismatchError), match=message):
        one_step(**REFUSED[message])


def test_a_stream_over_several_processes_is_refused(monkeypatch):
    class Two(recorder_module.Ranks):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.size = 2

    monkeypatch.setattr(recorder_module, "Ranks", Two)
    with pytest.raises(ValueError, match="a Stream must be recorded by one process"):
        one_step(targets=Y[:4])
