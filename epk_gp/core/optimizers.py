"""The optimizers of a run, one or several on one network: their common update rule and what must hold of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.optimizers.torch_rules import REFUSED, RULES
from epk_gp.optimizers.preconditioners import scale_options
from epk_gp.optimizers.update_rules import WEIGHTS, LinearStep, Options, UpdateRule

Optimizers = Optimizer | Sequence[Optimizer]
Rules = UpdateRule | Sequence[UpdateRule | None] | None
GivenRules = Sequence[tuple[UpdateRule | None, Optimizer]]


@dataclass(frozen=True)
class OptimizerGroup:
    """A parameter group of an optimizer when recording began, or from a step on where it is another one.

    Attributes:
        rule: Name of the update rule, one of torch's optimizers; empty for a rule of the user's own.
        names: Names of its parameters.
        options: Its options: numbers, texts and sequences of them. Learning rates may change during a run. Of a group
            that holds from a step on only those that the preconditioner depends on.
    """

    rule: str
    names: tuple[str, ...]
    options: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the group for a run's header."""
        return {"rule": self.rule, "names": list(self.names), "options": dict(self.options)}

    def of_scale(self) -> "OptimizerGroup":
        """Return the group with those options alone that its preconditioner depends on."""
        return OptimizerGroup(self.rule, self.names, scale_options(self.rule, self.options))

    @classmethod
    def from_json(cls, group: Mapping[str, Any]) -> "OptimizerGroup":
        """Return the group that a run's header describes."""
        return cls(group["rule"], tuple(group["names"]), group["options"])


def optimizer_groups(optimizers: Optimizers, rules: Rules, net: nn.Module) -> tuple[OptimizerGroup, ...]:
    """Return the parameter groups of all optimizers.

    Args:
        optimizers: One optimizer, or several.
        rules: The update rules that the user gave, as `rule_for` takes them.
        net: The network that they train.
    """
    names = {id(p): name for name, p in net.named_parameters()}
    given = given_rules(optimizers, rules)
    return tuple(group for own, optimizer in given for group in groups_of(optimizer, own, names))


def given_rules(optimizers: Optimizers, rules: Rules) -> GivenRules:
    """Return each optimizer with the update rule that the user gave for it."""
    several = as_optimizers(optimizers)
    given = (rules,) * len(several) if rules is None or isinstance(rules, UpdateRule) else tuple(rules)
    return list(zip(given, several, strict=True))


def groups_of(
    optimizer: Optimizer, own: UpdateRule | None, names: Mapping[int, str], *, of_scale: bool = False
) -> tuple[OptimizerGroup, ...]:
    """Return the parameter groups of one optimizer as they are now.

    Args:
        optimizer: The optimizer.
        own: The update rule that the user gave.
        names: The network's parameters by their `id`.
        of_scale: Whether to read those options alone that preconditioners depend on.
    """
    rule = RULES[type(optimizer)].name if own is None and type(optimizer) in RULES else ""
    found = []
    for group in optimizer.param_groups:
        options = scale_options(rule, group) if of_scale else group
        plain = {key: _plain(value) for key, value in options.items() if key != "params"}
        found.append(OptimizerGroup(rule, tuple(names[id(p)] for p in group["params"] if id(p) in names), plain))
    return tuple(found)


def _plain(option: Any) -> Any:
    """Return an option with numbers in the place of tensors; None for what is no number, text or sequence of them."""
    if isinstance(option, tuple | list):
        return [_plain(value) for value in option]
    if isinstance(option, Tensor):
        return option.item() if option.numel() == 1 else None
    return option if isinstance(option, bool | int | float | str) else None


