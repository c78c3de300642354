"""Batches of sets of points: the stack of the blocks, counted work, and each set's own gradient."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel

import epk_gp as epk
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import MemoryPlan
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from kernel_cases import MODES, C, D, assert_close, mixed, path_kernel_block, reduced

RULE = epk.gauss_legendre(2)


@dataclass
class Work:
    """Evaluations of the network, and the rows in them."""

    calls: int = 0
    rows: int = 0


@pytest.fixture
def work(monkeypatch):
    """A context manager that counts what the network is evaluated at."""
    original, counts = FunctionalModel.__call__, []

    def counting(model, params, X, *arguments):
        for count in counts:
            count.calls += 1
            count.rows += len(X)
        return original(model, params, X, *arguments)

    monkeypatch.setattr(FunctionalModel, "__call__", counting)

    @contextmanager
    def counted() -> Iterator[Work]:
        counts.append(Work())
        yield counts[-1]
        counts.pop()

    return counted


def kernel_of(trajectory, outputs="independent", **options):
    kernel = EPKKernel(trajectory, outputs, "log_softmax", RULE, **options)
    x = test_copy(torch.zeros(1, D, dtype=torch.float64)).requires_grad_()
    kernel.forward(x, x).sum().backward()  # the network's plan and its sizes are made once, and not counted
    return kernel


def random_test_copies(*shape):
    shape = torch.Size(shape)
    return test_copy(torch.randn(shape.numel(), D, dtype=torch.float64)).reshape(*shape, D + 1)


class SparseGP(gpytorch.models.ApproximateGP):
    """One variational GP per class."""

    def __init__(self, kernel, Z, *, learns_points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(Z.shape[-2], batch_shape=[C])
        options = {"learn_inducing_locations": learns_points}
        strategy = gpytorch.variational.VariationalStrategy(self, Z, distribution, **options)
        super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=C))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=[C])
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=[C])

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("points", ["shared", "own_of_each_class"])
def test_a_step_with_learned_inducing_points_costs_a_small_multiple_of_one_with_fixed_points(trajectory, work, points):
    x, Z = train_copy(trajectory.inputs), random_test_copies(*(() if points == "shared" else (C,)), 4)
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_features=C, num_classes=C, mixing_weights=False).double()
    cost = {}
    for learns_points in (False, True):
        gp = SparseGP(kernel_of(trajectory, cache_bytes=0), Z, learns_points=learns_points).double()
        bound = gpytorch.mlls.VariationalELBO(likelihood, gp, len(x))
        for _ in range(2):  # the first step also sets the variational distribution up
            with work() as cost[learns_points]:
                (-bound(gp(x), trajectory.targets)).backward()
    fixed, learned = cost[False], cost[True]
    # the values and the derivative of K(Z, Z) and K(Z, X); those of points that all classes share are one set's
    assert learned.calls <= 2.5 * fixed.calls
    assert learned.rows <= 2 * fixed.rows


def test_only_the_sum_of_gradients_of_shared_points_is_used_and_it_is_right(trajectory, work):
    """As GPyTorch expands inducing points to a set for each class and joins them with data."""
    kernel, data, Z = kernel_of(trajectory, cache_bytes=0), random_test_copies(3), random_test_copies(4)
    weights = torch.randn(C, 4, 4 + 3, dtype=torch.float64)

    def gradient(of, joint):
        own = joint[..., :4, :]
        values = torch.cat([kernel.forward(own, own), kernel.forward(own, data)], -1)
        return torch.autograd.grad((weights * values).sum(), of)[0]

    Z.requires_grad_()
    with work() as shared:
        found = gradient(Z, torch.cat([Z.expand(C, 4, D + 1), data.expand(C, 3, D + 1)], dim=1))
    own = Z.detach().repeat(C, 1, 1).requires_grad_()
    with work() as separate:
        expected = gradient(own, torch.cat([own, data.expand(C, 3, D + 1)], dim=1)).sum(0)
    assert_close(found, expected, 1e4)
    assert shared.rows < separate.rows
    joint = torch.cat([Z.expand(C, 4, D + 1), data.expand(C, 3, D + 1)], dim=1)
    assert_close(gradient(joint, joint)[:, :4].sum(0), expected, 1e4)  # asked for itself: each set's own gradient
    assert (gradient(joint, joint)[0, :4] - gradient(joint, joint)[1, :4]).abs().max() > 1e-3 * expected.abs().max()


def test_the_derivative_of_a_trace_evaluates_each_point_once_for_all_outputs(trajectory, work):
    kernel, y = kernel_of(trajectory, "trace", cache_bytes=0), random_test_copies(5)
    x = random_test_copies(2).requires_grad_()
    values = kernel.forward(x, y)
    with work() as count:
        values.sum().backward()
    assert count.rows == trajectory.num_steps * len(list(RULE)) * (2 + 5)


def test_restarts_share_the_training_points_whose_gradient_nobody_uses(trajectory, work):
    kernel, data, b, q = kernel_of(trajectory, "trace", cache_bytes=0), train_copy(trajectory.inputs), 6, 2
    X = random_test_copies(b, q).requires_grad_()
    N, S, Q = len(data), trajectory.num_steps, len(list(RULE))
    for _ in range(2):  # ways to differentiate are compared once
        with work() as count:
            joint = torch.cat([data.expand(b, N, D + 1), X], dim=1)
            kernel(joint)[..., N:, :N].to_dense().sum().backward()
    assert count.rows == 2 * (S * N + S * Q * b * q)  # for the values, and once more for the derivative
    with work() as one:
        joint = torch.cat([data, X[0].detach().requires_grad_()])
        kernel(joint)[..., N:, :N].to_dense().sum().backward()
    assert count.calls == one.calls


@pytest.mark.parametrize("outputs", MODES)
@pytest.mark.parametrize("diag", [False, True])
def test_every_set_gets_its_own_gradient(trajectory, outputs, diag):
    kernel, x = kernel_of(trajectory, outputs), mixed(C, 3)
    x[1] = x[0]
    x, y = x.requires_grad_(), (mixed(3) if diag else mixed(4)).requires_grad_()
    values = kernel.forward(x, y, diag=diag)
    weights = torch.randn_like(values)
    found = torch.autograd.grad((weights * values).sum(), [x, y])
    total = torch.zeros_like(y)
    for c in range(C):
        own = kernel.forward(x[c], y, diag=diag)
        own = own[c] if outputs == "independent" else own
        of_set, of_y = torch.autograd.grad((weights[c] * own).sum(), [x, y])
        assert_close(found[0][c], of_set[c], 1e4)
        total += of_y
    assert_close(found[1], total, 1e4)
    if not diag:
        assert (found[0][0] - found[0][1]).abs().max() > 1e-3 * found[0].abs().max()  # of equal sets, by their weights


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_equal_sets_on_both_sides_have_a_share_of_their_gradient_each(trajectory, is_symmetric):
    """`apart` are other points to the kernel, and the same up to rounding."""
    kernel, x = kernel_of(trajectory), random_test_copies(C, 2)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    values = kernel.forward(left, right)
    assert torch.equal(kernel.forward(x, x), values)
    weights, apart = torch.randn_like(values), torch.cat([x[..., :-1] * (1 + 1e-15), x[..., -1:]], -1)
    weights = weights + weights.mT if is_symmetric else weights
    found = torch.autograd.grad((weights * values).sum(), [left, right])
    (of_left,) = torch.autograd.grad((weights * kernel.forward(left, apart)).sum(), left)
    (of_right,) = torch.autograd.grad((weights * kernel.forward(apart, right)).sum(), right)
    (together,) = torch.autograd.grad((weights * kernel.forward(left, left)).sum(), left)
    for one, other in ((found[0], of_left), (found[1], of_right), (together, of_left + of_right)):
        assert_close(one, other, 1e4)


def test_small_blocks_have_the_same_values_and_derivatives(trajectory, monkeypatch):
    kernel, x = kernel_of(trajectory, cache_bytes=0), mixed(C, 5).requires_grad_()
    for y in (x, mixed(C, 3)):
        results = []
        for size in (1000, 12):  # points at all nodes of a step
            monkeypatch.setattr(MemoryPlan, "derivative_points", lambda *_, size=size: size)
            values = kernel.forward(x, y)
            results.append((values, *torch.autograd.grad(values.square().sum(), x)))
        for whole, in_blocks in zip(*results, strict=True):
            assert_close(in_blocks, whole, 1e4)


def test_gradients_that_nobody_uses_are_nan_where_they_can_be_seen(trajectory):
    """Who looks at a joint tensor in passing must not take 0 for a gradient; who asks for it gets all of it."""
    learned, fixed, kernel = mixed(2).requires_grad_(), mixed(3), kernel_of(trajectory, "trace")
    apart = learned.detach().requires_grad_(), fixed.clone().requires_grad_()
    expected = torch.autograd.grad(kernel.forward(*apart).sum(), apart)

    def joined():
        joint = torch.cat([learned, fixed])
        return joint, kernel.forward(joint[:2], joint[2:]).sum()

    joint, K = joined()
    assert_close(torch.autograd.grad(K, joint)[0], torch.cat(expected), 1e4)
    joint, K = joined()
    right = joint[2:]
    (found,) = torch.autograd.grad(kernel.forward(learned, right).sum(), right)
    assert_close(found, expected[1], 1e4)
    joint.retain_grad()
    K.backward()
    assert_close(learned.grad, expected[0], 1e4)
    assert joint.grad[2:].isnan().all()
    learned.grad = None
    with torch.autograd.set_detect_anomaly(True):  # which takes NaN for an error
        joined()[1].backward()
    assert_close(learned.grad, expected[0], 1e4)


def test_points_that_were_computed_get_their_gradient(trajectory):
    for change in (lambda z: 2 * z, lambda z: z + 0, torch.relu):
        x = mixed(3).requires_grad_()
        tagged = torch.cat([change(x)[:, :-1], x.detach()[:, -1:]], dim=1)
        kernel_of(trajectory, "trace").forward(tagged, mixed(2)).sum().backward()
        assert x.grad.isfinite().all()
        assert x.grad.abs().max() > 0


SHAPES = {
    "one_set": ((4,), (5,)), "batch_of_points": ((6, 1), (6, 1)), "batch_of_sets": ((3, 2), (3, 2)),
    "batch_against_one_set": ((3, 2), (5,)), "one_set_against_batch": ((5,), (3, 2)), "outer": ((3, 1, 2), (2, 3)),
    "double_batch": ((2, 3, 2), (2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("outputs", MODES)
def test_a_batch_is_the_stack_of_its_blocks(trajectory, outputs, shapes):
    x, y = (mixed(*shape) for shape in shapes)
    if outputs == "independent":
        x, y = (z.unsqueeze(-3) if z.ndim > 2 else z for z in (x, y))  # the kernel's own batch [C] comes last
    actual = EPKKernel(trajectory, outputs)(x, y).to_dense()
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    K = path_kernel_block(trajectory, x.reshape(-1, D + 1), y.reshape(-1, D + 1))
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


@pytest.mark.parametrize("n", [1, 2, C, C + 1])  # with C points GPyTorch would take (C, n) for a matrix
@pytest.mark.parametrize("normalize", [None, "cosine"])
def test_a_diagonal_has_a_row_for_each_class_for_any_number_of_points(trajectory, n, normalize):
    kernel = EPKKernel(trajectory, "independent", normalize=normalize)
    for own, shape in ((kernel, (n,)), (kernel, (C, n)), (kernel.expand_batch(torch.Size([n, C])), (1, n))):
        x, y = mixed(*shape), mixed(*shape)
        K, others = own(x).to_dense(), own(x, y).to_dense()
        assert K.shape[-3] == C
        product = own * RBFKernel(active_dims=kernel.input_dims).double()
        calls = {
            "of a call": (own(x, diag=True), K),
            "of two sets": (own(x, y, diag=True), others),
            "lazy": (own(x).diagonal(dim1=-1, dim2=-2), K),
            "lazy, of a product": (product(x).diagonal(dim1=-1, dim2=-2), K),
        }
        for name, (actual, expected) in calls.items():
            assert actual.shape == expected.shape[:-1], name
            assert_close(actual, expected.diagonal(dim1=-2, dim2=-1))


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


def test_single_points_cost_one_diagonal_and_shared_points_one_block(trajectory, counter):
    EPKKernel(trajectory)(mixed(50, 1)).to_dense()
    assert (counter.calls, counter.points) == (["diagonal_blocks"], 50)
    EPKKernel(trajectory)(mixed(20, 2), mixed(5).expand(20, 5, D + 1)).to_dense()
    assert (counter.calls[1:], counter.points - 50) == (["block"], 20 * 2 + 5)
