"""Texts: the words of questions and training sequences, and the loss term of each.

A word is the text that one token adds, so that the words of a text join to it.
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

_BROKEN = "\ufffd"  # the decoded form of incomplete characters


@runtime_checkable
class Decoder(Protocol):
    """A tokenizer of `tokenizers`, `transformers` or `tiktoken`."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of token ids."""


Tokenizer = Decoder | Callable[[list[int]], str | Sequence[str]] | Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, eq=False)
class Passage:
    """A text.

    Attributes:
        words: Its words.
        terms: The loss term whose target each word is, by its position in the targets; -1 for none.
    """

    words: list[str]
    terms: list[int]

    def part(self, shares: Sequence[int], whole: int) -> dict[str, Any]:
        """Return the share of each word, None for words that are not targets, and the rest of the whole.

        Args:
            shares: Share of each loss term, as a multiple of the quantum.
            whole: Their sum, up to rounding and words that are not shown, such as padding.
        """
        of_words = [None if term < 0 else shares[term] for term in self.terms]
        return {"shares": of_words, "rest": whole - sum(filter(None, of_words))}


class Text:
    """The texts of a run whose inputs are token ids.

    Args:
        run: The run. The ids are the input `input_ids`, or the first input with an integer for each position; positions
            outside `attention_mask`, and padding without loss, are not words.
        tokenizer: An object with `decode(ids) -> str`, or this function; or a function that returns one string per id;
            or strings by id.

    Raises:
        TypeError: The tokenizer has none of these forms.
        ValueError: The inputs of the run are not token ids, or the tokenizer returns another number of strings.

    Attributes:
        length: Number of ids of a text, including padding.
    """

    def __init__(self, run: Trajectory, tokenizer: Tokenizer) -> None:
        if not (isinstance(tokenizer, Decoder | Sequence | Mapping) or callable(tokenizer)):
            raise TypeError(
                "tokenizer must have a method decode(ids), be that or a function that returns a string for each of the "
                f"ids, or hold strings by id: got {type(tokenizer).__name__}."
            )
        self.run, self.tokenizer = run, tokenizer
        padding = getattr(tokenizer, "padding", None)  # in `tokenizers`
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
            targets: Its targets. If there is one for each position, they are words too: the next word after the
                position, or, in a text whose own words differ from these, the word at the position.
        """
        ids, is_text = self._ids(row[None])
        terms, is_target = torch.full_like(ids, -1), torch.zeros_like(is_text)
        if targets is not None and targets.shape == ids.shape and not targets.is_floating_point():
            y, places = targets.cpu().long(), torch.arange(len(ids))
            is_target = (y >= 0) & (y != getattr(self.run.loss, "ignore_index", None))
            if torch.equal(y[:-1][is_target[:-1]], ids[1:][is_target[:-1]]):  # targets are the next words
                ids, is_text = torch.cat([ids, y[-1:]]), torch.cat([is_text, is_target[-1:]])
                y, places, is_target = (torch.cat([x[:1], x]) for x in (y, places, is_target))
                is_target[0] = False
            ids, terms = torch.where(is_target, y, ids), torch.where(is_target, places, -1)
        if self._pad is not None:
            is_text = is_text & ((ids != self._pad) | is_target)
        return Passage(self.words(ids[is_text].tolist()), terms[is_text].tolist())

    def words(self, ids: list[int]) -> list[str]:
        """Return the word of each token of a text. The last token of a character has it; earlier ones are empty.

        Raises:
            ValueError: The tokenizer returns another number of words.
        """
        given: Any = self.tokenizer
        if not isinstance(given, Decoder):
            found = given(ids) if callable(given) else [given[k] for k in ids]
            if len(found) == len(ids) and not isinstance(found, str):
                return list(map(str, found))
            if not isinstance(found, str):  # one text for all ids, as from `decode`
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
            return str(decode(ids, skip_special_tokens=False))  # special tokens are part of the network's text
        except TypeError:
            return str(decode(ids))

    def _ids(self, rows: Shaped[Tensor, "1 ..."]) -> tuple[Int64[Tensor, " T"], Bool[Tensor, " T"]]:
        """Return the token ids of one input, and a mask of those that are not padding."""
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
    """The words whose log-probability is requested, and the change of each by training.

    Attributes:
        words: For each explained text and position the next word, or the word at the position; -100 without a request.
        changes: Change of its log-probability by training, or 0.
    """

    words: Int64[Tensor, "m T"]
    changes: Float[Tensor, "m T"]


def words_asked(request: ReportRequest, text: Text) -> WordsAsked | None:
    """Return the words whose log-probability is explained; None if other numbers are explained."""
    run, X, asked = request.trajectory, request.explained, request.function_of(request.points)
    terms = None if asked is None else log_probabilities(run, X, asked)
    if terms is None:
        return None
    with torch.no_grad():
        z = logits_of(run.model_for(X).returned(run.model.unflatten(flat_state(run, run.num_steps, X)), X[:1]))
    if z.ndim < 3:  # for a class
        return None
    answers = terms.data[0].reshape(len(X), -1).cpu()
    ends = (network_outputs(*ask(run, X, terms), state=state).cpu() for state in (-1, 0))
    left_out = text.length - answers.shape[1]  # positions without a requested word; negative: before the text
    return WordsAsked(F.pad(answers, (left_out, 0), value=-100), F.pad(operator.sub(*ends), (left_out, 0)))


def split_texts(
    request: ReportRequest, found: Explained, text: Text, rule: Rule, path: WeightPath | None
) -> tuple[Sequence[str], str]:
    """Add, to the content of each explained output, the contribution of each word of the training texts that it names.

    Returns:
        Reasons that these shares are not certified, and that there are none; empty if they are, and there are.
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
        with filter_own_warnings("ignore", CertificateWarning):  # `write_report` warns
            result = attribute_tokens(run, sequences=chosen, rule=rule, path=path, **asked)
    except ValueError as error:  # arguments are valid: the loss or the network has no such shares
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
    """Return the training texts that moved each text's numbers most, as text for printing.

    Args:
        asked: `epk_gp.attribute(trajectory, X, ...)`.
        trajectory: The run.
        X: The texts.
        tokenizer: The argument of `epk_gp.write_report`.
        top: Number of training texts for each number, the largest contributions by absolute value first.
        width: Largest number of characters of a text; the middle of a longer one is left out.

    Raises:
        TypeError: The tokenizer is invalid.
        ValueError: The inputs of the run are not token ids, or X is not the explained input.
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