def as_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple.

    Raises:
        TypeError: The object is neither an optimizer nor a sequence of optimizers.
        ValueError: There is none, or two of them hold the same parameter.
    """
    several = tuple(optimizers) if isinstance(optimizers, list | tuple) else (optimizers,)
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer: got {type(optimizer).__name__}.")
    if not several:
        raise ValueError("there must be at least one optimizer: got an empty sequence.")
    owners: dict[int, int] = {}
    for number, optimizer in enumerate(several):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(p), number) != number:
                raise ValueError(
                    "every parameter must belong to one optimizer: got a parameter of shape "
                    f"{tuple(p.shape)} that two of them hold."
                )
    return several


def rule_for(optimizers: Optimizers, given: Rules = None) -> UpdateRule:
    """Return the update rule of an optimizer, or the common one of several optimizers of one network.

    Args:
        optimizers: One optimizer, or several.
        given: The rule of an optimizer that is not one of torch's; of several optimizers a sequence with one entry for
            each, None for torch's own.

    Raises:
        TypeError: An object is not an optimizer.
        ValueError: The update rule of an optimizer is not known, or the optimizer cannot be covered.
    """
    several = as_optimizers(optimizers)
    rules = (given,) * len(several) if given is None or isinstance(given, UpdateRule) else tuple(given)
    if len(rules) != len(several):
        raise ValueError(f"update_rule must have one entry per optimizer: got {len(rules)} for {len(several)}.")
    found = tuple(_known_rule(o) if rule is None else rule for o, rule in zip(several, rules, strict=True))
    if len(found) == 1:
        return found[0]

    def coefficients(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
        for optimizer, rule in zip(several, found, strict=True):
            if any(group is its_own for its_own in optimizer.param_groups):
                # what another rule needs would make a first step look like a later one
                own = {name: value for name, value in before.items() if name != WEIGHTS or name in rule.needs_before}
                return rule.coefficients(p, group, own, after)
        raise ValueError("the parameter group must be one of the optimizers' that are recorded: it is another one.")

    return UpdateRule(
        name=" + ".join(dict.fromkeys(rule.name for rule in found)),
        coefficients=coefficients,
        needs_before=tuple(dict.fromkeys(name for rule in found for name in rule.needs_before)),
        unexplained=max(rule.unexplained for rule in found),
    )


def _known_rule(optimizer: Optimizer) -> UpdateRule:
    kind = type(optimizer)
    if kind in RULES:
        return RULES[kind]
    if kind in REFUSED:
        raise ValueError(REFUSED[kind])
    known = ", ".join(sorted(rule.__name__ for rule in RULES))
    raise ValueError(
        f"the optimizer's update rule must be known: that of "
        f"{kind.__module__}.{kind.__name__} is not. Use one of torch.optim's {known}, "
        "or pass the rule as update_rule=epk_gp.optimizers.update_rules.UpdateRule(...)."
    )


def validate_unexplained(rule: UpdateRule, unexplained: float | None) -> None:
    """Raise if a rule leaves a part of the steps unexplained, and nobody said that it may.

    Args:
        rule: The update rule.
        unexplained: Share of a step that update rule and loss need not explain; None for rounding only.

    Raises:
        ValueError: The rule leaves more than rounding, and no share is given.
    """
    if rule.unexplained > 0 and unexplained is None:
        raise ValueError(
            f"unexplained must be given for {rule.name}, whose steps the update rule explains up to a share only: got "
            "None. The optimizer computes a part of its step in a lower precision than that of the weights. Pass "
            f"unexplained={rule.unexplained}, the share of a step's norm that may be left: what is left becomes a term "
            "of its own in every result, with its size."
        )


def validate_fresh_optimizer(optimizers: Optimizers) -> None:
    """Raise if an optimizer holds what it derived from gradients before the recording.

    No sample of the recorded run could account for that.

    Raises:
        ValueError: The state of a parameter is not that of a fresh optimizer.
    """
    for optimizer in as_optimizers(optimizers):
        for group in optimizer.param_groups:
            for state in (optimizer.state.get(p, {}) for p in group["params"]):
                for name, value in sorted(state.items(), key=lambda entry: entry[0] == "step"):
                    if _holds_gradients(optimizer, group, name, value):
                        raise ValueError(
                            f"the optimizer must be fresh: its {name} holds gradients from before the recording. "
                            "Make a new optimizer, or record from its first step on."
                        )


def _holds_gradients(optimizer: Optimizer, group: Options, name: str, value: Any) -> bool:
    """Return whether an entry of an optimizer's state is another one than before the first step."""
    is_known = type(optimizer) in RULES or name in ("momentum_buffer", "exp_avg")
    if not is_known or name in ("eta", "step_size") or not isinstance(value, Tensor | int | float):
        return False  # of an optimizer of the user's own; or a rate, which follows from the options
    fresh = {"sum": group.get("initial_accumulator_value", 0.0), "mu": 1.0, "mu_product": 1.0}.get(name, 0.0)
    return bool((torch.as_tensor(value) != fresh).any())


def learning_rate(optimizers: Optimizers) -> float:
    """Return the learning rate of the first group of the first optimizer, the kernel's weight eps_s of the step.

    Raises:
        ValueError: The learning rate of a group is negative or not finite.
    """
    rates = [float(group["lr"]) for optimizer in as_optimizers(optimizers) for group in optimizer.param_groups]
    for rate in rates:
        if not 0 <= rate < float("inf"):
            raise ValueError(f"the learning rate must be finite and not negative: got {rate}.")
    return rates[0]
