"""Export a run to one safetensors file, for other tools."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.core.fingerprint import tensor_bytes
from epk_gp.core.update_rules import FIELDS, broadcast_to_params
from epk_gp.storage.chunk_verification import read_steps
from epk_gp.storage.chunks import STORED_FIELDS, step_tensors
from epk_gp.storage.index import read_journal
from epk_gp.storage.schema import FORMAT, SAFETENSORS_DTYPES, chunk_schema, read_data, read_header
from epk_gp.storage.stored import StoredStates, StoredUpdates


def export_run(path: str | os.PathLike[str], file: str | os.PathLike[str], *, progress: bool = False) -> int:
    """Write a run, after checking it, to one safetensors file; one state is in memory at a time.

    Tensors: `states` (S + 1, P), `update.FIELD` (S, P) for each coefficient of the update rule, `sizes`, `lengths`,
    `batches`, `weighted` and `sample_weights` as in the chunks, and all of `data.safetensors`. The metadata hold the
    run's header as JSON, and its digest.

    Args:
        path: The run's folder.
        file: The new file.
        progress: Show a progress bar.

    Returns:
        The size of the file in bytes.

    Raises:
        FileExistsError: The file already exists.
        FileNotFoundError, ValueError: The run is missing or damaged, as for `check_run`.
        OSError: The file cannot be written; no part of it is left.
    """
    header = read_header(path)
    schema, data, chunks = chunk_schema(header), read_data(path, header), read_journal(path).chunks
    steps = [step for chunk in chunks for step in read_steps(path, schema, chunk)]
    states, updates = StoredStates(Path(path), schema, chunks), StoredUpdates(Path(path), schema, chunks)
    in_memory = {**step_tensors(steps), **{name: value.contiguous() for name, value in data.items()}}
    shapes = {"states": ([len(states), schema.num_weights], schema.dtype)}
    shapes |= {f"update.{name}": ([len(steps), schema.num_weights], torch.float64) for name in STORED_FIELDS}
    shapes |= {name: (list(value.shape), value.dtype) for name, value in in_memory.items()}
    metadata = {"format": FORMAT, "digest": chunks[-1].digest, "header": json.dumps(header)}
    text, size = _safetensors_header(shapes, metadata)

    with _new_file(Path(file)) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for number in tqdm(range(len(states)), desc="states", disable=not progress):
            stream.write(tensor_bytes(states[number]))
        for name in FIELDS:
            for row in _coefficient_rows(updates, name, schema.sizes):
                stream.write(tensor_bytes(row))
        for value in in_memory.values():
            stream.write(tensor_bytes(value))
    return 8 + len(text) + size


@contextmanager
def _new_file(file: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it is synchronised at the end, and removed if an error interrupts the writing."""
    stream = file.open("xb")
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        file.unlink()
        raise


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


def _coefficient_rows(updates: StoredUpdates, name: str, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    reference = torch.zeros(0, dtype=torch.float64)
    for number in range(len(updates)):
        yield broadcast_to_params(getattr(updates[number], name), sizes, reference)
