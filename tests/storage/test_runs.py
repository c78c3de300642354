"""A run on disk: what is written is what is read, and what is damaged is said to be."""

import json
import pickle
import shutil
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.step import Step
from epk_gp.core.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.chunk_verification import read_steps
from epk_gp.storage.chunks import read_state
from epk_gp.storage.index import Chunk, chain_hash, read_journal, to_json_line
from epk_gp.storage.schema import WEIGHT_DTYPES, read_data, read_header
from epk_gp.storage.stored import StoredStates, StoredUpdates
from epk_gp.storage.training_state import read_training_state
from epk_gp.storage.writer import create_run_dir, write_header
from loops import CASES, data, file_hashes, mlp, sgd, squares, trained

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


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "run"
    record(path)
    return path


@pytest.fixture
def run(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "run")


@pytest.fixture
def crashed(tmp_path):
    """A run that was not finished."""
    record(tmp_path / "crashed", finish=False)
    return tmp_path / "crashed"


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


def test_a_run_holds_only_json_and_safetensors(run):
    names = sorted(file_hashes(run))
    assert names[-1] == HEADER
    assert {name.rsplit(".", 1)[1] for name in names} == {"json", "jsonl", "safetensors"}
    assert len(chunk_files(run)) == 4


def test_loading_unpickles_nothing(run, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a pickle was opened")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(module, name, forbidden)
    trajectory = epk.load_trajectory(run, mlp())
    assert torch.isfinite(torch.stack(list(trajectory.states))).all()


def test_chunks_do_not_change_the_run(tmp_path):
    for chunk_bytes, chunks in ((1, 7), (500, 4), (1500, 3), (1 << 24, 2)):
        path = tmp_path / str(chunk_bytes)
        assert record(path, chunk_bytes=chunk_bytes).digest == record(None).digest
        assert len(chunk_files(path)) == chunks


def test_the_journal_counts_every_state_once(run):
    journal = read_journal(run)
    assert [chunk.states for chunk in journal.chunks] == [1, 2, 2, 2]
    assert journal.chunks[-1].last == 6
    assert journal.finished


def test_no_partial_file_is_left(run):
    assert not list(run.glob("*.part"))


def test_loading_changes_no_file(run):
    before = file_hashes(run)
    epk.load_trajectory(run, mlp())
    assert file_hashes(run) == before


def test_loading_leaves_the_given_network_alone(run):
    net = mlp().train()
    with torch.no_grad():
        net[0].weight.fill_(7.0)
    trajectory = epk.load_trajectory(run, net)
    assert (net[0].weight == 7).all()
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    assert not (trajectory.weights(0)["0.weight"] == 7).any()


def test_a_float32_network_opens_a_float64_run(run):
    assert epk.load_trajectory(run, mlp(torch.float32)).dtype == torch.float64


def test_buffers_and_frozen_weights_come_from_the_run(tmp_path):
    case = CASES["frozen_batch_norm"]
    trajectory = trained(case, tmp_path / "run")
    net = case.make_net()
    net[1].running_mean.zero_()
    loaded = epk.load_trajectory(tmp_path / "run", net)
    X = case.make_data()[0]
    assert torch.equal(epk.network_outputs(loaded, X), epk.network_outputs(trajectory, X))


# --- Damage ---------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold a recorded run: .*nowhere/run.json does not exist"):
        epk.load_trajectory(tmp_path / "nowhere", mlp())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [HEADER, JOURNAL, "data.safetensors"])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    refused(run, FileNotFoundError, rf"must .*{name}")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_missing_chunk_is_named_with_its_states(run, number):
    file = chunk_files(run)[number]
    file.unlink()
    refused(
        run, ValueError, rf"{file.name} \(states {max(0, 2 * number - 1)}\.\.\d\) must have \d+ bytes: it is missing"
    )


@pytest.mark.parametrize("number", [0, 3])
def test_a_truncated_chunk_is_named_with_its_states(run, number):
    file = chunk_files(run)[number]
    file.write_bytes(file.read_bytes()[:-1])
    refused(run, ValueError, rf"{file.name} \(states .* must have \d+ bytes: it has \d+")


@pytest.mark.parametrize("position", [0, 40, -1, -300])
def test_a_flipped_bit_in_a_chunk_is_found(run, position):
    file = chunk_files(run)[1]
    flip(file, position)
    refused(run, ValueError, rf"{file.name} \(states 1\.\.2\) must have the checksum .*damaged. Restore it from a copy")


