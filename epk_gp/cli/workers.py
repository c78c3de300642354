"""Workers of commands: processes of this machine (--workers), or those of a Dask scheduler (--scheduler)."""

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import typer

from epk_gp.storage.files import MAX_JSON_BYTES, parse_json, read_bytes

TIMEOUT = 30  # seconds in which a scheduler must answer


@contextmanager
def computing(
    memory: float, workers: int | None, scheduler: str | None, quiet: bool, checkpoint: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Give how a command computes, as arguments of the library's calls (`ComputeSettings`).

    Processes of this machine are a pool of the standard library: it needs no further package, and opens no port, behind
    which other users of the machine could have their code executed, as a Dask cluster does. They are spawned: a process
    that has used PyTorch's threads cannot be forked safely.

    Args:
        memory: Memory for the computation, GiB.
        workers: Number of processes of this machine.
        scheduler: Address or scheduler file of a Dask scheduler.
        quiet: No progress bars.
        checkpoint: Folder of partial sums, from which the same command resumes.

    Raises:
        ImportError: Dask is not installed.
        FileNotFoundError: There is no such scheduler file.
        ConnectionError: The scheduler does not answer.
        ChildProcessError: Workers died, or cannot go on.
        ValueError: The address is none.
    """
    executor: Any = None
    if scheduler is not None:
        executor = _connect(scheduler)
    elif workers is not None:
        executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    again = f"Run the same command again{', which resumes from what was computed' if checkpoint else ''}"
    settings: dict[str, Any] = {"memory_budget": int(memory * 2**30), "progress": not quiet, "executor": executor}
    if checkpoint is not None:
        settings["checkpoint"] = checkpoint
    try:
        yield settings
    except Exception as error:
        if isinstance(error.__cause__, BrokenExecutor):
            raise ChildProcessError(
                "workers must live until all is computed: one of them died, killed or out of memory. "
                f"{again}; with fewer --workers or less --memory if memory was short."
            ) from error
        if executor is not None and _is_of_workers(error):
            raise ChildProcessError(f"workers must compute all pieces: {str(error).rstrip('.')}. {again}.") from error
        raise
    finally:
        if scheduler is not None:
            executor.close()
        elif workers is not None:
            executor.shutdown(cancel_futures=True)


def _connect(scheduler: str) -> Any:
    """Return a client of a Dask scheduler."""
    try:
        from distributed import Client  # noqa: PLC0415  comes with the extra 'distributed', and takes a second
    except ImportError as error:
        raise ImportError("--scheduler needs Dask: pip install epk-gp[distributed].") from error
    address = _address(scheduler)
    try:
        client: Any = Client(address, timeout=TIMEOUT, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError) as error:
        raise ConnectionError(f"--scheduler must be a running Dask scheduler: {address} did not answer.") from error
    if not client.scheduler_info()["workers"]:
        typer.echo(f"epk-gp: warning: the scheduler {scheduler} has no workers yet: pieces wait for them", err=True)
    return client


def _address(scheduler: str) -> str:
    """Return the address that an option gives, or the scheduler file that it names."""
    file, address = Path(scheduler), scheduler
    if file.suffix == ".json" or file.exists():
        if not file.is_file():  # Dask would wait for it
            raise FileNotFoundError(f"--scheduler must be a scheduler file of dask scheduler: {file} does not exist.")
        message = f"--scheduler must name a scheduler file that dask scheduler --scheduler-file wrote: {file}"
        content = parse_json(read_bytes(file, MAX_JSON_BYTES, str(file)), message)
        address = str(content.get("address")) if isinstance(content, dict) else "none"
    if not re.fullmatch(r"((tcp|tls|ws|wss|ucx)://)?[^/]+:[0-9]{1,5}", address):
        raise ValueError(f"--scheduler must be an address, as tcp://host:8786, or a scheduler file: got {address!r}.")
    return address


def _is_of_workers(error: Exception) -> bool:
    """Whether an error is about workers, rather than about what they compute."""
    *_, (raised_in, _) = walk_tb(error.__traceback__)
    is_of_work = isinstance(error, RuntimeError) and raised_in.f_globals.get("__name__", "").startswith("epk_gp.work.")
    return is_of_work or type(error).__module__.partition(".")[0] == "distributed"
