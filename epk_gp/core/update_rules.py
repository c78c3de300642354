"""Update rules: the coefficients by which an optimizer's step follows from the batch gradient.

An update rule is covered exactly if its step is linear in all gradients so far, with coefficients that are held as
recorded (docs/theory.md, section 4). With g the batch gradient, w the weights and m a momentum buffer, every such step
is

    h    = grad_scale * g + weight_decay * w
    m'   = beta * m + one_minus_dampening * h
    step = -(momentum_lr * m' + lr * h) - decoupled_decay * w

with one coefficient per parameter tensor, or one per weight (a diagonal preconditioner).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn, optim
from torch.optim import Optimizer

Number = float | Tensor
Options = Mapping[str, Any]


@dataclass(frozen=True)
class LinearStep:
    """The coefficients of one step of one parameter; each is a float, or a tensor of the parameter's shape.

    Attributes:
        lr: Factor of h in the step (the learning rate of plain gradient descent).
        momentum_lr: Factor of the new buffer in the step.
        beta: Factor of the old buffer in the new one.
        one_minus_dampening: Factor of h in the new buffer.
        grad_scale: Factor of the gradient in h: -1 where the loss is maximised.
        weight_decay: Factor of the weights in h (coupled weight decay).
        decoupled_decay: Factor of the weights in the step (decoupled weight decay, times the learning rate).
    """

    lr: Number = 0.0
    momentum_lr: Number = 0.0
    beta: Number = 0.0
    one_minus_dampening: Number = 0.0
    grad_scale: Number = 1.0
    weight_decay: Number = 0.0
    decoupled_decay: Number = 0.0


NO_UPDATE = LinearStep(
    beta=1.0, grad_scale=0.0
)  # a parameter without a gradient: torch moves neither it nor its buffer
FIELDS = tuple(field.name for field in fields(LinearStep))

Coefficients = Callable[[nn.Parameter, Mapping[str, Any], Mapping[str, Any], bool], LinearStep]


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which an optimizer's step follows from the gradient, read from the optimizer after each step.

    Attributes:
        name: Name of the rule in the run's header.
        coefficients: Function that is called after each step for each parameter that has a gradient, as
            f(p, group, state, first): the parameter, the options of its group, the optimizer's state of it after the
            step, and whether that state was empty before the step. Returns the coefficients of the step.
    """

    name: str
    coefficients: Coefficients


@dataclass(frozen=True, eq=False)
class UpdateCoefficients:
    """The coefficients of one step of all L parameters.

    Each attribute holds one number per parameter, (L,) float64, or one per weight, (P,). `LinearStep` says what each
    stands for.
    """

    lr: Tensor
    momentum_lr: Tensor
    beta: Tensor
    one_minus_dampening: Tensor
    grad_scale: Tensor
    weight_decay: Tensor
    decoupled_decay: Tensor

    def __iter__(self) -> Any:
        """Iterate over the coefficients in the order of `FIELDS`."""
        return iter(getattr(self, name) for name in FIELDS)


def stack_coefficients(steps: Sequence[LinearStep], sizes: Sequence[int]) -> UpdateCoefficients:
    """Join the coefficients of all parameters; one that any parameter has per weight becomes one number per weight."""
    joined = {}
    for name in FIELDS:
        values = [getattr(step, name) for step in steps]
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
        if not tensors:
            joined[name] = torch.tensor([float(value) for value in values], dtype=torch.float64)
            continue
        rows = [
            value.detach().reshape(-1)
            if isinstance(value, Tensor) and value.ndim
            else tensors[0].new_full((size,), float(value))
            for value, size in zip(values, sizes, strict=True)
        ]
        joined[name] = torch.cat(rows)
    return UpdateCoefficients(**joined)


def broadcast_to_params(value: Tensor, sizes: Sequence[int], reference: Tensor) -> Float[Tensor, " P"]:
    """Return a coefficient as one number per weight, in the dtype and on the device of `reference`."""
    if len(value) != len(sizes):
        return value.to(reference)
    repeats = torch.tensor(list(sizes), device=reference.device)
    return value.to(reference).repeat_interleave(repeats)


def predict_step(
    update: UpdateCoefficients,
    sizes: Sequence[int],
    w: Float[Tensor, " P"],
    g: Float[Tensor, " P"],
    m: Float[Tensor, " P"],
) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Return the step that an update rule predicts, and the momentum buffer after it.

    Args:
        update: The coefficients of the step.
        sizes: Number of weights of each of the L parameters.
        w: The weights before the step.
        g: The gradient of the batch's loss at w.
        m: The momentum buffer before the step; zero before the first step.
    """
    u = UpdateCoefficients(*(_scalar_or_per_weight(value, sizes, w) for value in update))
    h = u.grad_scale * g + u.weight_decay * w
    after = u.beta * m + u.one_minus_dampening * h
    return -(u.momentum_lr * after + u.lr * h) - u.decoupled_decay * w, after


def _scalar_or_per_weight(value: Tensor, sizes: Sequence[int], reference: Tensor) -> Tensor:
    """Return a coefficient as a scalar where all parameters share it, else as one number per weight."""
    if len(value) == len(sizes) and len(set(value.tolist())) == 1:
        return value[0].to(reference)
    return broadcast_to_params(value, sizes, reference)


def scale_gradient(update: UpdateCoefficients, factor: float | Tensor, sizes: Sequence[int]) -> UpdateCoefficients:
    """Multiply the gradient's coefficient by a factor, that of gradient clipping."""
    if isinstance(factor, Tensor):
        return replace(update, grad_scale=broadcast_to_params(update.grad_scale, sizes, factor) * factor)
    return replace(update, grad_scale=update.grad_scale * factor)


