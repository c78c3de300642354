"""Resuming a run: it ends as if it had never stopped, and another run is refused."""

import copy
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import epk_gp as epk
from epk_gp.storage.run import check_run, resume_run
from epk_gp.storage.schema import read_header
from epk_gp.storage.training_state import TrainingState, validate_resumable
from loops import data, file_hashes, mlp, sgd
from stored_runs import add, begin, finish, norm_net, resumed, step

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


def stop_before(at, optimizer):
    """Raise before the optimizer's step of this number: in the middle of an iteration."""
    left = [at]

    def hook(*_):
        left[0] -= 1
        if not left[0]:
            raise StopHereError

    return optimizer.register_step_pre_hook(hook)


def train(path, optimizer="sgd", scheduler="none", dtype=torch.float64, steps=STEPS, stop=None, **options):
    net, (X, y) = mlp(dtype), data(dtype=dtype)
    made = OPTIMIZERS[optimizer](net.parameters())
    schedule = SCHEDULERS[scheduler](made)
    if stop is not None:
        stop_before(stop, made)
    options = {"batch_size": 4, "generator": torch.Generator().manual_seed(5)} | options
    trajectory = epk.train(net, X, y, optimizer=made, scheduler=schedule, steps=steps, folder=path, **options)
    return trajectory, net, made, options["generator"]


def same(one, other):
    """Bit for bit: weights, numbers, network, optimizer and generator."""
    (a, net_a, optimizer_a, generator_a), (b, net_b, optimizer_b, generator_b) = one, other
    assert a.digest == b.digest
    assert all(torch.equal(a.states[s], b.states[s]) for s in range(STEPS + 1))
    assert all(torch.equal(p, q) for p, q in zip(net_a.parameters(), net_b.parameters(), strict=True))
    assert torch.equal(generator_a.get_state(), generator_b.get_state())
    assert str(optimizer_a.state_dict()) == str(optimizer_b.state_dict())


# Each optimizer and each schedule, stopped at the start, on the way and before the last step.
CASES = [
    ("sgd", "none", 6, torch.float64), ("adam", "none", 6, torch.float32), ("adamw", "steps", 4, torch.float64),
    ("rmsprop", "exponential", 6, torch.float32), ("adagrad", "cosine", 4, torch.float64),
    *(("momentum", schedule, 1 if k % 2 else STEPS, torch.float64) for k, schedule in enumerate(SCHEDULERS)),
    ("momentum", "one_cycle", 4, torch.float32),
]  # fmt: skip


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch's own, of its SequentialLR
@pytest.mark.parametrize(("optimizer", "schedule", "stop", "dtype"), CASES)
def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path, optimizer, schedule, stop, dtype):
    whole = train(None, optimizer, schedule, dtype)
    with pytest.raises(StopHereError):
        train(tmp_path / "run", optimizer, schedule, dtype, stop=stop, resume=stop == 6)
    assert epk.load_trajectory(tmp_path / "run", mlp(dtype)).num_steps == stop - 1
    torch.manual_seed(99)
    same(train(tmp_path / "run", optimizer, schedule, dtype, resume=True), whole)
    assert epk.load_trajectory(tmp_path / "run", mlp(dtype)).digest == whole[0].digest


@pytest.mark.parametrize("own", [True, False], ids=["own_generator", "torch_s_generator"])
def test_every_stop_on_the_way_leads_to_the_same_end(tmp_path, own):
    def go(path, **options):
        generator = torch.Generator().manual_seed(5) if own else None  # mlp seeds torch's
        return train(path, "adam", batch_size=3, generator=generator, **options)[0]

    whole, storage = go(None), epk.Storage(steps=2)
    for stop in (2, 1, 3, 2):
        with pytest.raises(StopHereError):
            go(tmp_path / "run", stop=stop, resume=True, storage=storage)
    assert go(tmp_path / "run", resume=True, storage=storage).digest == whole.digest


