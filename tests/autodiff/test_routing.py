"""Networks that send each row its own way, and functions that torch cannot differentiate twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
import reference
from epk_gp.autodiff.verification import plan_for, probe_rows
from epk_gp.gram.path_kernel import gram_diagonal_blocks
from helpers import assert_close

RULE = epk.gauss_legendre(2)
HEADS = ("logits", "log_softmax")


class Experts(nn.Module):
    """Each row goes to one of two experts, by the sign of its first entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def route(self, x: Tensor) -> Tensor:
        return (x[:, 0] > 0).long()

    def forward(self, x: Tensor) -> Tensor:
        index, h = self.route(x), torch.tanh(self.first(x))
        out = h.new_zeros(len(h), 3)
        for k, expert in enumerate(self.experts):
            m = index == k
            out = out.index_put((m,), expert(h[m]))
        return out


class OnlyAsked(Experts):
    """Calls an expert only if there is a row for it: on some rows nothing shows."""

    def forward(self, x: Tensor) -> Tensor:
        index, h = self.route(x), torch.tanh(self.first(x))
        out = h.new_zeros(len(h), 3)
        for k, expert in enumerate(self.experts):
            m = index == k
            if m.any():
                out = out.index_put((m,), expert(h[m]))
        return out


class Sorted(Experts):
    """Brings the rows into the order of their experts: a layer sees all rows, but others in their places."""

    def forward(self, x: Tensor) -> Tensor:
        order = self.route(x).argsort(stable=True)
        return self.experts[0](torch.tanh(self.first(x[order])))[order.argsort()]


class ScaledSometimes(Experts):
    """Uses a weight outside its layer, but only for some rows."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts[0](torch.tanh(self.first(x)))
        m = self.route(x) == 1
        return out.index_put((m,), out[m] * self.first.weight.sum()) if m.any() else out


def trained(net: nn.Module, X: Tensor, steps: int = 2) -> epk.Trajectory:
    return epk.train(net, X, torch.arange(len(X)) % 3, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), steps=steps)


def inputs(n: int, *, positive: bool | None = None) -> Tensor:
    X = torch.randn(n, 4, dtype=torch.float64)
    if positive is not None:
        X[:, 0] = X[:, 0].abs() if positive else -X[:, 0].abs()
    return X


def check(trajectory: epk.Trajectory, X: Tensor, head: str, *, mixed: bool = True) -> None:
    """Blocks, contributions and the kernel machine itself against the page."""
    test = epk.Points(X, False)
    both = epk.Points(trajectory.inputs[-4:], torch.tensor([True, True, False, False]) if mixed else True)
    assert_close(
        epk.gram_block(trajectory, test, both, head=head, rule=RULE),
        reference.gram_block(trajectory, test, both, head, RULE),
    )
    diagonal = torch.einsum("ncnd->ncd", reference.gram_block(trajectory, test, test, head, RULE)).contiguous()
    assert_close(gram_diagonal_blocks(trajectory, test, head=head, rule=RULE), diagonal)
    parts = epk.attribute(trajectory, X, head=head, rule=RULE)
    assert_close(parts.samples, reference.contributions(trajectory, X, head, RULE))
    assert epk.reconstruct(trajectory, X, head=head).max_error < 1e-12
    assert epk.attribute(trajectory, X, head=head).max_error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("build", [Experts, OnlyAsked, Sorted, ScaledSometimes])
def test_rows_that_go_different_ways_are_differentiated_row_by_row(build: Callable[[], nn.Module], head: str) -> None:
    trajectory = trained(build().double(), inputs(8))
    check(trajectory, inputs(3), head)
    assert not plan_for(trajectory, trajectory.model_for(trajectory.inputs)).plan.supports_interpolation


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("build", [OnlyAsked, ScaledSometimes])
@pytest.mark.parametrize("ask", ["gram_block", "gram_diagonal_blocks", "attribute", "reconstruct"])
def test_only_the_questions_own_rows_go_another_way(build: Callable[[], nn.Module], head: str, ask: str) -> None:
    """Training rows between the probe's, or only the points asked about: the plan is made once more."""
    X = inputs(9, positive=False)
    trajectory = trained(build().double(), X)
    T = inputs(3)
    T[:, 0] = torch.tensor([-0.5, 0.5, 1.0])
    plan = plan_for(trajectory, trajectory.model_for(X)).plan
    assert plan.supports_interpolation
    assert plan.bias_of
    a, b = epk.Points(T, False), epk.Points(X[:2], True)
    if ask == "gram_block":
        expected = reference.gram_block(trajectory, a, b, head, RULE)
        assert_close(epk.gram_block(trajectory, a, b, head=head, rule=RULE), expected)
    elif ask == "gram_diagonal_blocks":
        expected = torch.einsum("ncnd->ncd", reference.gram_block(trajectory, a, a, head, RULE)).contiguous()
        assert_close(gram_diagonal_blocks(trajectory, a, head=head, rule=RULE), expected)
    elif ask == "attribute":
        expected = reference.contributions(trajectory, T, head, RULE)
        assert_close(epk.attribute(trajectory, T, head=head, rule=RULE).samples, expected)
        assert epk.attribute(trajectory, T, head=head).max_error < 1e-12
    else:
        assert epk.reconstruct(trajectory, T, head=head).max_error < 1e-12
    assert not plan_for(trajectory, trajectory.model_for(X)).plan.supports_interpolation  # the run remembers


