"""Verification of a chunk before anything in it is used: checksum, names, shapes, dtypes, and finite numbers."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import FIELDS
from epk_gp.storage.atomic_files import open_tensors
from epk_gp.storage.chunks import GROUPS, STORED_FIELDS, RowReader, read_groups
from epk_gp.storage.index import Chunk, chunk_file, has_checksum
from epk_gp.storage.matrices import expected_matrices, validate_steps_of_matrices
from epk_gp.storage.pass_verification import expected_tables, read_tables, validate_tables
from epk_gp.storage.passes import ContentOnDisk, packed_steps
from epk_gp.storage.schema import SAFETENSORS_DTYPES, ChunkSchema

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
            if actual[name][1] in ("F32", "F64", "BF16"):
                _validate_finite_rows(tensors, name, actual[name][0][0], where)
        if schema.compression == "deltas":
            _validate_packed_rows(tensors, schema, chunk, where)
        _validate_places(tensors, schema, where)
        steps = _parse_steps(of_steps, schema, chunk, where)
        if not expected_tables(actual):
            return steps
        tables, size = read_tables(tensors)
    validate_tables(tables, size, steps, schema, where)
    return packed_steps(steps, tables, ContentOnDisk(Path(path), chunk))


def _validate_layout(
    actual: Mapping[str, tuple[tuple[int, ...], str]], schema: ChunkSchema, chunk: Chunk, where: str
) -> None:
    """Raise if names, shapes and dtypes are not those of a chunk of this run."""
    k, j, L = chunk.states, chunk.states - (chunk.first == 0), len(schema.sizes)
    weight_dtype = SAFETENSORS_DTYPES[schema.dtype]
    kept = len(schema.kept_between(chunk.first, chunk.last)) if schema.thins else k
    states_dtype = SAFETENSORS_DTYPES[schema.stored_dtype if j else schema.dtype]
    expected: dict[str, tuple[tuple[int, ...] | None, str]] = {  # None: one dimension of any length
        "sizes": ((j,), "F64"),
        "lengths": ((j,), "I64"),
        "weighted": ((j,), "BOOL"),
        "batches": (None, "I64"),
        "sample_weights": (None, "F64"),
    }
    if j:
        expected["update"] = ((j, len(FIELDS), L), "F64")
    required = {"states", "statistics"} if schema.num_statistics else {"states"}
    if schema.thins and j:
        scaled = [name for name in (f"update.{field}.at" for field in STORED_FIELDS) if name in actual]
        expected |= dict.fromkeys(scaled, ((j, L), "I64"))
    counts = {"states": kept} | dict.fromkeys(required - {"states"}, k)
    for name, rows in (*sorted(counts.items()), *((f"update.{field}", j) for field in STORED_FIELDS)):
        if name not in required and not actual.keys() & {name, f"{name}.packed"}:
            continue
        if schema.compression == "none":
            got = actual.get(name, ((), ""))[1]
            others = {"states": (states_dtype,), "statistics": ("F32", "F64")}.get(name, ("F64",))
            own = states_dtype if name == "states" else weight_dtype
            expected[name] = ((rows, schema.row_length(name)), got if got in others else own)
        else:
            expected |= {f"{name}.packed": (None, "U8"), f"{name}.lengths": ((rows,), "I64")}
    if GROUPS in actual:
        expected[GROUPS] = (None, "U8")
    expected |= expected_matrices(actual, schema)
    if schema.version >= 3:
        for name, (dimensions, dtype) in expected_tables(actual).items():
            expected[name] = (None if dimensions == 1 else actual.get(name, ((), ""))[0], dtype)
            if name in actual and len(actual[name][0]) != dimensions:
                raise ValueError(f"{where} must hold {name!r} of {dimensions} dimensions: got {actual[name]}.")
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
    for name in [key for key in tensors.keys() if key.endswith(".at")]:  # noqa: SIM118  # not a mapping
        at = tensors.get_tensor(name)
        if bool((at < -1).any()) or bool((at >= sizes.clamp(min=1)).any()):
            raise ValueError(f"{where} must hold {name!r} of -1 or a weight of its parameter: it holds others.")


def _validate_packed_rows(tensors: Any, schema: ChunkSchema, chunk: Chunk, where: str) -> None:
    """Unpack every row once, and raise if it is not a row of finite numbers."""
    for name in [key.removesuffix(".packed") for key in tensors.keys() if key.endswith(".packed")]:  # noqa: SIM118
        lengths = tensors.get_tensor(f"{name}.lengths")
        size = tensors.get_slice(f"{name}.packed").get_shape()[0]
        if (lengths < 1).any() or int(lengths.sum()) != size or int(lengths.max()) > size:
            raise ValueError(f"{where} must hold {name!r} in parts that fill it: they do not.")
        reader = RowReader()
        for row in range(len(lengths)):
            try:
                value = reader.read(tensors, name, row, file=chunk.file, num_weights=schema.row_length(name))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if name == "states" and value.dtype != schema.dtype:
                raise ValueError(f"{where} must hold states of {schema.dtype}: got {value.dtype}.")
            if not is_finite(value):
                raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")


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
