"""The kernel among GPyTorch's: its own conformance tests, every mode against the engine, and the known traps."""

import copy
import pickle
import unittest
from dataclasses import dataclass, field

import gpytorch
import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from torch import Tensor, nn

from epk_gp.core.losses import CrossEntropy
from epk_gp.core.points import Points
from epk_gp.gram.path_kernel import gram_block
from epk_gp.kernels import blocks
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import split_copy, test_copy, train_copy
from epk_gp.quadrature.rules import gauss_legendre, left_endpoint
from epk_gp.training.train import train

D, C = 2, 3
MODES = ["full", "independent", "trace", "sum", 1]


def make_run(num_inputs=D, num_outputs=C, dtype=torch.float64, points=7):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(points, num_inputs, generator=generator, dtype=torch.float64).to(dtype)
    net = nn.Sequential(nn.Linear(num_inputs, 5), nn.Tanh(), nn.Linear(5, num_outputs)).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    return train(net, X, torch.arange(points) % num_outputs, optimizer=optimizer, steps=2, loss=CrossEntropy())


@pytest.fixture(scope="module")
def trajectory():
    return make_run()


def mixed(*shape, dtype=torch.float64):
    """Random points of which about half are training copies."""
    x = torch.randn(*shape, D + 1, dtype=dtype)
    x[..., -1] = (x[..., -1] > 0).to(dtype)
    return x


def engine_block(trajectory, x, y, **options):
    """The block (n, C, m, C) that the engine gives, without GPyTorch and without the cache."""
    return gram_block(trajectory, Points(*split_copy(x)), Points(*split_copy(y)), **options)


def reduced(K, outputs):
    """What a mode makes of (n, C, m, C)."""
    if outputs == "full":
        return K.reshape(K.shape[0] * K.shape[1], -1)
    if outputs == "independent":
        return torch.stack([K[:, c, :, c] for c in range(K.shape[1])])
    if outputs == "trace":
        return sum(K[:, c, :, c] for c in range(K.shape[1]))
    return K.sum((1, 3)) if outputs == "sum" else K[:, outputs, :, outputs]


def assert_close(actual, expected, multiple=200):
    """Sums of some hundred products in another order: a multiple of eps of the largest entry."""
    scale = float(expected.detach().abs().max())
    tolerance = multiple * torch.finfo(expected.dtype).eps * scale
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


class Peer(BaseKernelTestCase):
    """GPyTorch's 13 tests, on points whose copy column is 0 or 1 wherever a test may cut it off."""

    seed = 0
    outputs: str | int
    _runs: dict = {}  # noqa: RUF012
    _width = 2

    def run_of(self, width, num_outputs):
        key = (width, num_outputs)
        if key not in self._runs:
            self._runs[key] = make_run(width - 1, num_outputs, torch.float32)
        return self._runs[key]

    def create_kernel_no_ard(self, active_dims=None, batch_shape=None):
        if active_dims is not None:
            self._width = len(active_dims)
        shape = torch.Size() if batch_shape is None else batch_shape
        if self.outputs != "independent":
            kernel = EPKKernel(self.run_of(self._width, 2), self.outputs, active_dims=active_dims)
            return kernel.expand_batch(shape)
        kernel = EPKKernel(self.run_of(self._width, shape[-1] if shape else 2), "independent", active_dims=active_dims)
        return kernel.expand_batch(shape) if shape else kernel[0]

    def create_data_no_batch(self):
        return self.with_copies(super().create_data_no_batch())

    def create_data_single_batch(self):
        return self.with_copies(super().create_data_single_batch())

    def create_data_double_batch(self):
        return self.with_copies(super().create_data_double_batch())

    @staticmethod
    def with_copies(x):
        for column in {x.shape[-1] - 1, *((6, 8) if x.shape[-1] == 10 else ())}:
            x[..., column] = (x[..., column] > 0).to(x.dtype)
        return x


class TestPeerFull(Peer, unittest.TestCase):
    outputs = "full"


class TestPeerIndependent(Peer, unittest.TestCase):
    outputs = "independent"


class TestPeerTrace(Peer, unittest.TestCase):
    outputs = "trace"


class TestPeerSum(Peer, unittest.TestCase):
    outputs = "sum"


class TestPeerClass(Peer, unittest.TestCase):
    outputs = 1


@pytest.mark.parametrize("outputs", MODES)
@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_every_mode_is_its_part_of_the_engines_block(trajectory, outputs, head):
    x, y = mixed(5), mixed(4)
    kernel = EPKKernel(trajectory, outputs, head)
    expected = reduced(engine_block(trajectory, x, y, head=head), outputs)
    assert_close(kernel(x, y).to_dense(), expected)
    assert kernel(x, y).shape == expected.shape


