"""Image recipes: MNIST as in torch's examples, and noisy labels."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from recipes.problem import C, finish, images, train


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
    return train(net, X, y, X_test, loss, optimizer=optimizer, size=10, epochs=3, loss=criterion)


RECIPES = [mnist_cnn, label_noise]
