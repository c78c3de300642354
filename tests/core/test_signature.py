"""Inputs of several tensors, packed into one and unpacked again; outputs taken from what networks return."""

import copy
import json
import pickle
from collections import namedtuple

import pytest
import torch
from signatures import Tagger, TwoInputs, mean_logits, tagger_inputs, two_inputs
from torch import nn

import epk_gp as epk
from epk_gp.core.inputs import ONE_TENSOR, parse_signature, signature_from_json
from epk_gp.core.model import functionalize
from epk_gp.core.plans import TensorSpec
from helpers import refusal

Pair = namedtuple("Pair", ["first", "second"])
BYTES = torch.arange(6, dtype=torch.uint8).view(3, 2)
STRUCTURES = {
    "tuple_of_floats": (two_inputs(), torch.float64),
    "list": (list(two_inputs()), torch.float64),
    "named_tuple": (Pair(*two_inputs()), torch.float64),
    "dict_of_mixed": (tagger_inputs(), torch.float64),
    "one_tensor_in_a_tuple": ((torch.randn(3, 2, 2),), torch.float32),
    "bytes": ((BYTES, BYTES.view(3, 2, 1)), torch.uint8),
    "integers_of_two_kinds": ({"a": BYTES, "b": torch.arange(3)}, torch.int64),
    "booleans": ((BYTES > 2, BYTES[:, 0] > 2), torch.bool),
    "half_beside_single": ((torch.randn(3, 2).half(), torch.randn(3)), torch.float32),
    "bytes_beside_floats": ((BYTES, torch.randn(3, 1, 1)), torch.float32),
}


