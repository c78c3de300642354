"""Parts of a Gram block, which processes compute that do not know of each other, and the block from its parts."""

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import epk_gp
from epk_gp.core.checks import validate_count
from epk_gp.core.inputs import Points
from epk_gp.core.show import progress_bar
from epk_gp.core.step import fingerprint, fingerprint_tensors
from epk_gp.distributed.job import Place
from epk_gp.distributed.pieces import threads_of_workers
from epk_gp.gram.accumulator import transpose_block
from epk_gp.gram.context import ExecutionContext, IntegrationCheck
from epk_gp.gram.tiles import GramPieces, Tile, assembled, block_tiles, ranges_of, sum_dtype, tile_points, tiles_of
from epk_gp.quadrature.paths import path_identity
from epk_gp.storage.files import checksum

# What the entries of a description are, in words; the block is the same where all of them are
_WORDS = {
    "epk_gp": "the version of epk_gp",
    "torch": "the version of torch",
    "run": "the digest of the run",
    "rows": "the fingerprint of the points along the rows",
    "columns": "the fingerprint of the points along the columns",
    "is_symmetric": "whether both sides are the same points",
    "head": "the head",
    "rule": "the rule",
    "rule_nodes": "the fingerprint of the rule",
    "step_weights": "the fingerprint of the step weights",
    "path": "the path",
    "dtype": "the dtype",
    "accumulate": "the dtype of the sum",
    "device": "the kind of device",
    "memory_budget": "the memory budget",
    "threads": "the number of threads (OMP_NUM_THREADS)",
    "plan": "the plan of the network",
}

_UNSAID = {"path": "StraightPath()"}  # what an entry that is not there stands for


@dataclass(frozen=True)
class StepInterval:
    """The steps first <= s < last of a run, as a part of a sum over all of them.

    Attributes:
        first: The first step.
        last: The step behind the last one.
    """

    first: int
    last: int

    def places(self, layout: "PieceLayout") -> list[Place]:
        """List the pieces of the part.

        Raises:
            ValueError: The steps do not begin and end where ranges of steps do.
        """
        bounds, (first, last) = layout.bounds, (self.first, self.last)
        if not 0 <= first < last <= bounds[-1]:
            raise ValueError(f"the steps a:b of a part must satisfy 0 <= a < b <= {bounds[-1]}: got {first}:{last}.")
        if first not in bounds or last not in bounds:
            begin = min(bounds[:-1], key=lambda bound: abs(bound - first))
            end = min((bound for bound in bounds if bound > begin), key=lambda bound: abs(bound - last))
            raise ValueError(
                f"the steps a:b of a part must begin and end where ranges of steps do, at {_listed(bounds)}, or their "
                f"sum is rounded otherwise: got {first}:{last}. Take {begin}:{end}."
            )
        wanted = range(bounds.index(first), bounds.index(last))
        return [place for place in layout.places if place[-1] in wanted]


