"""One optimizer's part of a step, read from it right after it has moved its parameters."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.optimizers.torch_rules import learning_rate
from epk_gp.optimizers.update_rules import NO_UPDATE, WEIGHTS, LinearStep
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.optimizer import StatesBefore
from epk_gp.recording.setup import TrainingSetup


@dataclass(frozen=True, eq=False)
class OptimizerPart:
    """What one optimizer did to its parameters.

    Attributes:
        optimizer: The optimizer.
        lr: The learning rate of its first parameter group.
        coefficients: By the parameter's name the coefficients of its step.
        gradients: The gradient that it used of each parameter; zero for one without a gradient.
        frozen: Names of the parameters without a gradient.
    """

    optimizer: Optimizer
    lr: float
    coefficients: Mapping[str, LinearStep]
    gradients: Mapping[str, Tensor]
    frozen: Set[str]


def optimizer_part(
    setup: TrainingSetup, optimizer: Optimizer, weights: Float[Tensor, " P"], before: StatesBefore, *, copies: bool
) -> OptimizerPart:
    """Read gradients and coefficients from an optimizer, right after it has stepped.

    Args:
        setup: The training.
        optimizer: The optimizer.
        weights: The weights before the step.
        before: The optimizer's state before it (`states_before`).
        copies: Copy the gradients, because the step is recorded later.

    Raises:
        StepMismatchError: A parameter that is not recorded has a gradient and is trained; or the learning rate is
            negative or not finite.
    """
    model = setup.model
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in setup.net.named_parameters() if id(p) in groups}
    for name, parameter in named.items():
        if name not in model.names and parameter.grad is not None and parameter.numel():
            raise StepMismatchError(
                f"a parameter that is in no optimizer when recording begins must stay untrained: {name!r} is trained "
                f"now. Tell the recorder that it will be, with trained=[{name!r}]."
            )
    parameters = {name: p for name, p in named.items() if name in model.names}
    frozen = {
        name
        for name, p in parameters.items()
        if p.grad is None or not (p.requires_grad or bool(dense_gradient(p).any()))
    }
    rule, weights_before = setup.rules.update_rule, model.unflatten(weights)

    def coefficients(name: str, parameter: nn.Parameter) -> LinearStep:
        if parameter.grad is None:
            return NO_UPDATE
        old: Mapping[str, Any] = before.get(name, {})
        if WEIGHTS in rule.needs_before:
            old = {**old, WEIGHTS: weights_before[name]}
        linear = rule.coefficients(parameter, groups[id(parameter)], old, optimizer.state.get(parameter, {}))
        return replace(linear, grad_scale=0.0) if name in frozen else linear

    gradients = {name: torch.zeros_like(p) if name in frozen else dense_gradient(p) for name, p in parameters.items()}
    try:
        lr = learning_rate(optimizer)
    except ValueError as error:
        raise StepMismatchError(str(error)) from error
    return OptimizerPart(
        optimizer=optimizer,
        lr=lr,
        coefficients={name: coefficients(name, p) for name, p in parameters.items()},
        gradients={name: g.clone() for name, g in gradients.items()} if copies else gradients,
        frozen=frozen,
    )


def dense_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient; zero if it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
