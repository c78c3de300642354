"""Several paths between the same weights: one output, other contributions (section 3.6, Bell et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.analysis.measures import rank_correlation
from epk_gp.autodiff.dense import WeightSegment
from epk_gp.core.trajectory import flat_state, network_outputs
from epk_gp.datasets import digits
from epk_gp.kernel_machine import adjoint
from epk_gp.kernel_machine.adjoint import StretchAverage, average_over
from epk_gp.kernel_machine.axes import by_sample
from epk_gp.kernel_machine.terms import IntegratedLines, Predictions
from epk_gp.plots.style import GREY, PALETTE, new_figure, styled
from epk_gp.quadrature.adaptive import integrate
from harness import Experiment, main, uncertified_results

_MODULES = "module by module"  # the Manhattan path, which is no path of the library


@dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
        num_train: Images trained on.
        num_test: Images whose predicted class is explained.
        width: Hidden units.
        steps: Steps of Adam on minibatches of a quarter of the images.
        lr: Learning rate.
        lengths: Steps of the chords.
        seeds: Networks.
    """

    num_train: int = 100
    num_test: int = 10
    width: int = 32
    steps: int = 100
    lr: float = 5e-3
    lengths: Sequence[int] = (5, 20, 100)
    seeds: int = 3


@dataclass(frozen=True)
class Result:
    """One entry per path, beside lists over all explained images of all networks, and one image as an example.

    Attributes:
        paths: Their names; the last one is the left endpoint of every step, whose sum is not the output.
        error: Largest |sum of the terms - output|.
        evaluations: Gradients of a test image for each step.
        rank: Rank correlation of an image's contributions with those along straight steps.
        difference: Norm of their difference over that of the latter.
        same_top: Share of the ten training images of the largest |contribution| that are among those of straight steps.
        outputs: Largest |output - output before training|, for scale.
        example: Contributions to the first image, path by path.
    """

    paths: list[str]
    error: list[float]
    evaluations: list[float]
    rank: list[list[float]]
    difference: list[list[float]]
    same_top: list[list[float]]
    outputs: float
    example: list[list[float]]


def run(config: Config) -> Result:
    """Train, and explain the same predictions along every path."""
    adaptive, paths = epk.adaptive(tol=1e-12), {"straight steps": epk.straight()}
    paths |= {_chord_name(k, config.steps): epk.chords(k) for k in config.lengths}
    asked = {name: (path, adaptive) for name, path in (paths | {_MODULES: epk.straight()}).items()}
    asked["straight, left ends"] = (epk.straight(), epk.QuadratureRule.left_endpoint())
    rows = {name: Result([name], [0.0], [], [], [], [], 0.0, []) for name in asked}
    scale = 0.0
    for seed in range(config.seeds):
        trajectory, X = _recorded(config, seed)
        predicted = network_outputs(trajectory, X).argmax(1)
        straight: Tensor | None = None
        for name, (path, rule) in asked.items():
            average = average_module_by_module if name == _MODULES else average_over
            with uncertified_results(), patch.object(adjoint, "average_over", average):
                parts = epk.attribute(
                    trajectory, X, by=[by_sample(trajectory)], head="logits", rule=rule, path=path, classes=predicted
                )
            own = parts.values[:, 0].double()
            straight, row = own if straight is None else straight, rows[name]
            row.error[0] = max(row.error[0], parts.max_error)
            row.evaluations.append(float(parts.evaluations))
            row.rank.append([float(rank_correlation(a, b) or 0.0) for a, b in zip(own, straight, strict=True)])
            row.difference.append(((own - straight).norm(dim=1) / straight.norm(dim=1)).tolist())
            row.same_top.append([_shared(a, b) for a, b in zip(own, straight, strict=True)])
            if seed == 0:
                row.example.append(own[0].tolist())
            scale = max(scale, float((parts.network - parts.initial).abs().max()))
    every = list(rows.values())
    return Result(
        paths=list(rows),
        error=[row.error[0] for row in every],
        evaluations=[sum(row.evaluations) / len(row.evaluations) for row in every],
        rank=[list(chain.from_iterable(row.rank)) for row in every],
        difference=[list(chain.from_iterable(row.difference)) for row in every],
        same_top=[list(chain.from_iterable(row.same_top)) for row in every],
        outputs=scale,
        example=[row.example[0] for row in every],
    )


