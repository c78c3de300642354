"""How the preconditioners of torch's optimizers follow from the gradients so far.

An update rule (`epk_gp.optimizers.update_rules`) holds the coefficients of a step as they were recorded. Under Adam
and its relatives some of them are proportional to a scale that the optimizer derives from the gradients:
1 / (sqrt(v) + eps) with v a moving average of squares. Here are these scales, as functions of what the optimizer keeps
and of

    h = grad_scale * g + weight_decay * w,

so that a coefficient at other gradients is the recorded one times the ratio of both scales. Learning rates and their
schedules are common factors and drop out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Memory = tuple[Tensor, ...]
Options = Mapping[str, Any]
Fields = Callable[[Options], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a scale depends on beside what the optimizer keeps; flat tensors with any leading dimensions.

    Attributes:
        h: As above.
        w: The weights before the step.
        count: Number of the step, from 1 on; one number, or one per weight.
        options: The options of the optimizer.
        shape: Shape of the parameter, where its weights share what their scales are made of.
    """

    h: Tensor
    w: Tensor
    count: Tensor
    options: Options
    shape: torch.Size


@dataclass(frozen=True)
class Preconditioner:
    """The scale of an optimizer's coefficients.

    Attributes:
        scale: Maps what the optimizer keeps before a step and the step's inputs to the scale, and to what is kept
            after the step.
        initial: Returns what each of the kept tensors holds before the first step.
        fields: Returns the names of the coefficients that are proportional to the scale.
        replays: Whether the scale alone says how coefficients change with the gradients. It does not where the
            optimizer decides by signs: the derivative is right, steps on other gradients are not.
        sizes: Returns the lengths of the kept tensors for a parameter's shape, where the scale of a weight depends on
            other weights of its parameter; None where it is computed entry by entry.
    """

    scale: Callable[[Memory, Inputs], tuple[Tensor, Memory]]
    initial: Callable[[Options], tuple[float, ...]]
    fields: Fields = lambda options: ("lr", "momentum_lr")
    replays: bool = True
    sizes: Callable[[torch.Size], tuple[int, ...]] | None = None


def _sqrt(v: Tensor) -> Tensor:
    """Return the root, with derivative 0 at 0: where all gradients so far are 0."""
    is_positive = v > 0
    return torch.where(is_positive, torch.where(is_positive, v, 1.0).sqrt(), 0.0)


def _average(kept: Tensor, value: Tensor, decay: float) -> Tensor:
    return decay * kept + (1 - decay) * value


