"""Pictures of a run as a whole: reliability, other inputs, targets, the kernel matrix, and the kernel machine."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from epk_gp.core.losses import Head
from epk_gp.kernel_machine.reconstruct import Reconstruction
from epk_gp.plots import style

_MARKERS = "osD^v"
_ROOM = 40  # characters of all groups' names that stand beside each other below a matrix


def reliability_diagram(
    ax: Axes,
    confidence: Float[style.Numbers, " B"],
    accuracy: Float[style.Numbers, " B"],
    count: Int[style.Numbers, " B"],
) -> None:
    """Draw the share of right predictions of the points of each bin against their mean confidence, larger for more."""
    given = {"confidence": confidence, "accuracy": accuracy, "count": count}
    x, y, n = (style.as_numpy(name, values) for name, values in given.items())
    ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=1, linestyle="--", label="confidence = accuracy")
    ax.plot(x, y, color=style.EXACT, linewidth=1.2)
    sizes, label = 20 + 180 * n / n.max(), "points of a bin; larger: more of them"
    ax.scatter(x, y, s=sizes, color=style.EXACT, zorder=3, label=label)
    ax.set(xlabel="confidence: probability of the predicted class", ylabel="share predicted rightly")
    ax.set(xlim=(-0.02, 1.04), ylim=(-0.02, 1.06))
    ax.legend(fontsize=style.SMALL, loc="lower right")


def roc(ax: Axes, inside: Float[style.Numbers, " k"], outside: Float[style.Numbers, " k"]) -> None:
    """Draw the share of other points that each threshold calls unlike the data, against that of ordinary ones."""
    ax.plot([0, 1], [0, 1], color=style.GREY, linewidth=1, linestyle="--", label="chance")
    x, y = style.as_numpy("inside", inside), style.as_numpy("outside", outside)
    ax.plot(x, y, color=style.OUT_OF_DISTRIBUTION, label="out-of-distribution score")
    ax.set(xlabel="share of ordinary points called unlike", ylabel="share of other points called unlike")
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    ax.legend(fontsize=style.SMALL, loc="lower right")


def target_scatter(ax: Axes, targets: Float[style.Numbers, " n"], outputs: Float[style.Numbers, " n"]) -> None:
    """Draw the outputs of a regression against their targets."""
    x, y = style.as_numpy("targets", targets), style.as_numpy("outputs", outputs)
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    ax.plot(ends, ends, color=style.GREY, linewidth=1, linestyle="--", label="output = target")
    ax.scatter(x, y, s=12, color=style.EXACT, alpha=0.7, linewidths=0, label="points")
    ax.set(xlabel="target", ylabel="output of the network")
    ax.legend(fontsize=style.SMALL)


def kernel_matrix(
    ax: Axes,
    cosines: Float[style.Numbers, "n n"],
    groups: Int[style.Numbers, " n"] | None,
    names: Sequence[str] | None = None,
) -> None:
    """Draw a matrix of cosines between points, with lines between groups that follow one another.

    Shades begin at the smallest cosine, rounded down to a tenth; where one is negative, colours go from -1 to 1.

    Args:
        ax: Axes to draw into; a colour bar is added to its figure.
        cosines: From -1 to 1.
        groups: Group of each point, such as its class; None for no lines.
        names: Names of the groups; their numbers by default.
    """
    K = style.as_numpy("cosines", cosines)
    least = float(K.min())
    low, colours = (np.floor(10 * least) / 10, style.COLORMAP) if least >= 0 else (-1.0, style.SIGNED)
    image = ax.imshow(K, vmin=low, vmax=1, cmap=colours, interpolation="nearest")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.set_label("cosine")
    bar.outline.set_visible(False)
    ax.grid(visible=False)
    ax.set(xticks=[], yticks=[])
    if groups is None:
        return
    g = style.as_numpy("groups", groups)
    edges = np.flatnonzero(np.diff(g)) + 0.5
    for edge in edges:
        ax.axhline(edge, color=style.OUT_OF_DISTRIBUTION, linewidth=0.8)
        ax.axvline(edge, color=style.OUT_OF_DISTRIBUTION, linewidth=0.8)
    ends = np.concatenate([[-0.5], edges, [len(K) - 0.5]])
    middles, present = (ends[:-1] + ends[1:]) / 2, g[np.ceil(ends[:-1]).astype(int)]
    words = [style.class_name(int(v), names, "") for v in present]
    ax.set_xticks(middles, words, rotation=90 if sum(map(len, words)) > _ROOM else 0)
    ax.set_yticks(middles, words)
    ax.tick_params(length=0)


def spectrum(ax: Axes, values: Float[style.Numbers, " n"]) -> None:
    """Draw descending eigenvalues as shares of their sum, on a logarithmic axis, without those of 0 by rounding."""
    eigenvalues = style.as_numpy("values", values)
    shares = eigenvalues / eigenvalues[eigenvalues > 0].sum()
    ranks = np.arange(1, len(shares) + 1)
    drawn = shares > 1e-16
    ax.semilogy(ranks[drawn], shares[drawn], color=style.EXACT, marker=".", markersize=4, linewidth=1)
    ax.set(xlabel="number of the eigenvalue", ylabel="share of the sum")


def compare_outputs(
    ax: Axes,
    network: Float[style.Numbers, "*shape"],
    machine: Float[style.Numbers, "*shape"],
    show: Literal["outputs", "differences", "errors"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw a kernel machine against its network, with the largest error in the legend.

    Call it once per rule to compare rules in one figure, the coarsest first. The errors' logarithmic axis has a band at
    the bottom, which float64 cannot represent: half a unit in the last place of the largest output. An error of exactly
    0 is drawn inside the band.

    Args:
        ax: Axes to draw into.
        network: Outputs of the trained network, of any shape.
        machine: Outputs of the kernel machine, in the same order.
        show: The machine's outputs, as in Figure 4 of Bell et al. (2023); what they miss, to scale; or its size.
        label: Label of `machine` in the legend, such as the name of the quadrature rule.

    Returns:
        The Axes.

    Raises:
        ValueError: The two shapes differ, or there is no output, or an output is not finite.
    """
    x, y = style.as_numpy("network", network), style.as_numpy("machine", machine)
    if x.shape != y.shape or x.size == 0:
        raise ValueError(f"network and machine must have one shape and an output: got {x.shape} and {y.shape}.")
    x, y = x.ravel(), y.ravel()
    index, error = len(ax.collections), np.abs(y - x)
    place: Literal["best", "upper left", "center right"] = "best"
    said, drawn, name = "largest", y - x, "kernel machine − network"
    if show == "outputs":
        said, drawn, place, name = "largest |error|", y, "upper left", "kernel machine output"
        ax.set(aspect="equal", adjustable="datalim")
    elif show == "errors":
        floor = np.finfo(np.float64).eps / 2 * max(float(np.abs(x).max()), np.finfo(np.float64).tiny)
        drawn, place, name = error.clip(min=floor / 5), "center right", "|kernel machine − network|"
        if index == 0:
            band = "below the rounding of float64"
            ax.axhspan(floor / 30, floor, color=style.REST, linewidth=0, zorder=0, label=band)
    if index == 0 and show != "errors":
        origin, slope = ((0.0, 0.0), 1.0) if show == "outputs" else ((float(x[0]), 0.0), 0.0)
        ax.axline(origin, slope=slope, color=style.GREY, linewidth=1, zorder=1)
    ax.scatter(
        x, drawn, s=16, color=style.class_colour(index), marker=_MARKERS[index % 5], alpha=0.75, linewidth=0, zorder=2,
        label=style.plain(f"{label}: {said} {style.short(error.max())}"),
    )  # fmt: skip
    if show == "errors":
        ax.set(yscale="log")
        ax.set_ylim(floor / 30, None)
        few_decades(ax)
    ax.set(xlabel="network output", ylabel=name)
    ax.legend(loc=place, fontsize=style.SMALL)
    return ax


def few_decades(ax: Axes) -> None:
    """Mark every few decades of a logarithmic ordinate, written as 1e−6."""
    ax.yaxis.set_major_locator(LogLocator(numticks=7))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.short(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


@style.styled
def reconstruction_figure(machines: Sequence[tuple[str, Reconstruction]], head: Head | None = None) -> Figure:
    """Draw what kernel machines leave of the network's outputs: in full, and its size on a logarithmic axis.

    Args:
        machines: Name and kernel machine, from the coarsest rule to the finest.
        head: What the outputs are, for the names of the axes.
    """
    figure = style.new_figure(3.7)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    for name, machine in machines:
        compare_outputs(left, machine.network, machine.outputs, "differences", label=name)
        compare_outputs(right, machine.network, machine.outputs, "errors", label=name)
    name = f"{style.OUTPUT_NAMES[head]} of the network"
    left.set(title="kernel machine − network, to scale", xlabel=name, ylabel="")
    right.set(title="its size, on a logarithmic axis", xlabel=name, ylabel="")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for ax in (left, right):
        ax.get_legend().remove()
    return figure
