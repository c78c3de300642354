"""Contributions along any axes: samples, labels, steps, layers, parameters; in blocks of points, or of outputs."""

import itertools
import sys

import pytest
import torch
from path_runs import queries, recorded
from torch import nn

import epk_gp as epk
from epk_gp.autodiff.dense import flat_columns
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernel_machine.attribute import Attribution, GroupedAttribution
from epk_gp.kernel_machine.axes import Axis, by_label, by_layer, by_parameter, by_sample, by_step
from epk_gp.kernel_machine.terms import TERMS, AttributionWork
from helpers import NETWORKS, assert_close, make_case

AXES = {
    "sample": by_sample,
    "label": by_label,
    "step": by_step,
    "range": lambda run: by_step(run, [2, 5]),
    "layer": by_layer,
    "parameter": by_parameter,
    "halves": lambda run: Axis("sample", (torch.arange(10) >= 6).long(), ("first", "second")),  # one's own
}
RULE = epk.gauss_legendre(3)
SAME_LAYERS = {"transformer", "leaky_relu", "tanh", "gelu", "wide", "linear"}


def trained(kind):
    return recorded(f"tanh_{kind}", steps=8), queries()


@pytest.fixture(params=["sgd", "momentum"])
def run(request):
    return trained(request.param)


@pytest.fixture
def outputs_apart(monkeypatch):
    """Let the adjoints of two outputs fit, and not those of all three of a point: a block may hold two points."""
    monkeypatch.setattr("epk_gp.kernel_machine.attribute.MAPPED_ADJOINTS", 0)
    return lambda: monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)


def test_every_combination_of_axes_is_a_sum_of_the_finest(run):
    trajectory, X = run
    names = [*((name,) for name in AXES), *list(itertools.combinations(reversed(AXES), 2))[::4]]
    names += [(), ("label", "layer", "range"), *list(itertools.permutations(AXES, 3))[::90]]
    kinds, finest = ["sample", "step", "parameter"], [f(trajectory) for f in (by_sample, by_step, by_parameter)]
    groupings = [[AXES[name](trajectory) for name in own] for own in names]
    whole, *results = epk.attribute(trajectory, X, by=[finest, *groupings], head="logits", rule=RULE)
    for by, parts in zip(groupings, results, strict=True):
        expected = whole.values.new_zeros(3, 3, *(len(axis.names) for axis in by))
        for place in itertools.product(*(range(n) for n in whole.values.shape[2:])):
            groups = tuple(int(axis.group[place[kinds.index(axis.kind)]]) for axis in by)
            expected[(slice(None), slice(None), *groups)] += whole.values[(slice(None), slice(None), *place)]
        assert_close(parts.values, expected)
        assert parts.decay.shape[2:] == tuple(1 if axis.kind == "sample" else len(axis.names) for axis in by)
        assert_close(parts.decay.reshape(3, 3, -1).sum(2), whole.decay.reshape(3, 3, -1).sum(2), rounding=1e5)
    parts = epk.attribute(trajectory, X, by=groupings[-1], head="logits", rule=RULE)  # in a pass of its own
    assert_close(parts.values, results[-1].values)
    assert epk.attribute(trajectory, X, by=[]).max_error <= 1e-12


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", ["transformer", *sorted({*NETWORKS} - SAME_LAYERS)])
def test_written_out_gradients_are_in_the_order_of_the_flat_weights(name):
    case = make_case(name)
    run, X = case.trajectory, case.test[:2]
    net = plan_for(run, run.model_for(case.test))
    for dense in (False, True):
        assert torch.equal(flat_columns(net, all_dense=dense).sort().values, torch.arange(run.num_weights))
    # layers of plain gradient descent are multiplied as factors, single parameters as written out gradients
    modules = by_layer(run)
    parts, layers = (epk.attribute(run, X, by=[axis], head=case.heads[-1]) for axis in (by_parameter(run), modules))
    assert parts.max_error <= 1e-11
    expected = torch.zeros_like(layers.values).index_add_(2, modules.group, parts.values)
    assert_close(layers.values, expected, rounding=1e5)
    start, end = (run.weights(s) for s in (0, -1))
    still = [k for k, n in enumerate(run.model.names) if torch.equal(start[n], end[n])]
    assert not parts.values[:, :, still].any()


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
@pytest.mark.parametrize("name", ["momentum", pytest.param("cnn", marks=pytest.mark.slow), "sgd"])
def test_one_class_per_point_is_a_column_of_all(name, head):
    """Each point another one: with logits the last layer's cotangents stand still along a step, and differ by point."""
    trajectory, X = trained(name) if name != "cnn" else ((case := make_case(name)).trajectory, case.test)
    whole = epk.attribute(trajectory, X, head=head)
    classes = torch.arange(len(X)) % trajectory.num_outputs
    parts = epk.attribute(trajectory, X, head=head, classes=classes)
    assert_close(parts.samples[:, 0], whole.samples[torch.arange(len(X)), classes])
    assert parts.max_error <= 1e-11


def test_the_form_of_by_says_how_many_results_there_are(run):
    trajectory, X = run
    whole = epk.attribute(trajectory, X, rule=RULE)
    one = epk.attribute(trajectory, X, by=[by_sample(trajectory)], rule=RULE)
    several = epk.attribute(trajectory, X, by=([by_sample(trajectory)], (by_step(trajectory),), []), rule=RULE)
    assert (type(whole), type(one), type(several)) == (Attribution, GroupedAttribution, tuple)
    assert_close(one.values, whole.samples)
    assert [parts.values.shape for parts in several] == [(3, 3, trajectory.num_points), (3, 3, 8), (3, 3)]
    assert torch.equal(epk.attribute(trajectory, X, by=[], rule=RULE).values, several[2].values)
    (alone,) = epk.attribute(trajectory, X, by=[[by_step(trajectory)]], rule=RULE)
    assert_close(alone.values, several[1].values)


