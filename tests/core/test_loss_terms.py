"""Losses of whatever a network returns: positions with padding, targets of shape (n,), losses of one's own."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from signatures import ModelOutput
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.graphs import select_rows, tensors_of
from epk_gp.core.inputs import ONE_TENSOR, Signature
from epk_gp.core.losses import (
    NegativeLogLikelihood,
    as_loss,
    loss_input,
    loss_terms,
    own_input,
    per_sample_losses,
    sample_weights,
    validate_loss_row_independence,
)
from epk_gp.recording.causes import validate_output_scale, validate_targets
from helpers import assert_close

N, T, V = 6, 4, 3


def tokens(ignored=-100):
    """Return class numbers of T tokens each; some are padding, in one sample all."""
    y = torch.randint(0, V, (N, T))
    y[torch.rand(N, T) > 0.6] = ignored
    y[0], y[1, 0] = ignored, 2
    return y


WEIGHTS = torch.tensor([1.0, 2.0, 0.5]).double()
PIXELS = (2, 5)
# a loss, torch's function of scores (positions, V) and labels (positions,), and the index of padding
POSITIONS = {
    "cross_entropy": (nn.CrossEntropyLoss(), F.cross_entropy, -100),
    "padding_index": (nn.CrossEntropyLoss(ignore_index=7), lambda z, y: F.cross_entropy(z, y, ignore_index=7), 7),
    "sum": (epk.CrossEntropy("sum"), lambda z, y: F.cross_entropy(z, y, reduction="sum"), -100),
    "class_weights": (nn.CrossEntropyLoss(weight=WEIGHTS), lambda z, y: F.cross_entropy(z, y, WEIGHTS), -100),
    "smoothing": (epk.CrossEntropy(label_smoothing=0.2), lambda z, y: F.cross_entropy(z, y, label_smoothing=0.2), -100),
    "likelihood": (nn.NLLLoss(), F.nll_loss, -100),
}


@pytest.mark.parametrize(("loss", "of_flat", "ignored"), POSITIONS.values(), ids=POSITIONS.keys())
@pytest.mark.parametrize("classes_last", [True, False], ids=["classes_last", "classes_second"])
def test_tokens_have_torchs_loss_of_the_flat_batch_and_its_gradient(loss, of_flat, ignored, classes_last):
    y, z = tokens(ignored), torch.randn(N, T, V, dtype=torch.float64, requires_grad=True)
    expected = of_flat(z.view(-1, V), y.view(-1))
    terms = per_sample_losses(as_loss(loss), z if classes_last else z.movedim(-1, 1), y)
    assert terms.shape == (N,)
    value = sample_weights(as_loss(loss), y) @ terms
    assert torch.allclose(value, expected, rtol=1e-14)
    gradient, right = (torch.autograd.grad(f, z)[0] for f in (value, expected))
    assert torch.allclose(gradient, right, rtol=1e-14, atol=1e-16)


def test_a_mean_over_samples_first_is_another_loss():
    """The negative control: padding must not have weight."""
    y, z = tokens(), torch.randn(N, T, V, dtype=torch.float64)
    means = [F.cross_entropy(a, b) for a, b in zip(z[1:], y[1:], strict=True) if bool((b != -100).any())]
    expected = F.cross_entropy(z.view(-1, V), y.view(-1))
    assert abs(torch.stack(means).mean() - expected) > 1e-3 * expected


def test_pixels_have_torchs_loss_and_where_both_orders_fit_classes_are_second():
    loss, z, y = epk.CrossEntropy(), torch.randn(N, V, *PIXELS).double(), torch.randint(0, V, (N, *PIXELS))
    soft = torch.rand(N, V, *PIXELS).double().softmax(1)
    square = torch.randn(N, V, V).double(), torch.randint(0, V, (N, V))
    for scores, targets in ((z, y), (z, soft), square):
        value = sample_weights(loss, targets) @ per_sample_losses(loss, scores, targets)
        assert_close(value, F.cross_entropy(scores, targets))


REGRESSIONS = {
    "squared": nn.MSELoss(),
    "squared_sum": nn.MSELoss(reduction="sum"),
    "absolute": nn.L1Loss(),
    "absolute_sum": nn.L1Loss(reduction="sum"),
    "huber": nn.HuberLoss(delta=0.3),
    "smooth": nn.SmoothL1Loss(),
    "binary": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]).double()),
}
SHAPES = {"n": ((N,), (N,)), "n_of_n_1": ((N, 1), (N,)), "n_1_of_n": ((N,), (N, 1)), "image": ((N, 2, 3), (N, 2, 3))}


@pytest.mark.filterwarnings("error::UserWarning")  # torch's, of an unwanted broadcast
@pytest.mark.parametrize("torch_loss", REGRESSIONS.values(), ids=REGRESSIONS.keys())
@pytest.mark.parametrize(("output_shape", "target_shape"), SHAPES.values(), ids=SHAPES.keys())
def test_targets_meet_outputs_entry_by_entry(torch_loss, output_shape, target_shape):
    loss, z, y = as_loss(torch_loss), torch.randn(output_shape).double(), torch.rand(target_shape).double()
    terms = per_sample_losses(loss, z, y)
    assert terms.shape == (N,)
    assert_close(sample_weights(loss, y) @ terms, torch_loss(z.flatten(), y.flatten()))


OUTPUT = Signature(None, lambda returned: returned.logits.mean(dim=1))
RETURNED = ModelOutput(torch.randn(N, T, V).double(), torch.randn(N, 2).double())


def test_a_loss_takes_what_fits_its_targets():
    tensor = Signature(None, lambda returned: returned.mean(dim=1))
    y, labels = tokens(), torch.randint(0, V, (N,))
    assert loss_input(OUTPUT, epk.CrossEntropy(), RETURNED, y) is RETURNED.logits
    assert loss_input(OUTPUT, epk.CrossEntropy(), {"logits": RETURNED.logits}, y) is RETURNED.logits
    assert loss_input(tensor, epk.CrossEntropy(), RETURNED.logits, y) is RETURNED.logits
    assert_close(loss_input(OUTPUT, epk.CrossEntropy(), RETURNED, labels), RETURNED.logits.mean(1))
    image = torch.randn(N, T, V).double()
    assert loss_input(tensor, epk.MeanSquaredError(), RETURNED.logits, image) is RETURNED.logits
    assert loss_input(OUTPUT, epk.PerSampleLoss(lambda r, y: r), RETURNED, y) is RETURNED
    z = torch.randn(N, 1).double()
    assert loss_input(ONE_TENSOR, epk.PerSampleLoss(lambda r, y: r), z, y) is z
    assert loss_input(ONE_TENSOR, epk.MeanSquaredError(), z[:, 0], z[:, 0]).shape == (N, 1)


def test_only_a_loss_of_the_outputs_takes_outputs():
    labels = torch.randint(0, V, (N,))
    assert own_input(epk.CrossEntropy(), RETURNED, labels) is None
    assert own_input(epk.CrossEntropy(), RETURNED, tokens()) is not None
    assert own_input(epk.PerSampleLoss(lambda r, y: r), RETURNED, labels) is not None


def shifted(returned: ModelOutput, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token, without padding: a user's own function of a whole batch."""
    return F.cross_entropy(returned.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_mean_over_what_counts_is_the_users_mean():
    y = tokens()
    loss = epk.PerSampleLoss(shifted, counts=lambda ids: (ids[:, 1:] != -100).sum(1))
    value = sample_weights(loss, y) @ loss_terms(OUTPUT, loss, RETURNED, y)
    assert_close(value, shifted(RETURNED, y))
    validate_loss_row_independence(loss, RETURNED, y)
    uneven = torch.where(torch.arange(N)[:, None] > torch.arange(T) + 2, -100, torch.ones_like(y))
    uneven[:, 1] = 1
    with pytest.raises(ValueError, match="must be the mean of the samples' losses"):
        validate_loss_row_independence(epk.PerSampleLoss(shifted), RETURNED, uneven)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (lambda y: y[:2, 0], r"one number per sample, shape \(6,\): got shape \(2,\)"),
        (lambda y: 3, "one number per sample, .*: got int"),
        (lambda y: -y[:, 0].double(), "finite numbers >= 0"),
        (lambda y: 0 * y[:, 0], "a batch must hold a sample that counts"),
    ],
    ids=["two", "number", "negative", "nothing"],
)
def test_counts_must_be_numbers_of_samples(counts, message):
    with pytest.raises(ValueError, match=message):
        sample_weights(epk.PerSampleLoss(shifted, counts=counts), torch.ones(N, T, dtype=torch.int64))


