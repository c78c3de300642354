"""Open-set recognition of MNIST as OpenOOD sets it up: networks know six digits, and scores tell the other four.

Usage: python benchmarks/outside/openset.py [--epochs N] [--splits N] [--out FILE]

OpenOOD's code is in no package registry and its lists of images are a download, so its protocol is made anew from its
configuration files (osr_mnist6): its LeNet, its augmentation, its optimizer and schedule with fewer epochs, all test
images, the area under the ROC curve. Its detectors are those of pytorch-ood. The digits of the five splits are those
of Chen et al. (2020), as OpenOOD's lists name none. Nothing is chosen on unknown digits.
"""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from processes import HERE, environment
from saved import FOLDER, Seconds, row, run_library, save

import epk_gp as epk
from epk_gp.datasets import Dataset, digits, mnist_folder
from epk_gp.provenance import Stopwatch

KNOWN = ((2, 4, 5, 9, 8, 3), (3, 2, 6, 9, 4, 0), (5, 8, 3, 2, 4, 6), (3, 7, 8, 4, 0, 5), (6, 3, 4, 9, 8, 2))
PACKAGES = ["pytorch-ood", "scikit-learn"]
NUM_VALIDATION = 1000  # known digits, which weigh our process against the network
BATCH_SIZE, LR, MOMENTUM, WEIGHT_DECAY, EPOCHS = 128, 0.1, 0.9, 5e-4, 100  # OpenOOD's
Labelled = tuple[Tensor, Tensor]  # images and classes
OURS = {"out_of_distribution": "epk_gp, out of distribution", "entropy": "epk_gp, entropy"}


class LeNet(nn.Module):
    """OpenOOD's LeNet, which takes grey images as coloured ones; the last layer takes 84 features."""

    def __init__(self, num_classes: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(),
        )  # fmt: skip
        self.last = nn.Linear(84, num_classes)

    def forward(self, X: Tensor) -> Tensor:
        """Return the logits."""
        return self.last(self.features(X.expand(-1, 3, -1, -1)))


