"""Update rules of optimizers outside torch, as implemented by `schedulefree` and `pytorch_optimizer`.

They are candidates, found by the name of a class. Every recorded step is compared with its rule: a class of the same
name with another algorithm raises an error and never gives a wrong result. timm's and other versions of the same
algorithm have the same rule if options and state have these names.

Some of these optimizers write into gradients, so all rules here read the gradient before the step. Options that are
attributes of such an optimizer (`maximize`, `eps1`) are listed among those of its groups.

**Schedule-free** optimizers (Defazio et al. 2024) evaluate gradients at y, between a base sequence z and its average x:

    z' = z - r g,    x' = (1 - c) x + c z',    y' = (1 - beta) z' + beta x'

The weights that the loop trains, and that are recorded, are y. With the buffer u = z - y the step is linear in u and g:

    u' = (1 - c) u - (r + k) g,    y' - y = c u + k g,    k = r (beta (1 - c) - 1)

x, the weights that `optimizer.eval()` sets, is an average of the recorded weights: eliminating z gives

    x' = (1 - a) x + a y',    a = c / (1 - beta (1 - c))

so `epk_gp.core.states.schedule_free_average` explains it.
"""

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.optimizers.update_rules import GRADIENT, OPTIONS, WEIGHTS, LinearStep, Options, SecondBuffer, UpdateRule


def _step(group: Options, rate: float | Tensor, **coefficients: Any) -> LinearStep:
    """Add the sign of the gradient, and the decay of the weights: decoupled, with a rate, unless it is coupled."""
    decay, is_decoupled = float(group.get("weight_decay", 0.0)), group.get("weight_decouple", True)
    factor = float(rate) if is_decoupled and not group.get("fixed_decay") else 1.0
    added = {"decoupled_decay" if is_decoupled else "weight_decay": decay * factor}
    return LinearStep(**added | coefficients, grad_scale=_sign(group))


def _sign(group: Options) -> float:
    return -1.0 if group.get("maximize", False) else 1.0


def _mean(beta: float) -> dict[str, Any]:
    return {"beta": beta, "one_minus_dampening": 1 - beta}


def _h(group: Options, before: Options) -> Tensor:
    """Return the gradient in the optimizer's form, with its sign and the coupled decay."""
    g: Tensor = _sign(group) * before[GRADIENT]
    is_coupled = not group.get("weight_decouple", True) and group["weight_decay"]
    return g.add(before[WEIGHTS], alpha=group["weight_decay"]) if is_coupled else g


def _debiased(beta: float, count: float | int) -> float:
    return float(1 - beta**count)


def _rate_of_mean(group: Options) -> float:
    """Return the learning rate divided by the first moment's bias correction."""
    bias = 1.0 if group.get("adam_debias") else _debiased(float(group["betas"][0]), group["step"])
    return float(group["lr"]) / bias