@pytest.mark.parametrize("change", ["flip", "truncate"])
def test_damaged_data_are_found(run, change):
    file = run / "data.safetensors"
    flip(file, -5) if change == "flip" else file.write_bytes(file.read_bytes()[:-8])
    refused(run, ValueError, r"data.safetensors must have the checksum")


def test_chunks_of_another_run_do_not_pass(run, tmp_path):
    """Same sizes, another history."""
    record(tmp_path / "other", steps=6)
    net, (X, y) = mlp(), data()
    with torch.no_grad():
        net[0].bias += 1
    optimizer = sgd(net)
    with epk.Recorder(
        net, optimizer, X, y, path=tmp_path / "another", storage=epk.Storage(chunk_bytes=800)
    ) as recorder:
        F.cross_entropy(net(X), y).backward()
        recorder.batch(None)
        optimizer.step()
    shutil.copy(chunk_files(tmp_path / "another")[0], chunk_files(run)[0])
    refused(run, ValueError, "chunk-000000.safetensors .* must have the checksum")


def cut(run, lines, length=0):
    """Leave whole lines of the journal, and the start of the next one."""
    whole = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    (run / JOURNAL).write_bytes(b"".join(whole[:lines]) + (whole[lines][:length] if length else b""))


def before_its_last_commit(run):
    """Bring back the file that the run would go on from, as a crash between journal and removal leaves it."""
    (run / "resume-000002.safetensors").write_bytes(b"whatever the second but last commit kept")


@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_a_last_journal_line_that_was_cut_short_is_not_committed(crashed, length):
    before_its_last_commit(crashed)
    cut(crashed, 3, length)
    loaded = epk.load_trajectory(crashed, mlp())
    assert loaded.num_steps == 4
    whole = record(None, steps=4)
    assert loaded.digest == whole.digest
    for s in range(5):
        assert torch.equal(loaded.states[s], whole.states[s])


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_a_journal_that_lost_whole_lines_is_found(crashed, run, lines):
    """The files of later commits say that there were more, whether the run was finished or not."""
    cut(crashed, lines)
    refused(crashed, ValueError, rf"a line for each of 4 committed chunks: it ends after {lines}")
    cut(run, lines)
    refused(run, ValueError, r"must be as it was when the run was finished, with \d+ bytes and 4 chunks")


def test_a_run_that_was_not_finished_opens_as_what_was_committed(crashed):
    assert epk.load_trajectory(crashed, mlp()).digest == record(None).digest
    assert not read_journal(crashed).finished


def test_a_chunk_without_its_journal_line_is_not_committed(crashed):
    before_its_last_commit(crashed)
    cut(crashed, 3)
    (crashed / "chunk-000003.safetensors.part").write_bytes(b"torn")
    chunk_files(crashed)[3].write_bytes(b"torn too")
    assert epk.load_trajectory(crashed, mlp()).num_steps == 4


def test_a_journal_without_any_line_is_no_run(crashed):
    (crashed / JOURNAL).write_bytes(b"")
    refused(crashed, ValueError, "at least its initial weights.*no committed chunk")


@pytest.mark.parametrize(
    "line", [b"\n", b"null\n", b"[]\n", b"{}\n", b'{"file": "x"}\n', b"\xff\xfe\n", b"{truncated\n"], ids=repr
)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_damaged_line_within_the_journal_is_an_error(crashed, number, line):
    lines = (crashed / JOURNAL).read_bytes().splitlines(keepends=True)
    lines[number] = line
    (crashed / JOURNAL).write_bytes(b"".join(lines))
    refused(crashed, ValueError, rf"line {number + 1} of .*{JOURNAL} must describe a chunk: it is damaged")


def rewritten(run, change):
    """Edit the second line of the journal, and sign all lines anew as an insider would."""
    chunks, before = [], ""
    for number, line in enumerate((run / JOURNAL).read_text().splitlines()):
        chunk = Chunk(**(json.loads(line) | (change if number == 1 else {})))
        before = chain_hash(before, chunk)
        chunks.append(Chunk(**(vars(chunk) | {"line": before})))
    (run / JOURNAL).write_bytes(b"".join(to_json_line(chunk) for chunk in chunks))


