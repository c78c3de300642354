"""Observations of a step of a training loop: its forward passes, its batches, and the step itself."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.optim import Optimizer

from epk_gp.core.graphs import has_rows, map_tensors, tensors_of
from epk_gp.core.step import ForwardPass
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import LinearStep, Options, UpdateCoefficients, stack_steps


@dataclass(eq=False)
class CapturedForward:
    """One forward pass of the user's network, as the hooks saw it.

    Attributes:
        inputs: The rows of the network's call, packed.
        modes: Flags for the modules that were in training mode.
        statistics: The moving statistics before the pass.
        statistics_after: The moving statistics after the pass.
        record: Its precision, random numbers, memory order, weights and settings.
        difference: Description of the difference between the call's graph and the recorded one; None without.
        random_states_after: The random states of the CPU and of the accelerator after it.
        position: Number of the pass since the recording began.
        returned: The network's result, detached; None if no tensor has one row per input.
        outputs: The loss's input, (n, ...), detached, if it is one of the returned tensors; otherwise None.
        place: The index of that tensor among them.
        sent: The gradient that the loop itself sent into each returned tensor of rows, by its index.
        num_arguments: Number of arguments of the call.
        stray: Shape of a returned tensor without rows that got a gradient; None if there is none.
    """

    inputs: Shaped[Tensor, "n ..."]
    modes: Bool[Tensor, " modules"]
    statistics: Float[Tensor, " Q"]
    statistics_after: Float[Tensor, " Q"]
    record: ForwardPass
    difference: str | None = None
    position: int = 0
    random_states_after: tuple[Tensor | None, Tensor | None] = None, None
    returned: Any = None
    outputs: Tensor | None = None
    place: int = -1
    sent: dict[int, Tensor] = field(default_factory=dict)
    num_arguments: int = 1
    stray: tuple[int, ...] | None = None

    def watch(self, returned: Any, counts: Callable[[], bool]) -> Any:
        """Return the network's result, with an alias for each tensor of rows if several of them require gradients.

        The gradient of an alias is the one that the loop itself sends into this tensor; the tensor's own gradient would
        include contributions through the other returned tensors. `counts` returns whether a gradient is part of the
        step.
        """
        num_rows, tensors, place = self.inputs.shape[0], [*tensors_of(returned)], -1
        if any(has_rows(z, num_rows) for z in tensors):
            self.returned = map_tensors(returned, Tensor.detach)
        moving = [has_rows(z, num_rows) for z in tensors if z.requires_grad]
        # a single tensor also receives everything that the network computed from it, such as the loss itself
        is_only = sum(moving) == 1

        def watched(z: Tensor) -> Tensor:
            nonlocal place
            place += 1

            def add(gradient: Tensor | None, place: int = place) -> None:
                if counts() and gradient is not None:
                    gradient = gradient.detach()
                    self.sent[place] = self.sent[place] + gradient if place in self.sent else gradient.clone()

            def note(gradient: Tensor) -> None:
                self.stray = tuple(z.shape) if counts() and bool(gradient.any()) and not is_only else self.stray

            if z.requires_grad and not has_rows(z, num_rows):
                z.register_hook(note)
            if not z.requires_grad or not has_rows(z, num_rows):
                return z
            is_whole = is_only or (place == self.place and not all(moving))  # also through a returned loss
            # not a view: hooks of a view are lost if the loop changes it in place
            alias = z if is_whole else z.clone()
            alias.register_hook(add)
            node: Any = z.grad_fn
            if place == self.place and node is not None and node.name().startswith("ToCopyBackward"):
                # tensors of another precision, which may get no gradient (Accelerate)
                copied = node.next_functions[0][0]
                copied.register_prehook(lambda came, place=place: None if place in self.sent else add(came[0]))
            return alias

        changed = map_tensors(returned, watched)
        return None if is_only else changed


@dataclass(eq=False)
class AnnouncedBatch:
    """A batch whose gradient the next step of the optimizer uses.

    Attributes:
        indices: Rows of the training data, or None for all of them in order.
        samples: The sample of each row.
        weight: Factor of the batch's loss, or of each row's, in the loop; None if it is read.
        position: Number of forward passes before the announcement.
        forwards: The forward passes of the batch, in the order of its rows; empty if none was seen.
        targets: The loop's targets of the rows; None if they are the recorded ones.
        is_void: Whether its gradient was cleared before a step, as by SAM, or a GradScaler skips the step.
    """

    indices: Int64[Tensor, " B"] | None
    samples: Int64[Tensor, " B"]
    weight: float | Tensor | None
    position: int = 0
    forwards: list[CapturedForward] = field(default_factory=list)
    targets: Tensor | None = None
    is_void: bool = False


@dataclass(eq=False)
class MadeStep:
    """A joint step of a loop's optimizers.

    Attributes:
        rates: The learning rates of all groups of the optimizers, in the order of their steps.
        announced: The batches that were announced for it, with their forward passes.
        gradient: The gradient that the optimizers used; zero for a parameter without one.
        arrived: The gradient after the last backward pass, before clipping, masks and noise: `gradient` itself if
            nothing changed it. None if it is not seen, for gradients that are written by hand or in parts.
        without_gradient: Names of the parameters without a gradient, which torch neither clips nor moves.
        linear: The coefficients of each parameter's step, or of all weights, without gradient clipping.
        sizes: Number of weights of each parameter.
        groups: The parameter groups of all optimizers; None if they are those of the step before.
        options: All options of each group.
        unseen, is_seen_enough: The results of `StepObserver._unseen_calls`.
        doubt: Missing observations of a rank, as a clause; such a step is checked.
        others: Forward passes with an output gradient that belong to no announced batch.
        has_left_over: Whether parameters already had a gradient when the first backward pass began.
        scale: The factor of the output gradients relative to the first record of the passes, as with a GradScaler; NaN
            if it is not seen.
    """

    rates: Sequence[float]
    announced: Sequence[AnnouncedBatch]
    gradient: Float[Tensor, " P"]
    arrived: Float[Tensor, " P"] | None
    without_gradient: Set[str]
    linear: Sequence[LinearStep] | LinearStep
    sizes: Sequence[int]
    groups: tuple[OptimizerGroup, ...] | None
    options: Sequence[Options]
    unseen: str | None
    is_seen_enough: bool
    others: Sequence[CapturedForward]
    has_left_over: bool
    doubt: str | None = None
    scale: float = 1.0

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return self.rates[0]

    @cached_property
    def update(self) -> UpdateCoefficients:
        """The coefficients of the step of all parameters."""
        return stack_steps([self.linear], self.sizes)[0]


@dataclass(eq=False)
class StepInProgress:
    """Observations since the last step: forward passes, then backward passes, batches, and the optimizers' own steps.

    Attributes:
        waiting: Forward passes that no announced batch has taken.
        calls: Shapes of the network's arguments.
        has_added: Whether a backward pass has added to gradients of weights.
        last_backward: Torch's number of the last such backward pass.
        has_left_over: Whether parameters already had a gradient when the first of them began.
        announced: The batches whose gradient the step uses.
        before: The optimizer's state of each parameter before its step.
        stepped: The optimizers that have made their part of the step.
        rates: The learning rates of their groups.
        coefficients: The coefficients of each parameter's step.
        joint: The coefficients of all weights together, if they are read this way.
        gradients: The used gradient of each parameter.
    """

    waiting: list[CapturedForward] = field(default_factory=list)
    calls: list[list[tuple[int, ...]]] = field(default_factory=list)
    has_added: bool = False
    last_backward: int = -1
    has_left_over: bool = False
    announced: list[AnnouncedBatch] = field(default_factory=list)
    before: Mapping[str, Any] = field(default_factory=dict)
    stepped: list[Optimizer] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    coefficients: dict[str, LinearStep] = field(default_factory=dict)
    joint: LinearStep | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
