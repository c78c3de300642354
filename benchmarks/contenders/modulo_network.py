"""The network of ExPLAIND's example: one block of attention without masks, on sums modulo a prime (a, +, b, =)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ModuloNetwork(nn.Module):
    """`SingleLayerTransformerClassifier` of explaind 0.1.0 without its unused positions; log-probabilities come out."""

    def __init__(self, tokens: int, dim: int, hidden: int, heads: int = 4) -> None:
        super().__init__()
        self.input_emb = nn.Embedding(tokens, dim)
        self.encoders = nn.ModuleList(nn.Linear(dim, dim // heads, bias=False) for _ in range(heads))
        self.decoders = nn.ModuleList(nn.Linear(dim // heads, dim, bias=False) for _ in range(heads))
        self.linear1, self.linear2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.decoder = nn.Linear(dim, tokens, bias=False)
        self.scale = math.sqrt(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities of the result, (n, tokens)."""
        h = self.input_emb(x) * self.scale
        parts = [encode(h) for encode in self.encoders]
        mixed = [F.scaled_dot_product_attention(part, part, part) for part in parts]
        h = torch.stack([decode(part) for decode, part in zip(self.decoders, mixed, strict=True)]).sum(dim=0)
        h = h + F.relu(self.linear2(F.relu(self.linear1(h))))
        return self.decoder(h)[:, -1].log_softmax(dim=-1)


def modulo_network(problem: dict[str, Any]) -> nn.Module:
    """Build the example's network; the same seed gives the same initial weights in every environment."""
    torch.manual_seed(0)
    return ModuloNetwork(problem["tokens"], problem["dim"], problem["hidden"])
