"""What the pieces of a computation cost: a few are measured, spread over it, and the sum of all is extrapolated."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import ceil, inf, isfinite
from statistics import fmean, variance
from typing import Protocol, final, runtime_checkable

from scipy.special import stdtrit

from epk_gp.core.show import ProgressBar, progress_bar
from epk_gp.distributed.job import Place

Clock = Callable[[], float]
Tick = Callable[[int], None]

# Samples of each family of pieces that are measured however long they take: early, in the middle and late in the run.
LEAST_SAMPLES = 3

# Measuring ends before its time where the interval is so narrow beside the sum, or after so many parts.
_NARROW, _MANY = 0.02, 1000

# An interval holds the sum with this probability, if times are spread as those of the sample are.
PROBABILITY = 0.95

# Steps of a part at least, where a piece has as many: the first of them is slower than the others.
_MIN_PART = 2

# Fractional parts of its multiples are spread evenly, wherever one stops.
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class PieceKind:
    """Pieces that differ in their steps only.

    Attributes:
        name: What they are, in words.
        family: Kinds of one family differ in size only.
        sizes: Measures of a step's work, such as N + M and N M: its time grows by a factor between theirs.
        unit: Steps that are measured at a time.
        pieces: Place and number of steps of each piece, in the order of the steps.
        together: Steps that are computed together, those of a chord: the unit is so many times a whole number.
    """

    name: str
    family: str
    sizes: tuple[float, ...]
    unit: int
    pieces: Sequence[tuple[Place, int]]
    together: int = 1

    @cached_property
    def num_steps(self) -> int:
        """Steps of all pieces."""
        return sum(count for _, count in self.pieces)

    @property
    def work(self) -> float:
        """Compare how much there is to do of each kind."""
        return float(max(self.sizes) * self.num_steps)


@runtime_checkable
class MeasurableWork(Protocol):
    """A computation whose pieces can be computed in parts, for measurements."""

    @property
    def kinds(self) -> Sequence[PieceKind]:
        """All pieces, kind by kind."""

    def compute(self, place: Place, first: int, last: int, tick: Tick) -> None:
        """Compute the steps first .. last - 1 of a piece, as a worker does, and drop the result.

        Args:
            place: The piece.
            first: Number of the first step, from 0.
            last: Number of the step behind the last one.
            tick: To be called with the number of steps that are done since its last call.
        """


@dataclass(frozen=True)
class KindCost:
    """What all pieces of a kind cost.

    Attributes:
        kind: The kind.
        seconds: Of all its pieces, one after another.
        standard_error: Of the seconds.
        bias: How far the seconds may be off besides, because the kind was not measured but another one of its family.
        overhead: Seconds of a piece besides its steps.
        rate: Seconds of a step.
        degrees: Degrees of freedom of the standard error.
    """

    kind: PieceKind
    seconds: float
    standard_error: float
    bias: float
    overhead: float
    rate: float
    degrees: int

    def of_piece(self, num_steps: int) -> float:
        """Return the seconds of one piece."""
        return max(0.0, self.overhead + self.rate * num_steps)


@dataclass(frozen=True)
class SampledCosts:
    """What a computation costs, from a sample of its pieces.

    Attributes:
        kinds: The cost of each kind of pieces.
        num_measured: Parts of pieces that were measured.
        is_exact: Whether every piece was measured as a whole.
        sample_seconds: What measuring took.
    """

    kinds: tuple[KindCost, ...]
    num_measured: int
    is_exact: bool
    sample_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of all pieces, one after another."""
        return sum((cost.seconds for cost in self.kinds), 0.0)

    @property
    def error(self) -> float:
        """Half the width of the interval of the seconds; 0 if all pieces were measured."""
        if self.is_exact:
            return 0.0
        spread = float(sum(cost.standard_error**2 for cost in self.kinds) ** 0.5)
        factor = float(stdtrit(max(1, sum(cost.degrees for cost in self.kinds)), (1 + PROBABILITY) / 2))
        return float(factor * spread + sum(cost.bias for cost in self.kinds))


