"""Ragged inputs: rows of unequal lengths, which are padded to one tensor, and rebuilt for each call of the network.

One row of a batch must be one sample; of a flat tensor with offsets, a nested tensor or a packed sequence it is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

RaggedCall = Literal["offsets", "nested", "packed", "list"]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal lengths, and the form in which a network takes a batch of them.

    Attributes:
        rows: A tensor (length, ...) per point.
        call: "offsets" for net(values, offsets), as `EmbeddingBag` takes them; "nested" for a jagged nested tensor,
            "packed" for a `PackedSequence`, "list" for a list of tensors. Nested tensors and packed sequences may also
            be passed as they are.
        longest: The largest length of a row, where it is more than that of these.
    """

    rows: Sequence[Tensor]
    call: RaggedCall
    longest: int = 0

    def padded(self) -> tuple[Int64[Tensor, " n"], Shaped[Tensor, "n L ..."]]:
        """Return lengths, and the rows padded with zeros.

        Raises:
            ValueError: There are no rows, or they differ in more than their length; or the form is unknown.
        """
        kinds = {(row.shape[1:], row.dtype) if isinstance(row, Tensor) and row.ndim else None for row in self.rows}
        if len(kinds) != 1 or None in kinds or self.call not in get_args(RaggedCall):
            raise ValueError(
                "Ragged(rows, call) must hold tensors (length, ...) of one dtype that differ in their length alone, "
                f"and a call among {', '.join(get_args(RaggedCall))}: got {self.call!r} and rows of {len(kinds)} kinds."
            )
        X = pad_sequence(list(self.rows), batch_first=True)
        lengths = torch.tensor([len(row) for row in self.rows], device=X.device)
        room = max(0, self.longest - X.shape[1])
        return lengths, F.pad(X, (*[0, 0] * (X.ndim - 2), 0, room))


def as_ragged(X: Any, call: RaggedCall | None = None, longest: int = 0) -> Ragged | None:
    """Return inputs, or what a network was called with, as rows; None if they are not ragged.

    Args:
        X: A `Ragged`, a jagged nested tensor or a `PackedSequence`; or what belongs to the form `call`: values and
            offsets, or a list.
        call: The form in which the network takes them.
        longest: The largest length of a row.
    """
    if isinstance(X, Ragged):
        return Ragged(X.rows, call or X.call, max(longest, X.longest))
    if isinstance(X, PackedSequence):
        padded, lengths = pad_packed_sequence(X, batch_first=True)
        return Ragged([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)], "packed", longest)
    if isinstance(X, Tensor) and X.layout == torch.jagged:
        return Ragged(list(X.unbind()), "nested", longest)
    if call == "offsets" and isinstance(X, list | tuple) and all(isinstance(v, Tensor) and v.ndim for v in X):
        ends = [0] if len(X) != 2 or X[1].is_floating_point() else [*X[1].flatten().tolist(), len(X[0])]
        if ends[0] == 0 < len(ends) - 1 and ends == sorted(ends):
            return Ragged(X[0].split([end - start for start, end in pairwise(ends)]), "offsets", longest)
    return Ragged(list(X), "list", longest) if call == "list" and isinstance(X, list | tuple) else None


def call_ragged(
    function: Callable[..., Any], call: str, lengths: Int64[Tensor, " n"], padded: Shaped[Tensor, "n L ..."]
) -> Any:
    """Call a network with rows in the form that it takes."""
    if call == "packed":
        return function(pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False))
    if call == "list":
        return function([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)])
    values = padded[torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]]
    ends = lengths.cumsum(0)
    if call == "offsets":
        return function(values, ends - lengths)
    return function(torch.nested.nested_tensor_from_jagged(values, F.pad(ends, (1, 0))))
