"""Verification of a run before anything in it is used: each chunk when it is opened, and every file by `check_run`."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.show import tracked
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import FIELDS
from epk_gp.storage.chunks import GROUPS, expected_matrices, read_groups, validate_steps_of_matrices
from epk_gp.storage.files import SAFETENSORS_DTYPES, open_tensors, regular_file_size
from epk_gp.storage.journal import FINISHED, JOURNAL, Chunk, chunk_file, has_checksum, read_journal, resume_name
from epk_gp.storage.passes import (
    Layout,
    expected_pass_tensors,
    pass_bytes,
    read_tables,
    validate_tables,
    with_stored_passes,
)
from epk_gp.storage.schema import DATA, HEADER, ChunkSchema, chunk_schema, read_data, read_header
from epk_gp.storage.training_state import read_training_state

_STEP_TENSORS = {"sizes", "lengths", "weighted", "batches", "sample_weights"}
_BLOCK_ELEMENTS = 1 << 22  # numbers tested at a time: 32 MiB of float64, so that a large chunk is not read as a whole


def read_steps(path: str | os.PathLike[str], schema: ChunkSchema, chunk: Chunk) -> list[Step]:
    """Verify a chunk as a whole, and return its steps; forward passes stay in the file until they are indexed.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged, or it does not hold the states and steps that the schema describes.
    """
    file, where = chunk_file(path, chunk)
    if not has_checksum(path, chunk):
        raise ValueError(
            f"{where} must have the checksum it was committed with: it is damaged. Restore it from a copy."
        )
    with open_tensors(file, where) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
        actual = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        _validate_layout(actual, schema, chunk, where)
        of_steps = {name: tensors.get_tensor(name) for name in _STEP_TENSORS | (actual.keys() & {GROUPS})}
        validate_steps_of_matrices(tensors, chunk.states - (chunk.first == 0), where)
        for name in actual.keys() - _STEP_TENSORS:
            if actual[name][1] in ("F32", "F64") and not name.startswith("passes."):
                _validate_finite_rows(tensors, name, actual[name][0][0], where)
        _validate_places(tensors, schema, where)
        steps = _parse_steps(of_steps, schema, chunk, where)
        if "passes.counts" not in actual:
            return steps
        tables = read_tables(tensors)
    validate_tables(tables, actual, steps, schema, where)
    return with_stored_passes(steps, tables, Path(path), chunk)


def _validate_layout(actual: Layout, schema: ChunkSchema, chunk: Chunk, where: str) -> None:
    """Raise if names, shapes and dtypes are not those of a chunk of this run."""
    k, j, L = chunk.states, chunk.states - (chunk.first == 0), len(schema.sizes)
    P, Q, weight_dtype = schema.num_weights, schema.num_statistics, SAFETENSORS_DTYPES[schema.dtype]
    got = {name: dtype for name, (_, dtype) in actual.items()}
    expected: dict[str, tuple[tuple[int, ...] | None, str]] = {  # None: one dimension of any length
        "states": ((len(schema.kept_between(chunk.first, chunk.last)), P), weight_dtype),
        "sizes": ((j,), "F64"),
        "lengths": ((j,), "I64"),
        "weighted": ((j,), "BOOL"),
        "batches": (None, "I64"),
        "sample_weights": (None, "F64"),
    }
    if Q:
        expected["statistics"] = ((k, Q), "F32" if got.get("statistics") == "F32" else "F64")
    if j:
        expected["update"] = ((j, len(FIELDS), L), "F64")
    for name in (f"update.{field}" for field in FIELDS):
        if name in actual:
            expected[name] = ((j, P), "F64" if got[name] == "F64" else weight_dtype)
        if f"{name}.at" in actual and schema.thins and j:
            expected[f"{name}.at"] = ((j, L), "I64")
    if GROUPS in actual:
        expected[GROUPS] = (None, "U8")
    expected |= expected_matrices(actual, schema) | expected_pass_tensors(actual, j)
    if different := sorted(actual.keys() ^ expected.keys()):
        raise ValueError(f"{where} must hold {sorted(expected)}: {different[0]!r} is not in both.")
    for name, (shape, dtype) in expected.items():
        if actual[name][1] != dtype or len(actual[name][0]) != (1 if shape is None else len(shape)):
            raise ValueError(f"{where} must hold {name!r} of type {dtype}: got {actual[name]}.")
        if shape is not None and actual[name][0] != shape:
            raise ValueError(f"{where} must hold {name!r} of shape {shape}: got {actual[name][0]}.")


def _validate_finite_rows(tensors: Any, name: str, rows: int, where: str) -> None:
    part = tensors.get_slice(name)
    block = max(1, _BLOCK_ELEMENTS * rows // max(1, math.prod(part.get_shape())))
    for start in range(0, rows, block):
        if not is_finite(part[start : start + block]):
            raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")


def _validate_places(tensors: Any, schema: ChunkSchema, where: str) -> None:
    sizes = torch.tensor(schema.sizes)
    for name in {f"update.{field}.at" for field in FIELDS} & set(tensors.keys()):
        at = tensors.get_tensor(name)
        if bool((at < -1).any()) or bool((at >= sizes.clamp(min=1)).any()):
            raise ValueError(f"{where} must hold {name!r} of -1 or a weight of its parameter: it holds others.")


def _parse_steps(tensors: Mapping[str, Tensor], schema: ChunkSchema, chunk: Chunk, where: str) -> list[Step]:
    rates, lengths, batches = tensors["sizes"], tensors["lengths"], tensors["batches"]
    is_weighted, weights = tensors["weighted"], tensors["sample_weights"]
    counts = lengths.clamp(min=0)
    if (
        not torch.isfinite(rates).all()
        or (rates < 0).any()
        or ((lengths < 1) & (lengths != -1)).any()
        or (counts > len(batches)).any()
        or int(counts.sum()) != len(batches)
        or int(counts[is_weighted].sum()) != len(weights)
        or (is_weighted & (lengths < 0)).any()
        or not torch.isfinite(weights).all()
        or (len(batches) and not 0 <= int(batches.min()) <= int(batches.max()) < schema.num_points)
    ):
        raise ValueError(
            f"{where} must hold steps of finite sizes on batches of the {schema.num_points} training points: "
            "it does not."
        )
    rows = batches.split(counts.tolist()) if len(counts) else ()
    parts = iter(weights.split(counts[is_weighted].tolist()) if is_weighted.any() else ())
    first = max(chunk.first - 1, 0)
    groups = read_groups(tensors[GROUPS], len(lengths), where) if GROUPS in tensors else {}
    return [
        Step(
            first + k,
            float(rates[k]),
            rows[k].clone() if lengths[k] >= 0 else None,
            next(parts).clone() if is_weighted[k] else None,
            groups=groups.get(k),
        )
        for k in range(len(lengths))
    ]


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run whose files were all checked.

    Attributes:
        header: The run's header.
        chunks: Its committed chunks.
        finished: Whether the recording came to its end.
        learning_rates: Learning rate of each step.
        batch_sizes: Number of points of each step.
        num_passes: Number of recorded forward passes of all steps.
        pass_bytes: Bytes that they take in memory.
        data_shapes: Shapes of inputs, targets, frozen state and fingerprint outputs.
        files: Number of files that were checked.
        bytes: Their total size.
    """

    header: dict[str, Any]
    chunks: tuple[Chunk, ...]
    finished: bool
    learning_rates: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    num_passes: int
    pass_bytes: int
    data_shapes: dict[str, tuple[int, ...]]
    files: int
    bytes: int

    @property
    def num_steps(self) -> int:
        """Number S of steps."""
        return len(self.learning_rates)


