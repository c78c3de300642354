"""The update rules of optimizers, and the coefficients by which their steps follow from gradients."""
