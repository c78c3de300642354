"""The update rule of every optimizer of torch: its step, to rounding; every run is a kernel machine."""

import re
from pathlib import Path

import pytest
import torch
from optimizer_cases import CASES, OF_TORCH, OPTIONS, batches, newton_schulz, optimizer_for, problem, recorded
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.losses import NegativeLogLikelihood
from epk_gp.kernel_machine.reconstruct import single_machine
from epk_gp.optimizers.torch_rules import (
    RULES,
    as_optimizers,
    learning_rate,
    momentum_before,
    rule_for,
)
from epk_gp.optimizers.update_rules import (
    LinearStep,
    UpdateRule,
    predict_step,
    stack_coefficients,
    validate_unexplained,
)
from helpers import assert_close, refusal

PAGE = Path(__file__).parents[2] / "docs" / "capabilities" / "optimizers.md"
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


def largest_relative_error(run, gradients) -> float:
    """The largest difference between a predicted and a recorded step, relative to the largest change of a weight."""
    m, worst = torch.zeros_like(run.states[0]), 0.0
    for s, g in enumerate(gradients):
        d, m = predict_step(run.updates[s], run.model.sizes, run.states[s], g, m)
        recorded_step = run.states[s + 1] - run.states[s]
        worst = max(worst, float((d - recorded_step).abs().max() / recorded_step.abs().max()))
    return worst


@pytest.mark.parametrize("name", OF_TORCH)
def test_every_optimizer_of_torch_is_exact_or_unexplained_or_refused(name):
    kind = OF_TORCH[name]
    assert (kind in RULES) != (name == "LBFGS"), f"{name} is neither exact, nor unexplained, nor refused"
    assert name == "LBFGS" or name in OPTIONS, f"{name} is not tested"


def test_the_page_s_table_says_what_each_optimizer_of_torch_is():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text(), flags=re.MULTILINE)
    found = {}
    for name, kind in OF_TORCH.items():
        if name == "LBFGS":
            found[name] = "refused"
        else:
            found[name] = "exact with `unexplained`" if RULES[kind].unexplained else "exact"
    stated = dict(rows)
    assert {name: stated.get(name) for name in OF_TORCH} == found


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES.keys())
def test_the_rule_s_step_is_torch_s(name, options, monkeypatch):
    if name == "Muon":  # without the rounding of bfloat16
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)
    net, X, y = problem(name)
    run, gradients = recorded(net, [optimizer_for(name, options, net)], X, y, batches())
    assert largest_relative_error(run, gradients) <= 1e-12


def test_the_rule_of_another_optimizer_misses(monkeypatch):
    """The control: Adam's rule on the state of RAdam, which takes its second moments only later."""
    net, X, y = problem("RAdam")
    optimizer = optimizer_for("RAdam", {}, net)
    monkeypatch.setattr("epk_gp.optimizers.torch_rules.RULES", {torch.optim.RAdam: RULES[torch.optim.Adam]})
    optimizer.param_groups[0]["amsgrad"] = False
    with pytest.raises(epk.StepMismatchError, match="step 0: .*the weights did not move by Adam's rule"):
        recorded(net, [optimizer], X, y, batches())


def test_muon_in_bfloat16_leaves_a_share_unexplained_that_must_be_given():
    (net, X, y), rule = problem("Muon"), RULES[torch.optim.Muon]
    run, gradients = recorded(net, [optimizer_for("Muon", {}, net)], X, y, batches())
    assert 1e-3 < largest_relative_error(run, gradients) <= rule.unexplained
    with pytest.raises(ValueError, match=r"unexplained must be given for Muon, .* got None.*Pass unexplained=0\.5"):
        validate_unexplained(rule, None)
    validate_unexplained(rule, 0.5)
    validate_unexplained(RULES[torch.optim.Adam], None)


def several(net: nn.Module) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    return [first, torch.optim.Adadelta(net[2].parameters(), lr=1.0, weight_decay=0.1)]


def test_several_optimizers_have_one_rule():
    net, X, y = problem("SGD")
    optimizers = several(net)
    rule = rule_for(optimizers)
    assert rule.name == "SGD + Adadelta"
    assert rule.needs_before == ("acc_delta",)
    assert learning_rate(optimizers) == 0.1
    run, gradients = recorded(net, optimizers, X, y, batches())
    assert largest_relative_error(run, gradients) <= 1e-12


def test_a_first_step_is_one_beside_an_optimizer_that_needs_the_weights_before():
    """torch does not dampen the first gradient; Adafactor's rule sees the weights in its first step too."""
    net, X, y = problem("SGD")
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    run, gradients = recorded(net, [first, torch.optim.Adafactor(net[2].parameters())], X, y, batches())
    assert largest_relative_error(run, gradients) <= 1e-12


def test_one_of_several_rules_may_be_one_s_own():
    net, _, _ = problem("SGD")
    own = UpdateRule("own", RULES[torch.optim.SGD].coefficients)
    assert rule_for(several(net), [own, None]).name == "own + Adadelta"
    assert rule_for(several(net)[0], own) is own


class Mine(torch.optim.Optimizer):
    """An optimizer without a rule."""


def stacked(**step):
    return stack_coefficients([LinearStep(**step)], (12,))


