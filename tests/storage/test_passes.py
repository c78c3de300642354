"""Forward passes and moving statistics on disk: what is written is what is read, when it is asked for."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file

import epk_gp as epk
from epk_gp.cli.runs import info
from epk_gp.core.model import functionalize
from epk_gp.core.step import ForwardPass, SeenRows, Step, fingerprint_step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.recording.history import RunHistory
from epk_gp.storage import export_run
from epk_gp.storage import passes as passes_module
from epk_gp.storage.passes import StoredPasses, _tensors_of, validate_pass
from epk_gp.storage.schema import read_header
from epk_gp.storage.verify import check_run
from loops import data
from stored_runs import add, begin, equal_values, finish, norm_net, random_pass, record, same_passes, write_by_hand

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


@pytest.mark.parametrize("statistics", [True, False], ids=["moving_statistics", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_passes_and_statistics_are_read_as_they_were_written(tmp_path, statistics, seed):
    options = {} if statistics else {"statistics": (), "net": norm_net()}
    run = write_by_hand(tmp_path / "run", seed, steps=2, unexplained=0.25, **options)
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


@settings(max_examples=20, deadline=None)
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


def test_tensors_of_another_kind_are_not_recorded():
    seen = SeenRows(torch.arange(3), torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="inputs must be of one of the dtypes float64, .*: got torch.complex64"):
        validate_pass(ForwardPass(3, inputs=seen))


def test_equal_passes_of_a_chunk_are_stored_once(tmp_path):
    run = begin(tmp_path / "run")
    modes = torch.arange(6) < 3
    for _ in range(50):
        add(run, (ForwardPass(4, modes.clone()), ForwardPass(6, modes.clone())))
    add(run, (ForwardPass(10, ~modes),))
    finish(run)
    tensors = load_file(tmp_path / "run" / "chunk-000001.safetensors")
    assert len(tensors["passes.at"].unique(dim=0)) == 2
    assert len(tensors["passes"]) < 300


def test_a_run_without_passes_has_few_tensors(tmp_path):
    record(tmp_path / "run")
    names = {"states", "sizes", "lengths", "batches", "weighted", "sample_weights", "update"}
    assert load_file(tmp_path / "run" / "chunk-000001.safetensors").keys() == names


def test_nothing_of_the_passes_is_read_before_they_are_indexed(tmp_path, monkeypatch):
    run = begin(tmp_path / "run", steps=5)
    for _ in range(20):
        add(run, (WHOLE, replace(WHOLE, num_rows=6)))
    finish(run)
    opened_files, real = [], passes_module.opened_chunk
    monkeypatch.setattr(passes_module, "opened_chunk", lambda *where: opened_files.append(where) or real(*where))
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert [len(step.passes) for step in opened.steps] == [2] * 20
    assert all(step.passes for step in opened.steps)
    assert opened_files == []
    assert same_passes([opened.steps[7].passes[1]], [replace(WHOLE, num_rows=6)])
    assert len(opened_files) == 1


def test_passes_are_a_sequence(tmp_path):
    run = begin(tmp_path / "run")
    add(run, (WHOLE, replace(WHOLE, num_rows=6)))
    finish(run)
    passes = epk.load_trajectory(tmp_path / "run", norm_net()).steps[0].passes
    assert [forward.num_rows for forward in passes] == [4, 6]
    assert [forward.num_rows for forward in reversed(passes)] == [6, 4]
    assert passes[-1].num_rows == 6
    for number in (2, -3):
        with pytest.raises(IndexError, match=rf"pass must lie in 0..1: got {number}"):
            passes[number]


def test_passes_of_an_open_run_tell_that_their_file_is_gone(tmp_path):
    write_by_hand(tmp_path / "run")
    step = next(step for step in epk.load_trajectory(tmp_path / "run", norm_net()).steps if step.passes)
    (tmp_path / "run" / "chunk-000001.safetensors").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="must have all its files"):
        step.passes[0]


def test_a_history_keeps_copies():
    history = RunHistory(torch.zeros(3), "digest")
    seen = SeenRows(torch.arange(10), torch.randn(10, 4))
    update = stack_coefficients([LinearStep(lr=0.1)], [3])
    for index in range(3):
        history.append(Step(index, 0.1, None, None, (ForwardPass(10, inputs=seen),)), torch.zeros(3), update)
    before = seen.values.clone()
    seen.values.zero_()
    for steps in (history.steps, copy.deepcopy(history.steps)):
        assert all(torch.equal(step.passes[0].inputs.values, before) for step in steps)


def test_a_pickled_run_holds_no_more_than_its_passes():
    """Views of the arena's blocks would pickle 4 MiB for each step."""
    net, (X, y) = norm_net().train(), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, X, y, optimizer=optimizer, steps=3)
    assert all(isinstance(step.passes, tuple) and step.passes for step in run.steps)
    assert len(pickle.dumps(run)) < 100_000
    assert same_passes(pickle.loads(pickle.dumps(run)).steps[1].passes, run.steps[1].passes)


