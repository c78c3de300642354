"""Dask's clients, imitated: workers that are not there, die again and again, or meet a time limit."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from distributed_cases import COUNT, RESULT, Shuffled, Squares, squares


class Client(Shuffled):
    """What a Dask client is like whose scheduler loses its workers: a call ends when there are new ones, which die."""

    __module__ = "distributed.client"

    def __init__(self):
        super().__init__()
        self.waits = 0

    def submit(self, function, *args, pure):
        assert not pure
        pending = super().submit(function, *args)
        arrived = pending.result
        pending.exception = lambda timeout: self.wait(arrived)
        pending.cancelled = lambda: False
        pending.result = self.fetch
        return pending

    def wait(self, arrived):
        self.waits += 1
        if self.waits <= 3:
            raise TimeoutError
        arrived()

    def fetch(self):
        raise TimeoutError("the worker that had the result has died")

    def nthreads(self):
        return {"tcp://10.0.0.1": 1} if self.waits == 1 else {}


def test_a_scheduler_without_workers_is_said_once_and_results_are_waited_for_but_not_fetched(folder, work, capsys):
    assert squares(work, Client(), folder, COUNT) == RESULT
    output = capsys.readouterr()
    assert output.err.count("the scheduler has no workers: the job waits until it has some") == 1
    assert not output.out


class ThreadClient(ThreadPoolExecutor):
    """What a Dask client is like whose worker is a thread."""

    __module__ = "distributed.client"

    def submit(self, function, *args, pure):
        return super().submit(function, *args)


def test_a_time_limit_in_a_piece_is_the_error_of_the_job(folder, work):
    faulty = Squares(work.notes, fault=no_answer)
    with ThreadClient(1) as client, pytest.raises(TimeoutError, match="a disk that does not answer"):
        squares(faulty, client, folder, COUNT)


def no_answer(n):
    raise TimeoutError("a disk that does not answer")


class KilledWorker(Exception):  # noqa: N818
    """The name of Dask's error."""


@pytest.mark.parametrize("deaths", [2, 5])
def test_a_piece_over_which_workers_die_is_tried_again_but_not_for_ever(deaths, folder, work, capsys):
    class Dying(Shuffled):
        left = deaths

        def work(self):
            self.left -= 1
            if self.left >= 0:
                raise KilledWorker
            super().work()

    executor = Dying()
    if deaths == 2:
        assert squares(work, executor, folder, COUNT) == RESULT
    else:
        with pytest.raises(RuntimeError, match=r"several died over square-0, 5 times.*a smaller memory_budget"):
            squares(work, executor, folder, COUNT)
    assert capsys.readouterr().err.count("it is submitted again") == min(deaths, 4)
