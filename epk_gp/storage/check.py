"""Check every file of a run against what was committed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epk_gp.core.show import tracked
from epk_gp.core.step import Step
from epk_gp.storage.atomic_files import regular_file_size
from epk_gp.storage.chunk_verification import read_steps
from epk_gp.storage.index import FINISHED, JOURNAL, Chunk, read_journal, resume_name
from epk_gp.storage.passes import packed_bytes
from epk_gp.storage.schema import DATA, HEADER, chunk_schema, read_data, read_header
from epk_gp.storage.training_state import read_training_state


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
        pass_bytes: Bytes that they take, packed.
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
    steps: list[Step] = []
    for chunk in tracked(journal.chunks, "checking", unit="chunk", shown=progress):
        own = read_steps(folder, schema, chunk)
        for step in own:
            for _ in step.passes:  # each is unpacked, checked and left
                pass
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
        pass_bytes=sum(packed_bytes(step) for step in steps),
        data_shapes={name: tuple(value.shape) for name, value in data.items()},
        files=len(names),
        bytes=sum(size or 0 for size in sizes),
    )
