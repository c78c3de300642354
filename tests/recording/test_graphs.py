"""Graphs: one forward pass computes all nodes, and the points of a run are its nodes."""

import json
from dataclasses import replace

import pytest
import torch
from graph_runs import CLASSES, LABELLED, make_graph, make_net, record
from safetensors.torch import load, save
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.graphs import RecordedGraph
from epk_gp.storage.files import checksum
from loops import assert_exact, sgd
from loops import record as record_loop
from stored_runs import replace_header

ALL = torch.arange(7)


@pytest.fixture(scope="module")
def run():
    return record(make_net(dropout=0.4))


def relative(error, scale):
    return float((error.abs().max() / scale.abs().max()).detach())


def test_contributions_of_nodes_sum_to_the_network_however_they_are_asked_for(run):
    """By numbers, by the graph for all of them, or with or without others."""
    (x, edges, _), expected = make_graph(), epk.network_outputs(run, ALL)
    parts = assert_exact(run, ALL, tolerance=1e-12)
    assert parts.samples.shape == (7, CLASSES, 7)
    unlabelled = [node for node in ALL.tolist() if node not in LABELLED]
    assert not parts.samples[..., unlabelled].any()
    assert parts.samples[unlabelled][..., LABELLED].abs().amin(dim=(0, 1)).gt(0).any()  # they are explained too
    for points in (epk.Graph(x, edges), epk.Graph(x.clone(), edges.clone()), ALL[:, None], ALL.int(), run.inputs):
        assert torch.equal(epk.network_outputs(run, points), expected)
    assert torch.equal(epk.attribute(run, epk.Graph(x, edges), head="logits").samples, parts.samples)
    asked = torch.tensor([4, 0, 4, 6])
    assert torch.equal(epk.network_outputs(run, asked), expected[asked])
    shares = epk.attribute(run, asked, head="logits").samples
    assert relative(shares - parts.samples[asked], shares) < 1e-12
    assert torch.equal(shares[0], shares[2])


def test_positions_and_keywords_are_one_call_and_the_recorded_tensors_are_copies():
    x, edges, y = make_graph()
    net = make_net(dropout=0.4)
    call = lambda net, _: net(edge_index=edges, x=x)[LABELLED]  # noqa: E731
    run = record_loop(net, sgd(net, 0.3), epk.Graph(x, edge_index=edges), y, [LABELLED], call=call).trajectory
    before = epk.network_outputs(run, ALL)
    x.zero_()
    assert torch.equal(epk.network_outputs(run, ALL), before)
    assert epk.reconstruct(run, ALL).certified


@pytest.mark.slow
def test_train_takes_a_graph():
    x, edges, y = make_graph()
    net = make_net()
    trajectory = epk.train(net, epk.Graph(x, edges), y, optimizer=sgd(net, 0.3), steps=4, batch_size=3)
    assert len(trajectory.steps[0].batch) == 3
    machine = epk.reconstruct(trajectory, ALL)
    assert relative(machine.outputs - machine.network, machine.network) < 1e-12


def test_float32_and_moving_statistics_are_recorded():
    graph, net = make_graph(dtype=torch.float32), make_net(dtype=torch.float32, dropout=0.3, norm=True)
    parts = epk.attribute(record(net, graph), ALL, head="logits")
    assert parts.total.dtype == torch.float32
    assert relative(parts.total - parts.network, parts.network) < 1e-4


@pytest.mark.slow
def test_labels_that_the_loop_changed_are_found():
    """Label noise: targets are read from the gradient in the outputs of the batch's nodes."""
    noisy = make_graph()[2].clone()
    noisy[2] = (noisy[2] + 1) % CLASSES
    trajectory = record(make_net(), steps=1, loss_of=lambda out, y: F.cross_entropy(out[LABELLED], noisy[LABELLED]))
    seen = trajectory.steps[0].passes[0].targets
    assert seen.index.tolist() == [1]
    assert epk.reconstruct(trajectory, ALL).certified


