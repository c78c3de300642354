"""`epk-gp record`: train a network and record every step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from torch import nn
from torch.nn import functional as F

from epk_gp.cli.data import SplitOptions, load_split, validate_held_out, write_held_out
from epk_gp.cli.manifest import read_network_spec, write_manifest
from epk_gp.cli.networks import NetworkSpec, build_network, network_spec, validate_network
from epk_gp.cli.options import Dtype, LossName, OptimizerName
from epk_gp.cli.parsing import torch_dtype
from epk_gp.core.losses import CrossEntropy, MeanSquaredError
from epk_gp.core.model import zero_final_layer
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import Dataset
from epk_gp.provenance import Stopwatch
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.setup import ClipNorm
from epk_gp.recording.train import train
from epk_gp.storage.run import is_run
from epk_gp.storage.writer import MANIFEST_FILES, Storage

_BLOCK = 1000  # inputs per forward pass when the accuracy is computed


def record(
    *,
    out: Path,
    data: str,
    data_dir: Path | None,
    num_train: int | None,
    num_test: int | None,
    num_classes: int | None,
    network: str,
    width: int | None,
    activation: str | None,
    zero_final: bool,
    steps: int,
    optimizer: OptimizerName,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    clip_norm: float | None,
    batch_size: int | None,
    loss: LossName,
    dtype: Dtype,
    resume: bool,
    keep_every: int,
    commit_seconds: float,
    check_every: int,
    seed: int,
    quiet: bool,
) -> None:
    """Train a network by gradient descent and record every step."""
    timer = Stopwatch()
    rates = OptimizerRates(lr, momentum, nesterov, weight_decay)
    validate_rates(optimizer, rates)
    _require_usable_folder(out, resume)
    asked = SplitOptions(num_train, num_test, num_classes, data_dir)
    split = load_split(data, asked, seed=seed, dtype=torch_dtype(dtype))
    X, y = split.train.inputs, split.train.labels
    if batch_size is not None and batch_size > len(X):
        raise ValueError(f"--batch-size must be at most the {len(X)} training points: got {batch_size}.")
    spec = network_spec(network, X, split.train.num_classes, width, activation)
    torch.manual_seed(seed)
    net = build_network(spec).to(torch_dtype(dtype))
    if zero_final:
        zero_final_layer(net)
    num_outputs = validate_network(net, X, split.train.num_classes)
    y = y if loss is LossName.cross_entropy else F.one_hot(y, num_outputs).to(torch_dtype(dtype))
    made = make_optimizer(net, optimizer, rates)
    config: dict[str, object] = {"data": data, "data_dir": None if data_dir is None else str(data_dir)}
    config |= {"num_train": len(split.train), "num_test": num_test, "num_classes": num_classes, "dtype": str(dtype)}
    config |= {"steps": steps, "batch_size": batch_size, "loss": str(loss), "seed": seed, "clip_norm": clip_norm}
    config |= {"optimizer": str(optimizer)} | asdict(rates)
    config |= {"zero_final_layer": zero_final, "check_every": check_every, "keep_every": keep_every}
    description = _Description(out, spec, config, split.held_out)
    with _resumed(description) if resume and is_run(out) else _created(description):
        trajectory = train(
            net,
            X,
            y,
            optimizer=made,
            steps=steps,
            loss=CrossEntropy() if loss is LossName.cross_entropy else MeanSquaredError(),
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(seed),
            clip=None if clip_norm is None else ClipNorm(clip_norm),
            folder=out,
            resume=resume,
            storage=Storage(seconds=commit_seconds, keep_every=keep_every),
            check_every=check_every,
            progress=not quiet,
        )
    description.write()
    parts = [(name, d) for name, d in (("training", split.train), ("held-out", split.held_out)) if len(d)]
    predicted = {name: network_outputs(trajectory, d.inputs, block_size=_BLOCK).argmax(1) for name, d in parts}
    accuracy = {name: float((predicted[name] == d.labels).double().mean()) for name, d in parts}
    typer.echo(f"{trajectory!r}")
    typer.echo("accuracy: " + ", ".join(f"{name} {100 * accuracy[name]:.1f} % of {len(d)} points" for name, d in parts))
    if num_test is None and len(split.held_out) < split.available:
        typer.echo(f"held out: {len(split.held_out)} of {split.available} points (--num-test N keeps N of them)")
    if not len(split.held_out):
        typer.echo("no held-out points: all points were trained on (--num-test N holds some out)")
    typer.echo(f"recorded in {out} ({timer.total:.1f} s)")


@dataclass(frozen=True, eq=False)
class _Description:
    """The files beside a run that say how it was made: the manifest and the held-out points."""

    run: Path
    spec: NetworkSpec
    config: dict[str, object]
    held_out: Dataset

    def write(self) -> None:
        """Write them."""
        write_manifest(self.run, self.spec, self.config, write_held_out(self.run, self.held_out))


@contextmanager
def _created(description: _Description) -> Iterator[None]:
    """Describe a new run before its first step, so that one that is killed can be resumed and opened too."""
    out, existed = description.run, description.run.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        description.write()
        yield
    except BlockingIOError:  # another process creates a run here: the files are its own
        raise
    except BaseException:
        if not is_run(out):
            for name in MANIFEST_FILES:
                (out / name).unlink(missing_ok=True)
            if not existed:
                with suppress(OSError):  # it holds something after all
                    out.rmdir()
        raise


@contextmanager
def _resumed(description: _Description) -> Iterator[None]:
    """Describe a run that is resumed, once it was found to be the same; before, nothing is written.

    Raises:
        ValueError: The held-out points are not the recorded ones.
    """
    out = description.run
    if read_network_spec(out) is None:  # what nothing checks is not known of a run that had no manifest
        for name in ("seed", "zero_final_layer"):
            del description.config[name]
    else:
        validate_held_out(out, description.held_out)
    try:
        yield
    except (StepMismatchError, KeyboardInterrupt):
        description.write()
        raise


def _require_usable_folder(out: Path, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out must be a new folder: {out} is a file.")
    if out.is_dir() and not resume and any(out.iterdir()):
        raise FileExistsError(
            f"--out must be a new or empty folder: {out} already holds something. Choose another, or pass --resume to "
            "go on with the run in it."
        )


@dataclass(frozen=True)
class OptimizerRates:
    """The hyperparameters of an optimizer."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float


