"""Path ridge is its formula with explicit Jacobians and the optimizer's own number for each weight."""

from dataclasses import replace

import pytest
import torch
from datamodel_cases import Loop, dense, internals, margin, mlp, vectors
from optimizer_cases import OPTIONS
from torch import Tensor

import epk_gp as epk
from epk_gp.optimizers.update_rules import broadcast_to_params
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
TIGHT = 1e-10 / torch.finfo(torch.float64).eps
LOOPS = {
    "mlp adam": Loop("mlp", "adam"),
    "wide adam": Loop("wide", "adam"),
    "wide sgd, groups": Loop("wide", "sgd_groups", steps=14),
    "cnn adamw in batches": Loop("cnn", "adamw", batch=4),
    "cnn momentum": Loop("cnn", "momentum"),
    "layer norm nesterov, schedule": Loop("layer_norm", "nesterov", decay=0.8),
    "layer norm adam, schedule": Loop("layer_norm", "adam", decay=0.9, batch=5),
    "layer norm adam, groups": Loop("layer_norm", "adam_groups"),
    "batch norm sgd": Loop("batch_norm", "sgd"),
    "batch norm momentum in batches": Loop("batch_norm", "momentum", batch=6),
    "tokens rmsprop": Loop("tokens", "rmsprop"),
    "tokens adam, groups, schedule": Loop("tokens", "adam_groups", decay=0.85),
    "attention adamw": Loop("attention", "adamw"),
    "attention sgd, groups": Loop("attention", "sgd_groups", decay=0.9, batch=4),
}
every_loop = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
REFUSED = ("Muon", "SparseAdam", "Rprop")  # matrices; rates that are 0 where a gradient changes its sign
SHORT = Loop("mlp", "sgd", steps=7, points=7)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@every_loop
def test_scores_are_the_formula_with_explicit_jacobians(loop: Loop) -> None:
    reference, model = dense(loop), loop.model
    assert model.metric == "exact"
    assert_close(torch.stack(model.trainings[0].kernels), reference.kernels, rounding=TIGHT)
    assert_close(model.scores, reference.ridge(), rounding=TIGHT)


def test_one_number_for_each_parameter_goes_into_two_factors_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LOOPS["wide sgd, groups"]
    monkeypatch.setattr(internals("fit"), "_EXACT", 0)
    model = epk.datamodel(loop.run, *loop.asked)
    assert model.metric == "exact"
    assert_close(model.scores, dense(loop).ridge(), rounding=TIGHT)


@pytest.mark.parametrize("name", [name for name in OPTIONS if hasattr(torch.optim, name) and name not in REFUSED])
def test_every_optimizer_of_torch_has_the_metric_of_its_recorded_steps(name: str) -> None:
    """H = grad_scale (lr + momentum_lr q), q = beta q + one_minus_dampening, weight by weight."""
    for options in OPTIONS[name].values():
        if "maximize" in options or "centered" in options:
            continue
        torch.manual_seed(1)
        net, y = mlp().double(), torch.arange(9) % 3
        optimizer = getattr(torch.optim, name)(net.parameters(), **options)
        run = epk.train(net, vectors(9), y, optimizer=optimizer, steps=7)
        nodes, w, q = internals("nodes").path_nodes(run), torch.zeros(51).double(), torch.zeros(51).double()
        assert nodes.steps == (0, 1, 2, 4, 5, 6)
        for s, update in enumerate(run.updates):
            gamma, epsilon, mu, beta, tau = (
                broadcast_to_params(getattr(update, field), run.model.sizes, w)
                for field in ("grad_scale", "lr", "momentum_lr", "beta", "one_minus_dampening")
            )
            q = beta * q + tau
            if s in nodes.steps:
                node = nodes.steps.index(s)
                expected = gamma * (epsilon + mu * q) * nodes.times[node]
                found = nodes.metric(node, run.states[s])
                assert_close(found, torch.minimum(expected, found), rounding=TIGHT)  # less where no gradient was seen
                assert float((found == expected).double().mean()) > 0.7


def in_two_factors(H: Tensor) -> Tensor:
    """Let 1 / H of each layer of "wide", bias as a column, be means over rows times those over columns by its mean."""
    changed = list[Tensor]()
    for own, rows in zip(H.split([150, 930, 93]), (30, 30, 3), strict=True):
        inverse = 1 / torch.cat([own[:-rows].view(rows, -1), own[-rows:, None]], dim=1)
        factored = inverse.mean() / (inverse.mean(dim=1, keepdim=True) * inverse.mean(dim=0))
        changed += [factored[:, :-1].flatten(), factored[:, -1]]
    return torch.cat(changed)


def test_a_number_for_each_weight_goes_into_two_factors_by_means_of_its_inverse(monkeypatch):
    loop = LOOPS["wide adam"]
    monkeypatch.setattr(internals("fit"), "_EXACT", 0)
    model = epk.datamodel(loop.run, *loop.asked)
    assert model.metric == "factored"
    assert_close(model.scores, dense(loop, metric=in_two_factors).ridge(), rounding=TIGHT)
    assert 0.01 < distance(model.scores, dense(loop).ridge()) < 0.3


def test_other_metrics_are_no_metrics_of_adam() -> None:
    """The control: one number for all weights, or the second moments of the first node alone, give other scores."""
    loop = LOOPS["wide adam"]
    scores = loop.model.scores
    flat = dense(loop, metric=lambda H: H.mean().expand(len(H))).ridge()
    assert distance(flat, scores) > 0.3
    assert distance(dense(loop, metric=torch.ones_like).ridge(), scores) > 0.3


def test_the_kernel_of_the_last_state_gives_other_scores() -> None:
    """The control: states along the path matter."""
    loop = Loop("mlp", "sgd", steps=62)
    reference = dense(loop)
    last = reference.kernels[-1:].expand(6, -1, -1)
    assert_close(loop.model.scores, reference.ridge(), rounding=TIGHT)
    assert distance(replace(reference, kernels=last).ridge(), loop.model.scores) > 0.05


@pytest.mark.parametrize("rate", [1e-3, 1e-4])
def test_of_few_small_steps_scores_are_contributions(rate: float) -> None:
    """lambda grows as 1 / time: what is left is k r, to an error that shrinks with the steps."""
    X, y = SHORT.data
    net = SHORT.net
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    run = epk.train(net, X, y, optimizer=optimizer, steps=7)
    X, y = SHORT.asked
    model = epk.datamodel(run, X, y)
    ask = epk.RowFunction(margin, y)
    contributions = epk.attribute(run, X, function=ask).samples[:, 0]
    assert distance(model.scores, contributions) < 20 * rate
    training = model.trainings[0]
    k = sum(training.kernels)[len(training.forces) :]
    assert distance(model.scores, k * training.forces / 7) < 20 * rate
    assert distance(model.derivative(), contributions) < 20 * rate
