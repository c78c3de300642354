"""Chunks of a run: the tensors that hold consecutive weight states and the steps that led to them."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.update_law import CompactUpdate, compact_update
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.codec import pack_rows, unpack_row
from epk_gp.storage.index import Chunk, opened_chunk
from epk_gp.storage.matrices import matrix_tensors, read_matrices
from epk_gp.storage.pass_tables import CONTENT
from epk_gp.storage.pass_verification import validate_tables
from epk_gp.storage.passes import pack_passes
from epk_gp.storage.schema import ChunkSchema, is_groups

# The names on disk of the coefficients in `update_rules.FIELDS`: those of format version 2.
GROUPS = "groups"
STORED_FIELDS = ("direct", "momentum", "keep", "take", "gradient", "decay", "shrink")


def step_tensors(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the tensors that hold learning rates and batches of consecutive steps, without passes, by name on disk."""
    batches = [step.batch.cpu() for step in steps if step.batch is not None]
    weights = [step.sample_weights.cpu() for step in steps if step.sample_weights is not None]
    return {
        "sizes": torch.tensor([step.lr for step in steps], dtype=torch.float64),
        "lengths": torch.tensor([-1 if step.batch is None else len(step.batch) for step in steps], dtype=torch.int64),
        "weighted": torch.tensor([step.sample_weights is not None for step in steps], dtype=torch.bool),
        "batches": torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64),
        "sample_weights": torch.cat(weights).double() if weights else torch.zeros(0, dtype=torch.float64),
        **_groups_tensor(steps),
    }


