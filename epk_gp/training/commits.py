"""When recorded steps are written to disk, and with which training state."""

import time

from torch import Tensor

from epk_gp.core.update_law import CompactUpdate
from epk_gp.core.trajectory import States, Updates
from epk_gp.storage.kept import read_chunks, stored_run
from epk_gp.storage.matrices import matrix_bytes
from epk_gp.storage.passes import packed_bytes
from epk_gp.storage.stored import StoredStates, stored_steps
from epk_gp.storage.training_state import WEIGHTS, TrainingState
from epk_gp.storage.writer import RunWriter, Storage
from epk_gp.recording.history import RunHistory


class CommitSchedule:
    """The commits of one run.

    A step belongs to an iteration of the user's loop, and schedulers or samplers may move on after the step. Only steps
    of completed iterations are committed, together with the training state at the end of the last of them: from there a
    resumed run continues.
    """

    def __init__(self, writer: RunWriter, storage: Storage, history: RunHistory, training: TrainingState) -> None:
        self._writer, self._limits, self._history, self._training = writer, storage, history, training
        self._num_completed = self._num_counted = history.num_steps
        self._training_state: dict[str, Tensor] = {}  # after the last completed step
        self._last_commit = time.monotonic()
        self._pass_bytes = 0  # of the completed steps that are not on disk

    @property
    def num_committed(self) -> int:
        """Number of steps on disk."""
        return self._writer.chunks[-1].last

    @property
    def digest(self) -> str:
        """Digest of the run up to the last step on disk."""
        return self._writer.chunks[-1].digest

    @property
    def failed(self) -> bool:
        """Whether the last commit failed."""
        return self._writer.failed

    def stored(self) -> tuple[States, Updates]:
        """Return the states and coefficients on disk, as far as the run holds them (`with_computed_states`)."""
        chunks, last = read_chunks(self._writer.path, self._writer.schema)
        return stored_run(self._writer.path, self._writer.schema, chunks, last)

    def stored_statistics(self) -> StoredStates | None:
        """Return the moving statistics on disk; None for a network without them."""
        schema = self._writer.schema
        if not schema.num_statistics:
            return None
        return StoredStates(self._writer.path, schema, tuple(self._writer.chunks), "statistics")

    def complete_iteration(self) -> None:
        """Keep the training state after the steps so far, and commit them if a limit of the storage is reached."""
        self._num_completed, self._training_state = self._history.num_steps, self._training.state_dict()
        packed = self._history.packed_steps(self._num_counted)
        self._pass_bytes += sum(packed_bytes(step) for step in packed)
        self._num_counted += len(packed)
        if self._writer.schema.thins:
            self._history.thin(self._num_completed, self._writer.schema)
        waiting = self._num_completed - self.num_committed
        if not waiting:
            return
        limits = self._limits
        if (
            self._waiting_bytes() + self._pass_bytes >= limits.chunk_bytes
            or time.monotonic() - self._last_commit >= limits.seconds
            or (limits.steps is not None and waiting >= limits.steps)
        ):
            self.commit()

    def _waiting_bytes(self) -> int:
        """Return how many bytes of weights, statistics and coefficients are to be written."""
        result, schema, first, count = self._history.last, self._writer.schema, self.num_committed, self._num_completed
        update = result.update.update if isinstance(result.update, CompactUpdate) else result.update
        matrices = 0 if update is None else matrix_bytes(update)
        diagonals = matrices + sum(v.nbytes for v in update or () if len(v) != len(schema.sizes))
        statistics = 0 if result.statistics is None else result.statistics.nbytes
        states = len(schema.kept_between(first + 1, count)) * schema.num_weights * schema.stored_dtype.itemsize
        return (count - first) * (diagonals + statistics) + states

    def commit(self) -> None:
        """Write the steps of completed iterations that are not on disk, and free their results."""
        first, count = self.num_committed, self._num_completed
        results = self._history.results(first, count)
        if results:
            updates = [r.update for r in results if r.update is not None]
            states, training_state = [r.end for r in results], self._training_state
            if (schema := self._writer.schema).thins:
                training_state = training_state | {WEIGHTS: states[-1]}
                states = [states[s - first - 1] for s in schema.kept_between(first + 1, count)]
            steps = self._history.steps[first:count]
            statistics = [r.statistics for r in results if r.statistics is not None]
            self._writer.append(states, steps, updates, self._history.digest(count), training_state, statistics)
            self._history.replace_steps(first, stored_steps(self._writer.path, self._writer.chunks[-1], steps))
        self._last_commit, self._pass_bytes, self._num_counted = time.monotonic(), 0, count
        # The result of the last completed step stays: it becomes the last one if the step after it is dropped.
        self._history.forget_results_before(min(self._history.num_steps, count, self.num_committed) - 1)

    def commit_completed_only(self) -> None:
        """Drop the step of an iteration that was not completed, and commit the others."""
        self._history.drop_steps_from(self._num_completed)
        self.commit()

    def mark_complete(self) -> None:
        """Write the closing record of the run."""
        self._writer.mark_complete()

    def close(self) -> None:
        """Release the folder."""
        self._writer.close()
