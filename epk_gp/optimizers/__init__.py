"""The update rules of optimizers, and the coefficients by which their steps follow from gradients."""

from epk_gp.optimizers.update_rules import LinearStep as LinearStep
from epk_gp.optimizers.update_rules import UpdateRule as UpdateRule
