"""Language models: what exact contributions of many questions cost, and what they say of training again.

Usage: python benchmarks/language_models.py cost gpt-64 --questions 100 --steps 30
       python benchmarks/language_models.py cost lora --questions 200 --steps 10 --every 10
       python benchmarks/language_models.py float32
       python benchmarks/language_models.py retrained FOLDER     (half an hour; what `lds` compares with is kept there)
       python benchmarks/language_models.py lds FOLDER
Each command puts its numbers into language_models.json, from which `make pages` writes the tables of
docs/language_models.md. The texts are below EPK_GP_DATA; `recorded_networks.py` says where the MiniLM is from.
"""

import gzip
import json
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from recorded_networks import GPT, Made, Training, minilm
from scipy.stats import spearmanr
from torch import Tensor
from torch.func import functional_call

import epk_gp as epk

HERE = Path(__file__).parent
IGNORED = -100
RUNS_AT_ONCE = 10
app = typer.Typer(help=__doc__, add_completion=False)


@dataclass(frozen=True)
class Asked:
    """A training, and questions about what it made.

    Attributes:
        training: The training.
        X: Inputs that were not trained on.
        answers: Targets of each, as `epk.RowFunction.log_probability` takes them.
    """

    training: Training
    X: Tensor | Mapping[str, Tensor]
    answers: Tensor

    @property
    def function(self) -> epk.RowFunction:
        """The log-probability of the answers."""
        return epk.RowFunction.log_probability(self.answers)


def gpt(questions: int, *, length: int, blocks: int = 4, texts: int = 1000, batch_size: int = 16) -> Asked:
    """A GPT of width 128 on letters of tinyshakespeare, AdamW, dropout; questions are whole texts."""
    file = Path(os.environ.get("EPK_GP_DATA", "")) / "text" / "tinyshakespeare.txt.gz"
    if not file.is_file():
        raise FileNotFoundError("EPK_GP_DATA must name the folder that holds text/tinyshakespeare.txt.gz")
    text = gzip.decompress(file.read_bytes()).decode()
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])

    def make() -> Made:
        torch.manual_seed(0)
        net = GPT(len(letters), length, blocks=blocks)
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6)

    end = texts * length
    starts = torch.linspace(end + 1, len(tokens) - length - 1, questions).long()[:, None] + torch.arange(length)
    X, Y = tokens[:end].view(texts, length), tokens[1 : end + 1].view(texts, length)
    weights = sum(p.numel() for p in make()[0].parameters()) / 1e6
    name = f"GPT, {weights:.1f} million weights, batches of {batch_size} x {length} letters"
    options = {"output": lambda z: z[:, :, -1]}
    return Asked(Training(name, make, X, Y, batch_size, options=options), tokens[starts], tokens[starts + 1])


def next_letters(questions: int, **sizes: int) -> Asked:
    """Ask for the letter after each text."""
    asked = gpt(questions, **sizes)
    answers = torch.full_like(asked.answers, IGNORED)
    answers[:, -1] = asked.answers[:, -1]
    return replace(asked, answers=answers)


def news(questions: int, *, lora: bool) -> Asked:
    """A MiniLM that learns the classes of news; questions are articles that it does not learn from."""
    training = minilm(lora=lora)
    order = torch.randperm(len(training.y), generator=torch.Generator().manual_seed(0))
    train, asked = order[:-questions], order[-questions:]
    X, y = training.X, training.y
    own = replace(training, X={name: value[train] for name, value in X.items()}, y=y[train])
    return Asked(own, {name: value[asked] for name, value in X.items()}, y[asked])


NETWORKS: dict[str, Callable[[int], Asked]] = {
    "gpt-64": partial(next_letters, length=64),
    "gpt-128": partial(next_letters, length=128, texts=500),
    "lora": partial(news, lora=True),
    "minilm": partial(news, lora=False),
}


def batches(training: Training, steps: int) -> Tensor:
    """Return the rows of each step, (steps, B)."""
    epochs = math.ceil(steps * training.batch_size / len(training.y))
    rows = torch.cat([torch.randperm(len(training.y)) for _ in range(epochs)])
    return rows[: steps * training.batch_size].view(steps, -1)


