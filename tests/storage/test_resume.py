"""Going on with a run: it ends as if it had never stopped, and only the same run goes on."""

import errno
import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import epk_gp as epk
from epk_gp.storage import writer as writing
from epk_gp.storage.check import check_run
from epk_gp.training import recorder as recorder_module
from epk_gp.training.clipping import ClipNorm
from loops import data, file_hashes, mlp, sgd

STEPS = 9
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
}
SCHEDULERS = {
    "none": lambda o: None,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5], 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS + 1),
    "in_sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.LambdaLR(o, lambda s: 0.9**s)], [3]
    ),
}


class StopHereError(Exception):
    """The process ends here."""


def stopping(scheduler, at, optimizer):
    """Raise in the middle of an iteration, before or after the optimizer's step."""
    count = [0]

    def hook(*_):
        count[0] += 1
        if count[0] == at:
            raise StopHereError

    return optimizer.register_step_pre_hook(hook)


def train(path, optimizer="sgd", scheduler="none", dtype=torch.float64, steps=STEPS, stop=None, **options):
    net, (X, y) = mlp(dtype), data(dtype=dtype)
    made = OPTIMIZERS[optimizer](net.parameters())
    schedule = SCHEDULERS[scheduler](made)
    if stop is not None:
        stopping(schedule, stop, made)
    options = {"batch_size": 4, "generator": torch.Generator().manual_seed(5)} | options
    trajectory = epk.train(net, X, y, optimizer=made, scheduler=schedule, steps=steps, path=path, **options)
    return trajectory, net, made, options["generator"]


def same(one, other):
    """Bit for bit: weights, numbers, network, optimizer and generator."""
    (a, net_a, optimizer_a, generator_a), (b, net_b, optimizer_b, generator_b) = one, other
    assert a.digest == b.digest
    assert all(torch.equal(a.states[s], b.states[s]) for s in range(STEPS + 1))
    assert all(torch.equal(p, q) for p, q in zip(net_a.parameters(), net_b.parameters(), strict=True))
    assert torch.equal(generator_a.get_state(), generator_b.get_state())
    assert str(optimizer_a.state_dict()) == str(optimizer_b.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path, optimizer, dtype):
    whole = train(None, optimizer, dtype=dtype)
    with pytest.raises(StopHereError):
        train(tmp_path / "run", optimizer, dtype=dtype, stop=6, resume=True)
    assert epk.load_trajectory(tmp_path / "run", mlp(dtype)).num_steps == 5
    torch.manual_seed(99)
    same(train(tmp_path / "run", optimizer, dtype=dtype, resume=True), whole)
    assert epk.load_trajectory(tmp_path / "run", mlp(dtype)).digest == whole[0].digest


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch's own, of its SequentialLR
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("stop", [1, 4, STEPS])
def test_schedules_go_on(tmp_path, scheduler, stop):
    whole = train(None, "momentum", scheduler)
    with pytest.raises(StopHereError):
        train(tmp_path / "run", "momentum", scheduler, stop=stop)
    same(train(tmp_path / "run", "momentum", scheduler, resume=True), whole)


@pytest.mark.parametrize("own", [True, False], ids=["own_generator", "torch_s_generator"])
def test_every_stop_on_the_way_leads_to_the_same_end(tmp_path, own):
    def go(path, **options):
        torch.manual_seed(8)
        given = torch.Generator().manual_seed(5) if own else None
        net, (X, y) = mlp(), data()
        torch.manual_seed(8)
        made = torch.optim.Adam(net.parameters(), lr=0.01)
        if (stop := options.pop("stop", None)) is not None:
            stopping(None, stop, made)
        options |= {"batch_size": 3, "generator": given, "steps": STEPS}
        return epk.train(net, X, y, optimizer=made, path=path, **options)

    whole = go(None)
    for compression in ("none", "deltas"):
        storage = epk.Storage(steps=2, compression=compression)
        for stop in (2, 1, 3, 2):
            with pytest.raises(StopHereError):
                go(tmp_path / compression, stop=stop, resume=True, storage=storage)
        assert go(tmp_path / compression, resume=True, storage=storage).digest == whole.digest


