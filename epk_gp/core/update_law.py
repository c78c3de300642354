"""The steps of a recorded run as functions of weights, gradients and the optimizer's state.

For Adam and its relatives, the coefficients of a parameter's weights are proportional to a scale that follows from the
gradients (`epk_gp.optimizers.torch_rules`). One coefficient therefore determines all others once the scale is computed
again:

    coefficient[i] = coefficient[r] * scale[i] / scale[r],    r the weight with the smallest coefficient

Weight r has the largest gradients so far, and its scale the least rounding error.

With the coefficients of `epk_gp.optimizers.update_rules`, one step is

    h = grad_scale * g + weight_decay * w
    scale, kept' = preconditioner(kept, h)
    m' = beta * m + one_minus_dampening * h
    w' = w - left (momentum_lr * m' + lr * h) right - decoupled_decay * w

where the coefficients that a preconditioner scales are the recorded ones times scale / (scale in the recorded run). At
the recorded gradients that is the recorded step, for any schedule of the learning rate and any scale.
`StepLaw.replayed` makes the step of the recorded run by the scale itself, which shows whether the scale is right.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.trajectory import Trajectory, held_coefficients, step_coefficients
from epk_gp.optimizers.torch_rules import LINEAR_RULES, PRECONDITIONERS, Memory, OptimizerGroup, Preconditioner
from epk_gp.optimizers.update_rules import (
    FIELDS,
    Clip,
    Options,
    UpdateCoefficients,
    broadcast_to_params,
    is_clipped,
    predict_step,
    shown_clip,
)

_HELD_NUMBERS = 1 << 20  # numbers kept of the coefficients of requested steps, by field


def scaled_fields(groups: Sequence[OptimizerGroup], names: Sequence[str]) -> tuple[frozenset[str], ...]:
    """Return the coefficients of each parameter that a known preconditioner scales, so that they can be computed again.

    Args:
        groups: The optimizers' parameter groups.
        names: Names of the L parameters.
    """
    scaled: dict[str, frozenset[str]] = {}
    for group in groups:
        if group.rule in PRECONDITIONERS:
            fields = frozenset(PRECONDITIONERS[group.rule].fields(group.options))
            scaled |= dict.fromkeys(group.names, fields)
    return tuple(scaled.get(name, frozenset()) for name in names)


def compact_update(
    update: UpdateCoefficients, fields: Sequence[frozenset[str]], sizes: Sequence[int]
) -> UpdateCoefficients:
    """Replace coefficients per weight by one number per parameter if the others can be computed again.

    Args:
        update: The coefficients of a step.
        fields: The scaled coefficients of each of the L parameters (`scaled_fields`).
        sizes: Number of weights of each parameter.
    """
    numbers: dict[str, Any] = {}
    places: dict[str, Tensor] = {}
    for name in FIELDS:
        value = getattr(update, name)
        if len(value) == len(sizes) or not any(name in own for own in fields):
            continue
        parts = zip(value.split(list(sizes)), fields, strict=True)
        compact = [_representative(part, name in scaled) for part, scaled in parts]
        if all(place is not None for place, _ in compact):
            places[name] = torch.tensor([place for place, _ in compact])
            numbers[name] = torch.tensor([number for _, number in compact], dtype=torch.float64)
    return replace(update, **numbers, places=places) if places else update


def _representative(values: Tensor, is_scaled: bool) -> tuple[int | None, float]:
    """Return the index and the value of one weight's coefficient that determines all others; no index if none does."""
    if not is_scaled or not len(values):
        is_shared = not len(values) or bool((values == values[0]).all())
        return (-1, float(values[0]) if len(values) else 0.0) if is_shared else (None, 0.0)
    sizes = values.abs()
    place = int(torch.where(sizes > 0, sizes, torch.inf).argmin())
    return place, float(values[place])


