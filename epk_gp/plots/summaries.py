"""Pictures of a run as a whole: reliability, other inputs, targets, the kernel matrix, and the kernel machine."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from epk_gp.core.losses import Head
from epk_gp.kernel_machine.reconstruct import Reconstruction
from epk_gp.plots.common import OUTPUT_NAMES, Numbers, as_numpy, plain, require_shape, short
from epk_gp.plots.style import (
    COLORMAP,
    EXACT,
    GREY,
    OUT_OF_DISTRIBUTION,
    PALETTE,
    REST,
    SIGNED,
    SMALL,
    new_figure,
    styled,
)

_IDENTITY = "identity"
_MARKERS = "osD^v"
_ROOM = 40  # characters of all groups' names that stand beside each other below a matrix


def reliability_diagram(
    ax: Axes,
    confidence: Float[Numbers, " B"],
    accuracy: Float[Numbers, " B"],
    count: Int[Numbers, " B"],
) -> Axes:
    """Draw the share of right predictions against their confidence, with the number of points beside each mark.

    Args:
        ax: Axes to draw into.
        confidence: Mean confidence of the points of each bin that has points.
        accuracy: Share of them that is predicted rightly.
        count: Their number, which gives the size of the mark.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes differ, or a number is not finite.
    """
    x, y, n = as_numpy("confidence", confidence), as_numpy("accuracy", accuracy), as_numpy("count", count)
    require_shape("accuracy", y, x.shape)
    require_shape("count", n, x.shape)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="confidence = accuracy")
    ax.plot(x, y, color=EXACT, linewidth=1.2)
    ax.scatter(x, y, s=20 + 180 * n / n.max(), color=EXACT, zorder=3, label="points of a bin; larger: more of them")
    ax.set(xlabel="confidence: probability of the predicted class", ylabel="share predicted rightly")
    ax.set(xlim=(-0.02, 1.04), ylim=(-0.02, 1.06))
    ax.legend(fontsize=SMALL, loc="lower right")
    return ax


def roc(ax: Axes, inside: Float[Numbers, " k"], outside: Float[Numbers, " k"]) -> Axes:
    """Draw a receiver operating characteristic.

    Args:
        ax: Axes to draw into.
        inside: Share of the points like the training data that each threshold calls unlike them, ascending.
        outside: Share of the others that it does.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes differ, or a number is not finite.
    """
    x, y = as_numpy("inside", inside), as_numpy("outside", outside)
    require_shape("outside", y, x.shape)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", label="chance")
    ax.plot(x, y, color=OUT_OF_DISTRIBUTION, label="out-of-distribution score")
    ax.set(xlabel="share of ordinary points called unlike", ylabel="share of other points called unlike")
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    ax.legend(fontsize=SMALL, loc="lower right")
    return ax


def target_scatter(ax: Axes, targets: Float[Numbers, " n"], outputs: Float[Numbers, " n"]) -> Axes:
    """Draw the outputs of a regression against their targets.

    Args:
        ax: Axes to draw into.
        targets: Known values.
        outputs: The network's values.

    Returns:
        The Axes.

    Raises:
        ValueError: The shapes differ, or a number is not finite.
    """
    x, y = as_numpy("targets", targets), as_numpy("outputs", outputs)
    require_shape("outputs", y, x.shape)
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    ax.plot(ends, ends, color=GREY, linewidth=1, linestyle="--", label="output = target")
    ax.scatter(x, y, s=12, color=EXACT, alpha=0.7, linewidths=0, label="points")
    ax.set(xlabel="target", ylabel="output of the network")
    ax.legend(fontsize=SMALL)
    return ax


def kernel_matrix(
    ax: Axes, cosines: Float[Numbers, "n n"], groups: Int[Numbers, " n"] | None, names: Sequence[str] | None = None
) -> Axes:
    """Draw a matrix of cosines between points, with lines between groups that follow one another.

    Shades begin at the smallest cosine, rounded down to a tenth; where one is negative, colours go from -1 to 1.

    Args:
        ax: Axes to draw into; a colour bar is added to its figure.
        cosines: From -1 to 1.
        groups: Group of each point, such as its class; None for no lines.
        names: Names of the groups; their numbers by default.

    Returns:
        The Axes.

    Raises:
        ValueError: The matrix is not square, or a number is not finite, or there is not one group per row.
    """
    K = as_numpy("cosines", cosines)
    require_shape("cosines", K, (len(K), len(K)))
    least = float(K.min())
    low, colours = (np.floor(10 * least) / 10, COLORMAP) if least >= 0 else (-1.0, SIGNED)
    image = ax.imshow(K, vmin=low, vmax=1, cmap=colours, interpolation="nearest")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.set_label("cosine")
    bar.outline.set_visible(False)
    ax.grid(visible=False)
    ax.set(xticks=[], yticks=[])
    if groups is not None:
        g = as_numpy("groups", groups)
        require_shape("groups", g, (len(K),))
        edges = np.flatnonzero(np.diff(g)) + 0.5
        for edge in edges:
            ax.axhline(edge, color=OUT_OF_DISTRIBUTION, linewidth=0.8)
            ax.axvline(edge, color=OUT_OF_DISTRIBUTION, linewidth=0.8)
        ends = np.concatenate([[-0.5], edges, [len(K) - 0.5]])
        middles, present = (ends[:-1] + ends[1:]) / 2, g[np.ceil(ends[:-1]).astype(int)]
        words = [str(int(v)) if names is None else plain(names[int(v)]) for v in present]
        ax.set_xticks(middles, words, rotation=90 if sum(map(len, words)) > _ROOM else 0)
        ax.set_yticks(middles, words)
        ax.tick_params(length=0)
    return ax


def spectrum(ax: Axes, values: Float[Numbers, " n"]) -> Axes:
    """Draw eigenvalues as shares of their sum, on a logarithmic axis.

    Args:
        ax: Axes to draw into.
        values: Eigenvalues, descending; those that are zero or negative by rounding are not drawn.

    Returns:
        The Axes.

    Raises:
        ValueError: A number is not finite, or none is positive.
    """
    eigenvalues = as_numpy("values", values)
    if not (eigenvalues > 0).any():
        raise ValueError("values must hold a positive eigenvalue: got none.")
    shares = eigenvalues / eigenvalues[eigenvalues > 0].sum()
    ranks = np.arange(1, len(shares) + 1)
    drawn = shares > 1e-16
    ax.semilogy(ranks[drawn], shares[drawn], color=EXACT, marker=".", markersize=4, linewidth=1)
    ax.set(xlabel="number of the eigenvalue", ylabel="share of the sum")
    return ax


def reconstruction_differences(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw kernel machine minus network, to scale, against the network's outputs: an exact machine lies on the line 0.

    Call it once per rule to compare rules in one figure, the coarsest first.

    Args:
        ax: Axes to draw into.
        network: Outputs of the trained network, of any shape.
        machine: Outputs of the kernel machine, in the same order.
        label: Label of `machine` in the legend, such as the name of the quadrature rule.

    Returns:
        The Axes.

    Raises:
        ValueError: The two shapes differ, or there is no output, or an output is not finite.
    """
    x, y = compared_outputs(network, machine)
    if not any(line.get_gid() == _IDENTITY for line in ax.lines):
        ax.axhline(0, color=GREY, linewidth=1, zorder=1, gid=_IDENTITY)
    scatter_outputs(ax, x, y - x, f"{label}: largest {short(np.abs(y - x).max())}")
    ax.set(xlabel="network output", ylabel="kernel machine − network")
    ax.legend(loc="best", fontsize=SMALL)
    return ax


