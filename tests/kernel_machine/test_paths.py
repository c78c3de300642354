"""Other paths between the same states: other contributions, the same sums (docs/theory.md, section 11)."""

import pytest
import torch
from path_runs import RUNS, STEPS, jacobian, mlp, path_average, queries, recorded, state
from path_shares import shares

import epk_gp as epk
from distributed_cases import Shuffled
from epk_gp.core.trajectory import flat_state
from epk_gp.kernel_machine.attribute import attribute_by, attribute_many
from epk_gp.kernel_machine.axes import by_sample, by_step
from epk_gp.kernel_machine.baselines import single_machine
from helpers import assert_close

PATHS = {"chords_2": epk.chords(2), "one_chord": epk.chords(100)}
RULE = epk.gauss_legendre(3)


def some(number):
    """Two of the three paths: another one is left out for each run."""
    return [item for place, item in enumerate(PATHS.items()) if place != number % 3]


every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "path"),
    [pytest.param(name, path, id=f"{name}-{key}") for number, name in enumerate(RUNS) for key, path in some(number)],
)
def test_sums_are_exact_along_every_path(name, path):
    run, X = recorded(name), queries()
    result = epk.reconstruct(run, X, path=path)
    assert result.certified
    assert result.max_error <= 1e-11
    parts = epk.attribute(run, X, path=path)
    assert parts.certified
    assert parts.max_error <= 1e-11
    assert_close(parts.total, parts.network, rounding=1e5)
    assert parts.evaluations == pytest.approx(result.evaluations)


@every_path
@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["tanh_momentum", "tanh_sgd", "tanh_adamw"])
def test_contributions_equal_the_definition(name, path):
    """Sample by sample: recorded steps split by buffers run forward, times averages along the path by autograd.grad."""
    run, X = recorded(name), queries(2)
    parts = epk.attribute(run, X, rule=RULE, path=path)
    of_samples = shares(run)
    for n, x in enumerate(X):
        expected = torch.zeros(3, run.num_points + 1, dtype=torch.float64)
        for s in range(run.num_steps):
            Phi = path_average(run, path, s, x, "log_softmax", RULE)
            expected += torch.cat([Phi[name] for name in run.model.names], dim=1) @ of_samples[s].T
        assert_close(parts.samples[n], expected[:, :-1])
        assert_close(parts.decay[n], expected[:, -1], rounding=1e5)


@every_path
@pytest.mark.mostly_slow
def test_other_paths_give_other_contributions(path):
    """The negative control: the sums agree, and the terms do not."""
    run, X = recorded("tanh_momentum"), queries()
    own, straight = epk.attribute(run, X, path=path), epk.attribute(run, X)
    assert_close(own.total, straight.total, rounding=1e5)
    assert (own.samples - straight.samples).norm() > 1e-3 * straight.samples.norm()


def test_averages_of_other_stretches_miss_the_network():
    """The negative control: with the chords' averages one step too late the sum is off."""
    run, x = recorded("tanh_sgd"), queries(1)[0]
    total = {late: torch.zeros(3, dtype=torch.float64) for late in (0, 1)}
    for s in range(STEPS):
        d = flat_state(run, s + 1, x) - flat_state(run, s, x)
        for late in total:
            Phi = path_average(run, epk.chords(2), max(0, s - late), x, "logits", epk.gauss_legendre(8))
            total[late] += torch.cat(list(Phi.values()), dim=1) @ d
    change = epk.network_outputs(run, x[None])[0] - epk.network_outputs(run, x[None], state=0)[0]
    assert (total[0] - change).abs().max() < 1e-9
    assert (total[1] - change).abs().max() > 1e-3


