"""The command line, `epk-gp`: the table of its commands, and how errors end one.

`options` holds the options that commands share; `data` and `networks` read and write what lies in files; the other
modules hold a command each. Commands may import everything else of the package.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from epk_gp import __version__

# typer depends on click or brings a copy of it, as versions differ: the base class of both kinds of usage errors.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_INTERRUPTED = 130  # 128 + SIGINT
_HELP = "Exact path kernels: which training points made a prediction, exactly, and how sure is it?"
_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}

# Each command is the function of its name in the module of its name: its options and its help are the function's
# signature and docstring. Beside it stands its line in `epk-gp --help`, in the order in which a run goes through them.
COMMANDS = {
    "demo": "Run the paper's problem, from training to figures.",
    "record": "Train a network and record every step.",
    "verify": "Check a run's files, and that the kernel machine equals the network.",
    "attribute": "Write the contribution of each training point.",
    "uncertainty": "Score how likely predictions are wrong, and how unlike the training data points are.",
    "report": "Write predictions, contributions and certificate as a page.",
}


class _LazyGroup(TyperGroup):
    """Imports a command's module when the command is called: PyTorch takes seconds, for which --help need not wait."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the command that is called in the place of its line in the list."""
        name = args[0]
        if name in COMMANDS:
            module = import_module(f"epk_gp.cli.{name}")
            alone = typer.Typer(**_PLAIN)
            alone.command(name)(getattr(module, name))
            self.commands[name] = typer.main.get_command(alone)
        return super().resolve_command(ctx, args)


def _listed() -> None:
    """Stand for a command in the list of --help."""


app = typer.Typer(name="epk-gp", cls=_LazyGroup, help=_HELP, **_PLAIN)
for _name, _line in COMMANDS.items():
    app.command(_name, short_help=_line)(_listed)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"epk-gp {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options in front of the command; without one there is nothing to do."""


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show warnings as errors are shown."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        # Neither what is for calls from Python (a command has a bar) nor torch's to linear_operator
        if category.__name__ != "SlowCallWarning" and not str(message).startswith("`torch.jit.script` is"):
            typer.echo(f"epk-gp: warning: {message}", err=True)

    shown_before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown_before


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. An error of typer or of the package becomes one line on stderr and exit status 1.

    Args:
        arguments: Arguments after `epk-gp`; those of the process by default.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold bytes that are no text
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as `python -m` does, so that --network finds the user's modules
    words = list(sys.argv[1:] if arguments is None else arguments)
    if empty := [word for word in words if not word or (word.startswith("--") and word.endswith("="))]:
        _exit_with_error(  # an empty path would mean the current folder
            f"arguments must not be empty: got {empty[0]!r} ({' '.join(word or repr(word) for word in words)})."
        )
    try:
        with _warnings_in_one_line():
            status = app(args=words or ["--help"], prog_name="epk-gp", standalone_mode=False)
    except _UsageError as error:
        path = getattr(getattr(error, "ctx", None), "command_path", "epk-gp")
        message: str = error.format_message()  # type: ignore[attr-defined]  # of click
        _exit_with_error(f"{message.strip().rstrip('.')}. See {path} --help.")
    except typer.Abort:
        _exit_with_error("interrupted.", _INTERRUPTED)
    except (OSError, ValueError, TypeError, ImportError, IndexError) as error:
        _exit_with_error(_describe(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's words
            raise  # a defect, whose traceback is needed
        _exit_with_error(f"there must be memory for what was asked: {error or 'there is not'}. Ask for less.")
    if status == _INTERRUPTED:  # newer versions of typer return the status instead of raising Abort
        _exit_with_error("interrupted.", _INTERRUPTED)
    if isinstance(status, int) and status:
        sys.exit(status)


def _describe(error: Exception) -> str:
    """Return the system's errors as a sentence, and the package's own as they are."""
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename} cannot be used: {error.strerror[0].lower()}{error.strerror[1:]}."


def _exit_with_error(message: str, status: int = 1) -> NoReturn:
    typer.echo("epk-gp: error: " + " ".join(message.split()), err=True)
    sys.exit(status)
