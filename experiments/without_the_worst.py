"""Which tenth of the training points should go, and what will the network be without it? Digits with wrong labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.analysis.score_check import random_subsets
from epk_gp.datasets import Dataset, digits
from epk_gp.plots import new_figure
from epk_gp.plots.style import PALETTE, SMALL, styled
from harness import Experiment, main, uncertified_results

WAYS = {"datamodel": "o", "influence": "s", "wrong labels, if they were known": "^", "at random": "D"}


@dataclass(frozen=True)
class Config:
    """Digits with wrong labels, and a network.

    Attributes:
        num_train: Training points.
        num_validation: Points that choose; all others judge.
        wrong: Share of wrong labels among the training points.
        dropped: Shares that are dropped.
        width: Hidden units, ReLU.
        lr: Learning rate of AdamW.
        steps: Number of steps.
        batch_size: Points of a step.
        draws: Random choices for each share.
        seeds: Of the order of the data, the wrong labels, the weights and the batches.
    """

    num_train: int = 400
    num_validation: int = 400
    wrong: float = 0.15
    dropped: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.3)
    width: int = 32
    lr: float = 0.01
    steps: int = 300
    batch_size: int = 40
    draws: int = 5
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Result:
    """What was predicted and measured.

    Attributes:
        rows: For each seed, way and share: accuracy and mean log-odds of the true class of the test points, predicted
            and measured, and the share of wrong labels among those that were dropped; means over random draws.
        whole: Accuracy and mean log-odds with all training points, of each seed, and how far path training ends from
            these log-odds, relative to their change in training.
        num_test: Points that judge.
        same: Share of the first points to drop that datamodel and influence have in common, for each share dropped.
    """

    rows: list[dict[str, Any]]
    whole: list[dict[str, float]]
    num_test: int
    same: list[float]


def run(config: Config) -> Result:
    """Choose by validation points, predict, train again, and judge by test points."""
    rows, whole, same = list[dict[str, Any]](), list[dict[str, float]](), list[list[float]]()
    for seed in config.seeds:
        generator = torch.Generator().manual_seed(seed)
        data = digits()
        data = data[torch.randperm(len(data), generator=generator)]
        train, rest = data[: config.num_train], data[config.num_train :]
        validation, test = rest[: config.num_validation], rest[config.num_validation :]
        labels, is_wrong = with_wrong_labels(train, config.wrong, generator)
        trajectory = record(config, train, labels, seed)
        harms = {
            "datamodel": -scores_of(trajectory, validation),
            "influence": -influence_on_log_odds(trajectory, validation),
            "wrong labels, if they were known": is_wrong.double() + 1e-3 * torch.rand(len(train), generator=generator),
        }
        with uncertified_results():  # where path training ends far from the network, which is said
            model, C = of_all_classes(trajectory, test), data.num_classes
        whole.append(judged(model.outputs.view(-1, C), test.labels) | {"miss": model.miss})
        for share in config.dropped:
            count = round(share * len(train))
            worst = [harm.topk(count).indices for harm in harms.values()]
            same.append([len(set(worst[0].tolist()) & set(worst[1].tolist())) / count])
            kept = torch.ones(len(worst), len(train), dtype=torch.float64)
            for row, indices in zip(kept, worst, strict=True):
                row[indices] = 0
            kept = torch.cat([kept, random_subsets(len(train), config.draws, share=1 - share, seed=seed)])
            predicted = model.predict(kept).view(len(kept), -1, C)
            measured = epk.retrain(trajectory, kept).outputs(test.inputs, head="logits")
            found = [
                {f"predicted {k}": v for k, v in judged(a, test.labels).items()}
                | {f"measured {k}": v for k, v in judged(log_odds(b), test.labels).items()}
                | {"wrong labels": float(is_wrong[own == 0].double().mean())}
                for a, b, own in zip(predicted, measured, kept, strict=True)
            ]
            drawn = {key: fmean(entry[key] for entry in found[len(harms) :]) for key in found[0]}
            for way, entry in zip(WAYS, [*found[: len(harms)], drawn], strict=True):
                rows.append({"seed": seed, "way": way, "dropped": share} | entry)
    shares = [fmean(values[0] for values in same[k :: len(config.dropped)]) for k in range(len(config.dropped))]
    return Result(rows, whole, len(test), shares)


def with_wrong_labels(data: Dataset, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return labels, a share of which are of another class, and which they are."""
    is_wrong = torch.zeros(len(data), dtype=torch.bool)
    is_wrong[torch.randperm(len(data), generator=generator)[: round(share * len(data))]] = True
    others = (data.labels + torch.randint(1, data.num_classes, (len(data),), generator=generator)) % data.num_classes
    return torch.where(is_wrong, others, data.labels), is_wrong


