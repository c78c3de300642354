"""`epk-gp gram --steps`, `--part` and `epk-gp reduce`: parts of a block, and the block from them, to the same bytes."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import epk_gp as epk
from commands import refused, run
from epk_gp.cli.manifest import open_run
from epk_gp.core.plans import MemoryPlan
from epk_gp.gram.block_parts import Share, StepInterval, reduce_gram_parts
from epk_gp.gram.part_files import read_gram_part, write_gram_part
from epk_gp.gram.path_kernel import PathKernel, gram_block_part
from epk_gp.gram.tiles import GramPieces

SIDES = ("--num-rows", 4, "--num-columns", 5, "--rule", "gauss-legendre:2", "--quiet")


@pytest.fixture(scope="module")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of forty steps, which are three ranges: 0, 16, 32."""
    folder = tmp_path_factory.mktemp("forty") / "run"
    sizes = ("--num-train", 24, "--num-test", 6, "--width", 3, "--steps", 40)
    assert run("record", "--out", folder, *sizes, "--quiet") == 0
    return folder


@pytest.fixture(scope="module")
def made(forty: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The block in one go, and parts of it and of others."""
    folder = tmp_path_factory.mktemp("made")
    for name, options in {
        "whole": (),
        "a": ("--steps", "0:16"),
        "b": ("--steps", "16:40"),
        "c": ("--steps", "16:32"),
        "1": ("--part", "1/3"),
        "3": ("--part", "3/3"),
        "other_rule": ("--part", "2/3", "--rule", "gauss-legendre:3"),
        "other_points": ("--part", "2/3", "--num-columns", 6),
        "other_head": ("--part", "2/3", "--head", "logits"),
        "other_memory": ("--part", "2/3", "--memory", 0.5),
    }.items():
        assert run("gram", forty, "--out", folder / name, *SIDES, *options) == 0
    return folder


def trajectory_and_points(forty: Path) -> tuple[epk.Trajectory, epk.Points, epk.Points]:
    trajectory = open_run(forty, None)
    both = torch.arange(8) % 3 == 0
    return trajectory, epk.Points(trajectory.inputs[:8], both), epk.Points(trajectory.inputs[:5], is_train=True)


@pytest.mark.parametrize("parts", [("a", "b"), ("b", "a"), ("1", "c", "3"), ("a", "c", "3")], ids="".join)
def test_parts_are_reduced_to_the_bytes_of_the_whole_block(made, tmp_path, parts):
    assert run("reduce", *(made / name for name in parts), "--out", tmp_path, "--quiet") == 0
    expected, got = (folder / "gram.safetensors" for folder in (made / "whole", tmp_path))
    assert got.read_bytes() == expected.read_bytes()
    one, other = (json.loads((folder / "gram.json").read_text()) for folder in (made / "whole", tmp_path))
    assert other["results"] == one["results"]
    shared = one["config"].keys() - {"workers", "scheduler"}
    assert all(other["config"][name] == one["config"][name] for name in shared)
    assert len(other["config"]["parts"]) == len(parts)


def test_a_part_is_one_file_and_holds_no_more_than_its_steps(made):
    assert [file.name for file in (made / "a").iterdir()] == ["steps-0-16.safetensors"]
    assert [file.name for file in (made / "1").iterdir()] == ["part-1-of-3.safetensors"]
    assert len(read_gram_part(made / "a" / "steps-0-16.safetensors").sums) == 1
    assert len(read_gram_part(made / "b" / "steps-16-40.safetensors").sums) == 2
    whole = load_file(made / "whole" / "gram.safetensors")["gram"]
    (part,) = read_gram_part(made / "a" / "steps-0-16.safetensors").sums.values()
    assert (part.permute(1, 0, 3, 2) - whole).abs().max() > 1e-3 * whole.abs().max()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("a",), "parts must cover the whole block: the sum over steps 16:40 is missing. Compute it"),
        (("b",), "parts must cover the whole block: the sum over steps 0:16 is missing."),
        (("1", "3"), "parts must cover the whole block: part 2/3, the sum over steps 16:32 is missing."),
        (("a", "b", "c"), "parts must not overlap: the sum over steps 16:32 is in "),
        (("a", "a"), "parts must not overlap: the sum over steps 0:16 is in "),
        (("1", "other_rule", "3"), "must be those of one block: the rule is Gauss-Legendre 3 in "),
        (("1", "other_points", "3"), "must be those of one block: the fingerprint of the points along the columns is"),
        (("1", "other_head", "3"), "must be those of one block: the head is logits in "),
        (("1", "other_memory", "3"), "must be those of one block: the memory budget is 536870912 in "),
        (("nowhere",), "a part of a block must exist: nowhere does not."),
        (("whole",), "PARTS must be the files that epk-gp gram --part or --steps wrote, or folders of them: whole has"),
        (("whole/gram.safetensors",), "must be a part of a Gram block (epk-gp gram --part): it is another file."),
        (("whole/gram.json",), "whole/gram.json must be a safetensors file"),
    ],
    ids=lambda value: "_".join(value).replace("/", "_") if isinstance(value, tuple) else "",
)
def test_parts_that_are_not_a_block_are_refused(made, tmp_path, monkeypatch, capsys, parts, message):
    monkeypatch.chdir(made)
    assert message in refused(capsys, "reduce", *parts, "--out", tmp_path / "new", "--quiet")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("place", [0.05, 0.5, 0.999])
def test_a_damaged_part_is_refused(made, tmp_path, capsys, place):
    file = tmp_path / "part-1-of-3.safetensors"
    content = bytearray((made / "1" / file.name).read_bytes())
    content[int(place * len(content))] ^= 1
    file.write_bytes(content)
    line = refused(capsys, "reduce", file, made / "c", made / "3", "--out", tmp_path / "out", "--quiet")
    assert str(file) in line


def test_a_part_computed_with_another_number_of_threads_is_refused(made, tmp_path, capsys):
    part = read_gram_part(made / "c" / "steps-16-32.safetensors")
    part.description["threads"] += 1
    write_gram_part(tmp_path / "steps-16-32.safetensors", part)
    line = refused(capsys, "reduce", made / "1", made / "3", tmp_path, "--out", tmp_path / "out", "--quiet")
    assert "the number of threads (OMP_NUM_THREADS) is " in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "3:40"), "must begin and end where ranges of steps do, at 0, 16, 32, 40, or their sum is rounded"),
        (("--steps", "3:40"), "got 3:40. Take 0:40."),
        (("--steps", "20:24"), "got 20:24. Take 16:32."),
        (("--steps", "16:16"), "the steps a:b of a part must satisfy 0 <= a < b <= 40: got 16:16."),
        (("--steps", "0:41"), "the steps a:b of a part must satisfy 0 <= a < b <= 40: got 0:41."),
        *((("--steps", text), f"--steps must be A:B, two whole numbers, as in 0:64: got '{text}'.")
          for text in ("16", "0-16", ":16", "0:-1", "a:b", "0:²")),
        *((("--part", text), f"--part must be K/N, two whole numbers, as in 3/16: got '{text}'.")
          for text in ("3", "1:3", "/3", "-1/3", "1/3.0")),
        (("--part", "4/3"), "--part 4/3: part k/n must have k in 1..n: got 4/3. The first part is 1."),
        (("--part", "0/3"), "--part 0/3: the number k of part k/n must be at least 1: got 0"),
        (("--part", "1/0"), "--part 1/0: the number n of parts must be at least 1: got 0"),
        (("--part", "1/4"), "it has 3 (tiles of points x ranges of steps), and 4 parts are asked for. Take n = 3"),
        (("--part", "1/3", "--steps", "0:16"), "--steps and --part must not stand together: got 0:16 and 1/3."),
    ],
    ids=lambda value: "_".join(value).replace("/", "_") if isinstance(value, tuple) else "",
)  # fmt: skip
def test_parts_that_do_not_exist_are_refused(forty, tmp_path, capsys, options, message):
    assert message in refused(capsys, "gram", forty, "--out", tmp_path, *SIDES, *options)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_part_that_was_killed_resumes(forty, made, tmp_path, monkeypatch):
    class Killed(BaseException):
        """As SIGKILL: nothing is written after it."""

    real, calls = GramPieces.piece, count(1)
    computed = []

    def piece(self, place):
        if next(calls) == 2:
            raise Killed
        computed.append(place)
        return real(self, place)

    monkeypatch.setattr(GramPieces, "piece", piece)
    asked = ("gram", forty, "--out", tmp_path, *SIDES, "--steps", "16:40")
    with pytest.raises(Killed):
        run(*asked)
    assert run(*asked) == 0
    assert len(computed) == len(set(computed)) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["steps-16-40.safetensors"]
    again, once = (read_gram_part(f / "steps-16-40.safetensors").sums for f in (tmp_path, made / "b"))
    assert all(torch.equal(again[place], once[place]) for place in once)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 5, 12])
def test_shares_of_a_block_of_many_tiles_are_reduced_to_the_same_bytes(forty, tmp_path, monkeypatch, number):
    """Points of both copies, tiles of which shares hold some, and products of float32 that are summed in float64."""
    monkeypatch.setattr(MemoryPlan, "tile_points", lambda *arguments: 3)
    trajectory, a, b = trajectory_and_points(forty)
    a, b = (epk.Points(points.X.float(), points.is_train) for points in (a, b))
    options = epk.ComputeOptions(accumulate=torch.float64)
    kernel = PathKernel(trajectory, rule=epk.gauss_legendre(2))
    parts = [kernel.block_part(a, b, Share(k, number), options) for k in range(1, number + 1)]
    assert len(parts[0].layout.tiles) > 3
    for k, part in enumerate(parts):
        write_gram_part(tmp_path / f"{k}.safetensors", part)
    read = [read_gram_part(tmp_path / f"{k}.safetensors") for k in reversed(range(number))]
    expected = kernel.block(a, b, options)
    assert expected.dtype == torch.float64
    assert torch.equal(reduce_gram_parts(parts), expected)
    assert torch.equal(reduce_gram_parts(read), expected)
    with pytest.raises(ValueError, match=f"part 2/{number}, the sum over steps .* of .* tiles|part 2/2, the sum over"):
        reduce_gram_parts([parts[0], *parts[2:]])


def test_parts_of_a_symmetric_block_are_reduced_to_the_same_bytes(forty, tmp_path):
    trajectory, a, _ = trajectory_and_points(forty)
    weights = torch.linspace(0, 1, 40) * (torch.arange(40) % 3 != 0)  # steps of weight 0 are in no range
    given = {"head": "logits", "rule": epk.gauss_legendre(2), "step_weights": weights}
    with pytest.raises(ValueError, match=r"at 0, 25, 40, or their sum is rounded otherwise: got 0:16. Take 0:25."):
        gram_block_part(trajectory, a, a, StepInterval(0, 16), **given)
    parts = [gram_block_part(trajectory, a, a, StepInterval(*steps), **given) for steps in ((0, 25), (25, 40))]
    for k, part in enumerate(parts):
        write_gram_part(tmp_path / f"{k}.safetensors", part)
    expected = epk.gram_block(trajectory, a, a, **given)
    assert torch.equal(reduce_gram_parts([read_gram_part(tmp_path / f"{k}.safetensors") for k in (1, 0)]), expected)
    other = gram_block_part(trajectory, a, epk.Points(a.X, a.is_train), StepInterval(25, 40), **given)
    with pytest.raises(ValueError, match="whether both sides are the same points is False"):
        reduce_gram_parts([parts[0], other])


@pytest.mark.slow
def test_what_an_adaptive_rule_could_not_integrate_is_said_when_parts_are_reduced(forty):
    trajectory, a, b = trajectory_and_points(forty)
    rule = epk.adaptive(1e-15, max_evaluations=4)
    parts = [gram_block_part(trajectory, a, b, Share(k, 2), rule=rule) for k in (1, 2)]
    with pytest.warns(epk.CertificateWarning, match="of 200 integrals of a point over a step did not"):
        reduce_gram_parts(parts)


def test_no_parts_are_no_block():
    with pytest.raises(ValueError, match="parts must be those of a block: there are none"):
        reduce_gram_parts([])


def test_a_file_whose_record_names_other_tensors_is_refused(made, tmp_path):
    file = made / "1" / "part-1-of-3.safetensors"
    save_file({"rows.inputs": torch.zeros(2)}, tmp_path / "x.safetensors", {"format": "epk_gp.gram_part.1"})
    with pytest.raises(ValueError, match="must hold the part that was written: it is damaged"):
        read_gram_part(tmp_path / "x.safetensors")
    with pytest.raises(KeyError):
        read_gram_part(file).sums[9, 9, 9, 9, 9]
