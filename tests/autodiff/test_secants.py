"""Every operation's mean derivative between two rows gives the whole change of its outputs, whatever it computes."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from epk_gp.autodiff.averages import Exponentials, end_of, log_softmax
from epk_gp.autodiff.secants import SecantDerivatives
from epk_gp.core.model import BATCH_MARK
from tests.helpers import assert_close

ROWS, WIDTH = 3, 12


def in_place(x):
    kept = F.relu(x, inplace=True)
    x += 0.5 * kept.flip(1)
    x.mul_(kept.sigmoid())
    return kept


ACTIVATIONS = (
    "relu", "leaky_relu", "elu", "celu", "selu", "relu6", "hardtanh", "hardswish", "hardsigmoid",
    "gelu", "silu", "mish", "softplus", "softsign", "tanhshrink", "softshrink", "logsigmoid", "tanh", "sigmoid",
)  # fmt: skip
FUNCTIONS = {
    **{name: getattr(F, name) for name in ACTIVATIONS},
    **{name: getattr(torch, name) for name in ("abs", "exp", "sin", "square", "erf")},
    "power": lambda x: x.abs() ** 1.5 + x**3, "root": lambda x: (x.square() + 1).sqrt().log(),
    "clamp": lambda x: x.clamp(-0.3, 0.4) + x.clamp_min(0.1),
    "clamp in place": lambda x: x.clone().clamp_(-0.3, 0.4) + torch.clamp_min_(x.clone(), 0.1),
    "quotient": lambda x: x / (1 + x.square()) + 1 / (2 + x.sin()),
    "normalised": lambda x: x / x.norm(dim=1, keepdim=True), "products": lambda x: x * x + x[:, :1] * x.flip(1),
    "einsum": lambda x: torch.einsum("eij,ejk->eik", x.view(-1, 3, 4), x.view(-1, 4, 3)).flatten(1),
    "softmax": lambda x: x.view(-1, 2, 3, 2).softmax(3), "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "logsumexp": lambda x: x.view(-1, 3, 4).logsumexp(2),
    "attention": lambda x: F.scaled_dot_product_attention(*(y.view(-1, 2, 3, 2) for y in (x, x.flip(1), x * x))),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x.square()), "amax": lambda x: x.view(-1, 3, 4).amax(dim=2),
    "max": lambda x: x.view(-1, 3, 4).max(dim=1).values, "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "sort": lambda x: x.sort(dim=1).values * torch.arange(WIDTH),
    "max_pool1d": lambda x: F.max_pool1d(x.view(-1, 2, 6), 3, stride=2),
    "max_pool2d": lambda x: F.max_pool2d(x.view(-1, 3, 2, 2), 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.view(-1, 1, 3, 4), (2, 2)),
    "avg_pool2d": lambda x: F.avg_pool2d(x.tanh().view(-1, 3, 2, 2), 2),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)), "group_norm": lambda x: F.group_norm(x.view(-1, 3, 2, 2), 3),
    "dropout": lambda x: F.dropout(x.tanh(), 0.5, training=False), "in_place": in_place,
    "rows elsewhere": lambda x: (x.T * x.T.sigmoid()).T,
}  # fmt: skip


class Around(nn.Module):
    """A function between layers whose weights move, and layers that normalise with weights of their own."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.a, self.norm, self.slope = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), nn.PReLU(WIDTH)
        self.b, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        x = self.slope(self.norm(self.b(self.a(x).tanh()))) * self.scale + 0.1
        return self.function(x).flatten(1)


def change_and_product(function, *, has_secants=True, step=0.3):
    """Return the change of a combination of the outputs, and the contracted derivative along the step."""
    torch.manual_seed(0)
    net = Around(function).double()
    params = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    direction = {name: step * torch.randn_like(value) for name, value in params.items()}
    ends = {name: value.detach() + direction[name] for name, value in params.items()}
    x = torch.randn(ROWS, 4, dtype=torch.float64)
    setattr(x, BATCH_MARK, ROWS)
    y_end = functional_call(net, ends, (x,)).detach()
    if has_secants:
        with SecantDerivatives(params, direction, ROWS):
            y = functional_call(net, params, (x,))
        assert_close(end_of(y), y_end, rounding=1e3)
    else:
        y = functional_call(net, params, (x,))
    v = torch.randn(ROWS, y.shape[1], dtype=torch.float64)
    grads = torch.autograd.grad(y, list(params.values()), v)
    product = sum(float((grad * step).sum()) for grad, step in zip(grads, direction.values(), strict=True))
    return float(((y_end - y.detach()) * v).sum()), product


@pytest.mark.parametrize("step", [0.3, 1e-3, 1e-7])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_multipliers_give_the_whole_change(name, step):
    change, product = change_and_product(FUNCTIONS[name], step=step)
    assert product == pytest.approx(change, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("name", ["relu", "gelu", "softmax", "max_pool2d", "layer_norm"])
def test_derivatives_at_both_ends_do_not(name):
    """The negative control: their mean misses the change."""
    change, product = change_and_product(FUNCTIONS[name], has_secants=False)
    assert abs(product - change) > 1e-4 * abs(change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [(1000, 1), (1, 1000), (1000, 1000)])
def test_multipliers_of_shares_are_bounded_however_far_scores_move(sizes, dtype):
    """Attention between two checkpoints: sums of exponentials at both ends differ by a factor of e to the 1000."""
    x0, x1 = (size * torch.randn(50, 6, dtype=torch.float64).to(dtype) for size in sizes)
    x0[:, 0], x1[:, 0] = -torch.inf, -torch.inf
    grad, change = torch.randn(50, 6, dtype=dtype), (x1 - x0).nan_to_num()
    shares = Exponentials((x0, x1), 1)
    assert shares.weights.min() >= 0
    assert shares.weights.sum(1).max() <= 1 + 1e-6
    for (y0, y1), pull in (shares.softmax(), log_softmax((x0[:, 1:], x1[:, 1:]), 1)):
        n = y0.shape[1]
        expected = (grad[:, -n:].double() * (y1.double() - y0.double())).sum(1)
        found = (pull(grad[:, -n:]).double() * change[:, -n:].double()).sum(1)
        assert pull(grad[:, -n:]).abs().max() <= 2 * grad.abs().sum(1).max()
        assert (found - expected).abs().max() <= 1e5 * torch.finfo(dtype).eps


def test_a_pool_gives_each_input_the_time_for_which_it_is_the_largest():
    """From (3, 1) to (1, 2): the first leads by 2, then lags by 1, so it is the largest for two thirds of the way."""
    weight = torch.tensor([[3.0], [1.0]], dtype=torch.float64, requires_grad=True)
    direction = {"w": torch.tensor([[-2.0], [1.0]], dtype=torch.float64)}
    with SecantDerivatives({"w": weight}, direction, 1):
        y = F.max_pool1d(F.linear(torch.ones(1, 1, dtype=torch.float64), weight)[:, None], 2)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert grad.flatten().tolist() == pytest.approx([2 / 3, 1 / 3])


def test_more_than_two_factors_and_functions_of_rows_elsewhere_than_first_are_refused():
    with pytest.raises(ValueError, match=r"layerwise\(\) cannot average einsum: it has 3 factors that move"):
        change_and_product(lambda x: torch.einsum("ei,ei,ei->ei", x, x, x))
    with pytest.raises(ValueError, match=r"layerwise\(\) cannot average sort: it .* for each input"):
        change_and_product(lambda x: x.T.sort(dim=0).values.T)
