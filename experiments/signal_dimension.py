"""How many directions the kernel and the training signal have: effective rank, and the signal's dimension."""

from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

import epk_gp as epk
from epk_gp.analysis.measures import gram_spectrum, principal_directions
from epk_gp.core.trajectory import network_outputs
from epk_gp.plots.style import GREY, PALETTE, new_figure, styled
from harness import Experiment, main
from problems import SMALL_TOY, Images, Toy, record_images, record_toy
from quantities.signal import input_gradients, signal_energies


@dataclass(frozen=True)
class Config:
    """Sizes; the Gram matrix is over `num_gram` training copies, the signal over `num_test` held-out points."""

    toy: Toy = field(default_factory=Toy)
    images: Images = field(default_factory=lambda: Images(network="mlp", num_train=1000, lr=0.2, steps=100))
    num_gram: int = 300
    num_test: int = 10
    share: float = 0.95


@dataclass(frozen=True)
class Result:
    """One entry per problem.

    Attributes:
        problems: Names.
        inputs: Entries D of an input.
        accuracy: Accuracy of the network on held-out points.
        effective_rank: Effective rank of the Gram matrix (trace over classes): exp of the entropy of its eigenvalues.
        gram_principal: Eigenvalues that hold `share` of its trace.
        dimension: Principal directions that hold `share` of a test point's input gradients, mean over test points.
        dimension_range: Smallest and largest over test points.
        eigenvalues: Eigenvalues of the Gram matrix, divided by their sum.
        energies: Energies of the input gradients, divided by their sum, mean over test points.
    """

    problems: list[str]
    inputs: list[int]
    accuracy: list[float]
    effective_rank: list[float]
    gram_principal: list[int]
    dimension: list[float]
    dimension_range: list[list[int]]
    eigenvalues: list[list[float]]
    energies: list[list[float]]


def run(config: Config) -> Result:
    """Record both problems and measure."""
    rows = []
    for name, (trajectory, held_out) in (
        ("three Gaussians", record_toy(config.toy)),
        (config.images.data, record_images(config.images)),
    ):
        rule = epk.gauss_legendre(2)
        kernel = epk.EPKKernel(trajectory, outputs="trace", rule=rule)
        gram = gram_spectrum(
            kernel(epk.train_copy(trajectory.inputs[: config.num_gram])).to_dense(), share=config.share
        )
        outputs = network_outputs(trajectory, held_out.inputs)
        energies = [
            signal_energies(
                input_gradients(trajectory, held_out.inputs[n : n + 1], int(outputs[n].argmax()), rule=rule)
            )
            for n in range(min(config.num_test, len(held_out)))
        ]
        dimensions = [principal_directions(e, share=config.share) for e in energies]
        rows.append(
            {
                "problems": name,
                "inputs": trajectory.inputs[0].numel(),
                "accuracy": float((outputs.argmax(1) == held_out.labels).double().mean()),
                "effective_rank": gram.effective_rank,
                "gram_principal": gram.num_principal,
                "dimension": sum(dimensions) / len(dimensions),
                "dimension_range": [min(dimensions), max(dimensions)],
                "eigenvalues": (gram.values / gram.values.sum()).tolist(),
                "energies": torch.stack([e / e.sum() for e in energies]).mean(0).tolist(),
            }
        )
    return Result(**{key: [row[key] for row in rows] for key in rows[0]})


@styled
def draw(result: Result) -> Figure:
    """Draw what the largest directions hold."""
    figure = new_figure(3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    for k, name in enumerate(result.problems):
        for ax, values, label in (
            (left, result.eigenvalues[k], f"{name}: {result.gram_principal[k]} hold 95 %"),
            (right, result.energies[k], f"{name}: {result.dimension[k]:.1f} of {result.inputs[k]} hold 95 % (mean)"),
        ):
            held = np.array(values).cumsum(0)
            ax.plot(range(1, len(held) + 1), held, ("-", "--")[k % 2], color=PALETTE[k], label=label)
    for ax, title in ((left, "eigenvalues of the Gram matrix"), (right, "principal directions of input gradients")):
        ax.axhline(0.95, color=GREY, linestyle=":", linewidth=1)
        ax.set(xscale="log", xlabel="largest directions", title=title, ylim=(0, 1.02))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.legend(loc="lower right")
    left.set_ylabel("share held")
    return figure


EXPERIMENT = Experiment(
    "signal_dimension",
    Config(),
    Config(SMALL_TOY, Images("digits", "mlp", width=8, num_train=20, steps=4), num_gram=12, num_test=2),
    Result,
    run,
    draw,
    ".svg",
)

if __name__ == "__main__":
    main(EXPERIMENT)
