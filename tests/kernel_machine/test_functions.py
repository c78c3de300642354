"""Numbers in place of outputs: what a function makes of that which the network returns."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import epk_gp as epk
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
    "class": (mlp, epk.log_probability(CHOSEN), lambda z: at(log_p(z), CHOSEN)),
    "difference": (mlp, epk.logit_difference(CHOSEN, 1), lambda z: at(z, CHOSEN) - z[:, 1]),
    "loss": (mlp, epk.loss_value(CHOSEN), lambda z: F.cross_entropy(z, CHOSEN, reduction="none")),
    "own": (mlp, lambda z: torch.stack([z.square().sum(1), z[:, 0].sin()], dim=1), None),
    "squares": (mlp, epk.loss_value(torch.ones(3, C), nn.MSELoss()), lambda z: (z - 1).square().mean(dim=1)),
    "next word": (gpt, epk.log_probability(CHOSEN), lambda z: at(log_p(z[:, -1]), CHOSEN)),
    "last words": (gpt, epk.log_probability(WORDS), lambda z: of_words(z).sum(dim=1)),
    "targets": (gpt, epk.log_probability(TARGETS), of_targets),
    "words apart": (gpt, epk.RowFunction(of_words, WORDS), of_words),
    "words untied": (partial(gpt, tied=False), epk.RowFunction(of_words, WORDS), of_words),
    "two words": (gpt, epk.logit_difference(4, OTHERS), lambda z: z[:, -1, 4] - at(z[:, -1], OTHERS)),
    "loss of texts": (gpt, epk.loss_value(TARGETS, nn.CrossEntropyLoss()), lambda z: -of_targets(z)),
    "label": (bert, epk.log_probability(CHOSEN), lambda z: at(log_p(z.logits), CHOSEN)),
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
