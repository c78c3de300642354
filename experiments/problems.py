"""The recorded runs of the experiments: the paper's three Gaussians, and images."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import epk_gp as epk
from epk_gp.analysis.maps import Plane, coordinate_plane
from epk_gp.core.model import zero_final_layer
from epk_gp.datasets import DATA_VARIABLE, Dataset, digits, mnist_folder, three_gaussians


@dataclass(frozen=True)
class Toy:
    """Section 4.1 of Bell et al. (2023): three Gaussians, one hidden ReLU layer, full batches.

    Attributes:
        num_per_class: Training points of each class.
        dim: Coordinates.
        width: Hidden units.
        lr: Learning rate.
        steps: Number of steps S.
        num_test: Held-out points.
        seed: Seed of the data and the initial weights.
    """

    num_per_class: int = 1000
    dim: int = 100
    width: int = 64
    lr: float = 0.1
    steps: int = 300
    num_test: int = 300
    seed: int = 0


SMALL_TOY = Toy(num_per_class=20, dim=4, width=8, steps=8, num_test=30)


@dataclass(frozen=True)
class Images:
    """A small network on images, plain gradient descent in float64.

    Attributes:
        data: A folder of MNIST-format files below EPK_GP_DATA, or "digits" (scikit-learn's, 8 x 8).
        network: "cnn" (conv 8 - pool - conv 16 - pool - linear, ReLU) or "mlp" (one hidden ReLU layer).
        width: Hidden units of the mlp.
        num_train: Number of training images M, the first in an order drawn with the seed.
        num_test: Held-out images.
        batch_size: Full batches if None.
        lr: Learning rate.
        steps: Number of steps S.
        seed: Seed of the order and the initial weights.
    """

    data: str = "mnist"
    network: str = "cnn"
    width: int = 64
    num_train: int = 600
    num_test: int = 100
    batch_size: int | None = None
    lr: float = 0.05
    steps: int = 60
    seed: int = 0


def record_toy(config: Toy) -> tuple[epk.Trajectory, Dataset]:
    """Train and record; return the run and held-out points."""
    generator = torch.Generator().manual_seed(config.seed)
    data = three_gaussians(config.num_per_class, dim=config.dim, generator=generator)
    held_out = three_gaussians(-(-config.num_test // 3), dim=config.dim, generator=generator)[: config.num_test]
    torch.manual_seed(config.seed)
    net = nn.Sequential(nn.Linear(config.dim, config.width), nn.ReLU(), nn.Linear(config.width, 3)).double()
    zero_final_layer(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.lr)
    return epk.train(net, data.inputs, data.labels, optimizer=optimizer, steps=config.steps), held_out


def toy_plane(X: torch.Tensor) -> Plane:
    """Return the plane of the first two coordinates of the toy problem, with all others 0, which is their mean."""
    return replace(coordinate_plane(X), origin=X.new_zeros(X.shape[1]))


def record_images(config: Images) -> tuple[epk.Trajectory, Dataset]:
    """Train and record; return the run and held-out images."""
    generator = torch.Generator().manual_seed(config.seed)
    train, test = images(config.data, "train"), images(config.data, "test")
    train = train[torch.randperm(len(train), generator=generator)[: config.num_train]]
    test = test[torch.randperm(len(test), generator=generator)[: config.num_test]]
    torch.manual_seed(config.seed)
    net = build(config.network, tuple(train.inputs.shape[1:]), train.num_classes, config.width).double()
    zero_final_layer(net)
    trajectory = epk.train(
        net,
        train.inputs,
        train.labels,
        optimizer=torch.optim.SGD(net.parameters(), lr=config.lr),
        steps=config.steps,
        batch_size=config.batch_size,
        generator=generator,
    )
    return trajectory, test


def images(name: str, split: str) -> Dataset:
    """Load images by name. "digits" are divided into a training and a test part.

    Raises:
        FileNotFoundError: The files do not exist.
    """
    if name == "digits":
        whole = digits()
        return whole[:1200] if split == "train" else whole[1200:]
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise FileNotFoundError(f"images need a folder that holds {name}/: pass --data-dir, or set {DATA_VARIABLE}.")
    return mnist_folder(Path(root) / name, split="train" if split == "train" else "test")


def build(name: str, shape: tuple[int, ...], num_classes: int, width: int) -> nn.Module:
    """Return a network with random initial weights.

    Raises:
        ValueError: There is no network of this name.
    """
    channels, height, breadth = shape
    if name == "mlp":
        layers = [nn.Flatten(), nn.Linear(channels * height * breadth, width), nn.ReLU(), nn.Linear(width, num_classes)]
        return nn.Sequential(*layers)
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (height // 4) * (breadth // 4), num_classes),
        )
    raise ValueError(f"network must be mlp or cnn: got {name!r}.")
