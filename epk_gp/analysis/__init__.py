"""Numbers of the paper's figures: alignment, retraining, maps, stationarity, boundaries, geometry, detection."""
