"""Forward passes and moving statistics on disk: what is written is what is read, when it is asked for."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import epk_gp as epk
from epk_gp.cli.runs import info
from epk_gp.core.step import ForwardPass, SeenRows, Step, fingerprint_step
from epk_gp.gram.thinning import _thinned
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.recording.history import RunHistory
from epk_gp.storage import export_run
from epk_gp.storage.check import check_run
from epk_gp.storage.packing import BITS, DTYPES, RAW, Packed, pack_tensor, unpack_tensor
from epk_gp.storage.pass_tables import PARTS
from epk_gp.storage.passes import ContentInMemory, ContentOnDisk, PackedPasses, pack_passes, pack_step, packed_steps
from stored_runs import (
    add,
    begin,
    equal_values,
    finish,
    norm_net,
    random_pass,
    record,
    same_passes,
    write_by_hand,
)

STATE = torch.Generator().manual_seed(3).get_state()
WHOLE = ForwardPass(
    num_rows=4,
    modes=torch.tensor([True, False, True, True, False, False]),
    inputs=SeenRows(torch.tensor([2, 0]), torch.linspace(0, 1, 8).reshape(2, 4).double()),
    targets=SeenRows(torch.tensor([1]), torch.tensor([[0.25, 0.75, 0.0]])),
    random_state=STATE,
    device_random_state=STATE[:16].clone(),
    statistics=torch.arange(12.0).double(),
    statistics_after=torch.arange(12.0).double() + 1,
    autocast=torch.bfloat16,
)


@pytest.mark.parametrize("compression", ["none", "deltas"])
@pytest.mark.parametrize("statistics", [True, False], ids=["moving_statistics", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_passes_and_statistics_are_read_as_they_were_written(tmp_path, compression, statistics, seed):
    options = {} if statistics else {"statistics": (), "net": norm_net()}
    run = write_by_hand(tmp_path / "run", seed, compression=compression, steps=2, unexplained=0.25, **options)
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert opened.digest == run.history.digest(len(run.steps))
    assert opened.unexplained == 0.25
    assert [step.index for step in opened.steps] == list(range(6))
    for number in torch.randperm(6).tolist():
        assert same_passes(opened.steps[number].passes, run.steps[number].passes)
        assert same_passes(run.history.steps[number].passes, run.steps[number].passes)
    for number in torch.randperm(7).tolist():
        assert torch.equal(opened.states[number], run.states[number])
        assert not statistics or torch.equal(opened.statistics[number], run.statistics[number])
    assert (opened.statistics is None) == (not statistics)
    assert check_run(tmp_path / "run").num_passes == sum(len(step.passes) for step in run.steps)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4),
    kind=st.sampled_from(["noise", "zeros", "few"]),
    size=st.sampled_from([1, 1000]),
)
def test_a_tensor_is_unpacked_as_it_was_packed(seed, dtype, shape, kind, size):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, size, generator=generator) * 60
    if kind != "noise":
        values = values.sign() * (kind == "few")
    value = values.to(dtype)
    packed = pack_tensor(value)
    read = unpack_tensor(packed)
    assert read.dtype == dtype
    assert read.shape == value.shape
    assert torch.equal(read, value)
    assert len(packed.content) <= value.nbytes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_rows=st.integers(1, 30), num_passes=st.integers(1, 4))
def test_any_passes_are_unpacked_as_they_were_packed(seed, num_rows, num_passes):
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    passes = tuple(random_pass(generator, num_rows, kinds=kinds) for _ in range(num_passes))
    packed = pack_step(Step(0, 0.1, None, None, passes))
    assert same_passes(packed.passes, passes)
    assert same_passes(pickle.loads(pickle.dumps(packed.passes)), passes)
    tables, content = pack_passes([packed, Step(1, 0.1, None), packed])
    joined = packed_steps([packed, Step(1, 0.1, None), packed], tables, ContentInMemory(content))
    assert joined[1].passes == ()
    assert same_passes(joined[0].passes, passes)
    assert same_passes(joined[2].passes, passes)


def test_a_tensor_takes_the_fewest_bytes_of_its_encodings():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (100_000,), generator=generator, dtype=torch.uint8)
    assert (pack_tensor(noise).encoding, len(pack_tensor(noise).content)) == (RAW, 100_000)
    modes = pack_tensor(torch.ones(81, dtype=torch.bool))
    assert (modes.encoding, len(modes.content)) == (BITS, 11)
    assert len(pack_tensor(STATE).content) < 2600  # 624 words of 32 bits, in 64 bits each
    images = (torch.rand(64, 784, generator=generator) > 0.8) * torch.randint(0, 256, (64, 784), generator=generator)
    assert len(pack_tensor(images.float() / 255).content) < 0.2 * 64 * 784 * 4
    assert len(pack_tensor(torch.zeros(1 << 20)).content) < 1 << 15


def test_tensors_of_another_kind_are_not_packed():
    with pytest.raises(TypeError, match="must be of one of the dtypes float64, .*: got torch.complex64"):
        pack_tensor(torch.zeros(3, dtype=torch.complex64))


def test_equal_tensors_of_a_chunk_are_stored_once(tmp_path):
    """Modes change seldom."""
    run = begin(tmp_path / "run")
    modes = torch.arange(6) < 3
    for _ in range(50):
        add(run, (ForwardPass(4, modes.clone()), ForwardPass(6, modes.clone())))
    add(run, (ForwardPass(10, ~modes),))
    finish(run)
    tensors = load_file(tmp_path / "run" / "chunk-000001.safetensors")
    assert tensors["passes.content"].tolist() == [0b11100000, 0b00011100]


def test_a_run_without_passes_has_the_chunks_of_version_2(tmp_path):
    record(tmp_path / "run")
    names = {"states", "sizes", "lengths", "batches", "weighted", "sample_weights", "update"}
    assert load_file(tmp_path / "run" / "chunk-000001.safetensors").keys() == names


def test_nothing_of_the_passes_is_read_before_they_are_indexed(tmp_path, monkeypatch):
    run = begin(tmp_path / "run", steps=5)
    for _ in range(20):
        add(run, (WHOLE, replace(WHOLE, num_rows=6)))
    finish(run)
    spans, real = [], ContentOnDisk.read
    monkeypatch.setattr(ContentOnDisk, "read", lambda self, parts: spans.extend(parts) or real(self, parts))
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert [len(step.passes) for step in opened.steps] == [2] * 20
    assert all(step.passes for step in opened.steps)
    assert spans == []
    assert same_passes([opened.steps[7].passes[1]], [replace(WHOLE, num_rows=6)])
    assert len(spans) == 9


def test_passes_are_a_sequence(tmp_path):
    passes = pack_step(Step(0, 0.1, None, None, (WHOLE, replace(WHOLE, num_rows=6)))).passes
    assert [forward.num_rows for forward in passes] == [4, 6]
    assert [forward.num_rows for forward in reversed(passes)] == [6, 4]
    assert [forward.num_rows for forward in passes[1:]] == [passes[-1].num_rows] == [6]
    for number in (2, -3):
        with pytest.raises(IndexError, match=rf"pass must lie in 0..1: got {number}"):
            passes[number]


def test_passes_of_an_open_run_tell_that_their_file_is_gone(tmp_path):
    write_by_hand(tmp_path / "run")
    step = next(step for step in epk.load_trajectory(tmp_path / "run", norm_net()).steps if step.passes)
    (tmp_path / "run" / "chunk-000001.safetensors").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="must keep all its files while it is used"):
        step.passes[0]


def test_a_history_keeps_packed_copies_and_pickles_no_more_than_them():
    """Views of the arena's blocks would pickle 4 MiB for each step."""
    history = RunHistory(torch.zeros(3), "digest")
    seen = SeenRows(torch.arange(10), torch.randn(10, 4))
    update = stack_coefficients([LinearStep(lr=0.1)], [3])
    for index in range(3):
        history.append(Step(index, 0.1, None, None, (ForwardPass(10, inputs=seen),)), torch.zeros(3), update)
    before = seen.values.clone()
    seen.values.zero_()
    assert all(isinstance(step.passes.content, ContentInMemory) for step in history.steps)
    for steps in (history.steps, pickle.loads(pickle.dumps(history.steps)), copy.deepcopy(history.steps)):
        assert all(torch.equal(step.passes[0].inputs.values, before) for step in steps)
    assert len(pickle.dumps([step.passes for step in history.steps])) < 10_000