def record(config: Config, train: Dataset, labels: Tensor, seed: int) -> epk.Trajectory:
    """Train and record."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, config.width), nn.ReLU(), nn.Linear(config.width, train.num_classes)]
    net = nn.Sequential(nn.Flatten(), *layers).double()
    optimizer, generator = torch.optim.AdamW(net.parameters(), lr=config.lr), torch.Generator().manual_seed(seed)
    options = {"steps": config.steps, "batch_size": config.batch_size, "generator": generator}
    return epk.train(net, train.inputs, labels, optimizer=optimizer, **options)


def log_odds(z: Tensor) -> Tensor:
    """Return log p - log(1 - p) of every class."""
    own = torch.eye(z.shape[1], dtype=torch.bool)
    return z - z[:, None, :].masked_fill(own, -torch.inf).logsumexp(dim=2)


def scores_of(trajectory: epk.Trajectory, points: Dataset) -> Tensor:
    """Return the scores of a datamodel, summed over the points."""
    with uncertified_results():
        return epk.datamodel(trajectory, points.inputs, points.labels).scores.sum(dim=0)


def influence_on_log_odds(trajectory: epk.Trajectory, points: Dataset) -> Tensor:
    """Return the derivative of the mean log-odds of the points' labels in each training point's weight."""

    def mean_log_odds(z: Tensor) -> Tensor:
        return log_odds(z).gather(1, points.labels[:, None]).mean()

    return epk.influence(trajectory, points.inputs, function=mean_log_odds).values[0, 0]


def of_all_classes(trajectory: epk.Trajectory, points: Dataset) -> Any:
    """Return the datamodel of the log-odds of every class of every point."""
    C = points.num_classes
    classes = torch.arange(C).repeat(len(points))
    return epk.datamodel(trajectory, points.inputs.repeat_interleave(C, dim=0), classes)


def judged(values: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy and mean log-odds of the labels, of the log-odds of every class."""
    accuracy = (values.argmax(dim=1) == labels).double().mean()
    return {"accuracy": float(accuracy), "log-odds": float(values.gather(1, labels[:, None]).mean())}


def means(result: Result, way: str, key: str) -> Iterator[tuple[float, float]]:
    """Yield each share that is dropped, and the mean of what is asked over seeds."""
    for share in sorted({row["dropped"] for row in result.rows}):
        found = [row[key] for row in result.rows if (row["way"], row["dropped"]) == (way, share)]
        yield share, fmean(found)


@styled
def draw(result: Result) -> Figure:
    """Draw accuracy and log-odds against the share that is dropped, measured and predicted."""
    figure = new_figure(3.8)
    for ax, (key, scale, label) in zip(
        figure.subplots(1, 2),
        (("accuracy", 100, "test accuracy, %"), ("log-odds", 1, "mean log-odds of the true class")),
        strict=True,
    ):
        first = scale * fmean(row[key] for row in result.whole)
        for (way, marker), colour in zip(WAYS.items(), PALETTE, strict=False):
            for kind, line in (("measured", "-"), ("predicted", ":")):
                found = list(means(result, way, f"{kind} {key}"))
                x, y = [0, *(100 * share for share, _ in found)], [first, *(scale * value for _, value in found)]
                name = f"{way}{', predicted' if kind == 'predicted' else ''}"
                ax.plot(x, y, line, color=colour, marker=marker, markersize=4, label=name, linewidth=1.5)
        ax.set(xlabel="training points dropped, %", ylabel=label)
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=SMALL)
    return figure


SMOKE = Config(
    num_train=60, num_validation=20, dropped=(0.1, 0.2), width=8, steps=20, batch_size=20, draws=2, seeds=(0,)
)
EXPERIMENT = Experiment("without_the_worst", Config(), SMOKE, Result, run, draw, ".svg")

if __name__ == "__main__":
    main(EXPERIMENT)
