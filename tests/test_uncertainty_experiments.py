"""The parts of the uncertainty experiments: images, wrong labels, the process beside ours, and saved rows."""

import json
from dataclasses import replace

import gpytorch
import pytest
import torch
import torch.nn.functional as F

import uncertainty_problems as problems
from judging import mean_and_std
from rbf_process import FLOOR, fit_rbf_process
from saved_rows import ONLY_VARIABLE, ROWS_VARIABLE, reasons_once, rounded, row_of
from uncertainty_problems import Problem, blurred, fgsm, noisy, outside_images, pgd, rotated, splits, wrong_labels

DIGITS = Problem("digits", width=8, num_train=100, steps=20, batch_size=10)


# Images


def test_training_validation_and_test_images_are_disjoint():
    sets = splits(DIGITS, 50)
    rows = [{tuple(image.flatten().tolist()) for image in data.inputs} for data in sets]
    assert [len(data) for data in sets] == [100, 300, 50]
    assert not rows[0] & rows[1]
    assert not rows[0] & rows[2]
    assert not rows[1] & rows[2]


def test_another_seed_draws_other_training_images_and_the_same_validation_images():
    (train, validation, _), (other, same, _) = (splits(replace(DIGITS, seed=seed), 50) for seed in (0, 1))
    assert validation.inputs.equal(same.inputs)
    assert not train.inputs.equal(other.inputs)


def test_more_training_images_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="num_train must be at most 900, the images of digits less 300 for validation"):
        splits(replace(DIGITS, num_train=901), 1)


def test_half_of_the_classes_leaves_the_other_half_outside():
    low, _, _ = splits(replace(DIGITS, data="digits-low"), 10)
    high = problems.pictures("digits-high", "train", torch.float64)
    assert low.num_classes == high.num_classes == 5
    whole = problems.pictures("digits", "train", torch.float64)
    assert high.inputs.equal(whole.inputs[whole.labels > 4])
    assert high.labels.equal(whole.labels[whole.labels > 4] - 5)


def test_a_quarter_turn_is_exact():
    X = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    turned = rotated(X, 90)
    assert any(torch.allclose(turned, X.rot90(k, (2, 3)), atol=1e-12) for k in (1, 3))
    assert not torch.allclose(rotated(X, 45), X, atol=0.1)
    torch.testing.assert_close(rotated(X, 0), X)


def test_blur_keeps_the_light_and_noise_keeps_the_range(generator):
    X = torch.zeros(1, 1, 21, 21, dtype=torch.float64)
    X[..., 10, 10] = 1
    dim = blurred(X, 1.5)
    assert float(dim.sum()) == pytest.approx(1)
    assert 0.05 < float(dim.max()) < 0.1  # 1 / (2 pi 1.5^2) = 0.07
    shaken = noisy(X, 0.3, generator)
    assert 0 == float(shaken.min()) < float(shaken.max()) <= 1


def test_attacks_stay_in_the_ball_and_several_steps_do_more_harm_than_one(generator):
    train, _, test = splits(DIGITS, 200)
    net = problems.train_unrecorded(replace(DIGITS, steps=100), train)
    losses = []
    for attacked in (
        test.inputs,
        fgsm(net, test.inputs, test.labels, 0.1),
        pgd(net, test.inputs, test.labels, 0.1, generator),
    ):
        assert float((attacked - test.inputs).abs().max()) <= 0.1 + 1e-12
        assert 0 <= float(attacked.min()) <= float(attacked.max()) <= 1
        losses.append(float(F.cross_entropy(net(attacked), test.labels).detach()))
    assert losses[0] + 0.1 < losses[1] <= losses[2] * 1.001


def test_images_from_elsewhere_are_none_of_the_test_images():
    inside = problems.pictures("digits", "test", torch.float64).inputs
    for name in ("inverted-digits", "turned-digits"):
        outside = outside_images(name, 20, DIGITS)
        assert outside.shape == (20, *inside.shape[1:])
        assert torch.cdist(outside.flatten(1), inside.flatten(1)).min() > 0


# Training


def test_recorded_and_unrecorded_training_end_at_the_same_weights():
    problem = replace(DIGITS, decay=True)
    train, _, _ = splits(problem, 1)
    run = problems.record(problem, train)
    weights = problems.train_unrecorded(problem, train).state_dict()
    for name, value in run.weights(-1).items():
        torch.testing.assert_close(value, weights[name])
    assert [step.lr for step in run.steps[:15]] == [0.3] * 15
    assert run.steps[-1].lr == pytest.approx(0.3 / 5)


# Wrong labels


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


def test_another_kind_of_wrong_labels_is_an_error(generator):
    with pytest.raises(ValueError, match="kind must be uniform or confusing: got 'rare'"):
        wrong_labels(torch.zeros(4, dtype=torch.int64), 0.5, "rare", torch.zeros(4, 2), generator)


# The process with an RBF kernel


