"""The recorded steps made on the gradients of several runs at once, whose samples have other weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import RunReplay, UnseenMove
from epk_gp.core.moving_statistics import WrittenOutNormalisation
from epk_gp.core.progress import ProgressBar
from epk_gp.core.recorded_clipping import EPSILON, clipped_entries, clipped_sets
from epk_gp.core.replay import PassData, passes_of
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, held_coefficients
from epk_gp.core.update_law import StepLaw, UpdateLaw
from epk_gp.core.update_rules import UpdateCoefficients, apply_matrices

# Relative difference of two computations of the same gradient, alone and together with others, that is rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True, eq=False)
class StackedStep:
    """One step of several runs.

    Attributes:
        step: The recorded step.
        before_passes: The moving statistics of all runs before each forward pass, (m, Q) each.
        after_passes: Those after it.
        coefficients: The coefficients by field, (P,) where all runs share the recorded ones, or (m, P); without the
            factors of gradient clipping.
        factors: By how much more than the recorded one each run's gradient was clipped: (m, L), or (m, P) where it was
            clipped entry by entry; None where no run's was.
        states: Weights and moving statistics after the step, (m, P + Q).
    """

    step: Step
    before_passes: list[Float[Tensor, "m Q"]]
    after_passes: list[Float[Tensor, "m Q"]]
    coefficients: dict[str, Tensor]
    factors: Float[Tensor, "m _"] | None
    states: Float[Tensor, "m PQ"]

    def update(self, recorded: UpdateCoefficients, number: int) -> UpdateCoefficients:
        """Return the coefficients of one run.

        Args:
            recorded: Those of the recorded step.
            number: Which run.
        """
        own: dict[str, Any] = {name: value[number] for name, value in self.coefficients.items() if value.ndim == 2}
        if self.factors is not None:
            own["grad_scale"] = recorded.grad_scale.to(self.factors) * self.factors[number]
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
        self._bound: float | None = None  # of the last step that clipped the norm of all gradients
        self._holds_statistics = False  # whether moving statistics moved between the passes, as recorded

    def end(self, weights: Float[Tensor, "m M"], bar: ProgressBar | None = None) -> dict[str, Tensor]:
        """Train with these weights of the samples.

        Args:
            weights: The weights.
            bar: A progress bar of steps.

        Returns:
            `states`, the weights and moving statistics of all runs at the end, (m, P + Q), averaged as those of the
            trajectory are; and `difference`, by how much a run with all weights 1 misses the recorded weights, at
            most, and by norms relative to the way that they went; and `holds_statistics`, whether moving statistics
            were moved by other passes than those of the steps, which moves are as recorded.
        """
        trajectory, P = self.trajectory, self.net.num_weights
        states = flat_state(self.law.trajectory, 0, trajectory.inputs).expand(len(weights) + 1, -1)
        averages = states[:, :P].clone() if trajectory.average is not None else None
        for made in self.steps(weights):
            states = made.states
            if averages is not None and trajectory.average is not None:
                share = float(trajectory.average.coefficients[made.step.index])
                averages = torch.lerp(averages, states[:, :P], share)
            if bar is not None:
                bar.update()
        if averages is not None:
            states = torch.cat([averages, states[:, P:]], dim=1)
        held = torch.tensor(self._holds_statistics)
        return {"states": states[1:].clone(), "difference": self.difference(states[0]), "holds_statistics": held}

    def difference(self, replayed: Float[Tensor, " PQ"]) -> Float[Tensor, " 2"]:
        """Return by how much a state misses the recorded one, at most, and by norms relative to the way of that.

        The latter is the larger one of weights and moving statistics.
        """
        trajectory, P = self.trajectory, self.net.num_weights
        end, start = (flat_state(trajectory, s, trajectory.inputs) for s in (trajectory.num_steps, 0))
        missed, way, tiny = replayed - end, end - start, torch.finfo(end.dtype).tiny
        ratios = [missed[part].norm() / way[part].norm().clamp(min=tiny) for part in (slice(P), slice(P, None))]
        return torch.stack([missed.abs().max(), torch.stack(ratios).max()]).double()

    def steps(self, weights: Float[Tensor, "m M"]) -> Iterator[StackedStep]:
        """Train with these weights of the samples, and yield every step; a run with all weights 1 comes first."""
        recorded, P = self.law.trajectory, self.net.num_weights
        every, self._bound = torch.cat([torch.ones_like(weights[:1]), weights]), None
        states = flat_state(recorded, 0, self.trajectory.inputs).expand(len(every), -1).clone()
        memory = self.law.initial((len(every),))
        for step in recorded.steps:
            law, w = self.law.step(step.index), states[:, :P]
            g, before, after = self._gradients(step, states, every)
            g, factors = self._clipped(step, law, g)
            made = law.advance(memory, w, g, is_stacked=True)
            memory = made.memory
            direction = apply_matrices(held_coefficients(recorded, step.index), law.sizes, made.direction)
            w = w - direction - law.recorded["decoupled_decay"] * w
            states = torch.cat([w, before.pop()], dim=1)
            yield StackedStep(step, before, after, made.coefficients, factors, states)

    def _clipped(
        self, step: Step, law: StepLaw, g: Float[Tensor, "m P"]
    ) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m _"] | None]:
        """Clip gradients to the bound that the recorded factor of the first run shows; divided by that factor.

        Returns:
            The gradients, and by how much more than the recorded one they were clipped.
        """
        update, sizes = held_coefficients(self.law.trajectory, step.index), law.sizes
        entries = clipped_entries(update, sizes, g)
        if entries is not None:
            bound = (entries * g[0].abs()).masked_fill((entries == 1) | (entries == 0), 0).max()
            if not bool(bound > 0):
                return g, None
            ratios = torch.where((g == 0) | (entries == 0), 1.0, g.clamp(-bound, bound) / (g * entries))
            return g * ratios, ratios
        factors = g.new_ones(len(g), len(sizes))
        sets = clipped_sets(update, sizes, g)
        for clipped in sets:
            norms = torch.where(clipped.is_member, g, 0.0).norm(dim=1, keepdim=True) + EPSILON
            self._bound = float(clipped.factor * norms[0])
            ratio = (self._bound / norms).clamp(max=1.0) / clipped.factor
            factors = torch.where(torch.stack([part.any() for part in clipped.is_member.split(sizes)]), ratio, factors)
        if not sets and self._bound is not None:
            factors = factors * (self._bound / (g.norm(dim=1, keepdim=True) + EPSILON)).clamp(max=1.0)
        if bool((factors == 1).all()):
            return g, None
        return g * factors.repeat_interleave(torch.tensor(sizes, device=g.device), dim=1), factors

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


def _is_same(a: Tensor, b: Tensor) -> bool:
    return not b.numel() or float((a - b).abs().max()) <= _ROUNDING[b.dtype] * max(float(b.abs().max()), 1e-300)
