"""A PyTorch Lightning callback that records the training; it needs the extra `lightning`."""

import os
from collections.abc import Callable
from typing import Any

from jaxtyping import Shaped
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from epk_gp.core.losses import CrossEntropy, Loss
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_rules import UpdateRule
from epk_gp.storage.writer import Storage
from epk_gp.training.clipping import Clip, ClipNorm, ClipValue
from epk_gp.training.recorder import Recorder


def first_entry(batch: Any) -> Any:
    """Return the first entry of a batch: the indices, if the data loader loads an `IndexedDataset`."""
    return batch[0]


class RecorderCallback(Callback):
    """Record a Lightning run as `epk_gp.Recorder` records a loop.

        callback = RecorderCallback(module.net, X, y, path="run")
        Trainer(callbacks=[callback], ...).fit(module, DataLoader(IndexedDataset(dataset), ...))
        trajectory = callback.trajectory

    The module's optimization must be automatic, with one optimizer. The trainer's gradient clipping and accumulation
    are recorded. The gradient of every step is recomputed: the loss of `training_step` must be the stated loss on the
    rows of X that `indices` returns.
    """

    def __init__(
        self,
        net: nn.Module,
        X: Shaped[Tensor, "M ..."],
        y: Shaped[Tensor, "M ..."],
        *,
        indices: Callable[[Any], Any] = first_entry,
        loss: Loss | nn.Module = CrossEntropy(),
        update_rule: UpdateRule | None = None,
        path: str | os.PathLike[str] | None = None,
        storage: Storage = Storage(),
    ) -> None:
        """Keep the arguments; the recorder starts with the training.

        Args:
            net: The network inside the Lightning module whose outputs the loss takes.
            X: All M training inputs, on the network's device.
            y: Their targets.
            indices: Returns the rows of X that a batch of the training data loader holds.
            loss: The loss that `training_step` computes.
            update_rule: How the optimizer's step follows from the gradient, if it is not one of torch's known
                optimizers.
            path: New folder for the run; the run is kept in memory if None.
            storage: How often steps are committed to disk, and whether they are compressed.
        """
        self._net, self._indices = net, indices
        self._data = (X, y)
        self._options: dict[str, Any] = {"loss": loss, "update_rule": update_rule, "path": path, "storage": storage}
        self._recorder: Recorder | None = None
        self._open = False

    @property
    def trajectory(self) -> Trajectory:
        """The run recorded so far.

        Raises:
            RuntimeError: The training has not started.
        """
        if self._recorder is None:
            raise RuntimeError("there must be a run: training has not started. Call trainer.fit first.")
        return self._recorder.trajectory

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the recorder.

        Raises:
            ValueError: The optimization is manual, there are several optimizers, or `Recorder` cannot record the
                training.
        """
        optimizers = trainer.optimizers
        if not pl_module.automatic_optimization or len(optimizers) != 1:
            raise ValueError(
                "the module must have automatic optimization with one optimizer: got "
                f"{len(optimizers)} and automatic_optimization={pl_module.automatic_optimization}. "
                "Use epk_gp.Recorder inside training_step."
            )
        self._recorder = Recorder(self._net, optimizers[0], *self._data, clip=_clip_of(trainer), **self._options)
        self._recorder.__enter__()
        self._open = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Announce the batch."""
        if self._recorder is not None:
            self._recorder.batch(self._indices(batch), weight=1 / trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit the run."""
        self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Commit what was recorded before an error."""
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        if self._recorder is not None and self._open:
            self._open = False
            self._recorder.__exit__(None if error is None else type(error), error, None)


def _clip_of(trainer: Trainer) -> Clip | None:
    bound = trainer.gradient_clip_val
    if not bound:
        return None
    by_value = trainer.gradient_clip_algorithm == "value"
    return ClipValue(float(bound)) if by_value else ClipNorm(float(bound))
