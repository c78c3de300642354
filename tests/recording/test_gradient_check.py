"""The gradient is checked itself; so are the last step, and the network when the recording ends."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.core.show import CertificateWarning
from loops import data, flat, mlp, record, sgd
from stored_runs import step as make_step

STEPS = 4


def record_rows(wrong, dtype=torch.float64, rates=(0.1,) * STEPS, **options):
    """Record a loop with momentum; at the step `wrong` the network sees other rows."""
    net, (X, y) = mlp(dtype), data(dtype=dtype)
    optimizer, step = sgd(net, momentum=0.9), [0]

    def before(index):
        step[0], optimizer.param_groups[0]["lr"] = index, rates[index]

    def call(net, x):
        return net(X[torch.arange(4) + step[0] + 3] if step[0] == wrong else x)

    batches = [torch.arange(4) + index for index in range(len(rates))]
    return record(net, optimizer, X, y, batches, before=before, call=call, **options)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(torch.float64, 0.0), (torch.float32, 0.0), (torch.float32, 1e-12)],
    ids=["float64", "float32", "below_rounding"],
)
def test_a_step_too_small_to_be_seen_needs_the_right_gradient_all_the_same(dtype, rate):
    """A warm-up starts at 0; a wrong first batch would stay in the momentum and move every later step."""
    rates = (rate, 0.1, 0.1, 0.1)
    assert record_rows(None, dtype, rates).num_steps == 4
    with pytest.raises(epk.StepMismatchError, match="step 0: .*must get the indices of the rows that the network saw"):
        record_rows(0, dtype, rates)


def record_edited(wrong, num_steps=STEPS, **options):
    """Record a loop that edits its gradient inside backward() in one of its steps, and check few steps."""
    net, (X, y), steps = mlp(), data(), iter(range(num_steps))
    optimizer = sgd(net)
    net[2].bias.register_hook(lambda gradient: gradient + (0.1 if next(steps) == wrong else 0.0))
    return record(net, optimizer, X, y, [None] * num_steps, check_every=1000, **options)


def test_check_every_checks_the_last_step_and_leaves_one_between_to_the_certificate():
    with pytest.raises(epk.StepMismatchError, match=f"step {STEPS - 1}: .*a backward hook at '2.bias'"):
        record_edited(wrong=STEPS - 1)
    recorder = record_edited(wrong=1)
    assert (recorder.num_steps, recorder.num_checked) == (STEPS, 2)
    with pytest.warns(CertificateWarning, match="step 1 differs"):
        assert not epk.reconstruct(recorder.trajectory, recorder.X).certified
    with pytest.raises(epk.StepMismatchError, match="step 1: .*rows that the network saw"):  # these at every step
        record_rows(1, check_every=1000)


def test_check_every_checks_the_first_step_of_a_resumed_run(tmp_path):
    options = {"folder": tmp_path / "run", "resume": True}
    record_edited(None, 2, **options)
    with pytest.raises(epk.StepMismatchError, match="step 2: "):
        record_edited(0, 7, **options)


class Scaled(nn.Module):
    """Keeps its activations, which cannot be copied after a backward pass, and counts its calls."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.inner, self.factor = mlp(), 1.0

    def forward(self, x):
        self.calls += 1
        self.kept = self.factor * self.inner(x)
        return self.kept


def average(net, initial):
    """Load an average that is not on the way from the last weights to earlier ones, as EMA or SWA do."""
    nn.utils.vector_to_parameters((flat(net) + initial.roll(1)) / 2, net.parameters())


ENDS = {
    "another_dtype": (lambda net, _: net.float(), "must end the recording as it was trained, in torch.float64"),
    "averaged_weights": (average, "weights at the end of the recording .*EMA, SWA"),
    "missing_layer": (lambda net, _: net.inner.pop(2), "weights at the end of the recording"),
    "attribute": (
        lambda net, _: setattr(net, "factor", 1.0 + 1e-6),
        "forward function must stay .*an attribute or a layer was changed",
    ),
    "activation": (lambda net, _: setattr(net.inner, "1", nn.ReLU()), "forward function must stay"),
}


@pytest.mark.parametrize(("change", "message"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_network_that_is_changed_after_the_last_step_is_found_and_no_step_is_lost(change, message, on_disk, tmp_path):
    net, path = Scaled(), tmp_path / "run" if on_disk else None
    recorder, initial = epk.Recorder(net, sgd(net), *data(), folder=path), flat(net)

    def loop():
        with recorder:
            for _ in range(2):
                make_step(recorder)
            change(net, initial)

    with pytest.raises(epk.StepMismatchError, match=f"{message}.* The 2 recorded steps are kept"):
        loop()
    kept = epk.load_trajectory(path, Scaled()) if on_disk else recorder.trajectory
    assert kept.num_steps == 2


def test_a_network_may_keep_its_activations_and_be_changed_after_the_recording():
    net, (X, y) = Scaled(), data()
    net.inner[1].eval()
    modes = [module.training for module in net.modules()]
    trajectory = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    assert [module.training for module in net.modules()] == modes
    average(net, trajectory.states[0])
    with pytest.warns(UserWarning, match=r"your network is not the one that is explained .* Record further"):
        assert epk.reconstruct(trajectory, X[:2]).certified


class Amplifying(nn.Module):
    """Amplifies rounding as deep networks do: normalised values are multiplied by a thousand."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)
        self.factor = 1.0

    def forward(self, x):
        return self.factor * self.b(torch.sin(1e3 * self.norm(self.a(x))))


def test_amplified_rounding_is_no_changed_network():
    """Statistics are written out in another order of operations than torch's own; a tenth more is a change."""
    for change in (0.0, 0.1):
        torch.manual_seed(0)
        net, X, y = Amplifying(), torch.randn(20, 2), torch.arange(20) % 3
        recorder = epk.Recorder(net, sgd(net), X, y, unexplained=1.0)
        says = "forward function must stay"
        with pytest.raises(epk.StepMismatchError, match=says) if change else nullcontext(), recorder:
            make_step(recorder)
            net.factor += change


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
