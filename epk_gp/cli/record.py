"""`epk-gp record`: train a network and record every step, or resume a recording as it was begun."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import torch
import typer
from pydantic import TypeAdapter, ValidationError
from torch import optim

from epk_gp.cli import networks
from epk_gp.cli import options as opt
from epk_gp.cli.data import HELD_OUT, held_out_content, is_data_file, load_split
from epk_gp.cli.networks import MANIFEST
from epk_gp.core.losses import CrossEntropy
from epk_gp.core.model import zero_final_layer
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import Dataset
from epk_gp.provenance import Stopwatch
from epk_gp.recording.train import train
from epk_gp.storage.files import atomic_write, checksum, checksummed_json
from epk_gp.storage.run import is_run
from epk_gp.storage.writer import MANIFEST_FILES, Storage

if TYPE_CHECKING:
    Context = typer.Context
else:
    Context = typer.Context.__base__  # click's: what a command is given; typer's own is for annotations alone
OptimizerName = Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"]

_OPTIMIZERS: dict[str, Any] = {
    kind.__name__.lower(): kind for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad)
}
_SAME = 1e-3  # outputs of a network that do not differ by more say nothing of a point
# The options that say what a run is made of. --out, --steps and --commit-seconds may change when it is resumed.
_RECORDED = (
    *("data", "data_dir", "num_train", "num_test", "num_classes", "network", "width", "zero_final"),
    *("optimizer", "lr", "momentum", "weight_decay", "batch_size", "dtype", "check_every", "seed"),
)
_DATA = (
    "three-gaussians, digits, mnist, or a .safetensors or .npz file with `inputs` and `labels` 0 .. C-1, and perhaps "
    "`test_inputs` and `test_labels`."
)
_NUM_TEST = (
    "Largest number of held-out points stored beside the run; by default 102 of a named data set, and of a file all of "
    "its `test_inputs`, or else all points after the first --num-train. Of a file where neither is given, that many of "
    "its last points, and none by default."
)
_NUM_CLASSES = "Classes C of a file; by default each of 0 .. C-1 has a training point."
_COMMIT_SECONDS = "Seconds between commits: a crash loses at most the steps of this time."


def record(
    ctx: Context,
    out: Annotated[Path, typer.Option(help="New folder for the run.")] = Path("run"),
    data: Annotated[str, typer.Option(help=_DATA)] = "three-gaussians",
    data_dir: Annotated[Path | None, typer.Option(help="Of --data mnist; default $EPK_GP_DATA/mnist.")] = None,
    num_train: Annotated[int | None, opt.count("Training points, the first ones of a file; all by default.")] = None,
    num_test: Annotated[int | None, opt.count(_NUM_TEST, 1, 10**6)] = None,
    num_classes: Annotated[int | None, opt.count(_NUM_CLASSES, 2, 10**6)] = None,
    network: Annotated[str, typer.Option(help="mlp, cnn, or package.module:factory, which returns it.")] = "mlp",
    width: Annotated[int | None, opt.count("Hidden units of the mlp; 64 by default.", 1, 10**6)] = None,
    zero_final: Annotated[bool, typer.Option("--zero-final-layer", help="Start from a zero last layer.")] = False,
    steps: Annotated[int, opt.count("Steps of gradient descent.")] = 300,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer of torch.optim.")] = "sgd",
    lr: Annotated[float, opt.number("Learning rate.", or_equal=False)] = 0.1,
    momentum: Annotated[float, opt.number("Momentum, of sgd and rmsprop: from 0, below 1.", below=1.0)] = 0.0,
    weight_decay: Annotated[float, opt.number("Weight decay; decoupled in adamw.")] = 0.0,
    batch_size: Annotated[int | None, opt.count("Points per step; all by default.")] = None,
    dtype: Annotated[opt.Dtype, typer.Option(help="Type of data and weights.")] = "float64",
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out with its options.")] = False,
    commit_seconds: Annotated[float, opt.number(_COMMIT_SECONDS, or_equal=False)] = 60.0,
    check_every: Annotated[int, opt.count("Recompute and check the gradient of one step in N.")] = 1,
    seed: opt.Seed = 0,
) -> None:
    """Train a classifier by gradient descent on cross entropy, and record every step."""
    options = {name: value for name, value in locals().items() if name != "ctx"}
    completed = _complete_options(options, _given_options(ctx))
    if completed != options:  # once more, with the recorded options in place of the defaults
        record(ctx, **completed)
        return
    timer, kind = Stopwatch(), opt.DTYPES[dtype]
    has_momentum = optimizer in ("sgd", "rmsprop")
    if momentum and not has_momentum:
        raise ValueError(f"--momentum belongs to sgd and rmsprop: got {optimizer}.")
    if out.exists() and not (out.is_dir() and (resume or not any(out.iterdir()))):
        raise FileExistsError(f"--out must be a new or empty folder: {out} already holds something. Or pass --resume.")
    training, held_out, available = load_split(
        data, seed=seed, dtype=kind, num_train=num_train, num_test=num_test, num_classes=num_classes, data_dir=data_dir
    )
    X, y = training.inputs, training.labels
    if batch_size is not None and batch_size > len(X):
        raise ValueError(f"--batch-size must be at most the {len(X)} training points: got {batch_size}.")
    spec = networks.network_spec(network, X, training.num_classes, width)
    torch.manual_seed(seed)
    net, output = networks.network_and_output(spec)
    net = net.to(kind)
    if zero_final:
        zero_final_layer(net)
    rates: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    rates |= {"momentum": momentum} if has_momentum else {}
    made = _OPTIMIZERS[optimizer]([p for p in net.parameters() if p.requires_grad], **rates)
    recorded = {name: options[name] for name in (*_RECORDED, "steps")} | {"num_train": len(training)}
    recorded["data_dir"] = None if data_dir is None else str(data_dir)

    with _described(out, networks.Manifest(network=spec, recorded_with=recorded), held_out):
        trajectory = train(
            net, X, y, optimizer=made, steps=steps, batch_size=batch_size, loss=CrossEntropy(),
            generator=torch.Generator().manual_seed(seed), folder=out, resume=resume,
            storage=Storage(seconds=commit_seconds), check_every=check_every, progress=True, output=output,
        )  # fmt: skip
    typer.echo(f"{trajectory!r}")
    shares, varies = [], False
    for name, part in (("training", training), ("held-out", held_out)):
        if len(part):
            z = network_outputs(trajectory, part.inputs)
            varies |= bool((z - z[:1]).abs().max() > _SAME)
            right = z.argmax(1) == part.labels
            shares.append(f"{name} {100 * float(right.double().mean()):.1f} % of {len(part)} points")
    typer.echo("accuracy: " + ", ".join(shares))
    if not varies:
        typer.echo(
            "the network gives all points the same outputs: its maps and scores say nothing. Columns of very different "
            "sizes do this: standardise them, or let the first layer of a --network of your own do it"
        )
    if num_test is None and len(held_out) < available:
        typer.echo(f"held out: {len(held_out)} of {available} points (--num-test N keeps N of them)")
    if not len(held_out):
        typer.echo("no held-out points: all points were trained on (--num-test N holds some out)")
    typer.echo(f"recorded in {out} ({timer.total:.1f} s)")


@contextmanager
def _described(out: Path, manifest: networks.Manifest, held_out: Dataset) -> Iterator[None]:
    """Describe a run before its first step, so that one that is killed can be resumed and opened too."""
    existed, is_resumed, content = out.exists(), is_run(out), held_out_content(out, held_out)
    described = manifest.model_copy(update={"held_out_bytes": len(content), "held_out_blake2b": checksum(content)})

    def write() -> None:
        if content:
            atomic_write(out / HELD_OUT, content)
        atomic_write(out / MANIFEST, checksummed_json(described.model_dump()))

    out.mkdir(parents=True, exist_ok=True)
    try:
        if not is_resumed:
            write()
        yield
        write()
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


def _given_options(ctx: Context) -> dict[str, str]:
    """Return the parameters that are on the command line, and the option of each."""
    options = {parameter.name: parameter.opts[0] for parameter in ctx.command.params if parameter.name is not None}
    sources = {name: getattr(ctx.get_parameter_source(name), "name", None) for name in options}
    return {name: option for name, option in options.items() if sources[name] == "COMMANDLINE"}


def _complete_options(options: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a recording: with --resume, those that are not given are as recorded.

    Data of a file, and the folder of MNIST-format files, may have been moved: another path is not refused, as the data
    themselves are compared.

    Args:
        options: Values of all parameters of `record`.
        given: Parameters that are on the command line, and their options.

    Raises:
        ValueError: An option is given with another value than the recorded one, or the manifest is damaged, or it names
            a factory that the command line does not.
    """
    completed, run = dict(options), options["out"]
    if not (options["resume"] and is_run(run)):
        return completed
    manifest, hints = networks.read_manifest(run), get_type_hints(record)
    if manifest is None:
        raise ValueError(f"{run} must hold the {MANIFEST} that epk-gp record wrote: resume this run in Python.")
    for name in (*_RECORDED, "steps"):
        try:
            value = TypeAdapter(hints[name]).validate_python(manifest.recorded_with[name])
        except (KeyError, ValidationError) as error:
            raise ValueError(f"{run / MANIFEST} must hold the options of the recording: {name} is damaged.") from error
        may_be_moved = name == "data_dir" or (name == "data" and is_data_file(options[name]) and is_data_file(value))
        if name not in given:
            completed[name] = value
        elif name != "steps" and options[name] != value and not may_be_moved:
            raise ValueError(
                f"{given[name]} must be the recorded one to resume the run at {run}: it has {value}, got "
                f"{options[name]}. Leave the option out, or record another run."
            )
    if "network" not in given:
        networks.require_trusted(completed["network"], run)
    return completed