def rule_for(optimizer: Optimizer) -> UpdateRule:
    """Return the update rule of one of torch's optimizers.

    Raises:
        TypeError: The object is not an optimizer.
        ValueError: The update rule of the optimizer is not known.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer: got {type(optimizer).__name__}.")
    if type(optimizer) not in _RULES:
        known = ", ".join(sorted(kind.__name__ for kind in _RULES))
        raise ValueError(
            f"the optimizer's update rule must be known: that of {type(optimizer).__name__} is not. "
            f"Use one of {known}, or pass the rule as update_rule=epk_gp.core.update_rules.UpdateRule(...)."
        )
    return _RULES[type(optimizer)]


def validate_fresh_optimizer(optimizer: Optimizer) -> None:
    """Raise if an optimizer holds momentum of gradients from before the recording.

    No sample of the recorded run could account for that momentum.

    Raises:
        ValueError: A momentum buffer of the optimizer is not zero.
    """
    for state in optimizer.state.values():
        for name in ("momentum_buffer", "exp_avg"):
            buffer = state.get(name)
            if isinstance(buffer, Tensor) and buffer.any():
                raise ValueError(
                    f"the optimizer must be fresh: its {name} holds gradients from before the recording. "
                    "Make a new optimizer, or record from its first step on."
                )


def learning_rate(optimizer: Optimizer) -> float:
    """Return the learning rate of the first parameter group, the kernel's weight eps_s of the step.

    Raises:
        ValueError: The learning rate of a group is negative or not finite.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for rate in rates:
        if not 0 <= rate < float("inf"):
            raise ValueError(f"the learning rate must be finite and not negative: got {rate}.")
    return rates[0]


def _sgd(p: nn.Parameter, group: Options, state: Options, first: bool) -> LinearStep:
    lr, mu, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
    sign = -1.0 if group["maximize"] else 1.0
    if mu == 0:
        return LinearStep(lr=lr, beta=1.0, grad_scale=sign, weight_decay=decay)
    return LinearStep(
        lr=lr if group["nesterov"] else 0.0,
        momentum_lr=lr * mu if group["nesterov"] else lr,
        beta=0.0 if first else mu,
        # torch starts the buffer with the gradient itself, not dampened
        one_minus_dampening=1.0 if first else 1.0 - float(group["dampening"]),
        grad_scale=sign,
        weight_decay=decay,
    )


def _adam(p: nn.Parameter, group: Options, state: Options, first: bool) -> LinearStep:
    lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    count = float(state["step"])
    v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    denominator = v.sqrt() / (1 - beta2**count) ** 0.5 + eps
    decoupled = bool(group.get("decoupled_weight_decay", False))
    return LinearStep(
        momentum_lr=lr / (1 - beta1**count) / denominator,
        beta=0.0 if first else beta1,
        one_minus_dampening=1 - beta1,
        grad_scale=-1.0 if group["maximize"] else 1.0,
        weight_decay=0.0 if decoupled else decay,
        decoupled_decay=lr * decay if decoupled else 0.0,
    )


def _adamw(p: nn.Parameter, group: Options, state: Options, first: bool) -> LinearStep:
    return _adam(p, {**group, "decoupled_weight_decay": True}, state, first)


def _rmsprop(p: nn.Parameter, group: Options, state: Options, first: bool) -> LinearStep:
    lr, mu = float(group["lr"]), float(group["momentum"])
    v = state["square_avg"]
    if group["centered"]:
        v = v.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
    inverse = 1 / (v.sqrt() + float(group["eps"]))
    return LinearStep(
        lr=0.0 if mu > 0 else lr * inverse,
        momentum_lr=lr if mu > 0 else 0.0,
        beta=0.0 if first else mu,
        one_minus_dampening=inverse if mu > 0 else 0.0,
        grad_scale=-1.0 if group["maximize"] else 1.0,
        weight_decay=float(group["weight_decay"]),
    )


def _adagrad(p: nn.Parameter, group: Options, state: Options, first: bool) -> LinearStep:
    lr = float(group["lr"]) / (1 + (float(state["step"]) - 1) * float(group["lr_decay"]))
    return LinearStep(
        lr=lr / (state["sum"].sqrt() + float(group["eps"])),
        grad_scale=-1.0 if group["maximize"] else 1.0,
        weight_decay=float(group["weight_decay"]),
    )


_RULES: dict[type[Optimizer], UpdateRule] = {
    optim.SGD: UpdateRule("SGD", _sgd),
    optim.Adam: UpdateRule("Adam", _adam),
    optim.AdamW: UpdateRule("AdamW", _adamw),
    optim.RMSprop: UpdateRule("RMSprop", _rmsprop),
    optim.Adagrad: UpdateRule("Adagrad", _adagrad),
}
