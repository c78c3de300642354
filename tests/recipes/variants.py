"""MNIST as in torch's examples, noisy labels, and variants: other passes, reductions, shapes of what is seen."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from recipes.loops import mlp, pgd
from recipes.problem import C, finish, images, vectors
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


def one_output_per_row():
    """Two classes, one logit, binary cross entropy."""
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1), nn.Flatten(0)).double()
    optimizer, criterion = torch.optim.Adam(net.parameters(), lr=0.01), nn.BCEWithLogitsLoss()

    def data(n):
        X, y = vectors(n)
        return X, (y > 0).double()

    return train(net, lambda x, y: criterion(net(x), y), data=data, optimizer=optimizer, loss=criterion)


class MnistNet(nn.Module):
    """The network of pytorch/examples, mnist/main.py, with fewer channels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3, 1)
        self.conv2 = nn.Conv2d(3, 4, 2, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, C)

    def forward(self, x):
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def mnist_cnn():
    X, y = images(30)
    X_test, y_test = (data[30:] for data in images(33))
    net = MnistNet().double()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = DataLoader(IndexedDataset(TensorDataset(X, y)), batch_size=10, shuffle=True)  # recorder: indexed
    with epk.Recorder(net, optimizer, X, y, loss=nn.NLLLoss()) as recorder:  # recorder
        for _ in range(2):
            net.train()
            for indices, (data, target) in train_loader:
                optimizer.zero_grad()
                output = net(data)
                loss = F.nll_loss(output, target)
                loss.backward()
                recorder.batch(indices)  # recorder
                optimizer.step()
            net.eval()
            with torch.no_grad():
                assert torch.isfinite(F.nll_loss(net(X_test), y_test, reduction="sum"))
            scheduler.step()
    return finish(recorder, net, X_test, X, y)


def label_noise():
    X, y = images(30)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, C)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(batch):
        noisy = torch.where(torch.rand(len(batch)) < 0.2, torch.randint(C, (len(batch),)), y[batch])
        return criterion(net(X[batch]), noisy)

    X_test = images(33)[0][30:]
    return train_on_batches(net, X, y, X_test, loss, optimizer=optimizer, size=10, epochs=3, loss=criterion)


RECIPES = [
    mnist_cnn, label_noise, mixup_with_smoothing, clean_and_adversarial_together, two_passes_of_one_batch, small_crops,
    channels_last, one_output_per_row,
]  # fmt: skip
