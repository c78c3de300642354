"""Contributions along any axes: samples, labels, steps, layers, parameters."""

import functools
import itertools
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.autodiff.dense import flat_columns
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.show import SlowCallWarning
from epk_gp.kernel_machine import attribute
from epk_gp.kernel_machine.attribute import attribute_by, attribute_many
from epk_gp.kernel_machine.axes import Axis, by_label, by_layer, by_parameter, by_sample, by_step
from epk_gp.kernel_machine.factored import FactoredTerms
from epk_gp.work import run as progress
from helpers import NETWORKS, assert_close, make_case

AXES = {
    "sample": by_sample,
    "label": by_label,
    "step": by_step,
    "range": lambda trajectory: by_step(trajectory, [2, 5]),
    "layer": by_layer,
    "parameter": by_parameter,
}


@pytest.fixture(scope="module", params=["plain", "momentum"])
def run(request) -> tuple[epk.Trajectory, torch.Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    X, y = torch.randn(11, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0, 0, 2])
    options = {"momentum": 0.9, "weight_decay": 0.1} if request.param == "momentum" else {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **options)
    return epk.train(net, X, y, optimizer=optimizer, steps=8, batch_size=4), torch.randn(3, 4).double()


@pytest.mark.slow
def test_every_combination_of_axes_is_a_sum_of_the_finest(run):
    """All single axes, all pairs of them, and some triples."""
    trajectory, X = run
    finest = (by_sample(trajectory), by_step(trajectory), by_parameter(trajectory))
    whole = attribute_by(trajectory, X, finest, head="logits", rule=epk.gauss_legendre(3))
    kinds = ["sample", "step", "parameter"]
    triples = list(itertools.permutations(AXES, 3))[::20]
    for names in [*((name,) for name in AXES), *itertools.combinations(reversed(AXES), 2), *triples]:
        by = [AXES[name](trajectory) for name in names]
        parts = attribute_by(trajectory, X, by, head="logits", rule=epk.gauss_legendre(3))
        expected = whole.values.new_zeros(3, 3, *(len(axis.names) for axis in by))
        for place in itertools.product(*(range(n) for n in whole.values.shape[2:])):
            groups = tuple(int(axis.group[place[kinds.index(axis.kind)]]) for axis in by)
            expected[(slice(None), slice(None), *groups)] += whole.values[(slice(None), slice(None), *place)]
        assert_close(parts.values, expected)
        assert parts.decay.shape[2:] == tuple(1 if axis.kind == "sample" else len(axis.names) for axis in by)
        assert_close(parts.decay.reshape(3, 3, -1).sum(2), whole.decay.reshape(3, 3, -1).sum(2), rounding=1e5)


def test_terms_along_axes_sum_to_the_network(run):
    trajectory, X = run
    for names in (("label", "layer", "range"), ("step",), ("sample", "label")):
        parts = attribute_by(trajectory, X, [AXES[name](trajectory) for name in names])
        assert parts.max_error <= 1e-12
    assert attribute_by(trajectory, X, []).max_error <= 1e-12


@pytest.mark.parametrize("name", ["tanh", "cnn"])
def test_the_two_ways_to_accumulate_agree(name, monkeypatch):
    """Plain gradient descent factored, and by adjoints: by samples and layers."""
    case = make_case(name)
    by = [by_sample(case.trajectory), by_layer(case.trajectory)]
    factored = attribute_by(case.trajectory, case.test, by)
    monkeypatch.setattr(attribute, "is_plain_descent", lambda *_: False)
    assert_close(attribute_by(case.trajectory, case.test, by).values, factored.values, rounding=1e5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_written_out_gradients_are_in_the_order_of_the_flat_weights(name):
    case = make_case(name)
    net = plan_for(case.trajectory, case.trajectory.model_for(case.test))
    for dense in (False, True):
        layout = flat_columns(net, all_dense=dense)
        assert torch.equal(layout.sort().values, torch.arange(case.trajectory.num_weights))
    head = "logits" if case.trajectory.num_outputs == 1 else "log_softmax"
    parts = attribute_by(case.trajectory, case.test[:2], [by_parameter(case.trajectory)], head=head)
    assert parts.max_error <= 1e-11
    # layers of plain gradient descent are multiplied as factors, single parameters as written out gradients
    modules = by_layer(case.trajectory)
    layers = attribute_by(case.trajectory, case.test[:2], [modules], head=head)
    expected = torch.zeros_like(layers.values).index_add_(2, modules.group, parts.values)
    assert_close(layers.values, expected, rounding=1e5)
    start, end = (case.trajectory.weights(s) for s in (0, -1))
    still = [k for k, n in enumerate(case.trajectory.model.names) if torch.equal(start[n], end[n])]
    assert not parts.values[:, :, still].any()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["logits", "log_softmax"])
@pytest.mark.parametrize("name", ["relu", "cnn", "transformer"])
def test_one_class_per_point_is_a_column_of_all(name, head):
    """Each point another one: with logits the last layer's cotangents stand still along a step, and differ by point."""
    case = make_case(name)
    check_classes(case.trajectory, case.test, head)


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_one_class_per_point_is_a_column_of_all_under_momentum(run, head):
    check_classes(*run, head)


def check_classes(trajectory, X, head):
    whole = epk.attribute(trajectory, X, head=head)
    classes = torch.arange(len(X)) % trajectory.num_outputs
    parts = epk.attribute(trajectory, X, head=head, classes=classes)
    assert parts.samples.shape == (len(X), 1, trajectory.num_points)
    picked = whole.samples.gather(1, classes[:, None, None].expand(-1, 1, whole.samples.shape[2]))
    assert_close(parts.samples, picked)
    assert parts.max_error <= 1e-11


