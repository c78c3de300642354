"""Inputs, outputs and losses that do not go together: one clear error each, before anything is recorded."""

from collections import OrderedDict

import pytest
import torch
from signatures import Tagger, TwoInputs, mean_logits, record, tagger_inputs, two_inputs
from torch import nn

import epk_gp as epk
from helpers import refusal

pytestmark = pytest.mark.usefixtures("unchecked")  # the library's own checks, not those of the test run
X, PAIR = tagger_inputs(), two_inputs()
LABELS = torch.arange(8) % 3
TOKENS = torch.zeros(8, 4, dtype=torch.int64)


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner, self.make = nn.Linear(3, 3), make

    def forward(self, x):
        return self.make(self.inner(x))


def without(key):
    return {name: value for name, value in X.items() if name != key}


INPUTS = {
    "text": ({**X, "mask": "x"}, TypeError, r"X\['mask'\] must be a torch.Tensor: got str. Convert it with"),
    "nothing": ((PAIR[0], None), TypeError, r"X\[1\] must be a torch.Tensor: got NoneType"),
    "numbers": ([1.0, 2.0], TypeError, "X must be a torch.Tensor: got list. .* pass several tensors as a tuple or"),
    "empty_tuple": ((), ValueError, "X must hold at least one tensor: got an empty tuple"),
    "keys": ({0: X["ids"]}, TypeError, "the keys of X must be keywords of the network's forward.*: got 0"),
    "rows": ((PAIR[0], PAIR[1][:5]), ValueError, r"one row per point: X\[0\] has 8 rows, X\[1\] has 5"),
    "no_rows": ((PAIR[0][:0], PAIR[1][:0]), ValueError, "at least one point: got .0, 5"),
    "no_columns": ((PAIR[0][:, :0],), ValueError, "X must hold at least one number per point: got none"),
    "scalar": ((PAIR[0], torch.tensor(1.0)), ValueError, r"X\[1\] must have one row per point: got a scalar"),
    "device": ((PAIR[0], PAIR[1].to("meta")), ValueError, r"X\[1\] must hold values: got .* on the device 'meta'"),
    "sparse": ((PAIR[0], PAIR[1][:, 0].to_sparse()), ValueError, r"X\[1\] must be dense: got .* layout torch.sparse"),
    "complex": ((PAIR[0], PAIR[1].cfloat()), TypeError, r"X\[1\] must hold real numbers: got torch.complex64"),
    "nan": ((PAIR[0], PAIR[1] * float("nan")), ValueError, r"X\[1\] must be finite: row 0 holds NaN"),
    "large": ({**X, "ids": X["ids"] + 2**60}, ValueError, r"X\['ids'\] must hold integers up to .* beside .*float64"),
    "dtype": ((PAIR[0].float(), PAIR[1].float()), TypeError, "X must have the weights' dtype torch.float64"),
    "one_too_few": ((PAIR[0],), ValueError, "must accept X .*missing 1 required .*'z'"),
    "unknown_key": ({**X, "other": X["ids"]}, ValueError, "must accept X .*unexpected keyword argument 'other'"),
    "missing_key": (without("mask"), ValueError, "must accept X .*missing 1 required .*'mask'"),
}


@pytest.mark.parametrize(("inputs", "error", "message"), INPUTS.values(), ids=INPUTS.keys())
def test_training_inputs_are_checked(inputs, error, message):
    net = (Tagger() if isinstance(inputs, dict) else TwoInputs()).double()
    with pytest.raises(error, match=message):
        record(net, inputs, LABELS, output=mean_logits if isinstance(inputs, dict) else None)


RETURNED = {
    "tuple": (lambda z: (z, z), None, r"got tuple for 4 inputs. Say how .*output=lambda returned: returned\[0\]\."),
    "dict": (lambda z: {"scores": z}, None, r"got dict .* output=lambda returned: returned\['scores'\]"),
    "logits": (lambda z: type("Out", (), {"logits": z})(), None, r"got Out .* output=lambda returned: returned.logits"),
    "image": (lambda z: z[:, None, None], None, r"shape \(4, 1, 1, 3\) .* returned.flatten\(1\)"),
    "still_tuple": (lambda z: (z, z), lambda r: r, r"output must map .* to .* shape \(n, C\): got tuple for 4"),
    "no_rows": (lambda z: (z, z), lambda r: r[0][0], r"output must map .*: got .* shape \(3, 1\) for 4 inputs"),
    "fails": (lambda z: (z, z), lambda r: r.logits, "output must accept what the network returns, tuple: it fails"),
    "integers": (lambda z: (z, z), lambda r: r[0].argmax(1), "output must return floating-point outputs: got .*int64"),
    "batch": (lambda z: (z, z), lambda r: r[0] @ r[0].T, "C of outputs must not depend on the batch: got 8 .* 1"),
    "coupled": (lambda z: (z, z), lambda r: r[0] - r[0].mean(0), "an output must depend on its own input alone"),
}


