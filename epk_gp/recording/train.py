"""The common training loop, recorded."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from epk_gp.core.checks import door, validate_count, validate_generator
from epk_gp.core.losses import loss_terms, sample_weights
from epk_gp.core.show import tracked
from epk_gp.core.step import fingerprint_data
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.trajectory import Trajectory
from epk_gp.optimizers.update_rules import Clip
from epk_gp.recording.recorder import Recorder
from epk_gp.storage.rows import Stream, Targets, TrainingInputs, num_rows


class EpochSampler:
    """Batches of random permutations of the points, one after another; the last batch of each may be smaller.

    Its state is the generator's state before the present permutation was drawn, and the number of used batches.
    """

    def __init__(self, num_points: int, batch_size: int, generator: torch.Generator | None) -> None:
        """Draw nothing yet; None uses torch's global generator."""
        self.num_points, self.batch_size = num_points, batch_size
        self._generator = torch.default_generator if generator is None else generator
        self._state_before_epoch = self._generator.get_state()
        self._batches: tuple[Tensor, ...] = ()
        self._num_used = 0

    def next_batch(self) -> Int64[Tensor, " B"]:
        """Return the indices of the next batch."""
        if self._num_used == len(self._batches):
            self._state_before_epoch = self._generator.get_state()
            self._batches = torch.randperm(self.num_points, generator=self._generator).split(self.batch_size)
            self._num_used = 0
        self._num_used += 1
        return self._batches[self._num_used - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the keys of a stored run."""
        sizes = {"points": self.num_points, "batch_size": self.batch_size}
        return sizes | {"drawn_from": self._state_before_epoch, "used": self._num_used}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Draw the stored permutation again, and skip the used batches.

        Raises:
            ValueError: The stored batches have another size.
        """
        recorded = (state["points"], state["batch_size"])
        if recorded != (self.num_points, self.batch_size):
            raise ValueError(f"batch_size must be the recorded one, {recorded[1]}: got {self.batch_size}.")
        self._generator.set_state(state["drawn_from"])
        self._batches, self._num_used = (), 0
        for _ in range(state["used"]):
            self.next_batch()


@door
def train(
    net: nn.Module,
    X: TrainingInputs,
    y: Targets = None,
    *,
    optimizer: Optimizer,
    steps: int,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    scheduler: LRScheduler | None = None,
    clip: Clip | None = None,
    sample_weight: Float[Tensor, " M"] | None = None,
    progress: bool = False,
    **options: Any,
) -> Trajectory:
    """Train a network in place and record every step.

    Args:
        net: The network.
        X: All M training inputs, as `Recorder` takes them.
        y: Their targets, as `Recorder` takes them.
        optimizer: The optimizer of the network's parameters.
        steps: Number of optimizer steps S >= 1, including those of a resumed run.
        batch_size: Points per step; each epoch is a new permutation, its last batch may be smaller. None: all M points.
        generator: Source of the permutations; torch's global generator by default.
        scheduler: A learning-rate scheduler that is stepped after every optimizer step.
        clip: Gradient clipping before every step.
        sample_weight: Factor of the loss of each point; 1 by default. For a loss that is a mean, weights are relative
            to their mean over all points. With one target per point and all points in each step, a point of weight 2
            counts like two copies, and a point of weight 0 as if it were absent, unless rows of a batch influence each
            other: batch normalisation counts each row once. The weights do not change the drawn batches. A run must be
            resumed with the same weights.
        progress: Show a progress bar.
        options: Further arguments of `Recorder`: `loss`, `folder`, `storage`, `update_rule`, `check_every`,
            `unexplained`, `output`; and `resume`, which continues the run in `folder`, if there is one, as if it had
            never stopped. Create network, optimizer and scheduler exactly as before.

    Returns:
        The recorded run.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A count is not positive; there is not one finite weight >= 0 for each point, or all are 0; or
            `Recorder` cannot record the training.
        OSError: The folder cannot be written.
        StepMismatchError: A step is not the one that the update rule predicts from the loss, or training diverged.
    """
    validate_count(steps, "steps")
    if batch_size is not None:
        validate_count(batch_size, "batch_size")
    validate_generator(generator)
    if isinstance(X, Stream):
        raise TypeError(
            "X must be a data set, of which train() draws the batches: got a Stream. Write the loop that brings its "
            "rows: with epk.Recorder(net, optimizer, X) as recorder, and recorder.batch(targets=y) after backward()."
        )
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler over the optimizer: got {scheduler!r}."
        )
    sampler = None if batch_size is None else EpochSampler(num_rows(X, y), int(batch_size), generator)
    objects: dict[str, Any] = {"sampler": sampler, "scheduler": scheduler}
    if sample_weight is not None:  # this name makes a run that is resumed with other weights, or without, fail
        digest = fingerprint_data(torch.as_tensor(sample_weight, dtype=torch.float64))
        objects[f"sample_weight of digest {digest}"] = nn.Identity()
    stateful = {name: value for name, value in objects.items() if value is not None}
    with Recorder(net, optimizer, X, y, clip=clip, stateful=stateful, **options) as recorder:
        signature, factors = recorder.signature, _row_factors(sample_weight, recorder)
        begun, remaining = recorder.num_steps, recorder.until(steps)
        remaining = tracked(remaining, "training", total=steps, unit="step", initial=begun, shown=progress)
        for _ in remaining:
            batch = None if sampler is None else sampler.next_batch()
            inputs, targets = recorder.rows(batch)
            weight = factors if factors is None or batch is None else factors[batch]
            optimizer.zero_grad()
            with torch.enable_grad(), disable_fused_attention():
                values = loss_terms(signature, recorder.loss, signature.call(net, inputs), targets)
                c = sample_weights(recorder.loss, targets)
                ((c if weight is None else c * weight).to(values) @ values).backward()
            if clip is not None:
                clip.clip_gradients(net)
            recorder.batch(batch, weight=1.0 if weight is None else weight)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return recorder.trajectory


def _row_factors(weights: Float[Tensor, " M"] | None, recorder: Recorder) -> Float[Tensor, " M"] | None:
    """Return the factor of each point's loss term; None if all are equal."""
    if weights is None:
        return None
    y = recorder.y
    weights = torch.as_tensor(weights, dtype=torch.float64, device=y.device)
    validate_row_weights(weights, len(y))
    if recorder.loss.reduction == "sum":
        return weights
    shares = sample_weights(recorder.loss, y)  # under these shares the mean weight is 1
    return None if bool((weights == weights[0]).all()) else weights * shares.sum() / (shares @ weights)


def validate_row_weights(weights: Float[Tensor, "..."], num_points: int) -> None:
    """Raise if there is not one finite weight >= 0 per point, or if all are 0.

    Raises:
        ValueError: The weights have another number or sign, are not finite, or are all 0.
    """
    is_weight = weights.isfinite() & (weights >= 0)
    if weights.shape != (num_points,) or not is_weight.all() or not weights.any():
        raise ValueError(
            f"sample_weight must be a finite number >= 0 for each of {num_points} points, and not 0 for all: got shape "
            f"{tuple(weights.shape)}; {int(is_weight.sum())} are such numbers, {int((weights > 0).sum())} above 0."
        )
