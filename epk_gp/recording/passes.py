"""The record of a forward pass: what of it does not follow from weights, data and batch.

Of a network in training mode: whether it draws random numbers, or computes something else than in evaluation mode. Of
the loss, which a loop computes outside of the network: its gradient in a row's outputs, delta_i = c_i d loss_i / d z_i,
shows what it did to the row (`_used_targets`). Under cross entropy delta_i is c_i (softmax(z_i) - q_i), so the target
q_i (mixup, CutMix, label noise) and the weight c_i of a row follow from it. What does not follow is left as stated, and
the check of the step's gradient decides.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from epk_gp.core.checks import blocks_of, is_finite
from epk_gp.core.graphs import tensors_of
from epk_gp.core.losses import (
    ClassLoss,
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    UnstatedLoss,
    classes_second,
    ignored_class,
    loss_derivatives,
    sample_weights,
    soft_targets,
    targets_like,
)
from epk_gp.core.model import copied_module, perturbed_initial, random_state_kept
from epk_gp.core.step import ForwardPass, SeenRows, Step, tensor_bytes
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints, with_tensors
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.observer import CapturedForward, MadeStep
from epk_gp.recording.setup import TrainingSetup

# torch notes in a global variable that a mode is entered, and puts it back as it was: one thread at a time.
_ENTERED = threading.RLock()

_NUM_ROWS = 8  # rows on which the modes are compared


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Let everything random in this thread draw from a generator, and nothing from torch's global one.

    The numbers are those that the global generator would give with the same seed. Seeding that one instead would
    disturb every other thread that draws from it, and be disturbed by them.

    Args:
        generator: A generator on the CPU.
    """
    with _ENTERED, _Draws(generator):
        yield