def _groups_tensor(steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the parameter groups of the steps from which on they are others, as JSON, if there are any."""
    changed = [(k, step.groups) for k, step in enumerate(steps) if step.groups is not None]
    names = list(dict.fromkeys(group.names for _, groups in changed for group in groups))
    changes = [[k, [{**g.to_json(), "names": names.index(g.names)} for g in groups]] for k, groups in changed]
    text = json.dumps({"names": names, "changes": changes})
    return {GROUPS: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)} if changed else {}


def read_groups(content: UInt8[Tensor, " bytes"], count: int, where: str) -> dict[int, tuple[OptimizerGroup, ...]]:
    """Return the parameter groups that a chunk of so many steps holds, by the step in the chunk.

    Raises:
        ValueError: The tensor is not what `step_tensors` makes.
    """
    try:
        held = json.loads(bytes(tensor_bytes(content)))
        found = {k: [{**g, "names": held["names"][g["names"]]} for g in groups] for k, groups in held["changes"]}
        if all(type(k) is int and 0 <= k < count and is_groups(groups) for k, groups in found.items()):
            return {k: tuple(map(OptimizerGroup.from_json, groups)) for k, groups in found.items()}
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise ValueError(f"{where} must hold {GROUPS!r} that describe the optimizers' parameter groups: it does not.")


def chunk_tensors(
    states: Sequence[Tensor],
    steps: Sequence[Step],
    updates: Sequence[UpdateCoefficients | CompactUpdate],
    schema: ChunkSchema,
    statistics: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    """Return the tensors of a chunk by their names on disk.

    Args:
        states: Consecutive weight states; of a run that keeps every k-th state those of them that it keeps.
        steps: The steps that led to them; none leads to state 0.
        updates: Coefficients of these steps, which a run that keeps every k-th state holds compactly.
        schema: The schema of the run's chunks.
        statistics: The moving statistics of all consecutive states, for a network that has any.

    Raises:
        TypeError: A tensor of a pass has a dtype that cannot be stored.
        ValueError: Statistics or passes are not those of this run, or the run is of version 2, which holds none.
    """
    count = (len(steps) or 1) if schema.thins else len(states)
    if [value.shape for value in statistics] != [(schema.num_statistics,)] * count * bool(schema.num_statistics):
        raise ValueError(
            f"a run of {schema.num_statistics} moving statistics must have them with each of {count} states: got "
            f"{len(statistics)}."
        )
    stored = schema.stored_dtype if steps else schema.dtype
    held = [state.cpu().to(stored) for state in states]
    rows = {"states": torch.stack(held) if held else torch.empty(0, schema.num_weights, dtype=stored)}
    if statistics:
        rows["statistics"] = torch.stack([value.cpu() for value in statistics])
    tensors = step_tensors(steps) | _pass_tensors(steps, schema)
    compact = [_compact(update, schema) for update in updates]
    held_updates, columns = [own.update for own in compact], []
    for name, stored_name in zip(FIELDS, STORED_FIELDS, strict=True) if held_updates else ():
        values = [getattr(update, name).cpu() for update in held_updates]
        diagonals = [value for value in values if len(value) != len(schema.sizes)]
        if diagonals:
            rows[f"update.{stored_name}"] = torch.stack(
                [broadcast_to_params(value, schema.sizes, diagonals[0]) for value in values]
            )
            values = [torch.zeros(len(schema.sizes), dtype=torch.float64) for _ in held_updates]
        columns.append(torch.stack(values).double())
        if any(name in own.places for own in compact):
            shared = torch.full((len(schema.sizes),), -1)
            tensors[f"update.{stored_name}.at"] = torch.stack([own.places.get(name, shared) for own in compact])
    tensors |= _matrix_tensors(held_updates, schema)
    if columns:
        tensors["update"] = torch.stack(columns, dim=1)
    for name, value in rows.items():
        if schema.compression == "none":
            tensors[name] = value
        else:
            tensors[f"{name}.packed"], tensors[f"{name}.lengths"] = pack_rows(value)
    return tensors


def _compact(update: UpdateCoefficients | CompactUpdate, schema: ChunkSchema) -> CompactUpdate:
    if isinstance(update, CompactUpdate):
        return update
    return compact_update(update, schema.scaled, schema.sizes) if schema.thins else CompactUpdate(update)


def _matrix_tensors(updates: Sequence[UpdateCoefficients], schema: ChunkSchema) -> dict[str, Tensor]:
    tensors = matrix_tensors(updates)
    if tensors and schema.version < 3:
        raise ValueError(
            "a run of format version 2 must have steps without matrix preconditioners: this one has them. Record to "
            "another folder."
        )
    return tensors


def _pass_tensors(steps: Sequence[Step], schema: ChunkSchema) -> dict[str, Tensor]:
    if not any(step.passes for step in steps):
        return {}
    if schema.version < 3:
        raise ValueError(
            "a run of format version 2 must have steps that the network in evaluation mode repeats: this one needs a "
            "forward pass that version 2 cannot hold (dropout, augmented rows). Record to another folder."
        )
    tables, content = pack_passes(steps)
    validate_tables(tables, len(content), steps, schema, "a chunk")
    return {**tables.tensors(), CONTENT: content}


class RowReader:
    """Reader of packed rows, which any number of threads may use at once.

    A packed row is a difference from the row before it in its chunk. The reader keeps the row that it returned last, so
    the row that follows it costs one unpacking; any other row costs all rows of its chunk before it. Each thread has a
    last row of its own: with a shared one, two threads that both read in order would unpack half a chunk for each row.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[type["RowReader"], tuple[()]]:
        """Return what a pickle or a copy holds: a new reader."""
        return RowReader, ()

    def read(self, tensors: Any, name: str, row: int, *, file: str, num_weights: int) -> Float[Tensor, " P"]:
        """Read one row.

        Args:
            tensors: The open chunk.
            name: Name of the tensor without `.packed`; a reader serves one name.
            row: Number of the row in the chunk.
            file: Name of the chunk's file.
            num_weights: P, or Q for moving statistics.

        Raises:
            IndexError: The chunk has no such row.
            ValueError: The bytes are not those of packed rows.
        """
        lengths = tensors.get_tensor(f"{name}.lengths").tolist()
        last: tuple[str, int, Tensor] | None = getattr(self._of_thread, "last", None)
        start, value = (last[1], last[2]) if last is not None and last[0] == file and last[1] <= row else (-1, None)
        offset = sum(lengths[: start + 1])
        packed = tensors.get_slice(f"{name}.packed")
        for number in range(start + 1, row + 1):
            part = packed[offset : offset + lengths[number]]
            value = unpack_row(part, value, num_weights)
            offset += lengths[number]
        if value is None:
            raise IndexError(f"row must be one of the chunk's: got {row}.")
        self._of_thread.last = (file, row, value)
        return value.clone()


def read_state(
    path: str | os.PathLike[str],
    schema: ChunkSchema,
    chunk: Chunk,
    state: int,
    reader: RowReader | None = None,
    *,
    name: str = "states",
) -> Float[Tensor, " _"]:
    """Read the weights of one state, or its moving statistics: mapped from the file, or unpacked.

    Args:
        path: Folder of the run.
        schema: What its chunks hold.
        chunk: The chunk of the state.
        state: Number of the state.
        reader: Keeps what was unpacked last.
        name: "states" for the weights, "statistics" for the moving statistics.

    Raises:
        FileNotFoundError: The file was removed since the run was opened.
        ValueError: The file was damaged since the run was opened.
    """
    with opened_chunk(path, chunk) as tensors:
        row = state - chunk.first
        if schema.thins and name == "states":
            row = len(schema.kept_between(chunk.first, state)) - 1
        return _read_row(tensors, name, row, chunk, schema, reader)


def read_update(
    path: str | os.PathLike[str],
    schema: ChunkSchema,
    chunk: Chunk,
    step: int,
    readers: Mapping[str, RowReader] | None = None,
) -> UpdateCoefficients:
    """Read the coefficients of one step: mapped from the file, or unpacked.

    Raises:
        FileNotFoundError: The file was removed since the run was opened.
        ValueError: The file was damaged since the run was opened.
    """
    row = step - max(chunk.first - 1, 0)
    values = {}
    with opened_chunk(path, chunk) as tensors:
        stored = {name.removesuffix(".packed") for name in tensors.keys()}  # noqa: SIM118  # not a mapping
        numbers = tensors.get_slice("update")[row].clone()
        for number, (name, stored_name) in enumerate(zip(FIELDS, STORED_FIELDS, strict=True)):
            diagonal = f"update.{stored_name}"
            reader = None if readers is None else readers[name]
            values[name] = (
                _read_row(tensors, diagonal, row, chunk, schema, reader) if diagonal in stored else numbers[number]
            )
        matrices: Mapping[str, Any] = read_matrices(tensors, row)
    return UpdateCoefficients(*(values[name] for name in FIELDS), **matrices)


def read_places(path: str | os.PathLike[str], chunk: Chunk, step: int) -> dict[str, Int64[Tensor, " L"]]:
    """Read of which weight of each parameter a chunk holds the coefficients that a preconditioner scales.

    Raises:
        FileNotFoundError: The file was removed since the run was opened.
        ValueError: The file was damaged since the run was opened.
    """
    row = step - max(chunk.first - 1, 0)
    with opened_chunk(path, chunk) as tensors:
        stored = set(tensors.keys())
        names = [(name, f"update.{own}.at") for name, own in zip(FIELDS, STORED_FIELDS, strict=True)]
        places = {name: tensors.get_slice(own)[row] for name, own in names if own in stored}
        return {name: at for name, at in places.items() if bool((at >= 0).any())}


def _read_row(
    tensors: Any, name: str, row: int, chunk: Chunk, schema: ChunkSchema, reader: RowReader | None
) -> Float[Tensor, " P"]:
    if schema.compression == "none":
        # a copy: a row that stays mapped would change with a file that is written again in place
        value: Tensor = tensors.get_slice(name)[row].clone()
        return value
    return (reader or RowReader()).read(tensors, name, row, file=chunk.file, num_weights=schema.row_length(name))
