"""What a Gram block will cost: how it is divided and its bytes are exact, and times of known costs are found."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import epk_gp as epk
from distributed_cases import RULE, SMALL, Shuffled, inputs, mixed, recorded
from epk_gp.distributed import pieces
from epk_gp.gram import estimate
from epk_gp.gram.block_parts import Share, StepInterval
from epk_gp.gram.estimate import estimate_gram
from epk_gp.gram.path_kernel import gram_block_part
from epk_gp.gram.tiles import GramPieces
from epk_gp.storage.partial_sums import PartialSums

BOTH = epk.Points(inputs(86), torch.arange(86) % 2 > 0)  # tiles of 39 and 4 points of either copy
BLOCKS: dict[str, tuple[epk.Points, epk.Points, dict[str, Any]]] = {
    "one_tile": (mixed(5), mixed(4), {}),
    "symmetric": (BOTH, BOTH, {"memory_budget": SMALL}),
    "edges": (BOTH, epk.Points(inputs(45, 5), is_train=True), {"memory_budget": SMALL}),
    "float32": (
        epk.Points(BOTH.X.float(), BOTH.is_train),
        epk.Points(inputs(45, 5).float(), is_train=False),
        {"memory_budget": SMALL, "accumulate": torch.float64},
    ),
}
SHORT = {"rule": epk.left_endpoint(), "seconds": 1e-3}


@pytest.fixture(scope="module")
def plain() -> epk.Trajectory:
    run: epk.Trajectory = recorded("plain")
    return run


@pytest.fixture(scope="module")
def short() -> epk.Trajectory:
    """Two steps, which are one range."""
    run: epk.Trajectory = recorded("plain", 2)
    return run


@pytest.fixture(scope="module")
def single() -> epk.Trajectory:
    run: epk.Trajectory = recorded("plain", 2, torch.float32)
    return run


class Ticking:
    """A clock that is one second later whenever it is read."""

    def __init__(self) -> None:
        self.seconds = count()

    def __call__(self) -> float:
        return float(next(self.seconds))


RUNS = {"one_tile": "plain", "symmetric": "short", "edges": "short", "float32": "single"}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("keeps", [False, True], ids=["no_checkpoint", "checkpoint"])
def test_pieces_and_bytes_are_those_of_the_real_call(request, tmp_path, monkeypatch, name, keeps):
    (a, b, options), run = BLOCKS[name], request.getfixturevalue(RUNS[name])
    options = {**options, "rule": epk.left_endpoint(), "checkpoint": tmp_path / "pieces" if keeps else None}
    found = estimate_gram(run, a, b, workers=2, seconds=1e-3, clock=Ticking(), **options)
    assert list(tmp_path.iterdir()) == []

    sizes, compute = list[int](), GramPieces.piece

    def noted(self, place):
        result = compute(self, place)
        sizes.append(result["total"].nbytes)
        return result

    monkeypatch.setattr(GramPieces, "piece", noted)
    block = epk.gram_block(run, a, b, executor=Shuffled(), **options)
    assert found.num_pieces == len(sizes)
    assert found.disk.piece == max(sizes)
    assert found.disk.result == block.nbytes
    assert found.disk.pieces_at_once == len(sizes)  # there are fewer than may wait
    if keeps:
        totals = sum(file.stat().st_size for file in (tmp_path / "pieces").glob("*.safetensors"))
        assert totals <= found.disk.scratch + 1000 * len(sizes)
        assert found.disk.scratch > len(sizes) * max(sizes)


@pytest.mark.parametrize("which", [Share(2, 3), StepInterval(16, 18)], ids=str)
def test_a_part_s_pieces_and_bytes_are_those_of_the_part(plain, which):
    a, b, _ = BLOCKS["one_tile"]
    whole, found = (estimate_gram(plain, a, b, which=part, clock=Ticking(), **SHORT) for part in (None, which))
    part = gram_block_part(plain, a, b, which, rule=epk.left_endpoint())
    assert found.num_pieces == len(part.sums) < whole.num_pieces
    assert found.disk.result == sum(total.nbytes for total in part.sums.values())
    assert found.description.startswith(f"{len(part.sums)} of {whole.num_pieces} = ")


def test_pieces_of_a_part_are_removed_when_they_are_read_unless_there_is_a_checkpoint(plain, tmp_path, monkeypatch):
    a, b, _ = BLOCKS["one_tile"]
    removed, remove, is_durable = list[str](), PartialSums.remove, set[bool]()

    def noted(self, names):
        removed.extend(names)
        is_durable.add(self.is_durable)
        remove(self, names)

    monkeypatch.setattr(PartialSums, "remove", noted)
    monkeypatch.setattr(pieces, "num_ahead", lambda *_: 2)
    monkeypatch.setattr(estimate, "num_ahead", lambda *_: 2)
    options: dict[str, Any] = {"rule": epk.left_endpoint(), "checkpoint": None}
    part = gram_block_part(plain, a, b, Share(1, 2), executor=Shuffled(), **options)
    assert len(removed) == len(part.sums) > 2
    assert is_durable == {False}
    found = estimate_gram(plain, a, b, which=Share(1, 2), workers=2, seconds=1e-3, clock=Ticking(), **options)
    assert found.disk.pieces_at_once == 2
    options["checkpoint"] = tmp_path / "pieces"
    found = estimate_gram(plain, a, b, which=Share(1, 2), workers=2, seconds=1e-3, clock=Ticking(), **options)
    gram_block_part(plain, a, b, Share(1, 2), executor=Shuffled(), **options)
    assert len(removed) == len(part.sums)  # no more
    assert found.disk.pieces_at_once == len(list((tmp_path / "pieces").glob("*.safetensors"))) == len(part.sums)


def test_one_process_without_a_checkpoint_writes_nothing_and_holds_the_block(plain):
    a, b, _ = BLOCKS["one_tile"]
    found = estimate_gram(plain, a, b, clock=Ticking(), **SHORT)
    assert (found.disk.pieces_at_once, found.disk.scratch) == (0, 0)
    assert found.memory.owner == found.disk.result == 5 * 4 * 9 * 8
    assert found.memory.limit > 1 << 30
    kept = estimate_gram(plain, a, b, clock=Ticking(), checkpoint="nowhere", **SHORT)
    assert kept.disk.scratch >= found.disk.result
    assert not Path("nowhere").exists()


def known_costs(monkeypatch: pytest.MonkeyPatch, cost: Callable[[Any, int], float]) -> Callable[[], float]:
    """Replace the sum over steps by a clock that costs move; give the clock."""
    now = [0.0]

    def spend(context, a, b, tile, steps, bar):
        for s, _ in steps:
            now[0] += cost(tile, s)
            bar.update(1)

    monkeypatch.setattr(estimate, "sum_range", spend)
    return lambda: now[0]


def of_tile(tile: Any, s: int) -> float:
    """A step's cost: evaluations of either side, and products; test copies have two nodes, early steps more."""
    n, m = len(tile.rows), len(tile.columns)
    nodes = 1 + (not tile.x_is_train or not tile.y_is_train) * (3 if s < 5 else 1)
    half = 0.5 if tile.is_symmetric else 1.0
    return nodes * half * (0.3 * (n + m) + 0.01 * n * m)


