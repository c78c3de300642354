"""Integrals along a training step."""
