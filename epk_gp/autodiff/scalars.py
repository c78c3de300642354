"""Numbers that are asked of a network: what it returns for rows of inputs, mapped to numbers by a function.

A run is asked by the same run with another network: its inputs are rows with their numbers, by which each row finds
the data that belong to it, however the engine divides, repeats or reorders rows. Its outputs are the numbers.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64, Integer, Shaped
from torch import Tensor, nn

from epk_gp.core import losses
from epk_gp.core.checks import door, validate_tensor
from epk_gp.core.graphs import has_rows, map_tensors, rows_of, select_rows, tensors_of
from epk_gp.core.inputs import Signature, side_by_side
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import PASS_BYTES, TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.trajectory import Trajectory, flat_state, network_outputs

_NUM_COMPARED = 64  # rows of which a function's numbers are compared with those of the row alone
# Digits of the numbers by which a checkpoint knows the function again: rounding on another machine moves the others.
_DIGITS = {torch.float64: 10, torch.float32: 6}


@dataclass(frozen=True, eq=False, init=False)
class RowFunction:
    """A function of what a network returns, with data that belong to the rows of the inputs.

    Attributes:
        function: Called as function(returned, *data) with what the network returned for m rows of inputs, such as the
            logits (m, T, V), and the data of these rows. It gives numbers (m,) or (m, K), row by row.
        data: A tensor (n, ...) with a row for each of the n inputs, or (), one number for all of them; on any device.
    """

    function: Callable[..., Tensor]
    data: tuple[Shaped[Tensor, "..."], ...]

    @door
    def __init__(self, function: Callable[..., Tensor], *data: Shaped[Tensor, "..."]) -> None:
        """Keep function and data.

        Raises:
            TypeError: The function cannot be called, or something else of the data is no tensor.
        """
        if not callable(function):
            raise TypeError(f"function must map what the network returns to numbers (n,) or (n, K): got {function!r}.")
        for value in data:
            validate_tensor(value, "data of a function")
        vars(self).update(function=function, data=data)

    @classmethod
    def of(cls, function: "Function") -> "RowFunction":
        """Return a function with its data, of which a plain one has none."""
        return function if isinstance(function, RowFunction) else RowFunction(function)


Function = Callable[..., Tensor] | RowFunction  # maps what a network returns for n rows to numbers


@dataclass(frozen=True, kw_only=True)
class AskedSignature(Signature):
    """How a network is called with rows that end in their numbers, and what is made of that which it returns.

    Attributes:
        recorded: The signature that the network was recorded with.
        shape: Shape of one of its packed inputs.
        dtype: Their dtype, where they are integers.
        function: Maps what the network returns to numbers.
    """

    recorded: Signature
    shape: tuple[int, ...]
    dtype: torch.dtype
    function: RowFunction

    def pack(self, X: Any, name: str = "X") -> Tensor:
        """Return packed rows as they are."""
        packed: Tensor = X
        return packed

    def call(
        self,
        function: Callable[..., Any],
        rows: Shaped[Tensor, "m E"],
        spec: TensorSpec | None = None,
        mark: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Any:
        """Call a network with rows, and return the numbers of what it returns for them."""
        X = rows[:, :-1].reshape(len(rows), *self.shape).contiguous()
        X = X if X.is_floating_point() else X.to(self.dtype)
        returned = self.recorded.call(function, X, spec, mark)
        return self.numbers(returned, rows[:, -1].to(torch.int64), spec, mark)

    def numbers(
        self,
        returned: Any,
        rows: Int64[Tensor, " m"],
        spec: TensorSpec | None = None,
        mark: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Any:
        """Return what the function makes of that which the network returned for some rows."""
        data = [value.to(rows.device) if spec is None else spec.cast(value) for value in self.function.data]
        values = self.function.function(returned, *(mark(value[rows]) if value.ndim else value for value in data))
        return values if spec is None or not isinstance(values, Tensor) else spec.cast(values)


def ask(
    trajectory: Trajectory, X: Shaped[Tensor, "n ..."], function: Function
) -> tuple[Trajectory, Shaped[Tensor, "n E"]]:
    """Return a run as it is asked for numbers: with the network that gives them, and with its inputs.

    Args:
        trajectory: The recorded run.
        X: n packed inputs.
        function: Maps what the network returns for them to numbers, (n,) or (n, K).

    Raises:
        TypeError: The function cannot be called, or returns no floating-point numbers.
        ValueError: It fails; it returns another shape, NaN or infinity; it mixes rows; nothing of what it returns
            depends on what the network returned; or its data have another number of rows than the inputs.
    """
    asked, base, n = RowFunction.of(function), trajectory.model.signature, len(X)
    for value in asked.data:
        if value.ndim and len(value) != n:
            raise ValueError(
                f"data of a function must have a row for each of the {n} inputs: got shape {tuple(value.shape)}."
            )
    own = asked.function
    if isinstance(own, partial) and own.func.__module__ == __name__ and X.ndim == 2:
        own = partial(own, length=X.shape[1])  # by which positions are told from words
    asked = RowFunction(own, *(value.detach().to(X.device) for value in asked.data))
    signature = AskedSignature(graph=base.graph, recorded=base, shape=tuple(X.shape[1:]), dtype=X.dtype, function=asked)
    dtype = X.dtype if X.is_floating_point() else torch.int64
    rows = side_by_side([X, torch.arange(n, device=X.device)], dtype)
    K, size = _validated(trajectory, X, signature)
    parts = trajectory.model.__getstate__() | {"signature": replace(signature, rows_per_call=size)}
    model = FunctionalModel(**parts)
    run = replace(trajectory, model=model, inputs=rows, num_outputs=K, live=None, asked_of=trajectory)
    digest = hashlib.blake2b(f"{trajectory.digest} asked for {K}".encode(), digest_size=16)
    for state in (0, -1):
        values = network_outputs(run, rows, state=state)
        _require_finite(values, "trained" if state else "initial")
        digest.update(" ".join(f"{value:.{_DIGITS[values.dtype]}g}" for value in values.flatten().tolist()).encode())
    return replace(run, digest=digest.hexdigest()), rows


def _validated(trajectory: Trajectory, X: Shaped[Tensor, "n ..."], signature: AskedSignature) -> tuple[int, int]:
    """Return the number K of numbers of a row, and how many rows are evaluated at a time, after all checks of `ask`."""
    model, n = trajectory.model_for(X), len(X)
    params = model.unflatten(flat_state(trajectory, trajectory.num_steps, X))
    with torch.no_grad():
        first = model.returned(params, X[:1])
        size = max(1, min(_NUM_COMPARED, PASS_BYTES // max(1, rows_of(first, 1).nbytes)))
        returned = model.returned(params, X[:size])
    m = min(n, size)
    rows, (at_leaves, leaves) = torch.arange(m, device=X.device), with_leaves(returned, m)

    def called(returned: Any, rows: Int64[Tensor, " m"]) -> Float[Tensor, "m *K"]:
        try:
            with disable_fused_attention():
                values = signature.numbers(returned, rows, model.spec)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            shapes = ", ".join(f"{tuple(z.shape)}" for z in tensors_of(returned))
            raise ValueError(
                f"function must take what the network returns for {len(rows)} rows, {type(returned).__name__} with "
                f"{shapes}, and the data of these rows, which come with epk_gp.RowFunction(function, data): it fails: "
                f"{error}"
            ) from error
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"function must return a floating-point tensor, which can be differentiated: got {got}.")
        if values.ndim not in (1, 2) or len(values) != len(rows) or not values.numel():
            raise ValueError(
                f"function must map what the network returns for {len(rows)} rows to numbers ({len(rows)},) or "
                f"({len(rows)}, K): got shape {tuple(values.shape)}."
            )
        return values

    with torch.enable_grad():
        values = called(at_leaves, rows)
        is_graph = values.requires_grad and leaves
        found = torch.autograd.grad(values.sum(), leaves, allow_unused=True) if is_graph else ()
    if all(gradient is None for gradient in found):
        raise ValueError(
            "function must be differentiable in what the network returns: its numbers do not depend on it by anything "
            "that torch differentiates (detach(), no_grad(), argmax, words that are generated)."
        )
    values = values.detach()
    _require_finite(values.reshape(m, -1), "trained")
    allowed = torch.finfo(values.dtype).eps ** 0.5 * values.abs().amax().clamp(min=1e-30)
    for i in torch.linspace(0, m - 1, min(m, _NUM_COMPARED)).long().tolist():
        twice = rows.new_tensor([i, i])
        with torch.no_grad():
            alone = called(map_tensors(select_rows(returned, twice, m), _with_another), twice)[1]
        if not bool(((alone - values[i]).abs() <= allowed).all()):
            raise ValueError(
                "function must map each row of outputs by itself, and give the same again: its result "
                f"{i} depends on other rows, or on chance."
            )
    return values.reshape(m, -1).shape[1], size


def _require_finite(values: Float[Tensor, "m K"], network: str) -> None:
    wrong = ~torch.isfinite(values).all(dim=1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(f"function must return finite numbers: those of row {row} are not for the {network} network.")


def with_leaves(returned: Any, num_rows: int) -> tuple[Any, list[Tensor]]:
    """Return what a network returned with leaves in the place of its rows, which require gradients; and these."""
    leaves = list[Tensor]()

    def leaf(z: Tensor) -> Tensor:
        if not has_rows(z, num_rows):
            return z
        leaves.append(z.detach().requires_grad_())
        return leaves[-1]

    return map_tensors(returned, leaf), leaves


def _with_another(z: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return what belongs to two equal rows with other numbers in the first of them."""
    return torch.stack([0.9 * z[0] - 0.1, z[1]]) if has_rows(z, 2) else z