def sample_costs(
    work: MeasurableWork, seconds: float, *, clock: Clock = time.perf_counter, progress: bool = False
) -> SampledCosts:
    """Measure parts of pieces until the time is over, or all pieces are measured, and extrapolate.

    Of every family at least `LEAST_SAMPLES` parts are measured, after one step that is not counted. What is measured
    next is what the sum is least certain of. Where all that is left fits into the time, pieces are measured as a whole.

    Args:
        work: The pieces.
        seconds: Time for measuring.
        clock: Gives the time in seconds.
        progress: Show a progress bar.
    """
    start = clock()
    samples = [_KindSample(kind) for kind in work.kinds if kind.pieces]
    with progress_bar(100, "measuring", unit="%", shown=progress) as bar:
        for family in _families(samples):
            _warm_up(work, family, clock, seconds / (LEAST_SAMPLES * len(samples)))
            for _ in range(LEAST_SAMPLES):
                family[0].measure_part(work, clock)
                _show(bar, (clock() - start) / seconds)
        while (left := seconds - (clock() - start)) > 0 and not _is_certain(samples):
            unfinished = [sample for sample in samples if not sample.is_exact]
            if sum(_rest(sample, samples) for sample in unfinished) <= left:
                for _ in _whole_pieces(unfinished, work, clock):
                    _show(bar, (clock() - start) / seconds)
                    if clock() - start > 2 * seconds:  # what seemed to fit into the time does not
                        break
                break
            open_samples = [sample for sample in unfinished if not sample.is_exhausted]
            chosen = max(open_samples, key=lambda sample: _gain(sample, samples), default=None)
            if chosen is None or _cost(chosen, samples).rate * chosen.unit > left:
                break
            chosen.measure_part(work, clock)
            _show(bar, (clock() - start) / seconds)
    return _result(samples, clock() - start)


@final
@dataclass(eq=False)
class _KindSample:
    """What was measured of a kind: overhead and rate of each part, and the seconds of whole pieces."""

    kind: PieceKind
    unit: int = 0
    overheads: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    whole: dict[int, float] = field(default_factory=dict)
    used: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unit = self.kind.unit
        self._spots = self._spread()

    @property
    def num_measured(self) -> int:
        return len(self.rates)

    @property
    def is_exact(self) -> bool:
        return len(self.whole) == len(self.kind.pieces)

    @property
    def is_exhausted(self) -> bool:
        return len(self.used) == self._num_parts

    @cached_property
    def _num_parts(self) -> int:
        return sum(max(1, ceil(count / self.unit)) for _, count in self.kind.pieces)

    def measure_part(self, work: MeasurableWork, clock: Clock) -> None:
        """Measure a part of a piece that was not measured before, if there is one."""
        spot = next(self._spots, None)
        if spot is not None:
            number, part = spot
            count = self.kind.pieces[number][1]
            self._measure(work, clock, number, (part * self.unit, min(count, (part + 1) * self.unit)))

    def measure_whole(self, work: MeasurableWork, clock: Clock) -> Iterator[None]:
        """Measure the pieces that were not measured as a whole, one by one."""
        for number, (_, count) in enumerate(self.kind.pieces):
            if number not in self.whole:
                self._measure(work, clock, number, (0, count))
                yield

    def _measure(self, work: MeasurableWork, clock: Clock, number: int, steps: tuple[int, int]) -> None:
        place, count = self.kind.pieces[number]
        times, done = [clock()], [0]

        def tick(steps: int) -> None:
            times.append(clock())
            done.append(done[-1] + steps)

        work.compute(place, *steps, tick)
        end, length = clock(), steps[1] - steps[0]
        # what comes first is slower: it fetches memory and reads states; the rate is that of the steps behind it
        skipped = 1 if len(done) > 2 else 0
        rate = (times[-1] - times[skipped]) / max(1, done[-1] - done[skipped]) if done[-1] else 0.0
        self.rates.append(rate)
        self.overheads.append(end - times[0] - rate * length)
        if length == count:
            self.whole[number] = end - times[0]

    def _spread(self) -> Iterator[tuple[int, int]]:
        """List parts of pieces, each once, spread evenly over the steps: the middle, early, late, and so on."""
        ends = list(accumulate(count for _, count in self.kind.pieces))
        for k in range(self._num_parts):
            position = (0.5 + k * _GOLDEN) % 1 * ends[-1]
            number = min(bisect_right(ends, position), len(ends) - 1)
            part = int(position - ends[number] + self.kind.pieces[number][1]) // self.unit
            while (number, part) in self.used:
                is_last = (part + 1) * self.unit >= self.kind.pieces[number][1]
                number, part = ((number + 1) % len(ends), 0) if is_last else (number, part + 1)
            self.used.add((number, part))
            yield number, part


def _families(samples: Sequence[_KindSample]) -> list[list[_KindSample]]:
    """Return the kinds of each family, that with most work first."""
    families: dict[str, list[_KindSample]] = {}
    for sample in sorted(samples, key=lambda sample: -sample.kind.work):
        families.setdefault(sample.kind.family, []).append(sample)
    return list(families.values())


def _whole_pieces(samples: Sequence[_KindSample], work: MeasurableWork, clock: Clock) -> Iterator[None]:
    for sample in samples:
        yield from sample.measure_whole(work, clock)


