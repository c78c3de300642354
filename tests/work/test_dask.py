"""Dask: the bytes of a call without workers, whatever dies meanwhile."""

import multiprocessing.forkserver
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from distributed_cases import CALLS, OVER, Squares, alone, run_of, same, squares

dask = pytest.importorskip("dask", reason="comes with epk-gp[distributed]")
distributed = pytest.importorskip("distributed", reason="comes with epk-gp[distributed]")

pytestmark = [
    pytest.mark.slow,
    # a cluster whose workers are killed leaves sockets and processes to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def new_cluster(workers=2):
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50, "death_timeout": 60}
    return distributed.LocalCluster(n_workers=workers, **options)


@pytest.fixture(scope="module", autouse=True)
def quick_restarts():
    """Workers are forks of a clean process that has imported all: a new interpreter takes seconds for that."""
    multiprocessing.set_forkserver_preload(["epk_gp.gram.path_features", "distributed_cases", "distributed"])
    multiprocessing.forkserver.ensure_running()
    settings = {"worker.multiprocessing-method": "forkserver", "deploy.lost-worker-timeout": "5s"}
    with dask.config.set({f"distributed.{name}": value for name, value in settings.items()}):
        yield


@pytest.fixture(scope="module")
def client():
    with new_cluster() as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.mark.parametrize("name", ["momentum", "features"])  # of all in processes: test_bytes.py
def test_dask_gives_the_bytes_of_none(name, client):
    assert same(CALLS[name](run_of(name), executor=client), alone(name))


def kill_at_random(work, kills, cluster, over):
    """Kill workers in the middle of their pieces; the cluster makes others, also for nannies that closed themselves."""
    killed, draw = [], random.Random(0)
    while len(killed) < kills and not over.wait(draw.uniform(0.02, 0.1)):
        cluster.scale(2)
        alive = [pid for pid in work.processes(0.3) if pid not in killed]
        with suppress(ProcessLookupError, IndexError):  # a nanny may have ended it itself
            pid = draw.choice(alive)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    (Path(work.notes) / OVER).touch()
    while not over.wait(1):
        cluster.scale(2)
    return len(killed)


def test_kills_change_nothing_and_cost_a_piece_each(tmp_path):
    (tmp_path / "notes").mkdir()
    work, kills, count, over = Squares(str(tmp_path / "notes"), seconds=0.02), 3, 100, threading.Event()
    with new_cluster() as cluster, distributed.Client(cluster) as client, ThreadPoolExecutor(1) as pool:
        killer = pool.submit(kill_at_random, work, kills, cluster, over)
        try:
            found = squares(work, client, tmp_path / "pieces", count)
        finally:  # the killer ends, and the pool with it, also where the job failed
            over.set()
        assert killer.result() == kills
        alive = set(client.run(os.getpid).values())
    assert found == [n * n for n in range(count)]
    begun, done = ([work.noted(n, what) for n in range(count)] for what in ("begun", "done"))
    for processes in begun:  # a piece is begun again only when the worker that had it is gone
        assert not set(processes[:-1]) & alive
    assert sum(map(len, done)) <= count + kills
    assert sum(map(len, begun)) <= count + 2 * kills


STOPS = {
    "closed scheduler": lambda cluster, client: cluster.close(timeout=5),
    "restarted scheduler": lambda cluster, client: client.restart(wait_for_workers=False),
    "closed client": lambda cluster, client: client.close(timeout=3),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS.keys())
def test_an_executor_that_is_stopped_is_an_error_and_the_job_goes_on_with_another(stop, tmp_path, client):
    (tmp_path / "notes").mkdir()
    work = Squares(str(tmp_path / "notes"), seconds=0.02)
    cluster = new_cluster(1)
    own = distributed.Client(cluster, timeout=3)

    def wait_and_stop():
        while not work.noted(3, "done"):
            time.sleep(0.02)
        with suppress(TimeoutError):  # on a slow machine what is stopped takes longer
            stop(cluster, own)

    thread = threading.Thread(target=wait_and_stop, daemon=True)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="Make a new one, and call again with the same checkpoint"):
            squares(work, own, tmp_path / "pieces", 200)
        (tmp_path / "notes" / OVER).touch()
    finally:
        thread.join(20)
        own.close(timeout=3)
        cluster.close(timeout=30)
    assert squares(work, client, tmp_path / "pieces", 200) == [n * n for n in range(200)]
