"""How well attribution scores predict retraining: leave-one-out effects and the linear datamodeling score."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import epk_gp as epk
from epk_gp.analysis.ranks import rank_correlation
from epk_gp.datasets import Dataset
from epk_gp.gram.ntk import tangent_trajectory
from epk_gp.plots import PALETTE
from epk_gp.plots.common import short
from harness import Experiment, main, uncertified_results
from problems import build, images

CAPTUM = find_spec("captum") is not None  # an optional peer: pip install captum

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "gradient descent": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.005),
}


@dataclass(frozen=True)
class Config:
    """Sizes: scikit-learn's digits, full batches, one hidden layer of ReLU units."""

    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    seeds: tuple[int, ...] = (0, 1, 2)
    num_train: int = 100
    num_test: int = 30
    width: int = 16
    steps: int = 150
    num_subsets: int = 200
    checkpoints: int = 10


@dataclass(frozen=True)
class Result:
    """How scores rank against what retraining does to log p(true class) of test points.

    Attributes:
        num_seeds: Number of seeds.
        table: One row per optimizer and score: rank correlation with leave-one-out effects over training points, and
            linear datamodeling score (rank correlation over random halves of the training set), each averaged over
            test points, as [mean, standard deviation over seeds]; seconds for the score.
        retraining: Mean seconds of one retraining of each kind, and their number.
        scatter: Contribution and effect of every training point for one test point, per optimizer (seed 0).
        slope: Least-squares slope of effect over contribution in `scatter`, per optimizer.
        completeness: Largest |sum of contributions - network|.
        left_out: Scores that could not be computed, and why.
    """

    num_seeds: int
    table: list[dict]
    retraining: dict
    scatter: dict
    slope: dict
    completeness: float
    left_out: list[str] = field(default_factory=list)


def run(config: Config) -> Result:
    """Record, score and retrain."""
    entries: dict[tuple[str, str], list[dict]] = {}
    scatter, slope, seconds, completeness = {}, {}, [], 0.0
    for name in config.optimizers:
        for seed in config.seeds:
            train, test = _data(config, seed)
            trajectory = _record(config, name, seed, train)
            scores, times, error = _scores(config, trajectory, test)
            completeness = max(completeness, error)
            start = time.perf_counter()
            effects = _leave_one_out(config, name, seed, train, test)
            masks, outcomes = _halves(config, name, seed, train, test)
            seconds.append((time.perf_counter() - start) / (len(train) + config.num_subsets + 1))
            for score, values in scores.items():
                row = {
                    "leave-one-out": _mean_rank(values, effects),
                    "datamodel": _mean_rank(values @ masks.T, outcomes),
                    "seconds": times[score],
                }
                entries.setdefault((name, score), []).append(row)
            if seed == config.seeds[0]:
                x, y = scores["exact path kernel"][0], effects[0]
                scatter[name] = [x.tolist(), y.tolist()]
                slope[name] = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    return Result(
        num_seeds=len(config.seeds),
        table=[{"optimizer": o, "score": s} | _spread(rows) for (o, s), rows in entries.items()],
        retraining={"seconds": float(np.mean(seconds)), "count": config.num_train + config.num_subsets + 1},
        scatter=scatter,
        slope=slope,
        completeness=completeness,
        left_out=[] if CAPTUM else ["captum: not installed"],
    )


def _data(config: Config, seed: int) -> tuple[Dataset, Dataset]:
    generator = torch.Generator().manual_seed(seed)
    train, test = images("digits", "train"), images("digits", "test")
    return (
        train[torch.randperm(len(train), generator=generator)[: config.num_train]],
        test[torch.randperm(len(test), generator=generator)[: config.num_test]],
    )


def _network(config: Config, seed: int, data: Dataset) -> nn.Module:
    torch.manual_seed(seed)
    net = build("mlp", tuple(data.inputs.shape[1:]), data.num_classes, config.width)
    return net.double()


def _record(config: Config, name: str, seed: int, train: Dataset) -> epk.Trajectory:
    net = _network(config, seed, train)
    return epk.train(net, train.inputs, train.labels, optimizer=OPTIMIZERS[name](net.parameters()), steps=config.steps)


def _retrained(config: Config, name: str, seed: int, train: Dataset, rows: Tensor, test: Dataset) -> Tensor:
    """Train on a subset of the rows from the same initial weights, and return log p(true class) of the test points."""
    net = _network(config, seed, train)
    optimizer = OPTIMIZERS[name](net.parameters())
    X, y = train.inputs[rows], train.labels[rows]
    for _ in range(config.steps):
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
    with torch.no_grad():
        return -F.cross_entropy(net(test.inputs), test.labels, reduction="none")


def _leave_one_out(config: Config, name: str, seed: int, train: Dataset, test: Dataset) -> Tensor:
    """Return the change of log p(true class) that each training point makes: (n, M)."""
    every = torch.arange(len(train))
    whole = _retrained(config, name, seed, train, every, test)
    without = [_retrained(config, name, seed, train, every[every != i], test) for i in range(len(train))]
    return whole[:, None] - torch.stack(without, dim=1)


