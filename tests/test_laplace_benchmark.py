"""The benchmark beside laplace-torch: it runs in its smallest form, and its functional posterior is that library's."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import page_code

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def laplace(monkeypatch):
    for load in page_code.imported(monkeypatch, FOLDER, FOLDER / "outside"):
        yield load("laplace")


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_functional_posterior_is_the_formula_of_the_library(laplace, likelihood, independent):
    """Its `functional_variance`, written with gradients by hand: K** - K*M (K_MM + 1 / L)^-1 K_M*, around the network.

    K is M / (N delta) J J^T of M of N points. L is 1 / sigma^2, or the diagonal of diag(p) - p p^T.
    """
    torch.manual_seed(2)
    C, prior, sigma = 3, 1.7, 0.6
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, C)).double()
    X, points = torch.randn(20, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    y = torch.randn(20, C, dtype=torch.float64) if likelihood == "regression" else torch.arange(20) % C
    where = [3, 0, 7, 11, 19, 5]
    args = (net, X, y, where, points, prior, sigma)
    mean, covariance = laplace.functional_posterior(*args, independent=independent)
    torch.testing.assert_close(mean, net(points).detach(), rtol=0, atol=1e-12)

    def gradients(rows):
        weights = [*net.parameters()]
        grads = [torch.autograd.grad(net(x[None])[0, c], weights) for x in rows for c in range(C)]
        return torch.stack([torch.cat([g.flatten() for g in own]) for own in grads])  # (n C, P), point by point

    J, G = gradients(X[where]), gradients(points)
    scale = len(where) / (20 * prior)
    K, cross, own = scale * J @ J.T, scale * G @ J.T, scale * G @ G.T
    p = net(X[where]).detach().softmax(1)
    noise = (
        torch.full((6 * C,), sigma**2, dtype=J.dtype) if likelihood == "regression" else (1 / (p * (1 - p))).flatten()
    )
    if independent:  # only products of equal outputs count
        K, cross, own = (M * torch.eye(C).repeat(len(M) // C, M.shape[1] // C) for M in (K, cross, own))
    expected = own - cross @ torch.linalg.inv(K + torch.diag(noise)) @ cross.T
    blocks = expected.view(4, C, 4, C)[torch.arange(4), :, torch.arange(4)]
    torch.testing.assert_close(covariance, blocks, rtol=0, atol=1e-10)


def test_benchmark_runs_without_the_library(laplace, tmp_path):
    laplace.main(tmp_path / "rows.json", tmp_path, 1.0, tmp_path, quick=True)
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["head"]["repeats"].startswith("one network each")
    systems = {row["system"] for row in content["rows"]}
    assert {"network (MAP)", "temperature scaling", "epk_gp of, last layer", "epk_gp, recorded path"} <= systems
    assert all(math.isfinite(row["number"]) and row["cost_seconds"] >= 0 for row in content["rows"])


def test_committed_rows_say_that_both_posteriors_are_one():
    """The numbers that the page shows: the library itself was asked."""
    rows = json.loads((FOLDER / "outside" / "laplace.json").read_text())["rows"]
    differences = [row["number"] for row in rows if row["unit"].startswith("largest difference")]
    assert len(differences) == 8
    assert max(differences) < 1e-8
