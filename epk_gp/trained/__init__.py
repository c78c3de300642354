"""Networks that are simply there: not recorded, but trained, or seen at a few checkpoints."""
