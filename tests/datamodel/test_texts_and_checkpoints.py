"""Datamodels of losses of positions, by the formula in the weights; and of checkpoints of an unknown training."""

from typing import Any

import pytest
import torch
from datamodel_cases import Loop, internals, margin
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import epk_gp as epk
from epk_gp.analysis.measures import row_correlations
from helpers import assert_close

WORDS, PADDING = 5, -100


class Letters(nn.Module):
    """Scores of the next letter at each position, (n, T, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(WORDS, 4), nn.Linear(4, 6), nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.embed(x).cumsum(dim=1))))


def texts(n: int, seed: int = 0, padded: int = 0) -> tuple[Tensor, Tensor]:
    whole = torch.randint(0, WORDS, (n, 5), generator=torch.Generator().manual_seed(seed))
    y = whole[:, 1:].clone()
    y[:padded, -1] = PADDING
    return whole[:, :-1], y


def recorded(X: Tensor, y: Tensor, steps: int = 14) -> epk.Trajectory:
    torch.manual_seed(1)
    net = Letters().double()
    optimizer, order = torch.optim.Adam(net.parameters(), lr=0.03), torch.Generator().manual_seed(2)
    output: Any = {"output": lambda z: z[:, -1]}
    with epk.Recorder(net, optimizer, X, y, loss=epk.CrossEntropy(), **output) as recorder:
        for _ in recorder.until(steps):
            batch = torch.randperm(len(X), generator=order)[:5]
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[batch]).movedim(2, 1), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


@pytest.mark.parametrize("padded", [0, 3])
def test_scores_of_texts_are_the_formula_in_the_weights(padded: int) -> None:
    """alpha sum_j a_j R_j R_j^T / s + G^-1 is inverted as a matrix of all weights; in the package, of all gradients."""
    (X, y), (X_new, y_new), net = texts(7, padded=padded), texts(3, seed=5), Letters().double()
    run = recorded(X, y)
    model = epk.datamodel(run, X_new, y_new)
    coordinates, nodes = internals("training"), internals("kernels").path_nodes(run)
    a, draws, total = nodes.sample_weights, 8, torch.zeros(3, 7).double()
    for node in (3, 4, 5):
        named = {name: value.detach() for name, value in run.weights(nodes.steps[node]).items()}

        def sums(w: Tensor, x: Tensor, labels: Tensor, named: dict[str, Tensor] = named) -> Tensor:
            parts = w.split([value.numel() for value in named.values()])
            own = {name: part.view_as(named[name]) for name, part in zip(named, parts, strict=True)}
            log_p = functional_call(net, own, (x,)).log_softmax(dim=2)
            chosen = log_p.gather(2, labels.clamp(min=0)[..., None])[..., 0]
            return chosen.masked_fill(labels == PADDING, 0).sum(dim=1)

        w = torch.cat([value.flatten() for value in named.values()])
        z = functional_call(net, named, (X,)).flatten(1)
        labels = coordinates.PseudoLabels(epk.CrossEntropy(), y, torch.Size([4, WORDS]), draws).at(z, node).labels
        assert labels.shape == (draws, 7, 4)
        assert bool((labels[:, y == PADDING] == PADDING).all())
        R = torch.cat([jacrev(sums)(w, X, own) * (a / draws).sqrt()[:, None] for own in labels])
        g, g_new = jacrev(sums)(w, X, y), jacrev(sums)(w, X_new, y_new)
        G = nodes.metric(node, w) * 6
        moves = G > 0
        H = 0.5 * R.T @ R
        inverse = torch.linalg.inv(H[moves][:, moves] + torch.diag(1 / G[moves]))
        total += g_new[:, moves] @ inverse @ g[:, moves].T * a / 3
    assert model.method == "linearised training"
    assert_close(model.scores, total, rounding=1e8)
    kept = (torch.arange(7) % 2).double()
    assert_close(model.predict(kept), model.outputs + (kept - 1) @ total.T, rounding=1e8)
    assert_close(model.verify(torch.ones(7)).measured[0], model.outputs, rounding=1e6)


def test_texts_need_a_recorded_run() -> None:
    X, y = texts(7)
    run = recorded(X, y)
    states = [run.weights(k) for k in (0, 3, 6, 9, 12, 14)]
    with pytest.raises(ValueError, match="scores at positions needs a recorded run"):
        epk.datamodel(states, X, y, data=(X, y), network=Letters().double(), output=lambda z: z[:, -1])


def checkpoints(optimizer: str) -> tuple[Loop, Any]:
    loop = Loop(optimizer=optimizer, steps=60)
    states = [{name: w.clone() for name, w in loop.run.weights(12 * k).items()} for k in range(6)]
    X, y = loop.data
    return loop, epk.datamodel(states, *loop.asked, data=(X, y), network=loop.net)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_six_checkpoints_predict_nearly_as_the_run_does(optimizer: str) -> None:
    loop, model = checkpoints(optimizer)
    nodes = internals("kernels")
    of_run = epk.datamodel(loop.run, *loop.asked)
    kept = (torch.rand(40, 11, generator=torch.Generator().manual_seed(0)) < 0.5).double()
    changes = [(own.predict(kept) - own.outputs).T for own in (model, of_run)]
    assert float(row_correlations(*changes).mean()) > 0.95
    assert_close(model.outputs, of_run.outputs, rounding=1e4)
    assert model.findings == ()
    observed = nodes.checkpoint_nodes(model.trajectories[0], None)
    assert observed.rule == {"sgd": "SGD", "adam": "Adam"}[optimizer]
    assert 0.5 < observed.observed[observed.rule] <= 1


def test_the_time_of_checkpoints_is_that_after_which_residuals_are_the_last_ones() -> None:
    loop, model = checkpoints("adam")
    training, N = model.trainings[0], 11
    u = training._steps(torch.ones(1, 11).double())[0][:N]
    X, y = loop.data
    p = loop.run.model.evaluate(loop.run.weights(60), X).softmax(dim=1).gather(1, y[:, None])
    residuals = [float(own.square().mean().sqrt()) for own in (torch.sigmoid(-u), 1 - p)]
    assert residuals[0] == pytest.approx(residuals[1], rel=0.05)


def test_a_stated_optimizer_counts() -> None:
    loop, model = checkpoints("adam")
    states = [loop.run.weights(12 * k) for k in range(6)]
    flat = epk.datamodel(states, *loop.asked, data=loop.data, network=loop.net, optimizer="SGD")
    assert float((flat.scores - model.scores).norm() / model.scores.norm()) > 0.1


@pytest.mark.parametrize(("options", "message"), [
    ({"count": 5}, "6 checkpoints at least"),
    ({"optimizer": "AdamW"}, 'optimizer must be "Adam", "SGD" or None'),
    ({"data": None}, "need both data= and network="),
    ({"pairs": 3}, "recorded run that saw all samples"),
    ({"backwards": True}, "must be those of a training"),
    ({"way": 1e-9}, "must be those of a training"),  # they hardly move
])  # fmt: skip
def test_checkpoints_that_are_too_few_or_are_asked_too_much_are_refused(options: dict[str, Any], message: str) -> None:
    loop, asked = Loop(optimizer="adam", steps=60), dict(options)
    count, is_backwards, way = asked.pop("count", 6), asked.pop("backwards", False), asked.pop("way", 1.0)
    first, *others = [loop.run.weights(10 * k) for k in range(count)]
    states = [first, *({name: first[name] + way * (w - first[name]) for name, w in own.items()} for own in others)]
    given = {"data": loop.data, "network": loop.net} | asked
    with pytest.raises(ValueError, match=message):
        epk.datamodel(states[::-1] if is_backwards else states, *loop.asked, **given)


@pytest.mark.filterwarnings("ignore:the datamodel is not certified. path training never:epk_gp.CertificateWarning")
@pytest.mark.parametrize("fits", ["classes", "numbers"])
def test_checkpoints_of_a_training_to_the_end_predict_which_samples_count(fits: str) -> None:
    torch.manual_seed(0)
    X, new = torch.randn(20, 3).double(), torch.randn(6, 3).double()
    is_number = fits == "numbers"
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1 if is_number else 2)).double()
    y = (2 * X[:, :1]).tanh() + 0.05 * torch.randn(20, 1).double() if is_number else (X[:, 0] > 0).long()
    loss: Any = epk.MeanSquaredError() if is_number else epk.CrossEntropy()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    run = epk.train(net, X, y, optimizer=optimizer, steps=400, loss=loss)
    states = [run.weights(80 * k) for k in range(6)]
    asked = None if is_number else (new[:, 0] > 0).long()
    model = epk.datamodel(states, new, asked, data=(X, y), network=net, loss=loss)
    kept = (torch.rand(24, 20, generator=torch.Generator().manual_seed(1)) < 0.7).double()
    networks = epk.retrain(run, kept).outputs(new, head="logits")
    measured = torch.stack([z[:, 0] if is_number else margin(z, asked) for z in networks])
    changes = [(own - model.outputs).T for own in (model.predict(kept), measured)]
    assert float(row_correlations(*changes).mean()) > 0.5


def test_checkpoints_whose_residuals_no_path_kernel_reaches_say_so() -> None:
    torch.manual_seed(0)
    X, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    run = epk.train(net, X, y, optimizer=optimizer, steps=500, loss=epk.MeanSquaredError())
    states = [run.weights(100 * k) for k in range(6)]
    with pytest.warns(epk.CertificateWarning, match="never has the last checkpoint's residuals"):
        model = epk.datamodel(states, X[:4], data=(X, y), network=net, loss=epk.MeanSquaredError())
    assert "nearest" in model.findings[0]
