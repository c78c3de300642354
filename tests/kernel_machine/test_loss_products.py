"""Losses of a batch are differentiated along several directions together, where that gives what single passes give."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from weighted_loops import Apply, Encoder, mlp, operation, record

import epk_gp as epk
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.trajectory import flat_state
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.loss_products import LossProducts
from epk_gp.kernel_machine.terms import Predictions


class Square(torch.autograd.Function):
    """A function in the style that torch.func cannot transform."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]

    jvp = backward


class Centred(nn.Module):
    """In training mode the batch's mean is taken off, for the backward pass a constant or not."""

    def __init__(self, *, is_constant=False):
        super().__init__()
        self.is_constant = is_constant

    def forward(self, x):
        if not self.training:
            return x
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_constant):
            mean = x.mean(dim=0)
        return x - mean


DROPOUT = {
    "mlp": lambda: mlp(nn.Dropout(0.4)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Dropout1d(0.4), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)
    ),
    "encoder": Encoder,  # attention draws masks for its shares, and dropout after it in the order that attention leaves
    "reverse_only": lambda: mlp(operation(torch.tanh, lambda x: 1 - x.tanh() ** 2), nn.Dropout(0.3)),
    "coupled": lambda: mlp(nn.Tanh(), Centred(), nn.Dropout(0.3)),
}
NETWORKS = DROPOUT | {
    "norm": lambda: mlp(nn.BatchNorm1d(6)),
    "norm_and_dropout": lambda: mlp(nn.BatchNorm1d(6), nn.Dropout(0.4)),
    "squares": lambda: mlp(activation=Apply(Square.apply)),
}


def products_of(name):
    """The training side of a run of two steps."""
    net = NETWORKS[name]().double()
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    run = record(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), X, y, torch.arange(12).split(6))
    model = plan_for(run, run.model_for(X))
    kernel = PathKernel(run, "logits", epk.gauss_legendre(2))
    asked = 1 << 30, X[:3], torch.zeros(3, dtype=torch.int64)
    problem = Predictions(model, run, kernel.head, kernel.rule, kernel.path, *asked)
    return LossProducts(problem, RunReplay(run.trained, model.model, X))


def calls_of(monkeypatch, name):
    made, original = [], getattr(LossProducts, name)
    monkeypatch.setattr(LossProducts, name, lambda *args: made.append(original(*args)) or made[-1])
    return made


def check_along(products, s, directions):
    run = products.block.trajectory
    (data,) = products.run.data(run.steps[s])
    state = flat_state(run.trained, s, data.X)
    losses = products.run.passes.gradient(state, data, exact=True).losses
    expected = products._sample_by_sample(state, data, directions)
    torch.testing.assert_close(products._along(state, data, directions, losses), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("name", "count", "num_mapped"), [
    pytest.param("norm", 3, 2, marks=pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch cannot map it")),
    ("norm", 1, 0),
    ("norm_and_dropout", 3, 0),
    ("squares", 3, 0),
])  # fmt: skip
def test_directions_are_taken_together_once_the_first_pass_was_compared(name, count, num_mapped, monkeypatch):
    """Not one alone, not where numbers are drawn; and what torch cannot map is tried once."""
    products = products_of(name)
    singles, mapped = calls_of(monkeypatch, "_single"), calls_of(monkeypatch, "_mapped")
    for s in (0, 1):
        check_along(products, s, torch.randn(count, products.block.net.model.num_weights, dtype=torch.float64))
    assert len(mapped) == num_mapped
    assert len(singles) == (1 if num_mapped else 2 * count)
    assert products._rows.works is {"norm": True if count > 1 else None, "squares": False}.get(name)


@pytest.mark.parametrize("wrong", ["losses", "derivatives"])
def test_mapped_passes_that_compute_something_else_are_not_used(wrong, monkeypatch):
    products, original = products_of("norm"), LossProducts._mapped

    def changed(*args):
        primals, slopes = original(*args)
        return (primals + 1e-6, slopes) if wrong == "losses" else (primals, slopes * (1 + 1e-6))

    monkeypatch.setattr(LossProducts, "_mapped", changed)
    check_along(products, 0, torch.randn(3, products.block.net.model.num_weights, dtype=torch.float64))
    assert products._rows.works is False


@pytest.mark.parametrize("name", DROPOUT)
def test_gradients_are_written_out_with_the_masks_that_were_drawn(name, monkeypatch):
    """Where a row's loss depends on other rows they are not, which one pass in forward mode shows."""
    products = products_of(name)
    started, singles = calls_of(monkeypatch, "start"), calls_of(monkeypatch, "_single")
    run, model = products.block.trajectory, products.block.net.model
    H, groups = torch.randn(200, model.num_weights, dtype=torch.float64), torch.arange(len(model.sizes)) % 2
    for step in run.steps:
        (data,) = products.run.data(step)
        found, _ = products.of_whole(step, data, H, groups, products.start(step, data, len(H)))
        for group in range(2):
            owner = (groups == group).repeat_interleave(torch.tensor(model.sizes))
            state = flat_state(run.trained, step.index, data.X)
            expected = data.c * products._sample_by_sample(state, data, H * owner)
            torch.testing.assert_close(found[..., group], expected, rtol=1e-11, atol=1e-12)
    if name == "coupled":
        assert started == [None, None]
    else:
        assert len(started) == 2
        assert len(singles) <= 2  # not one for each direction
        assert all(rows.gradients is not None for blocks in started for rows in blocks)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_what_is_computed_without_gradients_is_a_constant(dtype, tolerance):
    """Forward mode would follow it. In float32 that was taken for rounding: certified, and wrong by half."""
    net, lr, B = nn.Sequential(nn.Linear(4, 3), Centred(is_constant=True)).to(dtype), 0.1, 8
    X, y = torch.randn(B, 4, dtype=dtype), torch.randint(3, (B,))
    delta = net(X).detach().softmax(dim=1) - F.one_hot(y, 3)
    run = record(net, torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9), X, y, [None])
    parts = epk.attribute(run, X[:2], head="logits")
    expected = -lr / B * torch.einsum("ic,ni->nci", delta, X[:2] @ X.T + 1)
    assert (parts.samples - expected).norm() < tolerance * expected.norm()
    assert parts.certified
    assert parts.unexplained.norm() < tolerance * expected.norm()
