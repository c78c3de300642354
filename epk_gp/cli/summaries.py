"""The numbers that several commands report: a reconstruction's certificate, a GP's fit, a map's summary."""

from typing import Literal

from torch import Tensor

from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.gp.models import LogitGP
from epk_gp.kernel_machine.reconstruct import Reconstruction


def certificate(result: Reconstruction) -> dict[str, float]:
    """Return the error bounds of a reconstruction."""
    return {
        "max_error": result.max_error,
        "max_residual": result.max_residual,
        "total_residual": result.total_residual,
        "evaluations": result.evaluations,
        "max_step_mismatch": result.max_step_mismatch,
        "certified": result.certified,
    }


def fitted_numbers(gp: LogitGP, losses: list[float]) -> dict[str, object]:
    """Return the fitted hyperparameters of a GP, and its loss before and after the fit."""
    noise: Tensor = gp.likelihood.noise
    return {
        "kernel_scale": gp.kernel.scale,
        "outputscale": gp.covar_module.outputscale.detach().reshape(-1).tolist(),
        "noise": noise.detach().reshape(-1)[: gp.kernel.config.structure.num_matrices].tolist(),
        "negative_log_likelihood": [losses[0], losses[-1]],
    }


def map_numbers(m: UncertaintyMap) -> dict[str, object]:
    """Return the summary numbers of a map."""
    return {
        "largest_std": float(m.std.max()),
        "largest_standard_error": m.standard_error,
        "rank_correlation_of_std_with_distance": m.distance_correlation,
        "share_of_directions_in_which_std_falls": m.share_std_decreasing,
    }


def describe_map(m: UncertaintyMap) -> str:
    """Return the summary of a map as text."""
    correlation = "none" if m.distance_correlation is None else f"{m.distance_correlation:+.2f}"
    return (
        f"standard deviation of the class probability over the map: at most {float(m.std.max()):.3f}\n"
        f"its rank correlation with the distance to the training data: {correlation}\n"
        f"share of directions in which it falls outwards: {100 * m.share_std_decreasing:.0f} %"
    )


def describe_plane(name: Literal["principal", "coordinates"], num_entries: int) -> str:
    """Return which plane a map shows, and what the other coordinates are there, as the line above the picture.

    Args:
        name: The plane: of the first two principal directions, or of the first two coordinates.
        num_entries: Number of coordinates of an input.
    """
    others = num_entries - 2
    if name == "coordinates":
        if not others:
            return ""
        are = "other one is" if others == 1 else f"other {others} are"
        return f"Shown is the plane of the first two coordinates; the {are} 0. Training points are projected onto it."
    if not others:
        return "Shown are the two input coordinates, along the principal directions of the training inputs."
    return (
        f"Shown is the plane of the first two principal directions of the training inputs ({num_entries} coordinates) "
        "through their mean.\nTraining points are projected onto it."
    )
