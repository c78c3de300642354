"""Networks whose derivative is not the derivative of their outputs, and networks that only look like it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Base(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.activation = activation

    def hidden(self, x: Tensor) -> Tensor:
        return self.activation(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.activation(self.b(self.hidden(x))))


class StraightThrough(Base):
    def forward(self, x: Tensor) -> Tensor:
        w = self.b.weight
        w = w + ((8 * w).round() / 8 - w).detach()
        return self.c(self.activation(F.linear(self.hidden(x), w, self.b.bias)))


class StopGradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.c(self.activation(self.b(h)) + 0.3 * h.detach())


class GradientReversal(Base):
    """One output whose gradient has the other sign below the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        z = self.c(self.activation(self.b(h)))
        return torch.cat([z[:, :2], self.c(2 * h.detach() - h)[:, :1]], dim=1)


class TopOneExperts(Base):
    """Each input goes through the expert that its gate prefers: the outputs jump where that changes."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__(activation)
        self.gate, self.experts = nn.Linear(12, 8), nn.ModuleList(nn.Linear(12, 12) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        share, best = self.gate(h).softmax(dim=1).max(dim=1)
        routed = torch.stack([expert(h) for expert in self.experts], dim=1)[torch.arange(len(x)), best]
        return self.c(share[:, None] * routed)


class Autocast(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).to(x.dtype)


class CastInside(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.activation(self.b(self.hidden(x).bfloat16().to(x.dtype))))


class SingleInside(Base):
    """Computes in float32 whatever its inputs are, as normalisations of language models do."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(self.hidden(x).float(), self.b.weight.float(), self.b.bias.float())
        return self.c(self.activation(h).to(x.dtype))


class SingleNorm(Base):
    """Normalises in float32 whatever its weights are, as language models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x).float()
        return self.c(self.activation(self.b((h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype))))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x[:, None] * torch.linspace(0.5, 1.5, 3).to(x)[:, None])[:, 0])


def zero_last_layer() -> nn.Module:
    net = Base(torch.relu)
    nn.init.zeros_(net.c.weight)
    nn.init.zeros_(net.c.bias)
    return net


FAULTY = {
    "straight_through": StraightThrough, "stop_gradient": StopGradient, "gradient_reversal": GradientReversal,
    "cast_inside": CastInside,
}  # fmt: skip
SOUND = {
    "tanh": Base,
    "relu": lambda: Base(torch.relu),
    "gelu": lambda: Base(F.gelu),
    "convolutional": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6, 3),
    ),
    "attentive": Attentive,
    "zero_last_layer": zero_last_layer,
    "weight_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.ELU(), nn.Linear(8, 3)
    ),
}  # fmt: skip
