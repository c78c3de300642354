"""Measure and draw what docs/deciding.md states: MNIST and Fashion-MNIST, three seeds. EPK_GP_DATA names the data.

python docs/pictures/deciding.py judge NAME SEED, and clean and label in its place, measure (NAME is mnist or
fashion-mnist, and mnist alone for label); draw then draws, and writes the numbers of all seeds into deciding.json.
KMNIST's test part must lie beside the two others.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.analysis.measures import error_detection, ood_metrics
from epk_gp.core.checks import ComputeOptions
from epk_gp.datasets import Dataset, mnist_folder
from epk_gp.gp.label_process import condition_exactly, median_lengthscale, squared_distances
from epk_gp.gp.stacking import most_likely_temperature, stack_logits
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.plots import new_figure, save_figure, score_histogram, training_image
from epk_gp.plots.style import EXACT, GREY, PALETTE, RIGHT, SMALL, WRONG, styled

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "experiments"))
from label_suspicion import precision_at_k  # noqa: E402

KEPT = Path(tempfile.gettempdir()) / "epk_gp_deciding"
SEEDS = (20, 21, 22)
NUM_TRAIN, NUM_VALIDATION, NUM_TEST, NUM_OUTSIDE = 2000, 1000, 2000, 1000
STEPS, BATCH = 600, 64
OUTSIDE = {"mnist": ("fashion-mnist", "kmnist"), "fashion-mnist": ("mnist", "kmnist")}
CURVES = {
    "softmax": (GREY, "softmax", ":"),
    "ensemble of 5": (PALETTE[1], "ensemble of 5", "--"),
    "RBF on pixels": (PALETTE[4], "RBF on pixels", "-."),
    "UncertainClassifier": (EXACT, "error score", "-"),
}
FASHION = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def folder(name: str) -> Path:
    """Return the folder of a data set."""
    return Path(os.environ["EPK_GP_DATA"]) / name


def shuffled(name: str, split: str, seed: int) -> Dataset:
    """Load a part of a data set in random order."""
    data = mnist_folder(folder(name), split=split)
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))]


def trained(X: Tensor, y: Tensor, seed: int, steps: int = STEPS) -> epk.Trajectory:
    """Train and record the network, 784-64-10."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    return epk.train(net, X, y, optimizer=optimizer, steps=steps, batch_size=min(BATCH, len(X)), generator=generator)


@dataclass(frozen=True)
class PixelKernel:
    """The square of the RBF kernel on the pixels: the process's kernel without the path kernel's cosine."""

    lengthscale: float
    options: ComputeOptions = ComputeOptions()

    def rounding(self, X: Tensor) -> float:
        """Return the relative rounding error of a value."""
        return torch.finfo(X.dtype).eps

    def block(self, X: Tensor, Y: Tensor) -> Tensor:
        """Evaluate the kernel."""
        return (-squared_distances(X, Y) / self.lengthscale**2).exp()

    def gram(self, X: Tensor) -> Tensor:
        """Evaluate the kernel between all pairs."""
        return self.block(X, X)


