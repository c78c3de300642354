"""Replay of one step: the gradient recomputed, the optimizer's numbers read, and the two compared."""

from collections.abc import Mapping, Sequence, Set

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.gradients import batch_gradient, step_tolerance
from epk_gp.core.losses import Loss, sample_weights
from epk_gp.core.model import FunctionalModel
from epk_gp.core.probe import NUM_FINGERPRINT_POINTS, perturbed_initial
from epk_gp.core.step import Step
from epk_gp.core.update_rules import (
    NO_UPDATE,
    LinearStep,
    UpdateCoefficients,
    UpdateRule,
    predict_step,
    scale_gradient,
    stack_coefficients,
)
from epk_gp.training.clipping import Clip, clip_factor
from epk_gp.training.diagnosis import StepCheck, StepMismatchError, consistent_up_to_rounding, explain_mismatch


def join_batches(
    index: int,
    size: float,
    announced: Sequence[tuple[Tensor | None, float]],
    loss: Loss,
    y: Shaped[Tensor, "M ..."],
) -> Step:
    """Make one step of the batches that were announced, each with its weight."""
    if len(announced) == 1 and announced[0][1] == 1:
        return Step(index, size, announced[0][0])
    every = torch.arange(len(y))
    batches = [every if batch is None else batch for batch, _ in announced]
    weights = [
        weight * sample_weights(loss, y[batch.to(y.device)]).cpu()
        for batch, (_, weight) in zip(batches, announced, strict=True)
    ]
    return Step(index, size, torch.cat([batch.cpu() for batch in batches]), torch.cat(weights))


def validate_frozen_state(
    net: nn.Module, model: FunctionalModel, w: Float[Tensor, " P"], X: Shaped[Tensor, "M ..."], index: int
) -> None:
    """Refuse buffers and frozen parameters that changed; a counter of calls, say, does not matter.

    Raises:
        UnexplainedStepError: The outputs at the first inputs depend on what changed.
    """
    constants = model.frozen_state()
    if not constants:
        return
    now = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    changed = {name: now[name].detach() for name, value in constants.items() if not torch.equal(now[name], value)}
    if not changed:
        return
    weights, rows = model.unflatten(perturbed_initial(w)), X[:NUM_FINGERPRINT_POINTS]
    with torch.no_grad():
        before, after = model(weights, rows), model({**weights, **changed}, rows)
    if not torch.equal(before, after):
        raise StepMismatchError(
            f"step {index}: buffers and frozen parameters must stay as they were when recording began: "
            f"{next(iter(changed))!r} changed."
        )


def used_gradient(parameters: Mapping[str, nn.Parameter], model: FunctionalModel) -> Float[Tensor, " P"]:
    """Read the gradient that the optimizer used."""
    return model.flatten({name: _dense_gradient(parameters[name]) for name in model.names})


def read_coefficients(
    parameters: Mapping[str, nn.Parameter],
    model: FunctionalModel,
    optimizer: Optimizer,
    update_rule: UpdateRule,
    fresh: Set[str],
) -> UpdateCoefficients:
    """Read the numbers of the optimizer's last step; `fresh` names the parameters it had no state of before."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def linear(name: str) -> LinearStep:
        parameter = parameters[name]
        if parameter.grad is None:
            return NO_UPDATE
        return update_rule.coefficients(
            parameter, groups[id(parameter)], optimizer.state.get(parameter, {}), name in fresh
        )

    return stack_coefficients([linear(name) for name in model.names], model.sizes)


def recompute_gradient(
    parameters: Mapping[str, nn.Parameter],
    model: FunctionalModel,
    start: Float[Tensor, " P"],
    step: Step,
    data: tuple[Shaped[Tensor, "M ..."], Shaped[Tensor, "M ..."]],
    loss: Loss,
    clip: Clip | None,
) -> tuple[StepCheck, float | Tensor]:
    """Recompute a step's gradient and its clipping factor, beside the gradient that the optimizer used."""
    rows = slice(None) if step.batch is None else step.batch
    X, y = data[0][rows], data[1][rows]
    c = sample_weights(loss, y) if step.sample_weights is None else step.sample_weights.to(start)
    gradient = batch_gradient(model, start, X, y, loss, c)
    for name, part in model.unflatten(gradient).items():
        if parameters[name].grad is None:  # frozen for this step: torch neither clips nor moves it
            part.zero_()
    factor = clip_factor(clip, gradient)
    used = used_gradient(parameters, model)
    replay = StepCheck(start=start, used=used, gradient=gradient, clipped=gradient * factor, X=X, y=y, c=c, loss=loss)
    return replay, factor


def check_against_exact_gradient(
    net: nn.Module,
    model: FunctionalModel,
    update_rule: UpdateRule,
    replay: StepCheck,
    numbers: UpdateCoefficients,
    factor: float | Tensor,
    end: Float[Tensor, " P"],
    momentum: Float[Tensor, " P"],
    index: int,
) -> tuple[UpdateCoefficients, Float[Tensor, " P"]]:
    """Compare a step with the law's on the recomputed gradient.

    Returns:
        The step's numbers with the clipping in them, and the momentum buffer after it.

    Raises:
        UnexplainedStepError: It is another one.
    """
    start, sizes = replay.start, model.sizes
    predicted, _ = predict_step(numbers, sizes, start, replay.clipped, momentum)
    moved, after = predict_step(numbers, sizes, start, replay.used, momentum)  # the buffer follows the optimizer's own
    difference = float((end - start - predicted).abs().max())
    lawful = float((end - start - moved).abs().max()) <= step_tolerance(start, moved)
    if not (difference <= step_tolerance(start, predicted) or (lawful and consistent_up_to_rounding(model, replay))):
        cause = explain_mismatch(net, model, replay)
        raise StepMismatchError(
            f"step {index}: the change of the weights must be {update_rule.name}'s step on the gradient of "
            f"{replay.loss} on the given batch: it differs by {difference:.2e} (largest predicted change "
            f"{float(predicted.abs().max()):.2e}). Likely cause: {cause}."
        )
    return scale_gradient(numbers, factor, sizes), after


def check_against_used_gradient(
    parameters: Mapping[str, nn.Parameter],
    model: FunctionalModel,
    update_rule: UpdateRule,
    start: Float[Tensor, " P"],
    numbers: UpdateCoefficients,
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
    predicted, after = predict_step(numbers, model.sizes, start, used_gradient(parameters, model), momentum)
    difference = float((end - start - predicted).abs().max())
    if not difference <= step_tolerance(start, predicted):
        raise StepMismatchError(
            f"step {index}: the change of the weights must be {update_rule.name}'s step on the gradient that "
            f"backward() left: it differs by {difference:.2e}. Another optimizer or option is at work, or the weights "
            "were changed."
        )
    return after


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