def reconstruction_errors(
    ax: Axes,
    network: Float[Numbers, "*shape"],
    machine: Float[Numbers, "*shape"],
    *,
    label: str = "kernel machine",
) -> Axes:
    """Draw the size of the kernel machine's errors on a logarithmic axis, against the network's outputs.

    The band at the bottom is what float64 cannot represent: half a unit in the last place of the largest output. An
    error of exactly 0 is drawn inside the band. Call it once per rule to compare rules in one figure.

    Args:
        ax: Axes to draw into.
        network: Outputs of the trained network, of any shape.
        machine: Outputs of the kernel machine, in the same order.
        label: Label of `machine` in the legend, such as the name of the quadrature rule.

    Returns:
        The Axes.

    Raises:
        ValueError: The two shapes differ, or there is no output, or an output is not finite.
    """
    x, y = compared_outputs(network, machine)
    error = np.abs(y - x)
    floor = np.finfo(np.float64).eps / 2 * max(float(np.abs(x).max()), np.finfo(np.float64).tiny)
    if not any(patch.get_gid() == _IDENTITY for patch in ax.patches):
        words = "below the rounding of float64"
        ax.axhspan(floor / 30, floor, color=REST, linewidth=0, zorder=0, gid=_IDENTITY, label=words)
    scatter_outputs(ax, x, error.clip(min=floor / 5), f"{label}: largest {short(error.max())}")
    ax.set(yscale="log", xlabel="network output", ylabel="|kernel machine − network|")
    ax.set_ylim(floor / 30, None)
    few_decades(ax)
    ax.legend(loc="center right", fontsize=SMALL)
    return ax


def few_decades(ax: Axes) -> None:
    """Mark every few decades of a logarithmic ordinate, written as 1e−6."""
    ax.yaxis.set_major_locator(LogLocator(numticks=7))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def compared_outputs(network: Numbers, machine: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of network and kernel machine in one row each.

    Raises:
        ValueError: The two shapes differ, or there is no output, or an output is not finite.
    """
    x, y = as_numpy("network", network), as_numpy("machine", machine)
    if x.shape != y.shape:
        raise ValueError(
            f"network and machine must have one shape: got {x.shape} and {y.shape}. Pass the same points and outputs."
        )
    if x.size == 0:
        raise ValueError("network must hold at least one output: got none. Pass one test point or more.")
    return x.ravel(), y.ravel()


def scatter_outputs(ax: Axes, x: np.ndarray, y: np.ndarray, label: str) -> None:
    """Draw points with the next colour and mark; the last ones to come are on top."""
    index = len(ax.collections)
    ax.scatter(
        x, y, s=16, color=PALETTE[index % len(PALETTE)], marker=_MARKERS[index % 5], alpha=0.75, linewidth=0, zorder=2,
        label=plain(label),
    )  # fmt: skip


@styled
def reconstruction_figure(machines: Sequence[tuple[str, Reconstruction]], head: Head | None = None) -> Figure:
    """Draw what kernel machines leave of the network's outputs: in full, and its size on a logarithmic axis.

    Args:
        machines: Name and kernel machine, from the coarsest rule to the finest.
        head: What the outputs are, for the names of the axes.
    """
    words = "output" if head is None else OUTPUT_NAMES[head]
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
