"""Losses: torch's values, their derivatives, and the weight of a sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.losses import (
    NegativeLogLikelihood,
    as_loss,
    loss_derivatives,
    per_sample_losses,
    sample_weights,
    soft_targets,
    validate_loss_row_independence,
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
    "class_weights": (
        epk.CrossEntropy(class_weights=(1.0, 2.0, 0.5)),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double()),
        data,
    ),
    "label_smoothing": (
        epk.CrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.2),
        data,
    ),
    "smooth_soft_labels": (
        epk.CrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), label_smoothing=0.2),
        soft_data,
    ),
    "ignored": (epk.CrossEntropy(ignore_index=1), nn.CrossEntropyLoss(ignore_index=1), data),
    "likelihood": (NegativeLogLikelihood(), nn.NLLLoss(), data),
    "weighted_likelihood": (
        NegativeLogLikelihood(class_weights=(1.0, 2.0, 0.5), ignore_index=0),
        nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), ignore_index=0),
        data,
    ),
    "scalar_function": (epk.PerSampleLoss(F.smooth_l1_loss), nn.SmoothL1Loss(), regression_data),
    "torch_module": (as_loss(nn.L1Loss(reduction="sum")), nn.L1Loss(reduction="sum"), regression_data),
    "own_sum": (epk.PerSampleLoss(huber, "sum"), lambda z, y: huber(z, y).sum(), regression_data),
}


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def pair(request):
    loss, torch_loss, make_data = request.param
    return loss, torch_loss, torch.randn(10, 3, dtype=torch.float64), make_data()[1]


def test_weighted_samples_sum_to_torchs_loss(pair):
    loss, torch_loss, z, y = pair
    assert_close(sample_weights(loss, y) @ per_sample_losses(loss, z, y), torch_loss(z, y))


def test_weighted_derivatives_are_the_gradient_of_torchs_loss(pair):
    loss, torch_loss, z, y = pair
    leaf = z.clone().requires_grad_()
    torch_loss(leaf, y).backward()
    assert_close(sample_weights(loss, y)[:, None] * loss_derivatives(loss, z, y), leaf.grad)


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
    y = torch.zeros(4, dtype=torch.int64)
    assert sample_weights(epk.CrossEntropy(), y).tolist() == [0.25] * 4
    assert sample_weights(epk.CrossEntropy("sum"), y).tolist() == [1.0] * 4


def test_a_weighted_mean_divides_by_the_weights_that_count():
    loss = epk.CrossEntropy(class_weights=(1.0, 3.0), ignore_index=7)
    assert sample_weights(loss, torch.tensor([0, 1, 7])).tolist() == [0.25] * 3
    with pytest.raises(ValueError, match="must hold a sample that counts"):
        sample_weights(loss, torch.tensor([7, 7]))


def test_labels_are_distributions_too():
    y = torch.tensor([2, 0])
    assert soft_targets(epk.CrossEntropy(), y, torch.zeros(0, 3).double()).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert soft_targets(epk.CrossEntropy(), y, torch.zeros(0, 3)).dtype == torch.float32
    soft = torch.tensor([[0.25, 0.75]])
    assert torch.equal(soft_targets(epk.CrossEntropy(), soft, torch.zeros(0, 2).double()), soft.double())


@pytest.mark.parametrize(
    "loss",
    [
        epk.CrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.1),
        epk.CrossEntropy(label_smoothing=0.3, ignore_index=2),
        NegativeLogLikelihood(class_weights=(1.0, 2.0, 0.5), ignore_index=0),
    ],
    ids=["weights_and_smoothing", "smoothing_and_ignored", "likelihood"],
)
def test_every_class_loss_is_minus_targets_times_log_probabilities(loss):
    z, (_, y) = torch.randn(10, 3, dtype=torch.float64), data()
    f = torch.log_softmax(z, dim=1)
    outputs = f if isinstance(loss, NegativeLogLikelihood) else z
    assert_close(per_sample_losses(loss, outputs, y), -(soft_targets(loss, y, z) * f).sum(dim=1))


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
    validate_loss_row_independence(epk.PerSampleLoss(huber), z, y[:4])
    centred = epk.PerSampleLoss(lambda z, y: huber(z - z.mean(0), y))
    with pytest.raises(ValueError, match="must depend on its own row alone"):
        validate_loss_row_independence(centred, z, y[:4])
