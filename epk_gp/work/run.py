"""Execution of a computation for every pass: pieces here or on workers, partial sums in a folder, progress.

With an executor, the owner writes the computation into the folder once; each worker reads it, computes pieces and
writes them there; the owner reads them in order.
"""

import json
import os
import pickle
import platform
import shutil
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from tqdm.std import tqdm as std_tqdm

import epk_gp
from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.checks import ComputeOptions, SupportsSubmit
from epk_gp.core.plans import DifferentiationPlan
from epk_gp.core.show import new_bar
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.trajectory import Trajectory
from epk_gp.storage.files import PartialSums, atomic_write, checksum
from epk_gp.storage.run import require_same_run
from epk_gp.work.workers import only_owner, pickled, scratch_folder, submit, threads_of_workers, wait

Place = tuple[int, ...]

BEGUN = "-begun"  # suffix of the names of incomplete sums of a piece
_LARGEST, _CARRIED = "max.", "carried."  # prefixes of names of tensors in a file


@dataclass(frozen=True)
class Piece:
    """A part of a computation that is computed separately.

    Attributes:
        name: Name of its file.
        place: Identifier of the part.
        steps: Number of its steps, for a progress bar.
        total: Name of the sum to which it belongs, with its neighbours of the same total; "" for a complete piece.
    """

    name: str
    place: Place
    steps: int = 1
    total: str = ""


def pieces_of_ranges(name: str, place: Place, ranges: Sequence[slice], num_steps: int) -> Iterator[Piece]:
    """List the ranges of steps of one sum."""
    total = "" if len(ranges) == 1 else name
    for number, steps in enumerate(ranges):
        yield Piece(f"{name}-{number}", (*place, number), len(range(num_steps)[steps]), total)


@dataclass(eq=False)
class Sums:
    """Named tensors, grouped by the way in which those of two pieces are joined.

    Attributes:
        added: Tensors that are added, in the memory of the first.
        largest: Tensors that are joined by the maximum; NaN stays.
        carried: State for the rest of a piece, such as an adjoint; it is not part of the result.
        steps: Number of summed steps.
    """

    added: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def merge(self, other: "Sums") -> None:
        """Join the sums of a later piece."""
        for name, value in other.added.items():
            self.added[name] = self.added[name].add_(value) if name in self.added else value
        for name, value in other.largest.items():
            self.largest[name] = torch.maximum(self.largest[name], value) if name in self.largest else value
        self.steps += other.steps

    def save(self, stored: PartialSums, name: str, *, is_whole: bool = True) -> None:
        """Write the tensors into a folder, including the carried ones if the piece is not complete."""
        tensors = dict(self.added) | {_LARGEST + key: value for key, value in self.largest.items()}
        carried = {} if is_whole else {_CARRIED + key: value for key, value in self.carried.items()}
        stored.save(name, tensors | carried, self.steps)

    @classmethod
    def load(cls, stored: PartialSums | None, name: str, device: torch.device) -> "Sums":
        """Read the sums stored under a name; empty if they were never saved."""
        state, steps = ({}, 0) if stored is None else stored.load(name)
        sums = cls(steps=steps)
        for prefix, named in ((_LARGEST, sums.largest), (_CARRIED, sums.carried), ("", sums.added)):
            for key in [key for key in state if key.startswith(prefix)]:
                named[key.removeprefix(prefix)] = state.pop(key).to(device)
        return sums


@runtime_checkable
class Work(Protocol):
    """A computation in pieces. It is pickled once, and each worker keeps it from piece to piece."""

    @property
    def pieces(self) -> Iterable[Piece]:
        """The pieces in order, with pieces of the same total next to each other; they follow from the problem alone."""

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece."""

    @property
    def device(self) -> torch.device:
        """The device on which sums are joined."""

    def identity(self) -> str:
        """Return the fingerprint of everything the sums depend on except the names of pieces, which identify plans."""

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Compute a piece, and yield its sums whenever they could be saved; the last ones are the piece's result.

        Args:
            place: Identifier of the piece; the result depends on nothing else.
            saved: Incomplete sums of an earlier call; empty ones at the start.
        """

    def check(self) -> None:
        """Raise if a worker sees other data than the owner did, such as another copy of the run."""


