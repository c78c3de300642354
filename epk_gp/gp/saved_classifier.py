"""A fitted `UncertainClassifier` on disk: one safetensors file, and JSON that describes it."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor, nn

from epk_gp.core.model import NUM_FINGERPRINT_POINTS, FunctionalModel, fingerprint_outputs
from epk_gp.core.options import ComputeOptions
from epk_gp.core.step import Step, fingerprint_data
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.data import NodesWithoutData
from epk_gp.gp.label_kernel import InputFeatures, LabelKernel
from epk_gp.gp.label_process import ExactLabelProcess, LabelProcess, LabelSettings, SketchedLabelProcess
from epk_gp.gp.stacking import Stacking
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.quadrature.rules import chords, straight
from epk_gp.storage.compatibility import recorded_loss, recorded_model, validate_forward_function
from epk_gp.storage.files import (
    MAX_JSON_BYTES,
    atomic_write,
    checksum,
    checksum_file,
    checksum_json,
    checksummed_json,
    load_tensors,
    read_bytes,
    read_checksummed_json,
)
from epk_gp.storage.schema import Count, Positive, Record, RunDescription, run_header, validated

FORMAT = "epk_gp uncertain classifier"
FORMAT_VERSION = 1
_ROUNDING_POWER = 3 / 8  # of eps: how far another machine may be from a stored posterior; 1e-6, and 2e-3 in float32
DESCRIPTION, TENSORS = "classifier.json", "classifier.safetensors"
_NUMBERS = ("noise", "outputscale", "negative_log_likelihood")  # of a process
_DAMAGED = "must be what UncertainClassifier.save wrote: it is damaged. Restore it from a copy."


class _Settings(Record):
    """`LabelSettings`; chords by their length."""

    nodes: Positive | None
    features: Positive | Literal["exact"] | None
    inputs_kernel: Literal["rbf"] | None
    seed: int
    power: Positive | None
    chords_every: Positive = 1


class _Process(Record):
    """The numbers of a process."""

    kind: Literal["exact", "sketched"]
    noise: float
    outputscale: float
    negative_log_likelihood: float
    lengthscale: float | None
    power: Positive


class _Description(Record):
    """What the JSON file holds."""

    format: str
    version: int
    run: RunDescription
    digest: str
    step_size: float
    settings: _Settings
    process: _Process
    stacking: dict[str, int | float]
    classes: list[Any] | None
    tensor_bytes: Count
    tensor_blake2b: str


@dataclass(frozen=True, eq=False)
class SavedClassifier:
    """What a fitted classifier consists of, beside its run.

    Attributes:
        settings: What the process is made of.
        process: The process on the labels.
        stacking: The weights of network and process.
        scores: Conformity scores, ascending.
        posterior: What the classifier says of the first training points, (n, C + 1): by it a file is recognised whose
            entries do not belong together.
        classes: Names of the classes, or None for 0 .. C - 1.
    """

    settings: LabelSettings
    process: LabelProcess
    stacking: Stacking
    scores: Tensor
    posterior: Tensor
    classes: list[Any] | None = None

    def validate_posterior(self, actual: Float[Tensor, "n columns"]) -> None:
        """Raise if the classifier does not say what it said when it was saved, up to the rounding of its dtype.

        Means are compared with the largest mean, variances with the largest and, for rounding, with the prior one.

        Raises:
            TypeError: It says something else.
        """
        inputs = self.process.inputs if isinstance(self.process, ExactLabelProcess) else None
        eps = torch.finfo(torch.float32 if inputs is None or inputs.dtype != torch.float64 else torch.float64).eps
        size = self.posterior.abs().amax(0)
        size[:-1] = size[:-1].max()
        limit = eps**_ROUNDING_POWER * size
        limit[-1] += 8 * eps * self.stacking.process**2 * self.process.outputscale
        if actual.shape != self.posterior.shape or not ((actual - self.posterior).abs() <= limit).all():
            raise TypeError("its tensors do not give the logits that were stored with them")


def write_classifier(folder: str | os.PathLike[str], saved: SavedClassifier, trajectory: Trajectory) -> None:
    """Write a fitted classifier to a new or empty folder.

    Raises:
        FileExistsError: The folder holds something.
        OSError: The folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        raise FileExistsError(f"folder must be a new or empty folder: {place} holds something. Choose another.")
    process = saved.process
    nodes = nodes_of(process)
    probes = trajectory.inputs[:NUM_FINGERPRINT_POINTS]
    statistics = nodes.statistics
    tensors = {
        "states": torch.stack([nodes.states[s] for s in range(len(nodes.states))]),
        "probe_inputs": probes,
        "targets": trajectory.targets[:NUM_FINGERPRINT_POINTS],
        "probe": fingerprint_outputs(
            trajectory.model, nodes.states[0], probes, None if statistics is None else statistics[0]
        ),
        "values": process.values,
        "vectors": process.vectors,
        "weights": process.weights,
        "scores": saved.scores,
        "posterior": saved.posterior,
    }
    if statistics is not None:
        tensors["statistics"] = torch.stack([statistics[s] for s in range(len(statistics))])
    if isinstance(process, ExactLabelProcess):
        tensors |= {"inputs": process.inputs, "process_targets": process.targets}
    tensors |= {f"constant.{name}": value for name, value in trajectory.model.frozen_state().items()}
    tensors |= trajectory.model.signature.stored_tensors()
    described: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "run": run_header(
            trajectory.model,
            trajectory.loss,
            nodes.update_rule,
            num_points=trajectory.num_points,
            num_outputs=trajectory.num_outputs,
            data_digest=trajectory.data_digest,
        ),
        "digest": nodes.digest,
        "step_size": nodes.steps[0].lr,
        "settings": _describe_settings(saved.settings),
        "process": _describe_process(process),
        "stacking": asdict(saved.stacking),
        "classes": saved.classes,
    }
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
    atomic_write(place / TENSORS, content)
    described["tensor_bytes"] = len(content)
    described["tensor_blake2b"] = checksum(content, checksum_json(described))
    atomic_write(place / DESCRIPTION, checksummed_json(described))


