"""The run of every k-th step that an experiment takes: its weights, and the error that it tells."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from quantities.thinning import thin_path

RULE = epk.gauss_legendre(2)


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(0)
    X, net = torch.randn(20, 3, dtype=torch.float64), nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(net.double().parameters(), lr=0.2)
    return epk.train(net, X, torch.arange(20) % 3, optimizer=optimizer, steps=20)


def test_weights_are_summed_and_the_error_is_that_of_the_matrix(run):
    X, errors = run.inputs + 0.1, []
    both = epk.Points(torch.cat([run.inputs, X]), torch.arange(40) < 20)
    full = epk.gram_block(run, both, both, rule=RULE)
    for every in (1, 2, 5, 20):
        thinned = thin_path(run, every, X, rule=RULE, num_probe=100)
        assert (thinned.kept, thinned.probe) == (-(-20 // every), 40)
        assert float(thinned.trajectory.step_sizes.sum()) == pytest.approx(float(run.step_sizes.sum()))
        difference = epk.gram_block(thinned.trajectory, both, both, rule=RULE) - full
        assert thinned.error == pytest.approx(float(difference.norm() / full.norm()), rel=1e-9)
        largest = difference.abs().max() / torch.einsum("ncnc->nc", full).mean()
        assert thinned.max_error == pytest.approx(float(largest), rel=1e-9)
        errors.append(thinned.error)
    assert errors[0] == 0 < errors[1] < errors[2] < errors[3]
    assert errors[1] < 0.05


def test_a_thinned_run_is_another_one_and_stays_exact_elsewhere(run):
    thinned = thin_path(run, 4, run.inputs, rule=RULE).trajectory
    with pytest.raises(ValueError, match="the run that it was saved with"):
        epk.EPKKernel(thinned).load_state_dict(epk.EPKKernel(run).state_dict())
    assert epk.reconstruct(thinned, run.inputs + 0.1).max_error < 1e-12
    for every in (0, 21):
        with pytest.raises(ValueError, match="every must be"):
            thin_path(run, every, run.inputs)
