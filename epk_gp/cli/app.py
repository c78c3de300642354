"""The command-line application: the object that commands register with, and how errors end it."""

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

# typer depends on click or brings a copy of it, as versions differ: the base class of both kinds of usage errors.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_INTERRUPTED = 130  # 128 + SIGINT
_ORDER = ("demo", "record", "info", "verify", "export", "attribute", "gram", "uncertainty")


class _LifeCycleOrder(TyperGroup):
    """Lists the commands in the order in which a run goes through them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands for --help."""
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    name="epk-gp",
    cls=_LifeCycleOrder,
    help="Exact path kernels: which training points made a prediction, exactly, and how sure is it?",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. An error of typer or of the package becomes one line on stderr and exit status 1.

    Args:
        arguments: Arguments after `epk-gp`; those of the process by default.
    """
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as `python -m` does, so that --network finds the user's modules
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=words or ["--help"], prog_name="epk-gp", standalone_mode=False)
    except _UsageError as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "epk-gp")
        message: str = error.format_message()  # type: ignore[attr-defined]  # click's protocol
        _exit_with_error(f"{message.strip().rstrip('.')}. See {command} --help.")
    except typer.Abort:
        _exit_with_error("interrupted.", _INTERRUPTED)
    except (ValueError, TypeError, OSError, ImportError, IndexError) as error:
        _exit_with_error(str(error))
    if status == _INTERRUPTED:  # newer versions of typer return the status instead of raising Abort
        _exit_with_error("interrupted.", _INTERRUPTED)
    if isinstance(status, int) and status:
        sys.exit(status)


def _exit_with_error(message: str, status: int = 1) -> NoReturn:
    typer.echo("error: " + " ".join(message.split()), err=True)
    sys.exit(status)
