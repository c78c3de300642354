"""Joint analysis of a run's results: detection, calibration, suspicious labels, maps, counterfactuals, spectra."""
