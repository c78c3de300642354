"""Grokking from checkpoints alone: a transformer on sums modulo 113, split by its parts and by stretch of training."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import epk_gp as epk
from epk_gp.plots import new_figure
from epk_gp.plots.style import EXACT, GREY, INK, LOWERED, RAISED, SIGNED, SMALL, styled
from harness import Experiment, main
from saved_rows import ROWS_VARIABLE

EXPLAIND = find_spec("explaind") is not None  # an optional peer: pip install explaind, which asks for Python 3.12


@dataclass(frozen=True)
class Config:
    """The network and its training as ExPLAIND's sources have them, and what is asked.

    Attributes:
        modulus: p of a + b mod p. The two other tokens are + and =.
        width: Numbers in which the network holds a token.
        hidden: Units of its wide layer.
        heads: Heads of attention.
        num_train: Pairs that it is trained on, all of them in each step; the others are held out.
        steps: Steps of AdamW.
        every: Steps from one checkpoint to the next.
        lr: Learning rate.
        betas: Of AdamW.
        weight_decay: Of AdamW.
        seed: Seed of the weights and of the choice of pairs.
        shown: Steps of the stretches that are shown, a multiple of `every`.
        stretches: Numbers of stretches with which the network is put together again.
        nodes: Nodes a stretch of ExPLAIND's integral, to compare with.
        asked_pairs: Held-out pairs at which it is put together.
        peer_pairs: Those of them that ExPLAIND's own code is given, on one stretch.
    """

    modulus: int = 113
    width: int = 64
    hidden: int = 512
    heads: int = 4
    num_train: int = 4000
    steps: int = 1800
    every: int = 25
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 4.0
    seed: int = 43
    shown: int = 100
    stretches: tuple[int, ...] = (1, 3, 18)
    nodes: tuple[int, ...] = (10, 100)
    asked_pairs: int = 200
    peer_pairs: int = 8


@dataclass(frozen=True)
class Result:
    """What the network can do along training, what made it, and what it takes to know.

    Attributes:
        curves: At every checkpoint: its step, and accuracy and log-probability of the right sum on both sets of pairs.
        bounds: Checkpoints, as steps, between which the stretches lie.
        shares: By set of pairs and part of the network: what its weights added to the mean log-probability of the right
            sum in each stretch.
        finer: Largest difference of a share at held-out pairs from the sum over both halves of the stretch.
        table: A way to put the network together again a line: the stretches, evaluations a stretch, the accuracy, and
            the largest difference from an output of the network.
        cost: The cost of all outputs a line: seconds a pair and stretch, and the memory that the process took.
        pairs: Numbers of pairs.
        num_weights: Number of weights.
        seconds_training: Seconds of processor time of the training, or none if its checkpoints were there.
        left_out: What could not be measured, and why.
    """

    curves: dict[str, list[float]]
    bounds: list[int]
    shares: dict[str, dict[str, list[float]]]
    finer: float
    table: list[dict[str, Any]]
    cost: list[dict[str, Any]]
    pairs: dict[str, int]
    num_weights: int
    seconds_training: float | None
    left_out: list[str]


class SumNetwork(nn.Module):
    """A token embedding, attention without positions and masks, and a wide layer: log-probabilities of the last place.

    As ExPLAIND's `SingleLayerTransformerClassifier`: queries, keys and values of a head are the same numbers. What it
    computes at the other places nobody reads, so it is left out.
    """

    def __init__(self, tokens: int, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.heads = nn.ModuleList(Head(width, width // heads) for _ in range(heads))
        self.wide, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.unembedding = nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-probabilities of the sum, (n, tokens)."""
        tokens = self.embedding(x) * math.sqrt(self.embedding.embedding_dim)
        h = torch.stack([head(tokens) for head in self.heads]).sum(dim=0)
        h = h + F.relu(self.narrow(F.relu(self.wide(h))))
        return self.unembedding(h).log_softmax(dim=-1)


class Head(nn.Module):
    """A head of attention of the last place to all places."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the head adds at the last place, (n, width)."""
        h = self.encoder(x)
        return self.decoder(F.scaled_dot_product_attention(h[:, -1:], h, h)[:, 0])


@dataclass(frozen=True)
class Sums:
    """All unordered pairs: the network cannot tell a + b from b + a."""

    X: Tensor
    y: Tensor
    train: Tensor
    held_out: Tensor


