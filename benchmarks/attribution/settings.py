"""The settings of the attribution benchmark: data, network and training, each with a seed of its own."""

import gzip
import itertools
import os
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import nets
import torch
from sklearn.datasets import load_diabetes, make_friedman1
from torch import Tensor, nn

from epk_gp.datasets import digits, mnist_folder

FLIPPED = 0.1  # share of the labels that are wrong where wrong labels are to be found
NUM_SUSPECTED = 100  # samples among which they are to be found: all wrong ones, and right ones
IGNORED = -100  # target of positions that torch's cross-entropy leaves out
Options = dict[str, Any]
DATTRI_MEAN, DATTRI_STD = 0.1307, 0.3081  # dattri normalises MNIST with these


class Data(NamedTuple):
    """Training and test samples.

    Attributes:
        X: Training inputs.
        y: Their targets.
        X_test: Test inputs.
        y_test: Their targets, whose log-likelihoods are explained.
        num_classes: Classes, or letters; 1 of numbers, whose targets are (M, 1).
    """

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor
    num_classes: int


@dataclass(frozen=True)
class Setting:
    """One problem.

    Attributes:
        name: Its name.
        source: "mnist", "fashion-mnist", "kmnist" and "names" (EPK_GP_DATA), "digits" (scikit-learn's), "text" (help
            texts of Python); with numbers as targets "friedman" and "diabetes" (scikit-learn's).
        network: As `nets.build`.
        num_train: Training samples, M.
        num_test: Test samples of the ground truth. Expensive scores explain the first ones alone (`--points`).
        optimizer: "sgd", "adam" or "adamw".
        lr: Learning rate.
        momentum: Momentum of SGD.
        epochs: Passes over the data.
        batch_size: Samples per step.
        small: Whether it is small enough for leave-one-out, wrong labels and brittleness.
        together: Networks that are retrained side by side.
    """

    name: str
    source: str
    network: str
    num_train: int
    num_test: int
    optimizer: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    epochs: int = 20
    batch_size: int = 64
    small: bool = False
    together: int = 10


SETTINGS = [
    # https://github.com/TRAIS-Lab/dattri, dattri/benchmark/datasets/mnist: sizes, optimizers, epochs, dropout
    Setting("MNIST, MLP", "mnist", "mlp", 5000, 500, momentum=0.9, epochs=50),
    Setting("MNIST, logistic regression", "mnist", "logistic", 5000, 500),
    Setting("MNIST, CNN", "mnist", "cnn", 400, 100, "adamw", lr=3e-3, epochs=15, batch_size=50, small=True),
    Setting("text, transformer", "text", "transformer", 300, 60, "adamw", 3e-3, epochs=12, batch_size=30, small=True),
]  # fmt: skip
# The first test samples are explained: an expensive score of a hundred takes hours for networks of many steps or seeds.
NUM_EXPLAINED = {"MNIST, MLP": 100}
NUM_EXPLAINED_ELSEWHERE = 20
TINY = [
    Setting("tiny MLP", "digits", "mlp", 30, 5, momentum=0.9, epochs=2, batch_size=10, small=True),
    Setting("tiny transformer", "text", "transformer", 12, 3, "adamw", epochs=1, batch_size=6, small=True),
]
JUDGED = [  # small enough for exact contributions and derivatives, beside which judged.py sets everybody's scores
    Setting("digits", "mnist", "small", 600, 20, "adamw", lr=2e-3, epochs=8, batch_size=50),
    Setting("names", "names", "transformer", 200, 10, "adamw", lr=3e-3, epochs=6, batch_size=25),
]
TINY_JUDGED = [
    Setting("digits", "digits", "small", 40, 4, "adamw", lr=2e-3, epochs=2, batch_size=10),
]
REGRESSION: Options = {"network": "tanh", "num_train": 400, "epochs": 30, "batch_size": 50, "together": 50}
DATAMODELS = {  # of datamodels.py, each with its number of seeds
    replace(JUDGED[0], num_test=100): 3,
    Setting("Fashion-MNIST", "fashion-mnist", "relu", 600, 100, "adam", lr=1e-3, epochs=10, batch_size=50): 3,
    Setting("KMNIST", "kmnist", "tanh", 600, 100, lr=0.05, momentum=0.9, epochs=10, batch_size=50): 3,
    replace(SETTINGS[2], together=5): 3,
    replace(SETTINGS[2], name="KMNIST, CNN", source="kmnist", together=5): 2,
    Setting("Friedman, AdamW", "friedman", num_test=100, optimizer="adamw", lr=5e-3, **REGRESSION): 1,
    Setting("Friedman, SGD", "friedman", num_test=100, momentum=0.9, **REGRESSION): 1,
    Setting("diabetes, AdamW", "diabetes", num_test=42, optimizer="adamw", lr=5e-3, **REGRESSION): 1,
    Setting("diabetes, SGD", "diabetes", num_test=42, momentum=0.9, **REGRESSION): 1,
    SETTINGS[3]: 3,
    replace(SETTINGS[0], num_test=100): 1,
}
TINY_DATAMODELS = {
    TINY_JUDGED[0]: 2,
    Setting("Friedman, SGD", "friedman", "tanh", 30, 4, momentum=0.9, epochs=3, batch_size=10): 1,
    replace(TINY[1], epochs=4): 1,
}