CHANGES = {
    "first": ({"first": 3}, "line 2 .*must continue at state 1"),
    "path": ({"file": "../chunk-000001.safetensors"}, "line 2 .*must continue at state 1"),
    "none": ({"states": 0}, "line 2 .*must continue at state 1"),
    "more": ({"states": 3}, "line 3 .*must continue at state 4"),
    "text": ({"states": "2"}, "line 2 .*damaged"),
    "bytes": ({"bytes": 7}, "must have 7 bytes"),
    "blake2b": ({"blake2b": "0" * 32}, "must have the checksum"),
    "digest": ({"digest": "0" * 32}, "must have the checksum"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES.keys())
def test_a_journal_line_that_was_edited_and_signed_anew_is_found(crashed, change, says):
    rewritten(crashed, change)
    refused(crashed, ValueError, says)


@pytest.mark.parametrize("change", [change for change, _ in CHANGES.values()], ids=CHANGES.keys())
def test_an_edited_journal_line_is_found(crashed, change):
    lines = (crashed / JOURNAL).read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    (crashed / JOURNAL).write_text("\n".join(lines) + "\n")
    refused(crashed, ValueError, "line 2 of .* (must have its checksum: it is damaged|must describe a chunk)")


def test_a_line_lost_from_the_middle_of_the_journal_is_found(crashed):
    lines = (crashed / JOURNAL).read_bytes().splitlines(keepends=True)
    (crashed / JOURNAL).write_bytes(b"".join(lines[:1] + lines[2:]))
    refused(crashed, ValueError, "line 2 .*must have its checksum: it is damaged, or a line before it is lost")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b"[" * 1000], ids=repr)
def test_a_damaged_closing_record_is_found(run, content):
    (run / "finished.json").write_bytes(content)
    refused(run, ValueError, "finished.json must (be JSON|have)")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"epk_gp run"', b"\xff\xfe", b"{}"], ids=repr)
def test_a_damaged_header_is_found(run, content):
    (run / HEADER).write_bytes(content)
    refused(run, ValueError, "run.json must be the (JSON header of a run|header of an epk_gp run)")


@pytest.mark.parametrize(
    "key",
    [
        "names",
        "shapes",
        "dtype",
        "num_outputs",
        "num_points",
        "loss",
        "law",
        "data_digest",
        "data_blake2b",
        "compression",
    ],
)
@pytest.mark.parametrize("change", ["removed", "edited"])
def test_an_edited_header_is_found(run, key, change):
    header = json.loads((run / HEADER).read_text())
    del header[key]
    if change == "edited":
        header[key] = 4
    (run / HEADER).write_text(json.dumps(header))
    refused(run, ValueError, "run.json must have the checksum it was written with: it is damaged")


@pytest.mark.parametrize("version", [1, 3, None, "2"])
def test_a_run_of_another_version_is_refused(run, version):
    header = json.loads((run / HEADER).read_text()) | {"version": version, "something": "new"}
    (run / HEADER).write_text(json.dumps(header))
    refused(run, ValueError, rf"format version must be 2: .* has {version!r}. Open it with the version of epk_gp")


# --- Another network, another loss ----------------------------------------------------------------------------------


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Tuple(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x


class Failing(nn.Sequential):
    def forward(self, x):
        return super().forward(x.reshape(-1, 3))


def with_buffer():
    net = mlp()
    net.register_buffer("extra", torch.zeros(2))
    return net


def sequential(kind, *layers):
    return kind(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).double()


OTHERS = {
    "names": (Renamed, "must have the recorded weights: '0.weight' is missing"),
    "width": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        r"0.weight has shape \(5, 4\), .* \(6, 4\)",
    ),
    "outputs": (lambda: mlp(outputs=2), r"2.weight has shape \(2, 6\), the run has \(3, 6\)"),
    "activation": (lambda: mlp(activation=nn.ReLU), "its outputs at the initial state differ .*activation functions"),
    "extra_layer": (lambda: nn.Sequential(*mlp(), nn.Linear(3, 3)), "'3.bias' is a parameter or buffer in only one"),
    "extra_buffer": (with_buffer, "'extra' is a parameter or buffer in only one"),
    "fewer_layers": (lambda: nn.Sequential(mlp()[0]), "'2.weight' is missing"),
    "failing": (lambda: sequential(Failing, nn.Tanh()), "same weights, but fails on the recorded inputs"),
    "two_outputs": (lambda: sequential(Tuple, nn.Tanh()), "to a tensor of shape .n, C.: got tuple"),
}


@pytest.mark.parametrize(("make", "says"), OTHERS.values(), ids=OTHERS.keys())
def test_another_network_is_refused(run, make, says):
    refused(run, ValueError, says, make())


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_network_is_refused(run):
    with pytest.raises(TypeError, match="net must be a torch.nn.Module: got str"):
        epk.load_trajectory(run, "net")


