"""The steps of a recorded run as functions of weights, gradients and what the optimizer keeps.

With the coefficients of `epk_gp.core.update_rules` and the scales of `epk_gp.core.preconditioners`, one step is

    h = grad_scale * g + weight_decay * w
    scale, kept' = preconditioner(kept, h)
    m' = beta * m + one_minus_dampening * h
    w' = w - left (momentum_lr * m' + lr * h) right - decoupled_decay * w

where the coefficients that a preconditioner scales are the recorded ones times scale / (scale in the recorded run). At
the recorded gradients that is the recorded step, whatever the schedule of the learning rate was.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.preconditioners import LINEAR_RULES, Memory, Part, part_of
from epk_gp.core.trajectory import Trajectory, step_coefficients
from epk_gp.core.update_rules import FIELDS, broadcast_to_params


@dataclass(frozen=True, eq=False)
class OptimizerMemory:
    """What an optimizer keeps between two steps.

    Attributes:
        momentum: The momentum buffer, (..., P).
        kept: What the preconditioner of each part keeps.
        counts: Number of steps that each parameter has made, (L,).
    """

    momentum: Float[Tensor, "... P"]
    kept: tuple[Memory, ...]
    counts: Float[Tensor, " L"]

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the size of weights, the momentum first."""
        return [self.momentum, *(tensor for memory in self.kept for tensor in memory)]


@dataclass(frozen=True, eq=False)
class MadeStep:
    """What a step gives at some weights and gradients.

    Attributes:
        direction: momentum_lr * m' + lr * h, (..., P).
        memory: What the optimizer keeps afterwards.
        coefficients: The coefficients by field: the recorded ones, (P,), or (..., P) where preconditioners scale them.
    """

    direction: Float[Tensor, "... P"]
    memory: OptimizerMemory
    coefficients: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class StepLaw:
    """One step of a run as a function, entry by entry but for coupled parts and matrix preconditioners.

    Attributes:
        parts: What preconditioners scale.
        sizes: Number of weights of each of the L parameters.
        recorded: The recorded coefficients, by field one number per weight, (P,).
        moves: Which parameters the step moved, (L,); the optimizer passed over the others.
        is_moved: The same for each weight, (P,); None if all are.
    """

    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    recorded: Mapping[str, Float[Tensor, " P"]]
    moves: Tensor
    is_moved: Tensor | None

    @property
    def is_coupled(self) -> bool:
        """Whether the step of a weight depends on the gradients of other weights."""
        return any(part.is_coupled for part in self.parts)

    def advance(
        self,
        memory: OptimizerMemory,
        w: Float[Tensor, "... P"],
        g: Float[Tensor, "... P"],
        *,
        is_stacked: bool = False,
    ) -> MadeStep:
        """Make the step.

        Args:
            memory: What the optimizer keeps before it.
            w: The weights before it.
            g: The gradient, as gradient clipping leaves it but for its recorded factor.
            is_stacked: Whether there are several runs, (m, P), of which the first is the recorded one, whose scales
                the recorded coefficients belong to. Otherwise the scales found here are those of the recorded run.
        """
        counts = memory.counts + self.moves.to(memory.counts)
        scales, kept, h = self.scales(memory, w, g)
        found = dict(self.recorded)
        for part, scale in zip(self.parts, scales, strict=True):
            ratio = scale / (scale[:1] if is_stacked else scale.detach())
            for name in part.fields:
                found[name] = self._scaled(found[name], part, ratio)
        m = found["beta"] * memory.momentum + found["one_minus_dampening"] * h
        return MadeStep(found["momentum_lr"] * m + found["lr"] * h, OptimizerMemory(m, kept, counts), found)

    def scales(
        self, memory: OptimizerMemory, w: Float[Tensor, "... P"], g: Float[Tensor, "... P"]
    ) -> tuple[list[Tensor], tuple[Memory, ...], Tensor]:
        """Return the scale of each part, what its preconditioner keeps afterwards, and h.

        Args:
            memory: As in `advance`, like the others.
            w: The weights.
            g: The gradient.
        """
        h = self.recorded["grad_scale"] * g + self.recorded["weight_decay"] * w
        counts = memory.counts + self.moves.to(memory.counts)
        found = [self._scale(part, own, h, w, counts) for part, own in zip(self.parts, memory.kept, strict=True)]
        return [scale for scale, _ in found], tuple(kept for _, kept in found), h

    def _scale(self, part: Part, before: Memory, h: Tensor, w: Tensor, counts: Tensor) -> tuple[Tensor, Memory]:
        """Return the scale of a part, and what its preconditioner keeps afterwards."""
        own = counts[part.parameters].clamp(min=1)
        count = own[0] if bool((own == own[0]).all()) else own.repeat_interleave(self._repeats(part))
        scale, after = part.scale(before, h[..., part.columns], w[..., part.columns], count.to(h))
        if self.is_moved is None:
            return scale, after
        moved = self.is_moved[part.columns]
        return torch.where(moved, scale, 1.0), part.kept(before, after, moved)

    def _scaled(self, value: Tensor, part: Part, ratio: Tensor) -> Tensor:
        if part.columns == slice(0, sum(self.sizes)):
            return value * ratio
        whole = value.expand(*ratio.shape[:-1], -1)
        return torch.cat(
            [whole[..., : part.columns.start], whole[..., part.columns] * ratio, whole[..., part.columns.stop :]], -1
        )

    def _repeats(self, part: Part) -> Tensor:
        return torch.tensor(self.sizes[part.parameters], device=self.moves.device)


