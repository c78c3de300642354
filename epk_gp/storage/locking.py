"""One writer at a time: the lock that a writer holds on a run's folder.

The lock is the operating system's (`filelock` calls it), so it is released when the process ends, however it ends.

* On Linux and macOS it is a `flock` lock on the journal itself. Such a lock is advisory: readers do not notice it.
* On Windows a locked file cannot be read, so the lock is on a file of its own, `writer.lock`, which is removed at the
  end.
* On a file system without `flock` (some network drives, some Python builds) the existence of a file `writer.pid` is the
  lock. It holds the writer's process number and host. A warning says so, because a process that is killed leaves the
  file: a later writer on the same host removes it once that process has ended, but a writer on another host cannot
  know, and the file must then be removed by hand.
"""

import errno
import sys
import warnings
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout, lock_descriptor

LOCK, MARKER = "writer.lock", "writer.pid"
_JOURNAL_CAN_BE_LOCKED = sys.platform != "win32"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Seconds. A virus scanner may hold a lock file open for a moment on Windows, and removing the marker of a process that
# was killed takes a second attempt; one attempt is made every 0.05 s.
_TIMEOUT = 0.5


def lock_writer(folder: Path, journal: int) -> BaseFileLock | None:
    """Lock a run's folder against other writers, without waiting for them.

    Args:
        folder: The folder.
        journal: Descriptor of the journal, open for writing.

    Returns:
        The lock on a file beside the journal, to be released; None if the lock is on the journal, which releases it
        when it is closed.

    Raises:
        BlockingIOError: Another writer holds the lock.
        OSError: The folder cannot be written.
    """
    if not _JOURNAL_CAN_BE_LOCKED:
        return _lock_file(FileLock(folder / LOCK, thread_local=False), folder)
    try:
        locked = lock_descriptor(journal, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"the file system of {folder} has no locks: {MARKER} stands for one. If a recording is killed on another "
            f"computer, remove {MARKER} by hand.",
            RuntimeWarning,
            stacklevel=2,
        )
        return _lock_file(SoftFileLock(folder / MARKER, thread_local=False), folder)
    if not locked:
        raise _other_writer(folder)
    return None


def _lock_file(lock: BaseFileLock, folder: Path) -> BaseFileLock:
    try:
        lock.acquire(timeout=_TIMEOUT)
    except Timeout as error:
        raise _other_writer(folder) from error
    return lock


def _other_writer(folder: Path) -> BlockingIOError:
    return BlockingIOError(
        f"a run must have one writer at a time: another process records into {folder}. Wait for it to end, or "
        "choose another folder."
    )
