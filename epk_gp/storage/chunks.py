"""Chunks of a run on disk: consecutive weight states, and the steps that led to them."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.step import Step
from epk_gp.core.update_rules import FIELDS, UpdateCoefficients
from epk_gp.storage.atomic_files import checksum_file, open_tensors, regular_file_size
from epk_gp.storage.codec import unpack_row
from epk_gp.storage.index import Chunk

_SMALL = {"sizes", "lengths", "weighted", "batches", "sample_weights"}
_BLOCK_ELEMENTS = 1 << 22  # looked at at a time
# Names on disk of the coefficients in `update_rules.FIELDS`: those of format version 2.
STORED_FIELDS = ("direct", "momentum", "keep", "take", "gradient", "decay", "shrink")
_NAMES = {torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class ChunkSchema:
    """What the chunks of a run look like.

    Attributes:
        sizes: Number of weights of each of the L parameters.
        dtype: Of the weights.
        num_points: M.
        compression: "none", or "deltas".
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    num_points: int
    compression: str

    @property
    def num_weights(self) -> int:
        """P."""
        return sum(self.sizes)


def read_steps(path: str | os.PathLike[str], layout: ChunkSchema, chunk: Chunk) -> list[Step]:
    """Read a chunk's steps, after checking the whole chunk: its checksum, and what stands in it.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is damaged, or holds something else than its states and steps.
    """
    file, where = _place(path, chunk)
    if checksum_file(file, chunk.bytes, where, chunk.digest) != chunk.blake2b:
        raise ValueError(
            f"{where} must have the checksum it was committed with: it is damaged. Restore it from a copy."
        )
    with open_tensors(file, where) as tensors:
        shapes = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in shapes.items()}
        _check_layout(found, layout, chunk, where)
        small = {name: tensors.get_tensor(name) for name in _SMALL}
        for name in found.keys() - _SMALL:
            if found[name][1] in ("F32", "F64"):
                _check_rows(tensors, name, found[name][0][0], where)
        if "update" in found:
            _check_rows(tensors, "update", found["update"][0][0], where)
    if layout.compression == "deltas":
        _unpack_all(path, layout, chunk)
    return _steps_from(small, layout, chunk, where)


@dataclass
class RowReader:
    """Rows of one kind of tensor, unpacked one after the other; the last one is kept.

    Attributes:
        last: File, row and value of what was read last.
    """

    last: tuple[str, int, Tensor] | None = None

    def read(self, tensors: Any, name: str, key: str, row: int, layout: ChunkSchema) -> Float[Tensor, " P"]:
        """Read a row; one that follows the last is one step of unpacking."""
        lengths = tensors.get_tensor(f"{name}.lengths").tolist()
        kept = self.last
        start, value = (kept[1], kept[2]) if kept is not None and kept[0] == key and kept[1] <= row else (-1, None)
        offset = sum(lengths[: start + 1])
        packed = tensors.get_slice(f"{name}.packed")
        for number in range(start + 1, row + 1):
            part = packed[offset : offset + lengths[number]]
            value = unpack_row(part, value, layout.num_weights)
            offset += lengths[number]
        if value is None:
            raise IndexError(f"row must be one of the chunk's: got {row}.")
        self.last = (key, row, value)
        return value.clone()


def read_state(
    path: str | os.PathLike[str], layout: ChunkSchema, chunk: Chunk, state: int, reader: RowReader | None = None
) -> Float[Tensor, " P"]:
    """Read one weight state, mapped from the file, or unpacked.

    Raises:
        FileNotFoundError: The file is gone.
        ValueError: It was damaged since the run was opened.
    """
    file, where = _existing(path, chunk)
    with open_tensors(file, where) as tensors:
        return _row(tensors, "states", state - chunk.first, chunk, layout, reader)


def read_update(
    path: str | os.PathLike[str],
    layout: ChunkSchema,
    chunk: Chunk,
    step: int,
    readers: Mapping[str, RowReader] | None = None,
) -> UpdateCoefficients:
    """Read one step's numbers, mapped from the file, or unpacked.

    Raises:
        FileNotFoundError: The file is gone.
        ValueError: It was damaged since the run was opened.
    """
    row = step - max(chunk.first - 1, 0)
    values = {}
    file, where = _existing(path, chunk)
    with open_tensors(file, where) as tensors:
        stored = {name.removesuffix(".packed") for name in tensors.keys()}  # noqa: SIM118  # not a mapping
        numbers = tensors.get_slice("update")[row]
        for number, (name, stored_name) in enumerate(zip(FIELDS, STORED_FIELDS, strict=True)):
            diagonal = f"update.{stored_name}"
            reader = None if readers is None else readers[name]
            values[name] = (
                _row(tensors, diagonal, row, chunk, layout, reader) if diagonal in stored else numbers[number]
            )
    return UpdateCoefficients(**values)


