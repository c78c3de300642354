"""What is read of an optimizer.

Its state and options before a step, and its step right after it moved its parameters.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.step import Step
from epk_gp.optimizers.torch_rules import (
    GivenRules,
    OptimizerGroup,
    Optimizers,
    as_optimizers,
    groups_of,
    learning_rate,
)
from epk_gp.optimizers.update_rules import NO_UPDATE, WEIGHTS, LinearStep
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.setup import TrainingSetup

StatesBefore = Mapping[str, Mapping[str, Any]]


class GroupWatch:
    """Notices when parameter groups of the optimizers change, or the options that their preconditioners depend on.

    Args:
        rules: Each optimizer with the update rule that the user gave for it.
        net: The network that they train.
        groups: Their parameter groups when recording began.
        steps: The steps recorded so far.
    """

    def __init__(
        self, rules: GivenRules, net: nn.Module, groups: Sequence[OptimizerGroup], steps: Sequence[Step]
    ) -> None:
        self._rules, self._names = rules, {id(p): name for name, p in net.named_parameters()}
        changes = (step.groups for step in reversed(steps) if step.groups is not None)
        self._last = next(changes, tuple(group.of_scale() for group in groups))
        self._now = [groups_of(optimizer, own, self._names, of_scale=True) for own, optimizer in rules]

    def read(self, stepped: Optimizer) -> None:
        """Read the groups of an optimizer that has just stepped: its options may change before others step."""
        for number, (own, optimizer) in enumerate(self._rules):
            if optimizer is stepped:
                self._now[number] = groups_of(optimizer, own, self._names, of_scale=True)

    def changed(self) -> tuple[OptimizerGroup, ...] | None:
        """Return the groups of all optimizers at the step that was made; None if they are those of the step before."""
        before, self._last = self._last, tuple(group for groups in self._now for group in groups)
        return None if self._last == before else self._last


def states_before(
    optimizers: Optimizers, parameters: Mapping[str, nn.Parameter], needs_before: Collection[str]
) -> StatesBefore:
    """Return what optimizers hold of each parameter before a step, for `UpdateRule.coefficients`.

    Args:
        optimizers: The optimizers that will make the step.
        parameters: The parameters by name.
        needs_before: Names of the entries to copy (`UpdateRule.needs_before`).

    Returns:
        By the parameter's name its state: a copy of each entry that is needed, and None for each other one. It is empty
        where the optimizer has no state of the parameter yet.
    """
    several = as_optimizers(optimizers)

    def state_of(parameter: nn.Parameter) -> dict[str, Any]:
        for optimizer in several:
            state = optimizer.state.get(parameter, {})
            if any(value is not None for value in state.values()):
                return {name: _copied(value) if name in needs_before else None for name, value in state.items()}
        return {}

    return {name: state_of(parameter) for name, parameter in parameters.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


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
