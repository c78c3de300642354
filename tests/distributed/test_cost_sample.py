"""The sample that an estimate is made of: known costs and a clock that only they move."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from epk_gp.distributed.cost_estimate import CostEstimate, DiskEstimate, MemoryEstimate
from epk_gp.distributed.cost_sample import LEAST_SAMPLES, KindCost, PieceKind, SampledCosts, sample_costs

LENGTH = 16


def kind(name: str, count: int, sizes: tuple[float, ...] = (1.0,), unit: int = 4, last: int = LENGTH) -> PieceKind:
    """Pieces of 16 steps, the last of which may have fewer."""
    lengths = [LENGTH] * (count - 1) + [last]
    return PieceKind(name, name.split(",")[0], sizes, unit, [((k,), n) for k, n in enumerate(lengths)])


@dataclass
class Known:
    """Work of known costs: of each step of each piece, and of a piece besides."""

    kinds: Sequence[PieceKind]
    step: Callable[[int], float]
    overhead: float = 0.0
    first: float = 0.0
    now: float = 0.0
    parts: list[tuple[int, int, int]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def compute(self, place, first, last, tick):
        (number,) = place
        self.parts.append((number, first, last))
        self.now += self.overhead + (0.0 if len(self.parts) > 1 else self.first)
        for s in range(first, last):
            self.now += self.step(number * LENGTH + s)
            tick(1)

    @property
    def total(self) -> float:
        counts = [(number * LENGTH + s) for of in self.kinds for (number,), n in of.pieces for s in range(n)]
        return sum(map(self.step, counts)) + self.overhead * sum(len(of.pieces) for of in self.kinds)


def estimated(work: Known, seconds: float) -> SampledCosts:
    return sample_costs(work, seconds, clock=work.clock)


def noisy(seed: int, early: float) -> Callable[[int], float]:
    """Steps of random costs, the early ones larger, as under an adaptive rule."""
    rng = random.Random(seed)
    costs = [rng.uniform(0.5, 1.5) * (1 + early * 2.0 ** (-s / 200)) for s in range(64 * LENGTH)]
    return costs.__getitem__


@pytest.mark.parametrize("last", [LENGTH, 3, 1])
def test_the_sum_is_exact_where_all_pieces_are_measured(last):
    work = Known([kind("a", 5, last=last)], noisy(0, 3.0), overhead=0.7)
    found = estimated(work, 1e4)
    assert found.is_exact
    assert found.error == 0
    assert found.seconds == pytest.approx(work.total, rel=1e-12)
    whole = {part for part in work.parts if part[1:] == (0, work.kinds[0].pieces[part[0]][1])}
    assert len(whole) == 5


@pytest.mark.parametrize("early", [0.0, 3.0])
def test_intervals_hold_the_known_sum_as_often_as_they_say(early):
    inside, widths = 0, []
    for seed in range(40):
        work = Known([kind("a", 64)], noisy(seed, early), overhead=2.0)
        found = estimated(work, 0.1 * work.total)
        assert not found.is_exact
        assert work.now < 0.11 * work.total + 40
        inside += abs(found.seconds - work.total) <= found.error
        widths.append(found.error / work.total)
    assert inside >= 36
    assert max(widths) < 0.4


def test_the_first_parts_alone_would_miss_the_sum():
    """The negative control: a sample that is not spread over the run is off by more than the interval."""
    work = Known([kind("a", 64)], noisy(1, 3.0))
    found = estimated(work, 0.1 * work.total)
    first = sum(map(work.step, range(4))) / 4 * 64 * LENGTH
    assert abs(first - work.total) > 2 * found.error


def test_parts_are_spread_over_the_run_and_none_is_measured_twice():
    work = Known([kind("a", 64)], noisy(2, 0.0))
    found = estimated(work, 0.3 * work.total)
    parts = work.parts[1:]  # the first one is the warm-up
    assert len(set(parts)) == len(parts) == found.num_measured
    third = [number * 3 // 64 for number, *_ in parts]
    assert all(third[:LEAST_SAMPLES].count(k) == 1 for k in range(3))
    counts = [third.count(k) for k in range(3)]
    assert max(counts) <= 1.3 * min(counts)


def test_what_happens_once_only_is_not_counted():
    work = Known([kind("a", 64)], lambda s: 1.0, overhead=3.0, first=500.0)
    found = estimated(work, 800.0)
    assert found.seconds == pytest.approx(work.total, rel=1e-12)


def test_equal_steps_are_known_from_the_least_sample_at_once():
    work = Known([kind("a", 64)], lambda s: 1.0, overhead=3.0)
    found = estimated(work, 900.0)
    assert found.seconds == pytest.approx(work.total, rel=1e-12)
    assert found.num_measured <= 2 * LEAST_SAMPLES + 1


@pytest.mark.parametrize("seconds", [1e-3, 1.0])
def test_the_least_sample_is_measured_however_long_it_takes_but_in_short_parts(seconds):
    work = Known([kind("a", 64), kind("b", 64)], lambda s: 10.0)
    found = estimated(work, seconds)
    assert found.num_measured == 2 * LEAST_SAMPLES
    assert all(last - first == 2 for _, first, last in work.parts if (first, last) != (0, 1))
    assert found.seconds == pytest.approx(work.total)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_a_kind_that_was_not_measured_lies_between_what_its_sizes_say(power):
    """Edge tiles: their steps cost something between N + M and N M."""
    large, edge = kind("a, 10 x 10", 40, (20.0, 100.0)), kind("a, 10 x 2", 8, (12.0, 20.0))

    class Edges(Known):
        def compute(self, place, first, last, tick):
            self.parts.append((*place, first, last))
            for _ in range(first, last):
                self.now += 100.0
                tick(1)

    work = Edges([large, edge], lambda s: 0.0)
    found = estimated(work, 1.0)
    of_edge = 100.0 * (0.6 ** (1 - power) * 0.2**power)
    total = 40 * LENGTH * 100.0 + 8 * LENGTH * of_edge
    assert {part[0] for part in work.parts} <= set(range(40))
    assert abs(found.seconds - total) <= found.error < 0.1 * total


def test_measuring_ends_where_pieces_take_longer_than_they_seemed_to():
    costs = noisy(3, 0.0)
    work = Known([kind("a", 64)], lambda s: costs(s) if len(work.parts) < 8 else 200.0)
    found = estimated(work, 1.2 * work.total)
    assert not found.is_exact
    assert work.now <= 2 * 1.2 * 64 * LENGTH * 1.1 + 200 * LENGTH
    assert found.seconds > 64 * LENGTH * 2


def test_no_pieces_cost_nothing():
    found = estimated(Known([], lambda s: 1.0), 1.0)
    assert found.is_exact
    assert (found.seconds, found.error) == (0, 0)


def estimate(lengths: Sequence[int], workers: int | None, piece_seconds: float = 0.0, error: float = 0.0):
    """An estimate of pieces of so many steps of one second."""
    of = PieceKind("a", "a", (1.0,), 1, [((k,), n) for k, n in enumerate(lengths)])
    costs = SampledCosts((KindCost(of, float(sum(lengths)), 0.0, error, 0.0, 1.0, 0),), 1, False, 0.0)
    memory, disk = MemoryEstimate(0, None, 0), DiskEstimate(0, 0, 0, 0)
    return CostEstimate("", len(lengths), workers, 5.0, piece_seconds, costs, memory, disk)


@pytest.mark.parametrize(
    ("lengths", "workers", "seconds"),
    [
        ([4, 4, 4], None, 12),
        ([4, 4, 4], 1, 12),
        ([4, 4, 4], 2, 8),  # not 6: the third piece has one worker
        ([4, 4, 4], 3, 4),
        ([4, 4, 4], 100, 4),
        ([1] * 10 + [9], 4, 11),  # the long piece comes last: to the worker that is free at 2
        ([1] * 40000, 8, 5000),
        ([], 2, 0),
    ],
    ids=lambda value: f"{len(value)}" if isinstance(value, list) else f"{value}",
)
def test_workers_share_pieces_and_are_never_faster_than_the_longest(lengths, workers, seconds):
    found = estimate(lengths, workers)
    assert found.seconds == 5.0 + seconds
    assert found.interval == (found.seconds, found.seconds)
    assert found.longest_piece == max(lengths, default=0)


def test_the_interval_follows_the_work_s():
    found = estimate([4, 4, 4], 2, error=3.0)
    assert found.work_interval == (9.0, 15.0)
    assert found.interval == pytest.approx((5 + 6, 5 + 10))


def test_the_owner_reads_one_piece_after_another():
    """However many workers there are, pieces pass through one process."""
    times = [estimate([1] * 1000, workers, piece_seconds=0.1).seconds - 5 for workers in (1, 10, 100, 1000)]
    assert times == pytest.approx([1100, 110, 100, 100])
    assert all(later <= earlier for earlier, later in pairwise(times))
