"""Variants of common loops: other passes, other reductions, other shapes of what the network sees."""

import torch
from torch import nn
from torch.nn import functional as F

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


def small_crops():
    """The network sees crops of 5 x 5 pixels, the test images whole."""
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, C)]
    net = nn.Sequential(*layers).double()

    def loss(x, y):
        top, left = torch.randint(2, (2,)).tolist()
        return F.cross_entropy(net(x[:, :, top : top + 5, left : left + 5]), y)

    return train(net, loss, data=images)


def channels_last():
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, C)).double().to(memory_format=torch.channels_last)
    return train(net, lambda x, y: F.cross_entropy(net(x.to(memory_format=torch.channels_last)), y), data=images)


RECIPES = [
    mixup_with_smoothing, clean_and_adversarial_together, two_passes_of_one_batch, small_crops, channels_last
]  # fmt: skip
