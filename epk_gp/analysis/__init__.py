"""What results of a run say together: detection, calibration, suspicious labels, maps, counterfactuals, spectra."""
