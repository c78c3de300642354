"""Networks of averaged weights (EMA, SWA): exact sums, and each sample's share in the average."""

import pickle

import pytest
import torch
from optimizer_cases import batches, flat, problem
from path_shares import shares
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import epk_gp as epk
import reference
from epk_gp.core.inputs import Points
from epk_gp.core.states import AveragedStates, averaged_trajectory, averaging_coefficients
from helpers import assert_close

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
}
AVERAGES = {
    "ema": (range(1, 13), 0.7),
    "ema_every_third": (range(3, 13, 3), 0.5),
    "swa": (range(1, 13), None),
    "swa_late": (range(6, 13, 2), None),
    "one_update": ([5], None),
}


def recorded(optimizer_of, updates, decay) -> tuple[epk.Trajectory, nn.Module, Tensor]:
    """A run of 12 steps, and the average that torch makes beside it."""
    net, X, y = problem("SGD")
    optimizer = optimizer_of(net.parameters())
    average = AveragedModel(net, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for s, batch in enumerate(batches()):
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
            if s + 1 in updates:
                average.update_parameters(net)
    return recorder.trajectory, average, torch.randn(3, 4).double()


PAIRS = [*(("momentum", name) for name in AVERAGES), ("adamw", "ema"), ("plain", "swa_late")]


@pytest.mark.parametrize(("optimizer", "name"), PAIRS)
def test_the_parts_sum_to_the_averaged_network(optimizer, name):
    updates, decay = AVERAGES[name]
    run, average, X_test = recorded(OPTIMIZERS[optimizer], updates, decay)
    a = averaging_coefficients(run.num_steps, updates, decay=decay)
    path = averaged_trajectory(run, a, network=average)
    parts, machine = (f(path, X_test, head="logits") for f in (epk.attribute, epk.reconstruct))
    assert_close(parts.network, average(X_test).detach())
    assert parts.max_error <= 1e-12
    assert machine.max_error <= 1e-12
    assert machine.certified
    assert not torch.allclose(parts.samples, epk.attribute(run, X_test, head="logits").samples, rtol=1e-2)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_contributions_are_those_of_per_sample_buffers(name):
    """Each sample's share of every trained step, averaged as the weights are, against Phi by brute force."""
    updates, decay = AVERAGES["ema"]
    run, _, X_test = recorded(OPTIMIZERS[name], updates, decay)
    a = averaging_coefficients(run.num_steps, updates, decay=decay)
    path, rule = averaged_trajectory(run, a), epk.gauss_legendre(4)
    expected = torch.zeros(len(X_test), 3, run.num_points + 1, dtype=torch.float64)
    trained = average = torch.zeros(run.num_points + 1, run.num_weights, dtype=torch.float64)
    for s, share in enumerate(shares(run)):
        trained = trained + share
        before, average = average, torch.lerp(average, trained, float(a[s]))
        for n, x in enumerate(X_test):
            phi = sum(w * reference.jacobian(path, s, t, x, "logits") for t, w in rule)
            expected[n] += phi @ (average - before).T
    parts = epk.attribute(path, X_test, head="logits")
    scale = expected.abs().max()
    assert (parts.samples - expected[:, :, :-1]).abs().max() <= 1e-9 * scale
    assert (parts.decay - expected[:, :, -1]).abs().max() <= 1e-9 * scale


def test_the_run_s_own_contributions_do_not_sum_to_the_average():
    """The control."""
    run, average, X_test = recorded(OPTIMIZERS["momentum"], *AVERAGES["ema"])
    parts = epk.attribute(run, X_test, head="logits")
    assert (parts.total - average(X_test)).abs().max() > 1e-2


@pytest.mark.slow
def test_an_average_that_is_the_run_has_its_contributions():
    run, _, X_test = recorded(OPTIMIZERS["adamw"], [], None)
    path = averaged_trajectory(run, torch.ones(run.num_steps))
    expected, parts = (epk.attribute(t, X_test, head="logits") for t in (run, path))
    assert_close(parts.samples, expected.samples)
    assert_close(parts.decay, expected.decay)


@pytest.mark.slow
def test_an_average_that_counts_the_initial_weights_is_explained():
    """As written by hand: ema = decay * ema + (1 - decay) * w, from the initial weights on."""
    run, _, X_test = recorded(OPTIMIZERS["momentum"], [], None)
    ema = run.states[0]
    for s in range(run.num_steps):
        ema = 0.9 * ema + 0.1 * run.states[s + 1]
    a = averaging_coefficients(run.num_steps, decay=0.9, copies_first=False)
    path = averaged_trajectory(run, a)
    assert_close(path.states[run.num_steps], ema)
    assert epk.attribute(path, X_test, head="logits").max_error <= 1e-12
    equal = averaging_coefficients(run.num_steps, copies_first=False)
    assert_close(averaged_trajectory(run, equal).states[run.num_steps], torch.stack(run.states).mean(dim=0))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17])
