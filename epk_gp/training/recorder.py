"""Record a training run in one's own loop."""

import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.fingerprint import fingerprint_data, fingerprint_start, fingerprint_step
from epk_gp.core.losses import (
    CrossEntropy,
    Loss,
    as_loss,
    validate_loss_row_independence,
    validate_output_scale,
    validate_targets,
)
from epk_gp.core.model import functionalize
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_rules import UpdateCoefficients, UpdateRule, learning_rate, rule_for, validate_fresh_optimizer
from epk_gp.core.validation import validate_count, validate_finite
from epk_gp.storage.run import create_run, resume_run, validate_schedules
from epk_gp.storage.schema import header_of
from epk_gp.storage.stored import StoredStates, StoredUpdates
from epk_gp.storage.training_state import StatefulObjects, capture_training_state, options_of, validate_stateful
from epk_gp.storage.writer import RunWriter, Storage, is_run
from epk_gp.training.clipping import Clip, validate_clip
from epk_gp.training.diagnosis import StepMismatchError
from epk_gp.training.step_check import (
    check_against_exact_gradient,
    check_against_used_gradient,
    join_batches,
    read_coefficients,
    recompute_gradient,
    validate_frozen_state,
)
from epk_gp.training.tensor_arena import TensorArena
from epk_gp.training.validation import (
    parse_batch,
    parse_data,
    trained_names,
    validate_layer_modes,
    validated_fingerprint,
)


@dataclass(frozen=True, eq=False)
class _Record:
    """A step's result (index -1: the initial weights), and the run's digest with it."""

    end: Float[Tensor, " P"]
    update: UpdateCoefficients | None
    digest: str


