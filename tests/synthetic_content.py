"""Content of a report with made-up numbers that satisfy every invariant, in any size and for any kind of input."""

import base64
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from epk_gp.plots.style import RAISED, WRONG, new_figure, styled
from epk_gp.report.explanations import Terms, all_views, is_margin
from epk_gp.report.overview import svg

QUANTUM = 1e-9
MOST = 40  # explanations that differ
NAMED = 5_000  # training samples with contributions
WORDS = tuple("the film was slow but its end is a joy and nobody in the room could say why".split())  # noqa: SIM905


@dataclass(frozen=True)
class Sizes:
    """How much a report holds; views name `shown` samples of either sign."""

    kind: str = "image"  # or "text", "values" or "position"
    points: int = 6
    classes: int = 4
    explained: int = 2  # classes of each point
    samples: int = 300
    shown: int = 5
    layers: int = 3
    ranges: int = 4
    pairs: bool = True  # views of one layer and one range of steps
    pixels: int = 14


LARGE = Sizes(points=100, classes=10, samples=60_000, shown=10, layers=5, ranges=6, pairs=False, pixels=28)  # images


def image(generator: np.random.Generator, pixels: int) -> str:
    """Return a picture of a stroke, as data."""
    x, y = np.meshgrid(np.linspace(-1, 1, pixels), np.linspace(-1, 1, pixels))
    a, b, c = generator.normal(size=3)
    stroke = np.exp(-(((x - a / 4) ** 2 + (y - b / 4) ** 2 - 0.3 + c * x * y / 4) ** 2) / 0.02)
    buffer = io.BytesIO()
    Image.fromarray((255 * stroke).astype(np.uint8) // 16 * 16).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def made_input(generator: np.random.Generator, sizes: Sizes) -> dict[str, Any]:
    """Return an input of the kind that is asked for."""
    if sizes.kind == "image":
        return {"image": image(generator, sizes.pixels)}
    if sizes.kind == "text":
        return {"text": " ".join(generator.choice(WORDS, size=int(generator.integers(8, 40))))}
    if sizes.kind == "values":
        names = ("age", "hours per week", "capital gain", "years of education", "weight of the sample", "height")
        return {"values": [[name, round(float(generator.normal() * 10), 3)] for name in names]}
    return {"position": generator.uniform(-3, 3, size=2).round(4).tolist()}


def explanation(generator: np.random.Generator, sizes: Sizes, labels: torch.Tensor) -> dict[str, Any]:
    """Return the explanation of one output of one point: terms in quanta, and the package's views of them."""
    M, L, R = len(labels), sizes.layers, sizes.ranges
    initial = round((np.log(1 / sizes.classes) + 0.1 * generator.normal()) / QUANTUM)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.from_numpy(np.rint(generator.normal(size=shape) * scale / QUANTUM).astype(np.int64))

    samples, decay = draw(M, L, R, scale=0.1 / L / R), draw(L, R, scale=0.01)
    statistics, unexplained = draw(R, scale=0.003), draw(L, R, scale=1e-7)
    added = samples.sum(dim=(0, 1)) + decay.sum(dim=0) + statistics + unexplained.sum(dim=0)
    rounding = torch.from_numpy(generator.integers(-3, 4, size=R))
    running = (initial, *(initial + (added + rounding).cumsum(dim=0)).tolist())
    terms = Terms(QUANTUM, samples, decay, statistics, unexplained, running)
    influence = torch.from_numpy(generator.normal(size=M) * 0.03)
    views = all_views(terms, sizes.shown, labels, sizes.classes, influence)
    shown = {key: view for key, view in views.items() if sizes.pairs or is_margin(key)}
    return {"initial": initial, "network": running[-1], "running": list(running), "views": shown}


def point(generator: np.random.Generator, sizes: Sizes, number: int, made: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return one explained test point."""
    logits = generator.normal(size=sizes.classes) * 2
    probabilities = np.round(np.exp(logits) / np.exp(logits).sum(), 6)
    order = np.argsort(-probabilities).tolist()
    label = order[0] if generator.random() < 0.7 else order[1]
    spread = 0.3 * probabilities * (1 - probabilities)
    band = np.round(np.stack([(probabilities - spread).clip(0), (probabilities + spread).clip(max=1)], axis=1), 6)
    return {
        "name": f"test sample {number * 7}",
        "label": label,
        "predicted": order[0],
        "input": made_input(generator, sizes),
        "probabilities": probabilities.tolist(),
        "band": band.tolist(),
        "scores": [
            ["error score", round(1 - float(probabilities.max()), 6), "Probability that the predicted class is wrong."],
            *([name, round(generator.random(), 6), f"The {name}."] for name in ("distance score", "entropy")),
        ],
        "explanations": {str(c): next(made) for c in sorted({*order[: sizes.explained], label})},
    }


@styled
def figure(generator: np.random.Generator) -> Any:
    """Return a small figure with two curves."""
    drawing = new_figure(2.6, 5.2)
    for colour in (RAISED, WRONG):
        drawing.gca().plot(np.sort(generator.random(30)), np.linspace(0, 1, 30), color=colour)
    drawing.gca().set(xlabel="score", ylabel="share of points")
    return drawing


def overview_map(generator: np.random.Generator, sizes: Sizes, samples: list[int]) -> dict[str, Any]:
    """Return a map of the plane."""
    ny, nx, my, mx = 24, 30, 6, 6
    y, x = np.mgrid[-3 : 3 : ny * 1j, -3 : 3 : nx * 1j]
    predicted = np.floor((np.arctan2(y, x) / np.pi + 1) / 2 * sizes.classes * 0.999).astype(int)
    wrong = np.round(np.exp(-np.abs(np.sin(np.arctan2(y, x) * sizes.classes / 2)) * 3) * 0.7, 4)
    return {
        "title": "Predicted class and its probability of being wrong",
        "sentence": "The plane of the two inputs.",
        "extent": [-3, 3, -3, 3], "axes": ["first input", "second input"], "shape": [ny, nx], "coarse": [my, mx],
        "svg": svg(figure(generator)), "area": [0.1, 0.1, 0.9, 0.9],
        "predicted": predicted.reshape(-1).tolist(), "wrong": wrong.reshape(-1).tolist(),
        "behind": [[int(s) for s in generator.choice(samples, size=3, replace=False)] for _ in range(my * mx)],
    }  # fmt: skip


def made_content(sizes: Sizes, *, seed: int = 0) -> dict[str, Any]:
    """Return the content of a report."""
    generator = np.random.default_rng(seed)
    labels = torch.from_numpy(generator.integers(0, sizes.classes, size=min(sizes.samples, NAMED)))
    made = itertools.cycle([explanation(generator, sizes, labels) for _ in range(min(MOST, 3 * sizes.points))])
    points = [point(generator, sizes, number, made) for number in range(sizes.points)]
    explanations = [explanation for point in points for explanation in point["explanations"].values()]
    views = [view for explanation in explanations for view in explanation["views"].values()]
    named = sorted({row[0] for view in views for row in view["raised"] + view["lowered"]})
    shown = {str(sample): {**made_input(generator, sizes), "label": int(labels[sample])} for sample in named}
    right = sum(point["label"] == point["predicted"] for point in points)
    return {
        "version": 1, "title": "A small network on drawn strokes", "quantum": QUANTUM,
        "outputs": {"head": "log_softmax", "name": "log-probability",
                    "classes": [f"class {chr(65 + number)}" for number in range(sizes.classes)]},
        "layers": [f"{number} (Linear)" for number in range(sizes.layers)],
        "ranges": [[50 * number, 50 * (number + 1)] for number in range(sizes.ranges)],
        "card": [
            {"title": "Network", "rows": [["class", "Sequential"], ["weights", "12 345"]]},
            {"title": "Training", "rows": [["optimizer", "SGD"], ["steps", str(50 * sizes.ranges)]]},
            {"title": "Versions", "rows": [["digest of the run", "3f" * 32], ["epk_gp", "0.9"]]},
        ],
        "certificate": {
            "certified": True,
            "sentences": ["The sums of all terms were compared with the outputs of the network.",
                          "They agree: the largest difference is far below the limit."],
            "rows": [["largest difference", "3.2e-12", "1e-06"], ["largest error of a step", "1.1e-14", "1e-08"]],
        },
        "samples": {"count": sizes.samples, "shown": shown}, "points": points,
        "overview": {
            "accuracy": right / sizes.points, "count": sizes.points,
            "figures": [
                {"id": "reliability", "title": "Reliability", "sentence": "How often predictions are right.",
                 "svg": svg(figure(generator)),
                 "table": {"head": ["confidence", "right"], "rows": [["0.5", "0.48"], ["0.9", "0.91"]]}},
                {"id": "spectrum", "title": "Spectrum", "sentence": "Eigenvalues of the kernel.",
                 "svg": svg(figure(generator)), "table": None},
            ],
            "suspects": {
                "sentence": "Labels that their neighbours do not explain.",
                "head": ["label", "suggested", "score"],
                "rows": [[named[row], "class A", "class B", f"{0.9 - 0.05 * row:.2f}"] for row in range(5)],
            },
            "map": overview_map(generator, sizes, named) if sizes.kind == "position" else None,
        },
    }  # fmt: skip