def read_classifier(
    folder: str | os.PathLike[str], net: nn.Module, output: Callable[[Any], Tensor] | None = None
) -> tuple[SavedClassifier, Trajectory]:
    """Read a classifier that `write_classifier` wrote.

    Args:
        folder: The folder.
        net: A network of the recorded architecture.
        output: The function from what the network returns to its outputs, as at recording.

    Returns:
        The classifier, and a run whose steps are the nodes of the path and whose last state is the trained network,
        without its training data.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged or of another version, or the network is another one.
    """
    description, data = _read_files(Path(folder))
    header = dict(description.run)
    with damage_named(folder):
        scores = data["scores"]
        is_finite = data["states"].isfinite().all() and scores.isfinite().all()
        if not (is_finite and scores.ndim == 1 and len(scores) and (scores.diff() >= 0).all()):
            raise TypeError("a state or score is not finite, or the scores are not ascending")
        probes = {**data, "inputs": data["probe_inputs"]}
    model = recorded_model(header, probes, net, output)
    with damage_named(folder):
        trajectory = _read_nodes(description, header, data, model)
        settings = _label_settings(description.settings)
        process = _read_process(description.process, data, trajectory, settings)
        stacking: Any = description.stacking
        saved = SavedClassifier(settings, process, Stacking(**stacking), scores, data["posterior"], description.classes)
        return saved, trajectory


