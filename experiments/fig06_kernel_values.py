"""Figure 6: the kernel value of every training point for three test points and three classes."""

from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import epk_gp as epk
from epk_gp.analysis.maps import grid_coordinates, grid_over, lift, project
from epk_gp.analysis.measures import rank_correlation
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import GAUSSIAN_MEANS
from epk_gp.plots import class_regions, region_handles
from epk_gp.plots.style import INK, MAGNITUDES, SMALL, new_figure, styled
from harness import Experiment, classes_as_text, classes_from_text, main
from problems import SMALL_TOY, Toy, record_toy, toy_plane
from quantities.boundary import boundary_weight_ratio, margins


@dataclass(frozen=True)
class Config:
    """Sizes; `drawn` training points are drawn, all are measured."""

    toy: Toy = field(default_factory=Toy)
    grid: int = 120
    margin: float = 0.1
    drawn: int = 600
    share: float = 0.1


@dataclass(frozen=True)
class Result:
    """Kernel values K(x, x_i)[c, c] for the means x of the generating distributions.

    Attributes:
        x: Columns of the background.
        y: Its rows.
        network_class: Class that the network predicts at each node of the background, one digit per node.
        points: Training points in the plane.
        values: Kernel values of the drawn training points, (test point, class, training point).
        num_train: Number M of all training points.
        tests: The test points in the plane.
        predicted: Classes that the network predicts for them.
        numbers: One entry per test point and class: rank correlation of the kernel value with the Euclidean distance,
            over all training points and over those of the test point's class; boundary weight ratio.
        contributions: One entry per test point: the same for the exact contributions to the predicted class.
    """

    x: list[float]
    y: list[float]
    network_class: list[str]
    points: list[list[float]]
    values: list[list[list[float]]]
    num_train: int
    tests: list[list[float]]
    predicted: list[int]
    numbers: list[dict[str, float | int | None]]
    contributions: list[dict[str, float | int | None]]


def run(config: Config) -> Result:
    """Record the toy problem and evaluate the kernel."""
    trajectory, _ = record_toy(config.toy)
    X, labels = trajectory.inputs, trajectory.targets
    tests = X.new_zeros(3, X.shape[1])
    tests[:, :2] = torch.tensor(GAUSSIAN_MEANS, dtype=X.dtype)
    kernel = epk.PathKernel(trajectory, rule=epk.gauss_legendre(2))
    values = kernel.block_per_class(epk.Points(tests, is_train=False), epk.Points(X, is_train=True))
    margin = margins(network_outputs(trajectory, X), labels)
    predicted = network_outputs(trajectory, tests).argmax(1)
    parts = epk.attribute(trajectory, tests)
    numbers, contributions = [], []
    for n, test in enumerate(tests):
        distance = (X - test).norm(dim=1)
        same_class = labels == predicted[n]

        def describe(
            weights: torch.Tensor, distance: torch.Tensor = distance, same_class: torch.Tensor = same_class
        ) -> dict:
            at_boundary = boundary_weight_ratio(weights, margin, labels, share=config.share)
            return {
                "rank_correlation_with_distance": rank_correlation(weights, distance),
                "rank_correlation_with_distance_own_class": rank_correlation(weights[same_class], distance[same_class]),
                "boundary_weight_ratio": at_boundary.ratio,
                "rank_correlation_of_size_with_margin": at_boundary.rank_correlation,
            }

        numbers += [{"test": n, "class": c} | describe(values[c, n]) for c in range(3)]
        contributions.append({"test": n, "class": int(predicted[n])} | describe(parts.samples[n, predicted[n]]))
    plane = toy_plane(X)
    points = project(plane, X)
    x, y = grid_over(points, config.grid, config.margin, square=True)
    background = network_outputs(trajectory, lift(plane, grid_coordinates(x, y))).argmax(1)
    stride = -(-len(X) // config.drawn)
    return Result(
        x=x.tolist(),
        y=y.tolist(),
        network_class=classes_as_text(background.reshape(len(y), len(x))),
        points=points[::stride].tolist(),
        values=values[:, :, ::stride].transpose(0, 1).tolist(),
        num_train=len(X),
        tests=project(plane, tests).tolist(),
        predicted=predicted.tolist(),
        numbers=numbers,
        contributions=contributions,
    )


@styled
def draw(result: Result) -> Figure:
    """Draw training points in their kernel value's colour, one row per test point and one column per class."""
    figure = new_figure(7.6)
    points, values = np.array(result.points), np.array(result.values)
    background = classes_from_text(result.network_class)
    rows = figure.subplots(3, 3, sharex=True, sharey=True)
    for n, row in enumerate(rows):
        for c, ax in enumerate(row):
            class_regions(ax, np.array(result.x), np.array(result.y), background)
            shown, largest = values[n, c] / values[n, c].max(), f"{values[n, c].max():,.0f}"
            order = shown.argsort()
            dots = ax.scatter(*points[order].T, c=shown[order], s=7, cmap=MAGNITUDES, vmin=0, vmax=1)
            ax.plot(*result.tests[n], marker="*", color="white", markeredgecolor=INK, markersize=14)
            entry = f"{result.numbers[3 * n + c]['rank_correlation_with_distance']:+.2f}".replace("-", "−")
            star = " (predicted)" if c == result.predicted[n] else ""
            ax.set_title(f"output {c}{star}\nlargest {largest}, rank corr. {entry}", fontsize=SMALL)
            ax.set(xlabel="$x_1$" if n == 2 else "", ylabel="$x_2$" if c == 0 else "")
    bar = figure.colorbar(dots, ax=rows, fraction=0.03, pad=0.02, aspect=40)
    bar.set_label("kernel value, relative to the largest of the panel")
    star = Line2D([], [], color="white", marker="*", markersize=11, markeredgecolor=INK, linestyle="", label="$x$")
    figure.legend(handles=[star, *region_handles(range(3))], loc="outside lower center", ncols=4)
    figure.suptitle(
        "Kernel value $K(x, x_i)_{cc}$ of training points $x_i$ (dots) with $x$ (star), the mean of a class.\n"
        f"{len(points)} of {result.num_train} training points are drawn. Rank correlations with the distance from $x$ "
        "are over all.",
        x=0.01,
        ha="left",
    )
    return figure


EXPERIMENT = Experiment("fig06_kernel_values", Config(), Config(toy=SMALL_TOY, grid=10), Result, run, draw)

if __name__ == "__main__":
    main(EXPERIMENT)
