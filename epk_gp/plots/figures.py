"""The figures that commands write: each as a function that returns it, and one that writes it to a file."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64, Shaped
from matplotlib.figure import Figure, FigureBase
from torch import Tensor

from epk_gp.analysis.breakdown import PredictionBreakdown
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.reconstruct import Reconstruction
from epk_gp.plots import (
    attribution_bars,
    contribution_curve,
    error_against_evaluations,
    map_handles,
    reconstruction_differences,
    reconstruction_errors,
    training_image,
    uncertainty_map,
)
from epk_gp.plots.common import plain, short
from epk_gp.plots.style import DOWN, SMALL, UP, WIDTH, new_figure, save_figure, styled

_IMAGES_PER_ROW = 6
_IMAGE_ROW = 0.98  # inches of a row of training images, with captions
_MAX_POINTS = 600  # training points drawn on a map
_COORDINATES = ("$x_1$", "$x_2$")


@styled
def reconstruction_figure(machines: Sequence[tuple[str, Reconstruction]], head: Head | None = None) -> Figure:
    """Draw what kernel machines leave of the network's outputs: in full, and its size on a logarithmic axis.

    Args:
        machines: Name and kernel machine, from the coarsest rule to the finest.
        head: What the outputs are, for the names of the axes.
    """
    words = "output" if head is None else _OUTPUT_NAMES[head]
    figure = new_figure(3.7)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    for name, machine in machines:
        reconstruction_differences(left, machine.network, machine.outputs, label=name)
        reconstruction_errors(right, machine.network, machine.outputs, label=name)
    left.set(title="kernel machine − network, to scale", xlabel=f"{words} of the network", ylabel="")
    right.set(title="its size, on a logarithmic axis", xlabel=f"{words} of the network", ylabel="")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for ax in (left, right):
        ax.get_legend().remove()
    return figure


def draw_reconstruction(file: Path, machines: Sequence[tuple[str, Reconstruction]], head: Head | None = None) -> None:
    """Write `reconstruction_figure` to a file."""
    save_figure(reconstruction_figure(machines, head), file, palette=True)


@styled
def errors_figure(rules: Sequence[tuple[str, float, float]]) -> Figure:
    """Draw the largest error of quadrature rules, given as (name, evaluations, error), against their evaluations."""
    figure = new_figure(3.6)
    names, evaluations, errors = zip(*rules, strict=True)
    ax = figure.subplots()
    ax.set_title("error of each quadrature rule against its cost")  # before the names, whose places depend on it
    return error_against_evaluations(ax, names, evaluations, errors).figure  # type: ignore[return-value]


def draw_errors(file: Path, rules: Sequence[tuple[str, float, float]]) -> None:
    """Write `errors_figure` to a file."""
    save_figure(errors_figure(rules), file, palette=True)


@styled
def map_figure(
    m: UncertaintyMap,
    labels: Shaped[Tensor, "M ..."],
    axis_names: tuple[str, str] = _COORDINATES,
    *,
    plane: str = "",
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw the misclassification probability, its standard deviation, the entropy and the kernel over a plane.

    Args:
        m: The map.
        labels: Targets of the training points, which give their colours if they are classes.
        axis_names: Names of the two directions.
        plane: Which plane is shown, and what the other coordinates are there.
        names: Names of the classes, in order.
    """
    panels = (
        (1 - m.probability, "probability that the network's class is wrong", "probability", m.network_class),
        (m.std, "standard deviation of that probability", "standard deviation", None),
        (m.entropy, "entropy of the expected probabilities", "nats", None),
        (m.kernel, "kernel value k(x, x)", "relative to the training points' mean", None),
    )
    stride = -(-len(m.training) // _MAX_POINTS)
    classes = class_labels(labels)
    shown = None if classes is None else classes[::stride]
    figure = new_figure(7.1 if plane else 6.8)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for ax, (values, title, unit, regions) in zip(axes.flat, panels, strict=True):
        uncertainty_map(
            ax,
            m.x,
            m.y,
            values,
            title=title,
            points=m.training[::stride],
            labels=shown,
            boundary=m.boundary_classes,
            regions=regions,
            colorbar_label=unit,
            limits=(0.0, float(values.max())),  # white is 0: a map of almost equal values is all of one shade
            names=names,
            legend=False,
        )
        ax.set(xlabel="", ylabel="")
    words = [name if name in _COORDINATES else plain(name) for name in axis_names]
    for ax in axes[1]:
        ax.set_xlabel(words[0])
    for ax in axes[:, 0]:
        ax.set_ylabel(words[1])
    if plane:
        figure.suptitle(plain(plane), x=0.01, ha="left", fontsize=SMALL)
    if shown is not None:
        handles = map_handles(shown, names=names)
        columns = len(handles) if len(handles) <= _IMAGES_PER_ROW else -(-len(handles) // 2)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, title="training points, projected")
    return figure


def draw_map(
    file: Path,
    m: UncertaintyMap,
    labels: Shaped[Tensor, "M ..."],
    axis_names: tuple[str, str] = _COORDINATES,
    *,
    plane: str = "",
) -> None:
    """Write `map_figure` to a file."""
    save_figure(map_figure(m, labels, axis_names, plane=plane), file, palette=True)


@styled
def attribution_figure(
    breakdown: PredictionBreakdown,
    trajectory: Trajectory,
    X: Tensor,
    chosen: Sequence[int],
    top: int,
    *,
    head: Head | None = None,
    labels: Int64[Tensor, " n"] | None = None,
    names: Sequence[str] | None = None,
) -> Figure:
    """Draw the contributions of training points and of ranges of steps to the predicted output of chosen points.

    Args:
        breakdown: Contributions to the predicted outputs of n points.
        trajectory: The run.
        X: The n points.
        chosen: Indices of the points that are drawn, one below the other.
        top: Number of training points drawn of either sign.
        head: What the outputs are, for their names.
        labels: True classes of the n points, where they are known.
        names: Names of the classes, in order.
    """
    images, points = as_images(trajectory.inputs), as_images(X)
    shown = min(top, trajectory.num_points)
    with_images = images is not None and points is not None
    image_rows = -(-shown // _IMAGES_PER_ROW)
    height = 2 * image_rows * _IMAGE_ROW + 0.75 if with_images else 1.3 + 0.36 * shown
    figure = new_figure(height * len(chosen))
    parts = figure.subfigures(len(chosen), 1, squeeze=False)[:, 0]
    known = class_labels(trajectory.targets)
    for part, n in zip(parts, chosen, strict=True):
        output = output_name(int(breakdown.output[n]), head, names, is_class=known is not None)
        part.suptitle(_title(n, breakdown, labels, names, known is not None), x=0.01, ha="left", weight="bold")
        left, right = part.subfigures(1, 2, width_ratios=(WIDTH - 2.3, 2.3))
        if images is None or points is None:
            attribution_bars(
                left.subplots(), breakdown.samples[n], known, names=names, top=top, title="", output=output
            )
        else:
            _draw_images(left, breakdown.samples[n], points[n], images, (known, names, output), shown)
        start, end = (short(float(v[n]), sign=True).removeprefix("+") for v in (breakdown.initial, breakdown.network))
        ax = right.subplots()
        contribution_curve(ax, breakdown.range_ends, float(breakdown.initial[n]), breakdown.steps[n])
        ax.set_title(f"{start} → {end}")
        ax.set_ylabel(f"{output} so far")
    return figure


def draw_attributions(
    file: Path,
    breakdown: PredictionBreakdown,
    trajectory: Trajectory,
    X: Tensor,
    chosen: Sequence[int],
    top: int,
    *,
    head: Head | None = None,
    labels: Int64[Tensor, " n"] | None = None,
) -> None:
    """Write `attribution_figure` to a file."""
    figure = attribution_figure(breakdown, trajectory, X, chosen, top, head=head, labels=labels)
    images = as_images(X)
    save_figure(figure, file, palette=images is None or images.ndim == 3)  # grey ones need no more colours


_OUTPUT_NAMES: dict[Head, str] = {"logits": "logit", "log_softmax": "log probability"}


def output_name(number: int, head: Head | None, names: Sequence[str] | None = None, *, is_class: bool = True) -> str:
    """Return what an output is called: "logit of class 2", or "output 2" where it stands for no class.

    Args:
        number: Index of the output.
        head: What the outputs are; None means that it is not known.
        names: Names of the classes, in order.
        is_class: Whether outputs stand for classes.
    """
    if not is_class:
        return f"output {number}"
    name = number if names is None else plain(names[number])
    return f"{'output' if head is None else _OUTPUT_NAMES[head]} of class {name}"


def _title(
    n: int, breakdown: PredictionBreakdown, labels: Tensor | None, names: Sequence[str] | None, is_class: bool
) -> str:
    if not is_class:
        return f"point {n}, output {int(breakdown.output[n])}"
    predicted = int(breakdown.output[n])
    title = f"point {n}: predicted class {predicted if names is None else plain(names[predicted])}"
    if labels is None:
        return title
    true = int(labels[n])
    return f"{title}, true label {true if names is None else plain(names[true])}"


def _draw_images(
    figure: FigureBase,
    contributions: Tensor,
    point: Tensor,
    training: Tensor,
    words: tuple[Tensor | None, Sequence[str] | None, str],
    shown: int,
) -> None:
    """Draw the point, the training images that raised its output most, and below those that lowered it most."""
    labels, names, output = words
    values, order = contributions.sort(descending=True)
    raised = [(int(i), float(v)) for i, v in zip(order[:shown], values[:shown], strict=True) if v > 0]
    lowered = [(int(i), float(v)) for i, v in zip(order.flip(0)[:shown], values.flip(0)[:shown], strict=True) if v < 0]
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 4.3))[0]
    training_image(left.subplots(), point, "explained")
    rows, columns = -(-shown // _IMAGES_PER_ROW), min(shown, _IMAGES_PER_ROW)
    for part, entries, title in zip(
        right.subfigures(2, 1, squeeze=False)[:, 0],
        (raised, lowered),
        (f"{UP} raised the {output} most", f"{DOWN} lowered it most"),
        strict=True,
    ):
        part.suptitle(title, x=0.01, ha="left", fontsize=SMALL)
        axes = list(part.subplots(rows, columns, squeeze=False).flat)
        for ax in axes[len(entries) :]:
            ax.set_axis_off()
        for ax, (index, value) in zip(axes, entries, strict=False):
            training_image(ax, training[index], short(value, sign=True), value)
            ax.set_xlabel(_caption(index, labels, names), fontsize=SMALL, labelpad=2)


def _caption(index: int, labels: Tensor | None, names: Sequence[str] | None) -> str:
    if labels is None:
        return f"#{index}"
    label = int(labels[index])
    return f"#{index}\nlabel {label}" if names is None else f"#{index}\n{plain(names[label])}"


def as_images(X: Tensor) -> Tensor | None:
    """Return the points as grey (n, H, W) or colour (n, H, W, 3) images, or None if they are not images."""
    if X.ndim != 4 or X.shape[1] not in (1, 3) or min(X.shape[2:]) < 4:
        return None
    return X[:, 0] if X.shape[1] == 1 else X.permute(0, 2, 3, 1)


def class_labels(labels: Tensor) -> Tensor | None:
    """Return the targets if they are class labels, or None."""
    return labels if labels.ndim == 1 and labels.dtype == torch.int64 else None
