"""Record a training run, and check that each of its steps is the step that the update rule predicts.

The files, from the lowest: `causes` (targets that do not fit; why a step is another one), `setup` (all that is stated
of a run before its first step, checked), `observer` (hooks: forward passes, announced batches, steps of optimizers),
`passes` (what of a forward pass is recorded), `penalty` (what the loop adds to gradients, and sets to 0), `check` (of a
step, and of the network along it), `history` (the recorded steps, and when they are written), `recorder`; then `train`,
the common loop, and callbacks: `lightning`, `huggingface`. Start with `Recorder._record_step`. Of the package only
`core`, `optimizers` and `storage` are imported.
"""
