import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def resnet18(width=64, classes=10):
    """ResNet-18 for images of 32 x 32 pixels: a stem of 3 x 3, no pooling in it."""
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
    blocks, inputs = [], width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            blocks.append(Block(inputs, width * 2**stage, stride))
            inputs = width * 2**stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, nn.ReLU(), *blocks, *head)


def augmented(images):
    """Crop each image out of 4 pixels of padding, and mirror one in two."""
    rows = []
    for image in F.pad(images, (4, 4, 4, 4)):
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        rows.append(image.flip(-1) if torch.rand(()) < 0.5 else image)
    return torch.stack(rows)


torch.manual_seed(0)
X, y = torch.randn(24, 3, 32, 32).double(), torch.arange(24) % 10
net = resnet18(width=4).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
    net.train()
    for epoch in range(1):
        for batch in torch.randperm(len(X)).split(8):
            optimizer.zero_grad()
            F.cross_entropy(net(augmented(X[batch])), y[batch]).backward()
            recorder.batch(batch)  # recorder
            optimizer.step()
        scheduler.step()
X_test = X[:1]
