"""`epk-gp record` and `epk-gp info`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn import functional as F

from epk_gp.cli.app import Dtype, Quiet, RunFolder, Seed, app, make_folder, torch_dtype
from epk_gp.cli.data import load_split, write_held_out
from epk_gp.cli.networks import NetworkSpec, build_network, check_network, read_note, write_note
from epk_gp.core.losses import CrossEntropy, MeanSquaredError
from epk_gp.core.model import zero_final_layer
from epk_gp.core.trajectory import network_outputs
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.storage.check import check_run
from epk_gp.storage.run import is_run
from epk_gp.storage.schema import chunk_schema
from epk_gp.storage.writer import Storage
from epk_gp.training.clipping import ClipNorm
from epk_gp.training.diagnosis import StepMismatchError
from epk_gp.training.train import train

_BLOCK = 1000  # inputs evaluated at a time


class LossName(StrEnum):
    """Losses that need no code of the user's."""

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
    num_train: Annotated[int | None, typer.Option(help="Training points; all by default.")] = None,
    num_test: Annotated[int, typer.Option(help="Held-out points kept beside the run, at most.")] = 102,
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
        bool, typer.Option("--resume", help="Go on with the run in --out, given the options it was started with.")
    ] = False,
    compression: Annotated[
        CompressionName, typer.Option(help="none, or deltas: smaller files, slower to write and read.")
    ] = CompressionName.none,
    commit_seconds: Annotated[float, typer.Option(help="A crash costs at most the steps of so many seconds.")] = 60.0,
    check_every: Annotated[
        int, typer.Option(help="Recompute the gradient of one step in so many, to check it; of every step by default.")
    ] = 1,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Train a network by gradient descent and record every step."""
    watch = Stopwatch()
    split = load_split(data, data_dir, num_train=num_train, num_test=num_test, seed=seed, dtype=torch_dtype(dtype))
    X, y = split.train.inputs, split.train.labels
    spec = NetworkSpec(network, tuple(X.shape[1:]), split.train.num_classes, width, activation)
    torch.manual_seed(seed)
    net = build_network(spec).to(torch_dtype(dtype))
    if zero_final:
        zero_final_layer(net)
    num_outputs = check_network(net, X, split.train.num_classes)
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
    except (StepMismatchError, KeyboardInterrupt):  # the steps before can be opened
        if is_run(out):
            write_note(out, spec, config, write_held_out(out, split.held_out))
        raise
    write_note(out, spec, config, write_held_out(out, split.held_out))
    parts = [(name, d) for name, d in (("training", split.train), ("held-out", split.held_out)) if len(d)]
    predicted = {name: network_outputs(trajectory, d.inputs, block_size=_BLOCK).argmax(1) for name, d in parts}
    accuracy = {name: float((predicted[name] == d.labels).double().mean()) for name, d in parts}
    typer.echo(f"{trajectory!r}")
    typer.echo("accuracy: " + ", ".join(f"{name} {100 * value:.1f} %" for name, value in accuracy.items()))
    typer.echo(f"recorded in {out} ({watch.total:.1f} s)")


@dataclass(frozen=True)
class OptimizerRates:
    """An optimizer's numbers."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float


def make_optimizer(net: nn.Module, name: OptimizerName, rates: OptimizerRates) -> torch.optim.Optimizer:
    """Make one of torch's optimizers over what a network trains.

    Raises:
        ValueError: Numbers out of range, or that this optimizer does not know.
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


@app.command(short_help="Say what a run holds.")
def info(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Folder for info.json; none is written by default.")] = None,
    quiet: Quiet = False,
) -> None:
    """Say what a recorded run holds, after checking its files; builds no network."""
    watch = Stopwatch()
    found, spec = check_run(run, progress=not quiet), read_note(run)
    header = found.header
    size = sum(file.stat().st_size for file in run.iterdir() if file.is_file())
    lines: dict[str, object] = {
        "network": "not noted (pass --network to the other commands)" if spec is None else spec.name,
        "steps": found.num_steps,
        "step sizes": _range(sorted(set(found.learning_rates))),
        "points per step": _range(sorted(set(found.batch_sizes))),
        "weights": f"{sum(chunk_schema(header).sizes)} in {len(header['names'])} tensors",
        "dtype": header["dtype"].removeprefix("torch."),
        "outputs": header["num_outputs"],
        "training points": f"{found.data_shapes['inputs'][0]} of shape {found.data_shapes['inputs'][1:]}",
        "loss": f"{header['loss']['kind']}, {header['loss'].get('reduction')}",
        "update rule": header["law"]["name"],
        "gradients": "every step's recomputed while recording"
        if header.get("check_every") == 1
        else f"one in {header.get('check_every')} recomputed while recording",
        "digest": found.chunks[-1].digest,
        "data digest": header["data_digest"],
        "chunks": len(found.chunks),
        "compression": header["compression"],
        "size on disk": f"{size / 1e6:.2f} MB",
        "recording": "finished" if found.finished else "not finished: record --resume goes on with it",
        "files": f"all {found.files} verified against their checksums",
    }
    if out is not None:
        write_json(make_folder(out) / "info.json", "info", {"run": run}, lines, watch)
    for name, value in lines.items():
        typer.echo(f"{name + ':':17}{value}")


def _range(values: list[float] | list[int]) -> str:
    if not values:
        return "none"
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
