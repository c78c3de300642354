"""Figure 2: how far the test gradients of other kernels point away from the exact path kernel's, along training."""

from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure

from drawings import few_decades
from epk_gp.core.trajectory import network_outputs
from epk_gp.plots.style import PALETTE, new_figure, styled
from harness import Experiment, main
from problems import SMALL_TOY, Toy, record_toy
from quantities.alignment import gradient_alignment

DASHES = ("-", "--", "-.")
LEAST = 3e-4  # degrees: where the axis begins, as the error is 0 at the start of each step
KERNELS = ("DPK: gradient at the step's start", "NTK at the initial weights", "NTK at the trained weights")


@dataclass(frozen=True)
class Config:
    """Sizes; `shown` steps from `first` on are drawn in full for one point."""

    toy: Toy = field(default_factory=lambda: Toy(num_test=99))
    times: int = 5
    first: int = 10
    shown: int = 6
    fine: int = 25


@dataclass(frozen=True)
class Result:
    """Angles in degrees, between a test gradient and the step, less that of the exact path kernel.

    Attributes:
        time: s + t over the whole run.
        mean_error: Mean |error| over test points at each time, for each of `KERNELS`.
        mean_angle_to_exact: Mean angle between a kernel's gradient and the exact one, over points and times.
        mean: Mean |error| over points and times.
        fine_time: s + t of the steps shown in full.
        fine_error: Signed errors of one test point at these times.
        accuracy: Accuracy of the network at the test points.
    """

    time: list[float]
    mean_error: list[list[float]]
    mean_angle_to_exact: list[float]
    mean: list[float]
    fine_time: list[float]
    fine_error: list[list[float]]
    accuracy: float


def run(config: Config) -> Result:
    """Record the toy problem and measure."""
    trajectory, held_out = record_toy(config.toy)
    outputs = network_outputs(trajectory, held_out.inputs)
    chosen = outputs.argmax(1)
    steps, times = range(trajectory.num_steps), torch.linspace(0, 1, config.times).tolist()
    first, last = (
        gradient_alignment(trajectory, held_out.inputs, chosen, steps=steps, times=times, ntk_state=state)
        for state in (0, -1)
    )
    errors = [last.dpk_error, first.ntk_error, last.ntk_error]
    angles = [last.angle_dpk_to_exact, first.angle_ntk_to_exact, last.angle_ntk_to_exact]
    fine_steps = range(config.first, config.first + config.shown)
    fine_times = torch.linspace(0, 1, config.fine).tolist()
    fine = [
        gradient_alignment(
            trajectory, held_out.inputs[:1], chosen[:1], steps=fine_steps, times=fine_times, ntk_state=state
        )
        for state in (0, -1)
    ]
    shown = [fine[1].dpk_error, fine[0].ntk_error, fine[1].ntk_error]
    return Result(
        time=last.time.tolist(),
        mean_error=[error.abs().mean(0).tolist() for error in errors],
        mean_angle_to_exact=[float(angle.mean()) for angle in angles],
        mean=[float(error.abs().mean()) for error in errors],
        fine_time=fine[1].time.tolist(),
        fine_error=[error[0].tolist() for error in shown],
        accuracy=float((chosen == held_out.labels).double().mean()),
    )


@styled
def draw(result: Result) -> Figure:
    """Draw one point over a few steps, and the mean over all points along the run."""
    figure = new_figure(3.5)
    left, right = figure.subplots(1, 2, sharey=True)
    for k, (name, values, mean) in enumerate(zip(KERNELS, result.fine_error, result.mean, strict=True)):
        label, dashes = f"{name} (mean {mean:.2g}°)", DASHES[k]
        left.plot(result.fine_time, np.abs(values), dashes, color=PALETTE[k], label=label)
    left.set(xlabel="training step s + t", ylabel="|angle error|, degrees", title="one test point, a few steps")
    left.set(yscale="log", ylim=(LEAST, None))
    few_decades(left)
    for k, values in enumerate(result.mean_error):
        per_step = np.array(values).reshape(round(result.time[-1]), -1).mean(1)
        right.plot(per_step, DASHES[k], color=PALETTE[k])
    right.set(xlabel="training step s", title="mean of all test points")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


EXPERIMENT = Experiment(
    "fig02_alignment", Config(), Config(toy=SMALL_TOY, times=3, first=1, shown=2, fine=4), Result, run, draw, ".svg"
)

if __name__ == "__main__":
    main(EXPERIMENT)
