"""A run as one safetensors file, for other tools."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.core.step import Step
from epk_gp.core.update_rules import FIELDS, broadcast_to_params
from epk_gp.storage import schema as store
from epk_gp.storage.chunks import STORED_FIELDS, ChunkSchema, read_steps
from epk_gp.storage.index import read_journal
from epk_gp.storage.stored import StoredStates, StoredUpdates

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export_run(path: str | os.PathLike[str], file: str | os.PathLike[str], *, progress: bool = False) -> int:
    """Write a run, after checking it, to one safetensors file; one state is in memory at a time.

    Tensors: `states` (S + 1, P), `update.FIELD` (S, P) for each coefficient of the update rule, `sizes`, `lengths`,
    `batches`, `weighted` and `sample_weights` as in the chunks, and all of `data.safetensors`. The metadata hold the
    run's header as JSON, and its digest.

    Args:
        path: The run's folder.
        file: New file.
        progress: Show a progress bar.

    Returns:
        Its size in bytes.

    Raises:
        FileExistsError: The file is already there.
        FileNotFoundError, ValueError: As `check_run`.
        OSError: It cannot be written; nothing is left.
    """
    target = Path(file)
    header = store.read_header(path)
    layout, data, chunks = store.schema_of(header), store.read_data(path, header), read_journal(path).chunks
    steps = [step for chunk in chunks for step in read_steps(path, layout, chunk)]
    states = StoredStates(Path(path), layout, chunks)
    updates = StoredUpdates(Path(path), layout, chunks)
    small = {**_step_tensors(steps), **{name: value.contiguous() for name, value in data.items()}}
    large = {
        "states": (len(states), layout.dtype),
        **{f"update.{name}": (len(steps), torch.float64) for name in STORED_FIELDS},
    }
    entries: dict[str, object] = {
        "__metadata__": {"format": store.FORMAT, "digest": chunks[-1].digest, "header": json.dumps(header)}
    }
    offset = 0
    shapes = {name: ([count, layout.num_weights], dtype) for name, (count, dtype) in large.items()}
    shapes |= {name: (list(value.shape), value.dtype) for name, value in small.items()}
    for name, (shape, dtype) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    with target.open("xb") as stream:
        try:
            stream.write(len(text).to_bytes(8, "little") + text)
            for number in tqdm(range(len(states)), desc="states", disable=not progress):
                stream.write(_bytes(states[number]))
            for name in FIELDS:
                for row in _rows(updates, name, layout):
                    stream.write(_bytes(row))
            for value in small.values():
                stream.write(_bytes(value))
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            target.unlink()
            raise
    return 8 + len(text) + offset


def _rows(updates: StoredUpdates, name: str, layout: ChunkSchema) -> Iterator[Tensor]:
    like = torch.zeros(0, dtype=torch.float64)
    for number in range(len(updates)):
        yield broadcast_to_params(getattr(updates[number], name), layout.sizes, like)


def _step_tensors(steps: list[Step]) -> dict[str, Tensor]:
    batches = [step.batch for step in steps if step.batch is not None]
    weights = [step.sample_weights for step in steps if step.sample_weights is not None]
    return {
        "sizes": torch.tensor([step.lr for step in steps], dtype=torch.float64),
        "lengths": torch.tensor([-1 if step.batch is None else len(step.batch) for step in steps], dtype=torch.int64),
        "weighted": torch.tensor([step.sample_weights is not None for step in steps], dtype=torch.bool),
        "batches": torch.cat(batches) if batches else torch.zeros(0, dtype=torch.int64),
        "sample_weights": torch.cat(weights) if weights else torch.zeros(0, dtype=torch.float64),
    }


def _bytes(value: Tensor) -> memoryview:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data