@contextmanager
def damage_named(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what tensors of a wrong kind raise into one clear error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(f"{Path(folder) / DESCRIPTION} {_DAMAGED} ({reason})") from error


def nodes_of(process: LabelProcess) -> Trajectory:
    """Return the nodes of the path that a process stands on, as a run."""
    return _kernel_of(process).nodes


def _kernel_of(process: LabelProcess) -> LabelKernel | InputFeatures:
    if isinstance(process, ExactLabelProcess):
        return process.kernel
    if isinstance(process, SketchedLabelProcess):
        return process.features
    raise TypeError(f"a process of type {type(process).__name__} cannot be stored: this is a bug in epk_gp.")


def _describe_settings(settings: LabelSettings) -> dict[str, Any]:
    """Return settings as JSON has them; chords by their length, which classifiers of straight steps do not have."""
    described = {name: value for name, value in asdict(settings).items() if name != "path"}
    return described if settings.path.every == 1 else {**described, "chords_every": settings.path.every}


def _label_settings(described: _Settings) -> LabelSettings:
    settings, every = dict(described), described.chords_every
    del settings["chords_every"]
    return LabelSettings(**settings, path=straight() if every == 1 else chords(every))


def _describe_process(process: LabelProcess) -> dict[str, Any]:
    kernel = _kernel_of(process)
    kind = "exact" if isinstance(kernel, LabelKernel) else "sketched"
    numbers = {name: getattr(process, name) for name in _NUMBERS}
    return numbers | {"kind": kind, "lengthscale": kernel.lengthscale, "power": kernel.power}


def _read_process(
    description: _Process, data: Mapping[str, Tensor], trajectory: Trajectory, settings: LabelSettings
) -> LabelProcess:
    common: dict[str, Any] = {name: data[name] for name in ("values", "vectors", "weights")}
    common |= {name: getattr(description, name) for name in _NUMBERS}
    if description.kind == "exact":
        kernel = LabelKernel(trajectory, description.lengthscale, ComputeOptions(), settings.seed, description.power)
        return ExactLabelProcess(**common, kernel=kernel, inputs=data["inputs"], targets=data["process_targets"])
    features = InputFeatures(
        trajectory, len(data["vectors"]), settings.seed, description.lengthscale, power=description.power
    )
    return SketchedLabelProcess(**common, features=features, training_features=None, targets=None)


def _read_files(folder: Path) -> tuple[_Description, dict[str, Tensor]]:
    """Read both files, checked against their checksums."""
    file, tensors = folder / DESCRIPTION, folder / TENSORS
    if not file.is_file():
        raise FileNotFoundError(f"folder must be one that UncertainClassifier.save wrote: {file} does not exist.")
    message = f"{file} {_DAMAGED}"
    entries = read_checksummed_json(read_bytes(file, MAX_JSON_BYTES, str(file)), message)
    if entries is None or entries.get("format") != FORMAT:
        raise ValueError(message)
    if entries.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"{file} must have version {FORMAT_VERSION}: it has {entries.get('version')}. Read it with the version "
            "of epk_gp that wrote it."
        )
    description = validated(_Description, entries, message)
    del entries["tensor_blake2b"]
    size = description.tensor_bytes
    if checksum_file(tensors, size, str(tensors), checksum_json(entries)) != description.tensor_blake2b:
        raise ValueError(
            f"{tensors} and {DESCRIPTION} must have the checksum they were written with: one is damaged. Restore both "
            "from a copy."
        )
    return description, load_tensors(read_bytes(tensors, size, str(tensors)), str(tensors))


def _read_nodes(
    description: _Description, header: Mapping[str, Any], data: Mapping[str, Tensor], model: FunctionalModel
) -> Trajectory:
    """Build the run of nodes; its training data are a few points, by which the network is recognised."""
    states, length = tuple(data["states"]), description.step_size
    coefficients = stack_coefficients([LinearStep(lr=length)] * len(model.sizes), model.sizes)
    trajectory = NodesWithoutData(
        model=model,
        inputs=data["probe_inputs"],
        targets=data["targets"],
        loss=recorded_loss(header, None),
        update_rule=header["law"]["name"],
        states=states,
        updates=(coefficients,) * (len(states) - 1),
        steps=tuple(Step(index=j, lr=length, batch=None) for j in range(len(states) - 1)),
        num_outputs=header["num_outputs"],
        digest=description.digest,
        data_digest=fingerprint_data(data["probe_inputs"], data["targets"]),
        statistics=tuple(data["statistics"]) if "statistics" in data else None,
    )
    validate_forward_function(trajectory, data["probe"])
    return trajectory
