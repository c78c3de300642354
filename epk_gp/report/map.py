"""The map of uncertainty over a plane, with the training samples behind each spot."""

import warnings
from typing import Any

import torch
from matplotlib.figure import Figure

from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.analysis.planes import Plane, grid_coordinates, lift
from epk_gp.core.certificate import CertificateWarning
from epk_gp.core.trajectory import network_outputs
from epk_gp.kernel_machine.attribute import attribute_by
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.plots.maps import map_handles, shades_of, uncertainty_map
from epk_gp.plots.style import new_figure, styled
from epk_gp.report.fixed_point import significant
from epk_gp.report.pictures import DRAWING, svg
from epk_gp.report.request import ReportRequest

COARSE = 8  # cells per side for which the samples behind are computed: each costs as much as an explained output
_BEHIND = 3  # samples behind a cell
_MAX_POINTS = 400  # training samples that are drawn
_AXES = ("first direction of the plane", "second direction of the plane")


def map_entry(request: ReportRequest, m: UncertaintyMap) -> dict[str, Any]:
    """Return the map as the page takes it."""
    assert m.plane is not None  # noqa: S101  by `validate_map`
    count = min(COARSE, len(m.x), len(m.y))
    with DRAWING:
        figure = _draw(request, m)
        left, bottom, width, height = figure.axes[0].get_position().bounds
        picture = svg(figure)
    behind, certified = _behind(request, m, m.plane, count)
    sentence = (
        "Probability that the network's class is wrong, by the process: dark is uncertain. The largest Monte Carlo "
        f"standard error is {m.standard_error:.2g}. Behind each cell of a grid of {count} × {count} stand the "
        f"{_BEHIND} training samples that raised the network's class most at its middle, by exact contributions."
        + ("" if certified else " These contributions are NOT CERTIFIED: do not rely on them.")
    )
    return {
        "title": "Where is it sure?",
        "sentence": sentence,
        "extent": [float(m.x[0]), float(m.x[-1]), float(m.y[0]), float(m.y[-1])],
        "axes": list(_AXES),
        "shape": list(m.probability.shape),
        "svg": picture,
        "area": [significant(v, 6) for v in (left, 1 - bottom - height, left + width, 1 - bottom)],
        "predicted": m.network_class.flatten().tolist(),
        "wrong": [significant(v, 3) for v in (1 - m.probability).clamp(min=0).flatten().tolist()],
        "coarse": [count, count],
        "behind": behind,
    }


@styled
def _draw(request: ReportRequest, m: UncertaintyMap) -> Figure:
    stride = -(-len(m.training) // _MAX_POINTS)
    labels = None if request.training_labels is None else request.training_labels[::stride]
    figure = new_figure(5.2, 5.6)
    uncertainty_map(
        figure.subplots(),
        m.x,
        m.y,
        1 - m.probability,
        title="",
        points=m.training[::stride],
        labels=labels,
        boundary=m.boundary_classes,
        regions=m.network_class,
        colorbar_label="probability that the network's class is wrong",
        limits=(0.0, float((1 - m.probability).max())),
        names=request.class_names,
        legend=False,
    )
    shades_of(figure.axes[0]).set_rasterized(True)  # a picture: as outlines they are ten times as many bytes
    figure.axes[0].set(xlabel=_AXES[0], ylabel=_AXES[1])
    if labels is not None:
        handles = map_handles(labels, names=request.class_names)
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return figure


def _behind(request: ReportRequest, m: UncertaintyMap, plane: Plane, count: int) -> tuple[list[list[int]], bool]:
    """Return the samples that raised the network's class most, and whether that is certified.

    Cells are in the order of the map's nodes: row by row from the smallest coordinates on.
    """
    run, options = request.trajectory, request.settings.options
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    x, y = (axis[0] + middles.to(axis) * (axis[-1] - axis[0]) for axis in (m.x, m.y))
    X = lift(plane, grid_coordinates(x, y)).to(run.inputs)
    classes = network_outputs(run, X).argmax(dim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # the sentence of the map says it
        parts = attribute_by(
            run,
            X,
            [by_sample(run)],
            head=request.head,
            rule=request.settings.rule,
            classes=classes,
            memory_budget=options.memory_budget,
            progress=options.progress,
            executor=options.executor,
        )
    values, order = parts.values[:, 0].topk(min(_BEHIND, run.num_points), dim=1)
    behind = [
        [index for index, value in zip(indices, raised, strict=True) if value > 0]
        for indices, raised in zip(order.tolist(), values.tolist(), strict=True)
    ]
    return behind, parts.certified
