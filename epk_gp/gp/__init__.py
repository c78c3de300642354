"""Gaussian processes on logits, and Monte Carlo through the softmax."""
