"""Record a training run in one's own loop."""

import hashlib
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.recording import store
from epk_gp.recording.clipping import Clip, check_clip, clip_factor
from epk_gp.recording.diagnosis import (
    Replay,
    UnexplainedStepError,
    batch_gradient,
    explain_mismatch,
    explained,
    step_tolerance,
)
from epk_gp.recording.losses import (
    CrossEntropy,
    Loss,
    as_loss,
    check_targets,
    refuse_coupled_losses,
    refuse_mistaken_outputs,
    sample_weights,
)
from epk_gp.recording.networks import (
    Skeleton,
    call,
    constants_of,
    flatten,
    refuse_random_or_coupled_layers,
    refuse_random_or_coupled_outputs,
    skeleton_of,
    unflatten,
)
from epk_gp.recording.optimizers import (
    SKIPPED,
    LinearStep,
    StepLaw,
    Update,
    join_steps,
    law_of,
    learning_rate,
    predict_step,
    refuse_momentum,
    with_factor,
)
from epk_gp.recording.store import RunWriter, Step
from epk_gp.recording.trajectory import (
    NUM_PROBES,
    StoredStates,
    StoredUpdates,
    Trajectory,
    check_finite,
    digest_data,
    header_of,
    off_initial,
    probe_outputs,
)

CHUNK_BYTES = 16 << 20


