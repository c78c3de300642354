"""Networks of averaged weights (EMA, SWA): exact sums, and each sample's share in the average."""

import copy
import itertools
import pickle

import pytest
import torch
from optimizer_cases import batches, problem
from path_runs import OPTIMIZERS
from path_shares import assert_are_shares, shares
from statistics_runs import reference_jacobian
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from weighted_loops import record

import epk_gp as epk
from epk_gp.core.inputs import Points
from epk_gp.core.plans import TensorSpec
from epk_gp.core.states import AveragedStates, averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine.axes import by_sample, by_step
from helpers import assert_close
from loops import flat

AVERAGES = {
    "ema": (range(1, 13), 0.7), "ema_every_third": (range(3, 13, 3), 0.5), "swa": (range(1, 13), None),
    "swa_late": (range(6, 13, 2), None), "one_update": ([5], None),
}  # fmt: skip


def recorded(name, updates=(), decay=None, **options) -> tuple[epk.Trajectory, nn.Module, Tensor]:
    """A run of 12 steps, the average that torch makes beside it, and points."""
    net, X, y = problem("SGD")
    optimizer = OPTIMIZERS[name](net)
    average = AveragedModel(net, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    steps = itertools.count(1)
    optimizer.register_step_post_hook(lambda *_: next(steps) in updates and average.update_parameters(net))
    return record(net, optimizer, X, y, batches(), **options), average, torch.randn(3, 4).double()


@pytest.mark.parametrize(
    ("optimizer", "name"), [*(("momentum", name) for name in AVERAGES), ("adamw", "ema"), ("sgd", "swa_late")]
)
def test_the_parts_sum_to_the_averaged_network(optimizer, name):
    updates, decay = AVERAGES[name]
    run, average, X_test = recorded(optimizer, updates, decay)
    path = averaged_trajectory(run, averaging_coefficients(12, updates, decay=decay), network=average)
    parts, own = (epk.attribute(t, X_test, head="logits") for t in (path, run))
    assert_close(parts.network, average(X_test).detach())
    assert parts.max_error <= 1e-12
    machine = epk.reconstruct(path, X_test, head="logits")
    assert machine.certified
    assert machine.max_error <= 1e-12
    assert not torch.allclose(parts.samples, own.samples, rtol=1e-2)
    assert (own.total - average(X_test)).abs().max() > 1e-3  # the control
    assert_close(path.states[-1], flat(average.module))
    assert path.trained is run


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_contributions_are_those_of_per_sample_buffers(name):
    run, _, X_test = recorded(name)
    a = averaging_coefficients(12, decay=0.7)
    changes, trained = [], torch.zeros(run.num_points + 1, run.num_weights, dtype=torch.float64)
    average = trained
    for s, share in enumerate(shares(run)):
        trained = trained + share
        before, average = average, torch.lerp(average, trained, float(a[s]))
        changes.append(average - before)
    assert_are_shares(averaged_trajectory(run, a), X_test, changes)


def test_an_average_that_counts_the_initial_weights_is_explained():
    run, _, X_test = recorded("momentum")
    ema = run.states[0]
    for s in range(12):
        ema = 0.9 * ema + 0.1 * run.states[s + 1]
    path = averaged_trajectory(run, averaging_coefficients(12, decay=0.9, copies_first=False))
    assert_close(path.states[12], ema)
    assert epk.attribute(path, X_test, head="logits").max_error <= 1e-12
    equal = averaging_coefficients(12, copies_first=False)
    assert_close(averaged_trajectory(run, equal).states[12], torch.stack(run.states).mean(dim=0))


@pytest.mark.parametrize("is_averaged", [False, True])
def test_statistics_that_are_made_for_the_averaged_network_are_a_part_of_the_last_step(is_averaged):
    """SWA with `update_bn`, or with averaged buffers; shares are those of per-sample gradients, by brute force."""
    torch.manual_seed(2)
    net, X, y = problem("SGD")
    net.insert(1, nn.BatchNorm1d(6).double())
    optimizer, average = OPTIMIZERS["momentum"](net), AveragedModel(net, use_buffers=is_averaged)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(net))
    run, X_test = record(net, optimizer, X, y, batches()), torch.randn(3, 4).double()
    if not is_averaged:
        update_bn(X.split(4), average)
    a = averaging_coefficients(12)
    path, plain = averaged_trajectory(run, a, network=average), averaged_trajectory(run, a)
    parts, without = (epk.attribute(each, X_test, head="logits") for each in (path, plain))
    assert parts.certified
    assert (parts.total - average.eval()(X_test)).abs().max() <= 1e-12
    assert (without.total - average(X_test)).abs().max() > 1e-2  # the control
    changes, expected, P = averaged_shares(net, run, a), torch.zeros(3, 3, 11, dtype=torch.float64), run.num_weights
    moved = torch.zeros(3, 3, dtype=torch.float64)
    for s, change in enumerate(changes):
        start, end = (torch.cat([path.states[s + k], path.statistics[s + k]]) for k in (0, 1))
        for t, weight in epk.gauss_legendre(12):
            phi = weight * reference_jacobian(net, path, start + t * (end - start), X_test)
            expected += torch.einsum("ncp,mp->ncm", phi[..., :P], change)
            moved += torch.einsum("ncq,q->nc", phi[..., P:], (end - start)[P:])
    assert (parts.samples - expected).abs().max() <= 1e-8 * expected.abs().max()
    assert (parts.statistics - moved).abs().max() <= 1e-8 * moved.abs().max()
    grouped = epk.attribute(path, X_test, by=[by_step(path), by_sample(path)], head="logits")
    assert (grouped.statistics_of_no_sample.abs().sum(dim=(0, 1)).flatten() > 1e-6).nonzero().flatten().tolist() == [11]
    assert path.digest != plain.digest
    assert path.until(11).digest == plain.until(11).digest
    assert torch.equal(epk.attribute(pickle.loads(pickle.dumps(path)), X_test, head="logits").samples, parts.samples)
    for ask in (lambda: epk.influence(path, X_test), lambda: epk.retrain(path, torch.ones(1, 11))):
        with pytest.raises(ValueError, match="needs moving statistics that follow from the steps: .*update_bn"):
            ask()