def test_a_finished_run_is_given_back_and_can_be_made_longer(tmp_path):
    long = train(None)
    short, *_ = train(tmp_path / "run", steps=4)
    before = file_hashes(tmp_path / "run")
    assert train(tmp_path / "run", steps=4, resume=True)[0].digest == short.digest
    assert file_hashes(tmp_path / "run") == before
    same(train(tmp_path / "run", resume=True), long)
    assert check_run(tmp_path / "run").finished
    with pytest.raises(ValueError, match="steps must be at least the 9 that are recorded already: got 8"):
        train(tmp_path / "run", steps=8, resume=True)


def loop(recorder, steps, plain=False):
    with recorder:
        for step in range(recorder.num_steps, steps) if plain else recorder.until(steps):
            batch = torch.randint(len(recorder.X), (3,))
            recorder.optimizer.zero_grad()
            F.cross_entropy(recorder.net(recorder.X[batch]), recorder.y[batch]).backward()
            recorder.batch(batch)
            recorder.optimizer.step()
            if step == 4 and steps == 5:
                raise KeyboardInterrupt
    return recorder.trajectory


@pytest.mark.parametrize("plain", [True, False], ids=["plain_loop", "until"])
def test_ones_own_loop_goes_on_with_torch_s_random_numbers(tmp_path, plain):
    def made(path, **options):
        net, (X, y) = mlp(), data()
        torch.manual_seed(4)
        return epk.Recorder(net, torch.optim.Adam(net.parameters()), X, y, path=path, **options)

    whole = loop(made(None), STEPS, plain)
    with pytest.raises(KeyboardInterrupt):
        loop(made(tmp_path / "run", resume=True), 5, plain)
    resumed = made(tmp_path / "run", resume=True)
    assert resumed.num_steps == (5 if plain else 4)  # the loop had not come back for the next step
    assert loop(resumed, STEPS, plain).digest == whole.digest


def test_buffers_and_frozen_weights_come_back(tmp_path):
    def go(seed, steps, path):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        net[0].requires_grad_(False)
        X, y = data()
        return net, epk.train(net, X, y, optimizer=sgd(net), steps=steps, path=path, resume=path is not None)

    _, whole = go(1, 5, None)
    go(1, 3, tmp_path / "run")
    net, resumed = go(2, 5, tmp_path / "run")  # another start, which does not matter
    assert resumed.digest == whole.digest
    torch.testing.assert_close(epk.network_outputs(whole, data()[0]), net(data()[0]).detach(), rtol=0, atol=1e-15)


# --- Another run ----------------------------------------------------------------------------------------------------


def resumed(path, net=None, optimizer=sgd, X=None, y=None, **options):
    net = mlp() if net is None else net
    default_X, default_y = data()
    X, y = default_X if X is None else X, default_y if y is None else y
    return epk.Recorder(net, optimizer(net), X, y, path=path, resume=True, **options)


def wider():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


OTHERS = {
    "width": ({"net": wider()}, "network must have weights of the recorded shapes"),
    "layers": ({"net": nn.Sequential(mlp()[0], mlp()[1], nn.Sequential(mlp()[2]))}, "network must train the recorded"),
    "activation": ({"net": mlp(activation=nn.ReLU)}, "its outputs at the initial state differ"),
    "inputs": ({"X": data()[0] + 1e-15}, "data must be the recorded ones, bit for bit"),
    "labels": ({"y": data()[1].flip(0)}, "data must be the recorded ones, bit for bit"),
    "fewer": ({"X": data(9)[0], "y": data(9)[1]}, "data must be the recorded ones, with as many points"),
    "loss": ({"loss": epk.CrossEntropy("sum")}, "loss must be the recorded one"),
    "law": ({"optimizer": lambda net: torch.optim.Adam(net.parameters())}, "optimizer must be the recorded one"),
    "rate": ({"optimizer": lambda net: sgd(net, 0.2)}, "optimizer must have the recorded options"),
    "momentum": ({"optimizer": lambda net: sgd(net, momentum=0.1)}, "optimizer must have the recorded options"),
    "compression": ({"storage": epk.Storage(compression="deltas")}, "compression must be the recorded one"),
    "checks": ({"check_every": 3}, "check_every must be the recorded one"),
    "stateful": ({"stateful": {"g": torch.Generator()}}, r"stateful must have the names .*\[\]: got \['g'\]"),
}


