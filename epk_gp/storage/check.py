"""Check every file of a run against what was committed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from epk_gp.core.step import Step
from epk_gp.storage.atomic_files import regular_file_size
from epk_gp.storage.chunks import read_steps
from epk_gp.storage.index import Chunk, read_journal, resume_name
from epk_gp.storage.schema import DATA, HEADER, read_data, read_header, read_resume, schema_of


@dataclass(frozen=True)
class RunSummary:
    """What a run holds, after every one of its files was checked.

    Attributes:
        header: What it says of itself.
        chunks: Its committed chunks.
        finished: Whether recording came to its end.
        sizes: The steps' learning rates.
        batch_sizes: Points of each step.
        data_shapes: Shapes of inputs, targets, constants and probe.
        files: Number of files that were checked.
        bytes: Their size.
    """

    header: dict[str, Any]
    chunks: tuple[Chunk, ...]
    finished: bool
    sizes: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    data_shapes: dict[str, tuple[int, ...]]
    files: int
    bytes: int

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.sizes)


def check_run(path: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and check it against what was committed.

    Raises:
        FileNotFoundError: No run there, or a file is missing.
        ValueError: A damaged file; the message names it and the states it held.
    """
    folder = Path(path)
    header = read_header(path)
    layout = schema_of(header)
    data = read_data(path, header)
    journal = read_journal(path)
    steps: list[Step] = []
    for chunk in tqdm(journal.chunks, desc="chunks", disable=not progress):
        steps.extend(read_steps(path, layout, chunk))
    number, chunk = len(journal.chunks) - 1, journal.chunks[-1]
    try:
        read_resume(path, number, chunk)
    except FileNotFoundError:
        if read_journal(path).bytes == journal.bytes:  # nobody committed a newer one
            raise
    names = [HEADER, DATA, "journal.jsonl", resume_name(number), *(chunk.file for chunk in journal.chunks)]
    names += ["finished.json"] if journal.finished else []
    found = [regular_file_size(folder / name, name) for name in names]
    return RunSummary(
        header=header,
        chunks=journal.chunks,
        finished=journal.finished,
        sizes=tuple(step.lr for step in steps),
        batch_sizes=tuple(layout.num_points if step.batch is None else len(step.batch) for step in steps),
        data_shapes={name: tuple(value.shape) for name, value in data.items()},
        files=len(names),
        bytes=sum(size or 0 for size in found),
    )