def average_module_by_module(
    problem: Predictions, stretches: Sequence[range], max_nodes: int, Phi: Tensor, *, splits_statistics: bool
) -> list[StretchAverage]:
    """Average the gradients over steps in each of which the weights of one module move after another, in their order.

    Each weight has the average over the line on which it moves, so that the terms sum to the change of the outputs as
    along a straight step; nothing else of an attribution depends on the path. It takes the place of `average_over`.
    """
    if len(stretches[0]) > 1 or (splits_statistics and problem.trajectory.statistics is not None):
        raise ValueError("modules move one after another in single steps of networks without moving statistics.")
    return [_average_of_modules(problem, steps, max_nodes, own) for steps, own in zip(stretches, Phi, strict=True)]


def _average_of_modules(problem: Predictions, steps: range, max_nodes: int, Phi: Tensor) -> StretchAverage:
    X, net, trajectory = problem.X, problem.net, problem.trajectory
    w, end = (flat_state(trajectory, s, X) for s in (steps.start, steps.stop))
    named, first = zip(net.model.names, net.model.sizes, strict=True), 0
    integrals, averages = [], []
    for _, members in groupby(named, key=lambda entry: entry[0].rpartition(".")[0]):
        part = slice(first, first + sum(size for _, size in members))
        d = torch.zeros_like(w)
        d[part] = end[part] - w[part]
        segment = WeightSegment(net, w, d, problem.head, problem.memory_budget)
        integral = integrate(segment, X, problem.rule, trajectory.num_steps)
        IntegratedLines(problem, segment, integral, max_nodes).average_into(Phi[None])
        averages.append(Phi[:, :, part].clone())
        integrals.append(integral)
        w, first = w + d, part.stop
    whole = replace(
        integrals[-1],
        start=integrals[0].start,
        total=torch.stack([integral.total for integral in integrals]).sum(dim=0),
        evaluations=torch.stack([integral.evaluations for integral in integrals]).sum(dim=0),
    )
    of_weights = Phi.copy_(torch.cat(averages, dim=2))
    return StretchAverage(steps, of_weights, None, whole, whole.total, problem.select_outputs(whole.total))


@styled
def draw(result: Result) -> Figure:
    """Draw the contributions to one prediction along two other paths, and how every path orders contributions."""
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    names = result.paths[1:]
    straight = result.example[0]
    for colour, marker, name in zip(PALETTE, "o^", (result.paths[-3], result.paths[-2]), strict=False):
        own = result.example[result.paths.index(name)]
        left.plot(straight, own, marker, color=colour, markersize=4, alpha=0.7, markeredgewidth=0, label=name)
    ends = [min(straight), max(straight)]
    left.plot(ends, ends, color=GREY, linewidth=1, linestyle=":")
    left.set(xlabel="contribution along straight steps", ylabel="along the other path", title="one prediction")
    left.legend(loc="upper left")
    for place, name in enumerate(names):
        values = result.rank[result.paths.index(name)]
        right.plot(values, [place] * len(values), "o", color=PALETTE[0], markersize=4, alpha=0.35, markeredgewidth=0)
        right.plot([sum(values) / len(values)] * 2, [place - 0.3, place + 0.3], color=PALETTE[1], linewidth=2)
    labels = [f"{name}\nsum off by {result.error[result.paths.index(name)]:.0e}" for name in names]
    right.set_yticks(range(len(names)), labels)
    right.invert_yaxis()
    right.set(xlabel="rank correlation with straight steps", title="every prediction, and the mean", ylim=(None, -0.6))
    return figure


def _recorded(config: Config, seed: int) -> tuple[epk.Trajectory, Tensor]:
    data = digits()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    X, y = data.inputs.flatten(1)[order], data.labels[order]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, config.width), nn.ReLU(), nn.Linear(config.width, 10)).double()
    n = config.num_train
    optimizer = torch.optim.Adam(net.parameters(), lr=config.lr)
    trajectory = epk.train(
        net, X[:n], y[:n], optimizer=optimizer, steps=config.steps, batch_size=n // 4,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return trajectory, X[n : n + config.num_test]


def _chord_name(length: int, steps: int) -> str:
    return "one chord" if length >= steps else f"chords of {length} steps"


def _shared(a: Tensor, b: Tensor, count: int = 10) -> float:
    """Return the share of the largest entries by size that are those of the other."""
    top = [set(values.abs().topk(min(count, len(values))).indices.tolist()) for values in (a, b)]
    return len(top[0] & top[1]) / len(top[0])


EXPERIMENT = Experiment(
    "other_paths",
    Config(),
    Config(num_train=12, num_test=2, width=6, steps=6, lengths=(2, 6), seeds=1),
    Result,
    run,
    draw,
    ".svg",
)

if __name__ == "__main__":
    main(EXPERIMENT)
