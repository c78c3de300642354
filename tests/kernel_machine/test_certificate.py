"""One certificate: it holds for sound runs, and sees what the quadrature's residual alone does not."""

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from checked_networks import FAULTY, Base, SingleNorm
from language_models import LENGTH, WORDS, llama_like
from torch import nn
from torch.nn import functional as F
from weighted_loops import cross_entropy, record

import epk_gp as epk
from epk_gp.core.model import functionalize
from epk_gp.core.replayed_steps import RunReplay, replayed_steps
from epk_gp.kernel_machine import certificate
from epk_gp.kernel_machine.certificate import StepMismatches, larger
from loops import data, mlp

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def trained(make_net=mlp, dtype=torch.float64, optimizer="sgd", lr=None, steps=STEPS):
    """Record batches of 4, the first and last gradient recomputed."""
    net, (X, y) = make_net().to(dtype), data(dtype=dtype)
    optimizer = OPTIMIZERS[optimizer](net.parameters())
    optimizer.param_groups[0].update({} if lr is None else {"lr": lr})
    return record(net, optimizer, X, y, [torch.arange(4) + step for step in range(steps)], check_every=1000)


def moved(run, step, share):
    """Move the states behind a step by a share of it, as a gradient that is as much too large would."""
    way = run.states[step + 1] - run.states[step]
    states = tuple(w + share * way if s > step else w for s, w in enumerate(run.states))
    return replace(run, states=states, live=None)


def another_learning_rate(run):
    updates = [replace(update, lr=1.0001 * update.lr) if s == 2 else update for s, update in enumerate(run.updates)]
    return replace(run, updates=tuple(updates))


FAULTS = {
    "wrong_factor": lambda run: moved(run, 2, 0.5),
    "gradient_off_by_a_billionth": lambda run: moved(run, 1, 1e-9),
    "another_activation": lambda run: replace(run, model=functionalize(mlp(activation=nn.Sigmoid))),
    "another_loss": lambda run: replace(run, loss=epk.CrossEntropy(label_smoothing=1e-4)),
    "another_learning_rate": another_learning_rate,
    "other_targets": lambda run: replace(run, targets=run.targets.roll(1)),
}


class SingleData(Base):
    """Rounds its inputs to float32, and nothing that depends on weights."""

    def forward(self, x):
        return super().forward(x.float().to(x.dtype))


def in_float64(name):
    torch.manual_seed(0)
    if name == "Llama":
        words = torch.randint(WORDS, (8, LENGTH))
        net = llama_like("Llama", "eager").double()
        return epk.train(net, words, torch.arange(8) % 3, optimizer=OPTIMIZERS["sgd"](net.parameters()), steps=STEPS)
    return trained({"single norm": SingleNorm, "single data": SingleData}[name])


@pytest.mark.filterwarnings("ignore:step 0. the network computes in float32:epk_gp.core.show.CertificateWarning")
@pytest.mark.parametrize("name", ["Llama", "single norm", "single data"])
def test_a_network_that_casts_to_float32_inside_ends_and_is_certified_to_its_rounding(name):
    """Refinement below that rounding would not end."""
    run = in_float64(name)
    straight, layerwise = (epk.attribute(run, run.inputs[:2], path=path) for path in (None, epk.layerwise()))
    whole, is_exact = epk.reconstruct(run, run.inputs[:2]), name == "single data"
    for parts in (straight, layerwise, whole):
        assert parts.certified
        assert parts.evaluations <= 24
        assert ("precision" in repr(parts), "float32" in parts.precision) == (not is_exact, not is_exact)
        assert parts.max_error <= (1e-12 if is_exact else 1e-5)
        assert (parts.error_tolerance < 1e-9) == is_exact


class WithEmpty(Base):
    """Makes an empty tensor in float32 that requires gradients, as the activation checkpointing of torch 2.11 does."""

    def forward(self, x):
        torch.empty(0, requires_grad=True)
        return super().forward(x)


def test_an_empty_tensor_in_float32_rounds_nothing():
    run = trained(WithEmpty)
    parts = epk.attribute(run, run.inputs[:2])
    assert (parts.certified, parts.precision) == (True, "")
    assert parts.error_tolerance < 1e-9


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sound_runs_are_certified(optimizer, dtype):
    run = trained(dtype=dtype, optimizer=optimizer)
    for X in (run.inputs[:3], run.inputs[:3].double()):
        result, parts = epk.reconstruct(run, X), epk.attribute(run, X)
        assert result.certified
        assert result.outputs.dtype == X.dtype
        assert 0 <= result.residual_ratio <= 1
        assert 0 <= result.mismatch_ratio <= 1
        assert dtype == torch.float64 or 0 < result.max_step_mismatch < 1e-6
        assert result.max_error <= (1e-11 if X.dtype == dtype == torch.float64 else 1e-5)
        assert result.max_error <= result.error_tolerance
        assert parts.certified
        assert parts.mismatch_ratio == pytest.approx(result.mismatch_ratio)