@pytest.mark.parametrize(("make", "output", "message"), RETURNED.values(), ids=RETURNED.keys())
def test_what_the_network_returns_is_checked(make, output, message):
    with pytest.raises((TypeError, ValueError), match=message):
        record(Returns(make).double(), PAIR[0], LABELS, output=output)


def batch_loss(returned, y):
    return (returned.logits - returned.logits.mean(0)).square().mean((1, 2))


class OwnLoss(Tagger):
    """A network that computes its loss itself, over the batch."""

    def forward(self, ids, mask, scale):
        returned = super().forward(ids, mask, scale)
        returned.loss = returned.logits.square().mean()
        return returned


LOSSES = {
    "positions": (epk.CrossEntropy(), TOKENS[:, :2], r"class labels must have shape \(8,\): got \(8, 2\)"),
    "too_high": (epk.CrossEntropy(), TOKENS + 3, r"labels must lie in 0\.\.2 .*: got 3\.\.3"),
    "coupled": (epk.PerSampleLoss(batch_loss), TOKENS, "a sample's loss must depend on its own row alone"),
    "fails": (epk.PerSampleLoss(lambda r, y: r.other), TOKENS, "the loss must accept what the network returns"),
    "counts": (
        epk.PerSampleLoss(lambda r, y: r.logits.mean((1, 2)), counts=lambda y: y),
        TOKENS,
        r"counts must return one number per sample, shape \(8,\): got shape \(8, 4\)",
    ),
    "networks_own": (epk.PerSampleLoss(lambda r, y: r.loss), TOKENS, "must depend on its own row alone"),
}


@pytest.mark.parametrize(("loss", "y", "message"), LOSSES.values(), ids=LOSSES.keys())
def test_losses_of_what_the_network_returns_are_checked(loss, y, message):
    with pytest.raises(ValueError, match=message):
        record(OwnLoss().double(), X, y, loss=loss, output=mean_logits)


@pytest.fixture(scope="module")
def run():
    return record(Tagger().double(), X, LABELS, output=mean_logits, steps=1)


CALLS = {
    "outputs": epk.network_outputs,
    "reconstruct": epk.reconstruct,
    "attribute": epk.attribute,
    "pack": lambda run, X: run.pack(X),
    "gram": lambda run, X: epk.gram_block(run, epk.Points(X, is_train=True), epk.Points(X, is_train=True)),
}
QUERIES = {
    r"must consist of the tensors of .*, \['ids', .*: got \['ids', 'scale'\]": without("mask"),
    "must consist of the tensors of the training inputs": X | {"x": X["ids"]},
    r"must consist of the tensors of the training inputs, .*: got \[0, 1, 2\]": tuple(X.values()),
    r"\['ids'\] must have shape \(n, 4\) like .*: got \(n, 2\)": X | {"ids": X["ids"][:, :2]},
    r"\['mask'\] must be of .* kind \(torch.bool\): got torch.int64": X | {"mask": X["ids"]},
    "must have one row per point: .*has 8 rows, .*has 3": X | {"scale": X["scale"][:3]},
    r"\['scale'\] must be a torch.Tensor: got str": X | {"scale": "x"},
    r"must have shape \(n, 9\) like the training inputs: got \(8, 3\)": torch.zeros(8, 3).double(),
    r"\['ids'\] must hold whole numbers \(torch.int64\)": torch.full((8, 9), 0.5).double(),
    r"\['mask'\] must hold whole numbers \(torch.bool\)": torch.full((8, 9), 2.0).double(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_queries_have_the_structure_of_the_training_inputs(run, call):
    for message, query in QUERIES.items():
        assert refusal((TypeError, ValueError), message, call, run, query) is None


def test_a_run_of_one_tensor_takes_no_structure():
    one = record(nn.Linear(3, 3).double(), PAIR[0], LABELS, steps=1)
    message = "X must be (a torch.Tensor: got tuple|one tensor, as the training inputs are)"
    for call in CALLS.values():
        assert refusal(TypeError, message, call, one, (PAIR[0],)) is None


def test_any_mapping_and_any_order_is_the_structure(run):
    expected = epk.network_outputs(run, X)
    assert torch.equal(epk.network_outputs(run, OrderedDict(reversed(X.items()))), expected)
    assert torch.equal(epk.network_outputs(run, X | {"ids": X["ids"].int()}), expected)
