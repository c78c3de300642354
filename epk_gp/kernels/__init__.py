"""Kernels: the exact path kernel in GPyTorch."""