def logits_of(returned: Any) -> Float[Tensor, "m ..."]:
    """Return the scores in what a network returned: the tensor itself, its `logits`, or the first of a tuple.

    Raises:
        TypeError: There are none.
    """
    z = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", returned)
    z = z[0] if isinstance(z, tuple | list) and z else z
    if not isinstance(z, Tensor) or z.ndim < 2:
        raise TypeError(
            "the network must return scores of classes or words, (n, C) or (n, T, V), as a tensor, in `logits`, or "
            f"first in a tuple: got {type(returned).__name__}. Write a function of what it returns."
        )
    return z


def log_probability(answers: Integer[Tensor, "n *A"], ignore_index: int = -100) -> RowFunction:
    """Ask for the log-probability of given classes or words, summed over positions.

    Args:
        answers: (n,): the class of each input, or the word after its last position. (n, T): a target for each position,
            as the loss takes them, so that of position t is the word after it. (n, A), A < T: of the last A positions.
        ignore_index: Stands at positions that are left out, such as those of the prompt or of padding.

    Raises:
        TypeError: The answers are no integers.
        ValueError: One is negative, or all of a row are left out.
    """
    largest = _largest_word(answers, "answers", ignore_index)
    return RowFunction(partial(_log_probability, ignore_index=ignore_index, largest=largest), answers)


