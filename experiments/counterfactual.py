"""What added, and what would change: scores of training points against networks that were trained without them."""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import starmap
from multiprocessing import get_context

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import epk_gp as epk
from epk_gp.analysis.score_check import datamodeling_score, leave_one_out, random_subsets, rank_agreement
from epk_gp.datasets import Dataset
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.plots import PALETTE
from epk_gp.plots.style import GREY, new_figure, short, styled
from epk_gp.quadrature.rules import Rule
from harness import Experiment, main, uncertified_results
from problems import build, images

CAPTUM = find_spec("captum") is not None  # an optional peer: pip install captum
CONTRIBUTIONS, INFLUENCE = "contributions", "influence"

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "gradient descent": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.005),
}


@dataclass(frozen=True)
class Problem:
    """A network of one hidden layer on scikit-learn's digits, and how it is trained."""

    activation: str
    optimizer: str
    num_train: int = 100
    width: int = 16
    steps: int = 150
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """What is said of it in the table."""
        batches = "full batches" if self.batch_size is None else f"batches of {self.batch_size}"
        return f"{self.activation}, {self.optimizer}, {self.num_train} digits, {batches}, {self.steps} steps"


PROBLEMS = (
    Problem("tanh", "gradient descent"),
    Problem("tanh", "momentum"),
    Problem("relu", "gradient descent"),
    Problem("relu", "momentum"),
    Problem("tanh", "gradient descent", 200, 32),
    Problem("relu", "gradient descent", 200, 32),
    Problem("tanh", "Adam", 200, 32, 160, 25),
    Problem("relu", "Adam", 200, 32, 160, 25),
    Problem("relu", "Adam", 200, 32, 480, 25),
)


@dataclass(frozen=True)
class Config:
    """Sizes."""

    problems: tuple[Problem, ...] = PROBLEMS
    seeds: tuple[int, ...] = (0, 1, 2)
    num_test: int = 30
    num_subsets: int = 100
    num_smoothing: int = 8
    checkpoints: int = 10
    num_processes: int = 2


@dataclass(frozen=True)
class Result:
    """How scores rank against what retraining does to log p(true class) of test points.

    Attributes:
        num_seeds: Number of seeds.
        table: One row per problem and score: rank correlation with leave-one-out effects over training points, and
            linear datamodeling scores (over random subsets of half and of nine tenths of the training points), each
            averaged over test points, as [mean, standard deviation over seeds]; and the score's time, in times of
            attribution on the same points.
        retraining: Seconds of one retraining, on average, and their number.
        scatter: Contribution, influence and effect of every training point for one test point, by problem (seed 0).
        slope: Least-squares slope of effect over contribution and over influence in `scatter`, by problem.
        jackknife: Rank correlation of the jackknife standard deviation with the standard deviation over retrainings on
            nine tenths, over test points, by problem, as [mean, standard deviation over seeds].
        completeness: Largest |sum of contributions - network|.
        left_out: Scores that could not be computed, and why.
    """

    num_seeds: int
    table: list[dict]
    retraining: dict
    scatter: dict
    slope: dict
    jackknife: dict
    completeness: float
    left_out: list[str] = field(default_factory=list)


def run(config: Config) -> Result:
    """Record, score and train again."""
    asked = [(config, problem, seed) for problem in config.problems for seed in config.seeds]
    if config.num_processes == 1:
        found = list(starmap(_measure, asked))
    else:
        with ProcessPoolExecutor(config.num_processes, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_measure, *zip(*asked, strict=True)))
    entries: dict[tuple[str, str], list[dict]] = {}
    jackknife: dict[str, list[float]] = {}
    for (_, problem, _), measured in zip(asked, found, strict=True):
        jackknife.setdefault(problem.name, []).append(measured.jackknife)
        for score, row in measured.rows.items():
            entries.setdefault((problem.name, score), []).append(row)
    of_first_seed = {p.name: m for (_, p, seed), m in zip(asked, found, strict=True) if seed == config.seeds[0]}
    return Result(
        num_seeds=len(config.seeds),
        table=[{"problem": o, "score": s} | _spread(rows) for (o, s), rows in entries.items()],
        retraining={
            "seconds": float(np.mean([measured.seconds for measured in found])),
            "count": sum(p.num_train + 2 * config.num_subsets for p in config.problems) * len(config.seeds),
        },
        scatter={name: measured.scatter for name, measured in of_first_seed.items()},
        slope={name: measured.slope for name, measured in of_first_seed.items()},
        jackknife={name: _mean_and_std(values) for name, values in jackknife.items()},
        completeness=max(measured.completeness for measured in found),
        left_out=[] if CAPTUM else ["captum: not installed"],
    )


