"""The probe at recording: networks whose gradients do not integrate to their outputs are named, others are not."""

import copy

import pytest
import torch
from checked_networks import FAULTY, SOUND, Autocast, Base, SingleInside, TopOneExperts
from torch import nn

import epk_gp as epk
from epk_gp.core.show import CertificateWarning

DTYPES = {"float64": torch.float64, "float32": torch.float32}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "small_steps": lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
}


def record(make_net, dtype=torch.float64, make_optimizer=OPTIMIZERS["sgd"], steps=1, seed=0):
    torch.manual_seed(seed)
    net = make_net().to(dtype)
    X, y = torch.randn(24, 4, dtype=dtype), torch.randint(3, (24,))
    return epk.train(net, X, y, optimizer=make_optimizer(net.parameters()), steps=steps)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("make_net", FAULTY.values(), ids=FAULTY.keys())
def test_a_derivative_that_is_none_is_named(make_net, dtype, make_optimizer):
    with pytest.warns(CertificateWarning, match="derivative is not the derivative of its outputs: .* differ by"):
        record(make_net, dtype, make_optimizer)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("make_net", SOUND.values(), ids=SOUND.keys())
def test_a_sound_network_is_no_false_alarm(make_net, dtype, make_optimizer):
    """Warnings are errors in this suite."""
    assert record(make_net, dtype, make_optimizer, steps=4).num_steps == 4


def test_reduced_precision_inside_is_named():
    with pytest.warns(CertificateWarning, match="less precision than its weights have: its outputs are off by"):
        record(Autocast, torch.float32)
    assert record(Autocast, torch.float64).num_steps == 1  # autocast leaves float64 alone


def test_computing_in_float32_is_no_reduced_precision_for_float32_weights():
    assert record(SingleInside, torch.float32).num_steps == 1


def test_outputs_that_jump_along_a_step_are_named():
    """Seed and learning rate are such that inputs change their expert in the first step; others need not."""
    with pytest.warns(CertificateWarning, match="outputs jump by .* along the step .hard routing"):
        record(TopOneExperts, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=2.0))
    assert record(TopOneExperts, make_optimizer=OPTIMIZERS["small_steps"]).num_steps == 1


def test_a_run_is_warned_of_once_and_recorded_all_the_same():
    with pytest.warns(CertificateWarning) as caught:
        trajectory = record(FAULTY["stop_gradient"], steps=6)
    assert len(caught) == 1
    assert trajectory.num_steps == 6


def test_a_fault_that_the_first_step_cannot_show_is_named_later():
    """The last layer is zero and moves alone in step 0: what lies below has no effect yet."""

    class Late(FAULTY["stop_gradient"]):
        def __init__(self):
            super().__init__()
            nn.init.zeros_(self.c.weight)

    with pytest.warns(CertificateWarning, match="^step 3: "):
        record(Late, make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), steps=5)


class Centred(nn.Module):
    """A network less its initial self: its outputs begin at 0, and their rounding is that of its terms."""

    def __init__(self):
        super().__init__()
        self.net = Base()
        self.initial = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        return self.net(x) - self.initial(x)


class DeadOutputs(nn.Module):
    """Outputs and derivatives are 0; weight decay moves the weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.constant_(self.linear.bias, -100.0)

    def forward(self, x):
        return torch.relu(self.linear(x))


class _Square(torch.autograd.Function):
    """Its backward pass is written for float32."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * (g @ torch.eye(g.shape[1])) * x


class SingleBackward(Base):
    def forward(self, x):
        return self.c(_Square.apply(self.hidden(x)))


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float64, 1e-7), (torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_outputs_that_cancel_are_no_false_alarm(dtype, rate):
    def small(parameters):
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=rate)

    assert record(Centred, dtype, small, steps=4).num_steps == 4


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_dead_outputs_are_no_false_alarm(dtype):
    def decaying(parameters):
        return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)

    assert record(DeadOutputs, dtype, decaying, steps=2).num_steps == 2


def test_a_backward_pass_for_float32_alone_does_not_stop_the_recording():
    assert record(SingleBackward, torch.float32, steps=2).num_steps == 2


def test_the_probe_leaves_the_random_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    record(Base)
    torch.manual_seed(3)
    net = Base().double()
    state = torch.get_rng_state()
    X, y = torch.ones(2, 4, dtype=torch.float64), torch.tensor([0, 1])
    epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), expected)