def judge(name: str, seed: int) -> None:
    """Abstain, detect and sets: one network, its ensemble, its NTK at the last step, and the RBF kernel on pixels."""
    train, rest = shuffled(name, "train", seed)[:NUM_TRAIN], shuffled(name, "test", seed)
    validation, test = rest[:NUM_VALIDATION], rest[NUM_VALIDATION : NUM_VALIDATION + NUM_TEST]
    run = trained(train.inputs, train.labels, seed)
    model = epk.UncertainClassifier(run).fit(validation.inputs, validation.labels)
    ntk = epk.UncertainClassifier(tangent_trajectory(run)).fit(validation.inputs, validation.labels)
    u, ntk_u = model.uncertainty(test.inputs, 2), ntk.uncertainty(test.inputs, 2)
    z, z_validation = epk.network_outputs(run, test.inputs), epk.network_outputs(run, validation.inputs)
    members = [z.softmax(1)]
    for k in range(1, 5):
        other = trained(train.inputs, train.labels, 100 * seed + k)
        members.append(epk.network_outputs(other, test.inputs).softmax(1))
    pixels = PixelKernel(median_lengthscale(train.inputs))
    rbf = condition_exactly(pixels, train.inputs, nn.functional.one_hot(train.labels, 10).double() - 1 / 10)  # type: ignore[arg-type]
    rbf_mean, rbf_variance = rbf.predict(test.inputs)
    stacked = stack_logits(z_validation, rbf.predict(validation.inputs)[0], validation.labels)
    probabilities = {
        "softmax": z.softmax(1),
        "network, tempered": (most_likely_temperature(z_validation, validation.labels) * z).softmax(1),
        "ensemble of 5": torch.stack(members).mean(0),
        "RBF on pixels": stacked.logits(z, rbf_mean).softmax(1),
        "NTK at the last step": ntk.predict_proba(test.inputs),
        "UncertainClassifier": model.predict_proba(test.inputs),
    }
    predicted = z.argmax(1)
    wrong = predicted != test.labels
    found = {k: error_detection(1 - p.gather(1, predicted[:, None])[:, 0], wrong) for k, p in probabilities.items()}
    row: dict = {
        "train_accuracy": share(epk.network_outputs(run, train.inputs).argmax(1) == train.labels),
        "accuracy": {k: share(p.argmax(1) == test.labels) for k, p in probabilities.items()},
        "error_auroc": {k: value.auroc for k, value in found.items()},
        "aurc": {k: value.aurc for k, value in found.items()},
        "nll": {k: float(nn.functional.nll_loss(p.log(), test.labels)) for k, p in probabilities.items()},
        "ood": {},
        "sets": {},
    }
    inside = {name: u.out_of_distribution}
    for other_name in OUTSIDE[name]:
        X = shuffled(other_name, "test", seed)[:NUM_OUTSIDE].inputs
        of_x, of_x_ntk = model.uncertainty(X, 2), ntk.uncertainty(X, 2)
        entropy = [torch.special.entr(logits.softmax(1)).sum(1) for logits in (z, epk.network_outputs(run, X))]
        pairs = {
            "softmax entropy": entropy,
            "RBF on pixels": (rbf_variance, rbf.predict(X)[1]),
            "NTK at the last step": (ntk_u.out_of_distribution, of_x_ntk.out_of_distribution),
            "out-of-distribution score": (u.out_of_distribution, of_x.out_of_distribution),
            "error score": (u.error, of_x.error),
        }
        row["ood"][other_name] = {k: ood_metrics(*pair).auroc for k, pair in pairs.items()}
        inside[other_name] = of_x.out_of_distribution
    turned = torch.rot90(test.inputs, 1, (2, 3))
    for alpha in (0.1, 0.05, 0.01):
        sets, of_turned = model.predict_set(test.inputs, alpha), model.predict_set(turned, alpha)
        row["sets"][str(alpha)] = {
            "right": share(sets.gather(1, test.labels[:, None])),
            "size": float(sets.sum(1).double().mean()),
            "one_class": share(sets.sum(1) == 1),
            "right_of_turned": share(of_turned.gather(1, test.labels[:, None])),
        }
    print(json.dumps(row, indent=1))
    drawn = {k: value.risk for k, value in found.items()}
    keep("judge", name, seed, {"row": row, "risk": drawn, "ood": inside, "sets": model.predict_set(test.inputs, 0.01)})


def clean(name: str, seed: int) -> None:
    """Find 10 % of labels that were flipped to any other class."""
    train = shuffled(name, "train", seed)[:NUM_TRAIN]
    generator = torch.Generator().manual_seed(seed)
    flipped = torch.rand(NUM_TRAIN, generator=generator) < 0.1
    labels = (train.labels + flipped * torch.randint(1, 10, (NUM_TRAIN,), generator=generator)) % 10
    run = trained(train.inputs, labels, seed)
    found = epk.label_errors(run)
    loss = -epk.network_outputs(run, train.inputs).log_softmax(1).gather(1, labels[:, None])[:, 0]
    scores = {
        "label_errors": found.scores,
        "margin alone": -found.margin,
        "own label alone": -found.own_label,
        "AUM alone": -found.aum,
        "loss of the trained network": loss,
    }
    row: dict = {k: precision_at_k(values, flipped) for k, values in scores.items()}
    row |= {"flipped": int(flipped.sum()), "first_100": share(flipped[found.indices[:100]])}
    row |= {"expected_is_true": share((found.predicted == train.labels)[flipped])}
    print(json.dumps(row, indent=1))
    keep("clean", name, seed, {"row": row, "labels": labels, "order": found.indices, "expected": found.predicted})


