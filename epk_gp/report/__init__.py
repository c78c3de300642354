"""The report of a run: one HTML file with explained predictions, their certificate, and the run as a whole."""

from epk_gp.report.text import sentences as sentences
