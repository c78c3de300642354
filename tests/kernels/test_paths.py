"""Other paths in GPyTorch's terms: kernel, derivatives in the points, Gaussian process."""

from dataclasses import replace

import pytest
import torch
from path_runs import queries, recorded
from torch.autograd import gradcheck

import epk_gp as epk
from epk_gp.gram.sketch import nodes_trajectory
from helpers import assert_close

RULE = epk.gauss_legendre(2)


def copies(run: epk.Trajectory, count: int = 3) -> tuple[torch.Tensor, epk.Points]:
    """Training and test copies in GPyTorch's form and in the package's."""
    X = torch.cat([run.inputs[:count], queries(2)])
    return torch.cat([epk.train_copy(X[:count]), epk.test_copy(X[count:])]), epk.Points(X, torch.arange(len(X)) < count)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("outputs", ["full", "trace"])
def test_the_kernel_is_the_gram_block(outputs):
    path = epk.chords(2)
    run = recorded("relu_sgd")
    x, points = copies(run)
    K = epk.gram_block(run, points, points, rule=RULE, path=path)
    expected = K.reshape(15, 15) if outputs == "full" else torch.einsum("ncmc->nm", K)
    kernel = epk.EPKKernel(run, outputs, rule=RULE, path=path)
    assert_close(kernel(x).to_dense(), expected)
    assert_close(kernel(x).diagonal(), expected.diagonal())
    cosine = epk.EPKKernel(run, outputs, rule=RULE, path=path, normalize="cosine")(x).to_dense()
    norms = expected.diagonal().rsqrt()
    assert_close(cosine, expected * norms[:, None] * norms)
    other = epk.EPKKernel(run, outputs, rule=RULE)
    assert kernel.config.cache_key != other.config.cache_key
    assert (other(x).to_dense() - expected).abs().max() > 1e-4


@pytest.mark.mostly_slow
@pytest.mark.parametrize("sides", ["test_test", "test_train", "train_test"])
@pytest.mark.parametrize("name", ["batch_norm_sgd"])
def test_derivatives_along_chords_are_those_of_the_values(name, sides):
    run, copy = recorded(name), {"test": epk.test_copy, "train": epk.train_copy}
    kernel, (left, right) = epk.EPKKernel(run, rule=RULE, path=epk.chords(3)), sides.split("_")
    x, y = queries(2).requires_grad_(), copy[right](run.inputs[:2])
    assert gradcheck(lambda x: kernel.forward(copy[left](x), y), (x,), fast_mode=True)


@pytest.mark.usefixtures("unchecked")
def test_what_a_process_cannot_follow_is_refused():
    run = recorded("relu_sgd")
    with pytest.raises(ValueError, match="leaves a rule no part: got nodes=4 and"):
        epk.LogitGP(run, nodes=4, rule=RULE)
    with pytest.raises(ValueError, match="nodes must be at least 1: got 0"):
        epk.LogitGP(run, nodes=0)
    with pytest.raises(TypeError, match="path must be a path such as"):
        epk.LogitGP(run, path="chords")


PROCESSES = {
    "chords": {"path": epk.chords(2), "rule": RULE},
    "one chord": {"path": epk.chords(100), "rule": RULE},
    "nodes": {"nodes": 8},
    "nodes on chords": {"nodes": 8, "path": epk.chords(2)},
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("options", PROCESSES.values(), ids=PROCESSES)
def test_a_process_along_another_path_is_the_formula(options):
    run, X = recorded("relu_sgd"), queries(3)
    gp = epk.LogitGP(run, noise=0.1, **options)
    along, asked = run, {"rule": RULE, "path": options.get("path", epk.straight())}
    if "nodes" in options:
        along, asked = nodes_trajectory(run, 8, path=asked["path"]), {"rule": epk.QuadratureRule.left_endpoint()}
    both = epk.Points(torch.cat([run.inputs, X]), torch.arange(13) < 10)
    K = epk.gram_block(along, both, both, head="logits", **asked).reshape(39, 39) / gp.kernel.scale
    assert_close(K[:30, :30].diagonal().mean(), torch.tensor(1.0, dtype=torch.float64))
    gain = torch.linalg.solve(K[:30, :30] + 0.1 * torch.eye(30, dtype=torch.float64), K[:30, 30:]).T
    initial, trained = (epk.network_outputs(run, run.inputs, state=s) for s in (0, -1))
    mean = epk.network_outputs(run, X, state=0) + (gain @ (trained - initial).flatten()).view(3, 3)
    covariance = (K[30:, 30:] - gain @ K[:30, 30:]).view(3, 3, 3, 3)
    posterior = gp.logit_posterior(X)
    assert_close(posterior.mean, mean, rounding=1e7)
    assert_close(posterior.covariance, torch.einsum("ncnd->ncd", covariance), rounding=1e7)
    straight = epk.LogitGP(run, rule=RULE, noise=0.1).logit_posterior(X)
    assert (straight.covariance - posterior.covariance).abs().max() > 1e-6  # another kernel


def test_the_scale_of_a_process_on_all_points_is_its_matrix_s_mean_diagonal():
    """Whose matrix is computed once; with some of the points it is that of the kernel."""
    run = recorded("tanh_sgd")
    expected = epk.EPKKernel(run, head="logits", normalize="mean_diagonal").scale
    every, some = epk.LogitGP(run), epk.LogitGP(run, points=[0, 3])
    assert every.kernel.scale == pytest.approx(expected, rel=1e-12)
    assert some.kernel.scale == expected
    stored = len(every.kernel.config.cache)
    every.fit(1)
    assert len(every.kernel.config.cache) == stored  # the matrix was there
    (x,) = every.train_inputs
    assert_close(every.kernel(x).to_dense().diagonal().mean(), torch.tensor(1.0, dtype=torch.float64))
    frozen = replace(run, steps=tuple(replace(step, lr=0.0) for step in run.steps))
    with pytest.raises(ValueError, match="the mean diagonal over the training copies must be positive"):
        epk.LogitGP(frozen)
