"""Errors of writing a run, in one sentence: what failed, and what of the run can still be read."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from epk_gp.storage.atomic_files import DAMAGED, regular_file_size
from epk_gp.storage.index import JOURNAL, Chunk, read_journal, resume_name
from epk_gp.storage.schema import DATA, read_header

RESUME = "Free space or give the right to write, then go on with resume=True."
_RESTORE = "Restore the folder and go on with resume=True, or record to another folder."


@contextmanager
def explain_os_errors(path: Path, remains: Callable[[str], str]) -> Iterator[None]:
    """Turn an error of the system into our own: why a run cannot be written, what of it is kept, and what to do.

    Args:
        path: The run's folder.
        remains: Called after an error with its cause; returns what of the run is kept, and what to do.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # raised by this package, with its own sentence
            raise
        cause = str(error.strerror)
        explained = type(error)(f"the run must be written to {path}: {cause}; {remains(cause)}")
        explained.errno = error.errno
        raise explained from error


def describe_remains(path: Path, journal: int, chunks: Sequence[Chunk], cause: str) -> str:
    """Return what of a run's committed steps can be read, and what to do. Sizes are checked, contents are not.

    Args:
        path: The run's folder.
        journal: Descriptor of the journal.
        chunks: The committed chunks.
        cause: What the message says already.
    """
    count = chunks[-1].last if chunks else 0
    damage = find_damage(path, journal, chunks)
    if damage is None:
        return f"its {count} committed steps stay readable. {RESUME}"
    because = "" if damage == cause else f": {damage}"
    return f"its {count} committed steps cannot be read from there any more{because}. {_RESTORE}"


def find_damage(path: Path, journal: int, chunks: Sequence[Chunk]) -> str | None:
    """Return what of an open run is not as it was committed; None if the journal and all sizes are.

    Args:
        path: The run's folder.
        journal: Descriptor of the journal.
        chunks: The committed chunks.
    """
    try:
        require_same_journal(path, journal)
        if regular_file_size(path / DATA, str(path / DATA)) != read_header(path)["data_bytes"]:
            return f"{path / DATA} is missing or has another size"
        if read_journal(path).chunks[: len(chunks)] != tuple(chunks):
            return f"{path / JOURNAL} was changed"
        resume = path / resume_name(len(chunks) - 1)
        if chunks and regular_file_size(resume, str(resume)) != chunks[-1].resume_bytes:
            return f"{resume} is missing or has another size"
    except OSError as error:
        return (error.strerror or str(error)).removesuffix(".")
    except ValueError as error:
        return str(error).removesuffix(DAMAGED).rstrip(" .")
    return None


def require_same_journal(path: Path, journal: int) -> None:
    """Raise if the journal that lies in a folder is not the one that the writer has open.

    Whatever was written into a folder that was put in the place of the run's would be lost, or damage another run.

    Args:
        path: The run's folder.
        journal: Descriptor of the journal.

    Raises:
        OSError: The folder or the journal was deleted, renamed or replaced.
    """
    try:
        status = (path / JOURNAL).lstat()
    except FileNotFoundError as error:
        lost = f"{path / JOURNAL} was deleted or renamed" if path.is_dir() else f"{path} was deleted or renamed"
        raise FileNotFoundError(errno.ENOENT, f"{lost} while it was recorded", str(path)) from error
    except NotADirectoryError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file now", str(path)) from error
    if not os.path.samestat(status, os.fstat(journal)):
        raise FileNotFoundError(errno.ENOENT, f"{path / JOURNAL} was replaced while it was recorded", str(path))
