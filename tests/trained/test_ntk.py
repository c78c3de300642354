"""A network that was not recorded, as a run of no steps; its tangent kernel, against Jacobians by autograd."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from graph_runs import make_graph, make_net
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.trained.ntk import as_trajectory
from helpers import assert_close

C = 3


def jacobian(net, X, *, head="logits", output=None):
    """(n, C, P): one backward pass for each output, of a copy in float64 and evaluation mode."""
    net = copy.deepcopy(net).double().eval()
    call = net(**X) if isinstance(X, dict) else net(*X) if isinstance(X, tuple) else net(X)
    z = call if output is None else output(call)
    z = z if head == "logits" else torch.log_softmax(z, dim=1)
    weights = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for entry in z.flatten():
        found = torch.autograd.grad(entry, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows).unflatten(0, z.shape)


def block(J, L):
    return torch.einsum("ncp,mdp->ncmd", J, L)


def convolutional():
    """In training mode, with moving statistics, dropout and a frozen first layer."""
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.Linear(48, C)]
    net = nn.Sequential(*layers).double()
    nn.init.uniform_(net[1].running_mean), nn.init.uniform_(net[1].running_var, 0.5, 2.0)
    net[0].requires_grad_(False)
    return net


class Words(nn.Module):
    """Masked attention on tokens; the embedding is the last layer too, and a gain is a parameter of no layer."""

    def __init__(self):
        super().__init__()
        self.words, self.gain, self.last = nn.Embedding(11, 6), nn.Parameter(torch.ones(6)), nn.Linear(11, C)

    def forward(self, tokens, mask):
        h = self.words(tokens) * self.gain
        scores = (h @ h.transpose(1, 2)).masked_fill(~mask[:, None], -1e9)
        h = (torch.softmax(scores, -1) @ h).mean(1)
        return {"logits": self.last(torch.tanh(F.linear(h, self.words.weight)))}


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(9, 5, mode="mean"), nn.Linear(5, C)

    def forward(self, values, offsets):
        return self.last(torch.tanh(self.bag(values, offsets)))


def test_a_network_is_a_run_of_no_steps_in_evaluation_mode_and_keeps_its_modes(unchecked):
    net, X = convolutional(), torch.randn(6, 1, 6, 6, dtype=torch.float64)
    net[1].eval()
    before = [module.training for module in net.modules()]
    run = as_trajectory(net, X)
    assert [module.training for module in net.modules()] == before
    assert (run.num_steps, run.num_outputs, len(run.model.statistics)) == (0, 3, 0)
    assert run.model.names == ("1.weight", "1.bias", "5.weight", "5.bias")
    assert torch.equal(epk.network_outputs(run, X), net.eval()(X))


FORMS = {  # outputs -> what it is of a block (n, C, m, C)
    "full": lambda K: K,
    "trace": lambda K: torch.einsum("ncmc->nm", K),
    "independent": lambda K: torch.einsum("ncmc->cnm", K),
    1: lambda K: K[:, 1, :, 1],
}
DIAGONALS = {
    "full": lambda K: torch.einsum("ncnd->ncd", K),
    "trace": lambda K: torch.einsum("ncnc->n", K),
    "independent": lambda K: torch.einsum("ncnc->cn", K),
    1: lambda K: torch.einsum("nn->n", K[:, 1, :, 1]),
}


@pytest.mark.parametrize("outputs", FORMS)
@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_every_form_is_its_part_of_the_product_of_jacobians(outputs, head):
    net = convolutional()
    X, Z = (torch.randn(n, 1, 6, 6, dtype=torch.float64) for n in (5, 4))
    J, L = (jacobian(net, x, head=head) for x in (X, Z))
    assert_close(epk.ntk(net, X, Z, outputs=outputs, head=head), FORMS[outputs](block(J, L)))
    assert_close(epk.ntk(net, X, outputs=outputs, head=head), FORMS[outputs](block(J, J)))
    assert_close(epk.ntk(net, X, outputs=outputs, head=head, diagonal=True), DIAGONALS[outputs](block(J, J)))
    assert net.training
    assert all(module.training for module in net.modules())
    net[1].running_mean += 1  # the negative control: the kernel is that of these statistics
    assert (epk.ntk(net, X, Z, head=head) - block(J, L)).abs().max() > 1e-3


class LongestSoFar(nn.Module):
    """Makes a table longer where inputs are longer, and notes its length beside it, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.last, self.length = nn.Linear(1, C), 2
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.register_buffer("table", torch.linspace(1, 2, self.length).to(x), persistent=False)
        return self.last(torch.tanh(x * self.table[: x.shape[1]]).sum(dim=1, keepdim=True))


