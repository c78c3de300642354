"""A loop that cannot be recorded is told what of it cannot."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk


class Noisy(nn.Module):
    """Adds noise whose size, or whose source, is the network's own affair."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind, self.count = nn.Linear(4, 5), nn.Linear(5, 3), kind, 0
        self.generator = torch.Generator().manual_seed(0) if kind == "generator" else None
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.training:
            self.count += self.kind == "attribute"
            self.passes += self.kind == "buffer"
            noise = torch.randn(h.shape, dtype=h.dtype, generator=self.generator)
            h = h + noise / (1 + self.count + int(self.passes))
        return self.last(h)


def layers(norm):
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3))


def train(net, call=lambda net, x: net(x), change=lambda net, step: None):
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        net.train()
        for step, batch in enumerate(torch.arange(12).split(4)):
            change(net, step)
            optimizer.zero_grad()
            F.cross_entropy(call(net, X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory, X


def layer_by_layer(net, x):
    for layer in net:
        x = layer(x)
    return x


def rate(net, step):
    net[1].p = 0.5 / (1 + step)


def momentum(net, step):
    net[1].momentum = 0.5 / (1 + step)


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        pytest.param(
            lambda: layers(nn.Dropout()), {"change": rate}, r"'1' \(Dropout\) has p=0.25 and had p=0.5", id="p"
        ),
        pytest.param(
            lambda: layers(nn.BatchNorm1d(5)),
            {"change": momentum},
            "has momentum=0.5 and had momentum=0.1",
            id="momentum",
        ),
        pytest.param(lambda: Noisy("attribute"), {}, "has count=2 and had count=", id="attribute"),
        pytest.param(lambda: Noisy("buffer"), {}, "has passes=2 and had passes=", id="buffer"),
        pytest.param(lambda: Noisy("generator"), {}, "a torch.Generator of its own", id="generator"),
        pytest.param(
            lambda: layers(nn.Dropout()), {"call": layer_by_layer}, "call the network itself, net", id="parts"
        ),
        pytest.param(
            lambda: layers(nn.BatchNorm1d(5)),
            {"call": layer_by_layer},
            "call the network itself, net",
            id="norm_of_parts",
        ),
    ],
)
def test_a_refusal_names_its_cause(net, options, message):
    with pytest.raises(epk.StepMismatchError, match=message):
        train(net(), **options)


def test_gradients_that_are_clipped_one_by_one_are_named():
    net = layers(nn.BatchNorm1d(5)).double()
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train()
    F.cross_entropy(net(X), y).backward()
    half = 0.5 * float(net[0].weight.grad.norm())
    optimizer.zero_grad()

    def train_clipped():
        with epk.Recorder(net, optimizer, X, y) as recorder:
            F.cross_entropy(net(X), y).backward()
            recorder.batch(None)
            nn.utils.clip_grad_norm_([net[0].weight], half)
            optimizer.step()

    with pytest.raises(epk.StepMismatchError, match="gradients of single parameters that were clipped"):
        train_clipped()


@pytest.mark.parametrize("reduce", [torch.Tensor.clone, torch.Tensor.mean], ids=["rows", "mean"])
def test_a_loss_that_broadcasts_its_targets_is_told_so(reduce):
    net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    loss = epk.PerSampleLoss(lambda z, t: reduce((z - t).square()))
    with pytest.raises(ValueError, match=r"let it compare outputs\[:, 0\] with them"):
        epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), X, y, loss=loss)


class Centred(nn.Module):
    """Takes a moving mean off, as most people write one: the buffer is another tensor after each pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.mean(dim=0).detach()
        return self.last(h - self.mean)


def test_a_pass_may_put_another_tensor_in_the_place_of_a_buffer():
    trajectory, X = train(Centred())
    parts = epk.attribute(trajectory, X[:2])
    assert parts.certified
    assert parts.statistics.norm() > 1e-3 * parts.samples.norm()


class Bag(nn.Module):
    """The mean of words, under dropout."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.score = nn.Embedding(9, 4), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.score((self.drop(self.embed(ids)) * mask[..., None]).sum(dim=1))


@pytest.mark.parametrize(
    ("rows", "length", "cause"),
    [
        (8, 4, r"no call .* but one on inputs of shape \(8, 4\), \(8, 4\): .*padded"),
        (4, 6, r"no call .* but one on inputs of shape \(4, 6\), \(4, 6\): .*announce the rows"),
    ],
    ids=["cut to the longest", "gathered from two processes"],
)
def test_rows_that_the_network_saw_otherwise_under_dropout_are_named(rows, length, cause):
    torch.manual_seed(0)
    X = {"ids": torch.randint(1, 9, (24, 6)), "mask": torch.ones(24, 6).double()}
    y, net = torch.arange(24) % 3, Bag().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        nn.functional.cross_entropy(net(X["ids"][:rows, :length], X["mask"][:rows, :length]), y[:rows]).backward()
        recorder.batch(torch.arange(8))
        with pytest.raises(epk.StepMismatchError, match=cause):
            optimizer.step()


class NextToken(nn.Module):
    """Scores of the next token at each position."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids):
        return {"logits": self.out(torch.tanh(self.embed(ids)))}


def train_on_tokens(targets):
    torch.manual_seed(0)
    net, ids = NextToken().double(), torch.randint(0, 7, (12, 5))
    y = targets(ids)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with epk.Recorder(net, optimizer, ids, y, output=lambda returned: returned["logits"][:, -1]) as recorder:
        for batch in torch.arange(12).split(4):
            optimizer.zero_grad()
            scores = net(ids[batch])["logits"][:, :-1]
            F.cross_entropy(scores.flatten(0, 1), ids[batch, 1:].flatten()).backward()
            recorder.batch(batch)
            optimizer.step()
    return epk.attribute(recorder.trajectory, ids[:2])


def shifted(ids):
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)


def test_a_language_model_is_told_to_shift_its_labels():
    with pytest.raises(epk.StepMismatchError, match=r"label of the next one, as causal language models do: pass"):
        train_on_tokens(lambda ids: ids)
    assert train_on_tokens(shifted).certified


def test_labels_of_positions_need_scores_of_positions():
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.zeros(12, 5, dtype=torch.int64)
    net = nn.Linear(4, 3).double()
    with pytest.raises(ValueError, match=r"got \(12, 5\). Several need scores \(n, T, V\)"):
        epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), X, y)