@dataclass
class Nested:
    """A tensor inside a tuple inside a data class."""

    parts: tuple
    loss: Tensor
    name: str = "x"


@dataclass
class Mapped(OrderedDict):
    """A data class that is a dictionary of its fields that are not None, as Hugging Face's outputs are."""

    logits: Tensor
    loss: Tensor | None = None

    def __post_init__(self):
        self.update((name, value) for name, value in vars(self).items() if value is not None)


def test_rows_are_taken_from_every_structure():
    z = torch.arange(12.0).view(6, 2)
    nested = Nested((z, [z + 1], {"a": z + 2}), torch.tensor(3.0))
    row = select_rows(nested, slice(1, 2), 6)
    assert isinstance(row, Nested)
    assert [tuple(part.shape) for part in tensors_of(row)] == [(1, 2), (1, 2), (1, 2), ()]
    assert torch.equal(row.parts[2]["a"], z[1:2] + 2)
    assert row.name == "x"
    pair = select_rows(namedtuple("Pair", "a b")(z, 3), slice(0, 2), 6)
    assert (pair.a.shape, pair.b) == ((2, 2), 3)
    mapped = select_rows(Mapped(torch.arange(6.0)), slice(2, 4), 6)
    assert isinstance(mapped, Mapped)
    assert mapped.logits.tolist() == mapped["logits"].tolist() == [2.0, 3.0]
    assert mapped.loss is None


