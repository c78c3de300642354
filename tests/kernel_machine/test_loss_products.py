"""Losses of a batch are differentiated along several directions together, where that gives what single passes give."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.gradients import RunReplay
from epk_gp.core.trajectory import flat_state
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.adjoint import LossProducts
from epk_gp.kernel_machine.terms import AttributionProblem
from epk_gp.quadrature.rules import gauss_legendre


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

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent * ctx.saved_tensors[0]


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return Square.apply(self.linear(x))


class Encoder(nn.Module):
    """Attention draws masks for its shares, and dropout after it in the memory order that attention leaves."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.layer(x[:, None] * x.new_tensor([[1.0], [-0.5], [2.0]])).mean(dim=1))


class Reverse(torch.autograd.Function):
    """A tanh that cannot be differentiated in forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


class Once(Reverse):
    """A tanh that can be differentiated once only."""

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


class OnceBehindNorm(nn.Module):
    """Rows depend on each other, so that gradients are not written out row by row."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(Once.apply(self.norm(self.hidden(x))))


class ReverseOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.drop(Reverse.apply(self.hidden(x))))


class Coupled(nn.Module):
    """In training mode a row's outputs depend on the other rows."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.hidden(x))
        return self.out(F.dropout(x - x.mean(dim=0) if self.training else x, 0.3, self.training))


DROPOUT = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 3)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Dropout1d(0.4), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)
    ),
    "encoder": Encoder,
    "reverse_only": ReverseOnly,
    "coupled": Coupled,
}

NETWORKS = {
    **DROPOUT,
    "norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 3)),
    "squares": Squares,
}


@pytest.fixture
def products(request):
    """The training side of a run of two steps: its passes' losses along three directions."""
    net = NETWORKS[request.param]().double()
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        net.train()
        for batch in torch.arange(12).split(6):
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    trajectory = recorder.trajectory
    kernel = PathKernel(trajectory, "logits", gauss_legendre(2))
    model = plan_for(trajectory, trajectory.model_for(X))
    problem = AttributionProblem(model, kernel, X[:3], torch.zeros(3, dtype=torch.int64), 1 << 30)
    return LossProducts(problem, RunReplay(trajectory.trained, model.model, X))


def along(products, s, directions):
    trajectory = products.problem.trajectory
    (data,) = products.run.data(trajectory.steps[s])
    state = flat_state(trajectory.trained, s, data.X)
    return products._along(state, data, directions, products.run.passes.gradient(state, data, exact=True).losses)


def directions_of(products):
    return torch.randn(3, products.problem.net.model.num_weights, dtype=torch.float64)


def calls_of(monkeypatch, name):
    made, original = [], getattr(LossProducts, name)

    def counted(*args):
        made.append(name)
        return original(*args)

    monkeypatch.setattr(LossProducts, name, counted)
    return made


def check_against_backward_passes(products, found, s, directions):
    trajectory = products.problem.trajectory
    (data,) = products.run.data(trajectory.steps[s])
    expected = products._sample_by_sample(flat_state(trajectory.trained, s, data.X), data, directions)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("products", ["norm"], indirect=True)
def test_directions_are_taken_together_once_the_first_pass_was_compared(products, monkeypatch):
    singles, mapped = calls_of(monkeypatch, "_single"), calls_of(monkeypatch, "_mapped")
    directions = directions_of(products)
    for s in (0, 1):
        check_against_backward_passes(products, along(products, s, directions), s, directions)
    assert (len(singles), len(mapped)) == (1, 2)


@pytest.mark.parametrize("products", ["norm"], indirect=True)
def test_one_direction_is_not_mapped(products, monkeypatch):
    mapped = calls_of(monkeypatch, "_mapped")
    along(products, 0, directions_of(products)[:1])
    assert mapped == []


@pytest.mark.parametrize("products", ["dropout"], indirect=True)
def test_random_numbers_are_drawn_one_direction_at_a_time(products, monkeypatch):
    mapped = calls_of(monkeypatch, "_mapped")
    directions = directions_of(products)
    check_against_backward_passes(products, along(products, 0, directions), 0, directions)
    assert mapped == []


