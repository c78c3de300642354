"""Adapters with the libraries themselves, where they are installed: their own metrics take what adapters give."""

import importlib
import inspect
import sys
import warnings
from types import SimpleNamespace

import adapter_cases as cases
import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.adapters.captum import EPKInfluence, MostInfluential
from epk_gp.adapters.dattri import EPKAttributor
from epk_gp.adapters.quanda import EPKExplainer
from epk_gp.analysis.counterfactual import random_subsets
from gp_cases import gaussian_net, gaussian_run, gaussians

pytestmark = pytest.mark.filterwarnings("default")  # the libraries use what others deprecate
TRACIN = {"scores": "contributions", "rule": epk.left_endpoint()}  # what other libraries call TracIn


def real(name):
    """Import a library, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def adapter(name, library):
    """Import an adapter whose library is there, or skip."""
    real(library)
    return importlib.import_module(f"epk_gp.adapters.{name}")


NEEDING = {  # adapter: the library that it imports, and how it says to install it
    "cleanlab": ("cleanlab", "pip install cleanlab"),
    "opendataval": ("opendataval", "pip install opendataval"),
    "openood": ("openood", "pip install ./OpenOOD"),
    "pytorch_ood": ("pytorch_ood", "pip install pytorch-ood"),
    "torch_uncertainty": ("torch_uncertainty", "pip install torch-uncertainty lightning timm"),
}


@pytest.mark.parametrize("name", NEEDING)
def test_an_adapter_says_which_package_is_missing(name, monkeypatch):
    library, said = NEEDING[name]
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"epk_gp.adapters.{name}", raising=False)
    with pytest.raises(ImportError, match=f"must find its library: .*{library}.* Run `{said}`"):
        importlib.import_module(f"epk_gp.adapters.{name}")


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

    theirs = influence.TracInCP(
        net,
        train,
        [*range(cases.STEPS)],
        load,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        batch_size=5,
        sample_wise_grads_per_batch=False,
    )
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


def test_quandas_metrics_make_explainers_and_take_their_scores(run):
    explainers, metrics = real("quanda.explainers"), real("quanda.metrics.downstream_eval")
    theirs = inspect.signature(explainers.Explainer.explain).parameters
    assert list(inspect.signature(EPKExplainer.explain).parameters) == list(theirs)
    train, test = cases.data("classes")
    net, common = cases.network(), {"trajectory": run}
    net.load_state_dict(cases.states("classes")[-1])
    wrong = metrics.MislabelingDetectionMetric(
        model=net,
        train_dataset=train,
        mislabeling_indices=[0, 1],
        explainer_cls=EPKExplainer,
        expl_kwargs=common,
    )
    assert wrong.compute()["success_arr"][:2].all()  # the wrong labels come first
    explanations = EPKExplainer(net, train, **common).explain(*test.tensors)
    same = metrics.ClassDetectionMetric(net, train, s=1)
    same.update(explanations, test.tensors[1])
    assert same.compute()["score"] > 0.8  # the most helpful sample has the label of the test point


# Classifiers: three Gaussians, held-out points, and points far from all of them.


@pytest.fixture(scope="module")
def classifier():
    return epk.UncertainClassifier(gaussian_run(*gaussians(15, 0)), nodes=4)


@pytest.fixture(scope="module")
def points():
    X, y = gaussians(10, 2)
    return SimpleNamespace(X=X, y=y, far=X + 30, held_out=TensorDataset(*gaussians(20, 1)))


@pytest.fixture(scope="module")
def expected(classifier, points):
    fitted = epk.UncertainClassifier(classifier.trajectory, nodes=4).fit(*points.held_out.tensors)
    return SimpleNamespace(inside=fitted.uncertainty(points.X), model=fitted)


def test_pytorch_oods_metrics_take_a_detectors_scores(classifier, points, expected):
    made = adapter("pytorch_ood", "pytorch_ood")
    detector = made.EPKDetector(classifier)
    assert detector.fit(DataLoader(points.held_out, batch_size=16)) is detector
    assert detector.to("cpu").requires_fit
    assert_close(detector(points.X), expected.inside.out_of_distribution)
    measured = real("pytorch_ood.metrics").OODMetrics()
    measured.update(detector(points.X), points.y)
    measured.update(detector(points.far), torch.full_like(points.y, -1))
    assert measured.compute()["AUROC"] == pytest.approx(1)
    assert_close(made.EPKDetector(expected.model, score="error").predict(points.X), expected.inside.error)
    with pytest.raises(ValueError, match="score must be one of .*'out_of_distribution'.*: got 'energy'"):
        made.EPKDetector(classifier, score="energy")
    with pytest.raises(TypeError, match="classifier must be an epk_gp.UncertainClassifier: got Linear"):
        made.EPKDetector(nn.Linear(2, 2))
    seen = DataLoader(TensorDataset(classifier.trajectory.inputs, classifier.trajectory.targets), batch_size=16)
    with pytest.raises(ValueError, match="validation points must be unseen"):
        detector.fit(seen)


def test_openoods_inference_and_metrics_take_a_postprocessor(classifier, points, expected, monkeypatch):
    made = adapter("openood", "openood.postprocessors")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)  # it knows no other device
    net = gaussian_net()
    net.load_state_dict(network_state(classifier.trajectory))

    def loader(X, y):
        return [{"data": x, "label": label} for x, label in zip(X.split(8), y.split(8), strict=True)]

    postprocessor = made.EPKPostprocessor(classifier)
    postprocessor.setup(net, {"val": loader(*points.held_out.tensors)}, {})
    inside, outside = (
        postprocessor.inference(net, loader(X, y), progress=False)
        for X, y in ((points.X, points.y), (points.far, torch.full_like(points.y, -1)))
    )
    assert_close(torch.from_numpy(inside[1]), -expected.inside.out_of_distribution)
    assert (torch.from_numpy(inside[0]) == epk.network_outputs(classifier.trajectory, points.X).argmax(1)).all()
    pred, conf, label = (np.concatenate(pair) for pair in zip(inside, outside, strict=True))
    fpr, auroc, *_, accuracy = real("openood.evaluators.metrics").compute_all_metrics(conf, label, pred)
    assert (fpr, auroc) == (0, 1)
    assert accuracy > 0.8


def network_state(trajectory):
    """The last state of a run under the network's names."""
    return dict(trajectory.model.unflatten(trajectory.states[-1]))


