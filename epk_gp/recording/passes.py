"""The record of a forward pass: what of it does not follow from weights, data and batch.

A loop computes its loss outside of the network. What the loss did to a row shows in its gradient in the row's outputs,
delta_i = c_i d loss_i / d z_i: under cross entropy it is c_i (softmax(z_i) - q_i), so the target q_i (mixup, CutMix,
label noise) and the weight c_i of a row follow from it. What does not follow is left as stated, and the check of the
step's gradient decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.gradients import TrainingData
from epk_gp.core.losses import (
    CrossEntropy,
    Loss,
    MeanSquaredError,
    NegativeLogLikelihood,
    PerSampleLoss,
    classes_second,
    ignored_class,
    loss_derivatives,
    sample_weights,
    soft_targets,
)
from epk_gp.core.step import ForwardPass, SeenRows, Step, tensor_bytes
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.mode_check import ModeCheck
from epk_gp.recording.observer import AnnouncedBatch, CapturedForward, join_batches, of_nodes, stated_weights
from epk_gp.recording.setup import TrainingSetup

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


@dataclass(frozen=True, eq=False)
class OutputGradient:
    """What the backward pass brought to the outputs of a forward pass.

    Attributes:
        outputs: z, (n, C); scores of several positions have further dimensions.
        gradient: delta, the gradient of the loop's loss in z, of z's shape.
        is_recorded_input: Which rows of the input are X[batch], (n,).
    """

    outputs: Float[Tensor, "n ..."]
    gradient: Float[Tensor, "n ..."]
    is_recorded_input: Shaped[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class SeenTargets:
    """What the loss of a forward pass used.

    Attributes:
        targets: Targets of rows that have others than the recorded ones; None if no row has.
        c: The weight of each row in the loss.
    """

    targets: SeenRows | None
    c: Float64[Tensor, " n"]


def seen_targets(loss: Loss, seen: OutputGradient, y: Shaped[Tensor, "n ..."], c: Float64[Tensor, " n"]) -> SeenTargets:
    """Find the targets and weights that explain the gradient in the outputs.

    Args:
        loss: The stated loss.
        seen: Outputs, and the gradient of the loop's loss in them.
        y: The recorded targets of the rows.
        c: The weights that the stated loss gives to the rows.
    """
    stated = SeenTargets(None, c)
    z, delta = seen.outputs, seen.gradient
    tolerance = _TOLERANCE.get(z.dtype, _LOW_PRECISION)
    z, delta, c = z.double(), delta.double(), c.to(device=z.device, dtype=torch.float64)
    if not torch.isfinite(delta).all() or not c.any():
        return stated
    derivative = loss_derivatives(loss, z, y)
    expected = c[:, None] * derivative
    scale = c.abs()[:, None] * (1 + derivative.abs().amax(dim=1, keepdim=True))
    is_like = _within(delta - expected, tolerance * scale)
    if is_like.all():
        return stated
    common = float((delta * expected).sum() / expected.square().sum().clamp(min=1e-300))
    if _within(delta - common * expected, tolerance * scale * max(1.0, abs(common))).all():
        return stated  # one factor for all rows: the scale of a mixed-precision loop, or another weight of the batch
    ratio = (delta * derivative).sum(dim=1) / derivative.square().sum(dim=1).clamp(min=1e-300)
    is_weighted = _within(delta - ratio[:, None] * derivative, tolerance * (scale + ratio.abs()[:, None]))
    if is_weighted.all() and _are_weights(ratio, derivative, seen.is_recorded_input):
        return SeenTargets(None, torch.where(is_like, c, ratio).cpu())
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood | MeanSquaredError):
        return stated
    if not isinstance(loss, MeanSquaredError) and loss.class_weights is not None:
        return stated
    values, is_valid = _targets(loss, z, delta, c, tolerance)
    other = ~is_like
    if not is_valid[other].all() or not _is_plausible(loss, values, y, other, seen.is_recorded_input):
        return stated
    index = other.nonzero().squeeze(1)
    return SeenTargets(SeenRows(index, values[index].to(seen.outputs.dtype)), c.cpu())


def seen_positions(
    loss: Loss, seen: OutputGradient, y: Shaped[Tensor, "n ..."], c: Float64[Tensor, " n"]
) -> SeenTargets:
    """Find the positions of the rows, tokens or pixels, that a loop's loss left out: they have no gradient.

    A masked language model is trained on other positions each time. Only such targets are found that are the recorded
    ones with more positions ignored.

    Args:
        loss: The stated loss.
        seen: Scores of each position, and the gradient of the loop's loss in them; (n, V, ...) or (n, ..., V).
        y: The recorded labels of the positions, (n, ...).
        c: The weights that the stated loss gives to the rows.
    """
    stated = SeenTargets(None, c)
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood) or y.is_floating_point():
        return stated
    z, delta = classes_second(seen.outputs, y).double(), classes_second(seen.gradient, y).double()
    if y.shape != (len(z), *z.shape[2:]) or not is_finite(delta):
        return stated
    tolerance = _TOLERANCE.get(seen.outputs.dtype, _LOW_PRECISION)
    factors = c.to(z) / sample_weights(loss, y).to(z)
    labels = y.masked_fill(~(delta != 0).any(dim=1), ignored_class(loss))
    if _explains(loss, z, delta, (y, c.to(z)), tolerance) or bool((labels == ignored_class(loss)).all()):
        return stated
    weights = sample_weights(loss, labels).to(z) * factors[0]
    if not torch.equal(factors, factors[:1].expand_as(factors)):
        return stated
    if not _explains(loss, z, delta, (labels, weights), tolerance):
        return stated
    index = (labels != y).flatten(1).any(dim=1).nonzero().squeeze(1)
    return SeenTargets(SeenRows(index, labels[index]), weights.cpu())


def _explains(loss: Loss, z: Tensor, delta: Tensor, targets: tuple[Tensor, Tensor], tolerance: float) -> bool:
    """Return whether labels of positions, and weights of rows, give a gradient."""
    labels, weights = targets
    expected = weights.view(-1, *[1] * (z.ndim - 1)) * loss_derivatives(loss, z, labels)
    return bool(((delta - expected).abs() <= tolerance * expected.abs().amax()).all())


def _within(difference: Tensor, bound: Tensor) -> Tensor:
    return (difference.abs() <= bound).all(dim=1)


def _are_weights(ratio: Tensor, derivative: Tensor, is_recorded_input: Tensor) -> bool:
    """Return whether factors of the rows' gradients are weights of samples, and not the sign of another loss.

    With two classes, or one output, the gradients of all losses are multiples of each other: only the ranks tell then.
    """
    num_outputs, rows = derivative.shape[1], len(ratio)
    if num_outputs == 1 or bool((ratio < 0).any()):
        return False
    if num_outputs == 2 and (rows < _ENOUGH_ROWS or not is_recorded_input.all()):
        return False
    if rows < _ENOUGH_ROWS:
        return True
    ranks = torch.stack([value.argsort().argsort().double() for value in (ratio, derivative.abs().amax(dim=1))])
    return abs(float(torch.corrcoef(ranks)[0, 1])) <= _FOLLOWS_LOSS


def _targets(
    loss: CrossEntropy | NegativeLogLikelihood | MeanSquaredError,
    z: Tensor,
    delta: Tensor,
    c: Tensor,
    tolerance: float,
) -> tuple[Float[Tensor, "n C"], Shaped[Tensor, " n"]]:
    """Return the targets that explain a gradient, and for which rows they are targets at all."""
    scaled = delta / c[:, None].clamp(min=1e-300)
    if isinstance(loss, MeanSquaredError):
        factor = z.shape[1] if loss.reduction == "mean" else 1
        return z - scaled * factor / 2, torch.ones_like(c, dtype=torch.bool)
    q = z.softmax(dim=1) - scaled if isinstance(loss, CrossEntropy) else -scaled
    room = 10 * tolerance
    floor = loss.label_smoothing / z.shape[1] if isinstance(loss, CrossEntropy) else 0.0
    is_valid = (q >= -room).all(dim=1) & ((q.sum(dim=1) - 1).abs() <= room)
    if z.shape[1] > 2:  # two mixed labels leave a class out; the gradient of another loss does not
        is_valid &= (q.amin(dim=1) - floor).abs() <= room
    hard = q.round()
    is_hard = ((q - hard).abs() <= room).all(dim=1)
    return torch.where(is_hard[:, None], hard, q), is_valid


def _is_plausible(
    loss: CrossEntropy | NegativeLogLikelihood | MeanSquaredError,
    values: Tensor,
    y: Tensor,
    other: Tensor,
    is_recorded_input: Tensor,
) -> bool:
    """Return whether other targets are those of a loop that changes targets, and not of one that was stated wrongly."""
    noisy = other & is_recorded_input
    if not noisy.any():
        return True  # mixed rows with mixed targets
    count, rows = int(noisy.sum()), len(noisy)
    if isinstance(loss, MeanSquaredError):
        return rows >= _FEW_ROWS and count <= rows / 2
    if not is_recorded_input.all():
        return True
    if not bool((values[other] == values[other].round()).all()):
        return values.shape[1] > 2  # mixed inside the network
    expected = soft_targets(loss, y, values)
    if count > 1 and torch.equal(values[other].sum(dim=0), expected[other].sum(dim=0).round()):
        return False  # the recorded targets in another order
    return count <= max(1, _MOST_NOISY * rows)


@dataclass(eq=False)
class PassRecords:
    """Makes the records of a run's forward passes.

    Attributes:
        data: X, y and the loss, as recorded.
        reads_targets: Whether targets may be read from the gradient in the outputs: the loss depends on these alone.
        modes: Tells whether a network in some modes computes what it computes in evaluation mode.
        takes_graph: Whether every pass is one of a whole graph.
        has_other_rows: Whether the network saw a row that is no training point: the loop augments or mixes its rows.
    """

    data: TrainingData
    modes: ModeCheck
    reads_targets: bool
    takes_graph: bool = False
    has_other_rows: bool = False
    _index_of_row: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, setup: TrainingSetup, weights: Tensor) -> "PassRecords":
        """Prepare the records of a training that begins at some weights."""
        model, loss = setup.model, setup.loss
        modes = ModeCheck(model, setup.state(weights), setup.X)
        reads_targets = model.signature.output is None or not isinstance(loss, PerSampleLoss)
        return cls(setup.training_data, modes, reads_targets, model.signature.graph is not None)

    def step(
        self,
        index: int,
        lr: float,
        announced: Sequence[AnnouncedBatch],
        start: Float[Tensor, " P"],
        statistics: tuple[Tensor, Tensor] | None,
    ) -> Step:
        """Return the record of a step: its batches, their weights, and its forward passes if they do not follow.

        Args:
            index: Number of the step.
            lr: Its learning rate.
            announced: Its batches.
            start: The weights before the step.
            statistics: The moving statistics at the start and at the end of the step.

        Raises:
            StepMismatchError: The network saw other training points than those that were announced, or another graph.
            ValueError: All samples of a batch are ignored by the loss.
        """
        passes: list[ForwardPass] = []
        weights, stated = [], []
        for batch in announced:
            c = stated_weights(batch, self.data.loss, self.data.targets)
            stated.append(c)
            samples = batch.samples(len(self.data.inputs))
            forwards = [self._with_own_draws(forward, start) for forward in batch.forwards]
            if self.takes_graph:
                forwards = [of_nodes(index, forward, samples) for forward in forwards]
            sizes = [len(forward.inputs) for forward in forwards] or [len(samples)]
            found = []
            for number, (rows, part) in enumerate(zip(samples.split(sizes), c.split(sizes), strict=True)):
                if not forwards:
                    passes.append(ForwardPass(len(rows)))
                    found.append(part)
                    continue
                record, c_seen = self._record(index, forwards[number], rows, part)
                passes.append(_with_statistics(record, forwards[number], statistics))
                found.append(c_seen)
            weights.append(torch.cat(found))
        is_plain = all(forward.is_plain for forward in passes)
        is_stated = len(announced) == 1 and announced[0].is_plain and torch.equal(weights[0], stated[0])
        return join_batches(
            index, lr, announced, None if is_stated else weights, [] if is_plain else passes, len(self.data.inputs)
        )

    def _with_own_draws(self, forward: CapturedForward, start: Float[Tensor, " P"]) -> CapturedForward:
        """Leave out the random state of a pass that drew nothing: another thread has moved the generator."""
        if forward.random_state is None and forward.device_random_state is None:
            return forward
        state = torch.cat([start, forward.statistics.to(start)])
        if self.modes.draw(forward.modes, state, forward.inputs):
            return forward
        return replace(forward, random_state=None, device_random_state=None)

    def _record(
        self, index: int, forward: CapturedForward, rows: Int64[Tensor, " n"], c: Tensor
    ) -> tuple[ForwardPass, Tensor]:
        recorded = self.data.inputs[rows.to(self.data.inputs.device)]
        is_recorded = _equal_rows(forward.inputs, recorded)
        inputs = None
        if not is_recorded.all():
            self._require_announced_rows(index, forward.inputs, rows, is_recorded)
            other = (~is_recorded).nonzero().squeeze(1)
            is_same_kind = forward.inputs.shape == recorded.shape and forward.inputs.dtype == recorded.dtype
            other = other if is_same_kind else torch.arange(len(rows), device=other.device)
            inputs = SeenRows(other, forward.inputs[other])
        targets = None
        if self.reads_targets and forward.outputs is not None and forward.output_gradient is not None:
            y = self.data.targets[rows.to(self.data.targets.device)]
            seen = OutputGradient(forward.outputs, forward.output_gradient, is_recorded)
            read = seen_targets if forward.outputs.ndim == 2 else seen_positions
            found = read(self.data.loss, seen, y, c)
            targets, c = found.targets, found.c
        is_random = forward.random_state is not None or forward.device_random_state is not None
        needs_modes = is_random or forward.autocast is not None or self.modes.matter(forward.modes)
        record = ForwardPass(
            num_rows=len(rows),
            modes=forward.modes if needs_modes else None,
            inputs=inputs,
            targets=targets,
            random_state=forward.random_state,
            device_random_state=forward.device_random_state,
            autocast=forward.autocast,
            memory_order=forward.memory_order if is_random else None,
        )
        return record, c.cpu().double()

    def _require_announced_rows(
        self, index: int, seen: Tensor, rows: Int64[Tensor, " n"], is_recorded: Bool[Tensor, " n"]
    ) -> None:
        """Raise if the network saw training points under the indices of others.

        Augmented rows are no training points. A loop that mixes rows may meet one by rounding, so it is asked only
        until the loop has shown rows that are none.
        """
        X = self.data.inputs
        if self.has_other_rows or seen.shape[1:] != X.shape[1:] or seen.dtype != X.dtype:
            self.has_other_rows = True
            return
        if not self._index_of_row:
            self._index_of_row = {bytes(tensor_bytes(row)): number for number, row in enumerate(X)}
        other = (~is_recorded).nonzero().squeeze(1).tolist()
        found = [(row, self._index_of_row.get(bytes(tensor_bytes(seen[row])))) for row in other]
        wrong = [(row, place) for row, place in found if place is not None]
        if len(wrong) < len(found):
            self.has_other_rows = True
            return
        row, place = wrong[0]
        raise StepMismatchError(
            f"step {index}: recorder.batch() must get the indices of the rows that the network saw: row {row} was X["
            f"{place}], the batch says X[{int(rows[row])}] ({len(wrong)} of {len(seen)} rows are other training "
            "points). Likely cause: the gradient is that of another batch, or the indices are in another order."
        )


def _with_statistics(
    record: ForwardPass, forward: CapturedForward, statistics: tuple[Tensor, Tensor] | None
) -> ForwardPass:
    """Add the moving statistics around a pass where they are not those around the step."""
    if statistics is None:
        return record
    start, end = statistics
    before, after = forward.statistics, forward.statistics_after
    return replace(
        record,
        statistics=None if torch.equal(before, start) else before,
        statistics_after=None if torch.equal(after, end) else after,
    )


def _equal_rows(seen: Shaped[Tensor, "n ..."], recorded: Shaped[Tensor, "n ..."]) -> Bool[Tensor, " n"]:
    if seen.shape != recorded.shape or seen.dtype != recorded.dtype:
        return torch.zeros(len(recorded), dtype=torch.bool, device=recorded.device)
    return (seen == recorded).reshape(len(recorded), -1).all(dim=1)
