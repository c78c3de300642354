"""Matrices of matrix preconditioners (Muon) on disk."""

import pytest
import torch
from safetensors.torch import load, load_file, save

import epk_gp as epk
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.storage import export_run
from epk_gp.storage.files import pack
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
    for number, (start, length) in enumerate(tensors["matrices.at"].tolist()):
        read, expected = load(bytes(tensors["matrices"][start : start + length].tolist())), coefficients(number)
        matrices = {f"{side}.{k}": Q for side in ("left", "right") for k, Q in getattr(expected, side).items()}
        assert read.keys() == matrices.keys()
        assert all(torch.equal(read[name], Q) for name, Q in matrices.items())


def packed(**matrices):
    return lambda tensors: tensors | pack("matrices", [matrices, {}])


def places(position, value):
    def change(tensors):
        at = tensors["matrices.at"].clone()
        at.view(-1)[position] = value
        return tensors | {"matrices.at": at}

    return change


CHANGES = {
    "nan": packed(**{"left.0": torch.full((6, 6), torch.nan)}),
    "not_square": packed(**{"left.0": torch.ones(6, 3)}),
    "no_divisor": packed(**{"left.0": torch.ones(5, 5)}),
    "whole_numbers": packed(**{"left.0": torch.ones(6, 6).long()}),
    "of_no_parameter": packed(**{"left.4": torch.ones(1, 1)}),
    "no_side": packed(**{"middle.0": torch.ones(1, 1)}),
    "no_places": lambda t: {k: v for k, v in t.items() if k != "matrices.at"},
    "fewer_places": lambda t: t | {"matrices.at": t["matrices.at"][:1].clone()},
    "start_beyond": places(0, 1 << 40),
    "start_negative": places(0, -1),
    "length_huge": places(1, (1 << 63) - 1),
    "no_file": places(1, 7),
    "another_file": lambda t: t | {"matrices": t["matrices"] ^ 255},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_matrices_that_are_none_are_refused_with_their_states(written, change):
    replace_chunk(written, save(change(load_file(written / CHUNK))))
    refused(written, ValueError, rf"{CHUNK} \(states 1..2\) must ")
