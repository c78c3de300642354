"""The seed notebook's run: 784-128-10, 100 MNIST images one at a time, its approximation against the exact machine."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import Dataset
from epk_gp.plots.style import EXACT, GREY, INK, PALETTE, SIGNED, SMALL, new_figure, styled
from harness import Experiment, main
from problems import images

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels, as the notebook normalises them


@dataclass(frozen=True)
class Config:
    """The notebook's sizes, but for the test images: the notebook looks at 6, we at 1000."""

    data: str = "mnist"
    num_train: int = 100
    num_test: int = 1000
    width: int = 128
    epochs: int = 3
    lr: float = 0.01
    seed: int = 42
    shown: int = 6
    small_points: int = 20
    small_epochs: int = 10
    small_shown: int = 5


@dataclass(frozen=True)
class Result:
    """Predictions and confidences of the network, the exact kernel machine and the notebook's approximation.

    Attributes:
        num_test: Test images.
        images: The first few test images: label, and prediction and confidence of all three.
        max_output_error: Largest |machine - network| over all test images and log-softmax outputs.
        max_confidence_error: Largest difference of the confidence in the predicted class.
        same_prediction: Share of test images with the same prediction.
        max_residual: The certificate.
        evaluations: Gradients per image and step.
        network_accuracy: On the test images.
        notebook_agreement: Share of the test images at which the notebook's machine predicts what the network does.
        notebook_confidence: Its mean confidence.
        network_confidence: The network's mean confidence.
        gram: The 2-D problem's path-kernel matrix between its first points (log-softmax, summed over classes).
        gram_smallest_eigenvalue: Smallest eigenvalue of the matrix over all points, relative to the largest.
        similarity: The notebook's matrix: mean inner product of the loss gradients that made the steps.
        similarity_smallest_eigenvalue: The same of the notebook's matrix over all points.
        points: The 2-D points shown, and their labels.
    """

    num_test: int
    images: list[dict[str, Any]]
    max_output_error: float
    max_confidence_error: float
    same_prediction: float
    max_residual: float
    evaluations: float
    network_accuracy: float
    notebook_agreement: float
    notebook_confidence: float
    network_confidence: float
    gram: list[list[float]]
    gram_smallest_eigenvalue: float
    similarity: list[list[float]]
    similarity_smallest_eigenvalue: float
    points: list[list[float]]


def run(config: Config) -> Result:
    """Train as the notebook does, in float64 from its float32 initial weights, and compare."""
    train, test = (images(config.data, split) for split in ("train", "test"))
    train, test = train[: config.num_train], test[: config.num_test]
    X, X_test = ((d.inputs - MEAN) / DEVIATION for d in (train, test))
    torch.manual_seed(config.seed)
    first, last = nn.Linear(X[0].numel(), config.width), nn.Linear(config.width, train.num_classes)
    net = nn.Sequential(nn.Flatten(), first, nn.ReLU(), last).double()
    trajectory = _record(net, X, train.labels, config.lr, config.epochs)
    machine = epk.reconstruct(trajectory, X_test)
    network, exact = machine.network.softmax(1), machine.outputs.softmax(1)
    approximate = _notebook_machine(trajectory, X_test).softmax(1)
    predicted = network.argmax(1, keepdim=True)
    small = _small_problem(config)
    return Result(
        num_test=len(test),
        images=[_image(test, n, network, exact, approximate) for n in range(min(config.shown, len(test)))],
        max_output_error=machine.max_error,
        max_confidence_error=float((network - exact).gather(1, predicted).abs().max()),
        same_prediction=_share(exact.argmax(1) == network.argmax(1)),
        max_residual=machine.max_residual,
        evaluations=machine.evaluations,
        network_accuracy=_share(network.argmax(1) == test.labels),
        notebook_agreement=_share(approximate.argmax(1) == network.argmax(1)),
        notebook_confidence=float(approximate.amax(1).mean()),
        network_confidence=float(network.amax(1).mean()),
        **small,
    )


