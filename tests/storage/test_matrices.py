"""Matrices of matrix preconditioners (Muon) on disk."""

import pytest
import torch
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.storage import export_run
from epk_gp.storage.schema import read_header
from epk_gp.storage.verify import check_run
from epk_gp.storage.writer import open_for_writing
from loops import mlp
from stored_runs import refused, replace_chunk, resumed

CHUNK, SIZES = "chunk-000001.safetensors", (24, 6, 18, 3)  # parameters of shapes (6, 4), (6,), (3, 6), (3,)


def coefficients(number):
    """The weight of the first layer has a matrix on either side in turn, that of the last in all steps but one."""
    generator = torch.Generator().manual_seed(number)
    first = {"left": torch.randn(6, 6, generator=generator).double()}
    if number % 2:
        first = {"right": torch.randn(4, 4, generator=generator).double()}
    last = {} if number == 3 else {"left": torch.randn(3, 3, generator=generator)}
    rules = [LinearStep(lr=0.1, **first), LinearStep(lr=0.1), LinearStep(lr=0.2, **last), LinearStep(lr=0.1)]
    return stack_coefficients(rules, SIZES)


@pytest.fixture
def written(tmp_path):
    """Six steps in chunks of two."""
    path = tmp_path / "run"
    resumed(path)._commits.writer.close()
    writer = open_for_writing(path, read_header(path))
    for first in range(0, 6, 2):
        steps = [Step(number, 0.1, None) for number in (first, first + 1)]
        updates = [coefficients(number) for number in (first, first + 1)]
        states = [torch.randn(51).double() for _ in steps]
        writer.append(states, steps, updates, "digest", {"state": torch.zeros(1)})
    writer.close()
    return path


def test_matrices_are_read_as_they_were_written(written):
    opened = epk.load_trajectory(written, mlp())
    for number in torch.randperm(6).tolist():
        read, expected = opened.updates[number], coefficients(number)
        assert all(torch.equal(a, b) for a, b in zip(read.tensors(), expected.tensors(), strict=True))
        assert read.left.keys() == expected.left.keys()
        assert read.right.keys() == expected.right.keys()
    assert check_run(written).num_steps == 6


def test_an_export_holds_matrices(written, tmp_path):
    size = export_run(written, tmp_path / "file")
    assert size == (tmp_path / "file").stat().st_size
    tensors = load_file(tmp_path / "file")
    assert tensors["update.left.0.steps"].tolist() == [0, 2, 4]
    assert tensors["update.right.0.steps"].tolist() == [1, 3, 5]
    assert tensors["update.left.2.steps"].tolist() == [0, 1, 2, 4, 5]
    for name, side, k in (("update.left.0", "left", 0), ("update.right.0", "right", 0), ("update.left.2", "left", 2)):
        for row, number in enumerate(tensors[f"{name}.steps"].tolist()):
            assert torch.equal(tensors[name][row], getattr(coefficients(number), side)[k])


def entry(name, position, value):
    def change(tensors):
        tensor = tensors[name].clone()
        tensor.view(-1)[position] = value
        return tensors | {name: tensor}

    return change


CHANGES = {
    "nan": (entry("update.left.0", 3, float("nan")), "'update.left.0' holds NaN or infinity"),
    "steps_beyond": (entry("update.left.2.steps", 1, 2), "'update.left.2.steps' in the order of its 2 steps"),
    "steps_twice": (entry("update.left.2.steps", 1, 0), "'update.left.2.steps' in the order of its 2 steps"),
    "no_steps": (lambda t: {k: v for k, v in t.items() if k != "update.left.0.steps"}, "'update.left.0.steps' is not"),
    "no_matrix": (lambda t: {k: v for k, v in t.items() if k != "update.left.0"}, "'update.left.0' is not in both"),
    "not_square": (lambda t: t | {"update.left.0": t["update.left.0"][:, :3].clone()}, "'update.left.0' of shape"),
    "no_divisor": (lambda t: t | {"update.left.0": torch.ones(1, 5, 5).double()}, "'update.left.0' of shape"),
    "more": (lambda t: t | {"update.left.0": torch.ones(2, 6, 6).double()}, r"'update.left.0.steps' of shape \(2,\)"),
    "half": (lambda t: t | {"update.left.0": t["update.left.0"].half()}, "'update.left.0' of type F64"),
    "of_none": (lambda t: t | {"update.left.4": torch.ones(1, 1, 1).double()}, "'update.left.4' is not in both"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_matrices_that_are_none_are_refused_with_their_states(written, change, message):
    replace_chunk(written, save(change(load_file(written / CHUNK))))
    refused(written, ValueError, rf"{CHUNK} \(states 1..2\) .*{message}")
