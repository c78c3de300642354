"""Random small networks, of rows, images, series and texts: their layers, sizes and activations are drawn."""

import random
from collections.abc import Callable
from typing import Any

import torch
from odd_parts import CLASSES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus, nn.SiLU, nn.LeakyReLU, nn.Hardtanh, nn.ELU, nn.PReLU)


class Formula(nn.Module):
    """A network whose forward pass is a function of its modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module, **parameters: Tensor) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, *self.inner, x)


class Cube(torch.autograd.Function):
    """An operation of one's own, of which torch knows no map over weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].square() * grad


def rows(draw: random.Random) -> dict[str, Callable[[], nn.Module]]:
    """Return networks of rows of four numbers."""
    width, act = draw.randint(2, 6), draw.choice(ACTIVATIONS)
    bias = draw.random() < 0.8

    def lin(n: int, m: int) -> nn.Module:
        return nn.Linear(n, m, bias=bias)

    def layers(*between: Callable[[], nn.Module], is_centred: bool = False) -> nn.Module:
        # a bias before BatchNorm has gradients of rounding, of which Adam makes full steps
        first = (nn.Linear(n, width, bias=bias and not is_centred) for n in (4, width))
        made = [layer for linear in first for layer in (linear, *(make() for make in between), act())]
        return nn.Sequential(*made, lin(width, CLASSES))

    def experts(net: Any, gate: nn.Module, one: nn.Module, two: nn.Module, x: Tensor) -> Tensor:
        best = gate(x).argmax(dim=1)
        return torch.stack([one(x), two(x)], dim=1)[torch.arange(len(x)), best] * gate(x).softmax(1).amax(1)[:, None]

    def routed(net: Any, gate: nn.Module, one: nn.Module, two: nn.Module, x: Tensor) -> Tensor:
        chosen = gate(x).argmax(dim=1) == 0
        z = x.new_zeros(len(x), CLASSES)
        return z.masked_scatter(chosen[:, None], one(x[chosen])).masked_scatter(~chosen[:, None], two(x[~chosen]))

    return {
        "linear": lambda: lin(4, CLASSES),
        "mlp": layers,
        "one_layer": lambda: nn.Sequential(lin(4, width), act(), lin(width, CLASSES)),
        "layer_norm": lambda: layers(lambda: nn.LayerNorm(width)),
        "group_norm": lambda: layers(lambda: nn.GroupNorm(1, width)),
        "batch_norm": lambda: layers(
            lambda: nn.BatchNorm1d(width, momentum=draw.choice([0.1, None])), is_centred=True
        ),
        "dropout": lambda: layers(lambda: nn.Dropout(0.3)),
        "both": lambda: layers(lambda: nn.BatchNorm1d(width), lambda: nn.Dropout(0.3), is_centred=True),
        "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(lin(4, width)), act(), lin(width, CLASSES)),
        "spectral_norm": lambda: nn.Sequential(
            parametrizations.spectral_norm(lin(4, width)), act(), lin(width, CLASSES)
        ),
        "frozen": lambda: nn.Sequential(lin(4, width).requires_grad_(False), act(), layers_of(width, act)),
        "residual": lambda: Formula(
            lambda net, a, b, c, x: c(a(x) + torch.tanh(b(a(x)))), lin(4, width), lin(width, width), lin(width, CLASSES)
        ),
        "tied": lambda: Formula(
            lambda net, a, b, x: b(F.linear(torch.tanh(a(x)), a.weight.T)), nn.Linear(4, width), lin(4, CLASSES)
        ),
        "called_twice": lambda: Formula(
            lambda net, a, b, c, x: c(torch.tanh(b(torch.tanh(b(a(x)))))),
            lin(4, width), lin(width, width), lin(width, CLASSES),
        ),
        "bare": lambda: Formula(
            lambda net, a, x: a(torch.tanh(x @ net.w.square() + net.b)),
            lin(width, CLASSES), w=torch.randn(4, width), b=torch.zeros(width),
        ),
        "scaled": lambda: Formula(
            lambda net, a, b, x: net.s * b(torch.relu(a(x)) * net.t), lin(4, width), lin(width, CLASSES),
            s=torch.tensor(1.3), t=torch.ones(width),
        ),
        "mixture": lambda: Formula(experts, lin(4, 2), lin(4, CLASSES), lin(4, CLASSES)),
        "routed": lambda: Formula(routed, lin(4, 2), lin(4, CLASSES), lin(4, CLASSES)),
        "branching": lambda: Formula(
            lambda net, a, b, x: b(torch.tanh(a(x)) if float(a.weight.detach().sum()) > 0 else torch.relu(a(x))),
            lin(4, width), lin(width, CLASSES),
        ),
        "own_operation": lambda: Formula(
            lambda net, a, b, x: b(Cube.apply(a(x))), lin(4, width), lin(width, CLASSES)
        ),
        "stop_gradient": lambda: Formula(
            lambda net, a, b, x: b(torch.tanh(a(x)) + a(x).detach().square()), lin(4, width), lin(width, CLASSES)
        ),
        "bilinear": lambda: Formula(
            lambda net, a, b, x: b(torch.tanh(a(x[:, :2].contiguous(), x[:, 2:].contiguous()))),
            nn.Bilinear(2, 2, width), lin(width, CLASSES),
        ),
        "in_place": lambda: Formula(
            lambda net, a, b, x: b(F.relu(1.5 * a(x), inplace=True)), lin(4, width), lin(width, CLASSES)
        ),
        "one_output": lambda: nn.Sequential(lin(4, width), act(), lin(width, 1)),
    }  # fmt: skip


