"""The judged classifier on inputs and labels that are no plain tensors of numbers."""

import numpy as np
import pytest
import torch
from graph_runs import make_graph, make_net, record
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import epk_gp as epk
import loops
from gp_cases import make_run


class Tokens(loops.Tokens):
    def forward(self, x):
        return super().forward(x.long())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, u, v):
        return self.last(torch.tanh(self.left(u) + self.right(v)))


def tokens(count):
    return torch.randint(0, 7, (count, 4))


def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


PROBLEMS = {
    "tokens": (Tokens, tokens),
    "pairs": (Pair, lambda count: {"u": torch.randn(count, 3), "v": torch.randn(count, 2)}),
    "images": (batch_norm, lambda count: torch.randn(count, 1, 4, 4)),
}


def run_of(net, X, y=None):
    return make_run(net, X, torch.arange(24) % 3 if y is None else y, lr=0.1)


@pytest.fixture(params=PROBLEMS)
def problem(request):
    """A float32 run of 24 points, and a function that draws others."""
    torch.manual_seed(0)
    build, draw = PROBLEMS[request.param]
    return run_of(build(), draw(24)), draw, build


@pytest.mark.parametrize("features", ["exact", 128])
def test_tokens_several_inputs_and_images_are_judged_and_stored(problem, features, tmp_path):
    run, draw, build = problem
    model = epk.UncertainClassifier(run, nodes=3, features=features).fit(draw(20), torch.arange(20) % 3)
    X = draw(5)
    model.save(tmp_path)
    read = epk.UncertainClassifier.load(tmp_path, build())
    assert_close(read.predict_proba(X), model.predict_proba(X), rtol=1e-5, atol=1e-6)
    assert model.predict_proba(X).dtype == torch.float64
    if isinstance(X, torch.Tensor):  # flattened rows are reshaped
        rows = X.flatten(1).numpy()
        np.testing.assert_allclose(model.predict_proba(rows), model.predict_proba(X).numpy())
    assert len(epk.next_to_label(model, X, 2)) == 2
    assert len(epk.label_errors(run, nodes=3, features=features)) == 24


def test_numbers_of_an_array_are_not_changed_into_others():
    net, X = Tokens(), tokens(24).to(torch.uint8)
    model = epk.UncertainClassifier(run_of(net, X), nodes=3).fit(tokens(20).to(torch.uint8), torch.arange(20) % 3)
    array = X.numpy()
    for same in (array.astype(np.int64), array.astype(np.float32), array.tolist()):
        np.testing.assert_array_equal(model.predict_proba(same), model.predict_proba(X).numpy())
    wrapped, endless = array.astype(np.int64), array.astype(np.float64)
    wrapped[2, 1] += 256  # the same as the byte that is left of it
    endless[2, 1] = np.inf
    for other in (wrapped, wrapped.astype(np.float64), endless):
        with pytest.raises(ValueError, match=r"training inputs' kind, torch.uint8: row 2 of the array"):
            model.predict_proba(other)
    with pytest.raises(TypeError, match="X must be real numbers: got an array of torch.complex128"):
        model.predict_proba(array + 1j)


def test_points_without_a_label_are_left_out():
    torch.manual_seed(0)
    X, y = torch.randn(24, 3, dtype=torch.float64), torch.arange(24) % 3
    y[5] = -100
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    run = run_of(net, X, y)
    found = epk.label_errors(run, nodes=3)
    assert sorted(found.indices.tolist()) == [i for i in range(24) if i != 5]
    with pytest.raises(ValueError, match="that of 5 is -100, left out by the loss"):
        epk.label_errors(run, nodes=3, points=[4, 5, 6])
    model = epk.UncertainClassifier(run, nodes=3).fit(torch.randn(20, 3).double(), torch.arange(20) % 3)
    assert len(model.process_.training) == 23


def test_labels_of_nodes_that_no_step_was_trained_on_are_not_used():
    """All nodes of a graph are points of the run; the labels of those that are asked about must not leak."""
    graph, trained, held_out = make_graph(40), torch.arange(12), torch.arange(12, 32)[:, None]
    y = graph[2]
    run = record(make_net(), graph, batch=trained, loss_of=lambda out, y: F.cross_entropy(out[trained], y[trained]))
    model = epk.UncertainClassifier(run, nodes=2).fit(held_out, y[12:32])
    assert sorted(model.process_.training.flatten().tolist()) == trained.tolist()
    assert sorted(epk.label_errors(run, nodes=2).indices.tolist()) == trained.tolist()
    with pytest.raises(ValueError, match="must be unseen: 12 of 20 are training points"):
        epk.UncertainClassifier(run, nodes=2).fit(torch.arange(20)[:, None], y[:20])