def record(training: Training, steps: int, dtype: torch.dtype = torch.float64, **options: Any) -> epk.Trajectory:
    """Train with dropout and a warm-up over a fifth of the steps, and record it."""
    made = training.make()
    made[0].to(dtype).train()
    warmed = torch.optim.lr_scheduler.LambdaLR(made[1], lambda s: min(1.0, 5 * (s + 1) / steps))
    with epk.Recorder(*made, training.X, training.y, **training.options, **options) as recorder:
        for batch in batches(training, steps):
            training.step(made, batch, recorder.batch)
            warmed.step()
    return recorder.trajectory


def seconds_of_step(training: Training, steps: int, dtype: torch.dtype = torch.float64) -> float:
    """Return the seconds of processor time of a step of the training, without a recorder."""
    made = training.make()
    made[0].to(dtype).train()
    for number, batch in enumerate(batches(training, 3 + steps)):
        if number == 3:  # the first ones warm up
            begun = time.process_time()
        training.step(made, batch)
    return (time.process_time() - begun) / steps


def peak_bytes() -> int:
    """Return the largest memory of the process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def keep(part: str, numbers: Any, row: str | None = None) -> None:
    """Put numbers into the file of results, as a part or a row of one, and write the table anew."""
    file = HERE / "language_models.json"
    saved = json.loads(file.read_text()) if file.is_file() else {}
    if row is None:
        saved[part] = numbers
    else:
        saved.setdefault(part, {})[row] = numbers
    file.write_text(json.dumps(saved, indent=1) + "\n")
    typer.echo(json.dumps(numbers))


Questions = Annotated[int, typer.Option(help="Questions that are asked together.")]
Steps = Annotated[int, typer.Option(help="Steps of the training; times are in trainings of as many steps.")]


@app.command()
def cost(
    network: str,
    questions: Questions = 100,
    steps: Steps = 30,
    every: Annotated[int, typer.Option(help="Steps of a stretch along which operations are averaged.")] = 1,
    memory: Annotated[float, typer.Option(help="GiB that the attribution may take.")] = 4.0,
) -> None:
    """Measure an attribution of many questions beside the training, in one process."""
    torch.set_num_threads(1)
    asked = NETWORKS[network](questions)
    training = asked.training
    step = seconds_of_step(training, max(4, steps // 2))
    with tempfile.TemporaryDirectory() as folder:
        run = record(training, steps, folder=Path(folder) / "run")
        before, begun = peak_bytes(), time.process_time()
        path, budget = epk.layerwise(every=every), int(memory * 2**30)
        parts = epk.attribute(run, asked.X, function=asked.function, path=path, memory_budget=budget)
        seconds, peak = time.process_time() - begun, peak_bytes()
        step = (step + seconds_of_step(training, max(4, steps // 2))) / 2  # the machine may have become slower
    numbers = {
        "network": training.name,
        "weights": run.model.num_weights,
        "questions": questions,
        "steps": steps,
        "every": every,
        "step_seconds": step,
        "trainings": seconds / (steps * step),
        "error": float((parts.total - parts.network).abs().max()),
        "change": float((parts.network - parts.initial).abs().mean()),
        "unexplained": parts.unexplained_share,
        "certified": parts.certified,
        "bytes_beside": peak - before,
        "bytes_of_adjoints": 16 * questions * run.model.num_weights,
    }
    keep("cost", numbers, f"{network}-{questions}-every-{every}")


@app.command()
def float32(steps: Steps = 60, keep_every: int = 20, questions: Questions = 20) -> None:
    """Record a run in float32 that keeps few states, and attribute it."""
    torch.set_num_threads(1)
    asked = NETWORKS["gpt-64"](questions)
    with tempfile.TemporaryDirectory() as folder:
        storage = epk.Storage(keep_every=keep_every)
        run = record(asked.training, steps, torch.float32, folder=Path(folder) / "run", storage=storage)
        every = record(asked.training, steps, torch.float32)
        parts = epk.attribute(run, asked.X, function=asked.function, path=epk.layerwise())
        differ = sum(int((a != b).sum()) for a, b in zip(run.states, every.states, strict=True))
    numbers = {
        "steps": steps,
        "keep_every": keep_every,
        "weights": run.model.num_weights,
        "weights_that_differ": differ,
        "certified": parts.certified,
        "findings": list(parts.findings),
        "error": float((parts.total - parts.network).abs().max()),
        "change": float((parts.network - parts.initial).abs().mean()),
        "unexplained": float(parts.unexplained.abs().max()),
    }
    keep("float32", numbers)


LDS = {"length": 32, "blocks": 5, "texts": 200, "batch_size": 8}  # a GPT of 1.0 million weights
LDS_STEPS, ASKED = 100, 24
LEFT_OUT = {"tenth": 10, "half": 2}  # the share of texts that are left out is one of so many


def subsets(kind: str, count: int) -> Tensor:
    """Return the weights of the texts of each training: 0 of those that are left out."""
    M, generator = LDS["texts"], torch.Generator().manual_seed(1)
    weights = torch.ones(count, M, dtype=torch.float64)
    for row in weights:
        row[torch.randperm(M, generator=generator)[: M // LEFT_OUT[kind]]] = 0
    return weights


@app.command()
def retrained(folder: Path, kind: str = "tenth", count: int = 60) -> None:
    """Train without a tenth or a half of the texts, and keep the weights at the end in a folder."""
    torch.set_num_threads(1)
    run = record(gpt(1, **LDS).training, LDS_STEPS)
    for number, rows in enumerate(subsets(kind, count).split(RUNS_AT_ONCE)):
        file, begun = folder / f"{kind}-{number}.pt", time.process_time()
        if not file.is_file():
            found = epk.retrain(run, rows, memory_budget=5 << 29)
            torch.save({"weights": rows, "states": found.states, "difference": found.difference_ratio}, file)
            typer.echo(f"{file.name}: {time.process_time() - begun:.0f} s, {found.difference_ratio:.1e}")


@app.command()
def lds(folder: Path, questions: Questions = ASKED) -> None:
    """Compare what was predicted for the trainings in a folder with what they gave, question by question."""
    torch.set_num_threads(1)
    asked = gpt(questions, **LDS)
    X, run, function = asked.X, record(asked.training, LDS_STEPS), asked.function
    numbers: dict[str, Any] = {"questions": questions, "steps": LDS_STEPS, "weights": run.model.num_weights}
    ways: dict[str, Callable[[], Tensor]] = {
        "contributions": lambda: epk.attribute(run, X, function=function, path=epk.layerwise()).samples[:, 0],
        "derivative": lambda: epk.influence(run, X, function=function, memory_budget=1 << 31).values[:, 0],
    }
    scores = {}
    for name, compute in ways.items():
        file = folder / f"{name}.pt"
        if not file.is_file():
            torch.save(compute(), file)
        scores[name] = torch.load(file)
    net = asked.training.make()[0].double().eval()
    for kind in LEFT_OUT:
        kept = [torch.load(kept) for kept in sorted(folder.glob(f"{kind}-*.pt"))]
        if kept:
            weights, states = (torch.cat([part[name] for part in kept]) for name in ("weights", "states"))
            with torch.no_grad():
                returned = [functional_call(net, run.model.unflatten(state), X) for state in states]
            measured = torch.stack([function.function(z, asked.answers) for z in returned])
            found = {name: agreement(weights @ values.T, measured) for name, values in scores.items()}
            numbers[kind] = {"trainings": len(weights), "spread": float(measured.std(dim=0).mean()), **found}
    keep("lds", numbers)


def agreement(predicted: Tensor, measured: Tensor) -> dict[str, Any]:
    """Return the rank correlation over trainings of each question, their mean, and its 95 % interval over questions."""
    found = torch.tensor([spearmanr(a, b)[0] for a, b in zip(predicted.T, measured.T, strict=True)])
    draws = torch.randint(len(found), (10_000, len(found)), generator=torch.Generator().manual_seed(0))
    low, high = found[draws].mean(dim=1).quantile(found.new_tensor([0.025, 0.975])).tolist()
    return {"mean": float(found.mean()), "interval": [low, high], "of_each": [round(r, 3) for r in found.tolist()]}


if __name__ == "__main__":
    app()
