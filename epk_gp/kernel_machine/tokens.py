"""Contributions of loss terms: the targets of a training sequence that made a prediction.

The loss of a sequence is a sum of loss terms, one for each target: loss_i = sum_t loss_{i,t}. A contribution belongs to
a loss term,

    tokens[q, i, t] = -sum_s <H_{q,s}, c_{s,i} grad loss_{i,t}(w_s)>,

and the terms of a sequence add up to the contribution of the sequence. One forward-mode pass along the adjoint of a
question gives the terms of all rows of a pass; only passes that contain the requested sequences are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Unpack, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.scalars import Function
from epk_gp.core.checks import ComputeSettings, door, parse_options
from epk_gp.core.gradients import PassData
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import ClassLoss, Head
from epk_gp.core.show import Entry, Summary, number
from epk_gp.core.step import Step, fingerprint
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.adjoint import AdjointTerms
from epk_gp.kernel_machine.attribute import Attribution, parse_request, split_predictions, terms_by_sample
from epk_gp.kernel_machine.axes import PointsTable
from epk_gp.kernel_machine.certificate import warn_unless_certified
from epk_gp.kernel_machine.loss_products import LossProducts
from epk_gp.kernel_machine.terms import Groupings, TermSums
from epk_gp.optimizers.update_rules import relative_rounding
from epk_gp.quadrature.rules import Rule, WeightPath, adaptive


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TokenAttribution(Attribution):
    """The terms of a prediction, and the loss terms of chosen training sequences.

    Attributes:
        tokens: Contribution of each target of the chosen sequences, (n, C, R, T); 0 for targets that are left out.
        sequences: Numbers of the training sequences that were chosen for each output, (n, C, R).
        tokens_error: Largest |sum of the terms of a sequence - its contribution|.
        tokens_tolerance: The part of it that rounding explains.
    """

    tokens: Float[Tensor, "n C R T"]
    sequences: Int64[Tensor, "n C R"]
    tokens_error: float
    tokens_tolerance: float

    @property
    def findings(self) -> list[str]:
        """Reasons that the result is not certified, with numbers; empty if it is certified."""
        if self.tokens_error <= self.tokens_tolerance:
            return super().findings
        return [
            *super().findings,
            f"the terms of a sequence miss its contribution by {self.tokens_error:.2e}, more than "
            f"{self.tokens_tolerance:.2e}: forward mode follows something else than plain autograd",
        ]

    def _summary(self) -> Summary:
        summary, table, T = super()._summary(), PointsTable(self.network), self.tokens.shape[3]
        at_most = f"|sum of terms - sequence|; at most {number(self.tokens_tolerance)}"
        terms = Entry("largest error of terms", number(self.tokens_error), at_most)
        shape = Entry("shape of tokens", f"{tuple(self.tokens.shape)}", "of chosen sequences")
        rows = table.largest("largest tokens", self.tokens, lambda k: f"chosen {k // T} [{k % T}]")
        whole = table.table([*(summary.table.rows if summary.table is not None else ()), *rows])
        return Summary(f"{summary.title}, and to their tokens", (*summary.entries, terms, shape), whole)


class TokenSums(TermSums):
    """Sums of terms, including the loss terms of chosen sequences.

    Args:
        trajectory: The run.
        groupings: The axes of each result.
        reference: Tensor with the shape, (n, K), dtype and device of the predictions.
        sequences: The sequences, (n, K, R).
    """

    def __init__(
        self, trajectory: Trajectory, groupings: Groupings, reference: Tensor, sequences: Int64[Tensor, "n K R"]
    ) -> None:
        super().__init__(trajectory, groupings, reference)
        self.sequences = sequences
        self.tokens = reference.new_zeros(*sequences.shape, trajectory.targets.shape[1])

    @property
    def named(self) -> dict[str, Tensor]:
        """Return the tensors to which terms are added, in a fixed order."""
        return super().named | {"tokens": self.tokens}


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTerms(AdjointTerms):
    """The terms of any linear update rule, with the loss terms of chosen sequences.

    Attributes:
        sequences: The sequences: the same for all, (R,); for each input, (n, R); or for each of its outputs, (n, K, R).
    """

    sequences: Int64[Tensor, "*nK R"]

    @cached_property
    def chosen(self) -> Int64[Tensor, "n K R"]:
        """The sequences of each output of each input."""
        n, K, own = len(self.X), self.whole.num_outputs, self.sequences.to(self.X.device)
        own = own.unsqueeze(1) if own.ndim == 2 else own
        if own.ndim == 3 and (len(own) != n or own.shape[1] not in (1, K)):
            raise ValueError(
                f"sequences must be numbers (R,), ({n}, R) or ({n}, {K}, R), for {n} inputs with {K} numbers each: got "
                f"shape {tuple(self.sequences.shape)}."
            )
        return own.expand(n, K, -1)

    def identity(self) -> str:
        """Return a fingerprint of everything on which the sums depend."""
        return fingerprint(super().identity(), self.chosen)

    def totals(self, reference: Float[Tensor, "R K"], rows: Int64[Tensor, " R"]) -> TokenSums:
        """Return zero sums of some rows, on the device and in the dtype of a tensor."""
        of_rows = self.chosen.reshape(-1, self.outputs_per_row, self.chosen.shape[2])[rows.to(self.X.device)]
        return TokenSums(self.whole.recorded, self.groupings, reference, of_rows)

    def takes_whole(self, totals: TermSums, passes: Sequence[PassData]) -> bool:
        """Return whether a pass contains one of the sequences."""
        held = cast(TokenSums, totals).sequences
        return any(bool(torch.isin(data.samples, held.to(data.samples.device)).any()) for data in passes)

    def add_whole(
        self, totals: TermSums, products: LossProducts, step: Step, data: PassData, H: Float[Tensor, "R P"]
    ) -> None:
        """Add the contributions of the targets of the sequences in a pass, one output after another."""
        own = cast(TokenSums, totals)
        for row, direction in enumerate(H):
            n, k = divmod(row, own.sequences.shape[1])
            is_chosen = data.samples[:, None] == own.sequences[n, k].to(data.samples.device)
            rows = is_chosen.any(dim=1).nonzero().squeeze(1)
            if len(rows):
                found = products.of_targets(step, data, direction, rows)
                target = own.tokens[n, k, :, _positions(products.block.recorded, data, found.shape[1])]
                target -= is_chosen[rows].T.to(found) @ found


def _positions(run: Trajectory, data: PassData, length: int) -> slice:
    """Return the range of the recorded targets that a pass has: all, or the first or the last of them.

    The inputs of the pass show it: a row is conclusive if a tensor of it equals X's at one end, and not at the other.
    Inputs that the loop changed show nothing, and neither do targets, which may differ in each pass.

    Raises:
        ValueError: There are more targets than recorded, or the inputs do not show the range.
    """
    T, seen, layout = run.targets.shape[1], data.X, run.model.signature.layout
    if length == T:
        return slice(T)
    is_known, width = data.samples >= 0, seen.shape[1]
    X = run.inputs[data.samples[is_known].to(run.inputs.device)].to(seen.device)
    votes = False, False
    if length < T and width < X.shape[1]:
        ends = [X[:, :width], X[:, X.shape[1] - width :]] if layout is None else layout.ends(X, width)
        sizes = [width] if layout is None else [tensor.size for tensor in layout.of_width(width).tensors]
        same = [(end == seen[is_known]).split(sizes, dim=1) for end in ends]
        first, last = (torch.stack([part.flatten(1).all(dim=1) for part in own]) for own in same)
        votes = bool((first & ~last).any()), bool((last & ~first).any())
    if votes[0] == votes[1]:
        raise ValueError(
            f"a pass that had {length} of {T} recorded targets must show by its inputs which ones: none of its rows is "
            "X's at one end alone. Pass the attention mask in X too, or pad all batches to one length."
        )
    return slice(length) if votes[0] else slice(T - length, T)


@door
def attribute_tokens(
    trajectory: Trajectory,
    X: Inputs,
    *,
    sequences: Int64[Tensor, "*nK R"],
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    **options: Unpack[ComputeSettings],
) -> TokenAttribution:
    """Split predictions into contributions of training sequences, and chosen sequences into their loss terms.

        tokens[n, k, i, t] = -sum_s <H_s, c_{s,i} grad loss_{i,t}(w_s)>,   loss_i = sum_t loss_{i,t}

    A target's share is the contribution of training on it, given the words before it. The terms of a sequence add up to
    its contribution, which is certified.

    Args:
        trajectory: Training run on M sequences, with a class loss of several positions: targets (M, T).
        X: n inputs, as in `attribute`.
        sequences: Numbers of the training sequences to split: the same for all inputs, (R,); for each input, (n, R); or
            for each of its K numbers, (n, K, R), as `attribute(...).top(20)` returns them. Each costs a forward-mode
            pass of its rows in each step that contains it; of the whole batch if dropout is drawn for it.
        head: The argument of `attribute`.
        rule: The argument of `attribute`.
        path: The argument of `attribute`.
        classes: The argument of `attribute`.
        function: The argument of `attribute`.
        options: The options of `attribute`.

    Raises:
        TypeError, ValueError: As in `attribute`; the loss is not a known sum over positions, `sequences` are not
            numbers of training sequences, or torch has no forward mode for the network.
    """
    parsed = parse_options("attribute_tokens", ("accumulate",), **options)
    kernel, X, groupings = parse_request(trajectory, X, None, (head, rule, path), (classes, function))
    _validate(trajectory, sequences)
    kind: Callable[..., TokenTerms] = partial(TokenTerms, sequences=sequences)
    (parts,), totals = split_predictions(kernel, X, groupings, classes, parsed, splits_statistics=False, kind=kind)
    terms, shape, own = terms_by_sample(parts), parts.network.shape, cast(TokenSums, totals)
    tokens, chosen = (value.reshape(*shape, *value.shape[2:]) for value in (own.tokens, own.sequences))
    missed = (tokens.sum(dim=3) - terms["samples"].gather(2, chosen)).abs()
    allowed = relative_rounding(tokens.dtype) * tokens.abs().sum(dim=3)
    error, tolerance = (float(value.max()) if value.numel() else 0.0 for value in (missed, allowed))
    result = TokenAttribution(**terms, tokens=tokens, sequences=chosen, tokens_error=error, tokens_tolerance=tolerance)
    warn_unless_certified("the split of sequences", result.findings[len(parts.findings) :])
    return result


def _validate(run: Trajectory, sequences: Int64[Tensor, "*nK R"]) -> None:
    """Raise if the loss has no known terms, or the sequences do not exist."""
    if not isinstance(run.loss, ClassLoss) or run.targets.ndim != 2 or run.targets.is_floating_point():
        raise ValueError(
            "attribute_tokens needs a loss that is a sum over the targets of a sequence, epk_gp.CrossEntropy or "
            f"NegativeLogLikelihood with one class for each position, (M, T): got {run.loss} with targets of shape "
            f"{tuple(run.targets.shape)}. A function of your own (PerSampleLoss) does not say what its terms are."
        )
    if not isinstance(sequences, Tensor) or sequences.dtype != torch.int64 or not 1 <= sequences.ndim <= 3:
        raise TypeError(f"sequences must be an int64 tensor (R,), (n, R) or (n, K, R): got {sequences!r}.")
    if sequences.numel() and not 0 <= int(sequences.min()) <= int(sequences.max()) < run.num_points:
        raise ValueError(f"sequences must be numbers of training sequences, 0 to {run.num_points - 1}: got others.")
