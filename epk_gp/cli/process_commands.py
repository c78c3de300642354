"""The commands of Gaussian processes: names, options and help, as in `epk_gp.cli.commands`."""

from pathlib import Path
from typing import Annotated

import typer

from epk_gp.cli.app import command
from epk_gp.cli.options import (
    CoupledOutputs,
    Dtype,
    Features,
    Memory,
    MissRate,
    Network,
    Nodes,
    Out,
    PathOption,
    PlaneName,
    Quiet,
    RunFolder,
    Scheduler,
    Seed,
    TargetsName,
    Workers,
    count,
    number,
)

# options of `uncertainty` that mean something where points are scored
_OF_SCORES = (
    *("run", "out", "points", "alpha", "features", "nodes", "path", "save_model", "memory"),
    *("num_samples", "network", "dtype", "seed", "quiet"),
)


@command(
    "Map a GP's uncertainty, or score points.",
    alone={"validation": _OF_SCORES},
    needing={"validation": ("alpha", "features", "save_model", "memory")},
)
def uncertainty(
    ctx: typer.Context,
    run: RunFolder,
    out: Out = Path("uncertainty"),
    validation: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Score points, with labelled points that the network has not seen: a file (.safetensors or .npz) with "
            "`inputs` and `labels`, a folder of MNIST-format files (its test part), or held-out, the run's own. "
            "Without --points half of them, drawn with --seed, are kept to be scored.",
        ),
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option(
            help="File (.safetensors or .npz) with `inputs`, and perhaps `labels`; with --validation also a folder of "
            "MNIST-format files, whose labels are not read. By default, without --validation, the run's held-out "
            "points, or its training inputs if it has none."
        ),
    ] = None,
    alpha: MissRate = 0.1,
    features: Features = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="Nodes of the path that stand for all its steps. Scores: 20 by default, or as many as outputs up to "
            "256. Map: all steps by default; 20 nodes take a fraction of the time.",
            callback=count(1, 10**6),
        ),
    ] = None,
    path: PathOption = "straight",
    save_model: Annotated[
        Path | None, typer.Option(help="Scores: new folder for the fitted UncertainClassifier; none by default.")
    ] = None,
    memory: Memory = 1.0,
    num_condition: Annotated[
        int, typer.Option(help="Map: largest number of training points of its GP.", callback=count())
    ] = 300,
    outputs: Annotated[
        CoupledOutputs, typer.Option(help="Map: coupled classes, or one GP per class.")
    ] = CoupledOutputs.full,
    targets: Annotated[
        TargetsName, typer.Option(help="Map: the network's outputs, or Dirichlet-transformed labels.")
    ] = TargetsName.network,
    plane: Annotated[
        PlaneName,
        typer.Option(help="Map: the data's two principal directions, or the first two coordinates, others 0."),
    ] = PlaneName.principal,
    grid: Annotated[int, typer.Option(help="Map: nodes per side, 2 to 400.", callback=count(2, 400))] = 40,
    margin: Annotated[
        float,
        typer.Option(
            help="Map: border around the training points, in units of their extent (< 1000).",
            callback=number(below=1000.0),
        ),
    ] = 0.4,
    num_samples: Annotated[
        int, typer.Option(help="Monte Carlo draws through the softmax, 2 to 100000.", callback=count(2, 10**5))
    ] = 1024,
    rule: Annotated[
        str, typer.Option(help="Map: a fixed rule: gauss-legendre:N, left-riemann:N, midpoint:N, left-endpoint.")
    ] = "gauss-legendre:4",
    fit_steps: Annotated[
        int, typer.Option(help="Map: steps of the fit by marginal likelihood.", callback=count())
    ] = 50,
    network: Network = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type in which arrays are written; everything is computed in float64.")
    ] = Dtype.float64,
    workers: Workers = None,
    scheduler: Scheduler = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Score points with --validation; without it, map the uncertainty of a GP on the logits over a plane.

    Scores say how likely a prediction is wrong, and how unlike the training data a point is; beside them stand sets of
    classes that hold the true one as often as asked for.
    """


@command("Rank the training labels by how suspicious they are.")
def audit(
    run: RunFolder,
    out: Out = Path("audit"),
    top: Annotated[
        int, typer.Option(help="Labels printed and drawn, at most 60; the table holds all.", callback=count(1, 60))
    ] = 20,
    features: Features = None,
    nodes: Nodes = None,
    path: PathOption = "straight",
    memory: Memory = 1.0,
    network: Network = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Rank the training labels of a classifier by how suspicious they are; the worst are printed and drawn."""