@final
class _Draws(TorchDispatchMode):
    """Give a generator to every operation that takes one and got none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            with suppress(RuntimeError, TypeError):  # it has no form that takes a generator
                return func.overloadpacket(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


def of_nodes(forward: CapturedForward, nodes: Int64[Tensor, " B"]) -> CapturedForward:
    """Return what a pass of the whole graph holds of a batch's nodes.

    Args:
        forward: The pass.
        nodes: The nodes, each as often as it occurs; such a node's gradient is split evenly.

    Raises:
        StepMismatchError: The pass saw another graph, or the loss read nodes that are not in the batch.
    """
    if forward.difference is not None:
        raise StepMismatchError(
            f"the network must be called with the recorded graph: {forward.difference}. Change features and edges "
            "(DropEdge, masked features) inside the network's forward()."
        )
    rows, gradient = nodes.to(forward.inputs.device), forward.output_gradient
    if forward.outputs is None or gradient is None or len(gradient) != len(forward.inputs):
        return replace(forward, inputs=forward.inputs[rows])
    is_outside = torch.ones(len(gradient), dtype=torch.bool, device=rows.device).index_fill(0, rows, False)
    read = (is_outside & gradient.flatten(1).any(dim=1)).nonzero().squeeze(1)
    if len(read):
        raise StepMismatchError(
            f"recorder.batch() must get all nodes whose outputs the loss reads: it reads node {int(read[0])} "
            f"({len(read)} nodes in all), which the batch does not hold. A loss over several sets of nodes is one "
            "batch: recorder.batch(torch.cat(sets), weight=...) with a weight per row."
        )
    counts = rows.bincount(minlength=len(gradient))[rows].to(gradient.dtype)
    gradient = gradient[rows] / counts.view(-1, *[1] * (gradient.ndim - 1))
    return replace(forward, inputs=forward.inputs[rows], outputs=forward.outputs[rows], output_gradient=gradient)


class PassRecords:
    """Makes the records of a run's forward passes.

    Args:
        setup: The training.
        weights: The weights at which it begins.
    """

    def __init__(self, setup: TrainingSetup, weights: Float[Tensor, " P"]) -> None:
        self._setup, self._state = setup, setup.state(weights)
        self._has_other_rows = False  # whether the network saw a row that is no training point: the loop changes rows
        self._differing: dict[bytes, bool] = {}  # whether the network in some modes is another one

    def step(self, index: int, made: MadeStep, statistics: tuple[Tensor, Tensor]) -> Step:
        """Return the record of a step: its batches, their weights, and its forward passes if they do not follow.

        Args:
            index: Number of the step.
            made: What the optimizers did; it learns whether the loss of a pass may be another one, or its factor.
            statistics: The moving statistics at the start and at the end of the step.

        Raises:
            StepMismatchError: The network saw other training points than those that were announced, or another graph.
            ValueError: All samples of a batch are ignored by the loss.
        """
        y, passes, weights, announced = self._setup.y, list[ForwardPass](), list[Tensor](), made.announced
        is_stated = len(announced) == 1 and not isinstance(announced[0].weight, Tensor) and announced[0].weight == 1
        for batch in announced:
            samples, forwards = batch.samples, batch.forwards
            weight, is_read = (1.0, True) if batch.weight is None else (batch.weight, False)
            is_empty, labels = batch.position < 0, y[samples.to(y.device)]
            stated = torch.zeros(1) if is_empty else weight * sample_weights(self._setup.loss, labels).cpu()
            if self._setup.model.signature.graph is not None:
                forwards = [of_nodes(forward, samples) for forward in forwards]
            sizes = [len(forward.inputs) for forward in forwards] or [len(samples)]
            used = list(stated.split(sizes))
            passes += [] if forwards else [ForwardPass(len(samples))]
            for number, (forward, rows) in enumerate(zip(forwards, samples.split(sizes), strict=False)):
                record, used[number], is_doubtful = self._record(forward, rows, used[number], statistics, is_read)
                made.is_doubtful |= is_doubtful
                passes.append(record)
            weights.append(torch.cat(used))
            is_stated = is_stated and torch.equal(weights[-1], stated)
        needed = () if all(forward.is_plain for forward in passes) else tuple(passes)
        if is_stated:
            return Step(index, made.lr, announced[0].indices, None, needed)
        rows = torch.cat([batch.samples for batch in announced])
        return Step(index, made.lr, rows, torch.cat(weights).cpu().double(), needed)

    def _record(
        self,
        forward: CapturedForward,
        rows: Int64[Tensor, " n"],
        c: Tensor,
        statistics: tuple[Tensor, Tensor],
        is_read: bool,
    ) -> tuple[ForwardPass, Tensor, bool]:
        """Return the record of a pass, the weights of its rows in the loss, and whether the loss may be another one."""
        setup = self._setup
        is_recorded = torch.zeros(len(rows), dtype=torch.bool, device=setup.X.device)
        for own in self._recorded_like(forward.inputs, setup.X[rows.to(setup.X.device)]):
            is_recorded |= (forward.inputs == own).reshape(len(rows), -1).all(dim=1)
        is_known = (rows >= 0).to(is_recorded.device)  # -1 is no training point
        is_recorded &= is_known
        inputs, targets, cotangents, is_doubtful = None, None, None, False
        if not is_recorded[is_known].all():
            self._require_announced_rows(forward.inputs, rows, is_recorded | ~is_known)
        is_other = ~is_recorded if forward.inputs.shape[1:] == setup.X.shape[1:] else torch.ones_like(is_recorded)
        if is_other.any():
            other = is_other.nonzero().squeeze(1)
            inputs = SeenRows(other, forward.inputs[other])
        y = setup.y[rows.to(setup.y.device)]
        if isinstance(setup.loss, UnstatedLoss):
            cotangents = _cotangents(forward, setup.model.spec.dtype)
        else:
            cuts = targets_like(setup.model.signature, setup.loss, setup.X, forward.inputs, y)
            targets, c, is_doubtful = _used_targets(setup.loss, forward, y, cuts, c, is_recorded, is_read=is_read)
        seen, before, after = forward.record, forward.statistics, forward.statistics_after
        is_random = seen.random_state is not None or seen.device_random_state is not None
        is_special = seen.autocast is not None or seen.settings is not None
        needs_modes = is_random or is_special or self.differs_in(forward.modes)
        record = replace(
            seen,
            num_rows=len(rows),
            modes=forward.modes if needs_modes else None,
            inputs=inputs,
            targets=targets,
            statistics=None if torch.equal(before, statistics[0]) else before,
            statistics_after=None if torch.equal(after, statistics[1]) else after,
            memory_order=seen.memory_order if is_random else None,
            cotangents=cotangents,
        )
        return record, c.cpu().double(), is_doubtful

    def _require_announced_rows(self, seen: Tensor, rows: Int64[Tensor, " n"], is_recorded: Bool[Tensor, " n"]) -> None:
        """Raise if the network saw training points under the indices of others.

        Augmented rows are no training points. A loop that mixes rows may meet one by rounding, so it is asked only
        until the loop has shown rows that are none.
        """
        if self._has_other_rows:
            return
        other = (~is_recorded).nonzero().squeeze(1)
        index_of_row = _places(self._setup.X, seen[other], self._recorded_like)
        wrong = [(row, index_of_row.get(bytes(tensor_bytes(seen[row])))) for row in other.tolist()]
        if any(place is None for _, place in wrong):
            self._has_other_rows = True
            return
        row, place = wrong[0]
        raise StepMismatchError(
            f"recorder.batch() must get the indices of the rows that the network saw: row {row} was X[{place}], the "
            f"batch says X[{int(rows[row])}] ({len(wrong)} of {len(seen)} rows are other training points). Likely "
            "cause: the gradient is that of another batch, or the indices are in another order."
        )

    def _recorded_like(self, seen: Shaped[Tensor, "n ..."], X: Shaped[Tensor, "m ..."]) -> list[Tensor]:
        """Return recorded inputs in the shape of what a pass saw: padded to fewer columns, at either end."""
        layout = self._setup.model.signature.layout
        if layout is not None and seen.shape[1] < X.shape[1]:
            return layout.ends(X, seen.shape[1])
        return [X] if (seen.shape[1:], seen.dtype) == (X.shape[1:], X.dtype) else []

    def differs_in(self, modes: Bool[Tensor, " modules"]) -> bool:
        """Return whether the network computes something else in these modes than in evaluation mode."""
        key = modes.numpy().tobytes()
        if modes.any() and key not in self._differing:
            start, statistics = self._state.split([self._setup.model.num_weights, self._setup.model.num_statistics])
            states = (torch.cat([w, statistics]) for w in (start, perturbed_initial(start)))
            self._differing[key] = any(self._differs_at(modes, state) for state in states)
        return self._differing.get(key, False)

    def _differs_at(self, modes: Tensor, state: Tensor) -> bool:
        model = self._setup.model
        net, params = copied_module(model.module), model.unflatten(state)  # of which a frozen base may be large
        for part, mode in zip(net.modules(), modes.tolist(), strict=True):
            part.training = mode
        named = {name: value.clone() for name, value in {**dict(net.named_buffers()), **params}.items()}
        # dropout may leave a few nodes as they are
        rows = (self._setup.X if model.signature.graph is not None else self._setup.X[:_NUM_ROWS]).clone()
        with torch.no_grad(), random_state_kept(model.spec.device), disable_fused_attention(), quiet_checkpoints():
            try:
                returned = model.signature.call(with_tensors(net, named), rows)
            except (RuntimeError, ValueError):  # such as one value per channel in training mode
                return True
            expected = model.returned(params, rows)
        for a, b in zip_longest(tensors_of(returned), tensors_of(expected), fillvalue=torch.empty(0)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True):
                return True
        return any(not torch.equal(named[n], params[n]) for n in model.statistics)


def _places(
    X: Shaped[Tensor, "M ..."], rows: Shaped[Tensor, "k ..."], like: Callable[[Tensor, Tensor], list[Tensor]]
) -> dict[bytes, int]:
    """Return where X, in the shape of the rows, holds some rows, by their bytes; X is read block by block."""
    wanted, found, start = {bytes(tensor_bytes(row)) for row in rows}, dict[bytes, int](), 0
    for (block,) in blocks_of(X):
        for alike in like(rows, block):
            content, size = bytes(tensor_bytes(alike)), alike[0].nbytes
            places = {content[at : at + size]: start + at // size for at in range(0, len(content), size)}
            found |= {key: places[key] for key in wanted & places.keys()}
        start += len(block)
    return found


# Relative differences of a gradient in the outputs that count as rounding, by the dtype of the outputs.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
_LOW_PRECISION = 2e-2

# Share of the rows whose targets may be unlike the recorded ones while their inputs are as recorded: label noise. More
# of them are other targets than those that were stated.
_MOST_NOISY = 0.75
_FEW_ROWS = 4

# Weights of samples do not follow the outputs. Where the ranks of weights and losses agree by more than that, another
# loss is at work (focal loss: a cross entropy whose weights are a function of its value).
_FOLLOWS_LOSS = 0.9
_ENOUGH_ROWS = 6


def _cotangents(forward: CapturedForward, dtype: torch.dtype) -> Float[Tensor, "n D"]:
    """Return what the loop's backward pass sent into each row of what the network returned.

    Raises:
        StepMismatchError: A gradient came into a tensor that has no rows, or none came at all.
    """
    if forward.stray is not None:
        raise StepMismatchError(
            "with loss=None the loop's loss must be made of tensors that have one row per input: a gradient came into "
            f"one of shape {forward.stray} that it returned. Compute the loss outside of the network, or state it."
        )
    if forward.output_gradient is None:
        raise StepMismatchError(
            "with loss=None every pass of a batch must be followed by its backward() before the step: no gradient came "
            "into what the network returned. Call the network itself, net(X), and recorder.batch() after backward()."
        )
    return forward.output_gradient.to(dtype)


def rounding_of(outputs: Tensor) -> float:
    """Return which share of a gradient in outputs counts as rounding."""
    return _TOLERANCE.get(outputs.dtype, _LOW_PRECISION)


def common_factor(values: Tensor, expected: Tensor) -> float:
    """Return by which number an expected tensor comes nearest to some values."""
    return float((values * expected).sum() / expected.square().sum().clamp(min=1e-300))


def row_factors(values: Float[Tensor, "n C"], expected: Float[Tensor, "n C"]) -> Float[Tensor, " n"]:
    """Return the same of each row."""
    return (values * expected).sum(dim=1) / expected.square().sum(dim=1).clamp(min=1e-300)


def _as_stated(
    loss: Loss, z: Tensor, delta: Tensor, y: Tensor, c: Tensor, candidates: Iterable[Tensor], tolerance: float
) -> tuple[Tensor, Tensor, float] | None:
    """Return targets and weights that give the stated loss the gradient in the outputs, but for a factor, and that."""
    for labels in candidates:
        weights = c if labels is y else sample_weights(loss, labels).to(c) * (c / sample_weights(loss, y).to(c))
        derivative, by_row = loss_derivatives(loss, z, labels), (-1, *[1] * (z.ndim - 1))
        expected = weights.view(by_row) * derivative
        factor, sizes = common_factor(delta, expected), 1 + derivative.reshape(len(z), -1).abs().amax(dim=1)
        bound = tolerance * max(1.0, abs(factor)) * weights.abs() * sizes
        if bool(((delta - factor * expected).abs() <= bound.view(by_row)).all()):
            return labels, weights, factor
    return None


KnownLoss = CrossEntropy | NegativeLogLikelihood | MeanSquaredError


def _used_targets(
    loss: Loss,
    forward: CapturedForward,
    y: Tensor,
    cuts: list[Tensor],
    c: Float64[Tensor, " n"],
    is_recorded: Bool[Tensor, " n"],
    *,
    is_read: bool,
) -> tuple[SeenRows | None, Tensor, bool]:
    """Find the targets and weights that explain the gradient in the outputs.

    A masked language model is trained on other positions each time: those that the loss left out have no gradient.

    Args:
        loss: The stated loss.
        forward: The pass.
        y: The recorded targets of its rows.
        cuts: These, or those that the rows may have had (`targets_like`).
        c: The weights that the stated loss gives to the rows.
        is_recorded: Which rows of the input are as recorded.
        is_read: Whether all rows have a factor that is not stated.

    Returns:
        Targets of rows that have others than the recorded ones, weights of all rows, whether these may not be the
        loop's.

    Raises:
        StepMismatchError: The loop's labels are those of the next positions; or its classes are in another dimension;
            or the pass had another number of positions than y, and its labels are not found.
    """
    outputs, gradient = forward.outputs, forward.output_gradient
    if outputs is None or gradient is None or not is_finite(gradient) or not c.any():
        return None, c, is_read
    z, delta, c, tolerance = outputs.double(), gradient.double(), c.to(outputs.device), rounding_of(outputs)
    if not delta.any() and cuts[0].shape == y.shape and loss_derivatives(loss, z, y).any():
        return None, 0 * c, False  # the loop's loss of the pass is 0
    found = _as_stated(loss, z, delta, y, c, _possible_labels(loss, delta, cuts), tolerance)
    if found is not None:
        labels, weights, factor = found
        differs = (labels != y).reshape(len(y), -1).any(dim=1) if labels.shape == y.shape else torch.ones(len(y)).bool()
        index = differs.nonzero().squeeze(1).to(labels.device)
        return SeenRows(index, labels[index]) if len(index) else None, weights * (factor if is_read else 1.0), False
    if z.ndim > 2 and isinstance(loss, ClassLoss) and not y.is_floating_point():
        for own in (replace(loss, dim=dim) for dim in (1, -1)):  # where T = V both fit
            if _as_stated(own, z, delta, y, c, _possible_labels(own, delta, cuts), tolerance) is not None:
                raise StepMismatchError(
                    f"the loss must say where scores {tuple(z.shape)} have their classes, which lengths do not: the "
                    f"loop's loss takes dimension {own.dim}. State loss=epk_gp.{own}."
                )
        shifted = (F.pad(labels[:, 1:], (0, 1), value=ignored_class(loss)) for labels in cuts)
        if _as_stated(loss, z, delta, y, c, _possible_labels(loss, delta, [*shifted]), tolerance) is not None:
            raise StepMismatchError(
                "y must hold the label of each position: the loop's loss compares the scores of each position with the "
                "label of the next one, as causal language models do: pass epk_gp.next_words(y) as y."
            )
        if cuts[0].shape != y.shape:
            raise StepMismatchError(
                f"labels of positions must be y's where the pass has positions, {tuple(cuts[0].shape)} of "
                f"{tuple(y.shape)}: the outputs' gradient is not {loss}'s there. State loss and weight, or loss=None."
            )
    unknown = (None, c, True)
    if is_read or z.ndim > 2:
        return unknown
    derivative = loss_derivatives(loss, z, y)
    scale = c.abs()[:, None] * (1 + derivative.abs().amax(dim=1, keepdim=True))
    is_like = _within(delta - c[:, None] * derivative, tolerance * scale)
    ratio = row_factors(delta, derivative)
    is_weighted = _within(delta - ratio[:, None] * derivative, tolerance * (scale + ratio.abs()[:, None]))
    if is_weighted.all() and _are_weights(ratio, derivative, is_recorded):
        return None, torch.where(is_like, c, ratio), False
    if not isinstance(loss, KnownLoss) or getattr(loss, "class_weights", None) is not None:
        return unknown
    values, is_valid = read_targets(loss, z, delta, c, 10 * tolerance)
    if not isinstance(loss, MeanSquaredError) and z.shape[1] > 2:
        # two mixed labels leave a class out; the gradient of another loss does not
        floor = getattr(loss, "label_smoothing", 0.0) / z.shape[1]
        is_valid &= (values.amin(dim=1) - floor).abs() <= 10 * tolerance
    other = ~is_like
    if not is_valid[other].all() or not _is_plausible(loss, values, y, other, is_recorded):
        return unknown
    index = other.nonzero().squeeze(1)
    return SeenRows(index, values[index].to(outputs.dtype)), c, False


def _possible_labels(loss: Loss, gradient: Tensor, cuts: list[Tensor]) -> Iterator[Tensor]:
    """Yield targets that a pass may have had: as stated, and labels without the positions that have no gradient."""
    if gradient.ndim == 2 or not isinstance(loss, ClassLoss) or cuts[0].is_floating_point():
        yield cuts[0]
        return
    for labels in cuts:
        delta = classes_second(loss, gradient, labels)
        if labels.shape == (len(delta), *delta.shape[2:]):
            seen = labels.masked_fill(~(delta != 0).any(dim=1), ignored_class(loss))
            yield from (own for own in (labels, seen) if not torch.all(own == ignored_class(loss)))


def _within(difference: Tensor, bound: Tensor) -> Tensor:
    return (difference.abs() <= bound).all(dim=1)


def _are_weights(ratio: Tensor, derivative: Tensor, is_recorded: Tensor) -> bool:
    """Return whether factors of the rows' gradients are weights of samples, and not the sign of another loss.

    With two classes, or one output, the gradients of all losses are multiples of each other: only the ranks tell then.
    """
    num_outputs, rows = derivative.shape[1], len(ratio)
    if num_outputs == 1 or (num_outputs == 2 and not is_recorded.all()) or bool((ratio < 0).any()):
        return False
    if rows < _ENOUGH_ROWS:
        return num_outputs > 2
    ranks = torch.stack([value.argsort().argsort().double() for value in (ratio, derivative.abs().amax(dim=1))])
    return abs(float(torch.corrcoef(ranks)[0, 1])) <= _FOLLOWS_LOSS


def read_targets(
    loss: KnownLoss, z: Float[Tensor, "n C"], delta: Float[Tensor, "n C"], c: Float[Tensor, " n"], room: float
) -> tuple[Float[Tensor, "n C"], Bool[Tensor, " n"]]:
    """Return the targets that explain a gradient, and for which rows they are targets at all, up to some rounding."""
    scaled = delta / c.where(c != 0, 1e-300)[:, None]
    if isinstance(loss, MeanSquaredError):
        factor = z.shape[1] if loss.reduction == "mean" else 1
        return z - scaled * factor / 2, torch.ones_like(c, dtype=torch.bool)
    q = z.softmax(dim=1) - scaled if isinstance(loss, CrossEntropy) else -scaled
    is_valid, hard = (q >= -room).all(dim=1) & ((q.sum(dim=1) - 1).abs() <= room), q.round()
    return torch.where(((q - hard).abs() <= room).all(dim=1)[:, None], hard, q), is_valid


def _is_plausible(loss: KnownLoss, values: Tensor, y: Tensor, other: Tensor, is_recorded: Tensor) -> bool:
    """Return whether other targets are those of a loop that changes targets, and not of one that was stated wrongly."""
    noisy = other & is_recorded
    if not noisy.any():
        return True  # mixed rows with mixed targets
    count, rows = int(noisy.sum()), len(noisy)
    if isinstance(loss, MeanSquaredError):
        return rows >= _FEW_ROWS and count <= rows / 2
    if not is_recorded.all():
        return True
    if not bool((values[other] == values[other].round()).all()):
        return values.shape[1] > 2  # mixed inside the network
    expected = soft_targets(loss, y, values)
    if count > 1 and torch.equal(values[other].sum(dim=0), expected[other].sum(dim=0).round()):
        return False  # the recorded targets in another order
    return count <= max(1, _MOST_NOISY * rows)
