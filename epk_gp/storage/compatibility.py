"""Whether a given network, loss, data set and optimizer are those of a recorded run."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from epk_gp.core import losses
from epk_gp.core.gradients import batch_gradient, step_tolerance
from epk_gp.core.losses import CrossEntropy, Loss, MeanSquaredError, NegativeLogLikelihood
from epk_gp.core.model import FunctionalModel, fingerprint_outputs, functionalize
from epk_gp.core.plans import TensorSpec
from epk_gp.core.recomputation import recomputation_of
from epk_gp.core.signature import signature_from_json
from epk_gp.core.trajectory import Trajectory, batch_of
from epk_gp.optimizers.update_rules import predict_step
from epk_gp.storage.schema import WEIGHT_DTYPES, RunHeader, describe_loss

_KNOWN_LOSSES: dict[str, Any] = {
    kind.__name__: kind for kind in (CrossEntropy, NegativeLogLikelihood, MeanSquaredError)
}
# What a run that is resumed may have otherwise: what its files hold of themselves.
_OF_FILES = ("format", "version", "data_blake2b", "data_bytes")


def validate_same_header(recorded: Mapping[str, Any], header: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise if the header that a run would get now is not the one it was recorded with.

    Raises:
        ValueError: An entry differs; the message names it.
    """
    for name, entry in RunHeader.model_fields.items():  # the loss before the data: another one needs other targets
        before, now = (side.get(name, entry.default) for side in (recorded, header))
        if name not in _OF_FILES and before != now:
            raise ValueError(
                f"network, data, loss, optimizer and options must be the recorded ones to resume the run at {path}: "
                f"{name} is another: {_difference(before, now)}."
            )


def validate_modules(recorded: Sequence[str], given: Sequence[str]) -> None:
    """Raise if a network has other modules than the recorded one, so that recorded modes of modules say nothing of it.

    Args:
        recorded: Names of the modules of the recorded network (`schema.module_names`).
        given: Those of the network.

    Raises:
        ValueError: The names of the modules differ, or their order.
    """
    if recorded != given:
        raise ValueError(
            f"the network must have the recorded modules: {_difference(recorded, given)}. Build it as it was built for "
            "the recording."
        )


def recorded_model(
    header: Mapping[str, Any],
    data: Mapping[str, Tensor],
    net: nn.Module,
    output: Callable[[Any], Tensor] | None = None,
) -> FunctionalModel:
    """Copy a network of the recorded architecture, with the recorded frozen state and dtype, to the CPU.

    Args:
        header: The run's header.
        data: Its tensors, which hold the frozen state.
        net: The network; its weights do not matter and are not changed.
        output: Takes the outputs from what the network returns, as at recording.

    Raises:
        ValueError: The network has other parameters or buffers, by name or by shape; or the data do not have the
            recorded structure, or `output` must be given and is not.
    """
    signature = signature_from_json(header["signature"], output, data)
    if signature.layout is not None and data["inputs"].shape[1:] != (signature.layout.width,):
        raise ValueError(
            f"the run's inputs must have the {signature.layout.width} columns of the header's 'signature': got shape "
            f"{tuple(data['inputs'].shape)}."
        )
    buffers = {name: list(value.shape) for name, value in net.named_buffers()} if isinstance(net, nn.Module) else {}
    for name, shape in zip(header["statistics"], header["statistic_shapes"], strict=True):
        _require_recorded(f"moving statistic {name}", shape, buffers.get(name))
    model = functionalize(net, tuple(header["names"]), tuple(header["statistics"]), signature)
    for name, recorded, shape in zip(header["names"], header["shapes"], model.shapes, strict=True):
        _require_recorded(name, recorded, list(shape))
    model = model.variant(TensorSpec(WEIGHT_DTYPES[header["dtype"]], torch.device("cpu")))
    frozen_state = model.frozen_state()
    recorded_state = {
        key.removeprefix("constant."): value for key, value in data.items() if key.startswith("constant.")
    }
    for name in sorted(frozen_state.keys() | recorded_state.keys()):
        recorded, own = (list(side[name].shape) if name in side else None for side in (recorded_state, frozen_state))
        _require_recorded(name, recorded, own)
        frozen_state[name].copy_(recorded_state[name])
    return model


