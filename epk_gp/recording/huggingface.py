"""A callback for Hugging Face's `Trainer` that records the training; it needs the extra `huggingface`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments

from epk_gp.core.losses import CrossEntropy, Loss, as_loss
from epk_gp.optimizers.update_rules import ClipNorm
from epk_gp.recording.recorder import Recorder, RunOfCallback
from epk_gp.storage.rows import Targets, TrainingInputs

INDEX_KEY = "index"


def logits_of(returned: Any) -> Tensor:
    """Return the logits of a `ModelOutput`, or of a tuple that starts with them; the last of several positions."""
    logits: Tensor = returned[0] if isinstance(returned, tuple) else returned.logits
    return logits if logits.ndim == 2 else logits[:, -1]


class HuggingFaceRecorderCallback(RunOfCallback, TrainerCallback):  # type: ignore[misc, unused-ignore]  # untyped without the extra
    """Record a run of `transformers.Trainer` as `epk_gp.Recorder` records a loop.

        arguments = TrainingArguments(..., remove_unused_columns=False)
        callback = HuggingFaceRecorderCallback(X, y)
        dataset = IndexedDataset(dataset, key="index")
        Trainer(model, arguments, train_dataset=dataset, callbacks=[callback]).train()
        trajectory = callback.trajectory

    X is a dictionary of the tensors that the model takes, without the labels: item i of the dataset holds row i of
    each, and a batch may be padded to its own longest row. A causal language model shifts its labels, (M, T): y is
    `epk_gp.next_words(labels)`. The items' key `index` passes through the data collator, which makes it a tensor, and
    is removed from the batch right before the model sees it. Gradient accumulation, clipping (`max_grad_norm`) and
    `label_smoothing_factor` are recorded, and the trainer's divisor of the loss is read from its gradient. The run ends
    with the last step: `load_best_model_at_end` loads an earlier state after it. After an error in `train` call
    `close`, or train again.
    """

    _begins = "trainer.train"

    def __init__(
        self,
        X: TrainingInputs,
        y: Targets = None,
        *,
        loss: Loss | nn.Module | None = CrossEntropy(),
        output: Callable[[Any], Tensor] | None = logits_of,
        **options: Any,
    ) -> None:
        """Store the arguments; the recorder starts with the training.

        Args:
            X: All M training inputs, on the model's device.
            y: Their labels, shifted as the loss shifts them; X and y may have any form that `Recorder` takes.
            loss: The loss that the model or the trainer computes, or None (`epk_gp.Recorder`).
            output: Maps the model's result to its outputs, (n, C); by default the logits, and for several positions
                those of the last position.
            options: Further arguments of `epk_gp.Recorder`: `folder`, `storage`, `update_rule`, `unexplained`.
        """
        self._data: tuple[Any, Any] = (X, y)
        self._loss, self._options = as_loss(loss), {"output": output, **options}
        self._hooks: list[Any] = []
        self._seen: list[Tensor] = []  # rows of batches since the last announcement

    def on_train_begin(self, args: TrainingArguments, *states: Any, **kwargs: Any) -> None:
        """Start the recorder.

        Raises:
            ValueError: The trainer removes the indices from the batches, or `Recorder` cannot record the training.
        """
        if args.remove_unused_columns:
            raise ValueError("batches must hold rows' indices: set TrainingArguments(remove_unused_columns=False).")
        model, loss = kwargs["model"], self._loss
        for hook in [*model._forward_pre_hooks.values()]:  # hooks of a training that an error or Ctrl-C ended
            if isinstance(callback := getattr(hook, "__self__", None), HuggingFaceRecorderCallback):
                callback.close()
        if args.label_smoothing_factor and isinstance(loss, CrossEntropy):
            loss = replace(loss, label_smoothing=float(args.label_smoothing_factor))
        clip = ClipNorm(float(args.max_grad_norm)) if args.max_grad_norm else None
        self._recorder = Recorder(model, kwargs["optimizer"], *self._data, loss=loss, clip=clip, **self._options)
        self._recorder.__enter__()
        self._hooks = [
            model.register_forward_pre_hook(self._take_indices, with_kwargs=True, prepend=True),
            model.register_load_state_dict_pre_hook(self.on_train_end),  # called by load_best_model_at_end
        ]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Announce the batches that the model saw since the last announcement."""
        for indices in self._seen:
            self._recorder.batch(indices, weight=None)
        self._seen = []

    on_substep_end = on_pre_optimizer_step  # for a batch whose gradient is accumulated

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Commit the run."""
        self.close(None)

    def close(self, error: BaseException | None = RuntimeError("the training ended early")) -> None:  # noqa: B008
        """Commit the steps before an error, and release the run's folder; does nothing after a complete run."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._seen = [], []
            self._recorder.__exit__(None if error is None else type(error), error, None)

    def _take_indices(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Remove the indices from the arguments of the model."""
        indices = kwargs.pop(INDEX_KEY, None)
        if not (model.training and torch.is_grad_enabled()):
            return args, kwargs
        if indices is None:
            raise ValueError(
                f"the batches must hold the rows' indices under {INDEX_KEY!r}: got {', '.join(sorted(kwargs))}. Wrap "
                f'the data in IndexedDataset(dataset, key="{INDEX_KEY}"), and use a data collator that keeps numbers.'
            )
        counts = {len(value) for value in kwargs.values() if isinstance(value, Tensor) and value.ndim}
        if counts - {len(indices)}:
            raise ValueError(
                f"the batches must hold one row for each item: got {len(indices)} indices beside {sorted(counts)} "
                "rows. Use a data collator that pads, and puts no texts into one row (DataCollatorWithFlattening)."
            )
        self._seen.append(indices.cpu())
        return args, kwargs
