"""The recorder: records each step of the user's own training loop."""

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from epk_gp.core.checks import blocks_of, door, validate_count
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import CrossEntropy, Loss, as_loss
from epk_gp.core.model import functionalize_like, uncompiled
from epk_gp.core.show import warn_caller
from epk_gp.core.step import LiveNetwork, Move, Step, fingerprint_data, fingerprint_start
from epk_gp.core.trajectory import Trajectory
from epk_gp.optimizers.library_rules import NoOptimizer
from epk_gp.optimizers.torch_rules import Optimizers, Rules, as_optimizers, given_rules, groups_of
from epk_gp.optimizers.update_rules import Clip
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.distributed import OTHER_RANKS, Ranks
from epk_gp.recording.history import CommitSchedule, Held, RunHistory
from epk_gp.recording.observer import StepObserver
from epk_gp.recording.seen import MadeStep
from epk_gp.recording.setup import make_setup
from epk_gp.recording.stretch import MOST_BYTES, Stretch, errors_of_step
from epk_gp.storage.chunks import with_computed_states
from epk_gp.storage.files import map_tensors
from epk_gp.storage.rows import Targets, TrainingInputs, num_seen
from epk_gp.storage.run import is_run, resume_run
from epk_gp.storage.schema import DATA
from epk_gp.storage.training_state import StatefulObjects, TrainingState, validate_resumable, validate_stateful
from epk_gp.storage.writer import Storage, create_run, thinning_header