def known_total(run: Any, a: epk.Points, b: epk.Points, options: dict[str, Any]) -> tuple[float, float]:
    """The costs of all steps of all tiles, and those of the largest piece."""
    found = estimate.PathKernel(run, None, RULE).with_context(
        a, b, estimate.parse_options("x", **options), lambda context: estimate.piece_layout(context, a, b)
    )
    pieces = [sum(of_tile(tile, s) for s in steps) for tile in found.tiles for steps in (range(16), range(16, 18))]
    return sum(pieces), max(pieces)


@pytest.mark.parametrize("name", ["symmetric", "edges", "one_tile"])
def test_known_costs_of_tiles_are_found(plain, monkeypatch, name):
    a, b, options = BLOCKS[name]
    total, longest = known_total(plain, a, b, options)
    clock = known_costs(monkeypatch, of_tile)
    exact = estimate_gram(plain, a, b, rule=RULE, seconds=1e6, clock=clock, **options)
    assert exact.costs.is_exact
    assert exact.work_seconds == pytest.approx(total)
    assert exact.work_interval == (exact.work_seconds, exact.work_seconds)
    if name == "one_tile":
        return
    sampled = estimate_gram(plain, a, b, rule=RULE, seconds=0.3 * total, clock=clock, **options)
    assert not sampled.costs.is_exact
    low, high = sampled.work_interval
    assert low <= total <= high
    assert high - low < total
    assert sampled.longest_piece == pytest.approx(longest, rel=0.3)


def test_copies_and_sizes_are_kinds_of_their_own(short):
    found = estimate_gram(short, BOTH, BOTH, memory_budget=SMALL, clock=Ticking(), **SHORT)
    names = {cost.kind.name.rpartition(",")[0] for cost in found.costs.kinds}
    assert names == {
        *(f"{left} x {right} copies" for left, right in (("training",) * 2, ("test", "training"), ("test",) * 2)),
        *(f"{copy} x {copy} copies, same points" for copy in ("training", "test")),
    }
    assert sum(len(cost.kind.pieces) for cost in found.costs.kinds) == found.num_pieces
    assert sum(cost.kind.num_steps for cost in found.costs.kinds) == 2 * found.num_pieces


@pytest.mark.mostly_slow
@pytest.mark.parametrize("rule", [RULE, epk.adaptive(tol=1e-6)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", ["plain", "momentum"])
def test_the_sample_of_a_real_run_computes_what_pieces_compute(rule, kind):
    found = estimate_gram(recorded(kind, 4), mixed(2), mixed(2), rule=rule, seconds=20.0, clock=Ticking())
    assert found.costs.num_measured >= 3
    assert found.work_seconds > 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": inputs(3)}, TypeError, "a must be epk_gp.Points"),
        ({"head": "probabilities"}, ValueError, "head"),
        ({"rule": 4}, TypeError, "rule"),
        ({"memory_budget": 10}, ValueError, "memory_budget must be at least"),
        ({"executor": None}, TypeError, r"estimate_gram\(\) got an unexpected keyword argument 'executor'"),
        ({"workers": 0}, ValueError, "workers must be at least 1: got 0"),
        ({"workers": 1.5}, TypeError, "workers must be a whole number"),
        ({"seconds": 0.0}, ValueError, "seconds must be positive and finite: got 0"),
        ({"which": Share(9, 90)}, ValueError, "the block must have a piece for each of its parts: it has 8"),
        ({"which": StepInterval(0, 3)}, ValueError, "must begin and end where ranges of steps do"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_uses_are_refused_before_anything_is_measured(plain, monkeypatch, changes, error, message):
    monkeypatch.setattr(estimate, "sample_costs", None)
    arguments = {"a": mixed(5), "b": mixed(4), "rule": RULE, **changes}
    a, b = arguments.pop("a"), arguments.pop("b")
    with pytest.raises(error, match=message):
        estimate_gram(plain, a, b, **arguments)
