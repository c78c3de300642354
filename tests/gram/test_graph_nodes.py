"""The path kernel of a graph network by nodes, against autograd on the user's own network."""

import pytest
import torch
from graph_runs import Convolutions, make_graph, make_net, record
from torch import nn
from torch.func import functional_call

import epk_gp as epk
from helpers import assert_close

RULE = epk.gauss_legendre(3)


class OnlySparse(Convolutions):
    """A sparse adjacency matrix: torch has neither forward mode nor `vmap` for it."""

    def spread(self, x, edge_index):
        values = torch.full((edge_index.shape[1],), 0.5, dtype=x.dtype)
        size = (len(x), len(x))
        return x + torch.sparse.mm(torch.sparse_coo_tensor(edge_index.flip(0), values, size, check_invariants=True), x)


class Unmapped(Convolutions):
    """Sums in place into a tensor that `vmap` over weights cannot write to."""

    def spread(self, x, edge_index):
        return x + 0.5 * torch.zeros(x.shape, dtype=x.dtype).index_add_(0, edge_index[1], x[edge_index[0]])


class WithParameter(Convolutions):
    """A bare parameter too, and a layer that sees the edges alone."""

    def __init__(self):
        super().__init__(activation=torch.tanh)
        self.strength = nn.Parameter(torch.tensor(0.5))
        self.of_edge = nn.Linear(1, 1)

    def spread(self, x, edge_index):
        weight = self.strength * self.of_edge((edge_index[0] - edge_index[1]).to(x.dtype)[:, None])
        return x + torch.zeros_like(x).index_add(0, edge_index[1], weight * x[edge_index[0]])


def jacobian(net, trajectory, s, t, node, graph):
    """(C, P) of one node at w_s(t), from a pass of its own."""
    start, end = trajectory.weights(s), trajectory.weights(s + 1)
    here = {name: (start[name] + t * (end[name] - start[name])).requires_grad_() for name in trajectory.model.names}
    z = functional_call(net, here, graph)[node]
    rows = [torch.autograd.grad(value, list(here.values()), retain_graph=True) for value in z]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def expected_block(net, trajectory, a, b, graph):
    total = 0
    for step in trajectory.steps:
        for t, weight in RULE:
            phi_a = torch.stack([jacobian(net, trajectory, step.index, t, node, graph) for node in a.tolist()])
            phi_b = torch.stack([jacobian(net, trajectory, step.index, 0.0, node, graph) for node in b.tolist()])
            total = total + step.lr * weight * torch.einsum("ncp,mdp->ncmd", phi_a, phi_b)
    return total


NETS = {
    "index_add": lambda: make_net(activation=torch.tanh),
    "sparse": lambda: OnlySparse(torch.tanh).double(),
    "unmapped": lambda: Unmapped(torch.tanh).double(),
    "parameter": lambda: WithParameter().double(),
}


@pytest.mark.parametrize("name", NETS)
def test_a_block_by_nodes_is_that_of_autograd(name):
    """Also where every node is asked for, in another order, and one twice."""
    graph, net = make_graph(6), NETS[name]()
    trajectory = record(net, graph, steps=2)
    net.eval()
    for a in (torch.arange(6).flip(0), torch.tensor([4, 0, 4])):
        b = torch.tensor([1, 5])
        block = epk.gram_block(
            trajectory,
            epk.Points(a, is_train=False),
            epk.Points(b, is_train=True),
            head="logits",
            rule=RULE,
        )
        assert_close(block, expected_block(net, trajectory, a, b, graph[:2]))


@pytest.mark.parametrize("name", ["index_add", "sparse", "unmapped", "parameter"])
def test_the_kernel_machine_is_the_network_however_passes_are_differentiated(name):
    net = NETS[name]()
    graph = make_graph(6)
    trajectory = record(net, graph, steps=2)
    machine = epk.reconstruct(trajectory, torch.arange(6), head="logits")
    assert machine.certified
    assert_close(machine.outputs, net.eval()(*graph[:2]).detach())


def test_a_kernel_takes_node_numbers_as_columns():
    trajectory = record(make_net(activation=torch.tanh), steps=2)
    nodes = torch.arange(7)[:, None]
    kernel = epk.EPKKernel(trajectory, rule=RULE)
    K = kernel(epk.train_copy(nodes), epk.test_copy(nodes)).to_dense()
    train, test = (epk.Points(nodes, is_train=is_train) for is_train in (True, False))
    assert_close(K, epk.gram_block(trajectory, train, test, rule=RULE).reshape(21, 21))


def test_a_gaussian_process_predicts_nodes():
    gp = epk.LogitGP(record(make_net(activation=torch.tanh), steps=2), "independent", noise=1e-2)
    mean = gp.logit_posterior(torch.arange(7)).mean
    assert_close(gp.logit_posterior(torch.tensor([5, 0])).mean, mean[[5, 0]])


def test_nodes_of_a_block_must_exist():
    trajectory = record(make_net(), steps=1)
    points, beyond = (epk.Points(torch.tensor([node]), is_train=True) for node in (0, 7))
    with pytest.raises(ValueError, match=r"b.X must hold node numbers in 0\.\.6: got 7"):
        epk.gram_block(trajectory, points, beyond, rule=RULE)


class ThreeLayers(Convolutions):
    """What the second ReLU sees is no straight line along a step."""

    def __init__(self):
        super().__init__()
        self.middle = nn.Linear(5, 5)

    def forward(self, x, edge_index):
        h = torch.relu(self.spread(self.first(x), edge_index))
        h = torch.relu(self.spread(self.middle(h), edge_index))
        return self.spread(self.second(h), edge_index)


@pytest.mark.parametrize("make", [make_net, lambda: ThreeLayers().double()], ids=["two", "three"])
def test_kinks_of_a_graph_cost_a_few_evaluations(make):
    """A bisection of one kink takes some 40 halvings of 4 nodes each."""
    net = make()
    trajectory = record(net, steps=2, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    machine = epk.reconstruct(trajectory, torch.arange(7), head="logits")
    assert machine.certified
    assert machine.max_residual < 1e-11
    assert 5 < machine.evaluations < 40
