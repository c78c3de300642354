"""The recorded steps of a run: which results stay in memory, and when steps are written to disk."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.states import recomputation_of
from epk_gp.core.step import Move, StateSamples, Step, fingerprint_step, share_of_way, tensor_bytes
from epk_gp.core.trajectory import States, Trajectory, Updates
from epk_gp.core.update_law import compact_update
from epk_gp.optimizers.update_rules import UpdateCoefficients, relative_rounding
from epk_gp.recording.seen import MadeStep
from epk_gp.recording.setup import TrainingSetup
from epk_gp.storage.chunks import StoredStates, StoredUpdates, read_digests, validate_pass, with_stored_passes
from epk_gp.storage.files import pack
from epk_gp.storage.rows import as_bytes, num_seen
from epk_gp.storage.schema import INPUTS, TARGETS, ChunkSchema
from epk_gp.storage.training_state import CHECKSUM, REPLAY, TrainingState
from epk_gp.storage.writer import RunWriter, Storage

Held = tuple[Float[Tensor, " P"], Float[Tensor, " Q"] | None]  # weights and moving statistics of a state
Recorded = tuple[States, Updates, States | None, tuple[str, ...]]  # last: digests of the run up to each state
_ANCHORS = 4  # results of moves that stay in memory, as Lookahead's slow weights continue from them
_BLOCK_BYTES = 1 << 20  # about 25 states of a network of 10 000 float32 weights


class TensorArena:
    """An arena: copies of small tensors, one after another in large blocks.

    If allocated one by one, the small tensors would lie between the large, short-lived tensors of a training, and split
    every gap that those leave: the process would grow by the memory of a forward pass every few steps (measured: 20 MB
    per step for an MNIST CNN with batches of 250). A block is freed when none of its tensors is used any more.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}

    def copy_in(self, value: Tensor) -> Tensor:
        """Copy a tensor into the arena, and return the copy."""
        key = (value.dtype, value.device)
        block, used = self._blocks.get(key, (value.new_empty(0), 0))
        if used + value.numel() > len(block):
            size = max(value.numel(), _BLOCK_BYTES // value.element_size())
            block, used = torch.empty(size, dtype=value.dtype, device=value.device), 0
        end = used + value.numel()
        self._blocks[key] = (block, end)
        return block[used:end].view(value.shape).copy_(value.detach())

    def take_in(self, value: Tensor) -> Tensor:
        """Keep a tensor that nobody else writes to; a large one is not copied, as it would fill a block alone."""
        is_whole = value.untyped_storage().nbytes() == value.nbytes >= _BLOCK_BYTES
        return value if is_whole else self.copy_in(value)


# Bytes of a step above which a separate thread hashes it, during the next step of the training: 1 ms per MB. For
# smaller steps the change of threads costs more.
_IN_BACKGROUND = 1 << 18


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step; the result of step -1 holds the initial weights.

    Attributes:
        digest: Returns the digest of the run up to the step, once it is hashed.
        end: The weights after the step; empty if the run does not keep them (`RunHistory.thin`).
        update: Its coefficients; None if no step led to the weights.
        statistics: The moving statistics after the step; None for a network without them.
        replay: The stored data to repeat the step bit by bit (`CommitSchedule.replay_of`); None without.
    """

    digest: Callable[[], str]
    end: Float[Tensor, " P"]
    update: UpdateCoefficients | None
    statistics: Float[Tensor, " Q"] | None = None
    replay: dict[str, Tensor] | None = None

    def num_bytes(self, schema: ChunkSchema) -> float:
        """Return its number of bytes in a chunk, which holds every k-th state; numbers per parameter are neglected."""
        per_weight = [] if self.update is None else [v for v in self.update.tensors() if v.numel() > len(schema.sizes)]
        statistics = [*([] if self.statistics is None else [self.statistics]), *(self.replay or {}).values()]
        state = schema.num_weights * schema.dtype.itemsize / schema.keep_every
        return state + sum(v.nbytes for v in (*per_weight, *statistics))


class RunHistory:
    """The steps recorded so far, and those results that are in memory.

    A step is hashed after it was appended: at once if it is small, otherwise in another thread until the next step is
    appended, or until something that depends on the hash is read.

    Attributes:
        steps: Learning rate, batch and forward passes of each step; the passes are in memory or on disk.
        samples: A few weights of each state.
    """

    def __init__(
        self,
        weights: Float[Tensor, " P"],
        digest: str,
        steps: Sequence[Step] = (),
        statistics: Float[Tensor, " Q"] | None = None,
    ) -> None:
        """Begin with the weights and statistics after `steps`, or with the initial ones."""
        self.steps = list(steps)
        self._results = {len(self.steps) - 1: StepResult(lambda: digest, weights, None, statistics)}
        self.samples = StateSamples.of(weights)
        self.samples.rows[len(self.steps)] = weights[self.samples.places]
        self._checksums = dict[int, int]()  # checksums of states that are not kept any more
        self._moved_to: dict[int, Held] = {len(self.steps): (weights, statistics)}  # the ends of the last moves
        self._arena = TensorArena()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far."""
        return len(self.steps)

    @property
    def last(self) -> StepResult:
        """The result of the last step."""
        return self._results[self.num_steps - 1]

    def digest(self, count: int) -> str:
        """Return the digest of the first `count` steps, if their results are in memory."""
        return self._results[count - 1].digest()

    def append(
        self,
        step: Step,
        end: Float[Tensor, " P"],
        update: UpdateCoefficients,
        statistics: Float[Tensor, " Q"] | None = None,
        replay: dict[str, Tensor] | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        """Add a step and copies of its results; large weights and coefficients are not copied, and must not change.

        Results of a plain step that lie in large blocks of memory (`is_kept`) are not copied either.

        Raises:
            TypeError: A tensor of a pass has a dtype that cannot be stored.
            ValueError: A pass does not follow `ForwardPass`, or holds NaN or infinity.
        """
        copy_in, index, before = self._arena.copy_in, self.num_steps, self.last.digest()
        after, places = None if statistics is None else copy_in(statistics), self.samples.places
        if is_kept:
            digest: Callable[[], str] = partial(str, fingerprint_step(before, step, update, end, after))
            self.samples.rows[index + 1] = end[places]
        else:
            for forward in step.passes:
                validate_pass(forward)
            update = update.map(copy_in if update.has_matrices else self._arena.take_in)
            end = self._arena.take_in(end)
            on_cpu = tuple(forward.map(Tensor.cpu) for forward in step.passes)
            step = replace(step, passes=on_cpu).map(copy_in)
            digest = self._digest_of(before, step, update, end, after)
            self.samples.rows[index + 1] = copy_in(end[places])
        self._results[index] = StepResult(digest, end, update, after, replay)
        # Last, because the number of steps counts them: an interrupt before this line leaves the history unchanged.
        self.steps.append(step)

    def _digest_of(
        self, before: str, step: Step, update: UpdateCoefficients, end: Float[Tensor, " P"], statistics: Tensor | None
    ) -> Callable[[], str]:
        """Return the digest of the run up to a step; another thread computes it if there is much to hash."""
        hashing = partial(fingerprint_step, before, step, update, end, statistics)
        num_bytes = sum(value.nbytes for value in (end, *update.tensors()))
        if num_bytes + sum(forward.num_bytes for forward in step.passes) < _IN_BACKGROUND:
            return partial(str, hashing())
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="epk_gp-recorder")
        return self._thread.submit(hashing).result

    def find_move(
        self, w: Float[Tensor, " P"], sizes: tuple[int, ...], recorded: Callable[[], Trajectory]
    ) -> tuple[Move, Held] | None:
        """Return the loop's move of the weights after the last step, and the state towards which they moved.

        Args:
            w: The weights after the move.
            sizes: Number of weights of each parameter.
            recorded: Returns the part of the run that is on disk, for states that are not in memory.

        Returns:
            None if the weights did not move, or moved in another way.
        """
        u = self.last.end
        if (w.dtype, w.device) != (u.dtype, u.device) or torch.equal(w, u):
            return None
        for number in self.samples.anchors(u, w, self.num_steps - 1):
            result = self._results.get(number - 1)
            held = self._moved_to.get(number, None if result is None else (result.end, result.statistics))
            if held is None:
                run = recorded()
                recomputation, statistics = recomputation_of(run), run.statistics
                is_kept = recomputation is None or recomputation.is_kept(number)
                anchor = run.states[number].to(u) if is_kept else u.new_empty(0)
                held = anchor, None if statistics is None else statistics[number].to(u)
            if not len(held[0]) and self._checksums.get(number) == crc32(tensor_bytes(w)):
                held = w, held[1]
            share = share_of_way(u, w, held[0], sizes) if len(held[0]) else None
            if share is not None:
                return Move(number, share), held
        return None

    def move(
        self, move: Move, anchor: Held, w: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None
    ) -> Float[Tensor, " Q"] | None:
        """Replace the end of the last step, which is not on disk yet, by the weights after a move without a gradient.

        Args:
            move: The move.
            anchor: The state towards which the weights moved.
            w: The weights after the move.
            statistics: The moving statistics after the move.

        Returns:
            The moving statistics at the end of the step; unchanged if they moved otherwise than the weights.
        """
        b, copy_in = self.last.statistics, self._arena.copy_in
        if b is not None and anchor[1] is not None and statistics is not None:
            expected = torch.lerp(b, anchor[1], move.share)
            if torch.allclose(statistics, expected, rtol=relative_rounding(w.dtype)):
                self.move_statistics(statistics)
        end, b, S = copy_in(w), self.last.statistics, self.num_steps
        self._replace_last(replace(self.steps[-1], move=move), end, b)
        self.samples.rows[S] = copy_in(end[self.samples.places])
        self._moved_to = dict([*self._moved_to.items()][1 - _ANCHORS :]) | {S: (end, b)}
        return b

    def move_statistics(self, statistics: Float[Tensor, " Q"]) -> None:
        """Replace the moving statistics at the end of the last step, which is not on disk yet.

        Args:
            statistics: The moving statistics; ignored for a network without them.
        """
        step, b = self.steps[-1], self.last.statistics
        if b is not None and step.passes and not torch.equal(b, statistics):
            ends = [b.cpu() if p.statistics_after is None else p.statistics_after for p in step.passes]
            passes = zip(step.passes, ends, strict=True)
            step = replace(step, passes=tuple(replace(p, statistics_after=after) for p, after in passes))
            self._replace_last(step, self.last.end, self._arena.copy_in(statistics))

    def _replace_last(self, step: Step, end: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None) -> None:
        index, update = self.num_steps - 1, self.last.update
        if update is not None:  # a step led to these weights
            digest = fingerprint_step(self._results[index - 1].digest(), step, update, end, statistics)
            self._results[index] = StepResult(partial(str, digest), end, update, statistics, self.last.replay)
        self.steps[index] = step

    def follow(self, step: Step, end: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None) -> None:
        """Continue after a step that another process records; earlier results are forgotten, and there is no digest."""
        self._results = {self.num_steps: StepResult(str, end, None, statistics)}
        self.steps.append(step)

    def results(self, first: int, end: int) -> list[StepResult]:
        """Return the results of the steps `first` to `end - 1`."""
        return [self._results[index] for index in range(first, end)]

    def recorded(self) -> Recorded:
        """Return the states, coefficients and moving statistics of a run in memory, and its digests."""
        results = self.results(-1, self.num_steps)
        updates = tuple(r.update for r in results if isinstance(r.update, UpdateCoefficients))
        statistics = tuple(r.statistics for r in results if r.statistics is not None)
        return tuple(r.end for r in results), updates, statistics or None, tuple(r.digest() for r in results)

    def thin(self, count: int, schema: ChunkSchema) -> None:
        """Free results of the first `count` steps that a run with every k-th state does not keep.

        The weights after the last of these steps stay, because the run may be resumed from there.

        Args:
            count: Number of steps.
            schema: The layout of the run on disk.
        """
        for index, result in self._results.items():
            if index < count - 1 and (index + 1) % schema.keep_every and len(result.end):
                self._checksums[index + 1] = self.checksum(index + 1)
                result = replace(result, end=result.end.new_empty(0))
            if index < count and result.update is not None:
                result = replace(result, update=compact_update(result.update, schema.scaled, schema.sizes))
            self._results[index] = result

    def checksum(self, state: int) -> int:
        """Return the checksum of the weights of a state after a step that is in memory."""
        return self._checksums.get(state) or crc32(tensor_bytes(self._results[state - 1].end))

    def forget_results_before(self, index: int) -> None:
        """Free the results of the steps before `index`, which are on disk."""
        self._results = {i: result for i, result in self._results.items() if i >= index}

    def close(self) -> None:
        """Wait for the last step, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


class CommitSchedule:
    """The commits of one run.

    A step belongs to an iteration of the user's loop, and schedulers or samplers may advance after the step. Only steps
    of completed iterations are committed, together with the training state at the end of the last of them: a resumed
    run continues from there. The points of a stream, whose setup is `stream`, are committed with the steps that used
    them.

    Attributes:
        writer: Writes the run's folder.
    """

    def __init__(
        self,
        writer: RunWriter,
        storage: Storage,
        history: RunHistory,
        training: TrainingState,
        stream: TrainingSetup | None = None,
    ) -> None:
        self._stream, self._num_points = stream, 0 if stream is None else len(stream.X)  # the points that are on disk
        self.writer, self._limits, self._history, self._training = writer, storage, history, training
        self._num_completed = self._num_counted = history.num_steps
        self._training_state: tuple[Mapping[str, Any], Tensor] | None = None  # after the last completed step
        self._last_commit = time.monotonic()
        self._num_bytes = 0.0  # bytes of the completed steps that are not on disk
        self._digests = read_digests(writer.path, writer.chunks)

    @property
    def num_committed(self) -> int:
        """Number of steps on disk."""
        return self.writer.chunks[-1].last

    def recorded(self) -> Recorded:
        """Return the states, coefficients, moving statistics and digests that are on disk."""
        path, schema, chunks = self.writer.path, self.writer.schema, tuple(self.writer.chunks)
        statistics = StoredStates(path, schema, chunks, "statistics") if schema.num_statistics else None
        digests = self._digests or (chunks[-1].digest,)
        return StoredStates(path, schema, chunks), StoredUpdates(path, schema, chunks), statistics, digests

    def replay_of(self, made: MadeStep, num_ranks: int) -> dict[str, Tensor] | None:
        """Return the replay data of the last step; None if every state is kept anyway."""
        schema, state = self.writer.schema, self._history.num_steps + 1
        if not schema.thins or num_ranks > 1:
            return None
        return self._training.replay_row(made.options, is_kept=state % schema.keep_every == 0)

    def complete_iteration(self, snapshot: Mapping[str, Any]) -> None:
        """Keep the training state after the steps so far: a snapshot, and the momentum."""
        self._num_completed, self._training_state = self._history.num_steps, (snapshot, self._training.momentum.clone())

    def needs_steps(self, waiting: int) -> bool:
        """Return whether the storage reaches a limit with `waiting` more steps."""
        return self._is_full(self._history.num_steps + waiting - self.num_committed, 0.0)

    def _is_full(self, waiting: int, num_bytes: float) -> bool:
        """Return whether the storage reaches a limit with the steps and bytes that are not on disk."""
        limits, seconds = self._limits, time.monotonic() - self._last_commit
        is_many = num_bytes >= limits.chunk_bytes or (limits.steps is not None and waiting >= limits.steps)
        return waiting > 0 and (is_many or seconds >= limits.seconds)

    def commit_if_due(self) -> None:
        """Commit the completed steps if the storage reaches a limit."""
        if self.writer.schema.thins:
            self._history.thin(self._num_completed, self.writer.schema)
        steps = self._history.steps[self._num_counted :]
        results = self._history.results(self._num_counted, self._num_completed)
        self._num_bytes += sum(result.num_bytes(self.writer.schema) for result in results)
        self._num_bytes += sum(forward.num_bytes for step in steps for forward in step.passes)
        self._num_counted = self._num_completed
        num_bytes = self._num_bytes + (0 if self._stream is None else self._stream.X[self._num_points :].nbytes)
        if self._is_full(self._num_completed - self.num_committed, num_bytes):
            self.commit()

    def commit(self) -> None:
        """Write the steps of completed iterations that are not on disk, and free their results."""
        first, count = self.num_committed, self._num_completed
        results = self._history.results(first, count)
        if results:
            updates = [r.update for r in results if r.update is not None]
            schema, steps = self.writer.schema, self._history.steps[first:count]
            states = [results[s - first - 1].end for s in schema.held_between(first + 1, count)]
            statistics = [r.statistics for r in results if r.statistics is not None]
            digests = tuple(result.digest() for result in results)
            state = self._training.state_dict(*(self._training_state or ()))
            kept = (states, steps, updates, digests, state, statistics)
            made = [(state, r.replay) for state, r in enumerate(results, first + 1) if r.replay]
            replay = [row | {CHECKSUM: torch.tensor(self._history.checksum(state))} for state, row in made]
            rows = dict[str, Tensor]()
            if (stream := self._stream) is not None:
                new = slice(self._num_points, num_seen(steps, self._num_points))
                rows = {INPUTS: as_bytes(stream.X[new]), TARGETS: stream.y[new]} if new.stop > new.start else rows
            self.writer.append(*kept, rows=rows | (pack(REPLAY, replay) if replay else {}))
            self._digests = (*self._digests, *digests) if self._digests else ()
            self._num_points += len(rows.get(INPUTS, ()))
            if any(step.passes for step in steps):
                steps = with_stored_passes(self.writer.path, self.writer.chunks[-1], schema, steps)
                self._history.steps[first:count] = steps
        self._last_commit, self._num_bytes, self._num_counted = time.monotonic(), 0.0, count
        # The result of the last completed step stays: it becomes the last one if the step after it is dropped.
        self._history.forget_results_before(min(self._history.num_steps, count, self.num_committed) - 1)

    def commit_completed_only(self) -> None:
        """Drop the step of an incomplete iteration, and commit the others."""
        del self._history.steps[self._num_completed :]
        self.commit()
