"""The gradient, the last step and the network at the end are checked; loops that cannot be recorded are told why."""

import copy
from contextlib import nullcontext

import pytest
import torch
from captured_loops import Odd
from checked_networks import FAULTY, SOUND, Autocast, Base, SingleInside, SingleNorm, TopOneExperts
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from epk_gp.core.show import CertificateWarning
from loops import Net, data, flat, mlp, record, sgd
from stored_runs import step as make_step

STEPS = 4


def record_rows(wrong, dtype=torch.float64, rates=(0.1,) * STEPS, **options):
    """Record a loop with momentum; at the step `wrong` the network sees other rows."""
    net, (X, y), steps = mlp(dtype), data(dtype=dtype), iter(range(len(rates)))
    optimizer = sgd(net, momentum=0.9)
    change_rate = lambda step: optimizer.param_groups[0].update(lr=rates[step])  # noqa: E731
    call = lambda net, x: net(X[torch.arange(4) + wrong + 3] if next(steps) == wrong else x)  # noqa: E731
    batches = [torch.arange(4) + step for step in range(len(rates))]
    return record(net, optimizer, X, y, batches, before=change_rate, call=call, **options)


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float64, 0.0), (torch.float32, 0.0), (torch.float32, 1e-12)])
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


def test_check_every_checks_the_last_step_and_the_first_resumed_one_and_leaves_others_to_the_certificate(tmp_path):
    with pytest.raises(epk.StepMismatchError, match=f"step {STEPS - 1}: .*a backward hook at '2.bias'"):
        record_edited(wrong=STEPS - 1)
    recorder = record_edited(wrong=1)
    assert (recorder.num_steps, recorder.num_checked) == (STEPS, 2)
    with pytest.warns(CertificateWarning, match="step 1 differs"):
        assert not epk.reconstruct(recorder.trajectory, recorder.X).certified
    with pytest.raises(epk.StepMismatchError, match="step 1: .*rows that the network saw"):  # these at every step
        record_rows(1, check_every=1000)
    options = {"folder": tmp_path / "run", "resume": True}
    record_edited(None, 2, **options)
    with pytest.raises(epk.StepMismatchError, match="step 2: "):
        record_edited(0, 7, **options)


def scaled():
    """Keeps its activations, which cannot be copied after a backward pass, and counts its calls."""

    def forward(net, x):
        net.calls, net.kept = net.calls + 1, net.factor * net.inner(x)
        return net.kept

    return Net(forward, inner=mlp(), factor=1.0, calls=0)


def average(net, initial):
    """Load an average that is not on the way from the last weights to earlier ones, as EMA or SWA do."""
    nn.utils.vector_to_parameters((flat(net) + initial.roll(1)) / 2, net.parameters())


