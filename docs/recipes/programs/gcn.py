import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk

N, C = 14, 3


class GCN(nn.Module):
    def __init__(self, adjacency):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.conv1, self.conv2 = nn.Linear(6, 8), nn.Linear(8, C)

    def forward(self, x):
        x = F.relu(self.adjacency @ self.conv1(x))
        x = F.dropout(x, p=0.5, training=self.training)
        return self.adjacency @ self.conv2(x)


torch.manual_seed(0)
labels = torch.arange(N) % C
features = F.one_hot(labels, 6).double() + 0.5 * torch.randn(N, 6, dtype=torch.float64)
links = (torch.rand(N, N) < torch.where(labels[:, None] == labels, 0.4, 0.05)).double()
links = ((links + links.T + torch.eye(N)) > 0).double()
scale = links.sum(dim=1).rsqrt()
train_mask = torch.arange(N) < 9

net = GCN(scale[:, None] * links * scale).double()
optimizer = torch.optim.Adam(net.parameters(), lr=0.05, weight_decay=5e-4)


with epk.Recorder(net, optimizer, epk.Graph(features), labels) as recorder:  # recorder
    for epoch in range(20):
        net.train()
        optimizer.zero_grad()
        out = net(features)  # (N, C): all nodes
        F.cross_entropy(out[train_mask], labels[train_mask]).backward()
        recorder.batch(train_mask.nonzero()[:, 0])  # recorder: nodes of the loss
        optimizer.step()
