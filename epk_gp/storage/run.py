"""Create, resume, open and check a run on disk; check that network, loss, data and optimizer are the recorded ones."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from epk_gp.core import losses
from epk_gp.core.checks import door
from epk_gp.core.inputs import signature_from_json
from epk_gp.core.losses import CrossEntropy, Loss, MeanSquaredError, NegativeLogLikelihood, UnstatedLoss
from epk_gp.core.model import FunctionalModel, fingerprint_outputs, functionalize, with_kept_activations
from epk_gp.core.plans import TensorSpec
from epk_gp.core.replayed_steps import RunReplay, replayed_steps
from epk_gp.core.show import tracked
from epk_gp.core.states import Recomputation, recomputation_of
from epk_gp.core.step import Step, fingerprint_data
from epk_gp.core.trajectory import FirstOf, Trajectory, flat_state
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import clip_from_json, step_tolerance
from epk_gp.storage import chunks
from epk_gp.storage.files import regular_file_size
from epk_gp.storage.rows import Rows, from_bytes, num_seen
from epk_gp.storage.schema import (
    DATA,
    HEADER,
    INPUTS,
    JOURNAL,
    TARGETS,
    WEIGHT_DTYPES,
    Chunk,
    RunHeader,
    chunk_schema,
    describe_loss,
    opened_chunk,
    read_data,
    read_header,
    read_journal,
    resume_name,
)
from epk_gp.storage.training_state import TrainingState, read_training_state
from epk_gp.storage.writer import RunWriter, open_for_writing

_KNOWN_LOSSES: dict[str, Any] = {
    kind.__name__: kind for kind in (CrossEntropy, NegativeLogLikelihood, MeanSquaredError, UnstatedLoss)
}
# Header entries that may differ when a run is resumed: they describe the files themselves.
_OF_FILES = ("format", "version", "data_blake2b", "data_bytes")


def validate_same_header(recorded: Mapping[str, Any], header: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise if the header that a run would get now differs from the recorded one.

    Raises:
        ValueError: An entry differs; the message names it.
    """
    for name, entry in RunHeader.model_fields.items():  # the loss first: another one needs other targets
        before, now = (side.get(name, entry.default) for side in (recorded, header))
        if name not in _OF_FILES and before != now:
            raise ValueError(f"{name} must be the recorded one to resume {path}: {_difference(before, now)}.")


def recorded_model(
    header: Mapping[str, Any], data: Mapping[str, Tensor], net: nn.Module, output: Callable[[Any], Tensor] | None = None
) -> FunctionalModel:
    """Copy a network of the recorded architecture, with the recorded frozen state and dtype, to the CPU.

    Args:
        header: The run's header.
        data: Its tensors, including the frozen state.
        net: The network; its weights are ignored and not changed.
        output: Maps the network's result to the outputs, as at recording.

    Raises:
        ValueError: The network has other parameters or buffers, by name or by shape; or the data do not have the
            recorded structure, or `output` is missing.
    """
    signature = signature_from_json(header["signature"], output, data)
    if signature.layout is not None and data["inputs"].shape[1:] != (signature.layout.width,):
        raise ValueError(f"the run's inputs must have {signature.layout.width} columns, as the header says.")
    buffers = {name: list(value.shape) for name, value in net.named_buffers()} if isinstance(net, nn.Module) else {}
    for name, shape in zip(header["statistics"], header["statistic_shapes"], strict=True):
        _require_recorded(f"moving statistic {name}", shape, buffers.get(name))
    model = functionalize(net, tuple(header["names"]), tuple(header["statistics"]), signature)
    base = {} if header.get("base") is None else model.base()
    if base and fingerprint_data(*base.values()) != header["base"]:
        raise ValueError(
            "the network must have the frozen weights that it was trained with, of which the run holds the digest "
            "alone: it has others. Load the same pretrained weights before."
        )
    for name, recorded, shape in zip(header["names"], header["shapes"], model.shapes, strict=True):
        _require_recorded(name, recorded, list(shape))
    model = model.variant(TensorSpec(WEIGHT_DTYPES[header["dtype"]], torch.device("cpu")))
    frozen_state = model.frozen_state()
    recorded_state = {k.removeprefix("constant."): v for k, v in data.items() if k.startswith("constant.")}
    recorded_state |= {name: value for name, value in frozen_state.items() if name in base}
    for name in sorted(frozen_state.keys() | recorded_state.keys()):
        recorded, own = (list(side[name].shape) if name in side else None for side in (recorded_state, frozen_state))
        _require_recorded(name, recorded, own)
        frozen_state[name].copy_(recorded_state[name])
    return model


def _require_recorded(name: str, recorded: list[int] | None, own: list[int] | None) -> None:
    if recorded != own:
        raise ValueError(f"the network must be the recorded one: {name} has shape {own}, in the run {recorded}.")


