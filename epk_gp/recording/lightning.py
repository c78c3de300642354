"""A PyTorch Lightning callback that records the training; it needs the extra `lightning`."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from epk_gp.core.losses import UnstatedLoss
from epk_gp.optimizers.update_rules import Clip, ClipNorm, ClipValue
from epk_gp.recording.recorder import Recorder, RunOfCallback
from epk_gp.storage.rows import Targets, TrainingInputs


class RecorderCallback(RunOfCallback, Callback):
    """Record a Lightning run as `epk_gp.Recorder` records a loop.

        callback = RecorderCallback(module.net, X, y, folder="run")
        Trainer(callbacks=[callback], ...).fit(module, DataLoader(IndexedDataset(dataset), ...))
        trajectory = callback.trajectory

    The trainer's gradient clipping and accumulation are recorded. Under manual optimization each `manual_backward` of a
    batch counts as one backward pass of that batch. Validation may run at any time. `indices` returns the rows of X in
    a batch; rows with another loss than the stated one keep the gradient in their outputs.
    """

    def __init__(
        self,
        net: nn.Module,
        X: TrainingInputs,
        y: Targets = None,
        *,
        indices: Callable[[Any], Any] = itemgetter(0),
        weight: float | Tensor | Callable[[Any], float | Tensor] | None = None,
        clip: Clip | None = None,
        **options: Any,
    ) -> None:
        """Store the arguments; the recorder starts with the training.

        Args:
            net: The network inside the Lightning module whose outputs the loss takes.
            X: All M training inputs, on the network's device.
            y: Their targets; X and y may have any form that `Recorder` takes.
            indices: Returns the rows of X in a batch of the training data loader: by default the batch's first entry,
                as from a loader of an `IndexedDataset`.
            weight: Factor in front of a batch's loss, or of each row's; or a function of the batch that returns it.
                None stands for the trainer's own factor, 1 / `accumulate_grad_batches`.
            clip: The gradient clipping before each step; None for the trainer's.
            options: Further arguments of `epk_gp.Recorder`: `loss` (the one that `training_step` computes), `folder`,
                `storage`, `output`, `update_rule`, `unexplained`.
        """
        self._net, self._indices, self._weight, self._clip = net, indices, weight, clip
        self._data: tuple[Any, Any] = (X, y)
        self._options = options
        self._batch: Any = None  # the batch of `training_step`
        self._is_announced = False  # whether its backward pass was seen

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the recorder.

        Raises:
            ValueError: `Recorder` cannot record the training.
        """
        clip, bound = self._clip, trainer.gradient_clip_val
        if clip is None and bound:
            clip = ClipValue(float(bound)) if trainer.gradient_clip_algorithm == "value" else ClipNorm(float(bound))
        first, *rest = trainer.optimizers
        own = trainer.optimizers if rest else first
        wrapper = trainer.strategy.model
        options = self._options | ({"ddp": wrapper} if isinstance(wrapper, DistributedDataParallel) else {})
        self._recorder = Recorder(self._net, own, *self._data, clip=clip, **options)
        self._recorder.__enter__()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch until its backward pass."""
        self._batch, self._is_announced = batch, False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce the batch whose gradient was just computed."""
        weight: Any = self._weight(self._batch) if callable(self._weight) else self._weight
        if weight is None and not isinstance(self._recorder.loss, UnstatedLoss):  # its gradient already has the factor
            weight = 1 / trainer.accumulate_grad_batches
        self._recorder.batch(self._indices(self._batch), weight=weight)
        self._is_announced = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Announce the batch of a `training_step` that calls `loss.backward()` instead of `manual_backward`."""
        if not self._is_announced and not pl_module.automatic_optimization:  # training_step may then have no loss
            self.on_after_backward(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Commit the run."""
        self._recorder.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Commit the steps recorded before an error."""
        if self._recorder is not None:
            self._recorder.__exit__(type(exception), exception, None)