@pytest.fixture
def own_loss_run(tmp_path):
    trained(CASES["own_loss"], tmp_path / "own")
    return tmp_path / "own"


def test_a_loss_of_ones_own_must_be_given_again(own_loss_run):
    refused(own_loss_run, ValueError, "the user's own loss 'huber': pass it as loss=")


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (epk.CrossEntropy(), "must be the one the run was recorded with"),
        (epk.PerSampleLoss(CASES["own_loss"].losses, name="another"), "must be the one the run was recorded with"),
        (epk.PerSampleLoss(CASES["own_loss"].losses, "sum", name="huber"), "must be the one the run was recorded with"),
        (epk.PerSampleLoss(squares, name="huber"), "step 0 is not a step on the given 'huber'"),
    ],
    ids=["kind", "name", "reduction", "function"],
)
def test_another_loss_of_ones_own_is_refused(own_loss_run, loss, says):
    with pytest.raises(ValueError, match=says):
        epk.load_trajectory(own_loss_run, mlp(), loss=loss)


def test_another_loss_than_the_recorded_one_is_refused(run):
    assert epk.load_trajectory(run, mlp(), loss=epk.CrossEntropy()).loss == epk.CrossEntropy()
    with pytest.raises(ValueError, match="must be the one the run was recorded with"):
        epk.load_trajectory(run, mlp(), loss=epk.CrossEntropy("sum"))


# --- A folder that is not free --------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_refused_and_untouched(run):
    before = file_hashes(run)
    net, (X, y) = mlp(), data()
    for make in (
        lambda: epk.train(net, X, y, optimizer=sgd(net), steps=1, path=run),
        lambda: epk.Recorder(net, sgd(net), X, y, path=run, storage=epk.Storage()),
    ):
        with pytest.raises(FileExistsError, match=r"must be a new or empty folder: .*run already holds something"):
            make()
        assert file_hashes(run) == before
    assert epk.load_trajectory(run, mlp()).num_steps == 6


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_path_that_holds_anything_else_is_refused_and_untouched(tmp_path, kind):
    path = tmp_path / "notes"
    (path if kind == "file" else path / "mine.txt").parent.mkdir(exist_ok=True)
    (path if kind == "file" else path / "mine.txt").write_text("mine")
    before, (net, (X, y)) = file_hashes(tmp_path), (mlp(), data())
    with pytest.raises(FileExistsError, match="already holds something. Choose another path"):
        epk.train(net, X, y, optimizer=sgd(net), steps=1, path=path)
    assert file_hashes(tmp_path) == before


def test_an_empty_folder_is_taken_and_a_missing_one_made(tmp_path):
    (tmp_path / "empty").mkdir()
    record(tmp_path / "empty", steps=1)
    record(tmp_path / "deep" / "new", steps=1)
    assert epk.load_trajectory(tmp_path / "deep" / "new", mlp()).digest == record(None, steps=1).digest


