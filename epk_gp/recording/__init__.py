"""What happened in training: weights, batches and the step law, in memory or on disk."""
