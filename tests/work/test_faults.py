"""Faults of workers, pools and folders: one line says what happened, and what was computed is kept."""

import errno
import pickle
import stat
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import epk_gp as epk
from distributed_cases import (
    CALLS,
    COUNT,
    RESULT,
    Shuffled,
    Squares,
    StopError,
    Stopping,
    alone,
    exit_at,
    inputs,
    make_net,
    mixed,
    record,
    run_of,
    same,
    squares,
)
from epk_gp.core.checks import ComputeOptions
from epk_gp.gram.tiles import DiagonalWork, GramWork
from epk_gp.kernel_machine.reconstruct import ReconstructionWork
from epk_gp.kernel_machine.terms import AttributionWork
from epk_gp.storage import files
from epk_gp.storage.files import PartialSums
from epk_gp.work import run as jobs
from epk_gp.work.run import Piece, Sums
from epk_gp.work.run import run as carry_out
from epk_gp.work.workers import scratch_folder

SLOW = [
    pytest.param(n, marks=pytest.mark.slow) for n in ("attribute", "momentum", "features", "diagonal", "reconstruct")
]
EVERY = pytest.mark.parametrize("name", ["block", *SLOW])


def as_worker(folder, key, n):
    """Compute a piece as another process would."""
    jobs._opened.cache_clear()
    jobs.compute_piece(str(folder), key, f"square-{n}", (n,))


@pytest.fixture
def written(folder, work):
    """A folder with a job whose owner is another process, and its key."""
    sums = PartialSums(folder, "squares")
    return jobs.write_job(work, sums)


def test_a_killed_worker_ends_the_pool_and_costs_the_piece_in_hand(folder, work, fresh_processes):
    faulty = Squares(work.notes, fault=exit_at)
    with pytest.raises(RuntimeError, match=r"a worker process died, and with it the pool.*same checkpoint"):
        squares(faulty, fresh_processes, folder, COUNT)
    with pytest.raises(RuntimeError, match="a worker process died, and with it the pool"):  # now submit refuses
        squares(faulty, fresh_processes, folder, COUNT)
    assert squares(work, None, folder, COUNT) == RESULT
    assert [len(work.noted(n, "done")) for n in range(COUNT)] == [1] * COUNT


def require_precise_kernels(n: int) -> None:
    """Fail where torch may take fused attention, which goes with TF32."""
    assert not torch.backends.cuda.flash_sdp_enabled()


def test_workers_take_the_kernels_that_the_owner_takes(folder, work, fresh_processes):
    precise = Squares(work.notes, fault=require_precise_kernels)
    assert torch.backends.cuda.flash_sdp_enabled()  # the control: switched off in the pieces alone
    for executor in (None, fresh_processes):
        assert squares(precise, executor, folder / str(executor is None), COUNT) == RESULT


def test_a_pool_that_was_shut_down_and_what_is_no_executor_are_refused(folder, work, unchecked):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match=r"executor must take the pieces of a job: its submit raised RuntimeError"):
        squares(work, pool, folder, COUNT)
    for executor in (2, ProcessPoolExecutor, "processes"):
        with pytest.raises(TypeError, match=r"executor must have a method submit\(function, \*args\)"):
            epk.gram_block(run_of("block"), mixed(2), mixed(2), executor=executor)


class CommClosedError(OSError):
    """Of Dask, by its name."""


@pytest.mark.parametrize("error", [CancelledError(), CommClosedError("in <TCP>")], ids=["result", "connection"])
def test_a_result_that_was_given_up_is_an_error_of_the_executor(error, folder, work):
    """Also where it is gone when the rest is to be cancelled."""

    class Closed(Shuffled):
        def submit(self, function, *arguments):
            pending = super().submit(function, *arguments)
            pending.cancel = self.work
            return pending

        def work(self):
            raise error

    with pytest.raises(RuntimeError, match=r"executor must finish the pieces that it took: it gave up piece square-0"):
        squares(work, Closed(), folder, COUNT)


def test_a_worker_refuses_a_folder_without_its_job_whole_and_of_its_versions(folder, written, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"every worker must see the folder of the pieces: .*checkpoint="):
        as_worker(folder.with_name("elsewhere"), written, 0)
    assert not folder.with_name("elsewhere").exists()
    file = folder / jobs.JOB
    content = file.read_bytes()
    file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(ValueError, match=r"must be what the job's owner wrote: it is damaged, or another's"):
        as_worker(folder, written, 0)
    file.write_bytes(content)
    other = {**jobs._versions(), "torch": "1.0"}
    monkeypatch.setattr(jobs, "_versions", lambda: other)
    monkeypatch.setattr(pickle, "loads", lambda content: pytest.fail("was unpickled"))
    with pytest.raises(ValueError, match=r"a worker must have the versions of the job's owner: .*torch 1\.0, not "):
        as_worker(folder, written, 0)