@pytest.mark.parametrize("wrong", ["data", "labels", "optimizer", "steps"])
def test_nothing_is_written_for_a_run_that_is_refused_at_the_door(tmp_path, wrong):
    net, (X, y) = mlp(), data()
    X, y = (X * float("nan") if wrong == "data" else X), (y + 3 if wrong == "labels" else y)
    make = torch.optim.Adamax if wrong == "optimizer" else torch.optim.SGD
    optimizer = make(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="must"):
        epk.train(net, X, y, optimizer=optimizer, steps=0 if wrong == "steps" else 1, path=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- What is written is what is read --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "deltas"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_weights=st.integers(3, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    lengths=st.lists(st.one_of(st.none(), st.integers(1, 5)), max_size=9),
    chunk_states=st.integers(1, 4),
    sizes=st.lists(st.floats(0, 1e300), min_size=9, max_size=9),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory, compression, num_weights, dtype, lengths, chunk_states, sizes
):
    path = tmp_path_factory.mktemp("property") / "run"
    generator = torch.Generator().manual_seed(len(lengths))
    num_points = 1 << 20
    states = [torch.randn(num_weights, generator=generator, dtype=dtype) for _ in range(len(lengths) + 1)]
    batches = [None if n is None else torch.randint(0, num_points, (n,), generator=generator) for n in lengths]
    weights = [None if batch is None or len(batch) % 2 else torch.rand(len(batch)).double() for batch in batches]
    steps = [Step(s, sizes[s], batch, c) for s, (batch, c) in enumerate(zip(batches, weights, strict=True))]
    updates = [
        UpdateCoefficients(
            **{f: torch.rand(num_weights).to(dtype) if f in diagonal else torch.rand(2).double() for f in FIELDS}
        )
        for diagonal in ([("lr",), ("one_minus_dampening", "beta"), ()][s % 3] for s in range(len(lengths)))
    ]
    tensors = {"inputs": torch.zeros(num_points, 0), "targets": torch.zeros(num_points, 0), "probe": states[0]}
    kept = {"state": torch.arange(5)}
    about = {"names": ["w", "b"], "shapes": [[num_weights - 1], [1]], "dtype": str(dtype), "num_outputs": 1}
    about |= {"num_points": num_points, "loss": {"kind": "mine"}, "law": {"name": "mine"}, "data_digest": "none"}
    writer, header = create_run_dir(path, {**about, "compression": compression, "optimizer": []}, tensors)
    for first in range(0, len(states), chunk_states):
        last = min(first + chunk_states, len(states))
        own = slice(max(first - 1, 0), last - 1)
        writer.append(states[first:last], steps[own], updates[own], f"digest {last}", kept)
    write_header(writer, header)
    writer.mark_complete()
    writer.close()

    assert read_header(path) == header
    assert WEIGHT_DTYPES[header["dtype"]] == dtype
    for name, value in read_data(path, header).items():
        assert torch.equal(value, tensors[name])
        assert value.dtype == tensors[name].dtype
    chunks = read_journal(path).chunks
    assert list(chunks) == writer.chunks
    assert chunks[-1].digest == f"digest {len(states)}"
    assert torch.equal(read_training_state(path, len(chunks) - 1, chunks[-1])["state"], kept["state"])
    read = [step for chunk in chunks for step in read_steps(path, writer.schema, chunk)]
    assert [(step.index, step.lr) for step in read] == [(step.index, step.lr) for step in steps]
    for found, written in zip(read, batches, strict=True):
        assert (found.batch is None) == (written is None)
        assert written is None or torch.equal(found.batch, written)
    for found, written in zip(read, weights, strict=True):
        assert (found.sample_weights is None) == (written is None)
        assert written is None or torch.equal(found.sample_weights, written)
    stored = StoredUpdates(path, writer.schema, chunks)
    assert len(stored) == len(updates)
    like, sizes_of = torch.zeros(num_weights, dtype=dtype), writer.schema.sizes
    for s in torch.randperm(len(updates)).tolist():
        for found, written in zip(stored[s], updates[s], strict=True):
            assert torch.equal(broadcast_to_params(found, sizes_of, like), broadcast_to_params(written, sizes_of, like))
    in_order = StoredStates(path, writer.schema, chunks)
    for chunk in chunks:
        for state in range(chunk.first, chunk.last + 1):
            assert torch.equal(in_order[state], states[state])
            alone = read_state(path, writer.schema, chunk, state)
            assert torch.equal(alone, states[state])
            assert alone.dtype == dtype


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    steps=st.integers(1, 5),
    chunk_bytes=st.integers(1, 2000),
    batch_size=st.one_of(st.none(), st.integers(1, 10)),
    compression=st.sampled_from(["none", "deltas"]),
)
def test_a_recorded_run_is_the_run_in_memory(
    tmp_path_factory, widths, dtype, steps, chunk_bytes, batch_size, compression
):
    def make_net():
        torch.manual_seed(4)
        sizes = [4, *widths, 3]
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        return nn.Sequential(*layers).to(dtype)

    def loop(path):
        net, (X, y) = make_net(), data(dtype=dtype)
        optimizer = sgd(net)
        storage = epk.Storage(chunk_bytes=chunk_bytes, compression=compression)
        with epk.Recorder(net, optimizer, X, y, path=path, storage=storage) as recorder:
            for step in range(steps):
                batch = None if batch_size is None else (torch.arange(batch_size) + step) % len(X)
                rows = slice(None) if batch is None else batch
                optimizer.zero_grad()
                F.cross_entropy(net(X[rows]), y[rows]).backward()
                recorder.batch(batch)
                optimizer.step()
        return recorder.trajectory

    path = tmp_path_factory.mktemp("property") / "run"
    written, memory, loaded = loop(path), loop(None), epk.load_trajectory(path, make_net())
    for trajectory in (written, loaded):
        assert trajectory.digest == memory.digest
        assert trajectory.dtype == dtype
        assert all(torch.equal(trajectory.states[s], memory.states[s]) for s in range(steps + 1))
