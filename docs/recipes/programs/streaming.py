import csv
import random
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

import epk_gp as epk


class Lines(IterableDataset):
    """Yields the lines of a file through a buffer that shuffles them."""

    def __init__(self, path, buffer=16):
        self.path, self.buffer, self.random = path, buffer, random.Random(0)

    def __iter__(self):
        held = []
        with open(self.path) as file:
            for x1, x2, label in csv.reader(file):
                held.append((torch.tensor([float(x1), float(x2)]).double(), int(label)))
                if len(held) == self.buffer:
                    yield held.pop(self.random.randrange(self.buffer))
        self.random.shuffle(held)
        yield from held


path = tempfile.mkdtemp() + "/rows.csv"
with open(path, "w", newline="") as file:
    draw = random.Random(1)
    points = [(draw.gauss(0, 1), draw.gauss(0, 1)) for _ in range(60)]
    csv.writer(file).writerows((a, b, int(a * b > 0)) for a, b in points)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
loader = DataLoader(Lines(path), batch_size=12)

stream = epk.Stream(*next(iter(loader)))  # recorder: what a row is
with epk.Recorder(net, optimizer, stream) as recorder:  # recorder
    for epoch in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            recorder.batch(targets=labels)  # recorder: in the place of indices
            optimizer.step()
X_test = torch.tensor([[1.0, 1.2]]).double()