def recorded_loss(header: Mapping[str, Any], given: Loss | nn.Module | None) -> Loss:
    """Return the loss that a header describes; a `PerSampleLoss` must be given, because a function is not stored.

    Raises:
        ValueError: The loss is missing, differs from the given one, or the header describes none.
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
        raise ValueError(f"loss must be the recorded one: {_difference(recorded, describe_loss(loss))}.")
    return loss


def _difference(recorded: Any, given: Any) -> str:
    """Describe the difference between two entries of a header, with both values."""
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
    first = trajectory.steps[0]
    if first.passes or first.move or trajectory.statistics is not None:  # the replay of such steps compares all of them
        return
    recomputation = recomputation_of(trajectory)
    if recomputation is not None:  # computed states follow the given loss, a kept one the recorded loss
        state = recomputation.kept.numbers[1]
        allowed = recomputation.allowed_jump(state - 1, trajectory.dtype, trajectory.states[0])
        if not recomputation.jump(state, trajectory.model.spec) <= allowed:
            raise ValueError(f"loss must be the recorded one: its steps do not lead to state {state}.")
        return
    start, end = trajectory.states[0], trajectory.states[1]
    predicted = next(replayed_steps(RunReplay(trajectory, trajectory.model, start), slice(1))).d
    if not (end - start - predicted).abs().max() <= step_tolerance(start, predicted):
        raise ValueError(f"loss must be the recorded one: step 0 is not a step on the given {trajectory.loss.name!r}.")


def validate_forward_function(trajectory: Trajectory, recorded: Tensor) -> None:
    """Raise if the network's outputs near the initial weights are not the recorded ones.

    Outputs on another machine differ by rounding: up to eps^(3/4), relative to the largest, is accepted.

    Raises:
        ValueError: The outputs differ, or the network fails on the recorded inputs.
    """
    try:
        statistics = None if trajectory.statistics is None else trajectory.statistics[0]
        outputs = fingerprint_outputs(trajectory.model, trajectory.states[0], trajectory.inputs, statistics)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"the network must be the recorded one: it fails on the recorded inputs: {error}") from error
    eps = torch.finfo(outputs.dtype).eps
    if outputs[:1].numel() != trajectory.num_outputs:
        raise ValueError(f"the header must give the network's number of outputs: it gives {trajectory.num_outputs}.")
    limit = eps**0.75 * (1 + recorded.abs().max())
    if outputs.shape != recorded.shape or not (outputs - recorded).abs().max() <= limit:
        raise ValueError("the network must be the recorded one: its outputs at the initial state differ.")


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a run, damaged or not."""
    file = Path(folder) / HEADER
    return regular_file_size(file, str(file)) is not None


def resume_run(
    folder: str | os.PathLike[str],
    header: Mapping[str, Any],
    net: nn.Module,
    loss: Loss,
    training: TrainingState,
    *,
    output: Callable[[Any], Tensor] | None = None,
) -> tuple[Trajectory, RunWriter]:
    """Open a run to continue it: check that it is the same run, and restore the state of its last commit.

    Args:
        folder: The run's folder.
        header: The header that the run would get if it were created now.
        net: The network; its weights, frozen parameters and buffers are overwritten.
        loss: The loss.
        training: The optimizer and other objects, created as the recorded ones were; their state is overwritten.
        output: Maps the network's result to the outputs, as at recording.

    Returns:
        The run up to its last commit, and a writer that continues it.

    Raises:
        BlockingIOError: Another process records there.
        OSError: The folder cannot be written.
        ValueError: The run is damaged, or belongs to another network, data set, loss or optimizer.
    """
    recorded = read_header(folder)
    validate_same_header(recorded, {**header, **training.header()}, folder)
    writer = open_for_writing(folder, recorded)
    with writer.closed_on_error():
        trajectory = load_trajectory(folder, net, loss=loss, output=output)
        number, chunk = len(writer.chunks) - 1, writer.chunks[-1]
        tensors, where = read_training_state(folder, number, chunk), str(Path(folder) / resume_name(number))
        buffers = training.load_state_dict(tensors, where)
        writer.remove_uncommitted()
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    frozen, weights = trajectory.model.frozen_state(), trajectory.weights(chunk.last)
    moved = weights if chunk.last - 1 in trajectory.moves else {}  # moved after the buffers were kept
    with torch.no_grad():
        for name, value in {**frozen, **weights, **buffers, **moved}.items():  # buffers last, because they changed
            own[name].copy_(value)
    return trajectory, writer


