"""Words of token ids, which loss term each of them is, and what a report says of texts."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.report.text import Text, sentences
from epk_gp.report.write import lessen
from report_cases import ALPHABET, letters_run, report_case, written

SENTENCE = "naïve café, 日本 🙂"


def byte_level():
    """Return a tokenizer whose tokens are bytes, of which a character may take four."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: k for k, letter in enumerate(["<pad>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>")
    return tokenizer


def word_pieces():
    """Return a tokenizer of words, of which some go on the one before."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: k for k, word in enumerate(["[UNK]", "[CLS]", "play", "##ing", "the", "game"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


class OnlyDecodes:
    def decode(self, ids):
        return "".join(ALPHABET[k] for k in ids)


def test_words_are_what_each_token_adds_to_the_text():
    run, ids = letters_run()[0], [3, 0, 1, 7]
    by_id = dict(enumerate(ALPHABET))
    for tokenizer in (ALPHABET, list(ALPHABET), by_id, lambda ids: [by_id[k] for k in ids], OnlyDecodes()):
        assert Text(run, tokenizer).words(ids) == [ALPHABET[k] for k in ids]
    assert Text(run, word_pieces()).words([1, 2, 3, 4, 5]) == ["[CLS]", " play", "ing", " the", " game"]
    tokenizer = byte_level()
    encoded = tokenizer.encode(SENTENCE).ids
    words = Text(run, tokenizer).words(encoded)
    assert "".join(words) == SENTENCE
    assert len(words) == len(encoded)
    assert words[2:4] == ["", "ï"]
    assert words[-4:] == ["", "", "", "🙂"]
    assert Text(run, tokenizer).words(encoded[:3])[-1] == "\ufffd"  # a text that ends within a character


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(8, 3), nn.Linear(3, 8)

    def forward(self, input_ids, attention_mask):
        return self.out(self.embed(input_ids) * attention_mask[..., None])


def masked_run():
    ids, mask = torch.tensor([[2, 3, 4, 0, 0], [3, 3, 2, 1, 0]]), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    net = Masked().double()
    optimizer, loss = torch.optim.SGD(net.parameters(), lr=0.1), epk.CrossEntropy()
    inputs, y = {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1])
    return epk.train(net, inputs, y, optimizer=optimizer, loss=loss, steps=1, output=lambda z: z.mean(dim=1))


def test_each_loss_term_is_a_word():
    """Targets that follow their positions, those in their places, masked ones, and padding."""
    run = masked_run()
    text = Text(run, "ABCDEFGH")

    def passage(ids, mask, targets):
        row = run.pack({"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])})[0]
        found = text.passage(row, None if targets is None else torch.tensor(targets))
        return "".join(found.words), found.terms

    assert passage([2, 3, 4, 0, 0], [1, 1, 1, 0, 0], None) == ("CDE", [-1, -1, -1])
    assert passage([0, 0, 2, 3, 4], [0, 0, 1, 1, 1], 3) == ("CDE", [-1, -1, -1])  # a label of the whole
    following = [3, 4, 5, -100, -100]
    assert passage([2, 3, 4, 5, 0], [1, 1, 1, 1, 0], following) == ("CDEF", [-1, 0, 1, 2])
    assert passage([2, 3, 4, 5, 6], [1] * 5, [3, 4, 5, 6, 7]) == ("CDEFGH", [-1, 0, 1, 2, 3, 4])
    assert passage([0, 2, 3, 4, 5], [0, 1, 1, 1, 1], [-100, -100, 4, 5, 6]) == ("CDEFG", [-1, -1, 2, 3, 4])
    assert passage([2, 3, 4, 5, 0], [1, 1, 1, 1, 0], [-100, 3, 4, 5, -100]) == ("CDEF", [-1, 1, 2, 3])
    assert passage([2, 1, 4, 1, 0], [1, 1, 1, 1, 0], [-100, 3, -100, 5, -100]) == ("CDEF", [-1, 1, -1, 3])


def test_a_text_has_as_many_words_as_ids():
    """Of a method `decode`, and not of a function that leaves tokens out."""
    run, ids = letters_run()[0], [3, 0, 1, 7]
    assert Text(run, OnlyDecodes().decode).words(ids) == [ALPHABET[k] for k in ids]
    encoded = byte_level().encode(SENTENCE).ids
    assert Text(run, byte_level().decode).words(encoded) == Text(run, byte_level()).words(encoded)
    for given in ("king of", "four"):  # as long as four ids, or not
        assert len(Text(run, lambda _, given=given: given).words(ids)) == len(ids)
    with pytest.raises(ValueError, match="one text: got 6 strings for 7 ids"):  # with the last target
        Text(run, lambda ids: [ALPHABET[k] for k in ids[1:]])


def test_padding_without_a_mask_is_known_by_the_tokenizer():
    run = letters_run()[0]
    ids, targets = torch.tensor([3, 4, 5, 0, 0, 0]), torch.tensor([4, 5, 0, -100, -100, -100])
    tokenizer = OnlyDecodes()
    assert Text(run, tokenizer).passage(ids, targets).words == [*"bcd", "\n", "\n", "\n"]
    tokenizer.pad_token_id = 0  # which ends a text too, as that of GPT-2
    found = Text(run, tokenizer).passage(ids, targets)
    assert (found.words, found.terms) == ([*"bcd", "\n"], [-1, 0, 1, 2])
    assert Text(run, byte_level()).passage(ids, targets).terms == found.terms


def test_inputs_that_are_no_token_ids_and_tokenizers_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"tokenizer= needs inputs that are token ids, .*\(12, 5\) of torch.float64"):
        Text(report_case("gradient_descent")[0], "abc")
    with pytest.raises(TypeError, match=r"tokenizer must have a method decode\(ids\).* got int"):
        Text(letters_run()[0], 3)


def test_a_report_shows_the_words_of_texts_and_of_the_training_texts(tmp_path):
    run, X, y = letters_run()
    content = written(tmp_path, run, X, y[:, -1], tokenizer=ALPHABET, explained=2, outputs=1, top=3)
    for point, ids in zip(content["points"], X, strict=False):
        assert point["input"]["words"] == [ALPHABET[k] for k in ids.tolist()]
    for index, sample in content["samples"]["shown"].items():
        ids = [*run.inputs[int(index)].tolist(), int(run.targets[int(index), -1])]
        assert sample["words"] == [ALPHABET[k] for k in ids]
    with pytest.raises(ValueError, match="decode makes a text of an input, and tokenizer makes its words"):
        epk.write_report(tmp_path / "b.html", run, X, tokenizer=ALPHABET, decode=str)


def log_probabilities(run, X, targets, state):
    with torch.no_grad():
        z = run.model.returned(run.weights(state), X).log_softmax(dim=2)
    return z.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]


@pytest.mark.parametrize("asked", ["every word", "some words", "the last two", "the next"])
def test_the_changes_of_the_words_that_were_asked_for_add_up_to_the_change_of_their_log_probability(asked, tmp_path):
    run, X, y = letters_run()
    targets, T = y.clone(), y.shape[1]
    if asked != "every word":
        targets[:, : {"some words": 2, "the last two": T - 2, "the next": T - 1}[asked]] = -100
    answers = {"the last two": targets[:, -2:], "the next": targets[:, -1]}.get(asked, targets)
    content = written(tmp_path, run, X, function=epk.RowFunction.log_probability(answers), tokenizer=ALPHABET, top=3)
    assert content["outputs"]["name"] == content["outputs"]["classes"][0] == "log probability"
    assert len(content["points"]) == len(X)  # all of them, where a function is explained
    expected = (log_probabilities(run, X, targets, -1) - log_probabilities(run, X, targets, 0)) * (targets >= 0)
    parts = epk.attribute(run, X, function=epk.RowFunction.log_probability(answers))
    quantum = content["quantum"]
    for n, point in enumerate(content["points"]):
        (explanation,) = point["explanations"].values()
        part = explanation["words"]
        assert sum(filter(None, part["shares"])) + part["rest"] == explanation["network"] - explanation["initial"]
        assert abs(part["rest"]) <= T + 1
        assert point["input"]["words"] == [ALPHABET[k] for k in [*X[n].tolist(), int(y[n, -1])]]
        assert [share is None for share in part["shares"]] == [True, *(targets[n] < 0).tolist()]
        shares = torch.tensor([float(share or 0) for share in part["shares"]], dtype=torch.float64)
        assert float((shares[1:] * quantum - expected[n]).abs().max()) <= quantum
        view = explanation["views"]["*|*"]
        for index, value, _ in view["raised"] + view["lowered"]:
            assert value * quantum == pytest.approx(float(parts.samples[n, 0, index]), abs=1e-9)


def two_numbers(logits):
    return torch.stack([logits[:, -1, 0] - logits[:, -1, 1], logits.square().mean(dim=(1, 2))], dim=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": torch.zeros(3, dtype=torch.int64)}, "y, head and outputs are of the network's outputs"),
        ({"head": "logits"}, "y, head and outputs are of the network's outputs"),
        ({"outputs": "all"}, "y, head and outputs are of the network's outputs"),
        ({"function": lambda z: z.argmax(dim=2)[:, 0]}, "floating-point"),
        ({"class_names": ["a", "b"]}, "class_names must name each of the 1 outputs"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, given, message):
    run, X, y = letters_run()
    with pytest.raises((TypeError, ValueError), match=message):
        epk.write_report(tmp_path / "a.html", run, X, **{"function": epk.RowFunction.log_probability(y)} | given)


def test_sentences_are_those_that_moved_a_number_most():
    run, X, y = letters_run()
    asked = epk.attribute(run, X, function=epk.RowFunction.log_probability(y))
    lines = sentences(asked, run, X, ALPHABET, top=2).splitlines()
    assert len(lines) == 4 * len(X)
    for n in range(len(X)):
        title, ends, *texts = lines[4 * n : 4 * n + 4]
        assert title == f"text {n}: {''.join(ALPHABET[k] for k in X[n].tolist())!r}"
        assert ends == f"  number 0: {asked.initial[n, 0]:.4g} before training, {asked.network[n, 0]:.4g} after"
        for i, line in zip(asked.samples[n, 0].abs().topk(2).indices.tolist(), texts, strict=True):
            ids = [*run.inputs[i].tolist(), int(run.targets[i, -1])]
            text = "".join(ALPHABET[k] for k in ids)
            assert line == f"    {asked.samples[n, 0, i]:+.4g}  #{i}  {text!r}"
    with pytest.raises(ValueError, match="X must be the 3 texts that were asked: got 1"):
        sentences(asked, run, X[:1], ALPHABET)


@pytest.mark.parametrize("asked", ["function", "classes"])
def test_the_words_of_the_named_training_texts_have_the_shares_of_their_loss_terms(asked, tmp_path):
    run, X, y = letters_run()
    what = {"function": two_numbers} if asked == "function" else {"head": "logits"}
    given = what if asked == "function" else what | {"outputs": 2, "y": y[:, -1]}
    content = written(tmp_path, run, X, tokenizer=ALPHABET, explained=2, top=3, **given)
    every = torch.arange(run.num_points)
    assert asked != "function" or content["outputs"]["classes"] == ["two numbers 0", "two numbers 1"]
    expected, quantum = epk.attribute_tokens(run, X[:2], sequences=every, **what).tokens, content["quantum"]
    for n, point in enumerate(content["points"]):
        for k, explanation in point["explanations"].items():
            view = explanation["views"]["*|*"]
            named = {str(index): share for index, share, _ in view["raised"] + view["lowered"]}
            assert explanation["tokens"].keys() == named.keys()
            for index, part in explanation["tokens"].items():
                assert sum(filter(None, part["shares"])) + part["rest"] == named[index]
                assert abs(part["rest"]) <= 30  # each layer and range of steps is rounded
                shares = torch.tensor(part["shares"][1:], dtype=torch.float64) * quantum
                assert part["shares"][0] is None
                assert float((shares - expected[n, int(k), int(index)]).abs().max()) < 1e-10
    less = lessen(content, 1, 3)["points"][0]["explanations"].values()
    assert all(len(explanation["tokens"]) <= 2 for explanation in less)


def test_shares_of_words_that_cannot_be_had_or_are_not_certified_are_said(tmp_path, monkeypatch):
    run, X, y = report_case("words")
    content = written(tmp_path, run, X, y, tokenizer="abcdefghi", explained=1)
    said = dict(content["card"][-1]["rows"])["shares of words"]
    assert said == "left out: the targets are no words of the texts"
    content = written(tmp_path, run, X, function=epk.RowFunction.log_probability(y), tokenizer="abcdefghi", explained=1)
    (explanation,) = content["points"][0]["explanations"].values()
    assert "words" not in explanation  # a class is no word of the text
    assert content["points"][0]["input"]["words"] == ["abcdefghi"[k] for k in X[0].tolist()]
    monkeypatch.setattr("epk_gp.kernel_machine.tokens.relative_rounding", lambda dtype: 0.0)
    run, X, y = letters_run()
    with pytest.warns(epk.CertificateWarning, match="the report is not certified: the terms of a sequence miss its"):
        content = written(
            tmp_path, run, X, tokenizer=ALPHABET, function=epk.RowFunction.log_probability(y), explained=1
        )
    assert not content["certificate"]["certified"]
    assert any("The terms of a sequence miss" in sentence for sentence in content["certificate"]["sentences"])
