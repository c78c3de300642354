"""Small graph networks and their recorded runs."""

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk

CLASSES, FEATURES = 3, 4
LABELLED = torch.tensor([0, 2, 3, 5])


class Convolutions(nn.Module):
    """Two sums over edges; a ReLU or tanh, dropout and BatchNorm between them."""

    def __init__(self, activation=torch.relu, dropout=0.0, *, norm=False):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.activation, self.dropout = activation, dropout

    def forward(self, x, edge_index):
        x = F.dropout(self.activation(self.norm(self.spread(self.first(x), edge_index))), self.dropout, self.training)
        return self.spread(self.second(x), edge_index)

    @staticmethod
    def spread(x, edge_index):
        return x + 0.5 * torch.zeros_like(x).index_add_(0, edge_index[1], x[edge_index[0]])


def make_graph(num_nodes=7, dtype=torch.float64):
    """Return features, a ring of edges with a few chords, and labels."""
    generator = torch.Generator().manual_seed(3)
    nodes = torch.arange(num_nodes)
    edges = torch.stack([torch.cat([nodes, nodes[::3]]), torch.cat([nodes.roll(1), nodes[::3].flip(0)])])
    x = torch.randn(num_nodes, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return x, edges, nodes % CLASSES


def make_net(seed=1, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return Convolutions(**options).to(dtype)


def at_labelled_nodes(out, y):
    return F.cross_entropy(out[LABELLED], y[LABELLED])


def record(net, graph=None, steps=3, *, batch=LABELLED, weight=1.0, optimizer=None, call=None,
           loss_of=at_labelled_nodes, **options):  # fmt: skip
    """Record a loop on the labelled nodes; `call` stands for the network's call, `loss_of` for the loop's loss."""
    x, edges, y = make_graph() if graph is None else graph
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5) if optimizer is None else optimizer
    with epk.Recorder(net, optimizer, epk.Graph(x, edges), y, **options) as recorder:
        net.train()
        for step in recorder.until(steps):
            optimizer.zero_grad()
            out = net(x, edges) if call is None else call(net, x, edges, step)
            loss_of(out, y).backward()
            recorder.batch(batch, weight=weight)
            optimizer.step()
    return recorder.trajectory
