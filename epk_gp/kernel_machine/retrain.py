"""Retraining: a recorded run with other weights of its samples, many of them at once."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import plan_for
from epk_gp.core.checks import validate_finite, validate_integer
from epk_gp.core.gradients import passes_of
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head, apply_head, resolve_head
from epk_gp.core.options import MEMORY_BUDGET, ComputeSettings, parse_options
from epk_gp.core.plans import EVALUATED_ROWS, rows_of_weights, weight_rows
from epk_gp.core.show import (
    SHOWN_POINTS,
    Displayed,
    Entry,
    Summary,
    Table,
    certificate_entry,
    columns_note,
    count,
    kind_of,
    number,
    warn_uncertified,
)
from epk_gp.core.states import averaged_trajectory
from epk_gp.core.step import Step, fingerprint, tensor_bytes
from epk_gp.core.torch_overrides import disable_fused_attention, outside_autocast
from epk_gp.core.trajectory import (
    Trajectory,
    flat_state,
    flat_weights,
    parse_inputs,
    step_coefficients,
    validate_trajectory,
)
from epk_gp.core.update_law import UpdateLaw
from epk_gp.kernel_machine.certification import step_mismatches
from epk_gp.kernel_machine.stacked_training import REPLAY_TOLERANCE, StackedStep, StackedTraining
from epk_gp.optimizers.update_rules import UpdateCoefficients
from epk_gp.work.run import RunWork, run
from epk_gp.work.sums import Piece, Place, Sums


def retrained_run(
    training: StackedTraining, weights: Float[Tensor, " M"], budget: int
) -> tuple[Trajectory, Float[Tensor, " 2"]]:
    """Train with other weights of the samples, and return the run with all its states.

    Args:
        training: Makes the steps of the recorded run.
        weights: One weight per sample.
        budget: Bytes of memory; states that do not fit into their share of it go to a temporary file.

    Returns:
        The run, whose loss terms have the recorded weights times the given ones; and by how much a run with all weights
        1 misses the recorded weights (`StackedTraining.difference`).
    """
    whole, recorded = training.trajectory, training.law.trajectory
    P, S = training.net.num_weights, recorded.num_steps
    reference = training.law.reference
    states = rows_of_weights(S + 1, P, reference, weight_rows(budget, reference.element_size(), P))
    states[0] = recorded.states[0].to(states)
    statistics = None if recorded.statistics is None else [recorded.statistics[0].to(reference)]
    steps, updates, replayed = list[Step](), list[UpdateCoefficients](), flat_state(recorded, 0, recorded.inputs)
    for made in training.steps(weights[None]):
        index = made.step.index
        states[index + 1], replayed = made.states[1, :P], made.states[0]
        if statistics is not None:
            statistics.append(made.states[1, P:].clone())
        steps.append(_reweighted(training, made, weights))
        updates.append(made.update(step_coefficients(recorded, index, recorded.inputs), 1).map(torch.clone))
    digest = hashlib.blake2b(recorded.digest.encode(), digest_size=16)
    digest.update(tensor_bytes(weights))
    run = replace(
        recorded,
        states=tuple(states),
        statistics=None if statistics is None else tuple(statistics),
        steps=tuple(steps),
        updates=tuple(updates),
        digest=digest.hexdigest(),
    )
    difference = training.difference(replayed, recorded)
    return (run if whole.average is None else averaged_trajectory(run, whole.average.coefficients)), difference


def _reweighted(training: StackedTraining, made: StackedStep, weights: Float[Tensor, " M"]) -> Step:
    """Return a recorded step with the weights of its samples, and the run's own moving statistics."""
    step, data = made.step, passes_of(made.step, training.run.data)
    c = torch.cat([part.c * weights[part.samples.to(weights.device)].to(part.c) for part in data])
    passes = step.passes
    if passes and training.trajectory.statistics is not None:
        passes = tuple(
            replace(
                forward,
                statistics=None if forward.statistics is None else before[1].clone(),
                statistics_after=None if forward.statistics_after is None else after[1].clone(),
            )
            for forward, before, after in zip(passes, made.before_passes, made.after_passes, strict=True)
        )
    return replace(step, sample_weights=c.double().cpu(), passes=passes)


