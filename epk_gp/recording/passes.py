"""The record of a forward pass: everything that does not follow from weights, data and batch.

For a network in training mode: whether it draws random numbers, or computes something else than in evaluation mode. For
the loss, which a loop computes outside the network: its gradient in a row's outputs, delta_i. A row follows the stated
loss if delta_i = c_i d loss_i / d z_i; for cross entropy delta_i is c_i (softmax(z_i) - q_i), so the target q_i of
mixup, CutMix and label noise follows from it. For any other row delta_i itself is recorded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn import functional as F

from epk_gp.core.checks import blocks_of, is_finite
from epk_gp.core.graphs import has_rows, map_tensors, select_rows, tensors_of
from epk_gp.core.losses import (
    ClassLoss,
    CrossEntropy,
    Loss,
    NegativeLogLikelihood,
    PerSampleLoss,
    UnstatedLoss,
    classes_second,
    fit_targets,
    ignored_class,
    loss_derivatives,
    loss_input,
    loss_terms,
    sample_weights,
    soft_targets,
    targets_like,
)
from epk_gp.core.model import copied_module, perturbed_initial, random_state_kept
from epk_gp.core.show import warn_caller
from epk_gp.core.step import ForwardPass, SeenRows, Step, not_following, tensor_bytes
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints, with_tensors
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.seen import CapturedForward, MadeStep
from epk_gp.recording.setup import TrainingSetup

_ONE_FACTOR = 1e-6  # largest relative difference of a GradScaler's factors within a step
_NUM_ROWS = 8  # rows on which the modes are compared

# a possible record of a pass, the weights of its rows, and the remaining factor of the outputs' gradient
_Record = tuple[ForwardPass, Float64[Tensor, " n"], float]


def of_nodes(forward: CapturedForward, nodes: Int64[Tensor, " B"]) -> CapturedForward:
    """Return a batch's nodes of a pass over the whole graph.

    Args:
        forward: The pass.
        nodes: The nodes, repeated as they occur; the gradient of a repeated node is split evenly.

    Raises:
        StepMismatchError: The pass saw another graph, or the loss used nodes that are not in the batch.
    """
    if forward.difference is not None:
        raise StepMismatchError(
            f"the network must be called with the recorded graph: {forward.difference}. Change features and edges "
            "(DropEdge, masked features) inside the network's forward()."
        )
    n, rows = len(forward.inputs), nodes.to(forward.inputs.device)
    is_read = torch.zeros(n, dtype=torch.bool, device=rows.device)
    for gradient in forward.sent.values():
        is_read |= gradient.reshape(n, -1).any(dim=1)
    places = is_read.index_fill(0, rows, False).nonzero().squeeze(1)
    if len(places):
        raise StepMismatchError(
            f"recorder.batch() must get all nodes whose outputs the loss reads: it reads node {int(places[0])} "
            f"({len(places)} nodes in all), which the batch does not hold. A loss over several sets of nodes is one "
            "batch: recorder.batch(torch.cat(sets), weight=...) with a weight per row."
        )
    counts = rows.bincount(minlength=n)[rows]
    gradients = {place: g[rows] / counts.to(g.dtype).view(-1, *[1] * (g.ndim - 1)) for place, g in forward.sent.items()}
    return replace(
        forward,
        inputs=forward.inputs[rows],
        returned=select_rows(forward.returned, rows, n),
        outputs=None if forward.outputs is None else forward.outputs[rows],
        sent=gradients,
    )


class PassRecords:
    """Makes the records of a run's forward passes.

    Args:
        setup: The training.
        weights: The weights at the start.
    """

    def __init__(self, setup: TrainingSetup, weights: Float[Tensor, " P"]) -> None:
        self._setup, self._state = setup, setup.state(weights)
        self._has_warned = False  # about rows that do not follow the stated loss
        self._has_other_rows = False  # whether the loop changes rows: the network saw a row outside the training data
        self._factor = 0.0  # an unstated factor of the passes
        self._differing: dict[bytes, bool] = {}  # whether the network in some modes computes something else

    def step(self, index: int, made: MadeStep, statistics: tuple[Tensor, Tensor]) -> tuple[Step, ...]:
        """Return the record of a step: its batches, their weights, and its forward passes if they do not follow.

        If the loop's loss in some passes is a multiple of the stated one, there are two records: the second includes
        the factors in the weights, the first does not, because a GradScaler's factor is removed from the gradient
        before the step.

        Args:
            index: Number of the step.
            made: The optimizers' step; the factor of its passes in the first record is stored there.
            statistics: The moving statistics at the start and at the end of the step.

        Raises:
            StepMismatchError: The network saw other training points than the announced ones, or another graph.
            ValueError: All samples of a batch are ignored by the loss.
        """
        announced, setup, seen = made.announced, self._setup, list[list[_Record]]()
        is_stated = len(announced) == 1 and not isinstance(announced[0].weight, Tensor) and announced[0].weight == 1
        for batch in announced:
            samples, forwards, y = batch.samples, batch.forwards, setup.y[batch.samples.to(setup.y.device)]
            used = y if batch.targets is None or setup.stream is not None else batch.targets
            weight = 1.0 if batch.weight is None else batch.weight
            stated = torch.zeros(1) if batch.position < 0 else weight * sample_weights(setup.loss, used).cpu()
            if setup.model.signature.graph is not None:
                forwards = [of_nodes(forward, samples) for forward in forwards]
            sizes = [len(forward.inputs) for forward in forwards] or [len(samples)]
            parts = zip(*(v.split(sizes) for v in (samples, stated, y, used)), strict=True)
            seen += [] if forwards else [[(ForwardPass(len(samples)), stated, math.nan)]]
            for forward, (rows, c, of_rows, stated_ones) in zip(forwards, parts, strict=False):
                targets = of_rows, of_rows if used is y else stated_ones
                record = self._record(forward, rows, statistics)
                reads = math.inf if batch.weight is None else self._factor
                seen.append(_records_of_loss(setup, forward, record, targets, c, earlier=reads))
                self._factor = self._factor or seen[-1][0][2] * (len(seen[-1]) > 1)
            is_stated = is_stated and used is y
        rows, steps = torch.cat([batch.samples for batch in announced]), list[Step]()
        for k in range(max(map(len, seen))):
            records, weights, factors = zip(*(each[min(k, len(each) - 1)] for each in seen), strict=True)
            is_one = max(factors) - min(factors) <= _ONE_FACTOR * abs(factors[0])
            made.scale = made.scale if k else factors[0] if is_one else math.nan
            needed = () if all(record.is_plain for record in records) else records
            steps.append(Step(index, made.lr, rows, torch.cat(weights).cpu().double(), needed))
        if is_stated and torch.equal(torch.cat([each[0][1] for each in seen]).cpu(), stated):
            steps[0] = replace(steps[0], batch=announced[0].indices, sample_weights=None)
        return tuple(steps)

    def warn_of(self, step: Step) -> None:
        """Warn once that rows of a recorded step do not follow the stated loss."""
        if self._has_warned or isinstance(self._setup.loss, UnstatedLoss) or not (rows := not_following([step])):
            return
        self._has_warned, size = True, sum(p.cotangents.values.nbytes for p in step.passes if p.cotangents is not None)
        warn_caller(
            f"{rows} do not follow the stated loss. Contributions are exact: the gradients in the outputs are recorded "
            f"({size / 1e6:.2g} MB in this step). What needs the loss as a function (influence, retrain) does not take "
            "such a run: state the loop's loss (loss=), or the targets that it used (recorder.batch(targets=))."
        )

    def _record(
        self, forward: CapturedForward, rows: Int64[Tensor, " n"], statistics: tuple[Tensor, Tensor]
    ) -> ForwardPass:
        """Return the record of a pass except for its loss."""
        setup, seen = self._setup, forward.inputs
        is_recorded = torch.zeros(len(rows), dtype=torch.bool, device=setup.X.device)
        for own in self._recorded_like(seen, setup.X[rows.to(setup.X.device)]):
            is_recorded |= (seen == own).reshape(len(rows), -1).all(dim=1)
        is_known = (rows >= 0).to(is_recorded.device)  # -1 is not a training point
        self._require_announced_rows(seen, rows, is_recorded | ~is_known)
        is_kept = is_recorded & is_known if seen.shape[1:] == setup.X.shape[1:] else torch.zeros_like(is_recorded)
        other = (~is_kept).nonzero().squeeze(1)
        record, before, after = forward.record, forward.statistics, forward.statistics_after
        is_random = record.random_state is not None or record.device_random_state is not None
        is_special = record.autocast is not None or record.settings is not None
        needs_modes = is_random or is_special or self.differs_in(forward.modes)
        return replace(
            record,
            num_rows=len(rows),
            modes=forward.modes if needs_modes else None,
            inputs=SeenRows(other, seen[other]) if len(other) else None,
            statistics=None if torch.equal(before, statistics[0]) else before,
            statistics_after=None if torch.equal(after, statistics[1]) else after,
            memory_order=record.memory_order if is_random else None,
        )

    def _require_announced_rows(self, seen: Tensor, rows: Int64[Tensor, " n"], is_recorded: Bool[Tensor, " n"]) -> None:
        """Raise if the network saw training points under other points' indices.

        Augmented rows are not training points. A loop that mixes rows may produce one by rounding, so the check ends
        once the loop has shown rows that are not training points.
        """
        other = (~is_recorded).nonzero().squeeze(1)
        if self._has_other_rows or not len(other):
            return
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
        """Return recorded inputs in the shape of a pass's inputs: cut to fewer columns, at either end."""
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
        net, params = copied_module(model.module), model.unflatten(state)  # a frozen base may be large
        for part, mode in zip(net.modules(), modes.tolist(), strict=True):
            part.training = mode
        named = {name: value.clone() for name, value in {**dict(net.named_buffers()), **params}.items()}
        # dropout may leave a few nodes unchanged
        rows = (self._setup.X if model.signature.graph is not None else self._setup.X[:_NUM_ROWS]).clone()
        with torch.no_grad(), random_state_kept(model.spec.device), disable_fused_attention(), quiet_checkpoints():
            try:
                returned = model.signature.call(with_tensors(net, named), rows)
            except (RuntimeError, ValueError):  # for example one value per channel in training mode
                return True
            expected = model.returned(params, rows)
        for a, b in zip_longest(tensors_of(returned), tensors_of(expected), fillvalue=torch.empty(0)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True):
                return True
        return any(not torch.equal(named[n], params[n]) for n in model.statistics)


