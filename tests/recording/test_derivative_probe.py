"""The probe at recording: networks whose gradients do not integrate to their outputs are named, others are not."""

import copy

import pytest
import torch
from checked_networks import FAULTY, SOUND, Autocast, Base, SingleInside, SingleNorm, TopOneExperts
from torch import nn

import epk_gp as epk
from epk_gp.core.show import CertificateWarning
from loops import Net, sgd


def small_steps(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-5)


def rate(lr, **options):
    return lambda net: sgd(net, lr, **options)


STEPS = {"float64": (torch.float64, sgd), "float32": (torch.float32, sgd), "small": (torch.float32, small_steps)}


def record(make_net, dtype=torch.float64, make_optimizer=sgd, steps=1):
    torch.manual_seed(0)
    net = make_net().to(dtype)
    X, y = torch.randn(24, 4, dtype=dtype), torch.randint(3, (24,))
    state = torch.get_rng_state()
    trajectory = epk.train(net, X, y, optimizer=make_optimizer(net), steps=steps)
    assert torch.equal(torch.get_rng_state(), state)
    return trajectory


@pytest.mark.parametrize(("dtype", "make_optimizer"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("make_net", FAULTY.values(), ids=FAULTY.keys())
def test_a_derivative_that_is_none_is_named(make_net, dtype, make_optimizer):
    with pytest.warns(CertificateWarning, match="derivative is not the derivative of its outputs: .* differ by"):
        record(make_net, dtype, make_optimizer)


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
        record(*arguments)


def test_outputs_that_jump_are_left_to_the_results():
    """Inputs change their expert in the first step."""
    run = record(TopOneExperts, torch.float64, rate(2.0))
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
        trajectory = record(make_net, make_optimizer=rate(1.0), steps=6)
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
    *((net, *steps) for net in SOUND.values() for steps in STEPS.values()),
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
    assert record(make_net, dtype, make_optimizer, steps=4).num_steps == 4
