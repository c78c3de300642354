"""Batches of blocks: the stack of the blocks, and no point computed more often than needed."""

import pytest
import torch
from gpytorch.kernels import RBFKernel

from epk_gp.kernels.epk import EPKKernel
from kernel_cases import MODES, C, D, assert_close, mixed, path_kernel_block, reduced

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
