"""The kernel along other paths: its definition, positive semi-definite matrices, and what it costs."""

from dataclasses import replace

import path_runs
import pytest
import torch
from path_runs import queries, recorded

import epk_gp as epk
from epk_gp.gram import planned_kernel
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.sketch import nodes_trajectory
from helpers import assert_blocks, assert_close, make_case

RULE = epk.gauss_legendre(2)


def mixed_points(run: epk.Trajectory) -> epk.Points:
    """Both copies of two training points and a test point."""
    X = torch.cat([queries(1), run.inputs[:2], run.inputs[:2]])
    return epk.Points(X, torch.tensor([False, True, True, False, False]))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "head", "every"), [
    ("relu_sgd", "logits", 2), ("relu_sgd", "log_softmax", 100), ("batch_norm_sgd", "log_softmax", 2),
    ("transformer_adamw", "log_softmax", 2), ("cnn_adamw", "log_softmax", 2), ("cnn_adamw", "logits", 100),
])  # fmt: skip
def test_blocks_equal_the_definition(name, head, every):
    run, path = recorded(name), epk.chords(every)
    kernel, points = epk.PathKernel(run, head, RULE, path=path), mixed_points(run)
    expected = path_runs.gram_block(run, path, points, head, RULE)
    assert_blocks(kernel, points, points, expected)
    some = epk.Points(points.X[:3], points.is_train[:3])  # both combinations of copies
    assert_close(kernel.block(some, points), expected[:3])
    straight = epk.gram_block(run, points, points, head=head, rule=RULE)
    assert (straight - expected).abs().max() > 1e-4 * expected.abs().max()  # the control: another kernel


@pytest.mark.mostly_slow
@pytest.mark.parametrize("head", ["log_softmax", "logits"])
@pytest.mark.parametrize("name", ["three_sizes", "wide"])
def test_wide_layers_keep_their_factors_along_chords(name, head, monkeypatch):
    run = make_case("wide", steps=5).trajectory if name == "wide" else recorded(name)
    run = replace(run, steps=tuple(replace(step, lr=step.lr * (1 + step.index)) for step in run.steps))
    points, met = epk.Points(run.inputs[:4].flip(0), torch.arange(4) > 1), []
    for name in ("add_softmax_averages", "add_nodes"):
        real = getattr(GramAccumulator, name)
        monkeypatch.setattr(GramAccumulator, name, lambda *args, real=real, name=name: met.append(name) or real(*args))
    expected = path_runs.gram_block(run, epk.chords(2), points, head, RULE)
    kernel = epk.PathKernel(run, head, RULE, path=epk.chords(2))
    assert_close(kernel.block(points, points), expected)
    assert met.count("add_nodes") == 5 * 2
    assert ("add_softmax_averages" in met) == (head == "log_softmax")
    assert_blocks(kernel, points, points, expected)


def test_steps_without_weight_are_left_out_of_their_chord():
    run, chord = recorded("relu_sgd"), epk.chords(3)
    points = mixed_points(run)
    weights = torch.tensor([0.0, 2.0, 0.5, 0.0, 0.0])
    K = epk.gram_block(run, points, points, rule=RULE, step_weights=weights, path=chord)
    steps = tuple(replace(step, lr=weight) for step, weight in zip(run.steps, weights.tolist(), strict=True))
    assert_close(K, path_runs.gram_block(replace(run, steps=steps), chord, points, "log_softmax", RULE))
    K = epk.gram_block(run, points, points, rule=RULE, step_weights=torch.zeros(5), path=chord)
    assert not K.any()


@pytest.mark.slow
def test_an_adaptive_rule_finds_the_kinks_of_a_chord():
    run, path = recorded("relu_sgd", steps=20), epk.chords(20)
    test, train = epk.Points(queries(3), is_train=False), epk.Points(run.inputs[:2], is_train=True)
    for right in (train, test):
        rules = epk.adaptive(1e-12), epk.QuadratureRule.midpoint(500), epk.gauss_legendre(4)
        found, fine, coarse = (epk.gram_block(run, test, right, head="logits", rule=r, path=path) for r in rules)
        assert (found - fine).abs().max() < 0.1 * (coarse - fine).abs().max()
        assert (coarse - fine).abs().max() > 1e-3 * fine.abs().max()