def test_a_full_disk_names_the_piece_and_the_folder(folder, written, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("epk_gp.storage.files.atomic_write", full)
    message = r"piece square-1 must be written to .*pieces by .*: No space left.*Make room"
    with pytest.raises(OSError, match=message) as caught:
        as_worker(folder, written, 1)
    assert pickle.loads(pickle.dumps(caught.value)).errno == errno.ENOSPC  # it travels to the owner


def test_a_damaged_piece_is_never_used_and_what_killed_writers_left_is_removed(folder, work):
    with pytest.raises(StopError):
        squares(work, Stopping(3, "result"), folder, COUNT)
    piece, *others = folder.glob("square-*")
    assert len(others) == 2
    content = piece.read_bytes()
    piece.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"square-\d\.safetensors must be a partial sum.*does not have the checksum"):
        squares(work, Shuffled(), folder, COUNT)
    piece.unlink()
    (folder / "square-1.safetensors.0123.part").write_bytes(b"torn")
    assert squares(work, Shuffled(), folder, COUNT) == RESULT
    assert not list(folder.glob("*.part"))


def test_a_folder_serves_one_job_at_a_time(folder, work):
    first = carry_out(work, ComputeOptions(checkpoint=folder), "squares")
    assert int(next(first)[1].added["value"]) == 0
    with pytest.raises(BlockingIOError, match="a checkpoint must serve one job at a time: another is in"):
        squares(work, None, folder, COUNT)
    first.close()
    assert squares(work, None, folder, COUNT) == RESULT


def test_two_writers_of_one_piece_leave_it_whole(tmp_path, monkeypatch):
    """A scheduler takes a slow worker for dead: it and its successor write the same bytes at once."""
    sums, value, sync, nested = PartialSums(tmp_path / "sums", "x"), torch.arange(5), files.os.fsync, []

    def slow(handle):
        if not nested:
            nested.append(True)
            sums.save("piece", {"value": value}, 1)
        sync(handle)

    monkeypatch.setattr(files.os, "fsync", slow)
    sums.save("piece", {"value": value}, 1)
    assert torch.equal(sums.load("piece")[0]["value"], value)
    assert not list((tmp_path / "sums").glob("*.part"))


class Lock:
    """What no process can send to another."""

    __deepcopy__ = lambda self, memo: self  # noqa: E731

    def __reduce__(self):
        raise TypeError("cannot pickle a lock")


def test_a_network_that_cannot_be_pickled_is_refused_with_advice(processes):
    net = nn.Linear(4, 3).double()
    net.lock = Lock()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, inputs(6), torch.arange(6) % 3, optimizer=optimizer, steps=2)
    with pytest.raises(TypeError, match=r"what workers compute must be picklable: .*lock.* Define the network's class"):
        epk.gram_block(run, mixed(2), mixed(2), executor=processes)


def test_another_copy_of_the_run_is_refused(tmp_path, folder):
    record("plain", 3, path=tmp_path / "run")
    run = epk.load_trajectory(tmp_path / "run", make_net())
    (tmp_path / "run").rename(tmp_path / "old")
    record("momentum", 3, path=tmp_path / "run")

    class Elsewhere(Shuffled):
        """Workers that read the job, as other processes do."""

        def submit(self, function, *arguments):
            jobs._OWN.clear()
            jobs._opened.cache_clear()
            return super().submit(function, *arguments)

    options = {"executor": Elsewhere(), "checkpoint": folder}
    with pytest.raises(ValueError, match=r"Or another run was recorded there"):
        epk.gram_block(run, mixed(2), mixed(2), rule=epk.QuadratureRule.left_endpoint(), **options)


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
def test_an_error_keeps_a_temporary_folder_and_names_it(error):
    with pytest.raises(error) as caught, scratch_folder(None) as folder:
        raise error
    assert folder.is_dir()
    assert f"kept in {str(folder)!r}: pass it as checkpoint=" in caught.value.__notes__[0]
    folder.rmdir()


def test_success_and_a_reader_that_stops_remove_a_temporary_folder():
    with scratch_folder(None) as first, pytest.raises(GeneratorExit), scratch_folder(None) as second:
        raise GeneratorExit
    assert not first.exists()
    assert not second.exists()


@EVERY
@pytest.mark.parametrize(("where", "then"), [("submit", "shuffled"), ("result", "none"), ("result", "shuffled")])
def test_a_job_that_was_stopped_is_gone_on_with(name, where, then, tmp_path, monkeypatch):
    call, folder, computed, expected = CALLS[name], tmp_path / "pieces", [], alone(name)
    for kind in (GramWork, DiagonalWork, AttributionWork, ReconstructionWork):
        real = kind.compute
        noted = lambda self, place, saved, real=real: computed.append(place) or real(self, place, saved)  # noqa: E731
        monkeypatch.setattr(kind, "compute", noted)
    with pytest.raises((StopError, RuntimeError), match=f"stopped in {where}") as stopped:
        call(run_of(name), executor=Stopping(2, where), checkpoint=folder)
    assert f"kept in {str(folder)!r}: pass it as checkpoint=" in stopped.value.__notes__[0]
    before, executor = len(computed), None if then == "none" else Shuffled()
    assert same(call(run_of(name), executor=executor, checkpoint=folder), expected)
    assert len(computed) == len(set(computed))
    assert before == (0 if name == "features" else 2)


