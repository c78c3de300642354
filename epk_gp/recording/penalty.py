"""What a loop adds to the gradient of its loss, and what it sets to 0 in it, as the checked steps show them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.optimizers.update_rules import UpdateCoefficients, broadcast_to_params, rounded_bound, scale_gradient

_LEFT = 0.2  # share of a difference's norm that a penalty may leave, which is then compared with rounding
_MOST_CHANGES = 1  # of the rates between checked steps; after more, every step is checked


class WeightPenalty:
    """The L2 penalty of a loop's loss, and its mask of gradients, as the checked steps show them.

    The penalty is recorded as coupled weight decay. The gradient of sum_k lambda_k |w_k|^2 / 2 is lambda_k w_k for
    parameter k. So what the optimizer used less the gradient of the stated loss is a multiple of each parameter's
    weights, up to rounding. By chance it is not. The mask is recorded as a factor of the entries of the gradient.

    Attributes:
        rates: The factor lambda_k of each parameter's weights in the gradient, (L,).
        mask: 0 for the entries of the gradient, (P,), that the loop sets to 0, else 1; the number 1 where there are
            none. An entry that was 0 anyway since the recording began counts as 1.
        is_fixed: Whether no other rates are accepted, because the step is recorded already.
        is_always_checked: Whether every step must be checked, because some parameters are clipped by themselves.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.rates, self.is_fixed, self._sizes = torch.zeros(len(sizes), dtype=torch.float64), False, tuple(sizes)
        # rates that no step has shown yet, for the weights were zero; the others' rate is taken for theirs until then
        self._is_guess = torch.zeros(len(sizes), dtype=torch.bool)
        self._num_changes, self.is_always_checked = 0, False
        self.mask: float | Tensor = 1.0

    def masks(self, used: Float[Tensor, " P"], own: Float[Tensor, " P"]) -> Iterator[float | Tensor]:
        """Yield the mask of the steps before, and the one that a step shows if it is another.

        Args:
            used: The gradient that the optimizer used; one without any entry shows no mask.
            own: The gradient of the stated loss.
        """
        yield self.mask
        known = torch.zeros_like(own) + self.mask
        seen = torch.where(used != 0, 1.0, torch.where(own != 0, 0.0, known))
        if not self.is_fixed and bool(used.any()) and not torch.equal(seen, known):
            yield 1.0 if bool(seen.all()) else seen

    def gradient(self, w: Float[Tensor, " P"], rates: Float[Tensor, " L"] | None = None) -> Float[Tensor, " P"] | None:
        """Return the penalty's gradient at some weights; None without a penalty."""
        rates = self.rates if rates is None else rates
        return broadcast_to_params(rates, self._sizes, w) * w if bool(rates.any()) else None

    def needs_check(self, w: Float[Tensor, " P"], used: Float[Tensor, " P"]) -> bool:
        """Return whether a step must be checked: rates move, or are seen for the first time, or the mask is another."""
        if isinstance(self.mask, Tensor) and bool(used[self.mask == 0].any()):
            return True
        is_guess = bool(self._is_guess.any())
        is_always = self.is_always_checked or self._num_changes > _MOST_CHANGES
        return is_always or (is_guess and bool((self._is_guess & self._is_seen(w, used)).any()))

    def learn(self, rates: Float[Tensor, " L"], w: Float[Tensor, " P"], used: Float[Tensor, " P"]) -> None:
        """Take the rates of a step that was checked, from weights w with a gradient."""
        is_seen, is_new = self._is_seen(w, used), not bool(self.rates.any())
        is_known = is_seen & ~self._is_guess
        self._num_changes += not torch.equal(rates[is_known], self.rates[is_known])
        self.rates = torch.where(is_seen | is_new | self._is_guess, rates, self.rates)
        self._is_guess = ~is_seen & (self._is_guess | is_new) & bool(rates.any())

    def _is_seen(self, w: Float[Tensor, " P"], used: Float[Tensor, " P"]) -> Tensor:
        seen = [bool(v.any()) and bool(g.any()) for v, g in _pairs(w, used, self._sizes)]
        return torch.tensor(seen, dtype=torch.bool)

    def added_to(self, update: UpdateCoefficients) -> UpdateCoefficients:
        """Return the coefficients of a step with the mask, and the penalty as weight decay; clipping scales both."""
        update = scale_gradient(update, self.mask, self._sizes) if isinstance(self.mask, Tensor) else update
        rates, scale, decay = self.rates, update.grad_scale, update.weight_decay
        if not bool(rates.any()):
            return update
        if len(scale) != len(rates) or len(decay) != len(rates):
            like = scale if len(scale) != len(rates) else decay
            scale, decay, rates = (broadcast_to_params(value, self._sizes, like) for value in (scale, decay, rates))
        return replace(update, weight_decay=decay + scale * rates)

    def fitted(
        self, used: Float[Tensor, " P"], own: Float[Tensor, " P"], w: Float[Tensor, " P"], *, is_scaled: bool = False
    ) -> Float[Tensor, " L"] | None:
        """Return the rates that make of a gradient the one that was used; None if there are none.

        Args:
            used: The gradient that the optimizer used.
            own: The gradient of the stated loss.
            w: The weights.
            is_scaled: Whether the sum of both was multiplied by one factor, as clipping of the norm does.
        """
        (used, own, w), sizes = (value.double() for value in (used, own, w)), self._sizes
        if is_scaled:  # the factor is that of what stands at right angles to the weights
            upright = [
                torch.cat([u - (u @ v) / v.square().sum().clamp(min=1e-300) * v for u, v in _pairs(vector, w, sizes)])
                for vector in (used, own)
            ]
            used = used / (upright[0] @ upright[1] / upright[1].square().sum().clamp(min=1e-300))
        difference = used - own
        pairs = _pairs(difference, w, sizes)
        if not bool(difference.isfinite().all()):
            return None
        is_seen = self._is_seen(w, used).tolist()
        fits = [float(d @ v / (v @ v)) if seen else 0.0 for seen, (d, v) in zip(is_seen, pairs, strict=True)]
        is_fit = [r != 0 and len(d) > 1 and _is_like(d, r * v) for (d, v), r in zip(pairs, fits, strict=True)]
        clear = [k for k, fit in enumerate(is_fit) if fit]
        if not clear:
            return None
        middle = sorted(fits[k] for k in clear)[len(clear) // 2]
        same = [k for k in clear if abs(fits[k] - middle) <= 0.1 * abs(middle)]
        together = (torch.cat(parts) for parts in zip(*(pairs[k] for k in same), strict=True))
        rates, common = torch.zeros(len(sizes), dtype=torch.float64), _rounded(*together)
        for k, (d, v) in enumerate(pairs):
            choices = (common, 0.0, _rounded(d, v)) if is_fit[k] else (common, 0.0)
            left = [float((d - r * v).norm()) for r in choices]
            best = next(place for place, value in enumerate(left) if value <= 2 * min(left))
            rates[k] = choices[best] if is_seen[k] else common
        return rates if _is_like(difference, broadcast_to_params(rates, sizes, w) * w) else None


def _pairs(a: Tensor, b: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(a.split(list(sizes)), b.split(list(sizes)), strict=True))


def _is_like(difference: Tensor, penalty: Tensor) -> bool:
    return bool((difference - penalty).norm() <= _LEFT * difference.norm())


def _rounded(d: Tensor, v: Tensor) -> float:
    """Return by which rate v comes nearest to d, in three digits, or twice such a number, where that fits as well."""
    rate = float(d @ v / (v @ v))
    left = {r: float((d - r * v).norm()) for r in (2 * rounded_bound(rate / 2), rounded_bound(rate), rate)}
    return next(r for r, size in left.items() if size <= 2 * left[rate])
