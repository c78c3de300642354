"""Language models: what exact contributions of a hundred questions cost, and what they say of training again.

Usage: python benchmarks/language_models.py retrained FOLDER  (an hour; the networks of `lds`, which are kept there)
       python benchmarks/language_models.py lds FOLDER
"""

import gzip
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from recorded_networks import GPT
from torch import Tensor
from torch.nn import functional as F

import epk_gp as epk

app = typer.Typer(add_completion=False)
RUNS_AT_ONCE = 10


@dataclass(frozen=True)
class Problem:
    """A GPT on letters of tinyshakespeare, and how it is trained.

    Attributes:
        blocks: Blocks of width 128.
        length: Letters of a text, T.
        texts: Training texts, M.
        batch_size: Texts of a step, B.
        steps: Steps of AdamW.
        dtype: Of the weights.
    """

    blocks: int = 4
    length: int = 64
    texts: int = 1000
    batch_size: int = 16
    steps: int = 300
    dtype: torch.dtype = torch.float64

    def text(self) -> tuple[Tensor, int]:
        """Return the letters of the text as numbers, and how many different ones there are."""
        file = Path(os.environ.get("EPK_GP_DATA", "")) / "text" / "tinyshakespeare.txt.gz"
        if not file.is_file():
            raise FileNotFoundError("EPK_GP_DATA must name the folder that holds text/tinyshakespeare.txt.gz")
        text = gzip.decompress(file.read_bytes()).decode()
        letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
        return torch.tensor([letters[letter] for letter in text]), len(letters)

    def record(self, *, folder: Path | None = None, **options: object) -> epk.Trajectory:
        """Train with dropout, and record it."""
        tokens, letters = self.text()
        M, T = self.texts, self.length
        X, Y = tokens[: M * T].view(M, T), tokens[1 : M * T + 1].view(M, T)
        torch.manual_seed(0)
        net = GPT(letters, T, blocks=self.blocks).to(self.dtype)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))
        epochs = math.ceil(self.steps * self.batch_size / M)
        order = torch.cat([torch.randperm(M) for _ in range(epochs)])[: self.steps * self.batch_size]
        with epk.Recorder(net, optimizer, X, Y, output=lambda z: z[:, :, -1], folder=folder, **options) as recorder:
            net.train()
            for batch in order.view(self.steps, self.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(net(X[batch]), Y[batch]).backward()
                recorder.batch(batch)
                optimizer.step()
        return recorder.trajectory

    def questions(self, count: int) -> tuple[Tensor, Tensor]:
        """Return texts that were not trained on, and the letters that follow each of their letters, (count, T)."""
        tokens, _ = self.text()
        starts = torch.linspace(self.texts * self.length + 1, len(tokens) - self.length - 1, count).long()
        windows = starts[:, None] + torch.arange(self.length)
        return tokens[windows], tokens[windows + 1]


LDS = Problem(blocks=5, length=32, texts=200, batch_size=8, steps=150)  # 1.0 million weights


def subsets(kind: str, count: int) -> Tensor:
    """Return the weights of the texts of each training: 0 of those that are left out."""
    generator = torch.Generator().manual_seed(1)
    left_out = {"tenth": LDS.texts // 10, "half": LDS.texts // 2}[kind]
    weights = torch.ones(count, LDS.texts, dtype=torch.float64)
    for row in weights:
        row[torch.randperm(LDS.texts, generator=generator)[:left_out]] = 0
    return weights


@app.command()
def retrained(folder: Path, kind: str = "tenth", count: int = 60) -> None:
    """Train without a tenth or a half of the texts, and keep the weights at the end in a folder."""
    run, weights = LDS.record(), subsets(kind, count)
    for number, rows in enumerate(weights.split(RUNS_AT_ONCE)):
        file, begun = folder / f"{kind}-{number}.pt", time.thread_time()
        if not file.is_file():
            found = epk.retrain(run, rows, memory_budget=5 << 29)
            torch.save({"weights": rows, "states": found.states, "difference": found.difference_ratio}, file)
            typer.echo(f"{file.name}: {time.thread_time() - begun:.0f} s, {found.difference_ratio:.1e}")


if __name__ == "__main__":
    app()
