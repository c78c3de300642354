"""Moves of the weights without a gradient: Lookahead, checkpoints that are restored while training goes on."""

import copy
import pickle
from contextlib import nullcontext

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

# What the moves of `moving_loops` are: by the step, the anchor and the share of the way.
PATHS = {
    "lookahead": {2: (0, 0.6), 5: (3, 0.6), 8: (6, 0.6)},
    "restored": {6: (3, 1.0)},
    "nested": {2: (0, 0.6), 5: (3, 0.6), 7: (2, 1.0), 9: (6, 0.6)},
    "undone": {3: (3, 1.0), 6: (6, 0.5)},
}
STORAGES = {"memory": None, "disk": {"steps": 2}, "every_fourth": {"keep_every": 4}}


def recorded(move, make_net=mlp, make_optimizer=sgd, folder=None, storage=None, **options):
    if storage is not None:
        options |= {"folder": folder, "storage": epk.Storage(**storage)}
    recorder, net = run(make_net, make_optimizer, MOVES[move], **options)
    return recorder.trajectory, net


@pytest.mark.parametrize("make_net", [mlp, cnn])
@pytest.mark.parametrize("move", MOVES)
def test_shares_are_those_of_per_row_gradients_pushed_through_the_optimizer_by_hand(move, make_net):
    """airbench94's Lookahead with its moving statistics among them."""
    trajectory, net = recorded(move, make_net)
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


# Each pair of moves, places and optimizers occurs.
RUNS = [("lookahead", "memory", sgd), ("lookahead", "disk", adamw), ("lookahead", "every_fourth", sgd),
        ("nested", "memory", adamw), ("nested", "disk", sgd), ("nested", "every_fourth", adamw)]  # fmt: skip


@pytest.mark.parametrize(("move", "where", "make_optimizer"), RUNS)
def test_sums_are_exact_wherever_the_run_is_and_along_every_path(move, where, make_optimizer, tmp_path):
    storage, X = STORAGES[where], queries()
    in_memory, net = recorded(move, make_optimizer=make_optimizer)
    trajectory, _ = recorded(move, mlp, make_optimizer, tmp_path / "run", storage)
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
    trajectory, _ = recorded("nested")
    average = averaged_trajectory(trajectory, averaging_coefficients(11, decay=0.7))
    assert_exact(average, queries(), tolerance=1e-12)
    assert epk.reconstruct(average, queries()).certified
    points, rule = epk.Points(queries(), torch.tensor([True, False, False])), epk.gauss_legendre(3)
    K = epk.gram_block(trajectory, points, points, head="logits", rule=rule)
    expected = reference.gram_block(trajectory, points, points, "logits", rule)
    assert (K - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_statistics_of_a_step_belong_to_its_rows_and_those_of_a_move_to_none():
    trajectory, _ = recorded("lookahead", cnn)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
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
    trajectory, _ = recorded("lookahead")
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
    recorded("lookahead", folder=tmp_path / "run", storage={"steps": 3})
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
