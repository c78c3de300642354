"""Update rules, and gradient clipping.

An update rule consists of the coefficients by which an optimizer's step follows from the batch gradient.

An update rule is covered exactly if its step is linear in all gradients so far, with coefficients that are held as
recorded (docs/theory.md, section 4). With g the batch gradient, w the weights and m a momentum buffer, every such step
is

    h    = grad_scale * g + weight_decay * w
    m'   = beta * m + one_minus_dampening * h
    step = -left (momentum_lr * m' + lr * h) right - decoupled_decay * w

with one coefficient per parameter tensor, or one per weight (a diagonal preconditioner). `left` and `right` are the
matrices of a matrix preconditioner; nearly all optimizers have none. If an optimizer divides in its own basis,
inner_left m' inner_right replaces m' in the step, and h is replaced in the same way. Some optimizers have a second
buffer (`SecondBuffer`), which adds -rate * n' to the step. `epk_gp.optimizers.torch_rules` reads the coefficients of
torch's optimizers, `epk_gp.optimizers.library_rules` those of other libraries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

Number = float | Tensor
Options = Mapping[str, Any]
# In `UpdateRule.needs_before`, in addition to names of the optimizer's state: the parameter, its gradient, and the
# options of its group, as they were before the step.
WEIGHTS, GRADIENT, OPTIONS = "weights", "gradient", "options"
MATRICES = ("left", "right", "inner_left", "inner_right")
SECOND = "second"
BY_PARAMETER = (*MATRICES, SECOND)  # fields of `UpdateCoefficients` that most optimizers do not have


class SecondBuffer(NamedTuple):
    """The second buffer of a parameter, n' = beta * n + of_h * h + of_m * m' + of_w * w; the step has -rate * n'."""

    rate: Number
    beta: Number
    of_h: Number = 0.0
    of_m: Number = 0.0
    of_w: Number = 0.0


@dataclass(frozen=True)
class LinearStep:
    """The coefficients of one step of one parameter; each is a float, or a tensor of the parameter's shape.

    Attributes:
        lr: Factor of h in the step (the learning rate of plain gradient descent).
        momentum_lr: Factor of the new buffer in the step.
        beta: Factor of the old buffer in the new one.
        one_minus_dampening: Factor of h in the new buffer.
        grad_scale: Factor of the gradient in h: -1 if the loss is maximised.
        weight_decay: Factor of the weights in h (coupled weight decay).
        decoupled_decay: Factor of the weights in the step (decoupled weight decay, times the learning rate).
        left: Matrix (rows, rows) that multiplies the step of a parameter of rows * columns weights, row by row, from
            the left; None for the identity.
        right: Matrix (columns, columns) that multiplies it from the right; None for the identity.
        inner_left: Matrix that multiplies m' and h from the left before their coefficients; None for the identity.
        inner_right: Matrix that multiplies them from the right; None for the identity.
        second: The second buffer, if there is one.
    """

    lr: Number = 0.0
    momentum_lr: Number = 0.0
    beta: Number = 0.0
    one_minus_dampening: Number = 0.0
    grad_scale: Number = 1.0
    weight_decay: Number = 0.0
    decoupled_decay: Number = 0.0
    left: Tensor | None = None
    right: Tensor | None = None
    inner_left: Tensor | None = None
    inner_right: Tensor | None = None
    second: SecondBuffer | None = None

    @property
    def numbers(self) -> tuple[Number, ...]:
        """The coefficients that are not matrices, in the order of `FIELDS`."""
        return _FIELDS_OF(self)

    @property
    def has_matrices(self) -> bool:
        """Whether the step has a matrix or a second buffer."""
        return _MATRICES_OF(self) != (None,) * len(BY_PARAMETER)


# For a parameter without a gradient: torch moves neither it nor its buffer.
NO_UPDATE = LinearStep(beta=1.0, grad_scale=0.0)
FIELDS = tuple(item.name for item in fields(LinearStep) if item.name not in BY_PARAMETER)
_FIELDS_OF, _MATRICES_OF = attrgetter(*FIELDS), attrgetter(*BY_PARAMETER)

Coefficients = Callable[[nn.Parameter, Options, Options, Options], LinearStep]


