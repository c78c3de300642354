"""One recorded training step, moves of the weights without a gradient, and fingerprints of data and runs.

Lookahead pulls the weights back to slow ones, a loop restores the best checkpoint, an average replaces the weights.
Such a move is exact if it ends on the line from u, the weights after the optimizer's step, to a recorded state,

    w_{s+1} = u + share (w_anchor - u).

Samples of every state's weights select the possible anchors; all weights then decide.

The digest of a run is a chain of checksums: the first covers the run's header, the frozen state of the network, its
outputs at the initial weights and those weights; each further one covers the previous digest and one step. Equal runs
have equal digests, in memory or on disk, resumed or not.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt8
from torch import Tensor, nn

from epk_gp.core.model import FEW_WEIGHTS, FunctionalModel, flattened
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import UpdateCoefficients

_NUM_SAMPLES = 64  # sampled weights of a state, by which it is found
_NEAR = 1e-2  # largest distance of samples from the line, relative to the move; all weights are compared afterwards
_CANDIDATES = 4  # anchors that are compared by all weights
_ROUNDING = 16  # largest distance from the line, in eps of a parameter's largest weight


@dataclass(frozen=True)
class Move:
    """A move of the weights after a step, without a gradient.

    Attributes:
        anchor: Number of the recorded state that the weights moved towards, at most the state before the step.
        share: Share of the way to the anchor.
    """

    anchor: int
    share: float


@dataclass(frozen=True, eq=False)
class SeenRows:
    """Rows of a forward pass that differ from the recorded data, as the network or the loss saw them.

    Attributes:
        index: Indices of the k rows in the pass.
        values: The rows.
    """

    index: Int64[Tensor, " k"]
    values: Shaped[Tensor, "k ..."]


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One training forward pass of a step: everything that determines it apart from the weights and the data.

    Attributes:
        num_rows: Number of rows of the pass's batch; the passes of a step are consecutive in `Step.batch`.
        modes: Flags for the modules of the network, in the order of `modules()`, that were in training mode. None if
            the network in evaluation mode computes the same.
        inputs: Rows of the input that differ from X[batch] (augmented, mixed, adversarial), packed as X is.
        targets: Rows of the loss's target that differ from y[batch]. For class labels they are vectors q such that the
            loss of a row is -<q, log softmax(outputs)>; labels of several positions stay labels if the loop left out
            positions.
        random_state: State of torch's CPU generator when the pass began; None if it drew no random numbers.
        device_random_state: State of the generator of the network's accelerator.
        statistics: The moving statistics when the pass began, (Q,); None if they are those at the start of the step.
        statistics_after: The moving statistics when it ended; None if they are those at the end of the step.
        autocast: The dtype of automatic mixed precision; None without it.
        memory_order: The dimensions of the input in their memory order, from the slowest to the fastest: random numbers
            are drawn in that order. None if it is the natural order.
        cotangents: The gradient of the loop's loss in all numbers that the network returned for a row, (k, D), for rows
            that do not follow the stated loss (all rows if none is stated): the loss of a row is then their product.
        weights: The weights at which the pass was computed, (P,); None if they are those at the start of the step.
        settings: The network's numbers that are neither weights nor buffers (`model.setting_places`), such as dropout
            rates; None if they are those when recording began.
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
    cotangents: SeenRows | None = None
    weights: Float[Tensor, " P"] | None = None
    settings: Float64[Tensor, " K"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether weights, data and batch determine the pass completely."""
        return all(value is None for name, value in vars(self).items() if name != "num_rows")

    @property
    def is_deterministic(self) -> bool:
        """Whether the network in evaluation mode, on the rows as seen, reproduces the pass."""
        return self.modes is None and self.random_state is None and self.device_random_state is None

    @property
    def num_bytes(self) -> int:
        """Number of bytes of its tensors in memory."""
        rows = (self.inputs, self.targets, self.cotangents)
        seen = [own for each in rows if each is not None for own in (each.index, each.values)]
        return sum(value.nbytes for value in (*vars(self).values(), *seen) if isinstance(value, Tensor))

    def map(self, change: Callable[[Tensor], Tensor]) -> "ForwardPass":
        """Return the pass with each of its tensors replaced by its `change`."""
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
        index: The number s of the step, starting at 0.
        lr: The learning rate eps_s of the optimizer's first parameter group.
        batch: Indices into the training data, or None for all points in order; -1 for a row that is not a training
            point.
        sample_weights: The weights c of the batch's samples in the loss. None stands for the weights that the loss
            gives to a single batch; other weights come from accumulated gradients or weighted samples.
        passes: The forward passes on consecutive rows of the batch: a tuple, or read on indexing. Empty if the network
            in evaluation mode, on X and y as recorded, computes the same.
        groups: The optimizers' parameter groups from this step on, with the options of preconditioners; None if they
            are those of the step before.
        move: The loop's change of the weights after the optimizer's step, without a gradient (Lookahead, a restored
            checkpoint); w_{s+1} are the weights after it. None without one.
    """

    index: int
    lr: float
    batch: Int64[Tensor, " B"] | None
    sample_weights: Float64[Tensor, " B"] | None = None
    passes: Sequence[ForwardPass] = ()
    groups: tuple[OptimizerGroup, ...] | None = None
    move: Move | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Step":
        """Return the step with each tensor of its batch and of its passes in memory replaced by its `change`."""
        batch = None if self.batch is None else change(self.batch)
        passes = tuple(each.map(change) for each in self.passes) if isinstance(self.passes, tuple) else self.passes
        return replace(self, batch=batch, passes=passes)


def not_following(steps: Sequence[Step]) -> str:
    """List the steps and rows that do not follow the stated loss, such as "steps 0 to 11: 30 of 30 rows"; "" if none.

    Args:
        steps: Consecutive steps.
    """
    found = list[tuple[str, list[int]]]()  # rows, and the consecutive steps with this number of rows
    for step in steps:
        passes = tuple(step.passes)  # each pass of a run on disk is read once
        stored = sum(len(own.cotangents.index) for own in passes if own.cotangents is not None)
        rows = f"{stored} of {sum(own.num_rows for own in passes)} rows"
        if stored and found and (found[-1][0], found[-1][1][-1]) == (rows, step.index - 1):
            found[-1][1].append(step.index)
        elif stored:
            found.append((rows, [step.index]))
    named = [f"step{f's {at[0]} to' * (len(at) > 1)} {at[-1]}: {rows}" for rows, at in found[:3]]
    return "; ".join(named + [f"and {len(found) - 3} more ranges of steps"] * (len(found) > 3))


BEFORE = "before the recording"  # the contribution of a loaded optimizer's momentum
NOT_OF_DATA = "not of the data set"  # the contribution of rows that are not training points

_PLAIN = (torch.float64, torch.float32, torch.int64)  # dtypes whose arrays are hashed directly
_PART, _HASHING_THREADS = 1 << 22, 4  # bytes that a thread hashes at a time, about 4 ms
DIGEST_BYTES = 16  # 128 bits: two different inputs agree by chance with probability 3e-39


def tensor_bytes(value: Shaped[Tensor, "..."]) -> memoryview:
    """Return the bytes of a tensor's entries in row-major order; a contiguous tensor on the CPU is not copied."""
    value = value.detach()
    if value.is_cuda:  # through pinned memory, which is several times faster
        value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def fingerprint(*parts: object) -> str:
    """Hash everything that a result depends on: a tensor by shape, dtype and entries, any other object by its `repr`.

    The number of threads is hashed too, because torch splits sums by it: results for another number of threads agree
    only up to rounding.
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

    GPyTorch passes slices of fresh copies, so object identity cannot be the key. An edit in place changes the key, a
    clone does not, and the order of the tensors counts.
    """
    return fingerprint(*(part for x in tensors for part in (x, x.device)))


