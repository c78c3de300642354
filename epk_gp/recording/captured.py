"""A forward pass of the loop, as the hooks saw it, and what backward passes sent into its outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from epk_gp.core.graphs import has_rows, map_tensors, rows_of, tensors_of
from epk_gp.core.step import ForwardPass


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
        outputs: What the loss takes, (n, C), detached; None if it is not a tensor that the network returned. Where no
            loss is stated it is all that the network returned for each row.
        output_gradient: The gradient of the loop's loss in the outputs; None before the backward pass.
        num_backwards: Number of backward passes that brought it there, of those that add to the gradients of weights.
        num_arguments: Number of arguments of the call.
        stray: Shape of a returned tensor without rows that got a gradient; None if there is none.
        other_module: Name of a module that is another one than when recording began; None if there is none.
    """

    inputs: Shaped[Tensor, "n ..."]
    modes: Bool[Tensor, " modules"]
    statistics: Float[Tensor, " Q"]
    statistics_after: Float[Tensor, " Q"]
    record: ForwardPass
    difference: str | None = None
    position: int = 0
    random_states_after: tuple[Tensor | None, Tensor | None] = None, None
    outputs: Tensor | None = None
    output_gradient: Tensor | None = None
    num_backwards: int = 0
    num_arguments: int = 1
    stray: tuple[int, ...] | None = None
    other_module: str | None = None

    def counts(self, *, adds: bool) -> bool:
        """Return whether a gradient in the outputs is part of the step's.

        A backward pass that only looks (`torch.autograd.grad`) is none, unless all passes do: such a loop writes the
        gradients of weights itself.

        Args:
            adds: Whether the backward pass adds to the gradients of weights.
        """
        if adds and not self.num_backwards:
            self.output_gradient = self.stray = None
        self.num_backwards += adds
        return adds or not self.num_backwards

    @property
    def has_sent(self) -> bool:
        """Whether a gradient that is not 0 came to the outputs, or none could be seen."""
        return self.outputs is None or (self.output_gradient is not None and bool(self.output_gradient.any()))

    def watch(self, returned: Any, num_rows: int, begin: Callable[[], bool]) -> Any:
        """Return what the network returned, with each tensor that a gradient can come into as an alias.

        The gradient of an alias is what the loop itself sends into this tensor; that of the tensor would hold what
        comes through others of those that it returned too. `begin` returns whether the backward pass adds to the
        gradients of weights.
        """
        columns, own = [0], [z for z in tensors_of(returned) if has_rows(z, num_rows)]
        # through one tensor alone everything goes that the network computed of it too, such as the loss itself
        is_only = sum(z.requires_grad for z in own) == 1
        if own:
            self.outputs = rows_of(returned, num_rows).detach()

        def watched(z: Tensor) -> Tensor:
            first = columns[-1]
            if is_row := has_rows(z, num_rows):
                columns.append(first + z.shape[1:].numel())
            if not z.requires_grad:
                return z

            def add(gradient: Tensor) -> None:
                if not self.counts(adds=begin()):
                    return
                if not is_row:
                    self.stray = tuple(z.shape) if bool(gradient.any()) and not is_only else self.stray
                elif self.outputs is not None:
                    if self.output_gradient is None:
                        self.output_gradient = torch.zeros_like(self.outputs)
                    own = gradient.detach().flatten(1) if z.ndim > 1 else gradient.detach()[:, None]
                    self.output_gradient[:, first : first + own.shape[1]] += own

            # no view: hooks of a view are lost where the loop changes it in place
            alias = z if is_only else z.clone()
            alias.register_hook(add)
            return alias

        return map_tensors(returned, watched)

    def add_gradient(self, gradient: Tensor, *, adds: bool) -> None:
        """Keep the gradient that a backward pass brought to the outputs, if it `counts`; several passes add up."""
        if not self.counts(adds=adds):
            return
        gradient = gradient.detach()
        gradient = gradient if self.outputs is None else gradient.reshape(self.outputs.shape)
        self.output_gradient = gradient.clone() if self.output_gradient is None else self.output_gradient + gradient

    def watch_original(self, node: Any, begin: Callable[[], bool]) -> None:
        """Of outputs that are a copy in another precision, keep the gradient of the original if the copy gets none.

        Accelerate returns such copies in mixed precision, after the network has computed its own loss.
        """

        def add(gradients: tuple[Tensor | None, ...]) -> None:
            if self.output_gradient is None and self.outputs is not None and gradients[0] is not None:
                self.outputs = self.outputs.to(gradients[0].dtype)
                self.add_gradient(gradients[0], adds=begin())

        if node is not None and node.name().startswith("ToCopyBackward"):
            node.next_functions[0][0].register_prehook(add)