def test_memory_of_passes_is_bounded_by_the_bytes_of_a_chunk(tmp_path):
    """They count as the weights do, and leave memory when they are on disk."""
    run = begin(tmp_path / "run", chunk_bytes=40_000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        seen = SeenRows(
            torch.arange(10), torch.randn(10, 100, generator=generator, dtype=torch.float64)
        )  # 8000 bytes of noise
        add(run, (ForwardPass(10, inputs=seen),), generator=generator)
    in_memory = [isinstance(step.passes.content, ContentInMemory) for step in run.history.steps]
    assert run.commits.num_committed == in_memory.index(True) == 10
    finish(run)
    assert not any(isinstance(step.passes.content, ContentInMemory) for step in run.history.steps)
    assert all(same_passes(a.passes, b.passes) for a, b in zip(run.history.steps, run.steps, strict=True))


CHANGED = {
    "num_rows": 5,
    "modes": ~WHOLE.modes,
    "inputs": SeenRows(WHOLE.inputs.index, WHOLE.inputs.values + 1e-15),
    "targets": SeenRows(torch.tensor([2]), WHOLE.targets.values),
    "random_state": torch.Generator().manual_seed(4).get_state(),
    "device_random_state": STATE[1:17].clone(),
    "statistics": WHOLE.statistics + 1e-9,
    "statistics_after": None,
    "memory_order": torch.tensor([1, 0]),
    "autocast": torch.float16,
}


@pytest.mark.parametrize("name", [field.name for field in fields(ForwardPass)])
def test_the_digest_covers_every_part_of_a_pass(name):
    end, update = torch.zeros(3), stack_coefficients([LinearStep(lr=0.1)], [3])

    def digest(*passes, packed=False, statistics=None):
        step = Step(0, 0.1, torch.arange(4), None, passes)
        return fingerprint_step("before", pack_step(step) if packed else step, update, end, statistics)

    other = replace(WHOLE, **{name: CHANGED[name]})
    moving = torch.arange(2.0)
    digests = [digest(), digest(WHOLE), digest(other), digest(WHOLE, WHOLE), digest(WHOLE, statistics=moving)]
    assert len({*digests, digest(WHOLE, statistics=moving + 1)}) == 6
    assert digest(WHOLE, packed=True) == digest(WHOLE)
    assert equal_values(getattr(pack_step(Step(0, 0.1, None, None, (other,))).passes[0], name), CHANGED[name])


REFUSED = {
    "rows": ({"num_rows": 0}, "must have at least one row: got 0"),
    "index": ({"inputs": SeenRows(torch.tensor([4]), torch.zeros(1, 4))}, r"rows of the pass, 0..3: got 4..4"),
    "twice": ({"targets": SeenRows(torch.tensor([1, 1]), torch.zeros(2))}, "targets must give each row once"),
    "nan": ({"inputs": SeenRows(torch.tensor([1]), torch.full((1, 4), torch.nan))}, "inputs must hold finite numbers"),
    "statistics": ({"statistics": torch.full((12,), torch.inf)}, "statistics must hold finite numbers"),
    "half": ({"statistics": torch.zeros(12).half()}, "statistics must be a vector of torch.float64: got"),
    "random": ({"random_state": torch.zeros(0, dtype=torch.uint8)}, "random_state must have 1 to 65536 bytes: got 0"),
    "state": ({"random_state": STATE[1:].clone()}, "random_state must be one of torch's random numbers on the CPU: "),
    "autocast": ({"autocast": torch.int8}, "autocast must be a floating-point dtype: got torch.int8"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_pass_that_could_not_be_read_is_not_recorded(change, message):
    with pytest.raises(ValueError, match=message):
        pack_step(Step(0, 0.1, None, None, (replace(WHOLE, **change),)))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (replace(WHOLE, num_rows=9), "the rows of a step's passes are not as many as its batch has"),
        (
            replace(WHOLE, num_rows=10, modes=torch.ones(5) > 0),
            r"'modes' of a pass is of type torch.bool and shape \(5,\)",
        ),
        (ForwardPass(10, statistics=torch.ones(3)), r"'statistics' of a pass is of .* and shape \(3,\)"),
    ],
    ids=["rows", "modes", "statistics"],
)
def test_passes_of_another_network_or_batch_are_not_committed(tmp_path, forward, message):
    run = begin(tmp_path / "run", steps=1)
    with pytest.raises(ValueError, match=message):
        add(run, (forward,))
    assert run.commits.num_committed == 0
    assert epk.load_trajectory(tmp_path / "run", norm_net()).num_steps == 0


def test_an_export_holds_statistics_and_passes(tmp_path):
    run = write_by_hand(tmp_path / "run", seed=2, steps=2)
    size = export_run(tmp_path / "run", tmp_path / "file")
    assert size == (tmp_path / "file").stat().st_size
    tensors = load_file(tmp_path / "file")
    assert torch.equal(tensors["statistics"], torch.stack(run.statistics))
    assert tensors["passes.counts"].tolist() == [len(step.passes) for step in run.steps]
    contents = tensors["passes.content"].split(tensors["passes.lengths"].tolist())
    shapes = tensors["passes.shapes"].split(tensors["passes.kinds"][:, 2].tolist())

    def part(row, name):
        number = row[PARTS.index(name)]
        dtype, encoding, _ = tensors["passes.kinds"][number].tolist()
        shape, content = tuple(shapes[number].tolist()), contents[number].numpy().tobytes()
        return None if number < 0 else unpack_tensor(Packed(DTYPES[dtype], shape, encoding, content))

    passes = [forward for step in run.steps for forward in step.passes]
    for row, forward in zip(tensors["passes.parts"].tolist(), passes, strict=True):
        for name in ("modes", "random_state", "statistics"):
            assert equal_values(part(row, name), getattr(forward, name))
        if forward.inputs is not None:
            assert torch.equal(part(row, "inputs.values"), forward.inputs.values)
    assert sum(forward.inputs is not None for forward in passes) > 2


def test_info_says_what_was_recorded(tmp_path, capsys):
    run = write_by_hand(tmp_path / "run", unexplained=0.25)
    info(run=tmp_path / "run", out=None, quiet=True)
    lines = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["moving statistics"].strip() == "12 in 2 tensors"
    assert lines["unexplained"].strip() == "up to 0.25 of a step"
    assert f"{sum(len(step.passes) for step in run.steps)} recorded, 0.0" in lines["forward passes"]
    record(tmp_path / "plain")
    info(run=tmp_path / "plain", out=None, quiet=True)
    assert not {"moving statistics", "unexplained", "forward passes"} & {
        line.split(":")[0] for line in capsys.readouterr().out.splitlines()
    }


def test_a_thinned_run_keeps_passes_and_statistics(tmp_path):
    run = write_by_hand(tmp_path / "run", num_steps=4)
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    thinned = _thinned(opened, 2)
    assert thinned.statistics is opened.statistics
    assert all(same_passes(a.passes, b.passes) for a, b in zip(thinned.steps, run.steps, strict=True))


def test_random_passes_have_every_part():
    """The negative control of the tests above: what they draw is not empty."""
    generator = torch.Generator().manual_seed(0)
    passes = [random_pass(generator, 5) for _ in range(40)]
    for field in fields(ForwardPass):
        assert len({getattr(forward, field.name) is None for forward in passes}) == 2 or field.name == "num_rows"
    assert isinstance(pack_step(Step(0, 0.1, None, None, tuple(passes))).passes, PackedPasses)
