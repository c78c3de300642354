"""The check of one step: is the change of the weights the one that the update rule predicts?"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.gradients import batch_gradient, step_tolerance
from epk_gp.core.losses import sample_weights
from epk_gp.core.step import Step
from epk_gp.core.update_rules import (
    NO_UPDATE,
    LinearStep,
    UpdateCoefficients,
    predict_step,
    scale_gradient,
    stack_coefficients,
)
from epk_gp.training.diagnosis import StepCheck, StepMismatchError, consistent_up_to_rounding, explain_mismatch
from epk_gp.training.setup import TrainingSetup


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """A step of the optimizer as it was observed right after it.

    Attributes:
        step: Its learning rate and batch.
        start: The weights before it.
        end: The weights after it.
        gradient: The gradient that the optimizer used; zero for a parameter without one.
        without_gradient: Names of the parameters without a gradient, which torch neither clips nor moves.
        update: The coefficients of the step, read from the optimizer, without gradient clipping.
        momentum: The momentum buffer before the step, as the recorder follows it.
    """

    step: Step
    start: Float[Tensor, " P"]
    end: Float[Tensor, " P"]
    gradient: Float[Tensor, " P"]
    without_gradient: Set[str]
    update: UpdateCoefficients
    momentum: Float[Tensor, " P"]


@dataclass(frozen=True, eq=False)
class CheckedStep:
    """A step that is the predicted one.

    Attributes:
        update: The coefficients of the step, with gradient clipping.
        momentum: The momentum buffer after the step.
    """

    update: UpdateCoefficients
    momentum: Float[Tensor, " P"]


def observe_step(
    setup: TrainingSetup,
    optimizer: Optimizer,
    step: Step,
    *,
    start: Float[Tensor, " P"],
    end: Float[Tensor, " P"],
    momentum: Float[Tensor, " P"],
    state_uninitialised: Set[str],
) -> ObservedStep:
    """Read gradient and coefficients of a step from the network and its optimizer, right after it.

    Args:
        setup: The training.
        optimizer: Its optimizer.
        step: Learning rate and batch of the step.
        start: The weights before the step.
        end: The weights after the step.
        momentum: The momentum buffer before the step.
        state_uninitialised: Names of the parameters of which the optimizer had no state before the step.
    """
    model, named = setup.model, dict(setup.net.named_parameters())
    parameters = {name: named[name] for name in model.names}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

    def coefficients(name: str, parameter: nn.Parameter) -> LinearStep:
        if parameter.grad is None:
            return NO_UPDATE
        state = optimizer.state.get(parameter, {})
        is_first = name in state_uninitialised
        return setup.rules.update_rule.coefficients(parameter, groups[id(parameter)], state, is_first)

    return ObservedStep(
        step=step,
        start=start,
        end=end,
        gradient=model.flatten({name: _dense_gradient(parameter) for name, parameter in parameters.items()}),
        without_gradient={name for name, parameter in parameters.items() if parameter.grad is None},
        update=stack_coefficients([coefficients(*item) for item in parameters.items()], model.sizes),
        momentum=momentum,
    )


def check_against_exact_gradient(setup: TrainingSetup, observed: ObservedStep) -> CheckedStep:
    """Compare a step with the update rule, and the gradient that it used with the recomputed one.

    Both are needed: a learning rate of 0, or steps below the rounding of the weights, make any gradient fit the step,
    and a wrong one would stay in the optimizer's momentum.

    Raises:
        StepMismatchError: The step is not the predicted one, or the gradient is not that of the stated loss; the
            message names the likeliest cause.
    """
    sizes, start = setup.model.sizes, observed.start
    check = _recompute(setup, observed)
    # The buffer follows the gradient that the optimizer used, as the optimizer's own buffer does.
    predicted, momentum = predict_step(observed.update, sizes, start, check.used, observed.momentum)
    difference = float((observed.end - start - predicted).abs().max())
    follows_rule = difference <= step_tolerance(start, predicted)
    if not (follows_rule and consistent_up_to_rounding(setup.model, check)):
        expected, _ = predict_step(observed.update, sizes, start, check.clipped, observed.momentum)
        difference = float((observed.end - start - expected).abs().max())
        cause = explain_mismatch(setup.net, setup.model, check, follows_rule=follows_rule)
        raise StepMismatchError(
            f"step {observed.step.index}: the change of the weights must be {setup.rules.update_rule.name}'s step on "
            f"the gradient of {setup.loss} on the given batch: it differs by {difference:.2e} (largest predicted "
            f"change {float(expected.abs().max()):.2e}), the gradient by "
            f"{float((check.used - check.clipped).abs().max()):.2e} (largest entry "
            f"{float(check.clipped.abs().max()):.2e}). Likely cause: {cause}."
        )
    return CheckedStep(scale_gradient(observed.update, check.clip_factor, sizes), momentum)


def check_against_used_gradient(setup: TrainingSetup, observed: ObservedStep) -> CheckedStep:
    """Compare a step with the step that the update rule predicts from the gradient that the optimizer used.

    Whether that is the gradient of the stated loss is not checked.

    Raises:
        StepMismatchError: The step is not the predicted one.
    """
    start, sizes = observed.start, setup.model.sizes
    predicted, momentum = predict_step(observed.update, sizes, start, observed.gradient, observed.momentum)
    difference = float((observed.end - start - predicted).abs().max())
    if not difference <= step_tolerance(start, predicted):
        raise StepMismatchError(
            f"step {observed.step.index}: the change of the weights must be {setup.rules.update_rule.name}'s step on "
            f"the gradient that backward() left: it differs by {difference:.2e}. Another optimizer or option is at "
            "work, or the weights were changed."
        )
    return CheckedStep(observed.update, momentum)


def _recompute(setup: TrainingSetup, observed: ObservedStep) -> StepCheck:
    """Recompute the gradient of a step, and the factor by which the stated clipping multiplies it."""
    step, start, clip = observed.step, observed.start, setup.rules.clip
    rows = slice(None) if step.batch is None else step.batch
    X, y = setup.X[rows], setup.y[rows]
    c = sample_weights(setup.loss, y) if step.sample_weights is None else step.sample_weights.to(start)
    gradient = batch_gradient(setup.model, start, X, y, setup.loss, c)
    parts = setup.model.unflatten(gradient)
    for name in observed.without_gradient:
        parts[name].zero_()
    return StepCheck(
        start=start,
        used=observed.gradient,
        gradient=gradient,
        clip_factor=1.0 if clip is None else clip.factor(gradient),
        X=X,
        y=y,
        c=c,
        loss=setup.loss,
    )


def _dense_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
