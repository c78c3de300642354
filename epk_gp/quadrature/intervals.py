"""Intervals of a step, the orders of their rules, and what their nodes gave, as tensors."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.quadrature.intervals import Stage, Stages
from epk_gp.quadrature.intervals import NUM_TERMS, legendre_errors, spectrum
from epk_gp.quadrature.status import Parents


@dataclass(frozen=True, eq=False)
class Intervals:
    """E intervals [a, b] of points.

    Attributes:
        point: Whose they are.
        a: Their starts.
        b: Their ends.
        f_a: f at the starts.
        f_b: f at the ends.
        parent_residual: Largest residual of the last levels of intervals that they are parts of.
        stage: Index of their order.
        known: df/dt at the nodes that they have from the order before, (E, K, C).
        error_before: Residual of the order before, or of the interval that they are halves of; infinity if neither is
            known.
        is_searched: They were searched for kinks.
        parent: Which of the intervals that were refined last they are parts of.
    """

    point: Int64[Tensor, " E"]
    a: Float[Tensor, " E"]
    b: Float[Tensor, " E"]
    f_a: Float[Tensor, "E C"]
    f_b: Float[Tensor, "E C"]
    parent_residual: Float[Tensor, " E"]
    stage: Int64[Tensor, " E"]
    known: Float[Tensor, "E K C"]
    error_before: Float[Tensor, " E"]
    is_searched: Bool[Tensor, " E"]
    parent: Int64[Tensor, " E"]

    def __len__(self) -> int:
        """Count the intervals."""
        return len(self.point)

    def __getitem__(self, rows: Shaped[Tensor, " _"]) -> "Intervals":
        """Return some of them."""
        return Intervals(*(value[rows] for value in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Integrated:
    """E intervals of one level, with what their nodes gave.

    Attributes:
        intervals: The intervals.
        parents: The intervals that they are parts of.
        integral: Their integrals.
        slopes: df/dt at their nodes, as many as are to be known to the next order, (E, K, C).
        inner: f at the same nodes, (E, K, C); of those that are new.
        residual: f(b) - f(a) - integral.
        error: Its largest output.
        rounding: Residual that is taken for rounding of the outputs.
        level: How often the intervals were refined.
        table: The orders that they pass through.
    """

    intervals: Intervals
    parents: Parents
    integral: Float[Tensor, "E C"]
    slopes: Float[Tensor, "E K C"]
    inner: Float[Tensor, "E K C"]
    residual: Float[Tensor, "E C"]
    error: Float[Tensor, " E"]
    rounding: Float[Tensor, " E"]
    level: int
    table: "StageTable"


@dataclass(frozen=True, eq=False)
class StageTable:
    """The orders of intervals as tensors: row r belongs to the r-th order.

    Attributes:
        stages: The orders.
        first, half: As in `nested.Stages`.
        nodes: Padded with zeros, (R, Q).
        weights: Likewise, (R, Q).
        size: Number of nodes.
        num_known: Number of nodes that are those of the order before.
        degree: Degree of exactness.
        previous: Row of the order before, or -1.
        option: Row of the lowest order that it can be raised to, or -1.
        is_start: Intervals start with it.
        errors: `legendre_errors`, (R, J).
        num_kept: K, the largest number of nodes that is known to another order.
    """

    stages: tuple[Stage, ...]
    first: int
    half: int
    nodes: Float[Tensor, "R Q"]
    weights: Float[Tensor, "R Q"]
    size: Int64[Tensor, " R"]
    num_known: Int64[Tensor, " R"]
    degree: Int64[Tensor, " R"]
    previous: Int64[Tensor, " R"]
    option: Int64[Tensor, " R"]
    is_start: Bool[Tensor, " R"]
    errors: Float[Tensor, "R J"]
    num_kept: int


def stage_table(stages: Stages, reference: Tensor) -> StageTable:
    """Return the orders of intervals as tensors of a reference's dtype, on its device."""
    return _stage_table(stages, reference.dtype, reference.device)


