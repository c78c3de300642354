"""Gaussian processes on logits and on labels; imports core, gram and kernels.

For logits start with `models.LogitGP`: `data` provides its targets, `output_coupling` the covariance of its outputs,
`posterior` holds its predictions, `softmax` samples class probabilities, `regression` predicts targets. For labels
start with `uncertain_classifier.UncertainClassifier`: a `label_process` conditioned on the labels, and `stacking` of
network and process.
"""

from epk_gp.gp.posterior import LogitPosterior as LogitPosterior
from epk_gp.gp.regression import leave_one_out_targets as leave_one_out_targets
from epk_gp.gp.regression import predict_targets as predict_targets
