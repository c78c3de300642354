import schedulefree
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import three_gaussians

torch.manual_seed(0)
data = three_gaussians(12, dim=5)
X, y, X_test = data.inputs, data.labels, data.inputs[:2] + 0.1
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = schedulefree.AdamWScheduleFree(
    net.parameters(), lr=0.02, weight_decay=0.01, warmup_steps=3
)
with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
    for epoch in range(2):
        net.train()
        optimizer.train()
        for batch in torch.randperm(len(X)).split(12):
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)  # recorder
            optimizer.step()
        net.eval()
        optimizer.eval()
        with torch.no_grad():
            print(f"epoch {epoch}: {float(F.cross_entropy(net(X), y)):.4f}")
