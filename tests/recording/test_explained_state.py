"""Which network is explained: runs up to a state, early stopping, and networks that are trained on."""

import copy
import gc
import pickle
import re
import warnings
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from moving_loops import adamw, cnn, data, mlp, queries, run, sgd
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from loops import assert_exact, record
from stored_runs import step as make_step

STEPS, BEST = 10, 5
VOCABULARY, LENGTH, TEXTS = 9, 6, 12
STORAGES = {"memory": None, "disk": {"steps": 3}, "every_fourth": {"keep_every": 4}}


def recorded(steps=STEPS, make_net=mlp, make_optimizer=sgd, folder=None, storage=None, **options):
    if storage is not None:
        options |= {"folder": folder, "storage": epk.Storage(**storage)}
    return run(make_net, make_optimizer, lambda *_: None, steps, **options)


def keep_best(net, step, memory):
    if step == BEST - 1:
        memory.saved = copy.deepcopy(net.state_dict())


RUNS = [("memory", sgd, mlp), ("disk", adamw, cnn), ("every_fourth", sgd, cnn), ("every_fourth", adamw, mlp)]


@pytest.mark.parametrize(("where", "make_optimizer", "make_net"), RUNS)
def test_a_run_up_to_a_state_is_the_run_that_was_recorded_no_further(where, make_optimizer, make_net, tmp_path):
    storage, X = STORAGES[where], queries()
    recorder, _ = recorded(STEPS, make_net, make_optimizer, tmp_path / "run", storage)
    other, net = recorded(BEST, make_net, make_optimizer, tmp_path / "short", storage)
    whole, short = recorder.trajectory, other.trajectory
    expected = epk.attribute(short, X, head="logits")
    runs = [whole.until(BEST), whole.until(8).until(BEST), pickle.loads(pickle.dumps(whole.until(BEST)))]
    runs += [] if storage is None else [epk.load_trajectory(tmp_path / "run", make_net().double()).until(BEST)]
    points, rounding = epk.Points(X, False), 1e-9 if where == "every_fourth" else 1e-12  # of a state that is computed
    for first in runs:
        assert (first.num_steps, len(first.states), len(first.updates)) == (BEST, BEST + 1, BEST)
        assert first.digest == short.digest != whole.digest
        assert first.explained == f"weights after step {BEST} of {STEPS}"
        parts = assert_exact(first, X)
        assert first.explained in str(first)
        assert f"explains                    {first.explained}\n" in str(parts)
        assert (parts.samples - expected.samples).abs().max() <= rounding
        assert (parts.network - net.eval()(X)).abs().max() <= rounding
        assert epk.reconstruct(first, X).certified
        K, own = (epk.gram_block(each, points, points) for each in (short, first))
        assert (K - own).abs().max() <= rounding * K.abs().max()
        with pytest.raises(IndexError, match=rf"state .*must lie in 0\.\.{BEST}"):
            first.weights(BEST + 1)
    assert whole.until(STEPS) is whole
    assert whole.until(0).num_steps == 0
    if (where, make_net) == ("memory", mlp):
        assert torch.equal(epk.influence(whole.until(BEST), X).values, epk.influence(short, X).values)
        ends, expected = (epk.retrain(each, torch.ones(12)).states for each in (whole.until(BEST), short))
        assert torch.equal(ends, expected)
        assert torch.equal(*(epk.LogitGP(each).logit_posterior(X).mean for each in (whole.until(BEST), short)))


def test_an_average_up_to_a_state_is_the_average_of_the_run_up_to_it():
    whole = recorded()[0].trajectory
    a = averaging_coefficients(STEPS, decay=0.7)
    first, expected = averaged_trajectory(whole, a).until(BEST), averaged_trajectory(whole.until(BEST), a[:BEST])
    assert first.digest == expected.digest
    assert first.explained == f"the average of the weights up to step {BEST} of {STEPS}"
    parts = assert_exact(first, queries())
    assert torch.equal(parts.samples, epk.attribute(expected, queries(), head="logits").samples)


def test_numbers_of_steps_that_a_run_does_not_have_are_refused_and_each_state_has_a_digest():
    whole = recorded()[0].trajectory
    for step, error in ((STEPS + 1, "at most the run's 10 steps: got 11"), (-1, "step must be .*got -1")):
        with pytest.raises(ValueError, match=error):
            whole.until(step)
    with pytest.raises(TypeError, match="step must be"):
        whole.until(1.5)
    whole = replace(whole, digests=())  # they were not recorded
    assert len({whole.digest, *(whole.until(s).digest for s in range(STEPS))}) == STEPS + 1
    assert whole.until(3).digest == whole.until(3).digest


