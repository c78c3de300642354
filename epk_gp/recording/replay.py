"""Replay of one step: the gradient recomputed, the optimizer's numbers read, and the two compared."""

from collections.abc import Set

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.recording.chunks import Step
from epk_gp.recording.clipping import Clip, clip_factor
from epk_gp.recording.diagnosis import (
    Replay,
    UnexplainedStepError,
    batch_gradient,
    explain_mismatch,
    explained,
    step_tolerance,
)
from epk_gp.recording.losses import Loss, sample_weights
from epk_gp.recording.networks import Skeleton, flatten, unflatten
from epk_gp.recording.optimizers import (
    SKIPPED,
    LinearStep,
    StepLaw,
    Update,
    join_steps,
    predict_step,
    with_factor,
)


def used_gradient(net: nn.Module, skeleton: Skeleton) -> Float[Tensor, " P"]:
    """Read the gradient that the optimizer used."""
    parameters = dict(net.named_parameters())
    return flatten(skeleton, {name: _dense_gradient(parameters[name]) for name in skeleton.names})


def read_numbers(net: nn.Module, skeleton: Skeleton, optimizer: Optimizer, law: StepLaw, fresh: Set[str]) -> Update:
    """Read the numbers of the optimizer's last step; `fresh` names the parameters it had no state of before."""
    parameters = dict(net.named_parameters())

    def linear(name: str) -> LinearStep:
        parameter = parameters[name]
        if parameter.grad is None:
            return SKIPPED
        group = next(g for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
        return law.coefficients(parameter, group, optimizer.state.get(parameter, {}), name in fresh)

    return join_steps([linear(name) for name in skeleton.names], skeleton.sizes)


def replay_step(
    net: nn.Module,
    skeleton: Skeleton,
    start: Float[Tensor, " P"],
    step: Step,
    data: tuple[Shaped[Tensor, "M ..."], Shaped[Tensor, "M ..."]],
    loss: Loss,
    clip: Clip | None,
) -> tuple[Replay, float | Tensor]:
    """Recompute a step's gradient and its clipping factor, beside the gradient that the optimizer used."""
    rows = slice(None) if step.batch is None else step.batch
    X, y = data[0][rows], data[1][rows]
    c = sample_weights(loss, y) if step.sample_weights is None else step.sample_weights.to(start)
    gradient = batch_gradient(skeleton, start, X, y, loss, c)
    parameters = dict(net.named_parameters())
    for name, part in unflatten(skeleton, gradient).items():
        if parameters[name].grad is None:  # frozen for this step: torch neither clips nor moves it
            part.zero_()
    factor = clip_factor(clip, gradient)
    used = used_gradient(net, skeleton)
    replay = Replay(start=start, used=used, gradient=gradient, clipped=gradient * factor, X=X, y=y, c=c, loss=loss)
    return replay, factor


def check_replay(
    net: nn.Module,
    skeleton: Skeleton,
    law: StepLaw,
    replay: Replay,
    numbers: Update,
    factor: float | Tensor,
    end: Float[Tensor, " P"],
    momentum: Float[Tensor, " P"],
    index: int,
) -> tuple[Update, Float[Tensor, " P"]]:
    """Compare a step with the law's on the recomputed gradient.

    Returns:
        The step's numbers with the clipping in them, and the momentum buffer after it.

    Raises:
        UnexplainedStepError: It is another one.
    """
    start, sizes = replay.start, skeleton.sizes
    predicted, after = predict_step(numbers, sizes, start, replay.clipped, momentum)
    moved, _ = predict_step(numbers, sizes, start, replay.used, momentum)
    difference = float((end - start - predicted).abs().max())
    lawful = float((end - start - moved).abs().max()) <= step_tolerance(start, moved)
    if not (difference <= step_tolerance(start, predicted) or (lawful and explained(skeleton, replay))):
        cause = explain_mismatch(net, skeleton, replay)
        raise UnexplainedStepError(
            f"step {index}: the change of the weights must be {law.name}'s step on the gradient of "
            f"{replay.loss} on the given batch: it differs by {difference:.2e} (largest predicted change "
            f"{float(predicted.abs().max()):.2e}). Likely cause: {cause}."
        )
    return with_factor(numbers, factor, sizes), after


def check_law(
    net: nn.Module,
    skeleton: Skeleton,
    law: StepLaw,
    start: Float[Tensor, " P"],
    numbers: Update,
    end: Float[Tensor, " P"],
    momentum: Float[Tensor, " P"],
    index: int,
) -> Float[Tensor, " P"]:
    """Compare a step with the law's on the gradient that the optimizer used, whatever that is the gradient of.

    Returns:
        The momentum buffer after it.

    Raises:
        UnexplainedStepError: It is another one.
    """
    predicted, after = predict_step(numbers, skeleton.sizes, start, used_gradient(net, skeleton), momentum)
    difference = float((end - start - predicted).abs().max())
    if not difference <= step_tolerance(start, predicted):
        raise UnexplainedStepError(
            f"step {index}: the change of the weights must be {law.name}'s step on the gradient that backward() left: "
            f"it differs by {difference:.2e}. Another optimizer or option is at work, or the weights were changed."
        )
    return after


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
