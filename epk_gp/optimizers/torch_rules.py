"""The update rule of every optimizer of torch that takes one gradient a step, and of several on one network.

Each reads the coefficients of a `LinearStep` from the optimizer's options and its state before and after the step. What
an optimizer derives from the gradients themselves (second moments, signs, an orthogonalising matrix) is held as
recorded: the step is linear in the gradients with these numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from epk_gp.optimizers.preconditioners import scale_options
from epk_gp.optimizers.update_rules import WEIGHTS, LinearStep, Options, UpdateRule


def _sign(group: Options) -> float:
    return -1.0 if group.get("maximize", False) else 1.0


def _count(group: Options, state: Options) -> Any:
    """Return the number of the step, from 1 on: as torch computes with it, a float32 tensor where it is capturable."""
    return state["step"] if group.get("capturable", False) else float(state["step"])


def _option(group: Options, name: str) -> Any:
    """Return an option as torch computes with it: a tensor stays one, with its rounding, but in fused kernels."""
    value = group[name]
    if not isinstance(value, Tensor):
        return value
    return float(value) if group.get("fused", False) else value.detach().squeeze()


def _betas(group: Options) -> tuple[Any, Any]:
    beta1, beta2 = (_option({**group, "beta": beta}, "beta") for beta in group["betas"])
    return beta1, beta2


def _decoupled(group: Options) -> float:
    """Return by how much of themselves the weights shrink: torch multiplies them with 1 - lr * weight_decay."""
    return 1 - float(1 - _option(group, "lr") * _option(group, "weight_decay"))


def _decays(group: Options, *, decoupled: bool) -> dict[str, Any]:
    if decoupled:
        return {"decoupled_decay": _decoupled(group)}
    return {"weight_decay": float(group["weight_decay"])}


def _sgd(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, mu, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
    if mu == 0:
        return LinearStep(lr=lr, beta=1.0, grad_scale=_sign(group), weight_decay=decay)
    return LinearStep(
        lr=lr if group["nesterov"] else 0.0,
        momentum_lr=lr * mu if group["nesterov"] else lr,
        beta=mu if before else 0.0,
        # torch starts the buffer with the gradient itself, not dampened
        one_minus_dampening=1.0 - float(group["dampening"]) if before else 1.0,
        grad_scale=_sign(group),
        weight_decay=decay,
    )


def _adam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    (beta1, beta2), count = _betas(group), _count(group, after)
    v = after["max_exp_avg_sq"] if group["amsgrad"] else after["exp_avg_sq"]
    rate, root = _option(group, "lr") / (1 - beta1**count), (1 - beta2**count) ** 0.5
    if group.get("capturable", False):  # torch multiplies float32 numbers first
        momentum_lr = 1 / (v.sqrt() / float(root * rate) + float(group["eps"] / rate))
    else:
        momentum_lr = float(rate) / (v.sqrt() / float(root) + float(group["eps"]))
    return LinearStep(
        momentum_lr=momentum_lr,
        beta=float(beta1) if before else 0.0,
        one_minus_dampening=1 - float(beta1),
        grad_scale=_sign(group),
        **_decays(group, decoupled=bool(group.get("decoupled_weight_decay", False))),
    )


def _adamw(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    return _adam(p, {**group, "decoupled_weight_decay": True}, before, after)


def _adamax(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    beta1 = float(group["betas"][0])
    return LinearStep(
        momentum_lr=float(_option(group, "lr") / (1 - beta1 ** _count(group, after))) / after["exp_inf"],
        beta=beta1 if before else 0.0,
        one_minus_dampening=1 - beta1,
        grad_scale=_sign(group),
        **_decays(group, decoupled=False),
    )


def _nadam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, decay = _option(group, "lr"), float(group["momentum_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    count, product = _count(group, after), float(after["mu_product"])  # the product of mu_1 .. mu_t
    mu, mu_next = (float(beta1 * (1 - 0.5 * 0.96 ** (n * decay))) for n in (count, count + 1))
    denominator = (after["exp_avg_sq"] / float(1 - beta2**count)).sqrt() + float(group["eps"])
    return LinearStep(
        lr=float(lr * (1 - mu) / (1 - product)) / denominator,
        momentum_lr=float(lr * mu_next / (1 - product * mu_next)) / denominator,
        beta=beta1 if before else 0.0,
        one_minus_dampening=1 - beta1,
        grad_scale=_sign(group),
        **_decays(group, decoupled=bool(group["decoupled_weight_decay"])),
    )


def _radam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    count = _count(group, after)
    correction = 1 - beta2**count
    rho_inf = 2 / (1 - beta2) - 1
    rho = float(rho_inf - 2 * count * beta2**count / correction)
    momentum_lr: float | Tensor = lr / float(1 - beta1**count)
    if rho > 5:  # before that, torch takes the momentum as it is
        rectified = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        scale = rectified * float(correction**0.5)
        momentum_lr = momentum_lr * scale / (after["exp_avg_sq"].sqrt() + float(group["eps"]))
    return LinearStep(
        momentum_lr=momentum_lr,
        beta=beta1 if before else 0.0,
        one_minus_dampening=1 - beta1,
        grad_scale=_sign(group),
        **_decays(group, decoupled=bool(group["decoupled_weight_decay"])),
    )


def _sparse_adam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """Adam on the entries of the sparse gradient; the buffers of the others keep what they hold."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    count = float(after["step"])
    seen, one = _seen_entries(p), torch.ones_like(after["exp_avg"])
    denominator = after["exp_avg_sq"].sqrt() + float(group["eps"])
    rate = float(_option(group, "lr") * (1 - beta2**count) ** 0.5 / (1 - beta1**count))
    return LinearStep(
        momentum_lr=torch.where(seen, rate / denominator, 0.0),
        beta=torch.where(seen, one * (beta1 if before else 0.0), one),
        one_minus_dampening=torch.where(seen, one * (1 - beta1), 0.0),
        grad_scale=_sign(group),
    )


