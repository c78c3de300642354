"""Trained networks without a recording, given directly or as a few checkpoints."""
