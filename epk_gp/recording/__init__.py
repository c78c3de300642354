"""Record a training run, and check that each of its steps is the step that the update rule predicts.

The files, from the lowest: `causes` (what does not fit), `setup` (what is stated of a run before its first step),
`seen` and `observer` (hooks: passes, gradients in outputs, announced batches, steps of optimizers), `passes` (the
record of a step), `gradient_fit` (what the loop did to its gradient), `check` and `mismatches` (of a step; why it is
another one), `probe` (derivatives along it), `history` (the recorded steps, and when they are written), `stretch` (each
step, or many together), `recorder`; then `train`, the common loop, and callbacks: `lightning`, `huggingface`. Start
with `Stretch.record`. Of the package only `core`, `optimizers` and `storage` are imported.
"""