def log_probabilities(asked: RowFunction) -> RowFunction | None:
    """Return the function of the single terms, by position, of a `log_probability`; None for another function."""
    function = asked.function
    if not isinstance(function, partial) or function.func is not _log_probability:
        return None
    return RowFunction(partial(_log_probabilities, **function.keywords), *asked.data)


def logit_difference(a: int | Integer[Tensor, " n"], b: int | Integer[Tensor, " n"]) -> RowFunction:
    """Ask by how much the logit of one class or word is above that of another, after the last position of a text.

    Args:
        a: The one: a number, or one for each input.
        b: The other.

    Raises:
        TypeError: They are no integers.
        ValueError: One is negative.
    """
    words = [value if isinstance(value, Tensor) else torch.tensor(value) for value in (a, b)]
    largest = max(_largest_word(value, "classes or words") for value in words)
    return RowFunction(partial(_difference, largest=largest), *words)


def loss_value(targets: Shaped[Tensor, "n ..."], loss: losses.Loss | nn.Module = losses.CrossEntropy()) -> RowFunction:
    """Ask for the loss of each input, of a text the sum over its positions.

    Args:
        targets: As the loss takes them; of a language model also the one word after the last position, (n,).
        loss: A loss of this package, or a loss module of torch.

    Raises:
        TypeError: It is no loss, or the targets are no tensor.
        ValueError: A class is negative, or all of a row are ignored.
    """
    loss = losses.as_loss(loss)
    losses.validate_stated(loss, "loss_value")
    largest = -1
    if isinstance(loss, losses.ClassLoss) and not targets.is_floating_point():
        largest = _largest_word(targets, "targets", losses.ignored_class(loss))
    return RowFunction(partial(_loss_value, loss=loss, largest=largest), targets)


