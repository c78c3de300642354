"""Chunks whose forward passes, moving statistics or matrices are not those of a run: refused by one message."""

import math

import pytest
import torch
from safetensors.torch import load

import epk_gp as epk
import stored_runs
from epk_gp.core.step import ForwardPass, Step
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.storage.files import SAFETENSORS_DTYPES, pack
from epk_gp.storage.schema import read_header
from epk_gp.storage.writer import open_for_writing
from loops import mlp
from stored_runs import CHUNK, add, begin, changed, entry, finish, norm_net, opened, refused, with_tensor, without

WHOLE = stored_runs.WHOLE
STATE = WHOLE.random_state
HOLDS = rf"{CHUNK} \(states 1..2\)"


@pytest.fixture
def run(tmp_path):
    """One chunk of two steps: two passes on four points with every part, and none on all points."""
    made = begin(tmp_path / "run")
    add(made, (WHOLE, ForwardPass(2, WHOLE.modes)), torch.tensor([3, 5, 3, 1]))
    add(made, ())
    finish(made)
    return tmp_path / "run"


def first_pass(**parts):
    """Other tensors of the first pass; None leaves one out."""

    def change(tensors):
        rows = [load(bytes(tensors["passes"][a : a + n].tolist())) for a, n in tensors["passes.at"].tolist()]
        rows[0] = {name: value for name, value in (rows[0] | parts).items() if value is not None}
        return tensors | pack("passes", rows)

    return change


