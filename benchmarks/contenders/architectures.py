"""Five networks whose tangent kernels are compared, in torch; `architectures_jax` has the same functions in JAX."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, POSITIONS, WORDS = 4, 16, 64


def mlp() -> nn.Module:
    """Return three layers of ReLU."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    """Return two convolutions with pooling."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10),
    )  # fmt: skip


class ResNet(nn.Module):
    """A stem and two residual blocks of convolutions and BatchNorm, whose statistics are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(5))
        self.last = nn.Linear(16, 10)
        for norm in self.norms:  # as if it had been trained
            nn.init.uniform_(norm.running_mean, -0.2, 0.2)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 10)."""
        h = F.relu(self.norms[0](self.stem(x)))
        for i in (0, 2):
            inner = F.relu(self.norms[i + 1](self.convolutions[i](h)))
            h = F.relu(h + self.norms[i + 2](self.convolutions[i + 1](inner)))
        return self.last(h.mean((2, 3)))


class Transformer(nn.Module):
    """Two blocks of attention on tokens, LayerNorm before each part, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(POSITIONS, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(5))
        self.into = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 128) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(128, 32) for _ in range(2))
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 8)."""
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for i in range(2):
            q, k, v = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for part in self.into[i](self.norms[2 * i](h)).chunk(3, dim=-1)
            )
            attention = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
            h = h + self.out[i]((attention @ v).transpose(1, 2).flatten(2))
            h = h + self.down[i](F.gelu(self.up[i](self.norms[2 * i + 1](h)), approximate="tanh"))
        return self.last(self.norms[4](h).mean(1))


class Shared(nn.Module):
    """One layer that is used four times, with LayerNorm: a recurrent network whose input stays."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.norm, self.last = (
            nn.Linear(64, 128), nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, 10)."""
        h = u = self.into(x)
        for _ in range(4):
            h = torch.tanh(self.norm(self.again(h) + u))
        return self.last(h)


# Class, shape of one input, points on either side
ARCHITECTURES = {
    "MLP 784-128-128-10": (mlp, (784,), 50),
    "CNN 1-8-16 with pooling": (cnn, (1, 28, 28), 30),
    "ResNet, 5 convolutions, frozen BatchNorm": (ResNet, (3, 16, 16), 24),
    "transformer, 2 blocks, 16 tokens": (Transformer, (POSITIONS,), 32),
    "one layer used 4 times, LayerNorm": (Shared, (64,), 60),
}


def make_network(name: str) -> nn.Module:
    """Return a network with random weights, in evaluation mode and float64."""
    torch.manual_seed(0)
    net: nn.Module = ARCHITECTURES[name][0]()
    return net.double().eval()


def make_points(name: str) -> tuple[Tensor, Tensor]:
    """Return the points on the left and on the right."""
    torch.manual_seed(1)
    _, shape, n = ARCHITECTURES[name]
    if shape == (POSITIONS,):
        return torch.randint(0, WORDS, (n, *shape)), torch.randint(0, WORDS, (n, *shape))
    return torch.randn(n, *shape, dtype=torch.float64), torch.randn(n, *shape, dtype=torch.float64)
