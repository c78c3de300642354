"""Runs and results in one safetensors file: exact, and no larger than what they hold."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import epk_gp as epk
from epk_gp.optimizers.update_rules import FIELDS, ClipValue, LinearStep, UpdateRule, broadcast_to_params
from epk_gp.provenance import write_arrays
from epk_gp.storage import files
from epk_gp.storage.verify import export_run
from loops import data, mlp, sgd
from stored_runs import adam

CASES = {
    "sgd": (sgd, {}, torch.float64),
    "adam": (adam, {}, torch.float32),
    "adagrad": (lambda net: torch.optim.Adagrad(net.parameters(), lr=0.01, weight_decay=0.1), {}, torch.float64),
    "momentum": (lambda net: sgd(net, momentum=0.9, nesterov=True, weight_decay=0.1), {}, torch.float32),
    "clipped": (sgd, {"clip": ClipValue(0.02)}, torch.float64),
}


def exported(tmp_path, optimizer, dtype, **options):
    net, (X, y) = mlp(dtype), data(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    options = {"storage": epk.Storage(steps=2), "folder": tmp_path / "run", "generator": generator} | options
    trajectory = epk.train(net, X, y, optimizer=optimizer(net), steps=5, batch_size=4, **options)
    size = export_run(tmp_path / "run", tmp_path / "run.safetensors")
    assert size == (tmp_path / "run.safetensors").stat().st_size
    return trajectory, load_file(tmp_path / "run.safetensors")


def coefficient(tensors, field, step, sizes):
    """Read a coefficient of a step as one number per weight, as docs/format.md says."""
    if f"update.{field}" in tensors:
        return tensors[f"update.{field}"][step].double()
    return tensors["update"][step, FIELDS.index(field)].repeat_interleave(torch.tensor(sizes))


@pytest.mark.parametrize(("optimizer", "options", "dtype"), CASES.values(), ids=CASES)
def test_an_export_holds_the_run_bit_for_bit(tmp_path, optimizer, options, dtype):
    trajectory, tensors = exported(tmp_path, optimizer, dtype, **options)
    assert torch.equal(tensors["states"], torch.stack(list(trajectory.states)))
    assert torch.equal(tensors["batches"], torch.cat([step.batch for step in trajectory.steps]))
    sizes = trajectory.model.sizes
    for step in range(trajectory.num_steps):
        for name in FIELDS:
            value = getattr(trajectory.updates[step], name)
            expected = broadcast_to_params(value, sizes, torch.zeros(0, dtype=torch.float64))
            assert torch.equal(coefficient(tensors, name, step, sizes), expected), name
    with safe_open(tmp_path / "run.safetensors", framework="pt") as file:
        assert file.metadata()["digest"] == trajectory.digest
        assert json.loads(file.metadata()["update_fields"]) == list(FIELDS)


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
def test_an_export_is_not_larger_than_its_run(tmp_path, optimizer):
    """It was seven times as large: each coefficient was written once per weight."""
    net, (X, y) = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3)).double(), data()
    epk.train(net, X, y, optimizer=optimizer(net), steps=10, folder=tmp_path / "run")
    size = export_run(tmp_path / "run", tmp_path / "run.safetensors")
    assert size < sum(file.stat().st_size for file in (tmp_path / "run").iterdir())


def test_coefficients_per_weight_in_some_steps_only_are_exact_in_all(tmp_path):
    """In float32: 0.1 as a number per parameter is float64, and as one per weight float32. One tensor holds both."""

    def coefficients(p, group, before, after):
        count = len(taken) // 4
        taken.append(p)
        return LinearStep(lr=torch.full_like(p, 0.1) if count % 2 else 0.1, beta=1.0)

    taken = []
    rule = UpdateRule("SGD in two forms", coefficients)
    trajectory, tensors = exported(tmp_path, sgd, torch.float32, update_rule=rule, storage=epk.Storage(steps=1))
    assert [len(trajectory.updates[step].lr) for step in range(5)] == [4, 51, 4, 51, 4]
    assert tensors["update.lr"].dtype == torch.float64
    assert tensors["update.lr"][:, 0].tolist() == [0.1, float(torch.tensor(0.1)), 0.1, float(torch.tensor(0.1)), 0.1]


def test_an_export_is_the_same_file_each_time_and_replaces_none(run, tmp_path):
    contents = set()
    for number in range(8):
        export_run(run, tmp_path / str(number))
        contents.add((tmp_path / str(number)).read_bytes())
    assert len(contents) == 1
    with pytest.raises(FileExistsError, match="file must be a new file: .*0 exists. Choose another name"):
        export_run(run, tmp_path / "0")
    assert (tmp_path / "0").read_bytes() in contents


def test_an_export_that_cannot_be_written_leaves_nothing_and_says_so(run, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="must be written to .*: No such file or directory; no part of it is"):
        export_run(run, tmp_path / "nowhere" / "run.safetensors")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="must be written to .*: No space left on device; no part of it is left") as error:
        export_run(run, tmp_path / "run.safetensors")
    assert error.value.errno == errno.ENOSPC
    assert not (tmp_path / "run.safetensors").exists()


# --- Files of results -----------------------------------------------------------------------------------------------

ARRAYS = {
    "is_train": torch.tensor([True, False, True]),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).T,
    "kernel": torch.arange(24, dtype=torch.float64).view(1, 2, 3, 4).permute(1, 0, 3, 2),
    "nothing": torch.empty(0, 5),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def test_arrays_are_read_as_they_were_written_in_any_order(tmp_path):
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_arrays(file, ARRAYS, {"head": "logits", "axes": "N C M C"})
    write_arrays(other, dict(reversed(ARRAYS.items())), {"axes": "N C M C", "head": "logits"})
    assert file.read_bytes() == other.read_bytes()
    found = load_file(file)
    assert found.keys() == ARRAYS.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in ARRAYS.items())
    with safe_open(file, framework="pt") as stored:
        assert stored.metadata() == {"axes": "N C M C", "head": "logits"}


def test_no_copy_is_made_of_a_large_array(tmp_path, monkeypatch):
    written, real, large = [], files.tensor_bytes, torch.ones(1000)
    monkeypatch.setattr(files, "tensor_bytes", lambda value: written.append(real(value)) or written[-1])
    write_arrays(tmp_path / "a.safetensors", {"large": large}, {})
    large[0] = 7.0  # what was written shares its memory
    assert torch.frombuffer(written[0], dtype=torch.float32)[0] == 7.0
