"""A run on disk, started or gone on with: the door between a recorder and its folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from epk_gp.core.losses import Loss
from epk_gp.core.trajectory import Trajectory
from epk_gp.storage import schema as store
from epk_gp.storage.index import resume_name
from epk_gp.storage.loading import load_trajectory
from epk_gp.storage.training_state import StatefulObjects, options_of, restore_training_state
from epk_gp.storage.writer import RunWriter, create_run_dir, open_for_writing, publish

_MEANS = {
    "names": "the network must train the recorded weights",
    "shapes": "the network must have weights of the recorded shapes",
    "dtype": "the network must have the recorded dtype",
    "num_outputs": "the network must have the recorded number of outputs",
    "num_points": "the data must be the recorded ones, with as many points",
    "data_digest": "the data must be the recorded ones, bit for bit",
    "loss": "the loss must be the recorded one",
    "law": "the optimizer must be the recorded one",
    "optimizer": "the optimizer must have the recorded options",
    "compression": "the storage's compression must be the recorded one",
    "check_every": "check_every must be the recorded one",
}


def validate_schedules(optimizer: Optimizer, stateful: StatefulObjects, path: str | os.PathLike[str] | None) -> None:
    """Refuse to resume what would not go on as it did.

    Raises:
        ValueError: No path, or a schedule of learning rates whose place in it is not kept.
    """
    if path is None:
        raise ValueError("resume=True needs path=, the folder of the run to go on with: got None.")
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if scheduled and not any(isinstance(value, LRScheduler) for value in stateful.values()):
        raise ValueError(
            "resume=True must know the optimizer's learning-rate schedule: pass stateful={'scheduler': scheduler}."
        )


def create_run(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    data: Mapping[str, Tensor],
    start: Float[Tensor, " P"],
    digest: str,
    kept: Mapping[str, Tensor],
    options: list[dict[str, Any]],
) -> RunWriter:
    """Make the folder of a run that holds its initial weights.

    Raises:
        FileExistsError: The folder holds something.
        OSError: It cannot be written.
    """
    writer, full = create_run_dir(path, {**header, "optimizer": options}, data)
    writer.append([start], [], [], digest, kept)
    publish(writer, full)
    return writer


def resume_run(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    net: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    stateful: StatefulObjects,
    momentum: Float[Tensor, " P"],
) -> tuple[Trajectory, RunWriter]:
    """Go on with a run: check that it is the same, and bring network, optimizer and kept objects to its last commit.

    Args:
        path: The run's folder.
        header: What the run would say of itself if it were started now.
        net: The network; its weights, frozen parameters and buffers are overwritten.
        optimizer: Its optimizer, made as the recorded one was.
        loss: The loss.
        stateful: Other objects whose state was kept.
        momentum: The recorder's momentum buffer; overwritten.

    Raises:
        BlockingIOError: Another process records there.
        OSError: The folder cannot be written.
        ValueError: A damaged run, or one of another network, data, loss or optimizer.
    """
    recorded = store.read_header(path)
    given = {**header, "optimizer": options_of(optimizer)}
    for key, says in _MEANS.items():
        if recorded.get(key) != given[key]:
            raise ValueError(
                f"{says} to go on with the run at {path}: it has {recorded.get(key)!r}, got {given[key]!r}."
            )
    writer = open_for_writing(path, recorded)
    try:
        trajectory = load_trajectory(path, net, loss=loss)
        number, chunk = len(writer.chunks) - 1, writer.chunks[-1]
        kept = store.read_resume(path, number, chunk)
        restore_training_state(kept, optimizer, stateful, momentum, str(Path(path) / resume_name(number)))
        writer.clean()
    except BaseException:
        writer.close()
        raise
    parameters = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    values = {**trajectory.model.frozen_state(), **trajectory.model.unflatten(trajectory.states[chunk.last])}
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    return trajectory, writer