@every_path
@pytest.mark.mostly_slow
def test_moving_statistics_are_split_along_the_path(path):
    """Of every step, by the derivative in them that autograd.grad gives."""
    run, X = recorded("batch_norm_sgd"), queries(2)
    (steps, whole) = attribute_many(run, X, [[by_step(run)], [by_sample(run)]], rule=RULE, path=path)
    names = run.model.statistics
    for n, x in enumerate(X):
        for s in range(STEPS):
            Phi, start, end = path_average(run, path, s, x, "log_softmax", RULE), state(run, s), state(run, s + 1)
            expected = sum(Phi[name] @ (end[name] - start[name]).flatten() for name in names)
            assert_close(steps.statistics[n, :, s], expected, rounding=1e5)
    assert steps.statistics.abs().max() > 1e-3
    split = whole.statistics.sum(dim=2) + whole.statistics_of_no_sample.squeeze(2)
    assert_close(split, steps.statistics.sum(dim=2), rounding=1e5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["relu_sgd", "batch_norm_sgd"])
def test_the_steps_of_a_chord_sum_to_the_change_between_its_ends(name):
    run, X = recorded(name), queries()
    parts = attribute_by(run, X, [by_step(run)], head="logits", path=epk.chords(2))
    of_steps = parts.values + parts.statistics + parts.unexplained
    f = [epk.network_outputs(run, X, state=s) for s in (0, 2, 4, 5)]
    for k, (first, last) in enumerate([(0, 2), (2, 4), (4, 5)]):
        assert_close(of_steps[:, :, first:last].sum(dim=2), f[k + 1] - f[k], rounding=1e5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["relu_sgd", "tanh_momentum"])
def test_chords_of_one_step_are_straight(name):
    run, X = recorded(name), queries()
    assert torch.equal(epk.attribute(run, X, path=epk.chords(1)).samples, epk.attribute(run, X).samples)
    assert torch.equal(epk.reconstruct(run, X, path=epk.chords(1)).outputs, epk.reconstruct(run, X).outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu_sgd", "dropout_momentum"])
def test_chords_need_fewer_evaluations(name):
    run, X = recorded(name, steps=20), queries()
    straight, chord = (epk.reconstruct(run, X, path=path).evaluations for path in (epk.straight(), epk.chords(10)))
    assert chord < straight / 2


@every_path
@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu_sgd", "tanh_momentum"])
def test_workers_give_the_same_bytes(name, path):
    run, X = recorded(name), queries()
    assert torch.equal(
        epk.attribute(run, X, path=path, executor=Shuffled(), memory_budget=1 << 22).samples,
        epk.attribute(run, X, path=path, memory_budget=1 << 22).samples,
    )
    assert torch.equal(
        epk.reconstruct(run, X, path=path, executor=Shuffled()).outputs, epk.reconstruct(run, X, path=path).outputs
    )


@pytest.mark.slow
def test_ranges_of_steps_begin_where_chords_do():
    """Workers share 40 steps in ranges; the sum is that of one process, and every chord is integrated once."""
    run, X = recorded("relu_sgd", steps=40), queries()
    path = epk.chords(7)
    alone, shared = (epk.reconstruct(run, X, path=path, executor=executor) for executor in (None, Shuffled()))
    assert torch.equal(alone.outputs, shared.outputs)
    assert alone.evaluations == shared.evaluations
    assert sum(alone.statuses.values()) == 6 * len(X)
    parts = epk.attribute(run, X, path=path, executor=Shuffled())
    assert sum(parts.statuses.values()) == 6 * len(X)
    assert parts.max_error <= 1e-12


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["relu_sgd", "tanh_momentum"])
def test_a_checkpoint_belongs_to_its_path(name, tmp_path):
    run, X = recorded(name), queries()
    for number, call in enumerate((epk.attribute, epk.reconstruct)):
        folder = tmp_path / str(number)
        call(run, X, path=epk.chords(2), checkpoint=folder)
        call(run, X, path=epk.chords(2), checkpoint=folder)
        for other in (epk.straight(), epk.chords(3)):
            with pytest.raises(ValueError, match="must be of this very computation"):
                call(run, X, path=other, checkpoint=folder)


