"""An L2 penalty in the loop's loss: found in the gradient, and recorded as the coupled weight decay that it is.

The gradient of sum_k lambda_k |w_k|^2 / 2 is lambda_k w_k for parameter k. So what the optimizer used less the gradient
of the stated loss is a multiple of each parameter's weights, up to rounding. By chance it is not.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.optimizers.update_rules import UpdateCoefficients, broadcast_to_params, rounded_bound

_LEFT = 0.2  # share of a difference's norm that a penalty may leave, which is then compared with rounding
_MOST_CHANGES = 1  # of the rates between checked steps; after more, every step is checked


class WeightPenalty:
    """The L2 penalty of a loop's loss, as the checked steps show it.

    Attributes:
        rates: The factor lambda_k of each parameter's weights in the gradient, (L,).
        is_fixed: Whether no other rates are accepted, because the step is recorded already.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.rates, self.is_fixed, self._sizes = torch.zeros(len(sizes), dtype=torch.float64), False, tuple(sizes)
        # rates that no step has shown yet, for the weights were zero; the others' rate is taken for theirs until then
        self._is_guess = torch.zeros(len(sizes), dtype=torch.bool)
        self._num_changes = 0

    def gradient(self, w: Float[Tensor, " P"], rates: Float[Tensor, " L"] | None = None) -> Float[Tensor, " P"] | None:
        """Return the penalty's gradient at some weights; None without a penalty."""
        rates = self.rates if rates is None else rates
        return broadcast_to_params(rates, self._sizes, w) * w if bool(rates.any()) else None

    def needs_check(self, w: Float[Tensor, " P"], used: Float[Tensor, " P"]) -> bool:
        """Return whether a step must be checked because rates move, or because one can be seen for the first time."""
        return self._num_changes > _MOST_CHANGES or bool((self._is_guess & self._is_seen(w, used)).any())

    def learn(self, rates: Float[Tensor, " L"], w: Float[Tensor, " P"], used: Float[Tensor, " P"]) -> None:
        """Take the rates of a step that was checked, from weights w with a gradient."""
        is_seen, is_new = self._is_seen(w, used), not bool(self.rates.any())
        is_known = is_seen & ~self._is_guess
        self._num_changes += not torch.equal(rates[is_known], self.rates[is_known])
        self.rates = torch.where(is_seen | is_new | self._is_guess, rates, self.rates)
        self._is_guess = ~is_seen & (self._is_guess | is_new) & bool(rates.any())

    def _is_seen(self, w: Float[Tensor, " P"], used: Float[Tensor, " P"]) -> Tensor:
        pairs = _pairs(w, used, self._sizes)
        return torch.tensor([bool(v.any()) and bool(g.any()) for v, g in pairs], dtype=torch.bool)

    def added_to(self, update: UpdateCoefficients) -> UpdateCoefficients:
        """Return the coefficients of a step with the penalty as weight decay; clipping scales both."""
        rates = self.rates
        if not bool(rates.any()):
            return update
        scale, decay = update.grad_scale, update.weight_decay
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
        used, own, w = (value.double() for value in (used, own, w))
        sizes = self._sizes
        if is_scaled:  # the factor is that of what stands at right angles to the weights
            upright = [torch.cat([_without(u, v) for u, v in _pairs(vector, w, sizes)]) for vector in (used, own)]
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
        common = sum(float(pairs[k][0] @ pairs[k][1]) for k in same) / sum(
            float(pairs[k][1].square().sum()) for k in same
        )
        rates, common = torch.zeros(len(sizes), dtype=torch.float64), _rounded(common, [pairs[k] for k in same])
        for k, (d, v) in enumerate(pairs):
            choices = (common, 0.0, _rounded(fits[k], [pairs[k]])) if is_fit[k] else (common, 0.0)
            left = [float((d - r * v).norm()) for r in choices]
            best = next(place for place, value in enumerate(left) if value <= 2 * min(left))
            rates[k] = choices[best] if is_seen[k] else common
        return rates if _is_like(difference, broadcast_to_params(rates, sizes, w) * w) else None


def _pairs(a: Tensor, b: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(a.split(list(sizes)), b.split(list(sizes)), strict=True))


def _without(u: Tensor, v: Tensor) -> Tensor:
    return u - (u @ v) / v.square().sum().clamp(min=1e-300) * v


def _is_like(difference: Tensor, penalty: Tensor) -> bool:
    return bool((difference - penalty).norm() <= _LEFT * difference.norm())


def _rounded(rate: float, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return a rate in three digits, or twice one, where that fits as well: people choose such numbers."""

    def left(r: float) -> float:
        return sum(float((d - r * v).square().sum()) for d, v in pairs)

    short = (2 * rounded_bound(rate / 2), rounded_bound(rate))
    return next((r for r in short if left(r) <= 4 * left(rate)), rate)
