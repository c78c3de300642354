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
from loops import sgd
from stored_runs import replace_header

ALL = torch.arange(7)


@pytest.fixture(scope="module")
def run():
    return record(make_net(dropout=0.4))


def relative(error, scale):
    return float((error.abs().max() / scale.abs().max()).detach())


def test_contributions_of_nodes_sum_to_the_network(run):
    parts = epk.attribute(run, ALL, head="logits")
    assert parts.certified
    assert parts.samples.shape == (7, CLASSES, 7)
    assert relative(parts.total - parts.network, parts.network) < 1e-12
    unlabelled = [node for node in ALL.tolist() if node not in LABELLED]
    assert not parts.samples[..., unlabelled].any()
    assert (
        parts.samples[unlabelled][..., LABELLED].abs().amin(dim=(0, 1)).gt(0).any()
    )  # they are explained all the same


def test_the_graph_stands_for_all_its_nodes(run):
    x, edges, _ = make_graph()
    expected = epk.network_outputs(run, ALL)
    for points in (epk.Graph(x, edges), epk.Graph(x.clone(), edges.clone()), ALL[:, None], ALL.int(), run.inputs):
        assert torch.equal(epk.network_outputs(run, points), expected)
    shares = epk.attribute(run, epk.Graph(x, edges), head="logits").samples
    assert torch.equal(shares, epk.attribute(run, ALL, head="logits").samples)


def test_a_node_s_output_does_not_depend_on_which_others_are_asked_for(run):
    together = epk.network_outputs(run, ALL)
    asked = torch.tensor([4, 0, 4, 6])
    assert torch.equal(epk.network_outputs(run, asked), together[asked])
    shares = epk.attribute(run, asked, head="logits").samples
    assert relative(shares - epk.attribute(run, ALL, head="logits").samples[asked], shares) < 1e-12
    assert torch.equal(shares[0], shares[2])


def test_positions_and_keywords_are_one_call_and_the_recorded_tensors_are_copies():
    x, edges, y = make_graph()
    net = make_net(dropout=0.4)
    with epk.Recorder(net, sgd(net, 0.3), epk.Graph(x, edge_index=edges), y) as recorder:
        F.cross_entropy(net(edge_index=edges, x=x)[LABELLED], y[LABELLED]).backward()
        recorder.batch(LABELLED)
        recorder.optimizer.step()
    before = epk.network_outputs(recorder.trajectory, ALL)
    x.zero_()
    assert torch.equal(epk.network_outputs(recorder.trajectory, ALL), before)
    assert epk.reconstruct(recorder.trajectory, ALL).certified


@pytest.mark.slow
def test_train_takes_a_graph():
    x, edges, y = make_graph()
    net = make_net()
    trajectory = epk.train(net, epk.Graph(x, edges), y, optimizer=sgd(net, 0.3), steps=4, batch_size=3)
    assert len(trajectory.steps[0].batch) == 3
    machine = epk.reconstruct(trajectory, ALL)
    assert relative(machine.outputs - machine.network, machine.network) < 1e-12


@pytest.mark.mostly_slow
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch_norm"])
def test_float32_is_recorded(norm):
    graph = make_graph(dtype=torch.float32)
    parts = epk.attribute(record(make_net(dtype=torch.float32, dropout=0.3, norm=norm), graph), ALL, head="logits")
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


TWICE = torch.tensor([5, 0, 5])
WEIGHT = 5 * torch.tensor([1 / 2, 1 / 2, 0.3 / 3, 0.3 / 3, 0.3 / 3], dtype=torch.float64)  # beside the mean's 1/5
LOOPS = {
    "a_node_twice": {"batch": TWICE, "loss_of": lambda out, y: F.cross_entropy(out[TWICE], y[TWICE])},
    "two_losses_as_one_batch": {
        "batch": torch.arange(5),
        "weight": WEIGHT,
        "loss_of": lambda out, y: F.cross_entropy(out[:2], y[:2]) + 0.3 * F.cross_entropy(out[2:5], y[2:5]),
    },
}


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


@pytest.fixture
def folder(tmp_path):
    record(make_net(dropout=0.4), folder=tmp_path / "run")
    return tmp_path / "run"


def edit_data(folder, change):
    """Edit the stored data, with the checksum of the file made anew."""
    file = folder / "data.safetensors"
    data = load(file.read_bytes())
    change(data)
    file.write_bytes(save(data))
    content = file.read_bytes()
    replace_header(folder, data_blake2b=checksum(content), data_bytes=len(content))


MISSING = "must hold the tensor of its graph that the header describes by .*'key': 1"
EDITS = {
    "features": (
        lambda data: data["graph.0"][-1, 0].add_(1e-9),
        "the training data must have the digest in the header",
    ),
    "missing": (lambda data: data.pop("graph.1"), MISSING),
    "shape": (lambda data: data.update({"graph.1": data["graph.1"][:, :-1].contiguous()}), MISSING),
    "nodes": (
        lambda data: data.update(inputs=data["inputs"].flip(0).contiguous()),
        "inputs of a run on a graph must be the numbers of all nodes",
    ),
}


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_an_edited_graph_is_found_on_disk(folder, change, message):
    edit_data(folder, change)
    with pytest.raises(ValueError, match=message):
        epk.load_trajectory(folder, make_net(dropout=0.4))


@pytest.mark.parametrize("entry", [[{"key": 1, "shape": [7, 4], "dtype": "torch.float64"}], "x", [3]])
def test_a_damaged_description_of_the_graph_is_found(folder, entry):
    replace_header(folder, signature={"inputs": None, "has_output": False, "graph": entry})
    with pytest.raises(ValueError, match="must hold the tensor of its graph that the header describes"):
        epk.load_trajectory(folder, make_net(dropout=0.4))


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