def _save_begun(stored: PartialSums | None, name: str, sums: Sums) -> None:
    """Save the sums of an incomplete piece from time to time.

    They may be complete: a call that was killed before it marked them finds them, and has nothing left to compute.
    """
    if stored is not None and sums.added and stored.should_save:
        with suppress(OSError):  # a full disk ends the computation when the piece is complete, not here
            sums.save(stored, name + BEGUN, is_whole=False)


def run(work: Work, options: ComputeOptions, what: str) -> Generator[tuple[Piece, Sums], None, None]:
    """Compute all pieces, here or on workers, and yield every total with its last piece, in order.

    With a checkpoint, pieces and totals are saved, and those of an earlier call are not computed again, with or without
    workers. Without a checkpoint and an executor no file is written. The bytes are the same in all cases for the same
    number of threads; workers have one thread.

    Args:
        work: The computation.
        options: The executor, the folder for sums, and whether progress is shown.
        what: Text of the progress bar.

    Raises:
        BlockingIOError: Another job computes into the checkpoint.
        RuntimeError: Workers died repeatedly, or the executor is unusable.
        ValueError: The checkpoint belongs to another computation, or a file in it is damaged.
    """
    executor = options.executor
    with nullcontext() if executor is None else threads_of_workers(executor), _folder(work, options) as stored:
        missing = (piece for pieces in _totals(work) for piece in pieces[_num_joined(stored, pieces) :])
        workers = None if executor is None or stored is None else _by_workers(work, missing, executor, stored)
        with _bar(work, stored, options, what) as bar, nullcontext() if workers is None else closing(workers):
            for pieces in _totals(work):
                done, used = _num_joined(stored, pieces), list[str]()
                total = Sums.load(stored, pieces[0].total, work.device) if done else Sums()
                for number, piece in enumerate(pieces[done:], done + 1):
                    if workers is not None:
                        sums = next(workers)
                        bar.update()
                    elif stored is not None and stored.has(piece.name):
                        sums = Sums.load(stored, piece.name, work.device)
                        bar.update(piece.steps)
                    else:
                        sums = Sums.load(stored, piece.name + BEGUN, work.device)
                        if counted := sums.steps:
                            bar.update(counted)
                        with disable_fused_attention():  # sums of float32 numbers must not use TF32 either
                            for sums in work.compute(piece.place, sums):  # noqa: B020  the last sums are complete
                                bar.update(sums.steps - counted)
                                if sums.steps > counted:
                                    _save_begun(stored, piece.name, sums)
                                counted = sums.steps
                        if stored is not None and not piece.total:
                            sums.save(stored, piece.name)
                            stored.remove([piece.name + BEGUN])
                    total.merge(sums)
                    used += [piece.name, piece.name + BEGUN]
                    if stored is None:
                        continue
                    if options.checkpoint is not None:
                        if not piece.total or (number < len(pieces) and not stored.should_save):
                            continue
                        replace(total, steps=number).save(stored, piece.total)
                    stored.remove(used)
                    used.clear()
                yield pieces[-1], total


@contextmanager
def _folder(work: Work, options: ComputeOptions) -> Iterator[PartialSums | None]:
    """Yield the folder of the sums, of which this process is the only owner; None if nothing is written."""
    if options.executor is None and options.checkpoint is None:
        yield None
        return
    with scratch_folder(options.checkpoint) as folder:
        stored = PartialSums(folder, work.identity(), is_durable=options.checkpoint is not None)
        with only_owner(folder):
            stored.remove_torn()
            yield stored


def _totals(work: Work) -> Iterator[list[Piece]]:
    """Yield the lists of pieces that share a total."""
    return (list(pieces) for _, pieces in groupby(work.pieces, key=lambda piece: piece.total or piece.name))


def _num_joined(stored: PartialSums | None, pieces: list[Piece]) -> int:
    """Count the pieces whose joined sums are in a folder."""
    return 0 if stored is None or not pieces[0].total else stored.count(pieces[0].total)


