"""Runs exported to one safetensors file: exact, and no larger than the run."""

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
from epk_gp.storage import export_run
from loops import data, mlp, sgd


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def adagrad(net):
    return torch.optim.Adagrad(net.parameters(), lr=0.01, weight_decay=0.1)


CASES = {
    "sgd": (sgd, {}),
    "adam": (adam, {}),
    "adagrad": (adagrad, {}),
    "momentum": (lambda net: sgd(net, momentum=0.9, nesterov=True, weight_decay=0.1), {}),
    "clipped": (sgd, {"clip": ClipValue(0.02)}),
}
DTYPES = [torch.float32, torch.float64]


def exported(tmp_path, optimizer, dtype, **options):
    net, (X, y) = mlp(dtype), data(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    storage = options.pop("storage", epk.Storage(steps=2))
    trajectory = epk.train(
        net, X, y, optimizer=optimizer(net), steps=5, batch_size=4, generator=generator,
        folder=tmp_path / "run", storage=storage, **options,
    )  # fmt: skip
    size = export_run(tmp_path / "run", tmp_path / "run.safetensors")
    assert size == (tmp_path / "run.safetensors").stat().st_size
    return trajectory, load_file(tmp_path / "run.safetensors")


def coefficient(tensors, field, step, sizes):
    """Read a coefficient of a step as one number per weight, as docs/format.md says."""
    if f"update.{field}" in tensors:
        return tensors[f"update.{field}"][step].double()
    return tensors["update"][step, FIELDS.index(field)].repeat_interleave(torch.tensor(sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize(("optimizer", "options"), CASES.values(), ids=CASES.keys())
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


def test_an_export_is_the_same_file_each_time(run, tmp_path):
    contents = set()
    for number in range(8):
        export_run(run, tmp_path / str(number))
        contents.add((tmp_path / str(number)).read_bytes())
    assert len(contents) == 1


def test_an_export_does_not_replace_a_file(run, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="file must be a new file: .*mine exists. Choose another name"):
        export_run(run, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_export_into_a_folder_that_does_not_exist_is_explained(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="must be written to .*: No such file or directory; no part of it is"):
        export_run(run, tmp_path / "nowhere" / "run.safetensors")


def test_an_export_to_a_full_disk_leaves_nothing_and_says_so(run, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="must be written to .*: No space left on device; no part of it is left") as error:
        export_run(run, tmp_path / "run.safetensors")
    assert error.value.errno == errno.ENOSPC
    assert not (tmp_path / "run.safetensors").exists()
