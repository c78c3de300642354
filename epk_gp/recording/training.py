"""The common training loop, recorded."""

import os
from collections.abc import Iterator

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from epk_gp.recording.checks import check_count, check_generator
from epk_gp.recording.clipping import Clip, clip_gradients
from epk_gp.recording.losses import CrossEntropy, Loss, per_sample_losses, sample_weights
from epk_gp.recording.optimizers import StepLaw
from epk_gp.recording.recorder import Recorder
from epk_gp.recording.trajectory import Trajectory


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
    law: StepLaw | None = None,
    clip: Clip | None = None,
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
        law: How the optimizer steps, as for `Recorder`.
        clip: Gradient clipping before every step.
        path: New folder for the run; in memory if None.
        progress: Show a progress bar.

    Returns:
        The recorded run.

    Raises:
        TypeError, ValueError, FileExistsError: As `Recorder`; also counts that are not positive.
        UnexplainedStepError: A step that is not plain gradient descent on the loss, or that diverged.
    """
    check_count(steps, "steps")
    if batch_size is not None:
        check_count(batch_size, "batch_size")
    check_generator(generator)
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler over the optimizer: got {scheduler!r}."
        )
    with Recorder(net, optimizer, X, y, loss=loss, law=law, clip=clip, path=path) as recorder:
        batches = _batches(len(recorder.X), batch_size, generator)
        for _ in tqdm(range(steps), desc="training", disable=not progress):
            batch = next(batches)
            inputs, targets = (recorder.X, recorder.y) if batch is None else (recorder.X[batch], recorder.y[batch])
            optimizer.zero_grad()
            with torch.enable_grad():
                values = per_sample_losses(recorder.loss, net(inputs), targets)
                (sample_weights(recorder.loss, targets).to(values) @ values).backward()
            clip_gradients(clip, net)
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
