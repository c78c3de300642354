"""Every loss has its coordinates, forces and curvature; log-odds, outputs and numbers of a function are asked alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datamodel_cases import TIGHT, Loop, dense, margin, mlp
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.losses import NegativeLogLikelihood
from helpers import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:the datamodel is not certified")  # of few steps
M = 11
CLASS_WEIGHTS = (1.0, 2.0, 0.5)
LABELS = torch.arange(M) % 3


@dataclass(frozen=True, eq=False)
class LossLoop(Loop):
    """A loop on targets of its own."""

    targets: Tensor = LABELS
    make: Callable[[], nn.Module] = mlp

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return super().data[0], self.targets

    def _fresh(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().double()


def sine(outputs: int) -> Tensor:
    return torch.arange(M * outputs, dtype=torch.float64).reshape(M, outputs).sin()


def quartic(z: Tensor, y: Tensor) -> Tensor:
    """A loss of one's own, whose curvature depends on the outputs."""
    difference = z - y
    return (difference**2 / 2 + difference**4 / 4).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Case:
    """A loss, as it is stated and as a function of outputs, and what its coordinates are."""

    stated: Any
    of_batch: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor = LABELS
    make: Callable[[], nn.Module] = mlp
    weights: Tensor | None = None  # of the margins' losses
    are_margins: bool = False
    labels: Tensor | None = None  # of four questions, whose log-odds are asked for

    def loop(self) -> LossLoop:
        own = {"loss": self.of_batch, "targets": self.targets, "make": self.make, "options": {"loss": self.stated}}
        return LossLoop(optimizer="momentum", **own)


def ignored(labels: Tensor, index: int) -> Tensor:
    return labels.where(torch.arange(M) % 4 != 1, index)