@EVERY
def test_workers_go_on_with_what_was_begun_without_them(name, tmp_path, monkeypatch):
    call, saves, save, whole = CALLS[name], [], PartialSums.save, Shuffled()

    def cut(self, *arguments):
        save(self, *arguments)
        if not arguments[0].endswith("-begun"):
            saves.append(arguments[0])
            if len(saves) == 2:
                raise StopError

    monkeypatch.setattr("epk_gp.storage.files.SECONDS", 0.0)
    monkeypatch.setattr(PartialSums, "save", cut)
    with pytest.raises(StopError):
        call(run_of(name), checkpoint=tmp_path / "pieces")
    call(run_of(name), executor=whole)
    for left in (len(whole.order) - 2, 0):
        executor = Shuffled()
        assert same(call(run_of(name), executor=executor, checkpoint=tmp_path / "pieces"), alone(name))
        assert len(executor.order) == left


def test_threads_of_a_pool_that_computed_before_take_the_owners_number(folder):
    class CountThreads(Squares):
        def compute(self, place, saved):
            yield Sums({"value": torch.tensor([torch.get_num_threads()])}, steps=1)

    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        torch.set_num_threads(before + 1)
        assert pool.submit(torch.get_num_threads).result() == before + 1  # the thread keeps it
        torch.set_num_threads(before)
        assert squares(CountThreads(""), pool, folder, 2) == [before, before]
    assert torch.get_num_threads() == before


class Client(Shuffled):
    """What a Dask client is like whose scheduler loses its workers: a call ends when there are new ones, which die."""

    __module__ = "distributed.client"
    waits = 0

    def submit(self, function, *args, pure):
        assert not pure
        pending = super().submit(function, *args)
        arrived = pending.result
        pending.exception, pending.cancelled = lambda timeout: self.wait(arrived), lambda: False
        pending.result = lambda: pytest.fail("the worker that had the result has died")
        return pending

    def wait(self, arrived):
        self.waits += 1
        if self.waits <= 3:
            raise TimeoutError
        arrived()

    def nthreads(self):
        return {"tcp://10.0.0.1": 1} if self.waits == 1 else {}


def test_a_scheduler_without_workers_is_said_once_and_results_are_waited_for_but_not_fetched(folder, work, capsys):
    assert squares(work, Client(), folder, COUNT) == RESULT
    output = capsys.readouterr()
    assert output.err.count("the scheduler has no workers: the job waits until it has some") == 1
    assert not output.out


def test_a_time_limit_in_a_piece_is_the_error_of_the_job(folder, work):
    class ThreadClient(ThreadPoolExecutor):
        __module__ = "distributed.client"

        def submit(self, function, *args, pure):
            return super().submit(function, *args)

    def no_answer(n):
        raise TimeoutError("a disk that does not answer")

    faulty = Squares(work.notes, fault=no_answer)
    with ThreadClient(1) as client, pytest.raises(TimeoutError, match="a disk that does not answer"):
        squares(faulty, client, folder, COUNT)


@pytest.mark.parametrize("deaths", [2, 5])
def test_a_piece_over_which_workers_die_is_tried_again_but_not_for_ever(deaths, folder, work, capsys):
    class KilledWorker(Exception):  # noqa: N818  the name of Dask's error
        pass

    class Dying(Shuffled):
        left = deaths

        def work(self):
            self.left -= 1
            if self.left >= 0:
                raise KilledWorker
            super().work()

    died = r"several died over square-0, 5 times.*a smaller memory_budget"
    with pytest.raises(RuntimeError, match=died) if deaths == 5 else nullcontext():
        assert squares(work, Dying(), folder, COUNT) == RESULT
    assert capsys.readouterr().err.count("it is submitted again") == min(deaths, 4)


class Told:
    """An executor that computes here what it was sent, and looks at the job's file."""

    def __init__(self, file):
        self.file, self.modes = file, []

    def submit(self, *call):
        self.modes.append(stat.S_IMODE(self.file.stat().st_mode))
        return Shuffled().submit(*call)


@dataclass
class Ones:
    place: int
    piece_bytes = 8
    device = torch.device("cpu")

    @property
    def pieces(self):
        return [Piece("a", (self.place,))]

    def identity(self):
        return "1"

    def compute(self, place, saved):
        if place[0] < 0:
            raise KeyError("no such piece")
        yield Sums({"one": torch.ones(1)}, steps=1)

    def check(self):
        pass


@pytest.mark.parametrize("place", [1, -1], ids=["success", "failure"])
def test_a_job_is_private_and_removed_when_it_ends(tmp_path, place):
    file = PartialSums(tmp_path / "sums", "1").folder / jobs.JOB
    file.with_name("job.pickle.part").write_text("left by another, for all to read")
    executor = Told(file)
    try:
        list(carry_out(Ones(place), ComputeOptions(executor=executor, checkpoint=file.parent), "ones"))
    except KeyError:
        assert place < 0
    assert executor.modes == [0o600]
    assert not file.exists()
