"""Row identity: a check of the announced indices of a step's rows, as far as rows and targets allow.

A row that is bit for bit X[i] is known. If a loop normalises or augments, its rows are not training points, and the
announced indices could be wrong. Each row is compared with X at its own index and at the indices of other rows, in
several ways, each blind to one kind of change by a loop (`_likenesses`). It wins a comparison if it is more similar to
the announced point: under a right index a row wins nearly all comparisons in one of the ways, under a wrong one half of
them, for any data. The rows' shares of wins are judged together and for each position in a step; their distribution
shows a mixture of right and wrong indices, which a mean hides. Rows without any comparison are not confirmed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from epk_gp.core.checks import blocks_of
from epk_gp.core.losses import ClassLoss, Loss, MeanSquaredError, soft_targets
from epk_gp.core.step import NOT_OF_DATA, ForwardPass, SeenRows, Step, tensor_bytes

_GROUP, _ROWS = 16, 32  # rows compared with each other, and rows taken from a pass
_FEWEST_INDICES = 4  # fewest different indices of a pass whose rows are compared with each other
_FEWEST_PROFILES = 8  # fewest points that can be identified by their similarity to each other
_BATCHES, _MIXED_BATCHES = 8, 32  # batches per judgement; more if the loop mixes rows
_JUDGED, _STEPS = 16, 64  # judgements whose rows are joined; checked steps of a recorded run
_ENOUGH_ROWS, _FEWEST_ROWS = 64, 12  # fewest rows of a judgement within a recording, and at its end
_CLEAR, _CHANCE, _SURE = 0.65, 0.62, 0.9  # least share if right, largest if wrong, least for few rows
_LEAST_MEAN, _SPREAD = 0.77, 0.3  # lowest measured mean of the shares under right indices, and their deviation
_POSITION_ROWS, _UNCOMPARED = 32, 0.25  # fewest rows of a position; share of rows that may go without a comparison
_LOST, _MIXED_LOST, _REST = 0.09, 0.3, 0.55  # share of rows that win less than half; mean of those
_GAP, _LEAD = 0.65, 3.0  # a row clearly belongs to another point: largest ratio of distances, or multiple of chance
_OUTLIERS = 0.06  # largest share of such rows by chance
_OTHERS, _SEARCHED = 256, 1 << 24  # points of X compared in addition to the batch, and numbers if there is doubt
_SIDE, _LONGEST = 32, 1024  # pixels of an image's side, or of a line, compared under shifts

# Positions of a row in a step; the rows of each position are judged separately.
_POSITIONS = (
    "half {} of each pass (of 0 and 1)", "pass {} of each step", "steps s with s % 2 = {}", "steps s with s % 3 = {}",
    "passes of {} rows",
)  # fmt: skip

_Rows = tuple[Tensor, ...]  # the rows that the network saw, (k, ...), announced samples (k,), positions (k, 5)


@dataclass(eq=False)
class RowIdentity:
    """Collects rows of a run's forward passes, and judges the rows of several batches at a time.

    Attributes:
        X: The training inputs, packed.
        y: Their targets.
        loss: The loss.
        doubt: The reason that the rows judged so far could belong to other indices; None if there is no doubt.
        outside: A description of a row that was announced as no training point and is one; None if there is none.
        num_judged: Number of judgements.
        note: The common scaling and shift of all rows, in words; None if the loop does something else.
    """

    X: Shaped[Tensor, "M ..."]
    y: Shaped[Tensor, "M ..."]
    loss: Loss
    doubt: str | None = None
    outside: str | None = None
    num_judged: int = 0
    note: str | None = None
    _num_batches: int = 0
    _is_mixed: bool = False
    _passes: list[_Rows] = field(default_factory=list)
    _targets: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # samples, as used, as recorded
    _judged: list[_Rows] = field(default_factory=list)  # shares of comparisons that rows win, samples, positions
    _numbers: dict[int, int] = field(default_factory=dict)  # numbers of the rows of X, by their keys

    @torch.no_grad()
    def look_at(self, step: Step) -> str | None:
        """Take some rows of a step, and report contradictions to the announced indices once there are enough rows."""
        if not step.passes:
            return None
        for number, (forward, samples) in enumerate(self._split(step)):
            self._take(forward, samples, [number, step.index % 2, step.index % 3, forward.num_rows])
        self._num_batches += 1
        has_batches = self._num_batches >= (_MIXED_BATCHES if self._is_mixed else _BATCHES)
        return self._judge() if has_batches and self._num_rows >= _ENOUGH_ROWS else None

    @torch.no_grad()
    def finish(self) -> str | None:
        """Report contradictions to the indices from the remaining rows, if they are enough or the only ones."""
        return None if self.num_judged and self._num_rows < _ENOUGH_ROWS else self._judge()

    def finding(self, steps: Sequence[Step]) -> str | None:
        """Return the reason that the indices of a recorded run are wrong or not confirmed; None if they are confirmed.

        Args:
            steps: The steps of the run; some of them, at irregular distances, are checked.
        """
        if not any(step.passes for step in steps):
            return None
        order, errors = torch.randperm(len(steps), generator=torch.Generator().manual_seed(0)), list[str | None]()
        for number in order[:_STEPS].sort().values.tolist():
            self.look_outside(steps[number])
            errors.append(self.look_at(steps[number]))
        wrong = next((error for error in [*errors, self.finish()] if error is not None), None)
        if wrong is not None:
            return f"the announced indices are not those of the rows: {wrong}"
        return self.outside if self.doubt is None else f"rows could not be matched with X: {self.doubt}"

    @torch.no_grad()
    def look_outside(self, step: Step) -> str | None:
        """Describe the first row that was announced as no training point but equals one bit for bit; then None."""
        if self.outside is not None or step.batch is None or not bool((step.batch < 0).any()):
            return None
        if not self._numbers:
            keys = (key for (rows,) in blocks_of(self.X) for key in _keys(rows))
            self._numbers = {key: number for number, key in enumerate(keys)}
        for number, (forward, samples) in enumerate(self._split(step)):
            inputs = SeenRows(samples[:0], self.X[:0]) if forward.inputs is None else forward.inputs
            for row, key in zip(inputs.index.tolist(), _keys(inputs.values), strict=True):
                if samples[row] < 0 and key in self._numbers:
                    self.outside = (
                        f"row {row} of pass {number} of step {step.index} was announced as no training point (-1), "
                        f"and is X[{self._numbers[key]}] bit for bit: its contribution is listed under {NOT_OF_DATA!r}"
                    )
                    return self.outside
        return None

    def _split(self, step: Step) -> list[tuple[ForwardPass, Int64[Tensor, " n"]]]:
        """Return the passes of a step, each with its announced samples."""
        rows = torch.arange(len(self.X)) if step.batch is None else step.batch.cpu()
        return list(zip(step.passes, rows.split([p.num_rows for p in step.passes]), strict=True))

    @property
    def _num_rows(self) -> int:
        return max(sum(len(part[1]) for part in parts) for parts in (self._passes, self._targets))

    def _take(self, forward: ForwardPass, samples: Int64[Tensor, " n"], position: list[int]) -> None:
        inputs = forward.inputs
        places = torch.arange(len(samples)) if inputs is None else inputs.index.cpu()
        known = (samples[places] >= 0).nonzero().squeeze(1)  # rows outside the training data have no index to confirm
        if not len(known):
            return
        spread = torch.linspace(0, len(known) - 1, min(len(known), _ROWS)).long()
        chosen = known[(spread + 7 * self._num_batches) % len(known)]  # different rows in each batch
        chosen = chosen[self._take_targets(forward, samples, places[chosen])]
        if inputs is not None and len(chosen):
            rows, positions = places[chosen], torch.tensor([[0, *position]]).repeat(len(chosen), 1)
            positions[:, 0] = 2 * rows // forward.num_rows
            self._passes.append((inputs.values[chosen.to(inputs.values.device)], samples[rows], positions))

    def _take_targets(self, forward: ForwardPass, samples: Tensor, rows: Tensor) -> Bool[Tensor, " k"]:
        """Keep the targets of some rows, and return the rows whose mixed targets do not rather belong to others."""
        loss, y, other = self.loss, self.y[samples.to(self.y.device)].cpu(), forward.targets
        is_class, is_own = isinstance(loss, ClassLoss), torch.ones(len(rows)).bool()
        is_one = y.ndim == 1 or (y.ndim == 2 and y.is_floating_point())
        if not is_one or not (is_class or isinstance(loss, MeanSquaredError)) or getattr(loss, "class_weights", None):
            return is_own
        recorded = y.reshape(len(y), -1).double()
        if isinstance(loss, ClassLoss) and not y.is_floating_point():  # the classes that occur
            recorded = soft_targets(loss, y, recorded.new_empty(0, max(1, int(self.y.max()) + 1)))
        used, C = recorded, recorded.shape[1]
        if other is not None:
            used = recorded.index_copy(0, other.index.cpu(), other.values[:, :C].cpu().double())
        used, recorded, is_mixed = used[rows], recorded[rows], torch.tensor(other is not None)
        if is_class:  # whether a class has any share
            floor = (getattr(loss, "label_smoothing", 0.0) + 0.1) / C
            shares, recorded = used, (recorded > floor).double()
            used = (used > floor).double()
            is_mixed = used.sum(dim=1) > recorded.sum(dim=1)
            is_own = ~is_mixed | ((shares * recorded).sum(dim=1) >= 0.5 * shares.sum(dim=1))
        self._is_mixed |= bool(is_mixed.any())
        self._targets.append((used, recorded, samples[rows]))
        return is_own

    def _judge(self) -> str | None:
        """Judge the rows collected so far, and forget them."""
        groups, targets, batches = _groups_of(self._passes), self._targets, self._num_batches
        self._passes, self._targets, self._num_batches = [], [], 0
        error = self._wrong_targets(targets)
        varies = len(self.X) > 1 and any(bool((seen != seen[:1]).any()) for seen, *_ in groups)
        if error is None and varies and not any(bool((self.X[:1] != rows).any()) for (rows,) in blocks_of(self.X)):
            error = "all rows of X are alike, and those that the network saw are not"
        if error is not None:
            error += self._named(groups)
        elif groups and len(self.X) > 1:
            error = self._wrong_rows(groups, batches)
        self.num_judged += bool(batches)
        return error

    def _wrong_targets(self, targets: list[tuple[Tensor, Tensor, Tensor]]) -> str | None:
        """Report whether the targets of the loop's loss differ from the recorded ones, by their correlation."""
        if not targets:
            return None
        used, recorded, samples = (torch.cat(values) for values in zip(*targets, strict=True))
        used, recorded, n = used - used.mean(dim=0), recorded - recorded.mean(dim=0), len(samples.unique())
        if n < _FEWEST_ROWS or not used.any():
            return None
        if not recorded.any():
            is_constant = not (self.y != self.y[:1]).any()
            return "all targets y are alike, and those of the loop's loss are not" if is_constant else None
        correlation = float((used * recorded).sum() / (used.norm() * recorded.norm()))
        deviation = 1 / math.sqrt(n * max(1, int(recorded.any(dim=0).sum()) - 1))
        if correlation >= min(0.25, 3 * deviation):
            return None
        return (
            "the targets that the loop's loss used agree with y at the announced indices no more than by chance "
            f"(a correlation of {correlation:.2f} over {n} samples)"
        )

    def _wrong_rows(self, groups: list[_Rows], batches: int) -> str | None:
        """Report contradictions to the indices of some batches, or, if all rows were judged before, of one position."""
        judged = self._shares_won(groups), *map(torch.cat, list(zip(*groups, strict=True))[1:])
        is_searched = self.num_judged < 2 and not float(judged[0].nanmean()) >= 0.97
        clear, of, name = self._clearly_others(groups, _SEARCHED if is_searched else 0)
        if not self._is_mixed and clear > _OUTLIERS * of + math.sqrt(of):
            return f"{name}, in at least {clear} of {of} rows"
        error, _ = self._verdict(judged[0], judged[1], f" in {batches} batches")
        if error is not None and (batches >= _BATCHES or not self._is_mixed):
            return error + self._named(groups)
        self._judged = [*self._judged, judged][-_JUDGED:]
        shares, samples, positions = (torch.cat(values) for values in zip(*self._judged, strict=True))
        _, self.doubt = self._verdict(shares, samples, "")
        for column, words in enumerate(_POSITIONS):
            for value in positions[:, column].unique():
                chosen = positions[:, column] == value
                if _POSITION_ROWS <= int(chosen.sum()) < len(chosen):
                    where = f" in {words.format(int(value))}"
                    error, doubt = self._verdict(shares[chosen], samples[chosen], where, is_position=True)
                    if error is not None:
                        return error + self._named(groups)
                    self.doubt = self.doubt or doubt
        self.doubt = self.doubt or _mixture(shares, is_mixed=self._is_mixed)
        self.note = self.note or (None if self.doubt else self._common_map(groups))
        return None

    def _verdict(
        self, shares: Float64[Tensor, " n"], samples: Tensor, where: str, *, is_position: bool = False
    ) -> tuple[str | None, str | None]:
        """Report whether rows win no more comparisons than by chance, or the reason that they may do so."""
        compared = ~shares.isnan()
        mean, n, rows = float(shares.nanmean()), int(compared.sum()), len(samples[compared].unique())
        if n < (1 - _UNCOMPARED) * len(shares):
            lone = "could be compared with no other point: too few different indices were announced together"
            return None, f"{len(shares) - n} of {len(shares)} rows{where} {lone}"
        words = (
            f"the rows that the network saw{where} are more like X at their announced indices than like other rows of "
            f"X in {mean:.0%} of the comparisons only, where 50 % are chance ({n} rows, {rows} different indices)"
        )
        deviation = 0.289 / math.sqrt(n if rows == len(self.X) else rows)  # deviation of the mean under wrong indices
        limit, least = min(_CHANCE, 0.5 + 5 * deviation), max(_CLEAR, min(_SURE, 0.5 + 4 * deviation))
        if is_position:  # one of many positions, so a right one must be far from the limit
            limit = least = min(_CHANCE, _LEAST_MEAN - 4.5 * _SPREAD / math.sqrt(n)) - 0.04 * self._is_mixed
        return words if mean <= limit and rows >= _FEWEST_ROWS else None, words if mean < least else None

    def _own(self, samples: Int64[Tensor, " k"]) -> Shaped[Tensor, "k ..."]:
        return self.X[samples.to(self.X.device)]

    def _shares_won(self, groups: list[_Rows]) -> Float64[Tensor, " n"]:
        """Return each row's share of won comparisons, NaN without any; more informative ways count more."""
        scores, differs = [], []
        for seen, samples, _ in groups:
            own = self._own(samples)
            flat = own.reshape(len(own), -1)
            differs.append((flat[:, None] != flat[None]).any(dim=2).cpu())  # X may contain a point twice
            alike = _likenesses(seen.to(own.device), own, differs[-1].to(own.device)).double().cpu()
            once = 1 / (~differs[-1]).sum(dim=1).double()  # a repeated point counts once
            alike = alike - (alike * once).sum(dim=2, keepdim=True) / once.sum()
            deviation = ((alike.square() * once).sum(dim=2, keepdim=True) / once.sum()).sqrt()
            scores.append(alike / deviation.clamp(min=1e-30))
        ways = torch.cat([_shares(*pair) for pair in zip(scores, differs, strict=True)], dim=1).nanmean(dim=1)
        weights = (ways - 0.5).clamp(min=0).square().nan_to_num().view(-1, 1, 1)
        scores = [(weights * score.clamp(min=0) ** 3).sum(dim=0, keepdim=True) for score in scores]
        return torch.cat([_shares(*pair)[0] for pair in zip(scores, differs, strict=True)])

    def _clearly_others(self, groups: list[_Rows], searched: int) -> tuple[int, int, str]:
        """Return the number of rows that clearly belong to other points, the total, and one such pair."""
        groups = [group for group in groups if group[0].shape[1:] == self.X.shape[1:]]
        if not groups or len(self.X) < _FEWEST_PROFILES:
            return 0, 1, ""
        seen, samples, _ = map(torch.cat, zip(*groups, strict=True))
        M, count = len(self.X), max(_OTHERS, searched // max(1, self.X[0].numel()))
        others = torch.linspace(0, M - 1, min(M, count), dtype=torch.float64).long()
        places = torch.cat([samples, (samples - 1) % M, (samples + 1) % M, others]).unique()
        own = self._own(samples if len(samples.unique()) >= _FEWEST_ROWS else places)
        near = _closeness(seen.to(self.X.device), self._own(places), own).cpu()
        best, second, third = near.topk(3, dim=1).values.T
        place, middle = places[near.argmax(dim=1)], near.median(dim=1).values
        announced = near.gather(1, torch.searchsorted(places, samples)[:, None])[:, 0]
        lead = 1 - best / second.clamp(max=-1e-30)
        is_apart = second < 0.05 * near.median()  # X may contain a point twice
        is_other = (place != samples) & second.isfinite() & is_apart
        chance = (second - middle) / math.log(len(places) / 4)  # average lead of the nearest point by chance
        is_outlier = (best - second > _LEAD * chance) & (announced < third)
        lead = torch.where(is_other & (is_outlier | (lead > _GAP)), lead, 0.0)
        row = int(lead.argmax())
        pair = f"X[{int(place[row])}], the batch says X[{int(samples[row])}]"
        return int((lead > 0).sum()), len(seen), f"the network saw something like {pair}"

    def _named(self, groups: list[_Rows]) -> str:
        clear, of, name = self._clearly_others(groups, _SEARCHED)
        return f": {name}, in at least {clear} of {of} rows" if clear >= 3 else ""

    def _common_map(self, groups: list[_Rows]) -> str | None:
        """Describe the common scaling and shift of all rows, if the loop does nothing else to them."""
        count = sum(len(samples) for _, samples, _ in groups)
        if count <= _GROUP or any(seen.shape[1:] != self.X.shape[1:] for seen, *_ in groups):
            return None
        seen = torch.cat([seen for seen, *_ in groups]).double()
        own = self._own(torch.cat([samples for _, samples, _ in groups])).to(seen)
        if bool(((seen - own).abs() <= 1e-2 * (seen - seen.mean()).abs().max()).all()):
            return None  # the noise is too small to be distinguished from a shift
        s, x = seen - seen.mean(dim=0), own - own.mean(dim=0)
        slope = (s * x).sum(dim=0) / x.square().sum(dim=0).clamp(min=1e-300)
        if bool(((s - slope * x).abs() <= 1e-3 * s.abs().max()).all()):
            return "each column of every row is that of X[i], scaled and shifted"
        return None


def _groups_of(passes: list[_Rows]) -> list[_Rows]:
    """Return groups of rows to compare: one pass each, or several passes if a pass has few different indices."""
    together: dict[object, list[_Rows]] = {}
    for number, rows in enumerate(passes):
        key = number if len(rows[1].unique()) >= _FEWEST_INDICES else rows[0].shape[1:]
        together.setdefault(key, []).append(rows)
    wholes = [tuple(map(torch.cat, zip(*alike, strict=True))) for alike in together.values()]
    counts = [math.ceil(len(whole[1]) / _GROUP) for whole in wholes]
    return [
        tuple(v[k::count] for v in whole) for whole, count in zip(wholes, counts, strict=True) for k in range(count)
    ]


def _shares(scores: Float64[Tensor, "w k k"], differs: Bool[Tensor, "k k"]) -> Float64[Tensor, "w k"]:
    """Return each row's share of comparisons with other points that favour the announced point."""
    announced = scores.diagonal(dim1=1, dim2=2)[:, :, None]
    won = (scores < announced).double() + 0.5 * (scores == announced)
    return (won * differs).sum(dim=2) / differs.sum(dim=1)


def _mixture(shares: Float64[Tensor, " n"], *, is_mixed: bool) -> str | None:
    """Report whether some rows lose as by chance, while nearly all others win all of their comparisons.

    Under wrong indices a row's share is uniform between 0 and 1; rows that are changed beyond recognition have shares
    closer to 1.
    """
    shares = shares[~shares.isnan()]
    lost, rest = float((shares < 0.5).double().mean()), shares[shares < 1]
    is_chance = lost > _LOST and float(rest.mean()) < min(_REST, 0.6 - 3 * _SPREAD / math.sqrt(len(rest)))
    words = f"{lost:.0%} of {len(shares)} rows are less like X at their announced indices than like most other rows"
    return words if (lost > _MIXED_LOST if is_mixed else is_chance) else None


def _keys(rows: Shaped[Tensor, "n ..."]) -> list[int]:
    """Return a hash of each row's shape, dtype and bytes."""
    content, size, kind = bytes(tensor_bytes(rows)), rows[:1].nbytes, (rows.shape[1:], rows.dtype)
    return [hash((kind, content[at : at + size])) for at in range(0, len(content), size or 1)]


def _likenesses(seen: Tensor, own: Tensor, differs: Bool[Tensor, "k k"]) -> Float[Tensor, "4 k k"]:
    """Return similarities between rows and rows of X, in several ways; rows with the same number belong together.

    The ways: entry by entry, after scaling and shifting columns; under shifts and mirroring, with all frequencies of
    equal size; by the sorted numbers, or by counts of tokens; and by the similarity to the other rows, which a fixed
    map of all rows changes little.
    """
    unknown = torch.zeros(len(seen), len(own), device=own.device)
    entries = _closeness(seen, own, own) if seen.shape == own.shape else unknown
    a, b = _as_images(seen, own), _as_images(own, own)
    values = _sorted if own.is_floating_point() or seen.is_floating_point() else _token_counts
    sizes = _closeness(values(seen), values(own), values(own))
    shifted = _shifted(a, b) if a.shape[1] == b.shape[1] else unknown
    points = float((1 / (~differs).sum(dim=1)).sum())  # distinct points; few points all have similar profiles
    profiles = _profile(seen, differs) @ _profile(own, differs).T if points >= _FEWEST_PROFILES else unknown
    return torch.stack([entries, shifted, sizes, profiles])


def _closeness(seen: Tensor, others: Tensor, own: Tensor) -> Float[Tensor, "n m"]:
    """Return negative distances of rows from others; columns are scaled by means and deviations of seen and own."""
    seen, others, own = (x.reshape(len(x), -1).float() for x in (seen, others, own))
    return -torch.cdist(_standard(seen, seen), _standard(others, own))


def _standard(x: Float[Tensor, "k D"], reference: Float[Tensor, "r D"]) -> Float[Tensor, "k D"]:
    deviation = reference.std(dim=0, correction=0)
    varies = deviation > 1e-6 * reference.abs().amax(dim=0)
    z = ((x - reference.mean(dim=0)) / deviation).where(varies, 0.0).clamp(-4, 4)
    return F.normalize(z) if z.shape[1] >= 8 else z  # mixed rows are shorter: only directions count


def _as_images(x: Tensor, own: Tensor) -> Float[Tensor, "k C h w"]:
    """Return rows as images of about 32 pixels a side; a vector becomes one line."""
    x, own = (v.reshape(len(v), 1, 1, -1) if v.ndim < 3 else v[:, None] if v.ndim == 3 else v for v in (x, own))
    height, width = own.flatten(3).shape[2:]
    kernel = math.ceil(height / _SIDE), math.ceil(width / (_SIDE if height > 1 else _LONGEST))
    return F.avg_pool2d(x.float().flatten(3), kernel, ceil_mode=True)


def _shifted(seen: Tensor, own: Tensor) -> Float[Tensor, "n m"]:
    """Return the largest correlation of images over all shifts, mirrored or not, inverted or not."""
    size = [max(pair) for pair in zip(seen.shape[2:], own.shape[2:], strict=True)]
    centred = [x - x.mean(dim=0) for x in (seen, own, own.flip(3))]
    spectra = [torch.fft.rfft2(x - x.mean(dim=(2, 3), keepdim=True), s=size) for x in centred]
    amplitude = spectra[1].abs().square().mean(dim=(0, 1)).sqrt()
    spectra = [x / (amplitude + 0.1 * amplitude.mean()).clamp(min=1e-30) for x in spectra]
    a, *mirrored = (x / x.flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None, None] for x in spectra)
    products = ((a[:, None] * b[None].conj()).sum(dim=2) for b in mirrored)
    correlations = [torch.fft.irfft2(product, s=size).flatten(2).abs().amax(dim=2) for product in products]
    return torch.stack(correlations).amax(dim=0)


def _sorted(x: Tensor) -> Float[Tensor, "k 32"]:
    values = x.reshape(len(x), -1).float().sort(dim=1).values
    return values[:, torch.linspace(0, values.shape[1] - 1, 32).long()]


def _token_counts(x: Tensor) -> Float[Tensor, "k 512"]:
    tokens = x.reshape(len(x), -1).long() % 512
    return torch.zeros(len(x), 512, device=x.device).scatter_add_(1, tokens, torch.ones_like(tokens).float())


def _profile(x: Tensor, differs: Bool[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    alike = _closeness(x, x, x) * differs
    alike = alike - alike.sum(dim=1, keepdim=True) / differs.sum(dim=1, keepdim=True).clamp(min=1)
    return F.normalize(alike * differs)
