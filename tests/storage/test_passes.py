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
import stored_runs
from epk_gp.core.step import ForwardPass, SeenRows, Step, fingerprint_step
from epk_gp.optimizers.update_rules import LinearStep, broadcast_to_params, stack_coefficients
from epk_gp.recording.history import RunHistory
from epk_gp.storage import chunks as passes_module
from epk_gp.storage.chunks import StoredPasses
from epk_gp.storage.run import check_run
from loops import data
from stored_runs import CHUNK, add, begin, equal_values, finish, norm_net, random_pass, same_passes, write_by_hand

WHOLE = stored_runs.WHOLE
UPDATE = stack_coefficients([LinearStep(lr=0.1)], [3])


@pytest.mark.parametrize("statistics", [True, False], ids=["moving_statistics", "none"])
def test_passes_and_statistics_are_read_as_they_were_written(tmp_path, statistics):
    options = {"steps": 2} if statistics else {"steps": 4, "statistics": (), "net": norm_net().float()}
    run = write_by_hand(tmp_path / "run", unexplained=0.25, **options)
    opened, like = epk.load_trajectory(tmp_path / "run", norm_net()), run.states[0][:0]
    assert opened.digest == run.history.digest(len(run.steps))
    assert opened.unexplained == 0.25
    assert opened.dtype == run.states[0].dtype
    assert [step.index for step in opened.steps] == list(range(6))
    for number in torch.randperm(6).tolist():
        read, written = opened.steps[number], run.steps[number]
        assert read.lr == written.lr
        assert equal_values(read.batch, written.batch)
        assert equal_values(read.sample_weights, written.sample_weights)
        for pair in zip(opened.updates[number], run.updates[number], strict=True):
            assert torch.equal(*(broadcast_to_params(value, opened.model.sizes, like) for value in pair))
        assert same_passes(opened.steps[number].passes, run.steps[number].passes)
        assert same_passes(run.history.steps[number].passes, run.steps[number].passes)
    for number in torch.randperm(7).tolist():
        assert torch.equal(opened.states[number], run.states[number])
        assert not statistics or torch.equal(opened.statistics[number], run.statistics[number])
    assert (opened.statistics is None) == (not statistics)
    passes = [forward for step in run.steps for forward in step.passes]
    assert sum(len(step.passes) for step in check_run(tmp_path / "run").steps) == len(passes)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_rows=st.integers(1, 30), num_passes=st.integers(1, 4))
def test_passes_of_any_dtypes_are_read_as_they_were_written(tmp_path_factory, seed, num_rows, num_passes):
    """Rows of one part may have several dtypes in a chunk."""
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    passes = tuple(random_pass(generator, num_rows, kinds=kinds) for _ in range(num_passes))
    path = tmp_path_factory.mktemp("passes") / "run"
    run = begin(path)
    batch = torch.zeros(num_rows * num_passes, dtype=torch.int64)
    for own in (passes, (), passes):
        add(run, own, batch)
    in_memory = list(run.history.steps)
    finish(run)
    opened = epk.load_trajectory(path, norm_net())
    for steps in (in_memory, run.history.steps, opened.steps, pickle.loads(pickle.dumps(opened)).steps):
        assert steps[1].passes == ()
        assert same_passes(steps[0].passes, passes)
        assert same_passes(steps[2].passes, passes)


def test_random_passes_have_every_part():
    """The negative control of the tests above: what they draw is not empty."""
    generator = torch.Generator().manual_seed(0)
    passes = [random_pass(generator, 5) for _ in range(40)]
    for field in fields(ForwardPass):
        assert len({getattr(forward, field.name) is None for forward in passes}) == 2 or field.name == "num_rows"


def test_equal_passes_of_a_chunk_are_stored_once_and_none_take_no_tensor(tmp_path):
    run, modes = begin(tmp_path / "run"), torch.arange(6) < 3
    for _ in range(50):
        add(run, (ForwardPass(4, modes.clone()), ForwardPass(6, modes.clone())))
    add(run, (ForwardPass(10, ~modes),))
    finish(run)
    tensors = load_file(tmp_path / "run" / CHUNK)
    assert len(tensors["passes.at"].unique(dim=0)) == 2
    assert len(tensors["passes"]) < 300
    stored_runs.record(tmp_path / "plain")
    names = {"states", "sizes", "lengths", "batches", "weighted", "sample_weights", "update", "digests"}
    assert load_file(tmp_path / "plain" / CHUNK).keys() == names


