"""Runs of format version 2, which had neither forward passes nor moving statistics."""

import pytest
import torch
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.core.model import functionalize
from epk_gp.core.step import ForwardPass, Step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.storage.atomic_files import checksummed_json, read_checksummed_json
from epk_gp.storage.check import check_run
from epk_gp.storage.compatibility import validate_same_header
from epk_gp.storage.schema import HEADER_DEFAULTS, read_header
from epk_gp.storage.writer import open_for_writing
from loops import data, file_hashes, mlp
from stored_runs import HEADER, as_version_2, begin, finish, norm_net, record, refused, replace_chunk, resumed, step


@pytest.fixture
def old(run):
    as_version_2(run)
    return run


def test_a_run_of_version_2_opens_as_the_run_it_was(old):
    before, whole = file_hashes(old), record(None)
    opened = epk.load_trajectory(old, mlp())
    assert opened.digest == whole.digest
    assert all(torch.equal(opened.states[s], whole.states[s]) for s in range(7))
    assert opened.statistics is None
    assert opened.unexplained is None
    assert all(step.passes == () for step in opened.steps)
    assert check_run(old).num_steps == 6
    assert file_hashes(old) == before


def test_a_run_of_version_2_is_resumed_and_stays_of_version_2(old):
    recorder = resumed(old)
    with recorder:
        step(recorder)
    assert epk.load_trajectory(old, mlp()).num_steps == 7
    assert read_header(old)["version"] == 2


def test_a_run_of_version_2_takes_no_steps_that_it_cannot_hold(old):
    before = file_hashes(old)
    writer = open_for_writing(old, read_header(old))
    end, sizes = torch.zeros(51).double(), (24, 6, 18, 3)
    update = stack_coefficients([LinearStep(lr=0.1)] * 4, sizes)
    made = Step(6, 0.1, None, None, (ForwardPass(10, autocast=torch.bfloat16),))
    with pytest.raises(ValueError, match="of format version 2 must have steps that .* Record to another folder"):
        writer.append([end], [made], [update], "digest", {})
    writer.close()
    assert file_hashes(old) == before


def test_a_run_of_version_2_takes_no_moving_statistics(tmp_path):
    run = begin(tmp_path / "run")
    finish(run)
    header = read_header(tmp_path / "run")
    with pytest.raises(ValueError, match="must have the recorded moving statistics to resume the run at .*: it has 0"):
        validate_same_header(header | HEADER_DEFAULTS, header, tmp_path / "run")


def test_tensors_of_version_3_in_a_run_of_version_2_are_refused(old):
    chunk = load_file(old / "chunk-000001.safetensors")
    (old / "finished.json").unlink()
    replace_chunk(old, save(chunk | {"passes.counts": torch.zeros(2, dtype=torch.int64)}))
    refused(old, ValueError, r"chunk-000001.safetensors \(states 1..2\) must hold .*'passes.counts' is not in both")


def test_entries_of_version_3_in_a_header_of_version_2_say_nothing(old):
    header = read_checksummed_json((old / HEADER).read_bytes(), "")
    (old / HEADER).write_bytes(checksummed_json(header | {"unexplained": "all", "statistics": 3}))
    assert epk.load_trajectory(old, mlp()).unexplained is None


def test_a_run_holds_its_names_and_shapes_of_statistics(tmp_path):
    """The negative control of what is left out: a network with statistics has them in header and digest."""
    finish(begin(tmp_path / "run"))
    header = read_header(tmp_path / "run")
    assert header["version"] == 3
    assert header["statistics"] == ["1.running_mean", "1.running_var"]
    assert header["statistic_shapes"] == [[6], [6]]
    assert header["modules"] == ["", "0", "1", "2", "3", "4"]
    opened = epk.load_trajectory(tmp_path / "run", norm_net())
    assert opened.model.num_statistics == len(opened.statistics[0]) == 12
    assert functionalize(norm_net().eval()).num_statistics == 0
    assert epk.network_outputs(opened, data()[0]).shape == (10, 3)
