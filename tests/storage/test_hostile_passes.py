"""Chunks whose forward passes or moving statistics are not those of a run: refused by one message."""

import zlib

import pytest
import torch
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.core.step import ForwardPass, SeenRows
from epk_gp.storage.check import check_run
from epk_gp.storage.packing import DTYPES, RAW, max_size
from epk_gp.storage.pass_tables import PARTS
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
    whole = ForwardPass(2, modes, seen, targets, STATE, STATE[:16].clone(), moving, moving + 1, torch.bfloat16)
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


def part(name):
    """Where the packed tensor of a part of the first pass stands in `passes.parts`."""
    return PARTS.index(name)


def pointing(name, other):
    """Let a part of the first pass be the packed tensor of another."""

    def change(tensors):
        parts = tensors["passes.parts"].clone()
        parts[0, part(name)] = parts[0, part(other)]
        return tensors | {"passes.parts": parts}

    return change


def repacked(name, content, encoding=None):
    """Let the packed tensor of a part of the first pass have other bytes."""

    def change(tensors):
        number = int(tensors["passes.parts"][0, part(name)])
        lengths, kinds = tensors["passes.lengths"].clone(), tensors["passes.kinds"].clone()
        parts = list(tensors["passes.content"].split(lengths.tolist()))
        parts[number] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        lengths[number] = len(content)
        if encoding is not None:
            kinds[number, 1] = encoding
        new = {"passes.content": torch.cat(parts), "passes.lengths": lengths, "passes.kinds": kinds}
        return tensors | new

    return change


def raw(values, dtype):
    return torch.tensor(values, dtype=dtype).view(torch.uint8).numpy().tobytes()


