"""A vision transformer with drop path and checkpointing."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes.problem import C, images, train


class DropPath(nn.Module):
    """Stochastic depth as in timm: one branch is left out for whole samples."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        kept = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(kept)
        return x * mask.div_(kept)


class ViTBlock(nn.Module):
    def __init__(self, dim, rate):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim))
        self.drop_path = DropPath(rate)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop_path(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, *, dim=4, depth=2):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 3, stride=3)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 5, dim))
        self.blocks = nn.ModuleList([ViTBlock(dim, 0.1 * (i + 1)) for i in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, C)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(self.norm(x)[:, 0])


def checkpointing():
    X, y = images(16)
    net = ViT().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    X_test = images(17)[0][16:]
    return train(net, X, y, X_test, lambda b: criterion(net(X[b]), y[b]), optimizer=optimizer, loss=criterion)


RECIPES = [checkpointing]