def _adam(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, count, options = step.h, step.count, step.options
    v = _average(memory[0], h * h, options["betas"][1])
    used, memory = v, (v, *memory[1:])
    if options.get("amsgrad", False):  # switched off, the optimizer leaves the maximum as it is
        used = torch.maximum(memory[1], v)
        memory = (v, used)
    return 1 / (_sqrt(used) / (1 - options["betas"][1] ** count).sqrt() + options["eps"]), memory


def _radam(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, count, options = step.h, step.count, step.options
    beta2 = options["betas"][1]
    v = _average(memory[0], h * h, beta2)
    rho = 2 / (1 - beta2) - 1 - 2 * count * beta2**count / (1 - beta2**count)
    return torch.where(rho > 5, 1 / (_sqrt(v) + options["eps"]), 1.0), (v,)


def _adamax(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, options = step.h, step.options
    u = torch.maximum(options["betas"][1] * memory[0], h.abs() + options["eps"])
    return 1 / u, (u,)


def _sparse_adam(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, options = step.h, step.options
    v = _average(memory[0], h * h, options["betas"][1])
    return 1 / (_sqrt(v) + options["eps"]), (v,)


def _rmsprop(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, options = step.h, step.options
    used = v = _average(memory[0], h * h, options["alpha"])
    mean = memory[1]
    if options["centered"]:
        mean = _average(mean, h, options["alpha"])
        used = (v - mean * mean).clamp(min=0)
    return 1 / (_sqrt(used) + options["eps"]), (v, mean)


def _adagrad(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, options = step.h, step.options
    total = memory[0] + h * h
    return 1 / (_sqrt(total) + options["eps"]), (total,)


def _adadelta(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, options = step.h, step.options
    squares, deltas = memory
    squares = _average(squares, h * h, options["rho"])
    scale = ((deltas + options["eps"]) / (squares + options["eps"])).sqrt()
    return scale, (squares, _average(deltas, (scale * h) ** 2, options["rho"]))


def _rprop(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    return torch.where(step.h == 0, 1.0, 1 / step.h.abs()), memory


def _adafactor(memory: Memory, step: Inputs) -> tuple[Tensor, Memory]:
    h, w, count, options, shape = step.h, step.w, step.count, step.options, step.shape
    eps1, eps2 = map(float, options["eps"])
    share = count ** float(options["beta2_decay"])
    if len(shape) > 1:
        squares = h.unflatten(-1, shape).square()
        found = (squares.mean(dim=-1).flatten(-len(shape) + 1), squares.mean(dim=-2).flatten(-len(shape) + 1))
        memory = tuple(torch.lerp(kept, value, share) for kept, value in zip(memory, found, strict=True))
        row = memory[0].unflatten(-1, shape[:-1])
        column = memory[1].unflatten(-1, (*shape[:-2], shape[-1]))
        size = row.mean(dim=-1, keepdim=True).clamp(min=eps1)
        V = ((row / size)[..., None] * column[..., None, :]).flatten(-len(shape))
    else:
        memory = (torch.lerp(memory[0], h.square(), share),)
        V = memory[0]
    inverse = V.clamp(min=eps1 * eps1).rsqrt()
    clipping = (_root_mean_square(inverse * h) / float(options["d"])).clamp(min=1.0)
    return _root_mean_square(w).clamp(min=eps2) / clipping * inverse, memory


def _root_mean_square(value: Tensor) -> Tensor:
    return _sqrt(value.square().mean(dim=-1, keepdim=True))


_ADAM = Preconditioner(_adam, lambda options: (0.0, 0.0) if options.get("amsgrad", False) else (0.0,))
_ONE = lambda options: (0.0,)  # noqa: E731

PRECONDITIONERS: dict[str, Preconditioner] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "NAdam": _ADAM,
    "RAdam": Preconditioner(_radam, _ONE),
    "Adamax": Preconditioner(_adamax, _ONE),
    "SparseAdam": Preconditioner(_sparse_adam, _ONE),
    "RMSprop": Preconditioner(
        _rmsprop,
        lambda options: (0.0, 0.0),
        # with momentum the optimizer divides the gradient before it enters the buffer
        lambda options: ("one_minus_dampening",) if options["momentum"] > 0 else ("lr",),
    ),
    "Adagrad": Preconditioner(_adagrad, lambda options: (float(options["initial_accumulator_value"]),)),
    "Adadelta": Preconditioner(_adadelta, lambda options: (0.0, 0.0)),
    "Rprop": Preconditioner(_rprop, lambda options: (), replays=False),
    "Adafactor": Preconditioner(
        _adafactor,
        lambda options: (0.0, 0.0),
        lambda options: ("lr",),
        sizes=lambda shape: (
            (shape[:-1].numel(), shape.numel() // max(1, shape[-2])) if len(shape) > 1 else (max(1, shape.numel()),)
        ),
    ),
}

# The options that any scale or its fields depend on; of the betas it is the second.
_SCALE_OPTIONS = (
    *("eps", "betas", "amsgrad", "alpha", "centered", "momentum", "rho", "d", "beta2_decay"),
    "initial_accumulator_value",
)

# Rules whose coefficients do not depend on the gradients.
LINEAR_RULES = frozenset({"SGD", "ASGD"})


@dataclass(frozen=True, eq=False)
class Part:
    """Weights that a preconditioner scales: neighbours, each by its own numbers alone, or those of one parameter.

    Attributes:
        preconditioner: The preconditioner.
        options: The options of its optimizer.
        columns: Which of the flat weights.
        parameters: Which of the L parameters.
        shape: Shape of the parameter, if it is one.
    """

    preconditioner: Preconditioner
    options: Options
    columns: slice
    parameters: slice
    shape: torch.Size

    @property
    def is_coupled(self) -> bool:
        """Whether the scale of a weight depends on other weights."""
        return self.preconditioner.sizes is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the coefficients that are proportional to the scale."""
        return self.preconditioner.fields(self.options)

    def scale(
        self, memory: Memory, h: Float[Tensor, "... p"], w: Float[Tensor, "... p"], count: Tensor
    ) -> tuple[Tensor, Memory]:
        """Return the scale of these weights, and what the optimizer keeps of them after the step.

        Args:
            memory: What it keeps before.
            h: Of these weights.
            w: The weights before the step.
            count: Number of the step; one number, or one per weight.
        """
        return self.preconditioner.scale(memory, Inputs(h, w, count, self.options, self.shape))

    def initial(self, reference: Float[Tensor, "... P"]) -> Memory:
        """Return what the optimizer keeps of these weights before the first step."""
        like, values = reference[..., self.columns], self.preconditioner.initial(self.options)
        sizes = self.preconditioner.sizes
        if sizes is None:
            return tuple(torch.full_like(like, value) for value in values)
        lengths = sizes(self.shape)
        return tuple(like.new_full((*like.shape[:-1], n), value) for n, value in zip(lengths, values, strict=False))

    def kept(self, before: Memory, after: Memory, moved: Bool[Tensor, " p"]) -> Memory:
        """Return what the optimizer keeps if it passed over the weights that did not move."""
        if self.is_coupled:
            return after if bool(moved.any()) else before
        return tuple(torch.where(moved, new, old) for new, old in zip(after, before, strict=True))

    def joined(self, following: "Part") -> "Part | None":
        """Return one part in place of this and the following one; None where they are not scaled as one."""
        if self.is_coupled or self.columns.stop != following.columns.start or self.options is not following.options:
            return None  # not entry by entry, not side by side, or of another parameter group
        columns = slice(self.columns.start, following.columns.stop)
        return replace(self, columns=columns, parameters=slice(self.parameters.start, following.parameters.stop))


def scale_options(rule: str, options: Options) -> dict[str, Any]:
    """Return the options that a rule's scale depends on."""
    names = [name for name in _SCALE_OPTIONS if name in options and rule in PRECONDITIONERS]
    return {name: [0.0, options[name][1]] if name == "betas" else options[name] for name in names}


def part_of(rule: str, options: Options, columns: slice, number: int, shape: torch.Size) -> Part | None:
    """Return how an optimizer scales one parameter; None if that is not known.

    Args:
        rule: Name of the update rule.
        options: The options of the optimizer.
        columns: Which of the flat weights.
        number: Which of the L parameters.
        shape: Its shape.
    """
    own = PRECONDITIONERS.get(rule)
    return None if own is None else Part(own, options, columns, slice(number, number + 1), shape)


def with_eps(options: Options, eps: float) -> Options:
    """Return options whose first eps is a number: Adafactor's default is that of the weights' dtype."""
    own = options.get("eps")
    if isinstance(own, Sequence) and len(own) == 2 and own[0] is None:
        return {**options, "eps": [eps, own[1]]}
    return options


def fits_scale(rule: str, options: Options) -> bool:
    """Return whether a rule's scale can be computed by options that a file holds."""
    one = torch.ones(1, dtype=torch.float64)
    part = part_of(rule, with_eps(options, torch.finfo(one.dtype).eps), slice(0, 1), 0, torch.Size((1, 1)))
    try:
        return part is None or bool(part.fields and part.scale(part.initial(one), one, one, one)[0].isfinite().all())
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False
