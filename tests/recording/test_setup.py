"""What a recorder refuses before the first step: networks and losses whose steps it could not check."""

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from checked_loops import FunctionalDropout, HandMadeNorm
from epk_gp.core.model import zero_final_layer
from loops import data, mlp, sgd


class AlwaysCentred(HandMadeNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


class AlwaysRandom(FunctionalDropout):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.dropout(x, 0.3))


NETWORKS = {
    "batch_norm_without_running_statistics": (
        lambda: nn.Sequential(mlp(), nn.BatchNorm1d(3, track_running_stats=False)).double().eval(),
        r"'1' \(BatchNorm1d\) uses the statistics of the batch",
    ),
    "batch_statistics_by_hand": (AlwaysCentred, "must depend on its own input alone: evaluated together, 8 inputs"),
    "batch_statistics_by_hand_behind_a_zero_last_layer": (
        lambda: zero_final_layer(AlwaysCentred()),
        "must depend on its own input alone",
    ),
    "dropout_by_hand": (lambda: AlwaysRandom().double(), "deterministic network: two evaluations .* differ"),
}


@pytest.mark.parametrize(("make", "message"), NETWORKS.values(), ids=NETWORKS.keys())
def test_a_random_or_coupled_network_is_refused(make, message):
    net, (X, y) = make(), data()
    with pytest.raises(ValueError, match=message):
        epk.train(net, X, y, optimizer=sgd(net), steps=1)


def test_a_loss_that_mixes_the_rows_is_refused():
    net, (X, y) = mlp(), data()
    loss = epk.PerSampleLoss(lambda z, t: F.cross_entropy(z, t, reduction="none") / z.detach().std())
    with pytest.raises(ValueError, match="must depend on its own row alone"):
        epk.train(net, X, y, optimizer=sgd(net), steps=1, loss=loss)
