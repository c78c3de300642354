"""Small runs of every kind that a report must hold, and reports read back from their files."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import epk_gp as epk


def _run(net: nn.Module, X, y, *, dtype=torch.float64, loss=None, steps=9, lr=0.3, batch_size=None, **options):
    net = net.to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, **options)
    return epk.train(
        net,
        X.to(dtype) if X.is_floating_point() else X,
        y,
        optimizer=optimizer,
        steps=steps,
        loss=epk.CrossEntropy() if loss is None else loss,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(0),
    )


def _mlp(outputs=3):
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, outputs))


def _cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def _norm():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


class Words(nn.Module):
    """Embedded words, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)).mean(dim=1))


@functools.cache
def report_case(name: str):
    """Return a run, points, and their labels or targets."""
    torch.manual_seed(0)
    rows, points = torch.randn(12, 5, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    labels, true = torch.arange(12) % 3, torch.arange(8) % 3
    if name == "gradient_descent":
        return _run(_mlp(), rows, labels), points, true
    if name == "momentum":
        return _run(_mlp(), rows, labels, batch_size=4, momentum=0.8, weight_decay=0.01), points, true
    if name == "regression":
        y, targets = rows[:, :2].sin(), points[:, :2].sin()
        return _run(_mlp(2), rows, y, loss=epk.MeanSquaredError(), batch_size=4), points, targets
    if name == "images":
        X, test = torch.rand(12, 1, 6, 6, dtype=torch.float64), torch.rand(8, 1, 6, 6, dtype=torch.float64)
        return _run(_cnn(), X, labels, batch_size=6), test, true
    if name == "float32":
        return _run(_mlp(), rows, labels, dtype=torch.float32, batch_size=4), points.float(), true
    if name == "batch_norm":
        return _run(_norm(), rows, labels, batch_size=4), points, true
    if name == "words":
        X, test = torch.randint(9, (12, 4)), torch.randint(9, (8, 4))
        return _run(Words(), X, labels, batch_size=4), test, true
    if name == "one_step":
        return _run(_mlp(), rows, labels, steps=1), points, true
    raise KeyError(name)


CASES = ("momentum", "gradient_descent", "regression", "images", "float32", "batch_norm", "words", "one_step")


def written(folder: Path, trajectory: Any, X: Any, y: Any = None, **arguments: Any) -> dict[str, Any]:
    """Write a report without a kernel matrix, unless it is asked for, and return its content."""
    file = epk.write_report(folder / "report.html", trajectory, X, y, **{"kernel_points": 0} | arguments)
    return embedded(file)


def embedded(file: Path) -> dict[str, Any]:
    """Return the content of a report."""
    text = re.search(r'<script type="application/json" id="content">(.*?)</script>', file.read_text(), re.DOTALL)
    assert text is not None
    content: dict[str, Any] = json.loads(text[1])
    return content


def terms_of(view: dict[str, Any]) -> int:
    """Return the sum of the terms of a view, whole numbers all of them."""
    named = sum(entry[1] for side in ("raised", "lowered") for entry in view[side])
    rest = view["rest_raised"][1] + view["rest_lowered"][1]
    return named + rest + sum(view[name] for name in ("decay", "statistics", "unexplained", "rounding"))
