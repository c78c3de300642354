"""Runs of format 1 that later releases must read, and what the release that recorded them computed from them.

    python tests/data/format1/make.py

It writes a folder with the version's name, once: a folder that is there is never made anew, because a run that is
recorded again proves nothing about the one that somebody has. A release whose recorder writes something new adds a
folder of its own. `tests/storage/test_committed_runs.py` opens all of them, with this file's networks and questions.
"""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk

HERE = Path(__file__).parent
WORDS = 11


class LanguageModel(nn.Module):
    """A GRU that predicts each next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(WORDS, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.gru(self.embedding(tokens))[0])


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def regularized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "momentum": lambda: layers().double(),
    "momentum_float32": layers,
    "dropout": lambda: regularized().double(),
    "words": lambda: LanguageModel().double(),
}
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "momentum_float32": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dropout": lambda p: torch.optim.AdamW(p, lr=0.02),
    "words": lambda p: torch.optim.Adam(p, lr=0.02),  # every third state is kept
}
OUTPUTS: dict[str, Callable[[Tensor], Tensor]] = {"words": lambda returned: returned[:, -1]}


def points(name: str, count: int, seed: int) -> Tensor:
    """Inputs, of the training or of the questions."""
    generator = torch.Generator().manual_seed(seed)
    if name == "words":
        return torch.randint(1, WORDS, (count, 5), generator=generator)
    return torch.randn(count, 4, generator=generator).to(next(NETWORKS[name]().parameters()).dtype)


def training_data(name: str) -> tuple[Tensor, Tensor]:
    """Twelve points and their targets; another processor may draw others, so that only `main` asks for them."""
    X, y = points(name, 12, seed=2), torch.arange(12) % 3
    if name == "words":
        mask = torch.arange(5) < 3 + y[:, None]  # sentences of three to five words
        X, y = X * mask, epk.next_words(X, mask)
    return X, y


def record(name: str, folder: Path, X: Tensor, y: Tensor, steps: int = 7) -> epk.Trajectory:
    """Steps on batches of four of twelve points, those that the folder does not hold yet."""
    torch.manual_seed(1)
    net = NETWORKS[name]()
    optimizer, storage = OPTIMIZERS[name](net.parameters()), epk.Storage(keep_every=3 if name == "words" else 1)
    loss = epk.CrossEntropy(ignore_index=-100) if name == "words" else epk.CrossEntropy()
    chosen = {"loss": loss, "output": OUTPUTS.get(name), "storage": storage}
    with epk.Recorder(net, optimizer, X, y, folder=folder, resume=True, **chosen) as recorder:
        for step in recorder.until(steps):
            rows = (torch.arange(4) * 2 + step * 5) % 12
            optimizer.zero_grad()
            F.cross_entropy(net(X[rows]).flatten(0, -2), y[rows].flatten()).backward()
            recorder.batch(rows)
            optimizer.step()
    return recorder.trajectory


def numbers(run: epk.Trajectory, X: Tensor) -> dict[str, Tensor]:
    """What is computed from a run: two predictions, split over the training points, influence, and the kernel."""
    classes = torch.tensor([1, 2])
    parts = epk.attribute(run, X, classes=classes)
    both = epk.Points(torch.cat([X, run.inputs[:2]]), torch.tensor([False, False, True, True]))
    return {
        "weights": run.states[run.num_steps],
        "initial": parts.initial,
        "samples": parts.samples,
        "decay": parts.decay,
        "statistics": parts.statistics,
        "total": parts.total,
        "certified": torch.tensor(parts.certified),
        "influence": epk.influence(run, X, classes=classes).values,
        "kernel": epk.gram_block(run, both, both).diagonal(dim1=1, dim2=3),
    }


def conditioning(run: epk.Trajectory, X: Tensor) -> dict[str, float]:
    """How far each number moves, of its largest, where all weights of all states move by one eps."""
    expected, moved = numbers(run, X), dict[str, float]()
    states = torch.stack([run.states[step] for step in range(run.num_steps + 1)])
    for seed in range(3):
        signs = 1 - 2 * torch.randint(2, states.shape, generator=torch.Generator().manual_seed(seed)).to(states)
        with warnings.catch_warnings(action="ignore", category=epk.CertificateWarning):  # such steps are no rule's
            near = numbers(replace(run, states=states * (1 + torch.finfo(states.dtype).eps * signs)), X)
        for name, value in expected.items():
            change = (near[name].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-99)
            moved[name] = max(moved.get(name, 0.0), float(change))
    return {name: float(f"{value:.1e}") for name, value in moved.items() if name != "certified"}


def main() -> None:
    """Record the runs of this version and compute from them."""
    version = HERE / epk.__version__.partition(".dev")[0]
    version.mkdir()
    for name, make in NETWORKS.items():
        record(name, version / name, *training_data(name))
        run = epk.load_trajectory(version / name, make(), output=OUTPUTS.get(name))
        questions = points(name, 2, seed=3)
        found = {"questions": questions, **numbers(run, questions)}
        save_file({key: value.contiguous() for key, value in found.items()}, version / f"{name}.safetensors")
        noted = {"digest": run.digest, "data_digest": run.data_digest, "conditioning": conditioning(run, questions)}
        (version / f"{name}.json").write_text(json.dumps(noted, indent=1) + "\n")


if __name__ == "__main__":
    main()