def label(name: str, seed: int) -> None:
    """Learning curves: 100 labels at first, 50 more in each of six rounds, from a pool of 2000."""
    train, test = shuffled(name, "train", seed), shuffled(name, "test", seed)[:NUM_TEST]
    pool, validation = train[:2000], train[2000:2100]
    curves: dict[str, list[float]] = {"next_to_label": [], "largest entropy": [], "random": []}
    for strategy, accuracies in curves.items():
        chosen, generator = torch.arange(100), torch.Generator().manual_seed(seed)
        for _ in range(7):
            run = trained(pool.inputs[chosen], pool.labels[chosen], seed, steps=300)
            accuracies.append(share(epk.network_outputs(run, test.inputs).argmax(1) == test.labels))
            rest = torch.tensor(sorted(set(range(2000)) - set(chosen.tolist())))
            if strategy == "random":
                new = torch.randperm(len(rest), generator=generator)[:50]
            elif strategy == "largest entropy":
                p = epk.network_outputs(run, pool.inputs[rest]).softmax(1)
                new = torch.special.entr(p).sum(1).topk(50).indices
            else:
                model = epk.UncertainClassifier(run).fit(validation.inputs, validation.labels)
                new = epk.next_to_label(model, pool.inputs[rest], 50).indices
            chosen = torch.cat([chosen, rest[new]])
    print(json.dumps(curves))
    keep("label", name, seed, {"row": curves})


def share(found: Tensor) -> float:
    """Return the share of entries that are true."""
    return float(found.double().mean())


def keep(part: str, name: str, seed: int, results: dict) -> None:
    """Keep what is drawn later."""
    KEPT.mkdir(exist_ok=True)
    torch.save(results, KEPT / f"{part}_{name}_{seed}.pt")


def kept(part: str, name: str) -> list[dict]:
    """Return what was kept, one entry per seed."""
    return [torch.load(KEPT / f"{part}_{name}_{seed}.pt") for seed in SEEDS]


def draw() -> None:
    """Draw what was kept, and write the numbers of all seeds."""
    sizes = {"seeds": SEEDS, "train": NUM_TRAIN, "validation": NUM_VALIDATION, "test": NUM_TEST, "steps": STEPS}
    parts = {
        part: {name: [each["row"] for each in kept(part, name)] for name in OUTSIDE} for part in ("judge", "clean")
    }
    parts["label"] = {"mnist": [each["row"] for each in kept("label", "mnist")]}
    (HERE / "deciding.json").write_text(json.dumps(sizes | parts) + "\n")
    save(curves_figure(), "abstain")
    save(histograms_figure(), "detect")
    save(sets_figure(), "sets")
    save(labels_figure(), "clean")
    save(learning_figure(), "label")


def save(figure: Figure, name: str) -> None:
    """Write a picture."""
    save_figure(figure, HERE / f"deciding_{name}.png", palette=True)


@styled
def curves_figure() -> Figure:
    """Draw risk-coverage curves, means of the seeds."""
    figure = new_figure(3.3)
    for ax, name in zip(figure.subplots(1, 2), OUTSIDE, strict=True):
        runs = kept("judge", name)
        for score, (colour, words, dashes) in CURVES.items():
            risk = torch.stack([each["risk"][score] for each in runs]).mean(0)
            coverage = torch.arange(1, len(risk) + 1) / len(risk)
            ax.plot(100 * coverage[100:], 100 * risk[100:], dashes, color=colour, label=words)
        ax.set(title=name, xlabel="predictions kept, %", ylabel="wrong among them, %", xlim=(0, 100))
        ax.set_ylim(bottom=0)
        ax.legend()
    return figure


