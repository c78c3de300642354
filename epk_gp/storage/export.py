"""Export a run to one safetensors file, for other tools."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from epk_gp.core.show import tracked
from epk_gp.core.step import tensor_bytes
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.chunks import matrices_of, matrix_name, step_tensors, steps_with_matrices
from epk_gp.storage.files import SAFETENSORS_DTYPES, atomic_write
from epk_gp.storage.journal import read_journal
from epk_gp.storage.passes import pass_tensors
from epk_gp.storage.schema import FORMAT, chunk_schema, read_data, read_header
from epk_gp.storage.states import StoredStates, StoredUpdates
from epk_gp.storage.verify import read_steps
from epk_gp.storage.writer import explain_os_errors


def export_run(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, progress: bool = False) -> int:
    """Write a run, after checking it, to one safetensors file; one state at a time and all passes are in memory.

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
            f"a run must hold every state to be exported to one file: {folder} keeps every "
            f"{schema.keep_every}-th. Read it with epk_gp.load_trajectory, which computes the others."
        )
    file = Path(file)
    if file.exists():
        raise FileExistsError(f"file must be a new file: {file} exists. Choose another name.")
    steps = [step for chunk in chunks for step in read_steps(folder, schema, chunk)]
    states, updates = StoredStates(Path(folder), schema, chunks), StoredUpdates(Path(folder), schema, chunks)
    S, P, L = len(steps), schema.num_weights, len(schema.sizes)
    shown_states = tracked((states[s] for s in range(S + 1)), "export", total=S + 1, unit="state", shown=progress)
    tensors: dict[str, tuple[list[int], torch.dtype, Iterable[Tensor]]] = {
        "states": ([S + 1, P], schema.dtype, shown_states),
        "update": ([S, len(FIELDS), L], torch.float64, (_numbers_per_parameter(updates[s], L) for s in range(S))),
    }
    first_of_chunk = [updates[max(chunk.first - 1, 0)] for chunk in chunks if chunk.last]
    for name, dtype in _fields_per_weight(first_of_chunk, L).items():
        rows = _rows_per_weight(updates, name, schema.sizes, torch.zeros(0, dtype=dtype))
        tensors[f"update.{name}"] = ([S, P], dtype, rows)
    in_memory = step_tensors(steps) | pass_tensors(steps)
    for key, numbers in steps_with_matrices(folder, chunks).items():
        Q = matrices_of(updates[numbers[0]])[key]
        tensors[matrix_name(*key)] = ([len(numbers), *Q.shape], Q.dtype, _matrices(updates, key, numbers))
        in_memory[f"{matrix_name(*key)}.steps"] = torch.tensor(numbers)
    if schema.num_statistics:
        statistics = StoredStates(Path(folder), schema, chunks, "statistics")
        tensors["statistics"] = (
            [S + 1, schema.num_statistics],
            statistics[0].dtype,
            (statistics[s] for s in range(S + 1)),
        )
    # by name, for safetensors lists a file's tensors in another order each time: equal runs give equal files
    for name, value in (in_memory | {name: data[name] for name in sorted(data)}).items():
        tensors[name] = (list(value.shape), value.dtype, [value])
    metadata = {
        "format": FORMAT,
        "digest": chunks[-1].digest,
        "header": json.dumps(header),
        "update_fields": json.dumps(FIELDS),
    }
    text, size = _safetensors_header(tensors, metadata)
    contents = (tensor_bytes(row.to(dtype)) for _, dtype, rows in tensors.values() for row in rows)
    remains = "no part of it is left. Free space or give the right to write, or choose another file."
    with explain_os_errors(file, lambda _: remains):
        atomic_write(file, itertools.chain([text], contents))
    return len(text) + size


def _fields_per_weight(updates: Sequence[UpdateCoefficients], num_parameters: int) -> dict[str, torch.dtype]:
    """Return the fields that are one number per weight in any chunk, with a dtype that holds every row exactly.

    Args:
        updates: Coefficients of one step of each chunk: within a chunk a field has one shape and dtype.
        num_parameters: L.
    """
    kinds = {name: {(len(value), value.dtype) for u in updates for value in [getattr(u, name)]} for name in FIELDS}
    return {
        name: next(iter(kind))[1] if len(kind) == 1 else torch.float64
        for name, kind in kinds.items()
        if any(length != num_parameters for length, _ in kind)
    }


def _numbers_per_parameter(update: UpdateCoefficients, L: int) -> Tensor:
    """Return a step's numbers per parameter, (7, L) float64, with 0 for a field that is one number per weight."""
    return torch.stack([value.double() if len(value) == L else torch.zeros(L).double() for value in update])


def _rows_per_weight(updates: StoredUpdates, name: str, sizes: Sequence[int], like: Tensor) -> Iterator[Tensor]:
    for s in range(len(updates)):
        yield broadcast_to_params(getattr(updates[s], name), sizes, like)


def _matrices(updates: StoredUpdates, key: tuple[str, int], numbers: Sequence[int]) -> Iterator[Tensor]:
    for number in numbers:
        yield matrices_of(updates[number])[key]


def _safetensors_header(
    tensors: Mapping[str, tuple[list[int], torch.dtype, object]], metadata: dict[str, str]
) -> tuple[bytes, int]:
    """Return the beginning of a safetensors file, and the size of its tensors in bytes."""
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (shape, dtype, _) in tensors.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, offset
