"""Contributions of 10,000 training images to the predictions of a ResNet, and the terms that sum to its outputs."""

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from drawings import term_bars
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import Dataset
from epk_gp.kernel_machine.attribute import Attribution
from epk_gp.plots import new_figure, training_image
from epk_gp.plots.style import DOWN, SMALL, UP, short, styled
from harness import Experiment, main
from problems import images

CLOTHES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
TERMS = ("initial", "samples", "decay", "statistics", "unexplained")


@dataclass(frozen=True)
class Config:
    """A ResNet on clothes, trained as ResNets are.

    Attributes:
        data: A folder of MNIST-format files below EPK_GP_DATA, or "digits" (scikit-learn's, 8 x 8).
        activation: A name in `torch.nn.functional`.
        num_train: Number of training images M, the first in an order drawn with the seed.
        num_test: Test images whose predictions are explained, classes in turn.
        channels: Channels of each stage.
        strides: Of the first convolution, then of each stage.
        padding: Pixels by which an augmented image may be moved.
        batch_size: Images in a step.
        steps: Number of steps S.
        lr: Learning rate of the first step; a cosine brings it to zero.
        momentum: Of the gradients.
        weight_decay: Of all weights.
        tol: Tolerance of the adaptive rule, which all steps share.
        neighbours: Training images shown on each side of a test image.
        shown: Test images that are drawn with their training images.
        seed: Seed of order, augmentation and initial weights.
    """

    data: str = "fashion-mnist"
    activation: str = "relu"
    num_train: int = 10_000
    num_test: int = 10
    channels: tuple[int, ...] = (8, 16, 32)
    strides: tuple[int, ...] = (2, 2, 2, 2)
    padding: int = 2
    batch_size: int = 100
    steps: int = 300
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    tol: float = 1e-9
    neighbours: int = 4
    shown: tuple[int, ...] = (0, 5, 8, 9)
    seed: int = 0


