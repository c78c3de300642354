"""Recording: what is recorded is what happened, however the run was made and wherever it is kept."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from loops import CASES, RunCase, by_hand, data, flat, mlp, regression_data, sgd, trained
from stored_runs import step as make_step


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


def recorder_for(case, path=None, **options):
    return lambda net, optimizer, X, y: epk.Recorder(net, optimizer, X, y, loss=case.loss, folder=path, **options)


def states_of(trajectory):
    return [trajectory.states[s] for s in range(trajectory.num_steps + 1)]


def test_recorded_weights_are_those_of_a_plain_loop_bit_for_bit(case):
    _, states = by_hand(case)
    trajectory = trained(case)
    assert trajectory.num_steps == case.steps
    for recorded, plain in zip(states_of(trajectory), states, strict=True):
        assert torch.equal(recorded, plain)


@pytest.mark.mostly_slow
def test_train_and_ones_own_loop_give_the_same_run(case):
    recorder, _ = by_hand(case, recorder_for(case))
    assert recorder.trajectory.digest == trained(case).digest


@pytest.mark.mostly_slow
def test_memory_and_disk_hold_the_same_run(case, tmp_path):
    in_memory, on_disk = trained(case), trained(case, tmp_path / "run")
    loaded = epk.load_trajectory(tmp_path / "run", case.make_net(), loss=case.loss)
    for stored in (on_disk, loaded):
        assert stored.digest == in_memory.digest
        assert stored.data_digest == in_memory.data_digest
        assert stored.loss == in_memory.loss
        assert stored.num_outputs == in_memory.num_outputs
        assert torch.equal(stored.step_sizes, in_memory.step_sizes)
        assert torch.equal(stored.inputs, in_memory.inputs)
        assert torch.equal(stored.targets, in_memory.targets)
        for actual, expected in zip(states_of(stored), states_of(in_memory), strict=True):
            assert torch.equal(actual, expected)
        for actual, expected in zip(stored.steps, in_memory.steps, strict=True):
            assert (actual.index, actual.lr) == (expected.index, expected.lr)
            assert (actual.batch is None) == (expected.batch is None)
            assert actual.batch is None or torch.equal(actual.batch, expected.batch)


@pytest.mark.slow
def test_runs_have_one_digest_exactly_if_they_are_the_same_run():
    digests = {name: trained(case).digest for name, case in CASES.items()}
    assert digests.pop("two_groups") == digests["full_batch"]  # groups with one learning rate are no difference
    assert len(set(digests.values())) == len(digests)


def test_recording_does_not_change_training(case):
    _, plain = by_hand(case)
    _, recorded = by_hand(case, recorder_for(case))
    assert torch.equal(plain[-1], recorded[-1])


def test_recording_leaves_the_random_generator_alone(case):
    before = torch.random.get_rng_state()
    net, (X, y) = case.make_net(), case.make_data()
    torch.random.set_rng_state(before)
    epk.train(net, X, y, optimizer=case.make_optimizer(net), steps=2, loss=case.loss)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_last_batch_of_an_epoch_is_smaller():
    case = CASES["minibatch"]
    batches = [step.batch for step in trained(case).steps]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4]
    assert torch.equal(torch.cat(batches[:3]).sort().values, torch.arange(10))
    assert not torch.equal(torch.cat(batches[:3]), torch.cat(batches[3:6]))


def test_full_batch_steps_say_so_without_indices():
    assert all(step.batch is None for step in trained(CASES["full_batch"]).steps)


def test_step_sizes_follow_the_schedule():
    expected = 0.1 * 0.7 ** torch.arange(5, dtype=torch.float64)
    torch.testing.assert_close(trained(CASES["schedule"]).step_sizes, expected, rtol=1e-15, atol=0)


def test_frozen_parameters_are_constants_and_not_weights():
    trajectory = trained(CASES["frozen_layer"])
    assert set(trajectory.weights(0)) == {"2.weight", "2.bias"}
    assert trajectory.num_weights == 21


def test_parameters_that_the_optimizer_does_not_train_are_constants():
    net, (X, y) = mlp(), data()
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
    trajectory = epk.train(net, X, y, optimizer=optimizer, steps=2)
    assert set(trajectory.weights(-1)) == {"2.weight", "2.bias"}
    torch.testing.assert_close(epk.network_outputs(trajectory, X), net(X).detach())


@pytest.mark.parametrize(
    ("torch_loss", "ours", "make_data"),
    [
        (nn.CrossEntropyLoss(), epk.CrossEntropy(), data),
        (nn.CrossEntropyLoss(reduction="sum"), epk.CrossEntropy("sum"), data),
        (nn.MSELoss(), epk.MeanSquaredError(), regression_data),
        (nn.MSELoss(reduction="sum"), epk.MeanSquaredError("sum"), regression_data),
    ],
    ids=["cross_entropy_mean", "cross_entropy_sum", "mse_mean", "mse_sum"],
)
def test_torch_losses_are_accepted_and_mean_the_same(torch_loss, ours, make_data):
    digests = []
    for loss in (torch_loss, ours):
        net, (X, y) = mlp(), make_data()
        optimizer = sgd(net, 0.01)
        with epk.Recorder(net, optimizer, X, y, loss=loss) as recorder:
            for batch in (None, torch.tensor([1, 5, 2]), torch.tensor([0])):
                rows = slice(None) if batch is None else batch
                optimizer.zero_grad()
                torch_loss(net(X[rows]), y[rows]).backward()
                recorder.batch(batch)
                optimizer.step()
        assert recorder.trajectory.loss == ours
        digests.append(recorder.trajectory.digest)
    assert digests[0] == digests[1]


def test_a_list_of_indices_is_a_batch_and_a_repeated_index_counts_twice():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        F.cross_entropy(net(X[[3, 3, 1]]), y[[3, 3, 1]]).backward()
        recorder.batch([3, 3, 1])
        optimizer.step()
    assert recorder.trajectory.steps[0].batch.tolist() == [3, 3, 1]


def test_a_batch_may_be_announced_before_the_backward_pass():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        recorder.batch(None)
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
    assert recorder.num_steps == 1


def test_a_step_with_a_closure_is_checked_too():
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


def test_a_step_of_size_zero_is_recorded():
    """The empirical NTK is one zero-length step (theory, section 2)."""
    net, (X, y) = mlp(), data()
    trajectory = epk.train(net, X, y, optimizer=sgd(net, 0.0), steps=1)
    assert torch.equal(trajectory.states[0], trajectory.states[1])


def test_networks_that_differ_in_their_activation_have_different_digests():
    """Also where the weights never move, so that they cannot tell: a cache may be keyed by the digest."""
    digests = set()
    for activation in (nn.Tanh, nn.ReLU):
        net, (X, y) = mlp(activation=activation), data()
        digests.add(epk.train(net, X, y, optimizer=sgd(net, 0.0), steps=1).digest)
    assert len(digests) == 2


def test_the_digest_of_a_run_with_ones_own_loss_does_not_depend_on_where_the_function_lives():
    digests = set()
    for _ in range(2):
        net, (X, y) = mlp(), data()
        loss = epk.PerSampleLoss(lambda z, t: F.cross_entropy(z, t, reduction="none"), name="own")
        digests.add(epk.train(net, X, y, optimizer=sgd(net), steps=2, loss=loss).digest)
    assert len(digests) == 1


def test_the_network_trains_on_after_the_recorder_is_closed():
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
    assert not torch.equal(flat(net), recorded)
    assert torch.equal(trajectory.states[2], recorded)


def test_no_hook_is_left_after_an_error():
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    with pytest.raises(KeyError, match="mine"), epk.Recorder(net, optimizer, X, y):
        raise KeyError("mine")
    assert not optimizer._optimizer_step_post_hooks


def test_what_the_user_does_to_his_data_afterwards_does_not_reach_the_run():
    net, (X, y) = mlp(), data()
    trajectory = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    X.zero_()
    y.zero_()
    expected_X, expected_y = data()
    assert torch.equal(trajectory.inputs, expected_X)
    assert torch.equal(trajectory.targets, expected_y)


def test_a_trajectory_taken_during_training_does_not_grow():
    taken = {}
    for steps in (2, 4):
        net, (X, y) = mlp(), data()
        optimizer = sgd(net)
        with epk.Recorder(net, optimizer, X, y) as recorder:
            for step in range(steps):
                make_step(recorder)
                if step == 1:
                    taken[steps] = recorder.trajectory
    assert taken[4].num_steps == 2
    assert len(taken[4].states) == 3
    assert taken[4].digest == taken[2].digest != recorder.trajectory.digest


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_steps_before_an_error_are_kept(where, tmp_path):
    path = tmp_path / "run" if where == "disk" else None
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    recorder = epk.Recorder(net, optimizer, X, y, folder=path, storage=epk.Storage(chunk_bytes=1000), check_every=1)

    def loop():
        with recorder:
            for step in range(5):
                optimizer.zero_grad()
                F.cross_entropy(net(X), y).backward()
                if step == 3:
                    net[0].weight.grad.mul_(2)
                recorder.batch(None)
                optimizer.step()

    with pytest.raises(epk.StepMismatchError, match="step 3"):
        loop()
    three_steps = trained(RunCase("three", steps=3))
    kept = recorder.trajectory if path is None else epk.load_trajectory(path, mlp())
    assert kept.num_steps == 3
    for actual, expected in zip(states_of(kept), states_of(three_steps), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_run_that_diverges_keeps_its_finite_steps_on_disk(tmp_path):
    net, (X, y) = mlp(activation=nn.ReLU), regression_data()
    with pytest.raises(epk.StepMismatchError, match=r"step \d+: .*training diverged"):
        epk.train(net, X, y, optimizer=sgd(net, 50.0), steps=500, loss=epk.MeanSquaredError(), folder=tmp_path / "run")
    loaded = epk.load_trajectory(tmp_path / "run", mlp(activation=nn.ReLU))
    assert loaded.num_steps >= 1
    assert all(torch.isfinite(state).all() for state in states_of(loaded))


def test_a_recorder_without_steps_holds_the_initial_weights(tmp_path):
    net, (X, y) = mlp(), data()
    with epk.Recorder(net, sgd(net), X, y, folder=tmp_path / "run"):
        pass
    loaded = epk.load_trajectory(tmp_path / "run", mlp())
    assert loaded.num_steps == 0
    assert torch.equal(loaded.states[0], flat(mlp()))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_converged_regression_is_no_false_alarm(dtype):
    """Near the optimum the gradient is a sum that cancels: torch's loss and the replay's round it differently."""
    torch.manual_seed(0)
    X = torch.randn(200, 4, dtype=dtype)
    y = X @ torch.randn(4, 2, dtype=dtype) + 0.5 * torch.randn(200, 2, dtype=dtype)
    net = nn.Linear(4, 2).to(dtype)
    optimizer = sgd(net, 0.5)
    with epk.Recorder(net, optimizer, X, y, loss=epk.MeanSquaredError()) as recorder:
        for _ in range(200):
            optimizer.zero_grad()
            F.mse_loss(net(X), y).backward()
            recorder.batch(None)
            optimizer.step()
    assert net.weight.grad.abs().max() < 100 * torch.finfo(dtype).eps
    assert recorder.num_steps == 200


def test_the_progress_bar_is_silent_by_default(capsys):
    trained(CASES["full_batch"])
    assert capsys.readouterr() == ("", "")
    net, (X, y) = mlp(), data()
    epk.train(net, X, y, optimizer=sgd(net), steps=2, progress=True)
    assert "training" in capsys.readouterr().err


def test_a_look_at_the_run_in_a_step_that_fails_leaves_it_readable(tmp_path):
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    X, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = epk.Recorder(net, optimizer, X, y, folder=tmp_path / "run")

    def loop() -> None:
        with recorder:
            for step in recorder.until(5):
                make_step(recorder)
                assert recorder.trajectory.num_steps == step  # without the one whose iteration still runs
                if step == 2:
                    raise RuntimeError

    with pytest.raises(RuntimeError):
        loop()
    assert recorder.trajectory.num_steps == recorder.num_steps == 2
