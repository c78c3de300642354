"""Loops that announce right or wrong indices of rows that they changed, drawn from a seed, which decides everything.

Right indices must be recorded without a word; wrong ones must be an error, or a finding of the recorded run.
"""

import random
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
import page_code
from epk_gp.datasets import digits

BENCHMARK = page_code.load(Path(__file__).resolve().parents[1] / "benchmarks" / "row_identity.py")
CLASSES = 10


class Words(nn.Module):
    """The mean of a sentence's word vectors, and a layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(1002, 6), nn.Linear(6, CLASSES)

    def forward(self, tokens):
        return self.out(torch.tanh(self.embed(tokens).mean(dim=1)))


@cache
def data(kind):
    """Return inputs and labels of one kind."""
    torch.manual_seed(0)
    labels = torch.arange(400) % CLASSES
    if kind == "digits":
        found = digits()
        return found.inputs.reshape(-1, 64)[:600].clone(), found.labels[:600].clone()
    if kind == "images":
        return BENCHMARK.coloured_images(400)[..., ::2, ::2].contiguous().double(), labels
    return (BENCHMARK.table(400).double() if kind == "table" else BENCHMARK.sentences(400)), labels


def scaled(x, X):
    return (x - X.mean(dim=0)) / (X.std(dim=0) + 0.1)


def noisy(size):
    return lambda x, X: scaled(x, X) + size * torch.randn_like(x)


FLOATS = {
    "normalised": scaled,
    "noise .1": noisy(0.1),
    "noise .2": noisy(0.2),
    "noise .3": noisy(0.3),
    "noise .5": noisy(0.5),
    "a fifth left out": lambda x, X: scaled(x, X) * (torch.rand_like(x) > 0.2),
}
IMAGES = FLOATS | {
    "crops and flips": lambda x, X: BENCHMARK.normalised(BENCHMARK.cropped(BENCHMARK.mirrored(x), 2)),
    "colour": lambda x, X: BENCHMARK.normalised(BENCHMARK.jittered(x)),
}
TOKENS = {name: lambda x, X, f=f: f(x) for name, f in (("masked", BENCHMARK.masked), ("moved", BENCHMARK.moved))}
CHANGES = {"digits": FLOATS, "images": IMAGES, "table": FLOATS, "sentences": TOKENS}


def of_some(places, f):
    """Announce, at some places of (steps, passes, rows), what another announcement gives."""
    return lambda b, y: torch.where(places(b), f(b, y), b)


def numbers(b, dim):
    return torch.arange(b.shape[dim]).reshape([-1 if k == dim else 1 for k in range(3)]).expand(b.shape)


def permuted(b, y):
    return torch.randperm(len(y))[b]


def late(b, y):
    return b.roll(1, 0)


def within_class(b, y):
    order = torch.empty_like(y)
    for label in y.unique():
        order[y == label] = (y == label).nonzero()[:, 0].roll(1)
    return order[b]


# From the rows of each pass (steps, passes, rows) and the labels to the indices that are announced.
PATTERNS = {
    "constant": lambda b, y: 0 * b,
    "modulo 2": lambda b, y: b % 2,
    "modulo 3": lambda b, y: b % 3,
    "modulo 7": lambda b, y: b % 7,
    "late by one step": late,
    "every other step late": of_some(lambda b: numbers(b, 0) % 2 == 1, late),
    "every third step late": of_some(lambda b: numbers(b, 0) % 3 == 1, late),
    "second pass with the first one's": lambda b, y: b[:, :1].expand(b.shape) if b.shape[1] > 1 else late(b, y),
    "half of a batch shifted": of_some(lambda b: 2 * numbers(b, 2) >= b.shape[2], lambda b, y: b.roll(1, 2)),
    "halves swapped": lambda b, y: b.roll(b.shape[2] // 2, 2),
    "reversed": lambda b, y: b.flip(2),
    "off by one": lambda b, y: (b + 1) % len(y),
    "permuted": permuted,
    "counted beside a shuffled loader": lambda b, y: torch.arange(b.numel()).reshape(b.shape) % len(y),
    "wrong from the middle on": of_some(lambda b: 2 * numbers(b, 0) >= len(b), permuted),
    "half of the rows at random": of_some(lambda b: torch.rand(b.shape) < 0.5, permuted),
}
# Seen for certain where a loop only normalises.
SUBTLE = {
    "a quarter of the rows at random": of_some(lambda b: torch.rand(b.shape) < 0.25, permuted),
    "a quarter of each batch": of_some(lambda b: 4 * numbers(b, 2) >= 3 * b.shape[2], permuted),
    "permuted within classes": within_class,
}


def draw_case(seed, *, right=None, subtle=False):
    """Draw (kind of data, change of rows, pattern or None, shape of the batches); subtle: one that may not be seen."""
    draw = random.Random(seed)
    kind = draw.choice(list(CHANGES))
    change = draw.choice(list(CHANGES[kind]))
    is_mild = change == "normalised" and kind != "table"
    pattern = draw.choice(list(SUBTLE) if subtle else [*PATTERNS, *SUBTLE] if is_mild else list(PATTERNS))
    is_right = draw.random() < 0.25 if right is None else right
    passes = draw.choice([1, 2])
    return kind, change, None if is_right else pattern, (draw.randint(16, 24), passes, 32 // passes)


def outcome(seed, **drawn):
    """Record a loop: 'right' or 'false alarm' of right indices, 'refused', 'uncertified' or 'silent' of wrong ones."""
    kind, change, pattern, shape = draw_case(seed, **drawn)
    X, y = data(kind)
    torch.manual_seed(seed)
    rows = torch.cat([torch.randperm(len(X)) for _ in range(1 + 24 * 32 // len(X))])[: shape[0] * 32].reshape(shape)
    announced = rows if pattern is None else PATTERNS.get(pattern, SUBTLE.get(pattern))(rows, y)
    net = Words() if kind == "sentences" else nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), CLASSES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            finding = record(net.double(), X, y, rows, announced, CHANGES[kind][change]).identity_finding
        except epk.StepMismatchError as error:
            return ("false alarm" if pattern is None else "refused"), str(error)
    if pattern is None:
        return ("right" if finding is None else "false alarm"), finding
    return ("silent" if finding is None else "uncertified"), finding


def record(net, X, y, rows, announced, change, **options):
    """Train on changed rows, under the announced indices."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:
        for batches, indices in zip(rows, announced, strict=True):
            optimizer.zero_grad()
            for batch, said in zip(batches, indices, strict=True):
                (F.cross_entropy(net(change(X[batch], X)), y[batch]) / len(batches)).backward()
                recorder.batch(said, weight=1 / len(batches))
            optimizer.step()
    return recorder.trajectory


def count_outcomes(count, first=0, **drawn):
    """Count the outcomes of some loops, and describe those that are wrong."""
    counts, wrong = Counter(), []
    for seed in range(first, first + count):
        found, words = outcome(seed, **drawn)
        counts[found] += 1
        if found in ("silent", "false alarm"):
            wrong.append(f"seed {seed}: {found}: {draw_case(seed, **drawn)}: {words}")
    return counts, wrong
