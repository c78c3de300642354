"""The gradient is checked itself; so are the last step, and the network when the recording ends."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.show import CertificateWarning
from loops import data, flat, mlp, sgd
from stored_runs import step as make_step

STEPS = 4


def record(net, X, y, wrong, rates=(0.1,) * STEPS, **options):
    """Record a loop with momentum; at the step `wrong` the gradient is that of other rows."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    recorder = epk.Recorder(net, optimizer, X, y, **options)
    with recorder:
        for index, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            rows = torch.arange(4) + index
            used = rows + 3 if index == wrong else rows
            optimizer.zero_grad()
            F.cross_entropy(net(X[used]), y[used]).backward()
            recorder.batch(rows)
            optimizer.step()
    return recorder


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(torch.float64, 0.0), (torch.float32, 0.0), (torch.float32, 1e-12)],
    ids=["float64", "float32", "below_rounding"],
)
def test_a_step_too_small_to_be_seen_needs_the_right_gradient_all_the_same(dtype, rate):
    """A warm-up starts at 0; a wrong first batch would stay in the momentum and move every later step."""
    rates = (rate, 0.1, 0.1, 0.1)
    assert record(mlp(dtype), *data(dtype=dtype), wrong=None, rates=rates).num_steps == 4
    with pytest.raises(epk.StepMismatchError, match="step 0: .*must get the indices of the rows that the network saw"):
        record(mlp(dtype), *data(dtype=dtype), wrong=0, rates=rates)


def record_scaled(wrong, **options):
    """Record a loop whose gradient is doubled at one step."""
    net, (X, y) = mlp(), data()
    optimizer = sgd(net)
    recorder = epk.Recorder(net, optimizer, X, y, **options)
    with recorder:
        for index in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(net(X), y).mul(2.0 if index == wrong else 1.0).backward()
            recorder.batch(None)
            optimizer.step()
    return recorder


def test_check_every_checks_the_last_step():
    assert record_scaled(wrong=None, check_every=1000).num_steps == STEPS
    with pytest.raises(epk.StepMismatchError, match=f"step {STEPS - 1}: .*2 times that of the stated loss"):
        record_scaled(wrong=STEPS - 1, check_every=1000)


def test_a_step_between_is_left_to_the_certificate():
    """The negative control: neither the first nor the last step is wrong."""
    recorder = record_scaled(wrong=1, check_every=1000)
    assert (recorder.num_steps, recorder.num_checked) == (STEPS, 2)
    with pytest.warns(CertificateWarning, match="step 1 differs"):
        assert not epk.reconstruct(recorder.trajectory, recorder.X).certified


def test_rows_that_were_not_announced_are_found_at_every_step():
    with pytest.raises(epk.StepMismatchError, match="step 1: .*rows that the network saw"):
        record(mlp(), *data(), wrong=1, check_every=1000)


def test_check_every_checks_the_first_step_of_a_resumed_run(tmp_path):
    options = {"folder": tmp_path / "run", "resume": True, "check_every": 1000}
    net, (X, y) = mlp(), data()

    def continue_to(steps, offset):
        optimizer = sgd(net)
        with epk.Recorder(net, optimizer, X, y, **options) as recorder:
            for index in recorder.until(steps):
                rows = (torch.arange(4) + index) % len(X)
                used = (rows + offset) % len(X)
                optimizer.zero_grad()
                F.cross_entropy(net(X[used]), y[used]).backward()
                recorder.batch(rows)
                optimizer.step()

    continue_to(2, 0)
    with pytest.raises(epk.StepMismatchError, match="step 2: "):
        continue_to(9, 3)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.factor = mlp(), 1.0

    def forward(self, x):
        return self.factor * self.inner(x)


def average(net, initial):
    """Load the average of the initial weights and the last ones, as EMA or SWA do."""
    averaged = (flat(net) + initial) / 2
    nn.utils.vector_to_parameters(averaged, net.parameters())


def scale(net, initial):
    net.factor = 1.0 + 1e-6


def replace_activation(net, initial):
    net.inner[1] = nn.ReLU()


def remove_layer(net, initial):
    del net.inner[2]


def convert(net, initial):
    net.float()


ENDS = {
    "another_dtype": (convert, "must end the recording as it was trained, in torch.float64"),
    "averaged_weights": (average, "weights at the end of the recording .*EMA, SWA or Lookahead"),
    "missing_layer": (remove_layer, "weights at the end of the recording"),
    "attribute": (scale, "forward function must stay .*an attribute or a layer was changed"),
    "activation": (replace_activation, "forward function must stay"),
}


@pytest.mark.parametrize(("change", "message"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_network_that_is_changed_after_the_last_step_is_found_and_no_step_is_lost(change, message, on_disk, tmp_path):
    net, (X, y) = Scaled(), data()
    optimizer, path = sgd(net), tmp_path / "run" if on_disk else None
    recorder, initial = epk.Recorder(net, optimizer, X, y, folder=path), flat(net)

    def loop():
        with recorder:
            for _ in range(2):
                make_step(recorder)
            change(net, initial)

    with pytest.raises(epk.StepMismatchError, match=f"{message}.* The 2 recorded steps are kept"):
        loop()
    kept = epk.load_trajectory(path, Scaled()) if on_disk else recorder.trajectory
    assert kept.num_steps == 2


def test_a_network_that_may_be_changed_after_the_recording():
    net, (X, y) = Scaled(), data()
    trajectory = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    average(net, trajectory.states[0])
    assert epk.reconstruct(trajectory, X[:2]).certified


class Keeping(Scaled):
    """Keeps its activations, which cannot be copied after a backward pass, and counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        self.kept = super().forward(x)
        return self.kept


def test_a_network_that_keeps_its_activations_is_no_false_alarm():
    net, (X, y) = Keeping(), data()
    net.inner[1].eval()
    modes = [module.training for module in net.modules()]
    assert epk.train(net, X, y, optimizer=sgd(net), steps=2).num_steps == 2
    assert [module.training for module in net.modules()] == modes


class Amplifying(nn.Module):
    """Amplifies rounding as deep networks do: normalised values are multiplied by a thousand."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)
        self.factor = 1.0

    def forward(self, x):
        return self.factor * self.b(torch.sin(1e3 * self.norm(self.a(x))))


def train_amplifying(change):
    torch.manual_seed(0)
    net, X = Amplifying(), torch.randn(20, 2)
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, torch.arange(20) % 3, unexplained=1.0) as recorder:
        optimizer.zero_grad()
        F.cross_entropy(net(X), torch.arange(20) % 3).backward()
        recorder.batch(None)
        optimizer.step()
        net.factor += change
    return recorder.trajectory


def test_amplified_rounding_is_no_changed_network():
    """Statistics are written out in another order of operations than torch's own; a tenth more is a change."""
    assert train_amplifying(0.0).num_steps == 1
    with pytest.raises(epk.StepMismatchError, match="forward function must stay"):
        train_amplifying(0.1)


class RootOfWeight(nn.Module):
    """Leaves its domain where weights are moved, as the fingerprint of a network moves them."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = mlp(), nn.Parameter(torch.full((3,), 0.01))

    def forward(self, x):
        return self.inner(x) * self.scale.sqrt()


def test_a_network_that_is_not_defined_everywhere_is_no_false_alarm():
    net, (X, y) = RootOfWeight().double(), data()
    assert epk.train(net, X, y, optimizer=sgd(net, 1e-3), steps=2).num_steps == 2
