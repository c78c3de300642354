"""A run opens with its own network and loss only."""

import copy
import pathlib

import pytest
import torch
from torch import nn

import epk_gp as epk
from loops import CASES, mlp, squares, trained
from stored_runs import refused


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Tuple(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x


class Failing(nn.Sequential):
    def forward(self, x):
        return super().forward(x.reshape(-1, 3))


def with_buffer():
    net = mlp()
    net.register_buffer("extra", torch.zeros(2))
    return net


def sequential(kind, *layers):
    return kind(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).double()


OTHERS = {
    "names": (Renamed, "must have the recorded weights: '0.weight' is missing"),
    "width": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), r"0.weight has shape \[5, 4\], .*"),
    "outputs": (lambda: mlp(outputs=2), r"2.weight has shape \[2, 6\], in the run \[3, 6\]"),
    "activation": (lambda: mlp(activation=nn.ReLU), "its outputs at the initial state differ"),
    "extra_layer": (lambda: nn.Sequential(*mlp(), nn.Linear(3, 3)), "3.bias has shape .*, in the run None"),
    "extra_buffer": (with_buffer, "extra has shape .*, in the run None"),
    "fewer_layers": (lambda: nn.Sequential(mlp()[0]), "'2.weight' is missing"),
    "failing": (lambda: sequential(Failing, nn.Tanh()), "it fails on the recorded inputs"),
    "two_outputs": (lambda: sequential(Tuple, nn.Tanh()), "to a tensor of shape .n, C.: got tuple"),
}


@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_network_is_refused(run, make, message):
    refused(run, ValueError, message, make())


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_network_is_refused(run):
    with pytest.raises(TypeError, match="net must be a torch.nn.Module: got str"):
        epk.load_trajectory(run, "net")


@pytest.fixture
def own_loss_run(tmp_path):
    trained(CASES["own_loss"], tmp_path / "own")
    return tmp_path / "own"


def test_a_loss_function_must_be_given_again(own_loss_run):
    refused(own_loss_run, ValueError, "the user's own loss 'huber': pass it as loss=")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (epk.CrossEntropy(), "must be the recorded one"),
        (epk.PerSampleLoss(CASES["own_loss"].losses, name="another"), "must be the recorded one"),
        (epk.PerSampleLoss(CASES["own_loss"].losses, "sum", name="huber"), "must be the recorded one"),
        (epk.PerSampleLoss(squares, name="huber"), "step 0 is not a step on the given 'huber'"),
    ],
    ids=["kind", "name", "reduction", "function"],
)
def test_another_loss_function_is_refused(own_loss_run, loss, message):
    with pytest.raises(ValueError, match=message):
        epk.load_trajectory(own_loss_run, mlp(), loss=loss)


def test_another_loss_than_the_recorded_one_is_refused(run):
    assert epk.load_trajectory(run, mlp(), loss=epk.CrossEntropy()).loss == epk.CrossEntropy()
    with pytest.raises(ValueError, match="must be the recorded one"):
        epk.load_trajectory(run, mlp(), loss=epk.CrossEntropy("sum"))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_on_integers_is_computed_in_its_own_dtype(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """Whatever the dtype of the network that it is opened with: integer inputs say nothing of it."""
    torch.manual_seed(0)
    tokens, labels = torch.arange(24).reshape(6, 4) % 7, torch.arange(6) % 3
    layers = (torch.nn.Embedding(7, 5), torch.nn.Flatten(), torch.nn.Linear(20, 3))
    net = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = epk.train(net, tokens, labels, optimizer=optimizer, steps=3, folder=tmp_path / "run")
    opened = epk.load_trajectory(tmp_path / "run", copy.deepcopy(net).to(dtype))
    assert opened.dtype == opened.model.spec.dtype == torch.float64
    assert torch.equal(epk.network_outputs(opened, tokens), epk.network_outputs(run, tokens))
    assert epk.reconstruct(opened, tokens).max_error < 1e-12
