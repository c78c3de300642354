"""Parts of odd programs: networks, optimizers, what a loop may change in them, clipping, functions of outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

POINTS, CLASSES = 10, 3
WIDTH = 4
AVERAGE = 0.3  # coefficient of the averages of weights


class Estimator(nn.Module):
    """Adds what has no derivative: straight-through rounding, or a branch without a gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rounds = kind == "straight_through"

    def forward(self, h: Tensor) -> Tensor:
        return h + ((h * 4).round() / 4 - h if self.rounds else 0.5 * h.square()).detach()


class FakeQuantised(nn.Module):
    """A linear layer whose weights are rounded by torch's own function."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        W = torch.fake_quantize_per_tensor_affine(self.inner.weight.float(), 0.05, 0, -128, 127)
        return F.linear(x, W.to(x.dtype), self.inner.bias)


class Tokens(nn.Module):
    """The mean of embeddings, whose gradients are divided by how often a token occurs in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).mean(dim=1)


class Tied(nn.Module):
    """One matrix used twice."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(inputs, WIDTH), nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.out(F.linear(h, self.inner.weight.T))


def make_net(kind: str, inputs: int, activation: type[nn.Module]) -> nn.Module:
    """Make a network of some 30 weights."""
    first, last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, CLASSES)
    match kind:
        case "tied":
            return Tied(inputs)
        case "embedding":
            return nn.Sequential(Tokens(), activation(), last)
        case "convolution":
            body = [nn.Unflatten(1, (1, inputs)), nn.Conv1d(1, 3, 2), activation(), nn.Flatten()]
            return nn.Sequential(*body, nn.Linear(3 * (inputs - 1), CLASSES))
        case "batch_norm" | "layer_norm":
            norm = nn.BatchNorm1d(WIDTH) if kind == "batch_norm" else nn.LayerNorm(WIDTH)
            if kind == "batch_norm":  # a bias before it has gradients of rounding, of which Adam makes full steps
                first = nn.Linear(inputs, WIDTH, bias=False)
            return nn.Sequential(first, norm, activation(), last)
        case "dropout" | "straight_through" | "stop_gradient":
            return nn.Sequential(first, activation(), nn.Dropout(0.3) if kind == "dropout" else Estimator(kind), last)
        case "fake_quant":
            return nn.Sequential(FakeQuantised(inputs, WIDTH), activation(), last)
        case "weight_norm" | "spectral_norm" | "orthogonal":
            return nn.Sequential(getattr(parametrizations, kind)(first), activation(), last)
    return nn.Sequential(first, activation(), last)


DAMPED = {"momentum": 0.8, "dampening": 0.2}
# Optimizers, their learning rates, and options to choose from.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], float, list[dict[str, Any]]]] = {
    "SGD": (torch.optim.SGD, 0.2, [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, DAMPED]),
    "Adam": (torch.optim.Adam, 0.05, [{}, {"eps": 1e-3}, {"amsgrad": True}, {"foreach": True}]),
    "AdamW": (torch.optim.AdamW, 0.05, [{}, {"eps": 1e-3}, {"amsgrad": True}]),
    "RMSprop": (torch.optim.RMSprop, 0.02, [{}, {"momentum": 0.8}, {"centered": True, "eps": 1e-3}]),
    "Adagrad": (torch.optim.Adagrad, 0.1, [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.1}]),
    "Adadelta": (torch.optim.Adadelta, 1.0, [{"eps": 1e-3}, {"rho": 0.8, "eps": 1e-4}]),
    "Adamax": (torch.optim.Adamax, 0.05, [{}, {"eps": 1e-3}]),
    "NAdam": (torch.optim.NAdam, 0.05, [{}, {"eps": 1e-3}]),
    "RAdam": (torch.optim.RAdam, 0.05, [{"betas": (0.9, 0.9)}, {"eps": 1e-3}]),
    "ASGD": (torch.optim.ASGD, 0.2, [{}, {"lambd": 0.1}]),
    "Adafactor": (torch.optim.Adafactor, 0.2, [{}, {"beta2_decay": -0.5}]),
}
# What a loop may change in their groups: name and value.
CHANGES: dict[str, list[tuple[str, Any]]] = {
    "SGD": [("momentum", 0.4), ("dampening", 0.4), ("weight_decay", 0.1), ("maximize", True), ("nesterov", True)],
    "Adam": [("betas", (0.9, 0.5)), ("betas", (0.5, 0.999)), ("eps", 0.05), ("weight_decay", 0.1), ("amsgrad", False)],
    "AdamW": [("betas", (0.9, 0.5)), ("eps", 0.05), ("weight_decay", 0.5), ("amsgrad", False), ("maximize", True)],
    "RMSprop": [("alpha", 0.5), ("eps", 0.05), ("momentum", 0.4), ("weight_decay", 0.1)],
    "Adagrad": [("eps", 0.1), ("lr_decay", 0.5), ("weight_decay", 0.1)],
    "Adadelta": [("rho", 0.5), ("eps", 0.05), ("weight_decay", 0.1)],
    "Adamax": [("eps", 0.05), ("betas", (0.9, 0.5)), ("betas", (0.5, 0.999))],
    "NAdam": [("betas", (0.9, 0.5)), ("eps", 0.05), ("momentum_decay", 0.5)],
    "RAdam": [("betas", (0.9, 0.5)), ("eps", 0.05)],
    "ASGD": [("lambd", 0.3), ("alpha", 0.5), ("weight_decay", 0.1)],
    "Adafactor": [("beta2_decay", -0.3), ("eps", (1e-3, 0.1)), ("d", 0.5), ("weight_decay", 0.5)],
}
LINEAR = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")  # whose steps `odd_programs` follows by hand


@dataclass(frozen=True)
class Clipping:
    """Clipping of the gradient, by torch's own functions."""

    kind: str  # "value" or "norm"
    bound: float
    norm_type: float = 2.0  # the p of the norm
    is_stated: bool = True  # whether the recorder is told

    def clip(self, parameters: list[nn.Parameter]) -> None:
        rest = () if self.kind == "value" else (self.norm_type,)
        getattr(nn.utils, f"clip_grad_{self.kind}_")(parameters, self.bound, *rest)


# Functions of the outputs of three points that mix rows, and others that do not.
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda f: torch.cat([f[:1], f[1:] - f[:-1]]),
    "cumsum": lambda f: f.cumsum(0),
    "centred": lambda f: f - f.mean(dim=0),
    "from the last": lambda f: torch.cat([f[:1], f[1:] - f[-1:]]),
    "flipped": lambda f: f.flip(0),
    "times the second": lambda f: torch.cat([f[:1], f[1:2], f[2:] * f[1:2]]),
    "softmax over rows": lambda f: torch.cat([f[:1].exp(), f[1:].softmax(dim=0)]),
}
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "margin": lambda f: f[:, 0] - f[:, 1],
    "squares": lambda f: f.square(),
    "entropy": lambda f: -(f.softmax(dim=1) * f.log_softmax(dim=1)).sum(dim=1),
    "mean square": lambda f: f.square().mean(),
}