@pytest.mark.parametrize("criterion", ["post_processing", "deup"])
def test_torch_uncertaintys_routine_takes_post_processing(classifier, points, expected, criterion, monkeypatch):
    made = adapter("torch_uncertainty", "torch_uncertainty.post_processing")
    routines, lightning = real("torch_uncertainty.routines"), real("lightning.pytorch")
    net = gaussian_net()
    net.load_state_dict(network_state(classifier.trajectory))
    post = made.EPKScores(classifier) if criterion == "deup" else made.EPKPostProcessing(classifier)

    class Data(lightning.LightningDataModule):
        def postprocess_dataloader(self):
            return DataLoader(points.held_out, batch_size=16)

        def test_dataloader(self):
            return [DataLoader(TensorDataset(X, points.y), batch_size=8) for X in (points.X, points.far)]

    options = {"eval_ood": True, "ood_criterion": criterion, "post_processing": post}
    routine = routines.ClassificationRoutine(net, num_classes=3, loss=None, **options)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    logged = lightning.Trainer(**quiet, enable_model_summary=False).test(routine, Data(), verbose=False)[0]
    measured = {name.split("/dataloader_idx")[0]: value for name, value in logged.items()}
    if criterion == "deup":
        assert measured["ood/AUROC"] == pytest.approx(1)
        assert_close(post(points.X), expected.inside.out_of_distribution)
    else:
        p = expected.model.predict_proba(points.X)
        assert_close(post(points.X).softmax(1), p)
        nll = -p.gather(1, points.y[:, None]).log().mean()
        assert measured["test/post/cls/NLL"] == pytest.approx(float(nll), rel=1e-5)


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


def test_opendatavals_experiments_take_an_evaluators_values():
    made = adapter("opendataval", "opendataval.dataval")
    fetchers, experiment = real("opendataval.dataloader"), real("opendataval.experiment")
    methods = real("opendataval.experiment.exper_methods")
    (X, y), (held_out, labels) = gaussians(15, 0), gaussians(20, 1)
    one_hot = nn.functional.one_hot
    wrong = torch.tensor([3, 20, 40])
    given = y.clone()
    given[wrong] = (given[wrong] + 1) % 3
    parts = (value.numpy() for value in (X, one_hot(given), held_out, one_hot(labels), X, one_hot(y)))
    fetcher = fetchers.DataFetcher.from_data_splits(*parts, one_hot=True)
    fetcher.noisy_train_indices = wrong.numpy()

    def record(X, y):
        return gaussian_run(X.double(), y, steps=60)

    made_by = {
        "labels": made.EPKEvaluator(record, nodes=4),
        "influence": made.EPKEvaluator(record, values="influence"),
        "contributions": made.EPKEvaluator(record, "contributions"),
    }
    mediator = experiment.ExperimentMediator(fetcher, None, raises_error=True)
    mediator.compute_data_values([*made_by.values()])
    table = mediator.evaluate(methods.discover_corrupted_sample)
    assert list(table.groupby(level=0)["corrupt_found"].apply(lambda rates: rates.iloc[2])) == [1, 1, 1]
    run = made_by["influence"].trajectory
    loss = epk.loss_value(labels)
    mean_loss = epk.influence(run, held_out, function=lambda z: loss.function(z, labels).mean()).values[0, 0]
    assert_close(torch.from_numpy(made_by["influence"].data_values), -mean_loss, rtol=0, atol=1e-6)
