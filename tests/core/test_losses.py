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

WEIGHTS = torch.tensor([1.0, 2.0, 0.5]).double()
OF_TORCH = {
    "cross_entropy": (nn.CrossEntropyLoss(), data),
    "cross_entropy_sum": (nn.CrossEntropyLoss(reduction="sum"), data),
    "soft_labels": (nn.CrossEntropyLoss(), soft_data),
    "soft_labels_sum": (nn.CrossEntropyLoss(reduction="sum"), soft_data),
    "squared_error": (nn.MSELoss(), regression_data),
    "squared_error_sum": (nn.MSELoss(reduction="sum"), regression_data),
    "class_weights": (nn.CrossEntropyLoss(WEIGHTS), data),
    "label_smoothing": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), data),
    "smooth_soft_labels": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), soft_data),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), data),
    "likelihood": (nn.NLLLoss(), data),
    "weighted_likelihood": (nn.NLLLoss(WEIGHTS, ignore_index=0), data),
    "absolute_sum": (nn.L1Loss(reduction="sum"), regression_data),
}
LOSSES = {name: (as_loss(loss), loss, make_data) for name, (loss, make_data) in OF_TORCH.items()} | {
    "own": (epk.PerSampleLoss(huber), lambda z, y: huber(z, y).mean(), regression_data),
    "own_sum": (epk.PerSampleLoss(huber, "sum"), lambda z, y: huber(z, y).sum(), regression_data),
    "scalar_function": (epk.PerSampleLoss(F.smooth_l1_loss), nn.SmoothL1Loss(), regression_data),
}


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def pair(request):
    loss, torch_loss, make_data = request.param
    return loss, torch_loss, torch.randn(10, 3, dtype=torch.float64), make_data()[1]


def test_weighted_samples_sum_to_torchs_loss_and_its_gradient(pair):
    loss, torch_loss, z, y = pair
    leaf, c = z.clone().requires_grad_(), sample_weights(loss, y)
    expected = torch_loss(leaf, y)
    expected.backward()
    assert_close(c @ per_sample_losses(loss, z, y), expected.detach())
    with torch.no_grad():  # derivatives need no surrounding gradient mode
        derivatives = loss_derivatives(loss, z, y)
    assert_close(c[:, None] * derivatives, leaf.grad)
    assert not derivatives.requires_grad


def test_the_derivative_of_cross_entropy_is_probability_minus_target():
    z, (_, y) = torch.randn(10, 3, dtype=torch.float64), data()
    assert_close(loss_derivatives(epk.CrossEntropy(), z, y), torch.softmax(z, 1) - F.one_hot(y, 3))


def test_a_mean_divides_by_what_counts_in_its_own_batch():
    y, loss = torch.zeros(4, dtype=torch.int64), epk.CrossEntropy(class_weights=(1.0, 3.0), ignore_index=7)
    assert sample_weights(epk.CrossEntropy(), y).tolist() == [0.25] * 4
    assert sample_weights(epk.CrossEntropy("sum"), y).tolist() == [1.0] * 4
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


def test_losses_are_values_and_torchs_plain_losses_have_their_counterpart():
    for kind, ours in ((nn.CrossEntropyLoss, epk.CrossEntropy), (nn.MSELoss, epk.MeanSquaredError)):
        for reduction in ("mean", "sum"):
            assert as_loss(kind(reduction=reduction)) == ours(reduction)
    loss = epk.CrossEntropy()
    assert as_loss(loss) is loss
    assert len({loss, epk.CrossEntropy("mean"), epk.CrossEntropy("sum"), epk.MeanSquaredError()}) == 3
    with pytest.raises(AttributeError, match="cannot assign"):
        loss.reduction = "sum"


def test_an_independent_loss_passes_and_a_coupled_one_does_not():
    z, (_, y) = torch.randn(4, 3, dtype=torch.float64), regression_data()
    validate_loss_row_independence(epk.PerSampleLoss(huber), z, y[:4])
    centred = epk.PerSampleLoss(lambda z, y: huber(z - z.mean(0), y))
    with pytest.raises(ValueError, match="must depend on its own row alone"):
        validate_loss_row_independence(centred, z, y[:4])