@dataclass(frozen=True, eq=False, repr=False)
class Retraining(Displayed):
    """Networks that were trained as recorded but for the weights of the samples.

    Attributes:
        trajectory: The recorded run.
        states: Their weights, and then moving statistics, at the end, (m, P + Q).
        sample_weights: The weights of the samples, (m, M).
        max_difference: Largest difference of the weights of a run that was replayed with all weights 1 from the
            recorded ones.
        difference_ratio: That difference, by norms, relative to the way that the recorded weights went; or that of the
            moving statistics, if it is larger.
        holds_statistics: Whether moving statistics were moved between the steps' passes, by passes without a loss: how
            they would be moved with other weights is not known, and they are as recorded after such a move.
        doubts: What else is against the result, in words: recorded steps that do not follow from gradients and the
            optimizer's options.
        clipping: How the bound of gradient clipping is known, in words.
    """

    trajectory: Trajectory
    states: Float[Tensor, "m PQ"]
    sample_weights: Float[Tensor, "m M"]
    max_difference: float
    difference_ratio: float
    holds_statistics: bool = False
    doubts: tuple[str, ...] = ()
    clipping: str = ""

    @property
    def certified(self) -> bool:
        """Whether steps made again are the recorded ones, up to rounding, and no network diverged."""
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Why the result is not certified, in words; empty if it is."""
        identity = self.trajectory.identity_finding
        findings = [*([] if identity is None else [identity]), *self.doubts]
        if not self.difference_ratio <= REPLAY_TOLERANCE[self.states.dtype]:
            findings.append(
                f"with all weights 1 it ends {self.difference_ratio:.2g} of the way that the weights went from the "
                f"recorded network (largest difference {self.max_difference:.2e}); rounding is amplified along the run"
                f"{', or the network moves its statistics otherwise' if self.trajectory.model.statistics else ''}"
            )
        if self.holds_statistics:
            findings.append(
                "moving statistics were moved by passes without a loss (in training mode, between those of the steps): "
                "how other weights would move them is not known, and they are held as recorded there"
            )
        size = self.states.abs().amax(dim=1)  # NaN stays
        if diverged := (~(size < torch.finfo(size.dtype).max ** 0.5)).nonzero()[:, 0].tolist():
            findings.append(
                f"{len(diverged)} of {len(self)} networks diverged (NaN, infinity or weights beyond measure): "
                f"{', '.join(map(str, diverged[:SHOWN_POINTS]))}{', ...' if len(diverged) > SHOWN_POINTS else ''}"
            )
        return findings

    def __len__(self) -> int:
        """Count the networks, m."""
        return len(self.states)

    def __getitem__(self, rows: int | slice) -> "Retraining":
        """Return some of the networks: one by its number, negative from the end, or a slice.

        Raises:
            IndexError: There is no such network.
            TypeError: The index is neither an integer nor a slice.
        """
        if not isinstance(rows, slice):
            rows = slice(self._place(rows), self._place(rows) + 1)
        return replace(self, states=self.states[rows], sample_weights=self.sample_weights[rows])

    def __iter__(self) -> Iterator["Retraining"]:
        """Iterate over the networks, each as a retraining of one."""
        return (self[number] for number in range(len(self)))

    def _place(self, number: int) -> int:
        """Return the number of a network, counted from the first one."""
        validate_integer(number, "index")
        if not -len(self) <= number < len(self):
            raise IndexError(f"index must lie in 0..{len(self) - 1} (or be negative): got {number}.")
        return int(number) % len(self)

    def weights(self, number: int) -> dict[str, Tensor]:
        """Return the weights and moving statistics of one network by name."""
        return self.trajectory.model.unflatten(self.states[self._place(number)].clone())

    def run(self, number: int) -> Trajectory:
        """Return the whole run of one network, in memory: train it again and keep all its states.

        Its loss terms have the recorded weights times those of its samples.
        """
        weights = self.sample_weights[self._place(number)]
        return retrained_run(StackedTraining(self.trajectory), weights, MEMORY_BUDGET)[0]

    def outputs(self, X: Inputs, *, head: Head | None = None) -> Float[Tensor, "m n C"]:
        """Evaluate all networks.

        Args:
            X: n inputs, of the structure of the training inputs.
            head: "logits" or "log_softmax"; None follows the run's loss.

        Raises:
            TypeError, ValueError: The network cannot take the inputs, or the head is unknown.
        """
        X = parse_inputs(self.trajectory, X)
        head = resolve_head(head, self.trajectory.loss, self.trajectory.num_outputs)
        model = self.trajectory.model_for(X)
        with torch.no_grad(), disable_fused_attention():
            outputs = torch.stack(
                [
                    torch.cat(
                        [
                            apply_head(model(model.unflatten(state.to(X.device)), part), head)
                            for part in X.split(EVALUATED_ROWS)
                        ]
                    )
                    for state in self.states.to(model.spec.dtype)
                ]
            )
        if not outputs.isfinite().all():
            warn_uncertified("outputs of retrained networks are not finite: their training diverged.")
        return outputs

    def _summary(self) -> Summary:
        (m, M), head = self.sample_weights.shape, self.sample_weights[:SHOWN_POINTS]
        rows = [
            ("samples left out", *(f"{left_out:,}" for left_out in (head == 0).sum(dim=1).tolist())),
            ("weights other than 1", *(f"{others:,}" for others in (head != 1).sum(dim=1).tolist())),
            ("sum of the weights", *map(number, head.sum(dim=1).tolist())),
        ]
        table = Table(
            ("", *(f"network {i}" for i in range(len(head)))), tuple(rows), columns_note(len(head), m, "network")
        )
        meaning = "steps made again are the recorded ones, up to rounding"
        return Summary(
            f"Retraining of {count(m, 'network')} with other weights of {count(M, 'training sample')}",
            (
                certificate_entry(self.findings, meaning),
                Entry("difference from the run", number(self.difference_ratio), "of the way that the weights went"),
                Entry("gradient clipping", self.clipping),
                Entry("recorded run", repr(self.trajectory)),
                Entry("shape of states", f"{tuple(self.states.shape)}", kind_of(self.states)),
            ),
            table if m else None,
        )


def retrain(trajectory: Trajectory, weights: Float[Tensor, "*m M"], **options: Unpack[ComputeSettings]) -> Retraining:
    """Train as recorded with other weights of the samples: same initial weights, batches, rows and random numbers.

    A weight multiplies the loss terms of its sample, 0 leaves it out; the divisor of a mean over a batch stays, and so
    does what the sample does to the statistics of a batch. Momentum, preconditioner and clipping follow the new
    gradients; learning rates are those of the recorded steps. Many runs are computed together.

    A bound of gradient clipping that the recorder was told (`clip=`), or that any recorded step reached, is applied to
    all gradients. Of a bound that is neither stated nor reached the run knows nothing, and larger weights may reach it:
    state it when recording.

    Args:
        trajectory: Training run on M samples.
        weights: One weight per sample for each of m runs, or (M,) for one.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        The trained networks, in the dtype of the recorded inputs.

    Raises:
        TypeError: The weights are no tensor of floating-point numbers.
        ValueError: There is not one finite weight per sample, or steps on other gradients are not known: those of
            Muon, Rprop and of update rules of the user's own.
    """
    parsed = parse_options("retrain", ("accumulate",), **options)
    validate_trajectory(trajectory)
    rows = _parse_weights(trajectory, weights)
    require_replays(trajectory)
    net = plan_for(trajectory, trajectory.model_for(trajectory.inputs))
    work = RetrainingWork(trajectory, rows, _runs_at_once(net, trajectory, parsed.memory_budget), plan=net.plan)
    states, found = list[Tensor](), Sums()
    with outside_autocast():
        for _, sums in run(work, parsed, "retraining"):
            states.append(sums.added.pop("states"))
            found.merge(sums)
    difference, ratio = found.largest["difference"].tolist()
    holds_statistics = bool(found.largest["holds_statistics"])
    law = UpdateLaw(trajectory, flat_weights(trajectory, 0, trajectory.inputs))
    doubts = tuple(step_mismatches(trajectory, law).findings)
    result = Retraining(trajectory, torch.cat(states), rows, difference, ratio, holds_statistics, doubts, law.clipping)
    if not result.certified:
        warn_uncertified(f"the retraining is not certified: {'; '.join(result.findings)}.")
    return result


def require_replays(trajectory: Trajectory) -> None:
    """Raise if the optimizer's steps on other gradients than the recorded ones are not known.

    Raises:
        ValueError: They are not.
    """
    if not UpdateLaw(trajectory, flat_weights(trajectory, 0, trajectory.inputs)).replays:
        raise ValueError(
            f"steps must follow from other gradients to train again: those of {trajectory.update_rule} are known for "
            "the recorded ones only. Train anew in a loop of your own."
        )


def _parse_weights(trajectory: Trajectory, weights: Float[Tensor, "*m M"]) -> Float[Tensor, "m M"]:
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = str(weights.dtype) if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a torch.Tensor of floating-point numbers: got {got}.")
    rows = weights.detach()[None] if weights.ndim == 1 else weights.detach()
    if rows.ndim != 2 or rows.shape[1] != trajectory.num_points or not len(rows):
        raise ValueError(
            f"weights must hold one weight per sample, (m, {trajectory.num_points}): got shape {tuple(weights.shape)}."
        )
    validate_finite(rows, "weights")
    return rows.to(device=trajectory.device, dtype=torch.float64)


def _runs_at_once(net: PlannedModel, trajectory: Trajectory, budget: int) -> int:
    batches = (trajectory.num_points if step.batch is None else len(step.batch) for step in trajectory.steps)
    graph = net.model.signature.graph
    num_rows = max(batches, default=1) if graph is None else graph.num_nodes
    return net.memory_plan(budget).retrained_runs(num_rows)


@dataclass(frozen=True, eq=False)
class RetrainingWork(RunWork):
    """What is trained again: a piece is some runs that are computed together. It begins anew if it is interrupted.

    Attributes:
        trajectory: The run.
        weights: The weights of the samples, (m, M).
        runs_at_once: Number of runs that are computed together.
    """

    trajectory: Trajectory
    weights: Float[Tensor, "m M"]
    runs_at_once: int

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and its inputs."""
        return self.trajectory, self.trajectory.inputs

    @property
    def pieces(self) -> list[Piece]:
        """The runs that are computed together."""
        count, name = math.ceil(len(self.weights) / self.runs_at_once), self.named("runs")
        return [Piece(f"{name}-{number}", (number,), self.trajectory.num_steps) for number in range(count)]

    @property
    def piece_bytes(self) -> int:
        """Bytes of the weights of some runs."""
        return 8 * self.trajectory.num_weights * min(self.runs_at_once, len(self.weights))

    def identity(self) -> str:
        """Return a fingerprint of everything on which the runs depend."""
        return fingerprint("retrain", self.trajectory.digest, self.weights, self.runs_at_once)

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Train some runs."""
        yield from StackedTraining(self.trajectory).end(self.weights.split(self.runs_at_once)[place[0]])
