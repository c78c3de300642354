"""Record a training run and check that every step is the stated one."""