@pytest.fixture(scope="module")
def labelled():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    return X, (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def fitted(X, labels, **options):
    return fit_rbf_process(X, labels, 3, torch.Generator().manual_seed(0), **options)


def test_leaving_one_out_is_conditioning_on_the_others(labelled):
    X, labels = labelled
    gp = fitted(X, labels)
    mean, variance = gp.leave_one_out()
    rest = torch.arange(40) != 7
    K = torch.exp(-0.5 * torch.cdist(X, X).square() / gp.lengthscale**2)
    noisy_gram = K[rest][:, rest] + gp.noise * torch.eye(39, dtype=torch.float64)
    solved = torch.linalg.solve(noisy_gram, K[rest, 7])
    torch.testing.assert_close(mean[7], gp.mean + solved @ (F.one_hot(labels, 3).double() - gp.mean)[rest])
    torch.testing.assert_close(variance[7], 1 + gp.noise - solved @ K[rest, 7])


def test_mean_and_variance_are_gpytorchs(labelled):
    X, labels = labelled
    gp = fitted(X, labels)
    test = torch.randn(5, 3, dtype=torch.float64)
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = gp.lengthscale
    with torch.no_grad():
        K, cross = kernel(X).to_dense() + gp.noise * torch.eye(40), kernel(test, X).to_dense()
    mean, variance = gp.posterior(test)
    targets = F.one_hot(labels, 3).double() - gp.mean
    torch.testing.assert_close(mean, gp.mean + cross @ torch.linalg.solve(K, targets))
    torch.testing.assert_close(variance, 1 - (cross * torch.linalg.solve(K, cross.mT).mT).sum(1))


def test_no_other_lengthscale_or_noise_is_more_likely(labelled):
    X, labels = labelled
    Y = F.one_hot(labels, 3).double() - F.one_hot(labels, 3).double().mean(0)

    def loss(lengthscale, noise):
        K = torch.exp(-0.5 * torch.cdist(X, X).square() / lengthscale**2) + noise * torch.eye(40)
        scale = (Y * torch.linalg.solve(K, Y)).mean()
        return -sum(
            torch.distributions.MultivariateNormal(torch.zeros(40).double(), scale * K).log_prob(y) for y in Y.T
        )

    gp = fitted(X, labels)
    best = loss(gp.lengthscale, gp.noise)
    for factor in (0.8, 1.25):
        assert best < loss(factor * gp.lengthscale, gp.noise)
        assert best < loss(gp.lengthscale, max(factor * gp.noise, FLOOR))
    assert fitted(X, labels, lengthscale=2.0).lengthscale == pytest.approx(2)


# Rows


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv(ROWS_VARIABLE, str(tmp_path))
    monkeypatch.delenv(ONLY_VARIABLE, raising=False)
    return tmp_path


def test_a_saved_row_is_not_computed_again_and_another_key_is_another_row(rows):
    assert row_of("mnist, softmax", {"seed": 0}, lambda: {"AUROC": 0.9}) == {"AUROC": 0.9}
    assert row_of("mnist, softmax", {"seed": 0}, lambda: pytest.fail("computed again")) == {"AUROC": 0.9}
    assert row_of("mnist, softmax", {"seed": 1}, lambda: {"AUROC": 0.8}) == {"AUROC": 0.8}
    saved = [json.loads(file.read_text()) for file in rows.iterdir()]
    assert sorted(entry["key"]["seed"] for entry in saved) == [0, 1]


def test_a_row_that_failed_is_computed_again(rows):
    with pytest.raises(ZeroDivisionError):
        row_of("a", {}, lambda: {"AUROC": 1 / 0})
    assert list(rows.iterdir()) == []
    assert row_of("a", {}, lambda: {"AUROC": 1.0}) == {"AUROC": 1.0}


def test_rows_that_are_not_asked_for_are_read_or_left_out(rows, monkeypatch):
    row_of("mnist, softmax", {"seed": 0}, lambda: {"AUROC": 0.9})
    monkeypatch.setenv(ONLY_VARIABLE, "fashion")
    assert row_of("mnist, softmax", {"seed": 0}, dict) == {"AUROC": 0.9}
    assert row_of("mnist, softmax", {"seed": 1}, dict) is None
    assert row_of("fashion, softmax", {"seed": 1}, dict) == {}


def test_nothing_is_saved_without_a_folder(monkeypatch):
    monkeypatch.delenv(ROWS_VARIABLE, raising=False)
    assert [row_of("a", {}, lambda value=value: {"a": value})["a"] for value in (1, 2)] == [1, 2]


def test_rows_are_rounded_and_averaged_over_seeds():
    assert rounded({"a": {"b": 0.123456789, "c": None, "d": 3}}) == {"a": {"b": 0.12346, "c": None, "d": 3}}
    assert mean_and_std([0.25, 0.75]) == [0.5, 0.35]
    assert mean_and_std([0.25]) == [0.25, 0.0]
    assert mean_and_std([0.25, None]) is None


def test_reasons_are_listed_once_and_rows_that_wait_are_counted():
    assert reasons_once(["a: not installed", "not computed yet", "a: not installed", "not computed yet"]) == [
        "a: not installed", "2 rows: not computed yet",
    ]  # fmt: skip
    assert reasons_once([]) == []