@pytest.fixture
def evaluated(monkeypatch):
    """The number of points of each evaluation at a weight state."""
    sizes, real = [], planned_kernel.joined_jacobians

    def counted(net, weights, X, *args):
        return real(net, (sizes.append(len(X)) or w for w in weights), X, *args)

    monkeypatch.setattr(planned_kernel, "joined_jacobians", counted)
    return sizes


def test_test_copies_are_evaluated_once_for_each_chord(evaluated):
    run = recorded("tanh_sgd", steps=20)
    test, train = epk.Points(queries(3), is_train=False), epk.Points(run.inputs[:2], is_train=True)
    cases = {(epk.straight(), train): (40, 20), (epk.chords(10), train): (4, 20), (epk.straight(), test): (40, 0)}
    for (path, right), counts in (cases | {(epk.chords(10), test): (4, 0)}).items():
        epk.gram_block(run, test, right, rule=RULE, path=path)  # representations are measured once
        evaluated.clear()
        epk.gram_block(run, test, right, rule=RULE, path=path)
        assert (evaluated.count(3), evaluated.count(2)) == counts


@pytest.mark.parametrize("path", [epk.straight(), epk.chords(2), epk.chords(100)], ids=["straight", "chords", "one"])
def test_nodes_along_a_path_are_its_midpoint_rule(path):
    """Where steps are equally long and every stretch has as many nodes; training copies stay on their steps."""
    run, points = recorded("batch_norm_sgd", steps=4), epk.Points(queries(3), is_train=False)
    nodes_run = nodes_trajectory(run, 8, path=path)
    K = epk.gram_block(nodes_run, points, points, rule=epk.QuadratureRule.left_endpoint())
    per_stretch = 8 // len(range(0, 4, path.every))
    assert_close(K, epk.gram_block(run, points, points, rule=epk.QuadratureRule.midpoint(per_stretch), path=path))
    straight = nodes_trajectory(run, 8)
    assert (nodes_run.digest == straight.digest) == (path == epk.straight())
    assert torch.equal(nodes_run.states[-1], straight.states[-1])
    training = [nodes_trajectory(run, 8, is_train=True, path=p) for p in (path, epk.straight())]
    assert all(torch.equal(a, b) for a, b in zip(*(of.states for of in training), strict=True))
    if path != epk.straight():  # the control
        K_straight = epk.gram_block(straight, points, points, rule=epk.QuadratureRule.left_endpoint())
        assert (K - K_straight).abs().max() > 1e-4 * K.abs().max()


@pytest.mark.parametrize("mask", [False, True], ids=["test", "train"])
def test_features_along_chords_are_those_of_their_nodes(mask):
    run, X = recorded("relu_sgd", steps=8), queries(4)
    own = nodes_trajectory(run, 4, path=epk.chords(4))
    asked = {"nodes": 4, "is_train": mask}
    z = epk.path_features(run, X, 64, path=epk.chords(4), **asked)
    assert z.error.reference == "all 8 steps along straight lines, each over 4 steps, 2 nodes each"
    assert z.error.nodes_rms < 0.1
    straight = epk.path_features(run, X, 64, num_probe=0, **asked)
    assert not torch.allclose(z + 0, straight + 0)  # sketches are drawn for each path
    if not mask:
        assert torch.equal(z + 0, epk.path_features(own, X, 64, nodes=None, num_probe=0) + 0)


@pytest.mark.usefixtures("unchecked")
def test_paths_that_cannot_be_followed_are_refused():
    run = recorded("relu_sgd")
    nodes_run, chords = nodes_trajectory(run, 4), epk.chords(2)
    for call, error, message in (
        (lambda: epk.path_features(run, queries(2), 8, path=4), TypeError, "path must be a path such as .*: got"),
        (lambda: nodes_trajectory(nodes_run, 4, path=chords), ValueError, "this one is 4 nodes"),
        (lambda: epk.path_features(nodes_run, queries(2), 8, nodes=None, path=chords), ValueError, "got None"),
    ):
        with pytest.raises(error, match=message):
            call()
