"""Averages of the derivatives of language models give the whole change of what they return."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from epk_gp.autodiff.averages import end_of
from epk_gp.autodiff.secants import SecantDerivatives
from epk_gp.core.model import BATCH_MARK
from tests.language_models import BY_HAND, BY_TRANSFORMERS, LENGTH, WORDS, Experts

NETWORKS = {**BY_HAND, **BY_TRANSFORMERS}


class AllDigits(TorchFunctionMode):
    """Leave out casts to float32 of what depends on weights: transformers normalises so, whatever the weights are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if not (isinstance(result, torch.Tensor) and result.requires_grad and result.dtype == torch.float32):
            return result
        if func is F.softmax:
            return func(*args, **{**kwargs, "dtype": None})
        assert func in (torch.Tensor.to, torch.Tensor.float)
        return args[0]


def outputs(net, params, x):
    with AllDigits():
        return functional_call(net, params, (x,))


def made(make, step, *, rows):
    """Return a network, its weights, a change of them, and rows of words."""
    torch.manual_seed(0)
    net = make().double().eval()
    for layer in net.modules():
        layer.padding_idx = None  # autograd would leave out the gradient of its row, which moves here
        if make in BY_TRANSFORMERS.values() and isinstance(layer, torch.nn.Embedding):
            layer.weight.data.mul_(50)  # from 0.02, for which norms are steep; and a padding row of zeros more so
            layer.weight.data[0] = layer.weight.data[1]
    params = {name: p.detach().requires_grad_() for name, p in net.named_parameters() if p.requires_grad}
    d = {name: step * torch.randn_like(value) for name, value in params.items()}
    x = torch.randint(1, WORDS, (rows, LENGTH))
    x[0, -2:] = 0
    setattr(x, BATCH_MARK, rows)
    return net, params, d, x


def product(net, params, d, x):
    """Return the change of outputs, and what averages make of the change of weights, for each row."""
    with SecantDerivatives(params, d, len(x)):
        z = functional_call(net, params, (x,))
    v = torch.randn_like(z)
    rows = torch.eye(len(x), dtype=z.dtype)
    sums, sizes = [], []
    for row in rows:
        grads = torch.autograd.grad(z, list(params.values()), v * row[:, None], retain_graph=True)
        terms = [grad * d[name] for grad, name in zip(grads, params, strict=True)]
        sums.append(sum(term.sum() for term in terms))
        sizes.append(sum(float(term.abs().sum()) for term in terms))
    return z.detach(), end_of(z), v, torch.stack(sums), max(sizes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_averages_give_the_whole_change_of_every_row(name):
    net, params, d, x = made(NETWORKS[name], 0.3, rows=LENGTH)
    start, end, v, found, size = product(net, params, d, x)
    for z, w in ((start, params), (end, {name: value.detach() + d[name] for name, value in params.items()})):
        expected = outputs(net, {name: value.detach().requires_grad_() for name, value in w.items()}, x).detach()
        assert (z - expected).abs().max() <= 1e-13 * expected.abs().max()
    change = ((end - start) * v).sum(1)
    # Gemma's norms on either side of a layer make terms of opposite signs, a million times as large as their sum
    assert (found - change).abs().max() <= max(1e-12 * float(change.abs().max()), 1e-15 * size)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_averages_over_tiny_changes_are_derivatives_in_the_middle(name):
    net, params, d, x = made(NETWORKS[name], 1e-9, rows=3)
    _, _, v, found, _ = product(net, params, d, x)
    middle = {name: (value.detach() + d[name] / 2).requires_grad_() for name, value in params.items()}
    z = outputs(net, middle, x)
    for row, sum_of_row in enumerate(found):
        grads = torch.autograd.grad((z * v)[row].sum(), list(middle.values()), retain_graph=True)
        expected = sum((grad * d[name]).sum() for grad, name in zip(grads, middle, strict=True))
        assert float(sum_of_row) == pytest.approx(float(expected), rel=1e-11, abs=0)


def test_experts_that_both_states_choose_otherwise_are_refused_and_others_are_averaged():
    net, params, d, x = made(Experts, 1e-3, rows=3)
    start, end, v, found, _ = product(net, params, d, x)
    change = ((end - start) * v).sum(1)
    assert (found - change).abs().max() <= 1e-12 * change.abs().max()
    net, params, d, x = made(Experts, 1.0, rows=3)
    with pytest.raises(ValueError, match="takes places that both states choose otherwise, as a mixture of experts"):
        product(net, params, d, x)
