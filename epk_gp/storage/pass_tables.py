"""The tables that say where the packed tensors of forward passes are."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The tensors of a pass, in the order of the columns of `PassTables.parts`.
PARTS = (
    "modes",
    "inputs.index",
    "inputs.values",
    "targets.index",
    "targets.values",
    "random_state",
    "device_random_state",
    "statistics",
    "statistics_after",
    "memory_order",
)
CONTENT = "passes.content"
MAX_RANDOM_BYTES = 1 << 16  # torch's state has 5056 bytes on the CPU, 16 on CUDA
Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PassTables:
    """Where the packed tensors of the passes of j consecutive steps are. There are p passes and b packed tensors.

    On disk the tables are the tensors `passes.NAME`, int64.

    Attributes:
        counts: Number of passes of each step, (j,).
        rows: Number of rows of each pass, (p,).
        autocast: Its dtype of automatic mixed precision, as a number in `DTYPES`, or -1, (p,).
        parts: Number of the packed tensor of each of `PARTS`, or -1, (p, 10). Passes may share one.
        kinds: Dtype (a number in `DTYPES`), encoding, and number of dimensions of each packed tensor, (b, 3).
        shapes: Their shapes one after another.
        lengths: Their packed bytes, (b,); their content stands in this order, without gaps.
    """

    counts: Numbers
    rows: Numbers
    autocast: Numbers
    parts: Numbers
    kinds: Numbers
    shapes: Numbers
    lengths: Numbers

    @cached_property
    def shape_starts(self) -> Numbers:
        """Where the shape of each packed tensor begins in `shapes`."""
        return np.cumsum(self.kinds[:, 2]) - self.kinds[:, 2]

    @cached_property
    def starts(self) -> Numbers:
        """Where the content of each packed tensor begins."""
        return np.cumsum(self.lengths) - self.lengths

    def shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of a packed tensor."""
        start = self.shape_starts[number]
        return tuple(int(n) for n in self.shapes[start : start + self.kinds[number, 2]])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tables by their names on disk."""
        return {f"passes.{name}": torch.from_numpy(getattr(self, name)) for name in TABLES}


TABLES = tuple(field.name for field in fields(PassTables))


def as_numbers(values: Sequence[Any]) -> Numbers:
    """Return whole numbers as an array of int64."""
    return np.array(values, dtype=np.int64)


def no_passes(num_steps: int) -> PassTables:
    """Return the tables of steps without passes."""
    none = as_numbers([])
    counts, parts, kinds = np.zeros(num_steps, dtype=np.int64), none.reshape(0, len(PARTS)), none.reshape(0, 3)
    return PassTables(counts, none, none, parts, kinds, none, none)


def join_tables(tables: Sequence[PassTables]) -> PassTables:
    """Return the tables of steps one after another, for contents one after another."""
    before = np.cumsum([0, *(len(each.lengths) for each in tables)])
    parts = [np.where(t.parts < 0, -1, t.parts + n) for t, n in zip(tables, before[:-1], strict=True)]
    joined = {
        field.name: np.concatenate([getattr(each, field.name) for each in tables]) for field in fields(PassTables)
    }
    return PassTables(**(joined | {"parts": np.concatenate(parts)}))
