"""Numbers of the paper's figures, one module per quantity."""