class Recorder:
    """Record the steps of one's own training loop.

    Use it as a context manager; call `batch(indices)` after `backward()` and before `optimizer.step()`. Every step is
    replayed: the recorded change of the weights must be the step law's prediction from the gradient, recomputed, of the
    stated loss on the stated batch. A step that is not raises `UnexplainedStepError`, which names the cause as far as
    it can tell; the steps before it stay recorded.

    Attributes:
        num_steps: Steps recorded so far.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        X: Shaped[Tensor, "M ..."],
        y: Shaped[Tensor, "M ..."],
        *,
        loss: Loss | nn.Module = CrossEntropy(),  # noqa: B008  # a frozen value
        law: StepLaw | None = None,
        clip: Clip | None = None,
        path: str | os.PathLike[str] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Check everything that can be checked before training starts.

        Args:
            net: The network; X and y must be on its device.
            optimizer: Its optimizer. The weights recorded are those it trains.
            X: All M training inputs.
            y: Their targets.
            loss: The loss that will be minimised.
            law: How the optimizer steps; known for torch's SGD, Adam, AdamW, RMSprop and Adagrad.
            clip: The gradient clipping that the loop does before each step.
            path: New folder for the run; kept in memory if None.
            chunk_bytes: Weights are committed to disk in chunks of about this size.

        Raises:
            TypeError: Wrong kinds of arguments.
            ValueError: Data, targets, network or optimizer that cannot be recorded; the message says what to do.
            FileExistsError: `path` already holds something.
        """
        self.net, self.optimizer, self.loss = net, optimizer, as_loss(loss)
        self.law = law_of(optimizer) if law is None else law
        refuse_momentum(optimizer)
        learning_rate(optimizer)
        check_clip(clip)
        self.clip = clip
        self.skeleton = skeleton_of(net, _trained_names(net, optimizer))
        self.X, self.y = _checked_data(X, y)
        refuse_random_or_coupled_layers(net)
        start = self._weights()
        for name, value in unflatten(self.skeleton, start).items():
            check_finite(value.reshape(1, -1), f"the initial weights of {name!r}", "Initialise them again.")
        probe = _first_outputs(self.skeleton, start, self.X)
        check_targets(self.loss, self.y, len(self.X), probe.shape[1])
        refuse_mistaken_outputs(self.loss, probe)
        refuse_coupled_losses(self.loss, probe, self.y[: len(probe)])
        self.num_outputs, self.data_digest = probe.shape[1], digest_data(self.X, self.y)
        self.steps: list[Step] = []
        self._states: list[Tensor] = [start]
        self._last = start
        self._updates: list[Update] = []
        self._momentum = torch.zeros_like(start)
        self._pending: list[tuple[Tensor | None, float]] = []
        self._fresh: set[str] = set()
        self._hasher = hashlib.blake2b(digest_size=16)
        header = header_of(self.skeleton, self.loss, self.law.name, self.data_digest, self.num_outputs)
        self._hasher.update(repr(header).encode())
        for value in (*constants_of(self.skeleton).values(), probe, start):  # the probe stands for the forward function
            self._hasher.update(_bytes(value))
        self._chunk_bytes = chunk_bytes
        self._unwritten: list[Step] = []
        self._writer = None if path is None else self._create(path, header, probe)
        self._hooks: list[Any] = []
        self._closed = False

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        return len(self.steps)

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
        self._closed = True
        if self._writer is not None:
            self._commit()
        if kind is None and self._pending:
            raise UnexplainedStepError(
                "every recorder.batch() must be followed by optimizer.step(): "
                f"the one of step {len(self.steps)} was not."
            )
        if kind is None:
            self._check_constants(len(self.steps))

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
        index = len(self.steps)
        if not self._hooks or self._closed:
            raise RuntimeError("recorder.batch() must be called inside 'with Recorder(...) as recorder:'.")
        batch = None if indices is None else _checked_batch(indices, len(self.X), index)
        if not math.isfinite(weight):
            raise ValueError(f"step {index}: the weight of a batch must be finite: got {weight}.")
        try:
            refuse_random_or_coupled_layers(self.net)
            learning_rate(self.optimizer)
        except ValueError as error:
            raise UnexplainedStepError(f"step {index}: {error}") from error
        if not torch.equal(self._weights(), self._last):
            raise UnexplainedStepError(
                f"step {index}: the weights must be those the last recorded step left: they were changed in between "
                "(an optimizer.step() outside the recorder's sight, or an edit)."
            )
        self._check_constants(index)
        self._pending.append((batch, weight))

    @property
    def trajectory(self) -> Trajectory:
        """The run recorded so far; from disk if it is there."""
        states: Any = tuple(self._states)
        updates: Any = tuple(self._updates)
        if self._writer is not None:
            self._commit()
            states = StoredStates(self._writer.path, tuple(self._writer.chunks))
            updates = StoredUpdates(self._writer.path, tuple(self._writer.chunks))
        return Trajectory(
            skeleton=self.skeleton,
            inputs=self.X,
            targets=self.y,
            loss=self.loss,
            law=self.law.name,
            states=states,
            updates=updates,
            steps=tuple(self.steps),
            num_outputs=self.num_outputs,
            digest=self._hasher.hexdigest(),
            data_digest=self.data_digest,
        )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.skeleton.sizes

    def _weights(self) -> Tensor:
        return flatten(self.skeleton, dict(self.net.named_parameters()))

    def _check_constants(self, index: int) -> None:
        now = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        changed = {
            name: now[name].detach()
            for name, value in constants_of(self.skeleton).items()
            if not torch.equal(now[name], value)
        }
        if changed and self._matters(changed):
            raise UnexplainedStepError(
                f"step {index}: buffers and frozen parameters must stay as they were when recording began: "
                f"{next(iter(changed))!r} changed."
            )

    def _matters(self, changed: dict[str, Tensor]) -> bool:
        """Whether outputs depend on constants that changed; a counter of calls, say, does not matter."""
        weights, rows = unflatten(self.skeleton, off_initial(self._last)), self.X[:NUM_PROBES]
        with torch.no_grad():
            before, after = call(self.skeleton, weights, rows), call(self.skeleton, {**weights, **changed}, rows)
        return not torch.equal(before, after)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        parameters = dict(self.net.named_parameters())
        states = {name: optimizer.state.get(parameters[name], {}) for name in self.skeleton.names}
        self._fresh = {name for name, state in states.items() if all(value is None for value in state.values())}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        index = len(self.steps)
        if not self._pending:
            raise UnexplainedStepError(
                f"step {index}: optimizer.step() must be preceded by recorder.batch(indices): it was not."
            )
        announced, self._pending = self._pending, []
        start, end = self._last, self._weights()
        if not torch.isfinite(end).all():
            raise UnexplainedStepError(
                f"step {index}: the weights must stay finite: training diverged (NaN or infinity). "
                "Lower the learning rate."
            )
        try:
            step = self._step(index, announced)
        except ValueError as error:
            raise UnexplainedStepError(f"step {index}: {error}") from error
        replay, update, factor = self._replay(step, start)
        predicted, momentum = predict_step(update, self._sizes, start, replay.clipped, self._momentum)
        moved, _ = predict_step(update, self._sizes, start, replay.used, self._momentum)
        tolerance = step_tolerance(start, predicted)
        difference = float((end - start - predicted).abs().max())
        lawful = float((end - start - moved).abs().max()) <= step_tolerance(start, moved)
        if not (difference <= tolerance or (lawful and explained(self.skeleton, replay))):
            cause = explain_mismatch(self.net, self.skeleton, replay)
            raise UnexplainedStepError(
                f"step {index}: the change of the weights must be {self.law.name}'s step on the gradient of "
                f"{self.loss} on the given batch: it differs by {difference:.2e} (largest predicted change "
                f"{float(predicted.abs().max()):.2e}). Likely cause: {cause}."
            )
        self._momentum = momentum
        self._take(step, with_factor(update, factor, self._sizes), end)

    def _step(self, index: int, announced: list[tuple[Tensor | None, float]]) -> Step:
        """Join the announced batches to one step."""
        size = learning_rate(self.optimizer)
        every = torch.arange(len(self.X))
        batches = [every if batch is None else batch for batch, _ in announced]
        weights = [
            weight * sample_weights(self.loss, self.y[batch.to(self.y.device)]).cpu()
            for batch, (_, weight) in zip(batches, announced, strict=True)
        ]
        if len(announced) == 1 and announced[0][1] == 1:
            return Step(index, size, announced[0][0])
        return Step(index, size, torch.cat([batch.cpu() for batch in batches]), torch.cat(weights))

    def _replay(self, step: Step, start: Tensor) -> tuple[Replay, Update, float | Tensor]:
        """Recompute a step's gradient and its clipping, and read the optimizer's own and its numbers."""
        rows = slice(None) if step.batch is None else step.batch
        X, y = self.X[rows], self.y[rows]
        c = sample_weights(self.loss, y) if step.sample_weights is None else step.sample_weights.to(start)
        gradient = batch_gradient(self.skeleton, start, X, y, self.loss, c)
        parameters = dict(self.net.named_parameters())
        for name, part in unflatten(self.skeleton, gradient).items():
            if parameters[name].grad is None:  # frozen for this step: torch neither clips nor moves it
                part.zero_()
        factor = clip_factor(self.clip, gradient)
        used = {name: _dense_gradient(parameters[name]) for name in self.skeleton.names}
        replay = Replay(
            start=start,
            used=flatten(self.skeleton, used),
            gradient=gradient,
            clipped=gradient * factor,
            X=X,
            y=y,
            c=c,
            loss=self.loss,
        )
        linear = [self._linear_step(parameters[name], name) for name in self.skeleton.names]
        return replay, join_steps(linear, self._sizes), factor

    def _linear_step(self, parameter: nn.Parameter, name: str) -> LinearStep:
        if parameter.grad is None:
            return SKIPPED
        group = next(g for g in self.optimizer.param_groups if any(parameter is p for p in g["params"]))
        return self.law.coefficients(parameter, group, self.optimizer.state.get(parameter, {}), name in self._fresh)

    def _take(self, step: Step, update: Update, end: Tensor) -> None:
        """Take a verified step into the record."""
        self.steps.append(step)
        self._last = end
        self._hasher.update(repr(step.size).encode())
        self._hasher.update(b"all" if step.batch is None else _bytes(step.batch))
        if step.sample_weights is not None:
            self._hasher.update(_bytes(step.sample_weights))
        for value in update:
            self._hasher.update(_bytes(value))
        self._hasher.update(_bytes(end))
        self._states.append(end)
        self._updates.append(update)
        if self._writer is not None:
            self._unwritten.append(step)
            diagonals = (v for u in self._updates for v in u if len(v) != len(self._sizes))
            held = len(self._states) * end.nbytes + sum(value.nbytes for value in diagonals)
            if held >= self._chunk_bytes:
                self._commit()

    def _create(self, path: str | os.PathLike[str], header: dict[str, Any], probe: Tensor) -> RunWriter:
        constants = {f"constant.{name}": value for name, value in constants_of(self.skeleton).items()}
        data = {"inputs": self.X, "targets": self.y, "probe": probe, **constants}
        return store.create_run(path, header, data)

    def _commit(self) -> None:
        if self._writer is not None and self._states:
            self._writer.append_chunk(self._states, self._unwritten, self._updates, self._hasher.hexdigest())
            self._states, self._unwritten, self._updates = [], [], []


