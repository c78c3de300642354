"""Open a recorded run."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epk_gp.core import losses
from epk_gp.core.fingerprint import fingerprint_data
from epk_gp.core.gradients import batch_gradient, step_tolerance
from epk_gp.core.losses import CrossEntropy, Loss, MeanSquaredError, NegativeLogLikelihood
from epk_gp.core.model import FunctionalModel, functionalize
from epk_gp.core.probe import fingerprint_outputs
from epk_gp.core.trajectory import Trajectory, batch_of
from epk_gp.core.update_rules import predict_step
from epk_gp.storage import schema as store
from epk_gp.storage.chunks import read_steps
from epk_gp.storage.index import read_journal
from epk_gp.storage.schema import describe_loss
from epk_gp.storage.stored import StoredStates, StoredUpdates

_KNOWN_LOSSES: dict[str, Any] = {
    kind.__name__: kind for kind in (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
}


def load_trajectory(path: str | os.PathLike[str], net: nn.Module, *, loss: Loss | None = None) -> Trajectory:
    """Open a recorded run.

    Every file is checked against the checksum it was committed with; weights are then mapped, not loaded.

    Args:
        path: The run's folder.
        net: A network of the recorded architecture; its weights do not matter and are not changed.
        loss: Needed only if the run was recorded with a loss of the user's own.

    Returns:
        The run, with data on the CPU.

    Raises:
        FileNotFoundError: No run there, or a file is missing.
        ValueError: A damaged file, a network of other names, shapes or forward function, a missing or another loss.
    """
    header = store.read_header(path)
    layout = store.schema_of(header)
    data = store.read_data(path, header)
    chunks = read_journal(path).chunks
    model = _skeleton_from(header, data, net)
    steps = tuple(step for chunk in chunks for step in read_steps(path, layout, chunk))
    if fingerprint_data(data["inputs"], data["targets"]) != header["data_digest"]:
        raise ValueError(f"{path}: the training data must have the digest in the header: it has another.")
    trajectory = Trajectory(
        model=model,
        inputs=data["inputs"],
        targets=data["targets"],
        loss=_loss_from(header, loss),
        update_rule=header["law"]["name"],
        states=StoredStates(Path(path), layout, chunks),
        updates=StoredUpdates(Path(path), layout, chunks),
        steps=steps,
        num_outputs=header["num_outputs"],
        digest=chunks[-1].digest,
        data_digest=header["data_digest"],
    )
    _check_forward(trajectory, data["probe"])
    _check_loss(trajectory)
    return trajectory


def _skeleton_from(header: dict[str, Any], data: dict[str, Tensor], net: nn.Module) -> FunctionalModel:
    model = functionalize(net, tuple(header["names"]))
    for name, recorded, shape in zip(header["names"], header["shapes"], model.shapes, strict=True):
        if list(shape) != recorded:
            raise ValueError(
                f"the network must be the recorded one: {name} has shape {tuple(shape)}, the run has {tuple(recorded)}."
            )
    model.module.to(store.DTYPES[header["dtype"]])
    model.module.to("cpu")
    constants, recorded_constants = model.frozen_state(), _constants_from(data)
    if constants.keys() != recorded_constants.keys():
        odd = sorted(constants.keys() ^ recorded_constants.keys())
        raise ValueError(
            f"the network must be the recorded one: {odd[0]!r} is a parameter or buffer in only one of the two."
        )
    for name, value in recorded_constants.items():
        if value.shape != constants[name].shape:
            raise ValueError(
                f"the network must be the recorded one: {name} has shape {tuple(constants[name].shape)}, "
                f"the run has {tuple(value.shape)}."
            )
        constants[name].copy_(value)
    return model


def _constants_from(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("constant."): value for key, value in data.items() if key.startswith("constant.")}


def _loss_from(header: dict[str, Any], given: Loss | nn.Module | None) -> Loss:
    recorded = header["loss"]
    if given is None and recorded["kind"] not in _KNOWN_LOSSES:
        raise ValueError(f"the run was recorded with the user's own loss {recorded['name']!r}: pass it as loss=.")
    options = {key: value for key, value in recorded.items() if key != "kind"}
    try:
        loss = losses.as_loss(_KNOWN_LOSSES[recorded["kind"]](**options) if given is None else given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the run's loss must be one that is known: {error}") from error
    if describe_loss(loss) != recorded:
        raise ValueError(f"loss must be the one the run was recorded with, {recorded}: got {describe_loss(loss)}.")
    return loss


def _check_loss(trajectory: Trajectory) -> None:
    """Replay the first step with a loss of the user's own: its name says nothing of its function."""
    if not isinstance(trajectory.loss, losses.PerSampleLoss) or not trajectory.steps:
        return
    step, (start, end) = trajectory.steps[0], (trajectory.states[0], trajectory.states[1])
    X, y, c = batch_of(trajectory, step, start)
    gradient = batch_gradient(trajectory.model, start, X, y, trajectory.loss, c)
    predicted, _ = predict_step(trajectory.updates[0], trajectory.model.sizes, start, gradient, torch.zeros_like(start))
    if not (end - start - predicted).abs().max() <= step_tolerance(start, predicted):
        raise ValueError(
            f"loss must be the one the run was recorded with: step 0 is not a step on the given "
            f"{trajectory.loss.name!r}."
        )


def _check_forward(trajectory: Trajectory, recorded: Tensor) -> None:
    try:
        outputs = fingerprint_outputs(trajectory.model, trajectory.states[0], trajectory.inputs)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"the network must be the recorded one: it has the same weights, but fails on the recorded inputs: {error}"
        ) from error
    eps = torch.finfo(outputs.dtype).eps
    if outputs.shape != recorded.shape or (outputs - recorded).abs().max() > eps**0.75 * (1 + recorded.abs().max()):
        raise ValueError(
            "the network must be the recorded one: it has the same weights, but its outputs at the initial state "
            "differ from those recorded. Build it with the same layers and activation functions."
        )
