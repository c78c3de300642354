"""Numbers in place of outputs: what a function makes of that which the network returns."""

import re
from dataclasses import replace
from functools import cache, partial

import graph_runs
import pytest
import torch
from text_shapes import draw_case, outcome
from text_shapes import train as trained_case
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import epk_gp as epk
from epk_gp import RowFunction
from epk_gp.core.losses import UnstatedLoss
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.kernel_machine import attribute
from epk_gp.kernel_machine.attribute import plan_attribution
from epk_gp.kernel_machine.axes import by_layer, by_sample
from epk_gp.kernel_machine.influence_pass import InfluenceWork
from epk_gp.kernel_machine.terms import AttributionWork
from recipes.path_reference import brute_force_terms
from recipes.problem import C, sentences, train, vectors
from recipes.reference import Watched

VOCABULARY, T, IGNORED = 7, 5, -100


class GPT(nn.Module):
    """One block; positions are embedded without rows, and the last layer has the weights of the first."""

    def __init__(self, dim=6, *, tied=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, dim), nn.Embedding(T, dim)
        self.norm, self.qkv, self.drop = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Dropout(0.1)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens):
        h = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        return self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))


def texts(n, seed=1):
    tokens = torch.randint(VOCABULARY, (n, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def watched(net, X, y, X_test, loss_of, **options):
    """Train with AdamW, with the recorder watched from outside."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    watcher = type("Watcher", (Watched,), {"inner_class": epk.Recorder})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epk, "Recorder", watcher)
        return train(net, X, y, X_test, loss_of, optimizer=optimizer, size=4, epochs=2, **options)


@cache
def mlp():
    torch.manual_seed(0)
    net, (X, y) = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, C)).double(), vectors(9)
    return watched(net, X, y, vectors(12)[0][9:], lambda b: F.cross_entropy(net(X[b]), y[b]))


@cache
def gpt(tied=True):
    torch.manual_seed(0)
    net, (X, y) = GPT(tied=tied).double(), texts(8)
    options = {"loss": nn.CrossEntropyLoss(), "output": lambda logits: logits[:, -1]}

    def loss_of(b):
        return F.cross_entropy(net(X[b]).flatten(0, 1), y[b].flatten())

    return watched(net, X, y, texts(3, seed=2)[0], loss_of, **options)


@cache
def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = BertConfig(vocab_size=9, max_position_embeddings=6, num_labels=C, attn_implementation="eager", **sizes)
    net, (tokens, y) = BertForSequenceClassification(config).double(), sentences(11)
    inputs = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
    X, X_test = ({k: v[rows] for k, v in inputs.items()} for rows in (slice(0, 8), slice(8, 11)))
    options = {"output": lambda returned: returned.logits}

    def loss_of(b):
        return F.cross_entropy(net(**{k: v[b] for k, v in X.items()}).logits, y[b])

    return watched(net, X, y[:8], X_test, loss_of, **options)


CHOSEN, OTHERS = torch.tensor([0, 2, 1]), torch.tensor([1, 1, 0])
TARGETS = torch.tensor([[IGNORED, 3, 6, 0, 1], [2, 2, IGNORED, IGNORED, 4], [1, 0, 3, 5, IGNORED]])
WORDS = torch.tensor([[1, 5], [0, 0], [6, 2]])  # two words of each text, at its last two positions


def log_p(z):
    return z.log_softmax(dim=-1)


def of_words(z, words=WORDS):
    """The log-probabilities of two words of a text apart, (n, 2)."""
    return log_p(z)[:, -2:].gather(2, words[..., None])[..., 0]


def of_targets(z):
    counted = TARGETS != IGNORED
    return (log_p(z).gather(2, TARGETS.clamp(min=0)[..., None])[..., 0] * counted).sum(dim=1)


def at(z, classes):
    return z[torch.arange(3), classes]


# A run, what is asked, and the same in plain torch, of what the network returns for all inputs.
CASES = {
    "class": (mlp, RowFunction.log_probability(CHOSEN), lambda z: at(log_p(z), CHOSEN)),
    "difference": (mlp, RowFunction.logit_difference(CHOSEN, 1), lambda z: at(z, CHOSEN) - z[:, 1]),
    "loss": (mlp, RowFunction.loss_value(CHOSEN), lambda z: F.cross_entropy(z, CHOSEN, reduction="none")),
    "own": (mlp, lambda z: torch.stack([z.square().sum(1), z[:, 0].sin()], dim=1), None),
    "squares": (mlp, RowFunction.loss_value(torch.ones(3, C), nn.MSELoss()), lambda z: (z - 1).square().mean(dim=1)),
    "next word": (gpt, RowFunction.log_probability(CHOSEN), lambda z: at(log_p(z[:, -1]), CHOSEN)),
    "last words": (gpt, RowFunction.log_probability(WORDS), lambda z: of_words(z).sum(dim=1)),
    "targets": (gpt, RowFunction.log_probability(TARGETS), of_targets),
    "words apart": (gpt, epk.RowFunction(of_words, WORDS), of_words),
    "words untied": (partial(gpt, tied=False), epk.RowFunction(of_words, WORDS), of_words),
    "two words": (gpt, RowFunction.logit_difference(4, OTHERS), lambda z: z[:, -1, 4] - at(z[:, -1], OTHERS)),
    "loss of texts": (gpt, RowFunction.loss_value(TARGETS, nn.CrossEntropyLoss()), lambda z: -of_targets(z)),
    "label": (bert, RowFunction.log_probability(CHOSEN), lambda z: at(log_p(z.logits), CHOSEN)),
    "own of logits": (bert, lambda z: z.logits[:, :2], None),
}


@pytest.mark.parametrize("name", CASES)
def test_contributions_are_those_of_brute_force(name):
    make, asked, plain = CASES[name]
    result, plain = make(), plain or asked
    found = epk.attribute(result.trajectory, result.X_test, function=asked)
    with torch.no_grad():
        numbers = plain(result.net(**result.X_test) if make is bert else result.net(result.X_test)).reshape(3, -1)
    terms = brute_force_terms(replace(result, output=plain, outputs=numbers))
    assert found.certified
    assert torch.allclose(found.network, numbers, rtol=0, atol=1e-12)
    assert float((found.total - numbers).abs().max()) <= 1e-10
    assert float((found.samples - terms.samples).norm() / terms.samples.norm()) <= 1e-8
    assert float((found.decay - terms.decay).abs().max()) <= 1e-10


def test_the_report_speaks_of_numbers():
    result = gpt()
    found = epk.attribute(result.trajectory, result.X_test, function=epk.RowFunction(of_words, WORDS))
    assert "Attribution of 3 points × 2 numbers to 8 training samples" in str(found)
    assert "number  " in str(found)
    largest = found.samples.abs().sort(dim=2, descending=True).indices
    assert torch.equal(found.top(3), largest[..., :3])
    assert found.top(20).shape == (3, 2, 8)
    with pytest.raises(ValueError, match="k must be"):
        found.top(0)


@pytest.mark.parametrize("path", [epk.chords(every=3), epk.layerwise(), epk.layerwise(every=2)], ids=str)
@pytest.mark.parametrize("name", ["class", "targets", "words apart", "words untied", "label"])
def test_other_paths_end_at_the_same_numbers(name, path):
    make, asked, _ = CASES[name]
    result = make()
    try:
        found = epk.attribute(result.trajectory, result.X_test, function=asked, path=path)
    except ValueError as error:  # what some networks have no averages for, functions do not change
        with pytest.raises(ValueError, match=re.escape(str(error))):
            epk.attribute(result.trajectory, result.X_test, classes=CHOSEN, path=path)
        return
    assert found.certified
    assert found.max_error <= 1e-10


def test_pieces_and_checkpoints_change_nothing(tmp_path, monkeypatch):
    result = gpt()
    run, X = result.trajectory, result.X_test
    asked, options = epk.RowFunction(of_words, WORDS), {"path": epk.chords(every=2)}
    expected = epk.attribute(run, X, function=asked, **options)
    once = epk.attribute(run, X, function=asked, checkpoint=tmp_path / "sums", **options)
    assert torch.equal(once.samples, expected.samples)
    again = epk.attribute(run, X, function=asked, checkpoint=tmp_path / "sums", **options)
    assert torch.equal(again.samples, expected.samples)
    nearly = epk.RowFunction(lambda *given: of_words(*given) * (1 + 1e-8), WORDS)
    for other in (epk.RowFunction(of_words, WORDS.flip(0)), nearly):
        with pytest.raises(ValueError, match="must be of this very computation: it is of another"):
            epk.attribute(run, X, function=other, checkpoint=tmp_path / "sums", **options)
    # points, and numbers of a point, go through the run apart
    monkeypatch.setattr(MemoryPlan, "adjoint_points", lambda _, count: 2 if count == 1 else 0)
    monkeypatch.setattr(attribute, "MAPPED_ADJOINTS", 1)
    apart = epk.attribute(run, X, function=asked, **options)
    assert torch.allclose(apart.samples, expected.samples, rtol=0, atol=1e-12)
    by = [by_sample(run), by_layer(run)]
    split = epk.attribute(run, X, by=by, function=asked, **options)
    assert torch.allclose(split.values.sum(dim=3), expected.samples, rtol=0, atol=1e-10)
    plan = plan_attribution(run, X, function=asked, **options)
    assert plan.pieces == 3


def test_rows_have_their_own_data_in_any_order():
    result = gpt()
    order = torch.tensor([2, 0, 1, 0])
    asked = epk.attribute(result.trajectory, result.X_test, function=RowFunction.log_probability(TARGETS))
    moved = epk.attribute(result.trajectory, result.X_test[order], function=RowFunction.log_probability(TARGETS[order]))
    assert torch.allclose(moved.samples, asked.samples[order], rtol=0, atol=1e-12)
    alone = epk.attribute(result.trajectory, result.X_test[1:2], function=RowFunction.log_probability(TARGETS[1:2]))
    assert torch.allclose(alone.samples, asked.samples[1:2], rtol=0, atol=1e-12)


def test_a_function_of_outputs_is_as_the_outputs_themselves():
    average = averaged_trajectory(mlp().trajectory, averaging_coefficients(mlp().trajectory.num_steps, decay=0.5))
    graph = graph_runs.record(graph_runs.make_net()), torch.tensor([1, 4])
    questions = {"graph": graph, "ragged": ragged_run(), "average": (average, mlp().X_test)}
    for name, (run, X) in questions.items():
        expected = epk.attribute(run, X, head="logits")
        found = epk.attribute(run, X, function=lambda z: z)
        assert found.certified, name
        assert torch.allclose(found.network, expected.network), name
        assert torch.allclose(found.samples, expected.samples, rtol=1e-8, atol=1e-10), name
        if name == "ragged":  # torch has no second derivative of it
            continue
        effect, plain = epk.influence(run, X, function=lambda z: z), epk.influence(run, X, head="logits")
        assert torch.allclose(effect.values, plain.values, rtol=1e-8, atol=1e-10), name


def ragged_run():
    torch.manual_seed(0)
    net, y = nn.EmbeddingBag(9, C).double(), torch.arange(6) % C
    bags = [torch.arange(k % 3 + 1) + k for k in range(6)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    with epk.Recorder(net, optimizer, epk.Ragged(bags, "offsets"), y) as recorder:
        for b in torch.arange(6).split(3):
            lengths = torch.tensor([len(bags[i]) for i in b])
            optimizer.zero_grad()
            F.cross_entropy(net(torch.cat([bags[i] for i in b]), lengths.cumsum(0) - lengths), y[b]).backward()
            recorder.batch(b)
            optimizer.step()
    return recorder.trajectory, epk.Ragged(bags[:2], "offsets")


def test_influence_is_the_slope_of_retraining():
    result = mlp()
    run, X = result.trajectory, result.X_test
    effect = epk.influence(run, X, function=RowFunction.log_probability(CHOSEN))
    assert effect.certified
    assert "on 3 points × 1 number" in str(effect)
    weights = torch.ones(2, run.num_points, dtype=torch.float64)
    weights[:, 4] += torch.tensor([1e-5, -1e-5])
    ends = epk.retrain(run, weights).outputs(X, head="log_softmax")[..., torch.arange(3), CHOSEN]
    assert torch.allclose(effect.values[:, 0, 4], (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-8)


def test_influence_on_a_text_is_that_on_its_logits():
    result = gpt()
    run, X = result.trajectory, result.X_test
    words = epk.influence(run, X, function=RowFunction.log_probability(CHOSEN))
    of_outputs = epk.influence(run, X, classes=CHOSEN, head="log_softmax")
    assert torch.allclose(words.values, of_outputs.values, rtol=1e-8, atol=1e-10)
    texts_apart = epk.influence(run, X, function=RowFunction.log_probability(TARGETS))
    together = epk.influence(run, X, function=lambda z: of_targets(z).sum())
    assert together.values.shape == (1, 1, 8)
    assert torch.allclose(together.values[0, 0], texts_apart.values[:, 0].sum(dim=0), rtol=1e-8, atol=1e-10)


# What is asked of a run of texts, and what is said.
REFUSED = {
    "mixes rows": (lambda z: z[:, -1] - z[:, -1].mean(dim=0), ValueError, "result 0 depends on other rows"),
    "mixes one row": (lambda z: z[:, -1] / z[:, -1].sum(dim=0), ValueError, "result 0 depends on other rows"),
    "is generated": (lambda z: z.argmax(dim=-1), TypeError, "floating-point tensor, which can be differentiated"),
    "is detached": (lambda z: z[:, -1].detach(), ValueError, "must be differentiable in what the network returns"),
    "calls the network": (lambda z: torch.ones(len(z)).double(), ValueError, "must be differentiable in what"),
    "is one number": (lambda z: z.mean(), ValueError, r"to numbers \(3,\) or \(3, K\): got shape \(\)"),
    "is a tensor of rank 3": (lambda z: z, ValueError, r"got shape \(3, 5, 7\)"),
    "fails": (lambda z: z.logits, ValueError, r"Tensor with \(3, 5, 7\), and the data .* it fails: .*logits"),
    "is not finite": (lambda z: (z[:, -1] - 9).log(), ValueError, "must return finite numbers: those of row 0"),
    "is no function": ("log p", TypeError, "function must map what the network returns to numbers"),
    "has other rows": (RowFunction.log_probability(CHOSEN[:2]), ValueError, r"each of the 3 inputs: got shape \(2,\)"),
    "is no word": (RowFunction.log_probability(torch.tensor([0, 7, 1])), ValueError, r"must be in 0..6, .*: got 7"),
    "has too many": (RowFunction.log_probability(torch.ones(3, 6).long()), ValueError, r"answers \(3, 6\) must fit"),
    "has no such logit": (RowFunction.logit_difference(1, 9), ValueError, r"must be in 0..6, .*: got 9"),
    "does not fit": (RowFunction.loss_value(torch.ones(3, 2).long()), ValueError, r"answers \(3, 2\) must fit scores"),
    "leaves a row out": (RowFunction.log_probability(torch.tensor([[1], [-100], [2]])), ValueError, "each row must"),
    "leaves a target out": (RowFunction.loss_value(torch.tensor([1, -100, 2])), ValueError, "each row must have"),
    "is negative": (RowFunction.log_probability(torch.tensor([1, -2, 0])), ValueError, "in 0..6, or -100 .*: got -2"),
    "has no difference": (RowFunction.logit_difference(1, -100), ValueError, "each row must have a class or word"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_is_refused_before_any_work(name, monkeypatch):
    function, error, message = REFUSED[name]
    result = gpt()
    monkeypatch.setattr(AttributionWork, "compute", None)
    monkeypatch.setattr(InfluenceWork, "compute", None)
    for ask in (epk.attribute, *([] if name == "is one number" else [epk.influence])):
        with pytest.raises(error, match=message):
            ask(result.trajectory, result.X_test, function=function)


def test_arguments_of_functions_are_checked():
    run, X, asked = gpt().trajectory, gpt().X_test, RowFunction.log_probability(CHOSEN)
    for call, error, message in (
        (lambda: epk.attribute(run, X, function=asked, head="logits"), ValueError, "must not be given together"),
        (lambda: epk.attribute(run, X, function=asked, classes=CHOSEN), ValueError, "must not be given together"),
        (lambda: epk.influence(run, X, function=asked, head="logits"), ValueError, "must not be given together"),
        (lambda: epk.influence(run, X, function=asked, classes=CHOSEN), ValueError, "must not be given together"),
        (lambda: epk.attribute(run, X[:1], function=lambda z: z / z.sum(0)), ValueError, "got shape"),
        (lambda: epk.attribute(run, X[:1], function=lambda z: z[:, 0] - z[:, 0].mean(0)), ValueError, "on other rows"),
        (lambda: RowFunction.log_probability(TARGETS.double()), TypeError, "answers must be numbers of classes or"),
        (lambda: RowFunction.logit_difference(1.0, 2), TypeError, "classes or words must be numbers"),
        (lambda: RowFunction.loss_value(CHOSEN, UnstatedLoss()), ValueError, "loss_value needs the loss as a function"),
        (lambda: RowFunction.log_probability(CHOSEN, dim=0), ValueError, "dim must be 1 for classes second, -1 for"),
        (lambda: epk.RowFunction(of_words, [1, 2]), TypeError, "data of a function must be"),
    ):
        with pytest.raises(error, match=message):
            call()


# Of them lengths that coincide, prefixes, pixels, checkpoints; the rest is slow.
FEW_SHAPES = (4, 6, 16, 25, 26, 39, 49, 57)


@pytest.mark.parametrize("seed", [*FEW_SHAPES, *(pytest.param(k, marks=pytest.mark.slow) for k in range(60, 120, 2))])
def test_words_are_asked_for_where_the_network_has_them(seed):
    """Against loops over rows and words; where nothing says where they are, `dim` is asked for."""
    case = draw_case(seed)
    found = outcome(case)
    assert found == "right" or (found == "refused" and case.may_be_refused), (found, case)


def test_what_a_loss_leaves_out_is_left_out():
    """The run's padding by default, another one where it is stated, and -100 in any case."""
    case = replace(draw_case(6), inputs="ids", returns="tensor", trained="cross entropy", ignored=0, prefix=0)
    t = trained_case(case)
    X, y = t.X[:2], torch.tensor([[0, 2, -100], [1, 0, 2]])
    z = t.net.scores(X)[:, -3:].log_softmax(dim=-1)
    asked = [RowFunction.log_probability(y), RowFunction.log_probability(y, ignore_index=2)]
    found = [epk.attribute(t.run, X, function=own).network[:, 0] for own in asked]
    assert torch.allclose(found[0], torch.stack([z[0, 1, 2], z[1, 0, 1] + z[1, 2, 2]]))
    assert torch.allclose(found[1], torch.stack([z[0, 0, 0], z[1, 0, 1] + z[1, 1, 0]]))
    whole = y.new_full((2, case.length), 0).index_copy(1, torch.arange(case.length - 3, case.length), y)
    own = epk.attribute(t.run, X, function=RowFunction.loss_value(whole)).network[:, 0]
    assert torch.allclose(own, -found[0])


def test_classes_last_of_as_many_positions_must_be_stated():
    """By the loop's own gradient the recorder says which dimension the loss takes."""
    case = replace(draw_case(4), inputs="ids", words=4, length=4, prefix=0, returns="tensor", trained="cross entropy")
    case = replace(case, is_second=False, states_dim=False, ignored=-100)
    with pytest.raises(ValueError, match=r"loop's loss takes dimension -1. State loss=epk_gp.CrossEntropy\(.*dim=-1"):
        trained_case(case)
    t = trained_case(replace(case, states_dim=True))
    assert t.run.loss.dim == -1
    t = trained_case(replace(case, trained="checkpoints"))
    data = {"data": (t.X, t.y), "lr": 0.1, "output": lambda z: z[:, -1]}
    with pytest.raises(ValueError, match=r"dim must say where scores \(1, 4, 4\) have"):
        epk.between(t.net, t.states, t.X[:1], **data)
    assert epk.between(t.net, t.states, t.X[:1], loss=epk.CrossEntropy(dim=-1), **data).max_error < 1e-10