WRONG_TARGETS = {
    "other_positions": (
        epk.CrossEntropy(),
        torch.zeros(N, T + 1).long(),
        r"labels must have shape \(6, 3\), or \(6, 4\) where classes are last: got \(6, 5\)",
    ),
    "labels_too_high": (epk.CrossEntropy(), torch.full((N, T), 3), r"labels must lie in 0\.\.2 .*: got 3\.\.3"),
    "all_padding": (epk.CrossEntropy(), torch.full((N, T), -100), "at least one sample must not be ignored"),
    "class_weights": (
        epk.CrossEntropy(class_weights=(1.0, 2.0)),
        torch.zeros(N, T).long(),
        "one class weight per output: got 2 for 3",
    ),
    "image": (epk.MeanSquaredError(), torch.zeros(N, T), r"targets of the outputs' shape \(6, 4, 3\): got \(6, 4\)"),
}


@pytest.mark.parametrize(("loss", "y", "message"), WRONG_TARGETS.values(), ids=WRONG_TARGETS.keys())
def test_targets_of_positions_are_checked(loss, y, message):
    with pytest.raises(ValueError, match=message):
        validate_targets(loss, y, N, V, (T, V))


def test_scores_of_tokens_must_be_log_probabilities_for_the_likelihood():
    validate_output_scale(NegativeLogLikelihood(), RETURNED.logits.log_softmax(2), tokens())
    with pytest.raises(ValueError, match="needs outputs that are log-probabilities"):
        validate_output_scale(NegativeLogLikelihood(), RETURNED.logits, tokens())
