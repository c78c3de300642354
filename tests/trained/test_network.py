"""A network that was not recorded, as a run of no steps."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.trained.ntk import as_trajectory


def small_net() -> nn.Module:
    """Return a network with moving statistics and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).double()


def test_network_is_that_of_evaluation_mode_and_keeps_its_modes() -> None:
    """The run has the network's outputs in evaluation mode; the network stays as it was."""
    net, X = small_net(), torch.randn(6, 4, dtype=torch.float64)
    net[0].eval()
    before = [module.training for module in net.modules()]
    run = as_trajectory(net, X)
    assert [module.training for module in net.modules()] == before
    assert (run.num_steps, run.num_outputs, len(run.model.statistics)) == (0, 3, 0)
    assert torch.equal(epk.network_outputs(run, X), net.eval()(X))


def test_weights_are_those_that_require_gradients() -> None:
    """Frozen parameters are constants; a network of constants is refused."""
    net, X = small_net(), torch.randn(6, 4, dtype=torch.float64)
    net[0].requires_grad_(False)
    assert as_trajectory(net, X).model.names == ("1.weight", "1.bias", "4.weight", "4.bias")
    with pytest.raises(ValueError, match="must have weights that require gradients"):
        as_trajectory(net.requires_grad_(False), X)
    with pytest.raises(TypeError, match="must be a torch.nn.Module: got function"):
        as_trajectory(lambda x: x, X)  # type: ignore[arg-type]  # what is tested
