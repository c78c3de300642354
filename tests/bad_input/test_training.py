"""Arguments of `train` and `Recorder` that cannot be recorded: one clear error each, before anything is written."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from epk_gp.optimizers.update_rules import ClipNorm
from helpers import refusal, with_value
from loops import Tokens, data, mlp, regression_data, sgd, token_data

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN, INF, ONE = float("nan"), float("inf"), mlp(outputs=1)
X, Y = data()


def poisoned(value):
    net = mlp()
    with torch.no_grad():
        net[2].bias[1] = value
    return net


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Returning(Inner):
    """A network that returns what a function makes of another's inputs and outputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x, super().forward(x))


class ReentrantCheckpointed(Inner):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(checkpoint(lambda z: torch.tanh(self.b(z)), h, use_reentrant=True))


class InPlace(Inner):
    def forward(self, x):
        return super().forward(F.relu_(x))


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


class NoCopy(Inner):
    def __init__(self):
        super().__init__()
        self.kept = threading.Lock()


class Nothing(nn.Module):
    def forward(self, x):
        return x


OF_ANOTHER_KIND = {
    "X must be a torch.Tensor: got list": {"X": [[1.0] * 4] * 10},
    "y must be a torch.Tensor: got list": {"y": [0] * 10},
    "X must have the weights' dtype torch.float64: got torch.float32": {"X": X.float()},
    "labels must be int64: got torch.int32. Convert them with .long": {"y": Y.int()},
    "needs floating-point": {"loss": epk.MeanSquaredError(), "y": F.one_hot(Y, 3)},
    r"storage must be an epk_gp.Storage, such as .*: got None": {"storage": None},
    "net must be a torch.nn.Module: got function": {"net": lambda x: x},
    "must be copyable by copy.deepcopy": {"net": NoCopy()},
    "floating-point outputs: got torch.int64. Leave argmax": {"net": Returning(lambda x, z: z.argmax(1, True))},
    "got DataParallel around it. Pass net.module": {"net": nn.DataParallel(Inner())},
    "network in Python: got a torch.jit.ScriptModule": {"make": lambda: torch.jit.script(Inner())},
    "weights must be float32 or float64: got torch": {"net": mlp(torch.half), "X": X.half()},
    "loss must be epk_gp.CrossEntropy.*got 'cross_entropy'": {"loss": "cross_entropy"},
    "PerSampleLoss.f, reduction=.* around a function": {"loss": F.cross_entropy},
    "clip must be ClipNorm.* got 1.0": {"clip": 1.0},
    "optimizer must be a torch.optim.Optimizer: got str": {"optimizer": lambda net: "sgd"},
    "steps must be a whole number, at least 1: got 3.5": {"steps": 3.5},
    "generator must be a torch.Generator: got 0. Make one with": {"generator": 0},
    "scheduler must be a torch.optim.lr_scheduler.LRScheduler .* got 5": {"scheduler": 5},
}
WITHOUT_MEANING = {
    "at least one point: got .0, 4": {"X": X[:0], "y": Y[:0]},
    r"X must have shape .M, .*got .10,": {"X": X[:, 0]},
    r"must accept X .10, 8. torch.float64: .*multipl": {"X": torch.cat([X, X], 1)},
    "to a tensor of shape .n, C.: got a tensor of shape": {"X": X[:, None, None]},
    r"must accept X .*torch.int64": {"X": X.long()},
    "X must be finite: row 3 holds NaN or infinity": {"X": with_value(X, NAN)},
    "y must hold values: got a tensor on the device 'meta'": {"y": Y.to("meta")},
    "must accept X .*index out": {"net": Tokens().double(), "X": token_data()[0] + 7},
    "one entry per point: got 9 for 10 points": {"y": Y[:9]},
    "one entry per point: got a scalar for 10 points": {"y": Y[0]},
    r"labels must lie in 0\.\.2 .*3 outputs.*: got 1\.\.3": {"y": Y + 1},
    r"probabilities must have shape .10, 3.*labels must be int64": {"y": Y.double()},
    r"labels must have shape .10,.: got .10, 1.": {"y": Y[:, None]},
    "non-negative and sum to 1": {"y": F.one_hot(Y, 3) * 3.0 - 1},
    "targets must be finite: row 0": {"y": F.one_hot(Y, 3) * NAN},
    r"targets of the outputs' shape .10, 3.: got": {"loss": epk.MeanSquaredError()},
    "targets must be finite: row 3 holds": {"loss": epk.MeanSquaredError(), "y": with_value(regression_data()[1], NAN)},
    "no parameter requires a gradient|must train the": {"net": Nothing()},
    "share one floating dtype and one device": {"net": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3).double())},
    r"shape .n, C.: got tuple for 4 inputs. Say how .*": {"net": Returning(lambda x, z: (z, x))},
    r"labels must lie in 0..0 .the network has 1": {"net": Returning(lambda x, z: z[:, 0])},
    "shape .n, C.: got": {"net": Returning(lambda x, z: z.T), "X": X[:3], "y": Y[:3]},
    "initial weights must be finite: row 0 .* Repair its forward": {"net": Returning(lambda x, z: (z - 10).sqrt())},
    "in evaluation mode .* Pass use_reentrant=False": {"net": ReentrantCheckpointed()},
    r"leave its inputs as they are: .*ReLU\(inplace=False\)": {"net": InPlace()},
    r"must accept X \(10, 4\) .* missing .* 'z'. Several inputs are": {"net": TwoInputs()},
    "network must accept X .* positional argument": {"net": KeywordInput()},
    "its parameters are on device 'meta'": {"net": Inner().to("meta")},
    "lazy layers. Call it once": {"net": nn.Sequential(mlp(), nn.LazyLinear(3)), "optimizer": lambda net: sgd(net[0])},
    "remove batch statistics from .* compute in the precision of the weig": {"net": Single()},
    "weights of '2.bias' must be finite: .* Initialise them": {"net": poisoned(NAN)},
    "must take one gradient a step": {"optimizer": lambda net: torch.optim.LBFGS(net.parameters())},
    "steps must be at least 1: got 0": {"steps": 0},
    "batch_size must be at least 1: got 0": {"batch_size": 0},
    "reduction must be .* got 'none'": {"loss": nn.MSELoss(reduction="none")},
    "one class weight per": {"loss": nn.CrossEntropyLoss(weight=torch.ones(2))},
    "class weights must be finite, not negative": {"loss": epk.CrossEntropy(class_weights=(1.0, -1.0, 1.0))},
    "must lie in .0, 1.: got 1.5": {"loss": epk.CrossEntropy(label_smoothing=1.5)},
    "needs outputs that are log-probabilities": {"loss": nn.NLLLoss()},
    "must be positive and finite: got -1.0": {"clip": ClipNorm(-1.0)},
    "must be the sum of the": {"loss": epk.PerSampleLoss(F.cross_entropy, "sum")},
    "one value per sample.*got float": {"loss": epk.PerSampleLoss(lambda z, y: 1.0)},
    r"one value per sample, shape": {"loss": epk.PerSampleLoss(lambda z, y: z[:, :1])},
    r"state loss=nn\.MSELoss\(\)": {"net": ONE, "y": X[:, 0]},
    "must train the network's": {"optimizer": lambda net: sgd(mlp())},
    "learning rate must be finite": {"optimizer": lambda net: sgd(net, INF)},
    "must have weights to train: no parameter requires a gradient": {"net": mlp().requires_grad_(False)},
    r"HuberLoss needs targets of .* .10, 1.: got .10, 4.": {"net": ONE, "loss": nn.HuberLoss(), "y": X},
    "must accept the network's outputs and the targets: it fails": {"net": ONE, "loss": nn.BCEWithLogitsLoss(), "y": Y},
    r"X must be dense: got a tensor of layout torch.sparse.* to_dense\(\)": {"X": X.to_sparse()},
}
CASES = [
    (error, *case)
    for error, cases in ((TypeError, OF_ANOTHER_KIND), (ValueError, WITHOUT_MEANING))
    for case in cases.items()
]


