"""Variants of common loops: other passes, other reductions, other shapes of what the network sees."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epk_gp as epk
from recipes.loops import mlp, pgd
from recipes.problem import C, images, vectors
from recipes.problem import train as train_on_batches


def train(net, loss_of_rows, *, data=vectors, **options):
    """Train on batches of 8; `loss_of_rows` computes the loss of some inputs and labels."""
    X, y = data(24)
    return train_on_batches(net, X, y, data(26)[0][24:], lambda batch: loss_of_rows(X[batch], y[batch]), **options)


def mixup_with_smoothing():
    """timm's: smoothed labels are mixed, SoftTargetCrossEntropy."""
    net = mlp(dropout=0.1)

    def loss(x, y):
        lam = float(torch.rand(()))
        smooth = F.one_hot(y, C).double() * 0.9 + 0.1 / C
        target = smooth * lam + smooth.flip(0) * (1 - lam)
        return torch.sum(-target * F.log_softmax(net(x * lam + x.flip(0) * (1 - lam)), dim=-1), dim=-1).mean()

    return train(net, loss, loss=epk.CrossEntropy(label_smoothing=0.1))


def clean_and_adversarial_together():
    """One pass over both halves; each row of the batch is announced twice."""
    net = mlp(batch_norm=True)

    def loss(x, y):
        return F.cross_entropy(net(torch.cat([x, pgd(net, x, y)])), torch.cat([y, y]))

    return train(net, loss, announce=lambda recorder, batch: recorder.batch(torch.cat([batch, batch])))


def two_passes_of_one_batch():
    """Each pass is announced, in the order of the passes."""
    net = mlp(dropout=0.3)

    def loss(x, y):
        return F.cross_entropy(net(x), y) + 0.5 * F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), y)

    def announce(recorder, batch):
        recorder.batch(batch)
        recorder.batch(batch, weight=0.5)

    return train(net, loss, announce=announce)


def whole_network_checkpointed():
    net = mlp(dropout=0.3)
    return train(net, lambda x, y: F.cross_entropy(checkpoint(net, x, use_reentrant=False), y))


def hard_examples():
    """Only the half of a batch with the largest losses counts."""
    net = mlp(dropout=0.3)
    return train(net, lambda x, y: F.cross_entropy(net(x), y, reduction="none").topk(4).values.mean())


def sum_over_the_batch():
    net = mlp(dropout=0.3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    loss = nn.CrossEntropyLoss(reduction="sum")
    return train(net, lambda x, y: loss(net(x), y), optimizer=optimizer, loss=loss)


def small_crops():
    """The network sees crops of 5 x 5 pixels, the test images whole."""
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, C)]
    net = nn.Sequential(*layers).double()

    def loss(x, y):
        top, left = torch.randint(2, (2,)).tolist()
        return F.cross_entropy(net(x[:, :, top : top + 5, left : left + 5]), y)

    return train(net, loss, data=images)


def weight_norm():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
    net = nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, C)).double()
    return train(net, lambda x, y: F.cross_entropy(net(x), y))


def channels_last():
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, C)).double().to(memory_format=torch.channels_last)
    return train(net, lambda x, y: F.cross_entropy(net(x.to(memory_format=torch.channels_last)), y), data=images)


class ManifoldMixup(nn.Module):
    """Verma et al. (2019): hidden features are mixed, with numbers that are drawn inside."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, C)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.training:
            lam = torch.rand(()).to(h)
            h = lam * h + (1 - lam) * h[torch.randperm(len(h))]
        return self.last(h)


def manifold_mixup():
    net = ManifoldMixup().double()
    return train(net, lambda x, y: F.cross_entropy(net(x), y))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 2), nn.ModuleList([nn.Linear(5, C) for _ in range(2)])

    def forward(self, x):
        z = self.gate(x)
        weights = F.gumbel_softmax(z) if self.training else z.softmax(dim=1)
        return sum(weights[:, [k]] * expert(x) for k, expert in enumerate(self.experts))


def gumbel_softmax():
    net = Experts().double()
    return train(net, lambda x, y: F.cross_entropy(net(x), y))


class DeepLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 3, 2, dropout=0.3, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(6, C)

    def forward(self, x):
        return self.fc(self.lstm(x[..., None])[0][:, -1])


def lstm_with_dropout_between_layers():
    net = DeepLSTM().double()
    return train(net, lambda x, y: F.cross_entropy(net(x), y))


class ChannelsAtTheEnd(nn.Module):
    """Images (height, width, channels) are permuted inside, so that dropout meets another order in memory."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True), nn.GELU())
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(48, C))

    def forward(self, x):
        return self.head(self.features(x.permute(0, 3, 1, 2)))


def permuted_images():
    net = ChannelsAtTheEnd().double()

    def data(n):
        X, y = images(n, channels=3)
        return X.permute(0, 2, 3, 1).contiguous(), y

    return train(net, lambda x, y: F.cross_entropy(net(x), y), data=data)


def groups_and_one_cycle():
    """No weight decay for biases and BatchNorm; Nesterov; a learning rate that rises and falls."""
    net = mlp(batch_norm=True, dropout=0.1)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
    return train(net, lambda x, y: F.cross_entropy(net(x), y), optimizer=optimizer, after_step=scheduler.step)


def one_output_per_row():
    """Two classes, one logit, binary cross entropy."""
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1), nn.Flatten(0)).double()
    optimizer, criterion = torch.optim.Adam(net.parameters(), lr=0.01), nn.BCEWithLogitsLoss()

    def data(n):
        X, y = vectors(n)
        return X, (y > 0).double()

    return train(net, lambda x, y: criterion(net(x), y), data=data, optimizer=optimizer, loss=criterion)


RECIPES = [
    mixup_with_smoothing, clean_and_adversarial_together, two_passes_of_one_batch, whole_network_checkpointed,
    hard_examples, sum_over_the_batch, small_crops, weight_norm, channels_last, manifold_mixup, gumbel_softmax,
    lstm_with_dropout_between_layers, permuted_images, groups_and_one_cycle, one_output_per_row,
]  # fmt: skip
