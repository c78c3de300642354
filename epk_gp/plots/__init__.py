"""Drawing functions: each takes computed numbers and an Axes, draws into it and returns it; `..._figure` are whole.

Start with `style` (colours and sizes, each with one meaning) and `contributions`. What a figure shows is computed in
`epk_gp.analysis` and before; nothing is computed here.
"""

from epk_gp.plots.contributions import attribution_bars, training_image
from epk_gp.plots.maps import class_regions, draw_colorbar, map_handles, region_handles, shades_of, uncertainty_map
from epk_gp.plots.scores import risk_coverage, score_histogram, suspicion_bars
from epk_gp.plots.style import COLORMAP, PALETTE, figure_style, new_figure, save_figure

__all__ = [
    "COLORMAP",
    "PALETTE",
    "attribution_bars",
    "class_regions",
    "draw_colorbar",
    "figure_style",
    "map_handles",
    "new_figure",
    "region_handles",
    "risk_coverage",
    "save_figure",
    "score_histogram",
    "shades_of",
    "suspicion_bars",
    "training_image",
    "uncertainty_map",
]