def averaged_shares(net: nn.Module, run: epk.Trajectory, a: Tensor) -> list[Tensor]:
    """Each sample's share of the steps of the average, (M, P), under momentum; of decay no samples'."""
    buffers = trained = average = torch.zeros(run.num_points, run.num_weights, dtype=torch.float64)
    copied, changes = copy.deepcopy(net).train(), []
    for s, step in enumerate(run.steps):
        rows = torch.zeros_like(buffers)
        leaves = {name: value.clone().requires_grad_(name in run.model.names) for name, value in run.weights(s).items()}
        z = functional_call(copied, leaves, (run.inputs[step.batch],))
        weights = [leaves[name] for name in run.model.names]
        for i, loss in zip(step.batch, F.cross_entropy(z, run.targets[step.batch], reduction="none"), strict=True):
            own = torch.autograd.grad(loss / len(step.batch), weights, retain_graph=True)
            rows[i] += torch.cat([g.flatten() for g in own])
        buffers = 0.9 * buffers + rows
        trained, before = trained - 0.1 * buffers, average
        average = torch.lerp(average, trained, float(a[s]))
        changes.append(average - before)
    return changes


def test_averaged_states_are_the_recursion_in_any_order():
    for count in (1, 2, 3, 5, 16, 17):
        states, a = tuple(torch.randn(count, 4)), torch.rand(count - 1, dtype=torch.float64)
        expected = [states[0].double()]
        for s in range(count - 1):
            expected.append((1 - a[s]) * expected[-1] + a[s] * states[s + 1].double())
        averages = AveragedStates(states, a, None, TensorSpec(torch.float32, torch.device("cpu")))
        assert len(averages) == count
        for s in (*torch.randperm(count).tolist(), -1, -count):
            torch.testing.assert_close(averages[s], expected[s].float())
        with pytest.raises(IndexError, match=rf"state must lie in 0\.\.{count - 1} .*got {count}"):
            averages[count]


def test_an_averaged_run_can_be_pickled_and_stored_and_has_a_digest_of_its_own(tmp_path):
    run, _, X_test = recorded("sgd")
    paths = [averaged_trajectory(run, torch.full((12,), value)) for value in (0.5, 0.5, 0.4)]
    assert paths[0].digest == paths[1].digest != paths[2].digest != run.digest
    expected = epk.attribute(paths[0], X_test).samples
    assert torch.equal(epk.attribute(pickle.loads(pickle.dumps(paths[0])), X_test).samples, expected)
    on_disk = averaged_trajectory(recorded("sgd", folder=tmp_path / "run")[0], torch.full((12,), 0.5))
    assert torch.equal(epk.attribute(on_disk, X_test, checkpoint=tmp_path / "sums").samples, expected)


def test_what_is_no_average_of_a_run_is_refused():
    run, average, X_test = recorded("momentum", *AVERAGES["ema"])
    a, path = averaging_coefficients(12, decay=0.69), averaged_trajectory(run, torch.ones(12))
    points = Points(X_test, False)
    for call, says in (
        (lambda: averaged_trajectory(run, a, network=average), "must hold the average .*: it differs by .*updates"),
        (lambda: averaged_trajectory(run, a, network=nn.Linear(2, 2)), r"got none of the name '0\.weight'"),
        (lambda: averaged_trajectory(run, torch.ones(3)), r"in \[0, 1\] per step, \(12,\): got shape \(3,\)"),
        (lambda: averaged_trajectory(run, torch.full((12,), 2.0)), "values .2.0, 2.0"),
        (lambda: averaged_trajectory(path, torch.ones(12)), "must be a recorded run: it is the average of one"),
        (lambda: epk.PathKernel(path).block(points, points), "path kernel is that of a recorded run: this one"),
        (lambda: averaging_coefficients(4, decay=1.5), r"decay must lie in \[0, 1\]: got 1.5"),
        (lambda: averaging_coefficients(4, [3, 2]), r"ascending within 1\.\.4: got \[3, 2\]"),
        (lambda: averaging_coefficients(4, [0]), r"within 1\.\.4: got \[0\]\. After the first step one step is made"),
        (lambda: averaging_coefficients(4, [5]), r"ascending within 1\.\.4"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
