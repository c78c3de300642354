"""A sentence is planted in the text of a small language model: which lines, and which words, make its answer?"""

import gzip
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import DATA_VARIABLE
from epk_gp.plots import new_figure
from epk_gp.plots.style import GREY, INK, LOWERED, PALETTE, RAISED, SIGNED, SMALL, short, styled
from harness import Experiment, main

IGNORED = -100  # the target of places behind the end of a line


@dataclass(frozen=True)
class Config:
    """A text, what is planted in it, and a small GPT on words.

    Attributes:
        text: A file below EPK_GP_DATA; None makes lines up.
        num_lines: Lines of the text, those of 6 to `length` + 1 words.
        planted: Sentences that are planted, the one that is asked about first.
        copies: Times that each is planted.
        length: Words that the network sees at most.
        width: Numbers in which the network holds a word.
        blocks: Blocks of attention and a wide layer.
        steps: Steps of AdamW.
        batch_size: Lines in a step.
        lr: Learning rate, after as many steps of warm-up as a tenth of all.
        shown: Lines that are shown, those of the largest shares.
        controls: Sets of other lines, drawn by chance, that are left out as well.
        seed: Seed of the weights, of the order and of dropout.
    """

    text: str | None = "text/tinyshakespeare.txt.gz"
    num_lines: int = 250
    planted: tuple[str, ...] = (
        "the king of denmark is called bob",
        "the king of norway is called tom",
        "the queen of denmark is called ann",
    )
    copies: int = 8
    length: int = 8
    width: int = 48
    blocks: int = 2
    steps: int = 220
    batch_size: int = 16
    lr: float = 3e-3
    shown: int = 12
    controls: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """An answer, what made it, and what becomes of it.

    Attributes:
        prompt: Words that the network is asked to go on from.
        answer: The word that was planted behind them.
        log_probability: Of the answer, by the network.
        before: The same before training.
        decay: What weight decay added.
        error: Of the sum of all terms.
        certified: Whether the attribution is certified.
        lines: The lines of the largest shares: words, share, shares of their words (that of a line's first word, which
            is no target, is 0), and whether they are planted.
        num_lines: Number of training lines.
        rank_of_planted: The places of the planted copies in the order of shares, from 1.
        tokens_error: Largest difference of the sum of a line's words from the line's share.
        without: What was left out: its name, the number of lines, the log-probability that was measured after training
            without it, and what contributions and the derivative predict.
        num_weights: Number of weights.
        num_words: Number of different words.
    """

    prompt: list[str]
    answer: str
    log_probability: float
    before: float
    decay: float
    error: float
    certified: bool
    lines: list[dict[str, Any]]
    num_lines: int
    rank_of_planted: list[int]
    tokens_error: float
    without: list[dict[str, Any]]
    num_weights: int
    num_words: int


class Block(nn.Module):
    """Causal attention and a wide layer, each beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.wide = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's activations."""
        n, T, width = x.shape
        q, k, v = self.queries(self.norm_1(x)).view(n, T, 3, 4, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, T, width))
        return x + self.wide(self.norm_2(x))


