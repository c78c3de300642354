"""Draw overview.png: what the package does, with one network on points of the plane (half a minute)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

import epk_gp as epk
from epk_gp.analysis.maps import UncertaintyMap, coordinate_plane, uncertainty_on_plane
from epk_gp.datasets import three_gaussians
from epk_gp.plots import attribution_bars, class_regions, new_figure, save_figure, shades_of, uncertainty_map
from epk_gp.plots.style import INK, LOWERED, PALETTE, RAISED, short, styled

EXPLAINED = (3.55, 3.1)  # the point whose prediction is explained: between the classes
CLASSES = (0, 1, 2)
GRID = 48


@dataclass(frozen=True)
class Numbers:
    """What is drawn.

    Attributes:
        X: Training points.
        labels: Their classes.
        predicted: Class that the network predicts at `EXPLAINED`.
        initial: Logit of this class at the initial weights.
        network: The same at the trained weights.
        contributions: What each training point added to it.
        error: Largest difference of all sums from the network's outputs.
        map: Uncertainty over the plane.
    """

    X: Tensor
    labels: Tensor
    predicted: int
    initial: float
    network: float
    contributions: Tensor
    error: float
    map: UncertaintyMap


def compute() -> Numbers:
    """Train, explain one prediction, and map the uncertainty."""
    data = three_gaussians(60, dim=2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trajectory = epk.train(net, data.inputs, data.labels, optimizer=optimizer, steps=120)
    parts = epk.attribute(trajectory, data.inputs.new_tensor([EXPLAINED]), head="logits")
    predicted = int(parts.network[0].argmax())
    if not parts.certified:
        raise RuntimeError("the contributions are not certified")
    gp = epk.LogitGP(trajectory, rule=epk.gauss_legendre(4))
    gp.fit()
    generator = torch.Generator().manual_seed(0)
    m = uncertainty_on_plane(
        gp,
        coordinate_plane(data.inputs),
        size=GRID,
        margin=0.15,
        square=True,
        num_samples=2048,
        generator=generator,
    )
    return Numbers(
        data.inputs,
        data.labels,
        predicted,
        float(parts.initial[0, predicted]),
        float(parts.network[0, predicted]),
        parts.samples[0, predicted],
        float((parts.total - parts.network).abs().max()),
        m,
    )


@styled
def draw(numbers: Numbers) -> Figure:
    """Draw a prediction and its training points, the contributions of some, and the uncertainty."""
    figure = new_figure(3.45)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.12, 1, 1.12))
    draw_points(left, numbers)
    draw_contributions(middle, numbers)
    m = numbers.map
    uncertainty_map(
        right,
        m.x,
        m.y,
        1 - m.probability,
        title="How sure is it?",
        points=numbers.X,
        labels=numbers.labels,
        boundary=m.boundary_classes,
        regions=m.network_class,
        colorbar=False,
    )
    right.set(xlabel="", ylabel="", xticks=[], yticks=[])
    draw_star(right)
    shades, place = shades_of(right), right.inset_axes((0, -0.1, 1, 0.05))
    bar = figure.colorbar(shades, cax=place, orientation="horizontal", ticks=shades.levels[::2])
    bar.set_label("probability that the class is wrong")
    bar.outline.set_visible(False)
    handles = [
        Line2D([], [], color="white", marker="*", markersize=11, markeredgecolor=INK, linestyle="", label="explained"),
        Line2D([], [], color=RAISED, marker="^", markersize=7, linestyle="", label="raised its logit"),
        Line2D([], [], color=LOWERED, marker="v", markersize=7, linestyle="", label="lowered it"),
        *[Patch(facecolor=PALETTE[c], label=f"class {c}") for c in CLASSES],
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, columnspacing=1.4, handlelength=1.4)
    return figure


def draw_points(ax: Axes, numbers: Numbers) -> None:
    """Draw the training points, as large as their contributions."""
    m = numbers.map
    x, y = (np.linspace(float(axis[0]), float(axis[-1]), m.boundary_classes.shape[0]) for axis in (m.x, m.y))
    class_regions(ax, x, y, m.boundary_classes)
    values = numbers.contributions
    sizes = 130 * values.abs() / values.abs().max()
    for mark, colour, chosen in (("^", RAISED, values > 0), ("v", LOWERED, values < 0)):
        points = numbers.X[chosen]
        ax.scatter(*points.T, s=sizes[chosen], color=colour, marker=mark, alpha=0.75, linewidth=0)
    draw_star(ax)
    ax.set(xlabel="the area of a mark is the size of\nthe point's contribution", ylabel="", xticks=[], yticks=[])
    ax.set_title("What made this prediction?")


def draw_star(ax: Axes) -> None:
    """Mark the point that is explained."""
    ax.plot(*EXPLAINED, marker="*", color="white", markeredgecolor=INK, markersize=13, zorder=6)


def draw_contributions(ax: Axes, numbers: Numbers) -> None:
    """Draw the largest contributions, and how all of them make the network's logit."""
    attribution_bars(ax, numbers.contributions, numbers.labels, top=3)
    ax.get_legend().remove()
    ax.set(title="How much, exactly?", ylabel="", box_aspect=1.12)
    ax.set_yticks(ax.get_yticks(), [label.get_text().partition(",")[0] for label in ax.get_yticklabels()])
    sums = (numbers.initial, float(numbers.contributions.sum()), numbers.network)
    start, added, end = (f"{value:.3f}".replace("-", "−") for value in sums)
    furthest = 1.9 * float(numbers.contributions.abs().max())
    ax.set_xlim(-furthest, furthest)
    ax.set_xlabel(
        f"contribution to the logit of class {numbers.predicted}\n{start} at first + {added} of all\n"
        f"= {end}, the network's, to {short(numbers.error)}"
    )


if __name__ == "__main__":
    save_figure(draw(compute()), Path(__file__).with_suffix(".png"), palette=True)
