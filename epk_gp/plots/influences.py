"""Drawings of how predictions depend on the weights of training points."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.influence import Influence
from epk_gp.plots.attributions import attribution_bars
from epk_gp.plots.common import Numbers, as_numpy, short
from epk_gp.plots.figures import class_labels, output_name
from epk_gp.plots.style import DOWN, EXACT, GREY, UP, WIDTH, new_figure, save_figure, styled


def adjoint_curve(ax: Axes, norms: Float[Numbers, " S1"]) -> Axes:
    """Draw how large the derivative of a number in the weights is along the run, relative to that at its end.

    Args:
        ax: Axes to draw into.
        norms: Norm of the derivative in the weights of each state.

    Returns:
        The Axes.
    """
    values = as_numpy("norms", norms)
    last = float(values[-1]) or 1.0
    ax.plot(np.arange(len(values)), values / last, color=EXACT, linewidth=1.6)
    ax.axhline(1.0, color=GREY, linewidth=0.8, linestyle="--")
    ax.set_yscale("log")
    ax.set(xlabel="training step", ylabel="adjoint, relative to its end")
    return ax


@styled
def influence_figure(
    effect: Influence,
    predicted: Int64[Tensor, " n"],
    chosen: Sequence[int],
    top: int,
    trajectory: Trajectory,
    *,
    head: Head | None = None,
) -> Figure:
    """Draw the training points on whose weights predicted outputs depend most, and the adjoint along the run.

    Args:
        effect: The derivatives of all outputs of n points, or of the predicted ones.
        predicted: The predicted class of each point.
        chosen: Indices of the points that are drawn, one below the other.
        top: Number of training points drawn of either sign.
        trajectory: The run.
        head: What the outputs are, for their names.
    """
    columns = torch.zeros_like(predicted) if effect.outputs.shape[1] == 1 else predicted
    shown, known = min(top, trajectory.num_points), class_labels(trajectory.targets)
    figure = new_figure((1.3 + 0.36 * shown) * len(chosen))
    parts = figure.subfigures(len(chosen), 1, squeeze=False)[:, 0]
    for part, n in zip(parts, chosen, strict=True):
        k = int(columns[n])
        output = output_name(int(predicted[n]), head, is_class=known is not None)
        title = (
            f"point {n}: {output} {short(float(effect.outputs[n, k]))} ± {short(float(effect.std[n, k]))} (jackknife)"
        )
        part.suptitle(title, x=0.01, ha="left", weight="bold")
        left, right = part.subfigures(1, 2, width_ratios=(WIDTH - 2.3, 2.3))
        ax = attribution_bars(left.subplots(), effect.values[n, k], known, top=top, title="", output=output)
        total = f"all bars together: {short(float(effect.values[n, k].sum()), sign=True)}"
        ax.set_xlabel(f"{DOWN} its weight lowers     derivative in the sample's weight     {UP} raises\n{total}")
        adjoint_curve(right.subplots(), effect.adjoint_norms[n, k])
    return figure


def draw_influences(
    file: Path,
    effect: Influence,
    predicted: Int64[Tensor, " n"],
    chosen: Sequence[int],
    top: int,
    trajectory: Trajectory,
    *,
    head: Head | None = None,
) -> None:
    """Write `influence_figure` to a file."""
    figure = influence_figure(effect, predicted, chosen, top, trajectory, head=head)
    save_figure(figure, file, palette=True)