def _lion(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """The sign of v = beta1 m + (1 - beta1) h is v / |v|, with |v| held; m = (m' - (1 - beta2) h) / beta2.

    Tiger takes the sign of m' itself.
    """
    beta1, beta2 = map(float, group["betas"] if "betas" in group else [group["beta"]] * 2)
    of_m, of_h = beta1 / beta2, 1 - beta1 / beta2
    v = (of_m * after["exp_avg"] + of_h * _h(group, before)).abs()
    scale = torch.where(v > 0, float(group["lr"]) / v, 0.0)
    return _step(group, group["lr"], momentum_lr=of_m * scale, lr=of_h and of_h * scale, **_mean(beta2))


def _adabelief(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    v = after["max_exp_avg_var" if group.get("ams_bound") else "exp_avg_var"]
    root = math.sqrt(_debiased(float(group["betas"][1]), group["step"]))
    scale = _rate_of_mean(group) / (v.sqrt() / root + float(group["eps"]))
    return _step(group, group["lr"], momentum_lr=scale, **_mean(float(group["betas"][0])))


def _qhadam(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    (nu1, nu2), h = map(float, group["nus"]), _h(group, before)
    weight = float(after["beta1_weight"].reciprocal().to(h.dtype))
    v = nu2 * after["exp_avg_sq"] + (1 - nu2) * h.square()
    scale = float(group["lr"]) / (v.sqrt() + float(group["eps"]))
    return _step(group, group["lr"], momentum_lr=nu1 * scale, lr=(1 - nu1) * scale, **_mean(1 - weight))


def _stable_adamw(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    beta1, count, v = float(group["betas"][0]), group["step"], after["exp_avg_sq"]
    beta = beta1 * _debiased(beta1, count - 1) / _debiased(beta1, count)
    ratio = _h(group, before).square() / v.clamp(min=float(group["eps"]) ** 2)
    rate = float(group["lr"]) / float(ratio.mean().sqrt().clamp(min=1.0))
    return _step(group, rate, momentum_lr=rate / (v.sqrt() + float(group["eps"])), **_mean(beta))


def _scale_in_place(p: nn.Parameter, group: Options, before: Options) -> float:
    """Return the factor of the gradient if the optimizer clips the norm of all gradients in place."""
    g, sign = before[GRADIENT], _sign(group)
    is_clipped = group["max_grad_norm"] and p.grad is not None and bool(g.any())
    return sign * abs(float((p.grad * g).sum() / g.square().sum())) if is_clipped else sign


def _lamb(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    beta1, decay = float(group["betas"][0]), float(group["weight_decay"])
    rate = _rate_of_mean(group) * (1.0 if group["adam"] else float(after["trust_ratio"]))
    own = rate if not group["weight_decouple"] else 1.0 if group["fixed_decay"] else float(group["lr"])
    return LinearStep(
        momentum_lr=rate / (after["exp_avg_sq"].sqrt() + float(group["eps"])),
        beta=beta1,
        one_minus_dampening=1 - beta1 if group["grad_averaging"] else 1.0,
        grad_scale=_scale_in_place(p, group if group["pre_norm"] else {**group, "max_grad_norm": 0.0}, before),
        decoupled_decay=own * decay,
    )


def _prodigy(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """The estimated distance d from before the step scales the step's gradients."""
    (beta1, beta2), old = map(float, group["betas"]), before[OPTIONS]
    d, count = float(old["d"]), old["step"]
    bias = _debiased(beta1, count) / math.sqrt(_debiased(beta2, count)) if group["bias_correction"] else 1.0
    rate = d * float(group["lr"]) / bias
    momentum_lr = rate / (after["exp_avg_sq"].sqrt() + float(group["d"]) * float(group["eps"]))
    if not group["weight_decouple"]:  # the class adds a coupled decay to gradients that were already used
        group = {**group, "weight_decay": 0.0}
    return _step(group, rate, momentum_lr=momentum_lr, beta=beta1, one_minus_dampening=d * (1 - beta1))


def share_of_average(group: Options) -> float:
    """Return the share beta of the average in the weights of a schedule-free optimizer."""
    return float(group["betas"][0] if "betas" in group else group["momentum"])


def _share_of_base(group: Options) -> float:
    """Return the share c of the base sequence in the average after a schedule-free step."""
    count = group["k"] if "k" in group else group["step"]
    weight = count ** group["r"] * float(group["lr_max"]) ** group["weight_lr_power"]
    share = weight / float(group["weight_sum"]) if group["weight_sum"] else 0.0
    coupling = group.get("decoupling_c", 0)
    return min(1.0, share * (1 - float(group["betas"][0])) * coupling) if coupling > 0 else share


def _schedule_free(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    beta, c = share_of_average(group), _share_of_base(group)
    count, warmup = group["k"] if "k" in group else group["step"], group["warmup_steps"]
    rate = float(group["lr"]) * (count / warmup if count < warmup else 1.0)
    scale: float | Tensor = 1.0
    if "betas" in group:
        v, is_other = after["exp_avg_sq"] / _debiased(float(group["betas"][1]), count), "ams_bound" in group
        v = after["max_exp_avg_sq"] if group.get("ams_bound") else v
        scale = 1 / ((v + 1e-15 if is_other else v).sqrt() + float(group["eps"]))  # pytorch_optimizer adds 1e-15
    k = rate * (beta * (1 - c) - 1)
    of_u = c / (1 - c) if c < 1 else 0.0  # u is 0 if the average is the base sequence alone
    return LinearStep(
        lr=-(k + of_u * (rate + k)) * scale,
        momentum_lr=-of_u,
        beta=1 - c,
        one_minus_dampening=-(rate + k) * scale,
        grad_scale=_sign(group),
        weight_decay=float(group["weight_decay"]) / scale,
    )


def in_training_mode(optimizers: Sequence[Optimizer], weights: dict[int, Tensor]) -> dict[int, Tensor] | None:
    """Return weights, by the `id` of their parameter, in the form that schedule-free optimizers use in training.

    None if no optimizer is schedule-free.
    """
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    if not any("train_mode" in group for _, group in groups):
        return None
    for optimizer, group in groups:
        beta = share_of_average(group)
        for p in () if group.get("train_mode", True) else group["params"]:
            if "z" in optimizer.state.get(p, {}) and id(p) in weights:
                weights[id(p)] = weights[id(p)].lerp(optimizer.state[p]["z"].to(p), 1 - beta)
    return weights


def _lead(p: nn.Parameter, group: Options, state: Options) -> tuple[Tensor, ...]:
    if not group.get("train_mode", True):
        raise ValueError("a schedule-free optimizer must be in training mode: call optimizer.train() first.")
    return (state["z"] - p.detach(),)


def _inverse_root(state: Options, kind: str) -> Tensor:
    """Return the inverse root of a second moment that is stored as a product of rows and columns."""
    row, column = (state[f"exp_avg_{kind}_{side}"] for side in ("row", "col"))
    result: Tensor = (row / row.mean(dim=-1, keepdim=True)).rsqrt()[..., None] * column.rsqrt()[..., None, :]
    return result


def _came(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    is_factored, beta1, lr = "exp_avg_sq_row" in after, float(group["betas"][0]), float(group["lr"])
    inverse = _inverse_root(after, "sq") if is_factored else after["exp_avg_sq"].rsqrt()
    if group["ams_bound"]:
        inverse = (after["exp_avg_sq_hat"] / group["betas"][1]).rsqrt()
    clipping = max(1.0, float((inverse * _h(group, before)).square().mean().sqrt()) / group["clip_threshold"])
    buffer = {"beta": beta1, "one_minus_dampening": (1 - beta1) / clipping * inverse}
    return _step(group, lr, momentum_lr=lr * _inverse_root(after, "res") if is_factored else lr, **buffer)


def _adan(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """The moving average of differences of gradients is linear in h and in the sum n' = beta2 n + h.

    It is (1 - beta2) / beta2 (h - (1 - beta2) n'), where n starts so that the first difference is 0; or 2 h if the loss
    is maximised, because the class keeps the first gradient with the other sign.
    """
    (beta1, beta2, beta3), count, lr = map(float, group["betas"]), group["step"], float(group["lr"])
    decay, first = lr * float(group["weight_decay"]), (1 - 2 * beta2 * group.get("maximize", False)) / (1 - beta2)
    shrunk = decay if group["weight_decouple"] else decay / (1 + decay)
    scale = lr / (after["exp_avg_sq"].sqrt() / math.sqrt(_debiased(beta3, count)) + float(group["eps"]))
    scale = scale * (1.0 if group["weight_decouple"] else 1 - shrunk)
    of_difference = (1 - beta2) / _debiased(beta2, count) * scale
    return LinearStep(
        lr=of_difference,
        momentum_lr=scale / _debiased(beta1, count),
        grad_scale=_scale_in_place(p, group, before),
        decoupled_decay=shrunk,
        second=SecondBuffer((beta2 - 1) * of_difference, beta2, 1.0 if "previous_grad" in before else first),
        **_mean(beta1),
    )


def _adan_buffers(p: nn.Parameter, group: Options, state: Options) -> tuple[Tensor, ...]:
    beta2, h = float(group["betas"][1]), -state["previous_grad"]
    return state["exp_avg"], h + beta2 / (1 - beta2) * (h - state["exp_avg_diff"] / (1 - beta2))


def _ademamix(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    (beta1, beta2, beta3), count, until = map(float, group["betas"]), group["step"], group["t_alpha_beta3"]
    alpha, lr = float(group["alpha"]), float(group["lr"])
    if until is not None:
        share, (log1, log3) = count / until, map(math.log, (beta1, beta3))
        alpha = min(share * alpha, alpha)
        beta3 = min(math.exp(log1 * log3 / ((1 - share) * log3 + share * log1)), beta3)
    scale = lr / (after["exp_avg_sq"].sqrt() / math.sqrt(_debiased(beta2, count)) + float(group["eps"]))
    second = SecondBuffer(alpha * scale, beta3, 1 - beta3)
    return _step(group, lr, momentum_lr=scale / _debiased(beta1, count), second=second, **_mean(beta1))


def _soap(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """Adam in the basis of eigenvectors Q = Q_L, Q_R of the step: Q_L ((Q_L^T m' Q_R) / d) Q_R^T."""
    beta1, beta2 = map(float, group["betas"])
    count, lr = group["step"] - 1, float(group["lr"])
    if p.ndim > 2 or group["merge_dims"]:
        shape = "merge_dims=True" if group["merge_dims"] else f"a parameter of shape {tuple(p.shape)}"
        raise ValueError(
            f"SOAP must have matrices and vectors, as its steps turn each dimension by a matrix of its own: got "
            f"{shape}. Leave dimensions apart (merge_dims=False), and give other parameters another optimizer."
        )
    if count == 0:  # the first gradient only creates the basis
        return LinearStep(beta=1.0)
    h = _sign(group) * before[GRADIENT]
    left, right, *_ = *(Q if len(Q) else None for Q in before["Q"]), None
    turned = h if left is None else left.T @ h
    turned = turned if right is None else turned @ right
    v = before["exp_avg_sq"].lerp(turned.square(), 1 - beta2)
    rate = lr * (math.sqrt(_debiased(beta2, count)) / _debiased(beta1, count) if group["correct_bias"] else 1.0)
    decay = lr * float(group["weight_decay"])  # applied after the step
    scale = rate * (1 - decay) / (v.sqrt() + float(group["eps"]))
    inner = {"inner_left": None if left is None else left.T, "inner_right": right}
    outer = {"left": left, "right": None if right is None else right.T}
    return _step(group, lr, momentum_lr=scale, **_mean(beta1), **inner | outer, weight_decay=0.0, decoupled_decay=decay)


def lookahead(inner: UpdateRule) -> UpdateRule:
    """Return the rule of Lookahead over an optimizer: every k-th step ends between its weights and the slow ones.

    The second buffer n is minus the sum of the inner steps d since then: w - n are the slow weights. A step with a
    pull-back is d + (1 - alpha) n'.
    """

    def coefficients(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
        if group["pullback_momentum"] != "none":
            raise ValueError("Lookahead must leave the momentum as it is: got another pullback_momentum than 'none'.")
        own = {key: value for key, value in before.items() if key not in ("slow_params", OPTIONS)}
        step = inner.coefficients(p, group, own, after)
        if step.second is not None or any(Q is not None for Q in (step.left, step.right)):
            raise ValueError(f"Lookahead must be over an optimizer with one buffer and no matrices: got {inner.name}.")
        rate = float(group["alpha"]) - 1 if group["counter"] == 0 else 0.0
        is_begun = before[OPTIONS]["counter"] != 0
        second = SecondBuffer(rate, float(is_begun), step.lr, step.momentum_lr, step.decoupled_decay)
        return replace(step, second=second)

    def buffers(p: nn.Parameter, group: Options, state: Options) -> tuple[Tensor, ...]:
        (m,) = inner.buffers(p, group, state) or (torch.zeros_like(p),)
        return m, state["slow_params"] - p.detach()

    needed = (*inner.needs_before, OPTIONS)
    return UpdateRule(f"Lookahead({inner.name})", coefficients, needed, inner.unexplained, buffers)


def _adafactor(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
    """Adafactor of `transformers`, with or without momentum."""
    rate, gradient = group["lr"], before[GRADIENT]
    rate = float(rate * max(group["eps"][1], after["RMS"]) if group["scale_parameter"] else rate)
    inverse = _inverse_root(after, "sq") if p.ndim > 1 else after["exp_avg_sq"].rsqrt()
    size = float((inverse * gradient).norm(2)) / p.numel() ** 0.5
    scale, beta = rate / max(1.0, size / float(group["clip_threshold"])) * inverse, group["beta1"]
    if beta is None:
        return _step(group, rate, lr=scale)
    return _step(group, rate, momentum_lr=1.0, beta=beta, one_minus_dampening=(1 - beta) * scale)


_TABLE: tuple[tuple[Any, ...], ...] = (  # coefficients, names of classes, needed entries of the state before, buffers
    (_lion, "Lion Tiger", ()),
    (_adabelief, "AdaBelief", ()),
    (_qhadam, "QHAdam", ()),
    (_stable_adamw, "StableAdamW", ()),
    (_lamb, "Lamb LAMB", ()),
    (_prodigy, "Prodigy", (OPTIONS,)),
    (_schedule_free, "AdamWScheduleFree SGDScheduleFree ScheduleFreeAdamW ScheduleFreeSGD", (), _lead),
    (_came, "CAME", ()),
    (_adan, "Adan", (), _adan_buffers),
    (_ademamix, "AdEMAMix", (), lambda p, group, state: (state["exp_avg"], state["exp_avg_slow"])),
    (_soap, "SOAP", ("Q", "exp_avg_sq")),
    (_adafactor, "Adafactor", ()),
)
LIBRARY_RULES = {
    name: UpdateRule(name, coefficients, (GRADIENT, WEIGHTS, *needs), 0.0, *buffers)
    for coefficients, names, needs, *buffers in _TABLE
    for name in names.split()
}
# Options for which such a class makes other steps than its rule.
_OTHER_STEPS = ("rectify", "adanorm", "cautious", "use_gc", "stable_adamw", "normalize_gradient", "caution")

# Text shown when an unknown class is refused.
TEMPLATE = """
    from epk_gp.optimizers.update_rules import LinearStep, UpdateRule

    def coefficients(p, group, before, after):
        # h = grad + weight_decay * w;  m' = beta * m + one_minus_dampening * h
        # step = -(momentum_lr * m' + lr * h) - decoupled_decay * w
        scale = 1 / (after["exp_avg_sq"].sqrt() + group["eps"])  # or 1.0
        return LinearStep(momentum_lr=group["lr"] * scale, beta=group["beta"], one_minus_dampening=1 - group["beta"])

    rule = UpdateRule("mine", coefficients)
    recorder = epk.Recorder(net, optimizer, X, y, update_rule=rule)
"""


def of_class(rule: UpdateRule, optimizer: Optimizer) -> UpdateRule:
    """Return a library's rule for a class with its name; the class's attributes count as options."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    for option in _OTHER_STEPS:
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(f"{kind} must make the plain steps of {rule.name}: got {option}, which makes others.")

    def coefficients(p: nn.Parameter, group: Options, before: Options, after: Options) -> LinearStep:
        try:
            return rule.coefficients(p, ChainMap(dict(group), vars(optimizer)), before, after)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{kind} must have the options and the state of {rule.name}, which its name stands for: it lacks "
                f"{error}. State its rule: update_rule=epk_gp.optimizers.update_rules.UpdateRule(...)."
            ) from error

    return replace(rule, coefficients=coefficients)


def orthogonalising_matrix(U: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the matrix Q by which Muon's Newton-Schulz iteration multiplies an update U on its shorter side.

    The iteration X <- (a I + b A + c A A) X with A = X X^T is a product of matrices on one side of U / max(|U|, eps).
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


class NoOptimizer(Optimizer):
    """The optimizer of a loop that writes p -= lr * p.grad itself; each step's lr is read off the weights."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__([p for p in net.parameters() if p.requires_grad], {"lr": 0.0})

    def keep(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, Options]:
        """Copy weights and gradients before a step, and return them by name."""
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        self._before = [(p, p.detach().clone(), gradients.get(name)) for name, p in parameters.items()]
        return {name: {GRADIENT: g} for name, g in gradients.items()}

    def has_moved(self) -> bool:
        """Return whether the weights moved since; set the learning rate to the best fit of the move."""
        moves = [(w.double() - p.detach(), g) for p, w, g in self._before]
        pairs = [(move, g.double()) for move, g in moves if g is not None]
        along, size = (float(sum((a * b).sum() for a, b in each)) for each in (pairs, [(g, g) for _, g in pairs]))
        self.param_groups[0]["lr"] = max(0.0, along / max(size, 1e-300))
        return any(bool(move.any()) for move, _ in moves)