def own_loss(z, labels):
    assert len(z) == len(labels)
    return F.cross_entropy(z, labels, reduction="none")


@pytest.mark.mostly_slow
@pytest.mark.parametrize("options", [{"batch": None}, {"loss": epk.PerSampleLoss(own_loss)}], ids=["all", "own_loss"])
def test_a_loss_of_one_s_own_gets_the_batch_s_nodes_and_nodes_that_no_loss_reads_weigh_nothing(run, options):
    """Weights of samples are read from the gradient in the outputs."""
    shares = epk.attribute(record(make_net(dropout=0.4), **options), ALL[:2], head="logits").samples
    expected = epk.attribute(run, ALL[:2], head="logits").samples
    assert relative(shares - expected, expected) < 1e-9


TWICE, FIVE = torch.tensor([5, 0, 5]), torch.arange(5)
WEIGHT = 5 * torch.tensor([1 / 2, 1 / 2, 0.3 / 3, 0.3 / 3, 0.3 / 3], dtype=torch.float64)  # beside the mean's 1/5
LOOPS = {
    "a_node_twice": {"batch": TWICE, "loss_of": lambda out, y: F.cross_entropy(out[TWICE], y[TWICE])},
    "two_losses_as_one_batch": {"batch": FIVE, "weight": WEIGHT, "loss_of": lambda out, y:
        F.cross_entropy(out[:2], y[:2]) + 0.3 * F.cross_entropy(out[2:5], y[2:5])},
}  # fmt: skip


@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_nodes_may_occur_twice_and_in_several_losses(options):
    trajectory = record(make_net(dropout=0.4), **options)
    assert (trajectory.steps[0].sample_weights is None) == ("weight" not in options)
    assert epk.attribute(trajectory, ALL).certified


@pytest.mark.slow
def test_a_network_may_normalise_over_its_nodes():
    """Statistics of the batch in evaluation mode mix points; of a graph they are part of the function."""
    net = make_net()
    net.norm = nn.BatchNorm1d(5, track_running_stats=False).double()
    assert epk.reconstruct(record(net), ALL).certified


@pytest.mark.mostly_slow
@pytest.mark.parametrize("num_nodes", [10, 11], ids=["rows_but_one", "rows"])
@pytest.mark.parametrize("linked", [False, True])
def test_as_many_nodes_as_probe_rows_are_not_taken_for_them(num_nodes, linked):
    """A layer's call has a row per node, not per point, also where the numbers of both agree."""
    x, edges, y = make_graph(num_nodes)
    edges = edges if linked else edges[:, :0]
    net = make_net()
    trajectory = record(net, (x, edges, y))
    asked = torch.cat([torch.arange(num_nodes).flip(0)[:5], torch.arange(num_nodes - 5)])  # N points, in another order
    parts = epk.attribute(trajectory, asked, head="logits")
    (plan,) = trajectory.model.cache.plans.values()
    assert not plan.bias_of
    assert not plan.supports_interpolation
    assert relative(parts.total - parts.network, parts.network) < 1e-12
    assert torch.equal(parts.network, net.eval()(x, edges).detach()[asked])


# Storage


@pytest.mark.slow
def test_a_run_on_disk_holds_its_graph(run, tmp_path):
    stored = record(make_net(dropout=0.4), folder=tmp_path / "run")
    assert stored.digest == run.digest
    loaded = epk.load_trajectory(tmp_path / "run", make_net(seed=5, dropout=0.4))
    assert torch.equal(epk.attribute(loaded, ALL).samples, epk.attribute(run, ALL).samples)
    entry = json.loads((tmp_path / "run" / "run.json").read_text())["signature"]
    assert [(part["key"], part["shape"]) for part in entry["graph"]] == [(0, [7, 4]), (1, [2, 10])]