def _momentum_buffer(p: nn.Parameter, group: Options, state: Options) -> tuple[Tensor, ...]:
    held = [state[name] for name in ("momentum_buffer", "exp_avg") if state.get(name) is not None]
    return tuple(held[:1])


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which an optimizer's step follows from the gradient, read from the optimizer after each step.

    Attributes:
        name: Name of the rule in the run's header.
        coefficients: Function that is called after each step for each parameter with a gradient, as f(p, group, before,
            after): the parameter after the step, with its gradient, the options of its group, and the optimizer's state
            of it before and after the step. It returns the coefficients of the step. `before` is empty if there was no
            state before the step. Otherwise it has all entries of the state: copies of those in `needs_before`, and
            None for the others.
        needs_before: Names of the entries of the state that the function reads in `before`. The names "weights",
            "gradient" and "options" stand for the parameter, its gradient, and the options of its group before the
            step; they are also present in the first step. An optimizer that writes into gradients needs "gradient".
        unexplained: Share of the steps' norm that the rule leaves unexplained, because the optimizer computes in a
            lower precision than the weights; 0 for a rule that holds up to the rounding of the weights.
        buffers: Function of parameter, options and state that returns m, and n if there is one, for an optimizer that
            has made steps before the recording: by default its "momentum_buffer" or "exp_avg".
        refusal: The error message if one of the first two steps does not follow a guessed rule.
        of_entries: Names of the entries of the state that the function reads, if each weight's coefficients follow from
            its own entries by the same formula: it is then called once for all parameters. None otherwise.
    """

    name: str
    coefficients: Coefficients
    needs_before: tuple[str, ...] = ()
    unexplained: float = 0.0
    buffers: Callable[[nn.Parameter, Options, Options], tuple[Tensor, ...]] = _momentum_buffer
    refusal: str = ""
    of_entries: tuple[str, ...] | None = None


def validate_unexplained(rule: UpdateRule, unexplained: float | None) -> None:
    """Raise if a rule leaves a part of the steps unexplained, and the user did not allow it.

    Raises:
        ValueError: The rule leaves more than rounding, and `unexplained` is not given.
    """
    if rule.unexplained > 0 and unexplained is None:
        raise ValueError(
            f"unexplained must be given for {rule.name}, which computes a part of its step in a lower precision: got "
            f"None. Pass unexplained={rule.unexplained}: up to this share of a step becomes a term of its own."
        )


@dataclass(frozen=True, eq=False)
class UpdateCoefficients:
    """The coefficients of one step of all L parameters.

    Each attribute holds one number per parameter, (L,) float64, or one per weight, (P,). `LinearStep` defines each of
    them. `left`, `right` and the inner matrices are square, keyed by the index 0 .. L - 1 of the parameter; identities
    are left out. `second` holds the numbers of `SecondBuffer` by the same index, (5, 1) or one per weight. If one
    weight's number determines all others of its parameter (`epk_gp.core.update_law.compact_update`), `places` holds, by
    the coefficient's name, the index of this weight within each parameter, (L,), and -1 if all weights share the
    number.
    """

    lr: Tensor
    momentum_lr: Tensor
    beta: Tensor
    one_minus_dampening: Tensor
    grad_scale: Tensor
    weight_decay: Tensor
    decoupled_decay: Tensor
    left: Mapping[int, Tensor] = field(default_factory=dict, kw_only=True)
    right: Mapping[int, Tensor] = field(default_factory=dict, kw_only=True)
    inner_left: Mapping[int, Tensor] = field(default_factory=dict, kw_only=True)
    inner_right: Mapping[int, Tensor] = field(default_factory=dict, kw_only=True)
    second: Mapping[int, Tensor] = field(default_factory=dict, kw_only=True)
    places: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the coefficients that are not matrices, in the order of `FIELDS`."""
        return iter(_FIELDS_OF(self))

    @property
    def has_matrices(self) -> bool:
        """Whether the step of any parameter has a matrix or a second buffer."""
        return any(_MATRICES_OF(self))

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all tensors: the coefficients, and then the matrices by the index of their parameter."""
        yield from self
        for name in BY_PARAMETER if self.has_matrices else ():
            yield from (matrix for _, matrix in sorted(getattr(self, name).items()))

    def map(self, function: Callable[[Tensor], Tensor]) -> "UpdateCoefficients":
        """Return the same coefficients with a function applied to each tensor, including matrices."""
        rest: dict[str, Any] = {name: {k: function(Q) for k, Q in getattr(self, name).items()} for name in BY_PARAMETER}
        return UpdateCoefficients(*map(function, self), **rest, places=self.places)


def stack_coefficients(steps: Sequence[LinearStep], sizes: Sequence[int]) -> UpdateCoefficients:
    """Join the coefficients of all parameters; a coefficient given per weight in one becomes per weight in all.

    Raises:
        TypeError: A step is not a `LinearStep`.
        ValueError: A coefficient has another shape than the parameter, or a matrix's sides do not fit its size.
    """
    matrices: dict[str, dict[int, Tensor]] = {name: {} for name in BY_PARAMETER}
    for k, (step, size) in enumerate(zip(steps, sizes, strict=True)):
        if not isinstance(step, LinearStep):
            raise TypeError(f"an update rule's coefficients must be a LinearStep: got {type(step).__name__}.")
        held = {name: Q.detach() for name in MATRICES if (Q := getattr(step, name)) is not None}
        for name, Q in held.items():
            matrices[name][k] = Q
        _matrix_shape(held.get("left"), held.get("right"), size)
        _matrix_shape(held.get("inner_left"), held.get("inner_right"), size)
        if step.second is not None:
            device = next((v.device for v in step.second if isinstance(v, Tensor)), None)
            numbers = [torch.as_tensor(v, dtype=None if isinstance(v, Tensor) else torch.float64) for v in step.second]
            rows = torch.broadcast_tensors(*(value.detach().reshape(-1).to(device) for value in numbers))
            matrices[SECOND][k] = torch.stack(rows)
    joined: dict[str, Any] = {name: _joined(name, [getattr(step, name) for step in steps], sizes) for name in FIELDS}
    return UpdateCoefficients(**joined | matrices)


def _joined(name: str, values: Sequence[Number], sizes: Sequence[int]) -> Tensor:
    """Return a coefficient of all parameters: one number each, or one per weight if any parameter has that."""
    like = next((value for value in values if isinstance(value, Tensor) and value.ndim), None)
    if like is None:
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    dtype, numbers = like.dtype if like.is_floating_point() else torch.float64, list[Tensor]()
    for value, size in zip(values, sizes, strict=True):
        if not isinstance(value, Tensor) or not value.ndim:
            numbers.append(like.new_full((size,), float(value), dtype=dtype))
        elif value.numel() == size:
            numbers.append(value.detach().flatten())
        else:
            raise ValueError(f"{name} must be one number or one per weight, {size}: got {tuple(value.shape)}.")
    return torch.cat(numbers)  # this promotes their types


def stack_steps(steps: Sequence[Sequence[LinearStep] | LinearStep], sizes: Sequence[int]) -> list[UpdateCoefficients]:
    """Return the coefficients of several steps, as `stack_coefficients` does for one; they share memory.

    A single `LinearStep` instead of a sequence holds the coefficients of all weights in order.
    """
    several = [(own,) if isinstance(own, LinearStep) else own for own in steps]
    if any(type(own) is not LinearStep or own.has_matrices for step in several for own in step):
        return [stack_coefficients(step, sizes) for step in several]
    columns, L = list[Sequence[Tensor]](), len(sizes)
    for rows in zip(*(zip(*map(_FIELDS_OF, step), strict=True) for step in several), strict=True):
        if any(Tensor in set(map(type, row)) for row in rows):
            name = FIELDS[len(columns)]
            is_one = [len(row) < L and isinstance(row[0], Tensor) and row[0].ndim > 0 for row in rows]
            pairs = zip(rows, is_one, strict=True)
            columns.append([row[0] if one else _joined(name, row * (L // len(row)), sizes) for row, one in pairs])
        else:
            columns.append(torch.tensor([row * (L // len(row)) for row in rows], dtype=torch.float64).unbind())
    return [UpdateCoefficients(*own) for own in zip(*columns, strict=True)]


def broadcast_to_params(value: Tensor, sizes: Sequence[int], reference: Tensor) -> Float[Tensor, " P"]:
    """Return a coefficient as one number per weight, in the dtype and on the device of `reference`."""
    if len(value) != len(sizes):
        return value.to(reference)
    numbers = value.tolist()
    if numbers.count(numbers[0]) == len(numbers):
        return reference.new_full((1,), numbers[0]).expand(sum(sizes))
    return value.to(reference).repeat_interleave(torch.tensor(list(sizes), device=reference.device))


def coefficient_of_all(value: Tensor, sizes: Sequence[int], reference: Tensor) -> Number:
    """Return a coefficient as one number if all weights share it, otherwise as one number per weight."""
    is_shared = len(value) == len(sizes) and len(set(value.tolist())) == 1
    return float(value[0]) if is_shared else broadcast_to_params(value, sizes, reference)


def weighted_sum(memory: Tensor | None, *terms: tuple[Number, Tensor]) -> Tensor:
    """Add up coefficients times vectors, in `memory` if given; a term that is already a vector is not copied."""
    total: Tensor | None = None
    for c, vector in terms:
        if isinstance(c, Tensor):
            total = torch.mul(vector, c, out=memory) if total is None else torch.addcmul(total, c, vector, out=memory)
        elif c != 0:
            first = vector if c == 1 or total is not None else torch.mul(vector, c, out=memory)
            total = first if total is None else torch.add(total, vector, alpha=c, out=memory)
    return torch.zeros_like(terms[0][1]) if total is None else total


def linear_step(
    c: Sequence[Number], w: Tensor, g: Tensor, m: Tensor, memory: Sequence[Tensor | None] = (None, None, None)
) -> tuple[Tensor, Tensor]:
    """Return minus the step for coefficients without matrices, in the order of `FIELDS`, and the momentum after it."""
    lr, momentum_lr, beta, one_minus_dampening, grad_scale, weight_decay, decoupled_decay = c
    h = weighted_sum(memory[0], (grad_scale, g), (weight_decay, w))
    after = weighted_sum(memory[1], (beta, m), (one_minus_dampening, h))
    return weighted_sum(memory[2], (momentum_lr, after), (lr, h), (decoupled_decay, w)), after


def second_coefficients(
    update: UpdateCoefficients, sizes: Sequence[int], reference: Tensor
) -> tuple[Float[Tensor, " P"], ...]:
    """Return the numbers of `SecondBuffer` per weight; for parameters without one they leave the buffer unchanged."""
    untouched = reference.new_tensor(SecondBuffer(rate=0.0, beta=1.0))[:, None]
    numbers = [update.second.get(k, untouched) for k in range(len(sizes))]
    whole = [value.to(reference).expand(-1, size) for value, size in zip(numbers, sizes, strict=True)]
    return torch.cat(whole, dim=1).unbind()


def predict_step(
    update: UpdateCoefficients,
    sizes: Sequence[int],
    w: Float[Tensor, " P"],
    g: Float[Tensor, " P"],
    m: Float[Tensor, " B"],
) -> tuple[Float[Tensor, " P"], Float[Tensor, " B2"]]:
    """Return the step that an update rule predicts, and the momentum buffer after it.

    Args:
        update: The coefficients of the step.
        sizes: Number of weights of each of the L parameters.
        w: The weights before the step.
        g: The gradient of the batch's loss at w.
        m: The momentum buffer before the step, zero before the first step; then the second buffer, if there is one.
    """
    c = {name: coefficient_of_all(getattr(update, name), sizes, w) for name in FIELDS}
    m, n = m[: len(w)], m[len(w) :]
    h = weighted_sum(None, (c["grad_scale"], g), (c["weight_decay"], w))
    after = weighted_sum(None, (c["beta"], m), (c["one_minus_dampening"], h))
    inner_m, inner_h = (apply_matrices(update, sizes, vector, inner=True) for vector in (after, h))
    direction = apply_matrices(update, sizes, weighted_sum(None, (c["momentum_lr"], inner_m), (c["lr"], inner_h)))
    step = -weighted_sum(None, (1.0, direction), (c["decoupled_decay"], w))
    if update.second or len(n):
        rate, beta, of_h, of_m, of_w = second_coefficients(update, sizes, w)
        n = of_h * h + of_m * after + of_w * w + (beta * n if len(n) else 0)
        step, after = step - rate * n, torch.cat([after, n])
    return step, after


def step_tolerance(start: Tensor, predicted: Tensor) -> float:
    """Return the largest difference between a recorded and a predicted step that rounding can explain.

    A step is the difference of two weight vectors, so it has the rounding of the weights (4 eps of the largest weight)
    in addition to the relative rounding of the gradient.
    """
    eps = torch.finfo(start.dtype).eps
    return float(relative_rounding(start.dtype) * largest_entry(predicted) + 4 * eps * largest_entry(start))


def rounding_of_terms(
    update: UpdateCoefficients, sizes: Sequence[int], w: Tensor, g: Tensor, m: Tensor
) -> Float[Tensor, " P"]:
    """Return the change of each weight's step by rounding, where terms of `predict_step` cancel.

    The step of a sign, v / |v|, is the sum of two terms whose size relative to it grows as v becomes a small
    difference.
    """
    eps = torch.finfo(w.dtype).eps
    step, _ = predict_step(update.map(torch.abs), sizes, w.abs(), g.abs(), m.abs())
    return 64 * eps * step.abs() + 4 * eps * largest_entry(w)


def largest_entry(x: Float[Tensor, " P"]) -> Float[Tensor, ""]:
    """Return the largest absolute value of a vector, without a copy."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def relative_rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding of a gradient or step that is accepted without a closer look.

    In float64 it is the square root of eps, 1.5e-8. In float32 the root would be 3.5e-4, which hides a weight decay or
    a gradient scaled by 0.9998; it is 64 eps = 7.6e-6, and a larger difference is compared with the gradient in float64
    (`consistent_up_to_rounding` in `epk_gp.recording.check`).
    """
    eps = float(torch.finfo(dtype).eps)
    return eps**0.5 if dtype == torch.float64 else 64 * eps


def move_by_rounding(w: Float[Tensor, " P"], eps: float) -> Float[Tensor, " P"]:
    """Return weights whose entries are moved by one eps of their size, up or down.

    The results of a computation at both weights differ by its rounding error.
    """
    index = torch.arange(min(w.numel(), 65_537), device=w.device, dtype=torch.float64)  # then repeated
    factor = 1 + eps * (index * index).sin().sign().to(w.dtype)
    return torch.cat([part * factor[: len(part)] for part in w.split(len(factor))])


def apply_matrices(
    update: UpdateCoefficients,
    sizes: Sequence[int],
    vectors: Float[Tensor, "*n P"],
    *,
    transposed: bool = False,
    inner: bool = False,
) -> Float[Tensor, "*n P"]:
    """Multiply flat vectors of weights by the matrices of a step, or by their transposes.

    Args:
        update: The coefficients of the step.
        sizes: Number of weights of each of the L parameters.
        vectors: Vectors of P weights.
        transposed: Whether to multiply by the transposed matrices, as the adjoint of a step does.
        inner: Whether to multiply by the inner matrices.

    Returns:
        The products; the vectors themselves if the step has no such matrices.
    """
    lefts, rights = (update.inner_left, update.inner_right) if inner else (update.left, update.right)
    if not lefts and not rights:
        return vectors
    parts = list(vectors.split(list(sizes), dim=-1))
    for k in lefts.keys() | rights.keys():
        left, right = (None if Q is None else Q.to(vectors) for Q in (lefts.get(k), rights.get(k)))
        part = parts[k].unflatten(-1, _matrix_shape(left, right, sizes[k]))
        if left is not None:
            part = (left.T if transposed else left) @ part
        if right is not None:
            part = part @ (right.T if transposed else right)
        parts[k] = part.flatten(-2)
    return torch.cat(parts, dim=-1)


def _matrix_shape(left: Tensor | None, right: Tensor | None, size: int) -> tuple[int, int]:
    """Return rows and columns of a parameter that is multiplied by matrices."""
    rows = len(left) if left is not None else size // (1 if right is None else len(right))
    columns = len(right) if right is not None else size // rows
    expected = [Q is None or Q.shape == (side, side) for Q, side in ((left, rows), (right, columns))]
    if rows * columns != size or not all(expected):
        got = ", ".join(str(tuple(Q.shape)) for Q in (left, right) if Q is not None)
        raise ValueError(
            "the matrices of a step must be square, with sides that fit the parameter's number of weights: got "
            f"{got} for {size} weights."
        )
    return rows, columns


def scale_gradient(update: UpdateCoefficients, factor: float | Tensor, sizes: Sequence[int]) -> UpdateCoefficients:
    """Multiply the gradient's coefficient by the factor of gradient clipping."""
    if isinstance(factor, Tensor) and len(factor) != len(update.grad_scale):
        return replace(update, grad_scale=broadcast_to_params(update.grad_scale, sizes, factor) * factor)
    return replace(update, grad_scale=update.grad_scale * factor)