def test_float32_leaves_its_rounding_as_a_term():
    run, X = recorded("relu_sgd", dtype=torch.float32), queries(dtype=torch.float32)
    parts = attribute_by(run, X, [by_step(run)], path=epk.chords(2))
    assert parts.certified
    assert parts.max_error <= 1e-5
    steps = parts.unexplained.abs().sum(dim=(0, 1))
    assert bool(steps[[1, 3, 4]].any())
    assert not bool(steps[[0, 2]].any())


BAD = {
    "name": ("chords", TypeError, "path must be a path such as .*: got 'chords'"),
    "number": (20, TypeError, "path must be a path such as .*: got 20"),
    "function": (epk.chords, TypeError, "path must be a path"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("path", "error", "says"), BAD.values(), ids=BAD.keys())
def test_what_is_no_path_is_refused(path, error, says):
    run, X = recorded("tanh_sgd"), queries()
    calls = (
        lambda: epk.reconstruct(run, X, path=path),
        lambda: epk.attribute(run, X, path=path),
        lambda: attribute_by(run, X, [], path=path),
        lambda: attribute_many(run, X, [], path=path),
        lambda: epk.PathKernel(run, path=path),
    )
    for call in calls:
        with pytest.raises(error, match=says):
            call()


@pytest.mark.usefixtures("unchecked")
def test_chords_have_a_number_of_steps():
    with pytest.raises(ValueError, match="every must be at least 1: got 0"):
        epk.chords(0)
    with pytest.raises(TypeError, match=r"every must be a whole number, at least 1: got 2\.5"):
        epk.chords(every=2.5)


def test_jacobians_of_the_reference_are_those_of_the_network():
    """The control of the reference: finite differences, in statistics too."""
    run, x = recorded("batch_norm_sgd"), queries(1)[0]
    at = state(run, 2)
    found = jacobian(run, at, x, "logits")
    for name in (run.model.names[0], *run.model.statistics):
        move = torch.zeros_like(at[name])
        move.view(-1)[0] = 1e-6
        up, down = (run.model({**at, name: at[name] + sign * move}, x[None])[0] for sign in (1, -1))
        assert_close(found[name][:, 0], (up - down) / 2e-6, rounding=1e9)


def test_a_single_machine_follows_the_path_of_its_kernel():
    """Theorem 3.7 holds along every path: the coefficients are the same, the kernel is the path's."""
    torch.manual_seed(0)
    X, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    net = mlp(torch.nn.Tanh).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.3), steps=8)
    rule = epk.gauss_legendre(12)
    path = epk.chords(4)
    machine = single_machine(run, queries(), rule=rule, path=path)
    assert machine.certified
    assert machine.max_error < 1e-11
    test, train = epk.Points(queries(), is_train=False), epk.Points(X, is_train=True)
    K = epk.gram_block(run, test, train, rule=rule, path=path)
    sums = torch.einsum("ncmd,md->nc", K, machine.coefficients)
    assert_close(machine.outputs, machine.initial + sums, rounding=1e4)
    straight = epk.gram_block(run, test, train, rule=rule)
    assert (K - straight).abs().max() > 1e-3 * K.abs().max()  # the control: another kernel, the same sum
    assert_close(torch.einsum("ncmd,md->nc", straight, machine.coefficients), sums, rounding=1e5)
    with pytest.warns(epk.CertificateWarning, match="a fixed rule"):
        coarse = single_machine(run, queries(), rule=epk.left_endpoint(), path=path)
    assert coarse.max_error > 1e-4


@pytest.mark.usefixtures("unchecked")
def test_a_single_machine_refuses_what_is_no_path():
    run = recorded("tanh_sgd")
    with pytest.raises(TypeError, match="path must be a path such as .*: got 'chords'"):
        single_machine(run, queries(), path="chords")