@pytest.mark.parametrize(
    "make", [LongestSoFar, lambda: nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.Softplus()), nn.Linear(6, C))]
)
def test_what_a_network_replaces_itself_stays_and_scripted_parts_are_taken(make):
    net, X = make().double(), torch.randn(5, 4, dtype=torch.float64)
    K = epk.ntk(net, X)
    for n, c in ((0, 1), (4, 2)):
        rows = [torch.autograd.grad(net(X)[i, c], list(net.parameters())) for i in (n, 1)]
        expected = sum(float((a * b).sum()) for a, b in zip(*rows, strict=True))
        assert float(K[n, c, 1, c]) == pytest.approx(expected, rel=1e-11)


def test_numbers_have_the_dtype_of_the_inputs_and_options_change_none():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, C))
    X = torch.randn(30, 4, dtype=torch.float64)
    expected = block(*[jacobian(net, X)] * 2)
    assert_close(epk.ntk(net, X), expected)
    single = epk.ntk(net, X.float())
    assert single.dtype == torch.float32
    assert_close(single, expected.float())
    with ThreadPoolExecutor(2) as executor:
        for options in ({"memory_budget": 1 << 20}, {"executor": executor}):
            assert_close(epk.ntk(net, X, **options), expected)
    assert_close(epk.ntk(net.double(), X), expected)


def test_texts_rows_of_unequal_lengths_and_graphs_are_taken():
    words, logits = Words().double(), lambda returned: returned["logits"]
    texts = [
        {"tokens": torch.randint(0, 11, (n, 5)), "mask": torch.arange(5) < torch.randint(2, 6, (n, 1))} for n in (4, 3)
    ]
    J, L = (jacobian(words, X, output=logits) for X in texts)
    assert_close(epk.ntk(words, *texts, output=logits), block(J, L))
    assert_close(epk.ntk(words, *texts, output=logits, outputs=2), block(J, L)[:, 2, :, 2])
    as_tuples = [(X["tokens"], X["mask"]) for X in texts]
    assert_close(epk.ntk(words, *as_tuples, output=logits, outputs="trace"), torch.einsum("ncmc->nm", block(J, L)))

    bags, sides = Bags().double(), []
    for lengths in ([1, 3, 2], [5, 2]):  # the longest row is on the right
        rows = [torch.randint(0, 9, (length,)) for length in lengths]
        offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        sides.append((epk.Ragged(rows, "offsets"), jacobian(bags, (torch.cat(rows), offsets))))
    (a, J), (b, L) = sides
    assert_close(epk.ntk(bags, a, b), block(J, L))

    x, edges, _ = make_graph()
    net, nodes = make_net(), torch.tensor([5, 1])
    J = jacobian(net, (x, edges))
    assert_close(epk.ntk(net, epk.Graph(x, edges)), block(J, J))
    assert_close(epk.ntk(net, epk.Graph(x, edges), nodes), block(J, J[nodes]))
    kernel = epk.NTKKernel(net, epk.Graph(x, edges), outputs="trace")
    assert_close(kernel(kernel.rows(nodes)).to_dense(), torch.einsum("ncmc->nm", block(J, J))[nodes][:, nodes])


