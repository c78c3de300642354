"""Networks with several inputs and outputs that are no tensor (n, C), each beside the same one wrapped by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import epk_gp as epk

NUM_POINTS, NUM_TOKENS, NUM_CLASSES = 8, 4, 3


@dataclass
class ModelOutput:
    logits: Tensor
    hidden: Tensor | None = None


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 6), nn.Linear(2, 6), nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x) + self.b(z.view(-1, 2))))


class Tagger(nn.Module):
    """Token numbers, a mask and a number per sample; it returns a class score for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(10, 5), nn.Linear(5, 6)
        self.out = nn.Linear(6, NUM_CLASSES)

    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor) -> ModelOutput:
        assert ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        h = torch.tanh(self.hidden(self.embed(ids))) * scale[:, None, None]
        h = h * mask[..., None]
        return ModelOutput(self.out(h + h.mean(dim=1, keepdim=True)), h)


def tagger_inputs(n: int = NUM_POINTS) -> dict[str, Tensor]:
    """Return inputs of `Tagger`, keys in another order than they are packed in."""
    mask = torch.rand(n, NUM_TOKENS) > 0.3
    mask[:, 0] = True
    return {"scale": torch.rand(n).double() + 0.5, "mask": mask, "ids": torch.randint(0, 10, (n, NUM_TOKENS))}


def two_inputs(n: int = NUM_POINTS) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3).double(), torch.randn(n, 1, 2).double()


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, X: Tensor) -> Tensor:
        return self.call(self.inner, X)


def mean_logits(returned: Any) -> Tensor:
    """Take one row of scores per sample from what `Tagger` returns."""
    return returned.logits.mean(dim=1)


def record(net: nn.Module, X: Any, y: Tensor, *, steps: int = 4, momentum: float = 0.0, **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=momentum)
    generator = torch.Generator().manual_seed(3)
    return epk.train(net, X, y, optimizer=optimizer, steps=steps, batch_size=5, generator=generator, **options)