def _bar(work: Work, stored: PartialSums | None, options: ComputeOptions, what: str) -> std_tqdm:  # type: ignore[type-arg]
    """Return a progress bar: of steps, or of the pieces of workers."""
    is_here, size, done = options.executor is None, 0, 0
    for pieces in _totals(work):
        counts = [piece.steps if is_here else 1 for piece in pieces]
        size, done = size + sum(counts), done + sum(counts[: _num_joined(stored, pieces)])
    unit = "step" if is_here else "piece"
    return new_bar(None, what, shown=options.progress, total=size, unit=unit, initial=done)


@dataclass(frozen=True, eq=False, kw_only=True)
class RunWork(ABC):
    """A computation on a run (`Work`): the common part of all computations.

    Attributes:
        plan: The plan for differentiating the network: made once, by the owner of the job.
        recorded_plan: The plan of the trained network, if a question uses another network (`autodiff.scalars`); None if
            it is the same.
    """

    plan: DifferentiationPlan
    recorded_plan: DifferentiationPlan | None = None

    @property
    @abstractmethod
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs for its network."""

    def check(self) -> None:
        """Raise if the run on disk is not the one that the owner of the job opened."""
        require_same_run(self.run_and_inputs[0])

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, without values that are computed again."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def net(self) -> PlannedModel:
        """The network of the run, with the plan."""
        trajectory, X = self.run_and_inputs
        return PlannedModel(trajectory.model_for(X), self.plan)

    @cached_property
    def recorded_net(self) -> PlannedModel:
        """The trained network, with its plan."""
        if self.recorded_plan is None:
            return self.net
        trajectory, X = self.run_and_inputs
        return PlannedModel(trajectory.recorded.model_for(X), self.recorded_plan)

    @property
    def device(self) -> torch.device:
        """The device on which sums are joined."""
        return self.run_and_inputs[1].device

    def named(self, name: str) -> str:
        """Return the prefix of the names of pieces, because pieces of another plan have other bytes.

        A call that needs a second plan half-way continues in the same folder.
        """
        return f"{name}-{zlib.crc32(repr(self.plan).encode()):08x}"


# Largest number of pieces that are submitted before the first of them is read, and largest size of their files: this
# number, or this share of the free space in the folder if that is larger. A piece takes no space before a worker has
# computed it, so few workers need little. 1,000 workers need about 2,000 pieces, to avoid waiting for each straggler.
AHEAD, AHEAD_BYTES, AHEAD_SHARE = 4096, 8 << 30, 0.25

JOB = "job.pickle"

# Computations by process and key, with their folder and the number of threads of their owner: threads of a pool find
# theirs here. A forked worker finds a copy of its parent's, which is not its own.
_OWN: dict[tuple[int, str], tuple[Work, PartialSums, int]] = {}


def write_job(work: Work, stored: PartialSums) -> str:
    """Write the data for workers into the folder of the pieces, and return the key by which they request it.

    Raises:
        TypeError: The computation cannot be sent to another process.
    """
    about = {"versions": _versions(), "identity": stored.identity, "is_durable": stored.is_durable}
    content = json.dumps(about).encode() + b"\n" + pickled(work)
    atomic_write(stored.folder / JOB, content, is_durable=stored.is_durable, is_private=True)
    return checksum(content)


def compute_piece(folder: str, key: str, name: str, place: Place) -> None:
    """Compute a piece of a job and write its file, in a worker.

    A piece whose file already exists, because a worker died after writing it, is not computed again.

    Args:
        folder: Folder of the job.
        key: Key of the job in the folder (`write_job`).
        name: Name of the piece.
        place: Identifier of the piece.

    Raises:
        FileNotFoundError: The worker does not see the folder.
        OSError: The piece cannot be written.
        ValueError: The folder holds another job, or one of another version of a package.
    """
    work, stored, num_threads = _OWN.get((os.getpid(), key)) or _opened(folder, key)
    if torch.get_num_threads() != num_threads:  # a thread keeps torch's number at its first computation
        torch.set_num_threads(num_threads)
    if stored.has(name):
        return
    sums = Sums.load(stored, name + BEGUN, work.device)
    with disable_fused_attention():  # as without workers
        for sums in work.compute(place, sums):  # noqa: B020  the last sums are the piece's
            _save_begun(stored, name, sums)
    try:
        sums.save(stored, name)
    except OSError as error:
        raise OSError(
            error.errno,
            f"piece {name} must be written to {folder} by {platform.node()}: {error.strerror or error}. Make room "
            "there, and call again with this folder as the checkpoint.",
        ) from error
    stored.remove([name + BEGUN])


@lru_cache(maxsize=2)
def _opened(folder: str, key: str) -> tuple[Work, PartialSums, int]:
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
        raise ValueError(f"{file} must be what the job's owner wrote: it is damaged, or another's. Take a new folder.")
    header, _, rest = content.partition(b"\n")
    described = json.loads(header)
    if (own := _versions()) != (theirs := described["versions"]):
        unlike = ", ".join(f"{name} {own[name]}, not {theirs[name]}" for name in own if own[name] != theirs[name])
        raise ValueError(f"a worker must have the versions of the job's owner: {platform.node()} has {unlike}.")
    work: Work = pickle.loads(rest)
    work.check()
    return work, PartialSums(folder, described["identity"], is_durable=described["is_durable"]), 1


def _versions() -> dict[str, str]:
    """Return the versions that determine the bytes and the pickled form."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"epk_gp": epk_gp.__version__, "torch": torch.__version__, "python": python}


