"""Chunks whose forward passes or moving statistics are not those of a run: refused by one message."""

import math

import pytest
import torch
from safetensors.torch import load, load_file, save

import epk_gp as epk
from epk_gp.core.step import ForwardPass, SeenRows
from epk_gp.storage.files import SAFETENSORS_DTYPES, pack
from epk_gp.storage.passes import PARTS
from epk_gp.storage.verify import check_run
from loops import mlp
from stored_runs import add, begin, finish, norm_net, replace_chunk, replace_header

CHUNK = "chunk-000001.safetensors"
STATE = torch.Generator().manual_seed(3).get_state()


@pytest.fixture
def run(tmp_path):
    """One chunk of two steps: two passes on four points with every part, and none on all points."""
    made = begin(tmp_path / "run")
    seen = SeenRows(torch.tensor([1, 0]), torch.linspace(0, 1, 8).reshape(2, 4).double())
    targets = SeenRows(torch.tensor([0]), torch.tensor([[0.25, 0.5, 0.25]]).double())
    modes, moving = torch.arange(6) % 2 == 0, torch.arange(12).double()
    order = torch.tensor([1, 0])
    whole = ForwardPass(2, modes, seen, targets, STATE, STATE[:16].clone(), moving, moving + 1, torch.bfloat16, order)
    add(made, (whole, ForwardPass(2, modes)), torch.tensor([3, 5, 3, 1]))
    add(made, ())
    finish(made)
    (tmp_path / "run" / "finished.json").unlink()
    return tmp_path / "run"


def opened(run):
    """Open a run, and read all of its passes."""
    return [list(step.passes) for step in epk.load_trajectory(run, norm_net()).steps]


def refused(run, message):
    for opening in (check_run, opened):
        with pytest.raises(ValueError, match=message) as error:
            opening(run)
        assert len(str(error.value)) < 2000
        assert "\n" not in str(error.value)


def entry(name, position, value):
    def change(tensors):
        tensor = tensors[name].clone()
        tensor.view(-1)[position] = value
        return tensors | {name: tensor}

    return change


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def first_pass(**parts):
    """Other tensors of the first pass; None leaves one out."""

    def change(tensors):
        rows = [load(bytes(tensors["passes"][a : a + n].tolist())) for a, n in tensors["passes.at"].tolist()]
        rows[0] = {name: value for name, value in (rows[0] | parts).items() if value is not None}
        return tensors | pack("passes", rows)

    return change


