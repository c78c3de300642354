"""Loops of their own kind: adversarial training, several optimizers, weights, rows drawn twice, moved statistics."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from recipes.problem import C, batches, finish, images, train, vectors

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


def sample_weights():
    X, y = vectors(24)
    importance = torch.linspace(0.2, 2.0, 24, dtype=torch.float64)
    net = mlp(dropout=0.2)

    def loss(batch):
        return (importance[batch] * F.cross_entropy(net(X[batch]), y[batch], reduction="none")).mean()

    def announce(recorder, batch):
        recorder.batch(batch, weight=importance[batch])

    return train(net, X, y, TEST, loss, announce=announce)


class Erased(Dataset):
    """Random erasing, done by the dataset."""

    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        image = self.X[i].clone()
        top, left = torch.randint(5, (2,)).tolist()
        image[:, top : top + 2, left : left + 2] = 0
        return image, self.y[i]


def weighted_sampler():
    """Rows are drawn with replacement, so that a batch holds some twice, each erased elsewhere."""
    X, y = images(24)
    layers = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, C)]
    net = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    sampler = WeightedRandomSampler(torch.linspace(0.1, 1.0, 24), 24)
    loader = DataLoader(IndexedDataset(Erased(X, y)), batch_size=10, sampler=sampler)
    with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
        net.train()
        for _ in range(2):
            for indices, (inputs, labels) in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()
                recorder.batch(indices)  # recorder
                optimizer.step()
    return finish(recorder, net, images(26)[0][24:], X, y)


def statistics_moved_without_gradients():
    """The loop re-estimates the statistics before each epoch, and looks at a training loss under no_grad."""
    X, y = vectors(24)
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, C)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
        net.train()
        for _ in range(2):
            update_bn(X.split(8), net)
            for batch in batches(len(X), 8, epochs=1):
                with torch.no_grad():
                    F.cross_entropy(net(X[batch]), y[batch])
                optimizer.zero_grad()
                F.cross_entropy(net(X[batch]), y[batch]).backward()
                recorder.batch(batch)  # recorder
                optimizer.step()
    return finish(recorder, net, vectors(26)[0][24:], X, y)


def spectral_norm():
    """The power iteration's vectors move in every training forward pass, as moving statistics do."""
    X, y = vectors(24)
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, C)).double()
    return train(net, X, y, vectors(26)[0][24:], lambda b: F.cross_entropy(net(X[b]), y[b]))


RECIPES = [
    pgd_in_evaluation_mode, two_optimizers, sample_weights, weighted_sampler, statistics_moved_without_gradients,
    spectral_norm,
]  # fmt: skip
