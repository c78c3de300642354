"""What a loop does to a gradient: a factor and a decay of each parameter make one gradient of another one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from epk_gp.optimizers.update_rules import UpdateCoefficients, broadcast_to_params, scale_gradient

_ROUNDINGS = 16  # of an entry that was multiplied and added to a few times
_LEFT = 0.2  # share of a difference's norm that a decay may leave, which is then compared with rounding
_MOST_CHANGES = 1  # of what checked steps show; after more, every step is checked


@dataclass(frozen=True, eq=False)
class GradientFit:
    """A gradient as factor * (base + decay * w).

    Attributes:
        factor: One number, one for each parameter, (L,), or one for each entry, (P,).
        decay: The factor of the weights of each parameter, (L,).
    """

    factor: float | Tensor
    decay: Float64[Tensor, " L"]

    def of(self, base: Float[Tensor, " P"], w: Float[Tensor, " P"], sizes: Sequence[int]) -> Float[Tensor, " P"]:
        """Return the gradient."""
        whole = base + broadcast_to_params(self.decay, sizes, w) * w if bool(self.decay.any()) else base
        factor = self.factor
        return whole * (broadcast_to_params(factor, sizes, w) if isinstance(factor, Tensor) else factor)

    def added_to(self, update: UpdateCoefficients, sizes: Sequence[int]) -> UpdateCoefficients:
        """Return the coefficients of a step on the base, given those of the step on the gradient."""
        update = scale_gradient(update, self.factor, sizes)
        rates, scale, decay = self.decay, update.grad_scale, update.weight_decay
        if not bool(rates.any()):
            return update
        if len(scale) != len(rates) or len(decay) != len(rates):
            like = scale if len(scale) != len(rates) else decay
            scale, decay, rates = (broadcast_to_params(value, sizes, like) for value in (scale, decay, rates))
        return replace(update, weight_decay=decay + scale * rates)


def fit_gradient(
    used: Float[Tensor, " P"],
    base: Float[Tensor, " P"],
    w: Float[Tensor, " P"],
    sizes: Sequence[int],
    *,
    room: float = 0.0,
    factors: Literal["none", "common", "own"] = "own",
    known: GradientFit | None = None,
) -> GradientFit | None:
    """Return the factor and the decay of each parameter that make one gradient of another; None if none do.

    These are tried in this order: one factor, or one for each parameter; a decay; both. Each is tried for all entries,
    then without those that are 0 in the gradient alone, then without those that are clipped to a bound too.

    Args:
        used: The gradient.
        base: The other one.
        w: The weights.
        sizes: Number of weights of each parameter.
        room: By how much an entry may differ beside the rounding of its own terms.
        factors: Whether there may be a factor beside 0: none, one for all parameters, or any.
        known: The fit of a step before: entries that it sets to 0 remain so where the base is 0.
    """
    none = torch.zeros(len(sizes), dtype=torch.float64)
    if not used.any() or not (torch.isfinite(used).all() and torch.isfinite(base).all()):
        return None
    masked = known.factor == 0 if known is not None and isinstance(known.factor, Tensor) else None
    has_mask = masked is not None and len(masked) == len(w) and bool(masked.any())
    if factors != "none" and not has_mask and (factor := _exact_factor(used, base)) is not None:
        return GradientFit(factor, none)
    fitting = _Fitting((used, base, w), sizes, room, None if known is None else known.decay)
    for kind in ("factor", "decay", "both"):
        for inside, is_clipped in fitting.insides(masked if has_mask else None, clips=factors == "own"):
            for own, decay in fitting.candidates(kind, inside, factors):
                whole, whole_decay = own[fitting.part], decay[fitting.part]
                predicted = fitting.g + whole_decay * fitting.v
                whole = torch.where(inside, whole, torch.where(is_clipped, fitting.u / predicted, 0.0))
                if not bool((whole < 0)[is_clipped].any()) and bool(fitting.explains(whole, whole_decay).all()):
                    if not bool(inside.all()):
                        return GradientFit(whole.to(w), decay.cpu())
                    is_one = bool((own == own[0]).all())
                    return GradientFit(float(own[0]) if is_one else own.cpu(), decay.cpu())
    return None


def _exact_factor(used: Tensor, base: Tensor) -> float | None:
    """Return the number whose product with one gradient is another, bit by bit; None if there is none."""
    if int(base.count_nonzero()) < 2:  # one number shows no factor
        return None
    place = base.abs().argmax()
    ratio = used[place] / base[place]
    one = torch.ones((), dtype=used.dtype, device=used.device)
    down, up = (torch.nextafter(ratio, ratio + sign * one) for sign in (-1, 1))
    further = (torch.nextafter(value, value + sign * one) for value, sign in ((down, -1), (up, 1)))
    return next((float(f) for f in (ratio, down, up, *further) if torch.equal(base * f, used)), None)


class _Fitting:
    """Two gradients and the weights in float64, with the number of each entry's parameter."""

    def __init__(self, vectors: Sequence[Tensor], sizes: Sequence[int], room: float, known: Tensor | None) -> None:
        self.used, self.base, _ = vectors
        self.u, self.g, self.v = (value.double() for value in vectors)
        self.room, self.eps, self.count = room, torch.finfo(vectors[0].dtype).eps, len(sizes)
        self.known = self.u.new_zeros(len(sizes)) if known is None else known.to(self.u)
        self.part = torch.repeat_interleave(torch.tensor(list(sizes))).to(self.u.device)

    def by_parameter(self, values: Float[Tensor, " P"], inside: Bool[Tensor, " P"]) -> Float[Tensor, " L"]:
        """Return the sums of each parameter's entries."""
        return self.u.new_zeros(self.count).index_add_(0, self.part, torch.where(inside, values, 0.0))

    def explains(self, factor: Float[Tensor, " P"], decay: Float[Tensor, " P"]) -> Bool[Tensor, " P"]:
        """Return which entries are factor * (base + decay * w) up to rounding."""
        added = decay * self.v
        allowed = self.room + _ROUNDINGS * self.eps * factor.abs() * (self.g.abs() + added.abs())
        return (self.u - factor * (self.g + added)).abs() <= allowed

    def insides(
        self, masked: Bool[Tensor, " P"] | None, *, clips: bool
    ) -> Iterator[tuple[Bool[Tensor, " P"], Bool[Tensor, " P"]]]:
        """Yield which entries a factor and a decay must make: all, those that are no mask's, those not clipped."""
        u, g = self.u, self.g
        nowhere = torch.zeros_like(u, dtype=torch.bool)
        zero = (u == 0) & (g != 0) if masked is None else (u == 0) & ((g != 0) | masked)
        if masked is None:
            yield ~nowhere, nowhere
        if bool(zero.any()) or masked is not None:
            yield ~zero, nowhere
        if clips:
            most = u.new_zeros(self.count).scatter_reduce_(0, self.part, u.abs(), "amax")[self.part]
            at = (u.abs() == most) & (g.abs() > most) & (u * g > 0)
            bounds, number, counts = u.abs()[at].unique(return_inverse=True, return_counts=True)
            is_shown = (counts > 1) | (bounds == u.abs().max())  # one entry of a parameter alone shows no bound
            at = at.masked_scatter(at, is_shown[number])
            if bool(at.any()):
                yield ~zero & ~at, at

    def candidates(
        self, kind: str, inside: Bool[Tensor, " P"], factors: Literal["none", "common", "own"]
    ) -> Iterator[tuple[Float[Tensor, " L"], Float[Tensor, " L"]]]:
        """Yield factors and decays of the parameters, (L,)."""
        u, g, v = self.u, self.g, self.v
        none, ones = u.new_zeros(self.count), u.new_ones(self.count)
        if kind == "decay":
            yield from ((ones, decay) for decay in self.decays(ones, inside))
            return
        if kind == "factor":
            yield ones, none
        if factors == "none":
            return
        if kind == "both":  # the factor is that of what stands at right angles to the weights
            square = self.by_parameter(v * v, inside).clamp(min=1e-300)
            u, g = (x - (self.by_parameter(x * v, inside) / square)[self.part] * v for x in (u, g))
        products, squares = self.by_parameter(u * g, inside), self.by_parameter(g * g, inside)
        common = ones * (self.exactly(inside) or products.sum() / squares.sum().clamp(min=1e-300))
        own = torch.where(squares > 0, products / squares.clamp(min=1e-300), 1.0)
        if kind == "factor":
            yield common, none
        else:
            yield from ((common, decay) for decay in self.decays(common, inside))
        if factors == "own":
            number = self.by_parameter((self.g != 0).to(u) + (v != 0) * (kind == "both"), inside)
            if kind == "both":
                many = torch.where(number > 3, own, common)
                yield from ((many, decay) for decay in self.decays(many, inside))
                return
            off = ~self.holds(ones, none, inside)
            exact = self.exactly(inside & off[self.part])
            together = exact or products[off].sum() / squares[off].sum().clamp(min=1e-300)
            shared = torch.where(off, together, 1.0)
            chosen = torch.where(self.holds(shared, none, inside), shared, own)
            if bool(((chosen != 1) & (number > 1)).any()):  # one number alone shows no factor
                yield chosen, none

    def exactly(self, inside: Bool[Tensor, " P"]) -> float | None:
        """Return the number that some entries were multiplied with, if they were, bit by bit."""
        return _exact_factor(self.used[inside], self.base[inside])

    def holds(
        self, factor: Float[Tensor, " L"], decay: Float[Tensor, " L"], inside: Bool[Tensor, " P"]
    ) -> Bool[Tensor, " L"]:
        """Return which parameters are explained."""
        missed = ~self.explains(factor[self.part], decay[self.part])
        return self.by_parameter(missed.to(self.u), inside) == 0

    def decays(self, factor: Float[Tensor, " L"], inside: Bool[Tensor, " P"]) -> Iterator[Float[Tensor, " L"]]:
        """Yield the decays of all parameters, given their factors, if there are any.

        Each parameter has the known one, the common one, none or its own: the first that comes as near as any, up to
        rounding. One with less than two weights that are not 0 shows none of its own.
        """
        v, d = self.v, self.u / factor[self.part] - self.g
        products, squares = self.by_parameter(d * v, inside), self.by_parameter(v * v, inside)
        own, none = products / squares.clamp(min=1e-300), torch.zeros_like(products)
        terms = self.by_parameter(self.g.square() + d.square(), inside).sqrt()

        def left(rate: Float[Tensor, " L"]) -> Float[Tensor, " L"]:
            return self.by_parameter((d - rate[self.part] * v).square(), inside).sqrt()

        number = self.by_parameter((v != 0).to(v), inside)
        shows = (number > 1) & (left(own) <= _LEFT * left(none)) & (left(none) > 4 * self.eps * terms)
        if not bool(shows.any()):
            return
        middle = own[shows].median()
        same = shows & ((own - middle).abs() <= 0.1 * middle.abs())
        common = products[same].sum() / squares[same].sum() * torch.ones_like(own)
        room = 2 * torch.where(shows, left(own), left(none)).minimum(left(common)) + self.eps * terms
        rate = self.known
        for other in (common, none, torch.where(shows, own, none)):
            rate = torch.where(left(rate) <= room, rate, other)
        yield rate


