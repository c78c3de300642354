"""The common training loop, recorded."""

import os
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from epk_gp.core.losses import CrossEntropy, Loss, per_sample_losses, sample_weights
from epk_gp.core.trajectory import Trajectory
from epk_gp.core.update_rules import UpdateRule
from epk_gp.core.validation import validate_count, validate_generator
from epk_gp.storage.training_state import Stateful
from epk_gp.storage.writer import Storage
from epk_gp.training.clipping import Clip, clip_gradients
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
        optimizer: Over the network's parameters.
        steps: Number of optimizer steps S >= 1, with those of a run that is resumed.
        loss: The loss to minimise.
        batch_size: Points per step; each epoch is a new permutation, its last batch may be smaller. None: all M points.
        generator: Source of the permutations; torch's own by default.
        scheduler: Stepped after every optimizer step.
        update_rule: How the optimizer steps, as for `Recorder`.
        clip: Gradient clipping before every step.
        path: New folder for the run; in memory if None.
        resume: Go on with the run at `path`, if there is one, as if it had never stopped. Network, optimizer and
            scheduler must be made as they were.
        storage: How often steps are committed to disk, and how.
        check_every: Recompute the gradient of one step out of this many, as for `Recorder`.
        progress: Show a progress bar.

    Returns:
        The recorded run.

    Raises:
        TypeError, ValueError, OSError: As `Recorder`; also counts that are not positive.
        UnexplainedStepError: A step that is not plain gradient descent on the loss, or that diverged.
    """
    validate_count(steps, "steps")
    if batch_size is not None:
        validate_count(batch_size, "batch_size")
    validate_generator(generator)
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler.LRScheduler over the optimizer: got {scheduler!r}."
        )
    sampler = None if batch_size is None else EpochSampler(len(X), batch_size, generator)
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
        left = tqdm(
            recorder.until(steps), desc="training", initial=recorder.num_steps, total=steps, disable=not progress
        )
        for _ in left:
            batch = None if sampler is None else sampler.draw()
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


class EpochSampler:
    """Batches of one random permutation of the points after another; the last of each may be smaller."""

    def __init__(self, num_points: int, batch_size: int, generator: torch.Generator | None) -> None:
        """Draw nothing yet; torch's own generator is used if there is none."""
        self.num_points, self.batch_size = num_points, batch_size
        self._generator = torch.default_generator if generator is None else generator
        self._drawn_from = self._generator.get_state()
        self._batches: tuple[Tensor, ...] = ()
        self._used = 0

    def draw(self) -> Int64[Tensor, " B"]:
        """Give the next batch."""
        if self._used == len(self._batches):
            self._drawn_from = self._generator.get_state()
            self._batches = torch.randperm(self.num_points, generator=self._generator).split(self.batch_size)
            self._used = 0
        self._used += 1
        return self._batches[self._used - 1]

    def state_dict(self) -> dict[str, Any]:
        """Say from where the permutation was drawn, and how much of it is used."""
        ended = self._used == len(self._batches)
        return {
            "points": self.num_points,
            "batch_size": self.batch_size,
            "drawn_from": self._generator.get_state() if ended else self._drawn_from,
            "used": 0 if ended else self._used,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Draw the same permutation again, and leave out what was used.

        Raises:
            ValueError: Batches of another size.
        """
        found = (state["points"], state["batch_size"])
        if found != (self.num_points, self.batch_size):
            raise ValueError(f"batch_size must be the recorded one, {found[1]}: got {self.batch_size}.")
        self._generator.set_state(state["drawn_from"])
        self._batches, self._used = (), 0
        for _ in range(state["used"]):
            self.draw()
