"""Gram blocks of the exact path kernel."""

from epk_gp.gram.sketch import nodes_trajectory as nodes_trajectory
