"""The numbers of the figures: each has a case whose answer is known, and one where the wrong answer would show."""

import math

import pytest
import torch

from epk_gp.analysis.measures import calibration, gram_spectrum, ood_metrics, principal_directions, rank_correlation


def test_a_rank_correlation_is_one_for_any_growing_curve():
    x = torch.linspace(0, 5, 20)
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)
    assert rank_correlation(torch.ones(5), torch.arange(5.0)) is None


def test_the_rank_of_a_projection_is_counted_in_all_three_ways():
    Q = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64)).Q
    found = gram_spectrum(Q @ Q.T)
    assert found.effective_rank == pytest.approx(6)
    assert found.participation_ratio == pytest.approx(6)
    assert found.num_principal == 6
    strong = gram_spectrum(torch.diag(torch.tensor([1000.0, 1, 1, 1], dtype=torch.float64)))  # hides the others
    assert strong.num_principal == 1
    assert 1 < strong.participation_ratio < strong.effective_rank < 1.1


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    labels = torch.tensor([0, 0, 0, 1] * 25)
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64).expand(100, -1)
    assert calibration(p, labels).ece == pytest.approx(0)
    sure = calibration(torch.tensor([[0.95, 0.05]], dtype=torch.float64).expand(100, -1), labels)
    assert sure.ece == pytest.approx(0.2)
    assert sure.accuracy == 0.75
    assert sure.nll == pytest.approx(-(0.75 * math.log(0.95) + 0.25 * math.log(0.05)))


ONES, NO_CLASS = torch.ones(4), torch.zeros(4, dtype=torch.int64)
REFUSED = {
    "m >= 2: got": lambda: rank_correlation(torch.ones(1), torch.ones(1)),
    "symmetric": lambda: gram_spectrum(torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
    "positive semi-definite": lambda: gram_spectrum(torch.diag(torch.tensor([1.0, -0.5]))),
    "energies": lambda: principal_directions(0 * ONES),
    "finite": lambda: ood_metrics(ONES, ONES / 0),
    "softmax": lambda: calibration(torch.arange(8.0).view(4, 2) + 1, NO_CLASS),
}


def test_what_has_no_meaning_is_refused():
    for message, call in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            call()
