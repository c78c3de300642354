"""What would change without many of the training points: path training and path ridge."""
