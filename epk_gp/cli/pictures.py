"""The pictures that commands write."""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.machines.attribute import Attribution
from epk_gp.machines.reconstruct import Reconstruction
from epk_gp.plots import attribution_bars, error_against_evaluations, reconstruction_scatter, uncertainty_map

_DPI = 100
_MOST_POINTS = 600  # training points drawn on a map


def draw_reconstruction(path: Path, machines: Sequence[tuple[str, Reconstruction]]) -> None:
    """Draw every machine's outputs, and their errors, against the network's."""
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
    """Draw name, evaluations and largest error of each rule."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    names, evaluations, errors = zip(*rules, strict=True)
    ax = figure.subplots()
    error_against_evaluations(ax, names, evaluations, errors)
    ax.set_title("what each quadrature rule costs, and what it leaves")
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_map(path: Path, m: UncertaintyMap, labels: Tensor, axis_names: tuple[str, str] = ("$x_1$", "$x_2$")) -> None:
    """Draw the kernel, the doubt about the network's class, its standard deviation and the entropy over a plane."""
    figure = Figure(figsize=(10.5, 9.5), layout="constrained")
    stride = -(-len(m.training) // _MOST_POINTS)
    panels = (
        (m.kernel, "kernel value k(x, x)", "relative to the training points' mean"),
        (1 - m.probability, "doubt: 1 − expected probability of the network's class", "probability"),
        (m.std, "standard deviation of that probability", "standard deviation"),
        (m.entropy, "entropy of the expected probabilities", "nats"),
    )
    classes = _classes(labels)
    for number, (ax, (values, title, unit)) in enumerate(zip(figure.subplots(2, 2).flat, panels, strict=True)):
        uncertainty_map(
            ax,
            m.x,
            m.y,
            values,
            title=title,
            points=m.training[::stride],
            labels=None if classes is None else classes[::stride],
            boundary=m.fine_class,
            colorbar_label=unit,
        )
        ax.set_title(title, fontsize="medium")
        ax.set(xlabel=axis_names[0], ylabel=axis_names[1])
        legend = ax.get_legend()
        if legend is not None and number < 2:  # once per column is enough
            legend.remove()
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def draw_attribution(
    path: Path, parts: Attribution, labels: Tensor, names: Sequence[str], chosen: Sequence[int], top: int
) -> None:
    """Draw the largest contributions to one output of each chosen point: that which the network predicts.

    Args:
        path: Where to write.
        parts: The contributions.
        labels: Training targets.
        names: What to call the chosen points.
        chosen: Rows of `parts`.
        top: Training points of either sign.
    """
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(5.6 * columns, (1.4 + 0.42 * top) * rows), layout="constrained")
    axes = iter(figure.subplots(rows, columns, squeeze=False).flat)
    known = _classes(labels)
    classes = torch.zeros(len(labels), dtype=torch.int64) if known is None else known
    for ax, name, n in zip(axes, names, chosen, strict=False):
        c = int(parts.network[n].argmax())
        start, end = (f"{float(v[n, c]):.3g}".replace("-", "−") for v in (parts.initial, parts.network))
        attribution_bars(ax, parts.samples[n, c], classes, top=top)
        low, high = ax.get_xlim()
        room = 0.12 * (high - low)  # for the words beside a cut bar
        ax.set_xlim(low - room if parts.samples[n, c].min() < 0 else low, high + room)
        ax.set_title(f"{name}, output {c}: {start} at the start, {end} trained", fontsize="medium")
        legend = ax.get_legend()
        if legend is not None and known is None:
            legend.remove()
    for ax in axes:  # what is left of the last row
        ax.set_axis_off()
    figure.savefig(path, dpi=_DPI, bbox_inches="tight")


def _classes(labels: Tensor) -> Tensor | None:
    return labels if labels.ndim == 1 and labels.dtype == torch.int64 else None
