"""The commands: names, options and help. What each one does is in the module of its name, imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from epk_gp.cli.app import command
from epk_gp.cli.options import (
    CheckEvery,
    CommitSeconds,
    Dtype,
    Explained,
    ExplainedOutputs,
    HeadOption,
    LossName,
    Memory,
    Network,
    NumExplained,
    OptimizerName,
    Out,
    PathOption,
    PointsFile,
    Quiet,
    RuleOption,
    RunDtype,
    RunFolder,
    Scheduler,
    Seed,
    SeedOfPoints,
    SmoothingRuns,
    TopListed,
    VerifiedHeads,
    Workers,
    count,
    number,
)


@command("Run the paper's problem, from training to figures.")
def demo(
    out: Out = Path("demo_output"),
    seed: Seed = 0,
    dtype: Annotated[Dtype, typer.Option(help="Type of data and weights.")] = Dtype.float64,
    smoke: Annotated[bool, typer.Option("--smoke", help="Use tiny sizes, for a second or two.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train on three Gaussians, show that the kernel machine is the network, explain and map it (about a minute)."""


@command("Train a network and record every step.", completed_by="epk_gp.cli.resume")
def record(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="New folder for the run.")] = Path("run"),
    data: Annotated[
        str,
        typer.Option(
            help="three-gaussians, digits, mnist, or a .safetensors or .npz file with `inputs` and `labels` 0 .. C-1, "
            "and perhaps `test_inputs` and `test_labels`."
        ),
    ] = "three-gaussians",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of MNIST-format files, for --data mnist; default $EPK_GP_DATA/mnist.")
    ] = None,
    num_train: Annotated[
        int | None, typer.Option(help="Number of training points, the first ones of a file; all by default.")
    ] = None,
    num_test: Annotated[
        int | None,
        typer.Option(
            help="Largest number of held-out points stored beside the run; by default 102 of a named data set, and of "
            "a file all of its `test_inputs`, or else all points after the first --num-train. Of a file where neither "
            "is given, that many of its last points, and none by default.",
            callback=count(1, 10**6),
        ),
    ] = None,
    num_classes: Annotated[
        int | None,
        typer.Option(
            help="Number of classes C of a file, if some have no point; by default every one of 0 .. C-1 must have "
            "one.",
            callback=count(2, 10**6),
        ),
    ] = None,
    network: Annotated[
        str, typer.Option(help="mlp, cnn, or package.module:factory, which returns the torch.nn.Module.")
    ] = "mlp",
    width: Annotated[
        int | None, typer.Option(help="Hidden units of the mlp; 64 by default.", callback=count(1, 10**6))
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="relu, tanh or gelu, in the mlp and the cnn; relu by default.")
    ] = None,
    zero_final: Annotated[
        bool, typer.Option("--zero-final-layer", help="Start from a zero last layer, as the paper does.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of gradient descent.", callback=count())] = 300,
    optimizer: Annotated[OptimizerName, typer.Option(help="Optimizer of torch.optim.")] = OptimizerName.sgd,
    lr: Annotated[float, typer.Option(help="Learning rate.", callback=number(or_equal=False))] = 0.1,
    momentum: Annotated[
        float, typer.Option(help="Momentum, of sgd and rmsprop: from 0, below 1.", callback=number(below=1.0))
    ] = 0.0,
    nesterov: Annotated[
        bool, typer.Option("--nesterov", help="Nesterov's momentum, of sgd; needs --momentum.")
    ] = False,
    weight_decay: Annotated[float, typer.Option(help="Weight decay; decoupled in adamw.", callback=number())] = 0.0,
    clip_norm: Annotated[
        float | None,
        typer.Option(help="Clip the gradient to this norm; not by default.", callback=number(or_equal=False)),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Points per step; all by default.", callback=count())] = None,
    loss: Annotated[
        LossName, typer.Option(help="cross-entropy, or mse against one-hot labels.")
    ] = LossName.cross_entropy,
    dtype: Annotated[Dtype, typer.Option(help="Type of data and weights.")] = Dtype.float64,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --out, with the options it was started with.")
    ] = False,
    keep_every: Annotated[
        int,
        typer.Option(
            help="Keep every so many-th weight state; those between are computed again when they are read.",
            callback=count(),
        ),
    ] = 1,
    commit_seconds: CommitSeconds = 60.0,
    check_every: CheckEvery = 1,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Train a network by gradient descent and record every step."""


@command("Show the contents of a run.")
def info(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Folder for info.json; none is written by default.")] = None,
    quiet: Quiet = False,
) -> None:
    """Show the contents of a recorded run, after checking its files; no network is built."""


@command("Check that the kernel machine equals the network.", alone={"checksums": ("run", "quiet")})
def verify(
    ctx: typer.Context,
    run: RunFolder,
    checksums: Annotated[bool, typer.Option("--checksums", help="Check the files only.")] = False,
    head: Annotated[
        VerifiedHeads | None,
        typer.Option(help="Outputs that are verified; by default both for cross entropy, the logits otherwise."),
    ] = None,
    rule: RuleOption = "adaptive",
    path: PathOption = "straight",
    tol: Annotated[
        float | None,
        typer.Option(help="Largest error allowed; by default 1e-9, or 1e-3 if float32 is used.", callback=number()),
    ] = None,
    num_points: Annotated[
        int | None,
        typer.Option(help="Largest number of points; 10 by default, of a --points file all.", callback=count()),
    ] = None,
    all_points: Annotated[
        bool, typer.Option("--all-points", help="Use every point: the time grows in proportion.")
    ] = False,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    out: Annotated[Path | None, typer.Option(help="Folder for verify.json; none is written by default.")] = None,
    seed: SeedOfPoints = None,
    quiet: Quiet = False,
) -> None:
    """Rebuild the network's outputs from its training data; exit status 1 if they differ by more than --tol."""