def test_rows_are_interleaved_point_by_point(trajectory):
    """Row i * C + k is class k of point i; class by class (the control) is another matrix."""
    x, y = mixed(4), mixed(5)
    K = engine_block(trajectory, x, y)
    actual = EPKKernel(trajectory)(x, y).to_dense()
    for i, k, j, m in [(0, 0, 0, 0), (3, 2, 4, 1), (1, 0, 2, 2)]:
        assert_close(actual[i * C + k, j * C + m], K[i, k, j, m])
    by_class = K.permute(1, 0, 3, 2).reshape(actual.shape)
    assert (actual - by_class).abs().max() > 0.1 * actual.abs().max()


@pytest.mark.parametrize("outputs", MODES)
def test_the_diagonal_is_the_matrixs_and_costs_no_matrix(trajectory, outputs, monkeypatch):
    x = mixed(6)
    expected = EPKKernel(trajectory, outputs)(x).to_dense().diagonal(dim1=-2, dim2=-1)
    monkeypatch.setattr(blocks, "gram_block", None)
    monkeypatch.setattr(blocks, "gram_block_per_class", None)
    kernel = EPKKernel(trajectory, outputs)
    assert_close(kernel(x, diag=True), expected)
    assert_close(kernel(x).diagonal(dim1=-1, dim2=-2), expected)


@pytest.mark.parametrize("outputs", MODES)
def test_the_diagonal_of_different_points_is_the_matrixs(trajectory, outputs):
    x, y = mixed(6), mixed(6)
    expected = EPKKernel(trajectory, outputs)(x, y).to_dense().diagonal(dim1=-2, dim2=-1)
    assert_close(EPKKernel(trajectory, outputs)(x, y, diag=True), expected)


@pytest.mark.parametrize("outputs", MODES)
def test_the_gram_matrix_over_both_copies_is_positive_semi_definite(trajectory, outputs):
    X = torch.randn(6, D, dtype=torch.float64)
    K = EPKKernel(trajectory, outputs)(torch.cat([train_copy(X), test_copy(X)])).to_dense()
    assert_close(K, K.mT)
    assert torch.linalg.eigvalsh(K).min() > -200 * torch.finfo(K.dtype).eps * K.abs().max()


def test_a_train_copy_is_not_a_test_copy(trajectory):
    X = torch.randn(5, D, dtype=torch.float64)
    kernel = EPKKernel(trajectory)
    frozen, moving = kernel(train_copy(X)).to_dense(), kernel(test_copy(X)).to_dense()
    assert (frozen - moving).abs().max() > 1e-3 * frozen.abs().max()
    assert_close(EPKKernel(trajectory, rule=left_endpoint())(test_copy(X)).to_dense(), frozen)


# Batches


@dataclass
class Counter:
    """How many points the engine was asked about."""

    points: int = 0
    calls: list = field(default_factory=list)


@pytest.fixture
def counter(monkeypatch):
    count = Counter()

    def counting(name):
        original = getattr(blocks, name)

        def wrapped(run, *sets, **options):
            count.points += sum(len(points) for points in sets)
            count.calls.append(name)
            return original(run, *sets, **options)

        return wrapped

    for name in ("gram_block", "gram_block_per_class", "gram_diagonal_blocks"):
        monkeypatch.setattr(blocks, name, counting(name))
    return count


