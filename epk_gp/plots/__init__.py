"""Drawing functions: each takes computed numbers and an Axes, draws into it and returns it; `..._figure` are whole.

Start with `style` (colours and sizes, each with one meaning) and `contributions`. The numbers of a figure are computed
in `epk_gp.analysis` and other folders; nothing is computed here.
"""

from epk_gp.plots.contributions import attribution_bars as attribution_bars
from epk_gp.plots.contributions import training_image as training_image
from epk_gp.plots.maps import class_regions as class_regions
from epk_gp.plots.maps import draw_colorbar as draw_colorbar
from epk_gp.plots.maps import map_figure as map_figure
from epk_gp.plots.maps import map_handles as map_handles
from epk_gp.plots.maps import region_handles as region_handles
from epk_gp.plots.maps import shades_of as shades_of
from epk_gp.plots.maps import uncertainty_map as uncertainty_map
from epk_gp.plots.scores import check_figure as check_figure
from epk_gp.plots.scores import risk_coverage as risk_coverage
from epk_gp.plots.scores import score_histogram as score_histogram
from epk_gp.plots.scores import verification_figure as verification_figure
from epk_gp.plots.style import COLORMAP as COLORMAP
from epk_gp.plots.style import PALETTE as PALETTE
from epk_gp.plots.style import SIGNED as SIGNED
from epk_gp.plots.style import STYLE as STYLE
from epk_gp.plots.style import figure_style as figure_style
from epk_gp.plots.style import new_figure as new_figure
from epk_gp.plots.style import save_figure as save_figure
