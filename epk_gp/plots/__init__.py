"""Drawing functions: each takes computed numbers and an Axes, draws into it and returns it."""

from epk_gp.plots.attributions import attribution_bars, contribution_curve, term_bars, training_image
from epk_gp.plots.errors import (
    error_against_evaluations,
    reconstruction_differences,
    reconstruction_errors,
    reconstruction_scatter,
)
from epk_gp.plots.maps import class_regions, draw_colorbar, map_handles, region_handles, shades_of, uncertainty_map
from epk_gp.plots.scores import risk_coverage, score_histogram, suspicion_bars
from epk_gp.plots.style import COLORMAP, PALETTE, figure_style, new_figure, save_figure

__all__ = [
    "COLORMAP",
    "PALETTE",
    "attribution_bars",
    "class_regions",
    "contribution_curve",
    "draw_colorbar",
    "error_against_evaluations",
    "figure_style",
    "map_handles",
    "new_figure",
    "reconstruction_differences",
    "reconstruction_errors",
    "reconstruction_scatter",
    "region_handles",
    "risk_coverage",
    "save_figure",
    "score_histogram",
    "shades_of",
    "suspicion_bars",
    "term_bars",
    "training_image",
    "uncertainty_map",
]
