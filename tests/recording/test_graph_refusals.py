"""What is no graph, no node, or not the recorded graph is refused, and the message says what to do."""

import pytest
import torch
from graph_runs import CLASSES, LABELLED, make_graph, make_net, record
from torch import nn

import epk_gp as epk
from loops import sgd

ALL = torch.arange(7)


def edited(x):
    x[0] += 1
    return x


CALLS = {
    "edges": (lambda net, x, edges: net(x, edges[:, 1:]), r"recorded graph: tensor 1 has shape \(2, 10\)"),
    "features": (lambda net, x, edges: net(x * 0.5, edges), "tensor 0 holds other numbers. Change features .* inside"),
    "in_place": (lambda net, x, edges: net(edited(x), edges), "tensor 0 holds other numbers"),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_another_graph_than_the_recorded_one_is_refused(call, message):
    def late(net, x, edges, step):
        return call(net, x, edges) if step == 1 else net(x, edges)

    with pytest.raises(epk.StepMismatchError, match=f"step 1: the network must be called with the .*{message}"):
        record(make_net(), call=late)


def test_another_graph_without_a_step_is_no_matter():
    """An evaluation with gradients switched on, on a part of the graph."""

    def evaluate_too(net, x, edges, step):
        net(x[:5], edges[:, :0])
        return net(x, edges)

    assert record(make_net(), call=evaluate_too).num_steps == 3


@pytest.mark.parametrize("batch", [LABELLED[:3], LABELLED + 1], ids=["too_few", "others"])
def test_nodes_that_the_loss_reads_must_be_announced(batch):
    with pytest.raises(epk.StepMismatchError, match=r"must get all nodes whose outputs the loss reads: it reads node"):
        record(make_net(), batch=batch)


NODES = [
    (torch.tensor([0, 7]), ValueError, r"X must hold node numbers in 0\.\.6: got 0\.\.7"),
    (torch.tensor([-1]), ValueError, r"node numbers in 0\.\.6: got -1\.\.-1"),
    (torch.tensor([1.0]).double(), TypeError, "must hold node numbers, which are integers: got torch.float64"),
    (ALL > 2, TypeError, r"which are integers: got torch.bool. Pass X.nonzero\(\).squeeze\(1\)"),
    (ALL.view(1, 7), ValueError, r"must have shape \(n,\), one number per node: got \(1, 7\)"),
    (ALL[:0], ValueError, "at least one point"),
    ((ALL, ALL), TypeError, "must be a tensor of node numbers, or the graph: got tuple"),
    (epk.Graph(torch.zeros(7, 4).double()), ValueError, "must be the recorded graph.*: it consists of the tensors"),
    (epk.Graph(make_graph()[0] + 1, make_graph()[1]), ValueError, "recorded graph, or numbers .*: tensor 0 holds othe"),
]


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_node_or_another_graph_is_refused():
    run = record(make_net(dropout=0.4))
    for nodes, error, message in NODES:
        for function in (epk.attribute, epk.reconstruct, epk.network_outputs):
            with pytest.raises(error, match=message):
                function(run, nodes)


GRAPHS = [
    ((), ValueError, "must have at least one tensor"),
    ((3,), TypeError, "tensor 0 of the graph must be a torch.Tensor: got int"),
    ((torch.eye(3).to_sparse(),), ValueError, "tensor 0 of the graph must be dense"),
    ((torch.full((3, 2), torch.nan),), ValueError, "tensor 0 of the graph must be finite"),
    ((torch.zeros(2, 3).T,), ValueError, "tensor 0 of the graph must be contiguous"),
]


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_graph_and_a_graph_where_points_are_numbers_is_refused():
    for arguments, error, message in GRAPHS:
        with pytest.raises(error, match=message):
            epk.Graph(*arguments)
    for function in (epk.train_copy, epk.test_copy, lambda graph: epk.Points(graph, is_train=True)):
        with pytest.raises(TypeError, match="must be numbers of the graph's nodes"):
            function(epk.Graph(*make_graph()[:2]))


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x, edge_index):
        return self.layer(x.mul_(0.5))


class Pooled(InPlace):
    def forward(self, x, edge_index):
        return self.layer(x).mean(dim=0, keepdim=True)


class Dense(InPlace):
    def forward(self, x):
        return torch.eye(7, dtype=torch.float64) @ self.layer(x)


RUNS = {
    "in_place": (lambda x, e, y: (InPlace(), epk.Graph(x, e), y), ValueError, r"changes them in place \(tensor 0"),
    "pooled": (lambda x, e, y: (Pooled(), epk.Graph(x, e), y), ValueError, "one row per node, as y .* 7: got 1 rows"),
    "targets": (lambda x, e, y: (make_net(), epk.Graph(x, e), y[:4]), ValueError, "per node, .* 4: got 7 rows"),
    "arguments": (lambda x, e, y: (make_net(), epk.Graph(x), y), ValueError, "accept tensor 0 .* missing 1 required"),
    "keyword": (lambda x, e, y: (make_net(), epk.Graph(x, e, z=e), y), ValueError, "unexpected keyword argument 'z'"),
    "dtype": (lambda x, e, y: (make_net(), epk.Graph(x.float(), e), y), TypeError, "must have the weights' dtype"),
    "edges": (lambda x, e, y: (make_net(), epk.Graph(x, e + 7), y), ValueError, "accept .* it fails with IndexError"),
    "dense": (lambda x, e, y: (Dense(), x, y), ValueError, r"must accept X \(7, 4\) .* takes epk.Graph\(X\)"),
}


@pytest.mark.parametrize(("make", "error", "message"), RUNS.values(), ids=RUNS)
def test_a_network_that_does_not_take_the_graph_is_refused(make, error, message):
    net, graph, y = make(*make_graph())
    with pytest.raises(error, match=message):
        epk.Recorder(net.double(), sgd(net), graph, y)
