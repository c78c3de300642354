"""Create, resume, open and check a run on disk."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.gradients import with_kept_activations
from epk_gp.core.losses import Loss
from epk_gp.core.show import tracked
from epk_gp.core.step import Step, fingerprint_data
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import clip_from_json
from epk_gp.storage.chunks import read_steps
from epk_gp.storage.compatibility import (
    recorded_loss,
    recorded_model,
    validate_forward_function,
    validate_loss_function,
    validate_modules,
    validate_same_header,
)
from epk_gp.storage.files import regular_file_size
from epk_gp.storage.journal import FINISHED, JOURNAL, Chunk, read_journal, resume_name
from epk_gp.storage.passes import pass_bytes
from epk_gp.storage.schema import DATA, HEADER, chunk_schema, module_names, read_data, read_header
from epk_gp.storage.states import StoredStates, stored_run, with_computed_states
from epk_gp.storage.training_state import TrainingState, read_training_state
from epk_gp.storage.writer import RunWriter, create_run_dir, open_for_writing, write_header


@dataclass(frozen=True, eq=False)
class RunStart:
    """A run before its first step.

    Attributes:
        header: Description of the run (`schema.run_header`), with `check_every` and `modules`.
        data: Tensors `inputs`, `targets`, `probe` (the fingerprint outputs), `constant.NAME` for the frozen state, and
            `graph.KEY` for the tensors of a graph.
        weights: The initial weights.
        digest: Digest of the run of no steps.
        statistics: The initial moving statistics; None for a network without them.
    """

    header: Mapping[str, Any]
    data: Mapping[str, Tensor]
    weights: Float[Tensor, " P"]
    digest: str
    statistics: Float[Tensor, " Q"] | None = None


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a run, damaged or not."""
    file = Path(folder) / HEADER
    return regular_file_size(file, str(file)) is not None


def create_run(folder: str | os.PathLike[str], start: RunStart, training: TrainingState) -> RunWriter:
    """Create a run with its initial weights in a new or empty folder.

    Raises:
        FileExistsError: The folder already holds something.
        BlockingIOError: Another process creates a run there.
        OSError: The folder cannot be written.
        TypeError: The training state holds something that only a pickle could store.
    """
    tensors = training.state_dict()
    writer, header = create_run_dir(folder, {**start.header, **training.header()}, start.data)
    try:
        statistics = () if start.statistics is None else (start.statistics,)
        writer.append([start.weights], [], [], start.digest, tensors, statistics)
        write_header(writer, header)
    except BaseException:
        writer.close()
        raise
    return writer


def resume_run(
    folder: str | os.PathLike[str],
    header: Mapping[str, Any],
    net: nn.Module,
    loss: Loss,
    training: TrainingState,
    *,
    output: Callable[[Any], Tensor] | None = None,
) -> tuple[Trajectory, RunWriter]:
    """Open a run to continue it: check that it is the same, and restore the state of its last commit.

    Args:
        folder: The run's folder.
        header: The header that the run would get if it were created now.
        net: The network; its weights, frozen parameters and buffers are overwritten.
        loss: The loss.
        training: The optimizer and other objects, made as the recorded ones were; their state is overwritten.
        output: Takes the outputs from what the network returns, as at recording.

    Returns:
        The run up to its last commit, and a writer that continues it.

    Raises:
        BlockingIOError: Another process records there.
        OSError: The folder cannot be written.
        ValueError: The run is damaged, or it is one of another network, data set, loss or optimizer.
    """
    recorded = read_header(folder)
    validate_same_header(recorded, {**header, **training.header()}, folder)
    writer = open_for_writing(folder, recorded)
    try:
        trajectory = load_trajectory(folder, net, loss=loss, output=output)
        number, chunk = len(writer.chunks) - 1, writer.chunks[-1]
        buffers = training.load_state_dict(
            read_training_state(folder, number, chunk), str(Path(folder) / resume_name(number))
        )
        writer.remove_uncommitted()
    except BaseException:
        writer.close()
        raise
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    frozen, weights = trajectory.model.frozen_state(), trajectory.weights(chunk.last)
    with torch.no_grad():
        for name, value in {**frozen, **weights, **buffers}.items():  # buffers last: they moved
            own[name].copy_(value)
    return trajectory, writer


