"""The kernel's values against blocks of the path kernel, in every mode; points and options that it cannot take."""

import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor, nn

from epk_gp.core.inputs import Points
from epk_gp.core.losses import CrossEntropy
from epk_gp.gram.path_kernel import PathKernel, gram_block
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from epk_gp.quadrature.rules import gauss_legendre, left_endpoint
from epk_gp.recording.train import train
from kernel_cases import MODES, C, D, assert_close, mixed, path_kernel_block, reduced


@pytest.mark.parametrize("outputs", MODES)
@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_every_mode_is_its_part_of_the_path_kernels_block(trajectory, outputs, head):
    x, y = mixed(5), mixed(4)
    kernel = EPKKernel(trajectory, outputs, head)
    expected = reduced(path_kernel_block(trajectory, x, y, head=head), outputs)
    assert_close(kernel(x, y).to_dense(), expected)
    assert kernel(x, y).shape == expected.shape


def test_rows_are_interleaved_point_by_point(trajectory):
    """Row i * C + k is class k of point i; class by class (the negative control) is another matrix."""
    x, y = mixed(4), mixed(5)
    K = path_kernel_block(trajectory, x, y)
    actual = EPKKernel(trajectory)(x, y).to_dense()
    for i, k, j, m in [(0, 0, 0, 0), (3, 2, 4, 1), (1, 0, 2, 2)]:
        assert_close(actual[i * C + k, j * C + m], K[i, k, j, m])
    by_class = K.permute(1, 0, 3, 2).reshape(actual.shape)
    assert (actual - by_class).abs().max() > 0.1 * actual.abs().max()


@pytest.mark.parametrize("outputs", MODES)
def test_the_diagonal_is_the_matrixs_and_costs_no_matrix(trajectory, outputs, monkeypatch):
    x = mixed(6)
    expected = EPKKernel(trajectory, outputs)(x).to_dense().diagonal(dim1=-2, dim2=-1)
    monkeypatch.setattr(PathKernel, "block", None)
    monkeypatch.setattr(PathKernel, "block_per_class", None)
    monkeypatch.setattr(PathKernel, "trace_block", None)
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


def test_unknown_options_are_refused(trajectory, unchecked):
    for outputs in ("all", "Full"):
        with pytest.raises(ValueError, match=r"outputs must be one of \['full', 'independent', 'trace', 'sum'\] or"):
            EPKKernel(trajectory, outputs)
    for outputs in (True, 1.0, None):
        with pytest.raises(TypeError, match="outputs must be one of"):
            EPKKernel(trajectory, outputs)
    with pytest.raises(ValueError, match=r"head must be one of \['logits', 'log_softmax'\]: got 'softmax'"):
        EPKKernel(trajectory, head="softmax")
    with pytest.raises(ValueError, match="normalize must be None, 'cosine', .* positive number: got 'trace'"):
        EPKKernel(trajectory, normalize="trace")
    with pytest.raises(TypeError, match="the same nodes at all points"):
        EPKKernel(trajectory, rule="gauss")
    for index in (-1, C):
        with pytest.raises(ValueError, match=r"class index must lie in 0\.\.2 .*: got"):
            EPKKernel(trajectory, index)
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="normalize, if it is not .*, must be positive and finite"):
            EPKKernel(trajectory, normalize=value)
    for value in (True, [1.0]):
        with pytest.raises(TypeError, match="normalize, if it is not None, .* must be a positive number"):
            EPKKernel(trajectory, normalize=value)


def test_points_of_the_wrong_width_are_refused(trajectory, unchecked):
    kernel = EPKKernel(trajectory)
    for x in (torch.zeros(4, D - 1), torch.zeros(4, D + 2), torch.zeros(D + 1), torch.zeros(D)):
        with pytest.raises(ValueError, match=r"points must have shape \(\.\.\., n, 3\)"):
            kernel(x)
        with pytest.raises(ValueError, match=r"points must have shape"):
            kernel.forward(x, x)


def test_calls_without_a_meaning_are_refused(trajectory):
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


def test_options_that_a_kernel_cannot_use_are_refused(trajectory):
    """GPyTorch evaluates a kernel many times: there is no one computation to show the progress of, or to resume."""
    assert EPKKernel(trajectory, memory_budget=1 << 21).config.options.memory_budget == 1 << 21
    for option in ({"progress": True}, {"checkpoint": "folder"}, {"accumulate": torch.float64}):
        with pytest.raises(TypeError, match=r"EPKKernel\(\) got an unexpected .* memory_budget, executor as well"):
            EPKKernel(trajectory, **option)


def test_a_product_with_a_kernel_on_the_inputs_leaves_the_copy_column_out(trajectory):
    """Both copies of a point are one point for it; with all columns (the control) they lie 1 apart."""
    kernel, X = EPKKernel(trajectory, "trace"), torch.zeros(1, D, dtype=torch.float64)
    on_inputs = RBFKernel(active_dims=kernel.input_dims).double()
    assert on_inputs(train_copy(X), test_copy(X)).to_dense().item() == 1
    assert RBFKernel().double()(train_copy(X), test_copy(X)).to_dense().item() < 0.9