def test_memory_of_passes_is_bounded_by_the_bytes_of_a_chunk(tmp_path):
    """They count as the weights do, and leave memory when they are on disk."""
    run = begin(tmp_path / "run", chunk_bytes=40_000)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        seen = SeenRows(
            torch.arange(10), torch.randn(10, 100, generator=generator, dtype=torch.float64)
        )  # 8000 bytes of noise
        add(run, (ForwardPass(10, inputs=seen),), generator=generator)
    in_memory = [not isinstance(step.passes, StoredPasses) for step in run.history.steps]
    assert run.commits.num_committed == in_memory.index(True) == 10
    finish(run)
    assert all(isinstance(step.passes, StoredPasses) for step in run.history.steps)
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

    def digest(*passes, statistics=None):
        return fingerprint_step("before", Step(0, 0.1, torch.arange(4), None, passes), update, end, statistics)

    other = replace(WHOLE, **{name: CHANGED[name]})
    moving = torch.arange(2.0)
    digests = [digest(), digest(WHOLE), digest(other), digest(WHOLE, WHOLE), digest(WHOLE, statistics=moving)]
    assert len({*digests, digest(WHOLE, statistics=moving + 1)}) == 6


REFUSED = {
    "rows": ({"num_rows": 0}, "must have at least one row: got 0"),
    "index": ({"inputs": SeenRows(torch.tensor([4]), torch.zeros(1, 4))}, r"different rows of the pass, 0..3: got"),
    "twice": ({"targets": SeenRows(torch.tensor([1, 1]), torch.zeros(2))}, "targets must be different rows"),
    "nan": ({"inputs": SeenRows(torch.tensor([1]), torch.full((1, 4), torch.nan))}, "inputs must hold finite numbers"),
    "statistics": ({"statistics": torch.full((12,), torch.inf)}, "statistics must hold finite numbers"),
    "half": ({"statistics": torch.zeros(12).half()}, "statistics must be a vector of torch.float64: got"),
    "random": ({"random_state": torch.zeros(0, dtype=torch.uint8)}, "random_state must have 1 to 65536 entries: got 0"),
    "state": ({"random_state": STATE[1:].clone()}, "random_state must be one of torch's random numbers"),
    "autocast": ({"autocast": torch.int8}, "autocast must be a floating-point dtype: got torch.int8"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_pass_that_could_not_be_read_is_not_recorded(change, message):
    with pytest.raises(ValueError, match=message):
        validate_pass(replace(WHOLE, **change))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (replace(WHOLE, num_rows=9), "with as many rows as their batches have"),
        (replace(WHOLE, num_rows=10, modes=torch.ones(5) > 0), "modes must have 6 to 6 entries: got 5"),
        (ForwardPass(10, statistics=torch.ones(3)), "statistics must have 12 to 12 entries: got 3"),
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
    passes = [forward for step in run.steps for forward in step.passes]
    for (start, length), forward in zip(tensors["passes.at"].tolist(), passes, strict=True):
        held = load(bytes(tensors["passes"][start : start + length].tolist()))
        held.pop("autocast", None)
        expected = _tensors_of(forward)
        assert held.keys() == expected.keys()
        assert all(equal_values(held[name], value) for name, value in expected.items())
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


def test_random_passes_have_every_part():
    """The negative control of the tests above: what they draw is not empty."""
    generator = torch.Generator().manual_seed(0)
    passes = [random_pass(generator, 5) for _ in range(40)]
    for field in fields(ForwardPass):
        assert len({getattr(forward, field.name) is None for forward in passes}) == 2 or field.name == "num_rows"


def test_a_run_holds_its_names_and_shapes_of_statistics(tmp_path):
    """The negative control of what is left out: a network with statistics has them in header and digest."""
    finish(begin(tmp_path / "run"))
    header = read_header(tmp_path / "run")
    assert header["statistics"] == ["1.running_mean", "1.running_var"]
    assert header["statistic_shapes"] == [[6], [6]]
    assert header["modules"] == ["", "0", "1", "2", "3", "4"]
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert opened.model.num_statistics == len(opened.statistics[0]) == 12
    assert functionalize(norm_net().eval()).num_statistics == 0
    assert epk.network_outputs(opened, data()[0]).shape == (10, 3)