def split(data: Dataset, known: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the images of known digits, their classes in the order of `known`, and the images of the others."""
    classes = torch.full((10,), -1)
    classes[list(known)] = torch.arange(len(known))
    labels = classes[data.labels]
    images = (data.inputs.float() - 0.5) / 0.5  # OpenOOD's mean and deviation
    return images[labels >= 0], labels[labels >= 0], images[labels < 0]


def augmented(X: Tensor) -> Tensor:
    """Mirror half of the images, and move each by up to four pixels, as OpenOOD does."""
    n, side = len(X), X.shape[-1]
    X = torch.where((torch.rand(n) < 0.5)[:, None, None, None], X.flip(-1), X)
    rows, columns = (torch.randint(0, 9, (n, 1)) + torch.arange(side) for _ in range(2))
    padded = F.pad(X, (4, 4, 4, 4), value=-1.0)
    return padded[torch.arange(n)[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]


def trained(X: Tensor, y: Tensor, num_classes: int, epochs: int, seed: int) -> LeNet:
    """Train as OpenOOD's baseline does: SGD with Nesterov's momentum, and a cosine that ends near 0."""
    torch.manual_seed(seed)
    net = LeNet(num_classes)
    optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, nesterov=True)
    steps = epochs * -(-len(X) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-6)
    for _ in range(epochs):
        for rows in torch.randperm(len(X)).split(BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(net(augmented(X[rows])), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def network_of(
    number: int, train: Labelled, validation: Labelled, num_classes: int, epochs: int, folder: Path | None
) -> tuple[LeNet, float]:
    """Return the network of a split and the seconds of its training; one that the folder has is not trained again.

    With OpenOOD's learning rate some networks die: their logits become constant. These are drawn and trained again.
    """
    file = folder and folder / f"split_{number}_epochs_{epochs}.pt"
    if file is not None and file.exists():
        stored, net = torch.load(file, weights_only=True), LeNet(num_classes)
        net.load_state_dict(stored["weights"])
        return net.eval(), stored["seconds"]
    for seed in range(number, 1000, len(KNOWN)):
        with Seconds() as seconds:
            net = trained(*train, num_classes, epochs, seed)
        with torch.no_grad():
            if net(validation[0]).std(0).max() > 0:
                break
        print(f"split {number}: the network of seed {seed} died", flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": net.state_dict(), "seconds": seconds.value}, file)
    return net, seconds.value


def our_scores(net: nn.Module, train: Labelled, validation: Labelled, X: Tensor) -> dict:
    """Return our scores of images, and the seconds of all of them together."""
    with Seconds() as seconds:
        judge = epk.UncertainClassifier.of(net, *train).fit(*validation)
        uncertainty = judge.uncertainty(X)
    return {name: (getattr(uncertainty, field), seconds.value) for field, name in OURS.items()}


@torch.no_grad()
def their_scores(net: LeNet, train: Labelled, X: Tensor, python: Path) -> tuple[dict, dict[str, str]]:
    """Return the scores of pytorch-ood's detectors with the seconds of each, and its version."""
    features, asked = (torch.cat([net.features(part.expand(-1, 3, -1, -1)) for part in images.split(1000)])
                       for images in (train[0], X))  # fmt: skip
    job = {"features": features, "labels": train[1], "asked_features": asked, "asked_logits": net.last(asked)}
    job |= {"pixels": train[0].flatten(1), "asked_pixels": X.flatten(1)}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(job, given := Path(folder) / "job.pt")
        run_library(python, "detectors.py", given, found := Path(folder) / "scores.pt")
        found = torch.load(found, weights_only=True)
    scores = {f"pytorch-ood, {name}": (found["scores"][name], found["seconds"][name]) for name in found["scores"]}
    return scores, found["versions"]


def main(
    out: Annotated[Path, typer.Option(help="The JSON file.")] = FOLDER / "openset.json",
    epochs: Annotated[int, typer.Option(help=f"Epochs of each network; OpenOOD has {EPOCHS}.")] = 10,
    splits: Annotated[int, typer.Option(help="Networks, each on digits of its own.")] = len(KNOWN),
    library: Annotated[bool, typer.Option(help="Whether pytorch-ood's detectors run.")] = True,
    environments: Annotated[Path, typer.Option(help="Folder of the library's environment.")] = HERE / ".venvs",
    networks: Annotated[Path | None, typer.Option(help="Folder where trained networks are kept.")] = None,
    small: Annotated[bool, typer.Option(help="scikit-learn's digits, for the tests.")] = False,
) -> None:
    """Train, score, and write the rows."""
    torch.set_num_threads(1)
    timer, libraries, results, accuracies, training = Stopwatch(), {}, {}, [], []
    python = environment(environments / "pytorch_ood", PACKAGES) if library else None
    files = [enlarged(digits())] * 2 if small else [mnist_folder(split=part) for part in ("train", "test")]
    for number, known in enumerate(KNOWN[:splits]):
        (X, y, _), (X_test, y_test, unknown) = (split(data, known) for data in files)
        held_out = min(NUM_VALIDATION, len(X) // 4)
        train, validation = (X[:-held_out], y[:-held_out]), (X[-held_out:], y[-held_out:])
        net, seconds = network_of(number, train, validation, len(known), epochs, networks)
        training.append(seconds)
        asked = torch.cat([X_test, unknown])
        is_unknown = torch.arange(len(asked)) >= len(X_test)
        with torch.no_grad():
            accuracies.append(float((net(X_test).argmax(1) == y_test).float().mean()))
        scores = our_scores(net, train, validation, asked)
        if python is not None:
            theirs, libraries = their_scores(net, train, asked, python)
            scores |= theirs
        for name, (values, cost) in scores.items():
            results.setdefault(name, []).append((roc_auc_score(is_unknown, values), cost))
            print(f"split {number}, {name}: {results[name][-1][0]:.4f}, {cost:.1f} s", flush=True)
    data = "scikit-learn's digits" if small else "MNIST-6/4"
    judge = "OpenOOD's open-set protocol"
    rows = [
        row(name, judge, data, [area for area, _ in found], "AUROC of unknown digits", [cost for _, cost in found])
        for name, found in results.items()
    ]
    note = f"{epochs} epochs; OpenOOD trains {EPOCHS}"
    rows.append(row("LeNet", judge, data, accuracies, "accuracy on known digits", training, note))
    save(out, rows, f"{splits} splits, each with a network of its own", timer, libraries)


def enlarged(data: Dataset) -> Dataset:
    """Return scikit-learn's digits in MNIST's size."""
    images = F.interpolate(data.inputs.reshape(-1, 1, 8, 8).float(), size=(28, 28))
    return Dataset(images / images.max(), data.labels, data.num_classes, data.name)


if __name__ == "__main__":
    typer.run(main)
