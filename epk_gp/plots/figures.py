"""The figures that commands write."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from torch import Tensor

from epk_gp.analysis.breakdown import PredictionBreakdown
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.reconstruct import Reconstruction
from epk_gp.plots import (
    attribution_bars,
    contribution_curve,
    error_against_evaluations,
    reconstruction_scatter,
    training_image,
    uncertainty_map,
)

_DPI = 100
_IMAGE_WIDTH = 0.79  # inches
_MAX_POINTS = 600  # training points drawn on a map


def draw_reconstruction(path: Path, machines: Sequence[tuple[str, Reconstruction]]) -> None:
    """Draw the outputs of kernel machines and their errors against the network's outputs."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, machine in machines:
        reconstruction_scatter(left, machine.network, machine.outputs, label=name)
    left.set_title("kernel machine against network, held-out points")
    for (name, machine), marker in zip(machines, "os^D", strict=False):
        error = (machine.outputs - machine.network).abs().clamp_min(1e-17)
        right.scatter(
            machine.network.flatten(), error.flatten(), s=14, marker=marker, alpha=0.7, linewidth=0, label=name
        )
    colours = [points.get_facecolor() for points in left.collections]
    for points, colour in zip(right.collections, colours, strict=True):
        points.set_facecolor(colour)
    right.set(
        yscale="log",
        xlabel="network output",
        ylabel="|kernel machine − network|",
        title="the error alone (0 is drawn at 1e−17)",
    )
    right.grid(visible=True, color="#dddddd", linewidth=0.7)
    right.set_axisbelow(True)
    right.legend(fontsize="small")
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_errors(path: Path, rules: Sequence[tuple[str, float, float]]) -> None:
    """Draw the largest error of quadrature rules, given as (name, evaluations, error), against their evaluations."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    names, evaluations, errors = zip(*rules, strict=True)
    ax = figure.subplots()
    error_against_evaluations(ax, names, evaluations, errors)
    ax.set_title("error of each quadrature rule against its cost")
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_map(
    path: Path, m: UncertaintyMap, labels: Shaped[Tensor, "M ..."], axis_names: tuple[str, str] = ("$x_1$", "$x_2$")
) -> None:
    """Draw the kernel, the misclassification probability, its standard deviation and the entropy over a plane."""
    figure = Figure(figsize=(10.5, 9.5), layout="constrained")
    stride = -(-len(m.training) // _MAX_POINTS)
    panels = (
        (m.kernel, "kernel value k(x, x)", "relative to the training points' mean"),
        (1 - m.probability, "misclassification probability, 1 − E[p(network's class)]", "probability"),
        (m.std, "standard deviation of that probability", "standard deviation"),
        (m.entropy, "entropy of the expected probabilities", "nats"),
    )
    classes = _class_labels(labels)
    for number, (ax, (values, title, unit)) in enumerate(zip(figure.subplots(2, 2).flat, panels, strict=True)):
        uncertainty_map(
            ax,
            m.x,
            m.y,
            values,
            title=title,
            points=m.training[::stride],
            labels=None if classes is None else classes[::stride],
            boundary=m.boundary_classes,
            colorbar_label=unit,
        )
        ax.set_title(title, fontsize="medium")
        ax.set(xlabel=axis_names[0], ylabel=axis_names[1])
        legend = ax.get_legend()
        if legend is not None and number < 2:  # once per column is enough
            legend.remove()
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_attributions(
    path: Path,
    breakdown: PredictionBreakdown,
    trajectory: Trajectory,
    X: Tensor,
    chosen: Sequence[int],
    top: int,
) -> None:
    """Draw the contributions of training points and of ranges of steps to the predicted output of chosen points.

    Args:
        path: File that is written.
        breakdown: Contributions to the predicted outputs of n points.
        trajectory: The run.
        X: The n points.
        chosen: Indices of the points that are drawn, one row each.
        top: Number of training points drawn of either sign.
    """
    images = as_images(trajectory.inputs)
    shown = min(top, trajectory.num_points)
    height = 1.9 if images is not None else 1.6 + 0.34 * shown
    left_width = 10.3 if images is None else max(10.3, _IMAGE_WIDTH * (2 * shown + 1))
    figure = Figure(figsize=(left_width + 3.2, height * len(chosen)), layout="constrained")
    rows = figure.subfigures(len(chosen), 1, squeeze=False)[:, 0]
    points = as_images(X)
    for row, n in zip(rows, chosen, strict=True):
        left, right = row.subfigures(1, 2, width_ratios=(left_width, 3.2))
        start, end = (f"{float(v[n]):.3g}".replace("-", "−") for v in (breakdown.initial, breakdown.network))
        if images is None or points is None:
            _draw_bars(left.subplots(), breakdown.samples[n], trajectory.targets, top)
        else:
            _draw_images(left, breakdown, n, (points[n], images), trajectory.targets, shown)
        ax = right.subplots()
        contribution_curve(ax, breakdown.range_ends, float(breakdown.initial[n]), breakdown.steps[n])
        ax.set_title(f"point {n}, output {int(breakdown.output[n])}: {start} → {end}", fontsize="medium")
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def _draw_bars(ax: Axes, contributions: Tensor, labels: Tensor, top: int) -> None:
    known = _class_labels(labels)
    classes = torch.zeros(len(labels), dtype=torch.int64) if known is None else known
    attribution_bars(ax, contributions, classes, top=top, title="")
    legend = ax.get_legend()
    if legend is not None and known is None:
        legend.remove()


def _draw_images(
    figure: FigureBase,
    breakdown: PredictionBreakdown,
    n: int,
    images: tuple[Tensor, Tensor],
    labels: Tensor,
    shown: int,
) -> None:
    """Draw the point, the training images that raised its output most, and those that lowered it most."""
    point, training = images
    values, order = breakdown.samples[n].sort(descending=True)
    axes = figure.subplots(1, 2 * shown + 1, squeeze=False)[0]
    training_image(axes[0], point, "explained")
    raised = [(int(i), float(v)) for i, v in zip(order[:shown], values[:shown], strict=True) if v > 0]
    lowered = [(int(i), float(v)) for i, v in zip(order.flip(0)[:shown], values.flip(0)[:shown], strict=True) if v < 0]
    classes = _class_labels(labels)
    for ax, (index, value) in zip(axes[1 : shown + 1], raised, strict=False):
        training_image(ax, training[index], _caption(index, value, classes), value)
    for ax, (index, value) in zip(axes[shown + 1 :], lowered, strict=False):
        training_image(ax, training[index], _caption(index, value, classes), value)
    for ax in axes:
        ax.set_axis_on() if ax.images else ax.set_axis_off()


def _caption(index: int, value: float, labels: Tensor | None) -> str:
    label = "" if labels is None else f" ({int(labels[index])})"
    return f"#{index}{label}\n{value:+.3g}".replace("-", "−")


def as_images(X: Tensor) -> Tensor | None:
    """Return the points as grey (n, H, W) or colour (n, H, W, 3) images, or None if they are not images."""
    if X.ndim != 4 or X.shape[1] not in (1, 3) or min(X.shape[2:]) < 4:
        return None
    return X[:, 0] if X.shape[1] == 1 else X.permute(0, 2, 3, 1)


def _class_labels(labels: Tensor) -> Tensor | None:
    """Return the targets if they are class labels, or None."""
    return labels if labels.ndim == 1 and labels.dtype == torch.int64 else None