def _require_recorded(name: str, recorded: list[int] | None, own: list[int] | None) -> None:
    if recorded != own:
        raise ValueError(
            f"the network must be the recorded one: {name} has shape {own}, in the run {recorded}. None: there is none."
        )


def recorded_loss(header: Mapping[str, Any], given: Loss | nn.Module | None) -> Loss:
    """Return the loss that a header describes; a `PerSampleLoss` must be given, for a function is not stored.

    Raises:
        ValueError: The loss must be given and is not, or the given loss is another one, or the header describes none.
    """
    recorded = header["loss"]
    if given is None and recorded["kind"] not in _KNOWN_LOSSES:
        raise ValueError(f"the run was recorded with the user's own loss {recorded.get('name')!r}: pass it as loss=.")
    options = {key: value for key, value in recorded.items() if key != "kind"}
    try:
        loss = losses.as_loss(_KNOWN_LOSSES[recorded["kind"]](**options) if given is None else given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the run's loss must be one that is known: {error}") from error
    if header["num_outputs"] % len(getattr(loss, "class_weights", None) or [1]):
        raise ValueError(f"the run's loss must have a weight for each class: got {recorded['class_weights']}.")
    if describe_loss(loss) != recorded:
        raise ValueError(
            f"loss must be the one the run was recorded with: {_difference(recorded, describe_loss(loss))}."
        )
    return loss


def _difference(recorded: Any, given: Any) -> str:
    """Return in words where two entries of a header differ: only what does, with both values."""
    if isinstance(recorded, list) and isinstance(given, list):
        if len(recorded) != len(given):
            return f"it has {len(recorded)}, got {len(given)}"
        number = next(n for n, pair in enumerate(zip(recorded, given, strict=True)) if pair[0] != pair[1])
        return f"number {number}: {_difference(recorded[number], given[number])}"
    if isinstance(recorded, dict) and isinstance(given, dict):
        same = [key for key in recorded if key in given and recorded[key] == given[key]]
        recorded, given = ({k: v for k, v in side.items() if k not in same} for side in (recorded, given))
    return f"it has {recorded!r}, got {given!r}"


def validate_loss_function(trajectory: Trajectory) -> None:
    """Replay the first step of a run with a `PerSampleLoss`, because its name does not determine its function.

    Raises:
        ValueError: The first step is not a step on the given loss.
    """
    if not isinstance(trajectory.loss, losses.PerSampleLoss) or not trajectory.steps:
        return
    if trajectory.steps[0].passes or trajectory.statistics is not None:  # the replay of such steps compares them all
        return
    recomputation = recomputation_of(trajectory)
    if recomputation is not None:  # computed states are those of the given loss: a kept one says whether it is recorded
        state, jump, _ = next(iter(recomputation.jumps(trajectory.model.spec)))
        if not jump <= recomputation.allowed_jump(state - 1, trajectory.dtype, trajectory.states[0]):
            raise ValueError(
                f"loss must be the one the run was recorded with: steps on the given {trajectory.loss.name!r} do not "
                f"lead to state {state}, which the run keeps."
            )
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


def validate_forward_function(trajectory: Trajectory, recorded: Tensor) -> None:
    """Raise if the network's outputs near the initial weights are not the recorded ones.

    Outputs of another machine differ by rounding: up to eps^(3/4), relative to the largest, is accepted.

    Raises:
        ValueError: The outputs differ, or the network fails on the recorded inputs.
    """
    try:
        statistics = None if trajectory.statistics is None else trajectory.statistics[0]
        outputs = fingerprint_outputs(trajectory.model, trajectory.states[0], trajectory.inputs, statistics)
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"the network must be the recorded one: it has the same weights, but fails on the recorded inputs: {error}"
        ) from error
    eps = torch.finfo(outputs.dtype).eps
    if outputs[:1].numel() != trajectory.num_outputs:
        raise ValueError(
            f"the run's header must give the network's number of outputs: it gives {trajectory.num_outputs}, the "
            f"network has {outputs[:1].numel()}. Restore the header from a copy."
        )
    limit = eps**0.75 * (1 + recorded.abs().max())
    if outputs.shape != recorded.shape or not (outputs - recorded).abs().max() <= limit:
        raise ValueError(
            "the network must be the recorded one: it has the same weights, but its outputs at the initial state "
            "differ from those recorded. Build it with the same layers and activation functions."
        )