class Mixing(nn.Module):
    """Each output depends on the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, C).double()

    def forward(self, x):
        return self.last(x - x.mean(0))


@pytest.mark.parametrize("outputs", FORMS)
def test_mixed_rows_are_refused_wherever_the_second_row_is(outputs, unchecked):
    net, X = Mixing(), torch.randn(6, 4, dtype=torch.float64)
    for sides in ((X,), (X, X[:1]), (X[:1], X), (X[:1], X[1:2]), (X[:1].float(), X[1:].float())):
        with pytest.raises(ValueError, match="an output must depend on its own input alone"):
            epk.ntk(net, *sides, outputs=outputs)
    assert epk.ntk(net.last, X[:1], X, outputs=outputs).isfinite().all()  # the control


def test_what_it_cannot_use_is_refused(unchecked):
    net, X = nn.Linear(4, C).double(), torch.randn(5, 4, dtype=torch.float64)
    for call, error, message in (
        (lambda: epk.ntk(net, X, X, diagonal=True), ValueError, "diagonal=True takes each point with itself: X2"),
        (lambda: epk.ntk(net, X, outputs=C), ValueError, r"class index must lie in 0\.\.2 .*: got 3"),
        (lambda: epk.ntk(net, X, outputs="mean"), ValueError, "outputs must be one of"),
        (lambda: epk.ntk(net, X, head="softmax"), ValueError, "head must be one of"),
        (lambda: epk.ntk(net, X.numpy()), TypeError, "X must be a torch.Tensor, .* got ndarray"),
        (lambda: epk.ntk(net, X, X.float()), ValueError, "both sets of points must share dtype and device"),
        (lambda: epk.ntk(net, X, X[:, :3]), ValueError, r"X2 must have shape \(n, 4\)"),
        (lambda: epk.ntk(net, X[:, :3]), ValueError, "the network must accept X"),
        (lambda: epk.ntk(net, X[:0]), ValueError, "at least one point"),
        (lambda: epk.ntk(torch.tanh, X), TypeError, "must be a torch.nn.Module: got builtin"),
        (lambda: epk.ntk(nn.Tanh(), X), ValueError, "must have weights that require gradients"),
        (lambda: epk.ntk(net, X, accumulate=torch.float64), TypeError, "got an unexpected keyword argument"),
        (lambda: epk.NTKKernel(nn.Conv2d(1, 2, 3)), ValueError, "the shape of one input must be stated .* Conv2d"),
        (lambda: epk.NTKKernel(net, normalize="mean_diagonal"), ValueError, "there are no training points"),
        (lambda: epk.NTKKernel(net)(torch.ones(2, 5)), ValueError, "must have 4 columns.*: got 5"),
        (lambda: epk.NTKKernel(net, active_dims=[0, 1])(X), ValueError, "must have 4 columns.*: got 2"),
        (lambda: epk.NTKKernel(net, progress=True), TypeError, "unexpected"),
    ):
        with pytest.raises(error, match=message):
            call()


def regression():
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    X = torch.rand(12, 2, dtype=torch.float64)
    return net, X, torch.sin(3 * X.sum(1)), torch.rand(5, 2, dtype=torch.float64)


@pytest.mark.parametrize("outputs", FORMS)
def test_the_kernel_in_gpytorch_has_the_same_numbers(outputs):
    net = convolutional()
    X, Z = (torch.randn(n, 1, 6, 6, dtype=torch.float64) for n in (4, 3))
    kernel = epk.NTKKernel(net, input_shape=(1, 6, 6), outputs=outputs)
    K = epk.ntk(net, X, Z, outputs=outputs)
    expected = K.reshape(4 * C, -1) if outputs == "full" else K
    assert_close(kernel(kernel.rows(X), kernel.rows(Z)).to_dense(), expected)
    diagonal = kernel(kernel.rows(X)).to_dense().diagonal(dim1=-2, dim2=-1)
    assert_close(kernel(kernel.rows(X), diag=True), diagonal)
    assert kernel.batch_shape == torch.Size([C] if outputs == "independent" else [])
    if outputs == "independent":
        assert_close(kernel[1](kernel.rows(X)).to_dense(), epk.ntk(net, X, outputs=1))
    count = sum(p.numel() for p in net[1:].parameters())
    assert f"NTKKernel({count} weights, points of shape (1, 6, 6)" in repr(kernel)


def test_derivatives_in_the_points_are_those_of_jacobians():
    net, X, _, Z = regression()
    x = X[:3].clone().requires_grad_()
    weights = torch.randn(3, 5, dtype=torch.float64)
    (found,) = torch.autograd.grad((weights * epk.NTKKernel(net, outputs=0)(x, Z).to_dense()).sum(), x)
    params = {name: p.detach() for name, p in net.named_parameters()}

    def features(point):
        def output(w):
            return torch.func.functional_call(net, w, (point,))[0]

        return torch.cat([g.flatten() for g in torch.func.grad(output)(params).values()])

    def total(points):
        return (weights * (torch.func.vmap(features)(points) @ torch.func.vmap(features)(Z).mT)).sum()

    assert_close(found, torch.func.grad(total)(x.detach()))


def test_a_kernel_keeps_its_weights_and_says_when_the_networks_are_others():
    net, X, _, Z = regression()
    kernel = epk.NTKKernel(net, outputs=0)
    before = kernel(X, Z).to_dense()
    state = kernel.state_dict()
    epk.NTKKernel(copy.deepcopy(net), X, outputs="trace").load_state_dict(state)  # equal weights, whatever is asked
    restored = pickle.loads(pickle.dumps(kernel))
    assert torch.equal(restored(X, Z).to_dense(), before)
    with torch.no_grad():
        net[2].weight *= 2
    with pytest.warns(UserWarning, match=r"keeps the weights that the network had .* '2.weight' and 0 more are others"):
        assert torch.equal(kernel(X, Z).to_dense(), before)
    assert torch.equal(restored(X, Z).to_dense(), before)  # a kernel from a file knows no network
    now = epk.NTKKernel(net, outputs=0)
    assert (now(X, Z).to_dense() - before).abs().max() > 1e-2
    with pytest.raises(ValueError, match="must be loaded into a kernel of the network that it was saved with"):
        now.load_state_dict(state)
    del net
    gc.collect()
    assert torch.equal(kernel(X, Z).to_dense(), before)
