import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from distributed_cases import Squares


def new_pool(workers: int = 2) -> ProcessPoolExecutor:
    """Make a pool whose workers are forks of a clean process, which has imported the package.

    A fork of the test process itself would have the locks of its threads, and a new interpreter for each worker imports
    torch each time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["epk_gp.gram.path_features", "distributed_cases"])
    return ProcessPoolExecutor(workers, mp_context=context)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pieces"


@pytest.fixture
def work(tmp_path):
    (tmp_path / "notes").mkdir()
    return Squares(str(tmp_path / "notes"))


@pytest.fixture(scope="session")
def processes():
    with new_pool() as pool:
        yield pool


@pytest.fixture
def fresh_processes():
    """A pool for tests that end its workers."""
    with new_pool(1) as pool:
        yield pool