def test_passes_are_a_sequence_of_which_nothing_is_read_before_it_is_indexed(tmp_path, monkeypatch):
    run = begin(tmp_path / "run", steps=5)
    for _ in range(20):
        add(run, (WHOLE, replace(WHOLE, num_rows=8)))
    finish(run)
    read, real = [], passes_module.unpack
    monkeypatch.setattr(passes_module, "unpack", lambda *where: read.append(where) or real(*where))
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert [len(step.passes) for step in opened.steps] == [2] * 20
    assert read == []
    passes = opened.steps[7].passes
    assert same_passes([passes[1], passes[-1]], [replace(WHOLE, num_rows=8)] * 2)
    assert len(read) == 2
    assert [forward.num_rows for forward in reversed(passes)] == [8, 2]
    for number in (2, -3):
        with pytest.raises(IndexError, match=rf"pass must lie in 0..1: got {number}"):
            passes[number]
    opened_chunk = tmp_path / "run" / passes._chunk.file
    opened_chunk.unlink()
    with pytest.raises(FileNotFoundError, match="must have all its files"):
        passes[0]


def test_a_history_keeps_copies():
    history, seen = RunHistory(torch.zeros(3), "digest"), SeenRows(torch.arange(10), torch.randn(10, 4))
    for index in range(3):
        history.append(Step(index, 0.1, None, None, (ForwardPass(10, inputs=seen),)), torch.zeros(3), UPDATE)
    before = seen.values.clone()
    seen.values.zero_()
    for steps in (history.steps, copy.deepcopy(history.steps)):
        assert all(torch.equal(step.passes[0].inputs.values, before) for step in steps)


def test_a_pickled_run_holds_no_more_than_its_passes():
    """Views of the arena's blocks would pickle 4 MiB for each step."""
    net, (X, y) = norm_net().train(), data()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=3)
    assert all(isinstance(step.passes, tuple) and step.passes for step in run.steps)
    assert len(pickle.dumps(run)) < 100_000
    assert same_passes(pickle.loads(pickle.dumps(run)).steps[1].passes, run.steps[1].passes)


def test_memory_of_passes_is_bounded_by_the_bytes_of_a_chunk(tmp_path):
    """They count as the weights do, and leave memory when they are on disk."""
    run, generator = begin(tmp_path / "run", chunk_bytes=40_000), torch.Generator().manual_seed(0)
    for _ in range(12):
        noise = torch.randn(10, 100, generator=generator, dtype=torch.float64)  # 8000 bytes
        add(run, (ForwardPass(10, inputs=SeenRows(torch.arange(10), noise)),), generator=generator)
    in_memory = [not isinstance(step.passes, StoredPasses) for step in run.history.steps]
    assert run.commits.num_committed == in_memory.index(True) == 10
    finish(run)
    assert all(isinstance(step.passes, StoredPasses) for step in run.history.steps)
    assert all(same_passes(a.passes, b.passes) for a, b in zip(run.history.steps, run.steps, strict=True))


CHANGED = {
    "num_rows": 5,
    "modes": ~WHOLE.modes,
    "inputs": SeenRows(WHOLE.inputs.index, WHOLE.inputs.values + 1e-15),
    "targets": SeenRows(torch.tensor([1]), WHOLE.targets.values),
    "random_state": torch.Generator().manual_seed(4).get_state(),
    "device_random_state": WHOLE.device_random_state + 1,
    "statistics": WHOLE.statistics + 1e-9,
    "statistics_after": None,
    "memory_order": None,
    "autocast": torch.float16,
    "cotangents": SeenRows(torch.tensor([2]), torch.ones(1, 3, dtype=torch.float64)),
    "weights": torch.arange(3.0),
    "settings": torch.arange(2.0).double(),
}


def test_the_digest_covers_every_part_of_a_pass():
    def digest(*passes, statistics=None):
        step = Step(0, 0.1, torch.arange(4), None, passes)
        return fingerprint_step("before", step, UPDATE, torch.zeros(3), statistics)

    assert CHANGED.keys() == {field.name for field in fields(ForwardPass)}
    moving = torch.arange(2.0)
    digests = [digest(), digest(WHOLE), digest(WHOLE, WHOLE), digest(WHOLE, statistics=moving)]
    digests += [digest(WHOLE, statistics=moving + 1)]
    digests += [digest(replace(WHOLE, **{name: value})) for name, value in CHANGED.items()]
    assert len(set(digests)) == 5 + len(CHANGED)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (replace(WHOLE, num_rows=9), "with as many rows as their batches have"),
        (replace(WHOLE, num_rows=0), "must have at least one row: got 0"),
        (ForwardPass(10, inputs=SeenRows(torch.arange(3), torch.zeros(3).to(torch.complex64))), "of the dtypes floa"),
    ],
    ids=["rows", "no_rows", "complex"],
)  # fmt: skip
def test_a_pass_that_could_not_be_read_is_not_committed(tmp_path, forward, message):
    run = begin(tmp_path / "run", steps=1)
    with pytest.raises((ValueError, TypeError), match=message):
        add(run, (forward,))
    assert run.commits.num_committed == 0
    assert epk.load_trajectory(tmp_path / "run", norm_net()).num_steps == 0