EPSILON = 1e-6  # torch adds it to the norm of a gradient that it clips
CLIP_ROUNDING = (1e-4, 1e-7)  # relative rounding of a clipped gradient, in float32 and in float64


@dataclass(frozen=True)
class ClipNorm:
    """Clipping of the norm of the whole gradient, as `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        bound: The largest norm that is not clipped.
        norm_type: The p of the p-norm.
    """

    bound: float
    norm_type: float = 2.0

    def factor(self, g: Float[Tensor, " P"]) -> float:
        """Return the factor by which this clipping multiplies a gradient."""
        return min(1.0, self.bound / (float(torch.linalg.vector_norm(g, self.norm_type)) + EPSILON))

    def factors(self, g: Float[Tensor, "*m P"]) -> Float[Tensor, "*m 1"]:
        """Return the factor of each of several gradients."""
        norms: Tensor = torch.linalg.vector_norm(g, self.norm_type, dim=-1, keepdim=True)
        return (self.bound / (norms + EPSILON)).clamp(max=1.0)

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_norm_(net.parameters(), self.bound, self.norm_type)


@dataclass(frozen=True)
class ClipValue:
    """Clipping of every entry of the gradient, as `torch.nn.utils.clip_grad_value_`.

    Attributes:
        bound: The largest absolute value that is not clipped.
        norm_type: The p of the norm whose bound this is.
    """

    bound: float
    norm_type = float("inf")

    def factors(self, g: Float[Tensor, "*m P"]) -> Float[Tensor, "*m P"]:
        """Return the factor by which this clipping multiplies each entry of gradients."""
        return torch.where(g.abs() > self.bound, self.bound / g.abs(), 1.0)

    factor = factors

    def clip_gradients(self, net: nn.Module) -> None:
        """Clip the gradients of a network in place."""
        nn.utils.clip_grad_value_(net.parameters(), self.bound)