BAD_RULE = "update_rule must be an UpdateRule, or one or None for .*: got "
# What is refused, of the parameters of a network and its two optimizers.
REFUSED = {
    "must take one gradient a step: LBFGS evaluates the loss several": lambda p, _: rule_for(torch.optim.LBFGS(p)),
    rf"must be known: that of {__name__}.Mine is not. Known are ASGD, AdEM": lambda p, _: rule_for(Mine(p, {})),
    "its learning rate as the option 'lr', a number. Add it; to": lambda p, _: learning_rate(Mine(p, {"eta": 0.1})),
    "its learning rate as the option 'lr', a number. Add": lambda p, _: learning_rate(Mine(p, {"lr": None})),
    "update_rule must have one entry per opt.*: got 1 for 2": lambda _, own: rule_for(own, [RULES[torch.optim.SGD]]),
    f"{BAD_RULE}func": lambda _, own: rule_for(own[0], several),
    f"{BAD_RULE}str": lambda _, own: rule_for(own[0], "SGD"),
    f"{BAD_RULE}st": lambda _, own: rule_for(own[0], ["SGD"]),
    "coefficients must be a LinearStep: got NoneType": lambda p, _: stack_coefficients([None], (4,)),
    r"lr must be one number or one per weight, 12: got \(2,\)": lambda p, _: stacked(lr=torch.ones(2)),
    r"square, with sides that fit the param.*: got \(5, 5\) for 12 weights": lambda p, _: stacked(left=torch.eye(5)),
    r"must be square, .*: got \(3, 4\) for 12 weights": lambda p, _: stacked(right=torch.ones(3, 4)),
    r": got \(3, 3\), \(3, 3\) for 12 w": lambda p, _: stacked(left=torch.eye(3), right=torch.eye(3)),
    "optimizer must be a torch.optim.Optimizer: got str": lambda _, own: as_optimizers([own[0], "SGD"]),
    "there must be at least one optimizer": lambda *_: as_optimizers([]),
    r"belong to one optimizer: two hold one of \(6, 4\)": lambda p, own: as_optimizers([own[0], torch.optim.Adam(p)]),
}


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_rule_no_step_and_no_optimizer_is_refused():
    net, _, _ = problem("SGD")
    for message, ask in REFUSED.items():
        assert refusal((TypeError, ValueError), message, ask, list(net.parameters()), several(net)) is None, message


@pytest.mark.parametrize("name", ["NAdam", "Muon"])
def test_what_several_optimizers_hold_of_earlier_gradients_is_known(name):
    net, X, y = problem("Muon")
    F.cross_entropy(net(X), y).backward()
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1), OF_TORCH[name](net[2].parameters())]
    parameters = list(net.parameters())
    assert momentum_before(optimizers, None, parameters) is None
    optimizers[1].step()
    held, entry = momentum_before(optimizers, None, parameters), "momentum_buffer" if name == "Muon" else "exp_avg"
    expected = [torch.zeros(24).double(), optimizers[1].state[net[2].weight][entry].flatten()]
    assert torch.equal(held, torch.cat(expected))


def small_problem() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return net, torch.randn(11, 4).double(), torch.randint(0, 3, (11,)), torch.randn(3, 4).double()


LOSSES = {
    "class_weights": epk.CrossEntropy(class_weights=(1.0, 4.0, 0.3)),
    "smoothing": epk.CrossEntropy("sum", label_smoothing=0.2),
    "ignored": epk.CrossEntropy(ignore_index=2),
    "likelihood": NegativeLogLikelihood(class_weights=(1.0, 4.0, 0.3)),
    "torch_module": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.3]).double(), ignore_index=1),
    "function": epk.PerSampleLoss(lambda z, y: F.multi_margin_loss(z, y, p=2)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_every_loss_is_explained_on_uneven_batches(loss):
    net, X, y, X_test = small_problem()
    net = nn.Sequential(net, nn.LogSoftmax(dim=1)) if isinstance(loss, NegativeLogLikelihood) else net
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), torch.manual_seed(1)
    run = epk.train(net, X, y, optimizer=optimizer, steps=4, batch_size=4, loss=loss, generator=generator)
    for head in ("logits", "log_softmax"):
        assert epk.attribute(run, X_test, head=head).max_error <= 1e-11


def test_a_network_that_ends_in_log_softmax_counts_it_once():
    runs = []
    for loss, ends in ((epk.CrossEntropy(), False), (epk.CrossEntropy(), True), (NegativeLogLikelihood(), True)):
        net, X, y, X_test = small_problem()
        whole = nn.Sequential(net, nn.LogSoftmax(dim=1)) if ends else net
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.2)
        runs.append(epk.train(whole, X, y, optimizer=optimizer, steps=5, loss=loss))
    expected = epk.attribute(runs[0], X_test, head="log_softmax").samples
    for run in runs[1:]:
        for head in ("logits", "log_softmax"):
            assert_close(epk.attribute(run, X_test, head=head).samples, expected)
    machine = single_machine(runs[2], X_test, head="logits")
    assert machine.max_error <= 1e-12


def test_coefficients_of_several_types_lose_nothing():
    kinds = (torch.tensor([True, False]), torch.tensor([0.5, 0.25]), torch.tensor([0.1], dtype=torch.float64), 0.5)
    joined = stack_coefficients([LinearStep(lr=0.1, grad_scale=kind) for kind in kinds], [2, 2, 1, 1])
    assert joined.grad_scale.tolist() == [1, 0, 0.5, 0.25, 0.1, 0.5]