def _trained_names(net: nn.Module, optimizer: Optimizer) -> tuple[str, ...]:
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    names = {id(p): name for name, p in net.named_parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(id(p) not in names for p in trained):
        raise ValueError(
            "the optimizer must train the network's parameters only: it holds a tensor that is not one of them."
        )
    held = {id(p) for p in trained}
    return tuple(name for name, p in net.named_parameters() if id(p) in held)


def _checked_data(X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    for name, value in (("X", X), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor."
            )
    if X.ndim < 2 or len(X) == 0:
        raise ValueError(f"X must have shape (M, ...) with at least one point: got {tuple(X.shape)}.")
    if X.device != y.device:
        raise ValueError(f"X and y must be on one device: got {X.device} and {y.device}.")
    check_finite(X, "X")
    return X.detach().clone(), y.detach().clone()


def _first_outputs(skeleton: Skeleton, start: Tensor, X: Tensor) -> Tensor:
    """Evaluate a few inputs near the initial weights, and refuse what is no function of one input at a time."""
    if X.is_floating_point() and X.dtype != start.dtype:
        raise TypeError(f"X must have the weights' dtype {start.dtype}: got {X.dtype}. Convert one of them.")
    if X.device != start.device:
        raise ValueError(f"X must be on the network's device {start.device}: got {X.device}.")
    try:
        probe = probe_outputs(skeleton, start, X)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"the network must accept X: it fails on inputs of shape {tuple(X.shape[1:])} and {X.dtype}: {error}"
        ) from error
    refuse_random_or_coupled_outputs(skeleton, unflatten(skeleton, off_initial(start)), X)
    return probe


def _checked_batch(indices: Tensor | Sequence[int], num_points: int, index: int) -> Tensor:
    try:
        batch = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {indices!r}.") from error
    if batch.ndim != 1 or batch.numel() == 0:
        raise ValueError(
            f"step {index}: a batch must be a non-empty list of indices into X: got shape {tuple(batch.shape)}."
        )
    if batch.is_floating_point() or batch.dtype == torch.bool:
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {batch.dtype}.")
    low, high = int(batch.min()), int(batch.max())
    if low < 0 or high >= num_points:
        raise ValueError(f"step {index}: batch indices must lie in 0..{num_points - 1}: got {low}..{high}.")
    return batch.detach().to(torch.int64).clone()


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
