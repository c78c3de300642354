"""A check of a whole run: every file is compared with its committed form."""

import os
from dataclasses import dataclass
from typing import Any

from epk_gp.core.show import tracked
from epk_gp.core.step import Step
from epk_gp.storage.chunks import read_steps
from epk_gp.storage.journal import JOURNAL, Chunk, read_journal, resume_name
from epk_gp.storage.schema import DATA, HEADER, chunk_schema, read_data, read_header
from epk_gp.storage.training_state import read_training_state


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run after all its files were checked.

    Attributes:
        header: The run's header.
        chunks: Its committed chunks.
        steps: Its steps.
        finished: Whether the recording was finished.
        files: Number of files that were checked.
    """

    header: dict[str, Any]
    chunks: tuple[Chunk, ...]
    steps: tuple[Step, ...]
    finished: bool
    files: int

    @property
    def num_steps(self) -> int:
        """Number S of steps."""
        return len(self.steps)


def check_run(folder: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and compare it with its committed form.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        ValueError: A file is damaged; the message names it and its states.
    """
    header = read_header(folder)
    read_data(folder, header)
    schema, journal = chunk_schema(header), read_journal(folder)
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
        if read_journal(folder).bytes == journal.bytes:  # a writer that commits another chunk removes it
            raise
    files = len((HEADER, DATA, JOURNAL, resume_name(number), *journal.chunks)) + journal.finished
    return RunSummary(header, journal.chunks, tuple(steps), journal.finished, files)