@dataclass(frozen=True)
class Measured:
    """What one recorded run gives; the fields of `Result` for one problem and seed."""

    rows: dict[str, dict]
    scatter: list[list[float]]
    slope: list[float]
    jackknife: float
    completeness: float
    seconds: float


def _measure(config: Config, problem: Problem, seed: int) -> Measured:
    torch.set_num_threads(1)
    train, test = _data(config, problem, seed)
    trajectory = _record(problem, seed, train)
    scores, times, error = _scores(config, trajectory, test)
    start = time.perf_counter()
    effects = _of_class(leave_one_out(trajectory, test.inputs).permute(2, 0, 1), test).T
    sets = {
        key: random_subsets(problem.num_train, config.num_subsets, share=share, seed=seed)
        for key, share in {"half": 0.5, "most": 0.9}.items()
    }
    outcomes = {key: _of_class(epk.retrain(trajectory, rows).outputs(test.inputs), test) for key, rows in sets.items()}
    seconds = (time.perf_counter() - start) / (len(train) + 2 * config.num_subsets)
    rows = {
        score: {"leave-one-out": rank_agreement(values, effects).mean}
        | {key: datamodeling_score(values, sets[key], outcomes[key]).mean for key in sets}
        | {"seconds": times[score] / times[CONTRIBUTIONS]}
        for score, values in scores.items()
    }
    std = scores[INFLUENCE].square().sum(dim=1).sqrt()
    x, z, y = scores[CONTRIBUTIONS][0], scores[INFLUENCE][0], effects[0]
    return Measured(
        rows=rows,
        scatter=[x.tolist(), z.tolist(), y.tolist()],
        slope=[_slope(x, y), _slope(z, y)],
        jackknife=rank_agreement(std[None], outcomes["most"].std(dim=0)[None]).mean,
        completeness=error,
        seconds=seconds,
    )


def _data(config: Config, problem: Problem, seed: int) -> tuple[Dataset, Dataset]:
    generator = torch.Generator().manual_seed(seed)
    train, test = images("digits", "train"), images("digits", "test")
    return (
        train[torch.randperm(len(train), generator=generator)[: problem.num_train]],
        test[torch.randperm(len(test), generator=generator)[: config.num_test]],
    )


def _network(problem: Problem, seed: int, data: Dataset) -> nn.Module:
    torch.manual_seed(seed)
    net = build("mlp", tuple(data.inputs.shape[1:]), data.num_classes, problem.width)
    if problem.activation == "tanh":
        parts = [nn.Tanh() if isinstance(part, nn.ReLU) else part for part in net]
        net = nn.Sequential(*parts)
    return net.double()


def _record(problem: Problem, seed: int, train: Dataset) -> epk.Trajectory:
    net = _network(problem, seed, train)
    return epk.train(
        net,
        train.inputs,
        train.labels,
        optimizer=OPTIMIZERS[problem.optimizer](net.parameters()),
        steps=problem.steps,
        batch_size=problem.batch_size,
        generator=None if problem.batch_size is None else torch.Generator().manual_seed(seed),
    )


def _of_class(outputs: Tensor, test: Dataset) -> Tensor:
    """Return log p(true class) of each test point: (m, n, C) to (m, n)."""
    return outputs[:, torch.arange(len(test)), test.labels]


def _slope(x: Tensor, y: Tensor) -> float:
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def _scores(
    config: Config, trajectory: epk.Trajectory, test: Dataset
) -> tuple[dict[str, Tensor], dict[str, float], float]:
    """Return the scores of every training point for every test point, (n, M), and the seconds of each score."""
    X, y = test.inputs, test.labels
    smoothing = {"0 to 2": epk.Smoothing(config.num_smoothing), "0 to 1": epk.Smoothing(config.num_smoothing, high=1.0)}
    error = 0.0

    def contributions(rule: Rule) -> Tensor:
        nonlocal error
        with uncertified_results():
            parts = epk.attribute(trajectory, X, classes=y, rule=rule)
        if parts.certified:
            error = max(error, float((parts.total - parts.network).abs().max()))
        return parts.samples[:, 0]

    def products_of_gradients() -> Tensor:
        """Return c_i <gradient of log p(y), gradient of log p_i(y_i)> at the last step."""
        points = epk.Points(X, is_train=False), epk.Points(trajectory.inputs, is_train=True)
        K = epk.gram_block(tangent_trajectory(trajectory), *points, head="log_softmax")
        n, M = torch.arange(len(X)), torch.arange(trajectory.num_points)
        return K[n, y][:, M, trajectory.targets] / len(M)

    def random() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(len(X), trajectory.num_points, generator=generator, dtype=torch.float64)

    functions: dict[str, Callable[[], Tensor]] = {
        CONTRIBUTIONS: lambda: contributions(epk.adaptive()),
        INFLUENCE: lambda: epk.influence(trajectory, X, classes=y).values[:, 0],
        **{
            f"influence, smoothed, weights {name}": (
                lambda own=own: epk.influence(trajectory, X, classes=y, smoothing=own).values[:, 0]
            )
            for name, own in smoothing.items()
        },
        "first order (In-Run Shapley)": lambda: contributions(epk.QuadratureRule.left_endpoint()),
        "last-step gradients": products_of_gradients,
        **({"TracIn (captum)": lambda: _tracin(config, trajectory, test)} if CAPTUM else {}),
        "nearest pixels": lambda: -torch.cdist(X.flatten(1), trajectory.inputs.flatten(1)),
        "random": random,
    }
    scores, times = {}, {}
    for name, function in functions.items():
        start = time.perf_counter()
        scores[name] = function()
        times[name] = time.perf_counter() - start
    return scores, times, error


