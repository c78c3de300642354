"""Loops of their own kind: adversarial training, several optimizers, frozen layers, weights."""

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from recipes.problem import C, batches, finish, train, vectors

TEST = vectors(26)[0][24:]


def mlp(*, batch_norm=False, dropout=0.0):
    norm = [nn.BatchNorm1d(7)] if batch_norm else []
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(5, 7), *norm, nn.Tanh(), *drop, nn.Linear(7, C)).double()


def pgd(net, x, y, eps=0.3, alpha=0.1, steps=2):
    """Return rows inside the eps-box around x that the network takes for another class."""
    x_adv = x + torch.empty_like(x).uniform_(-eps, eps)
    for _ in range(steps):
        x_adv.requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x_adv), y), x_adv)
        x_adv = (x_adv.detach() + alpha * gradient.sign()).clamp(x - eps, x + eps)
    return x_adv.detach()


def pgd_in_evaluation_mode():
    X, y = vectors(24)
    net = mlp(batch_norm=True, dropout=0.2)

    def loss(batch):
        net.eval()
        x_adv = pgd(net, X[batch], y[batch])
        net.train()
        return F.cross_entropy(net(x_adv), y[batch])

    return train(net, X, y, TEST, loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def two_optimizers():
    X, y = vectors(24)
    net = mlp(dropout=0.2)
    encoder = torch.optim.AdamW(net[0].parameters(), lr=0.01)
    head = torch.optim.SGD(net[-1].parameters(), lr=0.1, momentum=0.9)
    return train(net, X, y, TEST, lambda b: F.cross_entropy(net(X[b]), y[b]), optimizer=[encoder, head])


def freeze_then_thaw():
    X, y = vectors(24)
    backbone = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh())
    net = nn.Sequential(backbone, nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, C)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
        for epoch in range(3):
            net.train()
            frozen = epoch == 0
            backbone.requires_grad_(not frozen)
            if frozen:
                backbone.eval()  # its BatchNorm keeps its statistics; the head's moves
            for batch in batches(len(X), 8, epochs=1):
                optimizer.zero_grad()
                F.cross_entropy(net(X[batch]), y[batch]).backward()
                recorder.batch(batch)  # recorder
                optimizer.step()
    return finish(recorder, net, TEST, X, y)


def sample_weights():
    X, y = vectors(24)
    importance = torch.linspace(0.2, 2.0, 24, dtype=torch.float64)
    net = mlp(dropout=0.2)

    def loss(batch):
        return (importance[batch] * F.cross_entropy(net(X[batch]), y[batch], reduction="none")).mean()

    def announce(recorder, batch):
        recorder.batch(batch, weight=importance[batch])

    return train(net, X, y, TEST, loss, announce=announce)


RECIPES = [pgd_in_evaluation_mode, two_optimizers, freeze_then_thaw, sample_weights]
