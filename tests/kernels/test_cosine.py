"""The cosine of a kernel: every value divided by the square roots of the kernel's own diagonal at both points."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from helpers import make_case
from kernel_cases import MODES, assert_close, mixed, path_kernel_block, reduced

NO_DIRECTION = r"normalize='cosine' needs k\(x, x\) > 0 at every point: got 0 at point 1"


def cosine_of_block(trajectory, x, y, outputs):
    """From one joint block, without the kernel."""
    joint = torch.cat([x, y])
    K = reduced(path_kernel_block(trajectory, joint, joint), outputs)
    norms = K.diagonal(dim1=-2, dim2=-1).sqrt()
    rows = len(x) * K.shape[-1] // len(joint)
    return (K / (norms[..., :, None] * norms[..., None, :]))[..., :rows, rows:]


@pytest.mark.parametrize("outputs", MODES)
def test_every_mode_is_divided_by_its_own_diagonal_at_both_copies(trajectory, outputs):
    x, y = mixed(5), mixed(4)
    kernel = EPKKernel(trajectory, outputs, normalize="cosine")
    assert kernel.scale == 1.0
    expected = cosine_of_block(trajectory, x, y, outputs)
    assert_close(kernel(x, y).to_dense(), expected)
    assert_close(kernel(y, x).to_dense(), expected.mT)
    assert_close(kernel(x[:4], y, diag=True), expected[..., : expected.shape[-1], :].diagonal(dim1=-2, dim2=-1))
    sets = torch.stack([x[:4], y]).unsqueeze(1)  # the second one is the other side
    assert_close(kernel(sets, y).to_dense()[1].squeeze(0), kernel(y).to_dense())
    both = torch.cat([x, y])
    assert_close(kernel(both).to_dense(), cosine_of_block(trajectory, both, both, outputs))


@pytest.mark.parametrize("outputs", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_of_cosines_is_a_correlation_matrix(trajectory, outputs, dtype):
    """Symmetric as far as the kernel is, its diagonal 1 to the last bit, positive semi-definite to rounding."""
    x = mixed(6, dtype=dtype)
    kernel = EPKKernel(trajectory, outputs, normalize="cosine")
    for repeated in (x, x.clone()):
        K = kernel(x, repeated).to_dense()
        assert K.dtype == dtype
        assert torch.equal(K, K.mT)
        ones = torch.ones_like(K[..., 0])
        assert torch.equal(K.diagonal(dim1=-2, dim2=-1), ones)
        assert torch.equal(kernel(x, repeated, diag=True), ones)
        assert torch.equal(kernel(x, repeated).diagonal(dim1=-1, dim2=-2), ones)
        assert torch.linalg.eigvalsh(K).min() > -100 * torch.finfo(dtype).eps
        batch = kernel(x.expand(3, 1, 6, 3), repeated).to_dense()
        assert torch.equal(batch, K.expand(batch.shape))


@pytest.mark.parametrize("rows", [1024, 2])
def test_a_matrix_is_normalised_some_rows_at_a_time_and_the_cache_is_left_alone(trajectory, counter, monkeypatch, rows):
    monkeypatch.setattr("epk_gp.kernels.values._ROWS", rows)
    x, y = mixed(5), mixed(4)
    kernel = EPKKernel(trajectory, "trace", normalize="cosine")
    expected = cosine_of_block(trajectory, x, y, "trace")
    counter.calls.clear()
    for _ in range(3):
        assert_close(kernel(x, y).to_dense(), expected)
    assert sorted(counter.calls) == ["diagonal_blocks"] * 2 + ["trace_block"]


@pytest.mark.parametrize("other_side", ["stands still", "is another tensor"])
def test_equal_points_of_two_tensors_have_a_gradient_each(other_side):
    case = make_case("tanh", steps=1)
    kernel = EPKKernel(case.trajectory, "trace", "logits", normalize="cosine")
    x = case.test[:3].flatten(1).clone().requires_grad_()
    y = x.detach().clone().requires_grad_(other_side == "is another tensor")
    inputs = (x, y) if y.requires_grad else (x,)
    weights = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)  # not symmetric
    found = torch.autograd.grad((weights * kernel(x, y).to_dense()).sum(), inputs)
    apart = 1e-9 * torch.randn_like(x)  # so little that values, but not gradients, are taken for those of other points
    expected = torch.autograd.grad((weights * kernel(x, y + apart).to_dense()).sum(), inputs)
    for gradient, of_others in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, of_others, rtol=1e-6, atol=1e-6)


def dead_run():
    """A ReLU network without biases: the gradients of all outputs vanish at x = 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    X, optimizer = torch.randn(7, 2, dtype=torch.float64), torch.optim.SGD(net.parameters(), lr=0.2)
    return epk.train(net, X, torch.arange(7) % 3, optimizer=optimizer, steps=2)


@pytest.mark.parametrize("outputs", MODES)
def test_a_point_without_a_direction_is_named(outputs):
    run = dead_run()
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
    kernel = EPKKernel(run, outputs, normalize="cosine")
    where = ", output 0" if outputs == "full" else ""
    for call in (
        lambda: kernel(test_copy(x)).to_dense(),
        lambda: kernel(train_copy(x[:1]), test_copy(x)).to_dense(),
        lambda: kernel(test_copy(x), diag=True),
    ):
        with pytest.raises(ValueError, match=NO_DIRECTION + where):
            call()
    EPKKernel(run, outputs, normalize="mean_diagonal")(test_copy(x)).to_dense()
