"""`epk-gp record`: train a network and record every step."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn import functional as F

from epk_gp.cli.app import app
from epk_gp.cli.data import load_split, write_held_out
from epk_gp.cli.manifest import write_manifest
from epk_gp.cli.networks import NetworkSpec, build_network, validate_network
from epk_gp.cli.options import Dtype, Quiet, Seed, torch_dtype
from epk_gp.core.losses import CrossEntropy, MeanSquaredError
from epk_gp.core.model import zero_final_layer
from epk_gp.core.trajectory import network_outputs
from epk_gp.provenance import Stopwatch
from epk_gp.storage.run import is_run
from epk_gp.storage.writer import Storage
from epk_gp.training.clipping import ClipNorm
from epk_gp.training.diagnosis import StepMismatchError
from epk_gp.training.train import train

_BLOCK = 1000  # inputs per forward pass when the accuracy is computed


class LossName(StrEnum):
    """Losses that can be chosen by name."""

    cross_entropy = "cross-entropy"
    mse = "mse"


class OptimizerName(StrEnum):
    """Optimizers whose update rule is known."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    rmsprop = "rmsprop"
    adagrad = "adagrad"


class CompressionName(StrEnum):
    """How weights are stored."""

    none = "none"
    deltas = "deltas"


@app.command(short_help="Train a network and record every step.")
def record(
    out: Annotated[Path, typer.Option(help="New folder for the run.")] = Path("run"),
    data: Annotated[
        str,
        typer.Option(help="three-gaussians, digits, mnist, or a .safetensors or .npz file with `inputs` and `labels`."),
    ] = "three-gaussians",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of MNIST-format files, for --data mnist; default $EPK_GP_DATA/mnist.")
    ] = None,
    num_train: Annotated[int | None, typer.Option(help="Number of training points; all by default.")] = None,
    num_test: Annotated[int, typer.Option(help="Largest number of held-out points stored beside the run.")] = 102,
    network: Annotated[
        str, typer.Option(help="mlp, cnn, or package.module:factory, which returns the torch.nn.Module.")
    ] = "mlp",
    width: Annotated[int, typer.Option(help="Hidden units of the mlp.")] = 64,
    activation: Annotated[str, typer.Option(help="relu, tanh or gelu, in the mlp and the cnn.")] = "relu",
    zero_final: Annotated[
        bool, typer.Option("--zero-final-layer", help="Start from a zero last layer, as the paper does.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent.")] = 300,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer of torch.optim.")] = OptimizerName.sgd,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.1,
    momentum: Annotated[float, typer.Option(help="Momentum, of sgd and rmsprop.")] = 0.0,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Nesterov's momentum, of sgd.")] = False,
    weight_decay: Annotated[float, typer.Option(help="Weight decay; decoupled in adamw.")] = 0.0,
    clip_norm: Annotated[float | None, typer.Option(help="Clip the gradient to this norm; not by default.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Points per step; all by default.")] = None,
    loss: Annotated[
        LossName, typer.Option(help="cross-entropy, or mse against one-hot labels.")
    ] = LossName.cross_entropy,
    dtype: Annotated[Dtype, typer.Option(help="Type of data and weights.")] = Dtype.float64,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out. Pass the options that it was started with.")
    ] = False,
    compression: Annotated[
        CompressionName, typer.Option(help="none, or deltas: smaller files, slower to write and read.")
    ] = CompressionName.none,
    commit_seconds: Annotated[
        float, typer.Option(help="Seconds between commits: a crash loses at most the steps of this time.")
    ] = 60.0,
    check_every: Annotated[
        int, typer.Option(help="Recompute and check the gradient of one step in N; of every step by default.")
    ] = 1,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Train a network by gradient descent and record every step."""
    timer = Stopwatch()
    split = load_split(data, data_dir, num_train=num_train, num_test=num_test, seed=seed, dtype=torch_dtype(dtype))
    X, y = split.train.inputs, split.train.labels
    spec = NetworkSpec(network, tuple(X.shape[1:]), split.train.num_classes, width, activation)
    torch.manual_seed(seed)
    net = build_network(spec).to(torch_dtype(dtype))
    if zero_final:
        zero_final_layer(net)
    num_outputs = validate_network(net, X, split.train.num_classes)
    rates = OptimizerRates(lr, momentum, nesterov, weight_decay)
    config: dict[str, object] = {
        "data": data,
        "data_dir": None if data_dir is None else str(data_dir),
        "num_train": len(split.train),
    }
    config |= {"steps": steps, "batch_size": batch_size, "loss": str(loss), "seed": seed, "clip_norm": clip_norm}
    config |= {"optimizer": str(optimizer)} | asdict(rates)
    config |= {"zero_final_layer": zero_final, "compression": str(compression), "check_every": check_every}
    try:
        trajectory = train(
            net,
            X,
            y if loss is LossName.cross_entropy else F.one_hot(y, num_outputs).to(torch_dtype(dtype)),
            optimizer=make_optimizer(net, optimizer, rates),
            steps=steps,
            loss=CrossEntropy() if loss is LossName.cross_entropy else MeanSquaredError(),
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(seed),
            clip=None if clip_norm is None else ClipNorm(clip_norm),
            path=out,
            resume=resume,
            storage=Storage(seconds=commit_seconds, compression=compression.value),
            check_every=check_every,
            progress=not quiet,
        )
    except (StepMismatchError, KeyboardInterrupt):  # the steps recorded so far can be opened
        if is_run(out):
            write_manifest(out, spec, config, write_held_out(out, split.held_out))
        raise
    write_manifest(out, spec, config, write_held_out(out, split.held_out))
    parts = [(name, d) for name, d in (("training", split.train), ("held-out", split.held_out)) if len(d)]
    predicted = {name: network_outputs(trajectory, d.inputs, block_size=_BLOCK).argmax(1) for name, d in parts}
    accuracy = {name: float((predicted[name] == d.labels).double().mean()) for name, d in parts}
    typer.echo(f"{trajectory!r}")
    typer.echo("accuracy: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in accuracy.items()))
    typer.echo(f"recorded in {out} ({timer.total:.1f} s)")


@dataclass(frozen=True)
class OptimizerRates:
    """The hyperparameters of an optimizer."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float


def make_optimizer(net: nn.Module, name: OptimizerName, rates: OptimizerRates) -> torch.optim.Optimizer:
    """Return one of torch's optimizers for the trainable parameters of a network.

    Raises:
        ValueError: A hyperparameter is out of range, or the optimizer does not have it.
    """
    if not 0 < rates.lr < float("inf"):
        raise ValueError(f"--lr must be positive and finite: got {rates.lr}.")
    options: dict[str, object] = {"lr": rates.lr, "weight_decay": rates.weight_decay}
    if rates.momentum and name not in (OptimizerName.sgd, OptimizerName.rmsprop):
        raise ValueError(f"--momentum belongs to sgd and rmsprop: got {rates.momentum} with {name}.")
    if rates.nesterov and name is not OptimizerName.sgd:
        raise ValueError(f"--nesterov belongs to sgd: got {name}.")
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
