"""The recorded steps of a run: all learning rates and batches, and the results that must stay in memory."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float
from torch import Tensor

from epk_gp.core.step import fingerprint_step
from epk_gp.core.update_law import CompactUpdate, compact_update
from epk_gp.core.step import SeenRows, Step
from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.storage.pass_tables import PassTables
from epk_gp.storage.passes import ContentInMemory, PackedPasses, pack_passes, packed_steps, validate_pass
from epk_gp.storage.schema import ChunkSchema
from epk_gp.recording.history import TensorArena

# Bytes of a step from which on it is hashed and packed in a thread of its own, beside the next step of the training:
# 1 ms for each MB that is hashed, 5 ms for each that is packed. Fewer are not worth the change of threads.
_IN_BACKGROUND = 1 << 18


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of a step; that of step -1 stands for the initial weights.

    Attributes:
        end: The weights after the step; empty where the run does not keep them (`RunHistory.thin`).
        update: Its coefficients; None where no step led to the weights.
        statistics: The moving statistics after the step; None for a network without them.
    """

    end: Float[Tensor, " P"]
    update: UpdateCoefficients | CompactUpdate | None
    statistics: Float[Tensor, " Q"] | None = None


@dataclass(frozen=True, eq=False)
class _Finished:
    """What is made of a step after it was recorded.

    Attributes:
        digest: Digest of the run up to the step.
        passes: Its packed passes; None if it has none, or they are packed already.
    """

    digest: str
    passes: tuple[PassTables, Tensor] | None


class RunHistory:
    """The steps recorded so far, and the results of those that are in memory.

    A step is hashed, and its passes are packed, after it was appended: at once if it is small, else in another thread
    until the next one is appended, or until anything is asked that depends on it.
    """

    def __init__(
        self,
        weights: Float[Tensor, " P"],
        digest: str,
        steps: Sequence[Step] = (),
        statistics: Float[Tensor, " Q"] | None = None,
    ) -> None:
        """Begin with the weights and statistics after `steps`, the initial ones if there are none."""
        self._steps = list(steps)
        self._results = {len(self._steps) - 1: StepResult(weights, None, statistics)}
        self._digests = {len(self._steps) - 1: digest}
        self._arena = TensorArena()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[int, Future[_Finished]] | None = None
        self._is_in_thread = False  # whether another thread is at the pending step

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far."""
        return len(self._steps)

    @property
    def steps(self) -> list[Step]:
        """Learning rate, batch and forward passes of each step; the passes are packed, in memory or on disk."""
        self.settle()
        return self._steps

    def packed_steps(self, first: int) -> list[Step]:
        """Return the steps from number `first` on, but for the last one if it is still packed in another thread."""
        return self._steps[first : self.num_steps - 1] if self._is_in_thread else self.steps[first:]

    @property
    def last(self) -> StepResult:
        """The result of the last step."""
        return self._results[self.num_steps - 1]

    def digest(self, count: int) -> str:
        """Return the digest of the run of the first `count` steps, of those whose results are in memory."""
        self.settle()
        return self._digests[count - 1]

    def append(
        self,
        step: Step,
        end: Float[Tensor, " P"],
        update: UpdateCoefficients,
        statistics: Float[Tensor, " Q"] | None = None,
    ) -> None:
        """Add a step and copies of its results.

        Raises:
            TypeError: A tensor of a pass has a dtype that cannot be stored.
            ValueError: A pass is not as `ForwardPass` says, or holds NaN or infinity.
        """
        self.settle()
        if not isinstance(step.passes, PackedPasses):
            for forward in step.passes:
                validate_pass(forward)
        copy_in, index = self._arena.copy_in, self.num_steps
        after = None if statistics is None else copy_in(statistics)
        update = update.map(copy_in)
        result = StepResult(copy_in(end), update, after)
        step = step if step.batch is None else replace(step, batch=copy_in(step.batch))
        finish = partial(_finish, self._digests[index - 1], step, result, update)
        job: Future[_Finished] = Future()
        self._is_in_thread = _num_bytes(step, result, update) >= _IN_BACKGROUND
        if self._is_in_thread:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="epk_gp-recorder")
            job = self._thread.submit(finish)
        else:
            job.set_result(finish())
        self._results[index], self._pending = result, (index, job)
        # Last, for the number of steps counts them: an interrupt before this line leaves the history as it was.
        self._steps.append(step)

    def settle(self) -> None:
        """Wait until the last step is hashed and packed."""
        if self._pending is None:
            return
        index, job = self._pending
        if index < self.num_steps:
            finished = job.result()
            step = self._steps[index]
            if finished.passes is not None:
                tables, content = finished.passes
                step = packed_steps([step], tables, ContentInMemory(self._arena.copy_in(content)))[0]
            self._digests[index] = finished.digest
            self._steps[index] = step
        self._pending, self._is_in_thread = None, False

    def replace_steps(self, first: int, steps: Sequence[Step]) -> None:
        """Put steps that are on disk in the place of the same steps in memory, from number `first` on."""
        self.steps[first : first + len(steps)] = steps

    def results(self, first: int, end: int) -> list[StepResult]:
        """Return the results of the steps `first` to `end - 1`."""
        return [self._results[index] for index in range(first, end)]

    def updates(self, count: int) -> tuple[UpdateCoefficients, ...]:
        """Return the coefficients of the first `count` steps, of a run in memory."""
        found = (self._results[index].update for index in range(count))
        return tuple(update for update in found if isinstance(update, UpdateCoefficients))

    def drop_steps_from(self, count: int) -> None:
        """Drop all steps but the first `count`."""
        del self.steps[count:]

    def thin(self, count: int, schema: ChunkSchema) -> None:
        """Free what a run that keeps every k-th state does not keep of its first `count` steps.

        The weights after the last of them stay, for the run may be resumed from there.

        Args:
            count: How many steps.
            schema: What the run keeps.
        """
        for index, result in self._results.items():
            if index < count - 1 and not schema.kept_between(index + 1, index + 1):
                result = replace(result, end=result.end.new_empty(0))
            if index < count and isinstance(result.update, UpdateCoefficients):
                result = replace(result, update=compact_update(result.update, schema.scaled, schema.sizes))
            self._results[index] = result

    def forget_results_before(self, index: int) -> None:
        """Free the results of the steps before `index`, which are on disk."""
        for earlier in [i for i in self._results if i < index]:
            del self._results[earlier]
            self._digests.pop(earlier, None)

    def close(self) -> None:
        """Wait for the last step, and end the thread."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _finish(before: str, step: Step, result: StepResult, update: UpdateCoefficients) -> _Finished:
    packed = pack_passes([step]) if step.passes and not isinstance(step.passes, PackedPasses) else None
    return _Finished(fingerprint_step(before, step, update, result.end, result.statistics), packed)


def _num_bytes(step: Step, result: StepResult, update: UpdateCoefficients) -> int:
    """Return how many bytes of a step are to be hashed or packed."""
    tensors = [result.end, *update.tensors()]
    if not isinstance(step.passes, PackedPasses):
        for part in (part for forward in step.passes for part in vars(forward).values()):
            tensors += [part] if isinstance(part, Tensor) else vars(part).values() if isinstance(part, SeenRows) else []
    return sum(value.nbytes for value in tensors)
