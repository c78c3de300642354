"""Drawing functions: each takes computed numbers and an Axes, draws into it and returns it."""

from epk_gp.plots.attributions import attribution_bars, contribution_curve, training_image
from epk_gp.plots.common import COLORMAP, PALETTE
from epk_gp.plots.errors import error_against_evaluations, reconstruction_scatter
from epk_gp.plots.maps import uncertainty_map
from epk_gp.plots.scores import risk_coverage, score_histogram, suspicion_bars

__all__ = [
    "COLORMAP",
    "PALETTE",
    "attribution_bars",
    "contribution_curve",
    "error_against_evaluations",
    "reconstruction_scatter",
    "risk_coverage",
    "score_histogram",
    "suspicion_bars",
    "training_image",
    "uncertainty_map",
]