class Recorder:
    """Record the steps of one's own training loop.

    Use it as a context manager; call `batch(indices)` after `backward()` and before `optimizer.step()`. Every step is
    checked: the recorded change of the weights must be what the update rule predicts from the recomputed gradient of
    the stated loss on the stated batch. A step that is not raises `StepMismatchError`, which names the cause as far as
    it can tell; the steps before it stay recorded.

    With `path` and `resume` the loop goes on where the last commit left it: write it as
    `for step in recorder.until(steps):`.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        X: Shaped[Tensor, "M ..."],
        y: Shaped[Tensor, "M ..."],
        *,
        loss: Loss | nn.Module = CrossEntropy(),
        update_rule: UpdateRule | None = None,
        clip: Clip | None = None,
        path: str | os.PathLike[str] | None = None,
        resume: bool = False,
        stateful: StatefulObjects | None = None,
        storage: Storage = Storage(),
        check_every: int = 1,
    ) -> None:
        """Check everything that can be checked before training starts.

        Args:
            net: The network; X and y must be on its device.
            optimizer: Its optimizer. The weights recorded are those it trains.
            X: All M training inputs.
            y: Their targets.
            loss: The loss that will be minimised.
            update_rule: How the optimizer steps; known for torch's SGD, Adam, AdamW, RMSprop and Adagrad.
            clip: The gradient clipping that the loop does before each step.
            path: New folder for the run; kept in memory if None.
            resume: Go on with the run at `path`, if there is one, from its last commit: brings network, optimizer,
                torch's random numbers (CPU) and what is in `stateful` to their state there. Python's and NumPy's random
                numbers are not kept.
            stateful: Objects by name whose state is kept with the run: the loop's `torch.Generator`, and anything with
                `state_dict` and `load_state_dict`, such as schedulers and samplers. The loop must be
                `for step in recorder.until(steps):` then.
            storage: How often steps are committed to disk, and how.
            check_every: Recompute the gradient of one step out of this many (which one of them is as good as random,
                and the same in every run); the others are compared with the update rule's step on the gradient that
                `backward()` left. `reconstruct(...).max_step_mismatch` checks them all afterwards.

        Raises:
            TypeError: Wrong kinds of arguments.
            ValueError: Data, targets, network or optimizer that cannot be recorded, or that are not those of the run
                to go on with; the message says what to do.
            FileExistsError: `path` already holds something.
            BlockingIOError: Another process records there.
            OSError: The folder cannot be written.
        """
        self.net, self.optimizer, self.loss = net, optimizer, as_loss(loss)
        self.update_rule = rule_for(optimizer) if update_rule is None else update_rule
        validate_fresh_optimizer(optimizer)
        learning_rate(optimizer)
        validate_clip(clip)
        validate_count(check_every, "check_every")
        if check_every > 1 and clip is not None:
            raise ValueError(f"check_every must be 1 where gradients are clipped: got {check_every}.")
        self.clip, self.check_every, self._storage = clip, check_every, storage
        self._stateful: StatefulObjects = {} if stateful is None else stateful
        validate_stateful(self._stateful)
        if resume:
            validate_schedules(optimizer, self._stateful, path)
        self.model = functionalize(net, trained_names(net, optimizer))
        self.X, self.y = parse_data(X, y)
        validate_layer_modes(net)
        start = self._weights()
        for name, value in self.model.unflatten(start).items():
            validate_finite(value.reshape(1, -1), f"the initial weights of {name!r}", "Initialise them again.")
        probe = validated_fingerprint(self.model, start, self.X)
        validate_targets(self.loss, self.y, len(self.X), probe.shape[1])
        validate_output_scale(self.loss, probe)
        validate_loss_row_independence(self.loss, probe, self.y[: len(probe)])
        self.num_outputs, self.data_digest = probe.shape[1], fingerprint_data(self.X, self.y)
        header = header_of(
            self.model, self.loss, self.update_rule.name, len(self.X), self.data_digest, self.num_outputs
        )
        self._steps: list[Step] = []
        self._shelf = TensorArena()
        self._records = {-1: _Record(start, None, fingerprint_start(header, self.model, probe, start))}
        self._momentum = torch.zeros_like(start)
        self._pending: list[tuple[Tensor | None, float]] = []
        self._fresh: set[str] = set()
        self._writer: RunWriter | None = None
        if path is not None and resume and is_run(path):
            self._go_on(path, header)
        elif path is not None:
            data = {"inputs": self.X, "targets": self.y, "probe": probe}
            data |= {f"constant.{name}": value for name, value in self.model.frozen_state().items()}
            kept = capture_training_state(optimizer, self._stateful, self._momentum)
            about = header | self._about_writing()
            self._writer = create_run(path, about, data, start, self._records[-1].digest, kept, options_of(optimizer))
        self._completed: tuple[int, dict[str, Tensor]] = (len(self._steps), {})
        self._committed_at = time.monotonic()
        self._hooks: list[Any] = []
        self._ended = self._in_until = False

    @property
    def num_steps(self) -> int:
        """Steps recorded so far, with those of the run that was resumed."""
        return len(self._steps)

    @property
    def num_committed(self) -> int:
        """Steps that are on disk for good: what a crash leaves."""
        return 0 if self._writer is None else self._writer.chunks[-1].last

    @property
    def steps(self) -> tuple[Step, ...]:
        """Size and batch of each step recorded so far."""
        return tuple(self._steps)

    def __enter__(self) -> "Recorder":
        """Start to listen to the optimizer."""
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; commit what was recorded, also after an error."""
        for hook in self._hooks:
            hook.remove()
        self._ended = True
        try:
            if kind is None:
                self._complete()
            if self._writer is not None and not self._writer.failed:  # a second try would only hide the first
                del self._steps[self._completed[0] :]  # a step whose iteration was left half done
                self._commit()
            if kind is None and self._pending:
                raise StepMismatchError(
                    "every recorder.batch() must be followed by optimizer.step(): "
                    f"the one of step {len(self._steps)} was not."
                )
            if kind is None:
                validate_frozen_state(self.net, self.model, self._last, self.X, len(self._steps))
                if self._writer is not None:
                    self._writer.finish()
        finally:
            if self._writer is not None:
                self._writer.close()

    def until(self, steps: int) -> Iterator[int]:
        """Loop over the steps that are still to be made, by their index.

        What the loop has done when it comes back for the next step is what a resumed run goes on from.

        Args:
            steps: Total number of steps of the run, with those already recorded.

        Raises:
            ValueError: More steps than that are recorded already.
        """
        validate_count(steps, "steps", minimum=0)
        if self.num_steps > steps:
            raise ValueError(f"steps must be at least the {self.num_steps} that are recorded already: got {steps}.")
        self._in_until = True
        try:
            while self.num_steps < steps:
                self._complete()
                yield self.num_steps
            self._complete()
        finally:
            self._in_until = False

    def batch(self, indices: Int64[Tensor, " B"] | Sequence[int] | None, *, weight: float = 1.0) -> None:
        """Announce a batch whose gradient the next `optimizer.step()` uses.

        Where gradients are accumulated over several backward passes, announce each of their batches.

        Args:
            indices: Rows of X that the batch held, each as often as it occurred; None for all of X.
            weight: Factor that the loop puts in front of this batch's loss, 1/k for the mean over k batches.

        Raises:
            TypeError: Indices that are no integers.
            ValueError: An empty batch, indices out of range, a weight that is not finite.
            UnexplainedStepError: The weights were changed since the last recorded step, or the network was switched to
                something random.
        """
        index = len(self._steps)
        if not self._hooks or self._ended:
            raise RuntimeError("recorder.batch() must be called inside 'with Recorder(...) as recorder:'.")
        if self._stateful and not self._in_until:
            raise RuntimeError(
                "with stateful= the loop must be 'for step in recorder.until(steps):': it is another one."
            )
        batch = None if indices is None else parse_batch(indices, len(self.X), index)
        if not math.isfinite(weight):
            raise ValueError(f"step {index}: the weight of a batch must be finite: got {weight}.")
        try:
            validate_layer_modes(self.net)
            learning_rate(self.optimizer)
        except ValueError as error:
            raise StepMismatchError(f"step {index}: {error}") from error
        if not torch.equal(self._weights(), self._last):
            raise StepMismatchError(
                f"step {index}: the weights must be those the last recorded step left: they were changed in between "
                "(an optimizer.step() outside the recorder's sight, or an edit)."
            )
        validate_frozen_state(self.net, self.model, self._last, self.X, index)
        self._pending.append((batch, weight))

    @property
    def trajectory(self) -> Trajectory:
        """The run recorded so far; from disk if it is there, and then without a step whose iteration still runs."""
        count = len(self._steps)
        states: Any = tuple(self._records[i].end for i in range(-1, count)) if self._writer is None else ()
        updates: Any = tuple(self._records[i].update for i in range(count)) if self._writer is None else ()
        digest = "" if self._writer is not None else self._records[count - 1].digest
        if self._writer is not None:
            if not self._ended:
                self._commit()
            chunks = tuple(self._writer.chunks)
            states = StoredStates(self._writer.path, self._writer.layout, chunks)
            updates = StoredUpdates(self._writer.path, self._writer.layout, chunks)
            count, digest = chunks[-1].last, chunks[-1].digest
        return Trajectory(
            model=self.model,
            inputs=self.X,
            targets=self.y,
            loss=self.loss,
            update_rule=self.update_rule.name,
            states=states,
            updates=updates,
            steps=tuple(self._steps[:count]),
            num_outputs=self.num_outputs,
            digest=digest,
            data_digest=self.data_digest,
        )

    @property
    def _last(self) -> Tensor:
        return self._records[len(self._steps) - 1].end

    def _weights(self) -> Tensor:
        return self.model.flatten(dict(self.net.named_parameters()))

    def _about_writing(self) -> dict[str, Any]:
        return {"compression": self._storage.compression, "check_every": self.check_every}

    def _go_on(self, path: str | os.PathLike[str], header: dict[str, Any]) -> None:
        """Bring everything to where the run's last commit left it."""
        found, self._writer = resume_run(
            path, header | self._about_writing(), self.net, self.optimizer, self.loss, self._stateful, self._momentum
        )
        self.model, self._steps = functionalize(self.net, self.model.names), list(found.steps)
        end = found.states[found.num_steps].to(self.X.device)
        self._records = {found.num_steps - 1: _Record(end, None, found.digest)}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        parameters = dict(self.net.named_parameters())
        states = {name: optimizer.state.get(parameters[name], {}) for name in self.model.names}
        self._fresh = {name for name, state in states.items() if all(value is None for value in state.values())}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        index = len(self._steps)
        if not self._pending:
            raise StepMismatchError(
                f"step {index}: optimizer.step() must be preceded by recorder.batch(indices): it was not."
            )
        announced, self._pending = self._pending, []
        start, end = self._last, self._weights()
        if not torch.isfinite(end).all():
            raise StepMismatchError(
                f"step {index}: the weights must stay finite: training diverged (NaN or infinity). "
                "Lower the learning rate."
            )
        try:
            step = join_batches(index, learning_rate(self.optimizer), announced, self.loss, self.y)
        except ValueError as error:
            raise StepMismatchError(f"step {index}: {error}") from error
        net, model, update_rule, parameters = self.net, self.model, self.update_rule, dict(self.net.named_parameters())
        update = read_coefficients(parameters, model, optimizer, update_rule, self._fresh)
        if _is_replayed(index, self.check_every):
            replay, factor = recompute_gradient(parameters, model, start, step, (self.X, self.y), self.loss, self.clip)
            update, self._momentum = check_against_exact_gradient(
                net, model, update_rule, replay, update, factor, end, self._momentum, index
            )
        else:
            self._momentum = check_against_used_gradient(
                parameters, model, update_rule, start, update, end, self._momentum, index
            )
        digest = fingerprint_step(self._records[index - 1].digest, step, update, end)
        put = self._shelf.put
        self._records[index] = _Record(put(end), UpdateCoefficients(*map(put, update)), digest)
        self._steps.append(step if step.batch is None else replace(step, batch=put(step.batch)))  # now it counts
        if not self._in_until:
            self._complete()

    def _complete(self) -> None:
        """Note what the run goes on from after the steps so far, and commit them if it is time."""
        if self._writer is None:
            return
        self._completed = (len(self._steps), capture_training_state(self.optimizer, self._stateful, self._momentum))
        waiting = len(self._steps) - self._writer.chunks[-1].last
        if not waiting:
            return
        record, limits = self._records[len(self._steps) - 1], self._storage
        diagonals = sum(v.nbytes for v in record.update or () if len(v) != len(self.model.sizes))
        if (
            waiting * (record.end.nbytes + diagonals) >= limits.chunk_bytes
            or time.monotonic() - self._committed_at >= limits.seconds
            or (limits.steps is not None and waiting >= limits.steps)
        ):
            self._commit()

    def _commit(self) -> None:
        """Write the completed steps that are not on disk, and forget what is."""
        if self._writer is None:
            return
        first, (count, kept) = self._writer.chunks[-1].last, self._completed
        records = [self._records[i] for i in range(first, count)]
        if records:
            states, updates = [r.end for r in records], [r.update for r in records if r.update is not None]
            self._writer.append(states, self._steps[first:count], updates, records[-1].digest, kept)
        self._committed_at = time.monotonic()
        # the last completed step's stays: if the one after it is given up, it is the last of all
        kept_from = min(len(self._steps), self._completed[0], self._writer.chunks[-1].last) - 1
        for index in [i for i in self._records if i < kept_from]:
            del self._records[index]


def _is_replayed(index: int, every: int) -> bool:
    """Choose one step of each `every` consecutive ones: the first of all, then one that only a hash could foresee."""
    block, place = divmod(index, every)
    chosen = int.from_bytes(hashlib.blake2b(str(block).encode(), digest_size=8).digest()) % every if block else 0
    return place == chosen
