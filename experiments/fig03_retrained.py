"""Figure 3: class predictions over the plane when a support vector machine retrains the kernel's coefficients."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import epk_gp as epk
from epk_gp.analysis.maps import grid_coordinates, grid_over, lift, project
from epk_gp.core.trajectory import network_outputs
from epk_gp.plots import draw_colorbar, map_handles, new_figure, shades_of, uncertainty_map
from epk_gp.plots.style import styled
from harness import Experiment, classes_as_text, classes_from_text, floats_as_text, floats_from_text, main
from problems import SMALL_TOY, Toy, record_toy, toy_plane
from quantities.rays import rays
from quantities.retraining import decision_values, fit_platt_scaling, fit_support_vector_machines, probabilities

RADII = (1.0, 3.0, 10.0)
MACHINES = ("SVM on the exact path kernel", "SVM on an RBF kernel", "network")


@dataclass(frozen=True)
class Config:
    """Sizes; half of the held-out points calibrate the probabilities, half are for the accuracy."""

    toy: Toy = field(default_factory=lambda: Toy(num_test=600))
    grid: int = 60
    margin: float = 0.6
    penalty: float = 1.0
    directions: int = 72


@dataclass(frozen=True)
class Result:
    """Predictions of the retrained machines and of the network.

    Attributes:
        x: Columns of the map.
        y: Its rows.
        probability: Probability of each class on the map (C, y, x), by the retrained machine, as `floats_as_text`.
        points: Some training points in the plane.
        labels: Classes of these points.
        network_class: Class that the network predicts on a finer grid over the same square, one digit per node.
        accuracy: Accuracy of each of `MACHINES` on held-out points.
        agreement: Share of held-out points at which retrained machine and network agree.
        support: Support vectors per class, of the path kernel's machine.
        num_train: M.
        confidence: Mean largest probability over directions, per machine, at each of `RADII` (in units of the data's).
    """

    x: list[float]
    y: list[float]
    probability: dict[str, Any]
    points: list[list[float]]
    labels: list[int]
    network_class: list[str]
    accuracy: list[float]
    agreement: float
    support: list[int]
    num_train: int
    confidence: list[list[float]]


def run(config: Config) -> Result:
    """Record the toy problem, retrain, and map."""
    trajectory, held_out = record_toy(config.toy)
    half = len(held_out) // 2
    plane = toy_plane(trajectory.inputs)
    training = project(plane, trajectory.inputs)
    x, y = grid_over(training, config.grid, config.margin, square=True)
    background = grid_coordinates(*grid_over(training, 3 * config.grid, config.margin, square=True))
    ends = [rays(training, config.directions, radius)[1] for radius in RADII]
    queries = torch.cat([held_out.inputs, lift(plane, torch.cat([grid_coordinates(x, y), *ends]))])
    copies = epk.Points(trajectory.inputs, is_train=True)
    # Two nodes are exact between the kinks of a network with one hidden ReLU layer.
    path = tuple(
        epk.PathKernel(trajectory, rule=epk.gauss_legendre(2)).block_per_class(points, copies)
        for points in (copies, epk.Points(queries, is_train=False))
    )
    width = torch.cdist(trajectory.inputs[:500], trajectory.inputs[:500]).square().median()
    rbf = tuple(
        torch.exp(-torch.cdist(X, trajectory.inputs).square() / width)[None].expand(3, -1, -1)
        for X in (trajectory.inputs, queries)
    )
    outputs = network_outputs(trajectory, queries)
    found, support = [], []
    for gram, cross in (path, rbf):
        machine = fit_support_vector_machines(gram, trajectory.targets, penalty=config.penalty)
        decisions = decision_values(machine, cross)
        found.append(probabilities(fit_platt_scaling(decisions[:half], held_out.labels[:half]), decisions))
        support.append(machine.num_support_vectors.tolist())
    found.append(outputs.softmax(1))
    sizes = [len(held_out), len(x) * len(y), *[config.directions] * len(RADII)]
    parts = [values.split(sizes) for values in found]
    test = slice(half, len(held_out))
    stride = -(-trajectory.num_points // 300)
    return Result(
        x=x.tolist(),
        y=y.tolist(),
        probability=floats_as_text(parts[0][1].T.reshape(-1, len(y), len(x))),
        points=training[::stride].tolist(),
        labels=trajectory.targets[::stride].tolist(),
        network_class=classes_as_text(
            network_outputs(trajectory, lift(plane, background)).argmax(1).view(3 * len(y), -1)
        ),
        accuracy=[_share(part[0].argmax(1)[test] == held_out.labels[test]) for part in parts],
        agreement=_share(parts[0][0].argmax(1)[test] == parts[2][0].argmax(1)[test]),
        support=support[0],
        num_train=trajectory.num_points,
        confidence=[[float(p.amax(1).mean()) for p in part[2:]] for part in parts],
    )


@styled
def draw(result: Result) -> Figure:
    """Draw one map per class."""
    figure = new_figure(3.4)
    maps = floats_from_text(result.probability)
    axes = figure.subplots(1, 3, sharey=True)
    for c, ax in enumerate(axes):
        uncertainty_map(
            ax,
            np.array(result.x),
            np.array(result.y),
            maps[c],
            title=f"class {c}",
            points=np.array(result.points),
            labels=np.array(result.labels),
            boundary=classes_from_text(result.network_class),
            limits=(0.0, 1.0),
            colorbar=False,
        )
    for ax in axes[1:]:
        ax.set_ylabel("")
    draw_colorbar(list(axes), shades_of(axes[0]), "probability of the class")
    figure.legend(handles=map_handles(result.labels), loc="outside lower center", ncols=4)
    figure.suptitle(
        "Probability of each class by a support vector machine on the exact path kernel.\nPlane of the first two "
        "coordinates; the others are 0. Training points are projected onto it.",
        x=0.01,
        ha="left",
    )
    return figure


def _share(right: Tensor) -> float:
    return float(right.double().mean())


EXPERIMENT = Experiment("fig03_retrained", Config(), Config(toy=SMALL_TOY, grid=8, directions=6), Result, run, draw)

if __name__ == "__main__":
    main(EXPERIMENT)
