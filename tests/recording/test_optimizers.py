"""Recording with every optimizer of torch, with parameters that freeze and thaw, and with groups that come later."""

import pytest
import torch
from optimizer_cases import batches, optimizer_for, problem
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.recording.setup import trained_names
from loops import assert_exact, record

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def recorded_by(net, optimizer, X, y, epochs=2, trained=(), set_to_none=True, **actions):
    """Record a loop; `actions` are called with network and optimizer before the step of their number."""

    def before(step):
        actions.get(f"at_{step}", lambda *_: None)(net, optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)

    options = {"trained": trained, "clear": False}
    return record(net, optimizer, X, y, batches(epochs), before=before, **options).trajectory


def assert_explained(run, X):
    assert_exact(run, X[:2])
    result = epk.reconstruct(run, X[:2], head="logits")
    assert result.max_error <= 1e-10
    assert result.certified


freeze, thaw = ((lambda net, _, value=value: net[0].requires_grad_(value)) for value in (False, True))
# optimizer, whether gradients are None or zeros, when the first layer freezes and thaws, and the steps that move it
FROZEN = [
    ("SGD", True, 2, 6, 9), ("SGD", False, 2, 6, 9), ("AdamW", True, 2, 6, 9), ("AdamW", False, 2, 6, 9),
    ("Rprop", False, 2, 6, 9), ("Adafactor", True, 2, 6, 9), ("SGD", True, 0, 3, 6), ("Adam", True, 0, 3, 6),
    ("ASGD", True, 0, 3, 6),
]  # fmt: skip


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "set_to_none", "first", "last", "steps"), FROZEN)
def test_parameters_may_freeze_and_thaw(name, set_to_none, first, last, steps):
    """Without a gradient torch leaves a parameter as it is; with one of zeros momentum and decay go on."""
    options = {"momentum": 0.9, "weight_decay": 0.1} if (name, first) == ("SGD", 2) else {}
    net, X, y = problem(name)
    actions = {"epochs": steps // 3, f"at_{first}": freeze, f"at_{last}": thaw, "set_to_none": set_to_none}
    run = recorded_by(net, optimizer_for(name, options, net), X, y, **actions)
    goes_on = not set_to_none and name in ("SGD", "AdamW")
    assert moves(run) == [goes_on or not first <= step < last for step in range(steps)]
    assert_explained(run, X)


def moves(run, name="0.weight"):
    return [not torch.equal(run.weights(s)[name], run.weights(s + 1)[name]) for s in range(run.num_steps)]


def test_a_learning_rate_of_zero_is_a_step_of_nothing():
    net, X, y = problem("SGD")
    optimizer = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[2].parameters()}], lr=0.01)
    run = recorded_by(net, optimizer, X, y, at_2=lambda *_: optimizer.param_groups[0].update(lr=0.0))
    assert moves(run) == [True, True, False, False, False, False]
    assert_explained(run, X)


def test_a_group_that_comes_later_is_explained_where_its_parameters_were_stated_and_named_elsewhere():
    net, X, y = problem("SGD")

    def grow(net, optimizer):
        optimizer.add_param_group({"params": net[0].requires_grad_(True).parameters(), "lr": 0.05})

    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9)
    run = recorded_by(net, optimizer, X, y, at_2=grow, trained=["0.weight", "0.bias"])
    assert moves(run) == [False, False, True, True, True, True]
    assert_explained(run, X)
    net[0].requires_grad_(False)
    says = r"a parameter that is in no optimizer when recording begins must stay untrained: '0\.weight' .*trained=\['0"
    with pytest.raises(epk.StepMismatchError, match=says):
        recorded_by(net, torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9), X, y, at_2=grow)
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
    net[0].requires_grad_(False)
    assert trained_names(net, optimizer, ["0.bias"]) == ("0.bias", "2.weight", "2.bias")
    both = [optimizer, torch.optim.Adam([net[0].bias.requires_grad_(True)])]
    assert trained_names(net, both) == ("0.bias", "2.weight", "2.bias")
    with pytest.raises(ValueError, match="trained must hold names of the network's parameters: got 'no'"):
        trained_names(net, optimizer, ["no"])


TURNS = [("alternating", "Adam"), ("every_third", "Adam"), ("alternating", "Adafactor")]


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("turns", "name"), TURNS)
def test_optimizers_may_take_turns(name, turns):
    """What a step was made of is read before the loop clears all gradients and schedules move."""
    net, X, y = problem("SGD")
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    optimizers = [first, optimizer_for(name, {}, net[2])]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in optimizers]
    with epk.Recorder(net, optimizers, X, y) as recorder:
        for s, batch in enumerate(batches(2)):
            net.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            makers = (s % 2 == 0, s % 2 == 1) if turns == "alternating" else (True, s % 3 == 0)
            for makes_step, optimizer, schedule in zip(makers, optimizers, schedules, strict=True):
                if makes_step:
                    optimizer.step()
                    schedule.step()
            net.zero_grad()
    assert recorder.num_steps == 6
    assert_explained(recorder.trajectory, X)


@pytest.mark.parametrize("on_disk", [False, True])
def test_muon_beside_another_optimizer_is_explained_up_to_its_own_term(tmp_path, on_disk):
    """Steps whose gradient is recomputed, and those between them."""
    net, X, y = problem("SGD")
    matrices, rest = ([p for p in net.parameters() if p.ndim == k] for k in (2, 1))
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.NAdam(rest, lr=0.01)]
    path = tmp_path / "run" if on_disk else None
    run = record(net, optimizers, X, y, batches(2), unexplained=0.5, folder=path, check_every=3).trajectory
    assert run.update_rule == "Muon + NAdam"
    assert sorted(run.updates[3].left | run.updates[3].right) == [0, 2]
    parts = assert_exact(run, X[:2], tolerance=1e-12)
    size = parts.unexplained.abs().max() / (parts.network - parts.initial).abs().max()
    assert 1e-5 < size < 0.1
