"""Inputs of shape (M,): a number per point, as an embedding takes them."""

import pytest
import torch
from torch import nn

import epk_gp as epk
import reference
from helpers import assert_close
from loops import record, sgd

X = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 1, 3])
Y = torch.arange(10) % 3
RULE = epk.gauss_legendre(3)


def make_net(dropout=0.0):
    torch.manual_seed(1)
    layers = (nn.Embedding(8, 4), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(dropout), nn.Linear(5, 3))
    return nn.Sequential(*layers).double()


def recorded(net, **options):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return record(net.train(), optimizer, X, Y, torch.arange(10).split(4), **options).trajectory


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_contributions_sum_to_the_network(dropout, tmp_path):
    net = make_net(dropout)
    trajectory = recorded(net, folder=tmp_path / "run")
    asked = torch.tensor([7, 0, 0])
    parts = epk.attribute(trajectory, asked, head="logits")
    assert parts.certified
    assert_close(parts.total, net.eval()(asked).detach())
    loaded = epk.load_trajectory(tmp_path / "run", make_net(dropout))
    assert torch.equal(epk.attribute(loaded, asked, head="logits").samples, parts.samples)


def test_a_block_is_that_of_the_definitions_and_a_kernel_takes_columns():
    trajectory = recorded(make_net())
    a, b = epk.Points(torch.arange(3), is_train=False), epk.Points(torch.arange(2, 6), is_train=True)
    block = epk.gram_block(trajectory, a, b, head="logits", rule=RULE)
    assert_close(block, reference.gram_block(trajectory, a, b, "logits", RULE))
    K = epk.EPKKernel(trajectory, rule=RULE)(epk.train_copy(X[:, None]), epk.test_copy(X[:2, None])).to_dense()
    train, test = epk.Points(X, is_train=True), epk.Points(X[:2], is_train=False)
    assert_close(K, epk.gram_block(trajectory, train, test, rule=RULE).reshape(30, 6))


def test_rows_of_other_points_and_numbers_that_are_no_integers_are_refused():
    net = make_net()
    with pytest.raises(epk.StepMismatchError, match=r"row 0 was X\[0\], the batch says X\[4\]"):
        record(net, sgd(net), X, Y, [torch.arange(4, 8)], call=lambda net, x: net(X[:4]))
    net = nn.Linear(1, 3).double()
    with pytest.raises(ValueError, match=r"\(M,\) is for integers alone, .*: got \(10,\). Points .* X\[:, None\]"):
        epk.Recorder(net, sgd(net), X.double(), Y)