DTYPES, NAN = list(SAFETENSORS_DTYPES), torch.full((2, 4), math.nan).double()
OF_STEPS, OUTSIDE = "the forward passes of its steps", "a row lies outside"
CHANGES = {
    "missing": (without("passes.rows"), "'passes.rows' is not in both"),
    "more": (lambda t: t | {"passes.evil": torch.zeros(1)}, "'passes.evil' is not in both"),
    "counts_floats": (with_tensor("passes.counts", torch.Tensor.double), "'passes.counts' of shape"),
    "counts_fewer": (with_tensor("passes.counts", lambda counts: counts[1:]), "the forward passes of its"),
    "count_negative": (entry("passes.counts", 0, -1), OF_STEPS),
    "count_huge": (entry("passes.counts", 0, 1 << 62), OF_STEPS),
    "count_moved": (with_tensor("passes.counts", lambda counts: counts.flip(0)), OF_STEPS),
    "rows_none": (entry("passes.rows", 0, 0), OF_STEPS),
    "rows_huge": (entry("passes.rows", 0, 1 << 62), OF_STEPS),
    "rows_others": (entry("passes.rows", 0, 3), OF_STEPS),
    "first_beyond": (entry("passes.at", 0, 1 << 40), OUTSIDE),
    "first_negative": (entry("passes.at", 0, -1), OUTSIDE),
    "first_huge": (entry("passes.at", 0, (1 << 63) - 1), OUTSIDE),
    "length_negative": (entry("passes.at", 1, -1), OUTSIDE),
    "length_huge": (entry("passes.at", 1, (1 << 63) - 1), OUTSIDE),
    "no_file": (entry("passes.at", 1, 9), "must be a safetensors file"),
    "evil": (first_pass(evil=torch.zeros(1)), "a pass has no 'evil'"),
    "autocast_integer": (first_pass(autocast=torch.tensor(DTYPES.index(torch.int8))), "autocast must be"),
    "autocast_beyond": (first_pass(autocast=torch.tensor(99)), "99"),
    "autocast_vector": (first_pass(autocast=torch.zeros(3)), "of a step: "),
    "modes_fewer": (first_pass(modes=torch.ones(5) > 0), "modes must have 6 to 6 entries"),
    "modes_numbers": (first_pass(modes=torch.ones(6)), "modes must be a vector of torch.bool"),
    "statistics_fewer": (first_pass(statistics=torch.ones(5)), "statistics must have 12 to 12 entries"),
    "statistics_nan": (first_pass(statistics=torch.full((12,), math.nan)), "statistics must hold finite"),
    "random_without": (first_pass(random_state=STATE[:0].clone()), "random_state must be one of torch's"),
    "random_none": (first_pass(random_state=torch.zeros_like(STATE)), "random_state must be one of torch's"),
    "random_matrix": (first_pass(random_state=STATE.reshape(2, -1)), "random_state must be a vector"),
    "order_twice": (first_pass(memory_order=torch.tensor([1, 1])), "memory_order must hold each dimension once"),
    "index_floats": (first_pass(**{"inputs.index": torch.zeros(2)}), "inputs must have one row per index"),
    "index_fewer": (first_pass(**{"inputs.index": torch.tensor([1])}), "inputs must have one row per index"),
    "index_missing": (first_pass(**{"targets.index": None}), "targets.index"),
    "values_missing": (first_pass(**{"inputs.values": None}), "inputs.values"),
    "index_beyond": (first_pass(**{"inputs.index": torch.tensor([2, 0])}), "inputs must be different rows"),
    "index_before": (first_pass(**{"inputs.index": torch.tensor([-1, 0])}), "inputs must be different rows"),
    "index_twice": (first_pass(**{"inputs.index": torch.tensor([1, 1])}), "inputs must be different rows"),
    "rows_nan": (first_pass(**{"inputs.values": NAN}), "inputs must hold finite"),
    "moving_nan": (entry("statistics", 0, float("nan")), "'statistics' holds NaN or infinity"),
    "moving_missing": (without("statistics"), "'statistics' is not in both"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_passes_and_statistics_that_are_none_are_refused_with_their_states(run, change, message):
    """Before they are read where the tables say so, and when they are read at the latest."""
    changed(change)(run)
    refused(run, f"{HOLDS}.*{message}", norm_net())


def test_another_network_is_refused_in_words(run):
    more = torch.nn.Sequential(*norm_net(), torch.nn.Identity())
    refused(run, "must have the recorded modules: it has 6, got 7", more, openings=[opened])
    message = r"moving statistic 1.running_mean has shape None, in the run \[6\]"
    refused(run, message, mlp(), openings=[opened])


# --- Matrices of matrix preconditioners (Muon) ----------------------------------------------------------------------

SIZES = (24, 6, 18, 3)  # parameters of shapes (6, 4), (6,), (3, 6), (3,)


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
def matrices(tmp_path):
    """Six steps in chunks of two."""
    path = tmp_path / "matrices"
    begin(path, net=mlp(), statistics=()).commits.writer.close()
    writer = open_for_writing(path, read_header(path))
    for first in range(0, 6, 2):
        steps = [Step(number, 0.1, None) for number in (first, first + 1)]
        updates = [coefficients(number) for number in (first, first + 1)]
        states = [torch.randn(51).double() for _ in steps]
        writer.append(states, steps, updates, ["0" * 32] * 2, {"state": torch.zeros(1)})
    writer.close()
    return path


def test_matrices_are_read_as_they_were_written(matrices):
    trajectory = epk.load_trajectory(matrices, mlp())
    for number in torch.randperm(6).tolist():
        read, expected = trajectory.updates[number], coefficients(number)
        assert all(torch.equal(a, b) for a, b in zip(read.tensors(), expected.tensors(), strict=True))
        assert (read.left.keys(), read.right.keys()) == (expected.left.keys(), expected.right.keys())


def packed(name, matrix):
    return lambda tensors: tensors | pack("matrices", [{name: matrix}, {}])


MATRICES = {
    "nan": packed("left.0", torch.full((6, 6), torch.nan)),
    "not_square": packed("left.0", torch.ones(6, 3)),
    "no_divisor": packed("left.0", torch.ones(5, 5)),
    "whole_numbers": packed("left.0", torch.ones(6, 6).long()),
    "of_no_parameter": packed("left.4", torch.ones(1, 1)),
    "no_side": packed("middle.0", torch.ones(1, 1)),
    "no_places": without("matrices.at"),
    "length_huge": entry("matrices.at", 1, (1 << 63) - 1),
    "no_file": entry("matrices.at", 1, 7),
}


@pytest.mark.parametrize("change", MATRICES.values(), ids=MATRICES)
def test_matrices_that_are_none_are_refused_with_their_states(matrices, change):
    changed(change)(matrices)
    refused(matrices, f"{HOLDS} must ")
