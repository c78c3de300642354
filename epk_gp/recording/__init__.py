"""Record a training run, and check that each of its steps is the step that the update rule predicts.

The files, from the lowest: `clipping`, `tensor_arena` (memory), `announced_batch`, `validation` (arguments), `setup`
(all that is stated of a run before its first step), `diagnosis` (why a step is another one), `step_check`, `history`
(the recorded steps), `commits` (when they are written), `recorder`; then `epoch_sampler` and `train` (the common loop),
`indexed_dataset`, and `lightning` (a callback, which needs the extra `lightning`).
"""