@pytest.mark.slow
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
        for number in range(recorder.num_steps, steps) if plain else recorder.until(steps):
            step(recorder, torch.randint(len(recorder.X), (3,)))
            if number == 4 and steps == 5:
                raise KeyboardInterrupt
    return recorder.trajectory


@pytest.mark.mostly_slow
@pytest.mark.parametrize("plain", [True, False], ids=["plain_loop", "until"])
def test_ones_own_loop_continues_with_torch_s_random_numbers(tmp_path, plain):
    def made(path, **options):
        net, (X, y) = mlp(), data()
        torch.manual_seed(4)
        return epk.Recorder(net, torch.optim.Adam(net.parameters()), X, y, folder=path, **options)

    whole = loop(made(None), STEPS, plain)
    with pytest.raises(KeyboardInterrupt):
        loop(made(tmp_path / "run", resume=True), 5, plain)
    again = made(tmp_path / "run", resume=True)
    assert again.num_steps == (5 if plain else 4)  # the loop had not come back for the next step
    assert loop(again, STEPS, plain).digest == whole.digest


@pytest.mark.slow
def test_buffers_and_frozen_weights_come_back(tmp_path):
    def go(seed, steps, path):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        net[0].requires_grad_(False)
        X, y = data()
        return net, epk.train(net, X, y, optimizer=sgd(net), steps=steps, folder=path, resume=path is not None)

    _, whole = go(1, 5, None)
    go(1, 3, tmp_path / "run")
    net, again = go(2, 5, tmp_path / "run")  # another start, which does not matter
    assert again.digest == whole.digest
    torch.testing.assert_close(epk.network_outputs(whole, data()[0]), net(data()[0]).detach(), rtol=0, atol=1e-15)


# --- Another network, data set, loss or optimizer is an error, and no file changes ----------------------------------


def in_groups(net):
    return torch.optim.SGD([{"params": part.parameters()} for part in (net[0], net[2])], lr=0.1)


def wider():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()


OTHERS = {
    "^shapes must be the recorded one to resume .*: number 0: number 0: it has 6, got 7.$": {"net": wider()},
    "^names must be the recorded": {"net": nn.Sequential(mlp()[0], mlp()[1], nn.Sequential(mlp()[2]))},
    "its outputs at the initial state differ": {"net": mlp(activation=nn.ReLU)},
    "^data_digest must be the recorded": {"X": data()[0] + 1e-15},
    "^data_digest must be the recorded one": {"y": data()[1].flip(0)},
    "^num_points must be the recorded": {"X": data(9)[0], "y": data(9)[1]},
    "^loss must be .* it has {'reduction': 'mean'}, got {'reduction': 'sum'}.$": {"loss": epk.CrossEntropy("sum")},
    "^loss must be the recorded": {"loss": epk.MeanSquaredError(), "y": F.one_hot(data()[1], 3).double()},
    "^law must be the recorded": {"optimizer": lambda net: torch.optim.Adam(net.parameters())},
    "^optimizer must be .*: number 0: it has {'lr': 0.1}, got {'lr': 0.2}.$": {"optimizer": lambda net: sgd(net, 0.2)},
    "^optimizer must be the recorded": {"optimizer": lambda net: sgd(net, momentum=0.1)},
    "^optimizer must be the recorded .*: it has 1, got 2.$": {"optimizer": in_groups},
    "^check_every must be the recorded": {"check_every": 3},
    r"stateful must have the names \[\]: got \['g'\]": {"stateful": {"g": torch.Generator()}},
}


@pytest.mark.parametrize(("message", "change"), OTHERS.items(), ids=map(str, range(len(OTHERS))))
def test_another_run_is_refused_and_nothing_changes(run, message, change):
    before = file_hashes(run)
    with pytest.raises(ValueError, match=message):
        resumed(run, **change)
    assert file_hashes(run) == before
    assert resumed(run).num_steps == 6  # the negative control, and the lock was given back


