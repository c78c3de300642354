"""The networks of the attribution benchmark and their log-likelihoods. Needs torch only: every peer imports it."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

DROPOUT = 0.1  # dattri's


def build(kind: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Make a network with torch's own initial weights.

    Args:
        kind: "mlp" and "logistic" (dattri's networks for MNIST), "small", "relu", "tanh", "cnn" or "transformer".
        shape: Shape of one input: (channels, height, width), or (length,) of a text.
        num_classes: Classes, or letters of a text; 1 where numbers are to be learnt.
    """
    size = math.prod(shape)
    if kind == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))
    if kind in (middle := {"small": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh}):
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), middle[kind](), nn.Linear(32, num_classes))
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Dropout(DROPOUT),
            nn.Linear(128, 64), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(64, num_classes),
        )  # fmt: skip
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(shape[0], 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * (shape[1] // 4) * (shape[2] // 4), num_classes),
        )  # fmt: skip
    return Transformer(num_classes, shape[0])


class Transformer(nn.Module):
    """One block with causal attention: each letter is predicted from those before it."""

    def __init__(self, letters: int, length: int, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, dim), nn.Embedding(length, dim)
        self.norm_1, self.norm_2, self.norm_3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.last = nn.Linear(dim, letters)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the letter that follows each place, (n, T, letters)."""
        h = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        h = h + self._attend(self.norm_1(h))
        h = h + self.narrow(F.gelu(self.wide(self.norm_2(h))))
        return self.last(self.norm_3(h))

    def _attend(self, h: Tensor) -> Tensor:
        # written out: torch's fused attention has no second derivative on a CPU, and influence functions need it
        n, T, dim = h.shape
        q, k, v = (part.view(n, T, self.heads, -1).transpose(1, 2) for part in self.queries(h).split(dim, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        later = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(3) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, T, dim))


def padded(y: Tensor) -> bool:
    """Return whether some positions of texts are padding, which the loss leaves out."""
    return y.ndim > 1 and bool((y < 0).any())


def log_p(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p(target) of every sample, of a text the mean over its letters: (n,).

    Of numbers (n, C) it is minus the squared error: the loss is -log p everywhere.
    """
    if targets.is_floating_point():
        return -(logits - targets).square().sum(1)
    values = -F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def answers(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number that is explained of every sample: log p(target), or the first output of numbers, (n,)."""
    return logits[:, 0] if targets.is_floating_point() else log_p(logits, targets)


def total_log_p(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p(target) of every sample, of a text the sum over its letters without padding: (n,)."""
    return -F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none").reshape(len(targets), -1).sum(1)


def functional_answers(net: nn.Module, weights: dict[str, Tensor], X: Tensor, y: Tensor) -> Tensor:
    """Return the explained number of every sample for a network with other weights: (n,)."""
    return answers(functional_call(net, weights, (X,)), y)


class Scored(nn.Module):
    """A network that returns log p(target) itself, (n, 1): what is explained where a sample has several targets."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log p(target), (n, 1)."""
        return log_p(self.net(x), y)[:, None]


def hidden(net: nn.Module, X: Tensor) -> Tensor:
    """Return what enters the last layer, of a text the mean over its places: (n, features)."""
    last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    found: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].detach()))
    with torch.no_grad():
        net.eval()(X)
    handle.remove()
    return found[0].flatten(1, -2).mean(1) if found[0].ndim > 2 else found[0]
