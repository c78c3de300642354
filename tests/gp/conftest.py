"""Fixtures of the Gaussian processes' tests: two small runs, and test points."""

import pytest
import torch

from gp_cases import N_TEST, C, D, M, make_net, make_run


@pytest.fixture(scope="module")
def trajectory():
    torch.manual_seed(3)
    X = torch.randn(M, D, dtype=torch.float64)
    return make_run(make_net(), X, torch.arange(M) % C)


@pytest.fixture
def X_test():
    return 2 * torch.randn(N_TEST, D, dtype=torch.float64)
