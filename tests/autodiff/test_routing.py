"""Networks that send each row its own way, functions that torch cannot differentiate twice, and odd ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epk_gp as epk
import reference
from epk_gp.autodiff.verification import plan_for, probe_rows
from helpers import assert_close, gram_diagonal_blocks

RULE = epk.gauss_legendre(2)
HEADS = ("logits", "log_softmax")


class Experts(nn.Module):
    """Each row goes to one of two experts, by the sign of its first entry."""

    asks_all = True

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
            if self.asks_all or m.any():
                out = out.index_put((m,), expert(h[m]))
        return out


class OnlyAsked(Experts):
    """Calls an expert only if there is a row for it: on some rows nothing shows."""

    asks_all = False


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


def trained(net: nn.Module, X: Tensor) -> epk.Trajectory:
    net = net.to(X.dtype if X.is_floating_point() else torch.float64)
    return epk.train(net, X, torch.arange(len(X)) % 3, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), steps=2)


def inputs(n: int) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64)


# What is asked of test points a and training points b, and the page's answer, or the network's.
ASKED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gram_block": lambda run, a, b, head: (
        epk.gram_block(run, a, b, head=head, rule=RULE), reference.gram_block(run, a, b, head, RULE),
    ),
    "gram_diagonal_blocks": lambda run, a, b, head: (
        gram_diagonal_blocks(run, a, head=head, rule=RULE),
        torch.einsum("ncnd->ncd", reference.gram_block(run, a, a, head, RULE)).contiguous(),
    ),
    "attribute": lambda run, a, b, head: (
        epk.attribute(run, a.X, head=head, rule=RULE).samples, reference.contributions(run, a.X, head, RULE),
    ),
    "total": lambda run, a, b, head: (
        epk.attribute(run, a.X, head=head).total, epk.network_outputs(run, a.X, head=head),
    ),
    "reconstruct": lambda run, a, b, head: (
        epk.reconstruct(run, a.X, head=head).outputs, epk.network_outputs(run, a.X, head=head),
    ),
}  # fmt: skip


def check(run: epk.Trajectory, X: Tensor, head: str) -> None:
    both = epk.Points(run.inputs[-4:], torch.tensor([True, True, False, False]))
    for ask in ASKED.values():
        assert_close(*ask(run, epk.Points(X, False), both, head))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "head"), [*zip([Experts, OnlyAsked, Sorted, ScaledSometimes], 2 * HEADS, strict=True)]
)
def test_rows_that_go_different_ways_are_differentiated_row_by_row(build: Callable[[], nn.Module], head: str) -> None:
    trajectory = trained(build(), inputs(8))
    check(trajectory, inputs(3), head)
    assert not plan_for(trajectory, trajectory.model_for(trajectory.inputs)).plan.supports_interpolation


@pytest.mark.parametrize(("build", "head"), [*zip([OnlyAsked, ScaledSometimes], HEADS, strict=True)])
@pytest.mark.parametrize("ask", ASKED)
def test_only_the_questions_own_rows_go_another_way(build: Callable[[], nn.Module], head: str, ask: str) -> None:
    """Training rows between the probe's, or only the points asked about: the plan is made once more."""
    X, T = inputs(9), inputs(3)
    X[:, 0], T[:, 0] = -X[:, 0].abs(), torch.tensor([-0.5, 0.5, 1.0])
    trajectory = trained(build(), X)
    plan = plan_for(trajectory, trajectory.model_for(X)).plan
    assert plan.supports_interpolation
    assert plan.bias_of
    assert_close(*ASKED[ask](trajectory, epk.Points(T, False), epk.Points(X[:2], True), head))
    assert not plan_for(trajectory, trajectory.model_for(X)).plan.supports_interpolation  # the run remembers


