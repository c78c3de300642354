"""The path kernel between some training samples, ordered by class, and its spectrum."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from matplotlib.figure import Figure
from torch import Tensor

from epk_gp.analysis.spectrum import gram_spectrum
from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import NUM_NODES, nodes_trajectory
from epk_gp.plots.style import new_figure, styled
from epk_gp.plots.summaries import kernel_matrix, spectrum
from epk_gp.quadrature.rules import left_endpoint
from epk_gp.report.fixed_point import significant
from epk_gp.report.pictures import figure_entry
from epk_gp.report.request import ReportRequest

MAX_OUTPUTS = 100  # each output of each sample costs a backward pass at each node
_EIGENVALUES = 20  # in the table


def reason_without_kernel(request: ReportRequest) -> str | None:
    """Return why a report has no kernel matrix; None if it has one."""
    run, count = request.trajectory, request.settings.kernel_points
    if count < 2 or run.num_points < 2:
        return "fewer than two samples were asked for" if count < 2 else "there is one training sample only"
    if run.num_outputs > MAX_OUTPUTS:
        return f"the network has more than {MAX_OUTPUTS} outputs, each of which costs a backward pass"
    if run.average is not None:
        return "the path of averaged weights has no path kernel"
    if not float(run.step_sizes.sum()) > 0:
        return "the learning rates of the first parameter group sum to 0"
    return None


def kernel_figures(request: ReportRequest) -> list[dict[str, Any]]:
    """Return the matrix and its spectrum, or nothing where a report has no kernel matrix."""
    if reason_without_kernel(request) is not None:
        return []
    trajectory, labels = request.trajectory, request.training_labels
    chosen, groups = _choose(trajectory, labels, request.settings.kernel_points)
    K = _matrix(request, chosen).cpu()
    diagonal = K.diagonal()
    if not bool((diagonal > 0).all()):  # a sample whose gradient is 0 throughout has no direction
        return []
    cosines = K / (diagonal[:, None] * diagonal).sqrt()
    how = (
        "at the start of each step"
        if trajectory.num_steps <= NUM_NODES
        else f"by the midpoint rule with {NUM_NODES} nodes along the path"
    )
    of = "by class" if groups is not None else "in the order of the data"
    sentence = (
        f"Path kernel between {len(chosen)} of {trajectory.num_points} training samples, {of}, as the cosine of the "
        f"angle between them: the sum over the outputs under {request.head}, {how}. Dark: training moves both alike."
    )
    table = _class_table(cosines, groups, request.class_names)

    @styled
    def draw_matrix() -> Figure:
        figure = new_figure(4.4, 5.2)
        ax = kernel_matrix(figure.subplots(), cosines, groups, names=request.settings.class_names)
        if groups is not None:
            ax.set(xlabel="class", ylabel="class")
        return figure

    found = gram_spectrum(K)

    @styled
    def draw_spectrum() -> Figure:
        figure = new_figure(3.4, 5.0)
        spectrum(figure.subplots(), found.values)
        return figure

    total = float(found.values.clamp(min=0).sum())
    values = [
        [n, significant(v, 4), significant(v / total, 3)]
        for n, v in enumerate(found.values[:_EIGENVALUES].tolist(), start=1)
    ]
    words = (
        f"Eigenvalues of the same matrix, not divided by its diagonal. {found.num_principal} of {len(chosen)} hold "
        f"95 % of their sum; the effective rank, the exponential of their entropy, is {found.effective_rank:.1f}."
    )
    head = ("number", "eigenvalue", "share of the sum")
    return [
        figure_entry("kernel", "Which samples does training treat alike?", sentence, draw_matrix, table),
        figure_entry("spectrum", "How many directions does it use?", words, draw_spectrum, (head, values)),
    ]


def _choose(
    trajectory: Trajectory, labels: Int64[Tensor, " M"] | None, count: int
) -> tuple[Int64[Tensor, " k"], Int64[Tensor, " k"] | None]:
    """Choose training samples evenly over the classes, in the order of the classes; evenly over all without classes."""
    M = trajectory.num_points
    if labels is None:
        return torch.linspace(0, M - 1, min(count, M)).round().long().unique(), None
    present = labels[(labels >= 0) & (labels < trajectory.num_outputs)].unique()
    each = max(1, count // len(present))
    chosen = torch.cat([(labels == c).nonzero()[:each, 0] for c in present])[:count]
    return chosen, labels[chosen]


def _matrix(request: ReportRequest, chosen: Int64[Tensor, " k"]) -> Float[Tensor, "k k"]:
    trajectory = request.trajectory
    X = trajectory.inputs[chosen.to(trajectory.inputs.device)]
    if trajectory.num_steps > NUM_NODES:
        run, points = nodes_trajectory(trajectory, NUM_NODES), Points(X, is_train=False)
    else:
        run, points = trajectory, Points(X, is_train=True)
    options = ComputeOptions(memory_budget=request.settings.options.memory_budget)
    return PathKernel(run, request.head, left_endpoint()).trace_block(points, points, options).double()


def _class_table(
    cosines: Float[Tensor, "k k"], groups: Int64[Tensor, " k"] | None, names: tuple[str, ...]
) -> tuple[list[str], list[list[Any]]]:
    """Average the cosines between classes; without classes, describe their distribution."""
    off = ~torch.eye(len(cosines), dtype=torch.bool)
    if groups is None:
        values = cosines[off]
        levels = (0.0, 0.25, 0.5, 0.75, 1.0)
        found = torch.quantile(values, torch.tensor(levels, dtype=values.dtype)).tolist()
        return ["quantile", "cosine of two samples"], [
            [q, significant(v, 3)] for q, v in zip(levels, found, strict=True)
        ]
    present = groups.unique().tolist()
    rows: list[list[Any]] = []
    for c in present:
        pairs = [(off & (groups[:, None] == c) & (groups == d)) for d in present]
        rows.append([names[c], *(significant(float(cosines[p].mean()), 3) if bool(p.any()) else "" for p in pairs)])
    return ["mean cosine with", *(names[c] for c in present)], rows