def test_the_probe_sees_rows_from_all_over_and_in_no_order() -> None:
    rows = probe_rows(torch.arange(101))
    assert (rows.min(), rows.max()) == (0, 100)
    assert torch.equal(rows, rows.flip(0))
    assert len(probe_rows(torch.arange(1))) == len(rows)


class Bag(nn.Module):
    """torch can differentiate `embedding_bag` once, backwards only."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(9, 6, mode="mean"), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.softplus(self.bag(x)))


class Cubed(torch.autograd.Function):
    """A function of one's own that torch can differentiate backwards only, and once."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class WrongTangent(torch.autograd.Function):
    """A function of one's own whose forward-mode derivative is wrong in one place: no error says so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):  # type: ignore[no-untyped-def]
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0].cos() * grad

    @staticmethod
    def jvp(ctx, tangent):  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0].cos() * tangent * (1 - 1e-3 * (torch.arange(tangent.shape[-1]) == 2))


class Applied(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.out, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.function(self.hidden(x))))


class WrongInOneOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return WrongTangent.apply(self.layer(x))


class Gated(nn.Module):
    """Parameters that are used, and have no gradient: their kernel is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(4, 5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.gate(x).sum(dim=1, keepdim=True).sigmoid()
        return self.value(gate * x)


# Each with what its plan supports: interpolation, forward mode, `vmap`.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[bool, bool, bool]]] = {
    "one_backward_pass": (Bag, (False, False, False)),
    "own_function": (lambda: Applied(Cubed.apply), (True, False, True)),
    "wrong_tangent": (WrongInOneOutput, (True, False, True)),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", KINDS)
def test_what_torch_cannot_do_is_done_another_way(name: str, head: str) -> None:
    """One backward pass is enough; of the second, through the places of the rows on the step."""
    make, supported = KINDS[name]
    tokens = torch.arange(24).reshape(6, 4) % 9
    X, T = (tokens, torch.tensor([[0, 1, 2, 3], [8, 8, 1, 4]])) if make is Bag else (inputs(8), inputs(12))
    trajectory = trained(make().double(), X)
    check(trajectory, T, head)
    plan = plan_for(trajectory, trajectory.model_for(X)).plan
    assert (plan.supports_interpolation, plan.supports_jvp, plan.supports_vmap) == supported


def test_parameters_without_a_gradient_have_a_kernel_of_zero() -> None:
    trajectory = trained(Gated().double(), inputs(8))
    a, b = epk.Points(inputs(3), False), epk.Points(inputs(8)[:2], True)
    expected = reference.gram_block(trajectory, a, b, "logits", RULE)
    assert_close(epk.gram_block(trajectory, a, b, head="logits", rule=RULE), expected)
