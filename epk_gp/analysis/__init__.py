"""Joint analysis of a run's results: detection, calibration, suspicious labels, maps, counterfactuals, spectra."""

from epk_gp.analysis.maps import column_plane as column_plane
from epk_gp.analysis.maps import coordinate_plane as coordinate_plane
from epk_gp.analysis.maps import principal_plane as principal_plane
from epk_gp.analysis.maps import uncertainty_on_plane as uncertainty_on_plane
from epk_gp.analysis.measures import gram_spectrum as gram_spectrum
from epk_gp.analysis.measures import ood_metrics as ood_metrics
from epk_gp.analysis.score_check import datamodeling_score as datamodeling_score
from epk_gp.analysis.score_check import leave_one_out as leave_one_out
from epk_gp.analysis.score_check import random_subsets as random_subsets
from epk_gp.analysis.score_check import rank_agreement as rank_agreement
