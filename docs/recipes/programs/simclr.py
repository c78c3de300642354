import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import digits


class SimCLR(nn.Module):
    def __init__(self, width=4, dim=6):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(9 * width, 8), nn.ReLU(), nn.Linear(8, dim)
        )

    def forward(self, x):
        return self.projector(self.encoder(x))


def view(images):
    """Move the images by a pixel, mirror them or not, and add noise."""
    top, left = torch.randint(3, (2,)).tolist()
    moved = F.pad(images, (1, 1, 1, 1))[:, :, top : top + 8, left : left + 8]
    moved = moved.flip(3) if torch.rand(()) < 0.5 else moved
    return moved + 0.1 * torch.randn_like(moved)


def nt_xent(z, temperature=0.5):
    """Rows i and i + n are views of one image; all others are negatives."""
    n = len(z) // 2
    z = F.normalize(z, dim=1)
    similarity = z @ z.T / temperature
    similarity = similarity.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(similarity, torch.arange(2 * n).roll(n))


torch.manual_seed(0)
data = digits()
X, X_test = data.inputs[:32], data.inputs[-2:]
net = SimCLR().double()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=1e-4)
with epk.Recorder(net, optimizer, X, None, loss=None) as recorder:  # recorder
    net.train()
    for epoch in range(2):
        for batch in torch.randperm(len(X)).split(8):
            optimizer.zero_grad()
            z = net(torch.cat([view(X[batch]), view(X[batch])]))
            nt_xent(z).backward()
            recorder.batch(torch.cat([batch, batch]))  # recorder
            optimizer.step()
