"""Problems of the uncertainty experiments: recorded runs, the data beside and outside them, shifts and attacks."""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.datasets import Dataset
from problems import build, images

NUM_VALIDATION = 1000  # the last of the training files: everything that is chosen is chosen on them
EPS = (0.03, 0.06, 0.1)  # radii of the attacks, of pixels in [0, 1]
CLASSES = {"low": (0, 1, 2, 3, 4), "high": (5, 6, 7, 8, 9)}
OUTSIDE = {
    "mnist": ("fashion-mnist", "kmnist"),
    "fashion-mnist": ("mnist", "kmnist"),
    "mnist-low": ("mnist-high", "fashion-mnist"),
    "fashion-mnist-low": ("fashion-mnist-high", "mnist"),
    "digits": ("inverted-digits", "turned-digits"),
}


@dataclass(frozen=True)
class Problem:
    """One trained network.

    Attributes:
        data: A folder below EPK_GP_DATA or "digits" (scikit-learn's); with "-low" or "-high" behind it, the classes
            0 … 4 or 5 … 9 alone, numbered from 0.
        network: "mlp" or "cnn", as `problems.build`.
        width: Hidden units of the mlp.
        num_train: Training images, the first in an order drawn with the seed.
        steps: Steps of plain gradient descent.
        batch_size: Images per step.
        lr: Learning rate; it falls to zero over the last quarter of the steps if `decay`.
        decay: Whether the learning rate falls.
        seed: Seed of the order, the initial weights and everything that is drawn.
        double: Whether the run is in float64. Runs of wide networks and of many steps are in float32.
    """

    data: str = "mnist"
    network: str = "mlp"
    width: int = 64
    num_train: int = 4000
    steps: int = 800
    batch_size: int = 100
    lr: float = 0.3
    decay: bool = False
    seed: int = 0
    double: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Return the floating type of weights and images."""
        return torch.float64 if self.double else torch.float32

    @property
    def name(self) -> str:
        """Return a name for titles and files."""
        network = f"{self.network}{self.width}" if self.network == "mlp" else self.network
        return f"{self.data} {network} {self.num_train} seed {self.seed}"


@dataclass(frozen=True, eq=False)
class Judged:
    """A trained network and the data on which it is judged.

    Attributes:
        problem: What was trained.
        trajectory: The recorded run; its inputs and targets are the training data.
        validation: Images for choices: temperature, stacking, lengthscales, numbers of neighbours.
        test: Images of the test files, from the same classes.
    """

    problem: Problem
    trajectory: epk.Trajectory
    validation: Dataset
    test: Dataset

    def generator(self) -> torch.Generator:
        """Return a generator with the problem's seed."""
        return torch.Generator().manual_seed(self.problem.seed)


def splits(problem: Problem, num_test: int) -> tuple[Dataset, Dataset, Dataset]:
    """Return training, validation and test images."""
    whole, test = pictures(problem.data, "train", problem.dtype), pictures(problem.data, "test", problem.dtype)
    num_validation = min(NUM_VALIDATION, len(whole) // 4)
    pool, validation = whole[: len(whole) - num_validation], whole[len(whole) - num_validation :]
    if problem.num_train > len(pool):
        raise ValueError(
            f"num_train must be at most {len(pool)}, the images of {problem.data} less {num_validation} for "
            f"validation: got {problem.num_train}."
        )
    return _drawn(pool, problem.num_train, problem.seed), validation, _drawn(test, num_test, problem.seed)


def outside_images(name: str, count: int, problem: Problem) -> Tensor:
    """Draw test images of another data set, or of the classes that were held out."""
    if name in ("inverted-digits", "turned-digits"):
        X = _drawn(pictures("digits", "test", problem.dtype), count, problem.seed).inputs
        return 1 - X if name == "inverted-digits" else X.mT.flip(2)
    return _drawn(pictures(name, "test", problem.dtype), count, problem.seed).inputs


@lru_cache(maxsize=4)
def pictures(name: str, split: str, dtype: torch.dtype) -> Dataset:
    """Load images, of some classes alone where the name says so."""
    stem, _, part = name.rpartition("-")
    if part not in CLASSES:
        data = images(name, split)
        return Dataset(data.inputs.to(dtype), data.labels, data.num_classes, name)
    whole, classes = pictures(stem, split, dtype), CLASSES[part]
    chosen = (whole.labels >= classes[0]) & (whole.labels <= classes[-1])
    return Dataset(whole.inputs[chosen], whole.labels[chosen] - classes[0], len(classes), name)


def _drawn(data: Dataset, count: int, seed: int) -> Dataset:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    return data[order[:count]]


@contextmanager
def judged(problem: Problem, num_test: int = 2000, labels: Tensor | None = None) -> Iterator[Judged]:
    """Train and record a network in a temporary folder, which is removed in the end.

    Args:
        problem: What to train.
        num_test: Test images.
        labels: Other labels of the training images, where some of them are wrong on purpose.
    """
    train, validation, test = splits(problem, num_test)
    if labels is not None:
        train = replace(train, labels=labels)
    with tempfile.TemporaryDirectory(prefix="epk-gp-judged-") as folder:
        yield Judged(problem, record(problem, train, Path(folder) / "run"), validation, test)


def record(problem: Problem, train: Dataset, path: Path | None = None) -> epk.Trajectory:
    """Train a network on these images and record it, on disk where a path is given."""
    net, optimizer, scheduler = _training(problem, train)
    return epk.train(
        net,
        train.inputs,
        train.labels,
        optimizer=optimizer,
        scheduler=scheduler,
        steps=problem.steps,
        batch_size=min(problem.batch_size, len(train)),
        generator=torch.Generator().manual_seed(problem.seed),
        folder=path,
    )


def train_unrecorded(problem: Problem, train: Dataset) -> nn.Module:
    """Train in the same way without recording: members of ensembles, folds and retrained networks."""
    net, optimizer, scheduler = _training(problem, train)
    generator = torch.Generator().manual_seed(problem.seed)
    batch_size, order = min(problem.batch_size, len(train)), torch.empty(0, dtype=torch.int64)
    for _ in range(problem.steps):
        if not len(order):
            order = torch.randperm(len(train), generator=generator)
        batch, order = order[:batch_size], order[batch_size:]
        optimizer.zero_grad()
        F.cross_entropy(net(train.inputs[batch]), train.labels[batch]).backward()
        optimizer.step()
        scheduler.step()
    return net.eval()


def _training(problem: Problem, train: Dataset) -> tuple[nn.Module, torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
    torch.manual_seed(problem.seed)
    shape = tuple(train.inputs.shape[1:])
    net = build(problem.network, shape, train.num_classes, problem.width).to(problem.dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=problem.lr)
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _decay(problem))


def _decay(problem: Problem) -> Callable[[int], float]:
    """Return the factor of the learning rate: 1, then linear to zero over the last quarter where it falls."""
    start = 3 * problem.steps / 4
    return lambda step: min(1.0, (problem.steps - step) / (problem.steps - start)) if problem.decay else 1.0


def network_of(judged: Judged) -> nn.Module:
    """Return the trained network as a module of its own."""
    problem, run = judged.problem, judged.trajectory
    net = build(problem.network, run.input_shape, run.num_outputs, problem.width).to(problem.dtype)
    net.load_state_dict(run.weights(-1))
    return net.eval().requires_grad_(requires_grad=False)


# Shifts: images that are still of the training classes


def rotated(X: Tensor, degrees: float) -> Tensor:
    """Rotate images about their centre, bilinearly, with black where nothing comes from."""
    a = math.radians(degrees)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]], dtype=X.dtype)
    grid = F.affine_grid(turn.expand(len(X), 2, 3), list(X.shape), align_corners=False)
    return F.grid_sample(X, grid, align_corners=False)


