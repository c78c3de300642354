"""Words of token ids, which loss term each of them is, and what a report says of texts."""

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.report.text import Text
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
