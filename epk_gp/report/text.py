"""Text: the words of questions and training sequences, and which term of a loss each of them is.

A word is what one token adds to the text before it, so that the words of a text join to it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from epk_gp.autodiff.scalars import ask, log_probabilities, logits_of
from epk_gp.core.inputs import Inputs
from epk_gp.core.show import CertificateWarning, number, shortened
from epk_gp.core.torch_overrides import filter_own_warnings
from epk_gp.core.trajectory import Trajectory, flat_state, network_outputs, parse_inputs
from epk_gp.kernel_machine.attribute import Attribution
from epk_gp.kernel_machine.certificate import Certificate
from epk_gp.kernel_machine.tokens import attribute_tokens
from epk_gp.quadrature.rules import Rule, WeightPath
from epk_gp.report.explanations import Explained, to_units
from epk_gp.report.request import ReportRequest

_BROKEN = "\ufffd"  # what bytes that are no whole character are decoded to


@runtime_checkable
class Decoder(Protocol):
    """A tokenizer, as of `tokenizers`, `transformers` or `tiktoken`."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of token ids."""


Tokenizer = Decoder | Callable[[list[int]], str | Sequence[str]] | Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, eq=False)
class Passage:
    """A text.

    Attributes:
        words: Its words.
        terms: The loss term of which each word is the target, by its position in the targets; -1 for none.
    """

    words: list[str]
    terms: list[int]

    def part(self, shares: Sequence[int], whole: int) -> dict[str, Any]:
        """Return the share of each word, None of one that is no target, and what they leave of the whole.

        Args:
            shares: Of each loss term, as a multiple of the quantum.
            whole: What they sum to, up to rounding and words that are not shown, as those of padding.
        """
        of_words = [None if term < 0 else shares[term] for term in self.terms]
        return {"shares": of_words, "rest": whole - sum(filter(None, of_words))}


class Text:
    """The texts of a run whose inputs are token ids.

    Args:
        run: The run. The ids are the input `input_ids`, or the first one of whole numbers for each position; what
            `attention_mask` leaves out is no word, nor is padding that has no loss.
        tokenizer: Has `decode(ids) -> str`, or is this function; or one that returns a string for each of the ids; or
            strings by id.

    Raises:
        TypeError: The tokenizer is nothing of this kind.
        ValueError: The inputs of the run are no token ids, or the tokenizer gives another number of strings.

    Attributes:
        length: How many ids a text has, with padding.
    """

    def __init__(self, run: Trajectory, tokenizer: Tokenizer) -> None:
        if not (isinstance(tokenizer, Decoder | Sequence | Mapping) or callable(tokenizer)):
            raise TypeError(
                "tokenizer must have a method decode(ids), be that or a function that returns a string for each of the "
                f"ids, or hold strings by id: got {type(tokenizer).__name__}."
            )
        self.run, self.tokenizer = run, tokenizer
        padding = getattr(tokenizer, "padding", None)  # of `tokenizers`
        self._pad = padding["pad_id"] if isinstance(padding, Mapping) else getattr(tokenizer, "pad_token_id", None)
        self._training: dict[int, Passage] = {}
        self.length = len(self._ids(run.inputs[:1])[0])
        self.training(0)

    def training(self, index: int) -> Passage:
        """Return a training text, with the words that are its targets."""
        if index not in self._training:
            self._training[index] = self.passage(self.run.inputs[index], self.run.targets[index])
        return self._training[index]

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
        """Return the word of each token of a text. The last token of a character has it; those before are empty.

        Raises:
            ValueError: The tokenizer gives another number of words.
        """
        given: Any = self.tokenizer
        if not isinstance(given, Decoder):
            found = given(ids) if callable(given) else [given[k] for k in ids]
            if len(found) == len(ids) and not isinstance(found, str):
                return list(map(str, found))
            if not isinstance(found, str):  # of all ids together, as of a method `decode`
                raise ValueError(
                    f"tokenizer must return a string for each of the ids, or one text: got {len(found)} strings for "
                    f"{len(ids)} ids. Leave no token out, or pass the tokenizer itself."
                )
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
        decode: Any = getattr(self.tokenizer, "decode", self.tokenizer)
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


class WordsAsked(NamedTuple):
    """The words whose log-probability is asked for, and by how much training changed it.

    Attributes:
        words: For each explained text and position the word after it, or in its place; -100 where none is asked for.
        changes: By how much training changed its log-probability, or 0.
    """

    words: Int64[Tensor, "m T"]
    changes: Float[Tensor, "m T"]