def fingerprint_data(*tensors: Shaped[Tensor, "..."]) -> str:
    """Hash the shapes, dtypes and entries of tensors, such as the training data."""
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
    """Return the digest of a run without steps.

    Args:
        header: Description of the run, without entries that concern only its storage.
        model: The network; its frozen state is hashed.
        outputs: Its outputs near the initial weights (`fingerprint_outputs`); they stand for the forward function.
        start: The initial weights.
        statistics: The initial moving statistics; None for a network without them.
        momentum: The initial momentum buffers, from earlier gradients; None for new optimizers.
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
    hasher.update(b"" if step.batch is not None else b"all")
    for value in (step.batch, step.sample_weights, *update.tensors(), end):
        if value is not None:
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
        if value is None and name in ("cotangents", "weights", "settings"):  # older digests have no such entries
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
    """Hash a tensor's bytes; several threads compute the digests of a large tensor's pieces."""
    is_small = value.nbytes <= _PART and value.dtype in _PLAIN and value.device.type == "cpu"
    if is_small and value.is_contiguous() and not value.requires_grad:
        hasher.update(value.numpy().data)  # without the calls that convert any tensor to bytes
        return
    content = tensor_bytes(value)
    if len(content) <= _PART:
        hasher.update(content)
        return
    parts = (content[first : first + _PART] for first in range(0, len(content), _PART))
    with ThreadPoolExecutor(min(_HASHING_THREADS, torch.get_num_threads())) as pool:
        for part in pool.map(hashlib.blake2b, parts):
            hasher.update(part.digest())


def share_of_way(
    u: Float[Tensor, " P"], w: Float[Tensor, " P"], anchor: Float[Tensor, " P"], sizes: tuple[int, ...]
) -> float | None:
    """Return the share of the way to an anchor that leads from u to w; None if w is not on the way, up to rounding.

    A point beyond u or beyond the anchor is not a move: a step that is made twice leads away from its start.

    Args:
        u: The weights before the move.
        w: The weights after it.
        anchor: The weights of the anchor.
        sizes: Number of weights of each parameter: each must be on the line up to its own rounding.
    """
    if torch.equal(w, anchor):
        return 1.0
    way, moved = (anchor - u).double(), (w - u).double()
    share = float(way @ moved / (way @ way).clamp(min=1e-300))
    missed, size = (moved - share * way).abs(), torch.stack([u, w, anchor]).abs().amax(dim=0)
    eps = _ROUNDING * torch.finfo(w.dtype).eps
    parts = zip(missed.split(list(sizes)), size.split(list(sizes)), strict=True)
    is_near = all(bool(own.max() <= eps * scale.max()) for own, scale in parts if len(own))
    return share if is_near and 0 < share <= 1 + _ROUNDING * torch.finfo(w.dtype).eps else None


@dataclass(eq=False)
class StateSamples:
    """A few weights of every state of a run.

    Attributes:
        places: Indices of the sampled weights.
        rows: Their values in each state, by its number.
    """

    places: Int64[Tensor, " k"]
    rows: dict[int, Float[Tensor, " k"]] = field(default_factory=dict)

    @classmethod
    def of(cls, w: Float[Tensor, " P"]) -> "StateSamples":
        """Choose the places for weights of this number."""
        count, exact = min(len(w), _NUM_SAMPLES), torch.float64  # float32 rounds numbers above 2^24
        return cls(torch.linspace(0, len(w) - 1, count, dtype=exact, device=w.device).long())

    def equal_to(self, w: Float[Tensor, " P"]) -> list[int]:
        """Return the numbers of states with these samples, the latest first."""
        if w.device != self.places.device or w.dtype != next(iter(self.rows.values())).dtype:
            return []
        row = w[self.places]
        return [state for state in sorted(self.rows, reverse=True) if torch.equal(self.rows[state], row)]

    def anchors(self, u: Float[Tensor, " P"], w: Float[Tensor, " P"], before: int) -> Iterator[int]:
        """Yield the states up to `before` that may be the anchor of a move from u to w, the likeliest first."""
        states = sorted((state for state in self.rows if state <= before), reverse=True)
        rows = torch.stack([self.rows[state] for state in states]).double()
        x, y = (value[self.places].double() for value in (u, w))
        ways, moved = rows - x, y - x
        shares = (ways @ moved) / ways.square().sum(dim=1).clamp(min=1e-300)
        missed = (moved - shares[:, None] * ways).norm(dim=1)
        for place in missed.argsort(stable=True)[:_CANDIDATES].tolist():
            if missed[place] <= _NEAR * moved.norm() and bool(ways[place].any()):
                yield states[place]


@dataclass(frozen=True, eq=False)
class LiveNetwork:
    """The user's network during training, for as long as the object exists.

    Attributes:
        network: The network.
        samples: Samples of every recorded state, including those after the trajectory's last step.
    """

    network: "weakref.ref[nn.Module]"
    samples: StateSamples


_NUM_COMPARED = 128  # weights of each parameter, where torch has not written to it


class LiveWeights:
    """The current weights of a network in training.

    Known weights that torch has not written to since are not compared again, except for a few: writes through `.data`
    leave no other trace.

    Args:
        net: The network.
        model: The same as a function of its weights.
        is_certain: Whether to compare all weights always.
    """

    def __init__(self, net: nn.Module, model: FunctionalModel, *, is_certain: bool) -> None:
        self._model, self._is_certain = model, is_certain
        # each parameter's module and its name there, because looking up all names in each step is slow
        paths = ((name, *name.rpartition(".")[::2]) for name in model.names)
        self._owners = [(name, net.get_submodule(path), leaf) for name, path, leaf in paths]
        self._known: tuple[Tensor | None, list[tuple[int, int]], Tensor] = None, [], torch.empty(0)
        self._seen: list[Any] = [None] * len(self._owners)

    def parameters(self) -> list[nn.Parameter] | None:
        """Return the parameters; None if one is missing, or torch.func puts tensors in their place."""
        present: list[Any] = [module._parameters.get(leaf) for _, module, leaf in self._owners]
        if not all(map(is_, present, self._seen)):  # checked again only if an object was replaced
            if not all(isinstance(p, nn.Parameter) for p in present):
                return None
            self._seen = present
        return present

    def named(self) -> dict[str, Tensor]:
        """Return the parameters that the network has, by name."""
        held = ((name, module._parameters.get(leaf)) for name, module, leaf in self._owners)
        return {name: p for name, p in held if isinstance(p, nn.Parameter)}

    def _marks(self, named: dict[str, Tensor]) -> tuple[list[tuple[int, int]], Tensor]:
        """Return marks that change when weights are written to: addresses, torch's write counts, and a few values."""
        own = [p.detach() for p in named.values()]
        few = torch.cat([w.reshape(-1)[:: 1 + w.numel() // _NUM_COMPARED] for w in own])
        return [(w.data_ptr(), w._version) for w in own], few

    def copy(self) -> Float[Tensor, " P"]:
        """Return a copy of the weights."""
        w = flattened(self._held())
        if self._model.num_weights > FEW_WEIGHTS:
            self._known = w, *self._marks(self.named())
        return w

    def versions(self) -> list[int]:
        """Return torch's write count of each parameter."""
        return [p._version for p in self._held()]

    def _held(self) -> list[Any]:
        return [module._parameters[leaf] for _, module, leaf in self._owners]

    def know_copy(self, w: Float[Tensor, " P"], copy: Float[Tensor, " P"]) -> None:
        """Use a copy in place of weights that the network is known to have had."""
        if self._known[0] is w:
            self._known = copy, *self._known[1:]

    def are(self, w: Float[Tensor, " P"]) -> bool:
        """Return whether the network has these weights, without copying."""
        if self._model.num_weights <= FEW_WEIGHTS:
            own = self.copy()
            return own.dtype == w.dtype and torch.equal(own, w)
        named = self.named()
        (known, marks, values), (present, few) = self._known, self._marks(named)
        if w is known and not self._is_certain and marks == present and torch.equal(values, few):
            return True
        if not all(torch.equal(named[name], value) for name, value in self._model.unflatten(w).items()):
            return False
        self._known = w, present, few
        return True
