"""A whole run: every file checked against what was committed, or all of it written to one safetensors file."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.core.show import tracked
from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import FIELDS
from epk_gp.storage.chunks import MATRICES_NAME, read_steps, step_tensors
from epk_gp.storage.files import DTYPES, Rows, atomic_write, tensor_file
from epk_gp.storage.journal import JOURNAL, Chunk, opened_chunk, read_journal, resume_name
from epk_gp.storage.passes import COUNTS
from epk_gp.storage.rows import from_bytes
from epk_gp.storage.schema import DATA, FORMAT, HEADER, INPUTS, ChunkSchema, chunk_schema, read_data, read_header
from epk_gp.storage.training_state import read_training_state
from epk_gp.storage.writer import explain_os_errors

# Tensors with an entry for each step, also of chunks that do not hold them.
_OF_EACH_STEP = {f"{MATRICES_NAME}.at", COUNTS, *(f"update.{field}" for field in FIELDS)}


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run whose files were all checked.

    Attributes:
        header: The run's header.
        data: Inputs, targets, frozen state and fingerprint outputs.
        chunks: Its committed chunks.
        steps: Its steps.
        finished: Whether the recording came to its end.
        files: Number of files that were checked.
    """

    header: dict[str, Any]
    data: dict[str, Tensor]
    chunks: tuple[Chunk, ...]
    steps: tuple[Step, ...]
    finished: bool
    files: int

    @property
    def num_steps(self) -> int:
        """Number S of steps."""
        return len(self.steps)

    @property
    def num_passes(self) -> int:
        """Number of recorded forward passes of all steps."""
        return sum(len(step.passes) for step in self.steps)


def check_run(folder: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and check it against what was committed.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        ValueError: A file is damaged; the message names it and the states it held.
    """
    header = read_header(folder)
    schema, data, journal = chunk_schema(header), read_data(folder, header), read_journal(folder)
    steps = list[Step]()
    for chunk in tracked(journal.chunks, "checking", unit="chunk", shown=progress):
        own = read_steps(folder, schema, chunk)
        for step in own:
            list(step.passes)  # each is read and checked
        steps.extend(own)
    number, chunk = len(journal.chunks) - 1, journal.chunks[-1]
    try:
        read_training_state(folder, number, chunk)
    except FileNotFoundError:
        if read_journal(folder).bytes == journal.bytes:  # a writer that committed another chunk would have removed it
            raise
    files = len((HEADER, DATA, JOURNAL, resume_name(number), *journal.chunks)) + journal.finished
    return RunSummary(header, data, journal.chunks, tuple(steps), journal.finished, files)


def export_run(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, progress: bool = False) -> int:
    """Write a run, after checking it, to one safetensors file; one chunk at a time is in memory.

    Tensors, as in the chunks: `states` (S + 1, P); `update` (S, 7, L), the numbers of the update rule of each of the L
    parameters; `update.FIELD` (S, P) for a field that is one number per weight in any chunk, where `update` holds 0;
    `matrices` of a run with matrix preconditioners; `statistics` (S + 1, Q) of a network with moving statistics;
    `passes` and `passes.*` of a run with forward passes; `sizes`, `lengths`, `batches`, `weighted` and
    `sample_weights`; `groups` where parameter groups change; and all of `data.safetensors`. The metadata hold the run's
    header as JSON, the names of the 7 fields in their order as JSON (`update_fields`), and the run's digest.

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
        raise ValueError(f"a run must hold every state to be exported: {folder} keeps every {schema.keep_every}-th.")
    file = Path(file)
    if file.exists():
        raise FileExistsError(f"file must be a new file: {file} exists. Choose another name.")
    steps = [step for chunk in chunks for step in read_steps(folder, schema, chunk)]
    tensors: dict[str, Tensor | Rows] = {**data, **step_tensors(steps)}
    layouts = []
    for chunk in chunks:
        with opened_chunk(folder, chunk) as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
            layouts.append({name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()})
    shown = tracked(chunks, "export", unit="chunk", shown=progress)
    for name in sorted(set().union(*layouts) - tensors.keys()):
        own = [layout[name] for layout in layouts if name in layout]
        dtype, count = max(dtype for _, dtype in own), sum(shape[0] for shape, _ in own)
        if name.removeprefix("update.") in FIELDS and count < len(steps):
            dtype = "F64"  # as the numbers per parameter of the other steps
        count = len(steps) if name in _OF_EACH_STEP else count
        kind = data["inputs"].dtype if name == INPUTS else DTYPES[dtype]
        rows = _rows(folder, schema, shown if name == "states" else chunks, name, kind)
        tensors[name] = Rows((count, *own[0][0][1:]), kind, rows)
    metadata = {
        "format": str(FORMAT["format"]),
        "digest": chunks[-1].digest,
        "header": json.dumps(header),
        "update_fields": json.dumps(FIELDS),
    }
    advice = "no part of it is left. Free space or give the right to write, or choose another file."
    with explain_os_errors(file, advice):
        atomic_write(file, tensor_file(tensors, metadata))
    return file.stat().st_size


def _rows(
    folder: str | os.PathLike[str], schema: ChunkSchema, chunks: Iterable[Chunk], name: str, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield a tensor of all chunks; where rows of a packed one start counts from the first chunk."""
    end, repeats, field = 0, torch.tensor(schema.sizes), name.removeprefix("update.")
    for chunk in chunks:
        with opened_chunk(folder, chunk) as tensors:
            if name in tensors.keys():  # noqa: SIM118  # not a mapping
                value = tensors.get_tensor(name)
                value = from_bytes(value, dtype) if name == INPUTS else value.to(dtype)
                if name.endswith(".at"):
                    value = value + torch.tensor([end, 0])
                    end += tensors.get_slice(name.removesuffix(".at")).get_shape()[0]
                yield value
            elif field in FIELDS and chunk.last:  # one number per parameter in `update`
                numbers = tensors.get_tensor("update")[:, FIELDS.index(field)]
                yield numbers.to(dtype).repeat_interleave(repeats, dim=1)
            elif name in _OF_EACH_STEP and chunk.last:  # no step has any
                yield torch.zeros(chunk.last - chunk.first_step, *((2,) if name.endswith(".at") else ()), dtype=dtype)