@pytest.mark.usefixtures("unchecked")
def test_what_could_not_be_resumed_to_the_same_end_is_refused_before_it_starts(tmp_path):
    net, (X, y) = mlp(), data()
    scheduled = sgd(net)
    lr_scheduler.ExponentialLR(scheduled, 0.9)
    path, strange = {"folder": tmp_path / "run"}, SimpleNamespace(state_dict=lambda: {1: print}, load_state_dict=print)
    wrong = {
        r"learning-rate schedule: pass stateful=\{'scheduler': scheduler\}": {"resume": True, **path},
        "resume=True needs folder=": {"resume": True},
        "stateful must be a dictionary of torch.Generators": {"stateful": {"random": random.Random(0)}, **path},
        "must consist of numbers, texts, .*: got builtin_function_or_m": {"stateful": {"strange": strange}, **path},
    }
    for message, options in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            epk.Recorder(net, scheduled if "schedule" in message else sgd(net), X, y, **options)
    assert not (tmp_path / "run").exists()
    recorder = epk.Recorder(net, sgd(net), X, y, stateful={"g": torch.Generator()}, **path)
    with recorder, pytest.raises(RuntimeError, match=r"the loop must be 'for step in recorder.until\(steps\):'"):
        recorder.batch(None)
    optimizers = two_optimizers(norm_net())
    validate_resumable(optimizers, {}, tmp_path)
    lr_scheduler.ExponentialLR(optimizers[1], 0.9)
    with pytest.raises(ValueError, match="must know the learning-rate schedule"):
        validate_resumable(optimizers, {}, tmp_path)


def test_options_that_are_numbers_of_numpy_are_stored_and_resumed(tmp_path):
    def go(steps, **options):
        net, (X, y) = mlp(), data()
        return epk.train(net, X, y, optimizer=sgd(net, np.float32(0.1)), steps=steps, **options).digest

    go(2, folder=tmp_path / "run")
    assert go(4, folder=tmp_path / "run", resume=True) == go(4)


# --- Buffers, statistics, several optimizers ------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls in buffers that its outputs do not depend on; one is made anew by each call."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("anew", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("large", torch.ones(1000))

    def forward(self, x):
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            self.calls += 1
            self.anew = self.anew + 1
        return self.inner(x)


def test_counters_come_back_as_they_were_at_the_last_commit(tmp_path):
    first = resumed(tmp_path / "run", net=Counting())
    with first:
        for _ in range(3):
            step(first)
    calls, anew = int(first.net.calls), int(first.net.anew)
    assert calls >= 3
    again = resumed(tmp_path / "run", net=Counting())
    assert (int(again.net.calls), int(again.net.anew)) == (calls, anew)


def state_of(net, optimizer=None):
    return TrainingState(optimizer or [sgd(net)], {}, torch.zeros(75).double(), net)


def test_buffers_that_do_not_change_are_not_stored_with_each_commit():
    net = Counting()
    training = state_of(net)
    before = sum(value.nbytes for value in training.state_dict().values())
    net(data()[0])
    assert 0 < sum(value.nbytes for value in training.state_dict().values()) - before < 1000
    assert training.load_state_dict(training.state_dict(), "").keys() == {"calls", "anew"}
    with torch.inference_mode():
        net.large = torch.ones(1000)  # torch does not count what happens to it
    assert training.load_state_dict(training.state_dict(), "").keys() == {"calls", "anew", "large"}


def resume(path, net, optimizer=None):
    """Resume a run that `begin` made, as a recorder would."""
    header = read_header(path) | {"modules": [name for name, _ in net.named_modules()]}
    opened, writer = resume_run(path, header, net, epk.CrossEntropy(), state_of(net, optimizer))
    writer.close()
    return opened