@pytest.mark.parametrize("products", ["squares"], indirect=True)
def test_what_cannot_be_mapped_is_tried_once(products, monkeypatch):
    mapped = calls_of(monkeypatch, "_mapped")
    directions = directions_of(products)
    for s in (0, 1):
        check_against_backward_passes(products, along(products, s, directions), s, directions)
    assert len(mapped) == 1


@pytest.mark.parametrize("products", ["norm"], indirect=True)
@pytest.mark.parametrize("wrong", ["losses", "derivatives"])
def test_mapped_passes_that_compute_something_else_are_not_used(products, wrong, monkeypatch):
    original = LossProducts._mapped

    def changed(*args):
        primals, slopes = original(*args)
        return (primals + 1e-6, slopes) if wrong == "losses" else (primals, slopes * (1 + 1e-6))

    monkeypatch.setattr(LossProducts, "_mapped", changed)
    directions = directions_of(products)
    check_against_backward_passes(products, along(products, 0, directions), 0, directions)
    assert products._maps is False


@pytest.mark.parametrize("products", DROPOUT, indirect=True)
def test_gradients_are_written_out_with_the_masks_that_were_drawn(products, monkeypatch):
    """Where a row's loss depends on other rows they are not, which one pass in forward mode shows."""
    is_coupled = isinstance(products.run.passes.model.module, Coupled)
    written, singles = [], calls_of(monkeypatch, "_single")
    original = LossProducts._from_gradients

    def seen(*args):
        written.append(original(*args))
        return written[-1]

    monkeypatch.setattr(LossProducts, "_from_gradients", seen)
    trajectory, model = products.problem.trajectory, products.problem.net.model
    H = torch.randn(10, 20, model.num_weights, dtype=torch.float64)
    groups = torch.arange(len(model.sizes)) % 2
    for step in trajectory.steps:
        (data,) = products.run.data(step)
        found, _ = products(step, data, H, groups)
        for group in range(2):
            owner = (groups == group).repeat_interleave(torch.tensor(model.sizes))
            state = flat_state(trajectory.trained, step.index, data.X)
            expected = data.c * products._sample_by_sample(state, data, (H * owner).flatten(0, 1))
            expected = expected.view(10, 20, -1).transpose(0, 1)
            torch.testing.assert_close(found[..., group], expected, rtol=1e-11, atol=1e-12)
    if is_coupled:
        assert written == [None]
    else:
        assert len(written) == 2
        assert len(singles) <= 2  # not one for each direction
        assert all(values is not None for values in written)


class Centred(nn.Module):
    """In training mode the batch's mean output is taken off, as a constant to the backward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        z = self.linear(x)
        if not self.training:
            return z
        with torch.no_grad():
            mean = z.mean(dim=0)
        return z - mean


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_what_is_computed_without_gradients_is_a_constant(dtype, tolerance):
    """Forward mode would follow it. In float32 that was taken for rounding: certified, and wrong by half."""
    net, lr, B = Centred().to(dtype), 0.1, 8
    X, y = torch.randn(B, 4, dtype=dtype), torch.randint(3, (B,))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        net.train()
        z = net(X)
        F.cross_entropy(z, y).backward()
        recorder.batch(None)
        optimizer.step()
    parts = epk.attribute(recorder.trajectory, X[:2], head="logits")
    delta = z.detach().softmax(dim=1) - F.one_hot(y, 3)
    expected = -lr / B * torch.einsum("ic,ni->nci", delta, X[:2] @ X.T + 1)
    assert (parts.samples - expected).norm() < tolerance * expected.norm()
    assert parts.certified
    assert parts.unexplained.norm() < tolerance * expected.norm()


def test_an_operation_that_is_differentiated_once_keeps_its_part():
    """Double backward would leave it out in silence."""
    net = OnceBehindNorm().double()
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    run = epk.train(net, X, y, optimizer=optimizer, steps=2, batch_size=5)
    assert epk.attribute(run, X[:2]).certified
