"""Losses: torch's values, their derivatives, and the weight of a sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.recording.losses import (
    as_loss,
    loss_derivatives,
    per_sample_losses,
    refuse_coupled_losses,
    sample_weight,
    soft_targets,
)
from helpers import assert_close
from loops import data, huber, regression_data, soft_data

LOSSES = {
    "cross_entropy": (epk.CrossEntropy(), nn.CrossEntropyLoss(), data),
    "cross_entropy_sum": (epk.CrossEntropy("sum"), nn.CrossEntropyLoss(reduction="sum"), data),
    "soft_labels": (epk.CrossEntropy(), nn.CrossEntropyLoss(), soft_data),
    "soft_labels_sum": (epk.CrossEntropy("sum"), nn.CrossEntropyLoss(reduction="sum"), soft_data),
    "squared_error": (epk.MeanSquaredError(), nn.MSELoss(), regression_data),
    "squared_error_sum": (epk.MeanSquaredError("sum"), nn.MSELoss(reduction="sum"), regression_data),
    "own": (epk.PerSampleLoss(huber), lambda z, y: huber(z, y).mean(), regression_data),
    "own_sum": (epk.PerSampleLoss(huber, "sum"), lambda z, y: huber(z, y).sum(), regression_data),
}


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def pair(request):
    loss, torch_loss, make_data = request.param
    return loss, torch_loss, torch.randn(10, 3, dtype=torch.float64), make_data()[1]


def test_weighted_samples_sum_to_torchs_loss(pair):
    loss, torch_loss, z, y = pair
    assert_close(sample_weight(loss, len(z)) * per_sample_losses(loss, z, y).sum(), torch_loss(z, y))


def test_weighted_derivatives_are_the_gradient_of_torchs_loss(pair):
    loss, torch_loss, z, y = pair
    leaf = z.clone().requires_grad_()
    torch_loss(leaf, y).backward()
    assert_close(sample_weight(loss, len(z)) * loss_derivatives(loss, z, y), leaf.grad)


def test_derivatives_need_no_surrounding_gradient_mode(pair):
    loss, _, z, y = pair
    with torch.no_grad():
        derivatives = loss_derivatives(loss, z, y)
    assert torch.equal(derivatives, loss_derivatives(loss, z, y))
    assert not derivatives.requires_grad


def test_the_derivative_of_cross_entropy_is_probability_minus_target():
    z, (_, y) = torch.randn(10, 3, dtype=torch.float64), data()
    assert_close(loss_derivatives(epk.CrossEntropy(), z, y), torch.softmax(z, 1) - F.one_hot(y, 3))


def test_a_mean_divides_by_its_own_batch():
    assert sample_weight(epk.CrossEntropy(), 4) == 0.25
    assert sample_weight(epk.CrossEntropy("sum"), 4) == 1.0


def test_labels_are_distributions_too():
    y = torch.tensor([2, 0])
    assert soft_targets(y, 3, torch.float64).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert soft_targets(y, 3, torch.float32).dtype == torch.float32
    soft = torch.tensor([[0.25, 0.75]])
    assert torch.equal(soft_targets(soft, 2, torch.float64), soft.double())


def test_targets_of_another_float_type_follow_the_outputs():
    z, (_, y) = torch.randn(10, 3), regression_data()
    assert per_sample_losses(epk.MeanSquaredError(), z, y).dtype == torch.float32


def test_losses_are_values():
    assert epk.CrossEntropy() == epk.CrossEntropy("mean") != epk.CrossEntropy("sum")
    assert len({epk.CrossEntropy(), epk.CrossEntropy(), epk.MeanSquaredError()}) == 2
    with pytest.raises(AttributeError, match="cannot assign"):
        epk.CrossEntropy().reduction = "sum"


@pytest.mark.parametrize(
    ("torch_loss", "ours"),
    [
        (nn.CrossEntropyLoss(), epk.CrossEntropy()),
        (nn.CrossEntropyLoss(reduction="sum"), epk.CrossEntropy("sum")),
        (nn.MSELoss(), epk.MeanSquaredError()),
        (nn.MSELoss(reduction="sum"), epk.MeanSquaredError("sum")),
    ],
)
def test_torchs_plain_losses_have_their_counterpart(torch_loss, ours):
    assert as_loss(torch_loss) == ours
    assert as_loss(ours) is ours


def test_an_independent_loss_passes_and_a_coupled_one_does_not():
    z, (_, y) = torch.randn(4, 3, dtype=torch.float64), regression_data()
    refuse_coupled_losses(epk.PerSampleLoss(huber), z, y[:4])
    centred = epk.PerSampleLoss(lambda z, y: huber(z - z.mean(0), y))
    with pytest.raises(ValueError, match="must depend on its own row alone"):
        refuse_coupled_losses(centred, z, y[:4])