@dataclass(frozen=True)
class Result:
    """Terms of every prediction, and what they cost.

    Attributes:
        tests: Per test image: label, predicted class, the terms of its output for that class (`samples` also divided
            into the training images of that class and the others), the output, the difference of the sum from it, the
            amplification, and how many training images raised and lowered it.
        shown: Some of them with their pixels, and the training images that raised and lowered the output most.
        names: Names of the classes.
        num_train: Number of training images.
        num_weights: Number of weights.
        num_statistics: Number of moving statistics.
        accuracy: Share of all test images that the network predicts rightly.
        completeness: Largest |sum - network| over |network|.
        certified: Whether steps, quadrature and sum are within tolerance.
        max_step_mismatch: Largest difference of a recorded step from the replayed one.
        evaluations: Gradients per test image and step.
        contributing: Smallest number of training images with a contribution that is not zero, over the test images.
        seconds_training: Seconds of training and recording.
        seconds_attribution: Seconds of the contributions.
        cpu_seconds_attribution: Seconds of processor time of the contributions.
        peak_memory: Largest resident memory of the process, in GiB.
        disk: Size of the recorded run, in MiB.
    """

    tests: list[dict[str, Any]]
    shown: list[dict[str, Any]]
    names: list[str]
    num_train: int
    num_weights: int
    num_statistics: int
    accuracy: float
    completeness: float
    certified: bool
    max_step_mismatch: float
    evaluations: float
    contributing: int
    seconds_training: float
    seconds_attribution: float
    cpu_seconds_attribution: float
    peak_memory: float
    disk: float


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = self.activation(self.norm1(self.conv1(x)))
        return self.activation(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet(nn.Module):
    """A convolution, one block per stage, the mean over all places, and a linear layer."""

    def __init__(self, config: Config, num_classes: int) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = getattr(F, config.activation)
        first = config.channels[0]
        self.conv = nn.Conv2d(1, first, 3, config.strides[0], padding=1, bias=False)
        self.norm = nn.BatchNorm2d(first)
        widths = zip((first, *config.channels), config.channels, strict=False)
        self.blocks = nn.Sequential(
            *(Block(*width, stride, self.activation) for width, stride in zip(widths, config.strides[1:], strict=True))
        )
        self.linear = nn.Linear(config.channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        features = self.blocks(self.activation(self.norm(self.conv(x))))
        return self.linear(features.mean(dim=(2, 3)))


def run(config: Config) -> Result:
    """Train, record, and split the predictions of the test images."""
    train, test = images(config.data, "train"), images(config.data, "test")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed))
    train = train[order[: config.num_train]]
    points = test[_classes_in_turn(test.labels, config.num_test)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        trajectory = record(config, train, Path(folder) / "run")
        trained = time.perf_counter()
        outputs = network_outputs(trajectory, test.inputs)
        predicted = network_outputs(trajectory, points.inputs).argmax(dim=1)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        parts = epk.attribute(
            trajectory,
            points.inputs,
            head="logits",
            rule=epk.adaptive(tol=config.tol),
            classes=predicted,
            progress=sys.stderr.isatty(),
        )
        done, cpu_done = time.perf_counter(), time.process_time()
        disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 2**20
        result = Result(
            tests=[_terms(parts, points, train, predicted, n) for n in range(len(points))],
            shown=[_shown(parts, points, train, n, config.neighbours) for n in config.shown],
            names=list(CLOTHES) if config.data == "fashion-mnist" else [str(c) for c in range(train.num_classes)],
            num_train=len(train),
            num_weights=trajectory.model.num_weights,
            num_statistics=trajectory.model.num_statistics,
            accuracy=float((outputs.argmax(dim=1) == test.labels).double().mean()),
            completeness=float(((parts.total - parts.network) / parts.network).abs().max()),
            certified=parts.certified,
            max_step_mismatch=parts.max_step_mismatch,
            evaluations=parts.evaluations,
            contributing=int((parts.samples != 0).sum(dim=2).min()),
            seconds_training=trained - start,
            seconds_attribution=done - begun,
            cpu_seconds_attribution=cpu_done - cpu_begun,
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            disk=disk,
        )
        del trajectory
    return result


def record(config: Config, train: Dataset, path: Path) -> epk.Trajectory:
    """Train with BatchNorm, augmentation, momentum, weight decay and a cosine, and record it on disk."""
    torch.manual_seed(config.seed)
    net = ResNet(config, train.num_classes).double()
    optimizer = torch.optim.SGD(
        net.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.steps)
    with epk.Recorder(net, optimizer, train.inputs, train.labels, folder=path) as recorder:
        net.train()
        batches: list[Tensor] = []
        for _ in range(config.steps):
            batches = batches or list(torch.randperm(len(train)).split(config.batch_size))
            batch = batches.pop()
            optimizer.zero_grad()
            F.cross_entropy(net(augmented(train.inputs[batch], config.padding)), train.labels[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
            scheduler.step()
    return recorder.trajectory


def augmented(batch: Tensor, padding: int) -> Tensor:
    """Move each image by up to `padding` pixels, and mirror one in two."""
    height, width = batch.shape[2:]
    rows = []
    for image in F.pad(batch, [padding] * 4):
        top, left, is_mirrored = (int(torch.randint(high, ())) for high in (2 * padding + 1, 2 * padding + 1, 2))
        image = image[:, top : top + height, left : left + width]
        rows.append(image.flip(2) if is_mirrored else image)
    return torch.stack(rows)


def _classes_in_turn(labels: Tensor, count: int) -> Tensor:
    """Return the first image of each class, then the second of each, and so on."""
    place = torch.zeros_like(labels)
    for c in labels.unique():
        is_class = labels == c
        place[is_class] = torch.arange(int(is_class.sum()))
    return (place * (labels.max() + 1) + labels).argsort()[:count]


def _terms(parts: Attribution, points: Dataset, train: Dataset, predicted: Tensor, n: int) -> dict[str, Any]:
    """List the terms of one prediction."""
    samples = parts.samples[n, 0]
    is_own = train.labels == predicted[n]
    return {
        "label": int(points.labels[n]),
        "predicted": int(predicted[n]),
        "initial": float(parts.initial[n, 0]),
        "samples": float(samples.sum()),
        "own_class": float(samples[is_own].sum()),
        "other_classes": float(samples[~is_own].sum()),
        "decay": float(parts.decay[n, 0]),
        "statistics": float(parts.statistics[n, 0]),
        "unexplained": float(parts.unexplained[n, 0]),
        "network": float(parts.network[n, 0]),
        "error": float(parts.total[n, 0] - parts.network[n, 0]),
        "amplification": float(parts.amplification[n, 0]),
        "num_raised": int((samples > 0).sum()),
        "num_lowered": int((samples < 0).sum()),
    }


def _shown(parts: Attribution, points: Dataset, train: Dataset, n: int, count: int) -> dict[str, Any]:
    """Return a test image, and the training images that raised its output most and lowered it most."""
    samples = parts.samples[n, 0]
    order = samples.argsort(descending=True)

    def listed(rows: Tensor) -> list[dict[str, Any]]:
        return [
            {"label": int(train.labels[i]), "value": float(samples[i]), "image": _as_text(train.inputs[i, 0])}
            for i in rows
        ]

    return {
        "test": n,
        "image": _as_text(points.inputs[n, 0]),
        "raised": listed(order[:count]),
        "lowered": listed(order.flip(0)[:count]),
    }


def _as_text(image: Tensor) -> list[str]:
    """Write an image of 256 levels of grey, one string of hexadecimal digits a row."""
    return [bytes(row).hex() for row in (255 * image).round().to(torch.uint8).tolist()]


def _from_text(rows: list[str]) -> np.ndarray:
    return np.array([list(bytes.fromhex(row)) for row in rows]) / 255


@styled
def draw(result: Result) -> Figure:
    """Draw some test images, the training images that raised and lowered their outputs most, and all terms."""
    figure = new_figure(2.45 * len(result.shown))
    for part, shown in zip(figure.subfigures(len(result.shown), 1, squeeze=False)[:, 0], result.shown, strict=True):
        test = result.tests[shown["test"]]
        predicted, true = result.names[test["predicted"]], result.names[test["label"]]
        part.suptitle(f"predicted: {predicted}, true label: {true}", x=0.01, ha="left", weight="bold")
        image, images, terms = part.subfigures(1, 3, width_ratios=(1.15, 3.5, 2.9))
        training_image(image.subplots(), _from_text(shown["image"]), "test image")
        for row, (key, title) in zip(
            images.subfigures(2, 1),
            (("raised", f"{UP} raised the logit of {predicted} most"), ("lowered", f"{DOWN} lowered it most")),
            strict=True,
        ):
            row.suptitle(title, x=0.01, ha="left", fontsize=SMALL)
            for ax, entry in zip(row.subplots(1, len(shown[key]), squeeze=False)[0], shown[key], strict=True):
                training_image(ax, _from_text(entry["image"]), short(entry["value"], sign=True), entry["value"])
                ax.set_xlabel(result.names[entry["label"]], fontsize=SMALL, labelpad=2)
        ax = term_bars(terms.subplots(), TERMS, np.array([test[term] for term in TERMS]), output="logit")
        ax.set_title("all terms of the logit")
    return figure


EXPERIMENT = Experiment(
    "resnet_contributions",
    Config(),
    Config(
        "digits",
        num_train=24,
        num_test=3,
        channels=(2, 2),
        strides=(1, 2, 2),
        padding=1,
        batch_size=8,
        steps=4,
        tol=1e-6,
        neighbours=2,
        shown=(0, 1),
    ),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
