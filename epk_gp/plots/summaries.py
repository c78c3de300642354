"""Drawings of a run as a whole: reliability, detection of other inputs, targets, and the kernel matrix."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes

from epk_gp.plots.common import Numbers, as_numpy, plain, require_shape
from epk_gp.plots.style import COLORMAP, EXACT, GREY, OUT_OF_DISTRIBUTION, SIGNED, SMALL

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
