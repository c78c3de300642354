"""Record a training run: in one's own loop, or with `train` for the common one."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from epk_gp.recording import store
from epk_gp.recording.diagnosis import UnexplainedStepError, batch_gradient, explain_mismatch, step_tolerance
from epk_gp.recording.losses import (
    CrossEntropy,
    Loss,
    PerSampleLoss,
    as_loss,
    check_targets,
    per_sample_losses,
    refuse_coupled_losses,
    sample_weight,
)
from epk_gp.recording.networks import (
    Skeleton,
    constants_of,
    flatten,
    refuse_random_or_coupled_layers,
    refuse_random_or_coupled_outputs,
    skeleton_of,
    unflatten,
)
from epk_gp.recording.optimizers import law_of, predict_step, step_size
from epk_gp.recording.store import RunWriter, Step
from epk_gp.recording.trajectory import (
    StoredStates,
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
            path: New folder for the run; kept in memory if None.
            chunk_bytes: Weights are committed to disk in chunks of about this size.

        Raises:
            TypeError: Wrong kinds of arguments.
            ValueError: Data, targets, network or optimizer that cannot be recorded; the message says what to do.
            FileExistsError: `path` already holds something.
        """
        self.net, self.optimizer, self.loss = net, optimizer, as_loss(loss)
        self.law = law_of(optimizer)
        self.skeleton = skeleton_of(net, _trained_names(net, optimizer))
        self.X, self.y = _checked_data(X, y)
        refuse_random_or_coupled_layers(net)
        start = self._weights()
        check_finite(start[None], "the initial weights")
        probe = _first_outputs(self.skeleton, start, self.X)
        check_targets(self.loss, self.y, len(self.X), probe.shape[1])
        if isinstance(self.loss, PerSampleLoss):
            refuse_coupled_losses(self.loss, probe, self.y[: len(probe)])
        self.num_outputs, self.data_digest = probe.shape[1], digest_data(self.X, self.y)
        self.steps: list[Step] = []
        self._states: list[Tensor] = [start]
        self._last = start
        self._pending: tuple[Step, Tensor] | None = None
        self._hasher = hashlib.blake2b(digest_size=16)
        header = header_of(self.skeleton, self.loss, self.law, self.data_digest, self.num_outputs)
        self._hasher.update(repr(header).encode())
        for value in (*constants_of(self.skeleton).values(), probe, start):  # the probe stands for the forward function
            self._hasher.update(_bytes(value))
        self._chunk_bytes = chunk_bytes
        self._unwritten: list[Step] = []
        self._writer = None if path is None else self._create(path, header, probe)
        self._hook: Any = None
        self._closed = False

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        return len(self.steps)

    def __enter__(self) -> "Recorder":
        """Start to listen to the optimizer."""
        self._hook = self.optimizer.register_step_post_hook(self._after_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; commit what was recorded, also after an error."""
        self._hook.remove()
        self._closed = True
        if self._writer is not None:
            self._commit()
        if kind is None and self._pending is not None:
            raise UnexplainedStepError(
                "every recorder.batch() must be followed by optimizer.step(): "
                f"the one of step {self._pending[0].index} was not."
            )
        if kind is None:
            self._check_constants(len(self.steps))

    def batch(self, indices: Int64[Tensor, " B"] | Sequence[int] | None) -> None:
        """Announce the batch whose gradient the next `optimizer.step()` uses.

        Args:
            indices: Rows of X that the batch held, each as often as it occurred; None for all of X.

        Raises:
            TypeError: Indices that are no integers.
            ValueError: An empty batch, indices out of range, a batch announced twice.
            UnexplainedStepError: The weights were changed since the last recorded step, or the network or the optimizer
                was switched to something else than plain gradient descent.
        """
        index = len(self.steps)
        if self._hook is None or self._closed:
            raise RuntimeError("recorder.batch() must be called inside 'with Recorder(...) as recorder:'.")
        if self._pending is not None:
            raise ValueError(
                f"recorder.batch() must be called once per optimizer.step(): step {index} has two. "
                "Gradient accumulation is not supported yet."
            )
        batch = None if indices is None else _checked_batch(indices, len(self.X), index)
        try:
            refuse_random_or_coupled_layers(self.net)
            size = step_size(self.optimizer)
        except ValueError as error:
            raise UnexplainedStepError(f"step {index}: {error}") from error
        start = self._weights()
        if not torch.equal(start, self._last):
            raise UnexplainedStepError(
                f"step {index}: the weights must be those the last recorded step left: they were changed in between "
                "(an optimizer.step() outside the recorder's sight, or an edit)."
            )
        self._check_constants(index)
        self._pending = (Step(index, size, batch), start)

    @property
    def trajectory(self) -> Trajectory:
        """The run recorded so far; from disk if it is there."""
        states: Any = tuple(self._states)
        if self._writer is not None:
            self._commit()
            states = StoredStates(self._writer.path, tuple(self._writer.chunks))
        return Trajectory(
            skeleton=self.skeleton,
            inputs=self.X,
            targets=self.y,
            loss=self.loss,
            law=self.law,
            states=states,
            steps=tuple(self.steps),
            num_outputs=self.num_outputs,
            digest=self._hasher.hexdigest(),
            data_digest=self.data_digest,
        )

    def _weights(self) -> Tensor:
        return flatten(self.skeleton, dict(self.net.named_parameters()))

    def _check_constants(self, index: int) -> None:
        now = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        for name, value in constants_of(self.skeleton).items():
            if not torch.equal(now[name], value):
                raise UnexplainedStepError(
                    f"step {index}: buffers and frozen parameters must stay as they were when recording began: "
                    f"{name!r} changed."
                )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        index = len(self.steps)
        if self._pending is None:
            raise UnexplainedStepError(
                f"step {index}: optimizer.step() must be preceded by recorder.batch(indices): it was not."
            )
        (step, start), self._pending = self._pending, None
        end = self._weights()
        X, y = (self.X, self.y) if step.batch is None else (self.X[step.batch], self.y[step.batch])
        if not torch.isfinite(end).all():
            raise UnexplainedStepError(
                f"step {index}: the weights must stay finite: training diverged (NaN or infinity). "
                "Lower the learning rate."
            )
        gradient = batch_gradient(self.skeleton, start, X, y, self.loss)
        predicted = predict_step(self.law, gradient, step.size)
        difference = float((end - start - predicted).abs().max())
        if not difference <= step_tolerance(start, predicted):
            cause = explain_mismatch(self.net, self.skeleton, start, gradient, X, y, self.loss)
            raise UnexplainedStepError(
                f"step {index}: the change of the weights must be -lr * gradient of {self.loss} on the given batch: it "
                f"differs by {difference:.2e} (largest predicted change {float(predicted.abs().max()):.2e}). "
                f"Likely cause: {cause}."
            )
        self.steps.append(step)
        self._last = end
        self._hasher.update(repr(step.size).encode())
        self._hasher.update(b"all" if step.batch is None else _bytes(step.batch))
        self._hasher.update(_bytes(end))
        self._states.append(end)
        if self._writer is not None:
            self._unwritten.append(step)
            if len(self._states) * end.nbytes >= self._chunk_bytes:
                self._commit()

    def _create(self, path: str | os.PathLike[str], header: dict[str, Any], probe: Tensor) -> RunWriter:
        constants = {f"constant.{name}": value for name, value in constants_of(self.skeleton).items()}
        data = {"inputs": self.X, "targets": self.y, "probe": probe, **constants}
        return store.create_run(path, header, data)

    def _commit(self) -> None:
        if self._writer is not None and self._states:
            self._writer.append_chunk(self._states, self._unwritten, self._hasher.hexdigest())
            self._states, self._unwritten = [], []


def train(
    net: nn.Module,
    X: Shaped[Tensor, "M ..."],
    y: Shaped[Tensor, "M ..."],
    *,
    optimizer: Optimizer,
    steps: int,
    loss: Loss | nn.Module = CrossEntropy(),  # noqa: B008  # a frozen value
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    scheduler: LRScheduler | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Trajectory:
    """Train a network in place and record every step.

    Args:
        net: The network.
        X: All M training inputs.
        y: Their targets.
        optimizer: Over the network's parameters.
        steps: Number of optimizer steps S >= 1.
        loss: The loss to minimise.
        batch_size: Points per step; each epoch is a new permutation, its last batch may be smaller. None: all M points.
        generator: Source of the permutations; torch's own by default.
        scheduler: Stepped after every optimizer step.
        path: New folder for the run; in memory if None.
        progress: Show a progress bar.

    Returns:
        The recorded run.

    Raises:
        TypeError, ValueError, FileExistsError: As `Recorder`; also counts that are not positive.
        UnexplainedStepError: A step that is not plain gradient descent on the loss, or that diverged.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1: got {steps}.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1: got {batch_size}.")
    with Recorder(net, optimizer, X, y, loss=loss, path=path) as recorder:
        batches = _batches(len(recorder.X), batch_size, generator)
        for _ in tqdm(range(steps), desc="training", disable=not progress):
            batch = next(batches)
            inputs, targets = (recorder.X, recorder.y) if batch is None else (recorder.X[batch], recorder.y[batch])
            optimizer.zero_grad()
            with torch.enable_grad():
                values = per_sample_losses(recorder.loss, net(inputs), targets)
                (sample_weight(recorder.loss, len(inputs)) * values.sum()).backward()
            recorder.batch(batch)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return recorder.trajectory


def _batches(num_points: int, batch_size: int | None, generator: torch.Generator | None) -> Iterator[Tensor | None]:
    while True:
        if batch_size is None:
            yield None
        else:
            yield from torch.randperm(num_points, generator=generator).split(batch_size)


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
    batch = torch.as_tensor(indices)
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


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
