"""What is seen of a step of a training loop: its forward passes, its batches, and the step itself."""

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
        inputs: The rows that the network was called with, packed.
        modes: Which modules were in training mode.
        statistics: The moving statistics before the pass.
        statistics_after: Those after it.
        record: Its precision, random numbers, memory order, weights and settings.
        difference: In words, how the call differs from one with the recorded graph; None if it does not.
        random_states_after: The random numbers on the CPU and of the accelerator after it.
        position: Number of the pass since the recording began.
        returned: What the network returned, detached; None if no tensor has a row for each of the inputs.
        outputs: What the loss takes, (n, ...), detached, where it is one of the returned tensors; else None.
        place: Its place among them.
        sent: The gradient that the loop itself sent into each returned tensor of rows, by its place.
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
        """Return what the network returned, with an alias of each tensor of rows where several of these move.

        The gradient of an alias is what the loop itself sends into this tensor; that of the tensor would hold what
        comes through others of those that it returned too. `counts` returns whether what comes is part of the step.
        """
        num_rows, tensors, place = self.inputs.shape[0], [*tensors_of(returned)], -1
        if any(has_rows(z, num_rows) for z in tensors):
            self.returned = map_tensors(returned, Tensor.detach)
        moving = [has_rows(z, num_rows) for z in tensors if z.requires_grad]
        # through one tensor alone everything goes that the network computed of it too, such as the loss itself
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
            is_whole = is_only or (place == self.place and not all(moving))  # also what comes by way of a returned loss
            # no view: hooks of a view are lost where the loop changes it in place
            alias = z if is_whole else z.clone()
            alias.register_hook(add)
            node: Any = z.grad_fn
            if place == self.place and node is not None and node.name().startswith("ToCopyBackward"):
                # of another precision, which may get none (Accelerate)
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
        weight: Factor that the loop puts in front of the batch's loss, or of each row's; None: it is read.
        position: Number of forward passes before the announcement.
        forwards: The forward passes that computed the batch, in the order of its rows; empty if none was seen.
        targets: The targets that the loop's loss used for the rows; None where they are the recorded ones.
        is_void: Whether its gradient was cleared before a step, as by SAM, and where a GradScaler skips a step.
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
    """A step that the optimizers of a loop have made together.

    Attributes:
        rates: The learning rates of all groups of the optimizers, in the order in which these took part.
        announced: The batches that were announced for it, with their forward passes.
        gradient: The gradient that the optimizers used; zero for a parameter without one.
        arrived: The gradient as the last backward pass left it, before clipping, masks and noise: `gradient` itself
            where nothing changed it. None where that is not seen: gradients that are written by hand, or in parts.
        without_gradient: Names of the parameters without a gradient, which torch neither clips nor moves.
        linear: The coefficients of each parameter's step, or of all weights, without gradient clipping.
        sizes: Number of weights of each parameter.
        groups: The parameter groups of all optimizers; None where they are those of the step before.
        options: All options of each group.
        unseen, is_seen_enough: As `StepObserver._unseen_calls` returns them.
        doubt: What was not seen on some rank, as a clause; such a step is checked.
        others: Forward passes with a gradient in their outputs that are no announced batch's.
        has_left_over: Whether parameters had a gradient already when the first backward pass began.
        scale: By what the gradients in the outputs are more than the first record of the passes says, as under a
            GradScaler; NaN where that is not seen.
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
    """What was seen since the last step: forward passes, then backward passes, batches, and the optimizers' own steps.

    Attributes:
        waiting: Forward passes that no announced batch has taken.
        calls: Shapes of what the network was called with.
        has_added: Whether a backward pass has added to gradients of weights.
        last_backward: Torch's number of the last one that did.
        has_left_over: Whether parameters had a gradient already when the first of them began.
        announced: The batches whose gradient the step uses.
        before: What the optimizer that makes its step held of each parameter before it.
        stepped: The optimizers that have made their part of the step.
        rates: The learning rates of their groups.
        coefficients: The coefficients of each parameter's step.
        joint: Those of all weights together, where they are read so.
        gradients: The gradient that was used of each parameter.
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
