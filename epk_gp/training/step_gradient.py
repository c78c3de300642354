"""The gradient of a step that is being recorded, recomputed from its record."""

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.plans import TensorSpec
from epk_gp.core.gradients import batch_gradient, statistics_error
from epk_gp.core.replay import TrainingReplay, passes_of
from epk_gp.core.step import Step
from epk_gp.recording.setup import TrainingSetup


def step_gradient(
    setup: TrainingSetup,
    step: Step,
    state: Float[Tensor, " PQ"],
    end_statistics: Float[Tensor, " Q"],
    dtype: torch.dtype | None = None,
) -> tuple[Float[Tensor, " P"], float]:
    """Return the gradient of a step's loss in the precision of the training, and the error of its moving statistics.

    Args:
        setup: The training.
        step: The step.
        state: The weights before it, then the moving statistics.
        end_statistics: The moving statistics after it.
        dtype: Another dtype for passes that draw no random numbers and use no automatic mixed precision.
    """
    spec = TensorSpec(state.dtype if dtype is None else dtype, state.device)
    model = setup.model if spec == setup.model.spec else setup.model.converted(spec)
    passes = passes_of(step, setup.training_data)
    state = state.to(spec.dtype)
    if not step.passes:
        (data,) = passes
        with disable_fused_attention():
            return batch_gradient(model, state, spec.cast(data.X), data.y, setup.loss, data.c), 0.0
    replay = TrainingReplay(setup.model, setup.loss, spec)
    total, error = torch.zeros_like(state[: setup.model.num_weights]), 0.0
    for data in passes:
        replayed = replay.gradient(state, data)
        total += replayed.gradient
        after = data.forward.statistics_after
        after = end_statistics if after is None else after
        error = max(error, statistics_error(replayed.statistics, after, setup.model.spec.dtype))
    return total, error
