"""Networks and losses that cannot be recorded: one clear error each, at the door; and some that only look like it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epk_gp as epk
from loops import data, mlp, sgd

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
X, Y = data()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class ReentrantCheckpointed(Inner):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(checkpoint(lambda z: torch.tanh(self.b(z)), h, use_reentrant=True))


class Classes(Inner):
    def forward(self, x):
        return super().forward(x).argmax(dim=1, keepdim=True)


class InPlace(Inner):
    def forward(self, x):
        return super().forward(F.relu_(x))


class Undefined(Inner):
    def forward(self, x):
        return (super().forward(x) - 10).sqrt()


class TwoInputs(Inner):
    def forward(self, x, z):
        return super().forward(x + z)


class KeywordInput(Inner):
    def forward(self, *, x):
        return super().forward(x)


class Single(Inner):
    """Computes in float32, whose rounding differs from batch to batch."""

    def forward(self, x):
        return self.c(torch.tanh(F.linear(self.a(x).float(), self.b.weight.float())).double())


NETWORKS = {
    "reentrant": (ReentrantCheckpointed, ValueError, "checkpointing in evaluation mode .* Pass use_reentrant=False"),
    "integer_outputs": (Classes, TypeError, "must return floating-point outputs: got torch.int64. Leave argmax"),
    "in_place": (InPlace, ValueError, r"leave its inputs as they are: .*ReLU\(inplace=False\)"),
    "nan": (Undefined, ValueError, "outputs at its initial weights must be finite: row 0 .* Repair its forward"),
    "two_inputs": (TwoInputs, ValueError, r"network must accept X \(10, 4\) .* missing .* 'z'. Several inputs are"),
    "keyword_input": (KeywordInput, ValueError, "network must accept X .* positional argument"),
    "data_parallel": (lambda: nn.DataParallel(Inner()), TypeError, "got DataParallel around it. Pass net.module"),
    "script": (lambda: torch.jit.script(Inner()), TypeError, "network in Python: got a torch.jit.ScriptModule"),
    "meta": (lambda: Inner().to("meta"), ValueError, "its parameters are on device 'meta'"),
    "lazy": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LazyLinear(3)), ValueError, "it has lazy layers. Call it once"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("make_net", "kind", "message"), NETWORKS.values(), ids=NETWORKS.keys())
def test_a_network_that_cannot_be_recorded_is_refused_in_words(make_net, kind, message):
    net = make_net().double()
    with pytest.raises(kind, match=message):
        epk.Recorder(net, torch.optim.SGD(list(net.parameters())[:2], lr=0.1), X, Y)


def test_weights_in_half_precision_are_refused():
    net = Inner().half()
    with pytest.raises(TypeError, match="weights must be float32 or float64: got torch"):
        epk.Recorder(net, sgd(net), X.half(), Y)


def test_rounding_that_differs_from_batch_to_batch_is_not_blamed_on_batch_statistics_alone():
    torch.manual_seed(0)
    net = Single().double()
    with pytest.raises(ValueError, match="Remove batch statistics from .* compute in the precision of the weights"):
        epk.Recorder(net, sgd(net), X, Y)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_sparse_inputs_are_refused(convert):
    net = mlp()
    with pytest.raises(ValueError, match=r"X must be dense: got a tensor of layout torch.sparse.* to_dense\(\)"):
        epk.Recorder(net, sgd(net), convert(X), Y)
    run = epk.train(net, X, Y, optimizer=sgd(net), steps=1)
    with pytest.raises(TypeError, match="X must be a dense tensor"):
        epk.reconstruct(run, convert(X))


TARGETS = {
    "other_width": (nn.HuberLoss(), X, r"HuberLoss needs targets of .* .10, 1.: got .10, 4."),
    "other_positions": (nn.L1Loss(), X[:, :, None], r"L1Loss needs targets of .* .10, 1.: got .10, 4, 1."),
    "integers": (nn.BCEWithLogitsLoss(), Y, "the loss must accept the network's outputs and the targets: it fails on"),
}


@pytest.mark.parametrize(("loss", "y", "message"), TARGETS.values(), ids=TARGETS.keys())
def test_targets_that_the_loss_would_broadcast_or_refuse_are_refused(loss, y, message):
    net = mlp(outputs=1)
    with pytest.raises(ValueError, match=message):
        epk.Recorder(net, sgd(net), X, y, loss=loss)
    right = (Y > 0).double()[:, None]
    assert epk.train(net, X, right, optimizer=sgd(net), steps=1, loss=loss).num_steps == 1


HOOKS = {
    "full": lambda layer: layer.register_full_backward_hook(lambda module, grad_input, grad_output: None),
    "pre": lambda layer: layer.register_full_backward_pre_hook(lambda module, grad_output: None),
    "parameter": lambda layer: layer.weight.register_hook(lambda grad: None),
    "accumulated": lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS.keys())
def test_hooks_that_only_look_at_gradients_do_not_matter(register):
    net, plain = mlp(), mlp()
    register(net[0])
    run, expected = (epk.train(n, X, Y, optimizer=sgd(n), steps=2) for n in (net, plain))
    assert run.digest == expected.digest
    assert torch.equal(epk.reconstruct(run, X[:2]).outputs, epk.reconstruct(expected, X[:2]).outputs)
    assert torch.equal(epk.attribute(run, X[:2]).samples, epk.attribute(expected, X[:2]).samples)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_hook_that_changes_a_gradient_is_found():
    net = mlp()
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] / 2,))
    with pytest.raises(epk.StepMismatchError, match="gradient"):
        epk.train(net, X, Y, optimizer=sgd(net), steps=1)
