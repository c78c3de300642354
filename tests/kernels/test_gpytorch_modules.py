"""The kernel as a module among GPyTorch's and BoTorch's: parameters, copies, states, caches and models around it."""

import copy
import pickle

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP

from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from kernel_cases import MODES, C, D, assert_close, make_run, mixed


def test_the_network_leaks_no_parameter(trajectory):
    scaled = gpytorch.kernels.ScaleKernel(EPKKernel(trajectory))
    assert [name for name, _ in scaled.named_parameters()] == ["raw_outputscale"]
    assert set(scaled.state_dict()) <= {
        "raw_outputscale",
        "raw_outputscale_constraint.lower_bound",
        "raw_outputscale_constraint.upper_bound",
        "base_kernel._extra_state",  # the run's digest
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_follow_the_points_dtype_and_the_kernel_reports_its_own(trajectory, dtype):
    kernel = EPKKernel(trajectory, "independent")
    x = mixed(3, dtype=dtype)
    assert kernel.forward(x, x).dtype == dtype
    assert kernel.forward(x, x, diag=True).dtype == dtype
    assert kernel.dtype == torch.float64
    assert kernel.device == torch.device("cpu")
    assert kernel.to(dtype=torch.float32).dtype == torch.float32
    assert kernel[0].dtype == torch.float32


def test_copies_share_the_run_and_pickles_carry_it(trajectory):
    kernel = EPKKernel(trajectory, "independent", normalize="mean_diagonal")
    x = mixed(3)
    K = kernel(x).to_dense()
    assert copy.deepcopy(kernel).trajectory is trajectory
    assert kernel[0].config is kernel.config
    restored = pickle.loads(pickle.dumps(kernel))
    assert torch.equal(restored(x).to_dense(), K)


def test_a_state_dict_loads_into_a_kernel_of_the_same_run_only(trajectory, tmp_path):
    scaled = gpytorch.kernels.ScaleKernel(EPKKernel(trajectory))
    scaled.outputscale = 3.0
    torch.save(scaled.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = gpytorch.kernels.ScaleKernel(EPKKernel(make_run()))  # recorded once more: the same digest
    again.load_state_dict(state)
    assert again.outputscale.item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match=r"kernel of the run that it was saved with: its digest is [0-9a-f]{12}, this"):
        gpytorch.kernels.ScaleKernel(EPKKernel(make_run(points=8))).load_state_dict(state)


@pytest.mark.parametrize("outputs", MODES)
def test_twenty_likelihood_steps_cost_one_gram_matrix(trajectory, counter, outputs):
    """GPyTorch's own loop, with train() and eval() in between: the cache is not tied to GPyTorch's."""
    kernel = EPKKernel(trajectory, outputs)
    module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=kernel.batch_shape)
    x = train_copy(trajectory.inputs)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(20):
        module.train()
        optimizer.zero_grad()
        K = module(x).to_dense()
        torch.logdet(K + torch.eye(K.shape[-1], dtype=K.dtype)).sum().backward()
        optimizer.step()
        module.eval()
    assert len(counter.calls) == 1


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_active_dims_survive_indexing_and_expanding(trajectory, outputs):
    wide = torch.cat([torch.randn(5, 3, dtype=torch.float64), mixed(5)], dim=1)
    kernel = EPKKernel(trajectory, outputs, active_dims=(3, 4, 5))
    expected = EPKKernel(trajectory, outputs)(wide[:, 3:]).to_dense()
    assert_close(kernel(wide).to_dense(), expected)
    assert_close(kernel.expand_batch([2, *kernel.batch_shape])(wide).to_dense()[1], expected)
    if outputs == "independent":
        assert_close(kernel[torch.tensor([2, 0])](wide).to_dense(), expected[[2, 0]])
        assert kernel[1].active_dims.tolist() == [3, 4, 5]


def test_an_error_leaves_active_dims_in_place(trajectory):
    kernel = EPKKernel(trajectory, active_dims=(0, 1, 2))
    with pytest.raises(ValueError, match="exactly 0"):
        kernel(torch.full((3, 4), 0.5, dtype=torch.float64)).to_dense()
    assert kernel.active_dims.tolist() == [0, 1, 2]


def test_the_kernel_adds_to_one_of_gpytorchs_own(trajectory):
    x = mixed(4)
    rbf = gpytorch.kernels.MultitaskKernel(gpytorch.kernels.RBFKernel(), num_tasks=C).double()
    rbf.active_dims = torch.tensor([0, 1])
    epk = EPKKernel(trajectory)
    assert_close((epk + rbf)(x).to_dense(), epk(x).to_dense() + rbf(x).to_dense())


class SparseGP(gpytorch.models.ApproximateGP):
    """One variational GP per class; inducing points are test copies."""

    def __init__(self, kernel, Z):
        batch = kernel.batch_shape
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(Z), batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(self, Z, distribution, learn_inducing_locations=False)
        super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=C))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_a_sparse_gp_per_class_trains_on_one_block(trajectory, counter):
    kernel = EPKKernel(trajectory, "independent", normalize="mean_diagonal")
    counter.calls.clear()
    gp = SparseGP(kernel, test_copy(torch.randn(4, D, dtype=torch.float64))).double()
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=C, num_classes=C, mixing_weights=False)
    bound = gpytorch.mlls.VariationalELBO(likelihood, gp, len(trajectory.inputs))
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    x = train_copy(trajectory.inputs)
    with gpytorch.settings.num_likelihood_samples(200):
        losses = []
        for _ in range(15):
            optimizer.zero_grad()
            loss = -bound(gp(x), trajectory.targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(counter.calls) <= 2  # the inducing points alone at the start, then one joint block at every step


@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
def test_botorch_fits_predicts_in_batches_and_fantasizes(trajectory, counter):
    kernel = EPKKernel(trajectory, "trace", normalize="mean_diagonal")
    counter.calls.clear()
    x, y = train_copy(trajectory.inputs), torch.randn(len(trajectory.inputs), 1, dtype=torch.float64)
    gp = SingleTaskGP(x, y, covar_module=gpytorch.kernels.ScaleKernel(kernel), outcome_transform=None)
    fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp))
    assert counter.calls == ["trace_block"]
    X = test_copy(torch.randn(12, D, dtype=torch.float64))
    with torch.no_grad():
        batch = gp.posterior(X.reshape(4, 3, D + 1))
        single = gp.posterior(X)
        fantasy = gp.condition_on_observations(X[:1], y[:1])
    assert_close(batch.mean.reshape(-1), single.mean.reshape(-1), multiple=1e6)  # two solves in another order
    assert_close(batch.variance.reshape(-1), single.variance.reshape(-1), multiple=1e6)
    assert fantasy.posterior(X).variance[0] < 0.99 * single.variance[0]
