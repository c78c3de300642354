"""Recording: what is recorded is what happened, however the run was made and wherever it is kept."""

import pytest
import torch
from thread_tools import at_once
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import epk_gp as epk
from helpers import Terminal
from loops import CASES, Net, assert_exact, by_hand, data, flat, mlp, record, regression_data, sgd, trained
from stored_runs import step as make_step

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def states_of(trajectory):
    return [trajectory.states[s] for s in range(trajectory.num_steps + 1)]


@CASE
def test_train_memory_disk_and_ones_own_loop_hold_the_run_of_a_plain_loop_bit_for_bit(case, tmp_path):
    def recording(net, optimizer, X, y):
        return epk.Recorder(net, optimizer, X, y, loss=case.loss)

    _, states = by_hand(case)
    case.make_net(), case.make_data()
    before = torch.random.get_rng_state()
    in_memory = trained(case)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert in_memory.num_steps == case.steps
    own, on_disk = by_hand(case, recording)[0].trajectory, trained(case, tmp_path / "run")
    for stored in (own, on_disk, epk.load_trajectory(tmp_path / "run", case.make_net(), loss=case.loss)):
        assert all(map(torch.equal, states_of(stored), states))
        for name in ("digest", "data_digest", "loss", "num_outputs"):
            assert getattr(stored, name) == getattr(in_memory, name)
        for name in ("step_sizes", "inputs", "targets"):
            assert torch.equal(getattr(stored, name), getattr(in_memory, name))
        for actual, expected in zip(stored.steps, in_memory.steps, strict=True):
            assert (actual.index, actual.lr) == (expected.index, expected.lr)
            assert (actual.batch is None) == (expected.batch is None)
            assert actual.batch is None or torch.equal(actual.batch, expected.batch)


@pytest.mark.slow
def test_runs_have_one_digest_exactly_if_they_are_the_same_run():
    digests = {name: trained(case).digest for name, case in CASES.items()}
    assert digests.pop("two_groups") == digests["full_batch"]  # groups with one learning rate are no difference
    assert len(set(digests.values())) == len(digests)


def test_parameters_that_are_frozen_or_in_no_optimizer_are_constants_and_not_weights():
    net, (X, y) = mlp(), data()
    part = epk.train(net, X, y, optimizer=sgd(net[2]), steps=2)
    for trajectory in (trained(CASES["frozen_layer"]), part):
        assert set(trajectory.weights(0)) == {"2.weight", "2.bias"}
        assert trajectory.num_weights == 21
    torch.testing.assert_close(epk.network_outputs(part, X), net(X).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kinds", [(nn.CrossEntropyLoss, epk.CrossEntropy), (nn.MSELoss, epk.MeanSquaredError)])
def test_torch_losses_mean_the_same_and_a_list_with_a_repeated_index_is_a_batch(kinds, reduction):
    value, stated = kinds[0](reduction=reduction), kinds[1](reduction)
    runs = []
    for loss in (value, stated):
        net, (X, y) = mlp(), data() if kinds[1] is epk.CrossEntropy else regression_data()
        batches = (None, [5, 5, 2], torch.tensor([0]))
        runs.append(record(net, sgd(net, 0.01), X, y, batches, value=value, loss=loss).trajectory)
    assert runs[0].loss == stated
    assert runs[0].digest == runs[1].digest
    assert runs[0].steps[1].batch.tolist() == [5, 5, 2]


def test_a_batch_may_be_announced_before_the_backward_pass_of_a_closure():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)

    def closure():
        optimizer.zero_grad()
        value = F.cross_entropy(net(X), y)
        value.backward()
        return value

    with epk.Recorder(net, optimizer, X, y) as recorder:
        for _ in range(3):
            recorder.batch(None)
            optimizer.step(closure)
    assert recorder.num_steps == 3


def test_the_digest_tells_networks_apart_in_a_step_of_size_zero_and_not_where_ones_own_loss_lives():
    """The empirical NTK is one zero-length step (theory, section 2); a cache may be keyed by the digest."""
    digests = set()
    for activation in (nn.Tanh, nn.ReLU, nn.Tanh):
        net, (X, y) = mlp(activation=activation), data()
        loss = epk.PerSampleLoss(lambda z, t: F.cross_entropy(z, t, reduction="none"), name="own")
        trajectory = epk.train(net, X, y, optimizer=sgd(net, 0.0), steps=1, loss=loss)
        assert torch.equal(trajectory.states[0], trajectory.states[1])
        digests.add(trajectory.digest)
    assert len(digests) == 2


def test_what_network_and_data_do_after_the_recording_does_not_reach_the_run():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=2)
    assert not optimizer._optimizer_step_post_hooks
    assert torch.equal(flat(net), trajectory.states[2])
    assert all(p.requires_grad for p in net.parameters())
    assert net.training
    recorded = trajectory.states[2].clone()
    F.cross_entropy(net(X), y).backward()
    optimizer.step()
    X.zero_(), y.zero_()
    assert not torch.equal(flat(net), recorded)
    assert torch.equal(trajectory.states[2], recorded)
    assert torch.equal(trajectory.inputs, data()[0])
    assert torch.equal(trajectory.targets, data()[1])


