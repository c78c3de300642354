"""A loop that cannot be recorded is told what of it cannot, before its first step where that shows."""

import pytest
import torch
from captured_loops import Odd
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from loops import data, mlp, record, sgd


class Mixing(nn.Module):
    """Mixes rows or draws random numbers, in evaluation mode too."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = mlp(), change

    def forward(self, x):
        return self.inner(self.change(x))


def centred(x):
    return x - x.mean(0)


NETWORKS = {
    "no_running_statistics": (
        lambda: nn.Sequential(mlp(), nn.BatchNorm1d(3, track_running_stats=False)).eval(),
        r"'1' \(BatchNorm1d\) uses the statistics of the batch",
    ),
    "centred": (lambda: Mixing(centred), "must depend on its own input alone: evaluated together, 8 inputs"),
    "zero_last_layer": (lambda: zero_final_layer(Mixing(centred)), "must depend on its own input alone"),
    "dropout": (lambda: Mixing(lambda x: F.dropout(x, 0.3)), "deterministic network: two evaluations .* differ"),
}


@pytest.mark.parametrize(("make", "message"), NETWORKS.values(), ids=NETWORKS.keys())
def test_a_random_or_coupled_network_is_refused(make, message):
    net, (X, y) = make().double(), data()
    with pytest.raises(ValueError, match=message):
        epk.Recorder(net, sgd(net), X, y)


def test_a_second_output_in_training_mode_is_named():
    net, (X, y) = Odd("auxiliary").double(), data()
    with pytest.raises(epk.StepMismatchError, match="step 0: .* returns tuple in training mode. Say with output="):
        record(net, sgd(net), X, y, [None], value=lambda z, y: F.cross_entropy(z[0], y) + F.cross_entropy(z[1], y))


LOSSES = {
    "mixing": (
        lambda z, t: F.cross_entropy(z, t.long(), reduction="none") / z.detach().std(), 3,
        "must depend on its own row alone",
    ),
    "broadcast_rows": (lambda z, t: (z - t).square().clone(), 1, r"let it compare outputs\[:, 0\] with them"),
    "broadcast_mean": (lambda z, t: (z - t).square().mean(), 1, r"let it compare outputs\[:, 0\] with them"),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "outputs", "message"), LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_that_mixes_rows_or_broadcasts_targets_is_refused(loss, outputs, message):
    net, (X, y) = nn.Sequential(nn.Linear(4, outputs), nn.Flatten(0 if outputs == 1 else 1)).double(), data()
    with pytest.raises(ValueError, match=message):
        epk.Recorder(net, sgd(net), X, y.double(), loss=epk.PerSampleLoss(loss))


class Bag(nn.Module):
    """The mean of words, under dropout."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.score = nn.Embedding(9, 4), nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.score((self.drop(self.embed(ids)) * mask[..., None]).sum(dim=1))


def test_rows_that_were_gathered_from_two_processes_are_named():
    cause = r"no call .* but one on inputs of shape \(4, 6\), \(4, 6\): .*announce the rows"
    X = {"ids": torch.randint(1, 9, (24, 6)), "mask": torch.ones(24, 6).double()}
    y, net = torch.arange(24) % 3, Bag().double()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        F.cross_entropy(net(X["ids"][:4], X["mask"][:4]), y[:4]).backward()
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


def test_a_language_model_is_told_to_shift_its_labels():
    ids = torch.randint(0, 7, (12, 5))
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)

    def train(y):
        net = NextToken().double()
        return record(
            net, sgd(net), ids, y, torch.arange(12).split(4), output=lambda returned: returned["logits"][:, -1],
            value=lambda z, t: F.cross_entropy(z["logits"][:, :4].flatten(0, 1), (t[:, :4] if y is shifted else
                                                                                 t[:, 1:]).flatten()),
        )  # fmt: skip

    with pytest.raises(epk.StepMismatchError, match=r"label of the next one, as causal language models do: pass"):
        train(ids)
    assert epk.attribute(train(shifted).trajectory, ids[:2]).certified


def test_labels_of_positions_need_scores_of_positions():
    X, net = data()[0], nn.Linear(4, 3).double()
    with pytest.raises(ValueError, match=r"got \(10, 5\). Several need scores \(n, T, V\)"):
        epk.Recorder(net, sgd(net), X, torch.zeros(10, 5, dtype=torch.int64))
