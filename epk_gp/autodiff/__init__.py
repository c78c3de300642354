"""Layer-wise Jacobians of a network, and its directional derivatives."""
