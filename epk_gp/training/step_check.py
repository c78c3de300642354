"""The check of one step: is the change of the weights the one that the update rule predicts?"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.gradients import batch_gradient, step_tolerance
from epk_gp.core.losses import sample_weights
from epk_gp.core.optimizers import Optimizers, as_optimizers
from epk_gp.core.step import Step
from epk_gp.core.update_rules import (
    NO_UPDATE,
    WEIGHTS,
    LinearStep,
    UpdateCoefficients,
    predict_step,
    scale_gradient,
    stack_coefficients,
)
from epk_gp.training.diagnosis import StepCheck, StepMismatchError, consistent_up_to_rounding, explain_mismatch
from epk_gp.training.optimizer_state import StatesBefore
from epk_gp.training.setup import TrainingSetup


@dataclass(frozen=True, eq=False)
class ObservedStep:
    """A step of the optimizer as it was observed right after it.

    Attributes:
        step: Its learning rate and batch.
        start: The weights before it.
        end: The weights after it.
        gradient: The gradient that the optimizer used; zero for a parameter without one.
        without_gradient: Names of the parameters without a gradient. torch neither clips nor moves those whose gradient
            is None; one that was frozen during the run and has a gradient of zeros moves by its momentum and decay.
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
    optimizers: Optimizers,
    step: Step,
    *,
    start: Float[Tensor, " P"],
    end: Float[Tensor, " P"],
    momentum: Float[Tensor, " P"],
    before: StatesBefore,
) -> ObservedStep:
    """Read gradient and coefficients of a step from the network and its optimizer, right after it.

    Args:
        setup: The training.
        optimizers: The optimizers that made the step; the parameters of others did not move.
        step: Learning rate and batch of the step.
        start: The weights before the step.
        end: The weights after the step.
        momentum: The momentum buffer before the step.
        before: The optimizers' states before the step (`states_before`).

    Raises:
        StepMismatchError: A parameter that is not recorded has a gradient and is trained.
    """
    model, named = setup.model, dict(setup.net.named_parameters())
    parameters = {name: named[name] for name in model.names}
    owned = {
        id(p): (group, optimizer.state)
        for optimizer in as_optimizers(optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in named.items():
        if name not in parameters and id(parameter) in owned and parameter.grad is not None:
            raise StepMismatchError(
                f"step {step.index}: a parameter that is frozen when recording begins must stay frozen: {name!r} is "
                f"trained now. Tell the recorder that it will be, with trained=[{name!r}]."
            )
    frozen = {
        name
        for name, p in parameters.items()
        if p.grad is None or id(p) not in owned or not (p.requires_grad or bool(_dense_gradient(p).any()))
    }

    def coefficients(name: str, parameter: nn.Parameter) -> LinearStep:
        if parameter.grad is None or id(parameter) not in owned:
            return NO_UPDATE
        group, states = owned[id(parameter)]
        old: Mapping[str, Any] = before.get(name, {})
        if WEIGHTS in rule.needs_before:
            old = {**old, WEIGHTS: weights_before[name]}
        linear = rule.coefficients(parameter, group, old, states.get(parameter, {}))
        return replace(linear, grad_scale=0.0) if name in frozen else linear

    rule, weights_before = setup.rules.update_rule, model.unflatten(start)
    gradients = {name: torch.zeros_like(p) if name in frozen else _dense_gradient(p) for name, p in parameters.items()}

    return ObservedStep(
        step=step,
        start=start,
        end=end,
        gradient=model.flatten(gradients),
        without_gradient=frozen,
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