def _halves(config: Config, name: str, seed: int, train: Dataset, test: Dataset) -> tuple[Tensor, Tensor]:
    """Retrain on random halves: their masks (k, M) and outcomes (n, k)."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(len(train), generator=generator)[: len(train) // 2] for _ in range(config.num_subsets)]
    masks = torch.stack([torch.zeros(len(train), dtype=torch.float64).index_fill(0, half, 1.0) for half in rows])
    return masks, torch.stack([_retrained(config, name, seed, train, half, test) for half in rows], dim=1)


def _scores(
    config: Config, trajectory: epk.Trajectory, test: Dataset
) -> tuple[dict[str, Tensor], dict[str, float], float]:
    """Return the scores of every training point for every test point, (n, M), and the seconds of each score."""
    scores: dict[str, Tensor] = {}
    times: dict[str, float] = {}
    every = {"exact path kernel": epk.adaptive(), "first order (In-Run Shapley)": epk.left_endpoint()}
    error = 0.0
    for name, rule in every.items():
        start = time.perf_counter()
        with uncertified_results():
            parts = epk.attribute(trajectory, test.inputs, classes=test.labels, rule=rule)
        scores[name], times[name] = parts.samples[:, 0], time.perf_counter() - start
        if name == "exact path kernel":
            error = float((parts.total - parts.network).abs().max())
    others = {"last-step gradients": _last_step} | ({"TracIn (captum)": _tracin} if CAPTUM else {})
    for name, score in others.items():
        start = time.perf_counter()
        scores[name], times[name] = score(config, trajectory, test), time.perf_counter() - start
    generator = torch.Generator().manual_seed(0)
    scores["random"] = torch.randn(scores["exact path kernel"].shape, generator=generator, dtype=torch.float64)
    times["random"] = 0.0
    return scores, times, error


def _last_step(config: Config, trajectory: epk.Trajectory, test: Dataset) -> Tensor:
    """Take inner products of loss gradients at the trained weights alone."""
    last = tangent_trajectory(trajectory)
    with uncertified_results():
        parts = epk.attribute(last, test.inputs, classes=test.labels, rule=epk.left_endpoint())
    return parts.samples[:, 0]


def _tracin(config: Config, trajectory: epk.Trajectory, test: Dataset) -> Tensor:
    """Run captum's TracIn over evenly spaced checkpoints."""
    from captum.influence import TracInCP  # noqa: PLC0415  an optional peer

    data = TensorDataset(trajectory.inputs, trajectory.targets)
    net = _network(config, 0, test)
    states = torch.linspace(0, trajectory.num_steps - 1, config.checkpoints).round().long().unique().tolist()

    def load(model: nn.Module, state: int) -> float:
        model.load_state_dict(trajectory.weights(state))
        return trajectory.steps[state].lr

    # captum only asks that checkpoints be a list; its annotations name paths
    tracer = TracInCP(net, data, states, load, loss_fn=nn.CrossEntropyLoss(reduction="none"), batch_size=len(data))
    return tracer.influence((test.inputs, test.labels)).to(torch.float64)


def _mean_rank(scores: Tensor, effects: Tensor) -> float:
    return float(np.mean([rank_correlation(a, b) or 0.0 for a, b in zip(scores, effects, strict=True)]))


def _spread(rows: list[dict]) -> dict:
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: [float(np.mean(v)), float(np.std(v, ddof=min(1, len(v) - 1)))] for key, v in columns.items()}


def draw(result: Result) -> Figure:
    """Draw contribution against effect for one test point, and both rank correlations of every score."""
    names = list(result.scatter)
    figure = Figure(figsize=(11.5, 7.0), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    for k, (ax, name) in enumerate(zip(np.atleast_1d(upper.subplots(1, len(names))), names, strict=True)):
        x, y = (np.array(values) for values in result.scatter[name])
        ax.scatter(x, y, s=12, color=PALETTE[k], linewidth=0)
        ax.axline((x.mean(), y.mean()), slope=result.slope[name], color="black", linewidth=0.8)
        ax.set(xlabel="exact contribution", title=f"{name}: slope {short(result.slope[name])}")
        ax.grid(visible=True, color="#dddddd", linewidth=0.7)
    upper.axes[0].set_ylabel("effect of having the point\n(leave-one-out retraining)")
    upper.suptitle("log p(true class) of one test point, a dot per training point", fontsize="medium")
    scores = list(dict.fromkeys(row["score"] for row in result.table))
    titles = {"leave-one-out": "rank correlation with leave-one-out effects", "datamodel": "linear datamodeling score"}
    for ax, (key, title) in zip(lower.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for k, name in enumerate(names):
            rows = {row["score"]: row[key] for row in result.table if row["optimizer"] == name}
            means, spreads = zip(*(rows[score] for score in scores), strict=True)
            places = [number + 0.2 * (k - (len(names) - 1) / 2) for number in range(len(scores))]
            ax.errorbar(means, places, xerr=spreads, fmt="o", color=PALETTE[k], markersize=5, capsize=2, label=name)
        ax.axvline(0, color="black", linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(scores)), scores)
        ax.set(xlabel=f"mean ± standard deviation of {result.num_seeds} seeds", title=title)
        ax.grid(visible=True, axis="x", color="#dddddd", linewidth=0.7)
        ax.legend(fontsize="small")
    lower.axes[0].invert_yaxis()
    return figure


EXPERIMENT = Experiment(
    "counterfactual",
    Config(),
    Config(
        ("gradient descent", "Adam"), (0,), num_train=12, num_test=3, width=4, steps=5, num_subsets=4, checkpoints=2
    ),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
