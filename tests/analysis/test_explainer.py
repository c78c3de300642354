"""Explainers under quanda's and captum's names."""

import pytest
import torch
from torch.testing import assert_close

import epk_gp as epk
from epk_gp.analysis.explainer import Explainer, MostInfluential, contribution_scores
from helpers import make_case

CLASSES = [0, 2, 1, 1, 0]


@pytest.fixture(scope="module")
def case():
    return make_case("tanh", steps=2)


@pytest.fixture(scope="module")
def explainer(case):
    return Explainer(trajectory=case.trajectory, scores=contribution_scores)


@pytest.mark.parametrize("targets", [CLASSES, torch.tensor(CLASSES, dtype=torch.int32)])
def test_explanations_are_contributions_to_the_targets_or_influence_by_default(case, explainer, targets):
    whole = epk.attribute(case.trajectory, case.test).samples
    expected = torch.stack([whole[n, c] for n, c in enumerate(CLASSES)])
    assert_close(explainer.explain(test_data=case.test, targets=targets), expected)
    # as `quanda.explainers.utils._init_explainer` calls it: by keywords, with more than is needed
    unused = {"model": object(), "train_dataset": range(7), "checkpoints": ["file"], "checkpoints_load_func": None}
    shown = Explainer(**unused, trajectory=case.trajectory).explain(case.test, targets)
    assert torch.equal(shown, epk.influence(case.trajectory, case.test, classes=torch.tensor(CLASSES)).values[:, 0])


@pytest.mark.parametrize("batch_size", [3, 32])
def test_self_influence_is_the_diagonal(case, explainer, batch_size):
    run = case.trajectory
    whole = explainer.explain(run.inputs, run.targets)
    assert_close(explainer.self_influence(batch_size=batch_size), whole.diagonal())


def test_captums_name_gives_all_scores_or_the_most_extreme_ones(case, explainer):
    whole = explainer.explain(case.test, CLASSES)
    inputs = (case.test, torch.tensor(CLASSES))
    assert torch.equal(explainer.influence(inputs), whole)
    order = whole.argsort(dim=1)
    for proponents, expected in ((True, order.flip(1)), (False, order)):
        found = explainer.influence(inputs, k=2, proponents=proponents)
        assert isinstance(found, MostInfluential)
        assert torch.equal(found.indices, expected[:, :2])
        assert_close(found.influence_scores, whole.gather(1, expected[:, :2]))


def test_what_means_nothing_is_refused(case, explainer):
    run, regression = case.trajectory, make_case("one_class").trajectory
    for call, message in (
        (lambda: Explainer(train_dataset=range(6), trajectory=run), "train_dataset must be the run's 7 .*: got 6"),
        (lambda: Explainer(trajectory=run, task="causal_lm"), "task must be one of .*: got 'causal_lm'"),
        (lambda: explainer.influence((case.test, torch.tensor(CLASSES)), k=8), "k must be at most 7, .*: got 8"),
        (lambda: Explainer(trajectory=regression).self_influence(), r"needs a run on classes.*of shape \(7, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