SHAPES = {
    "one_set": ((4,), (5,)),
    "batch_of_points": ((6, 1), (6, 1)),
    "batch_of_sets": ((3, 2), (3, 2)),
    "batch_against_one_set": ((3, 2), (5,)),
    "one_set_against_batch": ((5,), (3, 2)),
    "outer": ((3, 1, 2), (2, 3)),
    "double_batch": ((2, 3, 2), (2, 3, 4)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("outputs", MODES)
def test_a_batch_is_the_stack_of_its_blocks(trajectory, outputs, shapes):
    x, y = (mixed(*shape) for shape in shapes)
    if outputs == "independent":
        x, y = (z.unsqueeze(-3) if z.ndim > 2 else z for z in (x, y))  # the kernel's own batch [C] comes last
    actual = EPKKernel(trajectory, outputs)(x, y).to_dense()
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    K = engine_block(trajectory, x.reshape(-1, D + 1), y.reshape(-1, D + 1))
    rows, columns = (torch.arange(z.shape[:-1].numel()).reshape(z.shape[:-1]) for z in (x, y))
    rows, columns = (z.expand(*batch, z.shape[-1]).reshape(-1, z.shape[-1]) for z in (rows, columns))
    each = [reduced(K[i][:, :, j], outputs) for i, j in zip(rows, columns, strict=True)]
    expected = torch.stack(each)
    if outputs == "independent":
        batch = (*batch[:-1], C) if batch else (C,)
    assert_close(actual, expected.reshape(*batch, *expected.shape[-2:]))


@pytest.mark.parametrize("outputs", MODES)
def test_the_diagonal_of_a_batch_is_the_batch_of_diagonals(trajectory, outputs):
    x = mixed(4, 1, 3)
    kernel = EPKKernel(trajectory, outputs)
    expected = kernel(x).to_dense().diagonal(dim1=-2, dim2=-1)
    assert_close(kernel(x, diag=True), expected)


def test_repeated_points_in_a_batch_are_computed_once(trajectory, counter):
    x = mixed(5)
    K = EPKKernel(trajectory)(x).to_dense()
    once = counter.points
    for copies in (x.expand(4, 5, D + 1), x.repeat(4, 1, 1), x.repeat(2, 3, 1, 1)):
        counter.points = 0
        batch = EPKKernel(trajectory)(copies).to_dense()
        assert batch.shape == (*copies.shape[:-2], *K.shape)
        assert (batch == K).all()
        assert counter.points == once


def test_a_batch_of_single_points_costs_one_diagonal(trajectory, counter):
    x = mixed(50, 1)
    EPKKernel(trajectory)(x).to_dense()
    assert counter.calls == ["gram_diagonal_blocks"]
    assert counter.points == 50


def test_a_batch_of_small_sets_computes_each_point_twice_at_most(trajectory, counter):
    x = mixed(200, 3)
    EPKKernel(trajectory)(x).to_dense()
    assert counter.points == 2 * 200 * 3
    assert len(counter.calls) == 3


def test_a_batch_against_shared_points_is_one_block(trajectory, counter):
    x, y = mixed(20, 2), mixed(5).expand(20, 5, D + 1)
    EPKKernel(trajectory)(x, y).to_dense()
    assert counter.calls == ["gram_block"]
    assert counter.points == 20 * 2 + 5


def test_the_sum_over_classes_obeys_the_memory_budget(trajectory, counter):
    x = test_copy(torch.randn(40, D, dtype=torch.float64))
    y = train_copy(torch.randn(400, D, dtype=torch.float64))
    bounded = EPKKernel(trajectory, "sum", memory_budget=2 * 8 * C * C * 400 * 20)(x, y).to_dense()
    assert len(counter.calls) == 2
    assert_close(bounded, EPKKernel(trajectory, "sum")(x, y).to_dense())


# Normalization


@pytest.mark.parametrize("outputs", MODES)
def test_mean_diagonal_makes_the_mean_diagonal_one(trajectory, outputs):
    kernel = EPKKernel(trajectory, outputs, normalize="mean_diagonal")
    x = train_copy(trajectory.inputs)
    diagonal = kernel(x, diag=True)
    assert_close(diagonal.mean(), torch.ones((), dtype=torch.float64))
    raw = EPKKernel(trajectory, outputs)
    assert raw.scale == 1.0
    assert_close(kernel(x).to_dense() * kernel.scale, raw(x).to_dense())
    assert_close(EPKKernel(trajectory, outputs, normalize=4)(x).to_dense() * 4, raw(x).to_dense())
    if outputs == "independent":
        assert kernel[1].scale == kernel.scale  # one scale for all classes


def test_mean_diagonal_uses_evenly_spaced_points_only(counter, monkeypatch):
    monkeypatch.setattr("epk_gp.kernels.epk.NORMALIZATION_POINTS", 3)
    run = make_run()
    scale = EPKKernel(run, normalize="mean_diagonal").scale
    assert counter.points == 3
    x = train_copy(run.inputs[[0, 2, 4]])
    assert scale == pytest.approx(float(EPKKernel(run)(x, diag=True).mean()), rel=1e-12)


def test_normalization_is_computed_in_float64():
    run = make_run(dtype=torch.float32)
    x = train_copy(run.inputs.double())
    exact = float(EPKKernel(run)(x, diag=True).mean())
    assert EPKKernel(run, normalize="mean_diagonal").scale == pytest.approx(exact, rel=1e-14)


# Among GPyTorch's modules


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
    assert kernel[0].source is kernel.source
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
    assert counter.calls == ["gram_block_per_class"]
    X = test_copy(torch.randn(12, D, dtype=torch.float64))
    with torch.no_grad():
        batch = gp.posterior(X.reshape(4, 3, D + 1))
        single = gp.posterior(X)
        fantasy = gp.condition_on_observations(X[:1], y[:1])
    assert_close(batch.mean.reshape(-1), single.mean.reshape(-1), multiple=1e6)  # two solves in another order
    assert_close(batch.variance.reshape(-1), single.variance.reshape(-1), multiple=1e6)
    assert fantasy.posterior(X).variance[0] < 0.99 * single.variance[0]


def test_images_are_flattened_and_restored():
    X = torch.randn(4, 1, 3, 3, dtype=torch.float64)
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = train(net, X, torch.arange(4) % 3, optimizer=optimizer, steps=2, loss=CrossEntropy())
    expected = gram_block(run, Points(X, False), Points(X, True))
    assert_close(EPKKernel(run)(test_copy(X), train_copy(X)).to_dense(), reduced(expected, "full"))


class Tokens(nn.Module):
    """A network of integers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(6, 3), nn.Linear(3, 2)

    def forward(self, X: Tensor) -> Tensor:
        return self.linear(self.embedding(X).tanh().sum(1))


def test_integer_inputs_travel_as_whole_floats():
    X = torch.randint(0, 6, (5, 4))
    net = Tokens().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = train(net, X, torch.arange(5) % 2, optimizer=optimizer, steps=2, loss=CrossEntropy())
    kernel = EPKKernel(run, normalize="mean_diagonal")
    x = train_copy(X.double())
    expected = gram_block(run, Points(X, True), Points(X, True))
    assert_close(kernel(x).to_dense() * kernel.scale, reduced(expected, "full"))
    assert torch.equal(kernel(train_copy(X)).to_dense(), kernel(x).to_dense())
    with pytest.raises(ValueError, match="must not require gradients where the network takes integers"):
        kernel(x.requires_grad_())
    x = x.detach()
    x[0, 0] += 0.5
    with pytest.raises(ValueError, match="whole numbers"):
        kernel(x).to_dense()


# Errors


def test_unknown_options_are_refused(trajectory, unchecked):
    for outputs in ("all", "Full"):
        with pytest.raises(ValueError, match=r"outputs must be one of \['full', 'independent', 'trace', 'sum'\] or"):
            EPKKernel(trajectory, outputs)
    for outputs in (True, 1.0, None):
        with pytest.raises(TypeError, match="outputs must be one of"):
            EPKKernel(trajectory, outputs)
    with pytest.raises(ValueError, match=r"head must be one of \['logits', 'log_softmax'\]: got 'softmax'"):
        EPKKernel(trajectory, head="softmax")
    with pytest.raises(ValueError, match="normalize must be None, 'mean_diagonal' or a positive number: got 'trace'"):
        EPKKernel(trajectory, normalize="trace")
    with pytest.raises(TypeError, match="the same nodes at all points"):
        EPKKernel(trajectory, rule="gauss")
    for index in (-1, C):
        with pytest.raises(ValueError, match=r"class index must lie in 0\.\.2 .*: got"):
            EPKKernel(trajectory, index)
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive, finite number"):
            EPKKernel(trajectory, normalize=value)
    for value in (True, [1.0]):
        with pytest.raises(TypeError, match="normalize must be None, 'mean_diagonal' or a positive number"):
            EPKKernel(trajectory, normalize=value)


def test_points_of_the_wrong_width_are_refused_at_the_door(trajectory, unchecked):
    kernel = EPKKernel(trajectory)
    for x in (torch.zeros(4, D), torch.zeros(4, D + 2), torch.zeros(D + 1)):
        with pytest.raises(ValueError, match=r"points must have shape \(\.\.\., n, 3\)"):
            kernel(x)
        with pytest.raises(ValueError, match=r"points must have shape"):
            kernel.forward(x, x)


def test_calls_that_mean_nothing_are_refused(trajectory):
    kernel = EPKKernel(trajectory)
    x = mixed(4)
    with pytest.raises(ValueError, match="last_dim_is_batch must be False"):
        kernel.forward(x, x, last_dim_is_batch=True)
    with pytest.raises(ValueError, match="got 4 and 3 points"):
        kernel.forward(x, x[:3], diag=True)


def test_the_kernel_says_what_it_is(trajectory):
    text = repr(EPKKernel(trajectory, "independent", rule=gauss_legendre(2)))
    assert "outputs='independent'" in text
    assert "batch_shape=(3,)" in text
    assert repr(gauss_legendre(2)) in text