DTYPES, NAN = list(SAFETENSORS_DTYPES), torch.full((2, 4), math.nan).double()
CHANGES = {
    "missing": (without("passes.rows"), "'passes.rows' is not in both"),
    "more": (lambda t: t | {"passes.evil": torch.zeros(1)}, "'passes.evil' is not in both"),
    "counts_floats": (lambda t: t | {"passes.counts": t["passes.counts"].double()}, "'passes.counts' of shape"),
    "places_flat": (lambda t: t | {"passes.at": t["passes.at"].view(-1)}, "'passes.at' of shape"),
    "counts_fewer": (lambda t: t | {"passes.counts": t["passes.counts"][1:].clone()}, "the forward passes of its"),
    "count_negative": (entry("passes.counts", 0, -1), "the forward passes of its steps"),
    "count_huge": (entry("passes.counts", 0, 1 << 62), "the forward passes of its steps"),
    "count_moved": (lambda t: t | {"passes.counts": t["passes.counts"].flip(0)}, "the forward passes of its steps"),
    "rows_none": (entry("passes.rows", 0, 0), "the forward passes of its steps"),
    "rows_huge": (entry("passes.rows", 0, 1 << 62), "the forward passes of its steps"),
    "rows_others": (entry("passes.rows", 0, 3), "the forward passes of its steps"),
    "first_beyond": (entry("passes.at", 0, 1 << 40), "a row lies outside"),
    "first_negative": (entry("passes.at", 0, -1), "a row lies outside"),
    "first_huge": (entry("passes.at", 0, (1 << 63) - 1), "a row lies outside"),
    "length_negative": (entry("passes.at", 1, -1), "a row lies outside"),
    "length_huge": (entry("passes.at", 1, (1 << 63) - 1), "a row lies outside"),
    "no_file": (entry("passes.at", 1, 9), "must be a safetensors file"),
    "other_bytes": (lambda t: t | {"passes": t["passes"] ^ 255}, "must be a safetensors file"),
    "evil": (first_pass(evil=torch.zeros(1)), "a pass has no 'evil'"),
    "autocast_integer": (first_pass(autocast=torch.tensor(DTYPES.index(torch.int8))), "autocast must be"),
    "autocast_beyond": (first_pass(autocast=torch.tensor(99)), "99"),
    "autocast_vector": (first_pass(autocast=torch.zeros(3)), "of a step: "),
    "modes_fewer": (first_pass(modes=torch.ones(5) > 0), "modes must have 6 to 6 entries"),
    "modes_numbers": (first_pass(modes=torch.ones(6)), "modes must be a vector of torch.bool"),
    "statistics_fewer": (first_pass(statistics=torch.ones(5)), "statistics must have 12 to 12 entries"),
    "statistics_half": (first_pass(statistics=torch.ones(12).half()), "statistics must be a vector"),
    "statistics_nan": (first_pass(statistics=torch.full((12,), math.nan)), "statistics must hold finite"),
    "random_without": (first_pass(random_state=STATE[:0].clone()), "random_state must have 1 to 65536 entries"),
    "random_none": (first_pass(random_state=torch.zeros_like(STATE)), "random_state must be one of torch's"),
    "random_matrix": (first_pass(random_state=STATE.reshape(2, -1)), "random_state must be a vector"),
    "index_floats": (first_pass(**{"inputs.index": torch.zeros(2)}), "inputs must have one row per index"),
    "index_fewer": (first_pass(**{"inputs.index": torch.tensor([1])}), "inputs must have one row per index"),
    "index_missing": (first_pass(**{"targets.index": None}), "targets.index"),
    "values_missing": (first_pass(**{"inputs.values": None}), "inputs.values"),
    "index_beyond": (first_pass(**{"inputs.index": torch.tensor([2, 0])}), "inputs must be different rows"),
    "index_before": (first_pass(**{"inputs.index": torch.tensor([-1, 0])}), "inputs must be different rows"),
    "index_twice": (first_pass(**{"inputs.index": torch.tensor([1, 1])}), "inputs must be different rows"),
    "rows_nan": (first_pass(**{"inputs.values": NAN}), "inputs must hold finite"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_passes_that_are_none_are_refused_with_their_states(run, change, message):
    """Before they are read where the tables say so, and when they are read at the latest."""
    replace_chunk(run, save(change(load_file(run / CHUNK))))
    refused(run, rf"{CHUNK} \(states 1..2\).*{message}")


STATISTICS = {
    "nan": (entry("statistics", 0, float("nan")), "'statistics' holds NaN or infinity"),
    "fewer": (lambda t: t | {"statistics": t["statistics"][:, 1:].clone()}, r"'statistics' of shape \(2, 12\)"),
    "missing": (lambda t: {k: v for k, v in t.items() if k != "statistics"}, "'statistics' is not in both"),
    "half": (lambda t: t | {"statistics": t["statistics"].half()}, "'statistics' of shape .* and type F32 F64"),
}


@pytest.mark.parametrize(("change", "message"), STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics_that_are_none_are_refused_with_their_states(run, change, message):
    replace_chunk(run, save(change(load_file(run / CHUNK))))
    refused(run, rf"{CHUNK} \(states 1..2\) .*{message}")


HEADERS = {
    "statistics_names": {"statistics": ["1.running_mean"]},
    "statistics_twice": {"statistics": ["1.running_mean", "1.running_mean"]},
    "statistics_numbers": {"statistics": [1, 2]},
    "statistics_shapes": {"statistic_shapes": [[6], [-6]]},
    "unexplained": {"unexplained": True},
    "unexplained_negative": {"unexplained": -0.1},
    "modules": {"modules": "0"},
    "num_optimizers": {"num_optimizers": 0},
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_describes_no_run_is_refused(run, change):
    replace_header(run, **change)
    refused(run, "run.json must be the header of an epk_gp run of version 1")


def test_another_network_is_refused_in_words(run):
    more = torch.nn.Sequential(*norm_net(), torch.nn.Identity())
    others = {
        "must have the recorded modules: it has 6, got 7": more,
        r"moving statistic 1.running_mean has shape None, in the run \[6\]": mlp(),
    }
    for message, net in others.items():
        with pytest.raises(ValueError, match=message):
            epk.load_trajectory(run, net)


def test_a_run_with_replaced_files_of_the_same_content_is_good(run):
    """The negative control."""
    whole = epk.load_trajectory(run, norm_net()).digest
    replace_chunk(run, save(load_file(run / CHUNK)))
    replace_header(run)
    assert epk.load_trajectory(run, norm_net()).digest == whole
    assert [len(passes) for passes in opened(run)] == [2, 0]
    assert check_run(run).num_passes == 2


@pytest.mark.parametrize("name", [*PARTS, "after the step"])
def test_an_edited_part_of_a_pass_is_found_by_the_checksum_of_its_chunk(run, name):
    """Every random state, row, target and statistic on disk, by a change of one bit."""
    tensors, content = load_file(run / CHUNK), bytearray((run / CHUNK).read_bytes())
    start, length = tensors["passes.at"][0].tolist()
    parts = load(bytes(tensors["passes"][start : start + length].tolist())) | {"after the step": tensors["statistics"]}
    place = content.find(parts[name].numpy().tobytes())
    assert place > 0
    content[place] ^= 1
    (run / CHUNK).write_bytes(bytes(content))
    refused(run, rf"{CHUNK} \(states 1..2\) must have the checksum it was written with. The file is damaged")
