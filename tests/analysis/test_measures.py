"""Measures of kernels, probabilities and scores: known answers, brute force over all orders, and scikit-learn."""

import math
from itertools import permutations

import pytest
import torch
from sklearn.metrics import roc_auc_score

from epk_gp.analysis.measures import (
    calibration,
    error_detection,
    gram_spectrum,
    ood_metrics,
    principal_directions,
    rank_correlation,
    reliability_bins,
    roc_curve,
)


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


SCORES = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.9, 0.9], dtype=torch.float64)
MARKED = torch.tensor([False, True, False, False, True, False])


def orders(scores, *, descending):
    """Every order of the points that the scores allow: points of one score may stand in any order."""
    values = scores.tolist()
    for order in permutations(range(len(values))):
        ranked = [values[i] for i in order]
        if ranked == sorted(values, reverse=descending):
            yield list(order)


def test_the_area_under_the_risk_coverage_curve_is_the_mean_over_all_orders_of_ties():
    count = torch.arange(1, len(SCORES) + 1)
    risks = torch.stack([MARKED[order].double().cumsum(0) / count for order in orders(SCORES, descending=False)])
    found = error_detection(SCORES, MARKED)
    torch.testing.assert_close(found.risk, risks.mean(0))
    assert found.aurc == pytest.approx(float(risks.mean()))
    assert float(found.risk[-1]) == pytest.approx(2 / 6)
    assert found.auroc == pytest.approx(roc_auc_score(MARKED, SCORES))


def test_a_score_that_knows_all_errors_leaves_only_the_risk_of_full_coverage():
    wrong = torch.tensor([False] * 8 + [True] * 2)
    known = error_detection(wrong.float(), wrong)
    assert known.auroc == 1
    assert known.aurc == pytest.approx((1 / 9 + 2 / 10) / 10)
    assert error_detection(torch.zeros(10), wrong).aurc == pytest.approx(0.2)
    assert error_detection(SCORES.flip(0), MARKED.flip(0)).aurc == pytest.approx(error_detection(SCORES, MARKED).aurc)
    for same in (True, False):  # without both kinds there is no curve
        found = error_detection(SCORES, torch.full((6,), same))
        assert (found.auroc, found.aurc) == (None, same)


def test_bad_input_is_an_error_that_says_what_to_do(unchecked):
    for ask, error, message in (
        (lambda: error_detection(SCORES, MARKED[:3]), ValueError, "wrong must have one entry per score: got 3 entries"),
        (lambda: error_detection(SCORES, MARKED.long()), TypeError, "wrong must be a mask of torch.bool: got"),
        (lambda: error_detection(SCORES[:0], MARKED[:0]), ValueError, "scores must hold finite scores, at least one"),
    ):
        with pytest.raises(error, match=message):
            ask()


def test_the_area_under_the_curve_is_the_auroc(generator):
    """With ties, and for both orders."""
    inside = torch.randint(6, (40,), generator=generator).double()
    outside = torch.randint(3, 9, (30,), generator=generator).double()
    for first, second in ((inside, outside), (outside, inside)):
        curve = roc_curve(first, second)
        expected = roc_auc_score([0] * len(first) + [1] * len(second), torch.cat([first, second]))
        found = ood_metrics(first, second)
        assert torch.trapezoid(curve.outside, curve.inside).item() == pytest.approx(found.auroc)
        assert found.auroc == pytest.approx(expected)
        limit = first.sort().values[math.ceil(0.95 * len(first)) - 1]
        assert found.fpr95 == pytest.approx(float((second <= limit).double().mean()))
        assert (curve.threshold[0], curve.inside[0], curve.outside[0]) == (torch.inf, 0, 0)
        assert (curve.inside[-1], curve.outside[-1]) == (1, 1)
        for threshold, a, b in zip(*(v.tolist() for v in (curve.threshold, curve.inside, curve.outside)), strict=True):
            assert a == pytest.approx(float((first >= threshold).double().mean()))
            assert b == pytest.approx(float((second >= threshold).double().mean()))


def test_bins_of_confidence_hold_every_point_once(generator):
    p = torch.rand(60, 3, generator=generator, dtype=torch.float64).softmax(dim=1)
    p = torch.cat([p, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)])
    labels = torch.randint(3, (61,), generator=generator)
    bins = reliability_bins(p, labels, bins=5)
    confidence, chosen = p.max(dim=1)
    for k in range(5):
        inside = (confidence >= k / 5) & ((confidence < (k + 1) / 5) | (k == 4))
        assert bins.count[k] == inside.sum()
        if inside.any():
            assert bins.confidence[k] == pytest.approx(float(confidence[inside].mean()))
            assert bins.accuracy[k] == pytest.approx(float((chosen == labels)[inside].double().mean()))
        else:
            assert bins.confidence[k].isnan()
    filled = bins.count > 0
    gaps = bins.count * (bins.confidence - bins.accuracy).abs()
    assert float(gaps[filled].sum() / 61) == pytest.approx(calibration(p, labels, bins=5).ece)