def _check_layout(found: Mapping[str, Any], layout: ChunkSchema, chunk: Chunk, where: str) -> None:
    """Compare names, shapes and dtypes with those that a chunk of this run must have."""
    k, j, P, L = chunk.states, chunk.states - (chunk.first == 0), layout.num_weights, len(layout.sizes)
    kind = _NAMES[layout.dtype]
    wanted: dict[str, tuple[tuple[int, ...] | None, str]] = {
        "sizes": ((j,), "F64"),
        "lengths": ((j,), "I64"),
        "weighted": ((j,), "BOOL"),
        "batches": (None, "I64"),
        "sample_weights": (None, "F64"),
    }
    if j:
        wanted["update"] = ((j, len(FIELDS), L), "F64")
    for name, rows in (("states", k), *((f"update.{field}", j) for field in STORED_FIELDS)):
        if name != "states" and not found.keys() & {name, f"{name}.packed"}:
            continue
        if layout.compression == "none":
            wanted[name] = ((rows, P), "F64" if name != "states" and found[name][1] == "F64" else kind)
        else:
            wanted |= {f"{name}.packed": (None, "U8"), f"{name}.lengths": ((rows,), "I64")}
    if odd := sorted(found.keys() ^ wanted.keys()):
        raise ValueError(f"{where} must hold {sorted(wanted)}: {odd[0]!r} is not in both.")
    for name, (shape, dtype) in wanted.items():
        if found[name][1] != dtype or len(found[name][0]) != (1 if shape is None else len(shape)):
            raise ValueError(f"{where} must hold {name!r} of type {dtype}: got {found[name]}.")
        if shape is not None and found[name][0] != shape:
            raise ValueError(f"{where} must hold {name!r} of shape {shape}: got {found[name][0]}.")


def _check_rows(tensors: Any, name: str, rows: int, where: str) -> None:
    part = tensors.get_slice(name)
    block = max(1, _BLOCK_ELEMENTS * rows // max(1, math.prod(part.get_shape())))
    for start in range(0, rows, block):
        if not torch.isfinite(part[start : start + block]).all():
            raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")


def _unpack_all(path: str | os.PathLike[str], layout: ChunkSchema, chunk: Chunk) -> None:
    """Unpack every row once; each is checked as it comes."""
    file, where = _place(path, chunk)
    with open_tensors(file, where) as tensors:
        for name in [key.removesuffix(".packed") for key in tensors.keys() if key.endswith(".packed")]:  # noqa: SIM118
            lengths = tensors.get_tensor(f"{name}.lengths")
            size = tensors.get_slice(f"{name}.packed").get_shape()[0]
            if (lengths < 1).any() or int(lengths.sum()) != size or int(lengths.max()) > size:
                raise ValueError(f"{where} must hold {name!r} in parts that fill it: they do not.")
            reader = RowReader()
            for row in range(len(lengths)):
                try:
                    value = reader.read(tensors, name, chunk.file, row, layout)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
                if name == "states" and value.dtype != layout.dtype:
                    raise ValueError(f"{where} must hold states of {layout.dtype}: got {value.dtype}.")
                if not torch.isfinite(value).all():
                    raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")


def _steps_from(tensors: Mapping[str, Tensor], layout: ChunkSchema, chunk: Chunk, where: str) -> list[Step]:
    sizes, lengths, batches = tensors["sizes"], tensors["lengths"], tensors["batches"]
    given, weights = tensors["weighted"], tensors["sample_weights"]
    counts = lengths.clamp(min=0)
    if (
        not torch.isfinite(sizes).all()
        or (sizes < 0).any()
        or ((lengths < 1) & (lengths != -1)).any()
        or (counts > len(batches)).any()
        or int(counts.sum()) != len(batches)
        or int(counts[given].sum()) != len(weights)
        or (given & (lengths < 0)).any()
        or not torch.isfinite(weights).all()
        or (len(batches) and not 0 <= int(batches.min()) <= int(batches.max()) < layout.num_points)
    ):
        raise ValueError(
            f"{where} must hold steps of finite sizes on batches of the {layout.num_points} training points: "
            "it does not."
        )
    rows = batches.split(counts.tolist()) if len(counts) else ()
    parts = iter(weights.split(counts[given].tolist()) if given.any() else ())
    first = max(chunk.first - 1, 0)
    return [
        Step(
            first + k,
            float(sizes[k]),
            rows[k].clone() if lengths[k] >= 0 else None,
            next(parts).clone() if given[k] else None,
        )
        for k in range(len(lengths))
    ]


def _row(
    tensors: Any, name: str, row: int, chunk: Chunk, layout: ChunkSchema, reader: RowReader | None
) -> Float[Tensor, " P"]:
    if layout.compression == "none":
        value: Tensor = tensors.get_slice(name)[row]
        return value
    return (reader or RowReader()).read(tensors, name, chunk.file, row, layout)


def _place(path: str | os.PathLike[str], chunk: Chunk) -> tuple[Path, str]:
    file = Path(path) / chunk.file
    return file, f"{file} ({chunk.content})"


def _existing(path: str | os.PathLike[str], chunk: Chunk) -> tuple[Path, str]:
    file, where = _place(path, chunk)
    size = regular_file_size(file, where)
    if size is None:
        raise FileNotFoundError(
            f"a run must keep all its files while it is used: {where} was removed or renamed. Restore it, or load "
            "the run from its new place."
        )
    if size != chunk.bytes:
        raise ValueError(f"{where} must have {chunk.bytes} bytes while it is used: it has {size}. Restore it.")
    return file, where
