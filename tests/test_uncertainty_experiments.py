"""The parts of the uncertainty experiments: images, wrong labels, the process beside ours, and saved rows."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import uncertainty_problems as problems
from rbf_process import FLOOR, fit_rbf_process
from saved_rows import ONLY_VARIABLE, ROWS_VARIABLE, row_of
from uncertainty_problems import Problem, fgsm, pgd, rotated, splits, wrong_labels

DIGITS = Problem("digits", width=8, num_train=100, steps=20, batch_size=10)


def test_training_validation_and_test_images_are_disjoint():
    sets = splits(DIGITS, 50)
    rows = [{tuple(image.flatten().tolist()) for image in data.inputs} for data in sets]
    assert [len(data) for data in sets] == [100, 300, 50]
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]


def test_attacks_stay_in_the_ball_and_several_steps_do_more_harm_than_one(generator):
    train, _, test = splits(DIGITS, 200)
    net = problems.train_unrecorded(replace(DIGITS, steps=100), train)
    X, y, losses = test.inputs, test.labels, []
    for attacked in (X, fgsm(net, X, y, 0.1), pgd(net, X, y, 0.1, generator)):
        assert float((attacked - X).abs().max()) <= 0.1 + 1e-12
        assert 0 <= float(attacked.min()) <= float(attacked.max()) <= 1
        losses.append(float(F.cross_entropy(net(attacked), y).detach()))
    assert losses[0] + 0.1 < losses[1] <= losses[2] * 1.001


def test_a_quarter_turn_is_exact():
    X = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    turned = rotated(X, 90)
    assert any(torch.allclose(turned, X.rot90(k, (2, 3)), atol=1e-12) for k in (1, 3))
    assert not torch.allclose(rotated(X, 45), X, atol=0.1)
    torch.testing.assert_close(rotated(X, 0), X)


def test_recorded_and_unrecorded_training_end_at_the_same_weights():
    problem = replace(DIGITS, decay=True)
    train, _, _ = splits(problem, 1)
    run = problems.record(problem, train)
    weights = problems.train_unrecorded(problem, train).state_dict()
    for name, value in run.weights(-1).items():
        torch.testing.assert_close(value, weights[name])
    assert [step.lr for step in run.steps[:15]] == [0.3] * 15
    assert run.steps[-1].lr == pytest.approx(0.3 / 5)


@pytest.mark.parametrize("kind", ["uniform", "confusing"])
def test_exactly_the_share_of_the_labels_is_wrong(kind, generator):
    labels = torch.arange(200) % 4
    outputs = 3 * F.one_hot((labels + labels % 2) % 4, 4).double()  # class 1 looks like 2, and class 3 like 0
    given = wrong_labels(labels, 0.1, kind, outputs, generator)
    planted = given != labels
    assert int(planted.sum()) == 20
    if kind == "confusing":
        assert (given[planted & (labels == 1)] == 2).all()
        assert (given[planted & (labels == 3)] == 0).all()
    else:
        assert len(given[planted].unique()) == 4


@pytest.fixture(scope="module")
def labelled():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return X, (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def fitted(X, labels, **options):
    return fit_rbf_process(X, labels, 3, torch.Generator().manual_seed(0), **options)


def test_the_process_is_the_most_likely_one_and_predicts_as_written_out(labelled):
    X, labels = labelled
    gp, test, one_hot = fitted(X, labels), torch.randn(5, 3, dtype=torch.float64), F.one_hot(labels, 3).double()

    def rbf(a, b, lengthscale=gp.lengthscale):
        return torch.exp(-0.5 * torch.cdist(a, b).square() / lengthscale**2)

    K, cross = rbf(X, X) + gp.noise * torch.eye(40), rbf(test, X)
    mean, variance = gp.posterior(test)
    torch.testing.assert_close(mean, gp.mean + cross @ torch.linalg.solve(K, one_hot - gp.mean))
    torch.testing.assert_close(variance, 1 - (cross * torch.linalg.solve(K, cross.mT).mT).sum(1))
    left_out, spread = gp.leave_one_out()
    rest = torch.arange(40) != 7
    solved = torch.linalg.solve(K[rest][:, rest], K[rest, 7])
    torch.testing.assert_close(left_out[7], gp.mean + solved @ (one_hot - gp.mean)[rest])
    torch.testing.assert_close(spread[7], 1 + gp.noise - solved @ K[rest, 7])

    def loss(lengthscale, noise):
        covariance, Y = rbf(X, X, lengthscale) + noise * torch.eye(40), one_hot - one_hot.mean(0)
        covariance = (Y * torch.linalg.solve(covariance, Y)).mean() * covariance
        return -torch.distributions.MultivariateNormal(torch.zeros(40).double(), covariance).log_prob(Y.T).sum()

    for factor in (0.8, 1.25):
        assert loss(gp.lengthscale, gp.noise) < loss(factor * gp.lengthscale, gp.noise)
        assert loss(gp.lengthscale, gp.noise) < loss(gp.lengthscale, max(factor * gp.noise, FLOOR))
    assert fitted(X, labels, lengthscale=2.0).lengthscale == pytest.approx(2)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv(ROWS_VARIABLE, str(tmp_path))
    monkeypatch.delenv(ONLY_VARIABLE, raising=False)
    return tmp_path


def test_a_saved_row_is_not_computed_again_and_another_key_is_another_row(rows, monkeypatch):
    assert row_of("mnist, softmax", {"seed": 0}, lambda: {"AUROC": 0.9}) == {"AUROC": 0.9}
    assert row_of("mnist, softmax", {"seed": 0}, lambda: pytest.fail("computed again")) == {"AUROC": 0.9}
    assert row_of("mnist, softmax", {"seed": 1}, lambda: {"AUROC": 0.8}) == {"AUROC": 0.8}
    saved = [json.loads(file.read_text()) for file in rows.iterdir()]
    assert sorted(entry["key"]["seed"] for entry in saved) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        row_of("a", {}, lambda: {"AUROC": 1 / 0})
    assert row_of("a", {}, lambda: {"AUROC": 1.0}) == {"AUROC": 1.0}  # a row that failed is computed again
    monkeypatch.setenv(ONLY_VARIABLE, "fashion")
    assert row_of("mnist, softmax", {"seed": 0}, dict) == {"AUROC": 0.9}
    assert row_of("mnist, softmax", {"seed": 2}, dict) is None  # it was not asked for
    assert row_of("fashion, softmax", {"seed": 2}, dict) == {}
