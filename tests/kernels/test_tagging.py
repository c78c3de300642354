"""The two copies of an input as rows of a matrix (Definition 3.4)."""

import pytest
import torch

from epk_gp.kernels.tagging import split_copy, test_copy, train_copy

SHAPES = {"vectors": (5, 3), "images": (5, 1, 2, 3), "none": (0, 3)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_split_copy_undoes_both_copies(shape, dtype):
    X = torch.randn(shape).mul(10).to(dtype)
    for tag, expected in ((train_copy, True), (test_copy, False)):
        x = tag(X)
        assert x.shape == (shape[0], torch.Size(shape[1:]).numel() + 1)
        assert x.dtype == dtype
        flat, is_train = split_copy(x)
        assert torch.equal(flat.reshape(shape), X)
        assert torch.equal(is_train, torch.full((shape[0],), expected))


def test_the_two_copies_of_one_input_are_different_points():
    X = torch.randn(4, 2)
    assert (train_copy(X)[:, :-1] == test_copy(X)[:, :-1]).all()
    assert (train_copy(X)[:, -1] != test_copy(X)[:, -1]).all()


def test_split_copy_takes_batches_in_front():
    x = torch.stack([train_copy(torch.zeros(3, 2)), test_copy(torch.ones(3, 2))])
    X, is_train = split_copy(x)
    assert X.shape == (2, 3, 2)
    assert is_train.tolist() == [[True] * 3, [False] * 3]


def test_copies_pass_gradients_to_the_inputs():
    X = torch.randn(3, 2, requires_grad=True)
    train_copy(X).sum().backward()
    assert torch.equal(X.grad, torch.ones(3, 2))


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, 1 + 1e-6, float("nan"), float("inf")])
def test_a_copy_column_that_is_not_0_or_1_is_refused_with_its_row(value):
    x = train_copy(torch.randn(4, 2, dtype=torch.float64))
    x[2, -1] = value
    with pytest.raises(ValueError, match=r"exactly 0 \(test copy\) or 1 \(training copy\): got .* in row 2\. Make"):
        split_copy(x)
    with pytest.raises(ValueError, match=r"in row \(1, 2\)"):
        split_copy(torch.stack([train_copy(torch.zeros(4, 2, dtype=torch.float64)), x]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_are_refused(value):
    X = torch.randn(4, 2)
    X[3, 1] = value
    for tag in (train_copy, test_copy):
        with pytest.raises(ValueError, match=r"inputs must be finite: got .* at index \(3, 1\)"):
            tag(X)
    with pytest.raises(ValueError, match="inputs must be finite"):
        split_copy(torch.cat([X, torch.ones(4, 1)], dim=1))


def test_inputs_of_the_wrong_kind_or_shape_are_refused(unchecked):
    with pytest.raises(TypeError, match="real numbers: got torch.bool"):
        train_copy(torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="real numbers: got torch.complex64"):
        test_copy(torch.ones(3, 2, dtype=torch.complex64))
    for copy in (train_copy, test_copy):
        with pytest.raises(ValueError, match=r"one row per point: got shape \(5,\). A single point is X\[None\]"):
            copy(torch.zeros(5))
    with pytest.raises(ValueError, match="got a scalar"):
        train_copy(torch.tensor(1.0))
    for x in (torch.ones(3), torch.ones(3, 1)):
        with pytest.raises(ValueError, match=r"shape \(\.\.\., n, D \+ 1\)"):
            split_copy(x)
