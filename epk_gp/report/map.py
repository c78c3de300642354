"""The map of uncertainty over a plane, with the training samples behind each spot."""

from typing import Any

import torch
from matplotlib.figure import Figure

from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.analysis.planes import Plane, grid_coordinates, lift
from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import NUM_NODES, nodes_trajectory
from epk_gp.plots.maps import map_handles, shades_of, uncertainty_map
from epk_gp.plots.style import new_figure, styled
from epk_gp.quadrature.rules import left_endpoint
from epk_gp.report.fixed_point import significant
from epk_gp.report.pictures import DRAWING, svg
from epk_gp.report.request import ReportRequest

COARSE = 12  # cells per side for which the samples behind are computed
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
    sentence = (
        "Probability that the network's class is wrong, by the process: dark is uncertain. The largest Monte Carlo "
        f"standard error is {m.standard_error:.2g}. Behind each cell of a grid of {count} × {count} stand the "
        f"{_BEHIND} drawn training samples that training treats most like its middle: those with the largest cosine of "
        f"the path kernel, by the midpoint rule with {NUM_NODES} nodes along the path."
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
        "behind": _behind(request, m, m.plane, count),
    }


@styled
def _draw(request: ReportRequest, m: UncertaintyMap) -> Figure:
    stride = _stride(m)
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


def _behind(request: ReportRequest, m: UncertaintyMap, plane: Plane, count: int) -> list[list[int]]:
    """Return the drawn samples with the largest cosine to each cell's middle, row by row from the first coordinates."""
    run = request.trajectory.trained
    drawn = torch.arange(0, len(m.training), _stride(m))
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    x, y = (axis[0] + middles.to(axis) * (axis[-1] - axis[0]) for axis in (m.x, m.y))
    cells = Points(lift(plane, grid_coordinates(x, y)).to(run.inputs), is_train=False)
    samples = Points(run.inputs[drawn.to(run.inputs.device)], is_train=False)
    kernel = PathKernel(nodes_trajectory(run, NUM_NODES), request.head, left_endpoint())
    options = ComputeOptions(memory_budget=request.settings.options.memory_budget)
    K = kernel.trace_block(cells, samples, options).cpu()
    norms = kernel.diagonal_blocks(samples, options).diagonal(dim1=1, dim2=2).sum(dim=1).sqrt().cpu()
    cosines = K / norms.clamp(min=torch.finfo(K.dtype).tiny)  # but for a factor that a cell's samples share
    nearest = cosines.topk(min(_BEHIND, len(drawn)), dim=1).indices
    found: list[list[int]] = drawn[nearest].tolist()
    return found


def _stride(m: UncertaintyMap) -> int:
    return -(-len(m.training) // _MAX_POINTS)