@pytest.mark.parametrize(("X", "dtype"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_unpacked_inputs_are_the_packed_ones_bit_for_bit(X, dtype):
    packed, signature = parse_signature(X, None)
    assert packed.dtype == dtype
    assert packed.shape == (len(packed), signature.layout.width)
    again = signature.structure(packed)
    pairs = [(again[key], X[key]) for key in X] if isinstance(X, dict) else list(zip(again, X, strict=True))
    for value, expected in pairs:
        assert value.dtype == expected.dtype
        assert value.is_contiguous()
        assert torch.equal(value, expected)


def test_the_order_of_a_dictionary_does_not_count_and_only_floats_follow_the_computation():
    X = tagger_inputs()
    packed, signature = parse_signature(X, None)
    other = {key: X[key] for key in ("mask", "ids", "scale")}
    assert torch.equal(signature.pack(other), packed)
    assert parse_signature(other, None)[1] == signature
    dtypes = {key: part.dtype for key, part in signature.structure(packed.float()).items()}
    assert dtypes == {"ids": torch.int64, "mask": torch.bool, "scale": torch.float32}


def test_a_model_calls_its_network_as_the_user_does_in_any_dtype_copied_or_pickled():
    X, net = tagger_inputs(), Tagger().double()
    packed, signature = parse_signature(X, mean_logits)
    model = functionalize(net, signature=signature)
    params = model.unflatten(model.flatten(dict(net.named_parameters())))
    expected = mean_logits(net(**X))
    assert torch.equal(model(params, packed), expected)
    assert torch.equal(model.returned(params, packed).logits, net(**X).logits)
    assert torch.equal(torch.vmap(lambda x: model.evaluate(params, x[None])[0])(packed), expected)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(params, packed), expected)
    single = model.variant(TensorSpec(torch.float32, torch.device("cpu")))
    outputs = single({name: value.float() for name, value in params.items()}, packed.float())
    assert outputs.dtype == torch.float32
    assert torch.allclose(outputs.double(), expected, atol=1e-6)


def test_gradients_reach_the_floats_and_not_the_integers():
    net, X = Tagger().double(), tagger_inputs()
    packed, signature = parse_signature(X, mean_logits)
    model = functionalize(net, signature=signature)
    params = model.unflatten(model.flatten(dict(net.named_parameters())))
    leaf = packed.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(params, leaf).sum(), leaf)
    scale = X["scale"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(mean_logits(net(**{**X, "scale": scale})).sum(), scale)
    assert torch.allclose(gradient[:, -1], expected, rtol=1e-14)
    assert not gradient[:, :-1].any()


def test_one_value_per_point_is_an_output():
    net = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    model = functionalize(net)
    X = torch.randn(4, 3)
    outputs = model(model.unflatten(model.flatten(dict(net.named_parameters()))), X)
    assert torch.equal(outputs, net(X)[:, None])


CALLS = {
    "as_recorded": lambda X: ((), X), "by_position": lambda X: ((X["ids"], X["mask"], X["scale"]), {}),
    "mixed": lambda X: ((X["ids"],), {"scale": X["scale"], "mask": X["mask"]}),
    "with_options": lambda X: ((), {**X, "return_dict": True}), "missing": lambda X: ((), {"ids": X["ids"]}),
    "no_tensor": lambda X: ((), {**X, "mask": None}), "other_shape": lambda X: ((), {**X, "mask": X["mask"][:, :2]}),
    "other_kind": lambda X: ((), {**X, "mask": X["ids"]}), "other_rows": lambda X: ((), {**X, "scale": X["scale"][:2]}),
    "unknown_argument": lambda X: ((), {**X, "other": 1}),
}  # fmt: skip


def test_a_call_with_the_inputs_is_packed_as_they_are_and_another_is_not():
    def forward(ids, mask, scale, return_dict=False): ...

    X = tagger_inputs()
    packed, signature = parse_signature(X, None)
    found = {name: signature.pack_call(*call(X), forward) for name, call in CALLS.items()}
    of_inputs = ("as_recorded", "by_position", "mixed", "with_options")
    assert {name for name, value in found.items() if value is not None} == {*of_inputs}
    assert all(torch.equal(found[name], packed) for name in of_inputs)


def test_one_tensor_and_a_call_with_one_stay_themselves():
    X = torch.randn(3, 2)
    packed, own = parse_signature(X, None)
    assert packed is own.structure(X) is own.unpack(X)[0][0] is X
    assert (own, own.to_json()) == (ONE_TENSOR, None)
    assert ONE_TENSOR.pack_call((X,), {}) is X
    assert ONE_TENSOR.pack_call((), {"flag": True, "x": X}) is X
    assert ONE_TENSOR.pack_call((), {}) is None
    signature = parse_signature(two_inputs(), None)[1]
    x, z = two_inputs()
    by_keyword = signature.pack_call((x,), {"z": z}, TwoInputs().forward)
    assert torch.equal(by_keyword, signature.pack((x, z)))


@pytest.mark.parametrize(("X", "dtype"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_a_signature_survives_json(X, dtype):
    signature = parse_signature(X, None)[1]
    assert signature_from_json(json.loads(json.dumps(signature.to_json()))) == signature
    with_output = parse_signature(X, len)[1]
    assert signature_from_json(json.loads(json.dumps(with_output.to_json())), len) == with_output


ENTRIES = [
    "x",
    {},
    *(
        {"inputs": tensors, "has_output": False}
        for tensors in (
            [], [{"key": 0, "dtype": "torch.int64"}], [{"key": 0, "shape": [-1], "dtype": "torch.int64"}],
            [{"key": 0, "shape": [1], "dtype": "torch.cfloat"}], [{"key": 0, "shape": [1], "dtype": ["x"]}],
            [{"key": "a", "shape": [1], "dtype": "torch.int64"}] * 2,
            [{"key": 1, "shape": [1], "dtype": "torch.int64"}],
        )
    ),
]  # fmt: skip


def test_a_damaged_entry_of_a_header_is_refused():
    for entry in ENTRIES:
        assert refusal(ValueError, "the header's 'signature' must .*: got", signature_from_json, entry) is None


def test_the_output_function_must_be_given_again():
    entry = parse_signature(two_inputs(), len)[1].to_json()
    with pytest.raises(ValueError, match="recorded with output=.*: pass it as output="):
        signature_from_json(entry)


class BatchSecond(nn.RNN):
    """A recurrent layer that takes texts in rows, and returns places first."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1))[0]


def test_a_batch_in_the_second_dimension_is_named():
    X, y = torch.randn(6, 5, 4).double(), torch.arange(6) % 3
    for kind, targets, given in (
        (BatchSecond, None, {"loss": None, "output": lambda returned: returned[-1]}),
        (nn.RNN, y, {"output": lambda returned: returned[0][-1]}),
    ):
        net = kind(4, 3).double()
        with pytest.raises(ValueError, match=r"in the first dimension \(batch_first=True, or a module"):
            epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), X, targets, **given)
