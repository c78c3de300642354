"""Record a training run, and check that each of its steps is the step that the update rule predicts.

The files, from the lowest level: `causes` (invalid targets and settings), `setup` (statements about a run before its
first step), `seen` and `observer` (hooks: passes, gradients in outputs, announced batches, steps of optimizers),
`passes` (the record of a step), `gradient_fit` (the loop's changes to its gradient), `check` and `mismatches` (the
check of a step and of derivatives along it, and reasons for a mismatch), `history` (the recorded steps, and when they
are written), `stretch` (each step, or many together), `recorder`; then `train`, the common loop, and callbacks:
`lightning`, `huggingface`. Start with `Stretch.record`. Of the package only `core`, `optimizers` and
`storage` are imported.
"""