def _seen_entries(p: nn.Parameter) -> Tensor:
    """Return which entries of a parameter its sparse gradient holds."""
    seen = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
    if p.grad is not None:
        seen[tuple(p.grad.coalesce().indices())] = True
    return seen


def _rmsprop(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, mu = float(group["lr"]), float(group["momentum"])
    v = after["square_avg"]
    if group["centered"]:
        v = v.addcmul(after["grad_avg"], after["grad_avg"], value=-1)
    inverse = 1 / (v.sqrt() + float(group["eps"]))
    return LinearStep(
        lr=0.0 if mu > 0 else lr * inverse,
        momentum_lr=lr if mu > 0 else 0.0,
        beta=mu if before else 0.0,
        one_minus_dampening=inverse if mu > 0 else 0.0,
        grad_scale=_sign(group),
        weight_decay=float(group["weight_decay"]),
    )


def _adagrad(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr = float(group["lr"]) / (1 + (float(after["step"]) - 1) * float(group["lr_decay"]))
    return LinearStep(
        lr=lr / (after["sum"].sqrt() + float(group["eps"])),
        grad_scale=_sign(group),
        weight_decay=float(group["weight_decay"]),
    )


def _adadelta(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    eps, after_squares = float(group["eps"]), after["square_avg"]
    before_deltas = before.get("acc_delta", torch.zeros_like(after_squares))
    return LinearStep(
        lr=float(group["lr"]) * (before_deltas + eps).sqrt() / (after_squares + eps).sqrt(),
        grad_scale=_sign(group),
        weight_decay=float(group["weight_decay"]),
    )


def _asgd(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    # torch keeps the step size eta in float32; the one after a step is that of the next step
    eta = float(before["eta"] if before else torch.as_tensor(group["lr"]).to(after["eta"].dtype))
    return LinearStep(
        lr=eta,
        grad_scale=_sign(group),
        weight_decay=float(group["weight_decay"]),
        decoupled_decay=float(group["lambd"]) * eta,
    )


def _rprop(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    size = after["prev"].abs()  # of the gradient, and 0 where its sign changed and the step was left out
    return LinearStep(lr=torch.where(size > 0, after["step_size"] / size, 0.0), grad_scale=_sign(group))


def _adafactor(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, count = _option(group, "lr"), float(after["step"])
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(p.dtype).eps if eps1 is None else float(eps1)
    if p.ndim > 1:
        row, column = after["row_var"], after["col_var"]
        V = row @ column / row.mean(dim=-2, keepdim=True).clamp(min=eps1)
    else:
        V = after["variance"]
    inverse = V.clamp(min=eps1 * eps1).rsqrt()
    gradient = torch.zeros_like(p) if p.grad is None else p.grad
    alpha = max(float(eps2), _root_mean_square(before[WEIGHTS])) * min(lr, count**-0.5)
    clipping = max(1.0, _root_mean_square(inverse * gradient) / float(group["d"]))
    return LinearStep(lr=float(alpha / clipping) * inverse, grad_scale=_sign(group), decoupled_decay=_decoupled(group))


def _root_mean_square(value: Tensor) -> float:
    return float(value.norm(2)) / math.sqrt(value.numel())


def _muon(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    mu, nesterov = float(group["momentum"]), bool(group["nesterov"])
    gradient = torch.zeros_like(p) if p.grad is None else p.grad
    U = gradient.lerp(after["momentum_buffer"], mu) if nesterov else after["momentum_buffer"]
    Q = orthogonalising_matrix(U, group["ns_coefficients"], int(group["ns_steps"]), float(group["eps"]))
    rows, columns = p.shape
    rates = {"original": math.sqrt(max(1, rows / columns)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
    rate = float(_option(group, "lr") * rates.get(group["adjust_lr_fn"] or "original", 1.0))
    return LinearStep(
        lr=rate * (1 - mu) if nesterov else 0.0,
        momentum_lr=rate * mu if nesterov else rate,
        beta=mu if before else 0.0,
        one_minus_dampening=1 - mu,
        decoupled_decay=_decoupled(group),
        left=None if rows > columns else Q,
        right=Q if rows > columns else None,
    )


def orthogonalising_matrix(U: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the matrix Q that Muon's Newton-Schulz iteration multiplies an update U with, on its shorter side.

    The iteration X <- (a I + b A + c A A) X with A = X X^T is a product of matrices on one side of U / |U|.

    Args:
        U: The update, (rows, columns).
        coefficients: a, b and c.
        steps: Number of iterations.
        eps: Smallest norm that U is divided by.
    """
    a, b, c = coefficients
    X = U.T if U.shape[0] > U.shape[1] else U
    norm = X.norm().clamp(min=eps)
    X, identity = X / norm, torch.eye(len(X), dtype=X.dtype, device=X.device)
    Q: Tensor = identity / norm
    for _ in range(steps):
        A = X @ X.T
        polynomial = a * identity + b * A + c * A @ A
        X, Q = polynomial @ X, polynomial @ Q
    return Q.T if U.shape[0] > U.shape[1] else Q


def _of_torch(named: Mapping[str, Callable[..., LinearStep] | UpdateRule]) -> dict[type[Optimizer], UpdateRule]:
    """Return the rules of the optimizers that the installed torch has."""
    return {
        getattr(optim, name): rule if isinstance(rule, UpdateRule) else UpdateRule(name, rule)
        for name, rule in named.items()
        if hasattr(optim, name)
    }


RULES = _of_torch(
    {
        "SGD": _sgd,
        "Adam": _adam,
        "AdamW": _adamw,
        "RMSprop": _rmsprop,
        "Adagrad": _adagrad,
        "Adadelta": UpdateRule("Adadelta", _adadelta, ("acc_delta",)),
        "Adafactor": UpdateRule("Adafactor", _adafactor, (WEIGHTS,)),
        "Adamax": _adamax,
        "ASGD": UpdateRule("ASGD", _asgd, ("eta",)),
        "NAdam": _nadam,
        "RAdam": _radam,
        "Rprop": _rprop,
        "SparseAdam": _sparse_adam,
        "Muon": UpdateRule("Muon", _muon, unexplained=0.5),
    }
)
REFUSED: dict[type[Optimizer], str] = {
    optim.LBFGS: (
        "the optimizer must take one gradient a step: LBFGS evaluates the loss several times within a step, at weights "
        "that are not recorded, and its step is not linear in the gradients. Use another optimizer of torch.optim for "
        "the steps that are recorded."
    ),
}


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