def words_asked(request: ReportRequest, text: Text) -> WordsAsked | None:
    """Return the words whose log-probability is explained; None where something else is."""
    run, X, asked = request.trajectory, request.explained, request.function_of(request.points)
    terms = None if asked is None else log_probabilities(run, X, asked)
    if terms is None:
        return None
    with torch.no_grad():
        z = logits_of(run.model_for(X).returned(run.model.unflatten(flat_state(run, run.num_steps, X)), X[:1]))
    if z.ndim < 3:  # of a class
        return None
    answers = terms.data[0].reshape(len(X), -1).cpu()
    ends = (network_outputs(*ask(run, X, terms), state=state).cpu() for state in (-1, 0))
    left_out = text.length - answers.shape[1]  # positions of which no word is asked; fewer than 0 are before the text
    return WordsAsked(F.pad(answers, (left_out, 0), value=-100), F.pad(operator.sub(*ends), (left_out, 0)))


def split_texts(
    request: ReportRequest, found: Explained, text: Text, rule: Rule, path: WeightPath | None
) -> tuple[Sequence[str], str]:
    """Add to the content of each explained output what each word of the training texts adds that it names.

    Returns:
        Why these shares are not certified, and why there are none; empty if they are, and there are.
    """
    run = request.trajectory
    contents = [found.outputs[place] for place in zip(request.rows.tolist(), request.classes.tolist(), strict=True)]
    views = [content["views"]["*|*"] for content in contents]
    named = [[(index, share) for index, share, _ in view["raised"] + view["lowered"]] for view in views]
    longest = max(map(len, named))
    if not longest or not any(term >= 0 for index, _ in max(named, key=len) for term in text.training(index).terms):
        return (), "the targets are no words of the texts"
    sequences = torch.tensor([[row[min(k, len(row) - 1)][0] if row else 0 for k in range(longest)] for row in named])
    rows = request.points if request.function is not None else request.points[request.rows]
    chosen, asked = sequences.reshape(len(rows), -1, longest), request.asked("words", rows, request.classes)
    try:
        with filter_own_warnings("ignore", CertificateWarning):  # `write_report` says it
            result = attribute_tokens(run, sequences=chosen, rule=rule, path=path, **asked)
    except ValueError as error:  # its arguments were accepted before: the loss or the network has no such shares
        return (), str(error)
    for content, row, tokens in zip(contents, named, result.tokens.flatten(0, 1), strict=True):
        units = [to_units(value, found.quantum).tolist() for value in tokens]
        content["tokens"] = {
            str(index): text.training(index).part(shares, share)
            for (index, share), shares in zip(row, units, strict=False)
        }
    return result.findings[len(Certificate.of(result).findings) :], ""


def sentences(
    asked: Attribution, trajectory: Trajectory, X: Inputs, tokenizer: Tokenizer, *, top: int = 5, width: int = 80
) -> str:
    """Return the training texts that moved each text's numbers most, to be printed.

    Args:
        asked: `epk_gp.attribute(trajectory, X, ...)`.
        trajectory: The run.
        X: The texts.
        tokenizer: As of `epk_gp.write_report`.
        top: How many training texts of each number, the largest contributions by absolute value first.
        width: Most characters of a text; the middle of a longer one is left out.

    Raises:
        TypeError: The tokenizer is none.
        ValueError: The inputs of the run are no token ids, or X is not what was asked.
    """
    text, X = Text(trajectory, tokenizer), parse_inputs(trajectory, X)
    if len(X) != len(asked.network):
        raise ValueError(f"X must be the {len(asked.network)} texts that were asked: got {len(X)}.")

    def shown(passage: Passage) -> str:
        return shortened(repr("".join(passage.words)), width)

    lines = [f"not certified: {'; '.join(asked.findings)}"] if asked.findings else []
    for n, order in enumerate(asked.top(top)):
        lines.append(f"text {n}: {shown(text.passage(X[n]))}")
        for k, indices in enumerate(order.tolist()):
            ends = (number(float(value[n, k])) for value in (asked.initial, asked.network))
            lines.append(f"  {asked.explained} {k}: {' before training, '.join(ends)} after")
            for i in indices:
                lines.append(f"    {float(asked.samples[n, k, i]):+.4g}  #{i}  {shown(text.training(i))}")
    return "\n".join(lines)