@dataclass(frozen=True)
class Share:
    """One of several shares of the work on a block, as equal as they can be.

    Attributes:
        number: Which share, from 1.
        count: Number of shares.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        """Raise if there is no such share.

        Raises:
            TypeError: One of the numbers is not a whole number.
            ValueError: The number is not in 1 .. count.
        """
        validate_count(self.number, "the number k of part k/n")
        validate_count(self.count, "the number n of parts")
        if self.number > self.count:
            raise ValueError(f"part k/n must have k in 1..n: got {self.number}/{self.count}. The first part is 1.")

    def places(self, layout: "PieceLayout") -> list[Place]:
        """List the pieces of the part.

        Raises:
            ValueError: There are more shares than pieces.
        """
        pieces = len(layout.places)
        if self.count > pieces:
            raise ValueError(
                f"the block must have a piece for each of its parts: it has {pieces} (tiles of points x ranges of "
                f"steps), and {self.count} parts are asked for. Take n = {pieces} or fewer; a smaller memory budget "
                "gives more tiles."
            )
        first, last = ((self.number - end) * pieces // self.count for end in (1, 0))
        return layout.places[first:last]


@dataclass(frozen=True)
class PieceLayout:
    """The pieces of a block: which tiles there are, and which ranges of steps.

    Attributes:
        tiles: The tiles.
        bounds: The steps at which ranges begin, and the number of steps.
    """

    tiles: list[Tile]
    bounds: tuple[int, ...]

    @cached_property
    def places(self) -> list[Place]:
        """All pieces, steps first: consecutive ones have the same steps, or neighbouring ones."""
        return [(*tile.place, number) for number in range(len(self.bounds) - 1) for tile in self.tiles]


@dataclass(frozen=True, eq=False)
class GramPart:
    """A part of a Gram block: the sums of some of its tiles over some ranges of steps.

    Sums of different ranges are kept apart, because the order in which they are added determines the last bits.

    Attributes:
        description: What the block is a function of, and its layout, as JSON has it.
        a: The points along the rows.
        b: Those along the columns.
        sums: Sum by place, which is a tile and the number of a range of steps.
        integrals: What an adaptive rule could not integrate (`IntegrationCheck.state`).
        share: Which share of the block it is, if it was asked for as one.
        source: What it is called in messages.
        notes: What its owner wants to find beside it, as JSON has it.
    """

    description: Mapping[str, Any]
    a: Points
    b: Points
    sums: Mapping[Place, Float[Tensor, "K n ..."]]
    integrals: Mapping[str, Tensor]
    share: Share | None = None
    source: str = "a part"
    notes: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def layout(self) -> PieceLayout:
        """The pieces of the whole block."""
        b = self.a if self.description["is_symmetric"] else self.b
        tiles = tiles_of(self.a, b, self.description["tile_points"], len(self.description["bounds"]) - 1)
        return PieceLayout(tiles, tuple(self.description["bounds"]))


def gram_part(context: ExecutionContext, a: Points, b: Points, which: StepInterval | Share) -> GramPart:
    """Compute a part of a block, here or by the workers of an executor.

    Args:
        context: The kernel.
        a: The points along the rows.
        b: Those along the columns; the same object as a for a symmetric block.
        which: The part.
    """
    executor, reference = context.options.executor, context.reference
    check, sums = IntegrationCheck(), dict[Place, Tensor]()
    with nullcontext() if executor is None else threads_of_workers(executor):
        description = _describe(context, a, b)
        layout = PieceLayout(
            tiles_of(a, b, description["tile_points"], len(description["bounds"]) - 1), tuple(description["bounds"])
        )
        places = which.places(layout)
        largest = max((len(tile.rows) * len(tile.columns) for tile in layout.tiles), default=0)
        num_bytes = largest * context.num_sums * reference.itemsize
        pieces = GramPieces.of(context, a, b)
        results = pieces.results("piece", places, context.options, lambda: _identity(description), num_bytes)
        with closing(results), progress_bar(len(places), "kernel", unit="piece", shown=context.options.progress) as bar:
            for place, result in zip(places, results, strict=True):
                sums[place] = result.pop("total").to(reference.device)
                check.merge(result)
                bar.update()
    return GramPart(description, a, b, sums, check.state(), which if isinstance(which, Share) else None)


def reduce_gram_parts(parts: Sequence[GramPart]) -> Float[Tensor, "N C M C"]:
    """Add the parts of a block, in the order of steps: to the bytes of `gram_block` in one go.

    Args:
        parts: All parts of one block, in any order.

    Raises:
        ValueError: There are no parts, they are not of one block, some are missing, or some overlap.
    """
    if not parts:
        raise ValueError("parts must be those of a block: there are none.")
    first = parts[0]
    _require_same_block(parts)
    holders = _holders(parts)
    count, C = len(first.layout.bounds) - 1, int(first.description["num_outputs"])
    check = IntegrationCheck()
    for part in parts:
        check.merge(part.integrals)
    reference = first.a.X.new_empty(0, dtype=getattr(torch, first.description["accumulate"]))

    def total(tile: Tile) -> Tensor:
        terms = (holders[*tile.place, number].sums[*tile.place, number] for number in range(count))
        result = next(terms).to(reference, copy=True)
        for term in terms:
            result.add_(term.to(reference.device))
        return transpose_block(result) if tile.is_turned else result

    shape = (C, len(first.a), C, len(first.b))
    block = assembled(first.layout.tiles, map(total, first.layout.tiles), shape, reference)
    check.warn()
    return block.permute(1, 0, 3, 2)


def piece_layout(context: ExecutionContext, a: Points, b: Points) -> PieceLayout:
    """Return how a block is divided.

    Args:
        context: The kernel.
        a: The points along the rows.
        b: Those along the columns; the same object as a for a symmetric block.
    """
    return PieceLayout(block_tiles(context, a, b), _bounds(context))


def _bounds(context: ExecutionContext) -> tuple[int, ...]:
    steps = context.steps
    return 0, *(steps[r.start][0] for r in ranges_of(context)[1:]), context.trajectory.num_steps


def _describe(context: ExecutionContext, a: Points, b: Points) -> dict[str, Any]:
    """Describe a block: what its bytes depend on, and its layout."""
    return {
        "epk_gp": epk_gp.__version__,
        "torch": torch.__version__,
        "run": context.trajectory.digest,
        "rows": fingerprint_tensors(a.X, a.mask),
        "columns": fingerprint_tensors(b.X, b.mask),
        "is_symmetric": a is b,
        "head": context.head,
        "rule": context.rule.name,
        "rule_nodes": checksum(repr(context.rule).encode()),
        "step_weights": checksum(repr(context.step_weights).encode()),
        "dtype": _dtype_name(context.reference.dtype),
        "accumulate": _dtype_name(sum_dtype(context)),
        "device": context.reference.device.type,
        "memory_budget": context.options.memory_budget,
        "threads": torch.get_num_threads(),
        "plan": checksum(repr(context.net.plan).encode()),
        "tile_points": tile_points(context),
        "num_outputs": context.num_outputs,
        "bounds": list(_bounds(context)),
    } | dict.fromkeys(["path"] if path_identity(context.path) else [], repr(context.path))


def _identity(description: Mapping[str, Any]) -> str:
    """Fingerprint the block; pieces have the plan in their names (`PlannedPieces.named`)."""
    of_plan = ("plan", "tile_points")
    return fingerprint(sorted(entry for entry in description.items() if entry[0] not in of_plan))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _require_same_block(parts: Sequence[GramPart]) -> None:
    first = parts[0]
    for part in parts[1:]:
        keys = {**first.description, **part.description}
        unlike = [key for key in keys if part.description.get(key) != first.description.get(key)]
        if unlike:
            name = next((key for key in _WORDS if key in unlike), unlike[0])
            theirs, own = (of.description.get(name, _UNSAID.get(name)) for of in (part, first))
            raise ValueError(
                f"parts must be those of one block: {_WORDS.get(name, name)} is {theirs} in "
                f"{part.source}, and {own} in {first.source}. Leave out what is of another block, "
                "or compute it again."
            )


def _holders(parts: Sequence[GramPart]) -> dict[Place, GramPart]:
    """Find the part of each piece."""
    layout, holders = parts[0].layout, dict[Place, GramPart]()
    for part in parts:
        if twice := [place for place in part.sums if place in holders]:
            raise ValueError(
                f"parts must not overlap: {_spelled(twice, layout)} is in {holders[twice[0]].source} and in "
                f"{part.source}. Leave one of them out."
            )
        holders |= dict.fromkeys(part.sums, part)
    if missing := [place for place in layout.places if place not in holders]:
        shares = [part.share for part in parts if part.share is not None]
        by_number = ""
        if len(shares) == len(parts) and len({share.count for share in shares}) == 1:
            n = shares[0].count
            absent = sorted(set(range(1, n + 1)) - {share.number for share in shares})
            by_number = f"part {', '.join(f'{k}/{n}' for k in absent)}, "
        raise ValueError(
            f"parts must cover the whole block: {by_number}{_spelled(missing, layout)} is missing. Compute it, and "
            "reduce again."
        )
    return holders


def _spelled(places: Sequence[Place], layout: PieceLayout) -> str:
    """Name pieces by their steps, and how many tiles of these where it is not all."""
    counts = [sum(place[-1] == number for place in places) for number in range(len(layout.bounds) - 1)]
    found = []
    for count, group in groupby(range(len(counts)), key=counts.__getitem__):
        if count:
            numbers = list(group)
            tiles = "" if count == len(layout.tiles) else f" of {count} of {len(layout.tiles)} tiles"
            found.append(f"{layout.bounds[numbers[0]]}:{layout.bounds[numbers[-1] + 1]}{tiles}")
    return f"the sum over steps {_shortened(found)}"


def _listed(bounds: Sequence[int]) -> str:
    return _shortened([str(bound) for bound in bounds])


def _shortened(words: Sequence[str], most: int = 8) -> str:
    if len(words) <= most:
        return ", ".join(words)
    return ", ".join(chain(words[: most - 2], ["..."], words[-1:]))