ENDS = {
    "another_dtype": (lambda net, _: net.float(), "must end the recording as it was trained, in torch.float64"),
    "averaged_weights": (average, "weights at the end of the recording .*EMA, SWA"),
    "missing_layer": (lambda net, _: net.inner.pop(2), "weights at the end of the recording"),
    "attribute": (lambda net, _: setattr(net, "factor", 1.0 + 1e-6),
        "forward function must stay .*an attribute or a layer was changed"),
    "activation": (lambda net, _: setattr(net.inner, "1", nn.ReLU()), "forward function must stay"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_network_that_is_changed_after_the_last_step_is_found_and_no_step_is_lost(change, message, on_disk, tmp_path):
    net, path = scaled(), tmp_path / "run" if on_disk else None
    recorder, initial = epk.Recorder(net, sgd(net), *data(), folder=path), flat(net)
    says = pytest.raises(epk.StepMismatchError, match=f"{message}.* The 2 recorded steps are kept")
    with says, recorder:
        for _ in range(2):
            make_step(recorder)
        change(net, initial)
    kept = epk.load_trajectory(path, scaled()) if on_disk else recorder.trajectory
    assert kept.num_steps == 2


def test_a_network_may_keep_its_activations_and_be_changed_after_the_recording():
    net, (X, y) = scaled(), data()
    net.inner[1].eval()
    modes = [module.training for module in net.modules()]
    trajectory = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    assert [module.training for module in net.modules()] == modes
    average(net, trajectory.states[0])
    with pytest.warns(UserWarning, match=r"your network is not the one that is explained .* Record further"):
        assert epk.reconstruct(trajectory, X[:2]).certified


def amplifying():
    """Amplifies rounding as deep networks do: normalised values are multiplied by a thousand."""
    forward = lambda net, x: net.factor * net.b(torch.sin(1e3 * net.norm(net.a(x))))  # noqa: E731
    return Net(forward, a=nn.Linear(2, 64), norm=nn.BatchNorm1d(64), b=nn.Linear(64, 3), factor=1.0)


def test_amplified_rounding_is_no_changed_network():
    """Statistics are written out in another order of operations than torch's own; a tenth more is a change."""
    for change in (0.0, 0.1):
        torch.manual_seed(0)
        net, X, y = amplifying(), torch.randn(20, 2), torch.arange(20) % 3
        recorder = epk.Recorder(net, sgd(net), X, y, unexplained=1.0)
        says = "forward function must stay"
        with pytest.raises(epk.StepMismatchError, match=says) if change else nullcontext(), recorder:
            make_step(recorder)
            net.factor += change


def test_a_network_that_is_not_defined_everywhere_is_no_false_alarm():
    """It leaves its domain where weights are moved, as the fingerprint of a network moves them."""
    scale = nn.Parameter(torch.full((3,), 0.01))
    net, (X, y) = Net(lambda net, x: net.inner(x) * net.scale.sqrt(), inner=mlp(), scale=scale).double(), data()
    assert epk.train(net, X, y, optimizer=sgd(net, 1e-3), steps=2).num_steps == 2


def mixing(change):
    """Mixes rows or draws random numbers, in evaluation mode too."""
    return Net(lambda net, x: net.inner(change(x)), inner=mlp())


NETWORKS = {
    "no_running_statistics": (lambda: nn.Sequential(mlp(), nn.BatchNorm1d(3, track_running_stats=False)).eval(),
        r"'1' \(BatchNorm1d\) uses the statistics of the batch"),
    "zero_last_layer": (lambda: zero_final_layer(mixing(lambda x: x - x.mean(0))),
        "must depend on its own input alone"),
    "dropout": (lambda: mixing(lambda x: F.dropout(x, 0.3)), "deterministic network: two evaluations .* differ"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), NETWORKS.values(), ids=NETWORKS.keys())
def test_a_random_or_coupled_network_is_refused(make, message):
    net, (X, y) = make().double(), data()
    with pytest.raises(ValueError, match=message):
        epk.Recorder(net, sgd(net), X, y)


def test_a_second_output_in_training_mode_is_named():
    net, (X, y) = Odd("auxiliary").double(), data()
    with pytest.raises(epk.StepMismatchError, match="step 0: .* returns tuple in training mode. Say with output="):
        record(net, sgd(net), X, y, [None], value=lambda z, y: F.cross_entropy(z[0], y) + F.cross_entropy(z[1], y))


@pytest.mark.parametrize("reduce", [torch.clone, torch.mean], ids=["rows", "mean"])
def test_a_loss_that_broadcasts_targets_is_refused(reduce):
    net, (X, y) = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double(), data()
    loss = epk.PerSampleLoss(lambda z, t: reduce((z - t).square()))
    with pytest.raises(ValueError, match=r"let it compare outputs\[:, 0\] with them"):
        epk.Recorder(net, sgd(net), X, y.double(), loss=loss)


class Bag(nn.Module):
    """The mean of words, under dropout."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.score = nn.Embedding(9, 4), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.score((self.drop(self.embed(ids)) * mask[..., None]).sum(dim=1))


def test_rows_that_were_gathered_from_two_processes_are_named():
    cause = r"no call .* but one on inputs of shape \(4, 6\), \(4, 6\): .*announce the rows"
    X = {"ids": torch.randint(1, 9, (24, 6)), "mask": torch.ones(24, 6).double()}
    y, net = torch.arange(24) % 3, Bag().double()
    own_rows = lambda net, x: net(x["ids"][:4], x["mask"][:4])  # noqa: E731
    with pytest.raises(epk.StepMismatchError, match=cause):
        record(net, sgd(net), X, y, [torch.arange(8)], call=own_rows, value=lambda z, t: F.cross_entropy(z, t[:4]))


def test_a_language_model_is_told_to_shift_its_labels():
    ids = torch.randint(0, 7, (12, 5))
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)

    def train(y):
        def value(z, t):
            t = t[:, :4] if y is shifted else t[:, 1:]
            return F.cross_entropy(z["logits"][:, :4].mT, t)

        net = Net(lambda net, ids: {"logits": net.out(torch.tanh(net.embed(ids)))}, embed=nn.Embedding(7, 4),
                  out=nn.Linear(4, 7)).double()  # fmt: skip
        output = lambda returned: returned["logits"][:, -1]  # noqa: E731
        return record(net, sgd(net), ids, y, torch.arange(12).split(4), output=output, value=value)

    with pytest.raises(epk.StepMismatchError, match=r"label of the next one, as causal language models do: pass"):
        train(ids)
    assert epk.attribute(train(shifted).trajectory, ids[:2]).certified


def test_labels_of_positions_need_scores_of_positions():
    X, net = data()[0], nn.Linear(4, 3).double()
    with pytest.raises(ValueError, match=r"got \(10, 5\). Several need scores \(n, T, V\)"):
        epk.Recorder(net, sgd(net), X, torch.zeros(10, 5, dtype=torch.int64))


NUMBERS = {
    "the network was called with further arguments": lambda net: {"call": lambda net, x: net(x, scale=1.5)},
    "something else in it changes": lambda net: {"before": lambda step: net.table.__setitem__(0, 1.0 + step)},
}


@pytest.mark.parametrize("cause", NUMBERS)
def test_numbers_that_the_network_gets_beside_the_rows_are_named(cause):
    net = Net(lambda net, x, scale=1.0: net.table[0] * net.inner(x) * scale, inner=mlp(), table=[1.0])
    X, y = torch.randn(12, 4).double(), torch.arange(12) % 3
    with pytest.raises(epk.StepMismatchError, match=f"Likely cause: .*{cause}"):
        record(net, sgd(net), X, y, torch.randperm(12).split(6), **NUMBERS[cause](net))


# The probe: networks whose gradients do not integrate to their outputs are named, others are not.


def small_steps(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-5)


def rate(lr, **options):
    return lambda net: sgd(net, lr, **options)


OPTIMIZERS = {"float64": (torch.float64, sgd), "float32": (torch.float32, sgd), "small": (torch.float32, small_steps)}


def record_run(make_net, dtype=torch.float64, make_optimizer=sgd, steps=1):
    torch.manual_seed(0)
    net = make_net().to(dtype)
    X, y = torch.randn(24, 4, dtype=dtype), torch.randint(3, (24,))
    state = torch.get_rng_state()
    trajectory = epk.train(net, X, y, optimizer=make_optimizer(net), steps=steps)
    assert torch.equal(torch.get_rng_state(), state)
    return trajectory


@pytest.mark.parametrize(("dtype", "make_optimizer"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make_net", FAULTY.values(), ids=FAULTY.keys())
def test_a_derivative_that_is_none_is_named(make_net, dtype, make_optimizer):
    with pytest.warns(CertificateWarning, match="derivative is not the derivative of its outputs: .* differ by"):
        record_run(make_net, dtype, make_optimizer)


class Slight(Base):
    """A branch without a gradient that adds little."""

    def forward(self, x):
        h = self.hidden(x)
        return self.c(self.activation(self.b(h)) + 0.05 * h.detach())


SINGLE = r"^step 0: the network computes in float32 inside.*net\.float\(\).*certified if .* float32's rounding\.$"
OTHERS = {
    "less_precision": ("less precision than its weights have: its outputs are off by", Autocast, torch.float32),
    "float32_inside": (SINGLE, SingleNorm, torch.float64),
    "float32_inside_small": (SINGLE, SingleNorm, torch.float64, small_steps),
    "less_than_a_percent": (r"is not the derivative of its outputs: .* differ by 0\.\d%", Slight),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_wrong_with_the_derivative_is_named(name):
    message, *arguments = OTHERS[name]
    with pytest.warns(CertificateWarning, match=message):
        record_run(*arguments)


def test_outputs_that_jump_are_left_to_the_results():
    """Inputs change their expert in the first step."""
    run = record_run(TopOneExperts, torch.float64, rate(2.0))
    with pytest.warns(CertificateWarning, match="INCONSISTENT_DERIVATIVE"):
        assert not epk.attribute(run, run.inputs[12:18], head="logits").certified


class Late(FAULTY["stop_gradient"]):
    """The last layer is zero and moves alone in step 0: what lies below has no effect yet."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.c.weight)


@pytest.mark.parametrize(("make_net", "step"), [(FAULTY["stop_gradient"], 0), (Late, 3)])
def test_a_run_is_warned_of_once_as_soon_as_the_fault_shows_and_recorded_all_the_same(make_net, step):
    with pytest.warns(CertificateWarning, match=f"^step {step}: ") as caught:
        trajectory = record_run(make_net, make_optimizer=rate(1.0), steps=6)
    assert len(caught) == 1
    assert trajectory.num_steps == 6


def centred():
    """A network less its initial self: its outputs begin at 0, and their rounding is that of its terms."""
    net = Base()
    initial = copy.deepcopy(net).requires_grad_(False)
    return Net(lambda net, x: net.inner(x) - net.initial(x), inner=net, initial=initial)


def dead_outputs():
    """Outputs and derivatives are 0; weight decay moves the weights."""
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    nn.init.constant_(net[0].bias, -100.0)
    return net


class _Square(torch.autograd.Function):
    """Its backward pass is written for float32."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * (g @ torch.eye(g.shape[1])) * ctx.saved_tensors[0]


class SingleBackward(Base):
    def forward(self, x):
        return self.c(_Square.apply(self.hidden(x)))


QUIET = [
    *((net, *steps) for net in SOUND.values() for steps in OPTIMIZERS.values()),
    (centred, torch.float64, rate(1e-9)),
    (centred, torch.float32, rate(1e-5)),
    *((dead_outputs, dtype, rate(0.1, weight_decay=0.01)) for dtype in (torch.float64, torch.float32)),
    (Autocast, torch.float64, sgd),  # autocast leaves float64 alone
    (SingleInside, torch.float32, sgd),
    (SingleBackward, torch.float32, sgd),
    (TopOneExperts, torch.float64, small_steps),
]
IS_SLOW = [pytest.mark.slow if 0 < number < len(QUIET) - 8 else () for number in range(len(QUIET))]


@pytest.mark.parametrize(
    ("make_net", "dtype", "make_optimizer"),
    [pytest.param(*case, marks=marks) for case, marks in zip(QUIET, IS_SLOW, strict=True)],
)
def test_a_sound_network_is_no_false_alarm(make_net, dtype, make_optimizer):
    """Warnings are errors in this suite. Outputs may cancel or be dead, a backward pass may be for float32 alone."""
    assert record_run(make_net, dtype, make_optimizer, steps=4).num_steps == 4