class Recorder:
    """Record the steps of the user's own training loop.

    Use it as a context manager; call `batch(indices)` after `backward()` and before `optimizer.step()`. Hooks record
    everything that a forward pass depended on (dropout, batch statistics, augmented rows). Steps are checked
    (`check_every`): the recorded change of the weights must be the one that the update rule predicts from the
    recomputed gradient of the batch. Otherwise `StepMismatchError` is raised, which names the likely cause; the earlier
    steps stay recorded. For rows whose loss is not the stated one, the gradient of the loop's loss is recorded.

    With `folder` and `resume`, the loop `for step in recorder.until(steps):` continues after the last commit.

    Attributes:
        net: The network.
        optimizer: Its optimizer.
        loss: The loss.
        signature: The network's call, and the map from its result to outputs.
    """

    @door
    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizers | None,
        X: TrainingInputs,
        y: Targets = None,
        *,
        loss: Loss | nn.Module | None = CrossEntropy(),
        update_rule: Rules = None,
        clip: Clip | None = None,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        stateful: StatefulObjects | None = None,
        storage: Storage = Storage(),
        check_every: int | None = None,
        unexplained: float | None = None,
        trained: Collection[str] = (),
        output: Callable[[Any], Tensor] | None = None,
        ddp: nn.parallel.DistributedDataParallel | None = None,
    ) -> None:
        """Check everything that can be checked before training starts.

        Args:
            net: The network; X and y must be on its device.
            optimizer: Its optimizer, or several. The weights in them are recorded. None for a loop that moves the
                weights itself, p -= lr * p.grad: call `batch` right before.
            X: All M training inputs: a tensor, or a tuple or dict of tensors with the same first dimension, called as
                net(*X) or net(**X); or a `Graph`, whose nodes are the points. NumPy arrays and memory maps, a map-style
                dataset, or a `DataLoader` over one are read once, in order, and written to a file.
            y: Their targets, a tensor or an array. None if no loss is stated and nothing else needs targets, and if the
                items of a dataset are pairs (input, target), or dictionaries with `labels`; or the targets' key in
                them.
            loss: The minimised loss, as a function of a row's outputs and target. For rows that do not follow it, the
                gradient that the loop's backward pass sends into the outputs is recorded. This is enough for
                contributions; `influence` and `retrain` need all rows to follow the loss. None states no loss, and y
                may be None.
            update_rule: The rule by which the optimizer's step follows from the gradient; known for all optimizers of
                torch that take one gradient per step. For several optimizers a sequence, with None for torch's own.
            clip: The loop's gradient clipping, for `influence` and `retrain`: the recorder can find a bound of the
                2-norm or of the entries itself after two clipped steps. Changes of a gradient are recorded without this
                argument.
            folder: New folder for the run; it is kept in memory if None.
            resume: Continue the run in `folder`, if there is one, from its last commit: network, optimizer, torch's CPU
                generator and the objects in `stateful` get the state that they had there. Python's and NumPy's random
                states are not stored.
            stateful: Objects by name whose state is stored with the run: the loop's `torch.Generator`, and any object
                with `state_dict` and `load_state_dict`, such as schedulers and samplers. The loop must then be `for
                step in recorder.until(steps):`.
            storage: The states that a run on disk keeps, their form, and the times of commits.
            check_every: Recompute the gradient of one step out of this many (a hash chooses the step, the same in every
                run). For all steps the rows, the output gradients, the changes to the gradient and the update rule's
                step are compared. None recomputes the first three steps and the last, and as many others as take 5 % of
                the time. `reconstruct` and `attribute` check all of them.
            unexplained: Share of a step, by its norm, that update rule and loss need not explain: it becomes a separate
                term in every result. None refuses steps that they do not explain up to rounding.
            trained: Names of parameters that are trained later but that no optimizer holds yet. Frozen parameters in an
                optimizer are recorded too, unless they are more than the trained ones and more than 2^20 weights.
            output: Maps the network's result to the outputs (n, C) to explain, if the result has another form, such as
                `lambda returned: returned.logits`.
            ddp: The wrapper of several processes, if it holds `net` inside a larger module.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: Data, targets, network or optimizer cannot be recorded, or differ from those of the resumed run;
                the message says what to do.
            FileExistsError: `folder` already holds something.
            BlockingIOError: Another process records there.
            OSError: The folder cannot be written.
        """
        loss, called, net = as_loss(loss), net, uncompiled(net)
        if optimizer is None and isinstance(net, nn.Module):
            optimizer = NoOptimizer(net)
        stateful = {} if stateful is None else stateful
        if check_every is not None:
            validate_count(check_every, "check_every")
        self._ranks = Ranks(net, optimizer, ddp)
        called = called if self._ranks.net is net else self._ranks.net  # a wrapper changes buffers before a call
        net = self._ranks.net
        setup = make_setup(
            net, optimizer, X, y, loss, update_rule, clip=clip, unexplained=unexplained, trained=trained,
            output=output, folder=folder if self._ranks.is_writer else None,
        )  # fmt: skip
        validate_stateful(stateful)
        self._optimizers = as_optimizers(optimizer)
        if resume:
            validate_resumable(self._optimizers, stateful, folder)
        self.signature = setup.model.signature
        self.net, self.optimizer, self.loss = net, optimizer, loss
        header, start = setup.header() | thinning_header(storage, folder, setup.momentum), setup.weights()
        self._data_digest: str = header["data_digest"]
        self._num_examples = len(setup.X)  # for a stream
        rules, names = given_rules(self._optimizers, update_rule), {id(p): name for name, p in net.named_parameters()}
        self._groups = tuple(group for rule, own in rules for group in groups_of(own, rule, names))
        digest = fingerprint_start(header, setup.model, setup.fingerprint, start, setup.statistics(), setup.momentum)
        self._history = RunHistory(start, digest, (), setup.statistics())
        optimizers, objects, momentum = self._optimizers, stateful, torch.zeros_like(start)
        momentum = momentum if setup.momentum is None else setup.momentum.clone()
        if not self._ranks.is_writer:  # the writing rank keeps everything that is equal on all ranks
            optimizers, momentum = (), momentum[:0]
        elif self._ranks.size > 1:
            objects = {**stateful, OTHER_RANKS: self._ranks}
        self._training = TrainingState(optimizers, objects, momentum, net, self._groups)
        self._needs_until = bool(stateful)
        self._commits: CommitSchedule | None = None  # None if the run is kept in memory
        self._restored: tuple[Move, Held] | None = None  # a move to the earlier state that the network has at the end
        self._setup = setup
        if self._ranks.size > 1 and setup.stream is not None:
            raise ValueError("a Stream must be recorded by one process, which numbers its rows: pass a data set as X.")
        if folder is not None:
            header |= {"check_every": check_every, "modules": [name for name, _ in net.named_modules()]} | setup.base()
        with self._ranks.together():
            if self._ranks.size > 1:
                self._ranks.validate(self._data_digest)
            if folder is not None and self._ranks.is_writer:
                self._open(folder, header, storage, resume)
        if folder is not None and self._ranks.size > 1:
            steps = self._ranks.restore(self._optimizers, self._training, self._history.steps)
            if not self._ranks.is_writer:
                self._setup = replace(setup, model=functionalize_like(setup.model, net))
                self._history = RunHistory(self._setup.weights(), "", steps, self._setup.statistics())
        changed = (step.groups for step in reversed(self._history.steps) if step.groups is not None)
        groups = next(changed, tuple(group.of_scale() for group in self._groups))
        self._observer = StepObserver(self._setup, rules, groups, lambda: self._stretch.last.end, self._report, called)
        self._is_recording = self._is_closed = False  # inside the `with` statement; after it, when the folder is free
        self._in_until = False  # whether the loop is `for step in recorder.until(steps)`, marks ends of iterations
        waits = setup.stream is None and storage.keep_every == 1 and storage.chunk_bytes >= MOST_BYTES
        self._stretch = Stretch(
            self._setup, self._ranks, self._history, self._training, self._commits, start, check_every, may_wait=waits
        )

    def _open(self, folder: str | os.PathLike[str], header: dict[str, Any], storage: Storage, resume: bool) -> None:
        """Create the run's folder; or, to resume its run, restore the last commit."""
        setup, history, training = self._setup, self._history, self._training
        if resume and is_run(folder):
            recorded, writer = resume_run(folder, header, self.net, self.loss, training, output=self.signature.output)
            model, momentum = functionalize_like(setup.model, self.net), recorded.momentum
            self._setup = replace(setup, model=model, momentum=momentum)
            end = recorded.states[recorded.num_steps].to(setup.y.device)
            self._history = RunHistory(end, recorded.digest, recorded.steps, self._setup.statistics())
            samples = self._history.samples
            for state in (0, *(step + 1 for step in recorded.moves)):  # possible anchors of later moves
                samples.rows[state] = recorded.states[state].to(end)[samples.places]
            if setup.stream is not None:
                for X, y in blocks_of(recorded.inputs, recorded.targets):
                    self._setup.number(X, y, setup.stream)
        else:
            last, digest = history.last, history.digest(0)
            writer = create_run(folder, header, setup.data(), training, last.end, digest, statistics=last.statistics)
        if setup.is_mapped:  # the temporary files are not needed any more
            data = map_tensors(Path(folder) / DATA)
            self._setup = replace(self._setup, X=data["inputs"], y=data["targets"])
        self._commits = CommitSchedule(writer, storage, self._history, training, self._setup if setup.stream else None)

    @property
    def X(self) -> Inputs:  # noqa: N802  # named like the argument
        """A copy of the training inputs, in the structure of the network's call."""
        graph = self.signature.graph
        return self.signature.structure(self._setup.X) if graph is None else graph.graph

    @property
    def y(self) -> Shaped[Tensor, "M ..."]:
        """A copy of their targets."""
        return self._setup.y

    def rows(self, batch: Int64[Tensor, " B"] | None) -> tuple[Shaped[Tensor, "B ..."], Shaped[Tensor, "B ..."]]:
        """Return inputs, packed, and targets of some points; None for all points."""
        X, y = self._setup.X, self._setup.y
        return (X, y) if batch is None else (X[batch], y[batch])

    @property
    def num_steps(self) -> int:
        """Number of steps recorded so far, including those of a resumed run."""
        return self._stretch.num_steps

    @property
    def num_committed(self) -> int:
        """Number of steps on disk, which survive a crash."""
        return 0 if self._commits is None else self._commits.num_committed

    @property
    def num_checked(self) -> int:
        """Number of steps whose gradient was recomputed by this recorder."""
        return self._stretch.schedule.num_checked

    @property
    def steps(self) -> tuple[Step, ...]:
        """Learning rate and batch of each step recorded so far."""
        self._stretch.record()
        return tuple(self._history.steps)

    def __enter__(self) -> "Recorder":
        """Start to observe the network and its optimizers."""
        self._observer.start()
        self._is_recording = not self._is_closed  # a closed recorder stays closed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Stop observing the optimizer, and commit the recorded steps, also after an error."""
        self._observer.stop()
        if self._is_closed:
            return
        self._is_recording, self._is_closed = False, True
        try:
            try:
                if kind is None:
                    self._observer.complete()
                with nullcontext() if kind is None else suppress(StepMismatchError):  # it would hide the error
                    self._stretch.record()
                if kind is None:
                    if not self._stretch.has_refused and self._setup.has_all_weights():
                        self._follow_present(is_end=True)
                    self._complete_iteration()
            finally:
                # a second failure would hide the first
                if self._commits is not None and not self._commits.writer.failed:
                    self._commits.commit_completed_only()
            if kind is None:
                with self._ranks.together():
                    self._finish()
        finally:
            self._history.close()
            if self._commits is not None:
                self._commits.writer.close()

    def until(self, steps: int) -> Iterator[int]:
        """Iterate over the numbers of the remaining steps.

        An iteration is complete when the loop requests the next step; a resumed run continues after a complete one.

        Args:
            steps: Total number of steps of the run, including recorded ones.

        Raises:
            ValueError: More steps are already recorded.
        """
        validate_count(steps, "steps", minimum=0)
        if self.num_steps > steps:
            raise ValueError(f"steps must be at least the {self.num_steps} that are recorded already: got {steps}.")
        self._in_until = True
        try:
            while True:
                self._complete_iteration()
                if self.num_steps == steps:
                    return
                yield self.num_steps
                self._observer.complete()
                self._setup.validate_modules()
                self._follow_present()
        finally:
            self._in_until = False

    def batch(
        self,
        indices: Int64[Tensor, " B"] | Sequence[int] | None = None,
        *,
        weight: float | Float[Tensor, " B"] | None = 1.0,
        targets: Shaped[Tensor, "B ..."] | None = None,
    ) -> None:
        """Announce, after its backward pass, a batch whose gradient the next `optimizer.step()` uses.

        If gradients are accumulated over several backward passes, announce each batch. The rows as the network saw them
        (augmented rows, mixed targets, random numbers) are recorded.

        Args:
            indices: Rows of X in the batch, repeated as they occurred; an empty list if a sampler drew none; None for
                all of X. With loss=None, -1 stands for a row that is not a training point, such as a generated one.
            weight: Factor of this batch's loss, or of each row's loss, in the loop. A common factor of all rows of all
                steps is found without being stated. None reads any factor, also for a batch of one row, and changing
                ones: it must not depend on the weights. With loss=None the gradient already contains it: leave `weight`
                out, except for 1 / scaler.get_scale() with a GradScaler.
            targets: Targets of the loop's loss that replace y[indices], in the form of y, or probabilities (B, C) for
                labels. For a `Stream` the targets of the rows, instead of indices; None with loss=None.

        Raises:
            RuntimeError: The recorder is not recording, or the loop has to be one over `until` and is not.
            TypeError: The indices are not integers.
            ValueError: An index is out of range, or the weight is not finite; or the batch is empty with loss=None.
            StepMismatchError: The weights were changed since the last recorded step.
        """
        if not self._is_recording:
            raise RuntimeError("recorder.batch() must be called inside 'with Recorder(...) as recorder:'.")
        if self._needs_until and not self._in_until:
            raise RuntimeError("with stateful= the loop must be 'for step in recorder.until(steps):': it is another.")
        self._observer.complete()
        index, last = self.num_steps, self._stretch.last.end
        self._observer.announce(indices, weight, index, targets)
        with errors_of_step(lambda: index):
            self._setup.validate_modules()
            if not self._observer.is_unmoved and not self._setup.is_at(last):
                last = self._moved_from(index)
            self._setup.validate_frozen_state(last)
        if self._commits is not None and not self._in_until:
            self._stretch.record_if_due()
            self._commits.commit_if_due()

    def _moved_from(self, index: int) -> Float[Tensor, " P"]:
        """Record the loop's move before step `index`, and return the weights after it.

        Raises:
            StepMismatchError: The weights were changed in another way.
        """
        self._stretch.record()
        self._follow_move(*self._observer.first_state(), is_end=False)
        last, other = self._history.last.end, self._observer.other_optimizer
        if not self._setup.is_at(last) and (other or not self._observer.has_moved_between_passes):
            is_on_disk = 0 < index == self.num_committed
            hint = " The last step is on disk: read recorder.trajectory after such a move." * is_on_disk
            raise StepMismatchError(
                other
                or "the weights must be those the last recorded step left, or on the way from there to an earlier "
                "recorded state (Lookahead, a restored checkpoint): they were changed in between (an optimizer.step() "
                f"outside the recorder's sight, forward() itself, or an edit).{hint}"
            )
        return last

    def _follow_present(self, *, is_end: bool = False) -> None:
        """Record the move to the present weights, if there was one, or a change of moving statistics alone."""
        if not self._setup.is_at(self._stretch.last.end):
            self._stretch.record()
            self._follow_move(self._setup.weights(), self._setup.statistics(), is_end=is_end)
        elif self._ranks.is_writer and self.num_steps > self.num_committed and self._setup.model.statistics:
            with suppress(StepMismatchError):  # an edit raises an error at the next step, or at the end
                statistics = self._observer.statistics()
                self._stretch.record()
                self._history.move_statistics(statistics)

    def _follow_move(self, w: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None, *, is_end: bool) -> None:
        """Record a move of the weights since the last step, without a gradient, if it leads towards a recorded state.

        At the end of the recording, a return to an earlier state is not recorded: the run up to that state is more
        useful.
        """
        history = self._history
        if not self._ranks.is_writer:
            if history.steps and not torch.equal(w, history.last.end):  # rank 0 identifies the move
                history.follow(history.steps.pop(), w, statistics)
                self._observer.take_up(w, statistics)
        elif history.num_steps > self.num_committed:
            found = history.find_move(w, self._setup.model.sizes, self._recorded)
            if found is not None and is_end and found[0].share == 1.0:
                self._restored = found
            elif found is not None:
                statistics = history.move(*found, w, statistics)
                self._observer.take_up(w, statistics)

    @property
    @door
    def trajectory(self) -> Trajectory:
        """The run recorded so far.

        For a run on disk it holds the completed iterations, which are committed first. Further steps do not change it.

        Raises:
            RuntimeError: This process is not rank 0 of the training, which has the run.
        """
        if not self._ranks.is_writer:
            raise RuntimeError(f"the run must be asked for on rank 0, which writes it: got rank {self._ranks.rank}.")
        if self._is_recording:
            self._observer.complete()
            self._stretch.record()
        if self._commits is not None and not self._is_closed:
            self._commits.commit()
        return self._recorded()

    def _recorded(self) -> Trajectory:
        """Return the run in memory, or the part that is on disk."""
        setup, history, commits = self._setup, self._history, self._commits
        states, updates, statistics, digests = (history if commits is None else commits).recorded()
        steps, X, y, data_digest = tuple(history.steps[: len(updates)]), setup.X, setup.y, self._data_digest
        if setup.stream is not None:
            X, y = (values[: num_seen(steps, self._num_examples)] for values in (X, y))
            data_digest = fingerprint_data(X, y)
        trajectory = Trajectory(
            model=setup.model,
            inputs=X,
            targets=y,
            loss=self.loss,
            update_rule=setup.update_rule.name,
            states=states,
            updates=updates,
            steps=steps,
            num_outputs=setup.fingerprint.shape[1],
            digest=digests[-1],
            data_digest=data_digest,
            statistics=statistics,
            unexplained=setup.unexplained,
            optimizer_groups=self._groups,
            clip=setup.clip,
            momentum=setup.momentum,
            digests=digests if len(digests) > len(updates) else (),
            live=LiveNetwork(weakref.ref(setup.net), history.samples),
        )
        return with_computed_states(trajectory)

    def _report(self, made: MadeStep) -> None:
        """Take a step of the optimizers; it is checked and recorded at once, or together with others."""
        self._stretch.take(made, self._observer.statistics)
        if not self._ranks.is_writer:
            batch = torch.cat([torch.zeros(0, dtype=torch.int64), *(batch.samples for batch in made.announced)])
            step = Step(self.num_steps, made.lr, batch)
            self._history.follow(step, self._setup.weights(), self._setup.statistics())
        if not self._in_until:  # committed with the next step, as the loop may move the weights before it
            self._complete_iteration(commits=False)

    def _complete_iteration(self, *, commits: bool = True) -> None:
        """Store the training state if the run is on disk, and commit steps if due."""
        if self._ranks.size > 1:
            self._ranks.complete_iteration(self._training)
        if self._commits is None:
            return
        self._stretch.complete_iteration(self._training.snapshot())
        if commits:
            self._commits.commit_if_due()

    def _finish(self) -> None:
        """Check the end of the recording, and write the closing record of the run.

        Raises:
            StepMismatchError: A batch was announced without its step; weights, frozen state or forward function are not
                those of the last step any more; or the last step's gradient is not that of the stated loss.
        """
        if self._observer.num_announced:
            made = f"the one of step {self.num_steps} was not. {self._observer.other_optimizer}".rstrip()
            raise StepMismatchError(f"every recorder.batch() must be followed by optimizer.step(): {made}")
        if not self._stretch.has_refused:
            end, statistics = self._history.last.end, self._history.last.statistics
            if self._restored is not None:
                move, (end, statistics) = self._restored
                number, present = move.anchor, self._setup.statistics()
                if present is not None and statistics is not None and not torch.equal(present, statistics):
                    raise StepMismatchError(
                        f"weights that are restored must come with their moving statistics: those at the end are of "
                        f"step {number}, the statistics are not. Restore both (load_state_dict), or neither, inside "
                        f"the 'with' statement. The {self.num_steps} recorded steps are kept."
                    )
                warn_caller(
                    f"the weights at the end of the recording are those after step {number} of {self.num_steps}: "
                    f"recorder.trajectory.until({number}) explains them."
                )
            self._setup.validate_end(end, statistics, self.num_steps)
        if not self._ranks.is_writer:
            return
        self._stretch.finish()
        if self._commits is not None:
            self._commits.writer.mark_complete()


class RunOfCallback:
    """The run of a callback, which begins with the training."""

    _recorder: Any = None  # the `Recorder`, once the training has begun
    _begins = "trainer.fit"

    @property
    def trajectory(self) -> Trajectory:
        """The run recorded so far.

        Raises:
            RuntimeError: The training has not started.
        """
        if self._recorder is None:
            raise RuntimeError(f"there must be a run: training has not started. Call {self._begins} first.")
        trajectory: Trajectory = self._recorder.trajectory
        return trajectory