@styled
def histograms_figure() -> Figure:
    """Draw the out-of-distribution score inside and outside, of one network for each data set."""
    figure = new_figure(2.9)
    for ax, name in zip(figure.subplots(1, 2), OUTSIDE, strict=True):
        of_sets = kept("judge", name)[0]["ood"]
        known = {f"{other} (held out)" if other == name else other: values for other, values in of_sets.items()}
        score_histogram(ax, known, label="out-of-distribution score")
        ax.set(title=f"trained on {name}", ylim=(0, 0.42))
        ax.legend(loc="upper left")
    return figure


@styled
def sets_figure() -> Figure:
    """Draw images of Fashion with their sets of classes at 99 %: of one class, of two, of more."""
    sets = kept("judge", "fashion-mnist")[0]["sets"]
    data = shuffled("fashion-mnist", "test", SEEDS[0])[NUM_VALIDATION : NUM_VALIDATION + NUM_TEST]
    size = sets.sum(1)
    rows = {
        "one class in the set": (size == 1).nonzero()[:7, 0],
        "two classes": (size == 2).nonzero()[:7, 0],
        "three or more": (size >= 3).nonzero()[:7, 0],
    }
    figure = new_figure(5.9)
    parts = figure.subfigures(3, 1, height_ratios=(1, 1.12, 1.35))
    for part, (title, points) in zip(parts, rows.items(), strict=True):
        part.suptitle(title, x=0.01, ha="left")
        for ax, n in zip(part.subplots(1, 7), points.tolist(), strict=False):
            words = [FASHION[c] for c in sets[n].nonzero()[:, 0].tolist()]
            true = FASHION[int(data.labels[n])]
            sign, mark = (1.0, "✓") if true in words else (-1.0, "✗")
            training_image(ax, data.inputs[n, 0], "\n".join(words), sign, colours=(RIGHT, WRONG))
            ax.set_xlabel(f"is: {true} {mark}", fontsize=SMALL, labelpad=2)
    return figure


@styled
def labels_figure() -> Figure:
    """Draw the most suspicious labels; a solid dark frame and a tick mean that the label was flipped."""
    figure = new_figure(5.6)
    for part, name in zip(figure.subfigures(2, 1), OUTSIDE, strict=True):
        part.suptitle(f"{name}: label → expected class", x=0.01, ha="left")
        found, data = kept("clean", name)[0], shuffled(name, "train", SEEDS[0])[:NUM_TRAIN]
        words = FASHION if name == "fashion-mnist" else tuple("0123456789")
        for ax, i in zip(part.subplots(2, 9).flat, found["order"][:18].tolist(), strict=True):
            given, expected = int(found["labels"][i]), int(found["expected"][i])
            sign, mark = (1.0, "✓") if given != data.labels[i] else (-1.0, "✗")
            caption = f"{words[given]} →\n{words[expected]} {mark}"
            training_image(ax, data.inputs[i, 0], caption, sign, colours=(RIGHT, WRONG))
    return figure


@styled
def learning_figure() -> Figure:
    """Draw accuracy against the number of labels: mean and standard error of the seeds."""
    figure = new_figure(3.3, 5.0)
    ax, curves = figure.subplots(), [each["row"] for each in kept("label", "mnist")]
    for name, colour, marker in zip(curves[0], (EXACT, PALETTE[1], GREY), "osD", strict=True):
        values = 100 * torch.tensor([curve[name] for curve in curves])
        error = values.std(0) / len(SEEDS) ** 0.5
        places = range(100, 401, 50)
        ax.errorbar(places, values.mean(0), error, color=colour, marker=marker, markersize=4, label=name, capsize=3)
    ax.set(xlabel="labels of training points", ylabel="accuracy, %", title="MNIST, 784-64-10")
    ax.legend()
    return figure


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        draw()
    else:
        {"judge": judge, "clean": clean, "label": label}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