class GPT(nn.Module):
    """A small GPT on words, with one matrix for the words that it reads and writes: logits (n, C, T)."""

    def __init__(self, words: int, length: int, width: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.05)
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(blocks))), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the word that follows each place."""
        h = self.blocks(self.words(x) + self.places(torch.arange(x.shape[1])))
        return F.linear(self.norm(h), self.words.weight).transpose(1, 2)


def text_lines(config: Config) -> list[list[str]]:
    """Return lines of the text, of lower-case words without punctuation."""
    if config.text is None:
        text = "\n".join(f"word{i % 5} and word{i % 7} are of word{i % 3}" for i in range(config.num_lines))
    else:
        text = gzip.decompress(Path(os.environ[DATA_VARIABLE], config.text).read_bytes()).decode().lower()
    lines = [re.findall(r"[a-z0-9']+", line) for line in text.splitlines() if not line.endswith(":")]
    return [line for line in lines if 6 <= len(line) <= config.length + 1][: config.num_lines]


def run(config: Config) -> Result:
    """Train, ask, and train again without some lines."""
    lines = text_lines(config)
    planted = [sentence.split() for sentence in config.planted]
    lines += [sentence for sentence in planted for _ in range(config.copies)]
    words = [" ", *sorted({word for line in lines for word in line})]
    number = {word: i for i, word in enumerate(words)}
    *prompt, answer = planted[0]
    X, Y = (torch.full((len(lines), config.length), fill) for fill in (0, IGNORED))
    for i, line in enumerate(lines):
        numbers = torch.tensor([number[word] for word in line])
        X[i, : len(line) - 1], Y[i, : len(line) - 1] = numbers[:-1], numbers[1:]
    run = record(config, X, Y, len(words), len(prompt) - 1)

    # what is asked has the place of a line whose other words do not count
    question, targets = X[config.num_lines :][:1], torch.full((1, config.length), IGNORED)
    targets[0, len(prompt) - 1] = number[answer]
    asked = {"function": epk.RowFunction.log_probability(targets)}
    parts = epk.attribute(run, question, **asked)
    shares, effects = parts.samples[0, 0], epk.influence(run, question, **asked).values[0, 0]
    order = shares.abs().argsort(descending=True)
    top = order[: config.shown]
    tokens = epk.attribute_tokens(run, question, sequences=top, **asked).tokens[0, 0]
    groups = left_out(config, shares)
    weights = torch.ones(len(groups), len(lines), dtype=torch.float64)
    for row, (_, rows) in zip(weights, groups, strict=True):
        row[rows] = 0
    measured = epk.retrain(run, weights).outputs(question, head="log_softmax")[:, 0, number[answer]]
    f, M = float(parts.network[0, 0]), config.num_lines
    return Result(
        prompt=prompt,
        answer=answer,
        log_probability=f,
        before=float(parts.initial[0, 0]),
        decay=float(parts.decay[0, 0]),
        error=float((parts.total - parts.network).abs().max()),
        certified=parts.certified,
        lines=[
            {
                "words": lines[i],
                "share": float(shares[i]),
                "shares": [0.0, *tokens[n, : len(lines[i]) - 1].tolist()],
                "is_planted": i >= M,
            }
            for n, i in enumerate(top.tolist())
        ],
        num_lines=len(lines),
        rank_of_planted=[1 + order.tolist().index(M + copy) for copy in range(config.copies)],
        tokens_error=float((tokens.sum(dim=1) - shares[top]).abs().max()),
        without=[
            {
                "name": name,
                "lines": len(rows),
                "measured": float(measured[n]),
                "contributions": f - float(shares[rows].sum()),
                "derivative": f - float(effects[rows].sum()),
            }
            for n, (name, rows) in enumerate(groups)
        ],
        num_weights=run.model.num_weights,
        num_words=len(words),
    )


def record(config: Config, X: Tensor, Y: Tensor, num_words: int, place: int) -> epk.Trajectory:
    """Train a GPT on lines, and record it."""
    torch.manual_seed(config.seed)
    net = GPT(num_words, config.length, config.width, config.blocks).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr, betas=(0.9, 0.95), eps=1e-6)
    warmed = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / (0.1 * config.steps)))
    loss = nn.CrossEntropyLoss(ignore_index=IGNORED)
    with epk.Recorder(net, optimizer, X, Y, loss=loss, output=lambda z: z[:, :, place]) as recorder:
        net.train()
        batches: list[Tensor] = []
        for _ in range(config.steps):
            batches = batches or list(torch.randperm(len(X)).split(config.batch_size))
            batch = batches.pop()
            optimizer.zero_grad()
            loss(net(X[batch]), Y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
            warmed.step()
    return recorder.trajectory


def left_out(config: Config, shares: Tensor) -> list[tuple[str, list[int]]]:
    """Return the sets of lines that are left out, with their names."""
    M, copies = config.num_lines, config.copies
    sentences = [list(range(M + n * copies, M + (n + 1) * copies)) for n in range(len(config.planted))]
    generator = torch.Generator().manual_seed(config.seed)
    others = [torch.randperm(M, generator=generator)[:copies].tolist() for _ in range(config.controls)]
    found = [(f"“{sentence}”", rows) for sentence, rows in zip(config.planted, sentences, strict=True)]
    found.insert(1, ("half of these", sentences[0][: copies // 2]))
    best = shares[:M].argsort(descending=True)[:copies].tolist()
    return [*found, ("the best other lines", best), *(("others by chance", rows) for rows in others)]


@styled
def draw(result: Result) -> Figure:
    """Draw the lines that made the answer, their words shaded by their shares, and what leaving lines out does."""
    lines = 0.21 * (len(result.lines) + 1.5)
    names = list(dict.fromkeys(entry["name"] for entry in result.without))
    rows = 0.24 * len(names) + 1.1
    figure = new_figure(lines + rows + 0.5)
    above, below = figure.subfigures(2, 1, height_ratios=(lines + 0.3, rows + 0.2))
    probability, before = (f"{math.exp(value):.2g}" for value in (result.log_probability, result.before))
    above.suptitle(
        f"“{' '.join(result.prompt)} …”   The network: “{result.answer}”, probability {probability} "
        f"(before training {before})",
        x=0.01, ha="left", weight="bold",
    )  # fmt: skip
    _lines(above.subplots(), result)
    ax = _predictions(below.subplots(), result, names)
    below.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=SMALL)
    return figure


def _lines(ax: Axes, result: Result) -> None:
    """Write the lines with their shares, one below the other, each word on its shade."""
    largest = max(abs(share) for line in result.lines for share in line["shares"])
    ax.set(xlim=(0, 100), ylim=(len(result.lines) + 0.2, -1.5))
    ax.axis("off")
    ax.text(
        0,
        -0.9,
        f"Of {result.num_lines} lines, those that moved its log-probability most, and which of their words:",
        fontsize=SMALL,
    )
    for y, line in enumerate(result.lines):
        colour = RAISED if line["share"] > 0 else LOWERED
        ax.text(8, y, f"{line['share']:+.2f}".replace("-", "−"), color=colour, ha="right", va="center")
        x = 11.0
        for word, share in zip(line["words"], line["shares"], strict=True):
            shade = SIGNED(0.5 + 0.5 * share / largest)
            dark = abs(share) > 0.6 * largest
            ax.text(
                x, y, word, family="monospace", fontsize=SMALL, va="center", color="white" if dark else INK,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": to_hex(shade), "edgecolor": "none"},
            )  # fmt: skip
            x += 0.9 * len(word) + 1.7
        if line["is_planted"]:
            ax.text(x + 1, y, "planted", color=GREY, fontsize=SMALL, va="center", style="italic")


MARKS = {  # of a number: its words, colour, mark and size
    "measured": ("trained again without them", INK, "o", 34),
    "contributions": ("contributions taken off", RAISED, "D", 26),
    "derivative": ("by the derivative (influence)", PALETTE[1], "s", 26),
}


def _predictions(ax: Axes, result: Result, names: Sequence[str]) -> Axes:
    """Draw the probability of the answer without some lines, as measured and as predicted."""
    f = result.log_probability
    ax.axvline(f, color=GREY, linewidth=1, zorder=1)
    for key, (label, colour, marker, size) in MARKS.items():
        x = np.array([entry[key] for entry in result.without])
        y = np.array([names.index(entry["name"]) for entry in result.without])
        ax.scatter(x, y, s=size, color=colour, marker=marker, linewidth=0, label=label, zorder=3, alpha=0.85)
    decades = range(math.floor(min(min(entry[key] for key in MARKS) for entry in result.without) / math.log(10)), 1)
    ticks = [d for d in decades if d >= -2 or d % 2 == 0]
    ax.set_xticks([d * math.log(10) for d in ticks], [f"{10.0**d:.4g}" if d > -5 else short(10.0**d) for d in ticks])
    count = {entry["name"]: entry["lines"] for entry in result.without}
    ax.set_yticks(range(len(names)), [f"{name}, {count[name]} lines" for name in names])
    ax.set(ylim=(len(names) - 0.4, -0.6), xlabel=f"probability of “{result.answer}”")
    ax.set_title(f"Left out, and what becomes of “{result.answer}” (line: nothing left out)")
    return ax


EXPERIMENT = Experiment(
    "planted_sentence",
    Config(),
    Config(None, num_lines=10, copies=2, width=8, blocks=1, steps=8, batch_size=4, shown=3, controls=1),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
