"""Step laws: how a step follows from the batch gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class GradientDescent:
    """Plain (stochastic) gradient descent: w_{s+1} = w_s - size * gradient."""

    name: str = "gradient_descent"


Law = GradientDescent


def predict_step(law: Law, gradient: Float[Tensor, " P"], size: float) -> Float[Tensor, " P"]:
    """Predict w_{s+1} - w_s from the gradient of the batch's loss at w_s."""
    return -size * gradient


def law_of(optimizer: Optimizer) -> Law:
    """Find the step law of an optimizer.

    Raises:
        TypeError: Not an optimizer.
        ValueError: An optimizer, or an option of one, whose law is not known.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer: got {type(optimizer).__name__}.")
    if type(optimizer) is not torch.optim.SGD:
        raise ValueError(
            f"the optimizer's step law must be known: {type(optimizer).__name__} is not supported yet. "
            "Use torch.optim.SGD."
        )
    for group in optimizer.param_groups:
        for option in ("momentum", "weight_decay", "maximize"):
            if group[option]:
                raise ValueError(
                    f"the optimizer's step law must be known: SGD with {option}={group[option]} is not supported yet. "
                    f"Set {option} to 0."
                )
    step_size(optimizer)
    return GradientDescent()


def step_size(optimizer: Optimizer) -> float:
    """Read the step size that the next step will use.

    Raises:
        ValueError: Parameter groups with different step sizes, or a step size that is not finite and non-negative.
    """
    sizes = {float(group["lr"]) for group in optimizer.param_groups}
    if len(sizes) != 1:
        raise ValueError(f"all parameter groups must share one learning rate: got {sorted(sizes)}.")
    size = sizes.pop()
    if not 0 <= size < float("inf"):
        raise ValueError(f"the learning rate must be finite and not negative: got {size}.")
    return size
