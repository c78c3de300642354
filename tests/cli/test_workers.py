"""--workers and --scheduler: whose processes compute, and what is said where they cannot."""

import json
import os
import sys
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from commands import refused, run
from epk_gp.cli import workers
from epk_gp.work import run as of_job

GRAM = ("--num-rows", 2, "--num-columns", 3, "--quiet")
OTHERS = {
    "verify": ("--num-points", 2),
    "attribute": ("--num-points", 2, "--outputs", "predicted"),
    "uncertainty": ("--num-condition", 5, "--grid", 3, "--fit-steps", 2),
    "audit": ("--top", 3),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Threads of this process in place of new processes; the numbers of workers that were asked for."""
    asked: list[int | None] = []

    def pool(count, **options):
        asked.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(workers, "ProcessPoolExecutor", pool)
    return asked


@pytest.fixture(scope="module")
def by_one(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The block that one process writes."""
    folder: Path = tmp_path_factory.mktemp("one")
    assert run("gram", recorded, "--out", folder, *GRAM) == 0
    return (folder / "gram.safetensors").read_bytes()


def test_workers_compute_the_bytes_of_one_process(recorded, by_one, tmp_path, threads):
    assert run("gram", recorded, "--out", tmp_path, *GRAM, "--workers", 2) == 0
    assert threads == [2]
    assert (tmp_path / "gram.safetensors").read_bytes() == by_one
    assert not (tmp_path / "partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS)
def test_workers_of_other_commands_give_the_numbers_of_one_process(recorded, tmp_path, no_pictures, threads, command):
    for folder, more in (("one", ()), ("two", ("--workers", 2))):
        assert run(command, recorded, "--out", tmp_path / folder, *OTHERS[command], "--quiet", *more) == 0
    assert threads == [2]
    one, two = (json.loads(next((tmp_path / name).glob("*.json")).read_text()) for name in ("one", "two"))
    assert one["results"] == two["results"]


@pytest.mark.slow
def test_processes_compute_the_bytes_of_one_process(recorded, by_one, tmp_path):
    assert torch.get_num_threads() == 1
    assert run("gram", recorded, "--out", tmp_path, *GRAM, "--workers", 2) == 0
    assert (tmp_path / "gram.safetensors").read_bytes() == by_one


@pytest.mark.slow
def test_a_dask_scheduler_s_workers_compute_the_same_bytes(recorded, by_one, tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.write_scheduler_file(str(tmp_path / "scheduler.json"))
        where = ("--scheduler", tmp_path / "scheduler.json")
        assert run("gram", recorded, "--out", tmp_path / "gram", *GRAM, *where) == 0
    assert (tmp_path / "gram" / "gram.safetensors").read_bytes() == by_one


def test_the_pool_is_spawned_and_closed():
    with workers.computing(1.0, 1, None, True) as settings:
        executor = settings["executor"]
        assert isinstance(executor, ProcessPoolExecutor)
        assert executor._mp_context.get_start_method() == "spawn"
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(os.getpid)
    with workers.computing(1.0, None, None, True) as settings:
        assert settings == {"memory_budget": 1 << 30, "progress": False, "executor": None}


def test_a_scheduler_that_does_not_answer_or_has_no_dask_is_an_error(recorded, tmp_path, monkeypatch, capsys):
    distributed = pytest.importorskip("distributed")

    def silent(address, **options):
        raise OSError(f"Timed out trying to connect to {address} after {options['timeout']} s")

    monkeypatch.setattr(distributed, "Client", silent)
    line = refused(capsys, "gram", recorded, "--out", tmp_path, *GRAM, "--scheduler", "tcp://h:8786")
    assert "--scheduler must be a running Dask scheduler: tcp://h:8786 did not answer." in line
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = refused(capsys, "gram", recorded, "--out", tmp_path, *GRAM, "--scheduler", "tcp://h:8786")
    assert line.endswith("--scheduler needs Dask: pip install epk-gp[distributed].")


def test_a_worker_that_dies_ends_the_command_with_one_line_and_it_resumes(
    recorded, tmp_path, threads, monkeypatch, capsys
):
    asked = ("gram", recorded, "--out", tmp_path, *GRAM, "--workers", 2)
    with monkeypatch.context() as patch:
        patch.setattr(of_job, "compute_piece", _die)
        line = refused(capsys, *asked)
    assert "one of them died, killed or out of memory. Run the same command again, which resumes" in line
    assert (tmp_path / "partial").exists()
    assert run(*asked) == 0
    assert not (tmp_path / "partial").exists()


def test_other_errors_of_workers_are_named_and_a_defect_keeps_its_traceback(
    recorded, tmp_path, threads, monkeypatch, capsys
):
    asked = ("gram", recorded, "--out", tmp_path, *GRAM, "--workers", 2)
    monkeypatch.setattr(of_job, "compute_piece", lambda *arguments: None)
    line = refused(capsys, *asked)
    assert "workers must compute all pieces: workers must write into the folder that this process reads" in line

    def fail(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(of_job, "compute_piece", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        run(*asked)


def _die(*arguments: object) -> None:
    raise BrokenExecutor("a process in the pool was terminated abruptly")
