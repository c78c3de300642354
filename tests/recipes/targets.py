"""Recipes whose targets are no labels, recipes in low precision, and loops that a recorder refuses."""

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from recipes.problem import C, batches, finish, train, vectors


class VAE(nn.Module):
    """The variational autoencoder of pytorch/examples, with fewer units."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(5, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.fc3, self.fc4 = nn.Linear(2, 6), nn.Linear(6, 5)

    def reparameterize(self, mu, logvar):
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = torch.tanh(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = self.reparameterize(mu, logvar)
        return self.fc4(torch.tanh(self.fc3(z))), mu, logvar


def elbo_per_row(returned, x):
    recon, mu, logvar = returned
    return (recon - x).square().sum(dim=1) - 0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(dim=1)


def reconstruction(returned):
    return returned[0]


def vae():
    X, _ = vectors(24)
    net = VAE().double()
    own = epk.PerSampleLoss(elbo_per_row, reduction="sum")  # recorder

    def loss(batch):
        recon, mu, logvar = net(X[batch])
        squares = F.mse_loss(recon, X[batch], reduction="sum")
        return squares - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    return train(net, X, X, vectors(26)[0][24:], loss, optimizer=optimizer, loss=own, output=reconstruction)


def float32_net():
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, C))


def bf16_autocast():
    X, y = vectors(24, dtype=torch.float32)
    net = float32_net()

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(net(X[batch]), y[batch])

    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    X_test = vectors(26, dtype=torch.float32)[0][24:]
    return train(net, X, y, X_test, loss, optimizer=optimizer, unexplained=0.1)


def grad_scaler():
    """The first scale is so large that gradients overflow: the scaler skips those steps and halves its scale."""
    X, y = vectors(24, dtype=torch.float32)
    X = 50 * X  # not normalised
    net = float32_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.25)
    with epk.Recorder(net, optimizer, X, y, unexplained=1e-3) as recorder:  # recorder
        net.train()
        for batch in batches(len(X), 8, epochs=3):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(X[batch]), y[batch])
            scaler.scale(loss).backward()
            recorder.batch(batch)  # recorder
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**127
    return finish(recorder, net, 50 * vectors(26, dtype=torch.float32)[0][24:], X, y)


RECIPES = [vae]
IN_LOW_PRECISION = [bf16_autocast, grad_scaler]