def test_several_splits_in_one_pass_are_those_of_one_at_a_time(run):
    trajectory, X = run
    splits = [[by_sample(trajectory)], [by_step(trajectory), by_layer(trajectory)], []]
    for parts, by in zip(attribute_many(trajectory, X, splits), splits, strict=True):
        assert_close(parts.values, attribute_by(trajectory, X, by).values)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_layers_of_inputs_of_other_shapes_are_told_apart(name):
    """Of plain gradient descent: which way is taken depends on the dtype of the outputs, not of the inputs."""
    case = make_case(name, steps=2)
    parts = attribute_by(case.trajectory, case.test[:1], [by_layer(case.trajectory)])
    assert parts.max_error <= 1e-12


def test_layers_of_plain_gradient_descent_stay_factors(monkeypatch):
    """Gradients of single samples, written out, give the same numbers in a multiple of the time."""
    case, calls, terms = make_case("tanh", steps=2), [], FactoredTerms.terms
    monkeypatch.setattr(FactoredTerms, "terms", lambda *args: calls.append(args) or terms(*args))
    parts = attribute_by(case.trajectory, case.test, [by_sample(case.trajectory), by_layer(case.trajectory)])
    assert calls
    assert_close(parts.values.sum(dim=3), epk.attribute(case.trajectory, case.test).samples)


def test_axes_of_ones_own_are_taken(run):
    trajectory, X = run
    halves = Axis("sample", (torch.arange(11) >= 6).long(), ("first", "second"))
    parts = attribute_by(trajectory, X, [halves])
    samples = epk.attribute(trajectory, X).samples
    assert_close(parts.values, torch.stack([samples[:, :, :6].sum(2), samples[:, :, 6:].sum(2)], dim=2))


BAD = {
    "no_axis": (lambda t: ["step"], TypeError, "by must hold axes .*got 'step'"),
    "kind": (lambda t: [Axis("layer", torch.zeros(2).long(), ("a",))], ValueError, "kind .* got 'layer'"),
    "length": (lambda t: [Axis("step", torch.zeros(2).long(), ("a",))], ValueError, "each of the run's 8 steps"),
    "range": (lambda t: [Axis("step", torch.arange(8), ("a",))], ValueError, "groups must be int64 in 0..0"),
    "dtype": (lambda t: [Axis("step", torch.zeros(8), ("a",))], ValueError, "groups must be int64"),
    "edges": (lambda t: [by_step(t, [5, 2])], ValueError, "edges must ascend within 1..7: got .5, 2."),
    "edge_out": (lambda t: [by_step(t, [8])], ValueError, "edges must ascend within 1..7"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "error", "says"), BAD.values(), ids=BAD.keys())
def test_axes_that_are_not_of_the_run_are_refused(run, make, error, says):
    trajectory, X = run
    with pytest.raises(error, match=says):
        attribute_by(trajectory, X, make(trajectory))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("classes", "error", "says"),
    [
        (torch.tensor([0, 1, 3]), ValueError, "classes must lie in 0..2: got 0..3"),
        (torch.tensor([0, 1]), ValueError, r"one entry per point: got shape \(2,\) for 3 points"),
        (torch.tensor([0.0, 1.0, 2.0]), TypeError, "classes must be class indices: got torch.float32"),
    ],
    ids=["range", "length", "dtype"],
)
def test_classes_that_are_none_are_refused(run, classes, error, says):
    trajectory, X = run
    with pytest.raises(error, match=says):
        epk.attribute(trajectory, X, classes=classes)


def test_targets_that_are_no_labels_have_no_label_axis():
    case = make_case("one_class", batch_size=None)
    with pytest.raises(ValueError, match="by_label needs class labels"):
        by_label(case.trajectory)


@pytest.fixture
def slow_clock(monkeypatch):
    """A clock on which every step takes ten seconds."""
    clock = functools.partial(next, itertools.count(0, 10))
    monkeypatch.setattr(progress, "SlowCallNotice", functools.partial(progress.SlowCallNotice, clock=clock))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ("classes= explains one output", "path=epk_gp.layerwise() takes two", "progress=True shows")),
        ({"classes": torch.tensor([0, 1, 2])}, ("path=epk_gp.layerwise() takes two", "progress=True shows")),
        ({"path": epk.layerwise()}, ("classes= explains one output", "progress=True shows")),
    ],
    ids=["all outputs", "one output", "layerwise"],
)
def test_a_quiet_call_that_will_be_long_says_once_what_would_be_faster(run, slow_clock, options, said):
    trajectory, X = run
    with pytest.warns(SlowCallWarning) as caught:
        epk.attribute(trajectory, X, **options)
    (warning,) = caught
    (ways,) = re.findall(r"^the attribution will take about [\d.]+ minutes: (.*)\.$", str(warning.message))
    assert len(ways.split("; ")) == len(said)
    assert all(way.startswith(start) for way, start in zip(ways.split("; "), said, strict=True))


def test_a_call_that_shows_its_progress_or_has_workers_says_nothing_of_its_length(run, slow_clock, capsys):
    trajectory, X = run
    with ThreadPoolExecutor(1) as executor, warnings.catch_warnings():
        warnings.simplefilter("error")
        epk.attribute(trajectory, X, progress=True)
        epk.attribute(trajectory, X, executor=executor)
    assert "attribution" in capsys.readouterr().err