def _record(net: nn.Module, X: Tensor, y: Tensor, lr: float, epochs: int) -> epk.Trajectory:
    """Record the notebook's loop: one image at a time, in order."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for i in list(range(len(X))) * epochs:
            batch = torch.tensor([i])
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    return recorder.trajectory


def _notebook_machine(trajectory: epk.Trajectory, X: Tensor) -> Tensor:
    """Do what the notebook calls a kernel machine.

    The gradient of the mean output at the trained weights, times each step's loss gradient, added to the class of that
    step's image. Steps stand for training points, the path is left out on the test side, and so is b(x).
    """
    S = trajectory.num_steps
    states = torch.stack([trajectory.states[s] for s in range(S + 1)])
    rates = trajectory.step_sizes[:, None]
    losses = (states[:-1] - states[1:]) / rates  # one loss gradient per step
    weights = trajectory.weights(-1)
    values = []
    for block in X.split(500):
        inner = torch.zeros(len(block), S, dtype=X.dtype)
        for s in range(S):
            direction, at = {}, 0
            for name, value in weights.items():
                direction[name] = losses[s, at : at + value.numel()].view_as(value)
                at += value.numel()
            inner[:, s] = _mean_output_slope(trajectory, weights, direction, block)
        values.append(inner)
    labels = torch.cat([trajectory.targets[step.batch] for step in trajectory.steps])
    one_hot = F.one_hot(labels, trajectory.num_outputs).to(X.dtype)
    return torch.cat(values) @ one_hot / S


def _mean_output_slope(
    trajectory: epk.Trajectory, weights: dict[str, Tensor], direction: dict[str, Tensor], X: Tensor
) -> Tensor:
    def mean_output(w: dict[str, Tensor]) -> Tensor:
        return trajectory.model.evaluate(w, X).mean(1)

    return torch.func.jvp(mean_output, (weights,), (direction,))[1]


def _small_problem(config: Config) -> dict[str, Any]:
    """Replace the notebook's similarity matrix of its 2-D problem by the path kernel's."""
    torch.manual_seed(config.seed)
    X = torch.randn(config.small_points, 2)
    y = (X.sum(1) > 0).long()
    net = nn.Linear(2, 2)
    trajectory = _record(net.double(), X.double(), y, 0.1, config.small_epochs)
    copies = epk.Points(X.double(), is_train=True)
    K = torch.einsum("ncmc->nm", epk.gram_block(trajectory, copies, copies))
    states = torch.stack([trajectory.states[s] for s in range(trajectory.num_steps + 1)])
    gradients = ((states[:-1] - states[1:]) / 0.1).unflatten(0, (config.small_epochs, len(X)))
    similarity = torch.einsum("eip,ejp->ij", gradients, gradients) / config.small_epochs
    n = config.small_shown
    return {
        "gram": K[:n, :n].tolist(),
        "gram_smallest_eigenvalue": _smallest(K),
        "similarity": similarity[:n, :n].tolist(),
        "similarity_smallest_eigenvalue": _smallest(similarity),
        "points": torch.cat([X[:n].double(), y[:n, None].double()], dim=1).tolist(),
    }


def _smallest(gram: Tensor) -> float:
    values = torch.linalg.eigvalsh(gram)
    return float(values[0] / values[-1])


def _image(test: Dataset, n: int, network: Tensor, exact: Tensor, approximate: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"label": int(test.labels[n])}
    for name, p in (("network", network), ("exact", exact), ("notebook", approximate)):
        found |= {f"{name}_prediction": int(p[n].argmax()), f"{name}_confidence": float(p[n].max())}
    return found


def _share(right: Tensor) -> float:
    return float(right.double().mean())


@styled
def draw(result: Result) -> Figure:
    """Draw confidences of the first images, and below both matrices."""
    figure = new_figure(6.6)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.35))
    bars = upper.subplots()
    for k, (name, title) in enumerate(
        (("network", "network"), ("exact", "exact path kernel"), ("notebook", "notebook"))
    ):
        places = np.arange(len(result.images)) + 0.27 * (k - 1)
        heights = [image[f"{name}_confidence"] for image in result.images]
        drawn = bars.bar(places, heights, width=0.25, color=(GREY, EXACT, PALETTE[1])[k], label=title)
        bars.bar_label(drawn, [str(image[f"{name}_prediction"]) for image in result.images], fontsize=SMALL)
    bars.set_xticks(range(len(result.images)), [f"a {image['label']}" for image in result.images])
    bars.set(ylim=(0, 1.3), ylabel="confidence", yticks=(0, 0.5, 1))
    bars.set_title("first test images: confidence, and above the bars the predicted class")
    bars.grid(visible=False, axis="x")
    bars.legend(ncols=3, loc="upper left")
    for ax, matrix, title in zip(
        lower.subplots(1, 2),
        (result.gram, result.similarity),
        ("exact path kernel, 2-D problem", "the notebook's gradient similarity"),
        strict=True,
    ):
        _draw_matrix(ax, np.array(matrix), [f"$x_{i}$, class {int(p[2])}" for i, p in enumerate(result.points)])
        ax.set_title(title)
    return figure


def _draw_matrix(ax: Axes, values: np.ndarray, names: list[str]) -> None:
    """Draw a matrix with its values; each entry's colour is its size and sign."""
    size = float(np.abs(values).max())
    ax.imshow(values, cmap=SIGNED, vmin=-size, vmax=size)
    for (i, j), value in np.ndenumerate(values):
        colour = "white" if abs(value) > 0.6 * size else INK
        ax.text(j, i, f"{value:.3g}".replace("-", "−"), ha="center", va="center", fontsize=SMALL, color=colour)
    ax.set_xticks(range(len(names)), [name.partition(",")[0] for name in names])
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)


EXPERIMENT = Experiment(
    "notebook_path_kernel",
    Config(),
    Config(
        "digits", num_train=6, num_test=5, width=6, epochs=1, shown=3, small_points=6, small_epochs=2, small_shown=4
    ),
    Result,
    run,
    draw,
    ".svg",
)

if __name__ == "__main__":
    main(EXPERIMENT)
