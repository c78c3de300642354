"""Figure 5: kernel value and Monte Carlo standard deviation over a grid, and how stationary the kernel is."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import epk_gp as epk
from epk_gp.analysis.maps import (
    UncertaintyMap,
    grid_coordinates,
    uncertainty_on_plane,
)
from epk_gp.analysis.measures import rank_correlation
from epk_gp.plots import map_handles, new_figure, uncertainty_map
from epk_gp.plots.style import SMALL, styled
from harness import Experiment, classes_as_text, classes_from_text, floats_as_text, floats_from_text, main
from problems import SMALL_TOY, Toy, record_toy, toy_plane
from quantities.rays import share_decreasing
from quantities.stationarity import diagonal_growth_exponent, location_variance_share

TITLES = {"kernel": "kernel value k(x, x)", "std": "std of the class's probability"}


@dataclass(frozen=True)
class Config:
    """Sizes; the problem in `dims` dimensions, with every seed."""

    toy: Toy = field(default_factory=Toy)
    dims: tuple[int, ...] = (2, 100)
    seeds: tuple[int, ...] = (0, 1, 2)
    num_condition: int = 300
    grid: int = 40
    num_samples: int = 1024
    fit_steps: int = 100
    locations: int = 60
    displacements: int = 20
    directions: int = 72


@dataclass(frozen=True)
class Result:
    """Numbers of every run, and the maps of the first seed.

    Attributes:
        numbers: One entry per dimension and seed.
        maps: One entry per dimension: x, y, kernel and std (as `floats_as_text`), points, labels, network_class.
    """

    numbers: list[dict[str, float | int | None]]
    maps: list[dict[str, Any]]


def run(config: Config) -> Result:
    """Record the runs, fit a Gaussian process to each, and map it."""
    numbers, maps = [], []
    for dim in config.dims:
        for seed in config.seeds:
            toy = replace(config.toy, dim=dim, seed=seed)
            trajectory, held_out = record_toy(toy)
            order = torch.randperm(trajectory.num_points, generator=torch.Generator().manual_seed(seed))
            gp = epk.LogitGP(trajectory, points=order[: config.num_condition], rule=epk.gauss_legendre(2))
            gp.fit(config.fit_steps)
            m = uncertainty_on_plane(
                gp,
                toy_plane(trajectory.inputs),
                size=config.grid,
                square=True,
                num_samples=config.num_samples,
                generator=torch.Generator().manual_seed(seed),
            )
            numbers.append(
                {"dim": dim, "seed": seed}
                | _numbers(m, share_decreasing(gp, m, config.num_samples, torch.Generator().manual_seed(seed)))
                | _stationarity(config, trajectory, held_out.inputs)
            )
            if seed == config.seeds[0]:
                maps.append(_map(m, trajectory.targets))
    return Result(numbers, maps)


def _numbers(m: UncertaintyMap, share: float) -> dict[str, float | None]:
    distance = torch.cdist(grid_coordinates(m.x, m.y), m.training).amin(1)
    return {
        "rank_correlation_of_std_with_distance": m.distance_correlation,
        "rank_correlation_of_kernel_with_distance": rank_correlation(m.kernel.flatten(), distance),
        "share_of_directions_in_which_std_falls": share,
        "largest_std": float(m.std.max()),
        "largest_standard_error": m.standard_error,
    }


def _stationarity(config: Config, trajectory: epk.Trajectory, X: Tensor) -> dict[str, float]:
    """Measure the path kernel (its trace over classes), and an RBF kernel as the negative control."""
    generator = torch.Generator().manual_seed(0)
    kernel = epk.EPKKernel(trajectory, outputs="trace", rule=epk.gauss_legendre(2))
    locations = X[: config.locations]
    displacements = torch.randn(config.displacements, X.shape[1], generator=generator, dtype=X.dtype)
    directions = torch.randn(config.directions, X.shape[1], generator=generator, dtype=X.dtype)
    directions *= (X - X.mean(0)).norm(dim=1).mean() / directions.norm(dim=1, keepdim=True)

    def path(a: Tensor, b: Tensor) -> Tensor:
        values: Tensor = kernel(epk.test_copy(a), epk.test_copy(b)).to_dense()
        return values

    def rbf(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * X.shape[1]))

    def diagonal(a: Tensor) -> Tensor:
        values: Tensor = kernel(epk.test_copy(a), diag=True)
        return values

    exponents = diagonal_growth_exponent(
        diagonal, X.mean(0), directions, torch.tensor([3.0, 5.0, 10.0, 20.0], dtype=X.dtype)
    )
    return {
        "location_variance_share": location_variance_share(path, locations, displacements),
        "location_variance_share_rbf": location_variance_share(rbf, locations, displacements),
        "diagonal_growth_exponent_mean": float(exponents.mean()),
        "diagonal_growth_exponent_min": float(exponents.min()),
        "diagonal_growth_exponent_max": float(exponents.max()),
    }


def _map(m: UncertaintyMap, labels: Tensor) -> dict[str, Any]:
    stride = -(-len(m.training) // 300)
    return {
        "x": m.x.tolist(),
        "y": m.y.tolist(),
        "kernel": floats_as_text(m.kernel),
        "std": floats_as_text(m.std),
        "points": m.training[::stride].tolist(),
        "labels": labels[::stride].tolist(),
        "network_class": classes_as_text(m.boundary_classes),
    }


@styled
def draw(result: Result) -> Figure:
    """Draw kernel value and standard deviation, one row per dimension."""
    figure = new_figure(3.4 * len(result.maps) + 0.3)
    dims = list(dict.fromkeys(entry["dim"] for entry in result.numbers))
    for axes, dim, m in zip(figure.subplots(len(dims), 2, squeeze=False), dims, result.maps, strict=True):
        for ax, key in zip(axes, ("kernel", "std"), strict=True):
            uncertainty_map(
                ax,
                np.array(m["x"]),
                np.array(m["y"]),
                floats_from_text(m[key]),
                title=f"{TITLES[key]}, {dim} dimensions",
                points=np.array(m["points"]),
                labels=np.array(m["labels"]),
                boundary=classes_from_text(m["network_class"]),
                colorbar_label="relative to the training points' mean" if key == "kernel" else "standard deviation",
            )
        axes[1].set_ylabel("")  # that of the left map serves both
    figure.legend(handles=map_handles(result.maps[0]["labels"]), loc="outside lower center", ncols=4)
    others = f"of {dims[-1]} the other {dims[-1] - 2} are 0"
    figure.suptitle(
        f"The plane of the first two coordinates; {others}. Training points are projected onto it.",
        x=0.01,
        ha="left",
        fontsize=SMALL,
    )
    return figure


EXPERIMENT = Experiment(
    "fig05_uncertainty",
    Config(),
    Config(
        toy=SMALL_TOY, dims=(2, 3), seeds=(0,), num_condition=15, grid=6, num_samples=32, fit_steps=3, locations=4,
        displacements=3, directions=3,
    ),
    Result,
    run,
    draw,
)  # fmt: skip

if __name__ == "__main__":
    main(EXPERIMENT)
