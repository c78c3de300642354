"""Whose rows a run saw: rows of its forward passes that are unlike X[i] are compared with X[i] and with other points.

Where a loop normalises or augments, its rows are no training points, and the indices that it announces could be any.
They are believed only as far as rows and targets support them. Rows are compared in several ways, each blind to
something that loops do to rows (`_likenesses`). The announced row wins a comparison where it is more alike than another
row of the batch: right indices win far more than half of them in one of the ways, wrong ones half, whatever the data.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from epk_gp.core.losses import CrossEntropy, Loss, MeanSquaredError, NegativeLogLikelihood, soft_targets
from epk_gp.core.step import ForwardPass, Step

_GROUP = 16  # rows that are compared with one another
_BATCHES, _MIXED_BATCHES = 8, 32  # of one judgement; more where the loop mixes rows, some of which are rather others
_ENOUGH_ROWS, _FEWEST_ROWS = 64, 12  # of a judgement within a recording, and of one at its end
_CLEAR, _CHANCE = 0.65, 0.62  # shares of the comparisons that right indices win at least, and wrong ones at most
_NEAR, _FEWEST_NEAR = 0.3, 8  # a row is another one's if it is that much nearer to it than to all others
_OTHERS, _SEARCHED = 256, 1 << 24  # points of X that are compared beside the batch, and numbers if there is a doubt
_THOROUGH = 2  # judgements that search so many
_NAMED = 4096  # points of X among which rows are found again, to name them in an error
_DIRECTIONS = 8  # of as many columns on, rows are compared by their directions
_SIDE, _LONGEST = 32, 1024  # pixels of an image's side, or of a line, that are compared under shifts

CAUSES = (
    "Likely causes: indices that are counted beside a shuffled loader, or X and y that are not those of the data set "
    "that is loaded, or in another order. Take the indices from IndexedDataset (of a Subset it gives the numbers of the "
    "whole data set)"
)


@dataclass(frozen=True, eq=False)
class _Group:
    """Rows as the network saw them, the samples that were announced for them, and those rows of X."""

    seen: Shaped[Tensor, "k ..."]
    samples: Int64[Tensor, " k"]
    own: Shaped[Tensor, "k ..."]


@dataclass(eq=False)
class RowIdentity:
    """Collects rows of a run's forward passes, and judges those of several batches at a time.

    Attributes:
        X: The training inputs, packed.
        y: Their targets.
        loss: The loss.
        doubts: What was said of rows that could be those of any index.
        num_confirmed: Number of judgements that confirmed the announced indices.
        note: How the loop scales and shifts all rows, in words; None if it does something else.
    """

    X: Shaped[Tensor, "M ..."]
    y: Shaped[Tensor, "M ..."]
    loss: Loss
    doubts: list[str] = field(default_factory=list)
    num_confirmed: int = 0
    note: str | None = None
    _num_batches: int = 0
    _is_mixed: bool = False
    _groups: list[_Group] = field(default_factory=list)
    _pending: tuple[Tensor, Tensor] | None = None  # rows and samples of the next group
    _targets: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # samples, as used, as recorded

    @torch.no_grad()
    def look_at(self, step: Step) -> str | None:
        """Take some rows of a step, and say what contradicts the announced indices once there are enough rows."""
        if not step.passes:
            return None
        rows = torch.arange(len(self.X)) if step.batch is None else step.batch.cpu()
        for forward, samples in zip(step.passes, rows.split([p.num_rows for p in step.passes]), strict=True):
            self._take(forward, samples)
        self._num_batches += 1
        num_rows = max(_GROUP * len(self._groups), sum(len(samples) for samples, _, _ in self._targets))
        enough = self._num_batches >= (_MIXED_BATCHES if self._is_mixed else _BATCHES) and num_rows >= _ENOUGH_ROWS
        return self._judge() if enough else None

    @property
    def has_judged(self) -> bool:
        """Whether rows were judged, or there was nothing to judge."""
        return bool(self.num_confirmed or self.doubts)

    @torch.no_grad()
    def finish(self) -> str | None:
        """Say what contradicts the indices, by the rows that are left, if there are enough or no others were judged."""
        num_rows = sum(len(group.samples) for group in self._groups)
        return None if self.has_judged and num_rows < _ENOUGH_ROWS else self._judge()

    @property
    def doubt(self) -> str | None:
        """Why the announced indices could not be confirmed; None if they were, or if there was nothing to confirm."""
        return self.doubts[0] if len(self.doubts) > self.num_confirmed else None

    def _take(self, forward: ForwardPass, samples: Int64[Tensor, " n"]) -> None:
        inputs = forward.inputs
        places = torch.arange(len(samples)) if inputs is None else inputs.index.cpu()
        spread = torch.linspace(0, len(places) - 1, min(len(places), _GROUP)).long()
        chosen = (spread + 7 * self._num_batches) % len(places)  # others of each batch, which may be all of X
        is_own = self._take_targets(forward, samples, places[chosen])
        if inputs is None:
            return
        values = inputs.values[chosen.to(inputs.values.device)].to(self.X.device)[is_own.to(self.X.device)]
        samples = samples[places[chosen]][is_own]
        if self._pending is not None and self._pending[0].shape[1:] == values.shape[1:]:
            values, samples = torch.cat([self._pending[0], values]), torch.cat([self._pending[1], samples])
        numbers = samples.tolist()
        first = [place for place, number in enumerate(numbers) if number not in numbers[:place]]
        values, samples = values[first], samples[first]
        if len(samples) >= _GROUP:
            self._add_group(values[:_GROUP], samples[:_GROUP])
            values, samples = values[_GROUP:], samples[_GROUP:]
        self._pending = values, samples

    def _add_group(self, seen: Tensor, samples: Tensor) -> None:
        self._groups.append(_Group(seen, samples, self.X[samples.to(self.X.device)]))

    def _take_targets(self, forward: ForwardPass, samples: Tensor, rows: Tensor) -> Bool[Tensor, " k"]:
        """Keep the targets of some rows, and return which rows are, by mixed targets, not rather those of others."""
        loss, y, other = self.loss, self.y[samples.to(self.y.device)].cpu(), forward.targets
        is_class, is_own = isinstance(loss, CrossEntropy | NegativeLogLikelihood), torch.ones(len(rows)).bool()
        is_one = y.ndim == 1 or (y.ndim == 2 and y.is_floating_point())
        if not is_one or not (is_class or isinstance(loss, MeanSquaredError)) or getattr(loss, "class_weights", None):
            return is_own
        recorded = y.reshape(len(y), -1).double()
        if is_class and not y.is_floating_point():  # the classes that occur
            recorded = soft_targets(loss, y, recorded.new_empty(0, max(1, int(self.y.max()) + 1)))
        used, C = recorded, recorded.shape[1]
        if other is not None:
            used = recorded.index_copy(0, other.index.cpu(), other.values[:, :C].cpu().double())
        used, recorded = used[rows], recorded[rows]
        if is_class:  # whether a class has a share, however large
            floor = (getattr(loss, "label_smoothing", 0.0) + 0.1) / C
            has_share, had_share = used > floor, recorded > floor
            is_mixed = has_share.sum(dim=1) > had_share.sum(dim=1)
            is_own = ~is_mixed | ((used * had_share).sum(dim=1) >= 0.5 * used.sum(dim=1))
            used, recorded = has_share.double(), had_share.double()
        self._is_mixed |= bool(is_mixed.any()) if is_class else other is not None
        self._targets.append((samples[rows], used, recorded))
        return is_own

    def _judge(self) -> str | None:
        """Judge the rows collected so far, and forget them."""
        if self._pending is not None and len(self._pending[1]) >= 4 and len(self._groups) < 4:
            self._add_group(*self._pending)
        groups, targets, batches, is_mixed = self._groups, self._targets, self._num_batches, self._is_mixed
        self._groups, self._targets, self._num_batches, self._is_mixed = [], [], 0, False
        self._pending = None
        error = self._wrong_targets(targets) or self._placeholder(groups)
        if groups and error is None:
            return self._judge_rows(groups, batches, is_mixed)
        self.num_confirmed += bool(batches)
        return error if error is None else error + self._example(groups)

    def _wrong_targets(self, targets: list[tuple[Tensor, Tensor, Tensor]]) -> str | None:
        """Say whether the targets of the loop's loss are others than the recorded ones, by their correlation."""
        if not targets:
            return None
        samples, used, recorded = (torch.cat(values) for values in zip(*targets, strict=True))
        used, recorded, n = used - used.mean(dim=0), recorded - recorded.mean(dim=0), len(samples.unique())
        if n < _FEWEST_ROWS or not used.any():
            return None
        if not recorded.any():
            is_constant = bool((self.y == self.y[:1]).all())
            return "all targets y are alike, and those of the loop's loss are not" if is_constant else None
        correlation = float((used * recorded).sum() / (used.norm() * recorded.norm()))
        freedom = max(1, int(recorded.any(dim=0).sum()) - 1)
        if correlation >= min(0.25, 3 / math.sqrt(n * freedom)):
            return None
        return (
            "the targets that the loop's loss used agree with y at the announced indices no more than by chance "
            f"(a correlation of {correlation:.2f} over {n} samples)"
        )

    def _placeholder(self, groups: list[_Group]) -> str | None:
        varies = any(bool((group.seen != group.seen[:1]).any()) for group in groups)
        if not varies or len(self.X) == 1 or bool((self.X != self.X[:1]).any()):
            return None
        return "all rows of X are alike, and those that the network saw are not"

    def _judge_rows(self, groups: list[_Group], batches: int, is_mixed: bool) -> str | None:
        shares = [_shares_won(group) for group in groups]
        won, count = torch.stack([won for won, _ in shares]).sum(dim=0), sum(count for _, count in shares)
        rows = len(torch.cat([group.samples for group in groups]).unique())
        share, deviation = float(won.max()) / max(1, count), 0.289 / math.sqrt(rows)
        is_thorough = float(won[0]) < 0.97 * count and self.num_confirmed + len(self.doubts) < _THOROUGH
        near, of = (0, 1) if is_mixed else self._nearer(groups, is_thorough=is_thorough)
        if near >= max(_FEWEST_NEAR, (0.25 if self.X[0].numel() > 1 else 0.6) * of):
            return f"{near} of {of} rows are other training points, scaled or shifted{self._example(groups)}"
        words = (
            "the rows that the network saw are more like X at their announced indices than like other rows of X in "
            f"{share:.0%} of the comparisons only, where 50 % are chance ({rows} rows of {batches} batches)"
        )
        is_chance = share <= min(_CHANCE, 0.5 + 2.5 * deviation)
        if count and is_chance and rows >= _FEWEST_ROWS and (batches >= _BATCHES or not is_mixed):
            return words + self._example(groups)
        if share < _CLEAR:
            self.doubts.append(words if count else "all compared rows of X are alike")
        else:
            self.num_confirmed += 1
            self.note = self.note or _common_map(groups)
        return None

    def _nearer(self, groups: list[_Group], *, is_thorough: bool) -> tuple[int, int]:
        """Return how many rows are clearly those of other points, scaled and shifted, and of how many."""
        groups = [group for group in groups if group.seen.shape[1:] == self.X.shape[1:]]
        if not groups:
            return 0, 1
        seen, own = torch.cat([group.seen for group in groups]), torch.cat([group.own for group in groups])
        samples, M = torch.cat([group.samples for group in groups]), len(self.X)
        width = max(1, self.X[0].numel())
        others = torch.linspace(0, M - 1, min(M, max(_OTHERS, _SEARCHED // width if is_thorough else 0))).long()
        places = torch.cat([samples, (samples - 1) % M, (samples + 1) % M, others]).unique()
        z_seen, z_own = _standard(seen, seen), _standard(own, own)
        z = _standard(self.X[places.to(self.X.device)], own)
        distances, announced = torch.cdist(z_seen, z), (z_seen - z_own).norm(dim=1)
        alike = 0.01 * distances.median()  # X may hold a point twice
        distances = distances.masked_fill(torch.cdist(z_own, z) <= alike, math.inf)
        nearest, place = distances.min(dim=1)
        second = distances.masked_fill(torch.cdist(z[place], z) <= alike, math.inf).amin(dim=1)
        is_other = (nearest < _NEAR * torch.minimum(announced, second)) & second.isfinite()
        return int(is_other.sum()), len(seen)

    def _example(self, groups: list[_Group]) -> str:
        """Name rows that are more like another point of X than like their own, if some of them are it clearly."""
        clear, others, of = [], set(), 0
        for group in groups[:2]:
            spread = torch.linspace(0, len(self.X) - 1, min(len(self.X), _NAMED)).long()
            places, samples = torch.cat([group.samples, spread]), group.samples
            of += len(samples)
            for likeness in _likenesses(group.seen, self.X[places.to(self.X.device)])[:2]:
                nearest = places[likeness.cpu().argmax(dim=1)]
                rest = likeness.cpu().masked_fill(places == nearest[:, None], -math.inf).amax(dim=1)
                gap, usual = likeness.cpu().amax(dim=1) - rest, rest - likeness.cpu().median(dim=1).values
                is_clear = (gap > 0.4 * usual) & (nearest != samples)
                clear += list(
                    zip((gap / usual)[is_clear].tolist(), nearest[is_clear].tolist(), samples[is_clear].tolist())
                )
                others |= set(samples[nearest != samples].tolist())
        if len(clear) < 3:
            return ""
        _, nearest, sample = max(clear)
        return (
            f": the network saw something like X[{nearest}], the batch says X[{sample}], in {len(others)} of {of} rows"
        )


def identity_finding(
    X: Shaped[Tensor, "M ..."], y: Shaped[Tensor, "M ..."], loss: Loss, steps: Sequence[Step]
) -> str | None:
    """Say why the indices of a recorded run are wrong, or could not be confirmed; None if they were.

    Args:
        X: The training inputs, packed.
        y: Their targets.
        loss: The loss.
        steps: The steps of the run; some, spread over it, are looked at.
    """
    if not any(step.passes for step in steps):
        return None
    identity = RowIdentity(X, y, loss)
    spread = torch.linspace(0, len(steps) - 1, min(len(steps), 2 * _MIXED_BATCHES)).long().tolist()
    errors = [identity.look_at(steps[number]) for number in spread]
    wrong = next((error for error in [*errors, identity.finish()] if error is not None), None)
    if wrong is not None:
        return f"the announced indices are not those of the rows: {wrong}"
    return None if identity.doubt is None else f"rows could not be matched with X: {identity.doubt}"


def _shares_won(group: _Group) -> tuple[Float[Tensor, " ways"], int]:
    """Return how many comparisons with the other rows of a group the announced rows win, and how many there are."""
    own = group.own.reshape(len(group.own), -1)
    differs = (own[:, None] != own[None]).any(dim=2)
    won = []
    for likeness in _likenesses(group.seen, group.own):
        announced = likeness.diagonal()[:, None]
        won.append(((likeness < announced).double() + 0.5 * (likeness == announced))[differs].sum())
    return torch.stack(won).cpu(), int(differs.sum())


def _likenesses(seen: Tensor, own: Tensor) -> list[Float[Tensor, "n m"]]:
    """Return how alike rows are to rows of X, in several ways; rows of the same number belong together.

    Entry by entry, after scaling and shifting columns; under shifts and mirroring, with all frequencies of one size; by
    their sorted numbers, or by how often they hold a token; and by how alike they are to the other rows.
    """
    unknown = torch.zeros(len(seen), len(own), device=own.device)
    is_integer = not own.is_floating_point() and not seen.is_floating_point()
    entries = unknown if seen.shape[1:] != own.shape[1:] else _closeness(seen, own)
    if is_integer and seen.shape[1:] == own.shape[1:]:
        entries = (seen[:, None] == own[None]).reshape(len(seen), len(own), -1).float().mean(dim=2)
    a, b = _as_images(seen, own), _as_images(own, own)
    shifted = _shifted(a, b) if a.shape[1] == b.shape[1] else unknown
    values = _token_counts if is_integer else _quantiles
    profiles = _profile(seen) @ _profile(own).T if len(seen) == len(own) else unknown
    return [entries, shifted, _closeness(values(seen), values(own)), profiles]


def _closeness(seen: Tensor, own: Tensor) -> Float[Tensor, "n m"]:
    return -torch.cdist(_standard(seen, seen), _standard(own, own))


def _standard(x: Tensor, reference: Tensor) -> Float[Tensor, "k D"]:
    """Return rows with columns scaled and shifted as a reference has to be to have means 0 and variances 1."""
    x, reference = x.reshape(len(x), -1).float(), reference.reshape(len(reference), -1).float()
    mean, deviation = reference.mean(dim=0), reference.std(dim=0, correction=0)
    z = ((x - mean) / deviation).where(deviation > 1e-6 * reference.abs().amax(dim=0), 0.0).clamp(-4, 4)
    return F.normalize(z) if z.shape[1] >= _DIRECTIONS else z


def _as_images(x: Tensor, own: Tensor) -> Float[Tensor, "k C h w"]:
    """Return rows as images of some 32 pixels a side; a vector is one line."""

    def shaped(rows: Tensor) -> Tensor:
        rows = rows.reshape(len(rows), 1, 1, -1) if rows.ndim < 3 else rows[:, None] if rows.ndim == 3 else rows
        return rows.float().flatten(3)

    height, width = shaped(own).shape[2:]
    kernel = math.ceil(height / _SIDE), math.ceil(width / (_SIDE if height > 1 else _LONGEST))
    return F.avg_pool2d(shaped(x), kernel, ceil_mode=True)


def _shifted(seen: Tensor, own: Tensor) -> Float[Tensor, "n m"]:
    """Return the largest correlation of images over all shifts, mirrored or not."""
    size = [max(pair) for pair in zip(seen.shape[2:], own.shape[2:], strict=True)]

    def spectrum(x: Tensor) -> Tensor:
        x = x - x.mean(dim=0)
        return torch.fft.rfft2(x - x.mean(dim=(2, 3), keepdim=True), s=size)

    amplitude = spectrum(own).abs().square().mean(dim=(0, 1)).sqrt()
    scale = (amplitude + 0.1 * amplitude.mean()).clamp(min=1e-30)
    spectra = (spectrum(x) / scale for x in (seen, own, own.flip(3)))
    a, *mirrored = (s / s.flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None, None] for s in spectra)
    products = ((a[:, None] * b[None].conj()).sum(dim=2) for b in mirrored)
    return torch.stack([torch.fft.irfft2(product, s=size).flatten(2).amax(dim=2) for product in products]).amax(dim=0)


def _quantiles(x: Tensor) -> Float[Tensor, "k 32"]:
    values = x.reshape(len(x), -1).float().sort(dim=1).values
    return values[:, torch.linspace(0, values.shape[1] - 1, 32).long()]


def _token_counts(x: Tensor) -> Float[Tensor, "k 512"]:
    tokens = x.reshape(len(x), -1).long() % 512
    return torch.zeros(len(x), 512, device=x.device).scatter_add_(1, tokens, torch.ones_like(tokens).float())


def _profile(x: Tensor) -> Float[Tensor, "k k"]:
    """Return how alike each row is to the others; no fixed map of all rows changes much of it."""
    alike = _closeness(x, x).fill_diagonal_(0)
    alike = alike - alike.sum(dim=1, keepdim=True) / max(1, len(x) - 1)
    return F.normalize(alike.fill_diagonal_(0))


def _common_map(groups: Iterable[_Group]) -> str | None:
    """Say how all rows are scaled and shifted, if the loop does nothing else to them."""
    groups = [group for group in groups if group.seen.shape == group.own.shape and group.own.is_floating_point()]
    if not groups:
        return None
    seen, own = (torch.cat([getattr(group, name) for group in groups]).double() for name in ("seen", "own"))
    axes = {"all numbers": tuple(range(seen.ndim)), "each channel": (0, *range(2, seen.ndim)), "each column": (0,)}
    for of, dims in axes.items():
        s, x = seen - seen.mean(dim=dims, keepdim=True), own - own.mean(dim=dims, keepdim=True)
        slope = (s * x).sum(dim=dims, keepdim=True) / x.square().sum(dim=dims, keepdim=True).clamp(min=1e-300)
        if len(seen) >= _FEWEST_ROWS and bool(((s - slope * x).abs() <= 1e-3 * s.abs().max()).all()):
            is_same = bool(((seen - own).abs() <= 1e-2 * s.abs().max()).all())
            shift = float((seen.mean() - slope.mean() * own.mean()))
            numbers = f": {float(slope.mean()):.4g} X[i] {shift:+.4g}" if of == "all numbers" else ""
            return None if is_same else f"{of} of every row are those of X[i], scaled and shifted{numbers}"
    return None
