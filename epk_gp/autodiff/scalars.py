"""Requested numbers: a function that maps the network's result for rows of inputs to numbers.

A question to a run becomes the same run with another network: its inputs are rows with their numbers, by which each row
finds its data, however the engine divides, repeats or reorders rows. Its outputs are the requested numbers.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64, Integer, Shaped
from torch import Tensor, nn

from epk_gp.core import losses
from epk_gp.core.checks import door, validate_tensor
from epk_gp.core.graphs import has_rows, map_tensors, rows_of, select_rows, tensors_of
from epk_gp.core.inputs import Signature, parse_signature, side_by_side
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import PASS_BYTES, TensorSpec
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.trajectory import Trajectory, flat_state, outputs_at

_NUM_COMPARED = 64  # rows whose numbers are compared with those of each row alone
# Digits of the numbers by which a checkpoint recognises the function: rounding on another machine changes later digits.
_DIGITS = {torch.float64: 10, torch.float32: 6}


@dataclass(frozen=True, eq=False, init=False)
class RowFunction:
    """A function of a network's result, with data that belong to the rows of the inputs.

    Attributes:
        function: Called as function(returned, *data) with the network's result for m rows of inputs, such as the logits
            (m, T, V), and the data of these rows. It returns numbers (m,) or (m, K), row by row.
        data: Tensors (n, ...) with a row for each of the n inputs, or (), one number for all of them; on any device.
    """

    function: Callable[..., Tensor]
    data: tuple[Shaped[Tensor, "..."], ...]

    @door
    def __init__(self, function: Callable[..., Tensor], *data: Shaped[Tensor, "..."]) -> None:
        """Store function and data.

        Raises:
            TypeError: The function cannot be called, or an item of the data is not a tensor.
        """
        if not callable(function):
            raise TypeError(f"function must map what the network returns to numbers (n,) or (n, K): got {function!r}.")
        for value in data:
            validate_tensor(value, "data of a function")
        vars(self).update(function=function, data=data)

    @classmethod
    def of(cls, function: "Function") -> "RowFunction":
        """Return a function with its data; a plain function has no data."""
        return function if isinstance(function, RowFunction) else RowFunction(function)

    @classmethod
    def log_probability(
        cls, answers: Integer[Tensor, "n *A"], ignore_index: int | None = None, dim: int | None = None
    ) -> "RowFunction":
        """Ask for the log-probability of given classes or words, summed over positions.

        Args:
            answers: (n,): the class of each input, or the word after its last position. (n, T): a target for each
                position, as the loss takes them: the target of position t is the next word. (n, A), A < T: targets
                of the last A positions.
            ignore_index: Marks positions that are left out, such as the prompt or padding; -100 always does. None takes
                the index of the run's loss.
            dim: The dimension of the network's scores that holds classes or words: 1 for (n, V, T), -1 for (n, T, V).
                None follows the run's loss, or the network, whose positions follow the length of its inputs.

        Raises:
            TypeError: The answers are not integers.
        """
        loss = losses.as_loss(losses.CrossEntropy(ignore_index=ignore_index, dim=dim))
        return cls(partial(_log_probability, loss=loss), _words(answers, "answers"))

    @classmethod
    def logit_difference(
        cls, a: int | Integer[Tensor, " n"], b: int | Integer[Tensor, " n"], dim: int | None = None
    ) -> "RowFunction":
        """Ask for the difference of two logits, of classes or of words after the last position of a text.

        Args:
            a: The first class or word: a number, or one per input.
            b: The second class or word.
            dim: The dimension of classes or words, as in `log_probability`.

        Raises:
            TypeError: `a` or `b` is not an integer.
        """
        loss, name = losses.as_loss(losses.CrossEntropy(dim=dim)), "classes or words"
        return cls(partial(_difference, loss=loss), *(_words(torch.as_tensor(each), name) for each in (a, b)))

    @classmethod
    def loss_value(cls, targets: Shaped[Tensor, "n ..."], loss: losses.Loss | nn.Module | None = None) -> "RowFunction":
        """Ask for the loss of each input, for a text the sum over its positions.

        Args:
            targets: Targets in the loss's form; for a language model also the word after the last position, (n,).
            loss: A loss of this package, or a loss module of torch. None is cross entropy, which leaves out -100 and
                the targets that the run's loss leaves out.

        Raises:
            TypeError: `loss` is not a loss, or the targets are not a tensor.
            ValueError: The loss is not stated.
        """
        if loss is None:
            loss = losses.CrossEntropy()
        elif isinstance(loss := losses.as_loss(loss), losses.ClassLoss):
            loss = replace(loss, ignore_index=losses.ignored_class(loss))
        losses.validate_stated(loss, "loss_value")
        is_words = (
            isinstance(loss, losses.ClassLoss) and isinstance(targets, Tensor) and not targets.is_floating_point()
        )
        return cls(partial(_loss_value, loss=loss), _words(targets, "targets") if is_words else targets)


Function = Callable[..., Tensor] | RowFunction  # maps a network's result for n rows to numbers


@dataclass(frozen=True, kw_only=True)
class AskedSignature(Signature):
    """The call of a network with rows that end in their numbers, and the map from its result to requested numbers.

    Attributes:
        recorded: The signature that the network was recorded with.
        shape: Shape of one of its packed inputs.
        dtype: Dtype of the packed inputs, if they are integers.
        function: Maps the network's result to numbers.
    """

    recorded: Signature
    shape: tuple[int, ...]
    dtype: torch.dtype
    function: RowFunction

    @property
    def takes_them_as_returned(self) -> bool:
        """False: the outputs are the function's numbers."""
        return False

    def pack(self, X: Any, name: str = "X") -> Tensor:
        """Return packed rows unchanged."""
        packed: Tensor = X
        return packed

    def call(
        self,
        function: Callable[..., Any],
        rows: Shaped[Tensor, "m E"],
        spec: TensorSpec | None = None,
        mark: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Any:
        """Call a network with rows, and return the numbers of its result."""
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
        """Return the function's numbers of the network's result for some rows."""
        data = [value.to(rows.device) if spec is None else spec.cast(value) for value in self.function.data]
        values = self.function.function(returned, *(mark(value[rows]) if value.ndim else value for value in data))
        return values if spec is None or not isinstance(values, Tensor) else spec.cast(values)


def ask(
    trajectory: Trajectory, X: Shaped[Tensor, "n ..."], function: Function
) -> tuple[Trajectory, Shaped[Tensor, "n E"]]:
    """Return the run of a question: with a network that gives the requested numbers, and with the question's inputs.

    Args:
        trajectory: The recorded run.
        X: n packed inputs.
        function: Maps the network's result for them to numbers, (n,) or (n, K).

    Raises:
        TypeError: The function cannot be called, or returns no floating-point numbers.
        ValueError: It fails; it returns another shape, NaN or infinity; it mixes rows; its result does not depend on
            the network's result; its data have another number of rows than the inputs; or words are not those of the
            network, or the position of words in the network's scores is unclear.
    """
    asked, base, n = RowFunction.of(function), trajectory.model.signature, len(X)
    for value in asked.data:
        if value.ndim and len(value) != n:
            raise ValueError(
                f"data of a function must have a row for each of the {n} inputs: got shape {tuple(value.shape)}."
            )
    asked = _completed(
        trajectory, X, RowFunction(asked.function, *(value.detach().to(X.device) for value in asked.data))
    )
    signature = _asked_signature(base, X, asked)
    K, size = _validated(trajectory, X, signature)
    run, rows = _asking(trajectory, X, replace(signature, rows_per_call=size), K)
    digest = hashlib.blake2b(f"{trajectory.digest} asked for {K}".encode(), digest_size=16)
    for state in (0, -1):
        values = outputs_at(run, rows, state, "logits")
        _require_finite(values, "trained" if state else "initial")
        digest.update(" ".join(f"{value:.{_DIGITS[values.dtype]}g}" for value in values.flatten().tolist()).encode())
    return replace(run, digest=digest.hexdigest()), rows


def _asking(
    trajectory: Trajectory, X: Shaped[Tensor, "n ..."], signature: AskedSignature, K: int
) -> tuple[Trajectory, Shaped[Tensor, "n E"]]:
    """Return a run whose network gives K numbers per input, with these inputs and their numbers as its own."""
    dtype = X.dtype if X.is_floating_point() else torch.int64
    rows = side_by_side([X, torch.arange(len(X), device=X.device)], dtype)
    model = FunctionalModel(**trajectory.model.__getstate__() | {"signature": signature})
    return replace(trajectory, model=model, inputs=rows, num_outputs=K, live=None, asked_of=trajectory), rows


def _asked_signature(base: Signature, X: Tensor, function: RowFunction) -> AskedSignature:
    return AskedSignature(graph=base.graph, recorded=base, shape=tuple(X.shape[1:]), dtype=X.dtype, function=function)


def scores_of_loss(
    trajectory: Trajectory, X: Shaped[Tensor, "n ..."], targets: Shaped[Tensor, "n ..."]
) -> tuple[Trajectory, Shaped[Tensor, "n E"], torch.Size] | None:
    """Return the run of the question for the loss's scores, its inputs, and the shape of a row's scores.

    Args:
        trajectory: The recorded run.
        X: n packed inputs.
        targets: Their targets.

    Returns:
        None if the loss takes something other than one tensor.
    """
    z, base = losses.own_input(trajectory.loss, _returned(trajectory, X)[2], targets[:1]), trajectory.model.signature
    if not isinstance(z, Tensor):
        return None
    function = RowFunction(partial(_own_scores, loss=trajectory.loss), targets)
    return *_asking(trajectory, X, _asked_signature(base, X, function), z.numel()), z.shape[1:]


def _own_scores(returned: Any, targets: Tensor, *, loss: losses.Loss) -> Float[Tensor, "m D"]:
    z: Tensor = losses.own_input(loss, returned, targets)
    return z.flatten(1)


def _returned(trajectory: Trajectory, X: Shaped[Tensor, "n ..."]) -> tuple[FunctionalModel, dict[str, Tensor], Any]:
    """Return the network, its weights at the end, and its result for the first input."""
    model = trajectory.model_for(X)
    params = model.unflatten(flat_state(trajectory, trajectory.num_steps, X))
    with torch.no_grad():
        return model, params, model.returned(params, X[:1])


def _validated(trajectory: Trajectory, X: Shaped[Tensor, "n ..."], signature: AskedSignature) -> tuple[int, int]:
    """Return the number K of numbers per row, and the number of rows evaluated together, after all checks of `ask`."""
    (model, params, first), n = _returned(trajectory, X), len(X)
    with torch.no_grad():
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
    """Return a network's result with its rows replaced by leaves that require gradients, and these leaves."""
    leaves = list[Tensor]()

    def leaf(z: Tensor) -> Tensor:
        if not has_rows(z, num_rows):
            return z
        leaves.append(z.detach().requires_grad_())
        return leaves[-1]

    return map_tensors(returned, leaf), leaves


def _with_another(z: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return the data of two equal rows, with other numbers in the first."""
    return torch.stack([0.9 * z[0] - 0.1, z[1]]) if has_rows(z, 2) else z


def logits_of(returned: Any) -> Float[Tensor, "m ..."]:
    """Return the scores in a network's result: the tensor itself, its `logits`, or the first of a tuple.

    Raises:
        TypeError: There are no scores.
    """
    z = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", returned)
    z = z[0] if isinstance(z, tuple | list) and z else z
    if not isinstance(z, Tensor) or z.ndim < 2:
        raise TypeError(
            "the network must return scores of classes or words, (n, C) or (n, T, V), as a tensor, in `logits`, or "
            f"first in a tuple: got {type(returned).__name__}. Write a function of what it returns."
        )
    return z


def log_probabilities(trajectory: Trajectory, X: Shaped[Tensor, "n ..."], asked: RowFunction) -> RowFunction | None:
    """Return the function of the single terms, by position, of a `log_probability`; None for another function.

    Its answers are -100 at positions that are left out.
    """
    own = _completed(trajectory, X, asked)
    if not isinstance(own.function, partial) or own.function.func is not _log_probability:
        return None
    return RowFunction(partial(_log_probabilities, **own.function.keywords), *own.data)


def _words(words: Integer[Tensor, "..."], name: str) -> Integer[Tensor, "..."]:
    """Return numbers of classes or words as int64, after checking them."""
    validate_tensor(words, name)
    if words.is_floating_point() or words.dtype == torch.bool:
        raise TypeError(f"{name} must be numbers of classes or words: got {words.dtype}. Use torch.int64.")
    return words.long()


def _completed(trajectory: Trajectory, X: Shaped[Tensor, "n ..."], asked: RowFunction) -> RowFunction:
    """Return a function of this file with the run's settings: the dimension of the classes, and ignored targets.

    The run's loss determines the dimension if its steps were checked; otherwise the network does (`_observed_dims`).

    Raises:
        ValueError: Words do not fit the positions; or a row has no word, or one that the network does not have.
    """
    own, data = asked.function, asked.data
    loss = own.keywords["loss"] if isinstance(own, partial) and own.func.__module__ == __name__ else None
    if not isinstance(own, partial) or not isinstance(loss, losses.ClassLoss) or data[0].is_floating_point():
        return asked
    returned, ignored = _returned(trajectory, X)[2], loss.ignore_index
    rows_of(returned, 1)  # raises if there are none
    z = logits_of(returned)
    if (dim := loss.dim or (1 if z.ndim == 2 else dim_of_loss(trajectory))) is None:
        dims = _fitting_dims(z, data[0][:1]) if data[0].ndim > 2 else []  # all pixels are requested
        dim = _only(dims if len(dims) == 1 else _observed_dims(trajectory, X, z), z)
    loss = replace(loss, ignore_index=None, dim=dim)
    ignored = getattr(trajectory.loss, "ignore_index", None) if ignored is None else ignored
    if ignored is not None and own.func is not _difference:
        data = tuple(value.masked_fill(value == ignored, losses.IGNORED) for value in data)
    V, *positions = z.movedim(dim, 1).shape[1:]
    for words in data:
        shape = words.shape[1:]
        most = 1 if own.func is _loss_value else math.prod(positions)
        is_part = max(len(positions), len(shape)) < 2 and shape.numel() <= most
        if not is_part and list(shape) != positions:
            raise ValueError(f"answers {tuple(words.shape)} must fit scores of {V} words at positions {positions}.")
        if bool((words == losses.IGNORED).reshape(*words.shape[:1], -1).all(dim=-1).any()):
            raise ValueError("each row must have a class or word: all of a row are left out.")
        if len(wrong := words[(words != losses.IGNORED) & ((words < 0) | (words >= V))]):
            raise ValueError(f"classes or words must be in 0..{V - 1}, or -100 to be left out: got {int(wrong[0])}.")
    return RowFunction(partial(own, loss=loss), *data)


def dim_of_loss(trajectory: Trajectory) -> int | None:
    """Return the dimension of classes in a run's loss with several positions, 1 or -1; None if it has none.

    Raises:
        ValueError: Both are possible, and no step of a training was checked.
    """
    loss, y = trajectory.loss, trajectory.targets[:1]
    if not isinstance(loss, losses.ClassLoss) or trajectory.model.signature.output is None:
        return None
    z = losses.own_input(loss, _returned(trajectory, trajectory.inputs)[2], y)
    dims = [1] if y.is_floating_point() or z is None else _fitting_dims(z, y)
    is_checked = trajectory.steps or trajectory.recorded_steps
    return None if z is None or z.ndim < 3 else loss.dim or _only(dims[:1] if is_checked else dims, z)


def _fitting_dims(z: Float[Tensor, "n ..."], words: Shaped[Tensor, "n ..."]) -> list[int]:
    """Return the dimensions of scores that may hold the classes of targets: the others have the targets' shape."""
    return [dim for dim in (1, -1) if z.movedim(dim, 1)[:, 0].shape == words.shape]


def _only(dims: list[int], z: Float[Tensor, "1 ..."]) -> int:
    """Return the one dimension of scores that holds classes.

    Raises:
        ValueError: There are two, or none is known.
    """
    if len(dims) == 1:
        return dims[0]
    (V, *first), (W, *last) = (tuple(z.movedim(dim, 1).shape[1:]) for dim in (1, -1))
    raise ValueError(
        f"dim must say where scores {tuple(z.shape)} have classes or words, which nothing else does: dim=1 stands for "
        f"{V} of them at {first} positions, dim=-1 for {W} at {last}. Pass it to the function, or to the loss."
    )


def _observed_dims(trajectory: Trajectory, X: Shaped[Tensor, "n ..."], z: Float[Tensor, "1 ..."]) -> list[int]:
    """Return the dimensions of scores that may hold classes or words: positions follow the length of the inputs.

    A network that takes inputs of one length only gives no information.
    """
    model, params, _ = _returned(trajectory, X)
    inputs, moving = model.signature.structure(X[:1]), set[int]()
    tensors = list(tensors_of(inputs))
    places = [(size, dim) for x in tensors for dim, size in enumerate(x.shape) if dim]
    for length, dim in {*places, *((size, 0) for size, _ in places)}:
        with suppress(Exception), torch.no_grad():  # any error of a network that takes inputs of one length
            packed, signature = parse_signature(map_tensors(inputs, partial(_shortened, length=length, dim=dim)), None)
            shorter = FunctionalModel(**model.__getstate__() | {"signature": signature})
            pairs = zip(logits_of(shorter.returned(params, packed)).shape, z.shape, strict=True)
            moving |= {k for k, (size, whole) in enumerate(pairs) if size != whole}
    return [dim for dim in (1, -1) if dim % z.ndim not in moving]


def _shortened(x: Shaped[Tensor, "..."], length: int, dim: int) -> Shaped[Tensor, "..."]:
    """Return a tensor shortened by one in `dim`, or for 0 in every dimension, if its size there is `length`."""
    ends = (size - (size == length and k > 0 and dim in (0, k)) for k, size in enumerate(x.shape))
    return x[tuple(map(slice, ends))]


def _scores(returned: Any, loss: losses.ClassLoss) -> Float[Tensor, "m V P"]:
    """Return the scores of all classes or words at each of P positions; one position if there are none."""
    z = logits_of(returned)
    return z[..., None] if z.ndim == 2 else z.movedim(loss.dim, 1).flatten(2)  # type: ignore[arg-type]  # `_completed`


def _log_probability(returned: Any, answers: Tensor, **options: Any) -> Float[Tensor, " m"]:
    return _log_probabilities(returned, answers, **options).sum(dim=1)


def _log_probabilities(returned: Any, answers: Tensor, *, loss: Any) -> Float[Tensor, "m A"]:
    z, answers = _scores(returned, loss), answers.reshape(len(answers), -1)
    is_ignored = answers == losses.IGNORED
    log_p = z[:, :, z.shape[2] - answers.shape[1] :].log_softmax(dim=1)
    chosen = log_p.gather(1, answers.masked_fill(is_ignored, 0)[:, None])[:, 0]
    return chosen.masked_fill(is_ignored, 0.0)


def _difference(returned: Any, a: Tensor, b: Tensor, *, loss: Any) -> Float[Tensor, " m"]:
    z = _scores(returned, loss)[..., -1]
    one, other = (z.gather(1, word.expand(len(z))[:, None])[:, 0] for word in (a, b))
    return one - other


def _loss_value(returned: Any, targets: Tensor, *, loss: losses.Loss) -> Float[Tensor, " m"]:
    z = losses.own_input(loss, returned, targets)
    if z is None:
        z = logits_of(returned)
        if isinstance(loss, losses.ClassLoss) and targets.ndim == 1 and z.ndim == 3:
            z = _scores(returned, loss)[..., -1]
        z = losses.own_input(loss, z, targets)
    if z is None:
        raise ValueError(f"targets {tuple(targets.shape)} must fit what the network returns, and the loss {loss}.")
    return losses.per_sample_losses(loss, z, targets)
