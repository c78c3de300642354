"""Gaussian processes on logits and on labels; imports core, gram and kernels.

On logits start with `models.LogitGP`: `data` says what it regresses on, `output_coupling` how its outputs covary,
`posterior` predicts, `softmax` samples class probabilities, `regression` predicts targets. On labels start with
`uncertain_classifier.UncertainClassifier`: `label_kernel`, `label_process` conditioned on the labels, `stacking` of
network and process, and `saved_classifier`.
"""