@pytest.mark.parametrize(("where", "make_net"), [("memory", mlp), ("disk", cnn), ("every_fourth", cnn)])
def test_the_best_weights_may_be_restored_inside_of_the_with_statement(where, make_net, tmp_path):
    """Early stopping: the recorder says which state it is, the run is closed properly, and `until` explains it."""
    options = {} if where == "memory" else {"folder": tmp_path / "run", "storage": epk.Storage(**STORAGES[where])}
    restore = lambda net, memory: net.load_state_dict(memory.saved)  # noqa: E731
    with pytest.warns(UserWarning, match=r"those after step 5 of 10: recorder.trajectory.until\(5\) explains them"):
        recorder, net = run(make_net, sgd, keep_best, STEPS, after=restore, **options)
    trajectory = recorder.trajectory
    assert trajectory.num_steps == STEPS
    assert not trajectory.moves
    assert where == "memory" or (tmp_path / "run" / "finished.json").exists()
    assert_exact(trajectory.until(BEST), queries(), net)
    with pytest.warns(UserWarning, match=r"weights after step 10 of 10.* after step 5, which trajectory.until\(5\)"):
        epk.attribute(trajectory, queries())


def test_weights_that_are_restored_without_their_statistics_are_named():
    def after(net, memory):
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(memory.saved[name])

    with pytest.raises(epk.StepMismatchError, match="those at the end are of step 5, the statistics are not"):
        run(cnn, sgd, keep_best, STEPS, after=after)


def trained_on(net, _):
    X, y = data()
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.cross_entropy(net(X), y).backward()
    optimizer.step()


CHANGES = {
    "best weights": (lambda net, best: net.load_state_dict(best), r"after step 5, which trajectory.until\(5\)"),
    "trained on": (trained_on, r"Record further, or .*trajectory.until\(step\)"),
    "edited": (lambda net, _: net[-1].weight.data.mul_(1.1), "Record further"),
}
CALLS = {
    "attribute": epk.attribute,
    "reconstruct": epk.reconstruct,
    "influence": epk.influence,
    "kernel": lambda run, X: epk.gram_block(run, epk.Points(X, False), epk.Points(X, False)),
    "process": lambda run, X: epk.LogitGP(run),
}


@pytest.mark.parametrize(
    ("call", "change"), [*product(CALLS, ["best weights"]), ("attribute", "trained on"), ("influence", "edited")]
)
def test_a_network_that_is_another_one_after_the_recording_is_said_once(change, call):
    """With by how much its outputs differ."""
    make, (action, says) = mlp if call == "influence" else cnn, CHANGES[change]
    best = recorded(BEST, make)[1].state_dict()
    recorder, net = recorded(STEPS, make)
    CALLS[call](recorder.trajectory, queries())  # the control: no word while it is the one that was recorded
    X, before = data()[0], copy.deepcopy(net)
    action(net, best)
    difference = float((net.eval()(X) - before.eval()(X)).detach().abs().max())
    says = rf"weights after step 10 of 10.* differ by up to {difference:.2g}\. .*{says}".replace("+", r"\+")
    with pytest.warns(UserWarning, match=says) as said:
        CALLS[call](recorder.trajectory, queries())
    assert len(said) == 1


def test_what_is_asked_for_by_name_is_explained_without_a_word():
    """A run up to a state, and averages, while the network is the recorded one; a network of another dtype; none."""
    recorder, net = recorded()
    trajectory = recorder.trajectory
    average = averaged_trajectory(trajectory, averaging_coefficients(STEPS, decay=0.7))
    for own in (trajectory.until(BEST), average, average.until(BEST)):
        epk.attribute(own, queries())
    copied = pickle.loads(pickle.dumps(trajectory))
    with torch.no_grad():
        nn.utils.vector_to_parameters(average.states[STEPS], net.parameters())
    epk.attribute(average, queries())  # the averaged weights were loaded
    net[0].weight.data += 1
    epk.attribute(copied, queries())  # no network belongs to it
    with pytest.warns(UserWarning, match="your network is not the one"):
        epk.attribute(trajectory, queries())  # the control
    recorder, net = recorded()
    net.float()
    epk.attribute(recorder.trajectory, queries())
    net[0] = nn.Linear(2, 2)
    del net[2]
    epk.attribute(recorder.trajectory, queries())  # a network of other parameters cannot be compared
    trajectory = recorder.trajectory
    del recorder, net
    gc.collect()
    assert trajectory.live.network() is None
    epk.attribute(trajectory, queries())


