"""Chunks of a run: the tensors that hold consecutive weight states and the steps that led to them.

A chunk is written by `chunk_tensors`, verified as a whole by `read_steps` when a run is opened, and read row by row:
`StoredStates`, `StoredUpdates` and `StoredPasses` are a run's states, coefficients and forward passes, read when they
are indexed. `passes` and `passes.at` are the packed tensors (`files.pack`) of all passes; `passes.counts` holds the
number of passes of each step, and `passes.rows` the number of rows of each pass.
"""

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped, UInt8
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.states import recomputed_run
from epk_gp.core.step import DIGEST_BYTES, ForwardPass, Move, SeenRows, Step, tensor_bytes
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_law import compact_update
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import BY_PARAMETER, FIELDS, SECOND, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.files import SAFETENSORS_DTYPES, pack, parse_json, unpack, validate_places
from epk_gp.storage.schema import INPUTS, TARGETS, Chunk, ChunkSchema, GroupChanges, chunk_file, opened_chunk, validated
from epk_gp.storage.training_state import CHECKSUM, REPLAY, decoded_state

GROUPS = "groups"  # the tensor of parameter groups
MOVES = "moves"  # the tensor of moves without a gradient: anchor and share of the way, 0 without a move
DIGESTS = "digests"  # digests of the run up to each step
MATRICES_NAME = "matrices"  # the matrices of each step, packed
_BLOCK_ELEMENTS = 1 << 22  # numbers tested at a time: 32 MiB of float64, so that a large chunk need not fit into memory
# The fields of a pass that are tensors.
_VECTORS = {
    "modes": (torch.bool,),
    "random_state": (torch.uint8,),
    "device_random_state": (torch.uint8,),
    "statistics": (torch.float32, torch.float64),
    "statistics_after": (torch.float32, torch.float64),
    "memory_order": (torch.int64,),
    "weights": (torch.float32, torch.float64),
    "settings": (torch.float64,),
}
_SEEN = ("inputs", "targets", "cotangents")
PARTS = (*_VECTORS, *(f"{name}.{kind}" for name in _SEEN for kind in ("index", "values")))
_DTYPES = tuple(SAFETENSORS_DTYPES)  # a dtype is stored as its index in this list
_MAX_RANDOM_BYTES = 1 << 16  # torch's state has 16 bytes on CUDA
_MAX_DIMENSIONS = 16
PASSES, COUNTS, _ROWS = "passes", "passes.counts", "passes.rows"
PASS_LAYOUT = {PASSES: "U8", f"{PASSES}.at": "I64", COUNTS: "I64", _ROWS: "I64"}


def _read_matrices(tensors: Any, schema: ChunkSchema, row: int, where: str) -> dict[str, dict[int, Tensor]]:
    """Read the matrices of one step of an open chunk, as the arguments of `UpdateCoefficients`.

    Raises:
        ValueError: They are not square matrices of finite numbers whose sides divide their parameters' sizes, or not
            the five numbers of a second buffer.
    """
    sides: dict[str, dict[int, Tensor]] = {side: {} for side in BY_PARAMETER}
    names = {f"{side}.{k}": (side, k) for side in BY_PARAMETER for k in range(len(schema.sizes))}
    for name, Q in unpack(tensors, MATRICES_NAME, row, where).items():
        side, k = names.get(name, ("", 0))
        is_square = Q.ndim == 2 and Q.shape[0] == Q.shape[1] > 0
        if side == SECOND:
            is_sound = Q.shape in ((5, 1), (5, schema.sizes[k]))
        else:
            is_sound = side != "" and is_square and schema.sizes[k] % len(Q) == 0
        if not is_sound or not Q.is_floating_point() or not is_finite(Q):
            raise ValueError(f"{where} must hold square matrices of finite numbers: {name!r} of step {row} is none.")
        sides[side][k] = Q
    return sides


