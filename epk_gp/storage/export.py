"""Export a run to one safetensors file, for other tools."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from epk_gp.core.show import tracked
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.chunk_verification import read_steps
from epk_gp.storage.chunks import STORED_FIELDS, step_tensors
from epk_gp.storage.index import Chunk, read_journal
from epk_gp.storage.matrices import matrices_of, matrix_name, steps_with_matrices
from epk_gp.storage.pass_tables import CONTENT, PassTables, join_tables, no_passes
from epk_gp.storage.passes import PackedPasses, content_blocks
from epk_gp.storage.schema import FORMAT, SAFETENSORS_DTYPES, ChunkSchema, chunk_schema, read_data, read_header
from epk_gp.storage.stored import StoredStates, StoredUpdates


def export_run(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, progress: bool = False) -> int:
    """Write a run, after checking it, to one safetensors file; one state is in memory at a time.

    Tensors, as in the chunks: `states` (S + 1, P); `update` (S, 7, L), the numbers of the update rule of each of the L
    parameters; `update.FIELD` (S, P) for a field that is one number per weight in any step, where `update` holds 0;
    `update.left.K` and `update.right.K` with `.steps`, the matrices of parameter K, of a run with matrix
    preconditioners; `statistics` (S + 1, Q) of a network with moving statistics; `passes.*` of a run with forward
    passes; `sizes`, `lengths`, `batches`, `weighted` and `sample_weights`; `groups` where parameter groups change; and
    all of `data.safetensors`. The metadata hold the run's header as JSON, the names of the 7 fields in their order as
    JSON (`update_fields`), and the run's digest.

    Args:
        folder: The run's folder.
        file: The new file.
        progress: Show a progress bar.

    Returns:
        The size of the file in bytes.

    Raises:
        FileExistsError: The file already exists.
        FileNotFoundError, ValueError: The run is missing or damaged, as for `check_run`; or it does not hold every
            state.
        OSError: The file cannot be written; no part of it is left.
    """
    header = read_header(folder)
    schema, data, chunks = chunk_schema(header), read_data(folder, header), read_journal(folder).chunks
    if schema.thins:
        raise ValueError(
            f"a run must hold every state to be exported to one file: {folder} keeps every {schema.keep_every}-th in "
            f"{schema.stored_dtype}. Read it with epk_gp.load_trajectory, which computes the others."
        )
    steps = [step for chunk in chunks for step in read_steps(folder, schema, chunk)]
    states, updates = StoredStates(Path(folder), schema, chunks), StoredUpdates(Path(folder), schema, chunks)
    S, P, L = len(steps), schema.num_weights, len(schema.sizes)
    per_weight = _fields_per_weight([updates[max(chunk.first - 1, 0)] for chunk in chunks if chunk.last], schema)
    # by name, for safetensors lists a file's tensors in another order each time: equal runs give equal files
    in_memory = {**step_tensors(steps), **{name: data[name].contiguous() for name in sorted(data)}}
    contents = [content for chunk in chunks if (content := _passes_of(steps, chunk)) is not None]
    if contents:
        in_memory |= _tables(steps, chunks).tensors()
    shapes = {"states": ([S + 1, P], schema.dtype), "update": ([S, len(FIELDS), L], torch.float64)}
    shapes |= {f"update.{STORED_FIELDS[FIELDS.index(name)]}": ([S, P], dtype) for name, dtype in per_weight.items()}
    matrices = steps_with_matrices(folder, chunks)
    for key, rows in matrices.items():
        Q = matrices_of(updates[rows[0]])[key]
        shapes[matrix_name(*key)] = ([len(rows), *Q.shape], Q.dtype)
        in_memory[f"{matrix_name(*key)}.steps"] = torch.tensor(rows)
    statistics = StoredStates(Path(folder), schema, chunks, "statistics") if schema.num_statistics else None
    if statistics is not None:
        shapes["statistics"] = ([S + 1, schema.num_statistics], statistics[0].dtype)
    shapes |= {name: (list(value.shape), value.dtype) for name, value in in_memory.items()}
    if contents:
        shapes[CONTENT] = ([sum(int(passes.tables.lengths.sum()) for passes in contents)], torch.uint8)
    metadata = {
        "format": FORMAT,
        "digest": chunks[-1].digest,
        "header": json.dumps(header),
        "update_fields": json.dumps(STORED_FIELDS),
    }
    text, size = _safetensors_header(shapes, metadata)

    with _new_file(Path(file)) as write:
        write(len(text).to_bytes(8, "little") + text)
        for number in tracked(range(S + 1), "export", unit="state", shown=progress):
            write(tensor_bytes(states[number]))
        for number in range(S):
            write(tensor_bytes(_numbers_per_parameter(updates[number], schema)))
        for name, dtype in per_weight.items():
            for number in range(S):
                write(tensor_bytes(_row_per_weight(getattr(updates[number], name), schema, dtype)))
        for key, rows in matrices.items():
            for number in rows:
                write(tensor_bytes(matrices_of(updates[number])[key].to(shapes[matrix_name(*key)][1])))
        if statistics is not None:
            for number in range(S + 1):
                write(tensor_bytes(statistics[number].to(shapes["statistics"][1])))
        for value in in_memory.values():
            write(tensor_bytes(value))
        for passes in contents:
            for part in content_blocks(passes):
                write(part)
    return 8 + len(text) + size


def _fields_per_weight(updates: list[UpdateCoefficients], schema: ChunkSchema) -> dict[str, torch.dtype]:
    """Return the fields that are one number per weight in any chunk, with a dtype that holds every row exactly.

    Args:
        updates: Coefficients of one step of each chunk: within a chunk a field has one shape and dtype.
        schema: The schema of the chunks.
    """
    kinds = {name: {(len(value), value.dtype) for u in updates for value in [getattr(u, name)]} for name in FIELDS}
    return {
        name: next(iter(kind))[1] if len(kind) == 1 else torch.float64
        for name, kind in kinds.items()
        if any(length != len(schema.sizes) for length, _ in kind)
    }


def _passes_of(steps: Sequence[Step], chunk: Chunk) -> PackedPasses | None:
    """Return the passes of any step of a chunk, whose tables are those of the whole chunk; None if it has none."""
    own = steps[max(chunk.first - 1, 0) : chunk.last]
    return next((step.passes for step in own if isinstance(step.passes, PackedPasses)), None)


def _tables(steps: Sequence[Step], chunks: Sequence[Chunk]) -> PassTables:
    """Return the tables of the passes of all steps."""
    found = [(_passes_of(steps, chunk), chunk.last - max(chunk.first - 1, 0)) for chunk in chunks]
    return join_tables([no_passes(count) if passes is None else passes.tables for passes, count in found])


def _numbers_per_parameter(update: UpdateCoefficients, schema: ChunkSchema) -> Tensor:
    """Return a step's numbers per parameter, (7, L) float64, with 0 for a field that is one number per weight."""
    L = len(schema.sizes)
    return torch.stack([value.double() if len(value) == L else torch.zeros(L).double() for value in update])


def _row_per_weight(value: Tensor, schema: ChunkSchema, dtype: torch.dtype) -> Tensor:
    return broadcast_to_params(value, schema.sizes, torch.zeros(0, dtype=dtype))


@contextmanager
def _new_file(file: Path) -> Iterator[Callable[[bytes | memoryview], object]]:
    """Open a new file for writing; it is synchronised at the end, and removed if an error interrupts the writing."""
    try:
        stream: BinaryIO = file.open("xb")
    except FileExistsError as error:
        raise FileExistsError(f"file must be a new file: {file} exists. Choose another name.") from error
    except OSError as error:
        raise _explained(file, error) from error
    try:
        with stream:
            yield stream.write
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException as error:
        with suppress(OSError):
            file.unlink()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise _explained(file, error) from error
        raise


def _explained(file: Path, error: OSError) -> OSError:
    explained = type(error)(
        f"the run must be exported to {file}: {error.strerror}; no part of it is left. Free space or give the right to "
        "write, or choose another file."
    )
    explained.errno = error.errno
    return explained


def _safetensors_header(
    shapes: dict[str, tuple[list[int], torch.dtype]], metadata: dict[str, str]
) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and the size of its tensors in bytes."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8), offset  # tensors start at a multiple of 8 bytes