def sums(config: Config) -> Sums:
    """Make all pairs, and choose those of the training."""
    p = config.modulus
    pairs = torch.combinations(torch.arange(p), with_replacement=True)
    plus, equals = torch.full((2, len(pairs)), p)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(config.seed))
    X = torch.stack([pairs[:, 1], plus, pairs[:, 0], equals + 1], dim=1)
    return Sums(X, pairs.sum(dim=1) % p, order[: config.num_train], order[config.num_train :])


def network(config: Config) -> SumNetwork:
    """Return the network before training."""
    torch.manual_seed(config.seed)
    return SumNetwork(config.modulus + 2, config.width, config.hidden, config.heads)


def checkpoint(folder: Path, step: int) -> Path:
    """Return the file of a checkpoint."""
    return folder / f"step_{step:06d}.safetensors"


def train(config: Config, data: Sums, folder: Path) -> float | None:
    """Train by a plain loop that saves checkpoints; return seconds of processor time, or None if they are there."""
    if checkpoint(folder, config.steps).exists():
        return None
    start, net = time.process_time(), network(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    X, y = data.X[data.train], data.y[data.train]
    for step in range(config.steps + 1):
        if step % config.every == 0:
            save_file(net.state_dict(), checkpoint(folder, step))
        optimizer.zero_grad()
        F.nll_loss(net(X), y).backward()
        optimizer.step()
    return time.process_time() - start


def run(config: Config) -> Result:
    """Train, split what training did, and put the network together again."""
    with _folder() as folder:
        data = sums(config)
        seconds = train(config, data, folder)
        sets = {"training pairs": data.train, "held-out pairs": data.held_out}
        shares, finer = {}, list[float]()
        for name, rows in sets.items():
            asked = config, folder, data.X[rows], data.y[rows]
            parts = split(*asked, config.shown)
            shares[name] = {part: values.tolist() for part, values in parts.items()}
        for part, values in split(*asked, config.shown // 2).items():
            finer.append(float((values.unflatten(0, (-1, 2)).sum(dim=1) - parts[part]).abs().max()))
        table, cost, left_out = together_again(config, folder, data)
        return Result(
            curves=curves(config, folder, data, sets),
            bounds=list(range(0, config.steps + 1, config.shown)),
            shares=shares,
            finer=max(finer),
            table=table,
            cost=cost,
            pairs={name: len(rows) for name, rows in sets.items()},
            num_weights=sum(p.numel() for p in network(config).parameters()),
            seconds_training=seconds,
            left_out=left_out,
        )


@contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder for checkpoints: that of saved rows, where they are found again, or one that goes."""
    if kept := os.environ.get(ROWS_VARIABLE):
        folder = Path(kept) / "grokking"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)


def files_of(config: Config, folder: Path, length: int) -> list[Path]:
    """List checkpoints, so many steps from each other."""
    return [checkpoint(folder, step) for step in range(0, config.steps + 1, length)]


@torch.no_grad()
def curves(config: Config, folder: Path, data: Sums, sets: dict[str, Tensor]) -> dict[str, list[float]]:
    """Evaluate the network at all checkpoints."""
    net, files = network(config), files_of(config, folder, config.every)
    found: dict[str, list[float]] = {"step": [float(config.every * k) for k in range(len(files))]}
    for file in files:
        net.load_state_dict(load_file(file))
        for name, rows in sets.items():
            z, y = net(data.X[rows]), data.y[rows]
            found.setdefault(f"accuracy, {name}", []).append(_share(z.argmax(dim=1) == y))
            found.setdefault(f"log-probability, {name}", []).append(-float(F.nll_loss(z, y)))
    return found


def _share(right: Tensor) -> float:
    return float(right.double().mean())


def split(config: Config, folder: Path, X: Tensor, y: Tensor, length: int) -> dict[str, Tensor]:
    """Return what each part of the network added to the mean log-probability of the right sum, in each stretch."""
    files = [str(file) for file in files_of(config, folder, length)]
    shares = epk.between(network(config), files, X, classes=y).by("module", "stretch", depth=2)
    means = shares.values[:, 0].double().mean(dim=0)
    names = {f"heads.{n}": f"head {n + 1}" for n in range(config.heads)}
    names |= {"wide": "wide layer, in", "narrow": "wide layer, out"}
    return {names.get(module, module): values for module, values in zip(shares.axes[0].names, means, strict=True)}


def outputs_of_midpoints(config: Config, files: list[Path], X: Tensor, nodes: int) -> Tensor:
    """Sum ExPLAIND's integral for all outputs, in float64: midpoints of each stretch, in forward mode."""
    net = network(config).double()

    def outputs(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(net, weights, (X,))

    states = [{name: value.double() for name, value in load_file(file).items()} for file in files]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # torch 2.15 takes a kernel without a forward mode
        total = outputs(states[0])
        for start, end in pairwise(states):
            way = {name: end[name] - start[name] for name in start}
            for node in range(nodes):
                at = {name: start[name] + (node + 0.5) / nodes * way[name] for name in start}
                total += jvp(outputs, (at,), (way,))[1] / nodes
    return total


def outputs_of_explaind(config: Config, files: list[Path], X: Tensor, nodes: int) -> Tensor:
    """Sum ExPLAIND's integral for all outputs by its own code, which takes float32 alone."""
    from explaind.model_paths import ModelPath  # noqa: PLC0415  an optional peer

    states = [load_file(file) for file in files]
    outputs, where = torch.eye(config.modulus + 2), torch.device("cpu")
    path = ModelPath(network(config), device=where, checkpoints=states, output_dim=len(outputs))
    at = [(node + 0.5) / nodes for node in range(nodes)]
    total = path.forward(X, step=0).detach()
    for k, (start, end) in enumerate(pairwise(states)):
        averages = path.gradient_step_integral(X, None, k, k + 1, outputs, at)
        for name, average in averages.items():
            total += average @ (end[name] - start[name]).flatten()
    return total


def outputs_of_between(config: Config, files: list[Path], X: Tensor, nodes: int) -> Tensor:
    """Sum what `epk.between` says, for all outputs."""
    found = epk.between(network(config), [str(file) for file in files], X)
    return found.initial.double() + found.pieces.double().sum(dim=(2, 3))


WAYS: dict[str, Callable[[Config, list[Path], Tensor, int], Tensor]] = {
    "epk.between": outputs_of_between,
    "ExPLAIND": outputs_of_explaind,
}


def together_again(
    config: Config, folder: Path, data: Sums
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Put the network together from its initial outputs and all terms, and measure what that takes."""
    rows = data.held_out[: config.asked_pairs]
    X, y, table, cost = data.X[rows], data.y[rows], [], []
    net = network(config).double()
    net.load_state_dict(load_file(checkpoint(folder, config.steps)))
    with torch.no_grad():
        last = net(X)
    for stretches in config.stretches:
        files = files_of(config, folder, config.steps // stretches)
        z, taken = in_a_process("epk.between", config, files, X, 2)
        cost.append(taken)
        outputs = {("epk.between", 2): z}
        for nodes in config.nodes:
            outputs["ExPLAIND's integral", nodes] = outputs_of_midpoints(config, files, X, nodes)
        for (way, evaluations), z in outputs.items():
            row = {"way": way, "stretches": stretches, "evaluations": evaluations}
            miss = float((z.double() - last).abs().max())
            table.append(row | {"accuracy": _share(z.argmax(dim=1) == y), "miss": miss})
    if not EXPLAIND:
        return table, cost, ["ExPLAIND's own code: explaind is not installed"]
    few, files = X[: config.peer_pairs], files_of(config, folder, config.steps)
    for nodes in config.nodes:
        z, taken = in_a_process("ExPLAIND", config, files, few, nodes)
        difference = float((z - outputs_of_midpoints(config, files, few, nodes)).abs().max())
        cost.append(taken | {"difference": difference})
    return table, cost, []


def in_a_process(
    way: str, config: Config, files: list[Path], X: Tensor, evaluations: int
) -> tuple[Tensor, dict[str, Any]]:
    """Compute all outputs in a process of its own; return them, and what it took."""
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        z, seconds, before, peak = executor.submit(_measured, way, config, files, X, evaluations).result()
    each = seconds / len(X) / (len(files) - 1)
    row = {"way": way, "stretches": len(files) - 1, "evaluations": evaluations, "pairs": len(X)}
    return z, row | {"seconds_each": each, "bytes": peak - before}


def _measured(
    way: str, config: Config, files: list[Path], X: Tensor, evaluations: int
) -> tuple[Tensor, float, int, int]:
    """Return outputs, seconds of processor time, and the memory of this process before and at its peak."""
    torch.set_num_threads(1)
    network(config)(X[:1])  # what is loaded at the first call
    before, start = _bytes("VmRSS"), time.process_time()
    z = WAYS[way](config, files, X, evaluations)
    return z, time.process_time() - start, before, _bytes("VmHWM")


def _bytes(which: str) -> int:
    """Return the memory of this process, as Linux says it; 0 elsewhere."""
    status = Path("/proc/self/status")
    return 1024 * int(status.read_text().split(f"{which}:")[1].split()[0]) if status.exists() else 0


@styled
def draw(result: Result) -> Figure:
    """Draw what the network can do along training, and below what each part added to it in each stretch."""
    figure = new_figure(7.2)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(1.5, 2, 2))
    _curves(axes[0], result)
    for ax, name in zip(axes[1:], result.shares, strict=True):
        _shares(ax, result, name)
    axes[-1].set_xlabel(f"step of training; a column: from one checkpoint to the next, {result.bounds[1]} steps")
    return figure


def _curves(ax: Axes, result: Result) -> None:
    """Draw the accuracy on both sets of pairs, each curve named where it is half way up."""
    steps = np.array(result.curves["step"])
    for name, colour, side in zip(result.shares, (GREY, EXACT), ("left", "right"), strict=True):
        right = 100 * np.array(result.curves[f"accuracy, {name}"])
        ax.plot(steps, right, color=colour, linewidth=2)
        half, shift = steps[np.argmax(right >= 50)], 9 if side == "left" else -14
        words = f"{result.pairs[name]:,} {name}"
        ax.annotate(words, (half, 50), (shift, 0), textcoords="offset points", color=colour, ha=side, va="center")
    ax.set(ylim=(-4, 108), yticks=(0, 50, 100), ylabel="right sums, %", xlim=(0, result.bounds[-1]))
    ax.set_title("Grokking: the network learns the training pairs by heart, and much later the rule", weight="bold")


WORDS = {  # above the shares
    "training pairs": "Training pairs: what each part of the network added to the log-probability of the right sum",
    "held-out pairs": "Held-out pairs: learning by heart lowered it here (orange), before the rule raised it (blue)",
}


def _shares(ax: Axes, result: Result, name: str) -> None:
    """Draw what each part added to the log-probability in each stretch: blue raised it, orange lowered it."""
    values = np.array(list(result.shares[name].values()))
    # the first stretch leaves the random start, and would make all others pale
    size = max(np.abs(np.array(list(shares.values()))[:, 1:]).max() for shares in result.shares.values())
    edges, rows = np.array(result.bounds), np.arange(len(values) + 1)
    middles, below = (edges[1:] + edges[:-1]) / 2, len(values) + 0.65
    ax.pcolormesh(edges, rows, values, cmap=SIGNED, vmin=-size, vmax=size, edgecolor="white", linewidth=0.6)
    for (row, column), value in np.ndenumerate(values):
        _number(ax, middles[column], row + 0.5, value, "white" if abs(value) > 0.6 * size else INK)
    for x, value in zip(middles, values.sum(axis=0), strict=True):
        _number(ax, x, below, value, RAISED if value > 0 else LOWERED, "bold")
    ax.set_yticks([*rows[:-1] + 0.5, below], [*result.shares[name], "all together"], fontsize=SMALL)
    ax.set_ylim(len(values) + 1.1, 0)
    ax.tick_params(axis="both", length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set_title(WORDS[name])


def _number(ax: Axes, x: float, y: float, value: float, colour: str, weight: str = "normal") -> None:
    """Write a number of one digit; nothing where it is zero."""
    if abs(value) >= 0.05:
        text = f"{value:+.1f}".replace("-", "−")
        ax.text(x, y, text, ha="center", va="center", fontsize=SMALL, color=colour, weight=weight)


EXPERIMENT = Experiment(
    "grokking",
    Config(),
    Config(
        modulus=5,
        width=8,
        hidden=8,
        num_train=8,
        steps=8,
        every=1,
        shown=4,
        stretches=(1, 2),
        nodes=(2,),
        peer_pairs=1,
    ),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