def test_a_recording_may_begin_and_end_during_a_step_of_another():
    """As it does in another thread: torch goes through the hooks of all optimizers while they change."""
    inner, (X, y) = list[epk.Trajectory](), data()

    def train_another(*_):
        if not inner:
            inner.append(None)
            net = mlp()
            inner[0] = epk.train(net, X, y, optimizer=sgd(net), steps=2)

    net = mlp()
    with epk.Recorder(net, sgd(net), X, y) as recorder:
        hook = register_optimizer_step_post_hook(train_another)
        try:
            make_step(recorder), make_step(recorder)
        finally:
            hook.remove()
    assert recorder.trajectory.digest == inner[0].digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_run_that_diverges_names_the_step_and_keeps_its_finite_ones_on_disk(dtype, tmp_path):
    net, (X, y) = mlp(dtype, nn.ReLU), regression_data()
    options = {"loss": epk.MeanSquaredError(), "folder": tmp_path / "run"}
    with pytest.raises(epk.StepMismatchError, match=r"step [1-9]\d*: .*training diverged .*Lower the learning rate"):
        epk.train(net, X.to(dtype), y.to(dtype), optimizer=sgd(net, 50.0), steps=1000, **options)
    loaded = epk.load_trajectory(tmp_path / "run", mlp(dtype, nn.ReLU))
    assert loaded.num_steps >= 1
    assert all(torch.isfinite(state).all() for state in states_of(loaded))


def test_a_recorder_without_steps_holds_the_initial_weights_and_takes_no_batch_outside(tmp_path):
    net = mlp()
    recorder = epk.Recorder(net, sgd(net), *data(), folder=tmp_path / "run")
    with pytest.raises(RuntimeError, match="inside 'with Recorder"):
        recorder.batch(None)
    with recorder:
        pass
    with recorder, pytest.raises(RuntimeError, match="inside 'with Recorder"):  # once more
        recorder.batch(None)
    loaded = epk.load_trajectory(tmp_path / "run", mlp())
    assert loaded.num_steps == 0
    assert torch.equal(loaded.states[0], flat(mlp()))


def test_a_batch_without_its_step_is_found_at_the_end():
    net, (X, y) = mlp(), data()
    recorder = epk.Recorder(net, sgd(net), X, y)
    says = pytest.raises(epk.StepMismatchError, match="followed by optimizer.step.*the one of step 1 was not")
    with says, recorder:
        make_step(recorder)
        F.cross_entropy(net(X), y).backward()
        recorder.batch(None)
    assert recorder.trajectory.num_steps == 1


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_converged_regression_is_no_false_alarm(dtype):
    """Near the optimum the gradient is a sum that cancels: torch's loss and the replay's round it differently."""
    X = torch.randn(200, 4, dtype=dtype)
    y = X @ torch.randn(4, 2, dtype=dtype) + 0.5 * torch.randn(200, 2, dtype=dtype)
    net = nn.Linear(4, 2).to(dtype)
    record(net, sgd(net, 0.5), X, y, [None] * 100, value=F.mse_loss, loss=epk.MeanSquaredError())
    assert net.weight.grad.abs().max() < 100 * torch.finfo(dtype).eps


def test_the_progress_bar_is_silent_by_default(capsys, monkeypatch):
    trained(CASES["full_batch"])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, progress=True)
    assert "training" in terminal.getvalue()


def test_a_look_at_the_run_in_a_step_that_fails_leaves_it_readable(tmp_path):
    net = mlp()
    recorder = epk.Recorder(net, sgd(net), *data(), folder=tmp_path / "run")
    says = pytest.raises(RuntimeError, match="mine")
    with says, recorder:
        for step in recorder.until(5):
            make_step(recorder)
            assert recorder.trajectory.num_steps == step  # without the one whose iteration still runs
            if step == 2:
                raise RuntimeError("mine")
    assert recorder.trajectory.num_steps == recorder.num_steps == 2


def annealed():
    """Numbers that a loop changes: a rate of dropout, the momentum of a normalisation, a factor of its own."""

    def forward(net, x):
        net.calls += 1
        z = net.head(net.drop(torch.tanh(net.norm(net.body(x)))))
        return z * net.scale if net.training else z

    parts = {"body": nn.Linear(4, 6, bias=False), "norm": nn.BatchNorm1d(6), "drop": nn.Dropout(0)}
    return Net(forward, **parts, head=nn.Linear(6, 3), scale=1, calls=0).double()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_numbers_of_the_network_that_the_loop_changes_are_recorded_with_each_pass(tmp_path, is_on_disk):
    net, (X, y) = annealed(), data()

    def anneal(step):
        net.drop.p, net.norm.momentum, net.scale = 0.1 * step, 0.2 / (1 + step), 1 + 0.5 * step

    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    folder = tmp_path / "run" if is_on_disk else None
    recorder = record(net, optimizer, X, y, [None] * 5, before=anneal, folder=folder)
    run = epk.load_trajectory(folder, annealed()) if is_on_disk else recorder.trajectory
    assert_exact(run, X[:3], net)
    assert epk.influence(run, X[:2]).certified
    assert any(forward.settings is not None for step in run.steps for forward in step.passes)


