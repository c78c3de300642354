"""The update rules of torch's optimizers that take one gradient per step, and of several optimizers on one network.

Each rule reads the coefficients of a `LinearStep` from the optimizer's options and its state before and after the step.
Values that an optimizer derives from the gradients themselves (second moments, signs, an orthogonalising matrix) are
held as recorded: the step is linear in the gradients with these numbers. Some coefficients are proportional to a scale
such as 1 / (sqrt(v) + eps), where v is a moving average of squares. `PRECONDITIONERS` contains the scales that are
computed entry by entry, as functions of the optimizer's state and of

    h = grad_scale * g + weight_decay * w,

so that a coefficient for other gradients is the recorded one times the ratio of both scales. Learning rates and their
schedules are common factors and cancel.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from epk_gp.optimizers import library_rules
from epk_gp.optimizers.library_rules import NoOptimizer, orthogonalising_matrix
from epk_gp.optimizers.update_rules import GRADIENT, OPTIONS, WEIGHTS, LinearStep, Options, UpdateRule

Memory = tuple[Tensor, ...]
_BLOCK = 1 << 16  # entries that are processed together while they are in the processor's cache


def _count(group: Options, state: Options) -> Any:
    """Return the number of the step, from 1 on, as torch computes it: a float32 tensor if it is capturable."""
    return state["step"] if group.get("capturable", False) else float(state["step"])


def _as_computed(group: Options, value: Any) -> Any:
    """Return an option as torch uses it: a tensor stays a tensor, with its rounding, except in fused kernels."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if group.get("fused", False) else value.detach().squeeze()


def _step(group: Options, **coefficients: Any) -> LinearStep:
    """Add the common coefficients of all optimizers: the sign of the gradient, and the decay of the weights."""
    decay = group.get("weight_decay", 0.0)
    if group.get("decoupled_weight_decay", group.get("weight_decouple", False)):  # times 1 - lr * weight_decay
        shrunk = 1 - float(1 - _as_computed(group, group["lr"]) * _as_computed(group, decay))
        coefficients = {"decoupled_decay": shrunk} | coefficients
    else:
        coefficients = {"weight_decay": float(decay)} | coefficients
    return LinearStep(grad_scale=-1.0 if group.get("maximize", False) else 1.0, **coefficients)


def _mean(group: Options, before: Options) -> dict[str, Any]:
    """Return the coefficients of a moving average of gradients."""
    beta1 = float(group["betas"][0])
    return {"beta": beta1 if before else 0.0, "one_minus_dampening": 1 - beta1}