@lru_cache(maxsize=16)
def _stage_table(stages: Stages, dtype: torch.dtype, device: torch.device) -> StageTable:
    table, reference = stages.table, torch.zeros((), dtype=dtype, device=device)
    width = max(len(stage.rule) for stage in table)

    def padded(rows: list[tuple[float, ...]]) -> Tensor:
        return reference.new_tensor([[*row, *[0.0] * (width - len(row))] for row in rows])

    def integers(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=reference.device)

    rises = len(table) > 1
    errors = [legendre_errors(stage.rule, stage.degree) for stage in table] if rises else [np.zeros(NUM_TERMS)]
    return StageTable(
        stages=table,
        first=stages.first,
        half=stages.half,
        nodes=padded([stage.rule.nodes for stage in table]),
        weights=padded([stage.rule.weights for stage in table]),
        size=integers([len(stage.rule) for stage in table]),
        num_known=integers([stage.num_known for stage in table]),
        degree=integers([stage.degree for stage in table]),
        previous=integers([stage.previous for stage in table]),
        option=integers([min(stage.options, default=-1) for stage in table]),
        is_start=integers([stage.previous < 0 for stage in table]).bool(),
        errors=reference.new_tensor(np.stack(errors)),
        num_kept=max(stage.num_known for stage in table),
    )


def spectrum_of(stage: Stage, reference: Tensor) -> Float[Tensor, "K K"]:
    """Return the matrix that gives Legendre coefficients of f' from what an interval's first order knows."""
    return _spectrum_of(stage, reference.dtype, reference.device)


@lru_cache(maxsize=16)
def _spectrum_of(stage: Stage, dtype: torch.dtype, device: torch.device) -> Tensor:
    points = tuple(sorted({*stage.rule.nodes, *stage.probes}))
    return torch.tensor(spectrum(stage.rule.nodes, points), dtype=dtype, device=device)


def nodes_of(intervals: Intervals, table: StageTable) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List every interval's nodes: which interval they belong to, their number in it, places and weights."""
    counts = table.size[intervals.stage]
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    number = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    row, width = intervals.stage[owner], (intervals.b - intervals.a)[owner]
    return owner, number, intervals.a[owner] + width * table.nodes[row, number], width * table.weights[row, number]


def between_cuts(intervals: Intervals, owner: Tensor, cuts: Tensor, f_cuts: Tensor, to_cut: Tensor) -> Intervals:
    """Make the parts of cut intervals.

    For one interval with two cuts:

    left ends    a    c1   c2       sorted by owner, then position
    right ends   c1   c2   b        the next left end, or the interval's own end behind its last cut

    Args:
        intervals: All intervals.
        owner: Which of them each cut is in, (B,).
        cuts: The cuts, in the order of the owners and of the positions in each, (B,).
        f_cuts: f there, (B, C).
        to_cut: The intervals that are cut; those without a cut are one part.
    """
    owner = torch.cat([to_cut, owner])
    left, f_left = torch.cat([intervals.a[to_cut], cuts]), torch.cat([intervals.f_a[to_cut], f_cuts])
    order = lexicographic(owner, left)
    owner, left, f_left = owner[order], left[order], f_left[order]
    is_last = torch.ones_like(owner, dtype=torch.bool)
    is_last[:-1] = owner[1:] != owner[:-1]
    right = torch.where(is_last, intervals.b[owner], left.roll(-1))
    f_right = torch.where(is_last[:, None], intervals.f_b[owner], f_left.roll(-1, dims=0))
    return replace(intervals[owner], a=left, b=right, f_a=f_left, f_b=f_right, parent=owner)


def lexicographic(first: Tensor, second: Tensor) -> Tensor:
    """Return the order by `first`, then by `second`."""
    order = second.argsort(stable=True)
    return order[first[order].argsort(stable=True)]
