"""Which network is explained: runs up to a state, early stopping, networks that are trained on, or moved."""

import copy
import gc
import pickle
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from moving_loops import MOVES, LookaheadState, Memory, adamw, batch_of, cnn, data, lookahead, mlp, queries, run, sgd
from moving_loops import shares_by_hand as shares_of_moves
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
import reference
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.core.step import Move, StateSamples, share_of_way
from epk_gp.kernel_machine.axes import by_sample, by_step
from loops import assert_exact, assert_has_no_influence, record
from stored_runs import changed, chunk_files, entry, refused
from stored_runs import step as make_step

STEPS, BEST = 10, 5
VOCABULARY, LENGTH, TEXTS = 9, 6, 12
STORAGES = {"memory": None, "disk": {"steps": 3}, "every_fourth": {"keep_every": 4}}


def recorded(steps=STEPS, make_net=mlp, make_optimizer=sgd, folder=None, storage=None, **options):
    move = options.pop("move", lambda *_: None)
    if storage is not None:
        options |= {"folder": folder, "storage": epk.Storage(**storage)}
    return run(make_net, make_optimizer, move, steps, **options)


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


# Moves of the weights without a gradient: Lookahead, checkpoints that are restored while training goes on

# What the moves of `moving_loops` are: by the step, the anchor and the share of the way.
PATHS = {
    "lookahead": {2: (0, 0.6), 5: (3, 0.6), 8: (6, 0.6)},
    "restored": {6: (3, 1.0)},
    "nested": {2: (0, 0.6), 5: (3, 0.6), 7: (2, 1.0), 9: (6, 0.6)},
    "undone": {3: (3, 1.0), 6: (6, 0.5)},
}


def recorded_moves(move, make_net=mlp, make_optimizer=sgd, folder=None, storage=None, **options):
    recorder, net = recorded(11, make_net, make_optimizer, folder, storage, move=MOVES[move], **options)
    return recorder.trajectory, net


@pytest.mark.parametrize(("move", "make_net"), [("lookahead", mlp), *((move, cnn) for move in MOVES)])
def test_shares_are_those_of_per_row_gradients_pushed_through_the_optimizer_by_hand(move, make_net):
    """airbench94's Lookahead with its moving statistics among them."""
    trajectory, net = recorded_moves(move, make_net)
    assert {s: (own.anchor, pytest.approx(own.share)) for s, own in trajectory.moves.items()} == PATHS[move]
    parts = assert_exact(trajectory, queries(), net)
    samples, decay, statistics = shares_of_moves(make_net, MOVES[move], PATHS[move])
    assert (parts.samples - samples).abs().max() <= 1e-8
    assert (parts.decay - decay).abs().max() <= 1e-8
    assert (parts.statistics - statistics).abs().max() <= 1e-8
    assert (parts.network - net.eval()(queries())).abs().max() <= 1e-13
    assert parts.unexplained.abs().max() <= 1e-15
    by = epk.attribute(trajectory, queries(), by=[by_sample(trajectory)], head="logits")  # statistics too
    assert (by.values - parts.samples).abs().max() <= 1e-12
    assert (by.total - parts.total).abs().max() <= 1e-12
    still = epk.attribute(run(make_net, sgd, lambda *_: None)[0].trajectory, queries(), head="logits")
    assert not torch.allclose(still.samples, samples, rtol=1e-2)  # the control


MOVE_RUNS = [("lookahead", "memory", adamw), ("lookahead", "every_fourth", sgd), ("nested", "disk", sgd),
        ("nested", "every_fourth", adamw)]  # fmt: skip


@pytest.mark.parametrize(("move", "where", "make_optimizer"), MOVE_RUNS)
def test_sums_are_exact_wherever_the_run_is_and_along_every_path(move, where, make_optimizer, tmp_path):
    storage, X = STORAGES[where], queries()
    in_memory, net = recorded_moves(move, make_optimizer=make_optimizer)
    trajectory, _ = recorded_moves(move, mlp, make_optimizer, tmp_path / "run", storage)
    expected = epk.attribute(in_memory, X, head="logits")
    runs = [trajectory, pickle.loads(pickle.dumps(trajectory))]
    runs += [] if storage is None else [epk.load_trajectory(tmp_path / "run", mlp().double())]
    for own in runs:
        assert own.moves == in_memory.moves
        assert (own.digest == in_memory.digest) == (where != "every_fourth")
        parts = assert_exact(own, X)
        assert (parts.samples - expected.samples).abs().max() <= 1e-11
        assert epk.reconstruct(own, X, head="logits").certified
        for path in (epk.chords(every=4), epk.layerwise(every=3)):
            assert epk.attribute(own, X, head="logits", path=path).max_error <= 1e-10
    assert (expected.network - net(X)).abs().max() <= 1e-13