def _sgd(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, mu, is_nesterov = float(group["lr"]), float(group.get("momentum", 0.0)), group.get("nesterov", False)
    if mu == 0:
        return _step(group, lr=lr, beta=1.0)
    has_buffer = bool(before.keys() - {GRADIENT})  # torch initialises it with the gradient itself
    dampening = float(group.get("dampening", 0.0)) if has_buffer else 0.0
    buffer = {"beta": mu if has_buffer else 0.0, "one_minus_dampening": 1.0 - dampening}
    return _step(group, lr=lr if is_nesterov else 0.0, momentum_lr=lr * mu if is_nesterov else lr, **buffer)


def _adam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    (beta1, beta2), count = (_as_computed(group, beta) for beta in group["betas"]), _count(group, after)
    v = after["max_exp_avg_sq"] if group["amsgrad"] else after["exp_avg_sq"]
    lr, left, root = _as_computed(group, group["lr"]), 1 - beta1**count, (1 - beta2**count) ** 0.5
    eps, is_capturable = float(group["eps"]), group.get("capturable", False)
    if is_capturable and (group["foreach"] or (group["foreach"] is None and p.is_cuda and not group["fused"])):
        momentum_lr = float(1 / (left / lr)) / (v.sqrt() / float(root) + eps)
    elif is_capturable:  # torch multiplies float32 numbers first
        momentum_lr = 1 / (v.sqrt() / float(root * (lr / left)) + float(eps / (lr / left)))
    else:
        momentum_lr = torch.empty_like(v, memory_format=torch.contiguous_format)
        for own, memory in zip(v.reshape(-1).split(_BLOCK), momentum_lr.view(-1).split(_BLOCK), strict=True):
            torch.sqrt(own, out=memory).div_(float(root)).add_(eps).reciprocal_().mul_(float(lr / left))
    return _step(group, momentum_lr=momentum_lr, **_mean(group, before))


def _adamw(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    return _adam(p, {**group, "decoupled_weight_decay": True}, before, after)


def _adamax(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    rate = float(_as_computed(group, group["lr"]) / (1 - float(group["betas"][0]) ** _count(group, after)))
    return _step(group, momentum_lr=rate / after["exp_inf"], **_mean(group, before))


def _nadam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, decay = _as_computed(group, group["lr"]), float(group["momentum_decay"])
    beta1, beta2 = map(float, group["betas"])
    count, product = _count(group, after), float(after["mu_product"])  # product of mu_1 .. mu_t
    mu, mu_next = (float(beta1 * (1 - 0.5 * 0.96 ** (n * decay))) for n in (count, count + 1))
    denominator = (after["exp_avg_sq"] / float(1 - beta2**count)).sqrt() + float(group["eps"])
    rates = {"lr": lr * (1 - mu) / (1 - product), "momentum_lr": lr * mu_next / (1 - product * mu_next)}
    return _step(group, **{name: float(rate) / denominator for name, rate in rates.items()}, **_mean(group, before))


def _radam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    beta1, beta2 = map(float, group["betas"])
    count, rho_inf = _count(group, after), 2 / (1 - beta2) - 1
    correction = 1 - beta2**count
    rho = float(rho_inf - 2 * count * beta2**count / correction)
    momentum_lr: float | Tensor = float(group["lr"]) / float(1 - beta1**count)
    if rho > 5:  # before that, torch uses the momentum unscaled
        rectified = ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5
        scale = rectified * float(correction**0.5)
        momentum_lr = momentum_lr * scale / (after["exp_avg_sq"].sqrt() + float(group["eps"]))
    return _step(group, momentum_lr=momentum_lr, **_mean(group, before))


def _sparse_adam(p: Any, group: Options, before: Options, after: Options) -> LinearStep:
    """Adam on the entries of the sparse gradient; the buffers of other entries stay unchanged."""
    beta1, beta2 = map(float, group["betas"])
    count, seen = float(after["step"]), torch.zeros(p.shape, dtype=torch.bool, device=p.device)
    seen[tuple(p.grad.coalesce().indices())] = True
    rate = float(_as_computed(group, group["lr"]) * (1 - beta2**count) ** 0.5 / (1 - beta1**count))
    moving = {"momentum_lr": rate / (after["exp_avg_sq"].sqrt() + float(group["eps"])), **_mean(group, before)}
    one = torch.ones_like(after["exp_avg"])
    return _step(group, **{key: torch.where(seen, one * value, float(key == "beta")) for key, value in moving.items()})


def _rmsprop(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr, mu, v = float(group["lr"]), float(group["momentum"]), after["square_avg"]
    if group["centered"]:
        v = v.addcmul(after["grad_avg"], after["grad_avg"], value=-1)
    inverse, beta = 1 / (v.sqrt() + float(group["eps"])), mu if before else 0.0
    if mu > 0:
        return _step(group, momentum_lr=lr, beta=beta, one_minus_dampening=inverse)
    return _step(group, lr=lr * inverse, beta=beta)


def _adagrad(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    lr = float(group["lr"]) / (1 + (float(after["step"]) - 1) * float(group["lr_decay"]))
    return _step(group, lr=lr / (after["sum"].sqrt() + float(group["eps"])))


def _adadelta(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    eps, squares = float(group["eps"]), after["square_avg"]
    deltas = before.get("acc_delta", torch.zeros_like(squares))
    return _step(group, lr=float(group["lr"]) * (deltas + eps).sqrt() / (squares + eps).sqrt())


def _asgd(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    # torch keeps the step size eta in float32; the value after a step is used in the next step
    eta = float(before["eta"] if before else torch.as_tensor(group["lr"]).to(after["eta"].dtype))
    return _step(group, lr=eta, decoupled_decay=float(group["lambd"]) * eta)


def _rprop(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    size = after["prev"].abs()  # size of the gradient; 0 where its sign changed and the step was skipped
    return _step(group, lr=torch.where(size > 0, after["step_size"] / size, 0.0))


def _adafactor(p: Any, group: Options, before: Options, after: Options) -> LinearStep:
    def root_mean_square(value: Tensor) -> float:
        return float(value.norm(2)) / math.sqrt(value.numel())

    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(p.dtype).eps if eps1 is None else float(eps1)
    if p.ndim > 1:
        row, column = after["row_var"], after["col_var"]
        V = row @ column / row.mean(dim=-2, keepdim=True).clamp(min=eps1)
    else:
        V = after["variance"]
    inverse = V.clamp(min=eps1 * eps1).rsqrt()
    rate = min(_as_computed(group, group["lr"]), float(after["step"]) ** -0.5)
    alpha = max(float(eps2), root_mean_square(before[WEIGHTS])) * rate
    clipping = max(1.0, root_mean_square(inverse * p.grad) / float(group["d"]))
    return _step({**group, "decoupled_weight_decay": True}, lr=float(alpha / clipping) * inverse)


def _muon(p: Any, group: Options, before: Options, after: Options) -> LinearStep:
    mu, nesterov = float(group["momentum"]), bool(group["nesterov"])
    U = p.grad.lerp(after["momentum_buffer"], mu) if nesterov else after["momentum_buffer"]
    Q = orthogonalising_matrix(U, group["ns_coefficients"], int(group["ns_steps"]), float(group["eps"]))
    rows, columns = p.shape
    rates = {"original": math.sqrt(max(1, rows / columns)), "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
    rate = float(_as_computed(group, group["lr"]) * rates.get(group["adjust_lr_fn"] or "original", 1.0))
    return _step(
        {**group, "decoupled_weight_decay": True},
        lr=rate * (1 - mu) if nesterov else 0.0,
        momentum_lr=rate * mu if nesterov else rate,
        beta=mu if before else 0.0,
        one_minus_dampening=1 - mu,
        **{"right" if rows > columns else "left": Q},
    )


def _muon_of_library(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """Muon of `pytorch_optimizer`: parameters of any dimension, and groups that use Adam."""
    if not group["use_muon"]:
        return _adamw(p, {**group, "amsgrad": False}, before, {**after, "step": group["step"]})
    shape, buffer = (p.shape[0], p.numel() // p.shape[0]), after["momentum_buffer"]
    own: dict[str, Any] = {"ns_coefficients": group["ns_coeffs"][0], "eps": 1e-7}
    own |= {"adjust_lr_fn": "match_rms_adamw" if group["use_adjusted_lr"] else None}
    seen: Any = SimpleNamespace(grad=before[GRADIENT].reshape(shape), shape=shape)
    return _muon(seen, {**group, **own}, before, {"momentum_buffer": buffer.reshape(shape)})


_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
GRADIENT_DESCENT = UpdateRule("gradient descent", lambda p, group, *_: LinearStep(lr=float(group["lr"]), beta=1.0))
RULES: dict[type[Optimizer], UpdateRule] = {NoOptimizer: GRADIENT_DESCENT} | {
    getattr(optim, rule.name): rule
    for rule in (
        UpdateRule("SGD", _sgd, of_entries=()),
        UpdateRule("Adam", _adam, of_entries=_MOMENTS),
        UpdateRule("AdamW", _adamw, of_entries=_MOMENTS),
        UpdateRule("RMSprop", _rmsprop, of_entries=("square_avg", "grad_avg")),
        UpdateRule("Adagrad", _adagrad, of_entries=("sum",)),
        UpdateRule("Adadelta", _adadelta, ("acc_delta",)),
        UpdateRule("Adafactor", _adafactor, (WEIGHTS,)),
        UpdateRule("Adamax", _adamax, of_entries=("exp_inf",)),
        UpdateRule("ASGD", _asgd, ("eta",)),
        UpdateRule("NAdam", _nadam, of_entries=_MOMENTS),
        UpdateRule("RAdam", _radam, of_entries=_MOMENTS),
        UpdateRule("Rprop", _rprop),
        UpdateRule("SparseAdam", _sparse_adam),
        UpdateRule("Muon", _muon, unexplained=0.5),
    )
    if hasattr(optim, rule.name)  # the installed torch may be older
}
_SGD_OPTIONS = {*signature(optim.SGD).parameters, "initial_lr", "param_names"}
_OF_LIBRARIES = library_rules.LIBRARY_RULES | {
    "Muon": UpdateRule("Muon", _muon_of_library, (GRADIENT,), unexplained=0.5),
    "SGDW": UpdateRule("SGDW", _sgd, (GRADIENT,)),
}


@dataclass(frozen=True)
class Preconditioner:
    """The scale of an optimizer's coefficients.

    Attributes:
        scale: Maps the optimizer's state before the step, h, the options and the number of the step (from 1 on) to the
            scale and the state after the step, entry by entry. The number of the step is one number, or one per weight.
        initial: Returns the initial value of each stored tensor.
        fields: Returns the names of the coefficients that are proportional to the scale.
    """

    scale: Callable[[Memory, Tensor, Options, Tensor], tuple[Tensor, Memory]]
    initial: Callable[[Options], tuple[float, ...]] = lambda options: (0.0,)
    fields: Callable[[Options], tuple[str, ...]] = lambda options: ("lr", "momentum_lr")


def _sqrt(v: Tensor) -> Tensor:
    """Return the root, with derivative 0 at 0, where all gradients so far are 0."""
    is_positive = v > 0
    return torch.where(is_positive, torch.where(is_positive, v, 1.0).sqrt(), 0.0)


def _average(kept: Tensor, value: Tensor, decay: float) -> Tensor:
    return decay * kept + (1 - decay) * value


def _adam_scale(memory: Memory, h: Tensor, options: Options, count: Tensor) -> tuple[Tensor, Memory]:
    v = _average(memory[0], h * h, options["betas"][1])
    used, memory = v, (v, *memory[1:])
    if options.get("amsgrad", False):  # without it, the optimizer leaves the maximum unchanged
        used = torch.maximum(memory[1], v)
        memory = (v, used)
    return 1 / (_sqrt(used) / (1 - options["betas"][1] ** count).sqrt() + options["eps"]), memory


def _radam_scale(memory: Memory, h: Tensor, options: Options, count: Tensor) -> tuple[Tensor, Memory]:
    beta2 = options["betas"][1]
    v = _average(memory[0], h * h, beta2)
    rho = 2 / (1 - beta2) - 1 - 2 * count * beta2**count / (1 - beta2**count)
    return torch.where(rho > 5, 1 / (_sqrt(v) + options["eps"]), 1.0), (v,)


def _adamax_scale(memory: Memory, h: Tensor, options: Options, *_: Any) -> tuple[Tensor, Memory]:
    u = torch.maximum(options["betas"][1] * memory[0], h.abs() + options["eps"])
    return 1 / u, (u,)


def _rmsprop_scale(memory: Memory, h: Tensor, options: Options, *_: Any) -> tuple[Tensor, Memory]:
    used = v = _average(memory[0], h * h, options["alpha"])
    mean = memory[1]
    if options["centered"]:
        mean = _average(mean, h, options["alpha"])
        used = (v - mean * mean).clamp(min=0)
    return 1 / (_sqrt(used) + options["eps"]), (v, mean)


def _adagrad_scale(memory: Memory, h: Tensor, options: Options, *_: Any) -> tuple[Tensor, Memory]:
    total = memory[0] + h * h
    return 1 / (_sqrt(total) + options["eps"]), (total,)


def _adadelta_scale(memory: Memory, h: Tensor, options: Options, *_: Any) -> tuple[Tensor, Memory]:
    squares, deltas = memory
    squares = _average(squares, h * h, options["rho"])
    scale = ((deltas + options["eps"]) / (squares + options["eps"])).sqrt()
    return scale, (squares, _average(deltas, (scale * h) ** 2, options["rho"]))


_ADAM = Preconditioner(_adam_scale, lambda options: (0.0, 0.0) if options.get("amsgrad", False) else (0.0,))

PRECONDITIONERS: dict[str, Preconditioner] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam"), _ADAM),
    "RAdam": Preconditioner(_radam_scale),
    "Adamax": Preconditioner(_adamax_scale),
    "RMSprop": Preconditioner(
        _rmsprop_scale,
        lambda options: (0.0, 0.0),
        # with momentum the optimizer divides the gradient before it enters the buffer
        lambda options: ("one_minus_dampening",) if options["momentum"] > 0 else ("lr",),
    ),
    "Adagrad": Preconditioner(_adagrad_scale, lambda options: (float(options["initial_accumulator_value"]),)),
    "Adadelta": Preconditioner(_adadelta_scale, lambda options: (0.0, 0.0)),
}
# The options that scales and their fields depend on; for the betas only the second.
_OF_SCALES = ("eps", "betas", "amsgrad", "alpha", "centered", "momentum", "rho", "initial_accumulator_value")
# Options whose coefficients do not depend on the gradients.
LINEAR_RULES = frozenset({"SGD", "ASGD", GRADIENT_DESCENT.name, "SGDW", "SGDScheduleFree", "ScheduleFreeSGD"})


def fits_scale(rule: str, options: Options) -> bool:
    """Return whether a rule's scale can be computed from options stored in a file."""
    if rule not in PRECONDITIONERS:
        return True
    preconditioner, one = PRECONDITIONERS[rule], torch.ones(1, dtype=torch.float64)
    try:
        memory = tuple(value * one for value in preconditioner.initial(options))
        scale, _ = preconditioner.scale(memory, one, options, one)
        return bool(preconditioner.fields(options) and scale.isfinite().all())
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False


Optimizers = Optimizer | Sequence[Optimizer]
Rules = UpdateRule | Sequence[UpdateRule | None] | None
GivenRules = Sequence[tuple[UpdateRule | None, Optimizer]]


@dataclass(frozen=True)
class OptimizerGroup:
    """A parameter group of an optimizer when recording began, or from a later step on at which it changed.

    Attributes:
        rule: Name of the update rule, one of torch's optimizers; empty for a user's own rule.
        names: Names of its parameters.
        options: Its options: numbers, texts and sequences of them. Learning rates may change during a run. For a group
            that holds from a later step on, only the options of its preconditioner.
    """

    rule: str
    names: tuple[str, ...]
    options: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the group for a run's header."""
        return {"rule": self.rule, "names": list(self.names), "options": dict(self.options)}

    def of_scale(self) -> "OptimizerGroup":
        """Return the group with only those options that its preconditioner depends on."""
        present = [name for name in _OF_SCALES if name in self.options and self.rule in PRECONDITIONERS]
        held = {name: [0.0, self.options[name][1]] if name == "betas" else self.options[name] for name in present}
        return OptimizerGroup(self.rule, self.names, held)

    @classmethod
    def from_json(cls, group: Mapping[str, Any]) -> "OptimizerGroup":
        """Return the group that a run's header describes."""
        return cls(group["rule"], tuple(group["names"]), group["options"])


def given_rules(optimizers: Optimizers, rules: Rules) -> GivenRules:
    """Return each optimizer with the update rule that the user passed for it.

    Raises:
        TypeError: An entry is not an update rule.
        ValueError: There is not one entry per optimizer.
    """
    several = as_optimizers(optimizers)
    given: tuple[Any, ...] = tuple(rules) if isinstance(rules, list | tuple) else (rules,) * len(several)
    if strange := [type(rule).__name__ for rule in given if not isinstance(rule, UpdateRule | None)]:
        raise TypeError(f"update_rule must be an UpdateRule, or one or None for each optimizer: got {strange[0]}.")
    if len(given) != len(several):
        raise ValueError(f"update_rule must have one entry per optimizer: got {len(given)} for {len(several)}.")
    return list(zip(given, several, strict=True))


def groups_of(optimizer: Optimizer, given: UpdateRule | None, names: Mapping[int, str]) -> tuple[OptimizerGroup, ...]:
    """Return the present parameter groups of one optimizer.

    `given` is the user's update rule for it; `names` has the network's parameters by their `id`.
    """
    rule = _known_rule(optimizer).name if given is None else ""
    groups = []
    for group in optimizer.param_groups:
        plain = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append(OptimizerGroup(rule, tuple(names[id(p)] for p in group["params"] if id(p) in names), plain))
    return tuple(groups)


def _plain(option: Any) -> Any:
    """Return an option with tensors replaced by numbers; None if it is not a number, text or sequence of them."""
    if isinstance(option, tuple | list):
        return [_plain(value) for value in option]
    if isinstance(option, Tensor):
        return option.item() if option.numel() == 1 else None
    return option if isinstance(option, bool | int | float | str) else None


def as_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple, without wrappers that have no state.

    Raises:
        TypeError: The object is neither an optimizer nor a sequence of optimizers.
        ValueError: There is none, or two of them hold the same parameter.
    """
    several = tuple(map(_unwrapped, optimizers if isinstance(optimizers, list | tuple) else (optimizers,)))
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer: got {type(optimizer).__name__}.")
    if not several:
        raise ValueError("there must be at least one optimizer: got an empty sequence.")
    owners: dict[int, Optimizer] = {}
    for optimizer in several:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(id(p), optimizer) is not optimizer:
                raise ValueError(f"every parameter must belong to one optimizer: two hold one of {tuple(p.shape)}.")
    return several


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper without its own state, such as Accelerate's, Lightning's or SAM."""
    for name in ("optimizer", "base_optimizer"):
        inner, state = getattr(optimizer, name, None), getattr(optimizer, "state", None)
        if not isinstance(inner, Optimizer) or optimizer.param_groups is not inner.param_groups:
            continue
        # SAM stores the weights before its ascent step
        if not state or state is inner.state or {key for held in state.values() for key in held} <= {"old_p", "e_w"}:
            return _unwrapped(inner)
    return optimizer


def rule_for(optimizers: Optimizers, given: Rules = None) -> UpdateRule:
    """Return the update rule of an optimizer, or the joint rule of several optimizers of one network.

    A rule is given for an optimizer that is not one of torch's; for several optimizers a sequence with one entry each,
    None for torch's own.

    Raises:
        TypeError: An object is not an optimizer.
        ValueError: The update rule of an optimizer is not known, or the optimizer cannot be covered.
    """
    rules = [(_known_rule(o) if rule is None else rule, o) for rule, o in given_rules(optimizers, given)]
    if len(rules) == 1:
        return rules[0][0]

    def coefficients(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
        rule = next(rule for rule, optimizer in rules if any(group is own for own in optimizer.param_groups))
        # entries that another rule needs would make a first step look like a later one
        added = {WEIGHTS, GRADIENT, OPTIONS} - {*rule.needs_before}
        return rule.coefficients(p, group, {name: before[name] for name in before.keys() - added}, after)

    return UpdateRule(
        name=" + ".join(dict.fromkeys(rule.name for rule, _ in rules)),
        coefficients=coefficients,
        needs_before=tuple(dict.fromkeys(name for rule, _ in rules for name in rule.needs_before)),
        unexplained=max(rule.unexplained for rule, _ in rules),
        refusal=next((rule.refusal for rule, _ in rules if rule.refusal), ""),
    )


def _known_rule(optimizer: Optimizer) -> UpdateRule:
    """Return the rule of a class, of a base class, or of a library's class of this name; SGD's if options allow it."""
    inner = getattr(optimizer, "optimizer", None)
    for kind in type(optimizer).__mro__:
        if kind in RULES:
            return RULES[kind]
        if kind.__name__ == "Lookahead" and isinstance(inner, Optimizer):
            return library_rules.of_class(library_rules.lookahead(_known_rule(inner)), optimizer)
        if kind.__name__ in _OF_LIBRARIES:
            return library_rules.of_class(_OF_LIBRARIES[kind.__name__], optimizer)
    if isinstance(optimizer, optim.LBFGS):
        raise ValueError(
            "the optimizer must take one gradient a step: LBFGS evaluates the loss several times within a step, and "
            "its step is not linear in the gradients. Use another optimizer for the steps that are recorded."
        )
    known = ", ".join(sorted({*_OF_LIBRARIES, "Lookahead", *(kind.__name__ for kind in RULES)} - {"NoOptimizer"}))
    may_be_sgd = all("lr" in group and group.keys() <= _SGD_OPTIONS for group in optimizer.param_groups)
    kind, other = type(optimizer), ", nor is it that of SGD, whose options it has" if may_be_sgd else ""
    refusal = (
        f"the optimizer's update rule must be known: that of {kind.__module__}.{kind.__name__} is not{other}. Known "
        f"are {known}. Where its step is linear in the gradients, state it, with its own options and state:\n"
        f"{library_rules.TEMPLATE}"
    )
    if may_be_sgd:
        return replace(RULES[optim.SGD], refusal=refusal)
    raise ValueError(refusal)


def state_of(optimizer: Optimizer, p: nn.Parameter) -> Options:
    """Return an optimizer's state of a parameter, including that of a wrapped optimizer."""
    own: Options = optimizer.state.get(p, {})
    inner = vars(optimizer).get("optimizer")
    return {**inner.state.get(p, {}), **own} if isinstance(inner, Optimizer) else own


def states_before(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], needs_before: Collection[str]
) -> Mapping[str, Options]:
    """Return an optimizer's state of each parameter before a step, for `UpdateRule.coefficients`.

    Args:
        optimizer: The optimizer that will make the step.
        parameters: The parameters by name.
        needs_before: Names of the entries to copy (`UpdateRule.needs_before`).

    Returns:
        Its state by the parameter's name: a copy of each needed entry, and None for the others; empty if the optimizer
        has no state of the parameter yet.
    """
    result: dict[str, dict[str, Any]] = {}
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]} if needs_before else {}
    for name, parameter in parameters.items():
        state = state_of(optimizer, parameter)
        held = result[name] = dict.fromkeys(() if all(value is None for value in state.values()) else state)
        for key in held.keys() & {*needs_before}:
            held[key] = state[key].detach().clone() if isinstance(state[key], Tensor) else state[key]
        if GRADIENT in needs_before and parameter.grad is not None:
            held[GRADIENT] = parameter.grad.detach().clone()
        if OPTIONS in needs_before:
            held[OPTIONS] = dict(groups[id(parameter)])
    return result


def momentum_before(
    optimizers: Optimizers, rules: Rules, parameters: Sequence[nn.Parameter]
) -> Float[Tensor, " B"] | None:
    """Return the momentum buffers before the recording, second buffers after the first; None for new optimizers.

    For an optimizer that is not new, second moments and similar entries also contain earlier gradients.
    """
    found, is_new = list[tuple[UpdateRule, nn.Parameter, Options, Options]](), True
    for given, optimizer in given_rules(optimizers, rules):
        rule = _known_rule(optimizer) if given is None else given
        for group in optimizer.param_groups:
            states = [(p, state) for p in group["params"] if (state := state_of(optimizer, p))]
            entries = [entry for _, state in states for entry in state.items()]
            is_new &= not any(_holds_gradients(given is None, group, *entry) for entry in entries)
            found += [(rule, p, group, state) for p, state in states]
    if is_new:
        return None
    held = {id(p): rule.buffers(p, group, state) for rule, p, group, state in found}
    several = [(*held.get(id(p), ()), *[torch.zeros_like(p.detach())] * 2)[:2] for p in parameters]
    count = 2 if any(len(buffers) > 1 for buffers in held.values()) else 1
    return torch.cat([buffers[k].detach().reshape(-1) for k in range(count) for buffers in several])


def _holds_gradients(is_known: bool, group: Options, name: str, value: Any) -> bool:
    """Return whether an entry of an optimizer's state differs from its initial value."""
    is_known = is_known or name in ("momentum_buffer", "exp_avg")
    if not is_known or name in ("eta", "step_size", "slow_params") or not isinstance(value, Tensor | int | float):
        return False  # a user's own optimizer, or a value that follows from options and weights
    fresh = {"sum": group.get("initial_accumulator_value", 0.0), "mu": 1.0, "mu_product": 1.0}.get(name, 0.0)
    return bool((torch.as_tensor(value) != fresh).any())


def learning_rate(optimizers: Optimizers) -> float:
    """Return the learning rate of the first group of the first optimizer, the kernel's weight eps_s of the step.

    Raises:
        ValueError: The learning rate of a group is missing, negative or not finite.
    """
    groups = [group for optimizer in as_optimizers(optimizers) for group in optimizer.param_groups]
    if any(group.get("lr") is None for group in groups):
        advice = "Add it; to Adafactor pass lr=1e-3, relative_step=False, warmup_init=False."
        raise ValueError(f"each parameter group must have its learning rate as the option 'lr', a number. {advice}")
    rates = [float(group["lr"]) for group in groups]
    if wrong := [rate for rate in rates if not 0 <= rate < float("inf")]:
        raise ValueError(f"the learning rate must be finite and not negative: got {wrong[0]}.")
    return rates[0]
