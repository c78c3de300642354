"""Retraining: the recorded steps on the gradients of runs whose samples have other weights, many at once."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.verification import plan_for
from epk_gp.core.checks import MEMORY_BUDGET, ComputeSettings, door, parse_options, validate_finite
from epk_gp.core.gradients import PassData
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head, apply_head, resolve_head, validate_stated
from epk_gp.core.plans import EVALUATED_ROWS, rows_of_weights, weight_rows
from epk_gp.core.replayed_steps import RunReplay, UnseenMove
from epk_gp.core.show import Displayed, Entry, Summary, certificate_entry, count, kind_of, number
from epk_gp.core.states import EndingWith, averaged_trajectory
from epk_gp.core.step import Step, fingerprint, not_following, tensor_bytes
from epk_gp.core.torch_overrides import MappedRows, WrittenOutNormalisation, disable_fused_attention, outside_autocast
from epk_gp.core.trajectory import (
    Trajectory,
    flat_state,
    flat_weights,
    held_coefficients,
    step_coefficients,
    validate_trajectory,
)
from epk_gp.core.update_law import StepLaw, UpdateLaw
from epk_gp.gram.path_kernel import require_training
from epk_gp.kernel_machine.certificate import run_findings, step_mismatches, warn_unless_certified
from epk_gp.optimizers.update_rules import ClipValue, UpdateCoefficients, apply_matrices
from epk_gp.work.run import Piece, Place, RunWork, Sums, run

# Largest distance between the run that is replayed with all weights 1 and the recorded one, relative to the distance
# that the recorded weights moved.
REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True, eq=False)
class StackedStep:
    """One step of several runs.

    Attributes:
        step: The recorded step.
        before_passes: The moving statistics of all runs before each forward pass, (m, Q) each.
        after_passes: The moving statistics of all runs after each forward pass.
        coefficients: The coefficients by field, (P,) if all runs share the recorded ones, otherwise (m, P) or (m, L).
        states: Weights and moving statistics after the step, (m, P + Q).
    """

    step: Step
    before_passes: list[Float[Tensor, "m Q"]]
    after_passes: list[Float[Tensor, "m Q"]]
    coefficients: dict[str, Tensor]
    states: Float[Tensor, "m PQ"]


class StackedTraining:
    """Makes the recorded steps on the gradients of several runs at once; used by one thread only.

    The first run of a stack has all weights 1: the recorded coefficients belong to its gradients.

    Args:
        trajectory: The recorded run, or its average.

    Attributes:
        holds_statistics: Whether moving statistics were changed by other passes than those of the steps so far; these
            changes are as recorded.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, X = trajectory, trajectory.inputs
        self.net = trajectory.model_for(X)
        self.run = RunReplay(trajectory, self.net, X)
        self.law = UpdateLaw(trajectory, flat_weights(trajectory, 0, X))
        # torch computes convolutions with separate weights by copies
        self._rows = MappedRows(works=False if any(p.ndim > 2 for p in self.net.module.parameters()) else None)
        self.holds_statistics = False  # whether moving statistics changed between the passes, as recorded

    def difference(self, replayed: Float[Tensor, " PQ"], trajectory: Trajectory) -> Float[Tensor, " 2"]:
        """Return the largest difference of a state from a run's last one, and the relative difference by norms.

        The relative difference is that to the distance moved: the larger one for weights and moving statistics.
        """
        end, start = (flat_state(trajectory, s, trajectory.inputs) for s in (trajectory.num_steps, 0))
        missed, way, tiny = replayed - end, end - start, torch.finfo(end.dtype).tiny
        parts = slice(self.net.num_weights), slice(self.net.num_weights, None)
        ratios = [missed[part].norm() / way[part].norm().clamp(min=tiny) for part in parts]
        return torch.stack([missed.abs().max(), torch.stack(ratios).max()]).double()

    def steps(self, weights: Float[Tensor, "m M"]) -> Iterator[StackedStep]:
        """Train with these weights of the samples, and yield every step; a run with all weights 1 comes first."""
        recorded, P = self.law.trajectory, self.net.num_weights
        every = torch.cat([torch.ones_like(weights[:1]), weights])
        for index in self.law.clipped_steps[:1]:
            self.law.see_clip(index, self.run.gradient(recorded.steps[index])[0])
        states = flat_state(recorded, 0, self.trajectory.inputs).expand(len(every), -1).clone()
        memory = self.law.initial((len(every),))
        for step in recorded.steps:
            law, w = self.law.step(step.index), states[:, :P]
            g, before, after = self._gradients(step, states, every)
            held = held_coefficients(recorded, step.index)
            g, clipped = _clipped(held, law, g)
            direction, memory, coefficients = law.advance(memory, w, g, is_stacked=True)
            w = w - apply_matrices(held, law.sizes, direction) - law.recorded["decoupled_decay"] * w
            states = torch.cat([w, before.pop()], dim=1)
            yield StackedStep(step, before, after, {**coefficients, **clipped}, states)

    def _gradients(
        self, step: Step, states: Float[Tensor, "m PQ"], weights: Float[Tensor, "m M"]
    ) -> tuple[Float[Tensor, "m P"], list[Float[Tensor, "m Q"]], list[Float[Tensor, "m Q"]]]:
        """Return the gradients of a step's loss for all runs, and their moving statistics.

        Returns:
            The gradients; the statistics before each pass, and at the end of the step; and the statistics after each
            pass.
        """
        P, passes = self.net.num_weights, self.run.data(step)
        moves = self.run.unseen_moves(step, passes)
        total, start, after = torch.zeros_like(states[:, :P]), states[:, P:], list[Tensor]()
        before = [self._moved(moves[0], start, start)]
        for data, move in zip(passes, moves[1:], strict=True):
            # each run has its own statistics before the pass
            own = replace(data, forward=replace(data.forward, statistics=None, statistics_after=None))
            c = data.c * weights[:, data.samples.to(weights.device)].to(data.c)
            gradients, statistics = self._pass(torch.cat([states[:, :P], before[-1]], dim=1), own, c)
            after.append(statistics)
            before.append(self._moved(move, statistics, start))
            total += gradients
        return total, before, after

    def _moved(
        self, move: UnseenMove | None, statistics: Float[Tensor, "m Q"], start: Float[Tensor, "m Q"]
    ) -> Float[Tensor, "m Q"]:
        """Change statistics between passes as recorded, or back to those at the start of the step."""
        if move is None:
            return statistics
        self.holds_statistics |= not (move.is_reset or move.returns)
        values = start if move.returns else move.values.to(statistics)
        return torch.where(move.moved.to(statistics.device), values, statistics)

    def _pass(
        self, states: Float[Tensor, "m PQ"], data: PassData, c: Float[Tensor, "m n"]
    ) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m Q"]]:
        gradients, statistics = self._rows(
            len(states),
            lambda: self._mapped(states, data, c),
            lambda k: self._single(states[k], data, c[k]),
            compares=not data.forward.is_deterministic,
        )
        return gradients, statistics

    def _single(self, state: Tensor, data: PassData, c: Tensor) -> tuple[Tensor, Tensor]:
        replayed = self.run.passes.gradient(state, replace(data, c=c), exact=True)
        before = state[self.net.num_weights :]
        return replayed.gradient, replayed.statistics.to(before) if len(before) else before

    def _mapped(self, states: Tensor, data: PassData, c: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of all runs by one forward and backward pass."""
        replay = self.run.passes
        model, dtype = replay.model, replay.dtype_of(data)
        leaves = states.detach().to(dtype).requires_grad_()
        with torch.enable_grad():
            named = model.unflatten(leaves)
            before = {name: named[name].detach().clone() for name in model.statistics}

            def losses(params: dict[str, Tensor], statistics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
                return replay.losses({**params, **statistics}, data), statistics

            weights = {name: named[name] for name in model.names}
            with WrittenOutNormalisation([]):  # torch cannot map weight normalisation
                values, after = torch.vmap(losses, randomness="same")(weights, before)
            (gradients,) = torch.autograd.grad((c.to(values) * values).sum(), leaves)
        P = model.num_weights
        statistics = [after[name].reshape(len(states), -1) for name in model.statistics]
        return (gradients[:, :P].to(states), torch.cat(statistics, dim=1).to(states) if statistics else states[:, P:])


def _clipped(
    update: UpdateCoefficients, law: StepLaw, g: Float[Tensor, "m P"]
) -> tuple[Float[Tensor, "m P"], dict[str, Tensor]]:
    """Clip gradients, divided by the recorded factor, which the recorded coefficients include.

    Returns:
        The gradients, and the coefficient of the unclipped ones: (m, L), or (m, P) if they were clipped entry by entry;
        empty if no run was clipped more than the recorded one.
    """
    clip = law.clip
    if clip is None:
        return g, {}
    scale = law.recorded["grad_scale"]
    recorded = torch.where(scale == 0, 1.0, scale.abs())
    factors = clip.factors(torch.where(scale == 0, 0.0, g))
    ratios = factors / recorded
    if bool((ratios == 1).all()):
        return g, {}
    if not isinstance(clip, ClipValue):
        ratios = ratios[:, (scale != 0).nonzero()[0]]
        scale = update.grad_scale.to(g)
    return g * ratios, {"grad_scale": scale.sign() * factors}  # exactly 1 without clipping


def retrained_run(
    training: StackedTraining, weights: Float[Tensor, " M"], budget: int
) -> tuple[Trajectory, Float[Tensor, " 2"]]:
    """Train with other weights of the samples, and return the run with all its states.

    Args:
        training: Makes the steps of the recorded run.
        weights: One weight per sample.
        budget: Bytes of memory; states that do not fit into their share of it are put into a temporary file.

    Returns:
        The run, whose loss terms have the recorded weights times the given ones; and the difference of a run with all
        weights 1 from the recorded weights (`StackedTraining.difference`).
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
        own: dict[str, Any] = {name: value[1] for name, value in made.coefficients.items() if value.ndim == 2}
        updates.append(replace(step_coefficients(recorded, index, recorded.inputs), **own).map(torch.clone))
    digest = hashlib.blake2b(recorded.digest.encode() + tensor_bytes(weights), digest_size=16)
    run = replace(
        recorded,
        states=tuple(states),
        statistics=None if statistics is None else tuple(statistics),
        steps=tuple(steps),
        updates=tuple(updates),
        digest=digest.hexdigest(),
        digests=(),
        live=None,
    )
    difference = training.difference(replayed, recorded)
    if (average := whole.average) is None:
        return run, difference
    start = None if average.lead is None else whole.states[0]
    return averaged_trajectory(run, average.coefficients, start=start), difference


def _reweighted(training: StackedTraining, made: StackedStep, weights: Float[Tensor, " M"]) -> Step:
    """Return a recorded step with the weights of its samples, and the run's own moving statistics."""
    step, data = made.step, training.run.data(made.step)
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


@dataclass(frozen=True, eq=False)
class RetrainingWork(RunWork):
    """Retraining in pieces: some runs that are computed together. A piece starts again if it is interrupted.

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
        """Train some runs: yield their last weights and moving statistics, (m, P + Q), averaged like the trajectory's.

        Also yield the difference of a run with all weights 1 from the recorded one (`StackedTraining.difference`), and
        whether moving statistics were held.
        """
        trajectory, weights = self.trajectory, self.weights.split(self.runs_at_once)[place[0]]
        training, P, average = StackedTraining(trajectory), trajectory.num_weights, trajectory.average
        states = flat_state(training.law.trajectory, 0, trajectory.inputs).expand(len(weights) + 1, -1)
        averages = states[:, :P]
        for done, made in enumerate(training.steps(weights), 1):
            states = made.states
            if average is not None:
                averages = torch.lerp(averages, states[:, :P], float(average.coefficients[made.step.index]))
            yield Sums(steps=done)
        if average is not None:
            states = torch.cat([averages, states[:, P:]], dim=1)
        held = torch.tensor(training.holds_statistics)
        largest = {"difference": training.difference(states[0], trajectory), "holds_statistics": held}
        yield Sums({"states": states[1:].clone()}, largest, steps=trajectory.num_steps)


@dataclass(frozen=True, eq=False, repr=False)
class Retraining(Displayed):
    """Networks that were trained as recorded except for the weights of the samples.

    Attributes:
        trajectory: The recorded run.
        states: Their weights, followed by moving statistics, at the end, (m, P + Q).
        sample_weights: The weights of the samples, (m, M).
        max_difference: Largest difference between the weights of a run that was replayed with all weights 1 and the
            recorded ones.
        difference_ratio: The same difference, by norms, relative to the distance that the recorded weights moved; or
            the same ratio for the moving statistics, if it is larger.
        findings: Reasons that the result is not certified, in words; empty if it is certified.
        clipping: Source of the bound of gradient clipping, in words.
    """

    trajectory: Trajectory
    states: Float[Tensor, "m PQ"]
    sample_weights: Float[Tensor, "m M"]
    max_difference: float
    difference_ratio: float
    findings: tuple[str, ...] = ()
    clipping: str = ""

    @property
    def certified(self) -> bool:
        """Whether the repeated steps are the recorded ones, up to rounding, and no network diverged."""
        return not self.findings

    @door
    def run(self, number: int) -> Trajectory:
        """Return the whole run of one network, in memory: train it again and keep all its states.

        Its loss terms have the recorded weights times the weights of its samples.
        """
        return retrained_run(StackedTraining(self.trajectory), self.sample_weights[number], MEMORY_BUDGET)[0]

    def outputs(self, X: Inputs, *, head: Head | None = None) -> Float[Tensor, "m n C"]:
        """Evaluate all networks.

        Args:
            X: n inputs, with the structure of the training inputs.
            head: "logits" or "log_softmax"; None follows the run's loss.

        Raises:
            TypeError, ValueError: The network cannot take the inputs, or the head is unknown.
        """
        X = self.trajectory.pack(X)
        head = resolve_head(head, self.trajectory.loss, self.trajectory.num_outputs)
        model = self.trajectory.model_for(X)
        with torch.no_grad(), disable_fused_attention():
            found = []
            for state in self.states.to(model.spec.dtype):
                params = model.unflatten(state.to(X.device))
                found.append(torch.cat([apply_head(model(params, part), head) for part in X.split(EVALUATED_ROWS)]))
            outputs = torch.stack(found)
        if not outputs.isfinite().all():
            warn_unless_certified("the retraining", ["outputs of its networks are not finite: their training diverged"])
        return outputs

    def _summary(self) -> Summary:
        m, M = self.sample_weights.shape
        entries = (
            certificate_entry(self.findings, "steps made again are the recorded ones, up to rounding"),
            Entry("difference from the run", number(self.difference_ratio), "of the way that the weights went"),
            Entry("gradient clipping", self.clipping),
            Entry("recorded run", repr(self.trajectory)),
            Entry("shape of states", f"{tuple(self.states.shape)}", kind_of(self.states)),
        )
        title = f"Retraining of {count(m, 'network')} with other weights of {count(M, 'training sample')}"
        return Summary(title, entries)


@door
def retrain(trajectory: Trajectory, weights: Float[Tensor, "*m M"], **options: Unpack[ComputeSettings]) -> Retraining:
    """Train as recorded with other weights of the samples: same initial weights, batches, rows and random numbers.

    A weight multiplies the loss terms of its sample, and 0 leaves it out; the divisor of a mean over a batch stays, and
    so does the sample's effect on the statistics of a batch. Momentum, preconditioner and clipping follow the new
    gradients; learning rates are those of the recorded steps. Many runs are computed together.

    A bound of gradient clipping that was given to the recorder (`clip=`), or that any recorded step reached, is applied
    to all gradients. A bound that is neither stated nor reached is not known, and larger weights may reach it: state it
    when recording.

    Args:
        trajectory: Training run on M samples.
        weights: One weight per sample for each of m runs, or (M,) for one.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        The trained networks, in the dtype of the recorded inputs.

    Raises:
        TypeError: The weights are not a tensor of floating-point numbers.
        ValueError: There is not one finite weight per sample, or steps on other gradients are not known (for Muon,
            Adafactor, Rprop, SparseAdam and users' own update rules); or the loss is not stated.
    """
    parsed = parse_options("retrain", ("accumulate",), **options)
    validate_trajectory(trajectory)
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = str(weights.dtype) if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a torch.Tensor of floating-point numbers: got {got}.")
    rows = torch.atleast_2d(weights.detach())
    if rows.ndim != 2 or rows.shape[1] != trajectory.num_points or not len(rows):
        raise ValueError(
            f"weights must hold one weight per sample, (m, {trajectory.num_points}): got shape {tuple(weights.shape)}."
        )
    validate_finite(rows, "weights")
    rows = rows.to(device=trajectory.device, dtype=torch.float64)
    require_loss_as_function(trajectory, "epk_gp.retrain")
    law = UpdateLaw(trajectory, flat_weights(trajectory, 0, trajectory.inputs))
    require_replays(law)
    net = plan_for(trajectory, trajectory.model_for(trajectory.inputs))
    batches = (trajectory.num_points if step.batch is None else len(step.batch) for step in trajectory.steps)
    graph = net.model.signature.graph
    num_rows = max(batches, default=1) if graph is None else graph.num_nodes
    plan = net.memory_plan(parsed.memory_budget)
    runs_at_once = plan.retrained_runs(num_rows)
    work = RetrainingWork(trajectory, rows, runs_at_once, plan=net.plan)
    ends, found = list[Tensor](), Sums()
    with outside_autocast():
        for _, sums in run(work, parsed, "retraining"):
            ends.append(sums.added.pop("states"))
            found.merge(sums)
    replay = RunReplay(trajectory, net.model, trajectory.inputs, plan)
    states, (difference, ratio) = torch.cat(ends), found.largest["difference"].tolist()
    findings = [*run_findings(trajectory), *step_mismatches(trajectory, law, replay).retraining_findings]
    if not ratio <= REPLAY_TOLERANCE[states.dtype]:
        findings.append(
            f"with all weights 1 it ends {ratio:.2g} of the way that the weights went from the recorded network "
            f"(largest difference {difference:.2e}); rounding is amplified along the run"
            f"{', or the network moves its statistics otherwise' if trajectory.model.statistics else ''}"
        )
    if bool(found.largest["holds_statistics"]):
        findings.append(
            "moving statistics were moved by passes without a loss (in training mode, between those of the steps): how "
            "other weights would move them is not known, and they are held as recorded there"
        )
    size = states.abs().amax(dim=1)  # NaN stays
    if diverged := (~(size < torch.finfo(size.dtype).max ** 0.5)).nonzero()[:, 0].tolist():
        findings.append(
            f"{len(diverged)} of {len(states)} networks diverged (NaN, infinity or weights beyond measure): "
            f"{', '.join(map(str, diverged[:3]))}{', ...' if len(diverged) > 3 else ''}"
        )
    warn_unless_certified("the retraining", findings)
    return Retraining(trajectory, states, rows, difference, ratio, tuple(findings), law.clipping)


def require_loss_as_function(trajectory: Trajectory, what: str) -> None:
    """Raise if the recorded gradients are not functions of the weights at the start of their steps.

    Raises:
        ValueError: The loss is not stated, or a pass saw other weights.
    """
    validate_stated(trajectory.loss, what)
    require_training(trajectory, what)
    if isinstance(trajectory.statistics, EndingWith):
        raise ValueError(
            f"{what} needs moving statistics that follow from the steps: those of the averaged network are others "
            "(update_bn), which are held as they are. epk_gp.attribute explains it."
        )
    for step in trajectory.trained.steps:
        if step.move is not None:
            raise ValueError(
                f"{what} needs steps that follow from gradients alone: after step {step.index} the loop moved the "
                "weights without one (Lookahead, a checkpoint that was restored). epk_gp.attribute explains such a run."
            )
        if any(forward.weights is not None for forward in step.passes):
            raise ValueError(
                f"{what} needs gradients at the weights that a step moves: those of step {step.index} were taken at "
                "other ones (SAM). epk_gp.attribute explains such a run."
            )
    if rows := not_following(trajectory.trained.steps):
        raise ValueError(
            f"{what} needs the loss as a function of the outputs, which the loop's gradient does not follow: {rows}. "
            "Record again with the loop's loss stated (loss=), or with the targets that it used "
            "(recorder.batch(targets=)). epk_gp.attribute explains the run as it is."
        )


def require_replays(law: UpdateLaw) -> None:
    """Raise if the optimizer's steps on gradients other than the recorded ones are not known.

    Raises:
        ValueError: They are not known.
    """
    if law.held:
        raise ValueError(
            f"steps must follow from other gradients to train again: those of {law.trajectory.update_rule} are known "
            "for the recorded ones only. Train anew in a loop of your own."
        )