def _places(
    X: Shaped[Tensor, "M ..."], rows: Shaped[Tensor, "k ..."], like: Callable[[Tensor, Tensor], list[Tensor]]
) -> dict[bytes, int]:
    """Return the places in X, in the shape of the rows, of given rows, by their bytes; X is read block by block."""
    wanted, found, start = {bytes(tensor_bytes(row)) for row in rows}, dict[bytes, int](), 0
    for (block,) in blocks_of(X):
        for alike in like(rows, block):
            content, size = bytes(tensor_bytes(alike)), alike[0].nbytes
            places = {content[at : at + size]: start + at // size for at in range(0, len(content), size)}
            found |= {key: places[key] for key in wanted & places.keys()}
        start += len(block)
    return found


# Differences of an output gradient that count as rounding, by its dtype: shares of the largest gradient of the pass,
# and of the row's weight, because a softmax has that rounding even for small gradients.
TOLERANCE = {torch.float64: (1e-12, 2e-15), torch.float32: (2e-5, 1e-6)}
_LOW_PRECISION = 2e-2, 4e-3


def common_factor(values: Tensor, expected: Tensor) -> float:
    """Return the factor by which an expected tensor is closest to some values."""
    return float((values * expected).sum() / expected.square().sum().clamp(min=1e-300))


def rounding_of(gradient: Tensor) -> float:
    """Return the share of the largest output gradient that counts as rounding."""
    return TOLERANCE.get(gradient.dtype, _LOW_PRECISION)[0]


def rows_like(
    delta: Float[Tensor, "n D"], expected: Float[Tensor, "n D"], c: Float[Tensor, " n"]
) -> Bool[Tensor, " n"]:
    """Return the rows of a pass whose output gradient is the expected one, up to rounding.

    Args:
        delta: The gradient from the loop's loss, in its original dtype.
        expected: The gradient of the stated loss, with the weights.
        c: The weights.
    """
    share, floor = TOLERANCE.get(delta.dtype, _LOW_PRECISION)
    difference = (delta - expected).abs().amax(dim=1)
    return difference <= share * expected.abs().max() + floor * c.abs()


class _Fit(NamedTuple):
    """The rows of a pass that follow a loss up to a common factor, and whether no other loss would fit."""

    targets: Tensor
    c: Tensor
    follows: Tensor
    factor: float = 1.0
    is_sure: bool = True


def _fit(delta: Tensor, expected: Tensor, targets: Tensor, c: Tensor, is_alone: Tensor) -> _Fit:
    """Compare gradients of a pass, also up to one factor; `is_alone` marks rows without gradients elsewhere."""
    has_none, follows = ~delta.any(dim=1) & is_alone, rows_like(delta, expected, c) & is_alone
    c = c.masked_fill(has_none & ~follows, 0.0)  # rows that the loop's loss leaves out
    follows |= has_none
    if follows.all() or not is_alone.all():
        return _Fit(targets, c, follows)
    chosen = ~has_none & ~rows_like(torch.zeros_like(delta), expected, c)
    factor = common_factor(delta[chosen], expected[chosen])
    scaled = factor * c
    if not factor or not (has_none | rows_like(delta, factor * expected, scaled)).all():
        return _Fit(targets, c, follows)
    first = expected[chosen][:1].expand_as(expected[chosen])
    is_sure = not bool(rows_like(expected[chosen], first, c[chosen]).all())  # any loss of two outputs fits a single row
    return _Fit(targets, c, torch.ones_like(follows), factor, is_sure)


def _by_row(forward: CapturedForward) -> Float[Tensor, "n D"]:
    """Return the gradient in all numbers that the network returned for each row."""
    n, sent = len(forward.inputs), forward.sent
    tensors = [(sent.get(k), z) for k, z in enumerate(tensors_of(forward.returned)) if has_rows(z, n)]
    return torch.cat([(torch.zeros_like(z) if g is None else g).reshape(n, z.shape[1:].numel()) for g, z in tensors], 1)


def _derivatives(setup: TrainingSetup, forward: CapturedForward, loss: Loss, y: Tensor) -> Float[Tensor, "n ..."]:
    """Return the derivative of the rows' losses in their inputs, or in all numbers that the network returned."""
    if (z := forward.outputs) is not None:
        return loss_derivatives(loss, z if z.dtype in TOLERANCE else z.float(), y)
    n = len(forward.inputs)
    with torch.enable_grad():
        leaves = map_tensors(forward.returned, lambda z: z.detach().requires_grad_() if has_rows(z, n) else z)
        rows = [z for z in tensors_of(leaves) if has_rows(z, n)]
        value = loss_terms(setup.model.signature, loss, leaves, y).sum()
        found = torch.autograd.grad(value, rows, allow_unused=True, materialize_grads=True)
    return torch.cat([g.reshape(n, -1) for g in found], dim=1)


def _records_of_loss(
    setup: TrainingSetup,
    forward: CapturedForward,
    record: ForwardPass,
    targets: tuple[Shaped[Tensor, "n ..."], Shaped[Tensor, "n ..."]],
    c: Float64[Tensor, " n"],
    *,
    earlier: float,
) -> list[_Record]:
    """Compare the output gradient of a pass with the stated loss's gradient, row by row.

    A masked language model is trained on other positions each time: positions that the loss left out have no gradient.

    Args:
        setup: The training.
        forward: The pass.
        record: The pass's record except for its loss.
        targets: The recorded targets of its rows, and the targets that the loop passes, or the recorded ones again.
        c: The weights that the stated loss gives to the rows.
        earlier: The factor of the loop's loss in earlier passes, 0 if there was none; infinity if the loop states none,
            so that any factor is allowed. A changing factor may depend on the weights, as for log(mean loss).

    Returns:
        The record; if the rows follow up to a factor, first without it, then with it in the weights.

    Raises:
        StepMismatchError: With loss=None, a gradient arrived in a tensor without rows, or no gradient arrived;
            otherwise the loop's labels are those of the next positions, or its classes are in another dimension.
    """
    loss, (recorded, used), every = setup.loss, targets, torch.arange(len(c), device=targets[0].device)

    def stored(rows: Tensor, c: Tensor, others: SeenRows | None = None) -> _Record:
        gradients = SeenRows(rows, _by_row(forward)[rows].to(setup.model.spec.dtype))
        return replace(record, targets=others, cotangents=gradients), c, 1.0

    if isinstance(loss, UnstatedLoss):
        _require_gradients_of_rows(forward)
        return [stored(every, c)]
    cuts, delta = targets_like(setup.model.signature, loss, setup.X, forward.inputs, used), None
    z: Any = forward.outputs
    if z is not None and forward.sent:
        delta = forward.sent.get(forward.place, torch.zeros_like(z)).reshape(z.shape)
    elif forward.returned is not None:  # the loss takes something computed from the result
        z = loss_input(setup.model.signature, loss, forward.returned, cuts[0])
        is_known = isinstance(z, Tensor) or isinstance(loss, PerSampleLoss)
        delta = _by_row(forward) if is_known and forward.sent and forward.stray is None else None
    if delta is None or not is_finite(delta) or not c.any():
        return [(replace(record, targets=_seen_targets(loss, z, recorded, cuts[0], every >= 0)), c, 1.0)]
    weights, is_alone = c.to(delta.device), torch.ones(len(c), dtype=torch.bool, device=delta.device)
    for place, own in forward.sent.items() if forward.outputs is not None else ():
        is_alone &= (place == forward.place) | ~own.reshape(len(own), -1).any(dim=1)

    def fits(loss: Loss, cuts: list[Tensor], delta: Tensor = delta) -> Iterator[_Fit]:
        for own in _possible_labels(loss, delta, cuts):
            rated = weights if own is used else sample_weights(loss, own) * (weights / sample_weights(loss, used))
            expected = rated[:, None] * _derivatives(setup, forward, loss, own).reshape(len(own), -1)
            yield _fit(delta.reshape(len(own), -1), expected, own, rated, is_alone)

    best = _Fit(cuts[0], weights, torch.zeros_like(is_alone))
    for fit in fits(loss, cuts):
        best = fit if int(fit.follows.sum()) > int(best.follows.sum()) else best
        if best.follows.all():
            break
    if delta.ndim > 2 and isinstance(loss, ClassLoss) and not used.is_floating_point() and not best.follows.all():
        for dim in (1, -1):  # both fit if T = V
            if any(fit.follows.all() for fit in fits(replace(loss, dim=dim), cuts)):
                raise StepMismatchError(
                    f"the loss must say where scores {tuple(delta.shape)} have their classes, which lengths do not: "
                    f"the loop's loss takes dimension {dim}. State loss=epk_gp.{replace(loss, dim=dim)}."
                )
        shifted = [F.pad(labels[:, 1:], (0, 1), value=ignored_class(loss)) for labels in cuts]
        if any(fit.follows.all() for fit in fits(loss, shifted)):
            raise StepMismatchError(
                "y must hold the label of each position: the loop's loss compares the scores of each position with the "
                "label of the next one, as causal language models do: pass epk_gp.next_words(y) as y."
            )
    follows, others = best.follows, _seen_targets(loss, z, recorded, best.targets, best.follows)
    if not follows.all() and isinstance(loss, CrossEntropy | NegativeLogLikelihood) and delta.ndim == 2:
        read = _read_targets(loss, forward.outputs, delta, best.c, ~follows & is_alone)
        if read is not None:
            follows, known = follows.index_fill(0, read.index, True), [read] if others is None else [others, read]
            others = SeenRows(torch.cat([seen.index for seen in known]), torch.cat([seen.values for seen in known]))
    if not follows.all():
        rows = (~follows).nonzero().squeeze(1)
        return [stored(rows, best.c.index_fill(0, rows, 1.0), others)]
    record = replace(record, targets=others)
    if best.factor == 1:
        return [(record, best.c, 1.0)]
    room = max(TOLERANCE.get(delta.dtype, _LOW_PRECISION)[0], _ONE_FACTOR)
    is_same = earlier == 0 or abs(best.factor - earlier) <= room * abs(earlier)
    is_clear = (best.is_sure and is_same) or earlier == math.inf
    scaled = (record, best.factor * best.c, 1.0) if is_clear else stored(every, torch.ones_like(c))
    return [(record, best.c, best.factor), scaled]


def _require_gradients_of_rows(forward: CapturedForward) -> None:
    """Raise if the rows' gradients are not everything that the loop's backward pass sent into the network."""
    if forward.stray is not None:
        raise StepMismatchError(
            "with loss=None the loop's loss must be made of tensors that have one row per input: a gradient came into "
            f"one of shape {forward.stray} that it returned. Compute the loss outside of the network, or state it."
        )
    if not forward.sent:
        raise StepMismatchError(
            "with loss=None every pass of a batch must be followed by its backward() before the step: no gradient came "
            "into what the network returned. Call the network itself, net(X), and recorder.batch() after backward()."
        )


def _possible_labels(loss: Loss, gradient: Tensor, cuts: list[Tensor]) -> Iterator[Tensor]:
    """Yield possible targets of a pass: as stated, and labels without the positions that have no gradient."""
    if gradient.ndim == 2 or not isinstance(loss, ClassLoss) or cuts[0].is_floating_point():
        yield cuts[0]
        return
    for labels in cuts:
        delta = classes_second(loss, gradient, labels)
        if labels.shape == (len(delta), *delta.shape[2:]):
            seen = labels.masked_fill(~(delta != 0).any(dim=1), ignored_class(loss))
            yield from (own for own in (labels, seen) if not torch.all(own == ignored_class(loss)))


def _seen_targets(loss: Loss, z: Any, y: Tensor, used: Tensor, follows: Tensor) -> SeenRows | None:
    """Return the targets of rows that follow a loss with targets other than the recorded ones, y."""
    if used is y:
        return None
    if used.shape == y.shape:
        follows = follows & (used != y).reshape(len(y), -1).any(dim=1)
    elif used.ndim == y.ndim:  # labels of another number of positions, unlike the recorded ones
        follows = torch.ones_like(follows)
    index = follows.nonzero().squeeze(1)
    if len(index) and isinstance(loss, ClassLoss) and used.ndim == (2 if used.is_floating_point() else 1):
        used = soft_targets(loss, used, z)
    elif isinstance(z, Tensor):
        used = fit_targets(used, z)
    return SeenRows(index, used[index]) if len(index) else None


def _read_targets(
    loss: ClassLoss, z: Tensor | None, delta: Tensor, c: Tensor, rows: Bool[Tensor, " n"]
) -> SeenRows | None:
    """Return the rows whose targets follow from their gradient, with these targets: one label, or two mixed."""
    if z is None or loss.class_weights is not None:
        return None
    share, smoothing = 10 * rounding_of(delta), getattr(loss, "label_smoothing", 0.0)
    p = z.double().softmax(dim=1) if isinstance(loss, CrossEntropy) else torch.zeros_like(z, dtype=torch.float64)
    q = p - delta.double() / c.where(c != 0, 1.0)[:, None]
    top, places = ((q - smoothing / z.shape[1]) / max(1 - smoothing, 1e-300)).topk(min(2, z.shape[1]), dim=1)
    largest = top[:, 0].where((top[:, 0] - 1).abs() > share, 1.0)
    values = torch.stack([largest, 1 - largest], dim=1)[:, : z.shape[1]]
    exact = (1 - smoothing) * torch.zeros_like(q).scatter(1, places, values) + smoothing / z.shape[1]
    is_label = (largest == 1) | ((z.shape[1] > 2) & (largest > 0) & (largest < 1))
    is_read = rows & is_label & (c != 0) & rows_like(delta, c[:, None] * (p - exact), c)
    index = is_read.nonzero().squeeze(1)
    return SeenRows(index, exact[index].to(z.dtype)) if len(index) else None