@dataclass(frozen=True, eq=False)
class Part:
    """Neighbouring weights that a preconditioner scales using only their own numbers.

    Attributes:
        preconditioner: The preconditioner.
        options: The options of the parameters' optimizer.
        columns: The range of the flat weights.
        parameters: The range of the L parameters.
        sizes: Their numbers of weights.
    """

    preconditioner: Preconditioner
    options: Options
    columns: slice
    parameters: slice
    sizes: Tensor

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the coefficients that are proportional to the scale."""
        return self.preconditioner.fields(self.options)

    def initial(self, reference: Float[Tensor, "... P"]) -> Memory:
        """Return the optimizer's initial state for these weights."""
        like = reference[..., self.columns]
        return tuple(torch.full_like(like, value) for value in self.preconditioner.initial(self.options))


def restore_update(
    compact: UpdateCoefficients, parts: Sequence[Part], scales: Sequence[Tensor], sizes: Sequence[int]
) -> UpdateCoefficients:
    """Compute the coefficients of all weights from those of one weight of each parameter, in the dtype of the scales.

    Args:
        compact: The stored coefficients (`compact_update`).
        parts: The ranges of weights with preconditioners.
        scales: The scale of the weights of each part.
        sizes: Number of weights of each of the L parameters.
    """
    restored: dict[str, Any] = {}
    firsts = torch.tensor([0, *sizes]).cumsum(0)
    for name, places in compact.places.items():
        numbers = getattr(compact, name).to(scales[0])
        if len(numbers) != len(sizes):  # stored per weight, next to steps that need it
            numbers = numbers[firsts[:-1].clamp(max=len(numbers) - 1)]
        restored[name] = broadcast_to_params(numbers, sizes, scales[0]).clone()
        for part, scale in zip(parts, scales, strict=True):
            at, repeats = places[part.parameters], part.sizes.to(scale.device)
            if name not in part.fields or not bool((at >= 0).any()):
                continue
            r = firsts[:-1][part.parameters] + at.clamp(min=0) - part.columns.start
            r = r.clamp(max=len(scale) - 1).to(scale.device)  # the last parameter may have no weights
            values = (numbers[part.parameters] / scale[r]).repeat_interleave(repeats) * scale
            is_scaled = (at >= 0).to(scale.device).repeat_interleave(repeats)
            restored[name][part.columns] = torch.where(is_scaled, values, restored[name][part.columns])
    return replace(compact, **restored, places={})


