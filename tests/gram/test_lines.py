"""Any number of steps together gives what the definition gives, one state, one node and one sample at a time."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import epk_gp as epk
import reference
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.plans import MemoryPlan
from epk_gp.gram.path_kernel import PathKernel
from helpers import NETWORKS, assert_close, make_case

COUNTS = (1, 2, 7, 1 << 20)  # the last: all steps


def together(count: int):
    """Let as many steps go together as that, of networks of which several can."""
    return patch.object(MemoryPlan, "fitting_lines", lambda self, *sizes: count)


@pytest.mark.parametrize("name", ["tanh", "relu", "norms", "attention", "tied", "twice", "cnn"])
@pytest.mark.filterwarnings("ignore::epk_gp.CertificateWarning")  # of the fixed rule
def test_blocks_and_contributions_are_those_of_the_definition(name):
    case, rule = make_case(name), epk.gauss_legendre(3)
    run, head = case.trajectory, case.heads[-1]
    test, train = epk.Points(case.test, is_train=False), epk.Points(run.inputs, is_train=True)
    expected = reference.gram_block(run, test, train, head, rule)
    own = reference.gram_block(run, test, test, head, rule)
    samples = reference.contributions(run, case.test, head, rule)
    for count in COUNTS:
        with together(count):
            assert_close(epk.gram_block(run, test, train, head=head, rule=rule), expected)
            diagonal = PathKernel(run, head, rule).diagonal_blocks(test)
            assert_close(diagonal, torch.stack([own[n, :, n] for n in range(len(case.test))]))
            assert_close(epk.attribute(run, case.test, head=head, rule=rule).samples, samples)
            assert epk.attribute(run, case.test, head=head).max_error <= 1e-12
            assert epk.reconstruct(run, case.test, head=head).max_error <= 1e-12


def test_most_networks_take_several_steps_together():
    """The control of the test above: what cannot is one step at a time."""
    can = {
        name: plan_for(c.trajectory, c.trajectory.model_for(c.test)).plan
        for name in NETWORKS
        for c in [make_case(name, steps=1)]
    }
    taken = {name for name, plan in can.items() if plan.supports_stacking and plan.supports_jvp}
    assert {"tanh", "relu", "norms", "attention", "tied", "twice", "cnn"} <= taken


class Positions(nn.Module):
    """A position is looked up by a range that no input carries, and as long as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(5, 4), nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = self.places(torch.arange(x.shape[1]))
        return self.out(torch.tanh(self.words(x) + places).mean(1))


def test_a_range_that_is_as_long_as_there_are_rows_is_none_of_them():
    torch.manual_seed(0)
    net, X = Positions().double(), torch.randint(5, (8, 6))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    run = epk.train(net, X, torch.arange(8) % 3, steps=6, batch_size=4, optimizer=optimizer)
    for n in (1, 2, 3, 6):  # on 6 lines: 6, 12, ... rows
        with together(1):
            alone = epk.attribute(run, X[:n])
        for count in (2, 3, 6):
            with together(count):
                assert_close(epk.attribute(run, X[:n]).samples, alone.samples)


class Branch(nn.Module):
    """Calls a ReLU more where a weight is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.hidden(x))
        return self.out(torch.relu(x) if bool(self.out.bias[0] > 0) else x)


def test_another_branch_at_the_end_of_a_step_is_a_clear_error():
    torch.manual_seed(0)
    net, X = Branch().double(), torch.randn(6, 2, dtype=torch.float64)
    with torch.no_grad():
        net.out.bias.copy_(torch.tensor([-1e-3, 0.0]))
    run = epk.train(
        net, X, torch.zeros(6, dtype=torch.int64), steps=2, optimizer=torch.optim.SGD(net.parameters(), lr=0.5)
    )
    for count in COUNTS:
        with (
            together(count),
            pytest.raises(ValueError, match="must call the same functions at both ends of a step|tensors"),
        ):
            epk.attribute(run, X[:1])
