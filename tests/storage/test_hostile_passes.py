"""Chunks whose forward passes or moving statistics are not those of a run: refused by one message."""

import math

import pytest
import torch
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.core.step import ForwardPass, SeenRows
from epk_gp.storage.files import SAFETENSORS_DTYPES
from epk_gp.storage.passes import PARTS
from epk_gp.storage.run import check_run
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


def filled(name, value):
    """Let the rows of a part hold another number."""
    return lambda tensors: tensors | {f"passes.{name}.0": torch.full_like(tensors[f"passes.{name}.0"], value)}


def half(name):
    return lambda tensors: tensors | {name: tensors[name].half()}


DTYPES, NOWHERE = list(SAFETENSORS_DTYPES), torch.tensor([-1, 0, 0])
CHANGES = {
    "missing": (without("passes.rows"), "'passes.rows' is not in both"),
    "more": (lambda t: t | {"passes.evil": torch.zeros(1)}, "'passes.evil' is not in both"),
    "group_beyond": (lambda t: t | {"passes.modes.2": torch.zeros(6) > 0}, "'passes.modes.2' is not in both"),
    "group_without_places": (without("passes.modes.at"), "'passes.modes.at' is not in both"),
    "counts_floats": (lambda t: t | {"passes.counts": t["passes.counts"].double()}, "'passes.counts' of type I64"),
    "places_flat": (lambda t: t | {"passes.modes.at": t["passes.modes.at"].view(-1)}, "'passes.modes.at' of type I64"),
    "places_narrow": (
        lambda t: t | {"passes.modes.at": t["passes.modes.at"][:, 1:].clone()},
        r"'passes.modes.at' of shape \(2, 3\)",
    ),
    "counts_fewer": (lambda t: t | {"passes.counts": t["passes.counts"][1:].clone()}, "'passes.counts' of shape"),
    "count_negative": (entry("passes.counts", 0, -1), "their numbers of passes"),
    "count_huge": (entry("passes.counts", 0, 1 << 62), "their numbers of passes"),
    "count_moved": (lambda t: t | {"passes.counts": t["passes.counts"].flip(0)}, "not as many as its batch has"),
    "rows_none": (entry("passes.rows", 0, 0), "a pass has no row"),
    "rows_huge": (entry("passes.rows", 0, 1 << 62), "a pass has no row, or more than a batch"),
    "rows_others": (entry("passes.rows", 0, 3), "not as many as its batch has"),
    "autocast_integer": (entry("passes.autocast", 0, DTYPES.index(torch.int8)), "automatic mixed precision is none"),
    "autocast_beyond": (entry("passes.autocast", 0, 99), "automatic mixed precision is none"),
    "part_beyond": (entry("passes.modes.at", 0, 1), "'modes' of a pass lies in no tensor"),
    "part_before": (entry("passes.modes.at", 0, -2), "'modes' of a pass lies in no tensor"),
    "first_beyond": (entry("passes.modes.at", 1, 1), "'modes' of a pass lies outside of its tensor"),
    "first_negative": (entry("passes.modes.at", 1, -1), "'modes' of a pass lies outside of its tensor"),
    "first_huge": (entry("passes.modes.at", 1, (1 << 63) - 1), "'modes' of a pass lies outside of its tensor"),
    "length_negative": (entry("passes.modes.at", 2, -1), "'modes' of a pass lies outside of its tensor"),
    "length_huge": (entry("passes.modes.at", 2, (1 << 63) - 1), "'modes' of a pass lies outside of its tensor"),
    "modes_fewer": (entry("passes.modes.at", 2, 5), "'modes' of a pass must have 6 to 6 entries"),
    "statistics_fewer": (entry("passes.statistics.at", 2, 5), "'statistics' of a pass must have 12 to 12 entries"),
    "random_without": (entry("passes.random_state.at", 2, 0), "'random_state' of a pass must have 1 to 65536 entries"),
    "modes_numbers": (
        lambda t: t | {"passes.modes.0": t["passes.modes.0"].to(torch.uint8)},
        "'passes.modes.0' of type BOOL",
    ),
    "random_matrix": (
        lambda t: t | {"passes.random_state.0": t["passes.random_state.0"].view(2, -1)},
        "'passes.random_state.0' of type U8",
    ),
    "statistics_half": (half("passes.statistics.0"), "'passes.statistics.0' of type F64"),
    "index_floats": (half("passes.inputs.index.0"), "'passes.inputs.index.0' of type I64"),
    "values_missing": (
        entry("passes.inputs.values.at", slice(3), NOWHERE),
        "'inputs' of a pass must have one row per index",
    ),
    "index_missing": (
        entry("passes.targets.index.at", slice(3), NOWHERE),
        "'targets' of a pass must have one row per index",
    ),
    "index_fewer": (entry("passes.inputs.index.at", 2, 1), "'inputs' of a pass must have one row per index"),
    "index_beyond": (entry("passes.inputs.index.0", 0, 2), r"rows of the pass, 0..1: got 0..2"),
    "index_before": (entry("passes.inputs.index.0", 0, -1), r"rows of the pass, 0..1: got -1..0"),
    "index_twice": (filled("inputs.index", 1), "inputs must give each row once"),
    "rows_nan": (filled("inputs.values", math.nan), "inputs must hold finite"),
    "targets_inf": (filled("targets.values", math.inf), "targets must hold fin"),
    "statistics_nan": (filled("statistics", math.nan), "statistics must hold fi"),
    "random_none": (filled("random_state", 0), "random_state must be one of torch's random numbers"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_passes_that_are_none_are_refused_with_their_states(run, change, message):
    replace_chunk(run, save(change(load_file(run / CHUNK))))
    refused(run, rf"{CHUNK} \(states 1..2\).*{message}")


STATISTICS = {
    "nan": (entry("statistics", 0, float("nan")), "'statistics' holds NaN or infinity"),
    "fewer": (lambda t: t | {"statistics": t["statistics"][:, 1:].clone()}, r"'statistics' of shape \(2, 12\)"),
    "missing": (lambda t: {k: v for k, v in t.items() if k != "statistics"}, "'statistics' is not in both"),
    "half": (lambda t: t | {"statistics": t["statistics"].half()}, "'statistics' of type F64"),
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
    refused(run, "run.json must describe weights, data, loss and update rule")


def test_another_network_is_refused_in_words(run):
    with pytest.raises(ValueError, match="must have the recorded modules, .*: it has 6, got 7"):
        epk.load_trajectory(run, torch.nn.Sequential(*norm_net(), torch.nn.Identity()))
    layers = list(norm_net())
    other = torch.nn.Sequential(*layers[:2], torch.nn.Sequential(layers[2]), *layers[3:])
    with pytest.raises(ValueError, match="must have the recorded modules, .* module 4 is '3', got '2.0'"):
        epk.load_trajectory(run, other)
    with pytest.raises(
        ValueError, match=r"moving statistic '1.running_mean' must have shape \(6,\), got no such buffer"
    ):
        epk.load_trajectory(run, mlp())


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
    tensor = tensors["statistics" if name == "after the step" else f"passes.{name}.0"]
    place = content.find(tensor.numpy().tobytes())
    assert place > 0
    content[place] ^= 1
    (run / CHUNK).write_bytes(bytes(content))
    refused(run, rf"{CHUNK} \(states 1..2\) must have the checksum it was committed with: it is damaged")
