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
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.preconditioners import COUPLED, LINEAR_RULES, PRECONDITIONERS, Memory, PreconditionedPart
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
class StepLaw:
    """One step of a run as a function, entry by entry but for matrix preconditioners.

    Attributes:
        parts: What preconditioners scale.
        sizes: Number of weights of each of the L parameters.
        recorded: The recorded coefficients, by field one number per weight, (P,).
        moves: Which parameters the step moved, (L,); the optimizer passed over the others.
        is_moved: The same for each weight, (P,); None if all are.
    """

    parts: tuple[PreconditionedPart, ...]
    sizes: tuple[int, ...]
    recorded: Mapping[str, Float[Tensor, " P"]]
    moves: Tensor
    is_moved: Tensor | None

    def scales(
        self, memory: OptimizerMemory, w: Float[Tensor, "... P"], g: Float[Tensor, "... P"]
    ) -> tuple[list[Tensor], tuple[Memory, ...], Tensor]:
        """Return the scale of each part, what its preconditioner keeps afterwards, and h.

        Args:
            memory: What the optimizer keeps before the step.
            w: The weights before it.
            g: The gradient, as gradient clipping leaves it but for its recorded factor.
        """
        h = self.recorded["grad_scale"] * g + self.recorded["weight_decay"] * w
        counts = memory.counts + self.moves.to(memory.counts)
        scales, kept = [], []
        for part, before in zip(self.parts, memory.kept, strict=True):
            own = counts[part.parameters].clamp(min=1)
            count = own[0] if bool((own == own[0]).all()) else own.repeat_interleave(self._repeats(part))
            value, after = part.scale(before, h[..., part.columns], w[..., part.columns], count.to(h))
            if self.is_moved is not None:
                moved = self.is_moved[part.columns]
                kept_still = bool(moved.any()) if part.is_coupled else moved  # one parameter moves or does not
                after = tuple(_where(kept_still, new, old) for new, old in zip(after, before, strict=True))
                value = torch.where(moved, value, 1.0)
            scales.append(value)
            kept.append(after)
        return scales, tuple(kept), h

    def advance(
        self,
        memory: OptimizerMemory,
        w: Float[Tensor, "... P"],
        g: Float[Tensor, "... P"],
        *,
        is_stacked: bool = False,
    ) -> tuple[Float[Tensor, "... P"], OptimizerMemory]:
        """Return the direction momentum_lr * m' + lr * h, and what the optimizer keeps afterwards.

        Args:
            memory: What it keeps before.
            w: The weights before the step.
            g: The gradient, as for `scales`.
            is_stacked: Whether there are several runs, (m, P), of which the first is the recorded one, whose scales
                the recorded coefficients belong to. Otherwise the scales found here are those of the recorded run.
        """
        found, kept, h = self.coefficients(memory, w, g, is_stacked=is_stacked)
        m = found["beta"] * memory.momentum + found["one_minus_dampening"] * h
        direction = found["momentum_lr"] * m + found["lr"] * h
        return direction, OptimizerMemory(m, kept, memory.counts + self.moves.to(memory.counts))

    def coefficients(
        self,
        memory: OptimizerMemory,
        w: Float[Tensor, "... P"],
        g: Float[Tensor, "... P"],
        *,
        is_stacked: bool = False,
    ) -> tuple[dict[str, Tensor], tuple[Memory, ...], Tensor]:
        """Return the coefficients by field, what preconditioners keep afterwards, and h; arguments as for `advance`."""
        scales, kept, h = self.scales(memory, w, g)
        found = dict(self.recorded)
        for part, scale in zip(self.parts, scales, strict=True):
            ratio = scale / (scale[:1] if is_stacked else scale.detach())
            for name in part.fields:
                found[name] = self._scaled(found[name], part, ratio)
        return found, kept, h

    def _scaled(self, value: Tensor, part: PreconditionedPart, ratio: Tensor) -> Tensor:
        if part.columns == slice(0, sum(self.sizes)):
            return value * ratio
        whole = value.expand(*ratio.shape[:-1], -1)
        return torch.cat(
            [whole[..., : part.columns.start], whole[..., part.columns] * ratio, whole[..., part.columns.stop :]], -1
        )

    def _repeats(self, part: PreconditionedPart) -> Tensor:
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
        parts: list[PreconditionedPart] = []
        held = set()
        if not self.trajectory.optimizer_groups and set(trajectory.update_rule.split(" + ")) - LINEAR_RULES:
            raise ValueError(
                f"the run must hold the options of its optimizer, {trajectory.update_rule}, whose preconditioner "
                "depends on the gradients: it was recorded by an earlier version of epk_gp. Record it again."
            )
        for group in self.trajectory.optimizer_groups:
            if group.rule in LINEAR_RULES:
                continue
            known = PRECONDITIONERS.get(group.rule) or COUPLED.get(group.rule)
            if known is None:
                held.add(group.rule or "own rule")
                continue
            for number in sorted(places[name] for name in group.names if name in places):
                columns = slice(firsts[number], firsts[number + 1])
                shape = model.shapes[number] if group.rule in COUPLED else None
                own = PreconditionedPart(known, group.options, columns, slice(number, number + 1), shape)
                is_next = bool(parts) and parts[-1].columns.stop == columns.start
                if is_next and not own.is_coupled and parts[-1].options is own.options:
                    before = parts.pop()
                    own = replace(
                        own,
                        columns=slice(before.columns.start, columns.stop),
                        parameters=slice(before.parameters.start, number + 1),
                    )
                parts.append(own)
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


def _where(condition: Tensor | bool, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(condition, new, old) if isinstance(condition, Tensor) else new if condition else old
