"""Recipes from further afield: distillation, several heads and inputs, odd normalisation, moved statistics."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from recipes.problem import C, batches, finish, images, vectors
from recipes.problem import train as train_on_batches


def train(net, X, y, X_test, loss_of_batch, **options):
    """Train on batches of 8; `loss_of_batch` takes what the network returned and the batch."""

    def loss(batch):
        return loss_of_batch(net(*(x[batch] for x in X)) if isinstance(X, tuple) else net(X[batch]), batch)

    return train_on_batches(net, X, y, X_test, loss, **options)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2))
        self.label, self.size = nn.Linear(6, C), nn.Linear(6, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.label(h), self.size(h).squeeze(1)


def first(returned):
    return returned[0]


def several_tasks():
    X, y = vectors(24)
    targets = torch.cat([F.one_hot(y, C).double(), X.norm(dim=1, keepdim=True)], dim=1)

    def per_row(returned, t):
        labels, sizes = returned
        return F.cross_entropy(labels, t[:, :C], reduction="none") + 0.5 * (sizes - t[:, C]).square()

    def loss(returned, batch):
        return F.cross_entropy(returned[0], y[batch]) + 0.5 * F.mse_loss(returned[1], X[batch].norm(dim=1))

    own = epk.PerSampleLoss(per_row)
    return train(TwoHeads().double(), X, targets, vectors(26)[0][24:], loss, loss=own, output=first)


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.3 * torch.randn_like(x) if self.training else x


def noise_inside():
    X, y = vectors(24)
    net = nn.Sequential(Noise(), nn.Linear(5, 6), nn.Tanh(), Noise(), nn.Linear(6, C)).double()
    return train(net, X, y, vectors(26)[0][24:], lambda z, b: F.cross_entropy(z, y[b]))


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
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(48, C)
    ).double()
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
    return train(net, X, y, vectors(26)[0][24:], lambda z, b: F.cross_entropy(z, y[b]))


RECIPES = [
    several_tasks,
    noise_inside,
    weighted_sampler,
    statistics_moved_without_gradients,
    spectral_norm,
]
