"""Core objects that all other packages use: the network, a recorded run, losses and update rules."""