CHANGES = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != "passes.rows"}, "'passes.rows' is not in both"),
    "more": (lambda t: t | {"passes.evil": torch.zeros(1)}, "'passes.evil' is not in both"),
    "counts_floats": (lambda t: t | {"passes.counts": t["passes.counts"].double()}, "'passes.counts' of type I64"),
    "parts_flat": (lambda t: t | {"passes.parts": t["passes.parts"].view(-1)}, "'passes.parts' of 2 dimensions"),
    "parts_narrow": (lambda t: t | {"passes.parts": t["passes.parts"][:, 1:].clone()}, "must name the packed tensors"),
    "kinds_narrow": (lambda t: t | {"passes.kinds": t["passes.kinds"][:, 1:].clone()}, "three entries per packed"),
    "counts_fewer": (lambda t: t | {"passes.counts": t["passes.counts"][1:].clone()}, "their numbers of passes"),
    "count_negative": (entry("passes.counts", 0, -1), "their numbers of passes"),
    "count_huge": (entry("passes.counts", 0, 1 << 62), "their numbers of passes"),
    "count_moved": (lambda t: t | {"passes.counts": t["passes.counts"].flip(0)}, "not as many as its batch has"),
    "rows_none": (entry("passes.rows", 0, 0), "a pass has no row"),
    "rows_huge": (entry("passes.rows", 0, 1 << 62), "a pass has no row, or more than a batch"),
    "rows_others": (entry("passes.rows", 0, 3), "not as many as its batch has"),
    "autocast_integer": (entry("passes.autocast", 0, DTYPES.index(torch.int8)), "automatic mixed precision is none"),
    "autocast_beyond": (entry("passes.autocast", 0, 99), "automatic mixed precision is none"),
    "dtype_beyond": (entry("passes.kinds", 0, 99), "dtype, encoding or shape of a packed tensor is none"),
    "encoding_none": (entry("passes.kinds", 1, 3), "dtype, encoding or shape of a packed tensor is none"),
    "dimensions": (entry("passes.kinds", 2, 17), "dtype, encoding or shape of a packed tensor is none"),
    "shape_negative": (entry("passes.shapes", 0, -1), "dtype, encoding or shape of a packed tensor is none"),
    "shape_huge": (entry("passes.shapes", 0, 1 << 62), "dtype, encoding or shape of a packed tensor is none"),
    "shape_larger": (entry("passes.shapes", 0, 1 << 40), "another size than its shape"),
    "length_negative": (entry("passes.lengths", 0, -1), "do not fill 'passes.content'"),
    "length_huge": (entry("passes.lengths", 0, 1 << 62), "do not fill 'passes.content'"),
    "content_short": (lambda t: t | {"passes.content": t["passes.content"][1:].clone()}, "do not fill"),
    "part_beyond": (entry("passes.parts", 0, 99), "must name the packed tensors"),
    "part_before": (entry("passes.parts", 0, -2), "must name the packed tensors"),
    "modes_of_random": (pointing("modes", "random_state"), "'modes' of a pass is of type torch.uint8"),
    "random_of_modes": (pointing("random_state", "modes"), "'random_state' of a pass is of type torch.bool"),
    "device_random": (pointing("device_random_state", "modes"), "'device_random_state' of a pass is of type"),
    "statistics_of_rows": (pointing("statistics", "inputs.values"), "'statistics' of a pass is of type"),
    "after_of_index": (pointing("statistics_after", "inputs.index"), "'statistics_after' of a pass is of type"),
    "index_of_modes": (pointing("targets.index", "modes"), "'targets.index' of a pass is of type torch.bool"),
    "index_of_others": (pointing("inputs.index", "targets.index"), "'inputs' of a pass must have one row per index"),
    "values_missing": (entry("passes.parts", PARTS.index("inputs.values"), -1), "must have one row per index"),
    "index_missing": (entry("passes.parts", PARTS.index("targets.index"), -1), "must have one row per index"),
    "index_beyond": (repacked("inputs.index", raw([0, 2], torch.int64), RAW), r"rows of the pass, 0..1: got 0..2"),
    "index_before": (repacked("inputs.index", raw([0, -1], torch.int64), RAW), r"rows of the pass, 0..1: got -1..0"),
    "index_twice": (repacked("inputs.index", raw([1, 1], torch.int64), RAW), "inputs must give each row once"),
    "rows_nan": (repacked("inputs.values", raw([float("nan")] * 8, torch.float64), RAW), "inputs must hold finite"),
    "targets_inf": (repacked("targets.values", raw([0, 1, float("inf")], torch.float64), RAW), "targets must hold fin"),
    "statistics_nan": (repacked("statistics", raw([float("nan")] * 12, torch.float64), RAW), "statistics must hold fi"),
    "random_none": (repacked("random_state", bytes(5056), RAW), "random_state must be one of torch's random numbers"),
    "short": (repacked("random_state", zlib.compress(bytes(5055)), 1), "must hold 5056 bytes .*: it does not"),
    "bomb": (repacked("random_state", zlib.compress(bytes(1 << 24)), 1), "must hold 5056 bytes .*: it does not"),
    "noise": (repacked("random_state", b"noise", 1), "must hold 5056 bytes .*: Error -3"),
    "trailing": (repacked("random_state", zlib.compress(bytes(5056)) + b"x", 1), "must hold 5056 bytes"),
    "cut": (repacked("random_state", zlib.compress(bytes(5056))[:-1], 1), "must hold 5056 bytes"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_passes_that_are_none_are_refused_with_their_states(run, change, message):
    replace_chunk(run, save(change(load_file(run / CHUNK))))
    refused(run, rf"{CHUNK} \(states 1..2\).*{message}")


def test_a_few_bytes_that_claim_to_be_a_large_tensor_are_refused_unread(run):
    tensors = load_file(run / CHUNK)
    number = int(tensors["passes.parts"][0, part("inputs.values")])
    shape = int(tensors["passes.kinds"][:number, 2].sum()) + 1
    size = max_size(int(tensors["passes.lengths"][number])) // 8
    bomb = zlib.compress(bytes(16 * size))
    change = repacked("inputs.values", bomb, 1)(tensors)
    change["passes.shapes"][shape] = max_size(len(bomb)) // 16 + 1
    replace_chunk(run, save(change))
    refused(run, f"packed tensor {number} has another size than its shape")


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
    if name == "after the step":
        place = content.find(tensors["statistics"].numpy().tobytes())
    else:
        number = int(tensors["passes.parts"][0, part(name)])
        start = int(tensors["passes.lengths"][:number].sum())
        place = content.find(tensors["passes.content"].numpy().tobytes()) + start
    assert place > 0
    content[place] ^= 1
    (run / CHUNK).write_bytes(bytes(content))
    refused(run, rf"{CHUNK} \(states 1..2\) must have the checksum it was committed with: it is damaged")