def _by_workers(
    work: Work, pieces: Iterable[Piece], executor: SupportsSubmit, stored: PartialSums
) -> Generator[Sums, None, None]:
    """Have workers compute pieces, and yield their sums in the order of the pieces.

    Pieces whose files are in the folder are not computed again. The caller removes files that it no longer needs.

    Args:
        work: The computation.
        pieces: Its pieces, or the missing ones.
        executor: Executor of the workers.
        stored: Folder of the pieces, of which this process is the only owner (`only_owner`).

    Raises:
        RuntimeError: Workers died repeatedly over one piece, or the executor is unusable.
    """
    key, folder, rest = write_job(work, stored), str(stored.folder.absolute()), iter(pieces)
    _OWN[os.getpid(), key] = work, stored, torch.get_num_threads()
    waiting: deque[tuple[Piece, Any]] = deque()  # results of submit; None for an existing piece
    try:
        ahead = num_ahead(work.piece_bytes, shutil.disk_usage(folder).free)
        while True:
            while len(waiting) < ahead and (piece := next(rest, None)) is not None:
                call = (compute_piece, folder, key, piece.name, piece.place)
                waiting.append((piece, None if stored.has(piece.name) else submit(executor, *call)))
            if not waiting:
                return
            piece, pending = waiting.popleft()
            if pending is not None:
                wait(executor, pending, piece.name, compute_piece, folder, key, piece.name, piece.place)
            pending = None  # release it: a scheduler would compute wanted but lost results again
            sums = Sums.load(stored, piece.name, work.device)
            if not sums.added:
                raise RuntimeError(
                    f"workers must write into the folder that this process reads: {folder} has no piece {piece.name}, "
                    "which a worker has computed. Pass checkpoint=, a folder that all share, or name one in the "
                    "environment variable TMPDIR."
                )
            yield sums
    except RuntimeError as error:
        if isinstance(error.__cause__, BrokenExecutor):
            waiting.clear()  # a dead pool ends its calls itself, in a thread that fails at a cancelled one
        raise
    finally:
        for _, pending in waiting:
            if pending is not None:
                with suppress(Exception):  # a closed client cannot cancel; the error that ended the job counts
                    pending.cancel()
        _OWN.pop((os.getpid(), key), None)
        (stored.folder / JOB).unlink(missing_ok=True)  # a resumed call writes it again


def num_ahead(num_bytes: int, free: int) -> int:
    """Count the pieces of a given size that are submitted before the first is read, given the folder's free space."""
    return max(2, min(AHEAD, max(AHEAD_BYTES, int(AHEAD_SHARE * free)) // max(1, num_bytes)))
