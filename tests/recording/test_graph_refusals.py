"""What is no graph, no node, or not the recorded graph is refused, and the message says what to do."""

import pytest
import torch
from graph_runs import CLASSES, LABELLED, make_graph, make_net, record
from torch import nn

import epk_gp as epk

ALL = torch.arange(7)
SGD = torch.optim.SGD


@pytest.fixture(scope="module")
def run():
    return record(make_net(dropout=0.4))


def drop_edges(net, x, edges, step):
    return net(x, edges[:, 1:] if step == 1 else edges)


def mask_features(net, x, edges, step):
    return net(x * 0.5 if step == 1 else x, edges)


def edit_features(net, x, edges, step):
    if step == 1:
        x[0] += 1
    return net(x, edges)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (drop_edges, r"step 1: the network must be called with the recorded graph: tensor 1 has shape \(2, 10\)"),
        (mask_features, "step 1: .* recorded graph: tensor 0 holds other numbers. Change features and edges .* inside"),
        (edit_features, "step 1: .* tensor 0 holds other numbers"),
    ],
)
def test_another_graph_than_the_recorded_one_is_refused(call, message):
    with pytest.raises(epk.StepMismatchError, match=message):
        record(make_net(), call=call)


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


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        (torch.tensor([0, 7]), ValueError, r"X must hold node numbers in 0\.\.6: got 0\.\.7"),
        (torch.tensor([-1]), ValueError, r"node numbers in 0\.\.6: got -1\.\.-1"),
        (torch.tensor([1.0]), TypeError, "must hold node numbers, which are integers: got torch.float64"),
        (ALL > 2, TypeError, r"which are integers: got torch.bool. Pass X.nonzero\(\).squeeze\(1\)"),
        (ALL.view(1, 7), ValueError, r"must have shape \(n,\), one number per node: got \(1, 7\)"),
        (ALL[:0], ValueError, "at least one point"),
        ((ALL, ALL), TypeError, "must be a tensor of node numbers, or the graph: got tuple"),
        (
            epk.Graph(torch.zeros(7, 4).double()),
            ValueError,
            r"must be the recorded graph.*: it consists of the tensors",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_node_is_refused(run, nodes, error, message):
    nodes = nodes.double() if isinstance(nodes, torch.Tensor) and nodes.is_floating_point() else nodes
    for function in (epk.attribute, epk.reconstruct, epk.network_outputs):
        with pytest.raises(error, match=message):
            function(run, nodes)


def test_another_graph_s_nodes_are_refused(run):
    x, edges, _ = make_graph()
    with pytest.raises(ValueError, match="X must be the recorded graph, or numbers .*: tensor 0 holds other numbers"):
        epk.network_outputs(run, epk.Graph(x + 1, edges))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), ValueError, "must have at least one tensor"),
        ((3,), TypeError, "tensor 0 of the graph must be a torch.Tensor: got int"),
        ((torch.eye(3).to_sparse(),), ValueError, "tensor 0 of the graph must be dense"),
        ((torch.full((3, 2), torch.nan),), ValueError, "tensor 0 of the graph must be finite"),
        ((torch.zeros(2, 3).T,), ValueError, "tensor 0 of the graph must be contiguous"),
    ],
)
def test_what_is_no_graph_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        epk.Graph(*arguments)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x, edge_index):
        return self.layer(x.mul_(0.5))


class Pooled(InPlace):
    def forward(self, x, edge_index):
        return self.layer(x).mean(dim=0, keepdim=True)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda x, e, y: (InPlace().double(), epk.Graph(x, e), y),
            ValueError,
            r"changes them in place \(tensor 0",
        ),
        (
            lambda x, e, y: (Pooled().double(), epk.Graph(x, e), y),
            ValueError,
            "one row per node, as y .* 7: got 1 rows",
        ),
        (lambda x, e, y: (make_net(), epk.Graph(x, e), y[:4]), ValueError, "one row per node, .* 4: got 7 rows"),
        (lambda x, e, y: (make_net(), epk.Graph(x), y), ValueError, "must accept tensor 0 of .* missing 1 required"),
        (lambda x, e, y: (make_net(), epk.Graph(x, e, z=e), y), ValueError, "unexpected keyword argument 'z'"),
        (lambda x, e, y: (make_net(), epk.Graph(x.float(), e), y), TypeError, "must have the weights' dtype"),
        (lambda x, e, y: (make_net(), epk.Graph(x, e + 7), y), ValueError, "must accept .* it fails with IndexError"),
    ],
    ids=["in_place", "pooled", "targets", "arguments", "keyword", "dtype", "edges"],
)
def test_a_network_that_does_not_take_the_graph_is_refused(make, error, message):
    net, graph, y = make(*make_graph())
    with pytest.raises(error, match=message):
        epk.Recorder(net, SGD(net.parameters(), lr=0.1), graph, y)


@pytest.mark.parametrize("function", [epk.train_copy, epk.test_copy, lambda graph: epk.Points(graph, is_train=True)])
def test_points_are_numbers_not_the_graph(function):
    x, edges, _ = make_graph()
    with pytest.raises(TypeError, match="must be numbers of the graph's nodes"):
        function(epk.Graph(x, edges))


def test_features_in_the_place_of_a_graph_are_told_of_it():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, CLASSES)
            self.register_buffer("adjacency", torch.eye(7, dtype=torch.float64))

        def forward(self, x):
            return self.adjacency @ self.linear(x)

    (x, _, y), net = make_graph(), Dense().double()
    with pytest.raises(ValueError, match=r"must accept X \(7, 4\) .* takes epk.Graph\(X\)"):
        epk.Recorder(net, SGD(net.parameters(), lr=0.1), x, y)
