"""What the tests of the Gaussian processes share: sizes, options, small runs, and predictions per point."""

import torch
from torch import nn

from epk_gp.core.losses import CrossEntropy
from epk_gp.datasets import three_gaussians
from epk_gp.recording.train import train

D, C, M, N_TEST = 2, 3, 9, 6
DIM = 3  # of the Gaussians
OUTPUTS = ["full", "independent"]
MEANS = ["initial", "constant", "zero", "network"]
TARGETS = ["network", "dirichlet"]


def make_run(net, X, y, loss=CrossEntropy(), steps=4, lr=0.2):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return train(net, X, y, optimizer=optimizer, steps=steps, loss=loss)


def make_net(dtype=torch.float64):
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C)).to(dtype)


def gaussian_net():
    return nn.Sequential(nn.Linear(DIM, 8), nn.Tanh(), nn.Linear(8, C)).double()


def gaussians(count, seed):
    data = three_gaussians(count, dim=DIM, generator=torch.Generator().manual_seed(seed))
    return data.inputs, data.labels


def gaussian_run(X, y, steps=20):
    torch.manual_seed(0)
    return make_run(gaussian_net(), X, y, steps=steps, lr=0.1)


def per_point(distribution, outputs):
    """GPyTorch's joint prediction as mean (n, C) and covariance (n, C, C)."""
    if outputs != "full":
        return distribution.mean.mT, torch.diag_embed(distribution.variance.mT)
    n = distribution.mean.shape[0]
    K = distribution.covariance_matrix.reshape(n, C, n, C)
    i = torch.arange(n)
    return distribution.mean, K[i, :, i, :]


def with_hyperparameters(gp):
    """Hyperparameters that are not the initial ones, different for every class."""
    gp.covar_module.outputscale = torch.linspace(0.5, 2, gp.covar_module.outputscale.numel()).reshape(
        gp.covar_module.outputscale.shape
    )
    if hasattr(gp.likelihood, "raw_noise"):
        gp.likelihood.noise = torch.linspace(0.02, 0.05, gp.likelihood.noise.numel()).reshape(gp.likelihood.noise.shape)
    for name, parameter in gp.mean_module.named_parameters():
        assert name.endswith("raw_constant")
        nn.init.normal_(parameter)
    return gp
