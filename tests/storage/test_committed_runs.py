"""Runs that releases recorded: this one reads them, computes their numbers, and records on (docs/promises.md)."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import epk_gp as epk
from epk_gp.storage.run import check_run
from page_code import load

HERE = Path(__file__).parents[1] / "data" / "format1"
make = load(HERE / "make.py")
RUNS = sorted(header.parent for header in HERE.glob("*/*/run.json"))
NAMES = [f"{run.parent.name}-{run.name}" for run in RUNS]
# Other kernels of another processor or torch round otherwise: some last places of the sums, and what one last place of
# the weights makes of each number, which the release measured (conditioning).
SUMS, PLACES = 1024, 16


def recorded(run):
    return json.loads(run.with_suffix(".json").read_bytes())


def opened(run):
    return epk.load_trajectory(run, make.NETWORKS[run.name](), output=make.OUTPUTS.get(run.name))


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_a_run_of_a_release_is_whole_and_gives_the_numbers_that_it_gave_then(run):
    assert check_run(run).chunks[-1].digest == recorded(run)["digest"]
    trajectory, noted = opened(run), recorded(run)
    assert (trajectory.digest, trajectory.data_digest) == (noted["digest"], noted["data_digest"])
    expected = load_file(run.with_suffix(".safetensors"))
    found = make.numbers(trajectory, expected.pop("questions"))
    assert expected.keys() == found.keys()
    assert expected.pop("certified").item()
    assert found.pop("certified").item()
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        error = (found[name].double() - value.double()).abs().max()
        tolerance = SUMS * torch.finfo(value.dtype).eps + PLACES * noted["conditioning"][name]
        assert error <= tolerance * value.double().abs().max(), f"{name}: {error:.2e}"


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_a_run_of_a_release_is_resumed(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    data = opened(run)
    trajectory = make.record(run.name, tmp_path / "run", data.inputs, data.targets, steps=9)
    assert (trajectory.num_steps, trajectory.until(7).digest) == (9, recorded(run)["digest"])
    assert check_run(tmp_path / "run").chunks[-1].digest == trajectory.digest


def test_every_kind_of_run_was_recorded():
    assert {run.name for run in RUNS} == make.NETWORKS.keys()
