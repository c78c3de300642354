"""Text: the words of questions and training sequences, and which term of a loss each of them is.

A word is what one token adds to the text before it, so that the words of a text join to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from epk_gp.core.trajectory import Trajectory

_BROKEN = "\ufffd"  # what bytes that are no whole character are decoded to


@runtime_checkable
class Decoder(Protocol):
    """A tokenizer, as of `tokenizers`, `transformers` or `tiktoken`."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of token ids."""


Tokenizer = Decoder | Callable[[list[int]], Sequence[str]] | Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, eq=False)
class Passage:
    """A text.

    Attributes:
        words: Its words.
        terms: The loss term of which each word is the target, by its position in the targets; -1 for none.
    """

    words: list[str]
    terms: list[int]


class Text:
    """The texts of a run whose inputs are token ids.

    Args:
        run: The run. The ids are the input `input_ids`, or the first one of whole numbers for each position; what
            `attention_mask` leaves out is no word, nor is padding that has no loss.
        tokenizer: Has `decode(ids) -> str`; or a function that returns a string for each of the ids; or strings by id.

    Raises:
        TypeError: The tokenizer is nothing of this kind.
        ValueError: The inputs of the run are no token ids.
    """

    def __init__(self, run: Trajectory, tokenizer: Tokenizer) -> None:
        if not (isinstance(tokenizer, Decoder | Sequence | Mapping) or callable(tokenizer)):
            raise TypeError(
                "tokenizer must have a method decode(ids), be a function that returns a string for each of the ids, or "
                f"hold strings by id: got {type(tokenizer).__name__}."
            )
        self.run, self.tokenizer = run, tokenizer
        padding = getattr(tokenizer, "padding", None)  # of `tokenizers`
        self._pad = padding["pad_id"] if isinstance(padding, Mapping) else getattr(tokenizer, "pad_token_id", None)
        self._ids(run.inputs[:1])

    def passage(self, row: Shaped[Tensor, "..."], targets: Shaped[Tensor, "..."] | None = None) -> Passage:
        """Return the text of one packed input.

        Args:
            row: The input.
            targets: Its targets. Where there is one for each position, they are words too: that which follows the
                position, or, in a text whose own words are not these, that in its place.
        """
        ids, is_text = self._ids(row[None])
        terms, is_target = torch.full_like(ids, -1), torch.zeros_like(is_text)
        if targets is not None and targets.shape == ids.shape and not targets.is_floating_point():
            y, places = targets.cpu().long(), torch.arange(len(ids))
            is_target = (y >= 0) & (y != getattr(self.run.loss, "ignore_index", None))
            if torch.equal(y[:-1][is_target[:-1]], ids[1:][is_target[:-1]]):  # the words that follow
                ids, is_text = torch.cat([ids, y[-1:]]), torch.cat([is_text, is_target[-1:]])
                y, places, is_target = (torch.cat([x[:1], x]) for x in (y, places, is_target))
                is_target[0] = False
            ids, terms = torch.where(is_target, y, ids), torch.where(is_target, places, -1)
        if self._pad is not None:
            is_text = is_text & ((ids != self._pad) | is_target)
        return Passage(self.words(ids[is_text].tolist()), terms[is_text].tolist())

    def words(self, ids: list[int]) -> list[str]:
        """Return the word of each token of a text. The last token of a character has it; those before are empty."""
        if not isinstance(self.tokenizer, Decoder):
            given: Any = self.tokenizer
            return list(map(str, given(ids) if callable(given) else (given[k] for k in ids)))
        words, first, last = list[str](), 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[first:end])
            if text.endswith(_BROKEN) and end < len(ids):
                words.append("")
            else:
                words.append(text[len(self._decode(ids[first:last])) :])
                first, last = last, end
        return words

    def _decode(self, ids: list[int]) -> str:
        decode: Any = self.tokenizer.decode  # type: ignore[union-attr]  # `words` asks for it
        try:
            return str(decode(ids, skip_special_tokens=False))  # they are in the text that the network read
        except TypeError:
            return str(decode(ids))

    def _ids(self, rows: Shaped[Tensor, "1 ..."]) -> tuple[Int64[Tensor, " T"], Bool[Tensor, " T"]]:
        """Return the token ids of one input, and which of them are no padding."""
        signature = self.run.model.signature
        args, named = ((), {}) if signature.graph is not None else signature.unpack(rows.detach().cpu())
        found = [x for x in (*args, *named.values()) if x.ndim == 2 and not x.is_floating_point()]
        ids = named.get("input_ids", found[0] if found else None)
        if ids is None:
            raise ValueError(
                f"tokenizer= needs inputs that are token ids, whole numbers (n, T): got {tuple(self.run.inputs.shape)} "
                f"of {self.run.inputs.dtype}."
            )
        mask = named.get("attention_mask", torch.ones_like(ids))
        if signature.layout is not None and signature.layout.ragged is not None:
            mask = torch.arange(ids.shape[1]) < args[0]
        return ids[0].long(), mask[0].bool()
