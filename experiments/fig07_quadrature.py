"""Figure 7: the kernel machine of an MNIST network against the network, for many quadrature rules."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure

import epk_gp as epk
from drawings import error_against_evaluations
from epk_gp.core.losses import Head
from epk_gp.plots.style import EXACT, GREY, SMALL, new_figure, short, styled
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule
from harness import Experiment, main, uncertified_results
from problems import Images, record_images


@dataclass(frozen=True)
class Config:
    """Sizes and rules: Gauss-Legendre 1 to `gauss` nodes, composite ones are not needed beside the adaptive rule."""

    images: Images = field(default_factory=lambda: Images(num_test=8))
    riemann: tuple[int, ...] = (1, 10, 200)
    gauss: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    tolerances: tuple[float, ...] = (1e-6, 1e-9, 1e-12)
    head: Head = "logits"


@dataclass(frozen=True)
class Result:
    """Cost and error of each rule, over all test images and classes.

    Attributes:
        rules: Names.
        evaluations: Gradients per point and step.
        max_error: Largest |kernel machine - network|.
        max_residual: Largest quadrature residual of a (point, step).
        seconds: Seconds of each reconstruction.
        largest_output: Largest |network output|.
        gain: Error of the finest left Riemann rule over that of the finest adaptive rule.
        accuracy: Accuracy of the network at the test images.
        network: Outputs of the network, (point, class) flattened.
        machines: Outputs of the kernel machine with each left Riemann rule and the finest adaptive rule.
        drawn: Names of the rules in `machines`.
    """

    rules: list[str]
    evaluations: list[float]
    max_error: list[float]
    max_residual: list[float]
    seconds: list[float]
    largest_output: float
    gain: float
    accuracy: float
    network: list[float]
    machines: list[list[float]]
    drawn: list[str]


def run(config: Config) -> Result:
    """Record the network and reconstruct it with every rule."""
    trajectory, held_out = record_images(config.images)
    rules: list[QuadratureRule | AdaptiveRule] = [epk.QuadratureRule.left_riemann(n) for n in config.riemann]
    rules += [epk.gauss_legendre(n) for n in config.gauss] + [epk.adaptive(tol) for tol in config.tolerances]
    found, seconds = [], []
    for rule in rules:
        start = time.perf_counter()
        with uncertified_results():
            found.append(epk.reconstruct(trajectory, held_out.inputs, head=config.head, rule=rule))
        seconds.append(time.perf_counter() - start)
    network = found[0].network
    shown = [*range(len(config.riemann)), len(rules) - 1]
    return Result(
        rules=[rule.name for rule in rules],
        evaluations=[r.evaluations for r in found],
        max_error=[r.max_error for r in found],
        max_residual=[r.max_residual for r in found],
        seconds=seconds,
        largest_output=float(network.abs().max()),
        gain=found[len(config.riemann) - 1].max_error / max(found[-1].max_error, torch.finfo(network.dtype).eps),
        accuracy=float((network.argmax(1) == held_out.labels).double().mean()),
        network=network.flatten().tolist(),
        machines=[found[i].outputs.flatten().tolist() for i in shown],
        drawn=[rules[i].name for i in shown],
    )


@styled
def draw(result: Result) -> Figure:
    """Draw the outputs of the paper's three rules and ours, and error against evaluations for all."""
    figure = new_figure(5.9)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.5))
    network = np.array(result.network)
    errors = dict(zip(result.rules, result.max_error, strict=True))
    axes = upper.subplots(1, len(result.drawn), sharex=True, sharey=True)
    for ax, name, machine in zip(axes, result.drawn, result.machines, strict=True):
        ax.axline((0, 0), slope=1, color=GREY, linewidth=0.8)
        ax.scatter(network, np.array(machine), s=8, color=EXACT, linewidth=0)
        ax.set_title(f"{_short_name(name)}\nlargest |error| {short(errors[name])}", fontsize=SMALL)
        ax.set_xlabel("network output")
    axes[0].set_ylabel("kernel machine")
    ax = lower.subplots()
    ax.set_title("every rule: what it costs, and what it leaves")  # before the names, whose places depend on the layout
    error_against_evaluations(ax, [_short_name(name) for name in result.rules], result.evaluations, result.max_error)
    return figure


def _short_name(rule: str) -> str:
    return rule.replace("Gauss-Legendre", "Gauss").replace(" 4, tol", ", tol").replace("e-", "e−")


EXPERIMENT = Experiment(
    "fig07_quadrature",
    Config(),
    Config(Images("digits", num_train=20, num_test=3, steps=3, lr=0.5), (1, 10), (1, 2), (1e-3, 1e-12)),
    Result,
    run,
    draw,
    ".svg",
)

if __name__ == "__main__":
    main(EXPERIMENT)
