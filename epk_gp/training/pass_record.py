"""The record of a forward pass: what of it does not follow from weights, data and batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.step import tensor_bytes
from epk_gp.core.losses import PerSampleLoss
from epk_gp.core.replay import TrainingData
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.recording.observer import AnnouncedBatch, join_batches, stated_weights
from epk_gp.recording.observer import CapturedForward
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.observer import of_nodes
from epk_gp.recording.mode_check import ModeCheck
from epk_gp.recording.passes import OutputGradient, seen_positions, seen_targets
from epk_gp.recording.setup import TrainingSetup


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
