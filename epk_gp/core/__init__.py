"""Core objects that all other packages use: the network, a recorded run, losses and update rules."""

from epk_gp.core.checks import ComputeOptions as ComputeOptions
from epk_gp.core.model import zero_final_layer as zero_final_layer
from epk_gp.core.states import averaged_trajectory as averaged_trajectory
from epk_gp.core.states import averaging_coefficients as averaging_coefficients
from epk_gp.core.states import schedule_free_average as schedule_free_average
