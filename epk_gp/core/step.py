"""One recorded training step, fingerprints of data and runs, and whose rows a step saw.

The digest of a run is a chain of such checksums: the first covers the run's header, the frozen state of the network,
its outputs at the initial weights and those weights; each further one covers the digest before it and one step. Equal
runs have equal digests, in memory or on disk, resumed or not.

Where a loop normalises or augments, its rows are no training points, and the indices that it announces could be any.
They are believed only as far as rows and targets support them. Rows are compared in several ways, each blind to
something that loops do to rows (`_likenesses`). The announced row wins a comparison where it is more alike than another
row of the batch: right indices win far more than half of them in one of the ways, wrong ones half, whatever the data.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt8
from torch import Tensor
from torch.nn import functional as F

from epk_gp.core.checks import blocks_of
from epk_gp.core.losses import CrossEntropy, Loss, MeanSquaredError, NegativeLogLikelihood, soft_targets
from epk_gp.core.model import FunctionalModel
from epk_gp.core.moves import Move
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import UpdateCoefficients


@dataclass(frozen=True, eq=False)
class SeenRows:
    """Rows of a forward pass that are unlike the recorded data, as the network or the loss saw them.

    Attributes:
        index: Which k rows of the pass.
        values: The rows.
    """

    index: Int64[Tensor, " k"]
    values: Shaped[Tensor, "k ..."]


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One training forward pass whose gradient a step uses; everything that the weights and the data do not say.

    Attributes:
        num_rows: Number of rows of the batch that the pass saw; the passes of a step follow one another in
            `Step.batch`.
        modes: Which modules of the network, in the order of `modules()`, were in training mode. None where the network
            in evaluation mode computes the same.
        inputs: Rows of the input that are unlike X[batch] (augmented, mixed, adversarial), packed as X is.
        targets: Rows of the loss's target that are unlike y[batch]. For class labels they are vectors q such that the
            loss of a row is -<q, log softmax(outputs)>; labels of several positions are labels, where the loop left out
            positions.
        random_state: State of torch's random numbers on the CPU when the pass began; None if it drew none.
        device_random_state: The same of the network's accelerator.
        statistics: The moving statistics when the pass began, (Q,); None if they are those at the start of the step.
        statistics_after: Those when it ended; None if they are those at the end of the step.
        autocast: The dtype of automatic mixed precision; None without it.
        memory_order: The dimensions of the input in the order in which they lay in memory, from the slowest to the
            fastest: random numbers are drawn in that order. None if it is their own.
        cotangents: The gradient of the loop's loss in all that the network returned for each row, (n, D), where no loss
            is stated: the loss of a row is then their product. None where a stated loss gives it.
        weights: The weights at which the pass was computed, (P,); None if they are those at the start of the step.
        settings: The network's numbers that are neither weights nor buffers (`model.setting_places`), such as rates of
            dropout; None if they are those when recording began.
    """

    num_rows: int
    modes: Bool[Tensor, " modules"] | None = None
    inputs: SeenRows | None = None
    targets: SeenRows | None = None
    random_state: UInt8[Tensor, " bytes"] | None = None
    device_random_state: UInt8[Tensor, " device_bytes"] | None = None
    statistics: Float[Tensor, " Q"] | None = None
    statistics_after: Float[Tensor, " Q"] | None = None
    autocast: torch.dtype | None = None
    memory_order: Int64[Tensor, " dimensions"] | None = None
    cotangents: Float[Tensor, "n D"] | None = None
    weights: Float[Tensor, " P"] | None = None
    settings: Float64[Tensor, " K"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether everything that the pass depended on follows from weights, data and batch."""
        return all(value is None for name, value in vars(self).items() if name != "num_rows")

    @property
    def is_deterministic(self) -> bool:
        """Whether the network in evaluation mode, on the rows as seen, computes what the pass computed."""
        return self.modes is None and self.random_state is None and self.device_random_state is None

    @property
    def num_bytes(self) -> int:
        """How many bytes its tensors take in memory."""
        seen = [own for rows in (self.inputs, self.targets) if rows is not None for own in (rows.index, rows.values)]
        return sum(value.nbytes for value in (*vars(self).values(), *seen) if isinstance(value, Tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> "ForwardPass":
        """Return the pass with another tensor in the place of each of its own."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, SeenRows):
                changed[name] = SeenRows(change(value.index), change(value.values))
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class Step:
    """Learning rate and batch of the step from the weights w_s to the weights w_{s+1}.

    Attributes:
        index: The number s of the step, counted from 0.
        lr: The learning rate eps_s, that of the optimizer's first parameter group.
        batch: Indices into the training data, or None for all points in order; -1 for a row that is no training point.
        sample_weights: The weights c of the batch's samples in the loss. None stands for the weights that the loss
            gives to a single batch; other weights come from accumulated gradients or weighted samples.
        passes: The forward passes on consecutive rows of the batch: a tuple, or read when they are indexed. Empty
            if the network in evaluation mode, on X and y as recorded, computes the same.
        groups: The optimizers' parameter groups from this step on, with the options that preconditioners depend on;
            None where they are those of the step before.
        move: How the loop moved the weights after the optimizer's step, without a gradient (Lookahead, a checkpoint
            that is restored); w_{s+1} are the weights after it. None if it did not.
    """

    index: int
    lr: float
    batch: Int64[Tensor, " B"] | None
    sample_weights: Float64[Tensor, " B"] | None = None
    passes: Sequence[ForwardPass] = ()
    groups: tuple[OptimizerGroup, ...] | None = None
    move: Move | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Step":
        """Return the step with another tensor in the place of its batch and of each of its passes in memory."""
        batch = None if self.batch is None else change(self.batch)
        passes = tuple(each.map(change) for each in self.passes) if isinstance(self.passes, tuple) else self.passes
        return replace(self, batch=batch, passes=passes)


BEFORE = "before the recording"  # the contribution of what a loaded optimizer's momentum holds
NOT_OF_DATA = "not of the data set"  # the contribution of rows that are no training points

_PART, _HASHING_THREADS = 1 << 22, 4  # bytes that a thread hashes at once, some 4 ms
DIGEST_BYTES = 16  # 128 bits: two different inputs agree by chance with probability 3e-39


def tensor_bytes(value: Shaped[Tensor, "..."]) -> memoryview:
    """Return the bytes of a tensor's entries in row-major order; no copy is made of a contiguous tensor on the CPU."""
    value = value.detach()
    if value.is_cuda:  # by way of pinned memory, which is several times as fast
        value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def fingerprint(*parts: object) -> str:
    """Hash everything that a result depends on: a tensor by shape, dtype and entries, any other object by its `repr`.

    The number of threads is hashed too, because torch splits sums by it: results of another number of threads agree up
    to rounding only.
    """
    hasher = hashlib.blake2b(repr(torch.get_num_threads()).encode(), digest_size=DIGEST_BYTES)
    for part in parts:
        if isinstance(part, Tensor):
            _hash_tensor(hasher, part)
        else:
            hasher.update(repr(part).encode())
    return hasher.hexdigest()


def content_key(*tensors: Shaped[Tensor, "..."]) -> str:
    """Return the fingerprint of tensors and of the devices they are on, as the key of a cache.

    GPyTorch passes slices of fresh copies, so that object identity cannot serve as a key. An edit in place changes the
    key, a clone does not, and the order of the tensors counts.
    """
    return fingerprint(*(part for x in tensors for part in (x, x.device)))


def fingerprint_data(*tensors: Shaped[Tensor, "..."]) -> str:
    """Hash the shapes, dtypes and entries of tensors, such as those of the training data."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        _hash_tensor(hasher, tensor)
    return hasher.hexdigest()


def fingerprint_start(
    header: dict[str, Any],
    model: FunctionalModel,
    outputs: Float[Tensor, "n C"],
    start: Float[Tensor, " P"],
    statistics: Float[Tensor, " Q"] | None = None,
    momentum: Float[Tensor, " B"] | None = None,
) -> str:
    """Return the digest of a run of no steps.

    Args:
        header: Description of the run, without what concerns its storage alone.
        model: The network; its frozen state is hashed.
        outputs: Its outputs near the initial weights (`fingerprint_outputs`); they stand for the forward function.
        start: The initial weights.
        statistics: The initial moving statistics; None for a network without them.
        momentum: What momentum buffers held of earlier gradients; None where the optimizers were new.
    """
    hasher = hashlib.blake2b(repr(header).encode(), digest_size=DIGEST_BYTES)
    for value in (*model.frozen_state().values(), outputs, start):
        hasher.update(tensor_bytes(value))
    if statistics is not None:
        _hash_tensor(hasher, statistics)
    if momentum is not None:
        hasher.update(b"momentum")
        _hash_tensor(hasher, momentum)
    return hasher.hexdigest()


def fingerprint_step(
    start: str, step: Step, update: UpdateCoefficients, end: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None
) -> str:
    """Return the digest of a run that is one step longer than the run with digest `start`.

    Args:
        start: Digest of the run up to this step.
        step: Learning rate, batch and forward passes of the step.
        update: Its coefficients.
        end: The weights after the step.
        statistics: The moving statistics after the step; None for a network without them.
    """
    hasher = hashlib.blake2b(start.encode(), digest_size=DIGEST_BYTES)
    hasher.update(repr(step.lr).encode())
    hasher.update(b"all" if step.batch is None else tensor_bytes(step.batch))
    if step.sample_weights is not None:
        hasher.update(tensor_bytes(step.sample_weights))
    for value in (*update.tensors(), end):
        _hash_bytes(hasher, value)
    if statistics is not None:
        _hash_tensor(hasher, statistics)
    for forward in step.passes:
        _hash_pass(hasher, forward)
    if step.groups is not None:
        hasher.update(repr([group.to_json() for group in step.groups]).encode())
    if step.move is not None:
        hasher.update(repr(step.move).encode())
    return hasher.hexdigest()


def _hash_pass(hasher: hashlib.blake2b, forward: ForwardPass) -> None:
    hasher.update(repr(("pass", forward.num_rows, str(forward.autocast))).encode())
    for name, value in vars(forward).items():
        if value is None and name in ("cotangents", "weights", "settings"):  # as before there were these
            continue
        for tensor in (value.index, value.values) if isinstance(value, SeenRows) else (value,):
            if isinstance(tensor, Tensor):
                _hash_tensor(hasher, tensor)
            else:
                hasher.update(b"none")


def _hash_tensor(hasher: hashlib.blake2b, value: Tensor) -> None:
    hasher.update(repr((tuple(value.shape), str(value.dtype))).encode())
    _hash_bytes(hasher, value)


def _hash_bytes(hasher: hashlib.blake2b, value: Tensor) -> None:
    """Hash a tensor's bytes; of a large one the digests of its parts, which several threads compute."""
    content = tensor_bytes(value)
    if len(content) <= _PART:
        hasher.update(content)
        return
    parts = (content[first : first + _PART] for first in range(0, len(content), _PART))
    with ThreadPoolExecutor(min(_HASHING_THREADS, torch.get_num_threads())) as pool:
        for part in pool.map(hashlib.blake2b, parts):
            hasher.update(part.digest())


_GROUP = 16  # rows of a batch that are compared with one another
_BATCHES, _MIXED_BATCHES = 8, 32  # of one judgement; more where the loop mixes rows, some of which are rather others
_ENOUGH_ROWS, _FEWEST_ROWS = 64, 12  # of a judgement within a recording, and of one at its end
_CLEAR, _CHANCE = 0.65, 0.62  # shares of the comparisons that right indices win at least, and wrong ones at most
_GAP = 0.65  # a row is clearly another point's if it is nearer than all others by that share of their distance
_FEWEST_CLEAR, _CLEAR_SHARE = 8, 0.25  # rows that are clearly those of other points, where indices are wrong
_OTHERS, _SEARCHED = 256, 1 << 24  # points of X that are compared beside the batch, and numbers if there is a doubt
_SIDE, _LONGEST = 32, 1024  # pixels of an image's side, or of a line, that are compared under shifts

_Group = tuple[Tensor, Tensor]  # rows as the network saw them, (k, ...), and announced samples, (k,)


@dataclass(eq=False)
class RowIdentity:
    """Collects rows of a run's forward passes, and judges those of several batches at a time.

    Attributes:
        X: The training inputs, packed.
        y: Their targets.
        loss: The loss.
        doubts: What was said of rows that could be those of any index.
        num_confirmed: Number of judgements that left no doubt.
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
    _groups: list[_Group] = field(default_factory=list)  # the last one may be incomplete
    _targets: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # samples, as used, as recorded

    @property
    def num_judged(self) -> int:
        """How often rows were judged."""
        return self.num_confirmed + len(self.doubts)

    @property
    def doubt(self) -> str | None:
        """Why the announced indices could not be confirmed; None if they were, or if there was nothing to confirm."""
        return self.doubts[0] if len(self.doubts) > self.num_confirmed else None

    @torch.no_grad()
    def look_at(self, step: Step) -> str | None:
        """Take some rows of a step, and say what contradicts the announced indices once there are enough rows."""
        if not step.passes:
            return None
        rows = torch.arange(len(self.X)) if step.batch is None else step.batch.cpu()
        for forward, samples in zip(step.passes, rows.split([p.num_rows for p in step.passes]), strict=True):
            self._take(forward, samples)
        self._num_batches += 1
        has_batches = self._num_batches >= (_MIXED_BATCHES if self._is_mixed else _BATCHES)
        return self._judge() if has_batches and self._num_rows >= _ENOUGH_ROWS else None

    @torch.no_grad()
    def finish(self) -> str | None:
        """Say what contradicts the indices, by the rows that are left, if there are enough or no others were judged."""
        return None if self.num_judged and self._num_rows < _ENOUGH_ROWS else self._judge()

    def finding(self, steps: Sequence[Step]) -> str | None:
        """Say why the indices of a recorded run are wrong, or could not be confirmed; None if they were.

        Args:
            steps: The steps of the run; some, spread over it, are looked at.
        """
        if not any(step.passes for step in steps):
            return None
        spread = torch.linspace(0, len(steps) - 1, min(len(steps), 2 * _MIXED_BATCHES)).long().tolist()
        errors = [*(self.look_at(steps[number]) for number in spread), self.finish()]
        wrong = next((error for error in errors if error is not None), None)
        if wrong is not None:
            return f"the announced indices are not those of the rows: {wrong}"
        return None if self.doubt is None else f"rows could not be matched with X: {self.doubt}"

    @property
    def _num_rows(self) -> int:
        return max(sum(len(part[-1]) for part in parts) for parts in (self._groups, self._targets))

    def _take(self, forward: ForwardPass, samples: Int64[Tensor, " n"]) -> None:
        inputs = forward.inputs
        places = torch.arange(len(samples)) if inputs is None else inputs.index.cpu()
        known = (samples[places] >= 0).nonzero().squeeze(1)  # rows that are no training points have no index to confirm
        if not len(known):
            return
        spread = torch.linspace(0, len(known) - 1, min(len(known), _GROUP)).long()
        chosen = known[(spread + 7 * self._num_batches) % len(known)]  # others of each batch, which may be all of X
        is_own = self._take_targets(forward, samples, places[chosen])
        if inputs is None:
            return
        values, samples = inputs.values[chosen[is_own].to(inputs.values.device)], samples[places[chosen[is_own]]]
        if self._groups and len(self._groups[-1][1]) < _GROUP and self._groups[-1][0].shape[1:] == values.shape[1:]:
            last = self._groups.pop()
            values, samples = torch.cat([last[0], values]), torch.cat([last[1], samples])
        numbers = samples.tolist()
        first = [place for place, number in enumerate(numbers) if number not in numbers[:place]]
        self._groups += zip(values[first].split(_GROUP), samples[first].split(_GROUP), strict=True)

    def _take_targets(self, forward: ForwardPass, samples: Tensor, rows: Tensor) -> Bool[Tensor, " k"]:
        """Keep the targets of some rows, and return which rows are, by mixed targets, not rather those of others."""
        loss, y, other = self.loss, self.y[samples.to(self.y.device)].cpu(), forward.targets
        is_class, is_own = isinstance(loss, CrossEntropy | NegativeLogLikelihood), torch.ones(len(rows)).bool()
        is_one = y.ndim == 1 or (y.ndim == 2 and y.is_floating_point())
        if not is_one or not (is_class or isinstance(loss, MeanSquaredError)) or getattr(loss, "class_weights", None):
            return is_own
        recorded = y.reshape(len(y), -1).double()
        if isinstance(loss, CrossEntropy | NegativeLogLikelihood) and not y.is_floating_point():  # classes that occur
            recorded = soft_targets(loss, y, recorded.new_empty(0, max(1, int(self.y.max()) + 1)))
        used, C = recorded, recorded.shape[1]
        if other is not None:
            used = recorded.index_copy(0, other.index.cpu(), other.values[:, :C].cpu().double())
        used, recorded, is_mixed = used[rows], recorded[rows], torch.tensor(other is not None)
        if is_class:  # whether a class has a share, however large
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
        groups = [group for group in self._groups if len(group[1]) >= 4]
        targets, batches, is_mixed = self._targets, self._num_batches, self._is_mixed
        self._groups, self._targets, self._num_batches, self._is_mixed = [], [], 0, False
        error = self._wrong_targets(targets)
        varies = len(self.X) > 1 and any(bool((seen != seen[:1]).any()) for seen, _ in groups)
        if error is None and varies and not any(bool((self.X[:1] != rows).any()) for (rows,) in blocks_of(self.X)):
            error = "all rows of X are alike, and those that the network saw are not"
        if error is None and groups:
            return self._wrong_rows(groups, batches, is_mixed)
        self.num_confirmed += bool(batches)
        return error if error is None else error + self._named(groups)

    def _wrong_targets(self, targets: list[tuple[Tensor, Tensor, Tensor]]) -> str | None:
        """Say whether the targets of the loop's loss are others than the recorded ones, by their correlation."""
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

    def _wrong_rows(self, groups: list[_Group], batches: int, is_mixed: bool) -> str | None:
        won, count = (sum(values) for values in zip(*(self._shares_won(*group) for group in groups), strict=True))
        rows = len(torch.cat([samples for _, samples in groups]).unique())
        share = float(won.max()) / max(1, count)
        is_searched = self.num_judged < 2 and float(won[0]) < 0.97 * count
        clear, of, name = self._clearly_others(groups, _SEARCHED if is_searched else 0)
        if not is_mixed and clear >= max(_FEWEST_CLEAR, _CLEAR_SHARE * of):
            return f"{name}, in at least {clear} of {of} rows"
        words = (
            "the rows that the network saw are more like X at their announced indices than like other rows of X in "
            f"{share:.0%} of the comparisons only, where 50 % are chance ({rows} rows of {batches} batches)"
        )
        deviation = 0.289 / math.sqrt(rows)  # of the share that wrong indices win
        is_chance = share <= min(_CHANCE, 0.5 + 5 * deviation)
        if count and is_chance and rows >= _FEWEST_ROWS and (batches >= _BATCHES or not is_mixed):
            return words + self._named(groups)
        if share < max(_CLEAR, min(0.98, 0.5 + 4 * deviation)):  # the best of four ways may win more by chance
            self.doubts.append(words if count else "all compared rows of X are alike")
        else:
            self.num_confirmed += 1
            self.note = self.note or self._common_map(groups)
        return None

    def _own(self, samples: Int64[Tensor, " k"]) -> Shaped[Tensor, "k ..."]:
        return self.X[samples.to(self.X.device)]

    def _shares_won(self, seen: Tensor, samples: Tensor) -> tuple[Float[Tensor, " ways"], int]:
        """Return how many comparisons with others of a group the announced rows win, and how many there are."""
        own = self._own(samples)
        flat, won = own.reshape(len(own), -1), []
        differs = (flat[:, None] != flat[None]).any(dim=2)  # X may hold a point twice
        for likeness in _likenesses(seen.to(own.device), own):
            announced = likeness.diagonal()[:, None]
            won.append(((likeness < announced).double() + 0.5 * (likeness == announced))[differs].sum())
        return torch.stack(won).cpu(), int(differs.sum())

    def _clearly_others(self, groups: list[_Group], searched: int) -> tuple[int, int, str]:
        """Return how many rows are clearly those of other points, scaled and shifted, of how many; and such a pair."""
        groups = [group for group in groups if group[0].shape[1:] == self.X.shape[1:]]
        if not groups:
            return 0, 1, ""
        seen, samples = (torch.cat(values) for values in zip(*groups, strict=True))
        M, count = len(self.X), max(_OTHERS, searched // max(1, self.X[0].numel()))
        others = torch.linspace(0, M - 1, min(M, count), dtype=torch.float64).long()
        places = torch.cat([samples, (samples - 1) % M, (samples + 1) % M, others]).unique()
        near = _closeness(seen.to(self.X.device), self._own(places), self._own(samples)).cpu()
        best, place = near.max(dim=1)
        rest = near.masked_fill(places == places[place][:, None], -math.inf).amax(dim=1)
        lead = 1 - best / rest.clamp(max=-1e-30)
        is_apart = rest < 0.05 * near.median()  # X may hold a point twice
        lead = lead.where((places[place] != samples) & rest.isfinite() & is_apart, 0.0)
        row = int(lead.argmax())
        pair = f"X[{int(places[place[row]])}], the batch says X[{int(samples[row])}]"
        return int((lead > _GAP).sum()), len(seen), f"the network saw something like {pair}"

    def _named(self, groups: list[_Group]) -> str:
        clear, of, name = self._clearly_others(groups, _SEARCHED)
        return f": {name}, in at least {clear} of {of} rows" if clear >= 3 else ""

    def _common_map(self, groups: list[_Group]) -> str | None:
        """Say how all rows are scaled and shifted, if the loop does nothing else to them."""
        if len(groups) < 2 or any(seen.shape[1:] != self.X.shape[1:] for seen, _ in groups):
            return None
        seen = torch.cat([seen for seen, _ in groups]).double()
        own = self._own(torch.cat([samples for _, samples in groups])).to(seen)
        if bool(((seen - own).abs() <= 1e-2 * (seen - seen.mean()).abs().max()).all()):
            return None  # noise so small that it is not told from a shift
        s, x = seen - seen.mean(dim=0), own - own.mean(dim=0)
        slope = (s * x).sum(dim=0) / x.square().sum(dim=0).clamp(min=1e-300)
        if bool(((s - slope * x).abs() <= 1e-3 * s.abs().max()).all()):
            return "each column of every row is that of X[i], scaled and shifted"
        return None


def _likenesses(seen: Tensor, own: Tensor) -> list[Float[Tensor, "k k"]]:
    """Return how alike rows are to rows of X, in several ways; rows of the same number belong together.

    Entry by entry, after scaling and shifting columns; under shifts and mirroring, with all frequencies of one size; by
    their sorted numbers, or by how often they hold a token; and by how alike they are to the other rows, which no fixed
    map of all rows changes much.
    """
    unknown = torch.zeros(len(seen), len(own), device=own.device)
    entries = _closeness(seen, own, own) if seen.shape == own.shape else unknown
    a, b = _as_images(seen, own), _as_images(own, own)
    values = _sorted if own.is_floating_point() or seen.is_floating_point() else _token_counts
    sizes = _closeness(values(seen), values(own), values(own))
    shifted = _shifted(a, b) if a.shape[1] == b.shape[1] else unknown
    return [entries, shifted, sizes, _profile(seen) @ _profile(own).T]


def _closeness(seen: Tensor, others: Tensor, own: Tensor) -> Float[Tensor, "n m"]:
    """Return minus the distances of rows from others, with columns scaled by means and deviations of seen and own."""
    seen, others, own = (x.reshape(len(x), -1).float() for x in (seen, others, own))
    return -torch.cdist(_standard(seen, seen), _standard(others, own))


def _standard(x: Float[Tensor, "k D"], reference: Float[Tensor, "r D"]) -> Float[Tensor, "k D"]:
    deviation = reference.std(dim=0, correction=0)
    varies = deviation > 1e-6 * reference.abs().amax(dim=0)
    z = ((x - reference.mean(dim=0)) / deviation).where(varies, 0.0).clamp(-4, 4)
    return F.normalize(z) if z.shape[1] >= 8 else z  # many columns: directions, as mixed rows are shorter


def _as_images(x: Tensor, own: Tensor) -> Float[Tensor, "k C h w"]:
    """Return rows as images of some 32 pixels a side; a vector is one line."""
    x, own = (v.reshape(len(v), 1, 1, -1) if v.ndim < 3 else v[:, None] if v.ndim == 3 else v for v in (x, own))
    height, width = own.flatten(3).shape[2:]
    kernel = math.ceil(height / _SIDE), math.ceil(width / (_SIDE if height > 1 else _LONGEST))
    return F.avg_pool2d(x.float().flatten(3), kernel, ceil_mode=True)


def _shifted(seen: Tensor, own: Tensor) -> Float[Tensor, "n m"]:
    """Return the largest correlation of images over all shifts, mirrored or not."""
    size = [max(pair) for pair in zip(seen.shape[2:], own.shape[2:], strict=True)]
    centred = [x - x.mean(dim=0) for x in (seen, own, own.flip(3))]
    spectra = [torch.fft.rfft2(x - x.mean(dim=(2, 3), keepdim=True), s=size) for x in centred]
    amplitude = spectra[1].abs().square().mean(dim=(0, 1)).sqrt()
    spectra = [x / (amplitude + 0.1 * amplitude.mean()).clamp(min=1e-30) for x in spectra]
    a, *mirrored = (x / x.flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None, None] for x in spectra)
    products = ((a[:, None] * b[None].conj()).sum(dim=2) for b in mirrored)
    return torch.stack([torch.fft.irfft2(product, s=size).flatten(2).amax(dim=2) for product in products]).amax(dim=0)


def _sorted(x: Tensor) -> Float[Tensor, "k 32"]:
    values = x.reshape(len(x), -1).float().sort(dim=1).values
    return values[:, torch.linspace(0, values.shape[1] - 1, 32).long()]


def _token_counts(x: Tensor) -> Float[Tensor, "k 512"]:
    tokens = x.reshape(len(x), -1).long() % 512
    return torch.zeros(len(x), 512, device=x.device).scatter_add_(1, tokens, torch.ones_like(tokens).float())


def _profile(x: Tensor) -> Float[Tensor, "k k"]:
    alike = _closeness(x, x, x).fill_diagonal_(0)
    alike = alike - alike.sum(dim=1, keepdim=True) / max(1, len(x) - 1)
    return F.normalize(alike.fill_diagonal_(0))