def step_tensors(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the tensors with learning rates and batches of consecutive steps, without passes, by name on disk."""
    batches = [step.batch.cpu() for step in steps if step.batch is not None]
    weights = [step.sample_weights.cpu() for step in steps if step.sample_weights is not None]
    tensors = {
        "sizes": torch.tensor([step.lr for step in steps], dtype=torch.float64),
        "lengths": torch.tensor([-1 if step.batch is None else len(step.batch) for step in steps], dtype=torch.int64),
        "weighted": torch.tensor([step.sample_weights is not None for step in steps], dtype=torch.bool),
        "batches": torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64),
        "sample_weights": torch.cat(weights).double() if weights else torch.zeros(0, dtype=torch.float64),
    }
    if any(step.move is not None for step in steps):
        moves = [(0, 0.0) if step.move is None else (step.move.anchor, step.move.share) for step in steps]
        tensors[MOVES] = torch.tensor(moves, dtype=torch.float64)
    changed = [(k, step.groups) for k, step in enumerate(steps) if step.groups is not None]
    if changed:
        changes = [{"step": k, "groups": [group.to_json() for group in groups]} for k, groups in changed]
        tensors[GROUPS] = torch.frombuffer(bytearray(json.dumps({"changes": changes}).encode()), dtype=torch.uint8)
    return tensors


def read_groups(content: UInt8[Tensor, " bytes"], count: int, where: str) -> dict[int, tuple[OptimizerGroup, ...]]:
    """Return the parameter groups in a chunk of `count` steps, by the step in the chunk.

    Raises:
        ValueError: The tensor does not have the form that `step_tensors` makes.
    """
    message = f"{where} must hold {GROUPS!r} that describe the optimizers' parameter groups"
    held = validated(GroupChanges, parse_json(bytes(tensor_bytes(content)), message), message)
    if any(change.step >= count for change in held.changes):
        raise ValueError(f"{message}: they are those of other steps.")
    return {c.step: tuple(OptimizerGroup.from_json(group.model_dump()) for group in c.groups) for c in held.changes}


def pass_tensors(steps: Sequence[Step], schema: ChunkSchema) -> dict[str, Tensor]:
    """Return the tensors with the passes of consecutive steps, by name; empty if there is no pass.

    Raises:
        TypeError: A tensor has a dtype that cannot be stored.
        ValueError: A pass does not fit this run.
    """
    passes = [forward for step in steps for forward in step.passes]
    if not passes:
        return {}
    rows = []
    for forward in passes:
        validate_pass(forward, schema)
        row = {name: value for name in _VECTORS if (value := getattr(forward, name)) is not None}
        for name in _SEEN:
            if (seen := getattr(forward, name)) is not None:
                row |= {f"{name}.index": seen.index, f"{name}.values": seen.values}
        if forward.autocast is not None:
            row["autocast"] = torch.tensor(_DTYPES.index(forward.autocast))
        rows.append(row)
    tensors = {
        COUNTS: torch.tensor([len(step.passes) for step in steps]),
        _ROWS: torch.tensor([forward.num_rows for forward in passes]),
        **pack(PASSES, rows),
    }
    _validate_counts(tensors, steps, schema, "a chunk")
    return tensors


class StoredPasses(Sequence[ForwardPass]):
    """The forward passes of one step on disk; each is read and checked when it is indexed.

    Any number of threads may read at once. Nothing is cached: keep a pass that is needed twice.
    """

    def __init__(self, path: Path, chunk: Chunk, schema: ChunkSchema, first: int, rows: Sequence[int]) -> None:
        """Store the number of the step's first pass in the chunk, and the number of rows of each pass."""
        self._path, self._chunk, self._schema, self._first, self._rows = path, chunk, schema, first, rows

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, with an absolute path that works from any working directory."""
        return {**self.__dict__, "_path": self._path.absolute()}

    def __len__(self) -> int:
        """Return the number of passes."""
        return len(self._rows)

    def __getitem__(self, number: int) -> ForwardPass:  # type: ignore[override]  # one pass at a time
        """Read a pass.

        Raises:
            IndexError: The step has no such pass.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened, or does not hold a forward pass.
        """
        count = len(self._rows)
        if not -count <= number < count:
            raise IndexError(f"pass must lie in 0..{count - 1}: got {number}.")
        number %= count
        where = f"{chunk_file(self._path, self._chunk)[1]}: pass {number} of a step"
        with opened_chunk(self._path, self._chunk) as tensors:
            values = unpack(tensors, PASSES, self._first + number, where)
        try:
            if unknown := values.keys() - {"autocast", *PARTS}:
                raise ValueError(f"a pass has no {min(unknown)!r}")
            parts: dict[str, Any] = {name: values[name] for name in _VECTORS if name in values}
            for name in _SEEN:
                if f"{name}.index" in values or f"{name}.values" in values:
                    parts[name] = SeenRows(values[f"{name}.index"], values[f"{name}.values"])
            if "autocast" in values:
                parts["autocast"] = dict(enumerate(_DTYPES))[int(values["autocast"])]
            forward = ForwardPass(self._rows[number], **parts)
            validate_pass(forward, self._schema)
        except (ValueError, KeyError, RuntimeError) as error:  # RuntimeError: not a single number
            raise ValueError(f"{where}: {error}") from error
        return forward

    def __repr__(self) -> str:
        """Describe the passes in words."""
        return f"StoredPasses({len(self)} forward passes)"


def with_stored_passes(path: Path, chunk: Chunk, schema: ChunkSchema, steps: Sequence[Step]) -> list[Step]:
    """Return the steps of a chunk with its passes; a step without passes has an empty tuple.

    The content of a pass is checked when it is indexed: reading all passes at every opening is too slow.

    Raises:
        ValueError: Numbers of passes or rows do not fit the steps, or offsets lie outside the file's tensor.
    """
    with opened_chunk(path, chunk) as tensors:
        tables = {name: tensors.get_tensor(name) for name in PASS_LAYOUT if name != PASSES}
        size, where = tensors.get_slice(PASSES).get_shape()[0], chunk_file(path, chunk)[1]
    _validate_counts(tables, steps, schema, where)
    validate_places(tables[f"{PASSES}.at"], size, PASSES, where)
    stored, first, rows = list[Step](), 0, tables[_ROWS].tolist()
    for step, count in zip(steps, tables[COUNTS].tolist(), strict=True):
        passes = StoredPasses(path, chunk, schema, first, rows[first : first + count]) if count else ()
        stored.append(replace(step, passes=passes))
        first += count
    return stored


def _validate_counts(tensors: Mapping[str, Tensor], steps: Sequence[Step], schema: ChunkSchema, where: str) -> None:
    counts, rows = tensors[COUNTS], tensors[_ROWS]
    sizes = torch.tensor([schema.num_points if step.batch is None else len(step.batch) for step in steps])
    is_sound = (
        len(counts) == len(sizes)
        and bool(((counts >= 0) & (counts <= len(rows))).all())
        and int(counts.sum()) == len(rows) == len(tensors[f"{PASSES}.at"])
        and bool(((rows >= 1) & (rows <= sizes.max())).all())
        and all(
            not count or int(own.sum()) == size
            for count, own, size in zip(counts.tolist(), rows.split(counts.tolist()), sizes.tolist(), strict=True)
        )
    )
    if not is_sound:
        raise ValueError(f"{where} must hold the forward passes of its steps, with as many rows as their batches have.")


def validate_pass(forward: ForwardPass, schema: ChunkSchema | None = None) -> None:
    """Raise if a pass does not follow `ForwardPass`, cannot be stored, or does not fit a run with this schema.

    Raises:
        TypeError: A tensor has a dtype that cannot be stored.
        ValueError: A shape, dtype or index is wrong, or a number is not finite.
    """
    if type(forward.num_rows) is not int or forward.num_rows < 1:
        raise ValueError(f"a forward pass must have at least one row: got {forward.num_rows!r}.")
    for name in _SEEN:
        if (seen := getattr(forward, name)) is not None:
            _validate_seen(name, seen, forward.num_rows)
    lengths = {"device_random_state": (1, _MAX_RANDOM_BYTES), "memory_order": (2, _MAX_DIMENSIONS)}
    if schema is not None:
        lengths["modes"] = (schema.num_modules, schema.num_modules)
        lengths["statistics"] = lengths["statistics_after"] = (schema.num_statistics, schema.num_statistics)
        lengths["weights"] = (schema.num_weights, schema.num_weights)
    for name, dtypes in _VECTORS.items():
        value = getattr(forward, name)
        if value is None:
            continue
        if value.ndim != 1 or value.dtype not in dtypes:
            raise ValueError(f"{name} must be a vector of {dtypes[-1]}: got {tuple(value.shape)} of {value.dtype}.")
        least, most = lengths.get(name, (0, len(value)))
        if not least <= len(value) <= most:
            raise ValueError(f"{name} must have {least} to {most} entries: got {len(value)}.")
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f"{name} must hold finite numbers: it holds NaN or infinity.")
    order = forward.memory_order
    if order is not None and sorted(order.tolist()) != list(range(len(order))):
        raise ValueError(f"memory_order must hold each dimension once: got {order.tolist()}.")
    if forward.random_state is not None:
        try:
            torch.Generator().set_state(forward.random_state.cpu().clone())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"random_state must be one of torch's random numbers: {str(error)[:80]!r}.") from error
    if forward.autocast is not None and not (forward.autocast in _DTYPES and forward.autocast.is_floating_point):
        raise ValueError(f"autocast must be a floating-point dtype: got {forward.autocast}.")


def _validate_seen(name: str, seen: SeenRows, num_rows: int) -> None:
    index, values = seen.index, seen.values
    is_numbers = name != "cotangents" or (values.ndim == 2 and values.is_floating_point())
    if index.ndim != 1 or index.dtype != torch.int64 or values.ndim < 1 or len(values) != len(index) or not is_numbers:
        raise ValueError(f"{name} must have one row per index: got {tuple(index.shape)} and {tuple(values.shape)}.")
    if values.dtype not in SAFETENSORS_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SAFETENSORS_DTYPES)
        raise TypeError(f"{name} must be of one of the dtypes {names} to be recorded: got {values.dtype}.")
    if not (index.unique().numel() == len(index) and bool(((index >= 0) & (index < num_rows)).all())):
        raise ValueError(f"{name} must be different rows of the pass, 0..{num_rows - 1}: got {index.tolist()[:20]}.")
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise ValueError(f"{name} must hold finite numbers: they hold NaN or infinity.")


def chunk_tensors(
    states: Sequence[Tensor],
    steps: Sequence[Step],
    updates: Sequence[UpdateCoefficients],
    schema: ChunkSchema,
    statistics: Sequence[Tensor] = (),
    *,
    digests: Sequence[str],
) -> dict[str, Tensor]:
    """Return the tensors of a chunk by their names on disk.

    Args:
        states: Consecutive weight states; for a run that keeps every k-th state, these and the last one.
        steps: The steps that led to them; no step leads to state 0.
        updates: Coefficients of these steps, in compact form for a run that keeps every k-th state.
        schema: The schema of the run's chunks.
        statistics: The moving statistics of all consecutive states, for a network that has any.
        digests: Digest of the run up to each of the steps.

    Raises:
        TypeError: A tensor of a pass has a dtype that cannot be stored.
        ValueError: Statistics or passes do not fit this run.
    """
    count = len(steps) or 1
    if [value.shape for value in statistics] != [(schema.num_statistics,)] * count * bool(schema.num_statistics):
        raise ValueError(f"each of {count} states must have {schema.num_statistics} moving statistics: got others.")
    tensors = {"states": torch.stack([state.cpu() for state in states])}
    if statistics:
        tensors["statistics"] = torch.stack([value.cpu() for value in statistics])
    tensors |= step_tensors(steps) | pass_tensors(steps, schema)
    if steps:
        content = torch.frombuffer(bytearray.fromhex("".join(digests)), dtype=torch.uint8)
        tensors[DIGESTS] = content.view(len(steps), -1)
    if schema.thins:
        updates = [compact_update(update, schema.scaled, schema.sizes) for update in updates]
    columns = []
    for name in FIELDS if updates else ():
        values = [getattr(update, name).cpu() for update in updates]
        diagonals = [value for value in values if len(value) != len(schema.sizes)]
        if diagonals:
            rows = [broadcast_to_params(value, schema.sizes, diagonals[0]) for value in values]
            tensors[f"update.{name}"] = torch.stack(rows)
            values = [torch.zeros(len(schema.sizes), dtype=torch.float64) for _ in updates]
        columns.append(torch.stack(values).double())
        if any(name in update.places for update in updates):
            shared = torch.full((len(schema.sizes),), -1)
            tensors[f"update.{name}.at"] = torch.stack([update.places.get(name, shared) for update in updates])
    if any(update.has_matrices for update in updates):
        named = [{f"{side}.{k}": Q for side in BY_PARAMETER for k, Q in getattr(u, side).items()} for u in updates]
        tensors |= pack(MATRICES_NAME, named)  # by side and position of the parameter, as "left.0"
    if columns:
        tensors["update"] = torch.stack(columns, dim=1)
    return tensors


def read_row(tensors: Any, name: str, row: int) -> Shaped[Tensor, "..."]:
    """Copy a row of a tensor of an open chunk: a mapped row would change when the file is written again."""
    value: Tensor = tensors.get_slice(name)[row].clone()
    return value


def read_steps(path: str | os.PathLike[str], schema: ChunkSchema, chunk: Chunk) -> list[Step]:
    """Verify a chunk as a whole, and return its steps.

    Forward passes stay in the file and are checked when they are read: reading all of them at every opening is too
    slow.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged, or does not hold the states and steps that the schema describes.
    """
    where = chunk_file(path, chunk)[1]
    with opened_chunk(path, chunk, verify=True) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping
        actual = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        _validate_layout(actual, schema, chunk, where)
        for name, part in slices.items():
            if actual[name][1] in ("F32", "F64"):
                _validate_finite_rows(part, name, where)
        for field in FIELDS:
            if (name := f"update.{field}.at") in actual:
                at, sizes = tensors.get_tensor(name), torch.tensor(schema.sizes)
                if bool((at < -1).any()) or bool((at >= sizes.clamp(min=1)).any()):
                    raise ValueError(f"{where} must hold {name!r} of -1 or a weight of its parameter: it does not.")
        steps = _parse_steps(tensors, schema, chunk, where)
        for name in {MATRICES_NAME, REPLAY} & actual.keys():
            places = tensors.get_tensor(f"{name}.at")
            validate_places(places, actual[name][0][0], name, where)
            for row in range(len(places) if name == MATRICES_NAME else 0):
                _read_matrices(tensors, schema, row, where)
    return with_stored_passes(Path(path), chunk, schema, steps) if PASSES in actual else steps


_Layout = tuple[tuple[int, ...], str]  # shape and dtype of a tensor


def _validate_layout(actual: Mapping[str, _Layout], schema: ChunkSchema, chunk: Chunk, where: str) -> None:
    """Raise if names, shapes and dtypes do not fit a chunk of this run."""
    k, j, L, any_length = chunk.states, chunk.states - (chunk.first == 0), len(schema.sizes), -1
    P, Q, weight_dtype = schema.num_weights, schema.num_statistics, SAFETENSORS_DTYPES[schema.dtype]
    if "sizes" not in actual or actual["sizes"][0] != (j,):  # first, as the journal may claim any number
        raise ValueError(f"{where} must hold {j} steps: its 'sizes' are missing or others.")
    expected: dict[str, _Layout] = {
        "states": ((len(schema.held_between(chunk.first, chunk.last)), P), weight_dtype),
        "sizes": ((j,), "F64"),
        "lengths": ((j,), "I64"),
        "weighted": ((j,), "BOOL"),
        "batches": ((any_length,), "I64"),
        "sample_weights": ((any_length,), "F64"),
    }
    if Q:
        expected["statistics"] = ((k, Q), "F32 F64")
    if schema.thins and REPLAY in actual:
        expected |= {REPLAY: ((any_length,), "U8"), f"{REPLAY}.at": ((k, 2), "I64")}
    if j:
        optional: dict[str, _Layout] = {f"update.{field}": ((j, P), "F32 F64") for field in FIELDS}
        optional |= {f"update.{field}.at": ((j, L), "I64") for field in FIELDS if schema.thins}
        optional |= {GROUPS: ((any_length,), "U8"), MOVES: ((j, 2), "F64")}
        if schema.is_stream:
            optional |= {name: actual[name] for name in (INPUTS, TARGETS) if name in actual}
        if MATRICES_NAME in actual:
            expected |= {MATRICES_NAME: ((any_length,), "U8"), f"{MATRICES_NAME}.at": ((j, 2), "I64")}
        if PASSES in actual:
            expected |= {name: ((any_length,), dtype) for name, dtype in PASS_LAYOUT.items()}
            expected[f"{PASSES}.at"] = ((any_length, 2), "I64")
        expected |= {"update": ((j, len(FIELDS), L), "F64"), DIGESTS: ((j, DIGEST_BYTES), "U8")}
        expected |= {name: layout for name, layout in optional.items() if name in actual}
    if different := sorted(actual.keys() ^ expected.keys()):
        raise ValueError(f"{where} must hold {sorted(expected)}: {different[0]!r} is not in both.")
    for name, (shape, dtype) in expected.items():
        of_any_length = shape[:1] == (any_length,) and len(actual[name][0]) == len(shape)
        got = (any_length, *actual[name][0][1:]) if of_any_length else actual[name][0]
        if got != shape or actual[name][1] not in dtype.split():
            raise ValueError(f"{where} must hold {name!r} of shape {shape} and type {dtype}: got {actual[name]}.")


def _validate_finite_rows(part: Any, name: str, where: str) -> None:
    rows = part.get_shape()[0]
    block = max(1, _BLOCK_ELEMENTS * rows // max(1, math.prod(part.get_shape())))
    for start in range(0, rows, block):
        if not is_finite(part[start : start + block]):
            raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")


def _parse_steps(tensors: Any, schema: ChunkSchema, chunk: Chunk, where: str) -> list[Step]:
    rates, lengths, batches, is_weighted, weights = (
        tensors.get_tensor(name) for name in ("sizes", "lengths", "batches", "weighted", "sample_weights")
    )
    counts = lengths.clamp(min=0)
    num_points = 1 << 62 if schema.is_stream else schema.num_points  # `stream_data` counts them
    is_sound = (
        bool((rates >= 0).all() and ((lengths >= 1) | (lengths == -1)).all() and (counts <= len(batches)).all())
        and int(counts.sum()) == len(batches)
        and int(counts[is_weighted].sum()) == len(weights)
        and not bool((is_weighted & (lengths < 0)).any())
        and (not len(batches) or schema.least_index <= int(batches.min()) <= int(batches.max()) < num_points)
    )
    if not is_sound:
        raise ValueError(f"{where} must hold steps on batches of the {schema.num_points} training points: it does not.")
    rows = batches.split(counts.tolist()) if len(counts) else ()
    parts = iter(weights.split(counts[is_weighted].tolist()) if is_weighted.any() else ())
    groups = read_groups(tensors.get_tensor(GROUPS), len(lengths), where) if GROUPS in tensors.keys() else {}  # noqa: SIM118
    moves = tensors.get_tensor(MOVES).tolist() if MOVES in tensors.keys() else [(0.0, 0.0)] * len(lengths)  # noqa: SIM118
    if not all(anchor in range(chunk.first_step + k + 1) for k, (anchor, _) in enumerate(moves)):
        raise ValueError(f"{where} must hold {MOVES!r} towards states before their steps: it does not.")
    return [
        Step(
            chunk.first_step + k,
            float(rates[k]),
            rows[k].clone() if lengths[k] >= 0 else None,
            next(parts).clone() if is_weighted[k] else None,
            groups=groups.get(k),
            move=Move(int(moves[k][0]), moves[k][1]) if moves[k][1] else None,
        )
        for k in range(len(lengths))
    ]


def read_digests(path: str | os.PathLike[str], chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """Return the digests of the run up to each state."""
    digests = [chunks[0].digest]
    for chunk in chunks[1:]:
        with opened_chunk(path, chunk) as tensors:
            digests += [bytes(row).hex() for row in tensors.get_tensor(DIGESTS).numpy()]
    return tuple(digests)


@dataclass(frozen=True)
class _Stored:
    """Tensors of a run on disk, read from its chunks by several threads at once.

    Attributes:
        path: Folder of the run.
        schema: The layout of its chunks.
        chunks: The committed chunks.
    """

    path: Path
    schema: ChunkSchema
    chunks: tuple[Chunk, ...]

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, with an absolute path that works from any working directory."""
        return {**self.__dict__, "path": self.path.absolute()}

    def __len__(self) -> int:
        """Return the number of states, S + 1."""
        return self.chunks[-1].last + 1

    def _chunk(self, state: int) -> Chunk:
        return self.chunks[bisect_left(self.chunks, state, key=lambda chunk: chunk.last)]


@dataclass(frozen=True)
class StoredStates(_Stored):
    """The kept weights or the moving statistics of a run's states.

    Attributes:
        name: The tensor that is read: "states" for the weights, "statistics" for the moving statistics.
    """

    name: str = "states"

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the kept states."""
        return tuple(self.schema.held_between(0, len(self) - 1))

    def __getitem__(self, state: int) -> Float[Tensor, " _"]:
        """Read one state: P weights, or Q moving statistics.

        Raises:
            IndexError: The run has no such state, or does not keep it.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened.
        """
        if not 0 <= state < len(self):
            raise IndexError(f"state must lie in 0..{len(self) - 1}: got {state}.")
        chunk, row = self._chunk(state), state - self._chunk(state).first
        if self.schema.thins and self.name == "states":
            held = self.schema.held_between(chunk.first, chunk.last)
            if state not in held:
                raise IndexError(f"state must be a kept one, a multiple of {self.schema.keep_every}: got {state}.")
            row = held.index(state)
        with opened_chunk(self.path, chunk) as tensors:
            return read_row(tensors, self.name, row)

    def replay_row(self, state: int) -> Mapping[str, Any]:
        """Return the stored replay data of a state and the step before it; empty if there is none.

        Raises:
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened, or does not hold replay data.
        """
        chunk, where = self._chunk(state), chunk_file(self.path, self._chunk(state))[1]
        with opened_chunk(self.path, chunk) as tensors:
            if REPLAY not in tensors.keys():  # noqa: SIM118  # not a mapping
                return {}
            row = unpack(tensors, REPLAY, state - chunk.first, where)
        checksum = {CHECKSUM: int(row[CHECKSUM])} if CHECKSUM in row else {}
        content: dict[str, Any] = decoded_state(row, f"{where} must hold {REPLAY!r}")
        return content | checksum


@dataclass(frozen=True)
class StoredUpdates(_Stored):
    """The update coefficients of a run."""

    def __len__(self) -> int:
        """Return the number of steps, S."""
        return self.chunks[-1].last

    def __getitem__(self, step: int) -> UpdateCoefficients:
        """Read the coefficients of one step.

        Raises:
            IndexError: The run has no such step.
            FileNotFoundError: The file was removed since the run was opened.
            ValueError: The file was damaged since the run was opened.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step must lie in 0..{len(self) - 1}: got {step}.")
        chunk = self._chunk(step + 1)
        row, where = step - chunk.first_step, chunk_file(self.path, chunk)[1]
        with opened_chunk(self.path, chunk) as tensors:
            stored, numbers = set(tensors.keys()), read_row(tensors, "update", row)
            named = zip((f"update.{name}" for name in FIELDS), numbers, strict=True)
            values = [read_row(tensors, name, row) if name in stored else number for name, number in named]
            has_matrices = MATRICES_NAME in stored
            matrices: Mapping[str, Any] = _read_matrices(tensors, self.schema, row, where) if has_matrices else {}
        return UpdateCoefficients(*values, **matrices)

    def places(self, step: int) -> Mapping[str, Int64[Tensor, " L"]]:
        """Read the index, within each parameter, of the weight that a step's scaled coefficients belong to."""
        if not self.schema.thins:
            return {}
        chunk = self._chunk(step + 1)
        with opened_chunk(self.path, chunk) as tensors:
            names = {name: f"update.{name}.at" for name in FIELDS}
            stored = set(tensors.keys())
            places = {n: read_row(tensors, at, step - chunk.first_step) for n, at in names.items() if at in stored}
        return {name: at for name, at in places.items() if bool((at >= 0).any())}


def with_computed_states(trajectory: Trajectory) -> Trajectory:
    """Return a run whose states and coefficients are read from disk, or computed if they are not stored."""
    kept, updates = trajectory.states, trajectory.updates
    if not isinstance(kept, StoredStates) or not isinstance(updates, StoredUpdates) or not kept.schema.thins:
        return trajectory
    return recomputed_run(trajectory, kept, updates)