def _tracin(config: Config, trajectory: epk.Trajectory, test: Dataset) -> Tensor:
    """Run captum's TracIn over evenly spaced checkpoints."""
    from captum.influence import TracInCP  # noqa: PLC0415  an optional peer

    data = TensorDataset(trajectory.inputs, trajectory.targets)
    net = copy.deepcopy(trajectory.model.module).requires_grad_(True)
    states = torch.linspace(0, trajectory.num_steps - 1, config.checkpoints).round().long().unique().tolist()

    def load(model: nn.Module, state: int) -> float:
        model.load_state_dict(trajectory.weights(state))
        return trajectory.steps[state].lr

    # captum only asks that checkpoints be a list; its annotations name paths
    tracer = TracInCP(net, data, states, load, loss_fn=nn.CrossEntropyLoss(reduction="none"), batch_size=len(data))
    return tracer.influence((test.inputs, test.labels)).to(torch.float64)


def _mean_and_std(values: list[float]) -> list[float]:
    return [float(np.mean(values)), float(np.std(values, ddof=min(1, len(values) - 1)))]


def _spread(rows: list[dict]) -> dict:
    return {key: _mean_and_std([row[key] for row in rows]) for key in rows[0]}


@styled
def draw(result: Result) -> Figure:
    """Draw contribution and influence against effect for one test point, and the rank correlations of every score."""
    names = list(result.scatter)
    figure = new_figure(9.6)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 2.1))
    first = names[0]
    contribution, influence, effect = (np.array(values) for values in result.scatter[first])
    pairs = zip(
        upper.subplots(1, 2, sharey=True),
        (("exact contribution", contribution, 0), ("influence (derivative in its weight)", influence, 1)),
        strict=True,
    )
    for ax, (label, x, k) in pairs:
        ax.scatter(x, effect, s=12, color=PALETTE[k], linewidth=0)
        ax.axline((x.mean(), effect.mean()), slope=result.slope[first][k], color=GREY, linewidth=0.8)
        ax.set(xlabel=label, title=f"slope {short(result.slope[first][k])}")
    upper.axes[0].set_ylabel("effect of having the point")
    upper.suptitle(
        "log p(true class) of one test point of the first problem, a dot per training point", x=0.01, ha="left"
    )
    scores = list(dict.fromkeys(row["score"] for row in result.table))
    titles = {"leave-one-out": "leave-one-out", "half": "LDS, half left out", "most": "LDS, a tenth left out"}
    for ax, (key, title) in zip(lower.subplots(1, 3, sharey=True), titles.items(), strict=True):
        for k, name in enumerate(names):
            rows = {row["score"]: row[key] for row in result.table if row["problem"] == name}
            means, spreads = zip(*(rows[score] for score in scores), strict=True)
            places = [number + 0.09 * (k - (len(names) - 1) / 2) for number in range(len(scores))]
            colour = PALETTE[k % len(PALETTE)]
            ax.errorbar(means, places, xerr=spreads, fmt="o", color=colour, markersize=3, linewidth=0.8, label=name)
        ax.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(scores)), scores)
        ax.set(xlabel="rank correlation", title=title, xlim=(-0.25, 1.0))
    lower.axes[0].invert_yaxis()
    handles, labels = lower.axes[0].get_legend_handles_labels()
    lower.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


EXPERIMENT = Experiment(
    "counterfactual",
    Config(),
    Config(
        (Problem("tanh", "gradient descent", 12, 4, 5), Problem("relu", "Adam", 12, 4, 6, 4)),
        (0,),
        num_test=3,
        num_subsets=4,
        num_smoothing=2,
        checkpoints=2,
        num_processes=1,
    ),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