def load_trajectory(
    folder: str | os.PathLike[str],
    net: nn.Module,
    *,
    loss: Loss | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Trajectory:
    """Open a recorded run for reading.

    Every file is checked against the checksum it was committed with; the weights are then mapped, not loaded.

    Args:
        folder: The run's folder.
        net: A network of the recorded architecture; its weights do not matter and are not changed.
        loss: The loss, needed only if it was a `PerSampleLoss`, whose function is not stored.
        output: The function from what the network returns to its outputs, needed if the run was recorded with one.

    Returns:
        The run, with its data on the CPU.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        TypeError: `output` is no function.
        ValueError: A file is damaged; or the network has other names, shapes or another forward function than the
            recorded one, or checkpoints re-entrantly; or the loss or `output` is missing or another one.
    """
    header = read_header(folder)
    schema = chunk_schema(header)
    data = read_data(folder, header)
    chunks = read_journal(folder).chunks
    model = recorded_model(header, data, net, output)
    steps = tuple(step for chunk in chunks for step in read_steps(folder, schema, chunk))
    if any(step.passes for step in steps):
        validate_modules(header["modules"], module_names(net))
    graph = model.signature.stored_tensors().values()
    if fingerprint_data(data["inputs"], data["targets"], *graph) != header["data_digest"]:
        raise ValueError(f"{folder}: the training data must have the digest in the header: it has another.")
    states, updates = stored_run(folder, schema, chunks)
    trajectory = Trajectory(
        model=model,
        inputs=data["inputs"],
        targets=data["targets"],
        loss=recorded_loss(header, loss),
        update_rule=header["law"]["name"],
        states=states,
        updates=updates,
        steps=steps,
        num_outputs=header["num_outputs"],
        digest=chunks[-1].digest,
        data_digest=header["data_digest"],
        statistics=StoredStates(Path(folder), schema, chunks, "statistics") if schema.num_statistics else None,
        unexplained=None if header["unexplained"] is None else float(header["unexplained"]),
        optimizer_groups=tuple(map(OptimizerGroup.from_json, header["groups"])),
        clip=clip_from_json(header["clip"]),
    )
    validate_forward_function(trajectory, data["probe"])
    initial = flat_state(trajectory, 0, data["inputs"])
    trajectory = replace(trajectory, model=with_kept_activations(model, initial, data["inputs"]))
    trajectory = with_computed_states(trajectory)
    validate_loss_function(trajectory)
    return trajectory


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run whose files were all checked.

    Attributes:
        header: The run's header.
        chunks: Its committed chunks.
        finished: Whether the recording came to its end.
        learning_rates: Learning rate of each step.
        batch_sizes: Number of points of each step.
        num_passes: Number of recorded forward passes of all steps.
        pass_bytes: Bytes that they take in memory.
        data_shapes: Shapes of inputs, targets, frozen state and fingerprint outputs.
        files: Number of files that were checked.
        bytes: Their total size.
    """

    header: dict[str, Any]
    chunks: tuple[Chunk, ...]
    finished: bool
    learning_rates: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    num_passes: int
    pass_bytes: int
    data_shapes: dict[str, tuple[int, ...]]
    files: int
    bytes: int

    @property
    def num_steps(self) -> int:
        """Number S of steps."""
        return len(self.learning_rates)


def check_run(folder: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and check it against what was committed.

    Raises:
        FileNotFoundError: The folder holds no run, or a file is missing.
        ValueError: A file is damaged; the message names it and the states it held.
    """
    place = Path(folder)
    header = read_header(folder)
    schema = chunk_schema(header)
    data = read_data(folder, header)
    journal = read_journal(folder)
    steps, num_bytes = list[Step](), 0
    for chunk in tracked(journal.chunks, "checking", unit="chunk", shown=progress):
        own = read_steps(folder, schema, chunk)
        num_bytes += sum(pass_bytes(step.passes) for step in own)  # each is read and checked
        steps.extend(own)
    number, chunk = len(journal.chunks) - 1, journal.chunks[-1]
    try:
        read_training_state(folder, number, chunk)
    except FileNotFoundError:
        if read_journal(folder).bytes == journal.bytes:  # a writer that committed another chunk would have removed it
            raise
    names = [HEADER, DATA, JOURNAL, resume_name(number), *(chunk.file for chunk in journal.chunks)]
    names += [FINISHED] if journal.finished else []
    sizes = [regular_file_size(place / name, name) for name in names]
    return RunSummary(
        header=header,
        chunks=journal.chunks,
        finished=journal.finished,
        learning_rates=tuple(step.lr for step in steps),
        batch_sizes=tuple(schema.num_points if step.batch is None else len(step.batch) for step in steps),
        num_passes=sum(len(step.passes) for step in steps),
        pass_bytes=num_bytes,
        data_shapes={name: tuple(value.shape) for name, value in data.items()},
        files=len(names),
        bytes=sum(size or 0 for size in sizes),
    )