class UpdateLaw:
    """The steps of a run as functions.

    Args:
        trajectory: The run.
        reference: Tensor whose dtype and device the computation has.

    Attributes:
        parts: What preconditioners scale.
        held: Names of the update rules whose dependence on the gradients is not known here: their coefficients are
            held as recorded. A rule of the user's own counts among them, as "own rule".

    Raises:
        ValueError: The run was recorded by a version that did not record the optimizer's options, and it needs them.
    """

    def __init__(self, trajectory: Trajectory, reference: Tensor) -> None:
        self.trajectory, self.reference = trajectory.trained, reference
        model = trajectory.model
        self.sizes = model.sizes
        firsts = [0, *torch.tensor(self.sizes).cumsum(0).tolist()]
        places = {name: number for number, name in enumerate(model.names)}
        parts: list[Part] = []
        held = set()
        if not self.trajectory.optimizer_groups and set(trajectory.update_rule.split(" + ")) - LINEAR_RULES:
            raise ValueError(
                f"the run must hold the options of its optimizer, {trajectory.update_rule}, whose preconditioner "
                "depends on the gradients: it was recorded by an earlier version of epk_gp. Record it again."
            )
        for group in self.trajectory.optimizer_groups:
            if group.rule in LINEAR_RULES:
                continue
            for number in sorted(places[name] for name in group.names if name in places):
                columns = slice(firsts[number], firsts[number + 1])
                own = part_of(group.rule, group.options, columns, number, model.shapes[number])
                if own is None:
                    held.add(group.rule or "own rule")
                    break
                joined = parts[-1].joined(own) if parts else None
                if joined is not None:
                    parts.pop()
                parts.append(joined or own)
        self.parts, self.held = tuple(parts), tuple(sorted(held))

    @property
    def depends_on_memory(self) -> bool:
        """Whether the derivatives of a step depend on what the optimizer keeps."""
        return bool(self.parts)

    @cached_property
    def replays(self) -> bool:
        """Whether steps on other gradients can be computed."""
        return not self.held and all(part.preconditioner.replays for part in self.parts)

    def initial(self, leading: tuple[int, ...] = ()) -> OptimizerMemory:
        """Return what the optimizer keeps before the first step.

        Args:
            leading: Dimensions in front of that of the weights.
        """
        momentum = self.reference.new_zeros(*leading, sum(self.sizes))
        counts = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.reference.device)
        return OptimizerMemory(momentum, tuple(part.initial(momentum) for part in self.parts), counts)

    def step(self, index: int) -> StepLaw:
        """Return a step as a function."""
        update = step_coefficients(self.trajectory, index, self.reference)
        recorded = {name: broadcast_to_params(getattr(update, name), self.sizes, self.reference) for name in FIELDS}
        is_still = (
            (recorded["grad_scale"] == 0)
            & (recorded["beta"] == 1)
            & (recorded["one_minus_dampening"] == 0)
            & (recorded["lr"] == 0)
            & (recorded["momentum_lr"] == 0)
        )
        if not bool(is_still.any()):
            moves = torch.ones(len(self.sizes), dtype=torch.bool, device=is_still.device)
            return StepLaw(self.parts, self.sizes, recorded, moves, None)
        moves = torch.stack([~part.all() for part in is_still.split(list(self.sizes))])
        repeats = torch.tensor(self.sizes, device=is_still.device)
        return StepLaw(self.parts, self.sizes, recorded, moves, moves.repeat_interleave(repeats))

    def steps(self) -> Iterator[StepLaw]:
        """Return the steps in their order."""
        return map(self.step, range(self.trajectory.num_steps))