def noisy(X: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise to every pixel and cut it off at 0 and 1."""
    return (X + std * torch.randn(X.shape, generator=generator, dtype=X.dtype)).clamp(0, 1)


def blurred(X: Tensor, std: float) -> Tensor:
    """Blur with a Gaussian of a standard deviation in pixels."""
    reach = math.ceil(3 * std)
    line = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=X.dtype) / std).square())
    kernel = torch.outer(line, line) / line.sum().square()
    weight = kernel.expand(X.shape[1], 1, *kernel.shape)
    return F.conv2d(X, weight, padding=reach, groups=X.shape[1])


SHIFTS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "rotated 15°": lambda X, _: rotated(X, 15),
    "rotated 30°": lambda X, _: rotated(X, 30),
    "rotated 45°": lambda X, _: rotated(X, 45),
    "noise 0.3": lambda X, generator: noisy(X, 0.3, generator),
    "blur 1.5": lambda X, _: blurred(X, 1.5),
}


# Attacks: the worst small change for the network itself; the scores are not attacked


def fgsm(net: nn.Module, X: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Take one step along the sign of the loss's gradient (Goodfellow et al. 2015)."""
    return (X + eps * _loss_gradient(net, X, labels).sign()).clamp(0, 1)


def pgd(net: nn.Module, X: Tensor, labels: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Take 20 steps of eps / 8 from a random start, each projected onto the ball (Madry et al. 2018)."""
    moved = X + eps * (2 * torch.rand(X.shape, generator=generator, dtype=X.dtype) - 1)
    for _ in range(20):
        moved = moved.clamp(0, 1)
        moved = moved + eps / 8 * _loss_gradient(net, moved, labels).sign()
        moved = X + (moved - X).clamp(-eps, eps)
    return moved.clamp(0, 1)


def _loss_gradient(net: nn.Module, X: Tensor, labels: Tensor) -> Tensor:
    with torch.enable_grad():
        point = X.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(point), labels, reduction="sum"), point)
    return gradient


# Wrong labels


def wrong_labels(labels: Tensor, share: float, kind: str, outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Give a share of the points a wrong label.

    Args:
        labels: True classes of M points.
        share: Share of points that get another label.
        kind: "uniform": any other class. "confusing": for each class the one that a network mistakes it for most often.
        outputs: Logits of a network that has not seen the points, of shape (M, C), for "confusing".
        generator: Source of the points and of the labels.

    Returns:
        The labels, of which round(share M) differ from the true ones.
    """
    M, C = outputs.shape
    chosen = torch.randperm(M, generator=generator)[: round(share * M)]
    given = labels.clone()
    if kind == "uniform":
        given[chosen] = (labels[chosen] + torch.randint(1, C, (len(chosen),), generator=generator)) % C
    elif kind == "confusing":
        given[chosen] = most_similar(outputs, labels)[labels[chosen]]
    else:
        raise ValueError(f"kind must be uniform or confusing: got {kind!r}.")
    return given


def most_similar(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each class the other class with the largest mean probability on its points."""
    C = outputs.shape[1]
    p = outputs.softmax(1)
    mean = torch.stack([p[labels == c].mean(0) for c in range(C)])
    return mean.fill_diagonal_(-1.0).argmax(1)
