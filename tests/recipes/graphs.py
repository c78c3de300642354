"""Graph networks: all nodes in one forward pass, a loss over the labelled ones."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from recipes.problem import C, finish, vectors

N = 9
ASKED = torch.tensor([8, 0, 7, 4])  # labelled and unlabelled ones


def graph():
    """Return features, labels, edges in both directions, and the nodes with a label."""
    X, y = vectors(N)
    generator = torch.Generator().manual_seed(2)
    linked = torch.rand(N, N, generator=generator) < torch.where(y[:, None] == y, 0.5, 0.15).float()
    linked = linked | linked.T | torch.eye(N, dtype=torch.bool)
    return X, y, linked.nonzero().T, torch.arange(N) < 6


def finish_at_nodes(recorder, net, arguments, y):
    result = finish(recorder, net, arguments, None, y, output=lambda z: z[ASKED])
    return replace(result, nodes=ASKED)


class SAGE(nn.Module):
    """Mean aggregation over edges, written as message passing libraries do (Hamilton et al. 2017)."""

    def __init__(self, width=6):
        super().__init__()
        self.own1, self.neighbours1 = nn.Linear(5, width, bias=False), nn.Linear(5, width, bias=False)
        self.own2, self.neighbours2 = nn.Linear(width, C), nn.Linear(width, C, bias=False)
        self.norm = nn.BatchNorm1d(width)

    def mean(self, x, edge_index):
        source, target = edge_index
        total = torch.zeros_like(x).index_add_(0, target, x[source])
        degree = torch.zeros(len(x), dtype=x.dtype).index_add_(0, target, torch.ones(len(source), dtype=x.dtype))
        return total / degree.clamp(min=1)[:, None]

    def forward(self, x, edge_index):
        x = self.own1(x) + self.neighbours1(self.mean(x, edge_index))
        x = F.dropout(F.relu(self.norm(x)), p=0.3, training=self.training)
        return self.own2(x) + self.neighbours2(self.mean(x, edge_index))


def graph_sage_with_batchnorm():
    """Batches of nodes, the gradients of two of them accumulated; statistics over all nodes."""
    X, y, edge_index, train_mask = graph()
    nodes = train_mask.nonzero().squeeze(1)
    net = SAGE().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    with epk.Recorder(net, optimizer, epk.Graph(x=X, edge_index=edge_index), y) as recorder:  # recorder
        net.train()
        for _ in range(3):
            optimizer.zero_grad()
            for batch in nodes[torch.randperm(len(nodes))].split(4):
                (F.cross_entropy(net(X, edge_index)[batch], y[batch]) / 2).backward()
                recorder.batch(batch, weight=0.5)  # recorder
            optimizer.step()
    return finish_at_nodes(recorder, net, (X, edge_index), y)


RECIPES = [graph_sage_with_batchnorm]
