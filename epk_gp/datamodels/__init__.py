"""Predictions of a training without many of its points: path training and path ridge."""