def validate_rates(name: OptimizerName, rates: OptimizerRates) -> None:
    """Raise if an optimizer does not have a hyperparameter that is given.

    Raises:
        ValueError: Momentum is given to another optimizer than sgd and rmsprop, or Nesterov's to another than sgd, or
            Nesterov's without momentum.
    """
    if rates.momentum and name not in (OptimizerName.sgd, OptimizerName.rmsprop):
        raise ValueError(f"--momentum belongs to sgd and rmsprop: got {rates.momentum} with {name}.")
    if rates.nesterov and name is not OptimizerName.sgd:
        raise ValueError(f"--nesterov belongs to sgd: got {name}.")
    if rates.nesterov and not rates.momentum:
        raise ValueError("--nesterov must come with a positive --momentum: got none. Pass, say, --momentum 0.9.")


def make_optimizer(net: nn.Module, name: OptimizerName, rates: OptimizerRates) -> torch.optim.Optimizer:
    """Return one of torch's optimizers for the trainable parameters of a network."""
    options: dict[str, object] = {"lr": rates.lr, "weight_decay": rates.weight_decay}
    if name in (OptimizerName.sgd, OptimizerName.rmsprop):
        options["momentum"] = rates.momentum
    if name is OptimizerName.sgd:
        options["nesterov"] = rates.nesterov
    kinds = {
        OptimizerName.sgd: torch.optim.SGD,
        OptimizerName.adam: torch.optim.Adam,
        OptimizerName.adamw: torch.optim.AdamW,
        OptimizerName.rmsprop: torch.optim.RMSprop,
        OptimizerName.adagrad: torch.optim.Adagrad,
    }
    kind: Callable[..., torch.optim.Optimizer] = kinds[name]
    return kind([p for p in net.parameters() if p.requires_grad], **options)
