"""Retraining: a recorded run with other weights of its samples, many of them at once."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.core.attention import disable_fused_attention
from epk_gp.core.certificate import warn_uncertified
from epk_gp.core.compute_options import ComputeOptions, ComputeSettings, parse_options
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.gradients import RunReplay
from epk_gp.core.head import Head, apply_head, resolve_head
from epk_gp.core.input_layout import Inputs
from epk_gp.core.recorded_clipping import EPSILON, clipped_entries, clipped_sets
from epk_gp.core.replay import PassData, passes_of
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, parse_inputs, validate_trajectory
from epk_gp.core.update_law import OptimizerMemory, StepLaw, UpdateLaw
from epk_gp.core.update_rules import apply_matrices
from epk_gp.core.validation import validate_finite
from epk_gp.distributed.job import Place
from epk_gp.distributed.pieces import Piece, results_of
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.storage.stored import require_same_run

# Vectors of P numbers that a retraining holds: weights, gradients, what the optimizer keeps, and what joins them.
_VECTORS = 16

# Passes of a batch that a retraining holds at once.
_PASSES = 6

# Relative difference of two computations of the same gradient, alone and together with others, that is rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}

# By how much the run that is replayed with all weights 1 may miss the recorded one, relative to the way that the
# recorded weights went.
_REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True, eq=False)
class Retraining:
    """Networks that were trained as recorded but for the weights of the samples.

    Attributes:
        trajectory: The recorded run.
        states: Their weights, and then moving statistics, at the end, (m, P + Q).
        sample_weights: The weights of the samples, (m, M).
        max_difference: Largest difference of the weights of a run that was replayed with all weights 1 from the
            recorded ones.
        difference_ratio: That difference, by norms, relative to the way that the recorded weights went.
    """

    trajectory: Trajectory
    states: Float[Tensor, "m PQ"]
    sample_weights: Float[Tensor, "m M"]
    max_difference: float
    difference_ratio: float

    @property
    def certified(self) -> bool:
        """Whether the replay with all weights 1 is the recorded run, up to rounding."""
        return self.difference_ratio <= _REPLAY_TOLERANCE[self.states.dtype]

    def __len__(self) -> int:
        """Count the networks, m."""
        return len(self.states)

    def weights(self, number: int) -> dict[str, Tensor]:
        """Return the weights and moving statistics of one network by name."""
        return self.trajectory.model.unflatten(self.states[number].clone())

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
            return torch.stack(
                [
                    torch.cat([apply_head(model(model.unflatten(state.to(X.device)), part), head) for part in X.split(512)])
                    for state in self.states.to(model.spec.dtype)
                ]
            )


def retrain(
    trajectory: Trajectory, weights: Float[Tensor, "m M"], **options: Unpack[ComputeSettings]
) -> Retraining:
    """Train as recorded with other weights of the samples: same initial weights, batches, rows and random numbers.

    A weight multiplies the loss terms of its sample, 0 leaves it out; the divisor of a mean over a batch stays, and so
    does what the sample does to the statistics of a batch. Momentum, preconditioner and clipping follow the new
    gradients; learning rates are those of the recorded steps. Many runs are computed together.

    Args:
        trajectory: Training run on M samples.
        weights: One weight per sample for each of m runs, or (M,) for one.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        The trained networks, in the dtype of the recorded inputs.

    Raises:
        TypeError: The weights are no tensor of floating-point numbers.
        ValueError: There is not one finite weight per sample, or steps on other gradients are not known: those of
            Muon, Adafactor, Rprop and of update rules of the user's own.
    """
    parsed = parse_options("retrain", ("accumulate",), **options)
    validate_trajectory(trajectory)
    rows = _parse_weights(trajectory, weights)
    law = UpdateLaw(trajectory, flat_weights(trajectory, 0, trajectory.inputs))
    if not law.replays:
        raise ValueError(
            f"steps must follow from other gradients to train again: those of {trajectory.update_rule} are known for "
            "the recorded ones only. Train anew in a loop of your own."
        )
    problem = _Problem(trajectory, rows, parsed)
    found = list(_results(problem))
    states = torch.cat([part["states"] for part in found]).to(rows.device)
    difference, ratio = torch.stack([part["difference"] for part in found]).amax(dim=0).tolist()
    result = Retraining(trajectory, states, rows, difference, ratio)
    if not result.certified:
        warn_uncertified(
            f"the retraining is not certified: with all weights 1 it ends {ratio:.2g} of the way that the weights went "
            f"from the recorded network (largest difference {difference:.2e}); rounding is amplified along the run."
        )
    return result


def _parse_weights(trajectory: Trajectory, weights: Float[Tensor, "m M"]) -> Float[Tensor, "m M"]:
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


@dataclass(frozen=True, eq=False)
class _Problem:
    """What is trained again.

    Attributes:
        trajectory: The run.
        weights: The weights of the samples, (m, M).
        options: How to compute.
    """

    trajectory: Trajectory
    weights: Float[Tensor, "m M"]
    options: ComputeOptions

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, without what is found out again."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def blocks(self) -> list[Tensor]:
        """The runs that are computed together, (m',) each."""
        model, trajectory = self.trajectory.model_for(self.trajectory.inputs), self.trajectory
        per_run = _VECTORS * model.num_weights * model.spec.dtype.itemsize
        count = max(1, self.options.memory_budget // (2 * per_run))
        return list(torch.arange(len(self.weights)).split(min(count, max(1, self._fitting_runs(trajectory)))))

    def _fitting_runs(self, trajectory: Trajectory) -> int:
        """Count the runs whose activations on the largest batch fit into half of the budget."""
        largest = max((trajectory.num_points if s.batch is None else len(s.batch) for s in trajectory.steps), default=1)
        row = trajectory.inputs[0].numel() + sum(trajectory.model.sizes) // max(1, len(trajectory.model.sizes))
        itemsize = trajectory.model_for(trajectory.inputs).spec.dtype.itemsize
        return int(self.options.memory_budget // (2 * _PASSES * largest * row * itemsize))

    def check(self) -> None:
        """Raise if the run on disk is not the one that the owner of the job opened."""
        require_same_run(self.trajectory)

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Train the runs of a block."""
        return _Trainer(self.trajectory).train(self.weights[self.blocks[place[0]]])

    def identity(self) -> str:
        """Return a fingerprint of everything on which the runs depend."""
        return fingerprint("retrain", self.trajectory.digest, self.weights, self.options.memory_budget)


def _results(problem: _Problem) -> Iterator[dict[str, Tensor]]:
    """Train all blocks, here or by workers."""
    options, pieces = problem.options, [Piece(f"runs-{k}", (k,)) for k in range(len(problem.blocks))]
    if options.executor is None:
        parts = _parts_here(problem, pieces)
    else:
        alone = replace(problem, options=replace(options, executor=None, progress=False, checkpoint=None))
        num_bytes = 8 * problem.trajectory.num_weights * len(problem.blocks[0])
        parts = results_of(alone, pieces, options, problem.identity, num_bytes)
    is_hidden = options.executor is None or not options.progress
    with closing(parts), tqdm(total=len(pieces), desc="pieces", disable=is_hidden) as bar:
        for part in parts:
            yield part
            bar.update()


def _parts_here(problem: _Problem, pieces: list[Piece]) -> Generator[dict[str, Tensor], None, None]:
    options = problem.options
    stored = None if options.checkpoint is None else PartialSums(options.checkpoint, problem.identity())
    trainer = _Trainer(problem.trajectory)
    total = len(pieces) * problem.trajectory.num_steps
    with tqdm(total=total, desc="steps", disable=not options.progress) as bar:
        for piece in pieces:
            found = {} if stored is None else stored.load(piece.name)[0]
            if not found:
                found = trainer.train(problem.weights[problem.blocks[piece.place[0]]], bar)
                if stored is not None:
                    stored.save(piece.name, found, 1)
            else:
                bar.update(problem.trajectory.num_steps)
            yield found


class _Trainer:
    """Makes the recorded steps on the gradients of several runs at once; to be used by one thread.

    The first run of a stack has all weights 1: the recorded coefficients belong to its gradients.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory, X = trajectory, trajectory.inputs
        self.net = trajectory.model_for(X)
        self.run = RunReplay(trajectory.trained, self.net, X)
        self.law = UpdateLaw(trajectory, flat_weights(trajectory, 0, X))
        self._maps: bool | None = None
        if any(p.ndim > 2 for p in self.net.module.parameters()):
            self._maps = False  # torch computes convolutions with weights of their own by copies
        self._bound: float | None = None  # of the last step that clipped the norm of all gradients

    def train(self, weights: Float[Tensor, "m M"], bar: "tqdm[None] | None" = None) -> dict[str, Tensor]:
        """Train with these weights of the samples; return the states at the end, and the difference of the first."""
        trajectory, recorded = self.trajectory, self.law.trajectory
        every = torch.cat([torch.ones_like(weights[:1]), weights])
        P, self._bound = self.net.num_weights, None
        states = flat_state(recorded, 0, trajectory.inputs).expand(len(every), -1).clone()
        averages = states[:, :P].clone() if trajectory.average is not None else None
        memory = self.law.initial((len(every),))
        for step in recorded.steps:
            g, statistics = self._gradients(step, states, every)
            states, memory = self._step(step, states, (g, statistics), memory)
            if averages is not None and trajectory.average is not None:
                averages = torch.lerp(averages, states[:, :P], float(trajectory.average.coefficients[step.index]))
            if bar is not None:
                bar.update()
        if averages is not None:
            states = torch.cat([averages, states[:, P:]], dim=1)
        end, start = (flat_weights(trajectory, s, trajectory.inputs) for s in (trajectory.num_steps, 0))
        missed = states[0, :P] - end
        way = (end - start).norm().clamp(min=torch.finfo(end.dtype).tiny)
        difference = torch.stack([missed.abs().max(), missed.norm() / way]).double()
        return {"states": states[1:], "difference": difference}

    def _step(
        self, step: Step, states: Tensor, found: tuple[Tensor, Tensor], memory: OptimizerMemory
    ) -> tuple[Tensor, OptimizerMemory]:
        g, statistics = found
        P, law = self.net.num_weights, self.law.step(step.index)
        w = states[:, :P]
        direction, memory = law.advance(memory, w, self._clipped(step, law, g), is_stacked=True)
        update = self.law.trajectory.updates[step.index]
        w = w - apply_matrices(update, law.sizes, direction) - law.recorded["decoupled_decay"] * w
        return torch.cat([w, statistics], dim=1), memory

    def _clipped(self, step: Step, law: StepLaw, g: Float[Tensor, "m P"]) -> Float[Tensor, "m P"]:
        """Clip gradients to the bound that the recorded factor of the first run shows; divided by that factor."""
        update = self.law.trajectory.updates[step.index]
        factors = clipped_entries(update, law.sizes, g)
        if factors is not None:
            bound = (factors * g[0].abs()).masked_fill((factors == 1) | (factors == 0), 0).max()
            clipped = g.clamp(-bound, bound) if bool(bound > 0) else g
            return torch.where(factors > 0, clipped / factors.clamp(min=torch.finfo(g.dtype).tiny), g)
        sets = clipped_sets(update, law.sizes, g)
        for clipped in sets:
            norms = torch.where(clipped.is_member, g, 0.0).norm(dim=1, keepdim=True) + EPSILON
            self._bound = float(clipped.factor * norms[0])
            ratio = (self._bound / norms).clamp(max=1.0) / clipped.factor
            g = torch.where(clipped.is_member, g * ratio, g)
        if not sets and self._bound is not None:
            g = g * (self._bound / (g.norm(dim=1, keepdim=True) + EPSILON)).clamp(max=1.0)
        return g

    def _gradients(
        self, step: Step, states: Float[Tensor, "m PQ"], weights: Float[Tensor, "m M"]
    ) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m Q"]]:
        """Return the gradients of a step's loss of all runs, and their moving statistics after it."""
        P = self.net.num_weights
        total, statistics = torch.zeros_like(states[:, :P]), states[:, P:]
        for data in passes_of(step, self.run.data):
            # each run has its own statistics before the pass
            own = replace(data, forward=replace(data.forward, statistics=None, statistics_after=None))
            c = data.c * weights[:, data.samples.to(weights.device)].to(data.c)
            gradients, statistics = self._pass(torch.cat([states[:, :P], statistics], dim=1), own, c)
            total += gradients
        return total, statistics

    def _pass(
        self, states: Float[Tensor, "m PQ"], data: PassData, c: Float[Tensor, "m n"]
    ) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m Q"]]:
        if self._maps is not False:
            try:
                gradients, statistics = self._mapped(states, data, c)
            except (RuntimeError, NotImplementedError, ValueError, TypeError):
                self._maps = False
            else:
                if self._maps is None or data.forward.random_state is not None:
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