def test_moving_statistics_come_back_and_a_buffer_of_another_kind_is_refused(tmp_path):
    run = begin(tmp_path / "run")
    for _ in range(3):
        run.net[1].num_batches_tracked += 1
        add(run, (), generator=torch.Generator().manual_seed(0))
    finish(run)
    run.net[1].num_batches_tracked += 5  # after the last commit
    net = norm_net()
    opened = resume(tmp_path / "run", net)
    assert opened.num_steps == int(net[1].num_batches_tracked) == 3
    assert torch.equal(opened.model.flatten_statistics(dict(net.named_buffers())), run.statistics[3])
    assert torch.equal(opened.model.flatten(dict(net.named_parameters())), run.states[3])
    net, before = norm_net(), file_hashes(tmp_path / "run")
    net[1].num_batches_tracked = torch.zeros((), dtype=torch.int32)
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"recorded buffers to resume .*: '1.num_batches_tracked' is another"):
        resume(tmp_path / "run", net)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert file_hashes(tmp_path / "run") == before


def two_optimizers(net):
    return [sgd(net[0], momentum=0.9), torch.optim.Adam([*net[1].parameters(), *net[4].parameters()], lr=0.01)]


def moved(net, optimizers):
    """Let every optimizer do a step."""
    net.zero_grad()
    net(data()[0]).square().sum().backward()
    for each in optimizers:
        each.step()


def test_several_optimizers_come_back(tmp_path):
    net, again = norm_net(), norm_net()
    optimizers, made = two_optimizers(net), two_optimizers(again)
    run = begin(tmp_path / "run", net=net, optimizer=optimizers)
    moved(net, optimizers)
    add(run, ())
    finish(run)
    assert resume(tmp_path / "run", again, made).num_steps == 1
    assert str([each.state_dict() for each in made]) == str([each.state_dict() for each in optimizers])
    assert made[1].state_dict()["state"]
    header = read_header(tmp_path / "run")
    assert header["num_optimizers"] == 2
    assert [group["parameters"] for group in header["optimizer"]] == [2, 4]
    groups = [{"params": [*own.param_groups[0]["params"]]} for own in made]
    for others in ([torch.optim.SGD(groups, lr=0.1)], made[::-1]):
        with pytest.raises(ValueError, match="^optimizer must be the recorded one to resume"):
            resume(tmp_path / "run", again, others)
    one, two = state_of(again), state_of(again, made)
    for training, other, count in ((one, two, 2), (two, one, 1)):
        with pytest.raises(ValueError, match=f"the state to resume from: it has that of {count} optim"):
            training.load_state_dict(other.state_dict(), "file")


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_an_optimizer_comes_back_with_the_dtypes_that_its_state_had(kind):
    """torch loads NAdam's product of momenta, a float32 number, in float64, and other steps follow."""
    nets = [norm_net().eval(), norm_net().eval()]
    first, second = (kind(net.parameters(), lr=0.01) for net in nets)
    for _ in range(3):
        moved(nets[0], [first])
    state_of(nets[1], [second]).load_state_dict(state_of(nets[0], [first]).state_dict(), "file")
    nets[1].load_state_dict(nets[0].state_dict())
    for _ in range(3):
        moved(nets[0], [first])
        moved(nets[1], [second])
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("buffers", [[], {"list": [3]}, 7, {"dict": [["1.running_mean", 3]]}], ids=str)
def test_buffers_that_are_none_are_refused(buffers):
    training = state_of(norm_net())
    tensors = training.state_dict()
    state = json.loads(bytes(tensors["state"].numpy()))
    state["dict"][-1][1] = buffers
    tensors["state"] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="file must hold the state to resume from"):
        training.load_state_dict(tensors, "file")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_the_accelerator_come_back():
    net = norm_net().cuda()
    training = state_of(net)
    tensors = training.state_dict()
    drawn = torch.rand(3, device="cuda")
    torch.rand(9, device="cuda")
    training.load_state_dict(tensors, "file")
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
