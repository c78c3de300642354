"""The adjoint of an optimizer's step, through its momentum, its preconditioner and gradient clipping.

Entry by entry a step is a function of the weight, its gradient and what the optimizer keeps, so its Jacobian is one
small matrix per weight: one backward pass gives a row of it for all weights. Adjoints of any number of outputs are
then multiplied with it. Where a preconditioner couples the weights of a parameter, adjoints go back through the graph.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.gradients import RunReplay
from epk_gp.core.trajectory import flat_weights, held_coefficients
from epk_gp.core.update_law import OptimizerMemory, StepLaw, UpdateLaw
from epk_gp.optimizers.update_rules import EPSILON, ClipNorm, UpdateCoefficients, apply_matrices, is_clipped


@dataclass(frozen=True, eq=False)
class StepAdjoints:
    """The adjoints of what a step depends on.

    Attributes:
        of_weights: Of the weights before it, but for what goes through the gradient, (R, P).
        of_gradient: Of the gradient of the batch's loss, (R, P).
        of_memory: Of what the optimizer keeps before it, in the order of `OptimizerMemory.tensors`; None for zero.
    """

    of_weights: Float[Tensor, "R P"]
    of_gradient: Float[Tensor, "R P"]
    of_memory: list[Float[Tensor, "R _"] | None]


class OptimizerJacobian:
    """The Jacobian of the optimizer's part of a step.

    Args:
        law: The step.
        update: Its recorded coefficients.
        memory: What the optimizer keeps before it. Where no preconditioner is at work its values do not matter.
        w: The weights before the step, (P,).
        g: The gradient of the batch's loss, (P,). It matters where it is clipped or preconditioned.
    """

    def __init__(
        self,
        law: StepLaw,
        update: UpdateCoefficients,
        memory: OptimizerMemory,
        w: Float[Tensor, " P"],
        g: Float[Tensor, " P"],
    ) -> None:
        self.law, self.update, self.g = law, update, g
        inputs = [tensor.detach().requires_grad_() for tensor in (w, g, *memory.tensors())]
        kept, position = [], 3
        for before in memory.kept:
            kept.append(tuple(inputs[position : position + len(before)]))
            position += len(before)
        with torch.enable_grad():
            own = OptimizerMemory(inputs[2], tuple(kept), memory.counts)
            made = law.advance(own, inputs[0], inputs[1])
            outputs = [made.direction, *made.memory.tensors()]
        self._graph = (inputs, outputs) if law.is_coupled else None
        # one matrix per weight: entries (output, input), None where it is zero
        self.entries = [] if law.is_coupled else [_row(out, inputs, is_last=out is outputs[-1]) for out in outputs]
        self.columns: list[slice] = [slice(0, len(w))] * 3  # of each input
        for part, before in zip(law.parts, memory.kept, strict=True):
            self.columns += [part.columns] * len(before)

    def adjoints(self, of_weights: Float[Tensor, "R P"], of_memory: Sequence[Tensor | None]) -> StepAdjoints:
        """Multiply adjoints with the transposed Jacobian.

        Args:
            of_weights: Of the weights after the step.
            of_memory: Of what the optimizer keeps after it; None for zero.
        """
        law = self.law
        of_direction = -apply_matrices(self.update, law.sizes, of_weights, transposed=True)
        found = self._pulled([of_direction, *of_memory])
        decay = law.recorded["decoupled_decay"]
        through = of_weights * (1 - decay) if bool(decay.any()) else of_weights.clone()
        through = through if found[0] is None else through.add_(found[0])
        of_gradient = torch.zeros_like(of_weights) if found[1] is None else found[1]
        return StepAdjoints(through, self._unclipped(of_gradient), found[2:])

    def _pulled(self, adjoints: list[Tensor | None]) -> list[Tensor | None]:
        """Return the adjoints of all inputs, given those of all outputs; None for zero."""
        if self._graph is not None:
            inputs, outputs = self._graph
            given = [(out, own) for out, own in zip(outputs, adjoints, strict=True) if own is not None]
            return list(
                torch.autograd.grad(
                    [out for out, _ in given],
                    inputs,
                    [own for _, own in given],
                    is_grads_batched=True,
                    retain_graph=True,
                    allow_unused=True,
                )
            )
        found: list[Tensor | None] = []
        for number in range(len(self.columns)):
            total: Tensor | None = None
            for output, adjoint in enumerate(adjoints):
                entry = self.entries[output][number]
                if adjoint is None or entry is None:
                    continue
                product = _product(adjoint, entry, self._place(output), self.columns[number])
                total = product if total is None else total.add_(product)
            found.append(total)
        return found

    def _place(self, output: int) -> slice:
        """Return the columns of an output: the direction, the momentum, and what preconditioners keep."""
        return self.columns[0] if output == 0 else self.columns[output + 1]

    def _unclipped(self, of_gradient: Float[Tensor, "R P"]) -> Float[Tensor, "R P"]:
        """Return the adjoint of the gradient before it was clipped."""
        if not is_clipped(self.update):
            return of_gradient
        factors, clip = self.law.recorded["grad_scale"].abs(), self.law.clip
        if len(self.update.grad_scale) != len(self.law.sizes):  # a clipped entry does not move with the gradient
            return of_gradient * ((factors == 1) | (factors == 0))
        g = torch.where(factors > 0, self.g, 0.0).requires_grad_()
        with torch.enable_grad():
            norm = torch.linalg.vector_norm(g, clip.norm_type if isinstance(clip, ClipNorm) else 2.0)
            (slope,) = torch.autograd.grad(norm, g)
        along: Tensor = of_gradient @ g.detach() / (norm.detach() + EPSILON)
        return of_gradient - along[:, None] * slope


def _row(output: Tensor, inputs: list[Tensor], *, is_last: bool) -> list[Tensor | None]:
    """Return the derivatives of an output, entry by entry, in each input."""
    if not output.requires_grad:
        return [None] * len(inputs)
    found = torch.autograd.grad(output.sum(), inputs, retain_graph=not is_last, allow_unused=True)
    return [None if value is None or not bool(value.any()) else value for value in found]


def _product(adjoint: Tensor, entry: Tensor, of_output: slice, of_input: slice) -> Tensor:
    """Multiply an adjoint, (R, size of the output), with a diagonal, to (R, size of the input).

    The diagonal has the size of the input, which is a part of the output or contains it.
    """
    if of_output == of_input:
        return adjoint * entry
    if of_output.start <= of_input.start and of_input.stop <= of_output.stop:
        return adjoint[:, of_input.start - of_output.start : of_input.stop - of_output.start] * entry
    first, last = of_output.start - of_input.start, of_output.stop - of_input.start
    product = adjoint.new_zeros(len(adjoint), of_input.stop - of_input.start)
    product[:, first:last] = adjoint * entry[first:last]
    return product


@dataclass(frozen=True, eq=False)
class TracedStep:
    """What a step's Jacobian depends on.

    Attributes:
        memory: What the optimizer keeps before the step.
        g: The gradient of the batch's loss.
    """

    memory: OptimizerMemory
    g: Float[Tensor, " P"]


class MemoryTrace:
    """What the optimizer kept before each step, computed once more from the recorded weights and batches.

    Every k-th state is held, k about the root of the number of steps, and those of one stretch at a time. To be read
    from the last step to the first, by one thread: each pass over the run has a `reader` of its own.

    Args:
        law: The steps of the run.
        run: Computes their gradients.
    """

    def __init__(self, law: UpdateLaw, run: RunReplay) -> None:
        self.law, self.run = law, run
        S = law.trajectory.num_steps
        self.stride = max(1, round(S**0.5))
        self._held: list[OptimizerMemory] = []
        self._stretch: dict[int, TracedStep] = {}
        if not law.depends_on_memory:
            return
        memory = law.initial()
        for index in range(S):
            if index % self.stride == 0:
                self._held.append(memory)
            if index < (S - 1) // self.stride * self.stride:  # the last stretch is computed when it is read
                memory = self._after(index, memory)[1]

    def reader(self, run: RunReplay) -> "MemoryTrace":
        """Return another trace, which shares the states that are held."""
        own = copy(self)
        own.run, own._stretch = run, {}
        return own

    def __getitem__(self, index: int) -> TracedStep:
        """Return what the Jacobian of a step depends on."""
        if not self.law.depends_on_memory:
            is_clipped = self._clips(index)
            g = self.run.gradient(self.law.trajectory.steps[index])[0] if is_clipped else self.law.initial().momentum
            return TracedStep(self.law.initial(), g)
        if index not in self._stretch:
            number = index // self.stride
            self._stretch, memory = {}, self._held[number]
            for step in range(number * self.stride, min((number + 1) * self.stride, self.law.trajectory.num_steps)):
                traced, memory = self._after(step, memory)
                self._stretch[step] = traced
        return self._stretch[index]

    def _clips(self, index: int) -> bool:
        update = held_coefficients(self.law.trajectory, index)
        return is_clipped(update) and len(update.grad_scale) == len(self.law.sizes)

    def _after(self, index: int, memory: OptimizerMemory) -> tuple[TracedStep, OptimizerMemory]:
        step = self.law.trajectory.steps[index]
        g, _ = self.run.gradient(step)
        w = flat_weights(self.law.trajectory, index, self.law.reference)
        return TracedStep(memory, g), self.law.step(index).advance(memory, w, g).memory
