"""Figure 8: accuracy, loss, weight norm and directional derivative on the line w_0 → w_S, and along the real path."""

from dataclasses import dataclass, field, replace

import numpy as np
from matplotlib.figure import Figure

import epk_gp as epk
from epk_gp.plots.style import GREY, PALETTE, new_figure, styled
from harness import Experiment, main
from problems import SMALL_TOY, Images, Toy, record_images, record_toy
from quantities.path_geometry import line_profile, path_profile


@dataclass(frozen=True)
class Config:
    """Sizes: a CNN on MNIST and the three Gaussians, with every seed; the first CNN is drawn."""

    images: Images = field(default_factory=lambda: Images(num_train=500, lr=0.2, steps=200))
    toy: Toy = field(default_factory=lambda: Toy(num_test=3))
    seeds: tuple[int, ...] = (0, 1, 2)
    line_points: int = 41


@dataclass(frozen=True)
class Result:
    """Profiles of the first CNN, and numbers of every run.

    Attributes:
        t: Values of t on the line.
        accuracy: Accuracy on the training data at each t.
        loss: Mean loss at each t.
        norm: L2 norm of the weights at each t.
        slope: Derivative of the mean loss along the line's unit vector.
        path_norm: L2 norm of w_s.
        path_angle_to_initial: Angle between w_s and w_0, degrees.
        path_angle_to_chord: Angle between each step and the line, degrees.
        numbers: One entry per problem and seed.
    """

    t: list[float]
    accuracy: list[float]
    loss: list[float]
    norm: list[float]
    slope: list[float]
    path_norm: list[float]
    path_angle_to_initial: list[float]
    path_angle_to_chord: list[float]
    numbers: list[dict[str, float | int | str]]


def run(config: Config) -> Result:
    """Record the runs and measure them."""
    numbers, profiles = [], []
    for seed in config.seeds:
        for problem in ("cnn", "toy"):
            if problem == "cnn":
                trajectory = record_images(replace(config.images, seed=seed))[0]
            else:
                trajectory = record_toy(replace(config.toy, seed=seed))[0]
            size = config.line_points if not profiles else 2
            line = line_profile(trajectory, trajectory.inputs, trajectory.targets, size=size)
            path = path_profile(trajectory)
            profiles = profiles or [line, path]
            numbers.append({"problem": problem, "seed": seed} | _numbers(line, path, trajectory))
    line, path = profiles
    return Result(
        t=line.t.tolist(),
        accuracy=line.accuracy.tolist(),
        loss=line.loss.tolist(),
        norm=line.norm.tolist(),
        slope=line.slope.tolist(),
        path_norm=path.norm.tolist(),
        path_angle_to_initial=path.angle_to_initial.tolist(),
        path_angle_to_chord=path.angle_to_chord.tolist(),
        numbers=numbers,
    )


def _numbers(line, path, trajectory: epk.Trajectory) -> dict[str, float]:
    return {
        "norm_change": path.norm_change,
        "norm_is_monotonic": float((path.norm.diff() >= 0).all() or (path.norm.diff() <= 0).all()),
        "angle_to_initial": float(path.angle_to_initial[-1]),
        "straightness": path.straightness,
        "training_accuracy": float(line.accuracy[-1]),
        "training_loss": float(line.loss[-1]),
        "steps": trajectory.num_steps,
    }


@styled
def draw(result: Result) -> Figure:
    """Draw the line as the paper does, and the real path beside it."""
    figure = new_figure(5.6)
    (a, b), (c, d) = figure.subplots(2, 2)
    a.plot(result.t, result.accuracy, color=PALETTE[0], label="accuracy")
    a.plot(result.t, np.array(result.loss) / result.loss[0], "--", color=PALETTE[2], label="mean loss / its start")
    a.set(xlabel="t on the line from first to last weights", title="accuracy and loss on the line", ylim=(0, None))
    a.legend()
    b.plot(result.t, result.norm, "--", color=PALETTE[2], label="on the line")
    steps = len(result.path_norm) - 1
    b.plot(np.linspace(0, 1, steps + 1), result.path_norm, color=PALETTE[0], label="along the real path, s / S")
    b.set(xlabel="t, or s / S", ylabel="|w|", title="L2 norm of the weights")
    b.legend()
    c.plot(result.t, result.slope, "--", color=PALETTE[2])
    c.axhline(0, color=GREY, linewidth=0.8)
    c.set(xlabel="t on the line from first to last weights", title="derivative of the mean loss along the line")
    d.plot(range(steps + 1), result.path_angle_to_initial, color=PALETTE[0], label="between w and the first weights")
    d.plot(
        range(1, steps + 1),
        result.path_angle_to_chord,
        color=PALETTE[1],
        linewidth=1.0,
        label="between the step and the line",
    )
    d.set(xlabel="training step s", ylabel="degrees", title="angles along the real path", ylim=(0, None))
    d.legend()
    first = result.numbers[0]
    title = f"ReLU CNN on images, seed {first['seed']}, {first['steps']} full-batch steps"
    figure.suptitle(title, x=0.01, ha="left")
    return figure


EXPERIMENT = Experiment(
    "fig08_path_geometry",
    Config(),
    Config(Images("digits", num_train=20, steps=4, lr=0.3), SMALL_TOY, seeds=(0,), line_points=5),
    Result,
    run,
    draw,
    ".svg",
)

if __name__ == "__main__":
    main(EXPERIMENT)
