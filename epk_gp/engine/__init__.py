"""The exact integrals: quadrature along the path, per-layer gradients, Gram blocks."""
