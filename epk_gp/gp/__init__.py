"""Gaussian processes on logits and on labels; imports core, gram and kernels.

On logits start with `models.LogitGP`: `data` says what it regresses on, `output_coupling` how its outputs covary,
`posterior` is what it predicts, `softmax` samples class probabilities, `regression` predicts targets. On labels start
with `uncertain_classifier.UncertainClassifier`: a `label_process` conditioned on the labels, and `stacking` of network
and process.
"""

from epk_gp.gp.posterior import LogitPosterior as LogitPosterior
from epk_gp.gp.regression import leave_one_out_targets as leave_one_out_targets
from epk_gp.gp.regression import predict_targets as predict_targets