REFUSED = (
    (lambda t: {"by": by_step(t)}, TypeError, r"by must be a list of axes: got Axis. Write by=.by_step\(trajectory\)."),
    (lambda t: {"by": "step"}, TypeError, "by must be a list of axes: got str"),
    (lambda t: {"by": (axis for axis in [by_step(t)])}, TypeError, "by must be a list of axes: got generator"),
    (lambda t: {"by": [by_step]}, TypeError, "by must hold axes .*got <function by_step"),
    (lambda t: {"by": [[by_step(t)], by_sample(t)]}, TypeError, "by must hold axes .*got a list among them"),
    (lambda t: {"by": [[by_step(t)], ["step"]]}, TypeError, "by must hold axes .*got 'step'"),
    (lambda t: {"by": ["step"]}, TypeError, "by must hold axes .*got 'step'"),
    (lambda t: {"by": [Axis("layer", torch.zeros(2).long(), ("a",))]}, ValueError, "kind .* got 'layer'"),
    (lambda t: {"by": [Axis("step", torch.zeros(2).long(), ("a",))]}, ValueError, "each of the run's 8 steps"),
    (lambda t: {"by": [Axis("step", torch.arange(8), ("a",))]}, ValueError, "groups must be int64 in 0..0"),
    (lambda t: {"by": [Axis("step", torch.zeros(8), ("a",))]}, ValueError, "groups must be int64"),
    (lambda t: {"by": [by_step(t, [5, 2])]}, ValueError, "edges must ascend within 1..7: got .5, 2."),
    (lambda t: {"by": [by_step(t, [8])]}, ValueError, "edges must ascend within 1..7"),
    (lambda t: {"by": [by_label(make_case("one_class").trajectory)]}, ValueError, "by_label needs class labels"),
    (lambda t: {"by": [], "classes": torch.tensor([0, 1, 3])}, ValueError, "classes must lie in 0..2: got 0..3"),
    (lambda t: {"by": [], "classes": torch.tensor([0, 1])}, ValueError, r"one entry per point: got shape \(2,\)"),
    (lambda t: {"by": [], "classes": torch.tensor([0.0, 1.0, 2.0])}, TypeError, "classes must be class indices: got"),
)


@pytest.mark.usefixtures("unchecked")
def test_axes_and_classes_that_are_not_of_the_run_are_refused():
    trajectory, X = trained("sgd")
    for options, error, says in REFUSED:
        with pytest.raises(error, match=says):
            epk.attribute(trajectory, X, **options(trajectory))


@pytest.mark.parametrize("options", [{}, {"function": lambda z: z[:, 0]}, {"by": []}], ids=["plain", "function", "by"])
def test_a_request_is_parsed_once(run, options):
    """At the door: the inputs, the head, the rule and the path, however the outputs are evaluated afterwards."""
    calls, parsers = [], ("parse_inputs", "resolve_head", "validate_rule", "validate_path", "parse_axes")
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        epk.attribute(*run, **options)
    finally:
        sys.setprofile(None)
    assert {name: calls.count(name) for name in parsers} == dict.fromkeys(parsers, 1)


# Where the adjoints of all outputs of a point do not fit into the budget, outputs go through the run apart


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "path"), [
    ("batch_norm_sgd", epk.chords(2)), ("tanh_momentum", epk.straight()), ("transformer_adamw", epk.layerwise()),
])  # fmt: skip
def test_terms_do_not_depend_on_it(name, path, outputs_apart):
    run, X = recorded(name), queries()
    by = [[by_sample(run)], [by_layer(run), by_step(run)]]
    whole = epk.attribute(run, X, by=by, path=path)
    outputs_apart()
    for together, apart in zip(whole, epk.attribute(run, X, by=by, path=path), strict=True):
        for term in (*TERMS, "initial", "amplification", "network"):
            assert torch.allclose(getattr(apart, term), getattr(together, term), rtol=1e-7, atol=1e-11), term
        assert apart.certified
        assert apart.max_error <= 1e-11
        assert sum(apart.statuses.values()) == 3 * sum(together.statuses.values())
        assert apart.evaluations == pytest.approx(together.evaluations, rel=0.5)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_small_budget_brings_it_about(momentum, monkeypatch):
    """The least budget, 1 MiB, and 15,200 weights; plain gradient descent has no adjoints."""
    X, y, seen = torch.randn(12, 4).double(), torch.arange(12) % 3, set()
    net = nn.Sequential(nn.Linear(4, 1900), nn.Tanh(), nn.Linear(1900, 3)).double()
    run = epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum), steps=2)
    X, whole, block = X[:2], epk.attribute(run, X[:2]), AttributionWork.block
    monkeypatch.setattr(AttributionWork, "block", lambda work, k: seen.add(work.outputs_per_row) or block(work, k))
    assert_close(epk.attribute(run, X, memory_budget=1 << 20).samples, whole.samples, rounding=1e5)
    assert seen == {1 if momentum else 3}
    one = epk.attribute(run, X, classes=torch.tensor([2, 0]), memory_budget=1 << 20)
    assert_close(one.samples[:, 0], whole.samples[[0, 1], [2, 0]], rounding=1e5)
