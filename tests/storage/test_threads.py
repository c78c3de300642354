"""A run on disk that several threads read at once, as a prefetching thread and a pool of workers do."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import epk_gp as epk
from epk_gp.storage import chunks
from epk_gp.storage.chunks import RowReader
from loops import data, mlp

STEPS, THREADS = 40, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Forty steps of RMSprop in chunks of seven: its coefficients are one per weight, so they are packed too."""
    path = tmp_path_factory.mktemp("threads") / "run"
    torch.manual_seed(0)
    net, (X, y) = mlp(), data()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.003, momentum=0.5)
    storage = epk.Storage(steps=7, compression="deltas")
    epk.train(net, X, y, optimizer=optimizer, steps=STEPS, batch_size=4, folder=path, storage=storage)
    return path


def read_all(trajectory, order):
    """Read every state and the coefficients of every step, in one order."""
    states, updates = {}, {}
    for number in order:
        states[number] = trajectory.states[number]
        if number < STEPS:
            updates[number] = trajectory.updates[number]
    return states, updates


@pytest.mark.slow
def test_eight_threads_read_in_any_order_what_one_thread_reads(run):
    trajectory = epk.load_trajectory(run, mlp())
    states, updates = read_all(epk.load_trajectory(run, mlp()), range(STEPS + 1))
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(STEPS + 1, generator=generator).tolist() for _ in range(THREADS - 2)]
    orders += [list(range(STEPS + 1)), list(range(STEPS, -1, -1))]
    start, interval = threading.Barrier(THREADS), sys.getswitchinterval()

    def work(order):
        start.wait()
        return read_all(trajectory, order)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            results = list(pool.map(work, orders))
    finally:
        sys.setswitchinterval(interval)
    for read_states, read_updates in results:
        assert all(torch.equal(read_states[s], states[s]) for s in range(STEPS + 1))
        for s in range(STEPS):
            assert all(torch.equal(a, b) for a, b in zip(read_updates[s], updates[s], strict=True))


def count_unpacked_rows(trajectory, monkeypatch):
    """Read all states in order by two threads in turns, the second one half a run behind the first."""
    rows, plain = [], chunks.unpack_row
    with monkeypatch.context() as patch:
        patch.setattr(chunks, "unpack_row", lambda *args: rows.append(1) or plain(*args))
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
            for s in range(STEPS // 2 + 1):
                one.submit(trajectory.states.__getitem__, s + STEPS // 2).result()
                two.submit(trajectory.states.__getitem__, s).result()
    return len(rows)


def test_threads_that_read_in_order_do_not_cost_each_other_anything(run, monkeypatch):
    trajectory = epk.load_trajectory(run, mlp())
    in_order = 2 * (STEPS // 2 + 1) + 7  # each state once, and the first thread's start within a chunk
    assert count_unpacked_rows(trajectory, monkeypatch) <= in_order
    trajectory.states.reader._of_thread = SimpleNamespace()  # the negative control: one place for all threads
    assert count_unpacked_rows(trajectory, monkeypatch) > 1.5 * in_order


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda states: pickle.loads(pickle.dumps(states))])
def test_a_copy_reads_from_a_place_of_its_own(run, copied):
    states = epk.load_trajectory(run, mlp()).states
    expected = states[5]
    again = copied(states)
    assert again == states
    assert isinstance(again.reader, RowReader)
    assert again.reader is not states.reader
    assert torch.equal(again[5], expected)
