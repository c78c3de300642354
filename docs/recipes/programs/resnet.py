import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import digits


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.layers = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 8, 2))
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean(dim=(2, 3)))


def augmented(batch):
    """Move each image by up to a pixel, and mirror one in two."""
    rows = []
    for image in F.pad(batch, (1, 1, 1, 1)):
        top, left = torch.randint(3, (2,)).tolist()
        image = image[:, top : top + 8, left : left + 8]
        rows.append(image.flip(-1) if torch.rand(()) < 0.5 else image)
    return torch.stack(rows)


torch.manual_seed(0)
data = digits()
images, labels = data.inputs[:96], data.labels[:96]
net = ResNet().double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
with epk.Recorder(net, optimizer, images, labels) as recorder:  # recorder
    net.train()
    for epoch in range(2):
        for batch in torch.randperm(96).split(24):
            optimizer.zero_grad()
            F.cross_entropy(net(augmented(images[batch])), labels[batch]).backward()
            recorder.batch(batch)  # recorder
            optimizer.step()
            scheduler.step()
X_test = data.inputs[-2:]
