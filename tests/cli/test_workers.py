"""`epk-gp attribute --workers`: the bytes are those of one process, and a worker that dies ends the command."""

import os
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from commands import refused, run
from epk_gp.cli import attribute
from epk_gp.work import run as of_job

pytestmark = pytest.mark.usefixtures("no_pictures")
ASKED = ("--num-points", 2, "--outputs", "predicted")
ARRAYS = "attribution.safetensors"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Threads of this process in place of new processes; the numbers of workers that were asked for."""
    asked: list[int | None] = []

    def pool(count, **options):
        asked.append(count)
        return ThreadPoolExecutor(count)

    monkeypatch.setattr(attribute, "ProcessPoolExecutor", pool)
    return asked


def test_workers_compute_the_bytes_of_one_process(recorded, tmp_path, threads):
    assert run("attribute", recorded, "--out", tmp_path, *ASKED, "--workers", 2) == 0
    assert threads == [2]
    assert run("attribute", recorded, "--out", tmp_path / "one", *ASKED) == 0
    assert (tmp_path / ARRAYS).read_bytes() == (tmp_path / "one" / ARRAYS).read_bytes()
    assert not (tmp_path / "partial").exists()


def test_the_pool_is_spawned_and_closed():
    with attribute._executor(1) as executor:
        assert isinstance(executor, ProcessPoolExecutor)
        assert executor._mp_context.get_start_method() == "spawn"
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(os.getpid)
    with attribute._executor(None) as executor:
        assert executor is None


def test_a_worker_that_dies_ends_the_command_with_one_line_and_it_resumes(
    recorded, tmp_path, threads, monkeypatch, capsys
):
    asked = ("attribute", recorded, "--out", tmp_path, *ASKED, "--workers", 2)
    with monkeypatch.context() as patch:
        patch.setattr(of_job, "compute_piece", _die)
        line = refused(capsys, *asked)
    assert "one of them died, killed or out of memory. Run the same command again, which resumes" in line
    assert (tmp_path / "partial").exists()
    assert run(*asked) == 0
    assert not (tmp_path / "partial").exists()


def test_a_defect_keeps_its_traceback(recorded, tmp_path, threads, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(of_job, "compute_piece", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        run("attribute", recorded, "--out", tmp_path, *ASKED, "--workers", 2)


def _die(*arguments: object) -> None:
    raise BrokenExecutor("a process in the pool was terminated abruptly")
