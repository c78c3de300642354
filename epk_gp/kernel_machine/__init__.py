"""The network as a kernel machine, and each training point's share of a prediction."""