def test_the_probe_sees_rows_from_all_over_and_in_no_order() -> None:
    rows = probe_rows(torch.arange(101))
    assert (rows.min(), rows.max()) == (0, 100)
    assert torch.equal(rows, rows.flip(0))
    assert len(probe_rows(torch.arange(1))) == len(rows)


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
    """A function of the activations between two layers, and a parameter without numbers."""

    def __init__(self, function: Callable[["Applied", Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.out, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.function(self, self.hidden(x))))


class WrongInOneOutput(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return WrongTangent.apply(super().forward(x))


# Each with what its plan supports: interpolation, forward mode, `vmap`.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[bool, bool, bool]]] = {
    "one_backward_pass": (  # torch can differentiate `embedding_bag` once, backwards only
        lambda: nn.Sequential(nn.EmbeddingBag(9, 6, mode="mean"), nn.Softplus(), nn.Linear(6, 3)), (False,) * 3,
    ),
    "wrong_tangent": (lambda: WrongInOneOutput(4, 5), (True, False, True)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "head"), [*zip(KINDS, HEADS, strict=True)])
def test_what_torch_cannot_do_is_done_another_way(name: str, head: str) -> None:
    """One backward pass is enough; of the second, through the places of the rows on the step."""
    make, supported = KINDS[name]
    tokens = torch.arange(24).reshape(6, 4) % 9
    X, T = (
        (tokens, torch.tensor([[0, 1, 2, 3], [8, 8, 1, 4]])) if name == "one_backward_pass" else (inputs(8), inputs(12))
    )
    trajectory = trained(make(), X)
    check(trajectory, T, head)
    plan = plan_for(trajectory, trajectory.model_for(X)).plan
    assert (plan.supports_interpolation, plan.supports_jvp, plan.supports_vmap) == supported


def gated(net: Applied, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = h.sum(dim=1, keepdim=True).sigmoid()
    return gate.expand(-1, 6)


def test_parameters_without_a_gradient_have_a_kernel_of_zero() -> None:
    trajectory = trained(Applied(gated), inputs(8))
    a, b = epk.Points(inputs(3), False), epk.Points(inputs(8)[:2], True)
    assert_close(*ASKED["gram_block"](trajectory, a, b, "logits"))


INDEX = torch.tensor([1, 0, 2, 3, 5, 4])


def written(h: Tensor) -> Tensor:
    result = torch.zeros_like(h)
    result[:, :3] = h[:, 3:]
    return result.index_add_(1, INDEX, h)


FUNCTIONS: dict[str, Callable[[Applied, Tensor], Tensor]] = {
    "like": lambda net, h: h * torch.full_like(h, 2.0) + torch.ones_like(h) + torch.empty_like(h).fill_(0.3),
    "new": lambda net, h: h * h.new_tensor([1.0, 2, 3, 4, 5, 6]) + h.new_full((6,), 2.0) + h.new_zeros(len(h), 1),
    "scatter": lambda net, h: torch.zeros_like(h).scatter(1, INDEX.expand(len(h), -1), h),
    "written": lambda net, h: written(h),
    "multiple": lambda net, h: h * (0.1 * net.hidden.bias) + (net.hidden.bias + 1),
    "fourier": lambda net, h: torch.fft.irfft(2 * torch.fft.rfft(h), n=6),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_layerwise_takes_constants_scatters_and_multiples_of_weights(function):
    run = trained(Applied(function), inputs(8))
    assert epk.attribute(run, run.inputs[:1], path=epk.layerwise(every=2)).certified


def test_the_size_of_complex_numbers_is_integrated_and_not_averaged() -> None:
    run = trained(Applied(lambda net, h: torch.view_as_complex(h.view(-1, 3, 2)).abs().repeat(1, 2)), inputs(8))
    assert epk.attribute(run, run.inputs[:1]).certified
    with pytest.raises(ValueError, match=r"cannot average abs: it takes complex numbers.*Take chords"):
        epk.attribute(run, run.inputs[:1], path=epk.layerwise(every=2))


@pytest.mark.filterwarnings("ignore:step 0:epk_gp.core.show.CertificateWarning")  # of the probe
def test_a_number_made_of_a_weight_is_a_clear_error() -> None:
    run = trained(Applied(lambda net, h: h * net.hidden.bias[0].item()), inputs(8))
    with pytest.raises(ValueError, match=r"must compute with tensors: forward\(\) makes a Python number"):
        epk.attribute(run, run.inputs[:1])


@pytest.mark.parametrize("door", [
    lambda run, X: epk.attribute(run, X).samples,
    lambda run, X: epk.reconstruct(run, X).outputs,
    lambda run, X: epk.influence(run, X).values,
    lambda run, X: epk.retrain(run, torch.full((8,), 0.5)).states,
])  # fmt: skip
def test_the_callers_autocast_changes_nothing(door: Callable[[epk.Trajectory, Tensor], Tensor]) -> None:
    run = trained(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), inputs(8).float())
    expected = door(run, run.inputs[:2])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(door(run, run.inputs[:2]), expected)
