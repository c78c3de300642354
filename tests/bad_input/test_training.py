"""Bad arguments of `train` and `Recorder`: one clear error each, before anything is computed or written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from epk_gp.optimizers.update_rules import ClipNorm
from helpers import with_value
from loops import Tokens, data, mlp, regression_data, sgd, token_data

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN, INF = float("nan"), float("inf")
X, Y = data()


def poisoned(value):
    net = mlp()
    with torch.no_grad():
        net[2].bias[1] = value
    return net


class Tuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x), x


class OneNumber(Tuple):
    def forward(self, x):
        return self.inner(x)[:, 0]


class Transposed(Tuple):
    def forward(self, x):
        return self.inner(x).T


class NoCopy(Tuple):
    def __init__(self):
        super().__init__()
        self.kept = self.inner[0].weight * 1


class Nothing(nn.Module):
    def forward(self, x):
        return x


def mixed_dtypes():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3).double())


def float_tokens():
    return Tokens().double()


TRAINING = {
    # the data
    "X_no_tensor": ({"X": [[1.0] * 4] * 10}, TypeError, "X must be a torch.Tensor: got list"),
    "y_no_tensor": ({"y": [0] * 10}, TypeError, "y must be a torch.Tensor: got list"),
    "X_empty": ({"X": X[:0], "y": Y[:0]}, ValueError, "at least one point: got .0, 4"),
    "X_one_dimensional": ({"X": X[:, 0]}, ValueError, r"X must have shape .M, .*got .10,"),
    "X_too_wide": ({"X": torch.cat([X, X], 1)}, ValueError, r"must accept X .10, 8. torch.float64: .*multipl"),
    "X_too_deep": ({"X": X[:, None, None]}, ValueError, "to a tensor of shape .n, C.: got a tensor of shape"),
    "X_float32": ({"X": X.float()}, TypeError, "X must have the weights' dtype torch.float64: got torch.float32"),
    "X_integers": ({"X": X.long()}, ValueError, r"must accept X .*torch.int64"),
    "X_complex": ({"X": X + 0j}, ValueError, r"must accept X .*torch.complex128"),
    "X_nan": ({"X": with_value(X, NAN)}, ValueError, "X must be finite: row 3 holds NaN or infinity"),
    "devices": ({"y": Y.to("meta")}, ValueError, "y must hold values: got a tensor on the device 'meta'"),
    "token_out_of_range": ({"net": float_tokens(), "X": token_data()[0] + 7}, ValueError, "must accept X .*index out"),
    "floats_for_tokens": ({"net": float_tokens()}, ValueError, "must accept X .*torch.float64"),
    # the targets
    "length_mismatch": ({"y": Y[:9]}, ValueError, "one entry per point: got 9 for 10 points"),
    "y_scalar": ({"y": Y[0]}, ValueError, "one entry per point: got a scalar for 10 points"),
    "labels_too_high": ({"y": Y + 1}, ValueError, r"labels must lie in 0\.\.2 .*3 outputs.*: got 1\.\.3"),
    "labels_negative": ({"y": Y - 1}, ValueError, r"labels must lie in 0\.\.2 .*: got -1\.\.1"),
    "labels_float": ({"y": Y.double()}, ValueError, r"probabilities must have shape .10, 3.*labels must be int64"),
    "labels_int32": ({"y": Y.int()}, TypeError, "labels must be int64: got torch.int32. Convert them with .long"),
    "labels_column": ({"y": Y[:, None]}, ValueError, r"labels must have shape .10,.: got .10, 1."),
    "probabilities_negative": ({"y": F.one_hot(Y, 3) * 3.0 - 1}, ValueError, "non-negative and sum to 1"),
    "probabilities_nan": ({"y": F.one_hot(Y, 3) * NAN}, ValueError, "targets must be finite: row 0"),
    "regression_labels": ({"loss": epk.MeanSquaredError()}, ValueError, r"targets of the outputs' shape .10, 3.: got"),
    "regression_one_column": ({"loss": epk.MeanSquaredError(), "y": X[:, :1]}, ValueError, r"targets of the outputs'"),
    "regression_integers": ({"loss": epk.MeanSquaredError(), "y": F.one_hot(Y, 3)}, TypeError, "needs floating-point"),
    "regression_nan": (
        {"loss": epk.MeanSquaredError(), "y": with_value(regression_data()[1], NAN)},
        ValueError,
        "targets must be finite: row 3 holds",
    ),
    "no_storage": ({"storage": None}, TypeError, r"storage must be an epk_gp.Storage, such as .*: got None"),
    # the network
    "no_network": ({"net": lambda x: x}, TypeError, "net must be a torch.nn.Module: got function"),
    "network_without_weights": ({"net": Nothing()}, ValueError, "no parameter requires a gradient|must train the"),
    "network_of_two_dtypes": ({"net": mixed_dtypes()}, ValueError, "share one floating dtype and one device"),
    "network_not_copyable": ({"net": NoCopy()}, TypeError, "must be copyable by copy.deepcopy"),
    "network_returns_a_tuple": ({"net": Tuple()}, ValueError, r"shape .n, C.: got tuple for 4 inputs. Say how .*"),
    "network_returns_one_number": ({"net": OneNumber()}, ValueError, r"labels must lie in 0..0 .the network has 1"),
    "network_transposed": ({"net": Transposed(), "X": X[:3], "y": Y[:3]}, ValueError, "shape .n, C.: got"),
    "weights_nan": ({"net": poisoned(NAN)}, ValueError, "weights of '2.bias' must be finite: .* Initialise them"),
    # the loop
    "steps_zero": ({"steps": 0}, ValueError, "steps must be at least 1: got 0"),
    "batch_size_zero": ({"batch_size": 0}, ValueError, "batch_size must be at least 1: got 0"),
    "loss_name": ({"loss": "cross_entropy"}, TypeError, "loss must be epk_gp.CrossEntropy.*got 'cross_entropy'"),
    "torch_loss_reduction": ({"loss": nn.MSELoss(reduction="none")}, ValueError, "reduction must be .* got 'none'"),
    "class_weights_too_few": ({"loss": nn.CrossEntropyLoss(weight=torch.ones(2))}, ValueError, "one class weight per"),
    "class_weight_negative": (
        {"loss": epk.CrossEntropy(class_weights=(1.0, -1.0, 1.0))},
        ValueError,
        "class weights must be finite, not negative",
    ),
    "smoothing_too_large": ({"loss": epk.CrossEntropy(label_smoothing=1.5)}, ValueError, "must lie in .0, 1.: got 1.5"),
    "loss_a_function": ({"loss": F.cross_entropy}, TypeError, "PerSampleLoss.f, reduction=.* around a function"),
    "logits_as_log_probabilities": ({"loss": nn.NLLLoss()}, ValueError, "needs outputs that are log-probabilities"),
    "clip_no_clip": ({"clip": 1.0}, TypeError, "clip must be ClipNorm.* got 1.0"),
    "clip_negative": ({"clip": ClipNorm(-1.0)}, ValueError, "must be positive and finite: got -1.0"),
    "loss_joined": ({"loss": epk.PerSampleLoss(F.cross_entropy, "sum")}, ValueError, "must be the sum of the"),
    "loss_a_number": ({"loss": epk.PerSampleLoss(lambda z, y: 1.0)}, ValueError, "one value per sample.*got float"),
    "loss_a_column": ({"loss": epk.PerSampleLoss(lambda z, y: z[:, :1])}, ValueError, r"one value per sample, shape"),
    # the optimizer
    "no_optimizer": ({"optimizer": lambda net: "sgd"}, TypeError, "optimizer must be a torch.optim.Optimizer: got str"),
    "optimizer_of_another_network": ({"optimizer": lambda net: sgd(mlp())}, ValueError, "must train the network's"),
    "learning_rate_infinite": ({"optimizer": lambda net: sgd(net, INF)}, ValueError, "learning rate must be finite"),
    "optimizer_of_frozen_weights": (
        {"net": mlp().requires_grad_(False), "optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1)},
        ValueError,
        "must have weights to train: no parameter requires a gradient",
    ),
}


def make_optimizer(net):
    parameters = list(net.parameters()) if isinstance(net, nn.Module) else []
    return torch.optim.SGD(parameters or [torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(("change", "error", "message"), TRAINING.values(), ids=TRAINING.keys())
def test_train_refuses_it_before_anything_is_written(change, error, message, tmp_path):
    options = {"net": mlp(), "X": X, "y": Y, "steps": 1} | change
    net = options.pop("net")
    optimizer = options.pop("optimizer", make_optimizer)(net)
    before = [p.clone() for p in net.parameters()] if isinstance(net, nn.Module) else []
    with pytest.raises(error, match=message):
        epk.train(net, options.pop("X"), options.pop("y"), optimizer=optimizer, folder=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    if isinstance(net, nn.Module):
        for p, old in zip(net.parameters(), before, strict=True):
            torch.testing.assert_close(p, old, rtol=0, atol=0, equal_nan=True)


def test_an_unknown_reduction_is_refused():
    net = mlp()
    for loss in (epk.CrossEntropy("none"), epk.MeanSquaredError("none"), epk.PerSampleLoss(F.cross_entropy, "none")):
        with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum': got 'none'"):
            epk.Recorder(net, sgd(net), X, Y, loss=loss)


OPTIONS = {
    "steps_a_fraction": ({"steps": 3.5}, "steps must be a whole number, at least 1: got 3.5"),
    "steps_a_text": ({"steps": "3"}, "steps must be a whole number, at least 1: got '3'"),
    "steps_true": ({"steps": True}, "steps must be a whole number, at least 1: got True"),
    "batch_size_a_fraction": ({"batch_size": 2.5}, "batch_size must be a whole number, at least 1: got 2.5"),
    "generator_a_seed": ({"generator": 0}, "generator must be a torch.Generator: got 0. Make one with"),
    "scheduler_a_number": ({"scheduler": 5}, "scheduler must be a torch.optim.lr_scheduler.LRScheduler .* got 5"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_train_refuses_options_of_another_kind(options, message):
    net = mlp()
    with pytest.raises(TypeError, match=message):
        epk.train(net, X, Y, optimizer=sgd(net), **({"steps": 1} | options))


BATCHES = {
    "text": ("abc", TypeError, "integer indices into X: got 'abc'"),
    "object": (object(), TypeError, "integer indices into X: got <object"),
    "empty": (torch.zeros(0, dtype=torch.int64), ValueError, r"non-empty list of indices into X: got shape \(0,\)"),
    "two_dimensional": (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"list of indices into X: got shape \(2"),
    "one_number": (torch.tensor(3), ValueError, r"list of indices into X: got shape \(\)"),
    "too_high": ([0, 10], ValueError, r"indices must lie in 0\.\.9: got 0\.\.10"),
    "negative": ([-1, 3], ValueError, r"indices must lie in 0\.\.9: got -1\.\.3"),
    "floats": (torch.tensor([0.0, 1.0]), TypeError, "integer indices into X: got torch.float"),
    "mask": (torch.ones(10, dtype=torch.bool), TypeError, "integer indices into X: got torch.bool"),
}


@pytest.mark.parametrize(("batch", "error", "message"), BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_that_is_none_is_refused_with_its_step(batch, error, message):
    net = mlp()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, Y) as recorder:
        for rows in (None, [1, 2]):
            optimizer.zero_grad()
            F.cross_entropy(net(X if rows is None else X[rows]), Y if rows is None else Y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
        with pytest.raises(error, match=f"^step 2: .*{message}"):
            recorder.batch(batch)
    assert recorder.trajectory.num_steps == 2


def test_a_final_layer_that_is_not_linear_is_not_zeroed():
    for net, got in ((nn.Sequential(mlp(), nn.LayerNorm(3)), "LayerNorm"), (Nothing(), "without parameters")):
        with pytest.raises(ValueError, match=f"must be a torch.nn.Linear: got .*{got}"):
            zero_final_layer(net)
