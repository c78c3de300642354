"""Small runs of every kind that a report must hold, and reports read back from their files."""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.analysis.maps import coordinate_plane, uncertainty_on_plane


def _run(net: nn.Module, X, y, *, loss=None, steps=9, batch_size=None, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, **options)
    loss, generator = loss or epk.CrossEntropy(), torch.Generator().manual_seed(0)
    return epk.train(net, X, y, optimizer=optimizer, steps=steps, loss=loss, batch_size=batch_size, generator=generator)


def _mlp(outputs=3):
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)).mean(dim=1))


class Letters(nn.Module):
    """A language model of letters: one block of causal attention."""

    def __init__(self, vocabulary, length, dim=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.norm, self.attention = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        q, k, v = (part[:, None] for part in self.attention(self.norm(h)).chunk(3, dim=2))
        return self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


ALPHABET = "\n abcdeמה<"  # a line break, a space, letters of both directions, and one that HTML would take for its own


@functools.cache
def letters_run():
    """Return a recorded language model of letters, test texts, and their letters that follow."""
    torch.manual_seed(0)
    text, T = torch.randint(len(ALPHABET), (60,)), 6
    X = text.unfold(0, T + 1, 2)
    x, y, test = X[:, :-1].contiguous(), X[:, 1:].contiguous(), torch.randint(len(ALPHABET), (3, T + 1))
    net = Letters(len(ALPHABET), T).double()

    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    recorder = epk.Recorder(net, optimizer, x, y, output=lambda logits: logits[:, -1])
    with recorder:
        for step in range(4):
            rows = torch.arange(len(x))[step::4]
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]).mT, y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
    return recorder.trajectory, test[:, :-1].contiguous(), test[:, 1:].contiguous()


@functools.cache
def report_case(name: str):
    torch.manual_seed(0)
    rows, points = torch.randn(12, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    labels, true = torch.arange(12) % 3, torch.arange(8) % 3
    if name == "regression":
        y, targets = rows[:, :2].sin(), points[:, :2].sin()
        return _run(_mlp(2), rows, y, loss=epk.MeanSquaredError(), batch_size=4), points, targets
    if name == "images":
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double()
        X, test = torch.rand(12, 1, 6, 6, dtype=torch.float64), torch.rand(8, 1, 6, 6, dtype=torch.float64)
        return _run(net, X, labels, batch_size=6), test, true
    if name == "float32":
        return _run(_mlp().float(), rows.float(), labels, batch_size=4), points.float(), true
    if name == "batch_norm":
        net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        return _run(net, rows, labels, batch_size=4), points, true
    if name == "words":
        X, test = torch.randint(9, (12, 4)), torch.randint(9, (8, 4))
        return _run(Words().double(), X, labels, batch_size=4), test, true
    options = {
        "gradient_descent": {}, "momentum": {"batch_size": 4, "momentum": 0.8, "weight_decay": 0.01},
        "one_step": {"steps": 1},
    }  # fmt: skip
    return _run(_mlp(), rows, labels, **options[name]), points, true


def written(folder: Path, trajectory: Any, X: Any, y: Any = None, **arguments: Any) -> dict[str, Any]:
    """Write a report without a kernel matrix, unless it is asked for, and return its content."""
    file = epk.write_report(folder / "report.html", trajectory, X, y, **{"kernel_points": 0} | arguments)
    return embedded(file)


def report_of_everything(folder: Path) -> dict[str, Any]:
    """Return the content of a report with everything that it can hold: 60 points of the plane, in 14 classes."""
    torch.manual_seed(0)
    y = torch.arange(186) % 14
    angle = 2 * math.pi / 14 * y.double()
    X = 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.3 * torch.randn(186, 2, dtype=torch.float64)
    layers = [nn.Linear(2, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 14)]
    run = _run(nn.Sequential(*layers).double(), X[:98], y[:98], steps=48, batch_size=14, weight_decay=0.01)
    gp = epk.LogitGP(run, points=range(14), rule=epk.gauss_legendre(1))
    with pytest.warns(epk.CertificateWarning, match="training in the path kernel ends"):
        datamodel = epk.datamodel(run, X[126:], y[126:])
    return written(
        folder, run, X[126:], y[126:], explained=60, top=5, rule=epk.adaptive(1e-8), kernel_points=28,
        class_names=[f"class {letter}" for letter in "ABCDEFGHIJKLMN"], outside=9 * X[:20],
        influence=epk.influence(run, X[126:]), datamodel=datamodel,
        suspects=epk.label_errors(run, nodes=4),
        posterior=epk.UncertainClassifier(run, nodes=4).fit(X[98:126], y[98:126]),
        uncertainty_map=uncertainty_on_plane(gp, coordinate_plane(X), size=18, square=True, num_samples=32),
    )  # fmt: skip


def embedded(file: Path) -> dict[str, Any]:
    text = re.search(r'<script type="application/json" id="content">(.*?)</script>', file.read_text(), re.DOTALL)
    assert text is not None
    content: dict[str, Any] = json.loads(text[1])
    return content


def terms_of(view: dict[str, Any]) -> int:
    named = sum(entry[1] for side in ("raised", "lowered") for entry in view[side])
    rest = view["rest_raised"][1] + view["rest_lowered"][1]
    return named + rest + sum(view[name] for name in ("decay", "statistics", "unexplained", "rounding"))