Clip = ClipNorm | ClipValue


def clip_from_json(stated: Sequence[float] | None) -> Clip | None:
    """Return the clipping of a run's header: a bound of the entries, or a bound of the norm and its p."""
    if stated is None:
        return None
    return ClipValue(*stated) if len(stated) == 1 else ClipNorm(*stated)


def is_clipped(update: UpdateCoefficients) -> bool:
    """Return whether a step clipped its gradient, or an entry of it."""
    factors = update.grad_scale.abs()
    return bool(((factors > 0) & (factors < 1)).any())


def clip_kind(update: UpdateCoefficients, num_weights: int) -> type[ClipNorm | ClipValue] | None:
    """Return the kind of clipping of a step's gradient, None without; a norm's factors are equal, or 0 by a mask."""
    factors = update.grad_scale.abs()
    is_whole = len(factors) != num_weights or len(factors[factors > 0].unique()) == 1
    return None if not is_clipped(update) else ClipNorm if is_whole else ClipValue


def shown_clip(update: UpdateCoefficients, scale: Tensor, g: Float[Tensor, " P"]) -> Clip | None:
    """Return the clipping, of the 2-norm or of the entries, that a step's factors show; None without clipping.

    That this norm was clipped shows if another step has the same bound.

    Args:
        update: The recorded coefficients of the step.
        scale: Its `grad_scale` as one number per weight, (P,); 0 where there was no gradient.
        g: The gradient of the batch's loss.
    """
    if not is_clipped(update):
        return None
    factors = scale.abs()
    if clip_kind(update, len(g)) is ClipValue:
        bounds = (factors * g.abs())[(factors > 0) & (factors < 1)]
        return ClipValue(float(bounds.mode().values))
    norm = float(torch.linalg.vector_norm(torch.where(factors > 0, g, 0.0))) + EPSILON
    return ClipNorm(float(factors[factors > 0].min()) * norm)