class GradientTerms:
    """What a loop does to its gradients, as the steps so far show it, but for what single steps show by themselves.

    The gradient that came through backward() is scale * inner(g), with g what came through the outputs: the L2 penalty
    of a loss is the decay of `inner`, which a checked step shows. That of sum_k lambda_k |w_k|^2 / 2 is lambda_k.

    Attributes:
        inner: The masks and decays of the last checked step, which hold for the steps after it.
        edit: What the last step with an edit did to its gradient after backward().
        scale: The factor of a GradScaler in the last checked step.
        is_fixed: Whether nothing else is accepted, because the step is recorded already.
        is_always_checked: Whether every step must be checked, because edits of its gradient are not seen.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.nothing = GradientFit(1.0, torch.zeros(len(sizes), dtype=torch.float64))
        self.inner, self.edit, self.scale = self.nothing, self.nothing, 1.0
        self.is_fixed = self.is_always_checked = False
        # decays that no step has shown yet, for the weights were zero; the others' decay is taken for theirs until then
        self._is_guess, self._num_changes = torch.zeros(len(sizes), dtype=torch.bool), 0

    def needs_check(self, w: Float[Tensor, " P"], came: Float[Tensor, " P"]) -> bool:
        """Return whether a step must be checked: terms move, or are seen for the first time, or a mask is another."""
        factor = self.inner.factor
        if self.is_always_checked or self._num_changes > _MOST_CHANGES:
            return True
        if isinstance(factor, Tensor) and bool(came[factor == 0].any()):
            return True
        return bool(self._is_guess.any()) and bool((self._is_guess & self._is_seen(w, came)).any())

    def learn(self, inner: GradientFit, w: Float[Tensor, " P"], came: Float[Tensor, " P"]) -> None:
        """Take what a checked step shows, from weights w with a gradient."""
        rates, before, is_seen = inner.decay, self.inner.decay, self._is_seen(w, came)
        is_new = not bool(before.any())
        is_known = is_seen & ~self._is_guess
        self._num_changes += not torch.equal(rates[is_known], before[is_known])
        rates = torch.where(is_seen | is_new | self._is_guess, rates, before)
        self._is_guess = ~is_seen & (self._is_guess | is_new) & bool(rates.any())
        self.inner = replace(inner, decay=rates)

    def _is_seen(self, w: Float[Tensor, " P"], came: Float[Tensor, " P"]) -> Bool[Tensor, " L"]:
        pairs = zip(w.split(list(self.sizes)), came.split(list(self.sizes)), strict=True)
        return torch.tensor([bool(v.any()) and bool(g.any()) for v, g in pairs], dtype=torch.bool)
