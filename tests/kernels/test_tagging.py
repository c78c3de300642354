"""The two copies of an input as rows of a matrix (Definition 3.4)."""

import pytest
import torch

from epk_gp.kernels.tagging import as_points, tag_points, test_copy, train_copy


@pytest.mark.parametrize("shape", [(5, 3), (5, 1, 2, 3), (0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_copy_is_the_flattened_input_and_one_column(shape, dtype):
    X = torch.randn(shape).mul(10).to(dtype)
    for tag, value in ((train_copy, 1), (test_copy, 0)):
        x = tag(X)
        assert x.dtype == dtype
        assert torch.equal(x[:, :-1].reshape(shape), X)
        assert torch.equal(x[:, -1], torch.full((shape[0],), value, dtype=dtype))


def test_points_know_their_copies(trajectory):
    X = torch.randn(3, 2, dtype=torch.float64)
    for tag, is_train in ((train_copy, True), (test_copy, False)):
        assert as_points(trajectory, tag(X)).is_train.tolist() == [is_train] * 3
    mixed = as_points(trajectory, torch.cat([train_copy(X), test_copy(X)]))
    assert mixed.is_train.tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("value", [-1.0, 1 + 1e-6, float("nan")])
def test_a_copy_column_that_is_not_0_or_1_is_refused_with_its_row(trajectory, value):
    x = train_copy(torch.randn(4, 2, dtype=torch.float64))
    x[2, -1] = value
    with pytest.raises(ValueError, match=r"exactly 0 \(test copy\) or 1 \(training copy\): got .* in row 2\. Make"):
        tag_points(trajectory, x)
    with pytest.raises(ValueError, match=r"in row \(1, 2\)"):
        tag_points(trajectory, torch.stack([train_copy(torch.zeros(4, 2, dtype=torch.float64)), x]))
