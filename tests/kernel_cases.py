"""What the tests of the GPyTorch kernel share: a small run, tagged points, and every mode as a function of a block."""

import torch
from torch import nn

from epk_gp.core.inputs import Points
from epk_gp.core.losses import CrossEntropy
from epk_gp.gram.path_kernel import gram_block
from epk_gp.kernels.tagging import has_mark, test_copy, train_copy
from epk_gp.recording.train import train

D, C = 2, 3
MODES = ["full", "independent", "trace", 1]


def make_run(num_inputs=D, num_outputs=C, dtype=torch.float64, points=7):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(points, num_inputs, generator=generator, dtype=torch.float64).to(dtype)
    net = nn.Sequential(nn.Linear(num_inputs, 5), nn.Tanh(), nn.Linear(5, num_outputs)).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    return train(net, X, torch.arange(points) % num_outputs, optimizer=optimizer, steps=2, loss=CrossEntropy())


def mixed(*shape, dtype=torch.float64):
    """Random points of which about half are training copies."""
    return with_copies(torch.randn(*shape, D + 1, dtype=dtype))


def with_copies(x, column=-1):
    """Points whose column says by its sign which copies they are."""
    train, test = (copy(x.new_zeros(1, 1))[0, -1] for copy in (train_copy, test_copy))
    x[..., column] = torch.where(x[..., column] > 0, train, test)
    return x


def path_kernel_block(trajectory, x, y, **options):
    """The block (n, C, m, C) without GPyTorch and without the cache."""
    return gram_block(trajectory, *(Points(z[..., :-1], has_mark(z)) for z in (x, y)), **options)


def reduced(K, outputs):
    if outputs == "full":
        return K.reshape(K.shape[0] * K.shape[1], -1)
    if outputs == "independent":
        return torch.stack([K[:, c, :, c] for c in range(K.shape[1])])
    if outputs == "trace":
        return sum(K[:, c, :, c] for c in range(K.shape[1]))
    return K[:, outputs, :, outputs]


def assert_close(actual, expected, multiple=200):
    """Sums of some hundred products in another order: a multiple of eps of the largest entry."""
    scale = float(expected.detach().abs().max())
    tolerance = multiple * torch.finfo(expected.dtype).eps * scale
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
