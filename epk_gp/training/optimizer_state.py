"""The state of optimizers before a step, as far as their update rule needs it."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from epk_gp.core.optimizers import Optimizers, as_optimizers

StatesBefore = Mapping[str, Mapping[str, Any]]


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
