"""Content of a report with made-up numbers that satisfy every invariant, in any size and for any kind of input."""

import base64
import io
import itertools
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from epk_gp.plots.style import PALETTE, RAISED, WRONG, new_figure, styled

QUANTUM = 1e-9
WORDS = tuple("the film was slow but its end is a joy and nobody in the room could say why".split())  # noqa: SIM905


@dataclass(frozen=True)
class Sizes:
    """How much a report holds.

    Attributes:
        kind: Kind of the inputs: "image", "text", "values" or "position".
        points: Explained test points.
        classes: Names of the outputs, as a number.
        explained: Classes that are explained for each point.
        samples: Training samples.
        active: Samples with numbers of their own; the others are sums.
        shown: Samples that a view shows on each side.
        layers: Names of layers, as a number.
        ranges: Ranges of steps.
        pairs: Whether views of a layer and a range together are stored.
        pixels: Pixels on a side of an image.
    """

    kind: str = "image"
    points: int = 6
    classes: int = 4
    explained: int = 2
    samples: int = 300
    active: int = 40
    shown: int = 5
    layers: int = 3
    ranges: int = 4
    pairs: bool = True
    pixels: int = 14


LARGE = Sizes(  # 60,000 training images
    points=100, classes=10, explained=2, samples=60_000, active=50, shown=10, layers=5, ranges=6, pairs=False, pixels=28
)  # fmt: skip


def quanta(value: float) -> int:
    """Return the nearest multiple of the quantum."""
    return round(value / QUANTUM)


def rounded(value: float) -> float:
    """Return the value to six decimals."""
    return round(float(value), 6)


def image(generator: np.random.Generator, pixels: int) -> str:
    """Return a picture of a stroke as data."""
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
    x, y = generator.uniform(-3, 3, size=2)
    return {"position": [round(float(x), 4), round(float(y), 4)]}


@dataclass(frozen=True)
class Terms:
    """The terms of one output of one point, in quanta, over L layers and R ranges of steps.

    Attributes:
        active: Terms of the samples that have numbers of their own, (L, R, A).
        raised: Sum of the other samples that raised the output, by label, (L, R, C).
        lowered: Sum of the other samples that lowered it, by label, (L, R, C).
        decay: Of weight decay, (L, R).
        unexplained: Of what no sample explains, (L, R).
        rounding: Of rounding to quanta, (L, R).
        statistics: Of moving statistics, which have no layers, (R,).
        samples: Numbers of the A samples.
        labels: Their labels.
        counts: Other samples that raised and lowered the output.
        influence: Of the A samples, or none.
    """

    active: np.ndarray
    raised: np.ndarray
    lowered: np.ndarray
    decay: np.ndarray
    unexplained: np.ndarray
    rounding: np.ndarray
    statistics: np.ndarray
    samples: np.ndarray
    labels: np.ndarray
    counts: tuple[int, int]
    influence: np.ndarray | None

    def total(self) -> int:
        """Return the sum of all."""
        parts = (self.active, self.raised, self.lowered, self.decay, self.unexplained, self.rounding, self.statistics)
        return int(sum(part.sum() for part in parts))


