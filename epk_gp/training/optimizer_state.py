"""The state of optimizers before a step, as far as their update rule needs it, and their options at it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.optimizers.torch_rules import GivenRules, OptimizerGroup, Optimizers, as_optimizers, groups_of
from epk_gp.core.step import Step

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