@dataclass(frozen=True)
class Problem:
    """A setting with a seed; its labels are partly wrong if `flipped`, and then training samples are explained.

    Attributes:
        setting: The setting.
        seed: Seed of initial weights, order of the batches, dropout, subsets and wrong labels.
        flipped: Whether `FLIPPED` of the labels are wrong.
    """

    setting: Setting
    seed: int
    flipped: bool = False

    @property
    def num_explained(self) -> int:
        """Return how many of the first test samples scores explain."""
        return NUM_EXPLAINED.get(self.setting.name, NUM_EXPLAINED_ELSEWHERE)

    @property
    def name(self) -> str:
        """Return a name for rows."""
        return f"{self.setting.name}, seed {self.seed}" + (", wrong labels" if self.flipped else "")

    def generator(self, purpose: int) -> torch.Generator:
        """Return a source of random numbers of its own for each purpose."""
        return torch.Generator().manual_seed(1000 * self.seed + purpose)

    def data(self) -> Data:
        """Return the samples: the same for every seed, as dattri has it."""
        whole = _data(self.setting.source, self.setting.num_train, self.setting.num_test)
        if not self.flipped:
            return whole
        wrong = self.wrong()
        shift = torch.randint(1, whole.num_classes, whole.y.shape, generator=self.generator(1))
        mask = wrong if whole.y.ndim == 1 else wrong[:, None]
        y = torch.where(mask, (whole.y + shift) % whole.num_classes, whole.y)
        suspected = self.suspected()
        return Data(whole.X, y, whole.X[suspected], y[suspected], whole.num_classes)

    def wrong(self) -> Tensor:
        """Return which labels are wrong where some are, (M,) booleans."""
        count = self.setting.num_train
        chosen = torch.randperm(count, generator=self.generator(2))[: round(FLIPPED * count)]
        return torch.zeros(count, dtype=torch.bool).index_fill(0, chosen, True)

    def suspected(self) -> Tensor:
        """Return the samples among which wrong labels are to be found: the wrong ones, then the first right ones."""
        return self.wrong().long().argsort(descending=True, stable=True)[:NUM_SUSPECTED]

    def network(self) -> nn.Module:
        """Return the network with its initial weights."""
        data = self.data()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            return nets.build(self.setting.network, tuple(data.X.shape[1:]), data.num_classes)

    def batches(self) -> list[Tensor]:
        """Return the samples of every step."""
        generator = self.generator(3)
        orders = [torch.randperm(self.setting.num_train, generator=generator) for _ in range(self.setting.epochs)]
        return list(itertools.chain.from_iterable(order.split(self.setting.batch_size) for order in orders))

    def optimizer(self, weights: list[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer; it treats every number by itself, so networks can be trained stacked."""
        s = self.setting
        if s.optimizer == "adamw":
            return torch.optim.AdamW(weights, lr=s.lr, weight_decay=0.01)
        if s.optimizer == "adam":
            return torch.optim.Adam(weights, lr=s.lr)
        return torch.optim.SGD(weights, lr=s.lr, momentum=s.momentum)

    def subsets(self, alpha: float, count: int, *, purpose: int = 4) -> Tensor:
        """Draw subsets that hold a share alpha of the samples: (count, M), zeros and ones."""
        size, generator = self.setting.num_train, self.generator(10 * purpose + round(1000 * alpha))
        kept = [torch.randperm(size, generator=generator)[: round(alpha * size)] for _ in range(count)]
        return torch.stack([torch.zeros(size).index_fill(0, rows, 1.0) for rows in kept])


@cache
def _data(source: str, num_train: int, num_test: int) -> Data:
    if source == "text":
        return _text(num_train, num_test)
    if source == "names":
        return _names(num_train, num_test)
    if source in ("friedman", "diabetes"):
        return _numbers(source, num_train, num_test)
    if source == "digits":
        whole = digits(dtype=torch.float32)
        train, test = whole[:num_train], whole[num_train : num_train + num_test]
    elif source == "kmnist":  # its test part alone is there
        whole = mnist_folder(_folder(source), split="test", dtype=torch.float32)
        train, test = whole[:num_train], whole[num_train : num_train + num_test]
    else:
        read = partial(mnist_folder, _folder(source), dtype=torch.float32)
        train, test = read(split="train")[:num_train], read(split="test")[:num_test]
    X, X_test = ((part.inputs - DATTRI_MEAN) / DATTRI_STD for part in (train, test))
    return Data(X, train.labels, X_test, test.labels, train.num_classes)


def _folder(source: str) -> Path:
    return Path(os.environ["EPK_GP_DATA"]) / source


def _numbers(source: str, num_train: int, num_test: int) -> Data:
    """Return inputs and numbers to be learnt from them, standardised as the training samples say."""
    if source == "friedman":
        both = make_friedman1(num_train + num_test, noise=1.0, random_state=0)
    else:
        both = load_diabetes(return_X_y=True)
        order = torch.randperm(len(both[0]), generator=torch.Generator().manual_seed(0))[: num_train + num_test]
        both = both[0][order], both[1][order]
    X, y = (torch.from_numpy(part).float().reshape(num_train + num_test, -1) for part in both)
    X, y = ((part - part[:num_train].mean(0)) / part[:num_train].std(0) for part in (X, y))
    return Data(X[:num_train], y[:num_train], X[num_train:], y[num_train:], 1)


def _text(num_train: int, num_test: int, length: int = 32) -> Data:
    """Cut the help texts of Python's language into pieces; test samples are the pieces behind the training samples."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics)).lower()
    letters = sorted(set(text[: (num_train + num_test) * length + 1]))
    tokens = torch.tensor([letters.index(letter) for letter in text[: (num_train + num_test) * length + 1]])
    X, y = tokens[:-1].view(-1, length), tokens[1:].view(-1, length)
    return Data(X[:num_train], y[:num_train], X[num_train:], y[num_train:], len(letters))


def _names(num_train: int, num_test: int) -> Data:
    """Return first names in a random order, letter by letter, padded with the letter 0; the loss leaves padding out."""
    with gzip.open(Path(os.environ["EPK_GP_DATA"]) / "text" / "names.txt.gz", "rt") as file:
        names = file.read().split()
    chosen = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[: num_train + num_test]
    rows = [[0, *(ord(letter) - ord("a") + 1 for letter in names[number]), 0] for number in chosen.tolist()]
    length = max(map(len, rows)) - 1
    X = torch.tensor([row[:-1] + [0] * (length + 1 - len(row)) for row in rows])
    y = torch.tensor([row[1:] + [IGNORED] * (length + 1 - len(row)) for row in rows])
    return Data(X[:num_train], y[:num_train], X[num_train:], y[num_train:], 27)
