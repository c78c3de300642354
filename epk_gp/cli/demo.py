"""`epk-gp demo`: the paper's three-Gaussian problem by the other commands, with nothing to download."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from epk_gp.cli import app
from epk_gp.cli import options as opt

# Sizes as in section 4.1 of Bell et al. (2023), and tiny ones.
_SIZES = ("--num-train", 3000, "--num-test", 102, "--width", 64, "--steps", 300)
_SMOKE = ("--num-train", 60, "--num-test", 42, "--width", 8, "--steps", 8)


def demo(
    out: opt.Out = Path("demo_output"),
    seed: opt.Seed = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="Use tiny sizes, for a few seconds.")] = False,
) -> None:
    """Train on three Gaussians, show that the kernel machine is the network, explain and map it (about a minute).

    Each part is a command, which is shown. A second demo in the same folder goes on from the first one's run.
    """
    folder = opt.make_folder(out)
    run, sizes = folder / "run", _SMOKE if smoke else _SIZES
    commands = (
        ("record", "--out", run, "--resume", "--zero-final-layer", *sizes, "--seed", seed),
        ("verify", run, "--rule", "left-riemann:1", "--tol", 1),
        ("verify", run, "--out", folder),
        ("attribute", run, "--num-points", 3, "--out", folder / "attribution"),
        ("uncertainty", run, "--columns", "0,1", *(("--grid", 8) if smoke else ()), "--out", folder / "uncertainty"),
        ("report", run, "--num-points", 3, "--title", "Three Gaussians", "--out", folder / "report.html"),
    )  # fmt: skip
    for command in commands:
        words = [*map(str, command)]
        typer.echo(f"\n{shlex.join(('epk-gp', *words))}")
        if app(args=words, prog_name="epk-gp", standalone_mode=False):
            raise typer.Abort  # newer versions of typer return a status where the command was interrupted
    typer.echo(f"\nwritten to {folder}: report.html, to be opened in a browser, and what the commands say")
