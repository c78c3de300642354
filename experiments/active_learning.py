"""Labels are bought a few at a time: which images should be labelled next?"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.datasets import Dataset
from epk_gp.plots.style import INK, PALETTE, new_figure, styled
from harness import Experiment, main
from judging import mean_and_std, network_name
from saved_rows import WAITING, Row, reasons_once, rounded, row_of
from uncertainty_problems import Problem, record, splits, train_unrecorded

PER_ROW = 2  # panels


@dataclass(frozen=True)
class Purchase:
    """How labels are bought.

    Attributes:
        held_out: Labels bought first that weigh our process against the network; like all bought labels they are in the
            training data of every network whose accuracy is measured, whatever the method.
        start: Labels bought at random beside them, before the first round.
        per_round: Labels bought in a round.
        rounds: Number of rounds.
        pool: Images to choose from, those of the start among them.
        num_test: Test images.
        ensemble: Networks of the ensemble for BALD.
    """

    held_out: int = 40
    start: int = 20
    per_round: int = 20
    rounds: int = 10
    pool: int = 2000
    num_test: int = 5000
    ensemble: int = 5


@dataclass(frozen=True)
class Config:
    """Networks, the most important ones first, and seeds."""

    problems: tuple[Problem, ...] = (
        Problem("mnist", steps=400, batch_size=20, lr=0.1),
        Problem("fashion-mnist", steps=400, batch_size=20, lr=0.1),
        Problem("mnist", "cnn", steps=400, batch_size=20, lr=0.1),
        Problem("fashion-mnist", "cnn", steps=400, batch_size=20, lr=0.1, double=False),
    )
    purchase: Purchase = Purchase()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Result:
    """Accuracies of networks that are trained on the bought labels.

    Attributes:
        labels: Number of labels after each round, the start first.
        table: One entry per data set, network and method: after each round mean and standard deviation over seeds of
            the accuracy, and their mean over all rounds.
        left_out: What was not computed.
    """

    labels: list[int]
    table: list[dict[str, Any]]
    left_out: list[str]


@dataclass(frozen=True, eq=False)
class Shop:
    """What a method sees when it chooses.

    Attributes:
        problem: How networks are trained.
        pool: All images that can be bought; their labels are looked at where they are bought.
        bought: Which ones have been; the held-out ones come first.
        net: The network trained on them.
        purchase: How labels are bought.
        generator: Source of random choices.
    """

    problem: Problem
    pool: Dataset
    bought: Tensor
    net: nn.Module
    purchase: Purchase
    generator: torch.Generator

    @property
    def rest(self) -> Tensor:
        """Return which images are left."""
        left = torch.ones(len(self.pool), dtype=torch.bool)
        left[self.bought] = False
        return left.nonzero()[:, 0]

    def probability(self, net: nn.Module) -> Tensor:
        """Return what a network says about the images that are left."""
        with torch.no_grad():
            return net(self.pool.inputs[self.rest]).softmax(1)


Choice = Callable[[Shop, int], Tensor]  # places in `rest`


def at_random(shop: Shop, count: int) -> Tensor:
    """Choose at random."""
    return torch.randperm(len(shop.rest), generator=shop.generator)[:count]


def by_entropy(shop: Shop, count: int) -> Tensor:
    """Choose the largest entropies."""
    return torch.special.entr(shop.probability(shop.net)).sum(1).topk(count).indices


def by_margin(shop: Shop, count: int) -> Tensor:
    """Choose the smallest differences of the two largest probabilities."""
    first, second = shop.probability(shop.net).topk(2, dim=1).values.T
    return (second - first).topk(count).indices


def by_cover(shop: Shop, count: int) -> Tensor:
    """Choose, one after the other, what is farthest from all bought images in hidden features (Sener 2018)."""
    layers = nn.Sequential(*list(shop.net.children())[:-1])
    with torch.no_grad():
        A = layers(shop.pool.inputs).flatten(1)
    rest, chosen = A[shop.rest], []
    distance = torch.cdist(rest, A[shop.bought]).amin(1)
    for _ in range(count):
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, torch.cdist(rest, rest[chosen[-1:]])[:, 0])
    return torch.tensor(chosen)


def by_disagreement(shop: Shop, count: int) -> Tensor:
    """Choose the largest mutual information of an ensemble (BALD, Houlsby et al. 2011)."""
    known, seeds = shop.pool[shop.bought], range(1, shop.purchase.ensemble)
    others = [train_unrecorded(replace(shop.problem, seed=5000 + 100 * shop.problem.seed + k), known) for k in seeds]
    p = torch.stack([shop.probability(net) for net in [shop.net, *others]])
    information = torch.special.entr(p.mean(0)).sum(1) - torch.special.entr(p).sum(2).mean(0)
    return information.topk(count).indices


def by_next_to_label(shop: Shop, count: int) -> Tensor:
    """Choose with `epk.next_to_label`, from a recorded run that has not seen the held-out labels."""
    held_out, seen = shop.bought.tensor_split([shop.purchase.held_out])
    model = epk.UncertainClassifier(record(shop.problem, shop.pool[seen]))
    model.fit(shop.pool.inputs[held_out], shop.pool.labels[held_out])
    return epk.next_to_label(model, shop.pool.inputs[shop.rest], count).indices


METHODS: dict[str, Choice] = {
    "random": at_random,
    "entropy": by_entropy,
    "margin": by_margin,
    "k-centre": by_cover,
    "BALD, ensemble of 5": by_disagreement,
    "EPK-GP: next_to_label": by_next_to_label,
}


def run(config: Config) -> Result:
    """Buy labels round after round, by every method, and train a network after each."""
    purchase = config.purchase
    table, left_out = [], []
    for problem in config.problems:
        for method in METHODS:
            rows = []
            for seed in config.seeds:
                row = _row(replace(problem, seed=seed), purchase, method)
                if row is None:
                    left_out.append(WAITING)
                else:
                    rows.append(row["accuracy"])
            if rows:
                about = {"data": problem.data, "network": network_name(problem), "method": method, "seeds": len(rows)}
                about["accuracy"] = [mean_and_std(list(values)) for values in zip(*rows, strict=True)]
                table.append(about | {"mean": mean_and_std([sum(row[1:]) / len(row[1:]) for row in rows])})
    first = purchase.held_out + purchase.start
    return Result([first + purchase.per_round * k for k in range(purchase.rounds + 1)], table, reasons_once(left_out))


def _row(problem: Problem, purchase: Purchase, method: str) -> Row | None:
    name = f"{problem.data} {network_name(problem)} seed {problem.seed}, {method}"
    key = {"problem": asdict(problem), "purchase": asdict(purchase), "method": method}
    return row_of(name, key, lambda: rounded({"accuracy": _accuracies(problem, purchase, METHODS[method])}))


def _accuracies(problem: Problem, purchase: Purchase, choose: Choice) -> list[float]:
    pool, _, test = splits(replace(problem, num_train=purchase.pool), purchase.num_test)
    generator = torch.Generator().manual_seed(problem.seed)
    bought = torch.randperm(len(pool), generator=generator)[: purchase.held_out + purchase.start]
    accuracies = []
    for round_number in range(purchase.rounds + 1):
        net = train_unrecorded(problem, pool[bought])
        with torch.no_grad():
            accuracies.append(float((net(test.inputs).argmax(1) == test.labels).double().mean()))
        if round_number < purchase.rounds:
            shop = Shop(problem, pool, bought, net, purchase, generator)
            bought = torch.cat([bought, shop.rest[choose(shop, purchase.per_round)]])
    return accuracies


@styled
def draw(result: Result) -> Figure:
    """Draw accuracy against the number of labels for every network."""
    names = list(dict.fromkeys((row["data"], row["network"]) for row in result.table))
    methods = list(dict.fromkeys(row["method"] for row in result.table))
    rows = -(-len(names) // PER_ROW)
    figure = new_figure(0.9 + 2.5 * rows)
    axes = list(figure.subplots(rows, min(len(names), PER_ROW), squeeze=False).flat)
    for ax in axes:
        ax.set_axis_off()
    for ax, name in zip(axes, names, strict=False):
        ax.set_axis_on()
        for row in result.table:
            if (row["data"], row["network"]) == name:
                means = [mean for mean, _ in row["accuracy"]]
                ours, k = row["method"].startswith("EPK"), methods.index(row["method"])
                style = {"color": INK if ours else PALETTE[k], "marker": "os^DvP"[k % 6], "markersize": 3}
                ax.plot(result.labels, means, linewidth=2.2 if ours else 1.1, label=row["method"], **style)
        ax.set(title=", ".join(name), xlabel="labels bought")
    figure.axes[0].set_ylabel("accuracy on test images, mean of seeds")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


EXPERIMENT = Experiment(
    "active_learning",
    Config(),
    Config(
        (Problem("digits", width=8, steps=20, batch_size=10, lr=0.1),),
        Purchase(held_out=20, start=10, per_round=5, rounds=2, pool=100, num_test=100, ensemble=2),
        (0, 1),
    ),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