def made_terms(generator: np.random.Generator, sizes: Sizes, labels: np.ndarray, change: int) -> Terms:
    """Return terms whose sum is the change of the output."""
    L, R, A, C = sizes.layers, sizes.ranges, sizes.active, sizes.classes
    samples = np.sort(generator.choice(sizes.samples, size=A, replace=False))
    sides = generator.normal(size=A) * 2.0
    draw = lambda *shape, scale=1.0: np.rint(generator.normal(size=shape) * scale / QUANTUM).astype(np.int64)  # noqa: E731
    active = np.rint((sides + 0.3 * generator.normal(size=(L, R, A))) * 0.04 / QUANTUM / (L * R)).astype(np.int64)
    terms = Terms(
        active, np.abs(draw(L, R, C, scale=0.02)), -np.abs(draw(L, R, C, scale=0.02)), draw(L, R, scale=0.01),
        draw(L, R, scale=1e-7), generator.integers(-3, 4, size=(L, R)), draw(R, scale=0.003), samples, labels[samples],
        ((sizes.samples - A) // 2, sizes.samples - A - (sizes.samples - A) // 2), np.round(sides * 0.03, 6),
    )  # fmt: skip
    missing = change - terms.total()
    side = terms.raised if missing > 0 else terms.lowered
    share, rest = divmod(missing, side.size)
    side += share
    side.reshape(-1)[0] += rest
    return terms


def view(terms: Terms, sizes: Sizes, layer: int | None, steps: int | None) -> dict[str, Any]:
    """Return the view of one layer or all, and of one range of steps or all."""
    of_layer = slice(None) if layer is None else slice(layer, layer + 1)
    of_steps = slice(None) if steps is None else slice(steps, steps + 1)
    active = terms.active[of_layer, of_steps]
    values = active.sum((0, 1))
    order = [int(index) for index in np.argsort(-values, kind="stable")]
    raised = [index for index in order if values[index] > 0]
    lowered = [index for index in reversed(order) if values[index] < 0]
    rows = [
        [[int(terms.samples[index]), int(values[index]), influence_of(terms, index)] for index in side[: sizes.shown]]
        for side in (raised, lowered)
    ]
    others = [terms.raised[of_layer, of_steps], terms.lowered[of_layer, of_steps]]
    rests = [
        [len(side) - len(shown) + count, int(values[side[sizes.shown :]].sum() + other.sum())]
        for side, shown, count, other in zip((raised, lowered), rows, terms.counts, others, strict=True)
    ]
    by_label = np.bincount(terms.labels, weights=values, minlength=sizes.classes).astype(np.int64)
    by_label += sum(other.sum((0, 1)) for other in others)
    by_part = active.sum(2) + sum(other.sum(2) for other in others)
    statistics = int(terms.statistics[of_steps].sum()) if layer is None else 0
    content = {
        "raised": rows[0],
        "lowered": rows[1],
        "rest_raised": rests[0],
        "rest_lowered": rests[1],
        "labels": by_label.tolist(),
        "layers": by_part.sum(1).tolist() if layer is None else None,
        "ranges": by_part.sum(0).tolist() if steps is None else None,
        "decay": int(terms.decay[of_layer, of_steps].sum()),
        "statistics": statistics,
        "unexplained": int(terms.unexplained[of_layer, of_steps].sum()),
        "rounding": int(terms.rounding[of_layer, of_steps].sum()),
    }
    content["total"] = total_of(content)
    return content


def influence_of(terms: Terms, index: int) -> float | None:
    """Return a sample's influence, where there is any."""
    return None if terms.influence is None else float(terms.influence[index])


def total_of(content: dict[str, Any]) -> int:
    """Return the sum of all that a view shows."""
    samples = sum(value for _, value, _ in content["raised"] + content["lowered"])
    rests = content["rest_raised"][1] + content["rest_lowered"][1]
    return samples + rests + sum(content[name] for name in ("decay", "statistics", "unexplained", "rounding"))


def explanation(
    generator: np.random.Generator, sizes: Sizes, labels: np.ndarray, initial: int, network: int
) -> dict[str, Any]:
    """Return the explanation of one output of one point."""
    terms = made_terms(generator, sizes, labels, network - initial)
    layers, ranges = [None, *range(sizes.layers)], [None, *range(sizes.ranges)]
    views = {
        f"{'*' if layer is None else layer}|{'*' if steps is None else steps}": view(terms, sizes, layer, steps)
        for layer, steps in itertools.product(layers, ranges)
        if sizes.pairs or layer is None or steps is None
    }
    changes = [views[f"*|{steps}"]["total"] for steps in range(sizes.ranges)]
    running = [initial, *(initial + int(change) for change in np.cumsum(changes))]
    return {"initial": initial, "network": network, "running": running, "views": views}


def point(generator: np.random.Generator, sizes: Sizes, labels: np.ndarray, number: int) -> dict[str, Any]:
    """Return one explained test point."""
    logits = generator.normal(size=sizes.classes) * 2
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = [int(index) for index in np.argsort(-probabilities)]
    label = order[0] if generator.random() < 0.7 else order[1]
    explained = sorted({*order[: sizes.explained], label})
    spread = 0.3 * probabilities * (1 - probabilities)
    initial = [quanta(np.log(1 / sizes.classes) + shift) for shift in generator.normal(size=sizes.classes) * 0.1]
    return {
        "name": f"test sample {number * 7}",
        "label": label,
        "predicted": order[0],
        "input": made_input(generator, sizes),
        "probabilities": [round(float(value), 6) for value in probabilities],
        "band": [
            [round(float(max(value - half, 0)), 6), round(float(min(value + half, 1)), 6)]
            for value, half in zip(probabilities, spread, strict=True)
        ],
        "scores": [
            ["error score", rounded(1 - probabilities.max()), "Probability that the predicted class is wrong."],
            ["out-of-distribution score", rounded(generator.random()), "Variance of the process at this point."],
            ["entropy", rounded(-probabilities @ np.log(probabilities)), "Entropy of the probabilities."],
        ],
        "explanations": {
            str(c): explanation(generator, sizes, labels, initial[c], quanta(float(np.log(probabilities[c]))))
            for c in explained
        },
    }  # fmt: skip


@styled
def figure(generator: np.random.Generator) -> Any:
    """Return a small figure with two curves."""
    drawing = new_figure(2.6, 5.2)
    axes = drawing.add_subplot()
    for colour, name in ((RAISED, "in distribution"), (WRONG, "out of distribution")):
        axes.plot(np.sort(generator.random(30)), np.linspace(0, 1, 30), color=colour, label=name)
    axes.set(xlabel="score", ylabel="share of points")
    axes.legend()
    return drawing


def svg(drawing: Any) -> str:
    """Return a figure as an SVG element with text as text and a transparent background."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        drawing.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = buffer.getvalue().replace("#222222", "#1a1a1a")
    return text[text.index("<svg") :]


@styled
def map_figure(predicted: np.ndarray) -> Any:
    """Return a picture of the predicted classes that fills its whole figure."""
    drawing = new_figure(4.0, 4.0)
    drawing.set_layout_engine("none")
    axes = drawing.add_axes((0.1, 0.1, 0.8, 0.8))
    levels = np.arange(int(predicted.max()) + 2) - 0.5
    axes.contourf(np.linspace(-3, 3, predicted.shape[1]), np.linspace(-3, 3, predicted.shape[0]), predicted,
                  levels=levels, colors=PALETTE[: len(levels) - 1], alpha=0.5)  # fmt: skip
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
        "extent": [-3, 3, -3, 3],
        "axes": ["first input", "second input"],
        "shape": [ny, nx],
        "svg": svg(map_figure(predicted)),
        "area": [0.1, 0.1, 0.9, 0.9],
        "predicted": predicted.reshape(-1).tolist(),
        "wrong": wrong.reshape(-1).tolist(),
        "coarse": [my, mx],
        "behind": [[int(s) for s in generator.choice(samples, size=3, replace=False)] for _ in range(my * mx)],
    }


def made_content(sizes: Sizes, *, seed: int = 0, title: str = "A small network on drawn strokes") -> dict[str, Any]:
    """Return the content of a report."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, sizes.classes, size=sizes.samples)
    points = [point(generator, sizes, labels, number) for number in range(sizes.points)]
    named = named_samples(points)
    shown = {str(sample): {**made_input(generator, sizes), "label": int(labels[sample])} for sample in named}
    right = sum(point["label"] == point["predicted"] for point in points)
    return {
        "version": 1,
        "title": title,
        "quantum": QUANTUM,
        "outputs": {
            "head": "log_softmax",
            "name": "log-probability",
            "classes": [f"class {chr(65 + number)}" for number in range(sizes.classes)],
        },
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
        "samples": {"count": sizes.samples, "shown": shown},
        "points": points,
        "overview": {
            "accuracy": right / sizes.points,
            "count": sizes.points,
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


def named_samples(points: list[dict[str, Any]]) -> list[int]:
    """Return every training sample that a view names."""
    return sorted(
        {
            row[0]
            for point in points
            for explanation in point["explanations"].values()
            for view in explanation["views"].values()
            for row in view["raised"] + view["lowered"]
        }
    )