def test_averaged_weights_of_such_a_run_are_explained_and_its_kernel_is_that_of_its_path():
    trajectory, _ = recorded_moves("nested")
    average = averaged_trajectory(trajectory, averaging_coefficients(11, decay=0.7))
    assert_exact(average, queries(), tolerance=1e-12)
    assert epk.reconstruct(average, queries()).certified
    points, rule = epk.Points(queries(), torch.tensor([True, False, False])), epk.gauss_legendre(3)
    K = epk.gram_block(trajectory, points, points, head="logits", rule=rule)
    expected = reference.gram_block(trajectory, points, points, "logits", rule)
    assert (K - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_statistics_of_a_step_belong_to_its_rows_and_those_of_a_move_to_none():
    trajectory, _ = recorded_moves("lookahead", cnn)
    axes = [by_step(trajectory), by_sample(trajectory)]
    parts = epk.attribute(trajectory, queries(), by=axes, head="logits")
    of_no_sample = parts.statistics_of_no_sample.abs().sum(dim=(0, 1)).flatten()
    assert parts.max_error <= 1e-12
    assert (of_no_sample > 1e-6).nonzero()[:, 0].tolist() == [2, 5, 8]


def test_a_run_with_moves_resumes_to_the_bits_of_one_that_never_stopped(tmp_path):
    def resumable(steps, path):
        torch.manual_seed(1)
        net, (X, y) = cnn().double().train(), data()
        optimizer, memory = sgd(net), Memory(LookaheadState(net))
        options = {"folder": path, "resume": True, "stateful": {"lookahead": memory.lookahead}}
        with epk.Recorder(net, optimizer, X, y, **options) as recorder:
            for step in recorder.until(steps):
                batch = batch_of(step)
                optimizer.zero_grad()
                F.cross_entropy(net(X[batch]), y[batch]).backward()
                recorder.batch(batch)
                optimizer.step()
                lookahead(net, step, memory)
        return recorder.trajectory, net

    for steps in (3, 7, 11):  # right after a move, and between two
        resumed, net = resumable(steps, tmp_path / "run")
    whole, other = resumable(11, tmp_path / "whole")
    assert resumed.digest == whole.digest
    assert resumed.moves == whole.moves
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_loop_that_does_not_ask_for_its_steps_may_move_them_too(on_disk, tmp_path):
    """The last step is committed with the next one, for the loop may move the weights in between."""
    torch.manual_seed(1)
    net, (X, y) = mlp().double(), data()
    slow, optimizer = copy.deepcopy(list(net.parameters())), sgd(net)
    options = {"folder": tmp_path / "run", "storage": epk.Storage(steps=1)} if on_disk else {}

    @torch.no_grad()
    def move(step):
        for own, p in zip(slow, net.parameters(), strict=True):
            p.copy_(own.lerp_(p, 0.5))

    recorder = record(net, optimizer, X, y, [None] * 6, after=move, **options)
    assert list(recorder.trajectory.moves) == list(range(6))
    assert epk.attribute(recorder.trajectory, queries()).certified


@pytest.mark.parametrize(("make_optimizer", "dtype"), [(sgd, torch.float64), (adamw, torch.float32)])
def test_the_lookahead_of_pytorch_optimizer_is_followed(make_optimizer, dtype):
    library = pytest.importorskip("pytorch_optimizer")
    torch.manual_seed(1)
    net, (X, y) = mlp().to(dtype), data()
    X, optimizer = X.to(dtype), make_optimizer(net)
    wrapper = library.Lookahead(optimizer, k=3, alpha=0.4, pullback_momentum="none")
    recorder = record(net, optimizer, X, y, map(batch_of, range(8)), stepped=wrapper)
    assert {s: own.anchor for s, own in recorder.trajectory.moves.items()} == {2: 0, 5: 3}
    assert_exact(recorder.trajectory, X[:3], tolerance=1e-12 if dtype == torch.float64 else 1e-5)


def edit(net, *_):
    net[0].weight.data[0, 0] += 0.1


def other_shares(net, step, memory):
    """Lookahead whose share depends on the layer."""
    with torch.no_grad():
        for k, (name, p) in enumerate(net.named_parameters()):
            p.lerp_(memory.lookahead.net_ema[name], 0.5 + 0.1 * k)


def noise(net, *_):
    with torch.no_grad():
        for p in net.parameters():
            p += 1e-6 * torch.randn_like(p)


def twice(net, step, memory):
    """The step is made a second time, which leads away from where it began."""
    with torch.no_grad():
        for name, value in net.state_dict().items():
            value.lerp_(memory.saved[name], -1.0)


@pytest.mark.parametrize("change", [edit, other_shares, noise, twice])
def test_an_edit_of_the_weights_is_no_move(change):
    def move(net, step, memory):
        if step == 3:
            change(net, step, memory)
        memory.saved = copy.deepcopy(net.state_dict())

    with pytest.raises(epk.StepMismatchError, match=r"step 4: .* on the way .* changed in between .*or an edit"):
        run(mlp, sgd, move)
    keep = lambda net, step, memory: step == 9 and move(net, step, memory)  # noqa: E731
    with pytest.raises(epk.StepMismatchError, match=r"weights at the end of the recording must be .*or an edit"):
        run(mlp, sgd, keep, after=lambda net, memory: change(net, 10, memory))


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_checkpoint_that_is_restored_is_found_by_all_weights_where_its_state_is_not_kept(is_edited, tmp_path):
    def wide():
        return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3))

    def move(net, step, memory):
        if step == 1:
            memory.saved = copy.deepcopy(net.state_dict())
        if step == 6:
            net.load_state_dict(memory.saved)
            net[0].weight.data[0, 1] += 1e-3 * is_edited

    options = {"folder": tmp_path / "run", "storage": epk.Storage(keep_every=4)}
    with pytest.raises(epk.StepMismatchError, match="step 7: .*or an edit") if is_edited else nullcontext():
        trajectory = run(wide, sgd, move, **options)[0].trajectory
        assert trajectory.moves == {6: Move(2, 1.0)}
        assert epk.attribute(trajectory, queries()).certified