def _largest_word(words: Integer[Tensor, "..."], name: str, ignore_index: int | None = None) -> int:
    """Return the largest number of a class or word, after checking that there is one in each row."""
    validate_tensor(words, name)
    if words.is_floating_point() or words.dtype == torch.bool:
        raise TypeError(f"{name} must be numbers of classes or words: got {words.dtype}. Use torch.int64.")
    counted = torch.ones_like(words, dtype=torch.bool) if ignore_index is None else words != ignore_index
    if not bool((counted if words.ndim < 2 else counted.flatten(1).any(dim=1)).all()):
        raise ValueError(f"{name} must hold a class or word for each row: all of a row are {ignore_index}, left out.")
    if int(words[counted].min()) < 0:
        left_out = "" if ignore_index is None else f", or {ignore_index} to leave a position out"
        raise ValueError(f"{name} must hold numbers from 0 on{left_out}: got {int(words[counted].min())}.")
    return int(words[counted].max())


def _require_known(largest: int, num_words: int) -> None:
    if largest >= num_words:
        raise ValueError(f"classes or words must lie in 0..{num_words - 1}, what the network knows: got {largest}.")


def _classes_second(z: Float[Tensor, "m ..."], answers: Tensor, length: int | None) -> Float[Tensor, "m ..."]:
    """Return scores (m, V, T), also if they are (m, T, V): the length of the inputs tells, or that of the answers."""
    if z.ndim == 3 and z.shape[1] != z.shape[2] and length in z.shape[1:]:
        return z if z.shape[2] == length else z.mT
    return losses.classes_second(z, answers) if answers.ndim > 1 else z.mT


def _at_end(z: Float[Tensor, "m ..."], words: Tensor, length: int | None) -> Float[Tensor, "m V"]:
    """Return the scores after the last position."""
    return z if z.ndim == 2 else _classes_second(z, words, length)[..., -1]


def _log_probability(returned: Any, answers: Tensor, **options: int) -> Float[Tensor, " m"]:
    return _log_probabilities(returned, answers, **options).sum(dim=1)


def _log_probabilities(
    returned: Any, answers: Tensor, *, ignore_index: int, largest: int, length: int | None = None
) -> Float[Tensor, "m A"]:
    z = logits_of(returned)
    if answers.ndim == 1:
        z, answers = _at_end(z, answers, length)[:, :, None], answers[:, None]
    else:
        z = _classes_second(z, answers, length)
    if z.ndim != answers.ndim + 1 or answers.shape[1] > z.shape[2]:
        raise ValueError(f"answers {tuple(answers.shape)} must be those of positions: got scores {tuple(z.shape)}.")
    z = z[:, :, z.shape[2] - answers.shape[1] :]
    _require_known(largest, z.shape[1])
    is_ignored = answers == ignore_index
    chosen = z.log_softmax(dim=1).gather(1, answers.long().masked_fill(is_ignored, 0)[:, None])[:, 0]
    return chosen.masked_fill(is_ignored, 0.0)


def _difference(returned: Any, a: Tensor, b: Tensor, *, largest: int, length: int | None = None) -> Float[Tensor, " m"]:
    z = _at_end(logits_of(returned), a, length)
    _require_known(largest, z.shape[1])
    one, other = (z.gather(1, word.long().expand(len(z))[:, None])[:, 0] for word in (a, b))
    return one - other


def _loss_value(
    returned: Any, targets: Tensor, *, loss: losses.Loss, largest: int, length: int | None = None
) -> Float[Tensor, " m"]:
    z = losses.own_input(loss, returned, targets)
    if z is None:
        z = logits_of(returned)
        z = losses.own_input(loss, _at_end(z, targets, length) if targets.ndim == 1 else z, targets)
    if z is None:
        raise ValueError(f"targets {tuple(targets.shape)} must fit what the network returns, and the loss {loss}.")
    if isinstance(loss, losses.ClassLoss):
        _require_known(largest, losses.classes_second(z, targets).shape[1])
    return losses.per_sample_losses(loss, z, targets)
