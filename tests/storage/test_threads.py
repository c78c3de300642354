"""A run on disk that several threads read at once, as a prefetching thread and a pool of workers do."""

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import epk_gp as epk
from loops import data, mlp

STEPS, THREADS = 40, 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Forty steps of RMSprop in chunks of seven: its coefficients are one per weight, and read from the file."""
    path = tmp_path_factory.mktemp("threads") / "run"
    torch.manual_seed(0)
    net, (X, y) = mlp(), data()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.003, momentum=0.5)
    storage = epk.Storage(steps=7)
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda states: pickle.loads(pickle.dumps(states))])
def test_a_copy_reads_the_same(run, copied):
    states = epk.load_trajectory(run, mlp()).states
    expected = states[5]
    again = copied(states)
    assert again == states
    assert torch.equal(again[5], expected)