@pytest.mark.parametrize("make_fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_step_that_is_not_the_stated_one_is_not_certified_although_the_quadrature_is_exact(make_fault):
    faulty = make_fault(trained())
    for call, name in ((epk.reconstruct, "reconstruction"), (epk.attribute, "attribution")):
        with pytest.warns(epk.CertificateWarning, match=rf"{name} is not certified: step \d differs from the step"):
            result = call(faulty, faulty.inputs[:3])
        assert not result.certified
        assert result.max_residual < 1e-12  # the residual alone sees nothing
        assert result.mismatch_ratio > 10


def test_two_faults_that_cancel_in_the_sum_are_found():
    """Steps 1 and 2 have each other's batches: the weights end nearly where they would, the shares are others'."""
    run = trained(lr=1e-5)
    steps = list(run.steps)
    steps[1], steps[2] = replace(steps[1], batch=steps[2].batch), replace(steps[2], batch=steps[1].batch)
    with pytest.warns(epk.CertificateWarning, match=r"attribution is not certified: step [12] differs"):
        parts = epk.attribute(replace(run, steps=tuple(steps)), run.inputs[:2])
    assert parts.max_error <= parts.error_tolerance  # the sum sees nothing


@pytest.mark.mostly_slow
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_large_steps_are_certified(activation):
    """Every interval may leave its share of the tolerance."""
    run = trained(lambda: mlp(activation=activation), lr=10.0)
    result = epk.reconstruct(run, run.inputs[:3])
    assert result.max_error < 1e-10
    assert result.certified
    assert epk.attribute(run, run.inputs[:3]).certified


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("make_net", FAULTY.values(), ids=FAULTY.keys())
def test_a_derivative_that_is_none_ends_soon_and_is_not_certified(make_net, dtype):
    with pytest.warns(epk.CertificateWarning, match="derivative is not the derivative of its outputs"):
        run = trained(make_net, dtype, steps=2)
    with pytest.warns(epk.CertificateWarning, match="reconstruction is not certified: the quadrature of a step leaves"):
        result = epk.reconstruct(run, run.inputs[:1])
    assert not result.certified
    assert result.evaluations < 2000
    with pytest.warns(epk.CertificateWarning, match="attribution is not certified"):
        assert not epk.attribute(run, run.inputs[:1]).certified


def test_a_fixed_rule_is_certified_where_it_is_exact():
    run = trained()
    assert epk.reconstruct(run, run.inputs[:3], rule=epk.gauss_legendre(8)).certified
    for call in (epk.reconstruct, epk.attribute):
        with pytest.warns(epk.CertificateWarning, match=r"a fixed rule: epk_gp.adaptive\(\)"):
            assert not call(run, run.inputs[:3], rule=epk.QuadratureRule.left_riemann(10)).certified


def test_the_larger_of_two_numbers_keeps_nan():
    assert (larger(1.0, 2.0), larger(3.0, 2.0)) == (2.0, 3.0)
    for pair in ((1.0, float("nan")), (float("nan"), 1.0)):
        assert larger(*pair) != larger(*pair)


# A bias in front of BatchNorm has a gradient of pure rounding, which Adam makes steps of


def mixed(net, X, y):
    z = net(0.7 * X + 0.3 * X.flip(0))
    return 0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, y.flip(0))


def in_bfloat16(net, X, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(net(X), y)


@cache
def amplified(dtype, eps=1e-8, *, dropout=0.0, loss=cross_entropy):
    torch.manual_seed(0)
    X, y = torch.randn(18, 5, dtype=dtype), torch.arange(18) % 3
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)]
    net = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=eps)
    return record(net, optimizer, X, y, torch.arange(18).repeat(2).split(6), loss=loss)


def share_of_rounding(trajectory, X, tolerance):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epk.CertificateWarning)
        parts, machine = epk.attribute(trajectory, X, head="logits"), epk.reconstruct(trajectory, X, head="logits")
    assert machine.certified
    change = (parts.network - parts.initial).norm()
    share = float(parts.unexplained.abs().sum() / (parts.network - parts.initial).abs().sum())
    assert parts.certified == (share <= 0.01)
    assert parts.certified or f"{share:.1%} of the change of the outputs is `unexplained`" in parts.findings[0]
    assert (parts.total - parts.network).norm() < tolerance * change
    assert (machine.outputs - machine.network).norm() < (1e-4 if trajectory.dtype == torch.float32 else 1e-11) * change
    return float(parts.unexplained.norm() / change)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)])
