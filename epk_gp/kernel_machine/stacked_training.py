"""The recorded steps made on the gradients of several runs at once, whose samples have other weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import PassData, RunReplay, UnseenMove, passes_of
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import WrittenOutNormalisation
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, held_coefficients
from epk_gp.core.update_law import StepLaw, UpdateLaw
from epk_gp.optimizers.update_rules import Clip, ClipValue, UpdateCoefficients, apply_matrices, is_clipped, step_clip
from epk_gp.work.sums import Sums

# By how much the run that is replayed with all weights 1 may miss the recorded one, relative to the way that the
# recorded weights went.
REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}

# Relative difference of two computations of the same gradient, alone and together with others, that is rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True, eq=False)
class StackedStep:
    """One step of several runs.

    Attributes:
        step: The recorded step.
        before_passes: The moving statistics of all runs before each forward pass, (m, Q) each.
        after_passes: Those after it.
        coefficients: The coefficients by field, (P,) where all runs share the recorded ones, else (m, P) or (m, L).
        states: Weights and moving statistics after the step, (m, P + Q).
    """

    step: Step
    before_passes: list[Float[Tensor, "m Q"]]
    after_passes: list[Float[Tensor, "m Q"]]
    coefficients: dict[str, Tensor]
    states: Float[Tensor, "m PQ"]

    def update(self, recorded: UpdateCoefficients, number: int) -> UpdateCoefficients:
        """Return the coefficients of one run.

        Args:
            recorded: Those of the recorded step.
            number: Which run.
        """
        own: dict[str, Any] = {name: value[number] for name, value in self.coefficients.items() if value.ndim == 2}
        return replace(recorded, **own)


class StackedTraining:
    """Makes the recorded steps on the gradients of several runs at once; to be used by one thread.

    The first run of a stack has all weights 1: the recorded coefficients belong to its gradients.

    Args:
        trajectory: The recorded run, or its average.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, X = trajectory, trajectory.inputs
        self.net = trajectory.model_for(X)
        self.run = RunReplay(trajectory.trained, self.net, X)
        self.law = UpdateLaw(trajectory, flat_weights(trajectory, 0, X))
        self._maps: bool | None = None  # whether torch maps the passes over runs
        if any(p.ndim > 2 for p in self.net.module.parameters()):
            self._maps = False  # it computes convolutions with weights of their own by copies
        self._holds_statistics = False  # whether moving statistics moved between the passes, as recorded

    def end(self, weights: Float[Tensor, "m M"]) -> Iterator[Sums]:
        """Train with these weights of the samples, and yield after every step; the last sums are the result.

        They are `states`, the weights and moving statistics of all runs at the end, (m, P + Q), averaged as those of
        the trajectory are; `difference`, by how much a run with all weights 1 misses the recorded weights, at most, and
        by norms relative to the way that they went; and `holds_statistics`, whether moving statistics were moved by
        other passes than those of the steps, which moves are as recorded.

        Args:
            weights: The weights.
        """
        trajectory, P = self.trajectory, self.net.num_weights
        states = flat_state(self.law.trajectory, 0, trajectory.inputs).expand(len(weights) + 1, -1)
        averages = states[:, :P].clone() if trajectory.average is not None else None
        for number, made in enumerate(self.steps(weights), 1):
            states = made.states
            if averages is not None and trajectory.average is not None:
                share = float(trajectory.average.coefficients[made.step.index])
                averages = torch.lerp(averages, states[:, :P], share)
            yield Sums(steps=number)
        if averages is not None:
            states = torch.cat([averages, states[:, P:]], dim=1)
        difference, held = self.difference(states[0], trajectory), torch.tensor(self._holds_statistics)
        largest = {"difference": difference, "holds_statistics": held}
        yield Sums({"states": states[1:].clone()}, largest, steps=trajectory.num_steps)

    def difference(self, replayed: Float[Tensor, " PQ"], trajectory: Trajectory) -> Float[Tensor, " 2"]:
        """Return by how much a state misses the last one of a run, at most, and by norms relative to the way of that.

        The latter is the larger one of weights and moving statistics.
        """
        end, start = (flat_state(trajectory, s, trajectory.inputs) for s in (trajectory.num_steps, 0))
        missed, way, tiny = replayed - end, end - start, torch.finfo(end.dtype).tiny
        parts = slice(self.net.num_weights), slice(self.net.num_weights, None)
        ratios = [missed[part].norm() / way[part].norm().clamp(min=tiny) for part in parts]
        return torch.stack([missed.abs().max(), torch.stack(ratios).max()]).double()

    def steps(self, weights: Float[Tensor, "m M"]) -> Iterator[StackedStep]:
        """Train with these weights of the samples, and yield every step; a run with all weights 1 comes first."""
        recorded, P = self.law.trajectory, self.net.num_weights
        every, clip = torch.cat([torch.ones_like(weights[:1]), weights]), self._first_clip
        states = flat_state(recorded, 0, self.trajectory.inputs).expand(len(every), -1).clone()
        memory = self.law.initial((len(every),))
        for step in recorded.steps:
            law, w = self.law.step(step.index), states[:, :P]
            g, before, after = self._gradients(step, states, every)
            held = held_coefficients(recorded, step.index)
            clip = step_clip(law.clip, held, law.recorded["grad_scale"], g[0]) or clip
            g, clipped = _clipped(held, law, g, clip)
            made = law.advance(memory, w, g, is_stacked=True)
            memory = made.memory
            direction = apply_matrices(held, law.sizes, made.direction)
            w = w - direction - law.recorded["decoupled_decay"] * w
            states = torch.cat([w, before.pop()], dim=1)
            yield StackedStep(step, before, after, {**made.coefficients, **clipped}, states)

    @cached_property
    def _first_clip(self) -> Clip | None:
        """The clipping that is stated, or that the first clipped step shows; None where there is neither."""
        recorded = self.law.trajectory
        for step in recorded.steps if recorded.clip is None else ():
            update = held_coefficients(recorded, step.index)
            if is_clipped(update):
                scale = self.law.step(step.index).recorded["grad_scale"]
                return step_clip(None, update, scale, self.run.gradient(step)[0])
        return recorded.clip

    def _gradients(
        self, step: Step, states: Float[Tensor, "m PQ"], weights: Float[Tensor, "m M"]
    ) -> tuple[Float[Tensor, "m P"], list[Float[Tensor, "m Q"]], list[Float[Tensor, "m Q"]]]:
        """Return the gradients of a step's loss of all runs, and their moving statistics.

        Returns:
            The gradients; the statistics before each pass, and at the end of the step; and those after each pass.
        """
        P, passes = self.net.num_weights, passes_of(step, self.run.data)
        moves = self.run.unseen_moves(step, passes)
        total, before, after = torch.zeros_like(states[:, :P]), [self._moved(moves[0], states[:, P:])], list[Tensor]()
        for data, move in zip(passes, moves[1:], strict=True):
            # each run has its own statistics before the pass
            own = replace(data, forward=replace(data.forward, statistics=None, statistics_after=None))
            c = data.c * weights[:, data.samples.to(weights.device)].to(data.c)
            gradients, statistics = self._pass(torch.cat([states[:, :P], before[-1]], dim=1), own, c)
            after.append(statistics)
            before.append(self._moved(move, statistics))
            total += gradients
        return total, before, after

    def _moved(self, move: UnseenMove | None, statistics: Float[Tensor, "m Q"]) -> Float[Tensor, "m Q"]:
        """Move statistics between passes as recorded."""
        if move is None:
            return statistics
        self._holds_statistics |= not move.is_reset
        return torch.where(move.moved.to(statistics.device), move.values.to(statistics), statistics)

    def _pass(
        self, states: Float[Tensor, "m PQ"], data: PassData, c: Float[Tensor, "m n"]
    ) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m Q"]]:
        if self._maps is not False:
            try:
                gradients, statistics = self._mapped(states, data, c)
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                self._maps = False
            else:
                if self._maps is None or not data.forward.is_deterministic:
                    own, after = self._single(states[0], data, c[0])
                    self._maps = _is_same(gradients[0], own) and _is_same(statistics[0], after)
                if self._maps:
                    return gradients, statistics
        found = [self._single(state, data, own) for state, own in zip(states, c, strict=True)]
        return torch.stack([g for g, _ in found]), torch.stack([after for _, after in found])

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
            named = model.unflatten_rows(leaves)
            before = {name: named[name].detach().clone() for name in model.statistics}

            def losses(params: dict[str, Tensor], statistics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
                return replay.losses({**params, **statistics}, data), statistics

            weights = {name: named[name] for name in model.names}
            with WrittenOutNormalisation([]):  # torch cannot map weight normalisation
                values, after = torch.vmap(losses, randomness="same")(weights, before)
            (gradients,) = torch.autograd.grad((c.to(values) * values).sum(), leaves)
        P = model.num_weights
        statistics = [after[name].reshape(len(states), -1) for name in model.statistics]
        return (
            gradients[:, :P].to(states),
            torch.cat(statistics, dim=1).to(states) if statistics else states[:, P:],
        )


def _clipped(
    update: UpdateCoefficients, law: StepLaw, g: Float[Tensor, "m P"], clip: Clip | None
) -> tuple[Float[Tensor, "m P"], dict[str, Tensor]]:
    """Clip gradients, divided by the recorded factor, which the recorded coefficients hold.

    Returns:
        The gradients, and the coefficient of the unclipped ones: (m, L), or (m, P) where they were clipped entry by
        entry; nothing where no run's was clipped by more than the recorded one.
    """
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
    return g * ratios, {"grad_scale": scale.sign() * factors}  # exactly 1 where nothing is clipped


def _is_same(a: Tensor, b: Tensor) -> bool:
    return not b.numel() or float((a - b).abs().max()) <= _ROUNDING[b.dtype] * max(float(b.abs().max()), 1e-300)
