"""Resuming a run: it ends as if it had never stopped."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import epk_gp as epk
from epk_gp.storage.verify import check_run
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


def stop_before(at, optimizer):
    """Raise before the optimizer's step of this number: in the middle of an iteration."""
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


@pytest.mark.mostly_slow
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


def test_the_state_of_every_optimizer_is_resumed(tmp_path):
    def train_with_two(path, steps, **options):
        torch.manual_seed(1)
        net, (X, y) = mlp(), data()
        parameters = list(net.parameters())
        optimizers = [sgd(net[0], momentum=0.9), torch.optim.Adam(parameters[2:], lr=0.01)]
        with epk.Recorder(net, optimizers, X, y, folder=path, **options) as recorder:
            for step in recorder.until(steps):
                batch = (torch.arange(4) + step) % len(X)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                F.cross_entropy(net(X[batch]), y[batch]).backward()
                recorder.batch(batch)
                for optimizer in optimizers:
                    optimizer.step()
        return recorder.trajectory

    whole = train_with_two(None, 6)
    train_with_two(tmp_path / "run", 3)
    assert train_with_two(tmp_path / "run", 6, resume=True).digest == whole.digest


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch's own, of its SequentialLR
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("stop", [1, 4, STEPS])
def test_schedules_continue(tmp_path, scheduler, stop):
    whole = train(None, "momentum", scheduler)
    with pytest.raises(StopHereError):
        train(tmp_path / "run", "momentum", scheduler, stop=stop)
    same(train(tmp_path / "run", "momentum", scheduler, resume=True), whole)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("own", [True, False], ids=["own_generator", "torch_s_generator"])
def test_every_stop_on_the_way_leads_to_the_same_end(tmp_path, own):
    def go(path, **options):
        torch.manual_seed(8)
        given = torch.Generator().manual_seed(5) if own else None
        net, (X, y) = mlp(), data()
        torch.manual_seed(8)
        made = torch.optim.Adam(net.parameters(), lr=0.01)
        if (stop := options.pop("stop", None)) is not None:
            stop_before(stop, made)
        options |= {"batch_size": 3, "generator": given, "steps": STEPS}
        return epk.train(net, X, y, optimizer=made, folder=path, **options)

    whole = go(None)
    storage = epk.Storage(steps=2)
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
        for step in range(recorder.num_steps, steps) if plain else recorder.until(steps):
            batch = torch.randint(len(recorder.X), (3,))
            recorder.optimizer.zero_grad()
            F.cross_entropy(recorder.net(recorder.X[batch]), recorder.y[batch]).backward()
            recorder.batch(batch)
            recorder.optimizer.step()
            if step == 4 and steps == 5:
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
    resumed = made(tmp_path / "run", resume=True)
    assert resumed.num_steps == (5 if plain else 4)  # the loop had not come back for the next step
    assert loop(resumed, STEPS, plain).digest == whole.digest


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
    net, resumed = go(2, 5, tmp_path / "run")  # another start, which does not matter
    assert resumed.digest == whole.digest
    torch.testing.assert_close(epk.network_outputs(whole, data()[0]), net(data()[0]).detach(), rtol=0, atol=1e-15)
