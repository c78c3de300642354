"""Bad input at every public door: one clear error each, before anything is computed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import zero_final_layer
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.kernel_machine.attribute import attribute_by
from epk_gp.kernel_machine.axes import by_step
from epk_gp.kernel_machine.single_machine import single_machine
from epk_gp.training.clipping import ClipNorm
from loops import CASES, Tokens, data, mlp, regression_data, sgd, token_data, trained

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
NAN, INF = float("nan"), float("inf")
X, Y = data()


def with_value(X, value, row=3):
    X = X.clone()
    X[row, 1] = value
    return X


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


DOOR = {
    # the data
    "X_no_tensor": ({"X": [[1.0] * 4] * 10}, TypeError, "X must be a torch.Tensor: got list"),
    "y_no_tensor": ({"y": [0] * 10}, TypeError, "y must be a torch.Tensor: got list"),
    "X_numpy": ({"X": X.numpy()}, TypeError, "X must be a torch.Tensor: got ndarray"),
    "X_empty": ({"X": X[:0], "y": Y[:0]}, ValueError, "at least one point: got .0, 4"),
    "X_one_dimensional": ({"X": X[:, 0]}, ValueError, r"X must have shape .M, .*got .10,"),
    "X_scalar": ({"X": X[0, 0]}, ValueError, "X must have shape"),
    "X_too_wide": (
        {"X": torch.cat([X, X], 1)},
        ValueError,
        r"must accept X: .*shape .8,. and torch.float64: .*multipl",
    ),
    "X_too_deep": ({"X": X[:, None, None]}, ValueError, "to a tensor of shape .n, C.: got a tensor of shape"),
    "X_float32": ({"X": X.float()}, TypeError, "X must have the weights' dtype torch.float64: got torch.float32"),
    "X_integers": ({"X": X.long()}, ValueError, r"must accept X: .*torch.int64"),
    "X_complex": ({"X": X + 0j}, ValueError, r"must accept X: .*torch.complex128"),
    "X_nan": ({"X": with_value(X, NAN)}, ValueError, "X must be finite: row 3 holds NaN or infinity"),
    "X_infinite": ({"X": with_value(X, -INF, row=7)}, ValueError, "X must be finite: row 7 holds NaN or infinity"),
    "devices": ({"y": Y.to("meta")}, ValueError, "X and y must be on one device: got cpu and meta"),
    "token_out_of_range": (
        {"net": float_tokens(), "X": token_data()[0] + 7},
        ValueError,
        "must accept X: .*index out of range",
    ),
    "floats_for_tokens": ({"net": float_tokens()}, ValueError, "must accept X: .*torch.float64"),
    # the targets
    "length_mismatch": ({"y": Y[:9]}, ValueError, "one entry per point: got 9 for 10 points"),
    "y_scalar": ({"y": Y[0]}, ValueError, "one entry per point: got a scalar for 10 points"),
    "labels_too_high": ({"y": Y + 1}, ValueError, r"labels must lie in 0\.\.2 .*3 outputs.*: got 1\.\.3"),
    "labels_negative": ({"y": Y - 1}, ValueError, r"labels must lie in 0\.\.2 .*: got -1\.\.1"),
    "labels_float": ({"y": Y.double()}, ValueError, r"probabilities must have shape .10, 3.*labels must be int64"),
    "labels_int32": ({"y": Y.int()}, TypeError, "labels must be int64: got torch.int32. Convert them with .long"),
    "labels_bool": ({"y": Y > 0}, TypeError, "labels must be int64: got torch.bool"),
    "labels_column": ({"y": Y[:, None]}, ValueError, r"labels must have shape .10,.: got .10, 1."),
    "probabilities_negative": ({"y": F.one_hot(Y, 3) * 3.0 - 1}, ValueError, "non-negative and sum to 1"),
    "probabilities_too_large": ({"y": F.one_hot(Y, 3) * 1.1}, ValueError, "non-negative and sum to 1"),
    "probabilities_nan": ({"y": F.one_hot(Y, 3) * NAN}, ValueError, "targets must be finite: row 0"),
    "regression_labels": (
        {"loss": epk.MeanSquaredError()},
        ValueError,
        r"targets of the outputs' shape .10, 3.: got .10,",
    ),
    "regression_one_column": (
        {"loss": epk.MeanSquaredError(), "y": X[:, :1]},
        ValueError,
        r"targets of the outputs' shape .10, 3.: got .10, 1.",
    ),
    "regression_integers": (
        {"loss": epk.MeanSquaredError(), "y": F.one_hot(Y, 3)},
        TypeError,
        "needs floating-point targets: got torch.int64",
    ),
    "regression_nan": (
        {"loss": epk.MeanSquaredError(), "y": with_value(regression_data()[1], NAN)},
        ValueError,
        "targets must be finite: row 3 holds",
    ),
    "regression_infinite": (
        {"loss": epk.MeanSquaredError(), "y": with_value(regression_data()[1], INF, 9)},
        ValueError,
        "targets must be finite: row 9 holds",
    ),
    # the network
    "no_network": ({"net": lambda x: x}, TypeError, "net must be a torch.nn.Module: got function"),
    "network_without_weights": (
        {"net": Nothing()},
        ValueError,
        "no parameter requires a gradient|must train the network's",
    ),
    "network_of_two_dtypes": ({"net": mixed_dtypes()}, ValueError, "share one floating dtype and one device"),
    "network_not_copyable": ({"net": NoCopy()}, TypeError, "must be copyable by copy.deepcopy"),
    "network_returns_a_tuple": ({"net": Tuple()}, ValueError, r"shape .n, C.: got tuple for 4 inputs. Wrap it"),
    "network_returns_one_number": ({"net": OneNumber()}, ValueError, r"shape .n, C.: got a tensor of shape .4,. for 4"),
    "network_transposed": ({"net": Transposed(), "X": X[:3], "y": Y[:3]}, ValueError, "shape .n, C.: got"),
    "weights_nan": (
        {"net": poisoned(NAN)},
        ValueError,
        "weights of '2.bias' must be finite: .* Initialise them",
    ),
    "weights_infinite": ({"net": poisoned(INF)}, ValueError, "initial weights of '2.bias' must be finite"),
    # the loop
    "steps_zero": ({"steps": 0}, ValueError, "steps must be at least 1: got 0"),
    "steps_negative": ({"steps": -3}, ValueError, "steps must be at least 1: got -3"),
    "batch_size_zero": ({"batch_size": 0}, ValueError, "batch_size must be at least 1: got 0"),
    "loss_name": ({"loss": "cross_entropy"}, TypeError, "loss must be epk_gp.CrossEntropy.*got 'cross_entropy'"),
    "loss_class": ({"loss": epk.CrossEntropy}, TypeError, "loss must be epk_gp.CrossEntropy"),
    "torch_loss_reduction": ({"loss": nn.MSELoss(reduction="none")}, ValueError, "reduction must be .* got 'none'"),
    "class_weights_too_few": (
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(2))},
        ValueError,
        "one class weight per output: got 2 for 3 outputs",
    ),
    "class_weight_negative": (
        {"loss": epk.CrossEntropy(class_weights=(1.0, -1.0, 1.0))},
        ValueError,
        "class weights must be finite, not negative",
    ),
    "smoothing_too_large": ({"loss": epk.CrossEntropy(label_smoothing=1.5)}, ValueError, "must lie in .0, 1.: got 1.5"),
    "loss_a_function": ({"loss": F.cross_entropy}, TypeError, "PerSampleLoss.f, reduction=.* around a function"),
    "logits_as_log_probabilities": (
        {"loss": nn.NLLLoss()},
        ValueError,
        "needs outputs that are log-probabilities: the exponentials of a row sum to .* End the network in LogSoftmax",
    ),
    "clip_no_clip": ({"clip": 1.0}, TypeError, "clip must be epk_gp.ClipNorm.* got 1.0"),
    "clip_negative": ({"clip": ClipNorm(-1.0)}, ValueError, "must be positive and finite: got -1.0"),
    "loss_joined": (
        {"loss": epk.PerSampleLoss(F.cross_entropy, "sum")},
        ValueError,
        "must be the sum of the samples' losses, as reduction='sum' states",
    ),
    "loss_a_number": ({"loss": epk.PerSampleLoss(lambda z, y: 1.0)}, ValueError, "one value per sample.*got float"),
    "loss_a_column": (
        {"loss": epk.PerSampleLoss(lambda z, y: z[:, :1])},
        ValueError,
        r"one value per sample, shape .4,., or the batch.s joined loss, a scalar: got shape .4, 1.",
    ),
    # the optimizer
    "no_optimizer": ({"optimizer": lambda net: "sgd"}, TypeError, "optimizer must be a torch.optim.Optimizer: got str"),
    "optimizer_of_another_network": (
        {"optimizer": lambda net: sgd(mlp())},
        ValueError,
        "must train the network's parameters only",
    ),
    "learning_rate_infinite": ({"optimizer": lambda net: sgd(net, INF)}, ValueError, "learning rate must be finite"),
    "learning_rate_nan": ({"optimizer": lambda net: sgd(net, NAN)}, ValueError, "learning rate must be finite"),
    "optimizer_of_frozen_weights": (
        {"net": mlp().requires_grad_(False), "optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1)},
        ValueError,
        "must have weights to train: no parameter requires a gradient",
    ),
}


def make_optimizer(net):
    parameters = list(net.parameters()) if isinstance(net, nn.Module) else []
    return torch.optim.SGD(parameters or [torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(("change", "error", "says"), DOOR.values(), ids=DOOR.keys())
def test_train_refuses_at_the_door(change, error, says, tmp_path):
    options = {"net": mlp(), "X": X, "y": Y, "steps": 1} | change
    net = options.pop("net")
    optimizer = options.pop("optimizer", make_optimizer)(net)
    before = [p.clone() for p in net.parameters()] if isinstance(net, nn.Module) else []
    with pytest.raises(error, match=says):
        epk.train(net, options.pop("X"), options.pop("y"), optimizer=optimizer, path=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
    if isinstance(net, nn.Module):
        for p, old in zip(net.parameters(), before, strict=True):
            torch.testing.assert_close(p, old, rtol=0, atol=0, equal_nan=True)


def test_an_unknown_reduction_is_refused():
    net = mlp()
    for loss in (epk.CrossEntropy("none"), epk.MeanSquaredError("none"), epk.PerSampleLoss(F.cross_entropy, "none")):
        with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum': got 'none'"):
            epk.Recorder(net, sgd(net), X, Y, loss=loss)


ONCE = {  # arguments of train that a single call tells
    "steps_a_fraction": ({"steps": 3.5}, "steps must be a whole number, at least 1: got 3.5"),
    "steps_a_text": ({"steps": "3"}, "steps must be a whole number, at least 1: got '3'"),
    "steps_true": ({"steps": True}, "steps must be a whole number, at least 1: got True"),
    "batch_size_a_fraction": ({"batch_size": 2.5}, "batch_size must be a whole number, at least 1: got 2.5"),
    "generator_a_seed": ({"generator": 0}, "generator must be a torch.Generator: got 0. Make one with"),
    "scheduler_a_number": ({"scheduler": 5}, "scheduler must be a torch.optim.lr_scheduler.LRScheduler .* got 5"),
}


@pytest.mark.parametrize(("options", "says"), ONCE.values(), ids=ONCE.keys())
def test_train_refuses_options_of_another_kind(options, says):
    net = mlp()
    with pytest.raises(TypeError, match=says):
        epk.train(net, X, Y, optimizer=sgd(net), **({"steps": 1} | options))


BATCHES = {
    "text": ("abc", TypeError, "integer indices into X: got 'abc'"),
    "object": (object(), TypeError, "integer indices into X: got <object"),
    "empty": (torch.zeros(0, dtype=torch.int64), ValueError, r"non-empty list of indices into X: got shape \(0,\)"),
    "empty_list": ([], ValueError, "non-empty list of indices"),
    "two_dimensional": (
        torch.zeros(2, 2, dtype=torch.int64),
        ValueError,
        r"list of indices into X: got shape \(2, 2\)",
    ),
    "one_number": (torch.tensor(3), ValueError, r"list of indices into X: got shape \(\)"),
    "too_high": ([0, 10], ValueError, r"indices must lie in 0\.\.9: got 0\.\.10"),
    "negative": ([-1, 3], ValueError, r"indices must lie in 0\.\.9: got -1\.\.3"),
    "floats": (torch.tensor([0.0, 1.0]), TypeError, "integer indices into X: got torch.float"),
    "float_list": ([0.5, 1.5], TypeError, "integer indices into X: got torch.float"),
    "mask": (torch.ones(10, dtype=torch.bool), TypeError, "integer indices into X: got torch.bool"),
}


@pytest.mark.parametrize(("batch", "error", "says"), BATCHES.values(), ids=BATCHES.keys())
def test_a_batch_that_is_none_is_refused_with_its_step(batch, error, says):
    net = mlp()
    optimizer = sgd(net)
    with epk.Recorder(net, optimizer, X, Y) as recorder:
        for rows in (None, [1, 2]):
            optimizer.zero_grad()
            F.cross_entropy(net(X if rows is None else X[rows]), Y if rows is None else Y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
        with pytest.raises(error, match=f"^step 2: .*{says}"):
            recorder.batch(batch)
    assert recorder.trajectory.num_steps == 2


# --- Asking a recorded run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectory():
    return trained(CASES["minibatch"])


@pytest.fixture(scope="module")
def single_output():
    net = mlp(outputs=1)
    return epk.train(net, X, X[:, :1], optimizer=sgd(net), steps=1, loss=epk.MeanSquaredError())


ASK = {
    "network_outputs": lambda t, X, **k: epk.network_outputs(t, X, **k),
    "reconstruct": lambda t, X, **k: epk.reconstruct(t, X, **k),
    "attribute": lambda t, X, **k: epk.attribute(t, X, **k),
    "single_machine": lambda t, X, **k: single_machine(trained(CASES["full_batch"]), X, **k),
    "gram_block": lambda t, X, **k: epk.gram_block(t, epk.Points(X, True), epk.Points(X, False), **k),
    "gram_block_per_class": lambda t, X, **k: gram_block_per_class(t, epk.Points(X, True), epk.Points(X, False), **k),
    "gram_diagonal_blocks": lambda t, X, **k: gram_diagonal_blocks(t, epk.Points(X, False), **k),
}
GRAM = {name: ask for name, ask in ASK.items() if name.startswith("gram")}
every_question = pytest.mark.parametrize("ask", ASK.values(), ids=ASK.keys())
every_gram = pytest.mark.parametrize("ask", GRAM.values(), ids=GRAM.keys())

INPUTS = {
    "no_tensor": ([[1.0] * 4], TypeError, "X must be a torch.Tensor: got list"),
    "too_narrow": (X[:, :3], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(10, 3\)"),
    "too_deep": (X[None], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(1, 10, 4\)"),
    "one_point": (X[0], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(4,\)"),
    "scalar": (X[0, 0], ValueError, r"X must have shape \(n, 4\) like the training inputs: got \(\)"),
    "empty": (X[:0], ValueError, "X must hold at least one point: got an empty batch"),
    "integers": (X.long(), TypeError, "X must be of the training inputs' kind .torch.float64.: got torch.int64"),
    "half": (X.half(), TypeError, "X must be float32 or float64: got torch.float16"),
    "complex": (X + 0j, TypeError, "X must be of the training inputs' kind"),
    "nan": (with_value(X, NAN, 2), ValueError, "X must be finite: row 2 holds NaN or infinity"),
    "infinite": (with_value(X, INF, 5), ValueError, "X must be finite: row 5 holds NaN or infinity"),
}


@every_question
@pytest.mark.parametrize(("inputs", "error", "says"), INPUTS.values(), ids=INPUTS.keys())
def test_points_that_the_network_cannot_take_are_refused(trajectory, ask, inputs, error, says):
    with pytest.raises(error, match=says):
        ask(trajectory, inputs)


@every_question
@pytest.mark.parametrize("head", ["softmax", "", None, "LOGITS"])
def test_an_unknown_head_is_refused(trajectory, ask, head):
    with pytest.raises(
        ValueError, match=r"head must be one of \['logits', 'log_softmax'\]: got|needs head=\"log_softmax\""
    ):
        ask(trajectory, X, head=head)


@pytest.mark.parametrize("ask", [ask for name, ask in ASK.items() if name != "single_machine"])
def test_the_log_softmax_of_one_output_is_refused(single_output, ask):
    with pytest.raises(ValueError, match=r'head="log_softmax" needs at least 2 outputs.*Use head="logits"'):
        ask(single_output, X, head="log_softmax")


@pytest.mark.parametrize("ask", [ask for name, ask in ASK.items() if name != "network_outputs"])
@pytest.mark.parametrize("rule", [4, "gauss", None, epk.gauss_legendre], ids=["number", "name", "none", "function"])
def test_what_is_no_rule_is_refused(trajectory, ask, rule):
    with pytest.raises(TypeError, match="rule must be a quadrature rule such as"):
        ask(trajectory, X, rule=rule)


@every_gram
@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (torch.ones(6), r"step_weights must have shape \(7,\): got \(6,\)"),
        (torch.ones(7, 1), r"step_weights must have shape \(7,\): got \(7, 1\)"),
        (torch.tensor([1.0] * 6 + [-1e-9]), "step_weights must be finite and not negative"),
        (torch.tensor([NAN] + [1.0] * 6), "step_weights must be finite and not negative"),
        (torch.tensor([INF] + [1.0] * 6), "step_weights must be finite and not negative"),
    ],
    ids=["too_few", "column", "negative", "nan", "infinite"],
)
def test_bad_step_weights_are_refused(trajectory, ask, weights, says):
    with pytest.raises(ValueError, match=says):
        ask(trajectory, X, step_weights=weights)


@every_gram
@pytest.mark.parametrize("budget", [0, -1, (1 << 20) - 1])
def test_a_memory_budget_that_is_none_is_refused(trajectory, ask, budget):
    with pytest.raises(ValueError, match=f"memory_budget must be at least 1 MiB .*: got {budget}"):
        ask(trajectory, X, memory_budget=budget)


@pytest.mark.parametrize("block", [epk.gram_block, gram_block_per_class])
def test_points_of_two_dtypes_are_refused(trajectory, block):
    with pytest.raises(ValueError, match=r"share dtype and device: got torch.float64 on cpu and torch.float32 on cpu"):
        block(trajectory, epk.Points(X, True), epk.Points(X.float(), False))


@pytest.mark.parametrize("block", [epk.gram_block, gram_block_per_class])
def test_the_wrong_side_is_named(trajectory, block):
    with pytest.raises(ValueError, match=r"b.X must be finite: row 2"):
        block(trajectory, epk.Points(X, True), epk.Points(with_value(X, NAN, 2), False))


MASKS = {
    "too_short": (torch.ones(9, dtype=torch.bool), ValueError, r"one entry per point: got shape \(9,\) for 10 points"),
    "column": (torch.ones(10, 1, dtype=torch.bool), ValueError, r"one entry per point: got shape \(10, 1\) for 10"),
    "integers": (torch.ones(10, dtype=torch.int64), TypeError, "bool or a bool tensor: got torch.int64. Convert it"),
    "floats": (torch.ones(10), TypeError, "bool or a bool tensor: got torch.float32"),
    "list": ([True] * 10, TypeError, "bool or a bool tensor: got list"),
    "one": (1, TypeError, "bool or a bool tensor: got int"),
    "nothing": (None, TypeError, "bool or a bool tensor: got NoneType"),
}


@pytest.mark.parametrize(("mask", "error", "says"), MASKS.values(), ids=MASKS.keys())
def test_a_copy_mask_that_does_not_fit_is_refused(mask, error, says):
    with pytest.raises(error, match=f"is_train must .*{says}"):
        epk.Points(X, mask)


def test_a_run_on_integers_refuses_floats():
    trajectory = trained(CASES["integer_inputs"])
    with pytest.raises(TypeError, match="X must be of the training inputs' kind .torch.int64.: got torch.float64"):
        epk.network_outputs(trajectory, X[:, :3])


def test_a_final_layer_that_is_not_linear_is_not_zeroed():
    for net, got in ((nn.Sequential(mlp(), nn.LayerNorm(3)), "LayerNorm"), (Nothing(), "without parameters")):
        with pytest.raises(ValueError, match=f"must be a torch.nn.Linear: got .*{got}"):
            zero_final_layer(net)


# --- Other doors ----------------------------------------------------------------------------------------------------

POSTERIOR = LogitPosterior(torch.zeros(2, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
T = epk.test_copy(X)

KINDS = {
    "order_a_fraction": (lambda t: epk.adaptive(order=2.5), "order must be a whole number, at least 1: got 2.5"),
    "tol_a_text": (lambda t: epk.adaptive("x"), "tol must be a positive number: got 'x'"),
    "nodes_true": (lambda t: epk.gauss_legendre(True), "the number of nodes must be a whole number.*got True"),
    "nodes_a_fraction": (lambda t: epk.gauss_legendre(2.5), "the number of nodes must be a whole number.*got 2.5"),
    "nodes_a_text": (lambda t: epk.gauss_legendre("4"), "the number of nodes must be a whole number.*got '4'"),
    "riemann_a_fraction": (lambda t: epk.left_riemann(2.5), "the number of nodes must be a whole number.*got 2.5"),
    "midpoint_a_fraction": (lambda t: epk.midpoint(2.5), "the number of nodes must be a whole number.*got 2.5"),
    "loss_nothing": (lambda t: epk.PerSampleLoss(None), "the loss must be a function of outputs and targets: got None"),
    "block_without_copies": (
        lambda t: epk.gram_block(t, X, X),
        r"a must be epk_gp.Points\(X, is_train=...\).*got Tensor",
    ),
    "weights_a_list": (
        lambda t: epk.gram_block(t, epk.Points(X, True), epk.Points(X, True), step_weights=[1.0] * 7),
        r"step_weights must be a torch.Tensor, \(7,\): got list. Convert it",
    ),
    "no_run": (lambda t: epk.reconstruct(None, X), "trajectory must be an epk_gp.Trajectory: got NoneType. Record one"),
    "no_run_to_attribute": (lambda t: epk.attribute(None, X), "trajectory must be an epk_gp.Trajectory: got NoneType"),
    "gp_of_no_run": (lambda t: epk.LogitGP(None), "trajectory must be an epk_gp.Trajectory: got NoneType"),
    "kernel_of_no_run": (lambda t: epk.EPKKernel(None), "trajectory must be an epk_gp.Trajectory: got NoneType"),
    "points_a_number": (lambda t: epk.LogitGP(t, points=5), "points must be a list or tensor of indices .*: got 5"),
    "points_a_text": (
        lambda t: epk.LogitGP(t, points="abc"),
        "points must be a list or tensor of indices .*: got 'abc'",
    ),
    "points_a_slice": (lambda t: epk.LogitGP(t, points=slice(3)), "points must be a list or tensor .*: got slice"),
    "fit_a_fraction": (lambda t: epk.LogitGP(t, points=[0, 1]).fit(steps=2.5), "steps must be a whole number.*got 2.5"),
    "samples_a_fraction": (
        lambda t: epk.softmax_uncertainty(POSTERIOR, num_samples=2.5),
        "num_samples, for a standard deviation, must be a whole number, at least 2: got 2.5",
    ),
    "samples_generator": (
        lambda t: epk.softmax_uncertainty(POSTERIOR, generator=3),
        "generator must be a torch.Generator: got 3",
    ),
    "no_posterior": (
        lambda t: epk.softmax_uncertainty(None),
        "posterior must be an epk_gp.LogitPosterior: got NoneType",
    ),
    "kernel_of_a_list": (lambda t: epk.EPKKernel(t)([[1.0] * 5]), "points must be a torch.Tensor: got list. Make them"),
    "kernel_with_a_list": (lambda t: epk.EPKKernel(t)(T, [[1.0] * 5]), "points must be a torch.Tensor: got list"),
    "train_copy_of_a_list": (lambda t: epk.train_copy([[1.0]]), "inputs must be a torch.Tensor: got list. Convert it"),
    "split_copy_of_a_list": (lambda t: epk.split_copy([[1.0]]), "inputs must be a torch.Tensor: got list"),
    "state_a_text": (lambda t: t.weights("a"), "state must be a whole number: got 'a'"),
    "zeroing_nothing": (lambda t: zero_final_layer(None), "net must be a torch.nn.Module: got NoneType"),
    "budget_a_fraction": (
        lambda t: epk.reconstruct(t, X, memory_budget=2.5e9),
        "memory_budget must be a whole number of bytes: got 2500000000.0",
    ),
}


@pytest.mark.parametrize(("ask", "says"), KINDS.values(), ids=KINDS.keys())
def test_an_argument_of_another_kind_is_refused(trajectory, ask, says):
    with pytest.raises(TypeError, match=says):
        ask(trajectory)


VALUES = {
    "no_points": (
        lambda t: epk.EPKKernel(t)(T[:0]).to_dense(),
        r"there must be at least one point: got shape \(0, 5\)",
    ),
    "one_point": (lambda t: epk.train_copy(X[0]), r"one row per point: got shape \(4,\). A single point is X\[None\]"),
    "empty_blocks": (lambda t: epk.network_outputs(t, X, block_size=0), "block_size must be at least 1: got 0"),
    "order_zero": (lambda t: epk.adaptive(order=0), "order must be at least 1: got 0"),
    "fit_backwards": (
        lambda t: epk.LogitGP(t, points=[0, 1]).fit(steps=1, lr=-1.0),
        "lr must be positive and finite: got -1.0",
    ),
}


@pytest.mark.parametrize(("ask", "says"), VALUES.values(), ids=VALUES.keys())
def test_a_value_that_means_nothing_is_refused(trajectory, ask, says):
    with pytest.raises(ValueError, match=says):
        ask(trajectory)


@pytest.mark.parametrize("budget", [0, -1, (1 << 20) - 1])
@pytest.mark.parametrize(
    "ask",
    [
        lambda t, b: epk.reconstruct(t, X, memory_budget=b),
        lambda t, b: epk.attribute(t, X, memory_budget=b),
        lambda t, b: attribute_by(t, X, [by_step(t)], memory_budget=b),
        lambda t, b: epk.EPKKernel(t, memory_budget=b),
        lambda t, b: epk.LogitGP(t, memory_budget=b),
    ],
    ids=["reconstruct", "attribute", "attribute_by", "kernel", "gp"],
)
def test_every_door_refuses_a_budget_that_is_none(trajectory, ask, budget):
    with pytest.raises(ValueError, match=f"memory_budget must be at least 1 MiB .1048576 bytes.: got {budget}"):
        ask(trajectory, budget)


def test_integers_of_numpy_count():
    assert epk.gauss_legendre(np.int64(3)) == epk.gauss_legendre(3)


def test_a_chunk_that_is_removed_while_the_run_is_used_is_named(tmp_path):
    net = mlp()
    trajectory = epk.train(net, X, Y, optimizer=sgd(net), steps=2, path=tmp_path / "run")
    (tmp_path / "run" / "chunk-000001.safetensors").unlink(missing_ok=True)
    (tmp_path / "run" / "chunk-000000.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"chunk-00000\d.safetensors \(states \d..\d\) was removed or renamed. Restore"
    ):
        epk.reconstruct(trajectory, X)