def _result(samples: Sequence[_KindSample], elapsed: float) -> SampledCosts:
    costs = tuple(_cost(sample, samples) for sample in samples)
    is_exact = all(sample.is_exact for sample in samples)
    return SampledCosts(costs, sum(sample.num_measured for sample in samples), is_exact, elapsed)


def _is_certain(samples: Sequence[_KindSample]) -> bool:
    """Whether more parts are of no use."""
    count = sum(sample.num_measured for sample in samples)
    if all(sample.is_exact for sample in samples) or count >= _MANY:
        return True
    found = _result(samples, 0.0)
    return count > 2 * LEAST_SAMPLES * len(_families(samples)) and found.error <= _NARROW * found.seconds


def _warm_up(work: MeasurableWork, family: Sequence[_KindSample], clock: Clock, room: float) -> None:
    """Compute one step that is not counted, and shorten the parts that would take too long."""
    place, count = family[0].kind.pieces[0]
    start = clock()
    work.compute(place, 0, min(1, count), lambda _: None)
    taken = clock() - start
    for sample in family:
        together = sample.kind.together
        if taken * sample.unit / together > room:
            sample.unit = min(sample.unit, together * max(_MIN_PART, int(room / taken)))


def _cost(sample: _KindSample, samples: Sequence[_KindSample]) -> KindCost:
    """Extrapolate to all pieces of a kind, from its own sample or from its family's."""
    kind, n = sample.kind, sample.num_measured
    if sample.is_exact:
        seconds = sum(sample.whole.values(), 0.0)
        return KindCost(kind, seconds, 0.0, 0.0, 0.0, seconds / max(1, kind.num_steps), 0)
    if not n:
        return _cost_from_family(sample, samples)
    overhead, rate = fmean(sample.overheads), fmean(sample.rates)
    rest = len(kind.pieces) - len(sample.whole)
    steps = kind.num_steps - sum(kind.pieces[number][1] for number in sample.whole)
    length = steps / rest if rest else 0.0
    each = [o + r * length for o, r in zip(sample.overheads, sample.rates, strict=True)]
    known = (kind.num_steps - steps) / max(1, kind.num_steps)
    spread = (variance(each) / n) ** 0.5 if n > 1 else _relative_spread(samples) * abs(fmean(each))
    seconds = sum(sample.whole.values()) + rest * overhead + steps * rate
    return KindCost(kind, seconds, rest * spread * (1 - known) ** 0.5, 0.0, overhead, rate, max(0, n - 1))


def _cost_from_family(sample: _KindSample, samples: Sequence[_KindSample]) -> KindCost:
    """Extrapolate to a kind that was not measured: its time lies between what its sizes say."""
    kind = sample.kind
    other = next(family[0] for family in _families(samples) if family[0].kind.family == kind.family)
    if not other.num_measured:
        return KindCost(kind, inf, 0.0, 0.0, 0.0, inf, 0)
    cost = _cost(other, samples)
    factors = [own / its for own, its in zip(kind.sizes, other.kind.sizes, strict=True)]
    middle, half = (max(factors) + min(factors)) / 2, (max(factors) - min(factors)) / 2
    whole = len(kind.pieces) * cost.overhead + kind.num_steps * cost.rate
    relative = cost.standard_error / cost.seconds if cost.seconds > 0 else 0.0
    seconds = middle * whole
    return KindCost(kind, seconds, relative * seconds, half * whole, middle * cost.overhead, middle * cost.rate, 0)


def _relative_spread(samples: Sequence[_KindSample]) -> float:
    """Return the standard deviation of a part over its mean, among the kinds of which several parts were measured."""
    found = [variance(s.rates) / fmean(s.rates) ** 2 for s in samples if s.num_measured > 1 and fmean(s.rates) > 0]
    return fmean(found) ** 0.5 if found else 1.0


def _rest(sample: _KindSample, samples: Sequence[_KindSample]) -> float:
    """Return the seconds of the pieces that were not measured as a whole."""
    return _cost(sample, samples).seconds - sum(sample.whole.values())


def _gain(sample: _KindSample, samples: Sequence[_KindSample]) -> float:
    """Return how much another part of a kind adds to the certainty of the sum."""
    cost = _cost(sample, samples)
    if not isfinite(cost.seconds):
        return inf
    n = sample.num_measured
    return cost.seconds / max(1, n) if n < LEAST_SAMPLES else cost.standard_error / n**0.5 + 0.01 * cost.seconds / n


def _show(bar: ProgressBar, share: float) -> None:
    bar.update(max(0, min(100, int(100 * share)) - int(bar.n)))