def check_run(folder: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and check it against what was committed.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        ValueError: A file is damaged; the message names it and the states it held.
    """
    place = Path(folder)
    header = read_header(folder)
    schema = chunk_schema(header)
    data = read_data(folder, header)
    journal = read_journal(folder)
    steps, num_bytes = list[Step](), 0
    for chunk in tracked(journal.chunks, "checking", unit="chunk", shown=progress):
        own = read_steps(folder, schema, chunk)
        num_bytes += sum(pass_bytes(step.passes) for step in own)  # each is read and checked
        steps.extend(own)
    number, chunk = len(journal.chunks) - 1, journal.chunks[-1]
    try:
        read_training_state(folder, number, chunk)
    except FileNotFoundError:
        if read_journal(folder).bytes == journal.bytes:  # a writer that committed another chunk would have removed it
            raise
    names = [HEADER, DATA, JOURNAL, resume_name(number), *(chunk.file for chunk in journal.chunks)]
    names += [FINISHED] if journal.finished else []
    sizes = [regular_file_size(place / name, name) for name in names]
    return RunSummary(
        header=header,
        chunks=journal.chunks,
        finished=journal.finished,
        learning_rates=tuple(step.lr for step in steps),
        batch_sizes=tuple(schema.num_points if step.batch is None else len(step.batch) for step in steps),
        num_passes=sum(len(step.passes) for step in steps),
        pass_bytes=num_bytes,
        data_shapes={name: tuple(value.shape) for name, value in data.items()},
        files=len(names),
        bytes=sum(size or 0 for size in sizes),
    )