@pytest.mark.parametrize(("change", "says"), OTHERS.values(), ids=OTHERS.keys())
def test_another_run_is_refused_and_nothing_changes(tmp_path, change, says):
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, path=tmp_path / "run")
    before = file_hashes(tmp_path / "run")
    with pytest.raises(ValueError, match=says):
        resumed(tmp_path / "run", **change)
    assert file_hashes(tmp_path / "run") == before
    assert resumed(tmp_path / "run").num_steps == 2  # the control, and the lock was given back


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_go_on_as_it_did_is_refused_before_it_starts(tmp_path):
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ValueError, match=r"learning-rate schedule: pass stateful=\{'scheduler': scheduler\}"):
        epk.Recorder(net, optimizer, X, y, path=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="resume=True needs path="):
        epk.Recorder(net, sgd(net), X, y, resume=True)
    with pytest.raises(TypeError, match="stateful must hold torch.Generators and objects with state_dict"):
        epk.Recorder(net, sgd(net), X, y, path=tmp_path / "run", stateful={"random": random.Random(0)})
    recorder = epk.Recorder(net, sgd(net), X, y, path=tmp_path / "run", stateful={"g": torch.Generator()})
    with recorder, pytest.raises(RuntimeError, match=r"the loop must be 'for step in recorder.until\(steps\):'"):
        recorder.batch(None)


class Strange:
    def state_dict(self):
        return {"function": print}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_state_that_only_a_pickle_could_hold_is_refused(tmp_path):
    net, (X, y) = mlp(), data()
    with pytest.raises(TypeError, match=r"must consist of numbers, texts, .*: got builtin_function_or_method"):
        epk.Recorder(net, sgd(net), X, y, path=tmp_path / "run", stateful={"strange": Strange()})
    assert not (tmp_path / "run").exists()


# --- When it cannot be written --------------------------------------------------------------------------------------


def step(recorder):
    recorder.optimizer.zero_grad()
    F.cross_entropy(recorder.net(recorder.X), recorder.y).backward()
    recorder.batch(None)
    recorder.optimizer.step()


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path):
    first = resumed(tmp_path / "run", storage=epk.Storage(steps=1))
    with first:
        step(first)
        for _ in range(2):
            with pytest.raises(BlockingIOError, match="one writer at a time: another process records into .*run"):
                resumed(tmp_path / "run")
        step(first)
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 2
    assert resumed(tmp_path / "run").num_steps == 2


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", range(6))
def test_a_full_disk_gives_one_message_and_leaves_a_readable_run(tmp_path, monkeypatch, fails, number):
    """The operation fails from the given one on."""
    path, left = tmp_path / "run", [number]
    recorder = resumed(path, storage=epk.Storage(steps=1))
    owner = Path if fails == "replace" else os
    real = getattr(owner, fails)

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    def loop():
        with recorder:
            for _ in range(8):
                step(recorder)

    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, full)
        with pytest.raises(OSError, match=r"must be written to .*run: No space left on device; its \d+ committed") as e:
            loop()
    assert e.value.errno == errno.ENOSPC
    committed = recorder.num_committed
    assert str(committed) in str(e.value)
    assert epk.load_trajectory(path, mlp()).num_steps == committed == check_run(path).num_steps
    assert not list(path.glob("*.part"))
    again = resumed(path, storage=epk.Storage(steps=1))
    with again:
        for _ in again.until(8):
            step(again)
    net, (X, y) = mlp(), data()
    assert again.trajectory.digest == epk.train(net, X, y, optimizer=sgd(net), steps=8).digest


def test_an_error_of_the_loop_s_own_keeps_the_steps_before_it(tmp_path):
    recorder = resumed(tmp_path / "run")

    def loop():
        with recorder:
            for _ in range(3):
                step(recorder)
            raise FileNotFoundError("mine")

    with pytest.raises(FileNotFoundError, match="mine"):
        loop()
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 3


