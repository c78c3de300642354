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


class GAT(nn.Module):
    """One head of attention over the edges (Velickovic et al. 2018), and a bare parameter for it."""

    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Linear(5, 6), nn.Linear(6, C)
        self.attention = nn.Parameter(0.3 * torch.randn(2, 6))

    def forward(self, x, edge_index, edge_weight=None):
        h, (source, target) = self.embed(x), edge_index
        e = F.silu((h[source] * self.attention[0]).sum(1) + (h[target] * self.attention[1]).sum(1))
        e = e.exp() * edge_weight
        alpha = e / torch.zeros(len(x), dtype=x.dtype).index_add(0, target, e)[target]
        alpha = F.dropout(alpha, p=0.2, training=self.training)
        h = torch.zeros_like(h).index_add(0, target, alpha[:, None] * h[source])
        return self.read(F.silu(h)), alpha


def graph_attention():
    """What the network returns is more than the outputs, and nodes have weights of their own."""
    X, y, edge_index, train_mask = graph()
    edge_weight = 0.5 + torch.rand(edge_index.shape[1], dtype=torch.float64)
    nodes, importance = train_mask.nonzero().squeeze(1), torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0]).double()
    net = GAT().double()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.02)
    inputs = epk.Graph(X, edge_index, edge_weight=edge_weight)  # recorder
    loss = epk.CrossEntropy(reduction="sum")  # recorder
    with epk.Recorder(net, optimizer, inputs, y, loss=loss, output=lambda returned: returned[0]) as recorder:
        net.train()
        for _ in range(3):
            optimizer.zero_grad()
            out, _ = net(X, edge_index, edge_weight)
            (importance * F.cross_entropy(out[nodes], y[nodes], reduction="none")).sum().backward()
            recorder.batch(nodes, weight=importance)  # recorder
            optimizer.step()
    result = finish(recorder, net, (X, edge_index, edge_weight), None, y, output=lambda returned: returned[0][ASKED])
    return replace(result, nodes=ASKED)


RECIPES = [graph_sage_with_batchnorm, graph_attention]
