"""Scores against retraining: rank correlations with their spread, and subsets."""

import pytest
import torch
from scipy.stats import spearmanr
from weighted_loops import CLASSES, POINTS, WeightedLoop

import epk_gp as epk
from epk_gp.analysis.score_check import datamodeling_score, leave_one_out, random_subsets, rank_agreement

LOOP = WeightedLoop(lambda p: torch.optim.SGD(p, lr=0.3))


@pytest.fixture(scope="module")
def run() -> epk.Trajectory:
    return LOOP.record()


def test_leave_one_out_is_what_having_a_sample_did(run: epk.Trajectory) -> None:
    effects = leave_one_out(run, LOOP.test_points, samples=torch.tensor([5, 2]))
    assert effects.shape == (3, CLASSES, 2)
    weights = torch.ones(POINTS, dtype=torch.float64)
    weights[5] = 0
    expected = LOOP.outputs(torch.ones(POINTS, dtype=torch.float64)) - LOOP.outputs(weights)
    assert torch.allclose(effects[:, :, 0], expected, rtol=0, atol=1e-12)


def test_subsets_keep_their_share_and_differ() -> None:
    subsets = random_subsets(20, 5, share=0.9, seed=1)
    assert subsets.sum(dim=1).tolist() == [18.0] * 5
    assert torch.equal(subsets, random_subsets(20, 5, share=0.9, seed=1))
    assert len(subsets.unique(dim=0)) > 1


def test_agreement_is_spearmans_at_each_point() -> None:
    scores, effects = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    agreement = rank_agreement(scores, effects)
    expected = torch.tensor([spearmanr(a, b).statistic for a, b in zip(scores.numpy(), effects.numpy(), strict=True)])
    assert torch.allclose(agreement.per_point, expected)
    assert agreement.mean == pytest.approx(float(expected.mean()))
    assert agreement.standard_error == pytest.approx(float(expected.std() / 2))
    scores[0] = 1.0
    assert rank_agreement(scores, effects).per_point[0].isnan()
    assert rank_agreement(scores, effects).mean == pytest.approx(float(expected[1:].mean()))


def test_scores_that_are_the_outcomes_slopes_have_a_datamodeling_score_of_one(run: epk.Trajectory) -> None:
    scores, subsets = torch.randn(3, POINTS, dtype=torch.float64), random_subsets(POINTS, 8)
    assert datamodeling_score(scores, subsets, 2 + subsets @ scores.T).mean == pytest.approx(1.0)
    outcomes = epk.retrain(run, subsets).outputs(LOOP.test_points)[:, :, 0]
    assert datamodeling_score(epk.influence(run, LOOP.test_points).values[:, 0], subsets, outcomes).mean > 0.7


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_refused(run: epk.Trajectory) -> None:
    scores = torch.zeros(3, POINTS, dtype=torch.float64)
    for call, message in (
        (lambda: leave_one_out(run, LOOP.test_points, samples=torch.tensor([12])), r"in 0\.\.11"),
        (lambda: random_subsets(10, 2, share=0.01), "share must keep some of 10 samples"),
        (lambda: rank_agreement(scores, scores[:2]), "must both be"),
        (lambda: datamodeling_score(scores, scores[:, :5], scores), "must fit: got"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
