"""laplace-torch on the problems of benchmarks/outside/laplace.py, in an environment of its own.

Usage: python laplace_torch.py JOB RESULT
"""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

BATCH = 50  # its example has 25: for each batch the gradients of all points are computed anew
GRID = {"log_prior_prec_min": -2.0, "log_prior_prec_max": 4.0, "grid_size": 13}


def calibration(job: dict[str, Any]) -> dict[str, Any]:
    """Return probabilities and summed variances of the logits by a method, and seconds.

    The method is a structure of the last layer's Hessian, or a number of points of the functional posterior.
    """
    net, method, is_functional = job["net"], job["method"], isinstance(job["method"], int)
    loader = DataLoader(TensorDataset(*job["train"]), batch_size=BATCH if is_functional else 512)
    with seconds() as fitting:
        if is_functional:
            la = Laplace(
                net, "classification", subset_of_weights="all", hessian_structure="gp", independent_outputs=True,
                n_subset=method, prior_precision=job["prior_precision"],
            )  # fmt: skip
            la.fit(loader)
        else:
            held_out = DataLoader(TensorDataset(*job["validation"]), batch_size=512)
            la = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure=method)
            la.fit(loader)
            la.optimize_prior_precision("glm", method="gridsearch", val_loader=held_out, link_approx="probit", **GRID)
    found = predicted(la, job["sets"], BATCH if is_functional else 512)
    return found | {"fit": fitting[0], "prior precision": float(la.prior_precision.flatten()[0])}


def predicted(la: Any, sets: dict[str, Tensor], size: int) -> dict[str, Any]:
    """Predict: the probit approximation, which is the library's default, and the variance of the logits beside it."""
    probabilities, variances = {}, {}
    with seconds() as predicting:
        for name, X in sets.items():
            parts = [la._glm_predictive_distribution(x) for x in X.split(size)]  # of which la(x) is made
            mean = torch.cat([f for f, _ in parts])
            variance = torch.cat([v.diagonal(dim1=1, dim2=2) for _, v in parts])
            probabilities[name] = torch.softmax(mean / (1 + torch.pi / 8 * variance).sqrt(), dim=1).detach()
            variances[name] = variance.sum(1).detach()
    first = next(iter(sets))
    torch.testing.assert_close(probabilities[first][:size], la(sets[first][:size]).detach(), rtol=1e-4, atol=1e-5)
    return {"probabilities": probabilities, "variances": variances, "predict": predicting[0]}


def regression(job: dict[str, Any]) -> dict[str, Any]:
    """Return the posterior of its example: all weights, full covariance, 1000 steps on the marginal likelihood."""
    with seconds() as taken:
        la = Laplace(job["net"], "regression", subset_of_weights="all", hessian_structure="full")
        la.fit(DataLoader(TensorDataset(*job["train"]), batch_size=len(job["train"][0])))
        prior, sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        optimizer = torch.optim.Adam([prior, sigma], lr=1e-1)
        for _ in range(job["steps"]):
            optimizer.zero_grad()
            (-la.log_marginal_likelihood(prior.exp(), sigma.exp())).backward()
            optimizer.step()
        mean, variance = la(job["X"])
    found = {"mean": mean.detach(), "variance": variance.detach(), "seconds": taken[0]}
    return found | {"prior_precision": float(la.prior_precision), "sigma": float(la.sigma_noise)}


def posteriors(job: dict[str, Any]) -> dict[str, Any]:
    """Return mean and covariance of the functional posterior, in float64."""
    torch.set_default_dtype(torch.float64)
    la = Laplace(
        job["net"], job["likelihood"], subset_of_weights="all", hessian_structure="gp", n_subset=job["subset"],
        independent_outputs=job["independent"], prior_precision=job["prior_precision"],
        **({"sigma_noise": job["sigma"]} if job["likelihood"] == "regression" else {}),
        backend=BackPackGGN if job["backpack"] else CurvlinopsGGN,
    )  # fmt: skip
    la.fit(DataLoader(TensorDataset(*job["train"]), batch_size=7))
    mean, covariance = la._glm_predictive_distribution(job["X"])  # of classification la(x) is probabilities alone
    points = torch.cat([x for x, _ in la.train_loader])
    return {"mean": mean.detach(), "covariance": covariance.detach(), "points": points}


@contextmanager
def seconds() -> Iterator[list[float]]:
    """Measure processor seconds."""
    start, taken = time.process_time(), [0.0]
    yield taken
    taken[0] = time.process_time() - start


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = torch.load(sys.argv[1], weights_only=False)
    torch.manual_seed(0)
    torch.save(globals()[job["problem"]](job), sys.argv[2])
