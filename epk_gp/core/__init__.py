"""The network, a recorded run, losses and update rules: what everything else is about."""
