"""The common training loop, recorded."""

import os

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from epk_gp.core.attention import disable_fused_attention
from epk_gp.core.losses import CrossEntropy, Loss, per_sample_losses, sample_weights
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_rules import UpdateRule
from epk_gp.core.validation import validate_count, validate_generator
from epk_gp.storage.training_state import Stateful
from epk_gp.storage.writer import Storage
from epk_gp.training.clipping import Clip
from epk_gp.training.epoch_sampler import EpochSampler
from epk_gp.training.recorder import Recorder


def train(
    net: nn.Module,
    X: Shaped[Tensor, "M ..."],
    y: Shaped[Tensor, "M ..."],
    *,
    optimizer: Optimizer,
    steps: int,
    loss: Loss | nn.Module = CrossEntropy(),
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    scheduler: LRScheduler | None = None,
    update_rule: UpdateRule | None = None,
    clip: Clip | None = None,
    path: str | os.PathLike[str] | None = None,
    resume: bool = False,
    storage: Storage = Storage(),
    check_every: int = 1,
    progress: bool = False,
) -> Trajectory:
    """Train a network in place and record every step.

    Args:
        net: The network.
        X: All M training inputs.
        y: Their targets.
        optimizer: The optimizer of the network's parameters.
        steps: Number of optimizer steps S >= 1, with those of a run that is resumed.
        loss: The loss to minimise.
        batch_size: Points per step; each epoch is a new permutation, its last batch may be smaller. None: all M points.
        generator: Source of the permutations; torch's global generator by default.
        scheduler: A learning-rate scheduler that is stepped after every optimizer step.
        update_rule: How the optimizer's step follows from the gradient, as for `Recorder`.
        clip: Gradient clipping before every step.
        path: New folder for the run; the run is kept in memory if None.
        resume: Continue the run at `path`, if there is one, as if it had never stopped. Network, optimizer and
            scheduler must be made as they were.
        storage: How often steps are committed to disk, and whether they are compressed.
        check_every: Recompute the gradient of one step out of this many, as for `Recorder`.
        progress: Show a progress bar.

    Returns:
        The recorded run.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A count is not positive, or `Recorder` cannot record the training.
        OSError: The folder cannot be written.
        StepMismatchError: A step is not the one that the update rule predicts from the loss, or training diverged.
    """
    validate_count(steps, "steps")
    if batch_size is not None:
        validate_count(batch_size, "batch_size")
    validate_generator(generator)
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler over the optimizer: got {scheduler!r}."
        )
    sampler = None if batch_size is None else EpochSampler(len(X), int(batch_size), generator)
    stateful: dict[str, Stateful | torch.Generator] = {} if sampler is None else {"sampler": sampler}
    if scheduler is not None:
        stateful["scheduler"] = scheduler
    with Recorder(
        net,
        optimizer,
        X,
        y,
        loss=loss,
        update_rule=update_rule,
        clip=clip,
        path=path,
        resume=resume,
        stateful=stateful,
        storage=storage,
        check_every=check_every,
    ) as recorder:
        remaining = tqdm(
            recorder.until(steps), desc="training", initial=recorder.num_steps, total=steps, disable=not progress
        )
        for _ in remaining:
            batch = None if sampler is None else sampler.next_batch()
            inputs, targets = (recorder.X, recorder.y) if batch is None else (recorder.X[batch], recorder.y[batch])
            optimizer.zero_grad()
            with torch.enable_grad(), disable_fused_attention():
                values = per_sample_losses(recorder.loss, net(inputs), targets)
                (sample_weights(recorder.loss, targets).to(values) @ values).backward()
            if clip is not None:
                clip.clip_gradients(net)
            recorder.batch(batch)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return recorder.trajectory