@dataclass(frozen=True, eq=False)
class OptimizerMemory:
    """The optimizer's state between two steps.

    Attributes:
        momentum: The momentum buffer, (..., P).
        kept: The state of each part's preconditioner.
        counts: Number of steps that each parameter has made, (..., L).
    """

    momentum: Float[Tensor, "... P"]
    kept: tuple[Memory, ...]
    counts: Float[Tensor, "... L"]

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the size of weights, the momentum first."""
        return [self.momentum, *(tensor for memory in self.kept for tensor in memory)]


@dataclass(frozen=True, eq=False)
class StepLaw:
    """One step of a run as a function, entry by entry but for matrix preconditioners.

    Attributes:
        parts: The ranges of weights with preconditioners.
        sizes: Number of weights of each of the L parameters.
        recorded: The recorded coefficients, by field one number per weight, (P,).
        moves: A mask of the parameters that the step moved, (L,); the optimizer skipped the others.
        is_moved: The same mask for the weights, (P,); None if all moved.
        is_known: A mask of the parameters that are in a recorded group at this step, (L,).
        clip: The clipping of all steps: as stated, or as the first clipped step shows it (`UpdateLaw.see_clip`).
        has_more: Whether there is a second buffer, or inner matrices.
    """

    parts: tuple[Part, ...]
    sizes: tuple[int, ...]
    recorded: Mapping[str, Float[Tensor, " P"]]
    moves: Tensor
    is_moved: Tensor | None
    is_known: Tensor
    clip: Clip | None
    has_more: bool

    def advance(
        self, memory: OptimizerMemory, w: Float[Tensor, "... P"], g: Float[Tensor, "... P"], *, is_stacked: bool = False
    ) -> tuple[Float[Tensor, "... P"], OptimizerMemory, dict[str, Tensor]]:
        """Make the step.

        Args:
            memory: The optimizer's state before the step.
            w: The weights before it.
            g: The gradient after clipping, but without its recorded factor.
            is_stacked: Whether there are several runs, (m, P), the first of which is the recorded one, to whose scales
                the recorded coefficients belong. Otherwise the scales found here are those of the recorded run.

        Returns:
            The direction momentum_lr * m' + lr * h; the optimizer's state afterwards; and the coefficients by field:
            the recorded ones, (P,), or (..., P) if preconditioners scale them.
        """
        self.require_one_buffer()
        scales, after = self.scales(memory, h := self.decayed(w, g))
        coefficients = dict(self.recorded)
        for part, scale in zip(self.parts, scales, strict=True):
            ratio = scale / (scale[:1] if is_stacked else scale.detach())
            for name in part.fields:
                whole, columns = coefficients[name].expand(*ratio.shape[:-1], -1), part.columns
                scaled = whole[..., columns] * ratio
                coefficients[name] = whole.slice_scatter(scaled, -1, columns.start, columns.stop)
        m = coefficients["beta"] * memory.momentum + coefficients["one_minus_dampening"] * h
        return coefficients["momentum_lr"] * m + coefficients["lr"] * h, replace(after, momentum=m), coefficients

    def require_one_buffer(self) -> None:
        """Raise if the step for other gradients is unknown.

        Raises:
            ValueError: There is a second buffer, or there are inner matrices.
        """
        if self.has_more:
            raise ValueError(
                "steps on other gradients must have one momentum buffer and no matrices around the division: those of "
                "this run's optimizer have more (Adan, AdEMAMix, Lookahead, SOAP). Use attribute."
            )

    def decayed(self, w: Float[Tensor, "... P"], g: Float[Tensor, "... P"]) -> Float[Tensor, "... P"]:
        """Return h for the weights and the gradient."""
        return self.recorded["grad_scale"] * g + self.recorded["weight_decay"] * w

    def scales(self, memory: OptimizerMemory, h: Float[Tensor, "... P"]) -> tuple[list[Tensor], OptimizerMemory]:
        """Return the scale of each part, and the optimizer's state after the step except for its momentum.

        Args:
            memory: The optimizer's state before the step.
            h: The gradient with its factor and weight decay.
        """
        counts = memory.counts + self.moves.to(memory.counts)
        scales, kept = [], []
        for part, before in zip(self.parts, memory.kept, strict=True):
            n = counts[..., part.parameters].clamp(min=1)
            count = (n[..., :1] if bool((n == n[..., :1]).all()) else n.repeat_interleave(part.sizes, -1)).to(h)
            scale, after = part.preconditioner.scale(before, h[..., part.columns], part.options, count)
            if self.is_moved is not None:  # the optimizer skipped the weights that did not move
                moved = self.is_moved[part.columns]
                scale = torch.where(moved, scale, 1.0)
                after = tuple(torch.where(moved, new, old) for new, old in zip(after, before, strict=True))
            scales.append(scale)
            kept.append(after)
        return scales, OptimizerMemory(memory.momentum, tuple(kept), counts)

    def replayed(
        self, update: UpdateCoefficients, memory: OptimizerMemory, w: Float[Tensor, " P"], g: Float[Tensor, " P"]
    ) -> tuple[Float[Tensor, " P"] | None, OptimizerMemory]:
        """Make the step from the recorded optimizer options, not from its recorded coefficients.

        Args:
            update: The recorded coefficients.
            memory: The optimizer's state before the step; its momentum follows the recorded coefficients.
            w: The weights before it.
            g: The gradient of the batch's loss.

        Returns:
            The change of the weights, NaN if a parameter moves that is in no recorded group, and None if the step has
            the recorded coefficients; and the optimizer's state afterwards.
        """
        scales, after = self.scales(memory, self.decayed(w, g))
        coefficients, members = dict[str, Any](), dict[Any, list[tuple[Tensor, Tensor]]]()
        for part, scale in zip(self.parts, scales, strict=True):
            numbers, columns = after.counts[part.parameters], torch.arange(part.columns.start, part.columns.stop)
            columns, counts = columns.to(scale.device), {*numbers.tolist()}
            for count in counts:
                at = ... if len(counts) == 1 else (numbers == count).repeat_interleave(part.sizes)
                members.setdefault((id(part.options), count, part.fields), []).append((columns[at], scale[at]))
        for (*_, names), pieces in members.items():
            columns, scale = (torch.cat(values) for values in zip(*pieces, strict=True))
            for name in names:  # rates are a common factor; the smallest scale has the least rounding error
                whole = coefficients.get(name, self.recorded[name])
                if not bool((recorded := whole[columns]).any()):
                    continue
                r = torch.where(recorded == 0, torch.inf, scale).argmin()
                value = torch.where(recorded == 0, 0.0, recorded[r] / scale[r] * scale)
                coefficients[name] = whole.index_copy(0, columns, value)
        is_unknown = self.moves & ~self.is_known
        if bool(is_unknown.any()):
            sizes = torch.tensor(self.sizes, device=g.device)
            rates = coefficients.get("lr", self.recorded["lr"])
            coefficients["lr"] = torch.where(is_unknown.repeat_interleave(sizes), torch.nan, rates)
        sign = (scale := self.recorded["grad_scale"]).sign()  # 0 if the loop sets gradients to 0
        if self.clip is not None or not torch.equal(sign, scale):
            coefficients["grad_scale"] = sign if self.clip is None else sign * self.clip.factors(sign.abs() * g)
        if not coefficients:
            return None, after
        made = replace(update, **coefficients, places={})
        return predict_step(made, self.sizes, w, g, memory.momentum)[0], after


STILL = {"lr": 0.0, "momentum_lr": 0.0, "beta": 1.0, "one_minus_dampening": 0.0}  # coefficients of skipped weights


def still_weights(recorded: Mapping[str, Float[Tensor, " P"]]) -> Bool[Tensor, " P"]:
    """Return the weights that the optimizer skipped in a step, by its coefficients: neither they nor buffers moved."""
    return torch.stack([recorded[name] == value for name, value in STILL.items()]).all(dim=0)


class UpdateLaw:
    """The steps of a run as functions.

    Args:
        trajectory: The run.
        reference: Tensor whose dtype and device the computation has.

    Attributes:
        parts: The ranges of weights with preconditioners.
        held: Names of update rules whose dependence on the gradients is not known here: their coefficients are held as
            recorded, and steps on other gradients cannot be computed. A user's own rule is listed as "own rule".

    Raises:
        ValueError: The run needs the optimizer's options, and an earlier version recorded it without them.
    """

    def __init__(self, trajectory: Trajectory, reference: Tensor) -> None:
        run, model, rule = trajectory.trained, trajectory.model, trajectory.update_rule
        self.trajectory, self.reference, self.sizes, self.clip = run, reference, model.sizes, run.clip
        self._all_move = torch.ones(len(model.sizes), dtype=torch.bool, device=reference.device)
        self._laws = dict[int, StepLaw]()  # requested several times
        if run.momentum is not None:
            raise ValueError(
                "the run must begin with a new optimizer, so that its steps follow from the recorded gradients: its "
                "optimizer had made steps before. Use attribute, which needs no other runs."
            )
        if not run.optimizer_groups and set(rule.split(" + ")) - LINEAR_RULES:
            raise ValueError(f"the run must hold the options of its optimizer, {rule}. Record it again.")
        changes = [(step.index, step.groups) for step in run.steps if step.groups is not None]
        recorded = [(0, run.optimizer_groups), *changes]
        self._starts = [start for start, _ in recorded]
        # the group of each parameter from each of these steps on; a parameter may join a group later, or leave it
        groups = [{name: own for own in several for name in own.names} for _, several in recorded]
        firsts, held = [0, *torch.tensor(self.sizes).cumsum(0).tolist()], set[str]()
        parts: list[tuple[Part, list[OptimizerGroup | None]]] = []
        histories = [[named.get(name) for named in groups] for name in model.names]
        for _, neighbours in groupby(enumerate(histories), key=lambda numbered: list(map(id, numbered[1]))):
            numbers, (history, *_) = zip(*neighbours, strict=True)
            known = [group for group in history if group is not None]
            rules = {group.rule for group in known}
            if rules <= LINEAR_RULES:
                continue
            own = PRECONDITIONERS.get(known[0].rule) if len(rules) == 1 else None
            if own is None:
                held |= {rule or "own rule" for rule in rules}
                continue
            options = max((group.options for group in known), key=lambda each: bool(each.get("amsgrad")))
            members = slice(numbers[0], numbers[-1] + 1)
            sizes = torch.tensor(self.sizes[members], device=reference.device)
            columns = slice(firsts[members.start], firsts[members.stop])
            parts.append((Part(own, options, columns, members, sizes), history))
        self.parts, self.held = tuple(part for part, _ in parts), tuple(sorted(held))
        self._at = []  # the options from each change on, and the parameters in a group, (L,)
        for place, named in enumerate(groups):
            known_at = [(part, history[place]) for part, history in parts]
            of_step = [part if group is None else replace(part, options=group.options) for part, group in known_at]
            is_known = [name in named or not run.optimizer_groups for name in model.names]
            self._at.append((tuple(of_step), torch.tensor(is_known, device=reference.device)))

    @cached_property
    def clipped_steps(self) -> tuple[int, ...]:
        """Numbers of the steps that clipped their gradient."""
        run = self.trajectory
        return tuple(s for s in range(run.num_steps) if is_clipped(held_coefficients(run, s)))

    def see_clip(self, index: int, g: Float[Tensor, " P"]) -> None:
        """Store the clipping that a step shows on the gradient of its loss, if none is known."""
        if self.clip is None and index in self.clipped_steps:
            update = held_coefficients(self.trajectory, index)
            self.clip = shown_clip(update, broadcast_to_params(update.grad_scale, self.sizes, g), g)

    @cached_property
    def clipping(self) -> str:
        """The source of the bound of gradient clipping, in words."""
        run = self.trajectory
        if run.clip is not None:
            return f"{run.clip}, as stated"
        if self.clipped_steps:
            return "as the clipped steps show it; it was not stated"
        return "none: no bound was stated or reached. One that other weights of the samples reach is not known"

    def initial(self, leading: tuple[int, ...] = ()) -> OptimizerMemory:
        """Return the optimizer's state before the first step.

        Args:
            leading: Leading dimensions, before the dimension of the weights.
        """
        momentum = self.reference.new_zeros(*leading, sum(self.sizes))
        counts = torch.zeros(len(self.sizes), dtype=torch.float64, device=self.reference.device)
        return OptimizerMemory(momentum, tuple(part.initial(momentum) for part in self.parts), counts)

    def step(self, index: int) -> StepLaw:
        """Return a step as a function."""
        if (law := self._laws.get(index)) is None or law.clip is not self.clip:
            law = self._step(index)
            if len(self._laws) * sum(self.sizes) > _HELD_NUMBERS:
                self._laws.clear()
            self._laws[index] = law
        return law

    def _step(self, index: int) -> StepLaw:
        parts, is_known = self._at[bisect_right(self._starts, index) - 1]
        update = step_coefficients(self.trajectory, index, self.reference)
        recorded = {name: broadcast_to_params(getattr(update, name), self.sizes, self.reference) for name in FIELDS}
        moves, is_moved = self._all_move, None
        if bool((recorded["beta"] == STILL["beta"]).any()) and bool((is_still := still_weights(recorded)).any()):
            moves, is_moved = torch.stack([~still.all() for still in is_still.split(list(self.sizes))]), ~is_still
        more = bool(update.second or update.inner_left or update.inner_right)
        return StepLaw(parts, self.sizes, recorded, moves, is_moved, is_known, self.clip, more)