@door
def load_trajectory(
    folder: str | os.PathLike[str],
    net: nn.Module,
    *,
    loss: Loss | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Trajectory:
    """Open a recorded run for reading.

    Every file is checked against its committed checksum; the weights are then mapped, not loaded.

    Args:
        folder: The run's folder.
        net: A network of the recorded architecture; its weights are ignored and not changed.
        loss: The loss, needed only for a `PerSampleLoss`, whose function is not stored.
        output: The function from the network's result to its outputs, needed if the run was recorded with one.

    Returns:
        The run, with its data on the CPU.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        TypeError: `output` is not a function.
        ValueError: A file is damaged; or the network's names, shapes or forward function differ from the recorded
            ones, or it checkpoints re-entrantly; or the loss or `output` is missing or differs.
    """
    header = read_header(folder)
    schema = chunk_schema(header)
    data = read_data(folder, header)
    committed = read_journal(folder).chunks
    model = recorded_model(header, data, net, output)
    steps = tuple(step for chunk in committed for step in chunks.read_steps(folder, schema, chunk))
    modules = [name for name, _ in net.named_modules()]
    if header["modules"] != modules and any(step.passes for step in steps):  # the recorded modes would not fit them
        raise ValueError(f"the network must have the recorded modules: {_difference(header['modules'], modules)}.")
    graph = model.signature.stored_tensors().values()
    if fingerprint_data(data["inputs"], data["targets"], *graph) != header["data_digest"]:
        raise ValueError(f"{folder}: the training data must have the digest in the header: it has another.")
    path = Path(folder)
    trajectory = Trajectory(
        model=model,
        inputs=data["inputs"],
        targets=data["targets"],
        loss=recorded_loss(header, loss),
        update_rule=header["law"]["name"],
        states=chunks.StoredStates(path, schema, committed),
        updates=chunks.StoredUpdates(path, schema, committed),
        steps=steps,
        num_outputs=header["num_outputs"],
        digest=committed[-1].digest,
        data_digest=header["data_digest"],
        statistics=chunks.StoredStates(path, schema, committed, "statistics") if schema.num_statistics else None,
        unexplained=None if header["unexplained"] is None else float(header["unexplained"]),
        optimizer_groups=tuple(map(OptimizerGroup.from_json, header["groups"])),
        clip=clip_from_json(header["clip"]),
        momentum=data.get("momentum"),
        digests=chunks.read_digests(path, committed),
    )
    validate_forward_function(trajectory, data["probe"])
    if schema.is_stream:
        X, y = _stream_data(path, data, committed, steps)
        trajectory = replace(trajectory, inputs=X, targets=y, data_digest=fingerprint_data(X, y))
    initial = flat_state(trajectory, 0, data["inputs"])
    trajectory = replace(trajectory, model=with_kept_activations(model, initial, data["inputs"]))
    trajectory = chunks.with_computed_states(trajectory)
    validate_loss_function(trajectory)
    return trajectory


def require_same_run(trajectory: Trajectory) -> None:
    """Raise if the folder of a run on disk has changed since the trajectory was loaded.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: It holds another run.
    """
    states: Any = trajectory.trained.states
    while isinstance(states, FirstOf | Recomputation):  # for a run up to a state
        states = states.whole if isinstance(states, FirstOf) else states.kept
    if not isinstance(states, chunks.StoredStates):
        return
    if read_journal(states.path).chunks[: len(states.chunks)] != states.chunks:
        raise ValueError(f"{states.path} must hold the run with digest {trajectory.digest[:12]}: it holds another.")


def _stream_data(
    path: str | os.PathLike[str], data: Mapping[str, Tensor], committed: Sequence[Chunk], steps: Sequence[Step]
) -> tuple[Shaped[Tensor, "M ..."], Shaped[Tensor, "M ..."]]:
    """Return inputs and targets of a stream, from the header and the chunks, mapped from temporary files.

    Raises:
        ValueError: The chunks do not hold the points of their steps.
    """
    rows = Rows()
    rows.append(data["inputs"], data["targets"])
    for chunk in committed:
        with opened_chunk(path, chunk) as tensors:
            if {INPUTS, TARGETS} <= {*tensors.keys()}:
                X = from_bytes(tensors.get_tensor(INPUTS), data["inputs"].dtype)
                rows.append(X, tensors.get_tensor(TARGETS))
    if len(rows) < num_seen(steps):
        raise ValueError(f"{path} must hold all rows of the stream that its steps saw: it holds {len(rows)}.")
    X, y = rows.mapped()
    return X, y


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run after all its files were checked.

    Attributes:
        header: The run's header.
        chunks: Its committed chunks.
        steps: Its steps.
        finished: Whether the recording was finished.
        files: Number of files that were checked.
    """

    header: dict[str, Any]
    chunks: tuple[Chunk, ...]
    steps: tuple[Step, ...]
    finished: bool
    files: int

    @property
    def num_steps(self) -> int:
        """Number S of steps."""
        return len(self.steps)


def check_run(folder: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and compare it with its committed form.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        ValueError: A file is damaged; the message names it and its states.
    """
    header = read_header(folder)
    read_data(folder, header)
    schema, journal = chunk_schema(header), read_journal(folder)
    steps = list[Step]()
    for chunk in tracked(journal.chunks, "checking", unit="chunk", shown=progress):
        own = chunks.read_steps(folder, schema, chunk)
        for step in own:
            list(step.passes)  # each is read and checked
        steps.extend(own)
    number, chunk = len(journal.chunks) - 1, journal.chunks[-1]
    try:
        read_training_state(folder, number, chunk)
    except FileNotFoundError:
        if read_journal(folder).bytes == journal.bytes:  # a writer that commits another chunk removes it
            raise
    files = len((HEADER, DATA, JOURNAL, resume_name(number), *journal.chunks)) + journal.finished
    return RunSummary(header, journal.chunks, tuple(steps), journal.finished, files)