def layers_of(width: int, act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), act(), nn.Linear(width, CLASSES))


def images(draw: random.Random) -> dict[str, Callable[[], nn.Module]]:
    """Return networks of images of 6 × 6 pixels."""
    width, act = draw.randint(2, 4), draw.choice(ACTIVATIONS)
    pool = draw.choice([nn.MaxPool2d, nn.AvgPool2d])

    def two(*between: Callable[[], nn.Module], groups: int = 1, is_centred: bool = False) -> nn.Module:
        first = [nn.Conv2d(1, width, 3, padding=1, bias=not is_centred), *(make() for make in between), act(), pool(2)]
        second = [nn.Conv2d(width, width, 2, groups=groups), act()]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(4 * width, CLASSES))

    return {
        "convolutions": two,
        "convolutions_batch_norm": lambda: two(lambda: nn.BatchNorm2d(width), is_centred=True),
        "convolutions_group_norm": lambda: two(lambda: nn.GroupNorm(1, width)),
        "convolutions_dropout": lambda: two(lambda: nn.Dropout2d(0.3)),
        "depthwise": lambda: two(groups=width),
        "transposed": lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, stride=3), act(), nn.ConvTranspose2d(2, 2, 2), nn.Flatten(), nn.Linear(18, CLASSES)
        ),
        "adaptive_pool": lambda: nn.Sequential(
            nn.Conv2d(1, width, 3), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        ),
    }


def series(draw: random.Random) -> dict[str, Callable[[], nn.Module]]:
    """Return networks of series of five pairs."""
    width = 2 * draw.randint(1, 2)

    def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
        cells = kind(2, width, batch_first=True, **options)
        return Formula(lambda net, a, b, x: b(a(x)[0][:, -1]), cells, nn.Linear(width, CLASSES))

    def attention(dropout: float, norm_first: bool) -> nn.Module:
        block = nn.TransformerEncoderLayer(width, 2, 4, dropout=dropout, batch_first=True, norm_first=norm_first)
        block.self_attn.register_parameter("in_proj_bias", None)  # the gradient of a bias of keys is rounding, as above
        return Formula(
            lambda net, a, b, c, x: c(b(a(x) + net.places).mean(dim=1)),
            nn.Linear(2, width), block, nn.Linear(width, CLASSES), places=0.1 * torch.randn(5, width),
        )  # fmt: skip

    return {
        "rnn": lambda: recurrent(nn.RNN),
        "gru": lambda: recurrent(nn.GRU),
        "lstm": lambda: recurrent(nn.LSTM),
        "gru_two_layers": lambda: recurrent(nn.GRU, num_layers=2),
        "attention": lambda: attention(0.0, False),
        "attention_norm_first": lambda: attention(0.0, True),
        "attention_dropout": lambda: attention(0.2, False),
        "heads": lambda: Formula(
            lambda net, q, o, x: o(
                F.scaled_dot_product_attention(*q(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4))
                .transpose(1, 2).flatten(2).amax(dim=1)
            ),
            nn.Linear(2, 6 * width, bias=False), nn.Linear(2 * width, CLASSES),
        ),
        "convolution_1d": lambda: Formula(
            lambda net, a, b, x: b(torch.relu(a(x.mT)).flatten(1)),
            nn.Conv1d(2, width, 3), nn.Linear(3 * width, CLASSES),
        ),
        "linear_positions": lambda: nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2), nn.Flatten(), nn.Linear(10, CLASSES)
        ),
    }  # fmt: skip


def tokens(draw: random.Random) -> dict[str, Callable[[], nn.Module]]:
    """Return networks of texts of five tokens."""
    width = draw.randint(2, 4)
    return {
        "embedding": lambda: Formula(
            lambda net, e, a, x: a(torch.tanh(e(x)).flatten(1)), nn.Embedding(7, width), nn.Linear(5 * width, CLASSES)
        ),
        "embedding_places": lambda: Formula(
            lambda net, e, p, n, a, x: a(n(e(x) + p(torch.arange(5))).mean(dim=1)),
            nn.Embedding(7, width), nn.Embedding(5, width), nn.LayerNorm(width), nn.Linear(width, CLASSES),
        ),
        "embedding_tied": lambda: Formula(
            lambda net, e, a, x: F.linear(torch.tanh(a(e(x).mean(dim=1))), e.weight)[:, :CLASSES],
            nn.Embedding(7, width), nn.Linear(width, width),
        ),
        "embedding_bag": lambda: Formula(
            lambda net, e, a, x: a(torch.tanh(e(x))), nn.EmbeddingBag(7, width), nn.Linear(width, CLASSES)
        ),
    }  # fmt: skip


INPUTS: dict[str, tuple[Callable[[random.Random], dict[str, Callable[[], nn.Module]]], Callable[..., Tensor]]] = {
    "rows": (rows, lambda n, g: torch.randn(n, 4, generator=g, dtype=torch.float64)),
    "images": (images, lambda n, g: torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64)),
    "series": (series, lambda n, g: torch.randn(n, 5, 2, generator=g, dtype=torch.float64)),
    "tokens": (tokens, lambda n, g: torch.randint(0, 7, (n, 5), generator=g)),
}
