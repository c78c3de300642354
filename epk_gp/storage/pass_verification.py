"""Verification of the tables of forward passes in a chunk, before anything that they point to is read.

What a packed tensor holds is checked when it is unpacked (`passes.PackedPasses`): rows and random states are too many
to be unpacked whenever a run is opened.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from epk_gp.core.step import Step
from epk_gp.storage.packing import BITS, DTYPES, RAW, SORTED, fits
from epk_gp.storage.pass_tables import CONTENT, MAX_RANDOM_BYTES, PARTS, TABLES, PassTables
from epk_gp.storage.schema import ChunkSchema

_MAX_DIMENSIONS, _MAX_SIZE = 16, 1 << 40  # of a packed tensor; larger ones would overflow sums of int64
_COLUMN = {name: column for column, name in enumerate(PARTS)}
PASS_TENSORS = {*(f"passes.{name}" for name in TABLES), CONTENT}


def read_tables(tensors: Any) -> tuple[PassTables, int]:
    """Read the tables of the passes of an open chunk, and the size in bytes of what they point to."""
    # copies: the tables stay as long as the run is open, and would keep each chunk's file mapped
    tables = PassTables(**{name: tensors.get_tensor(f"passes.{name}").numpy().copy() for name in TABLES})
    return tables, tensors.get_slice(CONTENT).get_shape()[0]


def validate_tables(tables: PassTables, size: int, steps: Sequence[Step], schema: ChunkSchema, where: str) -> None:
    """Raise if tables do not describe the passes of steps.

    Args:
        tables: Tables of which only dtypes and numbers of dimensions are known to be right.
        size: Number of bytes that they point to.
        steps: The steps.
        schema: The schema of the run's chunks.
        where: Name of the file in error messages.

    Raises:
        ValueError: The tables do not describe forward passes of these steps.
    """
    batch_sizes = [schema.num_points if step.batch is None else len(step.batch) for step in steps]
    problem = (
        _problem_of_counts(tables, batch_sizes) or _problem_of_packed(tables, size) or _problem_of_parts(tables, schema)
    )
    if problem:
        raise ValueError(f"{where} must hold the forward passes of its steps: {problem}.")


def expected_tables(actual: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, tuple[int, str]]:
    """Return number of dimensions and dtype of each tensor of passes; none for a chunk without passes."""
    if not actual.keys() & PASS_TENSORS:
        return {}
    dimensions = {f"passes.{name}": (2 if name in ("parts", "kinds") else 1, "I64") for name in TABLES}
    return {**dimensions, CONTENT: (1, "U8")}


def _problem_of_counts(tables: PassTables, batch_sizes: Sequence[int]) -> str:
    counts, rows = tables.counts, tables.rows
    if len(counts) != len(batch_sizes) or (counts < 0).any() or (counts > len(rows)).any() or counts.sum() != len(rows):
        return "their numbers of passes are not those of the passes that it holds"
    if (rows < 1).any() or (rows > max(batch_sizes, default=0)).any():
        return "a pass has no row, or more than a batch"
    ends = np.concatenate([[0], np.cumsum(rows)])[np.cumsum(counts)]
    sums = np.diff(ends, prepend=0)
    if (sums[counts > 0] != np.array(batch_sizes, dtype=np.int64)[counts > 0]).any():
        return "the rows of a step's passes are not as many as its batch has"
    floats = [number for number, dtype in enumerate(DTYPES) if dtype.is_floating_point]
    if len(tables.autocast) != len(rows) or not np.isin(tables.autocast, [-1, *floats]).all():
        return "the dtype of automatic mixed precision is none"
    return ""


def _problem_of_packed(tables: PassTables, size: int) -> str:
    kinds, lengths, shapes = tables.kinds, tables.lengths, tables.shapes
    if kinds.shape != (len(lengths), 3):
        return "'passes.kinds' must have three entries per packed tensor"
    if (
        (kinds[:, 0] < 0).any()
        or (kinds[:, 0] >= len(DTYPES)).any()
        or not np.isin(kinds[:, 1], [RAW, BITS, *SORTED]).all()
        or (kinds[:, 2] < 0).any()
        or (kinds[:, 2] > _MAX_DIMENSIONS).any()
        or kinds[:, 2].sum() != len(shapes)
        or (shapes < 0).any()
        or (shapes > _MAX_SIZE).any()
    ):
        return "dtype, encoding or shape of a packed tensor is none"
    if (lengths < 0).any() or (lengths > size).any() or lengths.sum() != size:
        return "the packed tensors do not fill 'passes.content'"
    for number, (dtype, encoding, _) in enumerate(kinds.tolist()):
        if not fits(DTYPES[dtype], tables.shape(number), encoding, int(lengths[number])):
            return f"packed tensor {number} has another size than its shape {tables.shape(number)}"
    return ""


def _problem_of_parts(tables: PassTables, schema: ChunkSchema) -> str:
    parts, rows = tables.parts, tables.rows
    if parts.shape != (len(rows), len(PARTS)) or (parts < -1).any() or (parts >= len(tables.lengths)).any():
        return "'passes.parts' must name the packed tensors of each pass"
    dtypes = [DTYPES[number] for number in tables.kinds[:, 0].tolist()]
    shapes = [tables.shape(number) for number in range(len(dtypes))]
    floats, bytes_ = (torch.float32, torch.float64), range(1, MAX_RANDOM_BYTES + 1)
    for name, allowed, lengths in (
        ("modes", (torch.bool,), range(schema.num_modules, schema.num_modules + 1)),
        ("random_state", (torch.uint8,), bytes_),
        ("device_random_state", (torch.uint8,), bytes_),
        ("statistics", floats, range(schema.num_statistics, schema.num_statistics + 1)),
        ("statistics_after", floats, range(schema.num_statistics, schema.num_statistics + 1)),
        ("memory_order", (torch.int64,), range(2, _MAX_DIMENSIONS + 1)),
        ("inputs.index", (torch.int64,), range(_MAX_SIZE + 1)),
        ("targets.index", (torch.int64,), range(_MAX_SIZE + 1)),
    ):
        column = parts[:, _COLUMN[name]]
        for number in np.unique(column[column >= 0]).tolist():
            if dtypes[number] not in allowed or len(shapes[number]) != 1 or shapes[number][0] not in lengths:
                return f"{name!r} of a pass is of type {dtypes[number]} and shape {shapes[number]}"
    first = np.array([shape[0] if shape else -1 for shape in shapes] + [0], dtype=np.int64)  # last: of number -1
    for name in ("inputs", "targets"):
        index, values = parts[:, _COLUMN[f"{name}.index"]], parts[:, _COLUMN[f"{name}.values"]]
        if ((index < 0) != (values < 0)).any() or (first[index] != first[values]).any() or (first[index] > rows).any():
            return f"{name!r} of a pass must have one row per index, and no more than the pass"
    return ""