def make_optimizer(net):
    parameters = list(net.parameters()) if isinstance(net, nn.Module) else []
    return torch.optim.SGD(parameters or [torch.zeros(1, requires_grad=True)], lr=0.1)


def versions(net):
    return [p._version for p in net.parameters()] if isinstance(net, nn.Module) else []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("error", "message", "change"), CASES)
def test_train_refuses_it_before_anything_is_written(error, message, change, tmp_path):
    options = {"make": mlp, "X": X, "y": Y, "steps": 1} | change
    make = options.pop("make")
    net = options.pop("net") if "net" in options else make()
    optimizer, before = options.pop("optimizer", make_optimizer)(net), versions(net)
    with pytest.raises(error, match=message):
        epk.train(net, options.pop("X"), options.pop("y"), optimizer=optimizer, folder=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    assert versions(net) == before


@pytest.mark.parametrize("loss", [nn.HuberLoss(), nn.L1Loss(), nn.BCEWithLogitsLoss()])
def test_the_targets_that_such_a_loss_takes_are_recorded(loss):
    net = mlp(outputs=1)
    assert epk.train(net, X, (Y > 0).double()[:, None], optimizer=sgd(net), steps=1, loss=loss).num_steps == 1


BATCHES = [
    ("abc", TypeError, "integer indices into X: got 'abc'"),
    (object(), TypeError, "integer indices into X: got <object"),
    (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"list of indices: got shape \(2"),
    (torch.tensor(3), ValueError, r"list of indices: got shape \(\)"),
    ([0, 10], ValueError, r"indices must lie in 0\.\.9: got 0\.\.10"),
    ([-1, 3], ValueError, r"indices must lie in 0\.\.9: got -1\.\.3"),
    (torch.tensor([0.0, 1.0]), TypeError, "integer indices into X: got torch.float"),
    (torch.ones(10, dtype=torch.bool), TypeError, "integer indices into X: got torch.bool"),
]


def test_a_batch_that_is_none_is_refused_with_its_step():
    net = mlp()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, Y) as recorder:
        for rows in (None, [1, 2]):
            optimizer.zero_grad()
            F.cross_entropy(net(X if rows is None else X[rows]), Y if rows is None else Y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
        for batch, error, message in BATCHES:
            assert refusal(error, f"^step 2: .*{message}", recorder.batch, batch) is None
    assert recorder.trajectory.num_steps == 2


def test_a_final_layer_that_is_not_linear_is_not_zeroed():
    for net, got in ((nn.Sequential(mlp(), nn.LayerNorm(3)), "LayerNorm"), (Nothing(), "without parameters")):
        with pytest.raises(ValueError, match=f"must be a torch.nn.Linear: got .*{got}"):
            zero_final_layer(net)


HOOKS = [
    lambda layer: layer.register_full_backward_hook(lambda module, grad_input, grad_output: None),
    lambda layer: layer.register_full_backward_pre_hook(lambda module, grad_output: None),
    lambda layer: layer.weight.register_hook(lambda grad: None),
    lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda p: None),
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_that_only_look_at_gradients_do_not_matter_and_one_that_changes_them_is_found():
    plain = mlp()
    expected = epk.train(plain, X, Y, optimizer=sgd(plain), steps=2)
    for register in HOOKS:
        net = mlp()
        register(net[0])
        run = epk.train(net, X, Y, optimizer=sgd(net), steps=2)
        assert run.digest == expected.digest
        assert torch.equal(epk.attribute(run, X[:2]).samples, epk.attribute(expected, X[:2]).samples)
    net[2].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] / 2,))
    with pytest.raises(epk.StepMismatchError, match="gradient"):
        epk.train(net, X, Y, optimizer=sgd(net), steps=1)
