"""The open question of section 3.2, Bell et al. (2023): does the asymmetry of k' say anything about a prediction?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.analysis.measures import ood_metrics, rank_correlation
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import Dataset, digits, three_gaussians
from epk_gp.plots.style import GREY, PALETTE, new_figure, styled
from harness import Experiment, main

PROBLEMS = ("digits", "three Gaussians")
SCORES = {
    "max softmax": "1 - largest probability",
    "nearest distance": "distance to the nearest training point",
    "net asymmetry": "asymmetry of k' over the whole run",
    "asymmetry": "asymmetry of k' step by step",
    "drift": "asymmetry of k', not relative to k'",
    "both": "max softmax and asymmetry, sum of ranks",
}


@dataclass(frozen=True)
class Config:
    """Sizes.

    Attributes:
        num_train: Training points.
        num_test: Points whose predictions are judged, and as many foreign ones.
        width: Hidden units.
        steps: Steps of gradient descent on all points.
        lr: Learning rate of each problem.
        seeds: Networks, each with its own data.
    """

    num_train: int = 150
    num_test: int = 300
    width: int = 32
    steps: int = 60
    lr: Sequence[float] = (0.3, 0.1)
    seeds: int = 4


@dataclass(frozen=True)
class Result:
    """One entry per problem and score; lists are over networks.

    Attributes:
        problem: Names of the problems.
        score: Names of the scores.
        errors: AUROC of the score for wrong predictions.
        foreign: AUROC for foreign points.
        with_softmax: Rank correlation with 1 - largest probability.
        accuracy: By problem: accuracy of every network.
    """

    problem: list[str]
    score: list[str]
    errors: list[list[float]]
    foreign: list[list[float]]
    with_softmax: list[list[float]]
    accuracy: dict[str, list[float]]


def run(config: Config) -> Result:
    """Train, score and judge."""
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    accuracy: dict[str, list[float]] = {name: [] for name in PROBLEMS}
    for name, lr in zip(PROBLEMS, config.lr, strict=True):
        for seed in range(config.seeds):
            train, test = _data(name, config, seed)
            torch.manual_seed(seed)
            layers = [nn.Linear(train.inputs.shape[1], config.width), nn.ReLU()]
            net = nn.Sequential(*layers, nn.Linear(config.width, train.num_classes)).double()
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            trajectory = epk.train(net, train.inputs, train.labels, optimizer=optimizer, steps=config.steps)
            wrong = network_outputs(trajectory, test.inputs).argmax(1) != test.labels
            accuracy[name].append(1 - float(wrong.double().mean()))
            found_at = scores(trajectory, torch.cat([test.inputs, _foreign(test.inputs, seed)]))  # with common ranks
            own, foreign = ({k: v.chunk(2)[place] for k, v in found_at.items()} for place in range(2))
            for score, values in own.items():
                error = ood_metrics(values[~wrong], values[wrong]).auroc if wrong.any() else 0.5
                correlation = rank_correlation(values, own["max softmax"])
                row = (error, ood_metrics(values, foreign[score]).auroc, correlation or 0.0)
                found.setdefault((name, score), []).append(row)
    columns = [[list(values) for values in zip(*rows, strict=True)] for rows in found.values()]
    return Result(
        problem=[problem for problem, _ in found],
        score=[score for _, score in found],
        errors=[column[0] for column in columns],
        foreign=[column[1] for column in columns],
        with_softmax=[column[2] for column in columns],
        accuracy=accuracy,
    )


def scores(trajectory: epk.Trajectory, X: Tensor) -> dict[str, Tensor]:
    """Score points; larger is less sure.

    The asymmetry of a point is the sum over steps and training points of |k'_s(x, x_i) - k'_s(x_i, x)|, of the traces
    over outputs, over that of |k'_s(x, x_i) + k'_s(x_i, x)|.
    """
    training, moving, frozen = trajectory.inputs, (False, True), (True, False)
    total, size = torch.zeros(len(X), dtype=X.dtype), torch.zeros(len(X), dtype=X.dtype)
    net = torch.zeros(len(X), len(training), dtype=X.dtype)
    both = torch.zeros_like(net)
    etas = torch.tensor([step.lr for step in trajectory.steps], dtype=torch.float64)
    for s in range(trajectory.num_steps):
        weights = torch.where(torch.arange(len(etas)) == s, etas, 0.0)
        kernel = epk.PathKernel(trajectory, "logits", epk.gauss_legendre(2), step_weights=weights)
        forth, back = (
            kernel.trace_block(epk.Points(X, is_train=a), epk.Points(training, is_train=b)) for a, b in (moving, frozen)
        )
        total += (forth - back).abs().sum(1)
        size += (forth + back).abs().sum(1)
        net += forth - back
        both += forth + back
    p = network_outputs(trajectory, X).softmax(1)
    found = {
        "max softmax": 1 - p.max(1).values,
        "nearest distance": torch.cdist(X, training).min(1).values,
        "net asymmetry": net.abs().sum(1) / both.abs().sum(1),
        "asymmetry": total / size,
        "drift": total,
    }
    return found | {"both": _ranks(found["max softmax"]) + _ranks(found["asymmetry"])}


@styled
def draw(result: Result) -> Figure:
    """Draw a dot for every network, and a bar for the mean."""
    figure = new_figure(3.9)
    panels = figure.subplots(1, 2, sharey=True)
    names = list(SCORES)
    for ax, values, title in (
        (panels[0], result.errors, "AUROC, wrong predictions"),
        (panels[1], result.foreign, "AUROC, foreign points"),
    ):
        for k, problem in enumerate(PROBLEMS):
            for place, name in enumerate(names):
                row = next(
                    number
                    for number, entry in enumerate(zip(result.problem, result.score, strict=True))
                    if entry == (problem, name)
                )
                y = place + (k - 0.5) * 0.36
                ax.plot(values[row], [y] * len(values[row]), "os"[k], color=PALETTE[k], markersize=3.5, alpha=0.6,
                        markeredgewidth=0, label=problem if place == 0 else None)  # fmt: skip
                mean = sum(values[row]) / len(values[row])
                ax.plot([mean, mean], [y - 0.16, y + 0.16], color=PALETTE[k], linewidth=2)
        ax.axvline(0.5, color=GREY, linestyle=":", linewidth=1)
        ax.set(title=title, xlim=(0, 1.02))
    panels[0].set_yticks(range(len(names)), [SCORES[name] for name in names])
    panels[0].invert_yaxis()
    panels[1].legend(loc="center left")
    return figure


def _data(name: str, config: Config, seed: int) -> tuple[Dataset, Dataset]:
    """Return training and held-out points."""
    generator, n, m = torch.Generator().manual_seed(seed), config.num_train, config.num_test
    if name == "digits":
        data = digits()
        order = torch.randperm(len(data), generator=generator)
        data = Dataset(data.inputs.flatten(1)[order], data.labels[order], data.num_classes, name)
    else:
        data = three_gaussians(-(-(n + m) // 3), dim=20, generator=generator)
    return data[:n], data[n : n + m]


def _foreign(X: Tensor, seed: int) -> Tensor:
    """Return points of the same numbers in another order of the columns, the same for all."""
    return X[:, torch.randperm(X.shape[1], generator=torch.Generator().manual_seed(seed + 1000))]


def _ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


EXPERIMENT = Experiment(
    "asymmetry",
    Config(),
    Config(num_train=15, num_test=30, width=4, steps=3, seeds=1),
    Result,
    run,
    draw,
    ".svg",
)

if __name__ == "__main__":
    main(EXPERIMENT)