WEIGHTED = F.one_hot(LABELS).double() @ torch.tensor(CLASS_WEIGHTS).double()
HALVES = torch.arange(M) % 2
ASKED = torch.tensor([0, 1, 2, 0])
CASES = {
    "cross entropy": Case(epk.CrossEntropy(), F.cross_entropy, are_margins=True, labels=ASKED),
    "class weights": Case(
        epk.CrossEntropy(class_weights=CLASS_WEIGHTS),
        lambda z, y: F.cross_entropy(z, y, torch.tensor(CLASS_WEIGHTS).double()),
        weights=WEIGHTED,
        are_margins=True,
        labels=ASKED,
    ),
    "ignored samples": Case(
        epk.CrossEntropy(ignore_index=7), lambda z, y: F.cross_entropy(z, y, ignore_index=7),
        targets=ignored(LABELS, 7), weights=(torch.arange(M) % 4 != 1).double(), are_margins=True, labels=ASKED,
    ),
    "log-likelihood": Case(
        NegativeLogLikelihood(), F.nll_loss, make=lambda: nn.Sequential(*mlp(), nn.LogSoftmax(1)), are_margins=True,
        labels=ASKED,
    ),
    "two classes": Case(
        epk.CrossEntropy(), F.cross_entropy, targets=HALVES, make=lambda: mlp(2), are_margins=True, labels=ASKED % 2
    ),
    "one logit": Case(
        nn.BCEWithLogitsLoss(),
        lambda z, y: F.binary_cross_entropy_with_logits(z, y[:, None]),
        targets=HALVES.double(),
        make=lambda: mlp(1),
        labels=ASKED % 2,
    ),
    "logits of several": Case(nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits, (sine(3) > 0).double()),
    "squared error of one output": Case(epk.MeanSquaredError(), F.mse_loss, targets=sine(1), make=lambda: mlp(1)),
    "squared error of several": Case(epk.MeanSquaredError(), F.mse_loss, targets=sine(3)),
    "own loss": Case(
        epk.PerSampleLoss(quartic, name="quartic"), lambda z, y: quartic(z, y).mean(), sine(2), lambda: mlp(2),
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def losses_of(case: Case) -> Callable[[Tensor], Tensor]:
    """Return the sum of the samples' losses as a function of coordinates, margins or outputs."""
    if case.are_margins:
        weights = torch.ones(M).double() if case.weights is None else case.weights
        return lambda u: (weights * F.softplus(-u)).sum()

    def total(u: Tensor) -> Tensor:
        z = u.unflatten(0, (-1, M)).T
        return M * case.of_batch(z, case.targets)  # all are means over samples

    return total


def numbers_of(case: Case) -> Callable[[Tensor], Tensor]:
    if case.labels is None:
        return lambda z: z.flatten()
    if case.are_margins:
        return lambda z: margin(z, case.labels)
    return lambda z: z[:, 0] * (2 * case.labels - 1)


@every_case
def test_scores_of_every_loss_are_the_formula_with_explicit_jacobians(case: Case) -> None:
    loop = case.loop()
    X = loop.asked[0]
    classes = case.targets.where(case.targets < 3, 0)  # a sample that is left out has class 0
    coordinates = (lambda z: margin(z, classes)) if case.are_margins else (lambda z: z.T.flatten())
    reference = dense(loop, coordinates=coordinates, numbers=numbers_of(case), loss=losses_of(case))
    if case.weights is not None:
        # the mean divides by the sum of the weights that count
        counted = case.weights.sum() / M
        reference.a.div_(counted)
    model = epk.datamodel(loop.run, X, case.labels)
    assert_close(torch.stack(model.trainings[0].kernels), reference.kernels, rounding=TIGHT)
    assert abs(model.trainings[0].curvature / reference.curvature - 1) < (1e-9 if len(reference.a) == M else 0.3)
    scores = reference.ridge(model.trainings[0].curvature)
    assert_close(model.scores, scores.unflatten(1, (-1, M)).sum(dim=1), rounding=TIGHT)


@every_case
def test_half_the_samples_are_predicted_near_the_network_that_is_trained_on_them(case: Case) -> None:
    loop = case.loop()
    X = loop.asked[0]
    model = epk.datamodel(loop.run, X, case.labels)
    kept = torch.ones(2, M)
    kept[0, :5] = 0
    kept[1, 5:] = 0
    if case.weights is not None and case.weights.min() == 0:
        kept[:, case.weights == 0] = 1
    found = model.verify(kept)
    assert torch.equal(found.predicted, model.predict(kept))
    assert found.correlation > 0.9
    assert 0.5 < found.slope < 2


def test_ignored_samples_change_nothing() -> None:
    loop = CASES["ignored samples"].loop()
    model = epk.datamodel(loop.run, *loop.asked)
    is_ignored = torch.arange(M) % 4 == 1
    assert bool((model.scores[:, is_ignored] == 0).all())
    assert bool((model.scores[:, ~is_ignored] != 0).all())
    assert bool((model.derivative()[:, is_ignored] == 0).all())
    assert_close(model.predict(~is_ignored), model.outputs)


LOOP = Loop(optimizer="adam", steps=14)


def test_log_odds_are_those_of_y() -> None:
    X, y = LOOP.asked
    z = epk.network_outputs(LOOP.run, X)
    assert_close(LOOP.model.outputs, margin(z, y))
    one = CASES["one logit"].loop()
    z, sign = epk.network_outputs(one.run, X)[:, 0], 2 * (ASKED % 2) - 1
    odds, plain = epk.datamodel(one.run, X, ASKED % 2), epk.datamodel(one.run, X)
    assert_close(odds.outputs, sign * z)
    assert_close(plain.outputs, z)
    assert_close(odds.scores, sign[:, None] * plain.scores)


@pytest.mark.parametrize("head", ["logits", "log_softmax", None])
def test_one_output_of_each_input_is_a_question(head: Any) -> None:
    X, y = LOOP.asked
    model = epk.datamodel(LOOP.run, X, classes=y, head=head)
    outputs = epk.network_outputs(LOOP.run, X, head=head)
    assert_close(model.outputs, outputs.gather(1, y[:, None])[:, 0])
    own = (lambda z: z) if head == "logits" else (lambda z: z.log_softmax(dim=1))
    reference = dense(LOOP, numbers=lambda z: own(z).gather(1, y[:, None])[:, 0])
    assert_close(model.scores, reference.ridge(), rounding=TIGHT)


def both(z: Tensor) -> Tensor:
    return torch.stack([z[:, 0] - z[:, 1], z.softmax(dim=1)[:, 2]], dim=1)


def test_a_function_of_one_number_or_of_several_is_a_question() -> None:
    X, y = LOOP.asked
    model = epk.datamodel(LOOP.run, X, function=both)
    assert_close(model.outputs, both(epk.network_outputs(LOOP.run, X)).flatten())
    assert_close(model.scores, dense(LOOP, numbers=lambda z: both(z).flatten()).ridge(), rounding=TIGHT)
    first = epk.datamodel(LOOP.run, X, function=lambda z: both(z)[:, 0])
    kept = (torch.arange(11) % 3 != 0).double()
    assert_close(first.scores, model.scores[::2], rounding=TIGHT)
    assert_close(first.predict(kept), model.predict(kept)[::2], rounding=TIGHT)
    log_odds = epk.datamodel(LOOP.run, X, function=epk.RowFunction(margin, y))
    assert_close(log_odds.scores, LOOP.model.scores, rounding=TIGHT)
    assert_close(log_odds.predict(kept), LOOP.model.predict(kept), rounding=TIGHT)


def test_of_a_regression_all_outputs_are_asked_input_by_input() -> None:
    run, X = CASES["squared error of several"].loop().run, LOOP.asked[0]
    model = epk.datamodel(run, X)
    assert_close(model.outputs, epk.network_outputs(run, X).flatten())
    assert model.scores.shape == (12, M)
    third = epk.datamodel(run, X, classes=torch.full((4,), 2))
    assert_close(third.scores, model.scores[2::3], rounding=TIGHT)
    assert_close(epk.datamodel(run, X, torch.zeros(4, 3)).scores, model.scores)


def test_questions_do_not_depend_on_those_beside_them() -> None:
    X, y = LOOP.asked
    for k in range(4):
        alone = epk.datamodel(LOOP.run, X[k : k + 1], y[k : k + 1])
        assert_close(alone.scores[0], LOOP.model.scores[k], rounding=TIGHT)
    twice = epk.datamodel(LOOP.run, X[[2, 2, 0]], y[[2, 2, 0]])
    assert_close(twice.scores, LOOP.model.scores[[2, 2, 0]], rounding=TIGHT)


def test_probabilities_as_targets_have_outputs_as_coordinates() -> None:
    q = sine(3).softmax(dim=1)
    loop = LossLoop(optimizer="momentum", loss=F.cross_entropy, targets=q)
    loss, numbers = lambda u: M * F.cross_entropy(u.unflatten(0, (-1, M)).T, q), lambda z: z.log_softmax(1).flatten()
    reference = dense(loop, coordinates=lambda z: z.T.flatten(), numbers=numbers, loss=loss)
    model = epk.datamodel(loop.run, loop.asked[0])
    scores = reference.ridge(model.trainings[0].curvature)
    assert_close(model.scores, scores.unflatten(1, (-1, M)).sum(dim=1), rounding=TIGHT)
