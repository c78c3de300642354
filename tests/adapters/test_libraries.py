"""Adapters with the libraries themselves, where they are installed: their own metrics take what adapters give."""

import importlib
import inspect
import sys
import warnings

import adapter_cases as cases
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import epk_gp as epk
from epk_gp.adapters.scores import EPKAttributor, EPKInfluence, MostInfluential
from epk_gp.analysis.score_check import random_subsets
from gp_cases import gaussian_run, gaussians

pytestmark = pytest.mark.filterwarnings("default")  # the libraries use what others deprecate
TRACIN = {"scores": "contributions", "rule": epk.QuadratureRule.left_endpoint()}  # what other libraries call TracIn


def real(name):
    """Import a library, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def adapter(name, library):
    """Import an adapter whose library is there, or skip."""
    real(library)
    return importlib.import_module(f"epk_gp.adapters.{name}")


def test_the_adapter_of_cleanlab_says_which_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    monkeypatch.delitem(sys.modules, "epk_gp.adapters.cleanlab", raising=False)
    with pytest.raises(ImportError, match="must find its library: .*cleanlab.* Run `pip install cleanlab`"):
        importlib.import_module("epk_gp.adapters.cleanlab")


@pytest.fixture(scope="module")
def run():
    return cases.record("classes")


@pytest.fixture(scope="module")
def checkpoints():
    return cases.states("classes")[:-1]


def test_dattris_tracin_has_the_same_scores_and_its_metrics_take_them(run, checkpoints):
    base, tracin = real("dattri.algorithm.base").BaseAttributor, real("dattri.algorithm.tracin").TracInAttributor
    metric, task = real("dattri.metric"), real("dattri.task").AttributionTask
    for name in ("cache", "attribute"):
        theirs, ours = (inspect.signature(getattr(which, name)).parameters for which in (base, EPKAttributor))
        assert list(theirs) == list(ours)
    train, test = cases.loaders("classes", batch_size=4)
    weights = torch.full((cases.STEPS,), cases.LR / cases.M, dtype=torch.float64)
    net = cases.network()

    def loss(parameters, batch):
        outputs = torch.func.functional_call(net, parameters, (batch[0][None],))
        return nn.functional.cross_entropy(outputs, batch[1][None])

    asked = task(loss, net, checkpoints)
    theirs = tracin(asked, weight_list=weights, normalized_grad=False)
    theirs.projector_kwargs = None  # else it projects at random, whatever it is given
    expected = theirs.attribute(train, test)
    assert_close(EPKAttributor(run, **TRACIN).attribute(train, test).to(expected), expected, rtol=1e-5, atol=1e-6)

    attributor, subsets = EPKAttributor(run), random_subsets(cases.M, 20, share=0.75)
    attributor.cache(train)
    retrained = torch.stack([cases.losses_of_test_points("classes", mask) for mask in subsets])
    kept = torch.stack([mask.nonzero()[:, 0] for mask in subsets])
    scores = attributor.attribute(train, test)
    assert metric.lds(scores, (-retrained, kept))[0].mean() > 0.9
    without = cases.leave_one_out("classes").T
    assert metric.loo_corr(scores, (without, torch.arange(cases.M)))[0].mean() > 0.9
    is_wrong = torch.arange(cases.M) < 2
    assert metric.mislabel_detection_auc(attributor.self_attribute(train), is_wrong)[0] == pytest.approx(1)


def test_captums_tracin_has_the_same_scores_proponents_and_opponents(run, checkpoints):
    influence = real("captum.influence")
    train, test = cases.data("classes")
    net = cases.network()

    def load(model, step):
        model.load_state_dict(checkpoints[step])
        return cases.LR / cases.M

    options = {"loss_fn": nn.CrossEntropyLoss(reduction="none"), "batch_size": 5, "sample_wise_grads_per_batch": False}
    theirs = influence.TracInCP(net, train, [*range(cases.STEPS)], load, **options)
    ours = EPKInfluence(run, **TRACIN)
    assert_close(ours.influence(test.tensors), theirs.influence(test.tensors))
    assert_close(ours.influence(test.tensors, aggregate=True), theirs.influence(test.tensors, aggregate=True))
    assert_close(ours.self_influence(), theirs.self_influence())
    assert_close(ours.self_influence(train.tensors), theirs.self_influence(train.tensors))
    for proponents in (True, False):
        expected = theirs.influence(test.tensors, k=3, proponents=proponents)
        assert expected._fields == MostInfluential._fields
        for one, other in zip(ours.influence(test.tensors, k=3, proponents=proponents), expected, strict=True):
            assert_close(one, other)


def test_cleanlabs_datalab_has_the_same_labels_as_issues():
    made, cleanlab = adapter("cleanlab", "cleanlab"), real("cleanlab")
    factory = real("cleanlab.datalab.internal.issue_manager_factory")
    X, y = gaussians(15, 0)
    wrong = torch.tensor([3, 20, 40])
    y[wrong] = (y[wrong] + 1) % 3
    run = gaussian_run(X, y, steps=60)
    found, errors = made.label_issues(run, nodes=4), epk.label_errors(run, nodes=4)
    lab = cleanlab.Datalab({"label": y.numpy()}, label_name="label", verbosity=0)
    lab.find_issues(pred_probs=epk.network_outputs(run, X).softmax(1).numpy(), issue_types={"label": {}})
    assert list(found.columns) == list(lab.get_issues("label").columns)
    assert set(wrong.tolist()) < set(found.nsmallest(8, "label_score").index)
    assert found.is_label_issue[wrong.numpy()].all()
    assert (found.given_label == y.numpy()).all()
    assert list(found.sort_values("label_score", kind="stable").index) == errors.indices.tolist()

    factory.register(made.EPKLabelIssues)
    lab.find_issues(issue_types={"epk_label": {"trajectory": run, "nodes": 4}})
    issues = lab.get_issues("epk_label")
    assert (issues.epk_label_score == found.label_score).all()
    assert (issues.is_epk_label_issue == found.is_label_issue).all()
    lab.report()
    some = made.label_issues(run, nodes=4, points=[30, 3, 12])
    assert list(some.index) == [30, 3, 12]


def test_cleanlabs_issues_of_other_labels_than_the_datalabs_are_refused():
    made, cleanlab = adapter("cleanlab", "cleanlab"), real("cleanlab")
    real("cleanlab.datalab.internal.issue_manager_factory").register(made.EPKLabelIssues)
    X, y = gaussians(15, 0)
    asked = {"epk_label": {"trajectory": gaussian_run(X, y), "nodes": 4}}
    words = ["ant", "bee", "cat"]

    def manager(data, label_name="label", **options):
        lab = cleanlab.Datalab(data, label_name=label_name, verbosity=0)
        made.EPKLabelIssues(lab).find_issues(**asked["epk_label"], **options)

    for labels in (y.numpy(), y.numpy() + 1, [words[c] for c in y.tolist()]):
        manager({"label": labels})
    manager({"x": X[:, 0].numpy()}, None)  # without labels
    for data, label_name, options in (
        ({"label": y.flip(0).numpy()}, "label", {}),
        ({"label": y[:30].numpy()}, "label", {}),
        ({"label": [words[::-1][c] for c in y.tolist()]}, "label", {}),
        ({"x": X[:30, 0].numpy()}, None, {}),
        ({"label": y[:30].numpy()}, "label", {"points": [*range(1, 31)]}),
    ):
        with pytest.raises(
            ValueError, match="the Datalab must hold the run's points and class numbers, in their order: got"
        ):
            manager(data, label_name, **options)