def test_statistics_that_were_edited_with_the_weights_are_found():
    def move(net, step, memory):
        lookahead(net, step, memory)
        if step == 5:
            net[2].running_mean.mul_(1.5)

    with pytest.raises(epk.StepMismatchError, match="moving statistics"):
        run(cnn, sgd, move, steps=6)


def test_a_move_of_a_step_that_is_on_disk_says_what_to_do(tmp_path):
    net = mlp().double()
    start, recorder = copy.deepcopy(net.state_dict()), epk.Recorder(net, sgd(net), *data(), folder=tmp_path / "run")
    message = r"step 2: .*on disk: read recorder.trajectory after such a move"
    says = pytest.raises(epk.StepMismatchError, match=message)
    with says, recorder:
        for step in range(3):
            make_step(recorder)
            if step == 1:
                assert recorder.trajectory.num_steps == 2
                net.load_state_dict(start)


def test_what_needs_steps_that_follow_from_gradients_refuses_moves():
    trajectory, _ = recorded_moves("lookahead")
    message = r"after step 2 the loop moved the weights without one .*epk_gp.attribute"
    assert_has_no_influence(trajectory, queries(), message)


def test_a_share_of_the_way_is_found_only_on_the_line_of_every_parameter():
    u, anchor, sizes = torch.randn(9).double(), torch.randn(9).double(), (4, 0, 5)
    assert share_of_way(u, anchor, anchor, sizes) == 1.0
    assert share_of_way(u, torch.lerp(u, anchor, 0.25), anchor, sizes) == pytest.approx(0.25)
    for beyond in (-0.25, -1.0, 1.25):
        assert share_of_way(u, torch.lerp(u, anchor, beyond), anchor, sizes) is None
    w = torch.lerp(u, anchor, 0.5)
    w[8] += 1e-9
    assert share_of_way(u, w, anchor, sizes) is None
    tiny = torch.cat([1e-9 * torch.ones(4).double(), torch.zeros(5).double()])  # below the rounding of the others
    assert share_of_way(u * tiny.sign(), w * tiny.sign() + tiny, anchor * tiny.sign(), sizes) is None


WRONG = {
    "must hold 'moves' towards states before their steps": entry("moves", 0, 4.0),
    "must hold 'moves' towards states": entry("moves", 0, 0.5),
    "must hold finite numbers: 'moves'": entry("moves", 1, float("nan")),
}


@pytest.mark.parametrize("message", WRONG)
def test_files_that_hold_other_moves_are_refused(message, tmp_path):
    recorded_moves("lookahead", folder=tmp_path / "run", storage={"steps": 3})
    chunks = [load_file(file) for file in chunk_files(tmp_path / "run")]
    assert ["moves" in chunk for chunk in chunks] == [False, True, True, True, False]
    assert chunks[1]["moves"][:2].tolist() == [[0, 0], [0, 0]]
    changed(WRONG[message])(tmp_path / "run")
    refused(tmp_path / "run", message)


@pytest.mark.parametrize("size", [29_381_632, 124_439_808])
def test_weights_that_are_compared_are_there_in_networks_of_more_than_16_million(size):
    """As many as GPT-2 has: float32 rounds the number of the last one to one that there is not."""
    places = StateSamples.of(torch.zeros(1).expand(size)).places
    assert (int(places[0]), int(places[-1])) == (0, size - 1)
    assert bool((places.diff() > 0).all())


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
    calls = epk.attribute, partial(epk.influence, function=lambda z: z.square().mean())
    calls += () if options or dtype == torch.float32 else (epk.reconstruct, epk.influence)
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
