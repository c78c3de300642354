"""Draw overview.png: what the package does, in one picture."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from epk_gp.plots import PALETTE
from epk_gp.plots.common import GREY

HALF_WIDTH, HALF_HEIGHT = 0.12, 0.13
BOXES = (
    (0.13, 0.5, "a training run", "every step recorded\nand checked", PALETTE[8]),
    (0.43, 0.5, "exact path kernel", "gradients along each step,\nintegrated with a certificate", PALETTE[0]),
    (0.73, 0.86, "kernel machine", "equal to the network:\nlargest error 2e−14", PALETTE[2]),
    (0.73, 0.5, "contributions", "which training points\nmade this prediction, exactly", PALETTE[4]),
    (0.73, 0.14, "Gaussian process", "how sure is the prediction\n(GPyTorch)", PALETTE[6]),
)


def draw() -> Figure:
    """Draw boxes and the arrows between them."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.set_axis_off()
    ax.set(xlim=(0, 0.86), ylim=(0, 1))
    for x, y, name, words, colour in BOXES:
        corner = (x - HALF_WIDTH, y - HALF_HEIGHT)
        rounded = {"boxstyle": "round,pad=0,rounding_size=0.02", "facecolor": "white", "linewidth": 2}
        ax.add_patch(FancyBboxPatch(corner, 2 * HALF_WIDTH, 2 * HALF_HEIGHT, edgecolor=colour, **rounded))
        ax.text(x, y + 0.07, name, ha="center", va="center", fontsize=11, color=colour, weight="bold")
        ax.text(x, y - 0.05, words, ha="center", va="center", fontsize=9.5, color=GREY)
    arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.4}
    for (x, y), (u, v) in (
        ((0.25, 0.5), (0.31, 0.5)),
        ((0.55, 0.56), (0.61, 0.8)),
        ((0.55, 0.5), (0.61, 0.5)),
        ((0.55, 0.44), (0.61, 0.2)),
    ):
        ax.annotate("", (u, v), (x, y), arrowprops=arrow)
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), dpi=90)
