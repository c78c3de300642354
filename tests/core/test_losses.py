"""Losses: torch's values of any outputs, their derivatives, the weight of a sample, what a loss takes."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from signatures import ModelOutput
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core import losses
from epk_gp.core.graphs import select_rows, tensors_of
from epk_gp.core.inputs import ONE_TENSOR, Signature
from epk_gp.core.losses import as_loss, per_sample_losses, sample_weights
from epk_gp.recording.causes import validate_output_scale, validate_targets
from helpers import assert_close, refusal
from loops import data, huber, regression_data, soft_data

N, T, V = 6, 4, 3
WEIGHTS = torch.tensor([1.0, 2.0, 0.5]).double()
OF_TORCH = {
    "cross_entropy": (nn.CrossEntropyLoss(), data),
    "cross_entropy_sum": (nn.CrossEntropyLoss(reduction="sum"), data),
    "soft_labels": (nn.CrossEntropyLoss(), soft_data),
    "soft_labels_sum": (nn.CrossEntropyLoss(reduction="sum"), soft_data),
    "squared_error": (nn.MSELoss(), regression_data),
    "squared_error_sum": (nn.MSELoss(reduction="sum"), regression_data),
    "class_weights": (nn.CrossEntropyLoss(WEIGHTS), data),
    "label_smoothing": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), data),
    "smooth_soft_labels": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), soft_data),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), data),
    "likelihood": (nn.NLLLoss(), data),
    "weighted_likelihood": (nn.NLLLoss(WEIGHTS, ignore_index=0), data),
    "absolute_sum": (nn.L1Loss(reduction="sum"), regression_data),
}
LOSSES = {name: (as_loss(loss), loss, make_data) for name, (loss, make_data) in OF_TORCH.items()} | {
    "own": (epk.PerSampleLoss(huber), lambda z, y: huber(z, y).mean(), regression_data),
    "own_sum": (epk.PerSampleLoss(huber, "sum"), lambda z, y: huber(z, y).sum(), regression_data),
    "scalar_function": (epk.PerSampleLoss(F.smooth_l1_loss), nn.SmoothL1Loss(), regression_data),
}


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def pair(request):
    loss, torch_loss, make_data = request.param
    return loss, torch_loss, torch.randn(10, 3, dtype=torch.float64), make_data()[1]


def test_weighted_samples_sum_to_torchs_loss_and_its_gradient(pair):
    loss, torch_loss, z, y = pair
    leaf, c = z.clone().requires_grad_(), sample_weights(loss, y)
    expected = torch_loss(leaf, y)
    expected.backward()
    assert_close(c @ per_sample_losses(loss, z, y), expected.detach())
    with torch.no_grad():  # derivatives need no surrounding gradient mode
        derivatives = losses.loss_derivatives(loss, z, y)
    assert_close(c[:, None] * derivatives, leaf.grad)
    assert not derivatives.requires_grad


def test_a_mean_divides_by_what_counts_in_its_own_batch():
    y, loss = torch.zeros(4, dtype=torch.int64), epk.CrossEntropy(class_weights=(1.0, 3.0), ignore_index=7)
    assert sample_weights(epk.CrossEntropy(), y).tolist() == [0.25] * 4
    assert sample_weights(epk.CrossEntropy("sum"), y).tolist() == [1.0] * 4
    assert sample_weights(loss, torch.tensor([0, 1, 7])).tolist() == [0.25] * 3
    with pytest.raises(ValueError, match="must hold a sample that counts"):
        sample_weights(loss, torch.tensor([7, 7]))


CLASS_LOSSES = {
    "weights_and_smoothing": (epk.CrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.1), data),
    "smoothing_and_ignored": (epk.CrossEntropy(label_smoothing=0.3, ignore_index=2), data),
    "likelihood": (losses.NegativeLogLikelihood(class_weights=(1.0, 2.0, 0.5), ignore_index=0), data),
    "probabilities": (epk.CrossEntropy(), soft_data),
}


@pytest.mark.parametrize(("loss", "make_data"), CLASS_LOSSES.values(), ids=CLASS_LOSSES.keys())
def test_every_class_loss_is_minus_targets_times_log_probabilities(loss, make_data):
    z, (_, y) = torch.randn(10, 3, dtype=torch.float64), make_data()
    f = torch.log_softmax(z, dim=1)
    outputs = f if isinstance(loss, losses.NegativeLogLikelihood) else z
    assert_close(per_sample_losses(loss, outputs, y), -(losses.soft_targets(loss, y, z) * f).sum(dim=1))
    assert losses.soft_targets(loss, y, z.float()).dtype == torch.float32


def test_targets_of_another_float_type_follow_the_outputs():
    z, (_, y) = torch.randn(10, 3), regression_data()
    assert per_sample_losses(epk.MeanSquaredError(), z, y).dtype == torch.float32


def test_an_independent_loss_passes_and_a_coupled_one_does_not():
    z, (_, y) = torch.randn(4, 3, dtype=torch.float64), regression_data()
    losses.validate_loss_row_independence(epk.PerSampleLoss(huber), z, y[:4])
    centred = epk.PerSampleLoss(lambda z, y: huber(z - z.mean(0), y))
    with pytest.raises(ValueError, match="must depend on its own row alone"):
        losses.validate_loss_row_independence(centred, z, y[:4])


def tokens(ignored=-100):
    """Return class numbers of T tokens each; some are padding, in one sample all."""
    y = torch.randint(0, V, (N, T))
    y[torch.rand(N, T) > 0.6] = ignored
    y[0], y[1, 0] = ignored, 2
    return y


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
    "squared": nn.MSELoss(), "squared_sum": nn.MSELoss(reduction="sum"), "absolute": nn.L1Loss(),
    "absolute_sum": nn.L1Loss(reduction="sum"), "huber": nn.HuberLoss(delta=0.3), "smooth": nn.SmoothL1Loss(),
    "binary": nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]).double()),
}  # fmt: skip
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
    assert losses.loss_input(OUTPUT, epk.CrossEntropy(), RETURNED, y) is RETURNED.logits
    assert losses.loss_input(OUTPUT, epk.CrossEntropy(), {"logits": RETURNED.logits}, y) is RETURNED.logits
    assert losses.loss_input(tensor, epk.CrossEntropy(), RETURNED.logits, y) is RETURNED.logits
    assert_close(losses.loss_input(OUTPUT, epk.CrossEntropy(), RETURNED, labels), RETURNED.logits.mean(1))
    image = torch.randn(N, T, V).double()
    assert losses.loss_input(tensor, epk.MeanSquaredError(), RETURNED.logits, image) is RETURNED.logits
    assert losses.loss_input(OUTPUT, epk.PerSampleLoss(lambda r, y: r), RETURNED, y) is RETURNED
    z = torch.randn(N, 1).double()
    assert losses.loss_input(ONE_TENSOR, epk.PerSampleLoss(lambda r, y: r), z, y) is z
    assert losses.loss_input(ONE_TENSOR, epk.MeanSquaredError(), z[:, 0], z[:, 0]).shape == (N, 1)


def shifted(returned: ModelOutput, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token, without padding: a user's own function of a whole batch."""
    return F.cross_entropy(returned.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_mean_over_what_counts_is_the_users_mean():
    y = tokens()
    loss = epk.PerSampleLoss(shifted, counts=lambda ids: (ids[:, 1:] != -100).sum(1))
    value = sample_weights(loss, y) @ losses.loss_terms(OUTPUT, loss, RETURNED, y)
    assert_close(value, shifted(RETURNED, y))
    losses.validate_loss_row_independence(loss, RETURNED, y)
    uneven = torch.where(torch.arange(N)[:, None] > torch.arange(T) + 2, -100, torch.ones_like(y))
    uneven[:, 1] = 1
    with pytest.raises(ValueError, match="must be the mean of the samples' losses"):
        losses.validate_loss_row_independence(epk.PerSampleLoss(shifted), RETURNED, uneven)


def test_counts_must_be_numbers_of_samples():
    for counts, message in (
        (lambda y: y[:2, 0], r"one number per sample, shape \(6,\): got shape \(2,\)"),
        (lambda y: 3, "one number per sample, .*: got int"),
        (lambda y: -y[:, 0].double(), "finite numbers >= 0"),
        (lambda y: 0 * y[:, 0], "a batch must hold a sample that counts"),
    ):
        loss = epk.PerSampleLoss(shifted, counts=counts)
        assert refusal(ValueError, message, sample_weights, loss, torch.ones(N, T, dtype=torch.int64)) is None


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
    r"must have shape \(6, 3\), or \(6, 4\) .*: got \(6, 5\)": (epk.CrossEntropy(), torch.zeros(N, T + 1).long()),
    r"labels must lie in 0\.\.2 .*: got 3\.\.3": (epk.CrossEntropy(), torch.full((N, T), 3)),
    "at least one sample must not be ignored": (epk.CrossEntropy(), torch.full((N, T), -100)),
    "one class weight per output: got 2 for 3": (epk.CrossEntropy("sum", (1.0, 2.0)), torch.zeros(N, T).long()),
    r"targets of the outputs' shape \(6, 4, 3\): got \(6, 4\)": (epk.MeanSquaredError(), torch.zeros(N, T)),
}


def test_targets_of_positions_are_checked():
    for message, (loss, y) in WRONG_TARGETS.items():
        assert refusal(ValueError, message, validate_targets, loss, y, N, V, (T, V)) is None


def test_scores_of_tokens_must_be_log_probabilities_for_the_likelihood():
    validate_output_scale(losses.NegativeLogLikelihood(), RETURNED.logits.log_softmax(2), tokens())
    with pytest.raises(ValueError, match="needs outputs that are log-probabilities"):
        validate_output_scale(losses.NegativeLogLikelihood(), RETURNED.logits, tokens())


def test_the_target_of_a_position_is_the_word_that_follows():
    words = torch.tensor([[5, 6, 7, 8], [0, 0, 3, 4], [3, 4, 0, 0]])
    expected = torch.tensor([[6, 7, 8, -100], [-100, 3, 4, -100], [4, -100, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]])
    assert torch.equal(epk.next_words(words, mask), expected)
    assert torch.equal(epk.next_words(words.masked_fill(mask == 0, -100)), expected)
    assert torch.equal(epk.next_words(words, mask, ignore_index=9), expected.where(expected >= 0, 9))
