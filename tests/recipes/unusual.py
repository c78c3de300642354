"""Recipes from further afield: distillation, several heads, an autoencoder, low precision."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from recipes.problem import C, batches, finish, images, vectors
from recipes.problem import train as train_on_batches


def train(net, X, y, X_test, loss_of_batch, **options):
    """Train on batches of 8; `loss_of_batch` takes what the network returned and the batch."""
    return train_on_batches(net, X, y, X_test, lambda batch: loss_of_batch(net(X[batch]), batch), **options)


def distillation():
    """Hinton et al. (2015): softened outputs of a teacher, and the labels."""
    X, y = vectors(24)
    teacher = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, C)).double()
    student = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, C)).double()

    def loss(z, batch):
        with torch.no_grad():
            soft = F.softmax(teacher(X[batch]), dim=1)
        return 0.7 * F.kl_div(F.log_softmax(z, dim=1), soft, reduction="batchmean") + 0.3 * F.cross_entropy(z, y[batch])

    with torch.no_grad():  # recorder: the loss is a cross entropy with these targets, and a constant
        targets = 0.7 * F.softmax(teacher(X), dim=1) + 0.3 * F.one_hot(y, C).double()
    return train(student, X, targets, vectors(26)[0][24:], loss)


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


def spectral_norm():
    """The power iteration's vectors move in every training forward pass, as moving statistics do."""
    X, y = vectors(24)
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, C)).double()
    return train(net, X, y, vectors(26)[0][24:], lambda z, b: F.cross_entropy(z, y[b]))


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
    return train_on_batches(net, X, X, vectors(26)[0][24:], loss, optimizer=optimizer, loss=own, output=reconstruction)


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
    return train_on_batches(net, X, y, X_test, loss, optimizer=optimizer, unexplained=0.1)


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


RECIPES = [distillation, several_tasks, weighted_sampler, spectral_norm, vae]
IN_LOW_PRECISION = [bf16_autocast, grad_scaler]
