"""A computation in a folder: what every worker needs, written once; and the pieces that workers compute, as files."""

import json
import os
import pickle
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import epk_gp
from epk_gp.storage.files import atomic_write, checksum
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work.sums import Piece, Place, Sums, Work, computed, save_piece

JOB = "job.pickle"


@dataclass(frozen=True, eq=False)
class Job:
    """A computation and the folder of its pieces.

    Attributes:
        work: The computation.
        sums: The folder, which holds pieces of this computation only.
    """

    work: Work
    sums: PartialSums


# Computations by process and key, with the number of threads of their owner: threads of a pool find theirs here. A
# forked worker finds a copy of what its parent had, which is not its own.
_OWN: dict[tuple[int, str], tuple[Job, int]] = {}


def write_job(folder: Path, identity: str, job: Job) -> str:
    """Write what workers need into the folder of the pieces, and return the key by which they ask for it.

    Args:
        folder: The folder.
        identity: Fingerprint of everything on which the pieces depend.
        job: The computation.

    Raises:
        TypeError: The computation cannot be sent to another process.
    """
    about = {"versions": _versions(), "identity": identity, "is_durable": job.sums.is_durable}
    header = json.dumps(about).encode()
    content = header + b"\n" + pickled(job.work)
    atomic_write(folder / JOB, content, is_durable=job.sums.is_durable, is_private=True)
    key = checksum(content)
    _OWN[os.getpid(), key] = job, torch.get_num_threads()
    return key


def forget_job(key: str) -> None:
    """Let go of a computation of this process."""
    _OWN.pop((os.getpid(), key), None)


def compute_piece(folder: str, key: str, name: str, place: Place) -> None:
    """Compute a piece of a job and write its file: what a worker does.

    A piece whose file is there already, because a worker died after it wrote it, is not computed again.

    Args:
        folder: Folder of the job.
        key: Which job the folder must hold (`write_job`).
        name: Name of the piece.
        place: What is computed.

    Raises:
        FileNotFoundError: The worker does not see the folder.
        OSError: The piece cannot be written.
        ValueError: The folder holds another job, or one of another version of a package.
    """
    job = _own_job(key) or _opened(folder, key)
    if job.sums.has(name):
        return
    piece, sums = Piece(name, place), Sums()
    for later in computed(job.work, piece, job.sums):
        sums = later
    try:
        save_piece(job.sums, piece, sums)
    except OSError as error:
        raise OSError(
            error.errno,
            f"piece {name} must be written to {folder} by {platform.node()}: {error.strerror or error}. Make room "
            "there, and call again with this folder as the checkpoint.",
        ) from error


def _own_job(key: str) -> Job | None:
    """Return a job of this process, in whose threads pieces are computed as by its owner.

    A thread keeps the number that torch had when the thread first computed something.
    """
    job, num_threads = _OWN.get((os.getpid(), key), (None, 0))
    if job is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return job


@lru_cache(maxsize=2)
def _opened(folder: str, key: str) -> Job:
    """Read a job in a worker, which computes with one thread from then on: bytes depend on the number."""
    torch.set_num_threads(1)
    file = Path(folder) / JOB
    try:
        content = file.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"every worker must see the folder of the pieces: {file} does not exist on {platform.node()}. Pass "
            "checkpoint=, a folder on a file system that all workers share; where the call takes none, name one in the "
            "environment variable TMPDIR."
        ) from error
    if checksum(content) != key:
        raise ValueError(
            f"{file} must be what the job's owner wrote: it is damaged, or another job was started in this folder. "
            "Give each job a folder of its own."
        )
    header, _, pickled = content.partition(b"\n")
    described = json.loads(header)
    if (own := _versions()) != (theirs := described["versions"]):
        unlike = ", ".join(f"{name} {own[name]}, not {theirs[name]}" for name in own if own[name] != theirs[name])
        raise ValueError(
            f"a worker must have the versions of the job's owner: on {platform.node()} it has {unlike}. Install the "
            "same versions on all workers."
        )
    work: Work = pickle.loads(pickled)
    work.check()
    return Job(work, PartialSums(folder, described["identity"], is_durable=described["is_durable"]))


def _versions() -> dict[str, str]:
    """Return the versions on which bytes, and the pickled form, depend."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"epk_gp": epk_gp.__version__, "torch": torch.__version__, "python": python}


def pickled(value: object) -> bytes:
    """Return the pickled form of what workers compute, which cloudpickle makes where it is installed.

    Raises:
        TypeError: It cannot be sent to another process.
    """
    dumps: Callable[[Any], bytes] = pickle.dumps
    if find_spec("cloudpickle") is not None:
        import cloudpickle  # noqa: PLC0415  comes with the extra 'distributed'

        dumps = cloudpickle.dumps
    try:
        return dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"what workers compute must be picklable: {error}. Define the network's class and functions at the top "
            "level of a module, or install epk-gp[distributed], whose cloudpickle takes others too."
        ) from error
