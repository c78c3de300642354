"""The command-line application: the object that commands register with, and how errors end it."""

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
from typer.core import TyperGroup

from epk_gp import __version__

# typer depends on click or brings a copy of it, as versions differ: the base class of both kinds of usage errors.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
_INTERRUPTED = 130  # 128 + SIGINT
_ORDER = (
    *("demo", "record", "info", "verify", "export", "estimate", "attribute", "influence", "report", "gram"),
    *("uncertainty", "audit"),
)


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


def command(
    short_help: str,
    alone: Mapping[str, Sequence[str]] = MappingProxyType({}),
    needing: Mapping[str, Sequence[str]] = MappingProxyType({}),
    completed_by: str | None = None,
    options_of: Sequence[Callable[..., None]] = (),
    but: Sequence[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command: its signature and docstring say what the command takes.

    What the command does is the function of the same name in `epk_gp.cli.<name>`, which is called with the options as
    keyword arguments. The module is imported by its name, and only then: it imports PyTorch, which takes seconds, and
    neither --help, nor --version, nor a wrong option should wait for that.

    Args:
        short_help: The command's line in `epk-gp --help`.
        alone: Flags that leave only some other parameters a meaning, and those. The function must have a parameter
            `ctx`, which is not passed on.
        needing: Options without which some other parameters have no meaning, and those. As for `alone`.
        completed_by: Module whose `complete_options` makes the final options of those and of the names of the
            parameters that are on the command line. The function must have a parameter `ctx` here too.
        options_of: Other commands whose options this one takes as well, behind its own: first those that only one of
            them has. Where the function has a keyword-only parameter of the same name, that stands in their place.
        but: Parameters of the other commands that this one does not take.
    """

    def register(declared: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(declared)
        def call(**options: object) -> None:
            ctx = options.pop("ctx", None)
            for flag in (flag for flag in alone if options[flag]):
                _require_alone(ctx, flag, alone[flag])
            for option in (option for option in needing if options[option] is None):
                _require_given(ctx, option, needing[option])
            module = importlib.import_module(f"epk_gp.cli.{declared.__name__}")
            if "run" in options:
                importlib.import_module("epk_gp.cli.parsing").validate_folders(options["run"], options.get("out"))
            if completed_by is not None:
                completing = importlib.import_module(completed_by)
                options = completing.complete_options(options, {parameter.name for parameter in _given(ctx)})
            getattr(module, declared.__name__)(**options)

        if options_of:
            _take_options(call, options_of, but)
        app.command(short_help=short_help)(call)
        return call

    return register


def _take_options(call: Callable[..., None], others: Sequence[Callable[..., None]], but: Sequence[str]) -> None:
    """Add the parameters of other commands to what a function is seen to take (`command`)."""
    signature = inspect.signature(call)
    own = signature.parameters
    first = [parameter for parameter in own.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    left_out = {*but, *(parameter.name for parameter in first)}
    theirs = [
        parameter
        for other in others
        for parameter in inspect.signature(other).parameters.values()
        if parameter.name not in left_out
    ]
    holders = Counter(parameter.name for parameter in theirs)
    theirs.sort(key=lambda parameter: holders[parameter.name] > 1)
    added = {p.name: own.get(p.name, p).replace(kind=p.POSITIONAL_OR_KEYWORD) for p in theirs}
    parameters = [*first, *added.values()]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    hints = {parameter.name: parameter.annotation for parameter in parameters}
    call.__annotations__ = {**hints, "return": signature.return_annotation}


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show warnings as errors are shown."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if category.__name__ != "SlowCallWarning":  # of calls from Python: a command shows a bar, or is to be quiet
            typer.echo(f"epk-gp: warning: {message}", err=True)

    shown_before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown_before


def _given(ctx: Any) -> list[Any]:
    """Return the parameters that are on the command line."""
    sources = ((parameter, ctx.get_parameter_source(parameter.name)) for parameter in ctx.command.params)
    return [parameter for parameter, source in sources if source is not None and source.name == "COMMANDLINE"]


def _require_alone(ctx: Any, flag: str, meant: Sequence[str]) -> None:
    """Raise if the command line has an option that means nothing beside a flag."""
    for parameter in _given(ctx):
        if parameter.name not in (flag, *meant):
            raise ValueError(
                f"--{flag} must stand without {parameter.opts[0]}, which would be ignored. Pass one of them."
            )


def _require_given(ctx: Any, option: str, meant: Sequence[str]) -> None:
    """Raise if the command line has an option that means something only beside another one, which it has not."""
    for parameter in _given(ctx):
        if parameter.name in meant:
            raise ValueError(
                f"{parameter.opts[0]} must stand beside --{option}, without which it would be ignored. Pass both."
            )


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
        message: str = _wrong_number(error, words) or error.format_message()  # type: ignore[attr-defined]  # of click
        _exit_with_error(f"{message.strip().rstrip('.')}. See {path} --help.")
    except typer.Abort:
        _exit_with_error("interrupted.", _INTERRUPTED)
    except OSError as error:
        _exit_with_error(_describe(error))
    except MemoryError as error:
        _exit_with_error(f"there must be memory for what was asked: {error or 'there is not'}. Ask for less.")
    except (ValueError, TypeError, ImportError, IndexError) as error:
        _exit_with_error(str(error))
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch's words; any other is a defect, whose traceback is needed
            raise
        _exit_with_error(f"there must be memory for what was asked: {error}. Ask for less.")
    if status == _INTERRUPTED:  # newer versions of typer return the status instead of raising Abort
        _exit_with_error("interrupted.", _INTERRUPTED)
    if isinstance(status, int) and status:
        sys.exit(status)


def _wrong_number(error: Exception, words: Sequence[str]) -> str | None:
    """Return what a numeric option must be, if a word in place of its number is the error."""
    parameter, ctx = getattr(error, "param", None), getattr(error, "ctx", None)
    declared = {info.callback.__name__: info.callback for info in app.registered_commands if info.callback}
    if parameter is None or ctx is None or ctx.info_name not in declared:
        return None
    hint, option = get_type_hints(declared[ctx.info_name]).get(parameter.name), parameter.opts[0]
    kinds: dict[Any, type[int] | type[float]] = {int: int, int | None: int, float: float, float | None: float}
    kind = kinds.get(hint)
    if kind is None:
        return None
    values = [word for before, word in pairwise(words) if before == option]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    wrong = [value for value in values if not _is_number(value, kind)]
    return f"{option} must be a {'whole ' * (kind is int)}number: got {wrong[-1]!r}" if wrong else None


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _describe(error: OSError) -> str:
    """Return the system's errors as a sentence, and the package's own as they are."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename} cannot be used: {error.strerror[0].lower()}{error.strerror[1:]}."


def _exit_with_error(message: str, status: int = 1) -> NoReturn:
    typer.echo("epk-gp: error: " + " ".join(message.split()), err=True)
    sys.exit(status)