@command("Write a run to one file.")
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="New file, its name ending in .safetensors.")] = Path("run.safetensors"),
    quiet: Quiet = False,
) -> None:
    """Write a recorded run, after checking its files, to one safetensors file for other tools."""


@command("Write the contribution of each training point.")
def attribute(
    run: RunFolder,
    out: Out = Path("attribution"),
    num_points: NumExplained = 6,
    top: TopListed = 8,
    head: HeadOption = None,
    rule: RuleOption = "adaptive",
    path: PathOption = "straight",
    outputs: Explained = ExplainedOutputs.every,
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> None:
    """Write every training point's exact contribution, a table of the largest ones, and draw them over the steps.

    A command that was killed resumes from its partial sums when it is run again.
    """


@command("Write how predictions depend on each point's weight.")
def influence(
    run: RunFolder,
    out: Out = Path("influence"),
    num_points: NumExplained = 6,
    top: TopListed = 8,
    head: HeadOption = None,
    outputs: Explained = ExplainedOutputs.predicted,
    smoothing: SmoothingRuns = 0,
    memory: Memory = 1.0,
    points: PointsFile = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> None:
    """Write the derivative of outputs in every training point's weight, a table of the largest, and draw them.

    The negative of a derivative predicts what leaving the point out would do. A command that was killed resumes from
    its partial sums when it is run again.
    """


@command("Write predictions, contributions and certificate as a page.")
def report(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="The HTML file; it needs nothing beside it.")] = Path("report.html"),
    num_points: Annotated[
        int, typer.Option(help="Largest number of points that are explained; the overview is of all.", callback=count())
    ] = 6,
    top: Annotated[
        int, typer.Option(help="Training points named of either sign, at most 50.", callback=count(1, 50))
    ] = 10,
    layers: Annotated[
        bool,
        typer.Option("--layers/--no-layers", help="Tell layers apart."),
    ] = True,
    outputs: Annotated[
        str,
        typer.Option(help="predicted (and the true class where it is another), all, or a number: the most probable."),
    ] = "predicted",
    title: Annotated[str | None, typer.Option(help="Title of the page; the run's digest by default.")] = None,
    class_names: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Names of the classes, in order, with commas between them.")
    ] = None,
    feature_names: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Names of the features, as in the first line of a CSV file.")
    ] = None,
    head: HeadOption = None,
    rule: RuleOption = "adaptive",
    path: PathOption = "straight",
    influence: Annotated[
        bool, typer.Option("--influence", help="Compute influence too, and show it beside the contributions.")
    ] = False,
    validation: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Show probabilities with a band, and scores: fit an UncertainClassifier with labelled points that "
            "the network has not seen, as epk-gp uncertainty does. A file, a folder of MNIST-format files, or "
            "held-out; without --points half of them are the points of the report.",
        ),
    ] = None,
    outside: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="With --validation: points unlike the training data, to show how well scores tell them.",
        ),
    ] = None,
    label_errors: Annotated[
        bool, typer.Option("--label-errors", help="Show which training labels are suspicious, as epk-gp audit does.")
    ] = False,
    map: Annotated[  # noqa: A002  the option's name
        bool, typer.Option("--map", help="Show a GP's uncertainty over the plane of the principal directions.")
    ] = False,
    kernel_points: Annotated[
        int,
        typer.Option(
            help="Training points in the matrix of the path kernel, at most 500; 0 leaves it out.",
            callback=count(0, 500),
        ),
    ] = 100,
    memory: Memory = 1.0,
    points: Annotated[
        Path | None,
        typer.Option(
            help="File (.safetensors or .npz) with `inputs`, and perhaps `labels`; by default the run's held-out "
            "points, or its training inputs if it has none."
        ),
    ] = None,
    network: Network = None,
    dtype: RunDtype = None,
    seed: SeedOfPoints = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    quiet: Quiet = False,
) -> None:
    """Write a report: explained predictions that add up, their certificate, and the run as a whole, as one HTML file.

    It opens in a browser from the disk, and asks for nothing else.
    """
