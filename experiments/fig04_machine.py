"""Figure 4: the kernel machine against the network on 100 test points, class 1."""

from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

import epk_gp as epk
from drawings import compare_outputs
from epk_gp.kernel_machine.reconstruct import single_machine
from epk_gp.plots.style import new_figure, styled
from harness import Experiment, main, uncertified_results
from problems import SMALL_TOY, Toy, record_toy


@dataclass(frozen=True)
class Config:
    """Sizes."""

    toy: Toy = field(default_factory=lambda: Toy(num_test=100))
    riemann: tuple[int, ...] = (1, 10, 100)


@dataclass(frozen=True)
class Result:
    """Log-softmax outputs of class 0 (the paper counts from 1), and errors over all classes.

    Attributes:
        network: The network's, one per test point.
        rules: Names of the quadrature rules; the last is the single machine of Theorem 3.7 with the adaptive rule.
        machine: The kernel machine's, per rule.
        max_error: Largest |machine - network| over points and classes, per rule.
        evaluations: Gradients per point and step, per rule.
    """

    network: list[float]
    rules: list[str]
    machine: list[list[float]]
    max_error: list[float]
    evaluations: list[float]


def run(config: Config) -> Result:
    """Record the toy problem and reconstruct it with each rule."""
    trajectory, held_out = record_toy(config.toy)
    X = held_out.inputs
    rules = [*(epk.QuadratureRule.left_riemann(n) for n in config.riemann), epk.adaptive()]
    with uncertified_results():
        ensembles = [epk.reconstruct(trajectory, X, rule=rule) for rule in rules]
    single = single_machine(trajectory, X)
    return Result(
        network=single.network[:, 0].tolist(),
        rules=[*(rule.name for rule in rules), f"single machine, {rules[-1].name}"],
        machine=[*(e.outputs[:, 0].tolist() for e in ensembles), single.outputs[:, 0].tolist()],
        max_error=[*(e.max_error for e in ensembles), single.max_error],
        evaluations=[*(e.evaluations for e in ensembles), ensembles[-1].evaluations],
    )


@styled
def draw(result: Result) -> Figure:
    """Draw the paper's rule and ours against the network, and the errors alone."""
    figure = new_figure(3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    network = np.array(result.network)
    for i in (0, len(result.rules) - 3, len(result.rules) - 2):
        machine = np.array(result.machine[i])
        compare_outputs(left, network, machine, "outputs", label=result.rules[i])
        compare_outputs(right, network, machine, "errors", label=result.rules[i])
    left.set(title="held-out points, class 0 (the paper's class 1)")
    left.set(xlabel="network, log probability of class 0", ylabel="kernel machine")
    right.set(title="|kernel machine − network|", xlabel="network, log probability of class 0", ylabel="")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for ax in (left, right):
        ax.get_legend().remove()
    return figure


EXPERIMENT = Experiment("fig04_machine", Config(), Config(toy=SMALL_TOY, riemann=(1, 10)), Result, run, draw, ".svg")

if __name__ == "__main__":
    main(EXPERIMENT)
