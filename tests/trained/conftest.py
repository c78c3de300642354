import pytest
import torch

from checkpoint_runs import small_net, trained


@pytest.fixture(scope="module")
def rows():
    """A network, its checkpoints and its data."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(20, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (20,), generator=generator)
    net = small_net()
    return net, trained(net, X, y), X, y