def test_a_trajectory_taken_earlier_says_which_step_the_network_has_reached():
    net, taken = mlp().double(), []
    recorder = epk.Recorder(net, sgd(net), *data())
    with recorder:
        for _ in range(4):
            make_step(recorder)
            taken.append(recorder.trajectory)
            epk.attribute(taken[-1], queries())
    with pytest.warns(UserWarning, match=r"after step 2 of 2.* after step 4, which recorder.trajectory.until\(4\)"):
        epk.attribute(taken[1], queries())


@pytest.mark.parametrize("name", ["0.weight", "scale"])
def test_frozen_weights_and_buffers_that_are_edited_afterwards_are_said(name):
    """They are in no state of the run."""
    X, y = data()
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    net[0].weight.requires_grad_(False)
    net.register_buffer("scale", torch.ones((), dtype=torch.float64))
    net.register_forward_pre_hook(lambda net, args: (net.scale * args[0],))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    recorder = record(net, optimizer, X, y, [None])
    epk.reconstruct(recorder.trajectory, X[:2])  # the control: no word
    with torch.no_grad():
        dict(net.state_dict())[name].mul_(1.1)
    with pytest.warns(UserWarning, match=f"your network is not the one .*Frozen weights or buffers .*: {name}"):
        epk.reconstruct(recorder.trajectory, X[:2])


# Networks that predict otherwise without gradients than with them


class Padded(nn.Module):
    """Texts with padding at their ends, whose words a part of the network looks at together; then their mean."""

    def __init__(self, part="encoder", nested=True, mean="all"):
        super().__init__()
        self.embed, self.out, self.part, self.mean = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3), part, mean
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.look = {"encoder": encoder, "layer": layer, "attention": attention, "asks": nn.Identity()}[part]

    def forward(self, x):
        h, pads = self.embed(x), x == 0
        if self.part == "asks":
            h = h if torch.is_grad_enabled() else 1.1 * h
        elif self.part == "attention":
            h = self.look(h, h, h, key_padding_mask=pads, need_weights=False)[0]
        else:
            h = self.look(h, src_key_padding_mask=pads)
        return self.out(h.mean(1) if self.mean == "all" else (h * ~pads[..., None]).sum(1) / (~pads).sum(1)[:, None])


def padded_run(dtype, **options):
    torch.manual_seed(2)
    X, y, net = torch.randint(1, VOCABULARY, (TEXTS, LENGTH)), torch.arange(TEXTS) % 3, Padded(**options).to(dtype)
    for row in range(0, TEXTS, 2):
        X[row, LENGTH - row // 3 - 1 :] = 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trajectory = record(net, optimizer, X, y, torch.arange(TEXTS).repeat(2).split(8)).trajectory
    return net.eval(), trajectory


NESTED = r"torch's nested-tensor path in 'look'.* enable_nested_tensor=False"
ALIKE = {"nested": False}, {"mean": "of words"}, {"part": "layer"}, {"part": "attention"}
TYPES = torch.float32, torch.float64
OTHERS = (
    *product([({}, NESTED), ({"part": "asks"}, r"asks torch.is_grad_enabled\(\)")], TYPES),
    *(((each, None), TYPES[number % 2]) for number, each in enumerate(ALIKE)),
)


@pytest.mark.filterwarnings("ignore:step 0.*derivative is not the derivative")  # of the probe
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # where this test predicts
@pytest.mark.parametrize(("other", "dtype"), OTHERS)
def test_another_prediction_without_gradients_is_said_where_there_is_one(other, dtype):
    options, message = other
    net, run = padded_run(dtype, **options)
    calls = epk.attribute, epk.reconstruct, epk.influence, partial(epk.influence, function=lambda z: z.square().mean())
    for X in (run.inputs[:4], run.inputs[1::2]):  # the second ones have no padding
        with torch.no_grad():
            plain = net(X)
        differs = bool((plain - net(X)).abs().max() > 1e-3)
        assert differs == (message is not None and (message is not NESTED or bool((X == 0).any())))
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call(run, X)
            texts = [str(each.message) for each in caught]
            assert not any("prototype" in text for text in texts)  # of torch, about its nested tensors
            said = [text for text in texts if "other outputs in eval() without gradients" in text]
            assert bool(said) == differs
            assert not said or re.search(message, said[0])
