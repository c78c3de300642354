"""The state of optimizers before a step, as far as their update rule needs it, and their options at it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.optimizers import OptimizerGroup, Optimizers, as_optimizers, groups_of
from epk_gp.core.step import Step
from epk_gp.core.update_rules import UpdateRule

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
        self,
        rules: Sequence[tuple[UpdateRule | None, Optimizer]],
        net: nn.Module,
        groups: Sequence[OptimizerGroup],
        steps: Sequence[Step],
    ) -> None:
        self._rules = {id(optimizer): (own, optimizer) for own, optimizer in rules}
        self._names = {id(p): name for name, p in net.named_parameters()}
        changes = (step.groups for step in reversed(steps) if step.groups is not None)
        self._last = next(changes, tuple(group.of_scale() for group in groups))
        self._read: dict[int, tuple[OptimizerGroup, ...]] = {}

    def read(self, optimizer: Optimizer) -> None:
        """Read the groups of an optimizer that has just stepped: its options may change before the others step."""
        own, _ = self._rules[id(optimizer)]
        self._read[id(optimizer)] = tuple(group.of_scale() for group in groups_of(optimizer, own, self._names))

    def changed(self) -> tuple[OptimizerGroup, ...] | None:
        """Return the groups of all optimizers at the step that was made; None if they are those of the step before."""
        for key, (_, optimizer) in self._rules.items():
            if key not in self._read:
                self.read(optimizer)
        found = tuple(group for key in self._rules for group in self._read[key])
        self._read, before = {}, self._last
        self._last = found
        return None if found == before else found


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