def test_a_run_is_resumed_with_the_same_graph_only(run, tmp_path):
    x, edges, y = make_graph()
    record(make_net(dropout=0.4), folder=tmp_path / "run", steps=1, resume=True)
    moved = x.clone()
    moved[6, 0] += 1e-9  # a node outside of the probe
    with pytest.raises(ValueError, match="data_digest must be the recorded one to resume"):
        record(make_net(dropout=0.4), (moved, edges, y), folder=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="must be the recorded one to resume"):
        record(make_net(dropout=0.4), (x, edges[:, 1:], y), folder=tmp_path / "run", resume=True)
    assert record(make_net(dropout=0.4), folder=tmp_path / "run", resume=True).digest == run.digest


def edit_data(change):
    """Edit the stored data, with the checksum of the file made anew."""

    def edit(folder):
        file = folder / "data.safetensors"
        data = load(file.read_bytes())
        change(data)
        content = save(data)
        file.write_bytes(content)
        replace_header(folder, data_blake2b=checksum(content), data_bytes=len(content))

    return edit


def describe(graph):
    signature = {"inputs": None, "has_output": False, "graph": graph}
    return lambda folder: replace_header(folder, signature=signature)


DESCRIBED = "must hold the tensor of its graph that the header describes"
EDITS = {
    "features": (edit_data(lambda data: data["graph.0"][-1, 0].add_(1e-9)), "data must have the digest in the header"),
    "missing": (edit_data(lambda data: data.pop("graph.1")), f"{DESCRIBED} by .*'key': 1"),
    "shape": (edit_data(lambda data: data.update({"graph.1": data["graph.1"][:, :-1].contiguous()})),
        f"{DESCRIBED} by .*'key': 1"),
    "nodes": (edit_data(lambda data: data.update(inputs=data["inputs"].flip(0).contiguous())),
        "inputs of a run on a graph must be the numbers of all nodes"),
    "another_key": (describe([{"key": 1, "shape": [7, 4], "dtype": "torch.float64"}]), DESCRIBED),
    "a_word": (describe("x"), DESCRIBED),
    "a_number": (describe([3]), DESCRIBED),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), EDITS.values(), ids=EDITS)
def test_an_edited_graph_is_found_on_disk(edit, message, tmp_path):
    record(make_net(dropout=0.4), folder=tmp_path / "run")
    edit(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        epk.load_trajectory(tmp_path / "run", make_net(dropout=0.4))


# Faults in a recorded run: results are not certified


def with_features(change):
    def faulty(run):
        graph = run.model.signature.graph
        tensors = {key: value.clone() for key, value in graph.tensors.items()}
        change(tensors)
        model = run.model.converted(run.model.spec)
        model.signature = replace(model.signature, graph=RecordedGraph(tensors, graph.num_nodes))
        return replace(run, model=model)

    return faulty


FAULTS = {
    "feature": with_features(lambda tensors: tensors[0][2, 1].add_(1e-4)),
    "edge": with_features(lambda tensors: tensors[1][:, 3].copy_(tensors[1][:, 3].flip(0))),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(run, fault):
    assert epk.reconstruct(run, ALL).certified
    with pytest.warns(epk.CertificateWarning, match=r"not certified|step"):
        faulty = epk.reconstruct(fault(run), ALL)
    assert not faulty.certified
    assert faulty.mismatch_ratio > 1


# What is no graph, no node, or not the recorded graph is refused


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


class InPlace(nn.Linear):
    def __init__(self):
        super().__init__(4, CLASSES)

    def forward(self, x, edge_index):
        return super().forward(x.mul_(0.5))


class Pooled(InPlace):
    def forward(self, x, edge_index):
        return nn.Linear.forward(self, x).mean(dim=0, keepdim=True)


class Dense(InPlace):
    def forward(self, x):
        return torch.eye(7, dtype=torch.float64) @ nn.Linear.forward(self, x)


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