def test_a_folder_that_may_not_be_written_is_said_to_be(tmp_path, monkeypatch):
    """The rights themselves where they hold; the superuser's hold nowhere, so they are taken from `os.open`."""
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, path=tmp_path / "run")
    before = file_hashes(tmp_path / "run")
    real = os.open

    def read_only(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    for path, kept in ((tmp_path / "run", "it is unchanged"), (tmp_path / "new", "0 committed steps")):
        with pytest.raises(PermissionError, match=f"must be written to .*: Permission denied; .*{kept}.*resume=True"):
            resumed(path)
    assert file_hashes(tmp_path / "run") == before
    assert epk.load_trajectory(tmp_path / "run", mlp()).num_steps == 2


def test_rights_that_are_taken_away_are_said_to_be(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="must be written to .*: Permission denied"):
        resumed(tmp_path / "run")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_an_interrupt_at_any_file_operation_leaves_a_readable_run(tmp_path, monkeypatch, moment):
    """Ctrl-C is an exception between any two instructions; here it comes with the operation of that number."""
    path, left = tmp_path / "run", [moment]
    recorder = resumed(path, storage=epk.Storage(steps=1))

    def interrupted(real):
        def wrapper(*arguments, **options):
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return wrapper

    def loop():
        with recorder:
            for _ in range(8):
                step(recorder)

    names = {
        os: ("fsync", "write", "lseek"),
        Path: ("replace", "unlink", "open"),
        writing: ("chunk_tensors", "to_json_line"),
    }
    with monkeypatch.context() as patch:
        for owner, functions in names.items():
            for name in functions:
                patch.setattr(owner, name, interrupted(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            loop()
    assert epk.load_trajectory(path, mlp()).num_steps == check_run(path).num_steps == recorder.num_steps
    again = resumed(path, storage=epk.Storage(steps=1))
    with again:
        for _ in again.until(8):
            step(again)
    net, (X, y) = mlp(), data()
    assert again.trajectory.digest == epk.train(net, X, y, optimizer=sgd(net), steps=8).digest


def test_steps_are_committed_by_a_clock_that_does_not_jump(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: -1e9)
    recorder = resumed(tmp_path / "run", storage=epk.Storage(seconds=10.0))
    committed = []
    with recorder:
        for seconds in (3, 3, 3, 3, 100, 1):
            now[0] += seconds
            step(recorder)
            committed.append(recorder.num_committed)
    assert committed == [0, 0, 0, 4, 5, 5]
    assert recorder.num_committed == 6


def test_a_start_that_a_crash_cut_short_is_started_anew(tmp_path):
    net, (X, y) = mlp(), data()
    whole = epk.train(net, X, y, optimizer=sgd(net), steps=3, path=tmp_path / "run")
    start = shutil.copytree(tmp_path / "run", tmp_path / "start")
    for name in ("run.json", "chunk-000001.safetensors", "finished.json", "resume-000001.safetensors"):
        (start / name).unlink()
    (start / "run.json.part").write_text(json.dumps("torn"))
    net = mlp()
    assert epk.train(net, X, y, optimizer=sgd(net), steps=3, path=start, resume=True).digest == whole.digest
    (start / "mine.txt").write_text("mine")
    (start / "run.json").unlink()
    with pytest.raises(FileExistsError, match="must be a new or empty folder"):
        resumed(start)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"chunk_bytes": 0}, ValueError, "chunk_bytes must be at least 1"),
        ({"seconds": 0}, ValueError, "seconds must be positive"),
        ({"steps": 2.5}, TypeError, "steps must be a whole number"),
        ({"compression": "zip"}, ValueError, r"compression must be one of \['none', 'deltas'\]: got 'zip'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_a_storage_that_is_none_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        epk.Storage(**options)


# --- Fewer replays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 5])
def test_one_step_of_each_so_many_is_replayed_and_the_run_is_the_same(every, monkeypatch):
    replayed = []
    real = recorder_module.check_against_exact_gradient

    def counted(setup, observed):
        replayed.append(observed.step.index)
        return real(setup, observed)

    monkeypatch.setattr(recorder_module, "check_against_exact_gradient", counted)
    assert train(None, "adam", steps=20, check_every=every)[0].digest == train(None, "adam", steps=20)[0].digest
    found = replayed[: 20 // every]
    assert [index // every for index in found] == list(range(20 // every))
    assert found[0] == 0


def test_a_step_that_is_not_replayed_must_still_be_the_law_s():
    net, (X, y) = mlp(), data()
    recorder = epk.Recorder(net, sgd(net), X, y, check_every=1000)
    with recorder:
        step(recorder)
        recorder.optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        recorder.batch(None)
        with torch.no_grad():
            net[0].bias += 1e-3
        with pytest.raises(epk.StepMismatchError, match="step 1: .*on the gradient that backward.. left"):
            recorder.optimizer.step()
    with pytest.raises(ValueError, match="check_every must be 1 where gradients are clipped: got 2"):
        epk.Recorder(net, sgd(net), X, y, clip=ClipNorm(1.0), check_every=2)