def test_a_run_in_float32_is_explained_in_either_precision(dropout, dtype, tolerance):
    run = amplified(torch.float32, dropout=dropout)
    assert share_of_rounding(run, run.inputs[:2].to(dtype), tolerance) > 1e-4  # the rounding, as a term


def test_losses_that_are_rounded_otherwise_are_explained_in_float64():
    """Mixed targets follow from the gradient, and round differently from the loop's two losses."""
    run = amplified(torch.float64, loss=mixed, eps=1e-10)
    assert 1e-12 < share_of_rounding(run, run.inputs[:2], 1e-11) < 1e-5


def test_rounding_of_one_parameter_explains_no_other():
    """Adam's steps of that bias are as large as a fault in the others, which attribution did not see in float32."""
    run = amplified(torch.float32, dropout=0.2)
    steps = list(run.steps)
    forward = replace(steps[2].passes[0], random_state=steps[3].passes[0].random_state)
    steps[2] = replace(steps[2], passes=(forward,))
    for call in (epk.attribute, epk.reconstruct):
        with pytest.warns(epk.CertificateWarning, match="step 2 differs from the step"):
            assert not call(replace(run, steps=tuple(steps)), run.inputs[:2]).certified


class Shifted(nn.Module):
    """A shift of all logits, whose gradient is rounding; of rows with a mark, of one logit."""

    def __init__(self, size):
        super().__init__()
        self.body, self.shift = mlp(), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        shift = (x[:, 1 : 1 + len(self.shift)] * self.shift).sum(dim=1, keepdim=True)
        return self.body(x) + shift * torch.where(x[:, :1] > 0, torch.eye(3)[0], torch.ones(3)).to(x)


def twice(net, X, y):
    """Two passes, which the replay makes in one: gradients are rounded otherwise."""
    return 0.37 * F.cross_entropy(net(X), y) + 0.63 * F.cross_entropy(net(X.flip(0)), y.flip(0))


def mismatches_of(run):
    model, mismatches = run.model_for(run.inputs), StepMismatches()
    for replayed in replayed_steps(RunReplay(run, model, run.inputs)):
        mismatches.add(run, model, replayed)
    return mismatches


@pytest.mark.parametrize("size", [3, 1])  # of the first parameter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_that_was_amplified_in_earlier_steps_explains_no_fault_of_a_later_one(dtype, size, monkeypatch):
    """Step 5 is half as large again as its gradient makes it, which is as much as rounding made of the steps before."""
    X, y = data(24, dtype)
    X[:, 0] = torch.where(torch.arange(24) < 20, -1.0, 1.0)
    net = Shifted(size).to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-30)
    run, measured = record(net, optimizer, X, y, torch.arange(24).split(4), loss=twice), []
    measure = certificate._moved_passes
    monkeypatch.setattr(certificate, "_moved_passes", lambda step, dtype: measured.append(step) or measure(step, dtype))
    assert mismatches_of(run).ratio <= 1
    assert len(measured) <= 2  # of 6 steps: it stands for the later ones
    end = run.states[-1].clone()
    end[:size] += 0.5 * (end[:size] - run.states[-2][:size])
    mismatches = mismatches_of(replace(run, states=(*run.states[:-1], end), live=None))
    assert mismatches.ratio > 100
    assert mismatches.worst_step == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_compared_in_the_precision_that_moved_them(dtype):
    """Under autocast BatchNorm's statistics carry bfloat16's rounding of the layers before it."""
    X, y = torch.randn(12, 1, 5, 5), torch.arange(12) % 3
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = record(net, optimizer, X, y, torch.arange(12).split(6), loss=in_bfloat16, unexplained=0.2)
    for call in (epk.attribute, epk.reconstruct):
        assert call(run, X[:2].to(dtype)).certified


class NoisyBackward(torch.autograd.Function):
    """As of an attention kernel whose backward pass adds in another order each time, in few digits."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + 0.01 * torch.randn_like(g))


class Noisy(Base):
    def hidden(self, x):
        return NoisyBackward.apply(super().hidden(x))


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")
def test_a_backward_pass_that_is_not_deterministic_is_not_certified():
    """Measured rounding of a step holds its noise, so that the steps are no finding; the sum is."""
    run = trained(Noisy)
    with pytest.warns(epk.CertificateWarning, match="the attribution is not certified: .*the sum misses"):
        assert not epk.attribute(run, run.inputs[:2], path=epk.layerwise()).certified