def test_averaged_states_are_the_recursion_in_any_order(count):
    states, a = tuple(torch.randn(count, 4)), torch.rand(count - 1, dtype=torch.float64)
    expected = [states[0].double()]
    for s in range(count - 1):
        expected.append((1 - a[s]) * expected[-1] + a[s] * states[s + 1].double())
    averages = AveragedStates(states, a)
    assert len(averages) == count
    for s in (*torch.randperm(count).tolist(), -1, -count):
        torch.testing.assert_close(averages[s], expected[s].float())
    with pytest.raises(IndexError, match=rf"state must lie in 0\.\.{count - 1} .*got {count}"):
        averages[count]


@pytest.mark.slow
def test_an_averaged_run_can_be_pickled_and_has_a_digest_of_its_own():
    run, _, X_test = recorded(OPTIMIZERS["plain"], [], None)
    paths = [averaged_trajectory(run, torch.full((12,), value)) for value in (0.5, 0.5, 0.4)]
    assert paths[0].digest == paths[1].digest != paths[2].digest != run.digest
    again = pickle.loads(pickle.dumps(paths[0]))
    assert torch.equal(epk.attribute(again, X_test).samples, epk.attribute(paths[0], X_test).samples)


@pytest.mark.slow
def test_averages_on_disk_are_those_in_memory(tmp_path):
    results = []
    for path in (None, tmp_path / "run"):
        net, X, y = problem("SGD")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        run = epk.train(net, X, y, optimizer=optimizer, steps=7, folder=path)
        average = averaged_trajectory(run, averaging_coefficients(7, decay=0.5))
        results.append(epk.attribute(average, X[:2], checkpoint=tmp_path / f"sums {path is None}").samples)
    assert torch.equal(*results)


def test_a_network_that_is_another_average_is_refused():
    run, average, _ = recorded(OPTIMIZERS["momentum"], *AVERAGES["ema"])
    a = averaging_coefficients(run.num_steps, decay=0.69)
    with pytest.raises(ValueError, match=r"must hold the average of the run's weights: it differs by .*updates"):
        averaged_trajectory(run, a, network=average)
    with pytest.raises(ValueError, match=r"parameters of the trained one: got none of the name '0\.weight'"):
        averaged_trajectory(run, a, network=nn.Linear(2, 2))


BAD = {
    "decay": ({"decay": 1.5}, r"decay must lie in \[0, 1\]: got 1.5"),
    "order": ({"updates": [3, 2]}, r"ascending within 1\.\.4: got \[3, 2\]"),
    "zero": ({"updates": [0]}, r"ascending within 1\.\.4: got \[0\]\. After the first step one step is made"),
    "late": ({"updates": [5]}, r"ascending within 1\.\.4"),
}


@pytest.mark.parametrize(("options", "says"), BAD.values(), ids=BAD.keys())
def test_updates_that_cannot_have_been_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        averaging_coefficients(4, **options)


def test_what_is_no_average_of_a_run_is_refused():
    run, _, X_test = recorded(OPTIMIZERS["plain"], [], None)
    with pytest.raises(ValueError, match=r"one number in \[0, 1\] per step, \(12,\): got shape \(3,\)"):
        averaged_trajectory(run, torch.ones(3))
    with pytest.raises(ValueError, match=r"values .2.0, 2.0"):
        averaged_trajectory(run, torch.full((12,), 2.0))
    path = averaged_trajectory(run, torch.ones(12))
    with pytest.raises(ValueError, match="must be a recorded run: it is the average of one"):
        averaged_trajectory(path, torch.ones(12))
    with pytest.raises(ValueError, match="path kernel is that of a recorded run: this one is the path of its averaged"):
        epk.PathKernel(path).block(Points(X_test, is_train=False), Points(X_test, is_train=False))


def test_the_last_state_is_where_the_average_ends():
    net, _, _ = problem("SGD")
    run, average, _ = recorded(OPTIMIZERS["plain"], *AVERAGES["swa"])
    path = averaged_trajectory(run, averaging_coefficients(12))
    assert_close(path.states[-1], flat(average.module))
    assert torch.equal(path.weights(0)["0.weight"], net[0].weight.detach())
    assert path.trained is run
