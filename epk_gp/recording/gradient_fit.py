"""Changes of a loop to a gradient between its arrival and its use: a factor and a decay of each parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from epk_gp.core.model import FEW_WEIGHTS, FunctionalModel, flattened
from epk_gp.optimizers.update_rules import UpdateCoefficients, broadcast_to_params, scale_gradient

_ROUNDINGS = 16  # allowed roundings of an entry after a few products and sums
_LEFT = 0.2  # largest share of a difference's norm that a decay may leave, before the comparison with rounding
_MOST_CHANGES = 1  # changes of the decays between checked steps; after more, every step is checked
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class GradientFit:
    """A gradient as factor * (base + decay * w).

    Attributes:
        factor: One number, one for each parameter, (L,), or one for each entry, (P,).
        decay: The factor of the weights of each parameter, (L,).
    """

    factor: float | Tensor
    decay: Float64[Tensor, " L"]

    @cached_property
    def is_identity(self) -> bool:
        """Whether the gradient equals the base."""
        return isinstance(self.factor, float) and self.factor == 1 and not bool(self.decay.any())

    def of(self, base: Float[Tensor, " P"], w: Float[Tensor, " P"], sizes: Sequence[int]) -> Float[Tensor, " P"]:
        """Return the gradient."""
        whole = base + broadcast_to_params(self.decay, sizes, w) * w if bool(self.decay.any()) else base
        factor = self.factor
        return whole * (broadcast_to_params(factor, sizes, w) if isinstance(factor, Tensor) else factor)

    def added_to(self, update: UpdateCoefficients, sizes: Sequence[int]) -> UpdateCoefficients:
        """Return the coefficients of a step on the base, given the coefficients of the step on the gradient."""
        update = scale_gradient(update, self.factor, sizes)
        rates, scale, decay = self.decay, update.grad_scale, update.weight_decay
        if not bool(rates.any()):
            return update
        if len(scale) != len(rates) or len(decay) != len(rates):
            like = scale if len(scale) != len(rates) else decay
            scale, decay, rates = (broadcast_to_params(value, sizes, like) for value in (scale, decay, rates))
        return replace(update, weight_decay=decay + scale * rates)


def exact_factor(used: Tensor, base: Tensor) -> float | None:
    """Return the number that turns one gradient into another, bit by bit; None if there is none."""
    if int(base.count_nonzero()) < 2:  # one number does not determine a factor
        return None
    place = base.abs().argmax()
    ratio = used[place] / base[place]
    for end in (-torch.inf, torch.inf):  # rounding allows at most two numbers on either side
        factor = ratio
        for _ in range(3):
            if torch.equal(base * factor, used):
                return float(factor)
            factor = torch.nextafter(factor, torch.full_like(factor, end))
    return None


def fit_gradient(
    used: Float[Tensor, " P"],
    base: Float[Tensor, " P"],
    w: Float[Tensor, " P"],
    known: GradientFit,
    sizes: Sequence[int],
    *,
    room: float = 0.0,
    has_factors: bool = True,
) -> GradientFit | None:
    """Return the factor and the decay of each parameter that turn one gradient into another; None if none do.

    The order of trials: nothing, a factor, a decay, both. Each is tried for all entries, then without the entries that
    are 0 only in the used gradient, then also without entries that are clipped to a bound.

    Args:
        used: The used gradient.
        base: The gradient before the changes.
        w: The weights.
        known: The fit of an earlier step, whose decays are preferred if they fit as well.
        sizes: Number of weights of each parameter.
        room: Allowed difference of an entry in addition to the rounding of its own terms.
        has_factors: Whether there may be factors other than 0.
    """
    eps = _ROUNDINGS * torch.finfo(used.dtype).eps
    if not used.any() or not (torch.isfinite(used).all() and torch.isfinite(base).all()):
        return None
    if bool(((used - base).abs() <= room + eps * base.abs()).all()):
        return GradientFit(1.0, torch.zeros_like(known.decay))
    if has_factors and (exact := exact_factor(used, base)) is not None:
        return GradientFit(exact, torch.zeros_like(known.decay))
    u, g, v = used.double(), base.double(), w.double()
    part = torch.repeat_interleave(torch.tensor(list(sizes))).to(u.device)
    ones, none = u.new_ones(len(sizes)), u.new_zeros(len(sizes))

    def sums(values: Float[Tensor, " P"]) -> Float[Tensor, " L"]:
        # not index_add, which adds one entry after another: with many entries that loses more than _ROUNDINGS
        return torch.stack([own.sum() for own in torch.where(inside, values, 0.0).split(list(sizes))])

    def left(difference: Float[Tensor, " P"], rate: Float[Tensor, " L"]) -> Float[Tensor, " L"]:
        return sums((difference - rate[part] * v).square()).sqrt()

    def factors_of(u: Float[Tensor, " P"], g: Float[Tensor, " P"]) -> Iterator[Float[Tensor, " L"]]:
        products, squares = sums(u * g), sums(g * g)
        common = exact_factor(used[inside], base[inside]) or products.sum() / squares.sum().clamp(min=_TINY)
        yield common * ones
        own = torch.where(squares > 0, products / squares.clamp(min=_TINY), 1.0)
        own = torch.where((own - 1).abs() <= eps, 1.0, own)
        if bool(((own != 1) & (sums((g != 0).double()) > 1)).any()):
            yield own  # a single number does not determine it

    def decays_of(factor: Float[Tensor, " L"]) -> Iterator[Float[Tensor, " L"]]:
        d = u / factor[part] - g
        products, squares, terms = sums(d * v), sums(v * v), sums(g.square() + d.square()).sqrt()
        own, number = products / squares.clamp(min=_TINY), sums((v != 0).double())
        shows = (left(d, own) <= _LEFT * left(d, none)) & (left(d, none) > eps * terms) & (number > 1)
        if bool((number < 2)[part[~inside & ~zero & (v != 0)]].any()):
            return  # any decay would fit a parameter that is clipped in all entries
        if bool(shows.any()):
            same = shows & ((own / own[shows].median() - 1).abs() <= 0.1)
            common, own = products[same].sum() / squares[same].sum() * ones, torch.where(shows, own, none)
            most = 2 * left(d, own).minimum(left(d, common)) + eps * terms
            rate = known.decay.to(u) if bool(known.decay.any()) else common
            for other in (common, none, own):  # the first of the closest ones
                rate = torch.where(left(d, rate) <= most, rate, other)
            yield rate

    def candidates(kind: str) -> Iterator[tuple[Tensor, Tensor]]:
        if kind == "mask":
            yield ones, none
        elif kind == "decay":
            yield from ((ones, decay) for decay in decays_of(ones))
        elif kind == "factor" and has_factors:
            yield from ((factor, none) for factor in factors_of(u, g))
        elif kind == "both" and has_factors:  # the factor comes from the component orthogonal to the weights
            square = sums(v * v).clamp(min=_TINY)
            across = (x - (sums(x * v) / square)[part] * v for x in (u, g))
            yield from ((factor, decay) for factor in factors_of(*across) for decay in decays_of(factor))

    zero, at = (u == 0) & (g != 0), torch.zeros_like(u, dtype=torch.bool)
    if has_factors:  # clipped entries have the largest value of their parameter
        at = (u != 0) & (u.abs() == none.scatter_reduce(0, part, u.abs(), "amax")[part])
        bounds, number, counts = u.abs()[at].unique(return_inverse=True, return_counts=True)
        at = at.masked_scatter(at, ((counts > 1) | (bounds == bounds.max()))[number])
    for kind in ("mask", "factor", "decay", "both"):
        for inside in (torch.ones_like(zero), ~zero, ~(zero | at)):
            for factor, decay in candidates(kind):
                predicted = g + decay[part] * v
                whole = torch.where(inside, factor[part], torch.where(zero, 0.0, u / predicted))
                allowed = room + eps * whole.abs() * (g.abs() + (decay[part] * v).abs())
                is_shrunk = inside | ((whole >= 0) & (whole <= 1 + eps))
                if bool((((u - whole * predicted).abs() <= allowed) & is_shrunk).all()):
                    is_one, is_all = bool((factor == factor[0]).all()), bool(inside.all())
                    own = whole.to(w) if not is_all else float(factor[0]) if is_one else factor.cpu()
                    return GradientFit(own, decay.cpu())
    return None


_after_backward: Any = torch.autograd.Variable._execution_engine.queue_callback


class ArrivedGradient:
    """A copy of the gradient after the last backward pass of a step, before clipping, masks and noise.

    Args:
        model: The network.
        parameters: Returns the parameters; None if some are missing.
    """

    def __init__(self, model: FunctionalModel, parameters: Callable[[], Sequence[Tensor] | None]) -> None:
        self._model, self._parameters = model, parameters
        self._flat: Tensor | None = None
        self._memory: Tensor | None = None

    def keep_after_backward(self, used: Mapping[str, Tensor]) -> None:
        """Copy it when the running backward pass ends, except for parameters whose gradient an optimizer has used."""
        # DDP's callback for averaging gradients is queued in between
        _after_backward(lambda: _after_backward(lambda: self._keep(used)))

    def _keep(self, used: Mapping[str, Tensor]) -> None:
        model, parameters = self._model, self._parameters()
        if parameters is None:
            return  # this is refused at the next batch
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        parts = [g.to_dense() if g.is_sparse else g for g in gradients]
        if self._flat is not None:
            before = zip(model.names, self._flat.split(model.sizes), parts, strict=True)
            parts = [own if name in used else part for name, own, part in before]
        memory = self._memory if model.num_weights > FEW_WEIGHTS else None
        self._flat, self._memory = flattened(parts, memory), self._flat

    def take(self, gradient: Float[Tensor, " P"], without: Set[str]) -> Float[Tensor, " P"] | None:
        """Return the gradient, and begin anew; the used gradient itself if nothing changed it.

        Args:
            gradient: The gradient that was used.
            without: Names of parameters without a gradient.

        Returns:
            None if no gradient was seen.
        """
        flat, self._flat = self._flat, None
        if flat is None:
            return None
        for name, part in zip(self._model.names, flat.split(self._model.sizes), strict=True) if without else ():
            if name in without:
                part.zero_()
        if not torch.equal(flat, gradient):
            return flat
        self._memory = flat
        return gradient


class GradientTerms:
    """A loop's changes to its gradients that earlier steps show and that hold for later steps.

    The gradient that arrives through backward() is scale * inner(g), where g is the gradient through the outputs. An L2
    penalty in the loss is the decay of `inner`, which a checked step shows: for sum_k lambda_k |w_k|^2 / 2 it is
    lambda_k.

    Attributes:
        inner: The masks and decays of the last checked step; they hold for later steps.
        scale: The factor of a GradScaler in the last step that had one.
        is_fixed: Whether no other terms are accepted, because the step is already recorded.
        is_always_checked: Whether every step must be checked, because changes of its gradient are not seen.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.inner = self.nothing = GradientFit(1.0, torch.zeros(len(sizes), dtype=torch.float64))
        self.scale, self.is_fixed, self.is_always_checked = 1.0, False, False
        # decay is known from a checked step; until then, weights that were zero take the others' decay
        self._has_shown = torch.zeros(len(sizes), dtype=torch.bool)
        self._num_changes = 0

    @property
    def is_empty(self) -> bool:
        """Whether gradients were unchanged so far, so that no step must be checked for changes."""
        return not self.is_always_checked and self._num_changes <= _MOST_CHANGES and self.inner.is_identity

    def needs_check(self, w: Float[Tensor, " P"], came: Float[Tensor, " P"]) -> bool:
        """Return whether a step must be checked: terms change, are seen for the first time, or a mask differs."""
        factor, has_decay = self.inner.factor, bool(self.inner.decay.any())
        is_other = isinstance(factor, Tensor) and bool(came[factor == 0].any())
        is_new = has_decay and bool((self._shows(w, came) & ~self._has_shown).any())
        return is_other or is_new or self.is_always_checked or self._num_changes > _MOST_CHANGES

    def learn(self, inner: GradientFit, w: Float[Tensor, " P"], came: Float[Tensor, " P"]) -> None:
        """Store the terms of a checked step, given its weights and the arrived gradient."""
        before, shows = self.inner.decay, self._shows(w, came)
        again = shows & (self._has_shown | ~self._has_shown.any())
        self._num_changes += not torch.equal(inner.decay[again], before[again])
        self.inner = replace(inner, decay=torch.where(shows | ~self._has_shown, inner.decay, before))
        self._has_shown |= shows

    def _shows(self, w: Float[Tensor, " P"], came: Float[Tensor, " P"]) -> Bool[Tensor, " L"]:
        pairs = zip(w.split(list(self.sizes)), came.split(list(self.sizes)), strict=True)
        return torch.tensor([bool(v.any()) and bool(g.any()) for v, g in pairs], dtype=torch.bool)
