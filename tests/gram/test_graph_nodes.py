"""The path kernel of a graph network by nodes, against autograd on the user's own network."""

import pytest
import torch
from graph_runs import Convolutions, make_graph, make_net, record
from torch import nn

import epk_gp as epk
import reference
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


NETS = {
    "index_add": lambda: make_net(activation=torch.tanh),
    "sparse": lambda: OnlySparse(torch.tanh).double(),
    "unmapped": lambda: Unmapped(torch.tanh).double(),
    "parameter": lambda: WithParameter().double(),
}


@pytest.mark.parametrize("name", NETS)
def test_a_block_by_nodes_is_that_of_autograd_and_the_kernel_machine_the_network(name):
    graph, net = make_graph(6), NETS[name]()
    trajectory = record(net, graph, steps=2)
    for a in (torch.arange(6).flip(0), torch.tensor([4, 0, 4])):
        points = epk.Points(a, is_train=False), epk.Points(torch.tensor([1, 5]), is_train=True)
        block = epk.gram_block(trajectory, *points, head="logits", rule=RULE)
        assert_close(block, reference.gram_block(trajectory, *points, "logits", RULE))
    machine = epk.reconstruct(trajectory, torch.arange(6), head="logits")
    assert machine.certified
    assert_close(machine.outputs, net.eval()(*graph[:2]).detach())


def test_kernels_and_processes_take_node_numbers():
    trajectory = record(make_net(activation=torch.tanh), steps=2)
    nodes = torch.arange(7)[:, None]
    K = epk.EPKKernel(trajectory, rule=RULE)(epk.train_copy(nodes), epk.test_copy(nodes)).to_dense()
    train, test = (epk.Points(nodes, is_train=is_train) for is_train in (True, False))
    assert_close(K, epk.gram_block(trajectory, train, test, rule=RULE).reshape(21, 21))
    gp = epk.LogitGP(trajectory, "independent", noise=1e-2)
    assert_close(gp.logit_posterior(torch.tensor([5, 0])).mean, gp.logit_posterior(torch.arange(7)).mean[[5, 0]])
    beyond = epk.Points(torch.tensor([7]), is_train=True)
    with pytest.raises(ValueError, match=r"b.X must hold node numbers in 0\.\.6: got 7"):
        epk.gram_block(trajectory, train, beyond, rule=RULE)


def test_kinks_of_a_graph_cost_a_few_evaluations():
    net = make_net()
    trajectory = record(net, steps=2, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    machine = epk.reconstruct(trajectory, torch.arange(7), head="logits")
    assert machine.certified
    assert machine.max_residual < 1e-11
    assert 5 < machine.evaluations < 40