@pytest.mark.parametrize("announced", ["second", "first", "both"])
def test_of_the_two_passes_of_sam_any_may_be_announced(announced):
    """The gradient of the first one is cleared: it says only where the second one is."""

    def sharpness_aware(announced):
        net, (X, y) = mlp(), data()
        optimizer = sgd(net)
        with epk.Recorder(net, optimizer, X, y) as recorder:
            for rows in torch.arange(9).view(3, 3):
                climbs = [torch.zeros_like(p) for p in net.parameters()]
                for kind in ("first", "second"):
                    optimizer.zero_grad()
                    F.cross_entropy(net(X[rows]), y[rows]).backward()
                    if announced in (kind, "both"):
                        recorder.batch(rows)
                    with torch.no_grad():
                        for p, climb in zip(net.parameters(), climbs, strict=True):
                            p += climb.copy_(0.3 * p.grad if kind == "first" else -climb)
                optimizer.step()
        return recorder.trajectory

    assert sharpness_aware(announced).digest == sharpness_aware("second").digest


def test_moving_statistics_that_a_pass_without_a_loss_moves_after_the_last_step_are_recorded(tmp_path):
    """As the discriminator's do in the generator's step."""
    net, (X, y) = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double(), data()
    options = {"folder": tmp_path / "run", "stateful": {"draws": torch.Generator()}, "storage": epk.Storage(steps=1)}
    with epk.Recorder(net, optimizer := sgd(net), X, y, **options) as recorder:
        for _ in recorder.until(3):
            optimizer.zero_grad()
            F.cross_entropy(net(X), y).backward()
            recorder.batch(None)
            optimizer.step()
            net(X + 1.0)
    run = epk.load_trajectory(tmp_path / "run", net)
    assert torch.equal(run.statistics[3], torch.cat([net[1].running_mean, net[1].running_var]))
    assert_exact(run, X[:2], net)


def two_names():
    """A layer and a normalisation that the network has under two names each, and a third name for a weight."""

    def forward(net, x):
        for layer in net.layers:
            x = torch.tanh(net.again(layer(x)))
        return net.out(net.norm(net.tied(x)))

    torch.manual_seed(1)
    shared, norm, tied = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
    tied.weight = shared.weight
    layers = nn.ModuleList([shared, nn.Linear(4, 4), shared])
    return Net(forward, norm=norm, layers=layers, again=norm, tied=tied, out=nn.Linear(4, 3)).double()


def test_a_module_under_two_names_is_trained_as_without_recording_and_stays_as_it_was_trained():
    X, y = data()
    plain, recorded = (two_names() for _ in range(2))
    optimizer = sgd(plain)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(plain(X), y).backward()
        optimizer.step()
    weights = list(recorded.parameters())
    run = record(recorded, sgd(recorded), X, y, [None] * 3).trajectory
    assert all(map(torch.equal, recorded.state_dict().values(), plain.state_dict().values()))
    assert all(a is b for a, b in zip(weights, recorded.parameters(), strict=True))
    assert_exact(run, X, recorded)


def test_random_numbers_are_recorded_in_just_the_passes_that_draw_some_and_others_change_no_result():
    """Another thread draws while the network computes; or it drops units once its first bias has grown."""
    X, y, runs = data()[0], torch.zeros(10, dtype=torch.int64), {}

    def forward(net, x):
        if net.kind == "beside":
            at_once([lambda: torch.rand(1)])
        drops = net.kind == "drops later" and float(net.out.bias[0].detach()) > 1e-3 and net.training
        return net.out(F.dropout(torch.tanh(net.hidden(x)), 0.5, drops))

    for kind in ("plain", "beside", "drops later"):
        torch.manual_seed(0)
        net = Net(forward, hidden=nn.Linear(4, 6), out=nn.Linear(6, 3), kind=kind).double()
        nn.init.zeros_(net.out.bias)
        runs[kind] = epk.train(net, X, y, optimizer=sgd(net, 0.3), steps=3)
        runs[kind].model.module.kind = "plain"
    drawn = [any(p.random_state is not None for p in step.passes) for step in runs["drops later"].steps]
    assert drawn == [False, True, True]
    alone, beside = (assert_exact(runs[kind], X[:3]) for kind in ("plain", "beside"))
    assert float((beside.samples - alone.samples).abs().max()) < 1e-12
