"""The result of an influence: the derivatives, with what they can be trusted for."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.show import Displayed, Entry, Summary, certificate_entry, count, kind_of, number
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.certification import mismatch_finding
from epk_gp.kernel_machine.axes import (
    describe_axes,
    group_namer,
    largest_rows,
    number_row,
    place_table,
    shown_places,
)

_BY_POINT = ("outputs", "values", "adjoint_norms")  # what has a row for each point


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Influence(Displayed):
    """How numbers that a trained network gives depend on the weights of its training samples.

    Attributes:
        outputs: The numbers, (n, K): the network's outputs, or what `function` makes of them.
        values: Their derivatives, (n, K, M), or (n, K, G_1, G_2, ...) over the axes' groups. A weight multiplies the
            loss terms of its sample; the divisor of a mean over a batch stays. `-values` predicts leaving a sample out.
        adjoint_norms: Norm of the derivative of each number in the weights w_0 .. w_S of the run, (n, K, S + 1). Where
            it grows by orders of magnitude towards the beginning, training amplifies small changes there, and the
            derivative says little about large ones.
        axes: What the values are split by.
        max_step_mismatch: Largest difference of a recorded step from the one that the training gradients give.
        mismatch_ratio: Largest ratio of such a difference to what rounding explains.
        worst_step: The step that has it; -1 for a run without steps.
        held: Parts of the training that are held as recorded, because how they follow from the gradients is not known
            here: optimizers' preconditioners by name, and "moving statistics".
        curvature_error: Share by which torch's derivative of the gradient of a step differs from differences of such
            gradients, looked at in one direction; 0 where it does not.
        doubts: What else is against the result, in words: steps that do not follow from the recorded options of the
            optimizer; of a smoothed derivative, what is against any of its runs.
        clipping: How the bound of gradient clipping is known, in words.
        run_findings: What the recorded run itself says against derivatives in samples (`certification.run_findings`).
    """

    outputs: Float[Tensor, "n K"]
    values: Float[Tensor, "n K *groups"]
    adjoint_norms: Float[Tensor, "n K S1"]
    axes: tuple[Axis, ...]
    max_step_mismatch: float
    mismatch_ratio: float
    worst_step: int
    held: tuple[str, ...]
    curvature_error: float = 0.0
    doubts: tuple[str, ...] = ()
    clipping: str = ""
    run_findings: tuple[str, ...] = ()

    @property
    def certified(self) -> bool:
        """Whether every recorded step is the one that the training gradients give, and nothing of it is held."""
        return not self.findings

    @property
    def growth(self) -> Float[Tensor, "n K"]:
        """How much larger the derivative in the weights is along the run, at most, than in the trained weights."""
        norms = self.adjoint_norms
        return norms.amax(dim=2) / norms[:, :, -1].clamp(min=torch.finfo(norms.dtype).tiny)

    @property
    def std(self) -> Float[Tensor, "n K"]:
        """Jackknife standard deviation sqrt(sum_i values_i^2), (n, K): how much retraining moves each number.

        Its order over numbers means more than its size (docs/theory.md, section 10).

        Raises:
            ValueError: The values are not split by samples alone.
        """
        self._require_samples("std")
        return self.values.square().sum(dim=2).sqrt()

    def predict(self, weights: Float[Tensor, "... M"]) -> Float[Tensor, "... n K"]:
        """Predict the numbers of networks that are trained with other weights of the samples, to first order.

        Args:
            weights: One weight per training sample, (M,) or (m, M): 1 as recorded, 0 to leave a sample out.

        Raises:
            TypeError: The weights are no tensor.
            ValueError: The values are not split by samples alone, or there is not one weight per sample.
        """
        self._require_samples("predict()")
        if not isinstance(weights, Tensor):
            raise TypeError(f"weights must be a torch.Tensor: got {type(weights).__name__}.")
        M = self.values.shape[2]
        if weights.ndim == 0 or weights.shape[-1] != M:
            raise ValueError(f"weights must hold one weight per sample, (..., {M}): got shape {tuple(weights.shape)}.")
        if not torch.isfinite(weights).all():
            raise ValueError("weights must be finite: they hold NaN or infinity.")
        changes = torch.einsum("...i,nki->...nk", weights.to(self.values) - 1, self.values)
        return self.outputs + changes

    def _require_samples(self, what: str) -> None:
        if not self._is_by_sample:
            raise ValueError(
                f"{what} needs the derivative in each sample's weight: it is split by others. Leave by= out."
            )

    @property
    def _is_by_sample(self) -> bool:
        return [axis.kind for axis in self.axes] == ["sample"] and len(self.axes[0].names) == len(self.axes[0].group)

    @cached_property
    def _is_finite(self) -> bool:
        """Whether all values are finite, looked at once: they may be many."""
        return bool(torch.isfinite(self.values).all())

    @property
    def findings(self) -> list[str]:
        """Why the result is not certified, in words; empty if it is."""
        findings = []
        if not self.mismatch_ratio <= 1:
            findings.append(mismatch_finding(self.worst_step, self.mismatch_ratio, self.max_step_mismatch))
        if self.held:
            findings.append(
                f"how {', '.join(self.held)} would change with the gradients is not known: the derivative holds it as "
                "recorded"
            )
        if not self.curvature_error <= 0:
            findings.append(
                f"torch's derivative of the gradient differs by {self.curvature_error:.2g} of its size from finite "
                "differences: the gradient is that of no function (a straight-through estimator, fake quantisation, a "
                "stop-gradient such as detach(), scale_grad_by_freq), or torch's second derivative of an operation is "
                "wrong"
            )
        findings += self.run_findings
        if not self._is_finite:
            findings.append("the derivative is not finite: it explodes along the run (`adjoint_norms`)")
        return list(dict.fromkeys([*findings, *self.doubts]))

    def _summary(self) -> Summary:
        (n, K), places = self.outputs.shape, shown_places(self.outputs)
        head = replace(self, **{name: getattr(self, name)[: len(places)] for name in _BY_POINT})
        rows = [number_row("value", places, head.outputs)]
        if places and self._is_by_sample:
            rows.append(number_row("jackknife standard deviation", places, head.std))
        if places:
            rows.append(number_row("growth along the run", places, head.growth))
        rows += largest_rows("largest derivatives", places, head.values, group_namer(self.axes))
        every = "every recorded step is the one that the training gradients give, and nothing of it is held"
        return Summary(
            f"Influence of {describe_axes(self.axes)} on {count(n, 'point')} × {count(K, 'output')}",
            (
                certificate_entry(self.findings, every),
                Entry(
                    "largest mismatch of a step", number(self.max_step_mismatch), "recorded against replayed weights"
                ),
                Entry("gradient clipping", self.clipping),
                Entry("shape of values", f"{tuple(self.values.shape)}", kind_of(self.values)),
            ),
            place_table(self.outputs, places, rows),
        )
