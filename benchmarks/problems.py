"""The benchmark problems: Gram blocks of given shapes, and the number of operations that each needs at least."""

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

CNN_SHAPES = {
    "0.weight": (8, 1, 3, 3), "0.bias": (8,), "3.weight": (16, 8, 3, 3), "3.bias": (16,),
    "7.weight": (10, 784), "7.bias": (10,),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A Gram block: n x n points, at one weight state or over whole steps.

    Attributes:
        name: Name in the table.
        kind: "mlp" or "cnn".
        n: Points on the left.
        widths: Of an MLP, inputs and outputs included; of the CNN, pixels and outputs.
        dtype: Floating-point type of points and weights.
        steps: 0 for a single weight state.
        nodes: Gauss-Legendre nodes per step, for test copies; 0 for training copies.
        columns: Points on the right; 0 for as many as on the left.
    """

    name: str
    kind: str
    n: int
    widths: tuple[int, ...]
    dtype: str = "float64"
    steps: int = 0
    nodes: int = 0
    columns: int = 0

    @property
    def m(self) -> int:
        """Points on the right."""
        return self.columns or self.n

    @property
    def operations(self) -> float:
        """Operations of the matrix products that every method needs, counted as in docs/engine.md, section 4."""
        n, m, C, steps = self.n, self.m, self.widths[-1], max(1, self.steps)
        if self.kind == "cnn":  # gradients of both sides written out, their products, the last layer's inputs
            gradients = 2 * (n + m) * C * (16 * 196 * 73 + 8 * 784 * 10)
            return gradients + 2 * n * m * (C**2 * (1168 + 80) + 784)
        hidden = list(zip(self.widths[1:-1], self.widths[2:-1], strict=False))
        middle = sum(C**2 * n_out + n_in for n_in, n_out in hidden) * max(1, self.nodes)
        return 2 * n * m * (self.widths[0] + steps * (C**2 * self.widths[1] + middle + self.widths[-2]))

    def description(self, **more: Any) -> dict[str, Any]:
        """Return the description of the problem for a contender."""
        return {**asdict(self), "outputs": self.widths[-1], **more}

    def arrays(self) -> dict[str, np.ndarray]:
        """Draw points and weights, scaled as torch initialises them."""
        rng = np.random.default_rng(0)
        shapes = CNN_SHAPES if self.kind == "cnn" else _mlp_shapes(self.widths)
        shape = (1, 28, 28) if self.kind == "cnn" else self.widths[:1]
        normal = {name: rng.normal(size=size) for name, size in shapes.items()}
        scaled = {name: v / np.sqrt(v[0].size) if v.ndim > 1 else 0.1 * v for name, v in normal.items()}
        return {
            name: value.astype(self.dtype)
            for name, value in {
                **scaled,
                "X": rng.normal(size=(self.n, *shape)),
                "Y": rng.normal(size=(self.m, *shape)),
            }.items()
        }


def ntk_problems() -> list[Problem]:
    """Return the problems of a single NTK block, in both dtypes."""
    return [
        Problem(name, kind, n, widths, dtype)
        for name, kind, n, widths in (
            ("a: 1000 x 1000, MLP 100-256-3", "mlp", 1000, (100, 256, 3)),
            ("b: 200 x 200, MLP 784-128-10", "mlp", 200, (784, 128, 10)),
            ("c: 100 x 100, CNN 1-8-16 (3 x 3, pool) -10", "cnn", 100, (784, 10)),
        )
        for dtype in ("float32", "float64")
    ]


def epk_problems() -> list[Problem]:
    """Return the problems of a whole path-kernel block: test copies against training copies."""
    return [
        Problem(name, "mlp", 1000, widths, dtype, steps, nodes)
        for name, widths, steps, nodes in (
            ("a, 10 steps of 5 nodes", (100, 256, 3), 10, 5),
            ("a with two hidden layers, 4 steps of 3 nodes", (100, 256, 256, 3), 4, 3),
        )
        for dtype in ("float32", "float64")
    ]


def growth_problems() -> dict[str, list[tuple[int, Problem]]]:
    """Vary one size at a time: test copies against training copies, 4 nodes per step."""

    def base(n: int = 400, width: int = 128, outputs: int = 3, steps: int = 8, m: int = 0) -> Problem:
        return Problem("", "mlp", n, (100, width, width, outputs), "float64", steps, 4, m)

    return {
        "test points": [(n, base(n=n, m=400)) for n in (400, 800, 1600, 3200)],
        "training points": [(m, base(m=m)) for m in (400, 800, 1600, 3200)],
        "points on either side": [(n, base(n=n)) for n in (200, 400, 800, 1600)],
        "steps": [(steps, base(steps=steps)) for steps in (8, 16, 32, 64)],
        "width of two hidden layers": [(width, base(width=width)) for width in (64, 128, 256, 512)],
        "outputs": [(outputs, base(outputs=outputs)) for outputs in (2, 4, 8)],
    }


def _mlp_shapes(widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
        shapes |= {f"{2 * number}.weight": (n_out, n_in), f"{2 * number}.bias": (n_out,)}
    return shapes
